//! Attention transfer: the feature maps alone, trained so that each layer's attention returns what the teacher's returns.

use std::collections::HashMap;

use anyhow::{Context, Result};
use candle_core::{Tensor, Var};
use performer_core::{Attention, Favor, Mask, Softmax, features::Fitted};

use super::{
    Plan, attention,
    descend::{Descent, descend},
    fitted,
};
use crate::{data::Prepared, model::Decoder};

/// The maps of one layer while they are trained.
struct Trained {
    layer: usize,
    names: Vec<&'static str>,
    vars: Vec<Var>,
    attention: Box<dyn Attention>,
}

impl Trained {
    fn map(names: &[&'static str], tensors: &[Tensor]) -> candle_core::Result<Fitted> {
        Fitted::from_tensors(&|name| names.iter().position(|n| *n == name).map(|i| tensors[i].clone()))
    }
}

/// Trains the maps on `‖o − ô‖² / ‖o‖²` summed over the layers, `o` being what the teacher's attention returns for the same queries, keys
/// and values. `None` if it was stopped.
pub(super) fn transfer(
    plan: &Plan,
    teacher: &Decoder,
    mut student: Decoder,
    data: &Prepared,
) -> Result<Option<(Decoder, u64)>> {
    let mut layers = Vec::new();
    for layer in 0..plan.config.layers {
        let config = plan.config.attention_of(layer);
        if config.favor().is_none_or(|f| f.map != performer_core::FeatureMapKind::Learned) {
            continue;
        }
        let map = fitted(&student, layer)?.context("a learned feature map has no parameters")?;
        let map = map.for_heads(plan.config.kv_heads)?;
        let (names, tensors): (Vec<_>, Vec<_>) = map.tensors().into_iter().unzip();
        // What multiplies all features of a query cancels.
        let vars = tensors.into_iter().map(Var::from_tensor).collect::<candle_core::Result<Vec<_>>>()?;
        let tracked: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
        let favor = Favor::with_map(Box::new(Trained::map(&names, &tracked)?))?;
        layers.push(Trained { layer, names, vars, attention: attention(config, favor)? });
    }
    let named = layers.iter().flat_map(|l| {
        let parts = l.names.iter().zip(&l.vars).filter(|(name, _)| **name != "query_metric");
        parts.map(|(name, var)| (format!("layers.{}.{name}", l.layer), var.clone()))
    });
    let parameters = named.collect();
    let by_layer: HashMap<usize, &Trained> = layers.iter().map(|l| (l.layer, l)).collect();
    let descent = Descent {
        name: "transfer",
        steps: plan.transfer_steps,
        rate: (plan.transfer_rate, "--transfer-rate"),
        weight_decay: 0.0,
        seed: plan.seed,
    };
    let Some(tokens) = descend(plan, &descent, parameters, data, |ids, _| differences(teacher, &by_layer, ids))? else {
        return Ok(None);
    };
    for l in &layers {
        let tensors: Vec<Tensor> =
            l.vars.iter().map(|var| var.as_detached_tensor().copy()).collect::<candle_core::Result<_>>()?;
        let favor = Favor::fitted(Trained::map(&l.names, &tensors)?)?;
        student.set_attention(l.layer, attention(plan.config.attention_of(l.layer), favor)?);
    }
    Ok(Some((student, tokens)))
}

/// Relative squared differences of the layers' outputs, summed.
fn differences(teacher: &Decoder, layers: &HashMap<usize, &Trained>, ids: &Tensor) -> Result<Tensor> {
    let mut losses = Vec::new();
    teacher.hidden_through(ids, |layer, q, k, v| {
        let [q, k, v] = [q, k, v].map(Tensor::detach);
        let exact = Softmax::new().forward(&q, &k, &v, &Mask::causal())?;
        if let Some(trained) = layers.get(&layer) {
            let estimate = trained.attention.forward(&q, &k, &v, &Mask::causal())?;
            let norm = exact.sqr()?.sum_all()?;
            losses.push((estimate - &exact)?.sqr()?.sum_all()?.div(&norm)?);
        }
        Ok(exact)
    })?;
    Ok(Tensor::stack(&losses, 0)?.sum_all()?)
}
