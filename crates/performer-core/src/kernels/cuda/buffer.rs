//! What the launches of the attention kernels share: memory on the device that is not yet a tensor
//! (`Buffer`), the strides of tensors (`Strides`), and arguments of a launch that may be missing.

use candle_core::{DType, Layout, Result, Shape, Tensor};

use super::{CudaDevice, CudaStorage, Launch, View, allocate, tensor};

/// `Buffer` is memory on the device that is not a tensor of Candle.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) storage: CudaStorage,
    pub(super) layout: Layout,
}

impl Buffer {
    /// Allocates `count` numbers of f32.
    pub(super) fn new(device: &CudaDevice, count: usize) -> Result<Self> {
        Self::of(device, count, DType::F32)
    }

    /// Allocates numbers of a shape and type.
    pub(super) fn of(device: &CudaDevice, shape: impl Into<Shape>, dtype: DType) -> Result<Self> {
        let shape = shape.into();
        Ok(Self { storage: allocate(device, &shape, dtype)?, layout: Layout::contiguous(shape) })
    }

    pub(super) fn view(&self) -> View<'_> {
        (&self.storage, &self.layout)
    }

    pub(super) fn tensor(self) -> Tensor {
        tensor(self.storage, self.layout.shape())
    }
}

/// The distances between batch entries, heads and tokens, in numbers: `Strides` of `tile.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Strides {
    batch: i64,
    head: i64,
    token: i64,
}

assert_layout!(Strides, 24, batch: 0, head: 8, token: 16);

impl Strides {
    /// The strides of a tensor of rank 4.
    pub(super) fn of(layout: &Layout) -> Self {
        let s = layout.stride();
        Self { batch: s[0] as i64, head: s[1] as i64, token: s[2] as i64 }
    }

    /// The strides of a contiguous tensor.
    pub(super) fn dense(heads: usize, tokens: usize, width: usize) -> Self {
        Self { batch: (heads * tokens * width) as i64, head: (tokens * width) as i64, token: width as i64 }
    }
}

/// Returns the address of a tensor that may be missing; 0 where it is.
pub(super) fn address<'l>(launch: &mut Launch<'l>, view: Option<View<'l>>) -> Result<u64> {
    view.map_or(Ok(0), |view| launch.address(view))
}

/// Returns the address of memory for results that may be missing; 0 where it is.
pub(super) fn address_of_output<'l>(launch: &mut Launch<'l>, buffer: Option<&'l mut Buffer>) -> Result<u64> {
    buffer.map_or(Ok(0), |buffer| launch.address_mut(&mut buffer.storage))
}

/// Adds memory for results that may be missing to the arguments of a launch.
pub(super) fn optional_output<'l>(launch: Launch<'l>, buffer: Option<&'l mut Buffer>) -> Result<Launch<'l>> {
    match buffer {
        Some(buffer) => launch.output(&mut buffer.storage),
        None => Ok(launch.nothing()),
    }
}

/// Adds a tensor that may be missing to the arguments of a launch.
pub(super) fn optional<'l>(mut launch: Launch<'l>, view: Option<View<'l>>) -> Result<Launch<'l>> {
    let address = address(&mut launch, view)?;
    Ok(launch.value(address))
}
