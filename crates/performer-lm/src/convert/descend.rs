//! This module is the training loop that the stages of training share: batches of text, a loss on
//! each, and measurements at intervals. A run that is stopped loses nothing: all that it needs to
//! resume is saved.

use std::time::Duration;

use anyhow::Result;
use candle_core::{Tensor, Var};

use super::{Plan, Point, stage::Bookmark};
use crate::{
    data::{Batches, Prepared},
    train::{AdamW, AdamWConfig, Gradients, Pace, Schedule, Step, StepBar, Steps, take_steps},
};

/// Sequences of one pass. The number is fixed, so that results do not depend on the number of
/// threads, and small, because the logits of teacher and student are in memory at once.
const ROWS: usize = 4;

/// The time between two saves of a stage in progress.
const SAVE_AFTER: Duration = Duration::from_secs(60);

/// `Descent` holds the settings in which the stages of training differ.
pub(super) struct Descent {
    pub(super) steps: usize,
    /// Peak learning rate.
    pub(super) rate: f64,
    pub(super) weight_decay: f64,
    /// Seed of the order of the text.
    pub(super) seed: u64,
    /// Times that the model is measured on the way.
    pub(super) points: usize,
}

/// Trains `parameters` on `loss(step, ids, targets)`, the mean loss over ids `(B, T)` in a step
/// counted from 0, and calls `measure` at intervals, which returns `None` if it was stopped.
/// Returns the number of tokens seen and the points measured, or `None` if training was stopped.
pub(super) fn descend(
    plan: &Plan,
    bookmark: &Bookmark,
    descent: &Descent,
    parameters: Vec<(String, Var)>,
    data: &Prepared,
    loss: impl Fn(usize, &Tensor, &[u32]) -> Result<Tensor> + Sync,
    measure: impl Fn() -> Result<Option<f64>>,
) -> Result<Option<(u64, Vec<Point>)>> {
    let Descent { steps, rate, weight_decay, seed, points: wanted } = *descent;
    let mut optimizer = AdamW::new(parameters, AdamWConfig { weight_decay, ..AdamWConfig::default() })?;
    let points = bookmark.restore(&mut optimizer)?;
    let batches = Batches::new(data.train.clone(), plan.config.context, plan.batch_size, seed)?;
    let bar = StepBar::new(plan.listener, bookmark.name, optimizer.steps(), steps);
    let mut stage = InProgress { plan, bookmark, optimizer, batches, loss, measure, wanted, steps, points, bar };
    let pace = Pace {
        name: bookmark.name,
        steps,
        rate,
        schedule: Schedule::WarmupCosine { warmup_steps: steps.min(20), min_fraction: 0.05 },
        clip: Some(1.0),
        save_after: SAVE_AFTER,
        stop: plan.stop,
    };
    let begun = stage.optimizer.steps();
    // The training may have been stopped in the middle of a measurement.
    stage.measure_if_due(begun)?;
    if !take_steps(&mut stage, &pace)? {
        return Ok(None);
    }
    if begun < steps {
        // The measurements of the whole stage take a while, and may be stopped.
        stage.save()?;
    }
    Ok(Some((stage.tokens(steps), stage.points)))
}

struct InProgress<'a, L, M> {
    plan: &'a Plan<'a>,
    bookmark: &'a Bookmark<'a>,
    optimizer: AdamW,
    batches: Batches,
    loss: L,
    measure: M,
    /// Times that the model is to be measured on the way.
    wanted: usize,
    steps: usize,
    points: Vec<Point>,
    bar: StepBar<'a>,
}

impl<L, M> InProgress<'_, L, M> {
    fn tokens(&self, steps: usize) -> u64 {
        (steps * self.batches.tokens_per_batch()) as u64
    }
}

impl<L, M> InProgress<'_, L, M>
where
    M: Fn() -> Result<Option<f64>>,
{
    /// Measures the student after so many steps, where it is to be measured there and has not been.
    fn measure_if_due(&mut self, steps: usize) -> Result<()> {
        // The training has one part more than points, as equal as may be; a point ends a part.
        let parts = |steps: usize| steps as u128 * (self.wanted as u128 + 1) / self.steps as u128;
        let is_due = steps > 0 && steps < self.steps && parts(steps) > parts(steps - 1);
        let tokens = self.tokens(steps);
        if is_due && self.points.last().is_none_or(|point| point.tokens < tokens) {
            self.points.extend((self.measure)()?.map(|val_loss| Point { tokens, val_loss }));
        }
        Ok(())
    }
}

impl<L, M> Steps for InProgress<'_, L, M>
where
    L: Fn(usize, &Tensor, &[u32]) -> Result<Tensor> + Sync,
    M: Fn() -> Result<Option<f64>>,
{
    fn optimizer(&mut self) -> &mut AdamW {
        &mut self.optimizer
    }

    fn gradients(&mut self, step: usize) -> Result<(f64, Gradients)> {
        let (plan, loss) = (self.plan, &self.loss);
        let (epoch, index) = self.batches.position(step as u64);
        let batch = self.batches.batch(epoch, index)?;
        let parts = plan.batch_size.div_ceil(ROWS);
        Gradients::of_parts(parts, plan.threads, self.optimizer.parameters(), |i| {
            let part = i * ROWS * batch.context..((i + 1) * ROWS * batch.context).min(batch.inputs.len());
            let rows = part.len() / batch.context;
            let ids = Tensor::from_slice(&batch.inputs[part.clone()], (rows, batch.context), &plan.device)?;
            Ok((loss(step, &ids, &batch.targets[part])? * (rows as f64 / plan.batch_size as f64))?)
        })
    }

    fn after(&mut self, step: &Step) -> Result<()> {
        self.bar.step(step.number, step.loss, self.batches.tokens_per_batch());
        self.measure_if_due(step.number)
    }

    fn save(&mut self) -> Result<()> {
        self.bookmark.save(&self.optimizer, &self.points)
    }
}
