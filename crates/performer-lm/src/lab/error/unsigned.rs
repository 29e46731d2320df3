//! This module draws orthogonal rows as the usual implementations do, with a bias, for study.
//!
//! A library's QR decomposition by Householder reflections picks the signs of R's diagonal from its
//! input. Unless Q's columns are multiplied by them, Q is not uniform over the orthogonal group
//! (Mezzadri 2007, <https://arxiv.org/abs/math-ph/0609050>): its first entry, for instance, is
//! never positive, and the kernel is estimated with a bias. Nothing but the lab uses this.

use anyhow::Result;
use performer_core::{ProjectionKind, Radii, projection};

/// Draws `m` rows of dimension `d`: Qᵀ of the decomposition of Gaussian blocks, with χ-distributed
/// lengths.
pub(super) fn draw(m: usize, d: usize, seed: u64) -> Result<Vec<f64>> {
    let blocks = m.div_ceil(d);
    let gaussian = projection::draw(ProjectionKind::Gaussian, Radii::Chi, blocks * d, d, seed)?;
    // A Gaussian draw of another seed has rows of the right lengths.
    let lengths = projection::draw(ProjectionKind::Gaussian, Radii::Chi, m, d, projection::derive_seed(seed, 1))?;
    let mut rows: Vec<f64> = gaussian.chunks_exact(d * d).flat_map(|block| transposed_q(block, d)).collect();
    rows.truncate(m * d);
    for (row, length) in rows.chunks_exact_mut(d).zip(lengths.chunks_exact(d)) {
        let length = dot(length, length).sqrt();
        row.iter_mut().for_each(|w| *w *= length);
    }
    Ok(rows)
}

/// Computes Qᵀ of `matrix = QR`, row-major, by reflections, as LAPACK does.
fn transposed_q(matrix: &[f64], d: usize) -> Vec<f64> {
    let mut r = matrix.to_vec();
    let mut q: Vec<f64> = (0..d * d).map(|i| f64::from(i / d == i % d)).collect();
    // Each reflection I − 2 v vᵀ/‖v‖² clears a column of R below its diagonal; their product,
    // applied to the identity from the left, is Qᵀ.
    for k in 0..d - 1 {
        let mut v: Vec<f64> = (0..d).map(|i| if i < k { 0.0 } else { r[i * d + k] }).collect();
        v[k] += dot(&v, &v).sqrt().copysign(v[k]);
        let scale = 2.0 / dot(&v, &v);
        for matrix in [&mut r, &mut q] {
            for column in 0..d {
                let along = scale * (k..d).map(|i| v[i] * matrix[i * d + column]).sum::<f64>();
                (k..d).for_each(|i| matrix[i * d + column] -= along * v[i]);
            }
        }
    }
    q
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_orthogonal_and_signs_are_not_fixed() {
        let d = 5;
        let mut negative = 0;
        for seed in 0..50 {
            let rows = draw(d, d, seed).unwrap();
            for i in 0..d {
                for j in 0..i {
                    assert!(dot(&rows[i * d..][..d], &rows[j * d..][..d]).abs() < 1e-10, "{seed}: {i} {j}");
                }
            }
            negative += usize::from(rows[0] <= 0.0);
        }
        // R's diagonal has −‖column‖ where the entry is positive, so Q's first entry is never
        // positive.
        assert_eq!(negative, 50);
    }

    #[test]
    fn q_times_r_is_the_matrix() {
        let d = 4;
        let matrix = projection::draw(ProjectionKind::Gaussian, Radii::Chi, d, d, 9).unwrap();
        let q = transposed_q(&matrix, d);
        for i in 0..d {
            for j in 0..i {
                // R = Qᵀ matrix is upper triangular.
                let r: f64 = (0..d).map(|k| q[i * d + k] * matrix[k * d + j]).sum();
                assert!(r.abs() < 1e-12, "{i} {j}: {r}");
            }
        }
    }
}
