//! This module checks whether this machine's GPU computes correct results, and measures how fast:
//! it compares every kernel with a reference in f64, then takes timings, then trains briefly with
//! either attention. It needs nothing but the program, and runs on the CPU too.

mod attention;
mod parts;
mod speed;
mod training;

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};

pub use speed::{Speed, Work};
pub use training::Training;

use crate::{bench::attention::Others, device::describe, machine::Machine, train::git_revision};

/// A `Check` is one comparison with a reference.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Check {
    /// What was compared.
    pub what: String,
    /// The largest difference, relative to the largest number of the reference; `None` if it is not
    /// finite.
    pub error: Option<f64>,
    /// The largest error that passes.
    pub tolerance: f64,
    /// Whether the check passed.
    pub passed: bool,
    /// Why the check failed, if there is more to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
}

/// A `Report` holds all results.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Name of the GPU, or `cpu`.
    pub device: String,
    /// The machine that has the device.
    pub machine: Machine,
    /// Revision of this program.
    pub revision: String,
    /// Whether every check passed.
    pub passed: bool,
    /// The comparisons with references.
    pub checks: Vec<Check>,
    /// The timings of attention.
    pub speed: Vec<Speed>,
    /// The training runs.
    pub training: Vec<Training>,
    /// What could not be timed, and why, for instance for lack of memory.
    pub skipped: Vec<String>,
    /// Seconds that all of it took.
    pub seconds: f64,
}

/// An `Extent` says how much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Small sizes, which take half a minute on a CPU.
    Quick,
    /// All sizes, which take minutes on a GPU.
    Full,
}

/// Runs everything, or only the comparisons with references if `only_checks`; `progress` is called
/// with what comes next. PyTorch's times, if given, are put beside ours.
///
/// # Errors
/// If a part cannot run at all. A wrong result is no error: it is in the report.
pub fn run(
    device: &Device,
    extent: Extent,
    only_checks: bool,
    pytorch: Option<&Others>,
    mut progress: impl FnMut(&str),
) -> Result<Report> {
    let started = Instant::now();
    let mut checks = Vec::new();
    poison(true);
    progress("attention against the reference");
    attention::check(device, extent, &mut checks, &mut progress)?;
    progress("the other operations against f64");
    parts::check(device, &mut checks);
    #[cfg(feature = "metal")]
    if let Some(because) = performer_core::kernels::metal::failure() {
        checks.push(Check::of("Metal's own kernel".to_string(), Err(anyhow::Error::msg(because)), 0.0));
    }
    poison(false);
    let (mut speed, mut training, mut skipped) = (Vec::new(), Vec::new(), Vec::new());
    if !only_checks {
        progress("timing attention");
        speed = speed::run(device, extent, &mut skipped, &mut progress)?;
        if let Some(pytorch) = pytorch {
            speed.iter_mut().for_each(|speed| speed.set_beside(pytorch));
        }
        training = training::run(device, extent, &mut skipped, &mut progress)?;
    }
    Ok(Report {
        device: describe(device),
        machine: Machine::with(device),
        revision: git_revision().to_string(),
        passed: checks.iter().all(|c| c.passed),
        checks,
        speed,
        training,
        skipped,
        seconds: started.elapsed().as_secs_f64(),
    })
}

/// Sets whether outputs on CUDA are filled with NaN before kernels write them.
fn poison(on: bool) {
    #[cfg(feature = "cuda")]
    performer_core::kernels::cuda::poison_outputs(on);
    #[cfg(not(feature = "cuda"))]
    let _ = on;
}

/// Returns the result, or adds a line to `skipped`.
fn unless_skipped<T>(what: &str, result: Result<T>, skipped: &mut Vec<String>) -> Option<T> {
    result.map_err(|error| skipped.push(format!("{what}: {}", first_line(&error)))).ok()
}

/// Returns an error with its causes, without the backtrace that Candle adds.
fn first_line(error: &anyhow::Error) -> String {
    let causes: Vec<String> = error.chain().map(|e| e.to_string()).collect();
    causes.iter().map(|cause| cause.lines().next().unwrap_or_default()).collect::<Vec<_>>().join(": ")
}

impl Check {
    fn of(what: String, error: Result<f64>, tolerance: f64) -> Self {
        let (error, because) = match error {
            Ok(error) => (Some(error).filter(|e| e.is_finite()), None),
            Err(error) => (None, Some(first_line(&error))),
        };
        Self { what, error, tolerance, passed: error.is_some_and(|e| e <= tolerance), because }
    }
}

/// Returns the largest relative error that results in a type may have.
fn tolerance(dtype: DType) -> f64 {
    if dtype == DType::F32 { 1e-4 } else { 1e-2 }
}

/// Returns the largest difference relative to the largest expected number; infinite if a number
/// is not finite.
fn relative_error(got: &[f64], want: &[f64]) -> f64 {
    let largest = want.iter().fold(0.0f64, |m, x| m.max(x.abs())).max(1e-30);
    if got.len() != want.len() {
        return f64::INFINITY;
    }
    got.iter().zip(want).fold(0.0, |worst: f64, (g, w)| {
        let error = (g - w).abs() / largest;
        if error.is_nan() { f64::INFINITY } else { worst.max(error) }
    })
}

/// Returns the numbers of a tensor, row by row.
fn numbers(t: &Tensor) -> candle_core::Result<Vec<f64>> {
    t.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// `Random` draws random numbers that are the same on every machine.
struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws normal numbers by the method of Box and Muller, rounded to `dtype`.
    fn normal(&mut self, count: usize, deviation: f64, dtype: DType) -> candle_core::Result<Vec<f64>> {
        let values: Vec<f64> = (0..count)
            .map(|_| {
                let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
                deviation * radius * (std::f64::consts::TAU * self.unit()).cos()
            })
            .collect();
        numbers(&Tensor::from_vec(values, count, &Device::Cpu)?.to_dtype(dtype)?)
    }
}
