//! A causal convolution of few taps along the tokens of rows, each channel by a filter of its own.
//!
//! Each direction passes over the rows once. `ConvolvedHeads` also divides them into heads and
//! turns them by rotary positions, all as one node of the autograd graph. The linear map before it
//! stays a node of its own, because the backward pass here reads that map's result too.
//!
//! # Shapes
//!
//! ```text
//! x (B, T, C), w (C, 4); rows before the first and gradients after the last are zeros
//! forward:  y_t = Σ_j w_j ∘ x_{t−3+j} (B, T, C)
//! backward: g (B, T, C) -> dx_s = Σ_j w_j ∘ g_{s+3−j} (B, T, C);  dw_j = Σ_s x_s ∘ g_{s+3−j} (C, 4)
//! ```

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    contiguous, copy, for_heads,
    fresh::{Fresh, Part},
    heads::arrange,
    instructions::arch,
    operation::{Operation, Stored},
    rotary::Rotary,
    with_storages,
};

/// Numbers in the filter of a channel.
pub(crate) const TAPS: usize = 4;

/// The tokens of a sequence that one thread takes. The gradient of a filter is summed over pieces,
/// so its bits depend on this number, but not on the number of threads.
const PIECE: usize = 128;

/// `ShortConvolution` convolves contiguous rows `(B, T, C)` with filters `(C, 4)` of f32; rows are
/// f32 on the CPU, and of a type of the kernels on CUDA.
pub(crate) struct ShortConvolution;

/// `ConvolvedHeads` convolves like [`ShortConvolution`], and divides the rows into heads
/// `(B, H, T, C/H)`, turned by rotary positions if there are any.
pub(crate) struct ConvolvedHeads {
    pub(crate) heads: usize,
    pub(crate) rotary: Option<Rotary>,
}

/// `Filters` holds the filters of `C` channels tap by tap, `(4, C)`.
struct Filters {
    taps: [Vec<f32>; TAPS],
    channels: usize,
}

impl Filters {
    fn new(weight: &[f32], x: &Layout) -> Result<Self> {
        let (_, _, channels) = x.shape().dims3()?;
        if weight.len() != TAPS * channels {
            bail!("short-convolution: rows {:?} and {} numbers of filters", x.dims(), weight.len());
        }
        let taps = std::array::from_fn(|j| weight.iter().skip(j).step_by(TAPS).copied().collect());
        Ok(Self { taps, channels })
    }

    /// Computes the rows of `out` from row `start` on, of the sequence `x` `(T, C)`.
    #[inline(always)]
    fn forward(&self, x: &[f32], start: usize, out: &mut [f32]) {
        let n = self.channels;
        let zeros = vec![0f32; n];
        let [w0, w1, w2, w3] = self.taps.each_ref().map(|tap| &tap[..n]);
        for (t, out) in (start..).zip(out.chunks_exact_mut(n)) {
            let row = |back: usize| if t < back { &zeros[..] } else { &x[(t - back) * n..][..n] };
            let [x0, x1, x2, x3] = [row(3), row(2), row(1), row(0)];
            for c in 0..n {
                out[c] = w0[c] * x0[c] + w1[c] * x1[c] + w2[c] * x2[c] + w3[c] * x3[c];
            }
        }
    }

    /// Computes the gradients `dx` of the rows from `start` on, of the sequence `x` `(T, C)`, from
    /// the gradient `g` `(T, C)`, and returns the part of these rows in the gradients of the
    /// filters, `(4, C)`.
    #[inline(always)]
    fn backward(&self, x: &[f32], g: &[f32], start: usize, dx: &mut [f32]) -> [Vec<f32>; TAPS] {
        let n = self.channels;
        let zeros = vec![0f32; n];
        let [w0, w1, w2, w3] = self.taps.each_ref().map(|tap| &tap[..n]);
        let mut sums: [Vec<f32>; TAPS] = std::array::from_fn(|_| vec![0f32; n]);
        let [d0, d1, d2, d3] = sums.each_mut().map(|sum| &mut sum[..n]);
        for (s, dx) in (start..).zip(dx.chunks_exact_mut(n)) {
            let grad = |after: usize| g.get((s + after) * n..(s + after + 1) * n).unwrap_or(&zeros);
            let [g0, g1, g2, g3] = [grad(3), grad(2), grad(1), grad(0)].map(|row| &row[..n]);
            let x = &x[s * n..][..n];
            for c in 0..n {
                dx[c] = w0[c] * g0[c] + w1[c] * g1[c] + w2[c] * g2[c] + w3[c] * g3[c];
                d0[c] += x[c] * g0[c];
                d1[c] += x[c] * g1[c];
                d2[c] += x[c] * g2[c];
                d3[c] += x[c] * g3[c];
            }
        }
        sums
    }
}

/// Divides memory for rows `(B, T, C)` into pieces: the sequence and the first token of each.
fn pieces<'a>(memory: &'a mut Fresh, x: &Layout) -> Result<Vec<(usize, usize, Part<'a>)>> {
    let (_, tokens, channels) = x.shape().dims3()?;
    let of_sequence = |(n, sequence): (usize, Part<'a>)| {
        let pieces = sequence.parts(PIECE * channels).into_iter().enumerate();
        pieces.map(move |(i, piece)| (n, i * PIECE, piece))
    };
    Ok(memory.parts(tokens * channels).into_iter().enumerate().flat_map(of_sequence).collect())
}

fn forward(x: Stored<'_, CpuStorage>, weight: Stored<'_, CpuStorage>) -> Result<Vec<f32>> {
    let (rows, sequence) = (contiguous(x)?, x.1.dims()[1] * x.1.dims()[2]);
    let filters = Filters::new(contiguous(weight)?, x.1)?;
    let mut out = Fresh::new(rows.len());
    for_heads(pieces(&mut out, x.1)?, |(n, start, piece)| {
        arch().dispatch(
            #[inline(always)]
            || filters.forward(&rows[n * sequence..][..sequence], start, piece.take()),
        )
    });
    Ok(out.finish())
}

/// Computes the gradients of rows `x` `(B, T, C)` and of filters from the contiguous gradient of
/// the convolution, `(B, T, C)`.
fn backward(x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return Ok(cuda::with_storages([x, weight, grad], |[x, weight, grad]| {
            cuda::convolution::backward(x, weight, grad)
        })?
        .map(Some));
    }
    let (of_x, of_weight) = with_storages([x, weight, grad], |[x, weight, grad]| {
        let (rows, grads, sequence) = (contiguous(x)?, contiguous(grad)?, x.1.dims()[1] * x.1.dims()[2]);
        let filters = Filters::new(contiguous(weight)?, x.1)?;
        let mut of_x = Fresh::new(rows.len());
        let parts = for_heads(pieces(&mut of_x, x.1)?, |(n, start, piece)| {
            let of_sequence = n * sequence..(n + 1) * sequence;
            arch().dispatch(
                #[inline(always)]
                || filters.backward(&rows[of_sequence.clone()], &grads[of_sequence.clone()], start, piece.take()),
            )
        });
        let mut of_weight = vec![0f32; TAPS * filters.channels];
        for (j, tap) in parts.iter().flat_map(|part| part.iter().enumerate()) {
            of_weight.iter_mut().skip(j).step_by(TAPS).zip(tap).for_each(|(sum, part)| *sum += part);
        }
        Ok((of_x.finish(), of_weight))
    })?;
    Ok([
        Some(Tensor::from_vec(of_x, x.shape(), x.device())?),
        Some(Tensor::from_vec(of_weight, weight.shape(), x.device())?),
    ])
}

impl Operation<2> for ShortConvolution {
    fn name(&self) -> &'static str {
        "short-convolution"
    }

    fn cpu(&self, [x, weight]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(forward(x, weight)?), x.1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [x, weight]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        Ok((cuda::convolution::forward(x, weight)?, x.1.shape().clone()))
    }

    fn backward(&self, [x, weight]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        backward(x, weight, &grad.contiguous()?)
    }
}

impl ConvolvedHeads {
    /// The rows `(B, T, C)`, contiguous, seen as heads `(B, H, T, C/H)`.
    fn layout(&self, x: &Layout) -> Result<Layout> {
        let (b, t, c) = x.shape().dims3()?;
        Layout::contiguous((b, t, self.heads, c / self.heads)).transpose(1, 2)
    }
}

impl Operation<2> for ConvolvedHeads {
    fn name(&self) -> &'static str {
        "convolved-heads"
    }

    fn cpu(&self, [x, weight]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        let layout = self.layout(x.1)?;
        let rows = CpuStorage::F32(forward(x, weight)?);
        let heads = match &self.rotary {
            Some(rotary) => CpuStorage::F32(rotary.turn((&rows, &layout), 1.0, false)?),
            None => copy(&rows, &layout)?,
        };
        Ok((heads, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [x, weight]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        let (rows, layout) = (cuda::convolution::forward(x, weight)?, self.layout(x.1)?);
        let turn = self.rotary.as_ref().map(|rotary| (rotary, 1.0));
        Ok((cuda::heads::arrange((&rows, &layout), false, turn)?, layout.shape().clone()))
    }

    fn backward(&self, [x, weight]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let turn = self.rotary.as_ref().map(|rotary| (rotary, -1.0));
        backward(x, weight, &arrange(grad, true, turn)?.reshape(x.shape())?)
    }
}
