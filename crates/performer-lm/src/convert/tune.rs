//! Fine-tuning: all weights, on the next token and on the teacher's distribution of it.

use anyhow::Result;
use candle_core::{D, Tensor};

use super::{
    Plan,
    descend::{Descent, descend},
};
use crate::{data::Prepared, model::Decoder};

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
    let descent = Descent {
        name: "tune",
        steps: tuning.steps,
        rate: (tuning.rate, "--tune-rate"),
        weight_decay: 0.01,
        // Other text than the transfer began with.
        seed: plan.seed.wrapping_add(1),
    };
    let loss = |ids: &Tensor, targets: &[u32]| -> Result<Tensor> {
        Ok((loss_of(tuning, teacher, &student, ids, targets)? / targets.len() as f64)?)
    };
    let tokens = descend(plan, &descent, student.named_parameters()?, data, loss)?;
    Ok(tokens.map(|tokens| (student, tokens)))
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
