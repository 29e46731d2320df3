//! This module measures what the conversion of each layer costs while all other layers stay exact,
//! so that those layers can be converted that cost least.
//!
//! Layers differ much: a few find earlier tokens again and lose that with a window, while others
//! hardly look back at all. Choosing layers by what they cost keeps more than taking every second
//! one (HALO, Chen et al. 2026, <https://arxiv.org/abs/2601.22156>).

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use super::{
    Plan, check,
    measure::{Measured, Meter},
    with_fresh,
};
use crate::{config::ModelConfig, data::Prepared, model::Decoder, train::git_revision};

/// `Costs` are what the conversion of each layer alone costs, with nothing trained.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Costs {
    /// The attention that layers are given, as it is written on the command line.
    pub attention_spec: String,
    /// Name of the text.
    pub corpus: String,
    /// Number of held-out tokens that were measured.
    pub measured_tokens: usize,
    /// Revision of the program.
    pub revision: String,
    /// The teacher.
    pub teacher: Measured,
    /// Each layer that was to be converted, in the order of layers.
    pub layers: Vec<LayerCost>,
}

/// A `LayerCost` is what the conversion of one layer costs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerCost {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// By how many nats the teacher loses: the sum of its losses per token on the held-out text, and
    /// on pass keys and pairs, the mean over their lengths.
    pub cost: f64,
    /// The teacher with the attention of this layer exchanged.
    pub measured: Measured,
}

impl Costs {
    /// Returns the layers in the order of what they cost, dearest first.
    pub fn by_cost(&self) -> Vec<&LayerCost> {
        let mut layers: Vec<_> = self.layers.iter().collect();
        layers.sort_by(|a, b| b.cost.total_cmp(&a.cost));
        layers
    }
}

/// Measures the teacher of the plan, and then the teacher with each of its layers alone exchanged
/// for what the plan's configuration has there. It trains nothing, fits nothing and writes nothing.
/// Returns `None` if it was stopped.
///
/// # Errors
/// As [`run`](super::run), if a loss is not finite, and if recall cannot be measured in texts of
/// the plan's lengths.
pub fn costs(plan: &Plan, data: &Prepared) -> Result<Option<Costs>> {
    check(plan)?;
    let model = plan.teacher.decoder(&plan.device).context("cannot build the teacher")?;
    let meter = Meter::new(plan, &model, &data.valid);
    let Some(teacher) = meter.measure(&model).context("cannot measure the teacher")? else { return Ok(None) };
    let mut layers = Vec::new();
    for layer in 0..plan.config.layers {
        let attention = plan.config.attention_of(layer);
        if attention == plan.teacher.config.attention_of(layer) {
            continue;
        }
        plan.listener.note(&format!("layer {layer} of {}", plan.config.layers));
        let config = ModelConfig {
            attention_by_layer: [(layer, attention.clone())].into(),
            attention: plan.teacher.config.attention.clone(),
            ..plan.config.clone()
        };
        let tensors = with_fresh(&config, plan, plan.teacher.tensors.clone())?;
        let student = Decoder::frozen(&config, &tensors, &plan.device)?;
        let measured = meter.measure(&student).with_context(|| format!("cannot measure layer {layer}"))?;
        let Some(measured) = measured else { return Ok(None) };
        layers.push(LayerCost { layer, cost: nats(&measured) - nats(&teacher), measured });
    }
    Ok(Some(Costs {
        attention_spec: plan.config.pattern().to_string(),
        corpus: data.corpus_name.clone(),
        measured_tokens: plan.measure_tokens,
        revision: git_revision().to_string(),
        teacher,
        layers,
    }))
}

/// Sums up the losses of a model, in nats per token.
fn nats(measured: &Measured) -> f64 {
    let recall: f64 = measured.recall.iter().map(|recall| recall.passkey_loss + recall.pairs_loss).sum();
    measured.held_out.val_loss + recall / measured.recall.len().max(1) as f64
}
