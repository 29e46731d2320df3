//! LayerNorm and RMSNorm on CUDA: launches the kernels of `norm.cu`.

use std::fmt::Display;

use candle_core::{DType, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{CudaStorage, STORED, Source, THREADS, View, allocate, contiguous, source, storage, tensor, with_storages};
use crate::kernels::norm::Norm;

const SOURCE: Source = source!("norm.cu", STORED);

/// The rows that a thread block of the general kernels treats at a time, one for each warp.
const ROWS: usize = THREADS / 32;

/// The most thread blocks of a kernel that keeps rows in registers. They are enough to fill a card,
/// and as many on every card, so that sums are added up in the same order.
const MOST_BLOCKS: usize = 512;

/// The most numbers of a row that a lane keeps in registers.
const MOST_NUMBERS: usize = 16;

/// `Pieces` says how the kernels that keep rows in registers divide a row, 16 bytes at a time.
struct Pieces {
    /// The lanes of a row, a power of two.
    lanes: usize,
    /// The pieces of 16 bytes that each of them has at most.
    pieces: usize,
}

impl Pieces {
    /// The division of rows of `width` numbers, unless they are too long for registers, or tensors
    /// of such rows begin elsewhere than at multiples of 16 bytes.
    fn of(width: usize, tensors: &[View]) -> Option<Self> {
        let dtype = tensors[0].0.dtype();
        let wide = 16 / dtype.size_in_bytes();
        let aligned =
            tensors.iter().all(|(x, layout)| (layout.start_offset() * x.dtype().size_in_bytes()).is_multiple_of(16));
        let lanes = width.div_ceil(wide).next_power_of_two().min(32);
        let pieces = width.div_ceil(wide * lanes);
        (aligned && width.is_multiple_of(wide) && pieces * wide <= MOST_NUMBERS).then_some(Self { lanes, pieces })
    }

    /// The thread blocks for a number of rows.
    fn blocks(&self, rows: usize) -> usize {
        rows.div_ceil(THREADS / self.lanes).clamp(1, MOST_BLOCKS)
    }
}

/// Returns the number of rows and their width.
fn size(x: View, weight: View) -> Result<[usize; 2]> {
    let width = weight.1.shape().elem_count();
    if width == 0 || x.1.dims().last() != Some(&width) || weight.0.dtype() != DType::F32 {
        bail!(
            "norm: rows {:?} need an f32 weight of their last dimension, not {:?} {:?}",
            x.1.dims(),
            weight.0.dtype(),
            weight.1.dims()
        );
    }
    Ok([x.1.shape().elem_count() / width, width])
}

/// Computes the normalised rows, in the type of `x`; weight and bias are f32.
pub(in crate::kernels) fn forward(
    norm: &Norm,
    x: View,
    weight: View,
    bias: Option<View>,
) -> Result<(CudaStorage, Shape)> {
    let [rows, width] = size(x, weight)?;
    contiguous([x, weight, bias.unwrap_or(weight)])?;
    let device = x.0.device();
    let mut out = allocate(device, x.1.shape(), x.0.dtype())?;
    let (stored, center) = (storage(x.0.dtype())?, u8::from(norm.center));
    let mut macros: Vec<super::Macro> = vec![("STORAGE", &stored), ("CENTER", &center)];
    let wide = Pieces::of(width, &[x]);
    let (entry, blocks) = match &wide {
        Some(wide) => {
            macros.extend([("LANES", &wide.lanes as &dyn Display), ("PIECES", &wide.pieces)]);
            ("norm_forward_wide", wide.blocks(rows))
        }
        None => ("norm_forward", rows.div_ceil(ROWS)),
    };
    let kernel = SOURCE.kernel(device, entry, &macros, 0)?;
    let launch = kernel.launch().value(rows as i64).value(width as i32).value(norm.eps);
    let launch = launch.input(x)?.input(weight)?;
    let launch = match bias {
        Some(bias) => launch.input(bias)?,
        None => launch.nothing(),
    };
    // SAFETY: rows, weight and bias have the sizes that the kernel is told.
    unsafe { launch.output(&mut out)?.run([blocks, 1, 1], THREADS) }?;
    Ok((out, x.1.shape().clone()))
}

/// Computes the gradients of rows, weight and bias.
pub(in crate::kernels) fn backward(norm: &Norm, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Tensor; 3]> {
    let grad = grad.contiguous()?;
    with_storages([x, weight, &grad], |[x, weight, grad]| {
        let [rows, width] = size(x, weight)?;
        contiguous([x, weight, grad])?;
        let (device, dtype) = (x.0.device(), x.0.dtype());
        let (stored, center) = (storage(dtype)?, u8::from(norm.center));
        let macros: [super::Macro; 2] = [("STORAGE", &stored), ("CENTER", &center)];
        let mut dx = allocate(device, x.1.shape(), dtype)?;
        let wide = Pieces::of(width, &[x, grad]);
        // There are enough thread blocks to fill a card; their sums are added up in a fixed order.
        let splits = wide.as_ref().map_or(rows.div_ceil(ROWS).clamp(1, 64), |wide| wide.blocks(rows));
        let mut sums = allocate(device, &Shape::from((splits, 2, width)), DType::F32)?;
        if let Some(wide) = wide {
            let division: [super::Macro; 2] = [("LANES", &wide.lanes), ("PIECES", &wide.pieces)];
            let kernel = SOURCE.kernel(device, "norm_backward_wide", &[macros, division].concat(), 0)?;
            let launch = kernel.launch().value(rows as i64).value(width as i32).value(norm.eps);
            let launch = launch.input(x)?.input(weight)?.input(grad)?;
            // SAFETY: everything has the sizes that the kernel is told; every thread block writes
            // its part of the sums.
            unsafe { launch.output(&mut dx)?.output(&mut sums)?.run([splits, 1, 1], THREADS) }?;
        } else {
            let mut kept = allocate(device, &Shape::from((rows, 2)), DType::F32)?;
            let kernel = SOURCE.kernel(device, "norm_backward", &macros, 0)?;
            let launch = kernel.launch().value(rows as i64).value(width as i32).value(norm.eps);
            let launch = launch.input(x)?.input(weight)?.input(grad)?;
            // SAFETY: everything has the sizes that the kernel is told.
            unsafe { launch.output(&mut dx)?.output(&mut kept)?.run([rows.div_ceil(ROWS), 1, 1], THREADS) }?;
            let kernel = SOURCE.kernel(device, "norm_weight_gradients", &macros, 0)?;
            let launch = kernel.launch().value(rows as i64).value(width as i32);
            let launch = launch.input(x)?.input(grad)?.output(&mut kept)?;
            // SAFETY: everything has the sizes that the kernel is told; every thread block writes
            // its part of the sums.
            unsafe { launch.output(&mut sums)?.run([width.div_ceil(32), splits, 1], THREADS) }?;
        }
        let sums = tensor(sums, (splits, 2, width)).sum(0)?;
        let part = |i: usize| sums.get(i)?.reshape(weight.1.shape());
        Ok([tensor(dx, x.1.shape()), part(0)?, part(1)?])
    })
}
