//! This module runs many forward (and backward) passes side by side on the CPU's cores.
//!
//! Candle's elementwise operations run on one thread; small batches on several threads use every
//! core for all of them, and keep the working set near the cache. Where there are fewer passes than
//! threads, several threads work on each. Results come back in the order of the jobs, so sums over
//! them are the same for any number of threads.

use std::{
    collections::BTreeMap,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc,
    },
};

use anyhow::{Context, Result, bail};
use candle_core::Device;
use rayon::ThreadPoolBuilder;

/// The number of threads that can run at the same time here, as far as the system tells.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The threads that may work side by side on a device: as many as are there on a CPU. A card does
/// in order only what one thread asks of it, since Candle's queue there is another one in each.
pub(crate) fn threads_on(device: &Device, threads: usize) -> usize {
    if device.is_cpu() { threads } else { 1 }
}

/// Calls `job` with each number below `count` on up to `threads` threads, on one where `device`, on
/// which it computes, is a card, and passes the results to `fold` in the order of these numbers.
/// Stops at the first error that comes in.
pub(crate) fn in_order<T: Send>(
    device: &Device,
    count: usize,
    threads: usize,
    job: impl Fn(usize) -> Result<T> + Sync,
    mut fold: impl FnMut(T) -> Result<()>,
) -> Result<()> {
    let threads = threads_on(device, threads);
    if threads <= 1 || count <= 1 {
        return (0..count).try_for_each(|i| fold(job(i)?));
    }
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let workers = threads.min(count);
    // Where products and kernels may use several threads, as in a training with few passes, each
    // job has its share of them: all jobs with all threads would only compete for the cores.
    let share = || ThreadPoolBuilder::new().num_threads(threads / workers).build().ok();
    let may_use_several = candle_core::utils::get_num_threads() > 1;
    std::thread::scope(|scope| {
        let (sender, results) = mpsc::channel();
        for started in 0..workers {
            let (sender, next, stop, job, share) = (sender.clone(), &next, &stop, &job, &share);
            let work = move || {
                let pool = may_use_several.then(share).flatten();
                let job = |i: usize| match &pool {
                    Some(pool) => pool.install(|| job(i)),
                    None => job(i),
                };
                while !stop.load(Ordering::Relaxed) {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count || sender.send((i, job(i))).is_err() {
                        break;
                    }
                }
            };
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, work) {
                // Results do not depend on the number of threads, so some are enough.
                if started > 0 {
                    break;
                }
                return Err(error).context("cannot start a thread");
            }
        }
        drop(sender);
        let mut early = BTreeMap::new();
        let mut done = 0;
        let mut drain = || -> Result<()> {
            for (i, result) in &results {
                early.insert(i, result?);
                while let Some(result) = early.remove(&done) {
                    fold(result)?;
                    done += 1;
                }
            }
            if done < count {
                bail!("a worker thread died");
            }
            Ok(())
        };
        let outcome = drain();
        stop.store(true, Ordering::Relaxed);
        outcome
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_does_not_depend_on_threads() {
        for threads in [1, 2, 7] {
            let mut seen = Vec::new();
            let job = |i: usize| {
                std::thread::sleep(std::time::Duration::from_micros(((i * 37) % 11) as u64 * 100));
                Ok(i)
            };
            in_order(&Device::Cpu, 23, threads, job, |i| {
                seen.push(i);
                Ok(())
            })
            .unwrap();
            assert_eq!(seen, (0..23).collect::<Vec<_>>());
        }
    }

    /// Jobs side by side have the threads among them, and a job alone has those of the caller.
    #[test]
    fn threads_are_shared_by_the_jobs() {
        // Where Candle may use one thread alone, so may every job, and there is nothing to share.
        if candle_core::utils::get_num_threads() == 1 {
            return;
        }
        for (count, threads, expected) in [(9, 2, 1), (2, 6, 3), (4, 7, 1)] {
            let mut seen = Vec::new();
            in_order(
                &Device::Cpu,
                count,
                threads,
                |_| Ok(rayon::current_num_threads()),
                |n| {
                    seen.push(n);
                    Ok(())
                },
            )
            .unwrap();
            assert_eq!(seen, vec![expected; count], "{count} jobs, {threads} threads");
        }
        let mut alone = 0;
        let count = |n| {
            alone = n;
            Ok(())
        };
        in_order(&Device::Cpu, 1, 9, |_| Ok(rayon::current_num_threads()), count).unwrap();
        assert_eq!(alone, rayon::current_num_threads());
    }

    #[test]
    fn the_first_error_stops() {
        for threads in [1, 3] {
            let job = |i: usize| if i == 5 { bail!("job five") } else { Ok(i) };
            let error = in_order(&Device::Cpu, 100, threads, job, |_| Ok(())).unwrap_err();
            assert_eq!(error.to_string(), "job five");
        }
    }
}
