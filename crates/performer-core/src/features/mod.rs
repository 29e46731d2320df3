//! Feature maps φ with `φ(x)·φ(y) ≈ K(x, y)`: one file a family, one small trait.
//!
//! | kind | `φ(x)` | kernel estimated | `F` |
//! |---|---|---|---|
//! | [`Positive`] | `M^-½ exp(ω·x − ‖x‖²/2)` | softmax, unbiased | `M` |
//! | [`Hyperbolic`] | both `(2M)^-½ exp(±ω·x − ‖x‖²/2)` | softmax, unbiased | `2M` |
//! | [`Trigonometric`] | `M^-½ e^{‖x‖²/2} [sin ω·x, cos ω·x]` | softmax, unbiased, signed | `2M` |
//! | [`Phase`] | `(2/M)^½ e^{‖x‖²/2} cos(ω·x + b)` | softmax, unbiased, signed | `M` |
//! | [`GaussianPhase`] | `(2/M)^½ cos(ω·x + b)` | Gaussian `e^{−‖x−y‖²/2}` | `M` |
//! | [`Relu`] | `M^-½ relu(ω·x) + ε` | arc-cosine | `M` |
//! | [`Elu`] | `elu(x) + 1` | – | `D` |
//! | [`Taylor2`] | `[1, x, vec(xxᵀ)/√2]` | `1 + z + z²/2` | `1+D+D(D+1)/2` |
//! | [`Limit`] | `[1, x/√n]^{⊗n}` | `(1 + z/n)^n` | `C(D+n, n)` |
//! | [`HermiteTail`] | Taylor-2 ⊕ `M^-½ (e^{ω·x−‖x‖²/2}−h₂)` | softmax, unbiased | `M` + Taylor-2 |
//! | [`Optimal`] | `(1−4A)^{D/4} M^-½ exp(A‖ω‖²+√(1−4A)ω·x−‖x‖²/2)` | softmax, unbiased | `M` |
//! | [`Dense`] | as `Optimal`, with an `A` for each eigendirection | softmax, unbiased | `M` |
//! | [`Learned`] | `exp(a·x − ‖x‖²/2)`, `exp(b·y + w − ‖y‖²/2)`, trained | its own | `M` |
//! | [`Hedgehog`] | `[softmax(a x), softmax(−a x)]`, trained | its own | `2M` |
//!
//! [`Positive`]: FeatureMapKind::Positive
//! [`Hyperbolic`]: FeatureMapKind::Hyperbolic
//! [`Trigonometric`]: FeatureMapKind::Trigonometric
//! [`Phase`]: FeatureMapKind::Phase
//! [`GaussianPhase`]: FeatureMapKind::GaussianPhase
//! [`Relu`]: FeatureMapKind::Relu
//! [`Elu`]: FeatureMapKind::Elu
//! [`Taylor2`]: FeatureMapKind::Taylor2
//! [`Limit`]: FeatureMapKind::Limit
//! [`HermiteTail`]: FeatureMapKind::HermiteTail
//! [`Optimal`]: FeatureMapKind::Optimal
//! [`Dense`]: FeatureMapKind::Dense
//! [`Learned`]: FeatureMapKind::Learned
//! [`Hedgehog`]: FeatureMapKind::Hedgehog
//!
//! `Positive` is the map of FAVOR+, `Optimal` that of FAVOR++, `Dense` that of FAVOR#;
//! `h₂ = 1 + ω·x + ((ω·x)² − ‖x‖²)/2`. Rows `ω` of the projection Ω `(M, D)` come from
//! [`crate::projection`]; `z = x·y`. Rows `x` are already scaled by `D^-1/4`, so that
//! `x·y = q·k/√D`.
//!
//! A feature of a softmax kernel spans hundreds of orders of magnitude. A map therefore returns
//! [`Features`] in a form from which the attention can take the scale before it exponentiates.

mod elu;
mod exponential;
pub mod fit;
mod fitted;
mod hedgehog;
mod hermite;
mod polynomial;
mod relu;
mod trigonometric;

use std::{fmt, str::FromStr};

use candle_core::{D, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

pub use elu::Elu;
pub use exponential::{Hyperbolic, Positive};
pub use fitted::Fitted;
pub use hedgehog::Hedgehog;
pub use hermite::HermiteTail;
pub use polynomial::{Limit, Taylor2};
pub use relu::{RELU_EPSILON, Relu};
pub use trigonometric::{Phase, Trigonometric};

/// The features of many rows, in the form that keeps them in range.
#[derive(Clone, Debug)]
pub enum Features {
    /// Log-features `log φ(x)`, shape `(..., F)`, of maps whose features are all positive.
    Log(Tensor),
    /// `φ(x) = e^{log_scale} · values`, of maps with signed features, or features of moderate size.
    Linear {
        /// Shape `(..., F)`.
        values: Tensor,
        /// Shape `(..., 1)`; `None` means zero.
        log_scale: Option<Tensor>,
    },
}

impl Features {
    /// Computes `φ(x)` itself, shape `(..., F)`. Overflows where the features do; the attention
    /// never calls it.
    pub fn materialize(&self) -> Result<Tensor> {
        match self {
            Self::Log(log) => log.exp(),
            Self::Linear { values, log_scale: None } => Ok(values.clone()),
            Self::Linear { values, log_scale: Some(s) } => values.broadcast_mul(&s.exp()?),
        }
    }
}

/// The form of features `F^-½ exp(±ω_r·x − ‖x‖²/2)`, with parameters for each of `H` key heads, or
/// one set for all (`H` = 1).
#[derive(Clone, Debug)]
pub struct ExponentialForm {
    /// Ω, shape `(H, M, D)`.
    pub projection: Tensor,
    /// Whether each row gives a feature with `+` and one with `−` (all `+` first), or one with `+`
    /// only.
    pub hyperbolic: bool,
    /// The form of the features of keys, where it is another.
    pub keys: Option<KeyForm>,
}

impl ExponentialForm {
    /// All tensors of the form.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let of_keys =
            self.keys.iter().flat_map(|keys| [Some(&keys.projection), Some(&keys.log_weights), keys.metric.as_ref()]);
        std::iter::once(&self.projection).chain(of_keys.flatten())
    }

    /// Whether a gradient may be asked of any of its tensors.
    pub(crate) fn tracked(&self) -> bool {
        self.tensors().any(Tensor::track_op)
    }
}

/// The form of features of keys `F^-½ exp(b_r·y + w_r − ‖Py‖²/2)`.
#[derive(Clone, Debug)]
pub struct KeyForm {
    /// `b`, shape `(H, M, D)`.
    pub projection: Tensor,
    /// `w`, shape `(H, M)`.
    pub log_weights: Tensor,
    /// `P`, shape `(H, D, D)`; `None` is the identity.
    pub metric: Option<Tensor>,
}

/// A feature map φ: `R^D → R^F` with `φ(x)·φ(y) ≈ K(x, y)`.
pub trait FeatureMap: fmt::Debug + Send + Sync {
    /// The map's name in messages; the name of its type, unless overridden.
    fn name(&self) -> &'static str {
        let name = std::any::type_name::<Self>();
        name.rsplit("::").next().unwrap_or(name)
    }

    /// The width `D` of the rows that the map takes.
    fn input_dim(&self) -> usize;

    /// The number `F` of features of one row.
    fn feature_dim(&self) -> usize;

    /// Computes the features of the rows of `x`, shape `(..., D)`, f32 or f64. Where a map has
    /// parameters for each key head, the first dimension counts key heads, batch by batch.
    fn features(&self, x: &Tensor) -> Result<Features>;

    /// Computes the features of keys, where they differ from those of queries.
    fn key_features(&self, y: &Tensor) -> Result<Features> {
        self.features(y)
    }

    /// Returns the linear map of which the features are exponentials, for kernels that compute
    /// features themselves. Where its tensors are variables, kernels give them gradients.
    fn exponential_form(&self) -> Option<ExponentialForm> {
        None
    }

    /// Returns Ω `(M, D)` and ε of features `M^-½ relu(ω_r·x) + ε`, the other kind that kernels
    /// compute themselves.
    fn rectified_form(&self) -> Option<(Tensor, f64)> {
        None
    }

    /// Computes the offset common to all log-features of a query, `(..., D) → (..., 1)`, for maps
    /// with [`Self::exponential_form`]: by this much they are less than the linear map. Kernels
    /// leave it out, since it cancels in attention.
    fn query_offset(&self, x: &Tensor) -> Result<Tensor> {
        half_square_norm(x)?.affine(1.0, 0.5 * (self.feature_dim() as f64).ln())
    }

    /// Returns the tensors of a map that is fitted or trained, by name; they are saved with the
    /// model. The first dimension of each counts key heads; 1 serves all. Tensors that are drawn
    /// from a seed are not among them.
    fn parameters(&self) -> Vec<(&'static str, &Tensor)> {
        Vec::new()
    }

    /// The names among [`Self::parameters`] that training changes: all of them, unless overridden.
    fn trained_parameters(&self) -> Vec<&'static str> {
        self.parameters().into_iter().map(|(name, _)| name).collect()
    }

    /// Returns this map with other parameters, which `get` finds by name: for any number of heads,
    /// and trainable where they are variables.
    ///
    /// # Errors
    /// If one is missing or has no fitting shape.
    fn with_parameters(&self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<Box<dyn FeatureMap>> {
        let _ = get;
        bail!("feature map {self:?} has no parameters")
    }

    /// Computes the estimated kernel matrix `φ(x_i)·φ(y_j)`: `(..., Tq, D)`, `(..., Tk, D)` →
    /// `(..., Tq, Tk)`.
    ///
    /// It materialises every feature: for looking at an approximation, not for attention.
    fn kernel(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let phi_x = self.features(x)?.materialize()?;
        let phi_y = self.key_features(y)?.materialize()?;
        phi_x.matmul(&phi_y.transpose(D::Minus2, D::Minus1)?.contiguous()?)
    }
}

/// The feature maps by name: what a configuration file or a command line says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
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
    /// Second-order Taylor expansion of the exponential.
    Taylor2,
    /// `(1 + x·y/n)^n` for an even `n`.
    Limit(u32),
    /// Taylor-2 exactly plus random features of the remainder.
    HermiteTail,
    /// Optimal positive random features, FAVOR++ (Likhosherstov et al. 2022), see [`fit`]. Without
    /// a fit they are those for unit normal queries and keys.
    Optimal,
    /// Dense exponential random features, FAVOR# (Likhosherstov et al. 2023), see [`fit`]. Without
    /// a fit the map is [`Self::Optimal`].
    Dense,
    /// A trained linear map in place of Ω, see [`Fitted`]. Untrained it is [`Self::Positive`].
    Learned,
    /// Trained softmax features, see [`Hedgehog`] (Zhang et al. 2024).
    Hedgehog,
}

impl FeatureMapKind {
    /// Every map that takes no number, for help texts and sweeps.
    pub const NAMED: [Self; 13] = [
        Self::Positive,
        Self::Hyperbolic,
        Self::Trigonometric,
        Self::Phase,
        Self::GaussianPhase,
        Self::Relu,
        Self::Elu,
        Self::Taylor2,
        Self::HermiteTail,
        Self::Optimal,
        Self::Dense,
        Self::Learned,
        Self::Hedgehog,
    ];

    /// Whether the map draws a projection Ω.
    pub fn is_random(self) -> bool {
        !matches!(self, Self::Elu | Self::Taylor2 | Self::Limit(_))
    }

    /// Whether the map is a [`Fitted`] one, which can be fitted to queries and keys.
    pub fn is_fitted(self) -> bool {
        matches!(self, Self::Optimal | Self::Dense | Self::Learned)
    }

    /// Whether the map has parameters that are meant to be trained.
    pub fn is_trained(self) -> bool {
        matches!(self, Self::Learned | Self::Hedgehog)
    }

    /// Whether the map has parameters that began as what was drawn: redrawing leaves them alone.
    pub fn has_parameters(self) -> bool {
        self.is_fitted() || self.is_trained()
    }

    /// Whether the map draws phase offsets `b` besides Ω.
    pub fn has_offsets(self) -> bool {
        matches!(self, Self::Phase | Self::GaussianPhase)
    }

    /// Builds the map for rows of width `head_dim`.
    ///
    /// `random` holds what a random map needs, see [`RandomParameters`]; deterministic maps ignore
    /// it. `device` is where the constants of deterministic maps live.
    ///
    /// # Errors
    /// If a random map is given no parameters, or parameters of another shape.
    pub fn build(
        self,
        head_dim: usize,
        random: Option<&RandomParameters>,
        device: &Device,
    ) -> Result<Box<dyn FeatureMap>> {
        if head_dim == 0 {
            bail!("feature map {self}: head_dim is 0; it must be at least 1");
        }
        let random = match (self.is_random(), random) {
            (true, None) => {
                bail!("feature map {self} is random and needs a projection (M, {head_dim}); none was given")
            }
            (true, Some(r)) => {
                r.check(self, head_dim)?;
                r.clone()
            }
            (false, _) => return self.build_deterministic(head_dim, device),
        };
        let projection = random.projection;
        Ok(match self {
            Self::Positive => Box::new(Positive::new(projection)?),
            Self::Hyperbolic => Box::new(Hyperbolic::new(projection)?),
            Self::Trigonometric => Box::new(Trigonometric::new(projection)?),
            Self::Phase | Self::GaussianPhase => {
                let Some(offsets) = random.offsets else {
                    bail!("feature map {self} needs phase offsets ({}); none were given", projection.dims()[0])
                };
                Box::new(Phase::new(projection, offsets, self == Self::Phase)?)
            }
            Self::Relu => Box::new(Relu::new(projection)?),
            Self::HermiteTail => Box::new(HermiteTail::new(projection)?),
            Self::Optimal | Self::Dense | Self::Learned => Box::new(fit::unfitted(self, &projection)?),
            Self::Hedgehog => Box::new(Hedgehog::new(&projection)?),
            Self::Elu | Self::Taylor2 | Self::Limit(_) => unreachable!("deterministic maps returned above"),
        })
    }

    fn build_deterministic(self, head_dim: usize, device: &Device) -> Result<Box<dyn FeatureMap>> {
        Ok(match self {
            Self::Elu => Box::new(Elu::new(head_dim)),
            Self::Taylor2 => Box::new(Taylor2::new(head_dim, device)?),
            Self::Limit(n) => Box::new(Limit::new(n, head_dim, device)?),
            _ => bail!("feature map {self} is random"),
        })
    }
}

impl fmt::Display for FeatureMapKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::Positive => "positive",
            Self::Hyperbolic => "hyperbolic",
            Self::Trigonometric => "trigonometric",
            Self::Phase => "phase",
            Self::GaussianPhase => "gaussian-phase",
            Self::Relu => "relu",
            Self::Elu => "elu",
            Self::Taylor2 => "taylor2",
            Self::Limit(n) => return write!(f, "limit-{n}"),
            Self::HermiteTail => "hermite-tail",
            Self::Optimal => "optimal",
            Self::Dense => "dense",
            Self::Learned => "learned",
            Self::Hedgehog => "hedgehog",
        };
        f.write_str(name)
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

/// What a random feature map draws: constants to the gradient, saved with the model.
#[derive(Clone, Debug)]
pub struct RandomParameters {
    /// Ω, shape `(M, D)`, f32 or f64.
    pub projection: Tensor,
    /// `b`, shape `(M)`, for the phase maps.
    pub offsets: Option<Tensor>,
}

impl RandomParameters {
    fn check(&self, kind: FeatureMapKind, head_dim: usize) -> Result<()> {
        let dims = self.projection.dims();
        if dims.len() != 2 || dims[0] == 0 || dims[1] != head_dim {
            bail!("feature map {kind}: projection has shape {dims:?}; it must be (M, {head_dim}) with M >= 1");
        }
        if let Some(offsets) = &self.offsets
            && offsets.dims() != &dims[..1]
        {
            bail!("feature map {kind}: offsets have shape {:?}; they must be ({})", offsets.dims(), dims[0]);
        }
        Ok(())
    }
}

/// Computes `(..., D) · Ωᵀ → (..., M)`, with Ω cast to the dtype of `x`.
fn project(x: &Tensor, projection_t: &Tensor) -> Result<Tensor> {
    let d = x.dim(D::Minus1)?;
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = projection_t.dim(1)?;
    }
    x.contiguous()?.reshape(((), d))?.matmul(&projection_t.to_dtype(x.dtype())?)?.reshape(shape)
}

/// Computes `x · wᵀ` head by head: `x` `(B·H, .., D)`, `w` `(H, O, D)` → `(B·H, .., O)`.
fn project_by_head(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (h, o, d) = w.dims3()?;
    let dims = x.dims();
    if !dims[0].is_multiple_of(h) {
        bail!("a feature map fitted to {h} key heads was given {} of them", dims[0]);
    }
    let rows = x.elem_count() / (dims[0] * d).max(1);
    let x = x.contiguous()?.reshape((dims[0] / h, h, rows, d))?;
    let w = w.to_dtype(x.dtype())?.transpose(1, 2)?.unsqueeze(0)?;
    let mut shape = dims.to_vec();
    shape[dims.len() - 1] = o;
    x.broadcast_matmul(&w.contiguous()?)?.reshape(shape)
}

/// Computes `‖x‖²/2` of every row, `(..., D) → (..., 1)`.
fn half_square_norm(x: &Tensor) -> Result<Tensor> {
    x.sqr()?.sum_keepdim(D::Minus1)? * 0.5
}

/// Returns Ωᵀ, contiguous and detached from any gradient.
fn transposed(projection: &Tensor) -> Result<Tensor> {
    if projection.rank() != 2 || projection.elem_count() == 0 {
        bail!("projection has shape {:?}; it must be (M, D), both at least 1", projection.dims());
    }
    projection.detach().t()?.contiguous()
}
