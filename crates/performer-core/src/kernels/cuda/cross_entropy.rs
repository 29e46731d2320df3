//! Cross-entropy of rows of logits on CUDA: launches the kernels of `cross_entropy.cu`.

use candle_core::{DType, Result, Shape, Tensor, backend::BackendStorage};

use super::{STORED, Source, THREADS, View, allocate, contiguous, source, storage, tensor, with_storages};

const SOURCE: Source = source!("cross_entropy.cu", STORED);

/// Whether all rows begin at multiples of 16 bytes.
fn is_wide((storage, layout): View) -> bool {
    let wide = 16 / storage.dtype().size_in_bytes();
    layout.start_offset().is_multiple_of(wide) && layout.dims()[1].is_multiple_of(wide)
}

/// Computes losses and logarithms of the denominators, f32 `(N)` each, from logits `(N, V)` and u32
/// targets `(N)` below V.
pub(in crate::kernels) fn losses(logits: &Tensor, targets: &Tensor) -> Result<[Tensor; 2]> {
    let (n, vocabulary) = logits.dims2()?;
    with_storages([logits, targets], |[logits, targets]| {
        contiguous([logits, targets])?;
        let (device, shape) = (logits.0.device(), Shape::from(n));
        let entry = if is_wide(logits) { "cross_entropy_forward_wide" } else { "cross_entropy_forward" };
        let mut losses = allocate(device, &shape, DType::F32)?;
        let mut logs = allocate(device, &shape, DType::F32)?;
        let kernel = SOURCE.kernel(device, entry, &[("STORAGE", &storage(logits.0.dtype())?)], 0)?;
        let launch = kernel.launch().value(vocabulary as i32);
        let launch = launch.input(logits)?.input(targets)?;
        // SAFETY: there is a thread block for each row, and targets are checked to lie in it.
        unsafe { launch.output(&mut losses)?.output(&mut logs)?.run([n, 1, 1], THREADS) }?;
        Ok([tensor(losses, n), tensor(logs, n)])
    })
}

/// Turns logits into their gradients, in place: `g_i (softmax − onehot(target))`. Nothing else may
/// hold the logits.
pub(in crate::kernels) fn gradients(logits: Tensor, targets: &Tensor, logs: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (n, vocabulary) = logits.dims2()?;
    with_storages([&logits, targets, logs, grad], |views| {
        contiguous(views)?;
        let [logits, targets, logs, grad] = views;
        let device = logits.0.device();
        let entry = if is_wide(logits) { "cross_entropy_backward_wide" } else { "cross_entropy_backward" };
        let kernel = SOURCE.kernel(device, entry, &[("STORAGE", &storage(logits.0.dtype())?)], 0)?;
        let launch = kernel.launch().value(vocabulary as i32).input(logits)?;
        let launch = launch.input(targets)?.input(logs)?.input(grad)?;
        // SAFETY: there is a thread block for each row, which alone reads and writes it; the tensor
        // is ours.
        unsafe { launch.run([n, 1, 1], THREADS) }
    })?;
    Ok(logits)
}
