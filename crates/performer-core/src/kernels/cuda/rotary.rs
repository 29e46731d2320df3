//! Rotary positions on CUDA: launches the kernel of `rotary.cu`.

use candle_core::{DType, Result, Shape, Tensor, backend::BackendStorage, bail};

use super::{CudaStorage, STORED, Source, THREADS, View, allocate, contiguous, storage, with_storages};

const SOURCE: Source =
    Source { name: "performer-core/src/kernels/cuda/rotary.cu", text: include_str!("rotary.cu"), headers: STORED };

/// Turns rows `(B, H, T, D)` by the angles whose cosines and sines are given (f32 and contiguous,
/// `(T, D/2)`), or back if `direction` is −1.
pub(in crate::kernels) fn turn(x: View, cos: &Tensor, sin: &Tensor, direction: f32) -> Result<(CudaStorage, Shape)> {
    with_storages([cos, sin], |[cos, sin]| launch(x, cos, sin, direction))
}

fn launch(x: View, cos: View, sin: View, direction: f32) -> Result<(CudaStorage, Shape)> {
    contiguous([cos, sin])?;
    let (_, heads, tokens, width) = x.1.shape().dims4()?;
    let (half, strides) = (width / 2, x.1.stride());
    if [cos, sin].iter().any(|(s, l)| l.dims() != [tokens, half] || s.dtype() != DType::F32) || width % 2 != 0 {
        bail!("rotary: rows {:?} need f32 tables ({tokens}, {half}), not {:?}", x.1.dims(), cos.1.dims());
    }
    if strides[3] != 1 {
        bail!("rotary: a CUDA kernel was given rows that are not contiguous: {:?}", x.1);
    }
    let (device, pairs) = (x.0.device(), x.1.shape().elem_count() / 2);
    let mut out = allocate(device, x.1.shape(), x.0.dtype())?;
    let kernel = SOURCE.kernel(device, "rotary", &[("STORAGE", &storage(x.0.dtype())?)], 0)?;
    let mut launch = kernel.launch().value(pairs as i64);
    for size in [heads, tokens, half] {
        launch = launch.value(size as i32);
    }
    for &stride in &strides[..3] {
        launch = launch.value(stride as i64);
    }
    let launch = launch.value(direction).input(x.0, x.1)?.input(cos.0, cos.1)?.input(sin.0, sin.1)?;
    // SAFETY: sizes and strides are those of the tensors.
    unsafe { launch.output(&mut out)?.run([pairs.div_ceil(THREADS), 1, 1], THREADS) }?;
    Ok((out, x.1.shape().clone()))
}
