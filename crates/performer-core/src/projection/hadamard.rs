//! Structured blocks `H D₁ H D₂ H D₃`: Walsh-Hadamard matrices and random signs.

use super::rng::Rng;

/// Fills `block`, at most `p` rows of `d` numbers, from `H D₁ H D₂ H D₃`, where `p` is the power of
/// two at or above `d`, H the `p × p` Walsh-Hadamard matrix over `√p` and every `D` a diagonal of
/// independent random signs. Of its columns the first `d` are kept; full rows have norm 1.
///
/// D₃ makes the entries of a row uncorrelated with mean 0, as a Gaussian's are; the other two
/// rounds bring the rest of its distribution close to the sphere's.
pub(super) fn fill_block(rng: &mut Rng, d: usize, block: &mut [f64]) {
    let p = d.next_power_of_two();
    let [d1, d2, d3] = [(); 3].map(|()| (0..p).map(|_| rng.sign()).collect::<Vec<f64>>());
    // Column by column, in integers, which are exact: the three factors 1/√p come last, at once.
    let scale = 1.0 / (p as f64 * (p as f64).sqrt());
    let mut column = vec![0.0; p];
    for j in 0..d {
        column.fill(0.0);
        column[j] = d3[j];
        walsh_hadamard(&mut column);
        flip(&mut column, &d2);
        walsh_hadamard(&mut column);
        flip(&mut column, &d1);
        walsh_hadamard(&mut column);
        for (row, w) in block.chunks_exact_mut(d).zip(&column) {
            row[j] = w * scale;
        }
    }
}

/// Multiplies by the Walsh-Hadamard matrix of entries ±1 (Sylvester's order), in `O(p log p)`.
fn walsh_hadamard(x: &mut [f64]) {
    let mut half = 1;
    while half < x.len() {
        for pair in x.chunks_exact_mut(2 * half) {
            let (low, high) = pair.split_at_mut(half);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        half *= 2;
    }
}

fn flip(x: &mut [f64], signs: &[f64]) {
    x.iter_mut().zip(signs).for_each(|(x, s)| *x *= s);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sylvester's matrix has entries (−1)^{popcount(i & j)}.
    #[test]
    fn walsh_hadamard_is_sylvesters_matrix() {
        for j in 0..8usize {
            let mut column = [0.0; 8];
            column[j] = 1.0;
            walsh_hadamard(&mut column);
            for (i, w) in column.into_iter().enumerate() {
                assert_eq!(w, if (i & j).count_ones() % 2 == 0 { 1.0 } else { -1.0 }, "entry ({i}, {j})");
            }
        }
    }
}
