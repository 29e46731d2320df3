//! Reading tensors head by head and row by row: any strides between tokens; f32, f16 or bf16,
//! widened to f32 one tile at a time.

use std::{borrow::Cow, ops::Range};

use candle_core::{CpuStorage, Result, backend::BackendStorage, bail};
use half::{bf16, f16};

use super::{
    gemm::{Left, Right},
    operation::Stored,
    padded,
    transpose::transpose,
    vector::LANES,
};

/// A `Span` is consecutive rows of a head, or tokens: `count` of them from `start` on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) start: usize,
    pub(super) count: usize,
}

impl Span {
    /// The span of one row.
    pub(super) fn of(row: usize) -> Self {
        Self { start: row, count: 1 }
    }
}

/// `Heads` is a tensor `(B, H, T, X)` whose rows of `X` numbers are contiguous.
#[derive(Clone, Copy)]
pub(super) struct Heads<'a> {
    values: Values<'a>,
    /// The distances between batch entries, heads and tokens.
    strides: [usize; 3],
    heads: usize,
    tokens: usize,
    pub(super) width: usize,
}

/// `Values` are the numbers of a tensor, in one of the types that the kernels read.
#[derive(Clone, Copy)]
enum Values<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    Bf16(&'a [bf16]),
}

impl<'a> Heads<'a> {
    /// The heads of a tensor of rank 4 on the CPU.
    pub(super) fn new((storage, layout): Stored<'a, CpuStorage>) -> Result<Self> {
        let (_, heads, tokens, width) = layout.shape().dims4()?;
        let (stride, start) = (layout.stride(), layout.start_offset());
        if stride[3] != 1 && width > 1 {
            bail!("a fused kernel was given rows that are not contiguous: {layout:?}");
        }
        let values = match storage {
            CpuStorage::F32(x) => Values::F32(&x[start..]),
            CpuStorage::F16(x) => Values::F16(&x[start..]),
            CpuStorage::BF16(x) => Values::Bf16(&x[start..]),
            other => bail!("a fused kernel was given {:?}; it takes f32, f16 and bf16", other.dtype()),
        };
        Ok(Self { values, strides: [stride[0], stride[1], stride[2]], heads, tokens, width })
    }

    /// The rows of the `n`-th head, counted through the batch.
    pub(super) fn head(&self, n: usize) -> Rows<'a> {
        let start = (n / self.heads) * self.strides[0] + (n % self.heads) * self.strides[1];
        // An empty tensor may have nothing at its start.
        let from = |len: usize| start.min(len);
        let values = match self.values {
            Values::F32(x) => Values::F32(&x[from(x.len())..]),
            Values::F16(x) => Values::F16(&x[from(x.len())..]),
            Values::Bf16(x) => Values::Bf16(&x[from(x.len())..]),
        };
        Rows { values, stride: self.strides[2], tokens: self.tokens, width: self.width }
    }

    /// The rows of `count` heads from the `n`-th on.
    pub(super) fn heads(&self, n: usize, count: usize) -> Vec<Rows<'a>> {
        (n..n + count).map(|n| self.head(n)).collect()
    }
}

/// `Rows` are the `T` rows of `X` numbers of one head.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    values: Values<'a>,
    stride: usize,
    pub(super) tokens: usize,
    pub(super) width: usize,
}

impl<'a> Rows<'a> {
    /// The rows of a contiguous matrix.
    pub(super) fn new(values: &'a [f32], width: usize) -> Self {
        Self { values: Values::F32(values), stride: width, tokens: values.len() / width, width }
    }

    /// The first `width` numbers of each row.
    pub(super) fn first(&self, width: usize) -> Self {
        Self { width, ..*self }
    }

    /// The `i`-th number of the row of `token`.
    pub(super) fn number(&self, token: usize, i: usize) -> f32 {
        let at = token * self.stride + i;
        match self.values {
            Values::F32(x) => x[at],
            Values::F16(x) => x[at].to_f32(),
            Values::Bf16(x) => x[at].to_f32(),
        }
    }

    /// All rows and the distance between them, if they are f32 and their length is a multiple of
    /// [`LANES`].
    pub(super) fn whole_vectors(&self) -> Option<(&'a [f32], usize)> {
        match self.values {
            Values::F32(x) if self.width.is_multiple_of(LANES) => Some((x, self.stride)),
            _ => None,
        }
    }

    /// Returns `count` rows from token `start` on as f32, with the distance between them: the
    /// tensor itself where it holds f32, else a copy widened into `scratch`.
    pub(super) fn read<'s>(&self, start: usize, count: usize, scratch: &'s mut Vec<f32>) -> (&'s [f32], usize)
    where
        'a: 's,
    {
        if let Values::F32(x) = self.values {
            return (&x[start * self.stride..], self.stride);
        }
        scratch.resize((count * self.width).max(scratch.len()), 0.0);
        self.copy(start, count, scratch, self.width);
        (scratch, self.width)
    }

    /// Copies `count` rows from token `start` on as f32 into rows `stride` apart; what lies beyond
    /// the numbers of a row is left as it was.
    pub(super) fn copy(&self, start: usize, count: usize, to: &mut [f32], stride: usize) {
        let rows = to.chunks_mut(stride).take(count).enumerate();
        let range = |j: usize| (start + j) * self.stride..(start + j) * self.stride + self.width;
        match self.values {
            Values::F32(x) => rows.for_each(|(j, to)| to[..self.width].copy_from_slice(&x[range(j)])),
            Values::F16(x) => {
                rows.for_each(|(j, to)| to.iter_mut().zip(&x[range(j)]).for_each(|(to, x)| *to = x.to_f32()))
            }
            Values::Bf16(x) => {
                rows.for_each(|(j, to)| to.iter_mut().zip(&x[range(j)]).for_each(|(to, x)| *to = x.to_f32()))
            }
        }
    }

    /// Whether the numbers of `count` rows from token `start` on are finite.
    #[inline(always)]
    pub(super) fn are_finite(&self, start: usize, count: usize) -> bool {
        // An exponent of all ones is ∞ or NaN. The check has no branches, so that it is vectorised.
        macro_rules! check {
            ($x:expr, $mask:expr) => {
                (start..start + count).all(|j| {
                    let row = &$x[j * self.stride..j * self.stride + self.width];
                    !row.iter().fold(false, |bad, x| bad | (x.to_bits() & $mask == $mask))
                })
            };
        }
        match self.values {
            Values::F32(x) => check!(x, 0x7f80_0000),
            Values::F16(x) => check!(x, 0x7c00),
            Values::Bf16(x) => check!(x, 0x7f80),
        }
    }

    /// Copies `count` rows transposed: number `d` of row `start + j` goes to `to[d·stride + j]`.
    pub(super) fn copy_transposed(
        &self,
        start: usize,
        count: usize,
        to: &mut [f32],
        stride: usize,
        scratch: &mut Vec<f32>,
    ) {
        let (rows, from) = self.read(start, count, scratch);
        transpose(rows, from, [count, self.width], to, stride);
    }
}

/// `Matrix` holds rows of a head as f32, padded to whole vectors.
pub(super) struct Matrix<'a> {
    pub(super) values: Cow<'a, [f32]>,
    stride: usize,
    /// The rows that are held: two ranges, of which the second lies behind the first.
    held: [Range<usize>; 2],
}

impl<'a> Matrix<'a> {
    /// All rows: the tensor itself if it holds f32 in whole vectors, else a copy.
    pub(super) fn new(rows: &Rows<'a>) -> Self {
        Self::of(rows, [0..0, 0..rows.tokens])
    }

    /// As [`Self::new`], but where rows are copied, those of two ranges alone, of which the second
    /// lies behind the first.
    pub(super) fn of(rows: &Rows<'a>, held: [Range<usize>; 2]) -> Self {
        if let Some((values, stride)) = rows.whole_vectors() {
            return Self { values: values.into(), stride, held: [0..0, 0..rows.tokens] };
        }
        let stride = padded(rows.width);
        let [before, after] = [held[0].len(), held[1].len()];
        let mut values = vec![0f32; (before + after) * stride];
        rows.copy(held[0].start, before, &mut values, stride);
        rows.copy(held[1].start, after, &mut values[before * stride..], stride);
        Self { values: values.into(), stride, held }
    }

    /// The numbers from row `row` on, which is held.
    fn from(&self, row: usize) -> &[f32] {
        let [before, after] = &self.held;
        let place = if row < after.start { row - before.start } else { before.len() + row - after.start };
        &self.values[place * self.stride..]
    }

    /// One row of a matrix `width` wide.
    pub(super) fn row(&self, row: usize, width: usize) -> &[f32] {
        &self.from(row)[..width]
    }

    /// The rows from `row` on, as the left factor of a product.
    pub(super) fn left(&self, row: usize) -> Left<'_> {
        Left::rows(self.from(row), self.stride)
    }

    /// The rows from `row` on, as the right factor of a product.
    pub(super) fn right(&self, row: usize) -> Right<'_> {
        Right { values: self.from(row), stride: self.stride }
    }
}
