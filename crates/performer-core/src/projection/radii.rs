//! Row lengths: how far out on its direction each row of Ω lies.

use std::fmt;
use std::str::FromStr;

use candle_core::{Error, Result};
use serde::{Deserialize, Serialize};

use super::rng::Stream;

/// How long the rows of an orthogonal or Hadamard projection are. Gaussian projections ignore it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Radii {
    /// The norm of an independent standard Gaussian vector, `χ(d)`: rows are `N(0, I_d)` again, and
    /// the softmax kernel is estimated without bias.
    #[default]
    Chi,
    /// `√d`, the same for all: less variance, for the *regularised* softmax kernel ([Choromanski et
    /// al., 2020](https://arxiv.org/abs/2009.14794), theorem 1), which lies a little below the
    /// softmax kernel.
    Sqrt,
    /// The `m` quantiles `R_i` of `χ(d)` with `P(r ≤ R_i) = i / (m + 1)`, in random order: radii
    /// spread as `χ(d)`'s are, without their sampling noise. Slightly biased, as they leave out the
    /// tails.
    Quantile,
}

impl Radii {
    /// Every choice.
    pub const ALL: [Self; 3] = [Self::Chi, Self::Sqrt, Self::Quantile];

    /// The name, as it is displayed, parsed and serialised.
    pub fn name(self) -> &'static str {
        match self {
            Self::Chi => "chi",
            Self::Sqrt => "sqrt",
            Self::Quantile => "quantile",
        }
    }

    /// The lengths of `m` rows that have `dim` dimensions.
    pub(super) fn lengths(self, m: usize, dim: usize, seed: u64) -> Vec<f64> {
        match self {
            Self::Chi => {
                let mut rng = Stream::Radii.open(seed);
                let mut vector = vec![0.0; dim];
                let mut norm = || {
                    rng.fill_normal(&mut vector);
                    vector.iter().map(|z| z * z).sum::<f64>().sqrt()
                };
                (0..m).map(|_| norm()).collect()
            }
            Self::Sqrt => vec![(dim as f64).sqrt(); m],
            Self::Quantile => {
                let level = |i: usize| i as f64 / (m as f64 + 1.0);
                let mut lengths: Vec<f64> = (1..=m).map(|i| chi_quantile(level(i), dim)).collect();
                // Over all blocks, so that no block gets all the short rows.
                Stream::Permutation.open(seed).shuffle(&mut lengths);
                lengths
            }
        }
    }
}

impl fmt::Display for Radii {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Radii {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        super::parse("radii", text, &Self::ALL.map(|radii| (radii.name(), radii)))
    }
}

/// The `r` with `P(‖z‖ ≤ r) = level` for `z ~ N(0, I_dim)`, by bisection down to neighbouring
/// floats; `0 < level < 1`.
fn chi_quantile(level: f64, dim: usize) -> f64 {
    let below = |r: f64| gamma_cdf(dim as f64 / 2.0, r * r / 2.0) < level;
    let (mut low, mut high) = (0.0, 1.0);
    while below(high) {
        (low, high) = (high, 2.0 * high);
    }
    loop {
        let middle = (low + high) / 2.0;
        if middle <= low || middle >= high {
            return high;
        }
        if below(middle) {
            low = middle;
        } else {
            high = middle;
        }
    }
}

/// The regularised lower incomplete gamma function `P(a, x)` for `a` a positive multiple of ½.
///
/// Below the mean by its power series, above it from the complement, which for such `a` is a finite
/// sum: `Q(a + 1, x) = Q(a, x) + x^a e^{−x} / Γ(a + 1)` down to `Q(1, x) = e^{−x}` or `Q(½, x) =
/// erfc(√x)`. Terms are positive and fall from the first on, so nothing cancels or overflows.
fn gamma_cdf(a: f64, x: f64) -> f64 {
    let mut term = libm::exp(a * libm::log(x) - x - libm::lgamma(a + 1.0)); // x^a e^{−x} / Γ(a + 1)
    let mut sum = 0.0;
    if x < a {
        let mut n = a;
        while sum + term > sum {
            sum += term;
            n += 1.0;
            term *= x / n;
        }
        return sum;
    }
    let mut n = a;
    while n >= 1.0 {
        term *= n / x; // x^{n−1} e^{−x} / Γ(n)
        sum += term;
        n -= 1.0;
    }
    if n == 0.5 {
        sum += libm::erfc(x.sqrt());
    }
    1.0 - sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_close(got: f64, expected: f64, what: &str) {
        assert!((got / expected - 1.0).abs() < 1e-12, "{what}: {got}, expected {expected}");
    }

    #[test]
    fn chi_quantiles_have_known_values() {
        for i in 1..100 {
            let level = f64::from(i) / 100.0;
            let expected = (-2.0 * (1.0 - level).ln()).sqrt(); // two dimensions: 1 − e^{−r²/2}
            assert_close(chi_quantile(level, 2), expected, &format!("level {level} of chi(2)"));
        }
    }

    /// Values computed with 40 digits.
    #[test]
    fn chi_quantiles_match_precise_values() {
        let cases = [
            (1, 1.0 / 2.0, 0.674_489_750_196_081_7),
            (1, 1.0 / 1001.0, 0.001_252_062_402_374_928),
            (3, 1.0 / 2.0, 1.538_172_254_455_052),
            (3, 99.0 / 100.0, 3.368_214_175_218_727),
            (16, 1.0 / 100.0, 2.410_853_058_594_606),
            (64, 256.0 / 257.0, 9.907_300_743_006_715),
            (64, 1.0 / 257.0, 6.158_516_955_565_411),
            (255, 1.0 / 2.0, 15.947_841_360_933_8),
            (2048, 1.0 / 10.0, 44.344_344_182_748_87),
        ];
        for (dim, level, expected) in cases {
            assert_close(chi_quantile(level, dim), expected, &format!("level {level} of chi({dim})"));
        }
    }

    #[test]
    fn gamma_cdf_meets_at_its_seam() {
        // The two branches, series and complement, agree where one takes over from the other.
        for a in [0.5, 1.0, 1.5, 8.0, 31.5, 32.0, 128.0, 1000.5] {
            let (below, above) = (gamma_cdf(a, a * (1.0 - 1e-15)), gamma_cdf(a, a));
            assert!((below - above).abs() < 1e-11, "P({a}, {a}): {below} from below, {above} from above");
        }
    }
}
