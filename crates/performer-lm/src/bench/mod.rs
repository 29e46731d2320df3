//! This module measures speed: of attention over lengths and features, of decoding over contexts,
//! of whole models that generate, and of training.
//!
//! Figures of attention, decoding and generation are medians of repeated runs after a warm-up; one
//! of training is the mean of its steps. Those of attention and training stand beside the machine's
//! rate of matrix products, measured in the same process, because a figure says little without what
//! the machine can do.

pub mod attention;
pub mod decode;
pub mod generate;
pub mod train;

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use serde::{Deserialize, Serialize};

/// The most numbers of a tensor that is measured with, 64 GiB of them in f32.
const MAX_NUMBERS: usize = 1 << 34;

/// Refuses sizes of a tensor that no memory holds.
fn require_room(sizes: &[(&str, usize)]) -> anyhow::Result<()> {
    let numbers = sizes.iter().try_fold(1usize, |numbers, (_, size)| numbers.checked_mul(*size));
    let named: Vec<String> = sizes.iter().map(|(name, size)| format!("{size} {name}")).collect();
    anyhow::ensure!(
        numbers.is_some_and(|numbers| numbers <= MAX_NUMBERS),
        "{} make more numbers than memory holds; lower one of them",
        named.join(" × ")
    );
    Ok(())
}

/// Returns the length of the window of softmax whose keys and values are as many numbers as the
/// state of `features` features in a head of `dim` dimensions, as nearly as whole tokens allow.
pub(crate) fn window_of_equal_state(features: usize, dim: usize) -> usize {
    // A feature keeps a sum of values, a sum of ones and the scale of both. A window keeps a key
    // and a value of each of its tokens but the query's own.
    1 + (features as f64 * (dim + 2) as f64 / (2 * dim) as f64).round() as usize
}

/// A `Timing` summarises repeated timings of the same work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timing {
    /// Median, in milliseconds.
    pub median_ms: f64,
    /// Lower and upper quartile, in milliseconds.
    pub quartiles_ms: (f64, f64),
    /// Number of runs.
    pub runs: usize,
}

/// An `Effort` says how long each timing is repeated.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// The least total time.
    pub time: Duration,
    /// The least number of runs.
    pub runs: usize,
}

impl Default for Effort {
    fn default() -> Self {
        Self { time: Duration::from_millis(400), runs: 5 }
    }
}

/// Times `work`. It runs once more than is counted: the first run warms up caches and memory.
///
/// # Errors
/// The first error of `work`, or of the device while it is waited for.
pub fn time(effort: Effort, device: &Device, mut work: impl FnMut() -> Result<()>) -> Result<Timing> {
    work()?;
    device.synchronize()?;
    let begun = Instant::now();
    let mut runs = Vec::new();
    while runs.len() < effort.runs || begun.elapsed() < effort.time {
        let start = Instant::now();
        work()?;
        device.synchronize()?;
        runs.push(start.elapsed().as_secs_f64() * 1e3);
    }
    Ok(Timing::of(runs))
}

impl Timing {
    fn of(mut runs: Vec<f64>) -> Self {
        runs.sort_by(f64::total_cmp);
        let at = |share: f64| runs[((runs.len() - 1) as f64 * share).round() as usize];
        Self { median_ms: at(0.5), quartiles_ms: (at(0.25), at(0.75)), runs: runs.len() }
    }
}

/// Returns the billions of FLOP per second of Candle's product of two f32 matrices of 1024×1024,
/// which shows what the machine can do.
///
/// # Errors
/// If the device has no memory for them, or cannot multiply them.
pub fn matmul_rate(effort: Effort, device: &Device) -> Result<f64> {
    let a = Tensor::randn(0f32, 1.0, (1024, 1024), device)?.to_dtype(DType::F32)?;
    let timing = time(effort, device, || a.matmul(&a).map(drop))?;
    Ok(2.0 * 1024f64.powi(3) / timing.median_ms / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timings_are_medians() {
        let timing = Timing::of(vec![5.0, 1.0, 100.0, 2.0, 3.0]);
        assert_eq!(timing, Timing { median_ms: 3.0, quartiles_ms: (2.0, 5.0), runs: 5 });
    }

    #[test]
    fn work_runs_as_often_as_asked_and_once_to_warm_up() {
        let mut count = 0;
        let effort = Effort { time: Duration::ZERO, runs: 7 };
        let timing = time(effort, &Device::Cpu, || {
            count += 1;
            Ok(())
        });
        assert_eq!((timing.unwrap().runs, count), (7, 8));
    }
}
