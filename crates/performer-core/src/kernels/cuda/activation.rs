//! GELU, SwiGLU, output gates and sums of two tensors on CUDA, element by element: launches the
//! kernels of `activation.cu`.

use candle_core::{Result, Shape, Tensor, backend::BackendStorage, bail};

use super::super::activation::Gate;
use super::{CudaStorage, STORED, Source, THREADS, View, allocate, contiguous, source, storage, tensor, with_storages};

const SOURCE: Source = source!("activation.cu", STORED);

/// Runs the kernel `entry[0]`, or `entry[1]` where it can read 16 bytes at a time, that makes `OUT`
/// tensors from `N` tensors, all of one shape and type.
fn run<const N: usize, const OUT: usize>(entry: [&str; 2], inputs: [View; N]) -> Result<[CudaStorage; OUT]> {
    contiguous(inputs)?;
    let (first, layout) = inputs[0];
    let (shape, dtype, device) = (layout.shape(), first.dtype(), first.device());
    let wide = 16 / dtype.size_in_bytes();
    let starts = inputs.iter().all(|(_, layout)| layout.start_offset().is_multiple_of(wide));
    let is_wide = starts && shape.elem_count().is_multiple_of(wide);
    let entry = entry[usize::from(is_wide)];
    if inputs.iter().any(|(s, l)| l.shape() != shape || s.dtype() != dtype) {
        bail!("{entry}: inputs must have one shape and type, not {:?}", inputs.map(|(s, l)| (s.dtype(), l.dims())));
    }
    let outputs = (0..OUT).map(|_| allocate(device, shape, dtype)).collect::<Result<Vec<_>>>()?;
    let Ok(mut outputs) = <[CudaStorage; OUT]>::try_from(outputs) else { bail!("{entry}: too few outputs") };
    let count = shape.elem_count();
    let kernel = SOURCE.kernel(device, entry, &[("STORAGE", &storage(dtype)?)], 0)?;
    let mut launch = kernel.launch().value(count as i64);
    for input in inputs {
        launch = launch.input(input)?;
    }
    for output in &mut outputs {
        launch = launch.output(output)?;
    }
    let threads = if is_wide { count / wide } else { count };
    // SAFETY: all tensors have as many numbers as the kernel is told.
    unsafe { launch.run([threads.div_ceil(THREADS), 1, 1], THREADS) }?;
    Ok(outputs)
}

/// Computes GELU.
pub(in crate::kernels) fn gelu(x: View) -> Result<(CudaStorage, Shape)> {
    let [out] = run(["gelu_forward", "gelu_forward_wide"], [x])?;
    Ok((out, x.1.shape().clone()))
}

/// Computes the gradient of GELU's input.
pub(in crate::kernels) fn gelu_backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let [dx] = with_storages([x, &grad.contiguous()?], |inputs| run(["gelu_backward", "gelu_backward_wide"], inputs))?;
    Ok(tensor(dx, x.shape()))
}

/// Multiplies `x` by a gate of this kind.
pub(in crate::kernels) fn gate(kind: Gate, gate: View, x: View) -> Result<(CudaStorage, Shape)> {
    let [out] = match kind {
        Gate::Swiglu => run(["swiglu_forward", "swiglu_forward_wide"], [gate, x]),
        Gate::Output => run(["sigmoid_gate_forward", "sigmoid_gate_forward_wide"], [gate, x]),
    }?;
    Ok((out, x.1.shape().clone()))
}

/// Computes the gradients of the gates and of the numbers.
pub(in crate::kernels) fn gate_backward(kind: Gate, gate: &Tensor, x: &Tensor, grad: &Tensor) -> Result<[Tensor; 2]> {
    let entry = match kind {
        Gate::Swiglu => ["swiglu_backward", "swiglu_backward_wide"],
        Gate::Output => ["sigmoid_gate_backward", "sigmoid_gate_backward_wide"],
    };
    let gradients: [CudaStorage; 2] = with_storages([gate, x, &grad.contiguous()?], |inputs| run(entry, inputs))?;
    Ok(gradients.map(|gradient| tensor(gradient, x.shape())))
}

/// Computes `x + y`.
pub(in crate::kernels) fn add(x: View, y: View) -> Result<(CudaStorage, Shape)> {
    let [out] = run(["add", "add_wide"], [x, y])?;
    Ok((out, x.1.shape().clone()))
}
