//! Compiles Metal sources into compute pipelines of a device.

use std::{
    collections::HashMap,
    fmt::Display,
    sync::{Mutex, OnceLock, PoisonError},
};

use candle_core::{Error, MetalDevice, Result, metal_backend::DeviceId};
use candle_metal_kernels::metal::ComputePipeline;
use objc2_metal::MTLCompileOptions;

/// Why a kernel could not be compiled, once that has happened.
static FAILURE: Mutex<Option<String>> = Mutex::new(None);

/// Returns why this crate's Metal kernels are not used, if one could not be compiled for a device
/// or did not fit it. Attention then goes through composed operations, as with `composed()`.
pub fn failure() -> Option<String> {
    FAILURE.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Returns whether a [`pipeline`] can be had. Once one has failed, none is tried again, and
/// [`failure`] says why.
pub(super) fn possible(pipeline: impl FnOnce() -> Result<ComputePipeline>) -> bool {
    let mut failure = FAILURE.lock().unwrap_or_else(PoisonError::into_inner);
    if failure.is_none() {
        *failure = pipeline().err().map(|e| e.to_string());
    }
    failure.is_none()
}

/// Returns the kernel `entry` of `source` with `macros` for a device, from the cache if it was used
/// before.
///
/// # Errors
/// What could not be compiled, with the compiler's own words; or that a threadgroup cannot have
/// `threads` threads.
pub(super) fn pipeline(
    device: &MetalDevice,
    source: &str,
    entry: &str,
    macros: &[(&str, usize)],
    threads: usize,
) -> Result<ComputePipeline> {
    static CACHE: OnceLock<Mutex<HashMap<(DeviceId, String), ComputePipeline>>> = OnceLock::new();
    let defines: String = macros.iter().map(|(name, value)| format!("#define {name} {value}\n")).collect();
    let key = (device.id(), format!("{entry}\n{defines}"));
    let mut cache = CACHE.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pipeline) = cache.get(&key) {
        return Ok(pipeline.clone());
    }
    let failed = |what: &str, e: &dyn Display| Error::msg(format!("Metal kernel {entry} with {macros:?} {what}: {e}"));
    // Exact arithmetic is asked for, not the fast mode of Candle's own kernels: in that, a compiler
    // may drop `x + 0`, which turns -0 into 0, and add up in another order. The newer `setMathMode`
    // does not exist before macOS 15.
    let options = MTLCompileOptions::new();
    #[allow(deprecated)]
    options.setFastMathEnabled(false);
    let metal = device.metal_device();
    let pipeline = metal
        .new_library_with_source(&(defines + source), Some(&options))
        .and_then(|library| library.get_function(entry, None))
        .and_then(|function| metal.new_compute_pipeline_state_with_function(&function))
        .map_err(|e| failed("cannot be compiled", &e))?;
    let most = pipeline.max_total_threads_per_threadgroup();
    if most < threads {
        return Err(failed("does not fit this device", &format!("it takes {threads} threads, {most} are possible")));
    }
    cache.insert(key, pipeline.clone());
    Ok(pipeline)
}
