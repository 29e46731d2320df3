//! Fine-tuning: all weights, on the next token and on the teacher's distribution of it.

use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use candle_core::{D, Tensor};

use super::Plan;
use crate::{
    data::{Batches, Prepared},
    model::Decoder,
    train::{AdamW, AdamWConfig, Bar, Gradients, Schedule, in_order},
};

/// How a student is fine-tuned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Optimiser steps.
    pub steps: usize,
    /// Peak learning rate.
    pub rate: f64,
    /// Share of the teacher's distribution in the loss; the next token has the rest.
    pub distillation: f64,
}

/// Fine-tunes. `None` if it was stopped.
pub(super) fn tune(
    plan: &Plan,
    teacher: &Decoder,
    student: Decoder,
    data: &Prepared,
) -> Result<Option<(Decoder, u64)>> {
    let Some(tuning) = plan.tuning else { return Ok(Some((student, 0))) };
    let config = AdamWConfig { weight_decay: 0.01, ..AdamWConfig::default() };
    let mut optimizer = AdamW::new(student.named_parameters()?, config)?;
    // Other text than the transfer began with.
    let batches = Batches::new(data.train.clone(), plan.config.context, plan.batch_size, plan.seed.wrapping_add(1))?;
    let schedule = Schedule::WarmupCosine { warmup_steps: tuning.steps.min(20), min_fraction: 0.05 };
    let bar = Bar::new("tune", tuning.steps);
    for step in 0..tuning.steps {
        if plan.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (epoch, index) = batches.position(step as u64);
        let batch = batches.batch(epoch, index)?;
        // Small enough for logits of teacher and student.
        let rows = plan.batch_size.div_ceil(plan.threads).clamp(1, 4);
        let (mut loss, mut sum) = (0.0, None::<Gradients>);
        in_order(
            plan.batch_size.div_ceil(rows),
            plan.threads,
            |i| {
                let part = i * rows * batch.context..((i + 1) * rows * batch.context).min(batch.inputs.len());
                let rows = part.len() / batch.context;
                let ids = Tensor::from_slice(&batch.inputs[part.clone()], (rows, batch.context), student.device())?;
                let loss = loss_of(tuning, teacher, &student, &ids, &batch.targets[part])?;
                let loss = (loss / batch.inputs.len() as f64)?;
                let gradients = Gradients::from_store(&loss.backward()?, optimizer.parameters())?;
                Ok((f64::from(loss.to_scalar::<f32>()?), gradients))
            },
            |(part, gradients)| {
                loss += part;
                match &mut sum {
                    None => sum = Some(gradients),
                    Some(sum) => sum.add(gradients)?,
                }
                Ok(())
            },
        )?;
        let gradients = sum.context("the batch is empty")?;
        let rate = schedule.lr(tuning.rate, step, tuning.steps);
        optimizer
            .step(&gradients, rate, Some(1.0))
            .with_context(|| format!("tuning step {}, loss {loss}; lower --tune-rate", step + 1))?;
        bar.step(step + 1, loss);
    }
    Ok(Some((student, (tuning.steps * batches.tokens_per_batch()) as u64)))
}

/// Summed over the tokens: cross-entropy with the next token and with the teacher's distribution.
fn loss_of(tuning: Tuning, teacher: &Decoder, student: &Decoder, ids: &Tensor, targets: &[u32]) -> Result<Tensor> {
    if tuning.distillation == 0.0 {
        return Ok(student.losses(ids, targets, None)?.sum_all()?);
    }
    let logs = candle_nn::ops::log_softmax(&student.forward(ids, None)?.flatten_to(1)?, D::Minus1)?;
    let theirs = teacher.forward(ids, None)?.detach().flatten_to(1)?;
    let theirs = candle_nn::ops::softmax(&theirs, D::Minus1)?;
    let targets = Tensor::from_slice(targets, (targets.len(), 1), ids.device())?;
    let next = logs.gather(&targets, 1)?.sum_all()?;
    let distribution = (theirs * &logs)?.sum_all()?;
    Ok(((next * (tuning.distillation - 1.0))? - (distribution * tuning.distillation)?)?)
}
