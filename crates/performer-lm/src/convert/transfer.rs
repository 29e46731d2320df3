//! This module transfers attention: it trains the feature maps and the forget gates alone, so that
//! each layer's attention returns what the teacher's returns.

use anyhow::Result;
use candle_core::Tensor;
use performer_core::{Attention, Inputs, Mask, Softmax};

use super::{
    Plan, Trained,
    descend::{Descent, descend},
    measure::Meter,
    plan::is_transferred,
    stage::Bookmark,
    windows::{are_dropped, bare},
};
use crate::{data::Prepared, model::Decoder};

/// Trains the feature maps, and the forget gates beside them, on `‖o − ô‖² / ‖o‖²` summed over the
/// layers, where `o` is what the teacher's attention returns for the same queries, keys and values.
/// In steps without windows the features have to estimate all of `o`. Returns `None` if training
/// was stopped.
pub(super) fn transfer(
    plan: &Plan,
    bookmark: &Bookmark,
    teacher: &Decoder,
    student: Decoder,
    data: &Prepared,
    meter: &Meter<'_>,
) -> Result<Option<Trained>> {
    let mut parameters = student.named_parameters();
    parameters.retain(|(name, _)| is_of_transfer(plan, name));
    let descent = Descent {
        steps: plan.transfer_steps,
        rate: plan.transfer_rate,
        weight_decay: 0.0,
        seed: plan.seed,
        points: plan.points,
    };
    let loss = |step: usize, ids: &Tensor, _: &[u32]| {
        let bare = if are_dropped(step, plan.drop_window) { bare(&student)? } else { None };
        differences(plan, teacher, bare.as_ref().unwrap_or(&student), ids)
    };
    let frozen = || Decoder::frozen(&plan.config, &student.tensors(), &plan.device);
    let done = descend(plan, bookmark, &descent, parameters, data, loss, || meter.loss(&frozen()?))?;
    let Some((tokens, points)) = done else { return Ok(None) };
    Ok(Some(Trained { student: frozen()?, tokens, points }))
}

/// Whether the transfer trains a parameter: those of the feature map and the forget gate, in layers
/// whose attention is held against the teacher's. Exact attention may have gates as well, but it
/// has nothing to estimate, so they come to be trained in the stages that follow.
fn is_of_transfer(plan: &Plan, name: &str) -> bool {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')?.0.parse().ok());
    [".feature_map.", ".self_attn.gate."].iter().any(|part| name.contains(part))
        && layer.is_some_and(|layer| is_transferred(plan.config.attention_of(layer)))
}

/// Computes the sum over layers of the relative squared differences of their outputs.
fn differences(plan: &Plan, teacher: &Decoder, student: &Decoder, ids: &Tensor) -> Result<Tensor> {
    let mut losses = Vec::new();
    teacher.hidden_beside(student, ids, |layer, inputs| {
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(Tensor::detach);
        let exact = Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
        if is_transferred(plan.config.attention_of(layer)) {
            let mut same = Inputs::new(&q, &k, &v);
            same.gates = inputs.gates;
            let estimate = student.attention(layer).forward(same, &Mask::causal())?;
            let norm = exact.sqr()?.sum_all()?;
            losses.push((estimate - &exact)?.sqr()?.sum_all()?.div(&norm)?);
        }
        Ok(exact)
    })?;
    Ok(Tensor::stack(&losses, 0)?.sum_all()?)
}
