//! What the attention kernels share on the host's side: memory that is no tensor, and where rows of tensors lie.

use candle_core::{DType, Layout, Result, Shape, Tensor};

use super::{CudaDevice, CudaStorage, Launch, View, allocate, tensor};

/// Numbers on the device that are no tensor.
#[derive(Debug)]
pub(super) struct Buffer {
    pub(super) storage: CudaStorage,
    pub(super) layout: Layout,
}

impl Buffer {
    pub(super) fn new(device: &CudaDevice, count: usize) -> Result<Self> {
        Self::of(device, count, DType::F32)
    }

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

/// Distances between numbers, as `Strides` of `favor.cuh`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Strides {
    batch: i64,
    head: i64,
    token: i64,
}

impl Strides {
    pub(super) fn of(layout: &Layout) -> Self {
        let s = layout.stride();
        Self { batch: s[0] as i64, head: s[1] as i64, token: s[2] as i64 }
    }

    pub(super) fn dense(heads: usize, tokens: usize, width: usize) -> Self {
        Self { batch: (heads * tokens * width) as i64, head: (tokens * width) as i64, token: width as i64 }
    }
}

/// The address of a tensor that may be missing: 0 then.
pub(super) fn address<'l>(launch: &mut Launch<'l>, view: Option<View<'l>>) -> Result<u64> {
    view.map_or(Ok(0), |(storage, layout)| launch.address(storage, layout))
}

/// Gives a launch a tensor that may be missing.
pub(super) fn optional<'l>(mut launch: Launch<'l>, view: Option<View<'l>>) -> Result<Launch<'l>> {
    let address = address(&mut launch, view)?;
    Ok(launch.value(address))
}
