//! Measuring time on the device's own clock.

use candle_core::{
    Result,
    cuda_backend::{
        CudaDevice, WrapErr,
        cudarc::driver::{CudaEvent, CudaStream, sys::CUevent_flags},
    },
};

/// `Stopwatch` is an event in the queue of a device's work.
#[derive(Debug)]
pub struct Stopwatch(CudaEvent);

impl Stopwatch {
    /// Starts the measurement when the work queued so far is done.
    pub fn start(device: &CudaDevice) -> Result<Self> {
        Ok(Self(event(&device.cuda_stream())?))
    }

    /// Waits until the work queued since is done, and returns the seconds it took.
    pub fn stop(self, device: &CudaDevice) -> Result<f64> {
        let end = event(&device.cuda_stream())?;
        Ok(f64::from(self.0.elapsed_ms(&end).w()?) / 1e3)
    }
}

fn event(stream: &CudaStream) -> Result<CudaEvent> {
    stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).w()
}
