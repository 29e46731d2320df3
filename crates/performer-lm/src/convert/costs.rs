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
use crate::{config::ModelConfig, data::Prepared, eval::guessing, listener::Unit, model::Decoder, train::git_revision};

/// `Costs` are what the conversion of each layer alone costs, with nothing trained.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Costs {
    /// The attention that layers are given, as it is written on the command line.
    pub attention_spec: String,
    /// Name of the text.
    pub corpus: String,
    /// Number of tokens of the training text that were measured.
    pub measured_tokens: usize,
    /// Revision of the program.
    pub revision: String,
    /// What was measured of the teacher as it is.
    pub teacher: Measured,
    /// Each layer that was to be converted, in the order of layers.
    pub layers: Vec<LayerCost>,
}

/// A `LayerCost` is what the conversion of one layer costs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LayerCost {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// What the exchange loses, in nats per token: the rise of the loss on the training text, and
    /// those on pass keys and on pairs, each a mean over their lengths. What the teacher does not
    /// find again better than by guessing does not count, since its loss there is noise.
    pub cost: f64,
    /// What was measured of the teacher with the attention of this layer exchanged.
    pub measured: Measured,
}

impl Costs {
    /// Returns the layers in the order of what they cost, those that cost most first.
    pub fn by_cost(&self) -> Vec<&LayerCost> {
        let mut layers: Vec<_> = self.layers.iter().collect();
        layers.sort_by(|a, b| b.cost.total_cmp(&a.cost));
        layers
    }
}

/// Measures the teacher of the plan, and then the teacher with each of its layers alone exchanged
/// for what the plan's configuration has there. It measures on the training text, so that the
/// held-out text on which [`run`](super::run) reports has chosen no layer. It trains nothing, fits
/// nothing and writes nothing. Returns `None` if it was stopped.
///
/// # Errors
/// As [`run`](super::run), if a loss is not finite, and if recall cannot be measured in texts of
/// the plan's lengths.
pub fn costs(plan: &Plan, data: &Prepared) -> Result<Option<Costs>> {
    check(plan)?;
    let model = plan.teacher.decoder(&plan.device).context("cannot build the teacher")?;
    let meter = Meter::new(plan, &model, &data.train);
    meter.check()?;
    let Some(teacher) = meter.measure(&model).context("cannot measure the teacher")? else { return Ok(None) };
    let changed = |layer: &usize| plan.config.attention_of(*layer) != plan.teacher.config.attention_of(*layer);
    let changed: Vec<usize> = (0..plan.config.layers).filter(changed).collect();
    let mut layers = Vec::new();
    let bar = plan.listener.begin("costs", Unit::Layers, 0, changed.len() as u64);
    for layer in changed {
        let config = ModelConfig {
            attention_by_layer: [(layer, plan.config.attention_of(layer).clone())].into(),
            attention: plan.teacher.config.attention.clone(),
            ..plan.config.clone()
        };
        let tensors = with_fresh(&config, plan, plan.teacher.tensors.clone())?;
        let student = Decoder::frozen(&config, &tensors, &plan.device)?;
        let measured = meter.measure(&student).with_context(|| format!("cannot measure layer {layer}"))?;
        let Some(measured) = measured else { return Ok(None) };
        let cost = cost(&teacher, &measured, guessing(config.vocab_size));
        plan.listener.note(&format!("layer {layer} of {}: {cost:+.4} nats", plan.config.layers));
        layers.push(LayerCost { layer, cost, measured });
        bar.advance(layers.len() as u64);
    }
    Ok(Some(Costs {
        attention_spec: plan.config.attention_text(),
        corpus: data.corpus_name.clone(),
        measured_tokens: meter.held_out_tokens()?,
        revision: git_revision().to_string(),
        teacher,
        layers,
    }))
}

/// Returns the [cost](LayerCost::cost) of what was measured beside the teacher; `guess` is the loss
/// of a guess among all tokens.
fn cost(teacher: &Measured, measured: &Measured, guess: f64) -> f64 {
    let rises = teacher.recall.iter().zip(&measured.recall).flat_map(|(before, after)| {
        [(before.passkey, before.passkey_loss, after.passkey_loss), (before.pairs, before.pairs_loss, after.pairs_loss)]
    });
    // Among many questions a guess is right now and then.
    let counted = rises.filter(|(found, before, _)| *found > 0.0 && *before < guess);
    let recall: f64 = counted.map(|(_, before, after)| after - before).sum();
    measured.held_out.val_loss - teacher.held_out.val_loss + recall / teacher.recall.len().max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{convert::Predictions, recall::Recall};

    #[test]
    fn recall_counts_where_the_teacher_has_any() {
        let measured = |val_loss, recall: [[f64; 4]; 2]| Measured {
            held_out: Predictions { val_loss, perplexity: val_loss.exp(), top1_agreement: 1.0 },
            second: None,
            recall: recall
                .into_iter()
                .map(|[passkey, passkey_loss, pairs, pairs_loss]| Recall {
                    tokens: 256,
                    passkey,
                    passkey_loss,
                    pairs,
                    pairs_loss,
                })
                .collect(),
        };
        // It finds pass keys in texts of the first length, and pairs in those of both.
        let teacher = measured(2.0, [[0.5, 1.0, 0.5, 2.0], [0.0, 8.0, 0.25, 3.0]]);
        let exchanged = measured(2.5, [[0.0, 3.0, 0.0, 3.0], [0.0, 4.0, 0.5, 2.0]]);
        assert_eq!(cost(&teacher, &exchanged, 8.0), 0.5 + (2.0 + 1.0 - 1.0) / 2.0);
        // A pair that was found by chance says nothing.
        let teacher = measured(2.0, [[0.0, 9.0, 0.01, 11.6], [0.0, 9.0, 0.0, 11.6]]);
        let exchanged = measured(2.5, [[0.0, 9.5, 0.0, 11.9], [0.0, 9.1, 0.0, 11.5]]);
        assert_eq!(cost(&teacher, &exchanged, 8.3), 0.5);
    }
}
