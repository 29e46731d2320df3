//! This module transfers attention: it trains the feature maps alone, so that each layer's
//! attention returns what the teacher's returns.

use anyhow::Result;
use candle_core::Tensor;
use performer_core::{Attention, Inputs, Mask, Softmax};

use super::{
    Plan, Trained,
    descend::{Descent, descend},
    measure::Meter,
    stage::Bookmark,
};
use crate::{data::Prepared, model::Decoder};

/// Trains the feature maps on `‖o − ô‖² / ‖o‖²` summed over the layers, where `o` is what the
/// teacher's attention returns for the same queries, keys and values. Returns `None` if training was stopped.
pub(super) fn transfer(
    plan: &Plan,
    bookmark: &Bookmark,
    teacher: &Decoder,
    student: Decoder,
    data: &Prepared,
    meter: &Meter<'_>,
) -> Result<Option<Trained>> {
    let maps = student.named_parameters()?.into_iter().filter(|(name, _)| name.contains(".feature_map.")).collect();
    let descent = Descent {
        steps: plan.transfer_steps,
        rate: plan.transfer_rate,
        weight_decay: 0.0,
        seed: plan.seed,
        measure_every: plan.transfer_steps / plan.points.saturating_add(1),
    };
    let loss = |ids: &Tensor, _: &[u32]| differences(plan, teacher, &student, ids);
    let frozen = || Decoder::frozen(&plan.config, &student.tensors()?, &plan.device);
    let done = descend(plan, bookmark, &descent, maps, data, loss, || meter.loss(&frozen()?))?;
    let Some((tokens, points)) = done else { return Ok(None) };
    Ok(Some(Trained { student: frozen()?, tokens, points }))
}

/// Computes the sum over layers of the relative squared differences of their outputs.
fn differences(plan: &Plan, teacher: &Decoder, student: &Decoder, ids: &Tensor) -> Result<Tensor> {
    let mut losses = Vec::new();
    teacher.hidden_through(ids, |layer, q, k, v| {
        let [q, k, v] = [q, k, v].map(Tensor::detach);
        let exact = Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
        if plan.config.attention_of(layer).favor().is_some_and(|favor| favor.map.is_trained()) {
            let estimate = student.attention(layer).forward(Inputs::new(&q, &k, &v), &Mask::causal())?;
            let norm = exact.sqr()?.sum_all()?;
            losses.push((estimate - &exact)?.sqr()?.sum_all()?.div(&norm)?);
        }
        Ok(exact)
    })?;
    Ok(Tensor::stack(&losses, 0)?.sum_all()?)
}
