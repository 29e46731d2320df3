//! Forget gates on CUDA: launches the kernels of `forget_gate.cu`.

use candle_core::{DType, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{CudaStorage, Macro, STORED, Source, THREADS, View, allocate, contiguous, source, storage, tensor};

const SOURCE: Source = source!("forget_gate.cu", STORED);

/// The rows that a thread block treats at a time: four for each warp.
const ROWS: usize = THREADS / 32 * 4;

/// The rows, and the heads, of which a thread block sums gradients of weights at a time.
const SUMMED: [usize; 2] = [THREADS / 32, 4];

/// Returns the sequences, the tokens of each, the numbers of a row, and the heads, of rows
/// `(B, T, E)` and a weight `(H, E)`.
fn sizes(x: View, weight: View) -> Result<[usize; 4]> {
    contiguous([x, weight])?;
    let ((batch, tokens, width), (heads, columns)) = (x.1.shape().dims3()?, weight.1.shape().dims2()?);
    if columns != width || weight.0.dtype() != DType::F32 {
        bail!(
            "forget gates: rows {:?} need an f32 weight (heads, {width}), not {:?} {:?}",
            x.1.dims(),
            weight.0.dtype(),
            weight.1.dims()
        );
    }
    Ok([batch, tokens, width, heads])
}

/// Computes gates `(B, H, T)` in f32 of rows `(B, T, E)`, with a weight `(H, E)` and a bias `(H)`.
pub(in crate::kernels) fn forward(x: View, weight: View, bias: View) -> Result<(CudaStorage, Shape)> {
    contiguous([bias])?;
    let [batch, tokens, width, heads] = sizes(x, weight)?;
    let rows = batch * tokens;
    if bias.1.dims() != [heads] || bias.0.dtype() != DType::F32 {
        bail!("forget gates: {heads} heads need an f32 bias each, not {:?} {:?}", bias.0.dtype(), bias.1.dims());
    }
    let (device, shape) = (x.0.device(), Shape::from((batch, heads, tokens)));
    let mut gates = allocate(device, &shape, DType::F32)?;
    let macros: [Macro; 1] = [("STORAGE", &storage(x.0.dtype())?)];
    let kernel = SOURCE.kernel(device, "forget_gates", &macros, 0)?;
    let launch = kernel.launch().value(rows as i64).value(tokens as i32).value(width as i32);
    let launch = launch.value(heads as i32).input(x)?.input(weight)?.input(bias)?;
    // SAFETY: all tensors have the sizes that the kernel is told.
    unsafe { launch.output(&mut gates)?.run([rows.div_ceil(ROWS), 1, 1], THREADS) }?;
    Ok((gates, shape))
}

/// Computes the gradients of rows, weight and bias from gates `(B, H, T)` and their gradient, which
/// is contiguous.
pub(in crate::kernels) fn backward(x: View, weight: View, gates: View, grad: View) -> Result<[Tensor; 3]> {
    contiguous([gates, grad])?;
    let [batch, tokens, width, heads] = sizes(x, weight)?;
    let rows = batch * tokens;
    let device = x.0.device();
    let splits = rows.div_ceil(SUMMED[0]).clamp(1, 128);
    let mut slopes = allocate(device, &Shape::from((rows, heads)), DType::F32)?;
    let mut of_x = allocate(device, x.1.shape(), x.0.dtype())?;
    let mut sums = allocate(device, &Shape::from((splits, heads, width + 1)), DType::F32)?;
    let macros: [Macro; 1] = [("STORAGE", &storage(x.0.dtype())?)];

    let kernel = SOURCE.kernel(device, "forget_gate_slopes", &macros, 0)?;
    let launch = kernel.launch().value(rows as i64).value(tokens as i32).value(heads as i32);
    let launch = launch.input(gates)?.input(grad)?.output(&mut slopes)?;
    // SAFETY: all tensors have the sizes that the kernel is told.
    unsafe { launch.run([(rows * heads).div_ceil(THREADS), 1, 1], THREADS) }?;

    let kernel = SOURCE.kernel(device, "forget_gate_rows", &macros, 0)?;
    let launch = kernel.launch().value(rows as i64).value(width as i32).value(heads as i32);
    let launch = launch.input(weight)?.output(&mut slopes)?.output(&mut of_x)?;
    // SAFETY: all tensors have the sizes that the kernel is told.
    unsafe { launch.run([rows.div_ceil(ROWS), 1, 1], THREADS) }?;

    let kernel = SOURCE.kernel(device, "forget_gate_weights", &macros, 0)?;
    let launch = kernel.launch().value(rows as i64).value(width as i32).value(heads as i32);
    let launch = launch.input(x)?.output(&mut slopes)?.output(&mut sums)?;
    let grid = [(width + 1).div_ceil(32) * heads.div_ceil(SUMMED[1]), splits, 1];
    // SAFETY: all tensors have the sizes that the kernel is told; every thread block writes its
    // part of the sums.
    unsafe { launch.run(grid, THREADS) }?;

    let sums = tensor(sums, (splits, heads, width + 1)).sum(0)?;
    // Of one head, both parts are contiguous already, and would share their memory.
    let of_weight = sums.narrow(1, 0, width)?.force_contiguous()?;
    let of_bias = sums.narrow(1, width, 1)?.force_contiguous()?.reshape(heads)?;
    Ok([tensor(of_x, x.1.shape()), of_weight, of_bias])
}
