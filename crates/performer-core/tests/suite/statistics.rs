//! These tests check random features as estimators: they are unbiased where they claim to be, and
//! have the variance of their closed forms.
//!
//! Seeds are fixed, so a test that passes once passes always. For a fresh seed, "within three
//! standard errors" would fail once in 370 on code that is right; and the 5% allowed to a mean
//! squared error are at least 2.9 of its standard errors (which are measured, and asserted to be
//! that small): once in 270 at worst.

use crate::common::{assert_close, tensor, values};
use candle_core::{DType, Device, Result, Tensor};
use performer_core::features::{FeatureMapKind, RandomParameters};
use performer_core::projection::{derive_seed, draw_offsets, draw_tensor};
use performer_core::{ProjectionKind, Radii};

const DEVICE: Device = Device::Cpu;
const DRAWS: u64 = 12_000;

/// A `Pair` is a pair of rows. The kernels and their variances depend only on the products of the
/// two.
struct Pair {
    x: Vec<f64>,
    y: Vec<f64>,
}

/// The pairs have lengths of 0.5 to 0.8, where fourth moments of the exponential features are still
/// tame, at acute, right and obtuse angles.
fn pairs() -> Vec<Pair> {
    let pair = |x: [f64; 4], y: [f64; 4]| Pair { x: x.to_vec(), y: y.to_vec() };
    vec![
        pair([0.5, 0.2, -0.3, 0.1], [0.4, 0.3, 0.1, -0.2]),
        pair([0.6, 0.0, 0.4, 0.0], [0.0, 0.5, 0.0, -0.2]),
        pair([0.5, -0.4, 0.1, 0.1], [-0.4, 0.3, 0.2, 0.1]),
    ]
}

impl Pair {
    fn dot(&self) -> f64 {
        self.x.iter().zip(&self.y).map(|(x, y)| x * y).sum()
    }

    fn norms(&self) -> (f64, f64) {
        let square = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>();
        (square(&self.x), square(&self.y))
    }

    /// Returns `‖x + y‖²`.
    fn sum(&self) -> f64 {
        self.norms().0 + self.norms().1 + 2.0 * self.dot()
    }

    /// Returns `‖x − y‖²`.
    fn difference(&self) -> f64 {
        self.norms().0 + self.norms().1 - 2.0 * self.dot()
    }

    /// Returns `SM(x, y) = e^{x·y}`.
    fn softmax(&self) -> f64 {
        self.dot().exp()
    }

    /// Computes the mean and variance of `f(u, w)` with `u = ω·x`, `w = ω·y`, `ω ~ N(0, I)`: the
    /// trapezoid rule on a Gaussian converges faster than any power of the step.
    fn moments(&self, f: impl Fn(f64, f64) -> f64) -> (f64, f64) {
        let (nx, ny) = self.norms();
        let length = nx.sqrt();
        let along = self.dot() / length;
        let across = (ny - along * along).sqrt();
        let (step, reach) = (0.1, 100);
        let (mut mean, mut square) = (0.0, 0.0);
        for i in -reach..=reach {
            for j in -reach..=reach {
                let (a, b) = (f64::from(i) * step, f64::from(j) * step);
                let weight = (-0.5 * (a * a + b * b)).exp() * step * step / std::f64::consts::TAU;
                let value = f(length * a, along * a + across * b);
                mean += weight * value;
                square += weight * value * value;
            }
        }
        (mean, square - mean * mean)
    }
}

/// `Errors` holds the mean of the errors, the mean of their squares, and the standard errors of
/// both.
struct Errors {
    mean: f64,
    mean_error: f64,
    square: f64,
    square_error: f64,
}

impl Errors {
    fn of(errors: &[f64]) -> Self {
        let n = errors.len() as f64;
        let mean_of = |f: &dyn Fn(f64) -> f64| errors.iter().map(|&e| f(e)).sum::<f64>() / n;
        let (mean, square, fourth) = (mean_of(&|e| e), mean_of(&|e| e * e), mean_of(&|e| e.powi(4)));
        Errors {
            mean,
            mean_error: ((square - mean * mean) / n).sqrt(),
            square,
            square_error: ((fourth - square * square) / n).sqrt(),
        }
    }
}

/// Computes the errors of independent estimates of `kernel`, for every pair: by the crate's own
/// projections, of `m` rows, and maps.
fn estimate(
    map: FeatureMapKind,
    projection: ProjectionKind,
    m: usize,
    pairs: &[Pair],
    kernel: fn(&Pair) -> f64,
) -> Result<Vec<Errors>> {
    let d = pairs[0].x.len();
    let rows = |of: fn(&Pair) -> &[f64]| {
        let rows: Vec<f64> = pairs.iter().flat_map(|pair| of(pair).to_vec()).collect();
        tensor(&rows, &[pairs.len(), d], DType::F64, &DEVICE)
    };
    let (x, y) = (rows(|pair| &pair.x)?, rows(|pair| &pair.y)?);
    let mut errors = vec![Vec::new(); pairs.len()];
    for draw in 0..DRAWS {
        let seed = derive_seed(1, draw);
        let offsets = if map.has_offsets() { Some(Tensor::new(draw_offsets(m, seed)?, &DEVICE)?) } else { None };
        let projection = draw_tensor(projection, Radii::Chi, m, d, seed, DType::F64, &DEVICE)?;
        let map = map.build(d, Some(&RandomParameters { projection, offsets }), &DEVICE)?;
        let estimates = map.kernel(&x, &y)?.to_vec2::<f64>()?;
        for (i, pair) in pairs.iter().enumerate() {
            errors[i].push(estimates[i][i] - kernel(pair));
        }
    }
    Ok(errors.iter().map(|errors| Errors::of(errors)).collect())
}

/// The rows of an estimate. More rows do not make its error relatively more precise, only closer to
/// normal: errors of few rows have the heavy tails of the features.
const M: usize = 128;

/// Checks that estimates are unbiased and have the mean squared error that a closed form gives,
/// `variance(pair) / m`.
#[track_caller]
fn assert_unbiased(
    map: FeatureMapKind,
    m: usize,
    pairs: &[Pair],
    kernel: fn(&Pair) -> f64,
    variance: fn(&Pair) -> f64,
) -> Result<()> {
    let all = estimate(map, ProjectionKind::Gaussian, m, pairs, kernel)?;
    for (i, (pair, errors)) in pairs.iter().zip(all).enumerate() {
        let Errors { mean, mean_error, square, square_error } = errors;
        assert!(mean.abs() < 3.0 * mean_error, "{map}, pair {i}: bias {mean} ± {mean_error} of {}", kernel(pair));
        let expected = variance(pair) / m as f64;
        assert!(square_error < 0.05 / 2.9 * expected, "{map}, pair {i}: too few draws, {square} ± {square_error}");
        let ratio = square / expected;
        assert!((ratio - 1.0).abs() < 0.05, "{map}, pair {i}: MSE {square} is {ratio} of {expected}");
    }
    Ok(())
}

fn positive_variance(pair: &Pair) -> f64 {
    pair.sum().exp() * pair.softmax().powi(2) * (1.0 - (-pair.sum()).exp())
}

#[test]
fn positive_features() -> Result<()> {
    assert_unbiased(FeatureMapKind::Positive, M, &pairs(), Pair::softmax, positive_variance)
}

#[test]
fn hyperbolic_features() -> Result<()> {
    assert_unbiased(FeatureMapKind::Hyperbolic, M, &pairs(), Pair::softmax, |pair| {
        0.5 * (1.0 - (-pair.sum()).exp()) * positive_variance(pair)
    })
}

#[test]
fn trigonometric_features() -> Result<()> {
    assert_unbiased(FeatureMapKind::Trigonometric, M, &pairs(), Pair::softmax, |pair| {
        pair.sum().exp() * pair.softmax().powi(-2) * (1.0 - (-pair.difference()).exp()).powi(2) / 2.0
    })
}

/// Here `2 cos(u + b) cos(w + b) = cos(u − w) + cos(u + w + 2b)`, of variances
/// `(1 − e^{−‖x−y‖²})²/2` and ½, uncorrelated since b is uniform.
fn gaussian_phase_variance(pair: &Pair) -> f64 {
    (1.0 - (-pair.difference()).exp()).powi(2) / 2.0 + 0.5
}

#[test]
fn gaussian_phase_features() -> Result<()> {
    let gaussian: fn(&Pair) -> f64 = |pair| (-pair.difference() / 2.0).exp();
    assert_unbiased(FeatureMapKind::GaussianPhase, M, &pairs(), gaussian, gaussian_phase_variance)
}

#[test]
fn phase_features() -> Result<()> {
    assert_unbiased(FeatureMapKind::Phase, M, &pairs(), Pair::softmax, |pair| {
        (pair.norms().0 + pair.norms().1).exp() * gaussian_phase_variance(pair)
    })
}

#[test]
fn hermite_tail_features_are_unbiased() -> Result<()> {
    let all = estimate(FeatureMapKind::HermiteTail, ProjectionKind::Gaussian, M, &pairs(), Pair::softmax)?;
    for (i, Errors { mean, mean_error, .. }) in all.into_iter().enumerate() {
        assert!(mean.abs() < 3.0 * mean_error, "pair {i}: bias {mean} ± {mean_error}");
    }
    Ok(())
}

/// All the variance is that of the product of tails `g(x) = e^{ω·x−‖x‖²/2} − h₂(x)`. It has a
/// twelfth power of ω in it, so its own estimate has a 24th, and no feasible number of draws
/// suffices: here the rows of Ω are a grid of the plane instead, and the features of the crate are
/// integrated over it.
#[test]
fn hermite_tail_features_have_the_variance_of_the_tail() -> Result<()> {
    let (step, reach) = (0.1, 100);
    let axis = || (-reach..=reach).map(|i| f64::from(i) * step);
    let nodes: Vec<[f64; 2]> = axis().flat_map(|a| axis().map(move |b| [a, b])).collect();
    let weight = |[a, b]: [f64; 2]| (-0.5 * (a * a + b * b)).exp() * step * step / std::f64::consts::TAU;
    let m = nodes.len();
    let projection = tensor(&nodes.concat(), &[m, 2], DType::F64, &DEVICE)?;
    let map = FeatureMapKind::HermiteTail.build(2, Some(&RandomParameters { projection, offsets: None }), &DEVICE)?;
    for (x, y) in [([0.6, 0.2], [0.5, -0.3]), ([0.6, 0.2], [-0.3, 0.5])] {
        let pair = Pair { x: x.to_vec(), y: y.to_vec() };
        let features = |x: &[f64]| -> Result<Vec<f64>> {
            let features = map.features(&tensor(x, &[1, 2], DType::F64, &DEVICE)?)?.materialize()?;
            values(&features)
        };
        let (phi_x, phi_y) = (features(&pair.x)?, features(&pair.y)?);
        // There are six features of Taylor-2 in two dimensions, then the tail's.
        let taylor: f64 = (0..6).map(|f| phi_x[f] * phi_y[f]).sum();
        let rows =
            || nodes.iter().zip(phi_x[6..].iter().zip(&phi_y[6..])).map(|(&n, (x, y))| (weight(n), x * y * m as f64));
        let mean: f64 = rows().map(|(weight, row)| weight * row).sum();
        let variance = rows().map(|(weight, row)| weight * row * row).sum::<f64>() - mean * mean;

        let (nx, ny) = pair.norms();
        let tail = |u: f64, norm: f64| (u - norm / 2.0).exp() - (1.0 + u + (u * u - norm) / 2.0);
        let (tail_mean, tail_variance) = pair.moments(|u, w| tail(u, nx) * tail(w, ny));
        let z = pair.dot();
        let rest = z.exp() - (1.0 + z + z * z / 2.0);
        assert_close("Taylor-2", &[1], &[taylor], &[1.0 + z + z * z / 2.0], 1e-12);
        assert_close("mean", &[2], &[mean, tail_mean], &[rest, rest], 1e-9);
        assert_close("variance", &[1], &[variance], &[tail_variance], 1e-9);
        assert!(variance < 0.05 * positive_variance(&pair), "{variance}");
    }
    Ok(())
}

/// The integration in this file is checked against a closed form.
#[test]
fn numerical_moments_are_those_of_the_positive_features() {
    for pair in pairs() {
        let (nx, ny) = pair.norms();
        let (mean, variance) = pair.moments(|u, w| (u + w - (nx + ny) / 2.0).exp());
        assert!((mean - pair.softmax()).abs() < 1e-12);
        assert!((variance / positive_variance(&pair) - 1.0).abs() < 1e-12);
    }
}

/// Blocks of orthogonal rows with radii of their own are as unbiased as independent rows, and have
/// less variance. (A QR decomposition without its sign fix is biased by up to 15%.)
#[test]
fn orthogonal_rows_are_unbiased_and_better() -> Result<()> {
    // The last pair is left out: x + y is almost nothing there, and so is what orthogonality gains.
    let pairs = &pairs()[..2];
    for map in [FeatureMapKind::Positive, FeatureMapKind::Trigonometric] {
        let independent = estimate(map, ProjectionKind::Gaussian, M, pairs, Pair::softmax)?;
        let orthogonal = estimate(map, ProjectionKind::Orthogonal, M, pairs, Pair::softmax)?;
        for (i, (orthogonal, independent)) in orthogonal.iter().zip(&independent).enumerate() {
            let Errors { mean, mean_error, square, square_error } = orthogonal;
            assert!(mean.abs() < 3.0 * mean_error, "{map}, pair {i}: bias {mean} ± {mean_error}");
            let margin = 3.0 * (square_error.powi(2) + independent.square_error.powi(2)).sqrt();
            assert!(
                square + margin < independent.square,
                "{map}, pair {i}: MSE {square} orthogonal, {} independent, difference in doubt by {margin}",
                independent.square
            );
        }
    }
    Ok(())
}
