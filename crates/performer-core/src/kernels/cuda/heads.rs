//! Rows of heads on CUDA, in another order and turned by rotary positions: launches the kernels of
//! `heads.cu`.

use candle_core::{
    DType, Error, Layout, Result, backend::BackendStorage, bail, cuda_backend::cudarc::driver::DeviceRepr,
};

use super::{CudaStorage, STORED, Source, THREADS, View, allocate, contiguous, source, storage, with_storages};
use crate::kernels::rotary::{Pairs, Rotary};

const SOURCE: Source = source!("heads.cu", STORED);

/// `Rows` is the struct of that name in `heads.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rows {
    outer: i32,
    inner: i32,
    width: i32,
    strides: [i64; 3],
}

assert_layout!(Rows, 40, outer: 0, inner: 4, width: 8, strides: 16);

// SAFETY: a struct of numbers, as the kernel declares it.
unsafe impl DeviceRepr for Rows {}

/// `Turn` is the struct of that name in `heads.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Turn {
    token_is_inner: i32,
    next: i32,
    second: i32,
    direction: f32,
    table_stride: i64,
}

assert_layout!(Turn, 24, token_is_inner: 0, next: 4, second: 8, direction: 12, table_stride: 16);

// SAFETY: a struct of numbers, as the kernel declares it.
unsafe impl DeviceRepr for Turn {}

/// Copies heads `(B, H, T, D)`, whose rows are contiguous, to contiguous memory, as
/// `(B, T, H, D)` if `merged`, and turns them by rotary positions if there are any: forth by
/// direction 1, back by −1.
pub(in crate::kernels) fn arrange(x: View, merged: bool, turn: Option<(&Rotary, f32)>) -> Result<CudaStorage> {
    let Some((rotary, direction)) = turn else { return launch(x, merged, None) };
    rotary.check(x.1)?;
    with_storages([&rotary.cos, &rotary.sin], |tables| {
        contiguous(tables)?;
        if tables.iter().any(|(s, _)| s.dtype() != DType::F32) {
            bail!("rotary: a CUDA kernel was given tables of {:?}; it takes f32", tables[0].0.dtype());
        }
        launch(x, merged, Some((rotary.pairs, direction, tables)))
    })
}

fn launch(x: View, merged: bool, turn: Option<(Pairs, f32, [View; 2])>) -> Result<CudaStorage> {
    let (_, heads, tokens, width) = x.1.shape().dims4()?;
    let (device, dtype, strides) = (x.0.device(), x.0.dtype(), x.1.stride());
    if strides[3] != 1 && width > 1 {
        bail!("heads: a CUDA kernel was given rows that are not contiguous: {:?}", x.1);
    }
    let [outer, inner] = if merged { [tokens, heads] } else { [heads, tokens] };
    let [outer_stride, inner_stride] = if merged { [strides[2], strides[1]] } else { [strides[1], strides[2]] };
    let rows = Rows {
        outer: outer as i32,
        inner: inner as i32,
        width: width as i32,
        strides: [strides[0], outer_stride, inner_stride].map(|stride| stride as i64),
    };
    // What the threads of a row divide among themselves: its numbers, or its pairs.
    let (all, run) = match turn {
        None => (width, width),
        Some((Pairs::Halves, ..)) => (width / 2, width / 2),
        Some((Pairs::Neighbours, ..)) => (width / 2, width),
    };
    let wide = 16 / dtype.size_in_bytes();
    let starts = [x.1.start_offset(), strides[0], strides[1], strides[2], run];
    let is_wide = starts.iter().all(|start| start.is_multiple_of(wide));
    let step = match turn {
        _ if !is_wide => 1,
        Some((Pairs::Neighbours, ..)) => wide / 2,
        _ => wide,
    };
    let count = x.1.shape().elem_count() / width.max(1) * (all / step);
    let threads =
        u32::try_from(count).map_err(|_| Error::msg(format!("heads: {:?} has too many numbers", x.1.dims())))?;
    let mut out = allocate(device, x.1.shape(), dtype)?;
    let entry = match (turn.is_some(), is_wide) {
        (false, false) => "copy_heads",
        (false, true) => "copy_heads_wide",
        (true, false) => "turn_heads",
        (true, true) => "turn_heads_wide",
    };
    let kernel = SOURCE.kernel(device, entry, &[("STORAGE", &storage(dtype)?)], 0)?;
    let mut launch = kernel.launch().value(threads).value(rows);
    if let Some((pairs, direction, [cos, sin])) = turn {
        let [next, second] = match pairs {
            Pairs::Halves => [1, width / 2],
            Pairs::Neighbours => [2, 1],
        };
        let table_stride = if cos.1.dims()[0] == 1 { 0 } else { tokens * width / 2 };
        let turn = Turn {
            token_is_inner: i32::from(!merged),
            next: next as i32,
            second: second as i32,
            direction,
            table_stride: table_stride as i64,
        };
        launch = launch.value(turn).input(cos)?.input(sin)?;
    }
    // SAFETY: sizes and strides are those of the tensors.
    unsafe { launch.input(x)?.output(&mut out)?.run([count.div_ceil(THREADS), 1, 1], THREADS) }?;
    Ok(out)
}

/// Whether the kernels take heads of this type and layout.
pub(in crate::kernels) fn takes(dtype: DType, layout: &Layout) -> bool {
    let (dims, strides) = (layout.dims(), layout.stride());
    storage(dtype).is_ok() && layout.shape().elem_count() > 0 && (strides[3] == 1 || dims[3] == 1)
}
