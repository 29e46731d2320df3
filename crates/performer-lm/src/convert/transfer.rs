//! Attention transfer: the feature maps alone, trained so that each layer's attention returns what the teacher's returns.

use std::{collections::HashMap, sync::atomic::Ordering};

use anyhow::{Context, Result};
use candle_core::{Tensor, Var};
use performer_core::{Attention, Favor, Mask, Softmax, features::Fitted};

use super::{Plan, attention, fitted};
use crate::{
    data::{Batches, Prepared},
    model::Decoder,
    train::{AdamW, AdamWConfig, Bar, Gradients, Schedule, in_order},
};

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
    let config = AdamWConfig { weight_decay: 0.0, ..AdamWConfig::default() };
    let mut optimizer = AdamW::new(named.collect(), config)?;
    let by_layer: HashMap<usize, &Trained> = layers.iter().map(|l| (l.layer, l)).collect();
    let batches = Batches::new(data.train.clone(), plan.config.context, plan.batch_size, plan.seed)?;
    let schedule = Schedule::WarmupCosine { warmup_steps: plan.transfer_steps.min(20), min_fraction: 0.05 };
    let bar = Bar::new("transfer", plan.transfer_steps);
    for step in 0..plan.transfer_steps {
        if plan.stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let (epoch, index) = batches.position(step as u64);
        let batch = batches.batch(epoch, index)?;
        let rows = plan.batch_size.div_ceil(plan.threads).max(1);
        let (mut loss, mut sum) = (0.0, None::<Gradients>);
        in_order(
            plan.batch_size.div_ceil(rows),
            plan.threads,
            |i| {
                let part = i * rows * batch.context..((i + 1) * rows * batch.context).min(batch.inputs.len());
                let rows = part.len() / batch.context;
                let ids = Tensor::from_slice(&batch.inputs[part], (rows, batch.context), teacher.device())?;
                let share = rows as f64 / plan.batch_size as f64;
                let loss = (differences(teacher, &by_layer, &ids)? * share)?;
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
        let rate = schedule.lr(plan.transfer_rate, step, plan.transfer_steps);
        optimizer
            .step(&gradients, rate, Some(1.0))
            .with_context(|| format!("transfer step {}, loss {loss}; lower --transfer-rate", step + 1))?;
        bar.step(step + 1, loss / layers.len() as f64);
    }
    for l in &layers {
        let tensors: Vec<Tensor> =
            l.vars.iter().map(|var| var.as_detached_tensor().copy()).collect::<candle_core::Result<_>>()?;
        let favor = Favor::fitted(Trained::map(&l.names, &tensors)?)?;
        student.set_attention(l.layer, attention(plan.config.attention_of(l.layer), favor)?);
    }
    Ok(Some((student, (plan.transfer_steps * batches.tokens_per_batch()) as u64)))
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
