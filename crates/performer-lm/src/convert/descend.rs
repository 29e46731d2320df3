//! The loop that the training stages share. A stop costs nothing: what it takes to go on lies in the folder until the stage is done.

use std::{
    collections::{BTreeMap, HashMap},
    path::PathBuf,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor, Var};
use safetensors::SafeTensors;

use super::{Plan, Point};
use crate::{
    data::{Batches, Prepared},
    files,
    train::{AdamW, AdamWConfig, Bar, Gradients, Schedule, write_safetensors},
};

/// Sequences of a pass. Fixed, so that results do not depend on the number of threads; few, for teacher and student have logits at once.
const ROWS: usize = 4;

/// Between savings of a stage in progress.
const SAVE_EVERY: Duration = Duration::from_secs(60);

/// What differs between the stages.
pub(super) struct Descent {
    pub(super) name: &'static str,
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
    descent: &Descent,
    parameters: Vec<(String, Var)>,
    data: &Prepared,
    loss: impl Fn(&Tensor, &[u32]) -> Result<Tensor> + Sync,
    measure: impl Fn() -> Result<f64>,
) -> Result<Option<(u64, Vec<Point>)>> {
    let Descent { name, steps, rate: (rate, option), weight_decay, seed, measure_every } = *descent;
    let mut optimizer = AdamW::new(parameters, AdamWConfig { weight_decay, ..AdamWConfig::default() })?;
    let batches = Batches::new(data.train.clone(), plan.config.context, plan.batch_size, seed)?;
    let schedule = Schedule::WarmupCosine { warmup_steps: steps.min(20), min_fraction: 0.05 };
    let tokens = |steps: usize| (steps * batches.tokens_per_batch()) as u64;
    let interrupted = Interrupted::of(plan, descent);
    let mut points = interrupted.load(&mut optimizer)?;
    let bar = Bar::new(name, steps);
    let mut saved = Instant::now();
    for step in optimizer.steps()..steps {
        let stop = plan.stop.load(Ordering::Relaxed);
        if stop || saved.elapsed() > SAVE_EVERY {
            interrupted.save(&optimizer, &points)?;
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

/// Forgets what a stage needed to go on, now that its result is saved.
pub(super) fn forget(plan: &Plan, name: &str) -> Result<()> {
    let path = path(plan, name);
    if path.exists() {
        std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

fn path(plan: &Plan, name: &str) -> PathBuf {
    plan.out.join(format!("{name}.interrupted.safetensors"))
}

/// A stage in progress, on disk.
struct Interrupted {
    path: PathBuf,
    /// What must be the same for it to go on.
    settings: String,
}

impl Interrupted {
    fn of(plan: &Plan, d: &Descent) -> Self {
        let Descent { name, steps, rate: (rate, _), weight_decay, seed, measure_every } = d;
        let settings = format!(
            "{steps} steps of {} sequences of {} tokens, rate {rate}, decay {weight_decay}, seed {seed}, measured every {measure_every}, {:?}",
            plan.batch_size, plan.config.context, plan.tuning
        );
        Self { path: path(plan, name), settings }
    }

    fn save(&self, optimizer: &AdamW, points: &[Point]) -> Result<()> {
        let mut tensors = optimizer.state()?;
        tensors
            .extend(optimizer.parameters().iter().map(|(name, var)| (format!("p.{name}"), var.as_detached_tensor())));
        let points = serde_json::to_string(points)?;
        let metadata =
            BTreeMap::from([("settings".to_string(), self.settings.clone()), ("points".to_string(), points)]);
        let mut bytes = Vec::new();
        write_safetensors(&mut bytes, &tensors, &metadata)?;
        files::write(&self.path, &bytes)
    }

    /// Puts parameters and optimiser where they were, if there is anything to go on with.
    fn load(&self, optimizer: &mut AdamW) -> Result<Vec<Point>> {
        if !self.path.exists() {
            return Ok(Vec::new());
        }
        let shown = self.path.display();
        let bytes = std::fs::read(&self.path).with_context(|| format!("cannot read {shown}"))?;
        let damaged = || format!("{shown} is damaged: remove it to begin the stage again");
        let (_, header) = SafeTensors::read_metadata(&bytes).with_context(damaged)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let settings = metadata.get("settings").map_or("", String::as_str);
        ensure!(
            settings == self.settings,
            "{shown} was begun with other settings ({settings}; now {}): give the same, or remove it to begin the stage again",
            self.settings
        );
        let points = serde_json::from_str(metadata.get("points").map_or("[]", String::as_str)).with_context(damaged)?;
        let mut tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).with_context(damaged)?;
        let values: HashMap<String, Tensor> = optimizer
            .parameters()
            .iter()
            .map(|(name, _)| {
                let value = tensors.remove(&format!("p.{name}"));
                Ok((name.clone(), value.with_context(|| format!("{name} is missing")).with_context(damaged)?))
            })
            .collect::<Result<_>>()?;
        optimizer.load_state(&tensors).with_context(damaged)?;
        for (name, var) in optimizer.parameters() {
            var.set(&values[name].to_device(var.device())?.to_dtype(var.dtype())?).with_context(damaged)?;
        }
        Ok(points)
    }
}
