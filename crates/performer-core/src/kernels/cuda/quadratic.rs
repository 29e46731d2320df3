//! Polynomial features on CUDA: launches the kernels of `quadratic.cu`.

use candle_core::{Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{CudaStorage, STORED, Source, THREADS, View, allocate, contiguous, source, storage, tensor};
use crate::kernels::quadratic::QuadraticFeatures;

const SOURCE: Source = source!("quadratic.cu", STORED);

/// The rows of a thread block of the forward kernel: eight for each warp, as in `quadratic.cu`.
const ROWS_OF_BLOCK: usize = THREADS / 32 * 8;

/// Returns the number of rows of contiguous numbers `(.., D)`, and `D`.
fn size(x: View) -> Result<[usize; 2]> {
    contiguous([x])?;
    let dims = x.1.dims();
    match dims.last() {
        Some(&dim) if dim > 0 => Ok([x.1.shape().elem_count() / dim, dim]),
        _ => bail!("polynomial features: rows must have numbers, and have the shape {dims:?}"),
    }
}

/// Computes the features `(.., W)` of rows `(.., D)`.
pub(in crate::kernels) fn forward(map: &QuadraticFeatures, x: View) -> Result<(CudaStorage, Shape)> {
    let [rows, dim] = size(x)?;
    let width = map.width(dim);
    let mut dims = x.1.dims().to_vec();
    dims[x.1.dims().len() - 1] = width;
    let (device, shape) = (x.0.device(), Shape::from(dims));
    let mut out = allocate(device, &shape, x.0.dtype())?;
    let kernel = SOURCE.kernel(device, "quadratic_features", &[("STORAGE", &storage(x.0.dtype())?)], 0)?;
    let launch = kernel.launch().value(rows as i64).value(dim as i32).value(width as i32);
    let launch = launch.value(map.second).value(map.scale);
    // SAFETY: both tensors have the sizes that the kernel is told.
    unsafe { launch.input(x)?.output(&mut out)?.run([rows.div_ceil(ROWS_OF_BLOCK), 1, 1], THREADS) }?;
    Ok((out, shape))
}

/// Computes the gradient of rows from that of their features, which is contiguous.
pub(in crate::kernels) fn backward(map: &QuadraticFeatures, x: View, grad: View) -> Result<Tensor> {
    contiguous([grad])?;
    let [rows, dim] = size(x)?;
    let device = x.0.device();
    if grad.0.dtype() != x.0.dtype() {
        bail!("polynomial features: rows are {:?} and gradients {:?}", x.0.dtype(), grad.0.dtype());
    }
    let mut of_x = allocate(device, x.1.shape(), x.0.dtype())?;
    let kernel = SOURCE.kernel(device, "quadratic_gradient", &[("STORAGE", &storage(x.0.dtype())?)], 0)?;
    let launch = kernel.launch().value(rows as i64).value(dim as i32).value(map.width(dim) as i32);
    let launch = launch.value(map.second).value(map.scale);
    let launch = launch.input(x)?.input(grad)?.output(&mut of_x)?;
    // SAFETY: all tensors have the sizes that the kernel is told.
    unsafe { launch.run([(rows * dim).div_ceil(THREADS), 1, 1], THREADS) }?;
    Ok(tensor(of_x, x.1.shape()))
}
