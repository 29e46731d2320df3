//! This module has closed forms of the mean squared error of kernel estimates, relative to the
//! square of the softmax kernel `SM = e^{x·y}`.
//!
//! With `z = x + y`, `s = ‖z‖²`, `δ = ‖x − y‖²` and independent Gaussian rows (Choromanski et al.
//! 2020, <https://arxiv.org/abs/2009.14794>, lemma 2, whose formulas become short when divided by
//! `SM²`):
//!
//! | map | `M · MSE / SM²` |
//! |---|---|
//! | positive | `e^s − 1` |
//! | hyperbolic | `cosh s − 1` |
//! | trigonometric | `cosh δ − 1` |
//! | phase | `cosh δ − 1 + e^δ/2` |
//! | optimal (FAVOR++) with its `A` | `((1−4A)/√(1−8A))^D e^{s/(1−8A)} − 1` |
//!
//! Orthogonal rows with χ lengths add, for each pair of rows of a block, the covariance of the two.
//! `ω₁ + ω₂` of such a pair has a uniform direction and a squared length of χ²(2D), so
//! `E e^{(ω₁+ω₂)·z} = ₁F₁(D; D/2; s/2)` where independent rows have `e^s`; cosines have
//! `₁F₁(D; D/2; −δ/2)` where independent ones have `e^{−δ}`.

/// A `Pair` holds what the errors of a query and a key depend on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// `‖x + y‖²`.
    pub(super) sum: f64,
    /// `‖x − y‖²`.
    pub(super) difference: f64,
}

/// A `Form` is a closed form of the relative mean squared error of a pair by `m` rows of dimension
/// `d`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Form {
    /// Positive, independent rows.
    Positive,
    /// Positive, orthogonal rows, χ lengths.
    PositiveOrthogonal,
    /// Positive, orthogonal rows, all of length √D.
    PositiveRegular,
    /// Hyperbolic, orthogonal rows.
    HyperbolicOrthogonal,
    /// Trigonometric, orthogonal rows.
    TrigonometricOrthogonal,
    /// Phase, independent rows.
    Phase,
    /// FAVOR++ with this `A`, independent rows.
    Optimal(f64),
}

impl Pair {
    /// Returns the pair `√factor · (x, y)`.
    pub(super) fn scaled(self, factor: f64) -> Self {
        Self { sum: factor * self.sum, difference: factor * self.difference }
    }

    /// Returns `x·y`.
    pub(super) fn logit(self) -> f64 {
        (self.sum - self.difference) / 4.0
    }

    /// Computes the relative mean squared error of an estimate by `m` rows of dimension `d`.
    pub(super) fn error(self, form: Form, m: usize, d: usize) -> f64 {
        let Self { sum, difference, .. } = self;
        let n = m as f64;
        let pairs = same_block(m, d) / (n * n);
        let covariance = || kummer(d as f64, 0.5 * d as f64, sum / 2.0) * (-sum).exp() - 1.0;
        match form {
            Form::Positive => sum.exp_m1() / n,
            Form::PositiveOrthogonal => sum.exp_m1() / n + pairs * covariance(),
            Form::PositiveRegular => {
                let half = 0.5 * d as f64;
                // The next three are `E e^{R u·z}` for a direction u uniform on the sphere, with R²
                // = D, 4D and 2D.
                let mean = bessel(half, half * sum / 2.0) * (-sum / 2.0).exp();
                let square = bessel(half, 2.0 * half * sum) * (-sum).exp();
                let pair = bessel(half, half * sum) * (-sum).exp();
                let others = 1.0 - 1.0 / n - pairs;
                square / n + pairs * pair + others * mean * mean - 2.0 * mean + 1.0
            }
            Form::HyperbolicOrthogonal => (sum.cosh() - 1.0) / n + pairs * covariance(),
            Form::TrigonometricOrthogonal => {
                let pair = kummer(d as f64, 0.5 * d as f64, -difference / 2.0) * difference.exp();
                (difference.cosh() - 1.0) / n + pairs * (pair - 1.0)
            }
            Form::Phase => (difference.cosh() - 1.0 + 0.5 * difference.exp()) / n,
            Form::Optimal(a) => {
                let log = d as f64 * ((1.0 - 4.0 * a).ln() - 0.5 * (1.0 - 8.0 * a).ln()) + sum / (1.0 - 8.0 * a);
                log.exp_m1() / n
            }
        }
    }

    /// Returns the bound of theorem 2 of the Performer paper, relative to `SM²`: by how much, at
    /// least, the error of orthogonal rows lies below that of independent rows. The theorem holds
    /// for `m ≤ d`; more rows form independent blocks.
    pub(super) fn least_gain(self, m: usize, d: usize) -> f64 {
        let n = m as f64;
        2.0 * same_block(m, d) / (n * n * (d as f64 + 2.0)) * (-(-self.sum / 2.0).exp_m1()).powi(2)
    }

    /// Returns the relative standard error of a mean squared error of positive features of `m`
    /// independent rows, measured over `draws`, from the fourth moment of a log-normal variable.
    /// For the other forms it is a guide.
    pub(super) fn resolution(self, m: usize, draws: usize) -> f64 {
        let s = self.sum;
        let fourth = (6.0 * s).exp() - 4.0 * (3.0 * s).exp() + 6.0 * s.exp() - 3.0;
        let kurtosis = 3.0 + (fourth / s.exp_m1().powi(2) - 3.0) / m as f64;
        ((kurtosis - 1.0) / draws as f64).sqrt()
    }
}

/// Returns the `A` of FAVOR++ for queries and keys with `E‖x + y‖²/D = l` (Likhosherstov et al.
/// 2022, theorem 3.2).
pub(super) fn shrinkage(l: f64) -> f64 {
    (1.0 - 2.0 * l - ((2.0 * l + 1.0).powi(2) + 8.0 * l).sqrt()) / 16.0
}

/// Returns the number of ordered pairs of different rows in one block, of `m` rows in blocks of
/// `d`.
fn same_block(m: usize, d: usize) -> f64 {
    let rest = m % d;
    ((m / d) * d * (d - 1) + rest * rest.saturating_sub(1)) as f64
}

/// Computes `₁F₁(a; b; t)` by its series; below zero by Kummer's transformation, which keeps terms
/// small.
fn kummer(a: f64, b: f64, t: f64) -> f64 {
    if t < 0.0 {
        return t.exp() * series(|k| (b - a + k) / (b + k) * -t / (k + 1.0));
    }
    series(|k| (a + k) / (b + k) * t / (k + 1.0))
}

/// Computes `₀F₁(; b; t) = E e^{R u·z}` for `t = R²‖z‖²/4`, `b = D/2`.
fn bessel(b: f64, t: f64) -> f64 {
    series(|k| t / ((b + k) * (k + 1.0)))
}

/// Sums `1 + r₀ + r₀r₁ + …` until terms no longer change the sum.
fn series(ratio: impl Fn(f64) -> f64) -> f64 {
    let (mut sum, mut term) = (1.0f64, 1.0f64);
    for k in 0..10_000 {
        term *= ratio(f64::from(k));
        sum += term;
        if term.abs() <= 1e-17 * sum.abs() {
            break;
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIR: Pair = Pair { sum: 1.3, difference: 0.7 };

    #[test]
    fn hypergeometric_functions_have_known_values() {
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-12, "{a} {b}");
        close(kummer(2.0, 2.0, 1.7), 1.7f64.exp());
        close(kummer(2.0, 1.0, 0.9), 1.9 * 0.9f64.exp());
        close(kummer(2.0, 1.0, -0.9), 0.1 * (-0.9f64).exp());
        close(bessel(0.5, 0.49), 1.4f64.cosh());
        close(bessel(1.5, 0.49), 1.4f64.sinh() / 1.4);
    }

    /// Compares the forms with those that the papers state.
    #[test]
    fn forms_are_those_of_the_papers() {
        let (m, d) = (7, 1_000_000);
        let softmax = PAIR.logit().exp();
        let (s, difference) = (PAIR.sum, PAIR.difference);
        let positive = s.exp() * softmax.powi(2) * (1.0 - (-s).exp()) / m as f64;
        let close = |a: f64, b: f64| assert!((a / b - 1.0).abs() < 1e-4, "{a} {b}");
        close(PAIR.error(Form::Positive, m, d) * softmax.powi(2), positive);
        close(PAIR.error(Form::Optimal(0.0), m, d) * softmax.powi(2), positive);
        // In high dimension, independent rows are nearly orthogonal and of one length.
        close(PAIR.error(Form::PositiveOrthogonal, m, d) * softmax.powi(2), positive);
        close(PAIR.error(Form::PositiveRegular, m, d) * softmax.powi(2), positive);
        close(PAIR.error(Form::HyperbolicOrthogonal, m, d) * softmax.powi(2), 0.5 * (1.0 - (-s).exp()) * positive);
        let trigonometric = s.exp() * softmax.powi(-2) * (1.0 - (-difference).exp()).powi(2) / (2.0 * m as f64);
        close(PAIR.error(Form::TrigonometricOrthogonal, m, d) * softmax.powi(2), trigonometric);
    }

    #[test]
    fn orthogonal_rows_keep_theorem_2() {
        for d in [2, 3, 16, 64] {
            for m in [1, 2, d, d + 1, 4 * d] {
                for factor in [0.01, 0.3, 1.0, 5.0] {
                    let pair = PAIR.scaled(factor);
                    let independent = pair.error(Form::Positive, m, d);
                    let orthogonal = pair.error(Form::PositiveOrthogonal, m, d);
                    let slack = 1e-9 * independent;
                    assert!(orthogonal <= independent - pair.least_gain(m, d) + slack, "d={d} m={m} {factor}");
                    assert!(orthogonal >= 0.0 && pair.least_gain(m, d) >= 0.0);
                }
            }
        }
    }
}
