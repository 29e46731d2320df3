//! Haar-distributed orthogonal blocks: Gram-Schmidt on Gaussian rows.

use super::rng::Rng;

/// Fills `block`, at most `d` rows of `d` numbers, with orthonormal rows: the first rows of a
/// matrix from the Haar (uniform) distribution on the orthogonal group.
///
/// Gram-Schmidt on the rows of a Gaussian matrix G writes Gᵀ = QR where R's diagonal holds the
/// norms it divides by, all positive. That is what makes Q Haar: with the signs fixed, QR is
/// unique, so turning G by an orthogonal U (which leaves its distribution alone) turns Q by U. A
/// library's Householder QR picks the signs of R's diagonal from its input instead, for stability;
/// its Q is not uniform (Q₁₁ is never positive) until every column is multiplied by the sign of R's
/// diagonal ([Mezzadri, 2007](https://arxiv.org/abs/math-ph/0609050)), and a kernel estimate from
/// it is biased.
pub(super) fn fill_block(rng: &mut Rng, d: usize, block: &mut [f64]) {
    rng.fill_normal(block);
    for start in (0..block.len()).step_by(d) {
        let (done, rest) = block.split_at_mut(start);
        let row = &mut rest[..d];
        // Once leaves errors as large as the row's loss of length allows; twice is enough for full
        // precision.
        for _ in 0..2 {
            for unit in done.chunks_exact(d) {
                let along = dot(unit, row);
                row.iter_mut().zip(unit).for_each(|(w, u)| *w -= along * u);
            }
        }
        let norm = dot(row, row).sqrt();
        row.iter_mut().for_each(|w| *w /= norm);
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
