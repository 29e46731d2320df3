//! These tests check the propositions of the Performer paper (Choromanski et al. 2020,
//! <https://arxiv.org/abs/2009.14794>) statistically.
//!
//! Each compares a mean over independent draws of Ω with what a theorem says, and allows
//! [`ALLOWED`] = 5 standard errors. Seeds are fixed, so a test that passes once passes always; for
//! a fresh seed, code that is right would fail one comparison with probability at most 1/25 by
//! Chebyshev's inequality, whatever the distribution, and 6·10⁻⁷ (two-sided) where the mean is as
//! good as normal, which thousands of draws make it. With the 59 comparisons of this file that is
//! 4·10⁻⁵ for all of it. Standard errors are those of closed forms where the fourth moment has one,
//! and measured elsewhere.
//!
//! Errors are relative: of `φ(x)·φ(y) / e^{x·y}`. Then with `s = ‖x+y‖²` and `δ = ‖x−y‖²`, M times
//! the mean squared error of independent rows is `e^s − 1` for positive features, `cosh s − 1` for
//! hyperbolic and `cosh δ − 1` for trigonometric ones.

use crate::common::{Random, tensor};
use candle_core::{DType, Device, Result, Tensor};
use performer_core::features::{FeatureMapKind, RandomParameters};
use performer_core::projection::{derive_seed, draw_tensor};
use performer_core::{ProjectionKind, Radii};

const DEVICE: Device = Device::Cpu;

/// The standard errors by which a mean may be off.
const ALLOWED: f64 = 5.0;

/// The number of pairs of a draw. They have the same `s` and `δ` in different directions, so that
/// all estimate the same error.
const PAIRS: usize = 16;

/// An `Estimate` says how an estimate is made.
#[derive(Clone, Copy)]
struct Estimate {
    map: FeatureMapKind,
    projection: ProjectionKind,
    radii: Radii,
    m: usize,
    d: usize,
}

impl Estimate {
    fn new(map: FeatureMapKind, projection: ProjectionKind, m: usize, d: usize) -> Self {
        Self { map, projection, radii: Radii::Chi, m, d }
    }

    /// Returns the relative errors of `draws` estimates of `PAIRS` pairs each with this `s` and
    /// `δ`.
    fn errors(self, s: f64, difference: f64, draws: u64) -> Result<Vec<Vec<f64>>> {
        let [x, y] = pairs(self.d, s, difference)?;
        let softmax = (0.25 * (s - difference)).exp();
        let one = |draw| {
            let seed = derive_seed(7, draw);
            let projection = draw_tensor(self.projection, self.radii, self.m, self.d, seed, DType::F64, &DEVICE)?;
            let map = self.map.build(self.d, Some(&RandomParameters { projection, offsets: None }), &DEVICE)?;
            let (phi_x, phi_y) = (map.features(&x)?.materialize()?, map.key_features(&y)?.materialize()?);
            let estimates = (phi_x * phi_y)?.sum(1)?.to_vec1::<f64>()?;
            Ok(estimates.into_iter().map(|e| e / softmax - 1.0).collect())
        };
        (0..draws).map(one).collect()
    }

    /// Returns the mean of the squared errors.
    fn squared(self, s: f64, difference: f64, draws: u64) -> Result<Mean> {
        Ok(Mean::of(&self.errors(s, difference, draws)?, |e| e * e))
    }
}

/// Returns rows `(PAIRS, d)` of both sides: `x + y` of squared length `s`, `x − y` of squared
/// length `difference`, in random directions at a right angle.
fn pairs(d: usize, s: f64, difference: f64) -> Result<[Tensor; 2]> {
    let mut random = Random::new(3);
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let (mut x, mut y) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        let (sum, mut rest) = (random.normal(d, 1.0), random.normal(d, 1.0));
        let along = dot(&sum, &rest) / dot(&sum, &sum);
        rest.iter_mut().zip(&sum).for_each(|(r, s)| *r -= along * s);
        let (a, b) = ((s / dot(&sum, &sum)).sqrt(), (difference / dot(&rest, &rest)).sqrt());
        x.extend(sum.iter().zip(&rest).map(|(s, r)| 0.5 * (a * s + b * r)));
        y.extend(sum.iter().zip(&rest).map(|(s, r)| 0.5 * (a * s - b * r)));
    }
    Ok([tensor(&x, &[PAIRS, d], DType::F64, &DEVICE)?, tensor(&y, &[PAIRS, d], DType::F64, &DEVICE)?])
}

/// A `Mean` is a mean over draws with its measured standard error; the pairs of a draw count as
/// one.
#[derive(Clone, Copy, Debug)]
struct Mean {
    value: f64,
    error: f64,
}

impl Mean {
    fn of(draws: &[Vec<f64>], f: impl Fn(f64) -> f64) -> Self {
        let n = draws.len() as f64;
        let means: Vec<f64> = draws.iter().map(|d| d.iter().map(|&e| f(e)).sum::<f64>() / d.len() as f64).collect();
        let value = means.iter().sum::<f64>() / n;
        let variance = means.iter().map(|m| (m - value).powi(2)).sum::<f64>() / (n - 1.0);
        Self { value, error: (variance / n).sqrt() }
    }

    #[track_caller]
    fn assert_is(self, expected: f64, what: &str) {
        let off = (self.value - expected) / self.error;
        assert!(off.abs() < ALLOWED, "{what}: {self:?}, expected {expected}, off by {off} standard errors");
    }

    #[track_caller]
    fn assert_below(self, bound: f64, what: &str) {
        let off = (self.value - bound) / self.error;
        assert!(off < ALLOWED, "{what}: {self:?} exceeds {bound} by {off} standard errors");
    }
}

/// Computes `₁F₁(a; b; t)`.
fn kummer(a: f64, b: f64, t: f64) -> f64 {
    series(|k| (a + k) / (b + k) * t / (k + 1.0))
}

/// Computes `₀F₁(; b; t)`.
fn bessel(b: f64, t: f64) -> f64 {
    series(|k| t / ((b + k) * (k + 1.0)))
}

fn series(ratio: impl Fn(f64) -> f64) -> f64 {
    let terms = (0..200).scan(1.0, |term, k| {
        *term *= ratio(f64::from(k));
        Some(*term)
    });
    1.0 + terms.sum::<f64>()
}

/// Lemma 1 and section 3: estimates are unbiased with independent and with orthogonal rows, at a
/// dimension that is no power of two and with rows that fill no block.
#[test]
fn estimates_are_unbiased() -> Result<()> {
    for map in [FeatureMapKind::Positive, FeatureMapKind::Hyperbolic, FeatureMapKind::Trigonometric] {
        for projection in [ProjectionKind::Gaussian, ProjectionKind::Orthogonal] {
            for (s, difference) in [(1.0, 1.0), (0.2, 1.5), (1.5, 0.2)] {
                let errors = Estimate::new(map, projection, 10, 7).errors(s, difference, 2000)?;
                let mean = Mean::of(&errors, |e| e);
                assert!(mean.error < 0.01, "too few draws to tell: {mean:?}");
                mean.assert_is(0.0, &format!("{map}, {projection}, s={s} δ={difference}"));
            }
        }
    }
    Ok(())
}

/// Lemma 2 for positive features. Here even the standard error is exact: that of the square of a
/// mean of `m` log-normal variables.
#[test]
fn positive_features_have_the_error_of_lemma_2() -> Result<()> {
    let (m, draws) = (64, 4000);
    for s in [0.1, 0.5, 1.0f64] {
        // The result does not depend on δ.
        for difference in [0.3, 3.0] {
            let estimate = Estimate::new(FeatureMapKind::Positive, ProjectionKind::Gaussian, m, 16);
            let measured = estimate.squared(s, difference, draws)?.value;
            let expected = s.exp_m1() / m as f64;
            let fourth = (6.0 * s).exp() - 4.0 * (3.0 * s).exp() + 6.0 * s.exp() - 3.0;
            let kurtosis = 3.0 + (fourth / s.exp_m1().powi(2) - 3.0) / m as f64;
            // Pairs may err together, so a draw of them counts as one.
            let error = expected * ((kurtosis - 1.0) / draws as f64).sqrt();
            assert!(error < 0.05 * expected, "too few draws to tell");
            Mean { value: measured, error }.assert_is(expected, &format!("s={s} δ={difference}"));
        }
    }
    Ok(())
}

/// Lemma 2: as the kernel goes to zero, the error of positive features goes with it, and that of
/// trigonometric features does not.
#[test]
fn where_softmax_vanishes_positive_errors_vanish_and_trigonometric_ones_grow() -> Result<()> {
    let (m, s) = (32, 0.5f64);
    let mut before: Option<[Mean; 2]> = None;
    for difference in [1.0f64, 3.0, 6.0, 9.0] {
        let softmax = (0.25 * (s - difference)).exp();
        let absolute = |map: FeatureMapKind| -> Result<Mean> {
            let relative = Estimate::new(map, ProjectionKind::Gaussian, m, 16).squared(s, difference, 1500)?;
            Ok(Mean { value: softmax.powi(2) * relative.value, error: softmax.powi(2) * relative.error })
        };
        let positive = absolute(FeatureMapKind::Positive)?;
        let trigonometric = absolute(FeatureMapKind::Trigonometric)?;
        positive.assert_is(softmax.powi(2) * s.exp_m1() / m as f64, "positive");
        trigonometric.assert_is(softmax.powi(2) * (difference.cosh() - 1.0) / m as f64, "trigonometric");
        if let Some([positive_before, trigonometric_before]) = before {
            positive.assert_below(0.7 * positive_before.value, "positive errors shrink");
            trigonometric_before.assert_below(trigonometric.value / 1.3, "trigonometric errors grow");
        }
        before = Some([positive, trigonometric]);
    }
    Ok(())
}

/// Lemma 2: hyperbolic features are no worse than positive ones, of as many features, by
/// `1 − e^{−s}`.
#[test]
fn hyperbolic_features_are_no_worse_than_positive_ones() -> Result<()> {
    let features = 64;
    for s in [0.1, 0.5, 1.0f64] {
        let positive = Estimate::new(FeatureMapKind::Positive, ProjectionKind::Gaussian, features, 16);
        let hyperbolic = Estimate::new(FeatureMapKind::Hyperbolic, ProjectionKind::Gaussian, features / 2, 16);
        let (positive, hyperbolic) = (positive.squared(s, 1.0, 3000)?, hyperbolic.squared(s, 1.0, 3000)?);
        hyperbolic.assert_is((s.cosh() - 1.0) / (features / 2) as f64, "hyperbolic");
        let gap = positive.value - hyperbolic.value;
        let error = positive.error.hypot(hyperbolic.error);
        assert!(gap > ALLOWED * error, "s={s}: {hyperbolic:?} is not below {positive:?}");
    }
    Ok(())
}

/// Theorem 2: with orthogonal rows the error of positive features lies below that of independent
/// ones by a margin, and is what the covariance of two orthogonal rows makes it,
/// `E e^{(ω₁+ω₂)·z} = ₁F₁(d; d/2; ‖z‖²/2)`.
#[test]
fn orthogonal_rows_keep_the_bound_of_theorem_2() -> Result<()> {
    for (m, d) in [(2, 2), (4, 4), (3, 5)] {
        let (n, dim) = (m as f64, d as f64);
        for s in [0.3, 0.8f64] {
            let estimate = Estimate::new(FeatureMapKind::Positive, ProjectionKind::Orthogonal, m, d);
            let measured = estimate.squared(s, 1.0, 8000)?;
            let independent = s.exp_m1() / n;
            let bound = independent - 2.0 * (n - 1.0) / (n * (dim + 2.0)) * (-(-s / 2.0).exp_m1()).powi(2);
            let covariance = kummer(dim, dim / 2.0, s / 2.0) * (-s).exp() - 1.0;
            let what = format!("m={m} d={d} s={s}");
            measured.assert_is(independent + (n - 1.0) / n * covariance, &what);
            measured.assert_below(bound, &what);
        }
    }
    // These draws can see that gain.
    let measured = Estimate::new(FeatureMapKind::Positive, ProjectionKind::Orthogonal, 4, 4).squared(0.8, 1.0, 8000)?;
    let independent = 0.8f64.exp_m1() / 4.0;
    assert!(measured.value + ALLOWED * measured.error < independent, "{measured:?} against {independent}");
    Ok(())
}

/// Theorem 1: rows of length √d estimate the regularised kernel, which lies between `1 − 2/d^{1/3}`
/// times the softmax kernel and itself.
#[test]
fn rows_of_length_sqrt_d_estimate_the_regularised_kernel() -> Result<()> {
    for d in [12, 48] {
        let s = 2.0f64;
        let half = d as f64 / 2.0;
        let estimate = Estimate {
            radii: Radii::Sqrt,
            ..Estimate::new(FeatureMapKind::Positive, ProjectionKind::Orthogonal, d, d)
        };
        let mean = Mean::of(&estimate.errors(s, 1.0, 2000)?, |e| 1.0 + e);
        // The expected value is E e^{√d u·z} over directions u.
        mean.assert_is(bessel(half, half * s / 2.0) * (-s / 2.0).exp(), &format!("d={d}"));
        assert!((1.0 - 2.0 * (d as f64).powf(-1.0 / 3.0)..=1.0).contains(&mean.value), "d={d}: {mean:?}");
    }
    Ok(())
}
