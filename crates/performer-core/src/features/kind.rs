//! The feature maps by name, and what there is to know of each before it is built.

use std::{fmt, str::FromStr};

use candle_core::{Device, Result, bail};
use serde::{Deserialize, Serialize};

use super::{
    Elu, Exp, FeatureMap, Hedgehog, HermiteTail, Hyperbolic, Limit, Phase, Positive, RandomParameters, Relu, Taylor2,
    Trigonometric, fit,
};

/// The feature maps by name: what a configuration file or a command line says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum FeatureMapKind {
    /// Positive random features, FAVOR+ (Choromanski et al. 2020, Lemma 1).
    #[default]
    Positive,
    /// Hyperbolic positive random features (Choromanski et al. 2020, Lemma 1, second form).
    Hyperbolic,
    /// Trigonometric random features of the softmax kernel (Choromanski et al. 2020, section 2.3).
    Trigonometric,
    /// Random Fourier features with a random phase, scaled to the softmax kernel.
    Phase,
    /// Random Fourier features of the plain Gaussian kernel (Rahimi & Recht 2007).
    GaussianPhase,
    /// Generalised attention with a ReLU kernel (Choromanski et al. 2020, section 2.2).
    Relu,
    /// `elu(x) + 1` (Katharopoulos et al. 2020, eq. 7).
    Elu,
    /// `e^x` of each dimension (Shen et al. 2018).
    Exp,
    /// The Taylor expansion of `e^z` up to the second order, `1 + z + z²/2`, exactly (Arora et al.
    /// 2024, <https://arxiv.org/abs/2402.18668>, have it as the map of Based): see [`Taylor2`].
    Taylor2,
    /// `(1 + z/n)^n` exactly, for an even `n` of at most 1024: it goes to `e^z` with growing `n`,
    /// by the definition of the exponential function as a limit. See [`Limit`].
    Limit(u32),
    /// [`Self::Taylor2`] exactly plus random features of the remainder, the terms of the Hermite
    /// expansion from the third degree on: see [`HermiteTail`], which derives it.
    HermiteTail,
    /// Optimal positive random features, FAVOR++ (Likhosherstov et al. 2022), see [`fit`]. Without
    /// a fit they are those for unit normal queries and keys.
    Optimal,
    /// Dense exponential random features, FAVOR# (Likhosherstov et al. 2023), see [`fit`]. Without
    /// a fit the map is [`Self::Optimal`].
    Dense,
    /// A trained linear map in place of the random rows Ω, see [`Fitted`](super::Fitted). Untrained
    /// it is [`Self::Positive`].
    Learned,
    /// Trained softmax features, see [`Hedgehog`] (Zhang et al. 2024).
    Hedgehog,
}

/// Where the numbers of a feature map come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapNumbers {
    /// The map has none.
    None,
    /// A projection Ω is drawn from a seed.
    Drawn,
    /// A projection Ω and phase offsets `b` are drawn from a seed.
    DrawnWithOffsets,
    /// They begin as what was drawn, and can be fitted to queries and keys (see
    /// [`fit`](super::fit)).
    Fitted,
    /// They begin as what was drawn, can be fitted, and are meant to be trained.
    FittedAndTrained,
    /// They begin as what was drawn, and are meant to be trained.
    Trained,
}

/// The description of a feature map that is known before the map is built: its formula, kernel,
/// number of features, sign, and where its parameters come from. It is a row of the table on the
/// [module's page](super).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapDescription {
    /// The name on the command line. For [`FeatureMapKind::Limit`] this is the placeholder
    /// `limit-n`: the command line takes `limit-4`, and a configuration file takes `{"limit": 4}`.
    pub name: &'static str,
    /// `φ(x)`, for rows `x` that are scaled by `D^-¼`.
    pub formula: &'static str,
    /// The kernel `K(x, y)` that `φ(x)·φ(y)` estimates.
    pub kernel: &'static str,
    /// The number of features `F`, as a formula in the number of random rows `M` and the head
    /// dimension `D`.
    pub features: &'static str,
    /// Whether no feature is negative. Where features have both signs, denominators can come near
    /// zero, except for `taylor2`, whose kernel is at least ½.
    pub positive: bool,
    /// Where its numbers come from.
    pub numbers: MapNumbers,
}

impl FeatureMapKind {
    /// Every map but [`Self::Limit`], which has a number of its own: for help texts, and for
    /// experiments over all maps.
    pub const NAMED: [Self; 14] = [
        Self::Positive,
        Self::Hyperbolic,
        Self::Trigonometric,
        Self::Phase,
        Self::GaussianPhase,
        Self::Relu,
        Self::Elu,
        Self::Exp,
        Self::Taylor2,
        Self::HermiteTail,
        Self::Optimal,
        Self::Dense,
        Self::Learned,
        Self::Hedgehog,
    ];

    /// Returns the description of the map, from which most other methods follow.
    pub fn describe(self) -> MapDescription {
        use MapNumbers::{Drawn, DrawnWithOffsets, Fitted, FittedAndTrained, None, Trained};
        let unbiased = "softmax, unbiased";
        let (name, formula, kernel, features, positive, numbers) = match self {
            Self::Positive => ("positive", "M^-½ exp(ω·x − ‖x‖²/2)", unbiased, "M", true, Drawn),
            Self::Hyperbolic => ("hyperbolic", "(2M)^-½ exp(±ω·x − ‖x‖²/2)", unbiased, "2M", true, Drawn),
            Self::Trigonometric => {
                ("trigonometric", "M^-½ e^{‖x‖²/2} [sin ω·x, cos ω·x]", unbiased, "2M", false, Drawn)
            }
            Self::Phase => ("phase", "(2/M)^½ e^{‖x‖²/2} cos(ω·x + b)", unbiased, "M", false, DrawnWithOffsets),
            Self::GaussianPhase => {
                ("gaussian-phase", "(2/M)^½ cos(ω·x + b)", "`e^{−‖x−y‖²/2}`, unbiased", "M", false, DrawnWithOffsets)
            }
            Self::Relu => ("relu", "M^-½ relu(ω·x) + 10⁻³", "arc-cosine, nearly", "M", true, Drawn),
            Self::Elu => ("elu", "elu(x) + 1", "its own", "D", true, None),
            Self::Exp => ("exp", "exp(x)", "its own", "D", true, None),
            Self::Taylor2 => ("taylor2", "[1, x, vec(xxᵀ)/√2]", "`1 + z + z²/2`", "1 + D + D(D+1)/2", false, None),
            Self::Limit(_) => ("limit-n", "[1, x/√n]^{⊗n}, n even", "`(1 + z/n)^n`", "C(D+n, n)", false, None),
            Self::HermiteTail => (
                "hermite-tail",
                "taylor2 ⊕ M^-½ (exp(ω·x − ‖x‖²/2) − h₂(x))",
                unbiased,
                "M + those of taylor2",
                false,
                Drawn,
            ),
            Self::Optimal => {
                ("optimal", "(1−4A)^{D/4} M^-½ exp(A‖ω‖² + √(1−4A) ω·x − ‖x‖²/2)", unbiased, "M", true, Fitted)
            }
            Self::Dense => ("dense", "optimal, with an A for each eigendirection", unbiased, "M", true, Fitted),
            Self::Learned => (
                "learned",
                "M^-½ exp(a·x − ‖x‖²/2), M^-½ exp(b·y + w − ‖y‖²/2)",
                "its own",
                "M",
                true,
                FittedAndTrained,
            ),
            Self::Hedgehog => ("hedgehog", "[softmax(a·x), softmax(−a·x)]", "its own", "2M", true, Trained),
        };
        MapDescription { name, formula, kernel, features, positive, numbers }
    }

    /// Whether the map draws a projection Ω.
    pub fn is_random(self) -> bool {
        self.describe().numbers != MapNumbers::None
    }

    /// Whether the map is a [`Fitted`](super::Fitted) one, which can be fitted to queries and keys.
    pub fn is_fitted(self) -> bool {
        matches!(self.describe().numbers, MapNumbers::Fitted | MapNumbers::FittedAndTrained)
    }

    /// Whether the map has parameters that are meant to be trained.
    pub fn is_trained(self) -> bool {
        matches!(self.describe().numbers, MapNumbers::Trained | MapNumbers::FittedAndTrained)
    }

    /// Whether the map has parameters that can be fitted or trained. They begin as what was drawn
    /// from the seed, and drawing new random rows later leaves them as they are.
    pub fn has_parameters(self) -> bool {
        self.is_fitted() || self.is_trained()
    }

    /// Whether features are `exp(±ω·x − ‖x‖²/2)` with an Ω that is neither fitted nor trained.
    pub(crate) fn is_exponential(self) -> bool {
        matches!(self, Self::Positive | Self::Hyperbolic)
    }

    /// Whether the map draws phase offsets `b` besides Ω.
    pub fn has_offsets(self) -> bool {
        self.describe().numbers == MapNumbers::DrawnWithOffsets
    }

    /// Builds the map for rows of width `head_dim`.
    ///
    /// `random` holds what a random map needs, see [`RandomParameters`]; deterministic maps ignore
    /// it. `device` is where the constants of deterministic maps live.
    ///
    /// # Errors
    /// If `head_dim` is 0; if a random map is given no parameters, or parameters of another shape;
    /// if the power of [`Self::Limit`] is odd, 0, above 1,024 or too high for f32; or if there are
    /// more than 16,384 features of [`Self::Limit`], or products `x_i x_j` of [`Self::Taylor2`] and
    /// [`Self::HermiteTail`].
    pub fn build(
        self,
        head_dim: usize,
        random: Option<&RandomParameters>,
        device: &Device,
    ) -> Result<Box<dyn FeatureMap>> {
        if head_dim == 0 {
            bail!("feature map {self}: head_dim is 0; it must be at least 1");
        }
        let given = || -> Result<RandomParameters> {
            let Some(random) = random else {
                bail!("feature map {self} is random and needs a projection (M, {head_dim}); none was given")
            };
            random.check(self, head_dim)?;
            Ok(random.clone())
        };
        Ok(match self {
            Self::Positive => Box::new(Positive::new(given()?.projection)?),
            Self::Hyperbolic => Box::new(Hyperbolic::new(given()?.projection)?),
            Self::Trigonometric => Box::new(Trigonometric::new(given()?.projection)?),
            Self::Phase | Self::GaussianPhase => {
                let RandomParameters { projection, offsets } = given()?;
                let Some(offsets) = offsets else {
                    bail!("feature map {self} needs phase offsets ({}); none were given", projection.dims()[0])
                };
                Box::new(Phase::new(projection, offsets, self == Self::Phase)?)
            }
            Self::Relu => Box::new(Relu::new(given()?.projection)?),
            Self::HermiteTail => Box::new(HermiteTail::new(given()?.projection)?),
            Self::Optimal | Self::Dense | Self::Learned => Box::new(fit::unfitted(self, &given()?.projection)?),
            Self::Hedgehog => Box::new(Hedgehog::new(&given()?.projection)?),
            Self::Elu => Box::new(Elu::new(head_dim)),
            Self::Exp => Box::new(Exp::new(head_dim, device)?),
            Self::Taylor2 => Box::new(Taylor2::new(head_dim, device)?),
            Self::Limit(n) => Box::new(Limit::new(n, head_dim, device)?),
        })
    }
}

impl fmt::Display for FeatureMapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(n) => write!(f, "limit-{n}"),
            _ => f.write_str(self.describe().name),
        }
    }
}

impl FromStr for FeatureMapKind {
    type Err = String;

    fn from_str(s: &str) -> std::result::Result<Self, String> {
        if let Some(n) = s.strip_prefix("limit-") {
            return match n.parse::<u32>() {
                Ok(n) if n >= 2 && n % 2 == 0 => Ok(Self::Limit(n)),
                _ => Err(format!("limit-{n}: n must be an even number of at least 2, as in limit-2")),
            };
        }
        Self::NAMED.into_iter().find(|k| k.to_string() == s).ok_or_else(|| {
            let names: Vec<String> = Self::NAMED.iter().map(ToString::to_string).collect();
            format!("unknown feature map '{s}'; known are {}, limit-N", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table of all maps in Markdown.
    fn table() -> String {
        let mut table = String::from("| name | `φ(x)` | kernel | F | numbers | signed |\n|---|---|---|---|---|---|\n");
        for kind in FeatureMapKind::NAMED.into_iter().chain([FeatureMapKind::Limit(2)]) {
            let MapDescription { name, formula, kernel, features, positive, numbers } = kind.describe();
            let numbers = match numbers {
                MapNumbers::None => "none",
                MapNumbers::Drawn => "Ω drawn",
                MapNumbers::DrawnWithOffsets => "Ω and b drawn",
                MapNumbers::Fitted => "fitted",
                MapNumbers::FittedAndTrained => "fitted, trained",
                MapNumbers::Trained => "trained",
            };
            let signed = if positive { "" } else { "yes" };
            table += &format!("| `{name}` | `{formula}` | {kernel} | {features} | {numbers} | {signed} |\n");
        }
        table
    }

    /// The tables in `maps.md` and the README are the table that the descriptions make.
    #[test]
    fn the_tables_in_the_documentation_are_those_of_the_descriptions() {
        assert_eq!(include_str!("maps.md"), table(), "features/maps.md must be:\n{}", table());
        assert!(include_str!("../../README.md").contains(&table()), "README.md must have this table:\n{}", table());
    }

    /// The sign, the number of features and the parameters in a description are those of the map.
    #[test]
    fn descriptions_are_true_of_the_maps() -> Result<()> {
        use candle_core::{DType, Tensor};
        let device = Device::Cpu;
        let (d, m) = (5, 6);
        let random = RandomParameters {
            projection: Tensor::randn(0f32, 1.0, (m, d), &device)?,
            offsets: Some(Tensor::rand(0f32, 6.2, m, &device)?),
        };
        for kind in FeatureMapKind::NAMED.into_iter().chain([FeatureMapKind::Limit(2)]) {
            let description = kind.describe();
            assert_eq!(kind.to_string().parse(), Ok(kind));
            let map = kind.build(d, Some(&random), &device)?;
            let x = (Tensor::randn(0f32, 1.0, (50, d), &device)? * 2.0)?;
            let least = map.features(&x)?.materialize()?.min_all()?.to_dtype(DType::F32)?.to_scalar::<f32>()?;
            assert_eq!(least >= 0.0, description.positive, "{kind}: the least feature is {least}");
            let features = match description.features {
                "M" => m,
                "2M" => 2 * m,
                "D" => d,
                "1 + D + D(D+1)/2" => 21,
                "C(D+n, n)" => 21,
                "M + those of taylor2" => m + 21,
                other => panic!("{kind}: a number of features that this test does not know, {other}"),
            };
            assert_eq!(map.feature_dim(), features, "{kind}");
            assert_eq!(!map.parameters().is_empty(), kind.has_parameters(), "{kind}");
        }
        Ok(())
    }
}
