//! This module trains a small model briefly, once with softmax and once with FAVOR, on the sample
//! text that comes with the program.

use anyhow::{Context, Result};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::{Extent, Item, Line, Part};
use crate::{
    config::{AttentionConfig, ModelConfig, Precision, Preset, TrainingConfig},
    data::{DataSpec, prepare},
    listener::Silent,
    train::{RunOptions, Trainer},
    unfinished::Scratch,
};

/// A `Training` describes one training run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Training {
    /// The preset whose sizes the model has; its vocabulary is smaller, because the sample is
    /// small.
    pub preset: String,
    /// The attention with its settings.
    pub attention_spec: String,
    /// Number of trained parameters.
    pub params: usize,
    /// Type of the activations.
    pub dtype: Precision,
    /// Number of sequences in a step, and of tokens in each.
    pub batch: (usize, usize),
    /// Number of optimiser steps.
    pub steps: usize,
    /// Training tokens per second.
    pub tokens_per_second: f64,
    /// Cross-entropy on held-out text at the end, in nats per token.
    pub val_loss: f64,
}

/// Returns an item for each attention.
pub(super) fn items(extent: Extent) -> Vec<Item> {
    ["softmax", "favor:m=128"]
        .map(|attention| {
            Item::new(Part::Training, format!("training with {attention}"), move |device| {
                Ok(vec![Line::Training(run(attention, device, extent)?)])
            })
        })
        .into_iter()
        .collect()
}

/// Trains a model with one attention.
fn run(attention: &str, device: &Device, extent: Extent) -> Result<Training> {
    let (preset, vocabulary, batch, steps) = match extent {
        Extent::Quick => (Preset::Seed, 512, 8, 5),
        Extent::Full => (Preset::Stories15m, 2048, 64, 40),
    };
    let (config, training) = preset.load()?;
    let dtype = if device.is_cpu() { Precision::F32 } else { Precision::Bf16 };
    let data = prepare(&DataSpec::Sample, vocabulary, None, &Silent)?;
    let attention: AttentionConfig = attention.parse().map_err(anyhow::Error::msg)?;
    let config = ModelConfig { attention, ..config };
    let train = |steps: usize| {
        let training = TrainingConfig {
            epochs: steps,
            max_steps: Some(steps),
            batch_size: batch,
            micro_batch: if device.is_cpu() { training.micro_batch.min(batch) } else { batch },
            dtype,
            eval_every: 0,
            save_every: 0,
            ..training.clone()
        };
        let folder = Scratch::new("the run")?;
        let options = RunOptions { device: device.clone(), threads: 1, ..RunOptions::new(folder.path()) };
        Trainer::new(&config, &training, &data, options)?.run()?.context("stopped")
    };
    // The first steps compile kernels and allocate memory.
    train(2)?;
    let report = train(steps)?;
    Ok(Training {
        preset: format!("{preset:?}").to_lowercase(),
        attention_spec: report.attention_spec,
        params: report.params,
        dtype,
        batch: (batch, config.context),
        steps: report.steps,
        tokens_per_second: report.tokens_per_second,
        val_loss: report.val_loss,
    })
}
