//! The loop that the training stages share. A stop costs nothing: what it takes to go on is saved.

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use candle_core::{Tensor, Var};

use super::{Plan, Point, stage::Bookmark};
use crate::{
    data::{Batches, Prepared},
    train::{AdamW, AdamWConfig, Bar, Gradients, Schedule},
};

/// Sequences of a pass. Fixed, so that results do not depend on the number of threads; few, for teacher and student have logits at once.
const ROWS: usize = 4;

/// Between savings of a stage in progress.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// What differs between the stages.
pub(super) struct Descent {
    pub(super) steps: usize,
    /// Peak learning rate, and the option that sets it.
    pub(super) rate: (f64, &'static str),
    pub(super) weight_decay: f64,
    /// Seed of the order of the text.
    pub(super) seed: u64,
    /// Steps between measurements; 0 for none.
    pub(super) measure_every: usize,
}

/// Trains `parameters` on `loss(ids, targets)`, the mean over ids `(B, T)`, and calls `measure` now and then. Returns the tokens seen and
/// the points measured; `None` if it was stopped.
pub(super) fn descend(
    plan: &Plan,
    bookmark: &Bookmark,
    descent: &Descent,
    parameters: Vec<(String, Var)>,
    data: &Prepared,
    loss: impl Fn(&Tensor, &[u32]) -> Result<Tensor> + Sync,
    measure: impl Fn() -> Result<f64>,
) -> Result<Option<(u64, Vec<Point>)>> {
    let name = bookmark.name;
    let Descent { steps, rate: (rate, option), weight_decay, seed, measure_every } = *descent;
    let mut optimizer = AdamW::new(parameters, AdamWConfig { weight_decay, ..AdamWConfig::default() })?;
    let batches = Batches::new(data.train.clone(), plan.config.context, plan.batch_size, seed)?;
    let schedule = Schedule::WarmupCosine { warmup_steps: steps.min(20), min_fraction: 0.05 };
    let tokens = |steps: usize| (steps * batches.tokens_per_batch()) as u64;
    let mut points = bookmark.restore(&mut optimizer)?;
    let bar = Bar::new(name, steps);
    let mut saved = Instant::now();
    for step in optimizer.steps()..steps {
        let stop = plan.stop.load(Ordering::Relaxed);
        if stop || saved.elapsed() > SAVE_EVERY {
            bookmark.save(&optimizer, &points)?;
            saved = Instant::now();
        }
        if stop {
            return Ok(None);
        }
        let (epoch, index) = batches.position(step as u64);
        let batch = batches.batch(epoch, index)?;
        let parts = plan.batch_size.div_ceil(ROWS);
        let (mean, gradients) = Gradients::of_parts(parts, plan.threads, optimizer.parameters(), |i| {
            let part = i * ROWS * batch.context..((i + 1) * ROWS * batch.context).min(batch.inputs.len());
            let rows = part.len() / batch.context;
            let ids = Tensor::from_slice(&batch.inputs[part.clone()], (rows, batch.context), &plan.device)?;
            Ok((loss(&ids, &batch.targets[part])? * (rows as f64 / plan.batch_size as f64))?)
        })?;
        optimizer
            .step(&gradients, schedule.lr(rate, step, steps), Some(1.0))
            .with_context(|| format!("{name} step {}, loss {mean}; lower {option}", step + 1))?;
        bar.step(step + 1, mean, batches.tokens_per_batch());
        if measure_every > 0 && (step + 1) % measure_every == 0 && step + 1 < steps {
            points.push(Point { tokens: tokens(step + 1), val_loss: measure()? });
        }
    }
    Ok(Some((tokens(steps), points)))
}
