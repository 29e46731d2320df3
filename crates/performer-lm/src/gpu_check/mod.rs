//! This module checks whether this machine's GPU computes correct results, and measures how fast:
//! it compares every kernel with a reference in f64, then takes timings, then trains a small model
//! briefly, once with softmax and once with FAVOR. It needs nothing but the program, and runs on
//! the CPU too.
//!
//! The work is a list of [`Item`]s. [`perform`] does them one after the other and gives each result
//! away as a [`Line`] as soon as it is known, so that nothing is lost when a kernel makes the
//! device or the process fail: what is missing is done by another process, and [`Report::of`] puts
//! the lines of all processes together.

mod attention;
mod lines;
mod maps;
mod parts;
mod speed;
mod training;

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use performer_core::projection::draw_normal;
#[cfg(feature = "metal")]
use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};

use crate::device::is_out_of_memory;
pub use lines::{About, Line, Report, State};
pub use speed::{Speed, Work};
pub use training::Training;

/// A `Check` is one comparison with a reference.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Check {
    /// What was compared.
    pub what: String,
    /// The largest difference, relative to the largest number of the reference, or, where a check
    /// counts, the number of outputs or tensors that are not as they must be; `None` if it is not
    /// finite or nothing could be compared.
    pub error: Option<f64>,
    /// The largest error that passes.
    pub tolerance: f64,
    /// Whether the check passed.
    pub passed: bool,
    /// What computed it: kernels for a device, or Candle's operations and why; where that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Why the check failed, if there is more to say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub because: Option<String>,
}

/// An `Extent` says how much is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Extent {
    /// Small sizes, which take half a minute on a CPU.
    Quick,
    /// All sizes, which take minutes on a GPU.
    Full,
}

/// A `Part` is a kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Comparisons with a reference.
    Checks,
    /// Timings of attention.
    Timings,
    /// Training runs.
    Training,
}

/// An `Item` is a piece of work that is done whole or not at all.
pub struct Item {
    /// What is done, in words. No two items of a list have the same name: the lines of a check tell
    /// items apart by it.
    pub name: String,
    /// The kind of work.
    pub part: Part,
    work: Perform,
}

type Perform = Box<dyn Fn(&Device) -> Result<Vec<Line>>>;

impl Item {
    fn new(part: Part, name: impl Into<String>, work: impl Fn(&Device) -> Result<Vec<Line>> + 'static) -> Self {
        Self { name: name.into(), part, work: Box::new(work) }
    }

    fn checks(name: impl Into<String>, work: impl Fn(&Device) -> Result<Vec<Check>> + 'static) -> Self {
        let work = move |device: &Device| {
            poison(true);
            let checks = work(device);
            poison(false);
            Ok(checks?.into_iter().map(Line::Check).collect())
        };
        Self::new(Part::Checks, name, work)
    }
}

/// Returns everything that there is to do on a device, in order: what needs little time comes
/// first.
pub fn items(device: &Device, extent: Extent) -> Vec<Item> {
    let mut items = attention::items(extent, !device.is_cpu());
    items.extend(maps::items(extent));
    items.extend(parts::items());
    // On Hopper, FAVOR's forward kernel takes matrix products of warpgroups in the items above, so
    // the kernel that other cards use in its place is checked by items of its own.
    if has_warpgroups(device) {
        items.extend(attention::items_without_warpgroups(extent));
    }
    #[cfg(feature = "metal")]
    items.push(Item::checks("Metal's own kernel", |device| {
        // Whatever ran before in this process, the kernel is compiled for this at the latest.
        let favor = Favor::new(&FavorConfig::default(), 64, 1, DType::F32, device)?;
        let x = Tensor::zeros((1, 1, 70, 64), DType::F32, device)?;
        favor.forward(Inputs::new(&x, &x, &x), &Mask::causal())?;
        let failure = performer_core::kernels::metal::failure().map(anyhow::Error::msg);
        Ok(vec![Check::of("Metal's own kernel".to_string(), failure.map_or(Ok(0.0), Err), 0.0)])
    }));
    items.extend(speed::items(device, extent));
    items.extend(training::items(extent));
    items
}

/// Does the items one after the other, until all are done or `stop` returns true, and gives every
/// line to `write` as soon as it is known. An item that fails is a line too.
///
/// # Errors
/// If the device no longer answers, as after a kernel that read memory that is not its own: nothing
/// works then until the process ends, and another process must go on. Or if `write` fails.
pub fn perform<'a>(
    items: impl IntoIterator<Item = &'a Item>,
    device: &Device,
    stop: impl Fn() -> bool,
    mut write: impl FnMut(&Line) -> Result<()>,
) -> Result<()> {
    for item in items {
        if stop() {
            break;
        }
        write(&Line::Begin { item: item.name.clone() })?;
        let started = Instant::now();
        let lines = (item.work)(device).unwrap_or_else(|error| {
            let what = item.name.clone();
            vec![match item.part {
                Part::Checks => Line::Check(Check::of(what, Err(error), 0.0)),
                // What there is no memory for is left out; whatever else fails is wrong.
                Part::Timings | Part::Training if is_out_of_memory(&error) => {
                    Line::Skipped { what, because: first_line(&error) }
                }
                Part::Timings | Part::Training => Line::Check(Check::of(what, Err(error), 0.0)),
            }]
        });
        for line in &lines {
            write(line)?;
        }
        if let Err(error) = device.synchronize() {
            let error = anyhow::Error::new(error).context("the device failed");
            write(&Line::Lost { item: item.name.clone(), because: first_line(&error) })?;
            return Err(error.context(item.name.clone()));
        }
        write(&Line::End { item: item.name.clone(), seconds: started.elapsed().as_secs_f64() })?;
    }
    Ok(())
}

/// Sets whether outputs on CUDA are filled with NaN before kernels write them.
fn poison(on: bool) {
    #[cfg(feature = "cuda")]
    performer_core::kernels::cuda::poison_outputs(on);
    #[cfg(not(feature = "cuda"))]
    let _ = on;
}

/// Whether the device is a Hopper GPU, whose groups of four warps have products of their own.
fn has_warpgroups(device: &Device) -> bool {
    #[cfg(feature = "cuda")]
    let has = device.as_cuda_device().and_then(performer_core::kernels::cuda::capability).is_ok_and(|c| c.0 == 9);
    #[cfg(not(feature = "cuda"))]
    let has = {
        let _ = device;
        false
    };
    has
}

/// Does work without products of warpgroups, as cards do that have none.
fn without_warpgroups<T>(work: impl FnOnce() -> T) -> T {
    #[cfg(feature = "cuda")]
    let before = performer_core::kernels::cuda::use_warpgroups(false);
    let done = work();
    #[cfg(feature = "cuda")]
    performer_core::kernels::cuda::use_warpgroups(before);
    done
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
        Self { what, error, tolerance, passed: error.is_some_and(|e| e <= tolerance), path: None, because }
    }

    /// Adds what computed it.
    fn by(self, path: impl Into<String>) -> Self {
        Self { path: Some(path.into()), ..self }
    }
}

/// Returns the largest relative error that results in a type may have. In half types a result goes
/// through at most five roundings, of features, weights, products of pairs, sums, and of the result
/// itself, each of about 2⁻⁹ of its number (in bf16 at most 2⁻⁸); `docs/LOG.md` says more.
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

/// Returns the relative error, or the largest number of `got` where all of `want` is zero, as the
/// gradient of attention to a single key is: what is computed of it is rounding. Infinite if a
/// number is not finite or the counts differ.
fn error_of(got: &[f64], want: &[f64]) -> f64 {
    let largest = |x: &[f64]| x.iter().fold(0.0f64, |m, x| m.max(x.abs()));
    if largest(want) >= 1e-9 {
        return relative_error(got, want);
    }
    // The larger of two numbers is never NaN where one of them is none.
    let is_whole = got.len() == want.len() && got.iter().all(|x| x.is_finite());
    if is_whole { largest(got) } else { f64::INFINITY }
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

    /// Draws normal numbers, rounded to `dtype`.
    fn normal(&mut self, count: usize, deviation: f64, dtype: DType) -> candle_core::Result<Vec<f64>> {
        let normal = Tensor::from_vec(draw_normal(count, self.0.next_u64())?, count, &Device::Cpu)?;
        numbers(&(normal * deviation)?.to_dtype(dtype)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::Cause;

    /// Whatever fails is a failed check, but for what there is no memory for.
    #[test]
    fn what_fails_is_a_failed_check() {
        type Work = fn() -> anyhow::Error;
        let errors: [(Work, usize); 4] = [
            (|| Cause::Diverged { training: "training".into(), step: 3, loss: None }.into(), 1),
            (|| anyhow::anyhow!("a kernel cannot be compiled"), 1),
            (|| anyhow::anyhow!("CUDA_ERROR_OUT_OF_MEMORY").context("allocating"), 0),
            (|| Cause::OutOfMemory { free: None, lower: "the batch".into(), in_training: true }.into(), 0),
        ];
        for (error, expected) in errors {
            for part in [Part::Training, Part::Timings] {
                let items = [Item::new(part, "it", move |_| Err(error()))];
                let (mut failed, mut skipped) = (0, 0);
                let count = |line: &Line| {
                    failed += usize::from(matches!(line, Line::Check(check) if !check.passed));
                    skipped += usize::from(matches!(line, Line::Skipped { .. }));
                    Ok(())
                };
                perform(&items, &Device::Cpu, || false, count).unwrap();
                assert_eq!((failed, skipped), (expected, 1 - expected), "{}", error());
            }
        }
    }

    /// Outputs are filled with NaN before kernels write them, so NaN that is left must not pass,
    /// whatever was expected.
    #[test]
    fn numbers_that_are_not_finite_are_errors() {
        for want in [[0.0, 0.0], [1.0, -2.0]] {
            assert_eq!(error_of(&want, &want), 0.0);
            for bad in [f64::NAN, f64::INFINITY] {
                assert_eq!(error_of(&[want[0], bad], &want), f64::INFINITY, "{bad}");
            }
            assert_eq!(error_of(&want[..1], &want), f64::INFINITY);
        }
        assert_eq!(error_of(&[0.0, -3e-6], &[0.0, 0.0]), 3e-6);
    }
}
