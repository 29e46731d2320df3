//! These tests check the distributions of projections over many seeds.

use performer_core::projection::ProjectionKind::{Gaussian, Hadamard, Orthogonal};
use performer_core::projection::{ProjectionKind, Radii, draw, draw_offsets};

fn omega(kind: ProjectionKind, radii: Radii, m: usize, d: usize, seed: u64) -> Vec<f64> {
    draw(kind, radii, m, d, seed).expect("valid arguments")
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Returns how far the mean of `samples` is from `expected`, in standard errors.
fn standard_errors(samples: &[f64], expected: f64) -> f64 {
    let n = samples.len() as f64;
    let mean = samples.iter().sum::<f64>() / n;
    let variance = samples.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean - expected) / (variance / n).sqrt()
}

/// Computes Q of the QR decomposition of a square row-major matrix, by Householder's reflections as
/// LAPACK does it: R's diagonal has whatever signs it gets. With `fix_signs`, Q's columns are
/// multiplied by them.
fn householder_q(matrix: &[f64], d: usize, fix_signs: bool) -> Vec<f64> {
    let mut r = matrix.to_vec();
    let mut q: Vec<f64> = (0..d * d).map(|i| f64::from(i / d == i % d)).collect();
    for k in 0..d - 1 {
        let mut v: Vec<f64> = (0..d).map(|i| if i < k { 0.0 } else { r[i * d + k] }).collect();
        v[k] += dot(&v, &v).sqrt().copysign(v[k]);
        let scale = 2.0 / dot(&v, &v);
        for j in 0..d {
            let along = scale * (0..d).map(|i| v[i] * r[i * d + j]).sum::<f64>();
            (0..d).for_each(|i| r[i * d + j] -= along * v[i]);
            let along = scale * dot(&q[j * d..][..d], &v);
            (0..d).for_each(|i| q[j * d + i] -= along * v[i]);
        }
    }
    if fix_signs {
        (0..d * d).for_each(|i| q[i] *= r[(i % d) * (d + 1)].signum());
    }
    q
}

fn transposed(matrix: &[f64], d: usize) -> Vec<f64> {
    (0..d * d).map(|i| matrix[(i % d) * d + i / d]).collect()
}

/// Cosines between blocks average to zero over seeds; blocks seeded alike, or differing by signs,
/// would not.
#[test]
fn blocks_are_uncorrelated() {
    let d = 4;
    for kind in [Gaussian, Orthogonal, Hadamard] {
        for j in 0..d {
            let cosines: Vec<f64> = (0..2000)
                .map(|seed| {
                    let drawn = omega(kind, Radii::Sqrt, 2 * d, d, seed);
                    dot(&drawn[..d], &drawn[(d + j) * d..][..d])
                })
                .collect();
            let off = standard_errors(&cosines, 0.0);
            assert!(off.abs() < 4.0, "{kind}: rows 0 and {}: {off} standard errors", d + j);
        }
    }
}

#[test]
fn chi_lengths_are_those_of_gaussian_vectors() {
    for (kind, d) in [(Gaussian, 16), (Orthogonal, 3), (Orthogonal, 16), (Hadamard, 16)] {
        let drawn = omega(kind, Radii::Chi, 4000, d, 3);
        let squares: Vec<f64> = drawn.chunks_exact(d).map(|row| dot(row, row)).collect();
        let d = d as f64;
        let mean = standard_errors(&squares, d);
        let spread: Vec<f64> = squares.iter().map(|s| (s - d).powi(2)).collect();
        let spread = standard_errors(&spread, 2.0 * d);
        assert!(mean.abs() < 3.0, "{kind}, d = {d}: E‖ω‖² is off by {mean} standard errors");
        assert!(spread.abs() < 3.0, "{kind}, d = {d}: Var‖ω‖² is off by {spread} standard errors");
    }
}

#[test]
fn orthogonal_is_the_sign_corrected_qr_of_the_gaussian() {
    for d in [1, 2, 5, 32] {
        let gaussian = omega(Gaussian, Radii::Chi, d, d, 6);
        let expected = transposed(&householder_q(&transposed(&gaussian, d), d, true), d);
        let drawn = omega(Orthogonal, Radii::Sqrt, d, d, 6);
        for (got, expected) in drawn.iter().zip(expected) {
            let got = got / (d as f64).sqrt();
            assert!((got - expected).abs() < 1e-12, "d = {d}: {got}, expected {expected}");
        }
    }
}

/// Computes the moments that distinguish the Haar distribution on O(d) from its imitations, and
/// returns the largest of them in absolute standard errors: E Q_ij = 0 for all i, j; E (tr Q)² = 1;
/// E tr Q² = 1; and E e^{√d q_i·z} for a unit vector z, the bias of a kernel estimate, which is the
/// same for every row i and every z.
fn haar_deviation(d: usize, draws: &[Vec<f64>]) -> f64 {
    let over = |f: &dyn Fn(&[f64]) -> f64, expected| {
        standard_errors(&draws.iter().map(|q| f(q)).collect::<Vec<_>>(), expected).abs()
    };
    let trace = |q: &[f64]| (0..d).map(|i| q[i * (d + 1)]).sum::<f64>();
    let mut worst = over(&|q| trace(q).powi(2), 1.0).max(over(&|q| dot(q, &transposed(q, d)), 1.0));
    // E e^{s q·z} over the sphere: the Bessel series Σ s^{2k} / (2^k k! d (d+2) … (d+2k−2)), here
    // s² = d.
    let (mut kernel, mut term) = (1.0, 1.0);
    for k in 1..40 {
        let k = f64::from(k);
        term *= d as f64 / (2.0 * k * (d as f64 + 2.0 * k - 2.0));
        kernel += term;
    }
    for i in 0..d * d {
        worst = worst.max(over(&|q| q[i], 0.0));
        worst = worst.max(over(&|q| ((d as f64).sqrt() * q[i]).exp(), kernel));
    }
    worst
}

#[test]
fn orthogonal_blocks_are_haar_distributed() {
    let d = 4;
    let seeds = 0..4000;
    let drawn: Vec<Vec<f64>> = seeds
        .clone()
        .map(|seed| omega(Orthogonal, Radii::Sqrt, d, d, seed).iter().map(|w| w / (d as f64).sqrt()).collect())
        .collect();
    let deviation = haar_deviation(d, &drawn);
    assert!(deviation < 3.5, "{deviation} standard errors"); // the largest of 34 statistics

    // The statistics have the power to tell: Householder QR without the sign fix is far outside.
    let unsigned: Vec<Vec<f64>> =
        seeds.map(|seed| householder_q(&omega(Gaussian, Radii::Chi, d, d, seed), d, false)).collect();
    let deviation = haar_deviation(d, &unsigned);
    assert!(deviation > 30.0, "{deviation} standard errors");
}

#[test]
fn directions_are_uniform_on_the_sphere() {
    for d in [2, 3, 8] {
        let expected = 3.0 / (d * (d + 2)) as f64;
        for row in [0, d - 1, d] {
            let fourth: Vec<f64> = (0..4000)
                .map(|seed| {
                    let drawn = omega(Orthogonal, Radii::Sqrt, d + 1, d, seed);
                    (drawn[row * d + seed as usize % d] / (d as f64).sqrt()).powi(4)
                })
                .collect();
            let off = standard_errors(&fourth, expected);
            assert!(off.abs() < 4.0, "d = {d}, row {row}: E q⁴ is off by {off} standard errors");
        }
    }
}

/// E e^{ω·z} = e^{‖z‖²/2} is all that positive features need to be unbiased.
#[test]
fn chi_rows_estimate_the_softmax_kernel_without_bias() {
    let (m, d) = (12, 8);
    let spread = [0.6, -0.3, 0.2, 0.9, -0.5, 0.1, -0.7, 0.4];
    let mut axis = [0.0; 8];
    axis[0] = 1.5;
    for kind in [Gaussian, Orthogonal] {
        for z in [spread, axis, axis.map(|z| -z)] {
            let estimates: Vec<f64> = (0..4000)
                .map(|seed| {
                    let drawn = omega(kind, Radii::Chi, m, d, seed);
                    drawn.chunks_exact(d).map(|row| dot(row, &z).exp()).sum::<f64>() / m as f64
                })
                .collect();
            let off = standard_errors(&estimates, (dot(&z, &z) / 2.0).exp());
            assert!(off.abs() < 3.0, "{kind}, z = {z:?}: biased by {off} standard errors");
        }
    }
}

#[test]
fn hadamard_entries_have_mean_0_and_variance_1() {
    for d in [1, 4, 5] {
        for i in 0..3 * d {
            let entries: Vec<f64> = (0..1000).map(|seed| omega(Hadamard, Radii::Chi, 3, d, seed)[i]).collect();
            let squares: Vec<f64> = entries.iter().map(|w| w * w).collect();
            let off = [standard_errors(&entries, 0.0), standard_errors(&squares, 1.0)];
            assert!(off.iter().all(|off| off.abs() < 4.0), "d = {d}, entry {i}: {off:?} standard errors");
        }
    }
}

/// D₃ gives every entry of a row a sign of its own, so any product of different entries averages 0.
#[test]
fn hadamard_entries_have_independent_signs() {
    let product = |w: Vec<f64>| w[0] * w[1] * w[2] * w[3];
    let products: Vec<f64> = (0..1000).map(|seed| product(omega(Hadamard, Radii::Sqrt, 1, 4, seed))).collect();
    let off = standard_errors(&products, 0.0);
    assert!(off.abs() < 4.0, "{off} standard errors");
}

#[test]
fn offsets_are_uniform_phases() {
    let offsets = draw_offsets(20_000, 3).unwrap();
    assert!(offsets.iter().all(|b| (0.0..std::f64::consts::TAU).contains(b)));
    for harmonic in 1..4 {
        let cosines: Vec<f64> = offsets.iter().map(|b| (b * f64::from(harmonic)).cos()).collect();
        let off = standard_errors(&cosines, 0.0);
        assert!(off.abs() < 3.0, "harmonic {harmonic}: {off} standard errors");
    }
    let mean = standard_errors(&offsets, std::f64::consts::PI);
    assert!(mean.abs() < 3.0, "mean: {mean} standard errors");

    // Box and Muller's angle of a pair of normals is such a phase too, and must not be the same.
    let normals = omega(Gaussian, Radii::Chi, 100, 2, 3);
    for pair in normals.chunks_exact(2) {
        let angle = pair[1].atan2(pair[0]).rem_euclid(std::f64::consts::TAU);
        assert!(offsets.iter().all(|b| (b - angle).abs() > 1e-12), "an offset is used twice");
    }
}
