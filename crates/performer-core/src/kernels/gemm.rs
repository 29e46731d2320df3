//! Products of small row-major tiles that lie in the caches: where attention and cross-entropy
//! spend most of their time.
//!
//! `C (m, n) += A (m, k) · B (k, n)` with a tile of `C` in registers, a few rows by two vectors.
//! Entries of `A` are broadcast, so `A` may have any strides (a transposed tile costs nothing);
//! rows of `B` and `C` are read as whole vectors. The terms of an entry are added in the order of
//! `k`, in runs of [`TERMS`] whose sums are added to `C`, whatever the shape around it: a row of a
//! product has the same bits in a tall tile and in a low one.

use pulp::{Simd, WithSimd};

use super::vector::LANES;

/// The rows of `C` in registers at once: with two vectors a row, enough independent sums to hide
/// the latency of a fused multiply-add.
const ROWS: usize = 8;
/// The rows of `C` in registers at once where a row is one vector: as many sums as `ROWS` by two.
const ROWS_OF_ONE: usize = 16;
/// The rows of `C` in registers at once where the machine has 16 vector registers.
const ROWS_OF_16: usize = 4;
/// The terms of a run. All rows of `A` meet the same `TERMS` by `VECTORS` vectors of `B`, at most
/// 18 KiB, which stay in a first-level cache of 32 KiB.
const TERMS: usize = 144;
/// The vectors of a row of `C` in registers at once.
const VECTORS: usize = 2;

/// `Left` is the left factor: entry `(i, p)` is `values[i·row + p·column]`.
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub(super) values: &'a [f32],
    pub(super) row: usize,
    pub(super) column: usize,
}

impl<'a> Left<'a> {
    /// A factor whose rows are `stride` apart.
    pub(super) fn rows(values: &'a [f32], stride: usize) -> Self {
        Self { values, row: stride, column: 1 }
    }

    /// The transpose of a tile with rows `stride` apart.
    pub(super) fn transposed(values: &'a [f32], stride: usize) -> Self {
        Self { values, row: 1, column: stride }
    }

    /// The factor without its first `p` columns.
    fn after(self, p: usize) -> Self {
        Self { values: &self.values[p * self.column..], ..self }
    }
}

/// `Right` is the right factor: entry `(p, j)` is `values[p·stride + j]`.
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub(super) values: &'a [f32],
    pub(super) stride: usize,
}

impl Right<'_> {
    /// The factor without its first `p` rows.
    fn after(self, p: usize) -> Self {
        Self { values: &self.values[p * self.stride..], ..self }
    }
}

/// `Accumulate` says whether a product is added to what `C` holds or takes its place.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Accumulate {
    No,
    Yes,
}

/// Computes `C = A·B` or `C += A·B` for `C` `(m, n)` with rows `stride` apart and `k` terms an
/// entry. `n` is a multiple of [`LANES`].
#[inline(always)]
pub(super) fn gemm<S: Simd>(
    simd: S,
    mut accumulate: Accumulate,
    [m, n, k]: [usize; 3],
    a: Left,
    b: Right,
    c: &mut [f32],
    stride: usize,
) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(n.is_multiple_of(LANES) && (m - 1) * stride + n <= c.len());
    assert!(k == 0 || (m - 1) * a.row + (k - 1) * a.column < a.values.len());
    assert!(k == 0 || (k - 1) * b.stride + n <= b.values.len());
    let mut start = 0;
    // With no terms at all there is still one run, which writes zeros.
    while start < k.max(1) {
        let (a, b) = (a.after(start), b.after(start));
        simd.vectorize(Gemm { accumulate, m, n, k: TERMS.min(k - start), a, b, c: &mut *c, stride });
        (accumulate, start) = (Accumulate::Yes, start + TERMS);
    }
}

/// `Gemm` is one run of terms of a product.
struct Gemm<'a> {
    accumulate: Accumulate,
    m: usize,
    n: usize,
    k: usize,
    a: Left<'a>,
    b: Right<'a>,
    c: &'a mut [f32],
    stride: usize,
}

impl WithSimd for Gemm<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) {
        const { assert!(LANES.is_multiple_of(S::F32_LANES)) };
        let width = VECTORS * S::F32_LANES;
        let mut j = 0;
        while j + width <= self.n {
            self.columns::<S, VECTORS>(simd, j);
            j += width;
        }
        while j < self.n {
            self.columns::<S, 1>(simd, j);
            j += S::F32_LANES;
        }
    }
}

impl Gemm<'_> {
    /// Computes `NV` vectors of columns from column `j` on.
    #[inline(always)]
    fn columns<S: Simd, const NV: usize>(&mut self, simd: S, j: usize) {
        let mut i = 0;
        if S::REGISTER_COUNT >= 32 {
            while NV == 1 && i + ROWS_OF_ONE <= self.m {
                self.tile::<S, ROWS_OF_ONE, NV>(simd, i, j);
                i += ROWS_OF_ONE;
            }
            while i + ROWS <= self.m {
                self.tile::<S, ROWS, NV>(simd, i, j);
                i += ROWS;
            }
        }
        while i + ROWS_OF_16 <= self.m {
            self.tile::<S, ROWS_OF_16, NV>(simd, i, j);
            i += ROWS_OF_16;
        }
        while i < self.m {
            self.tile::<S, 1, NV>(simd, i, j);
            i += 1;
        }
    }

    /// Computes a tile of `MR` rows by `NV` vectors in registers, from row `i` and column `j` on.
    #[inline(always)]
    fn tile<S: Simd, const MR: usize, const NV: usize>(&mut self, simd: S, i: usize, j: usize) {
        let (a_row, a_column, b_stride) = (self.a.row, self.a.column, self.b.stride);
        let mut sums = [[simd.splat_f32s(0.0); NV]; MR];
        // SAFETY: `gemm` has checked that rows below m, columns below n (a multiple of the vector)
        // and terms below k lie inside the three slices; the MR rows from i and the NV vectors from
        // j are among them.
        unsafe {
            // A pointer for each row: one that walked from row to row would be a chain of additions
            // as long as the products take.
            let a: [*const f32; MR] = std::array::from_fn(|r| self.a.values.as_ptr().wrapping_add((i + r) * a_row));
            let mut at = 0;
            let mut b = self.b.values.as_ptr().wrapping_add(j);
            for _ in 0..self.k {
                let mut vectors = [simd.splat_f32s(0.0); NV];
                for (v, vector) in vectors.iter_mut().enumerate() {
                    *vector = b.add(v * S::F32_LANES).cast::<S::f32s>().read_unaligned();
                }
                for (r, sums) in sums.iter_mut().enumerate() {
                    let entry = simd.splat_f32s(*a[r].wrapping_add(at));
                    for (sum, vector) in sums.iter_mut().zip(vectors) {
                        *sum = simd.mul_add_e_f32s(entry, vector, *sum);
                    }
                }
                at += a_column;
                b = b.wrapping_add(b_stride);
            }
            for (r, sums) in sums.into_iter().enumerate() {
                for (v, sum) in sums.into_iter().enumerate() {
                    let c = self.c.as_mut_ptr().add((i + r) * self.stride + j + v * S::F32_LANES).cast::<S::f32s>();
                    let value = match self.accumulate {
                        Accumulate::No => sum,
                        Accumulate::Yes => simd.add_f32s(c.read_unaligned(), sum),
                    };
                    c.write_unaligned(value);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use pulp::Scalar;

    use super::{super::instructions::arch, *};

    struct Product<'a>([usize; 3], Left<'a>, Right<'a>, Accumulate, &'a mut [f32], usize);

    impl WithSimd for Product<'_> {
        type Output = ();
        fn with_simd<S: Simd>(self, simd: S) {
            gemm(simd, self.3, self.0, self.1, self.2, self.4, self.5);
        }
    }

    fn numbers(n: usize) -> Vec<f32> {
        (0..n).map(|i| ((i * 37 + 11) % 23) as f32 - 11.0).collect()
    }

    #[test]
    fn products_of_every_shape_match_the_definition() {
        // Small integers: every sum is exact, so any order must give the same bits.
        for (m, n, k) in [
            (1, 16, 1),
            (3, 16, 5),
            (8, 32, 7),
            (13, 48, 64),
            (64, 80, 0),
            (29, 64, 33),
            (1, 16, TERMS + 5),
            (11, 48, 2 * TERMS + 5),
        ] {
            // Miri takes minutes for sums over many terms; a single row of them is enough there.
            let k = if cfg!(miri) && m > 1 { k.min(3) } else { k };
            for (transposed, accumulate) in [(false, Accumulate::No), (true, Accumulate::Yes)] {
                let (pad, (a, b)) = (3, (numbers((m + 3) * (k + 3)), numbers(k * (n + 16) + n)));
                let left = if transposed { Left::transposed(&a, m + pad) } else { Left::rows(&a, k + pad) };
                let right = Right { values: &b, stride: n + 16 };
                let before = numbers(m * (n + 16));
                let mut want = before.clone();
                for i in 0..m {
                    for j in 0..n {
                        let dot: f32 =
                            (0..k).map(|p| a[i * left.row + p * left.column] * b[p * right.stride + j]).sum();
                        let old = if accumulate == Accumulate::Yes { want[i * (n + 16) + j] } else { 0.0 };
                        want[i * (n + 16) + j] = old + dot;
                    }
                }
                let mut got = before.clone();
                arch().dispatch(Product([m, n, k], left, right, accumulate, &mut got, n + 16));
                assert_eq!(got, want, "{m}x{n}x{k}, transposed {transposed}");
                let mut scalar = before;
                Scalar.vectorize(Product([m, n, k], left, right, accumulate, &mut scalar, n + 16));
                assert_eq!(scalar, want, "scalar {m}x{n}x{k}, transposed {transposed}");
            }
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_tile() {
        let (n, k) = (16, TERMS + 50);
        let a: Vec<f32> = (0..40 * k).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.73).cos()).collect();
        let right = Right { values: &b, stride: n };
        let mut tall = vec![0f32; 40 * n];
        arch().dispatch(Product([40, n, k], Left::rows(&a, k), right, Accumulate::No, &mut tall, n));
        for i in 0..40 {
            let mut one = vec![0f32; n];
            arch().dispatch(Product([1, n, k], Left::rows(&a[i * k..], k), right, Accumulate::No, &mut one, n));
            assert_eq!(one, tall[i * n..(i + 1) * n], "row {i}");
        }
    }
}
