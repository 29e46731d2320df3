//! Memory of a CUDA device: allocating it for results, keeping it in the pool, and how much is
//! free.

use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{
    DType, Error, Result, Shape,
    backend::BackendDevice,
    bail,
    cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr, cudarc},
};
use cudarc::driver::{DevicePtrMut, result, sys};

/// Runs `$work` on the typed slice of a storage, whatever its type.
macro_rules! on_slice {
    ($storage:expr, $slice:ident => $work:expr) => {
        match $storage {
            CudaStorageSlice::F32($slice) => $work,
            CudaStorageSlice::BF16($slice) => $work,
            CudaStorageSlice::F16($slice) => $work,
            CudaStorageSlice::F64($slice) => $work,
            CudaStorageSlice::U32($slice) => $work,
            CudaStorageSlice::I64($slice) => $work,
            CudaStorageSlice::U8($slice) => $work,
            _ => candle_core::bail!("a CUDA kernel was given numbers of a type that it does not take"),
        }
    };
}
pub(super) use on_slice;

static POISON: AtomicBool = AtomicBool::new(false);

/// Makes [`allocate`] fill what it returns with NaN (all ones, in every type of numbers) from now
/// on: a kernel that leaves a number unwritten, or reads one that it did not write, then shows. For
/// tests.
pub fn poison_outputs(on: bool) {
    POISON.store(on, Ordering::Relaxed);
}

/// Allocates memory for a kernel's results; its contents are arbitrary.
pub fn allocate(device: &CudaDevice, shape: &Shape, dtype: DType) -> Result<CudaStorage> {
    // SAFETY: a kernel writes all of it before anything reads it; tests with poison check that.
    let mut storage = unsafe { device.alloc_uninit(shape, dtype) }.map_err(|e| {
        let Ok((free, all)) = free_memory(device) else { return e };
        let size = shape.elem_count() * dtype.size_in_bytes();
        let mib = |bytes: usize| bytes.div_ceil(1 << 20);
        Error::msg(format!(
            "cannot allocate {} MiB for {dtype:?} {:?} on the CUDA device, where {} of {} MiB are free: \
             use smaller batches, a shorter context or bf16 ({e})",
            mib(size),
            shape.dims(),
            mib(free),
            mib(all)
        ))
    })?;
    if POISON.load(Ordering::Relaxed) && shape.elem_count() > 0 {
        on_slice!(&mut storage.slice, slice => {
            let stream = slice.stream().clone();
            let bytes = slice.num_bytes();
            let (pointer, _sync) = slice.device_ptr_mut(&stream);
            // SAFETY: the memory is ours and has as many bytes.
            unsafe { result::memset_d8_async(pointer, 0xff, bytes, stream.cu_stream()) }.w()?;
        });
    }
    Ok(storage)
}

/// Returns the bytes that are free on the device, and all it has.
pub fn free_memory(device: &CudaDevice) -> Result<(usize, usize)> {
    device.cuda_stream().context().mem_get_info().w()
}

/// Keeps freed memory in the device's pool. Otherwise every wait for the device gives it back, and
/// the next step of training asks for all of it again.
pub fn keep_memory(device: &CudaDevice) -> Result<()> {
    let stream = device.cuda_stream();
    let context = stream.context();
    if !context.has_async_alloc() {
        return Ok(());
    }
    let (mut pool, mut all) = (std::ptr::null_mut(), u64::MAX);
    let threshold = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
    // SAFETY: the driver writes the pool, then reads a number of 64 bits.
    unsafe {
        sys::cuDeviceGetDefaultMemPool(&mut pool, context.cu_device()).result().w()?;
        sys::cuMemPoolSetAttribute(pool, threshold, (&raw mut all).cast()).result().w()
    }
}

/// Waits until the device has finished all queued work.
pub fn synchronize(device: &CudaDevice) -> Result<()> {
    match device.synchronize() {
        Ok(()) => Ok(()),
        Err(e) => bail!("the CUDA device failed: {e}"),
    }
}
