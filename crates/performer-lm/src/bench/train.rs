//! This module measures training: tokens per second of whole optimiser steps, one attention beside
//! another.

use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::{Effort, matmul_rate};
use crate::{
    config::{AttentionPattern, ModelConfig, Positions, TrainingConfig},
    data::Prepared,
    errors::Cause,
    listener::Listener,
    machine::Machine,
    model::pretrained::Pretrained,
    train::{RunOptions, Trainer},
    unfinished::Scratch,
};

/// A `Point` is one measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The attention, as it was asked for, or as the trained model has it.
    pub attention_spec: String,
    /// Where the weights come from that the steps begin with; `None` if they are new.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Number of trained parameters.
    pub params: usize,
    /// Training tokens per second, from embedding to update: the median of the rounds.
    pub tokens_per_second: f64,
    /// Training tokens per second in each round, in their order; empty if there was one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounds: Vec<f64>,
    /// Billions of FLOP per second, counted as 6 for each weight of a matrix product and token,
    /// without attention.
    pub gflops: f64,
}

/// A `Report` holds all that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The machine on which it was measured.
    pub machine: Machine,
    /// Number of threads.
    pub threads: usize,
    /// Configuration of the model, apart from its attention.
    pub config: ModelConfig,
    /// Number of optimiser steps of each run.
    pub steps: usize,
    /// Billions of FLOP per second of a product of two 1024×1024 matrices, for each thread that
    /// computes it.
    pub matmul_gflops: f64,
    /// The measurements.
    pub points: Vec<Point>,
}

/// The number of threads on which Candle computes a matrix product.
fn threads_of_products(device: &Device) -> f64 {
    if device.is_cpu() { candle_core::utils::get_num_threads() as f64 } else { 1.0 }
}

/// What is measured, and on what.
pub struct Plan<'a> {
    /// The model; its attention is replaced by each of `attentions` and by those of `trained`.
    pub config: ModelConfig,
    /// Training settings.
    pub training: TrainingConfig,
    /// The attentions to measure, in this order. All are trained on the same batches, and new
    /// models from the same seed.
    pub attentions: Vec<AttentionPattern>,
    /// Trained models to measure after them, each with the name that the report gives it.
    pub trained: Vec<(String, Pretrained)>,
    /// Number of optimiser steps of each run.
    pub steps: usize,
    /// Number of rounds, in each of which everything is measured once. What slows the machine down
    /// for a while then slows down all that is compared, and the medians leave it out.
    pub rounds: usize,
    /// Device on which the models are trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop.
    pub stop: &'a AtomicBool,
    /// Is told of steps and validations.
    pub listener: &'a dyn Listener,
}

/// Trains each attention and then each trained model for some steps, and discards the results;
/// `progress` is called with what comes next.
///
/// New and trained weights differ in speed where there are forget gates: exact attention skips
/// blocks of keys that its gates have made negligible, and FAVOR begins a new chunk where its gates
/// have forgotten much.
///
/// # Errors
/// If an attention does not fit the model, if a trained model differs from the configuration in
/// more than its attention or has another tokenizer than the data, if a training cannot begin or
/// fails ([`Trainer::exactly`], [`Trainer::run`]), if there is no place for its temporary folder,
/// or, with [`Cause::Stopped`], if it is stopped.
pub fn run(plan: &Plan, data: &Prepared, mut progress: impl FnMut(String)) -> Result<Report> {
    ensure!(plan.steps > 0, Cause::setting("", "steps", 0, "at least 1"));
    ensure!(plan.rounds > 0, Cause::setting("", "rounds", 0, "at least 1"));
    // There are as many epochs as the steps can need.
    let epochs = plan.steps.max(2);
    let training = TrainingConfig { epochs, eval_every: 0, save_every: 0, ..plan.training.clone() };
    let mut report = Report {
        machine: Machine::with(&plan.device),
        threads: plan.threads,
        // A short text gives a small vocabulary, but the output head must have the size that it has
        // in real training.
        config: ModelConfig {
            vocab_size: plan.config.vocab_size.max(data.tokenizer.vocab_size()),
            ..plan.config.clone()
        },
        steps: plan.steps,
        // Where steps have few passes, Candle's products inside of them use several threads.
        matmul_gflops: matmul_rate(Effort::default(), &plan.device)? / threads_of_products(&plan.device),
        points: Vec::new(),
    };
    // What cannot be compared is refused before anything is measured.
    let alike = |(name, model): &(String, Pretrained)| {
        let config = with_attention_of(&report.config, name, model, data)?;
        Ok((name.clone(), Pretrained { config, ..model.clone() }))
    };
    let trained = plan.trained.iter().map(alike).collect::<Result<Vec<_>>>()?;
    let new = |attention| {
        let config = report.config.clone().with_attention(attention)?;
        Ok(Candidate { name: attention.to_string(), config, trained: None })
    };
    let mut candidates = plan.attentions.iter().map(new).collect::<Result<Vec<_>>>()?;
    candidates.extend(trained.into_iter().map(|(name, model)| Candidate {
        name: format!("{} of {name}", model.config.attention_text()),
        config: model.config.clone(),
        trained: Some((name, model)),
    }));
    let mut measured = vec![Vec::new(); candidates.len()];
    for round in 1..=plan.rounds {
        for (candidate, measured) in candidates.iter().zip(&mut measured) {
            let of = if plan.rounds > 1 { format!(", round {round} of {}", plan.rounds) } else { String::new() };
            progress(format!("{}{of}", candidate.name));
            measured.push(measure(plan, &training, candidate, data)?);
        }
    }
    report.points = measured.into_iter().map(median_of).collect();
    Ok(report)
}

/// A `Candidate` is one of what is compared.
struct Candidate {
    /// What it is called while it is measured.
    name: String,
    config: ModelConfig,
    /// The trained model that the steps begin with, and the name that the report gives it; `None`
    /// if they begin with new weights.
    trained: Option<(String, Pretrained)>,
}

/// Returns the measurement of median speed, with the speeds of all rounds; of an even number of
/// rounds the slower one of the two in the middle.
fn median_of(rounds: Vec<Point>) -> Point {
    let speeds: Vec<f64> = rounds.iter().map(|point| point.tokens_per_second).collect();
    let mut sorted = rounds;
    sorted.sort_by(|a, b| a.tokens_per_second.total_cmp(&b.tokens_per_second));
    let median = sorted.swap_remove((sorted.len() - 1) / 2);
    Point { rounds: if speeds.len() > 1 { speeds } else { Vec::new() }, ..median }
}

/// Returns `config` with the attention of a trained model.
///
/// # Errors
/// If the model's weights do not fit it, or the text was encoded for another model.
fn with_attention_of(config: &ModelConfig, name: &str, model: &Pretrained, data: &Prepared) -> Result<ModelConfig> {
    let ModelConfig { attention, attention_by_layer, .. } = model.config.clone();
    let config = ModelConfig { attention, attention_by_layer, ..config.clone() };
    // Of a trained model, these can be changed, unless it has learned positions.
    let context = if config.positions == Positions::Learned { model.config.context } else { config.context };
    let own = ModelConfig { context, dropout: config.dropout, ..model.config.clone() };
    ensure!(
        own == config,
        "{name} differs from the model that is measured in more than its attention, so their speeds cannot be compared: \
         measure it by itself"
    );
    ensure!(
        model.tokenizer.hash() == data.tokenizer.hash(),
        "{name} has another tokenizer than the first model, so they cannot train on the same tokens: measure it by itself"
    );
    Ok(config)
}

/// Trains a candidate for some steps, and measures it.
fn measure(plan: &Plan, training: &TrainingConfig, candidate: &Candidate, data: &Prepared) -> Result<Point> {
    let Candidate { config, trained, .. } = candidate;
    let train = |steps: usize| {
        let training = TrainingConfig { max_steps: Some(steps), ..training.clone() };
        let folder = Scratch::new("the run")?;
        let options = RunOptions {
            device: plan.device.clone(),
            threads: plan.threads,
            stop: plan.stop,
            listener: plan.listener,
            ..RunOptions::new(folder.path())
        };
        let trainer = match trained {
            Some((_, weights)) => Trainer::from_weights(weights, &training, data, options)?,
            None => Trainer::exactly(config, &training, data, options)?,
        };
        trainer.run()?.context(Cause::Stopped("stopped".into()))
    };
    if !plan.device.is_cpu() {
        // The first steps on a GPU compile kernels and allocate memory.
        train(2)?;
    }
    let run = train(plan.steps)?;
    // An embedding is looked up, not multiplied, and so are learned positions; a tied output head
    // does multiply by the embedding.
    let embeddings = if config.tied_head { 0 } else { config.vocab_size };
    let positions = if config.positions == Positions::Learned { config.context } else { 0 };
    let looked_up = (embeddings + positions) * config.hidden_size;
    let flop = 6.0 * run.params.saturating_sub(looked_up) as f64;
    Ok(Point {
        attention_spec: run.attention_spec,
        from: trained.as_ref().map(|(name, _)| name.clone()),
        params: run.params,
        tokens_per_second: run.tokens_per_second,
        rounds: Vec::new(),
        gflops: flop * run.tokens_per_second / 1e9,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(tokens_per_second: f64) -> Point {
        let gflops = tokens_per_second / 2.0;
        Point { attention_spec: "softmax".into(), from: None, params: 1, tokens_per_second, rounds: Vec::new(), gflops }
    }

    #[test]
    fn the_median_round_is_reported_with_all_rounds_in_their_order() {
        let of = |speeds: &[f64]| median_of(speeds.iter().copied().map(point).collect());
        let three = of(&[30.0, 10.0, 20.0]);
        assert_eq!((three.tokens_per_second, three.gflops), (20.0, 10.0));
        assert_eq!(three.rounds, [30.0, 10.0, 20.0]);
        assert_eq!(of(&[40.0, 10.0, 30.0, 20.0]).tokens_per_second, 20.0);
        assert_eq!((of(&[10.0]).tokens_per_second, of(&[10.0]).rounds.len()), (10.0, 0));
    }
}
