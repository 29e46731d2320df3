//! This module opens the device to compute on, and explains what is wrong where that fails.

use anyhow::{Context, Result, bail};
use candle_core::Device;

use crate::errors::Cause;

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum DeviceKind {
    /// CUDA or Metal where this build has it and finds one, else the CPU.
    Auto,
    /// The processor.
    Cpu,
    /// An NVIDIA card: the first, or for processes under mpirun one each, in their order.
    Cuda,
    /// The graphics of a Mac.
    Metal,
}

impl DeviceKind {
    /// Opens the first device of this kind. `note` is called when `Auto` falls back to the CPU
    /// because a device that this build supports cannot be opened.
    ///
    /// # Errors
    /// If the build has no support for the device, or the machine has none that works.
    pub fn open(self, note: impl Fn(&str)) -> Result<Device> {
        match self {
            Self::Cpu => Ok(Device::Cpu),
            Self::Cuda => cuda(),
            Self::Metal => metal(),
            Self::Auto => {
                let found = if candle_core::utils::cuda_is_available() {
                    cuda()
                } else if candle_core::utils::metal_is_available() {
                    metal()
                } else {
                    return Ok(Device::Cpu);
                };
                Ok(found.unwrap_or_else(|error| {
                    note(&format!("computing on the CPU: {error}"));
                    Device::Cpu
                }))
            }
        }
    }
}

fn cuda() -> Result<Device> {
    if !candle_core::utils::cuda_is_available() {
        bail!(Cause::Device(
            "this build has no CUDA: make one that has with scripts/cuda-build.sh (or cargo build --features cuda)"
                .into()
        ));
    }
    let device = Device::new_cuda(card()).context(Cause::Device(
        "no CUDA device can be opened: nvidia-smi must list one, and a driver of at least the version that the CUDA libraries \
         here need (580 for CUDA 13)"
            .into(),
    ))?;
    #[cfg(feature = "cuda")]
    {
        let card = device.as_cuda_device()?;
        // SAFETY: the events would order several streams that one context has made. This program
        // makes none beside Candle's own, between whose threads they are never recorded.
        unsafe { card.disable_event_tracking() };
        performer_core::kernels::cuda::keep_memory(card).context("the CUDA device cannot be set up")?;
    }
    Ok(device)
}

/// The number of the card that this process takes: several processes on a machine divide its cards.
fn card() -> usize {
    #[cfg(feature = "cuda")]
    if let Ok(count @ 1..) = candle_core::cuda_backend::cudarc::driver::CudaContext::device_count() {
        return performer_dist::local_rank() % count as usize;
    }
    0
}

fn metal() -> Result<Device> {
    if !candle_core::utils::metal_is_available() {
        bail!(Cause::Device("this build has no Metal: build it with --features metal on a Mac".into()));
    }
    // Candle panics where there is none, as in a virtual machine.
    #[cfg(feature = "metal")]
    if performer_core::kernels::metal::devices() == 0 {
        bail!(Cause::Device("this machine has no Metal device".into()));
    }
    Device::new_metal(0).context(Cause::Device("no Metal device can be opened".into()))
}

/// Adds the cause to an error that says that a GPU's memory ran out, unless it has one; `lower`
/// says what decides how much is needed.
pub(crate) fn explain_memory(error: anyhow::Error, device: &Device, lower: String, in_training: bool) -> anyhow::Error {
    let explained = matches!(error.downcast_ref(), Some(Cause::OutOfMemory { .. }));
    if device.is_cpu() || explained || !is_out_of_memory(&error) {
        return error;
    }
    error.context(Cause::OutOfMemory { free: free_memory(device), lower, in_training })
}

/// What drivers and Candle say where the memory of a device ran out, in lower case; the last two
/// are of Metal.
const OUT_OF_MEMORY: [&str; 4] =
    ["out_of_memory", "out of memory", "insufficient memory", "failed to create metal resource: buffer"];

/// Whether an error says that the memory of a device ran out. Drivers say it in words alone.
pub(crate) fn is_out_of_memory(error: &anyhow::Error) -> bool {
    let ran_out = |text: String| OUT_OF_MEMORY.iter().any(|words| text.to_lowercase().contains(words));
    matches!(error.downcast_ref(), Some(Cause::OutOfMemory { .. })) || error.chain().any(|e| ran_out(e.to_string()))
}

#[cfg(feature = "cuda")]
fn free_memory(device: &Device) -> Option<(usize, usize)> {
    performer_core::kernels::cuda::free_memory(device.as_cuda_device().ok()?).ok()
}

#[cfg(not(feature = "cuda"))]
fn free_memory(_: &Device) -> Option<(usize, usize)> {
    None
}

/// Returns the name of a device for reports: that of the GPU, or `cpu`.
pub fn describe(device: &Device) -> String {
    #[cfg(feature = "cuda")]
    if let Ok(device) = device.as_cuda_device() {
        return performer_core::kernels::cuda::device_name(device);
    }
    kind(device).to_string()
}

/// Returns the name of a device's kind, as `--device` takes it.
pub(crate) fn kind(device: &Device) -> &'static str {
    match device {
        Device::Cpu => "cpu",
        Device::Cuda(_) => "cuda",
        Device::Metal(_) => "metal",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_build_lacks_is_said() {
        for (kind, available) in [
            (DeviceKind::Cuda, candle_core::utils::cuda_is_available()),
            (DeviceKind::Metal, candle_core::utils::metal_is_available()),
        ] {
            if !available {
                let error = kind.open(|_| ()).unwrap_err();
                assert!(matches!(error.downcast_ref(), Some(Cause::Device(_))));
                assert!(error.to_string().contains("this build has no"), "{error}");
            }
        }
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let error = explain_memory(anyhow::anyhow!("out of memory"), &Device::Cpu, "nothing".into(), false);
        assert_eq!(error.chain().count(), 1);
    }
}
