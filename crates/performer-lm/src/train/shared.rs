//! What several ranks that train one model do together: they share a batch, fail together, stop
//! together, and let one of them write the files.

#[cfg(feature = "lab")]
use anyhow::bail;
use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use performer_dist::{Disagreement, Grid, Reduction, agree, agree_on, gather, sum_in_order};
use serde_json::Value;

#[cfg(feature = "lab")]
use super::{Found, Report, RunOptions, find, find_or_run};
use super::{Gradients, run_key};
#[cfg(feature = "lab")]
use crate::{
    config::{ModelConfig, TrainingConfig},
    data::Prepared,
    errors::Cause,
};

/// Returns the outcome of this rank, or the error of the first rank that failed: all ranks fail,
/// and know why.
pub(crate) fn agreed<T>(ranks: &Grid, outcome: Result<T>) -> Result<T> {
    if ranks.world().size() == 1 {
        return outcome;
    }
    let failure = outcome.as_ref().err().map(|error| format!("{error:#}"));
    match (agree(ranks.world(), failure.as_deref())?, outcome) {
        (None, outcome) => outcome,
        // The rank that failed keeps its own error, in whose causes the program finds its advice.
        (Some(failed), Err(error)) if failed.rank == ranks.world().rank() => Err(error.context(failed)),
        (Some(failed), _) => Err(failed.into()),
    }
}

/// Does something on the one rank that writes files; all ranks fail if it fails.
pub(crate) fn led<T>(ranks: &Grid, work: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
    agreed(ranks, if ranks.leads() { work().map(Some) } else { Ok(None) })
}

/// Does something on the first rank, then on one rank of each other machine, then on all others:
/// what the first of a machine downloads, or writes to a cache, the others find.
#[cfg(feature = "cli")]
pub(crate) fn in_turn<T>(ranks: &Grid, work: impl Fn() -> Result<T>) -> Result<T> {
    let mut done = led(ranks, &work)?;
    let turn = done.is_none() && performer_dist::local_rank() == 0;
    done = agreed(ranks, if turn { work().map(Some) } else { Ok(done) })?;
    agreed(ranks, done.map_or_else(work, Ok))
}

/// Refuses ranks that would divide other runs among themselves than rank 0, or make them otherwise:
/// `plan` are the settings, as a JSON object.
#[cfg(feature = "lab")]
pub(crate) fn require_one_plan(
    ranks: &Grid,
    config: &ModelConfig,
    plan: &Value,
    data: &Prepared,
    device: &Device,
) -> Result<()> {
    let key = run_key::RunKey::new("several runs", config, plan, run_key::digests(data), 0, device)?;
    require_equal(ranks, &serde_json::to_value(key)?)
}

/// Refuses ranks whose settings, data, program or progress, as named in a JSON object, are not
/// those of rank 0.
pub(super) fn require_equal(ranks: &Grid, what: &Value) -> Result<()> {
    let parse = |text: &str| serde_json::from_str(text).unwrap_or(Value::Null);
    let differs = |first: &str, other: &str| {
        let listed = run_key::listed_apart(&parse(first), &parse(other));
        format!("it does not train what rank 0 trains: {listed}")
    };
    refuse(agree_on(ranks.world(), &what.to_string(), differs)?)
}

/// Refuses ranks whose weights are not those of rank 0: something was computed otherwise there.
pub(super) fn require_equal_weights(ranks: &Grid, digest: impl FnOnce() -> Result<String>) -> Result<()> {
    if ranks.world().size() == 1 {
        return Ok(());
    }
    let digest = agreed(ranks, digest())?;
    refuse(agree_on(ranks.world(), &digest, |_, _| {
        "its weights are no longer those of rank 0: the machines compute differently, or a memory is faulty; what was \
         saved before is whole"
            .into()
    })?)
}

fn refuse(differs: Option<Disagreement>) -> Result<()> {
    differs.map_or(Ok(()), |differs| Err(differs.into()))
}

/// Makes each of `count` runs on one of the ranks; later all ranks find the results in a folder
/// that they share. Returns the numbers of the runs that diverged, where `may_diverge` says that
/// the others go on without them, or `None` if a run was stopped: no further one is begun then. A
/// rank whose run fails waits until the others have ended theirs, which keeps these, and then all
/// fail.
#[cfg(feature = "lab")]
pub(crate) fn divided(
    ranks: &Grid,
    count: usize,
    may_diverge: impl Fn(usize) -> bool,
    mut make: impl FnMut(usize) -> Result<Option<Report>>,
) -> Result<Option<Vec<usize>>> {
    let world = ranks.world();
    let mut mine = (world.rank()..count).step_by(world.size());
    let mut diverged = Vec::new();
    let outcome = mine.try_fold(true, |_, run| match make(run) {
        Ok(Some(_)) => Ok(true),
        Ok(None) => Err(None),
        Err(error) if may_diverge(run) && is_divergence(&error) => {
            diverged.push(run);
            Ok(true)
        }
        Err(error) => Err(Some(error)),
    });
    let stopped = matches!(outcome, Err(None));
    agreed(ranks, outcome.or_else(|error| error.map_or(Ok(false), Err)))?;
    if any_asked(ranks, stopped)? {
        return Ok(None);
    }
    let numbers: Vec<u8> = diverged.iter().flat_map(|run| (*run as u64).to_le_bytes()).collect();
    let numbers = gather(world, &numbers)?.concat();
    let number = |bytes: &[u8]| bytes.try_into().map_or(usize::MAX, |bytes| u64::from_le_bytes(bytes) as usize);
    Ok(Some(numbers.chunks_exact(8).map(number).collect()))
}

/// Whether a run failed because its loss or gradients were no longer finite.
#[cfg(feature = "lab")]
pub(crate) fn is_divergence(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(Cause::Diverged { .. }))
}

/// Returns the result of one of several runs. A process that is alone makes the run, unless its
/// result is there already; where there are several, each reads what [`divided`] has made.
#[cfg(feature = "lab")]
pub(crate) fn made(
    ranks: &Grid,
    config: &ModelConfig,
    training: &TrainingConfig,
    data: &Prepared,
    options: RunOptions,
) -> Result<Option<Report>> {
    if ranks.world().size() == 1 {
        return find_or_run(config, training, data, options);
    }
    match find(config, training, data, &options)? {
        Found::Finished(report) => Ok(Some(*report)),
        _ => bail!(
            "{} has no result, though a process has trained it: all processes need one folder for results, on a file \
             system that all of them see",
            options.out.display()
        ),
    }
}

/// Whether any rank was asked to stop.
pub(crate) fn any_asked(ranks: &Grid, asked: bool) -> Result<bool> {
    if ranks.world().size() == 1 {
        return Ok(asked);
    }
    let mut flag = [if asked { 1.0 } else { 0.0 }];
    ranks.world().all_reduce(&mut flag, Reduction::Max)?;
    Ok(flag[0] > 0.0)
}

/// Computes the sums of `loss(0..parts)` and of their gradients for `params`, of which each group
/// of ranks computes a part. All ranks get both, with the bits that one rank would get; where cards
/// are connected, these add the gradients, and their bits depend on the number of ranks.
///
/// Gradients leave a rank when all of its parts are computed: neither Candle's backward pass nor
/// the tape's hands out the gradient of a parameter before it ends. A rank after the first keeps
/// those of its parts until the sum over the parts before them arrives.
pub(super) fn gradients(
    ranks: &Grid,
    parts: usize,
    threads: usize,
    params: &[(String, Var)],
    loss: impl Fn(usize) -> Result<Tensor> + Sync,
) -> Result<(f64, Gradients)> {
    let world = ranks.world();
    if world.size() == 1 {
        return Gradients::of_parts(parts, threads, params, loss);
    }
    let adds = world.rank() == 0 || world.cards().is_some();
    let mut kept = Vec::<Gradients>::new();
    let losses = Gradients::of_each(ranks.share(parts), threads, params, loss, |gradients| {
        match kept.last_mut() {
            Some(sum) if adds => sum.add(gradients)?,
            _ => kept.push(gradients),
        }
        Ok(())
    })?;
    let sum = sum(ranks, &kept, params)?;
    let losses: Vec<u8> = losses.iter().flat_map(|loss| loss.to_le_bytes()).collect();
    let losses = gather(world, &losses)?.concat();
    let losses = losses.chunks_exact(8).map(|bytes| bytes.try_into().map_or(f64::NAN, f64::from_le_bytes));
    Ok((losses.sum(), sum))
}

/// Adds the gradients of all ranks, of which each has kept some.
fn sum(ranks: &Grid, kept: &[Gradients], params: &[(String, Var)]) -> Result<Gradients> {
    let cut = ranks.sequence().size() > 1;
    #[cfg(feature = "nccl")]
    if let Some(cards) = ranks.world().cards() {
        return super::cards::sum(cards, kept.first(), params, cut);
    }
    let kept = kept.iter().map(|gradients| flat(gradients, params, cut)).collect::<Result<Vec<_>>>()?;
    let length = params.iter().map(|(_, var)| var.elem_count()).sum();
    of_flat(&sum_in_order(ranks.world(), length, &kept)?, params)
}

/// Returns the gradient of parameter `i`. It may be missing only where sequences are `cut` into
/// segments: the loss of one segment need not depend on every parameter, on a feature map for keys
/// beyond a window, say, where none of its queries has such keys.
pub(super) fn present<'a>(
    gradients: &'a Gradients,
    params: &[(String, Var)],
    i: usize,
    cut: bool,
) -> Result<Option<&'a Tensor>> {
    let gradient = gradients.tensors[i].as_ref();
    ensure!(cut || gradient.is_some(), "parameter `{}` received no gradient", params[i].0);
    Ok(gradient)
}

/// Returns the numbers of all gradients, parameter by parameter.
fn flat(gradients: &Gradients, params: &[(String, Var)], cut: bool) -> Result<Vec<f32>> {
    let mut numbers = Vec::with_capacity(params.iter().map(|(_, var)| var.elem_count()).sum());
    for (i, (_, var)) in params.iter().enumerate() {
        let Some(gradient) = present(gradients, params, i, cut)? else {
            numbers.resize(numbers.len() + var.elem_count(), 0.0);
            continue;
        };
        let gradient = gradient.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.flatten_all()?;
        numbers.extend(gradient.to_vec1::<f32>()?);
    }
    Ok(numbers)
}

/// Returns the gradients of `params` from their numbers, which stand as [`flat`] puts them.
fn of_flat(numbers: &[f32], params: &[(String, Var)]) -> Result<Gradients> {
    let mut start = 0;
    let tensor = |(_, var): &(String, Var)| {
        let count = var.elem_count();
        start += count;
        let gradient = Tensor::from_slice(&numbers[start - count..start], var.shape(), var.device())?;
        Ok(Some(gradient.to_dtype(var.dtype())?))
    };
    Ok(Gradients { tensors: params.iter().map(tensor).collect::<Result<_>>()? })
}
