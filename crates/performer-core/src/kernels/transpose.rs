//! Transposing tiles: in blocks of 8×8 by AVX shuffles where the machine has them, and one entry at
//! a time elsewhere.

/// Transposes a tile: `to[j·to_stride + i] = from[i·from_stride + j]` for `i` below `rows` and `j`
/// below `columns`.
pub(super) fn transpose(
    from: &[f32],
    from_stride: usize,
    [rows, columns]: [usize; 2],
    to: &mut [f32],
    to_stride: usize,
) {
    #[cfg(target_arch = "x86_64")]
    let [block_rows, block_columns] = x86::blocks(from, from_stride, [rows, columns], to, to_stride);
    #[cfg(not(target_arch = "x86_64"))]
    let [block_rows, block_columns] = [0, 0];
    for i in 0..rows {
        let done = if i < block_rows { block_columns } else { 0 };
        for j in done..columns {
            to[j * to_stride + i] = from[i * from_stride + j];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use pulp::{Arch, Simd, WithSimd, bytemuck::cast, f32x8, x86::V3};

    use super::super::instructions::arch;

    /// Transposes the whole 8×8 blocks of a tile and returns how many rows and columns they cover.
    pub(super) fn blocks(
        from: &[f32],
        from_stride: usize,
        [rows, columns]: [usize; 2],
        to: &mut [f32],
        to_stride: usize,
    ) -> [usize; 2] {
        let Some(simd) = V3::try_new().filter(|_| !matches!(arch(), Arch::Scalar)) else { return [0, 0] };
        let (rows, columns) = (rows / 8 * 8, columns / 8 * 8);
        Simd::vectorize(simd, Blocks { simd, from, from_stride, rows, columns, to, to_stride });
        [rows, columns]
    }

    struct Blocks<'a> {
        simd: V3,
        from: &'a [f32],
        from_stride: usize,
        rows: usize,
        columns: usize,
        to: &'a mut [f32],
        to_stride: usize,
    }

    impl WithSimd for Blocks<'_> {
        type Output = ();

        #[inline(always)]
        fn with_simd<S: Simd>(self, _: S) {
            for i in (0..self.rows).step_by(8) {
                for j in (0..self.columns).step_by(8) {
                    let row = |r: usize| {
                        let start = (i + r) * self.from_stride + j;
                        let (head, _) = V3::as_simd_f32s(&self.from[start..start + 8]);
                        head[0]
                    };
                    let block = transposed(self.simd, std::array::from_fn(row));
                    for (r, row) in block.into_iter().enumerate() {
                        let start = (j + r) * self.to_stride + i;
                        V3::as_mut_simd_f32s(&mut self.to[start..start + 8]).0[0] = row;
                    }
                }
            }
        }
    }

    /// Transposes an 8×8 block: interleaves pairs of rows, then pairs of those, then exchanges
    /// halves.
    #[inline(always)]
    fn transposed(simd: V3, rows: [f32x8; 8]) -> [f32x8; 8] {
        let avx = simd.avx;
        let r = rows.map(cast);
        let low = |a, b| avx._mm256_unpacklo_ps(a, b);
        let high = |a, b| avx._mm256_unpackhi_ps(a, b);
        let pairs = [
            low(r[0], r[1]),
            high(r[0], r[1]),
            low(r[2], r[3]),
            high(r[2], r[3]),
            low(r[4], r[5]),
            high(r[4], r[5]),
            low(r[6], r[7]),
            high(r[6], r[7]),
        ];
        let first = |a, b| avx._mm256_shuffle_ps::<0b01_00_01_00>(a, b);
        let second = |a, b| avx._mm256_shuffle_ps::<0b11_10_11_10>(a, b);
        let quads = [
            first(pairs[0], pairs[2]),
            second(pairs[0], pairs[2]),
            first(pairs[1], pairs[3]),
            second(pairs[1], pairs[3]),
            first(pairs[4], pairs[6]),
            second(pairs[4], pairs[6]),
            first(pairs[5], pairs[7]),
            second(pairs[5], pairs[7]),
        ];
        std::array::from_fn(|i| {
            let (a, b) = (quads[i % 4], quads[i % 4 + 4]);
            cast(if i < 4 {
                avx._mm256_permute2f128_ps::<0x20>(a, b)
            } else {
                avx._mm256_permute2f128_ps::<0x31>(a, b)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_of_every_shape_moves() {
        for (rows, columns) in [(1, 1), (8, 8), (7, 9), (64, 64), (17, 40), (40, 17), (3, 0)] {
            let (from_stride, to_stride) = (columns + 2, rows + 5);
            let from: Vec<f32> = (0..rows * from_stride).map(|i| i as f32).collect();
            let mut to = vec![-1.0; columns * to_stride];
            transpose(&from, from_stride, [rows, columns], &mut to, to_stride);
            for j in 0..columns {
                for i in 0..to_stride {
                    let want = if i < rows { from[i * from_stride + j] } else { -1.0 };
                    assert_eq!(to[j * to_stride + i], want, "{rows}x{columns} at ({i}, {j})");
                }
            }
        }
    }
}
