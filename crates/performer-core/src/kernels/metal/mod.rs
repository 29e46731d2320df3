//! The Metal kernel of FAVOR, compiled by the device when it is first used, from one source with
//! macros for the shape in front of it.
//!
//! It has not been run on an Apple device: `tests/devices/metal_host.rs` runs the source on the
//! CPU, and the code around it is only linted.

#[cfg(feature = "metal")]
mod compile;
#[cfg(feature = "metal")]
pub(crate) mod favor;
mod projection;

/// The number of Metal devices of this machine.
#[cfg(feature = "metal")]
pub fn devices() -> usize {
    candle_metal_kernels::metal::Device::all().len()
}

#[cfg(feature = "metal")]
pub use compile::failure;
#[cfg(feature = "metal")]
pub(crate) use projection::Projection;
