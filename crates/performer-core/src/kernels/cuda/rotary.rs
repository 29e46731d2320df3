//! Rotary positions on CUDA: launches the kernel of `rotary.cu`.

use candle_core::{DType, Result, Shape, backend::BackendStorage, bail};

use super::{CudaStorage, STORED, Source, THREADS, View, allocate, contiguous, storage, with_storages};
use crate::kernels::rotary::{Pairs, Rotary};

const SOURCE: Source =
    Source { name: "performer-core/src/kernels/cuda/rotary.cu", text: include_str!("rotary.cu"), headers: STORED };

/// Turns rows `(B, H, T, D)`, each contiguous; back if `direction` is −1.
pub(in crate::kernels) fn turn(rotary: &Rotary, x: View, direction: f32) -> Result<(CudaStorage, Shape)> {
    rotary.check(x.1)?;
    with_storages([&rotary.cos, &rotary.sin], |[cos, sin]| launch(rotary.pairs, x, cos, sin, direction))
}

fn launch(pairs: Pairs, x: View, cos: View, sin: View, direction: f32) -> Result<(CudaStorage, Shape)> {
    contiguous([cos, sin])?;
    let (_, heads, tokens, width) = x.1.shape().dims4()?;
    let (half, strides) = (width / 2, x.1.stride());
    if [cos, sin].iter().any(|(s, _)| s.dtype() != DType::F32) {
        bail!("rotary: a CUDA kernel was given tables of {:?}; it takes f32", cos.0.dtype());
    }
    if strides[3] != 1 {
        bail!("rotary: a CUDA kernel was given rows that are not contiguous: {:?}", x.1);
    }
    // Numbers of a table from one sequence to the next.
    let step = if cos.1.dims()[0] == 1 { 0 } else { tokens * half };
    // From the first number of a pair to the next pair's, and to its second number.
    let [next, second] = match pairs {
        Pairs::Halves => [1, half],
        Pairs::Neighbours => [2, 1],
    };
    let (device, count) = (x.0.device(), x.1.shape().elem_count() / 2);
    let mut out = allocate(device, x.1.shape(), x.0.dtype())?;
    let kernel = SOURCE.kernel(device, "rotary", &[("STORAGE", &storage(x.0.dtype())?)], 0)?;
    let mut launch = kernel.launch().value(count as i64);
    for size in [heads, tokens, half, next, second] {
        launch = launch.value(size as i32);
    }
    for stride in [strides[0], strides[1], strides[2], step] {
        launch = launch.value(stride as i64);
    }
    let launch = launch.value(direction).input(x.0, x.1)?.input(cos.0, cos.1)?.input(sin.0, sin.1)?;
    // SAFETY: sizes and strides are those of the tensors.
    unsafe { launch.output(&mut out)?.run([count.div_ceil(THREADS), 1, 1], THREADS) }?;
    Ok((out, x.1.shape().clone()))
}
