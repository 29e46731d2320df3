//! Training: tokens a second of whole steps, attention beside attention.

use anyhow::{Context, Result};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::{Effort, matmul_rate};
use crate::{
    config::{AttentionConfig, ModelConfig, TrainingConfig},
    data::Prepared,
    listener::Listener,
    machine::Machine,
    train::{NEVER, RunOptions, Trainer},
};

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The attention as it was asked for.
    pub attention_spec: String,
    /// Trained parameters.
    pub params: usize,
    /// Training tokens a second: embedding to update.
    pub tokens_per_second: f64,
    /// Billions of FLOP a second, at 6 for each weight of a matrix product and token, attention not counted.
    pub gflops: f64,
}

/// All that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The machine.
    pub machine: Machine,
    /// Threads.
    pub threads: usize,
    /// The model, but for its attention.
    pub config: ModelConfig,
    /// Optimiser steps of each run.
    pub steps: usize,
    /// Billions of FLOP a second of a product of two 1024×1024 matrices, on one thread.
    pub matmul_gflops: f64,
    /// The measurements.
    pub points: Vec<Point>,
}

/// What is measured, and on what.
pub struct Plan<'a> {
    /// The model; its attention is replaced by each of `attentions`.
    pub config: ModelConfig,
    /// The training.
    pub training: TrainingConfig,
    /// Attentions to measure.
    pub attentions: Vec<AttentionConfig>,
    /// Optimiser steps of each.
    pub steps: usize,
    /// Device of the models.
    pub device: Device,
    /// Worker threads on the CPU.
    pub threads: usize,
    /// Is told of steps and validations.
    pub listener: &'a dyn Listener,
}

/// Trains each attention for some steps and throws the models away; `progress` is told what comes next.
pub fn run(plan: &Plan, data: &Prepared, mut progress: impl FnMut(String)) -> Result<Report> {
    let training =
        TrainingConfig { max_steps: Some(plan.steps), eval_every: 0, save_every: 0, ..plan.training.clone() };
    let mut report = Report {
        machine: Machine::with(&plan.device),
        threads: plan.threads,
        // Little text makes few tokens, but the head is to be as large as it is in earnest.
        config: ModelConfig {
            vocab_size: plan.config.vocab_size.max(data.tokenizer.vocab_size()),
            ..plan.config.clone()
        },
        steps: plan.steps,
        matmul_gflops: matmul_rate(Effort::default(), &plan.device)?,
        points: Vec::new(),
    };
    for attention in &plan.attentions {
        progress(attention.to_string());
        let folder = tempfile::tempdir().context("cannot make a folder for the run")?;
        let options = RunOptions {
            out: folder.path(),
            data: "bench",
            device: plan.device.clone(),
            threads: plan.threads,
            stop: &NEVER,
            samples: false,
            listener: plan.listener,
        };
        let config = ModelConfig { attention: attention.clone(), ..report.config.clone() };
        let run = Trainer::exactly(&config, &training, data, options)?.run()?.context("stopped")?;
        // An embedding is looked up, not multiplied; a tied head multiplies by it all the same.
        let embeddings = if config.tied_head { 0 } else { report.config.vocab_size * config.hidden_size };
        let flop = 6.0 * run.params.saturating_sub(embeddings) as f64;
        report.points.push(Point {
            attention_spec: run.attention_spec,
            params: run.params,
            tokens_per_second: run.tokens_per_second,
            gflops: flop * run.tokens_per_second / 1e9,
        });
    }
    Ok(report)
}
