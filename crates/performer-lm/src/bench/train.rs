//! This module measures training: tokens per second of whole optimiser steps, one attention beside
//! another.

use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::{Effort, matmul_rate};
use crate::{
    config::{AttentionPattern, ModelConfig, TrainingConfig},
    data::Prepared,
    errors::Cause,
    listener::Listener,
    machine::Machine,
    train::{Grid, RunOptions, Trainer},
};

/// A `Point` is one measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The attention, as it was asked for.
    pub attention_spec: String,
    /// Number of trained parameters.
    pub params: usize,
    /// Training tokens per second, from embedding to update.
    pub tokens_per_second: f64,
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
    /// Billions of FLOP per second of a product of two 1024×1024 matrices, on one thread.
    pub matmul_gflops: f64,
    /// The measurements.
    pub points: Vec<Point>,
}

/// What is measured, and on what.
pub struct Plan<'a> {
    /// The model; its attention is replaced by each of `attentions`.
    pub config: ModelConfig,
    /// Training settings.
    pub training: TrainingConfig,
    /// The attentions to measure, in this order. Each is trained from the same seed, on the same
    /// batches.
    pub attentions: Vec<AttentionPattern>,
    /// Number of optimiser steps of each run.
    pub steps: usize,
    /// Device on which the models are trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop.
    pub stop: &'a AtomicBool,
    /// Is told of steps and validations.
    pub listener: &'a dyn Listener,
}

/// Trains each attention for some steps and discards the models; `progress` is called with what
/// comes next.
///
/// # Errors
/// If an attention does not fit the model, if a training cannot begin or fails
/// ([`Trainer::exactly`], [`Trainer::run`]), if there is no place for its temporary folder, or,
/// with [`Cause::Stopped`], if it is stopped.
pub fn run(plan: &Plan, data: &Prepared, mut progress: impl FnMut(String)) -> Result<Report> {
    ensure!(plan.steps > 0, Cause::setting("", "steps", 0, "at least 1"));
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
        matmul_gflops: matmul_rate(Effort::default(), &plan.device)?,
        points: Vec::new(),
    };
    for attention in &plan.attentions {
        progress(attention.to_string());
        let config = report.config.clone().with_attention(attention)?;
        let train = |steps: usize| {
            let training = TrainingConfig { max_steps: Some(steps), ..training.clone() };
            let folder = tempfile::tempdir().context("cannot make a folder for the run")?;
            let options = RunOptions {
                out: folder.path(),
                data: "bench",
                device: plan.device.clone(),
                threads: plan.threads,
                stop: plan.stop,
                samples: false,
                listener: plan.listener,
                ranks: Grid::one(),
            };
            let run = Trainer::exactly(&config, &training, data, options)?.run()?;
            run.context(Cause::Stopped("stopped".into()))
        };
        if !plan.device.is_cpu() {
            // The first steps on a GPU compile kernels and allocate memory.
            train(2)?;
        }
        let run = train(plan.steps)?;
        // An embedding is looked up, not multiplied; a tied output head does multiply by it.
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
