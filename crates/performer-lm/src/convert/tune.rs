//! This module fine-tunes a student: all weights, or low-rank adapters and all that the teacher
//! does not have, are trained on the next token and on the teacher's distribution of it
//! (distillation).

use anyhow::Result;
use candle_core::Tensor;

use super::{
    Plan, Trained,
    adapters::Adapters,
    descend::{Descent, descend},
    measure::Meter,
    stage::Bookmark,
    windows::{are_dropped, bare, without_windows},
};
use crate::{data::Prepared, model::Decoder};

/// `Tuning` says how a student is fine-tuned.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuning {
    /// Number of optimiser steps.
    pub steps: usize,
    /// Peak learning rate.
    pub rate: f64,
    /// Weight of the teacher's distribution in the loss; the cross-entropy of the next token has
    /// the rest.
    pub distillation: f64,
    /// Rank of the adapters that are trained in place of the weights, if any.
    pub adapters: Option<usize>,
}

impl Tuning {
    /// Returns a fine-tuning of all weights in so many steps, at the rate 3e-4, of which one half
    /// of the loss is the teacher's distribution and the other half the next token's.
    pub fn new(steps: usize) -> Self {
        Self { steps, rate: 3e-4, distillation: 0.5, adapters: None }
    }
}

/// Fine-tunes `student` as the stage of the bookmark. Returns `None` if training was stopped.
pub(super) fn tune(
    plan: &Plan,
    bookmark: &Bookmark,
    tuning: Tuning,
    teacher: &Decoder,
    student: Decoder,
    data: &Prepared,
    meter: &Meter<'_>,
) -> Result<Option<Trained>> {
    let config = student.config().clone();
    let adapters = tuning.adapters.map(|rank| Adapters::new(&student, plan.teacher, rank, plan.seed)).transpose()?;
    let parameters = match &adapters {
        Some(adapters) => adapters.parameters(),
        None => student.named_parameters(),
    };
    // Returns the model whose loss a step computes, or `None` where it is the student itself.
    let changed = |step: usize| -> Result<Option<Decoder>> {
        let dropped = are_dropped(step, plan.drop_window);
        let Some(adapters) = &adapters else { return if dropped { bare(&student) } else { Ok(None) } };
        let bare = if dropped { without_windows(&config) } else { None };
        Ok(Some(Decoder::over_tensors(bare.as_ref().unwrap_or(&config), &adapters.merged()?, &plan.device)?))
    };
    let descent = Descent {
        steps: tuning.steps,
        rate: tuning.rate,
        weight_decay: 0.01,
        // Another seed gives this stage other text than the transfer began with.
        seed: plan.seed.wrapping_add(1),
        points: plan.points,
    };
    let loss = |step: usize, ids: &Tensor, targets: &[u32]| -> Result<Tensor> {
        let changed = changed(step)?;
        let student = changed.as_ref().unwrap_or(&student);
        let losses = match tuning.distillation {
            0.0 => student.losses(ids, targets, None)?,
            share => student.distillation_losses(ids, targets, teacher, share)?,
        };
        Ok(losses.mean_all()?)
    };
    let frozen = || -> Result<Decoder> {
        let tensors = match &adapters {
            None => student.tensors(),
            Some(adapters) => adapters.merged()?,
        };
        // Tensors are copied, so that later steps do not change them, and detached.
        let tensors = tensors.into_iter().map(|(name, tensor)| Ok((name, tensor.detach().copy()?)));
        Decoder::frozen(&config, &tensors.collect::<Result<_>>()?, &plan.device)
    };
    let done = descend(plan, bookmark, &descent, parameters, data, loss, || meter.loss(&frozen()?))?;
    let Some((tokens, points)) = done else { return Ok(None) };
    Ok(Some(Trained { student: frozen()?, tokens, points }))
}
