//! This module sets the sizes and budgets of the tasks, which are the same for every attention.

use anyhow::Result;
use serde::{Deserialize, Serialize};

use super::{Task, example::Source};
use crate::config::{
    AttentionConfig, AttentionPattern, FeedForwardKind, ModelConfig, NormKind, NormPosition, Positions,
};

/// A `Recipe` has the length of sequences, the size of the model, and the budget of training.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recipe {
    /// Size of an example: symbols to copy, pairs to recall, tokens of multi-query recall, length
    /// that expressions stay below, bytes of context, residues of a window.
    pub length: usize,
    /// Pairs of keys and values in a sequence of [`Task::Mqar`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pairs: Option<usize>,
    /// Number of optimiser steps.
    pub steps: usize,
    /// Number of examples in a step.
    pub batch_size: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Number of held-out examples that the result is measured on.
    pub held_out: usize,
    /// Number of blocks of the model.
    pub layers: usize,
    /// Dimension of the model.
    pub hidden_size: usize,
    /// Number of heads of the model.
    pub heads: usize,
}

impl Recipe {
    /// Returns the recipe of a task. It was chosen so that softmax solves what can be solved, in
    /// less than half a minute on two idle cores.
    pub(super) fn of(task: Task) -> Self {
        let small = Self {
            length: 0,
            pairs: None,
            steps: 200,
            batch_size: 32,
            learning_rate: 3e-3,
            held_out: 128,
            layers: 2,
            hidden_size: 64,
            heads: 4,
        };
        match task {
            Task::Copying => Self { length: 128, batch_size: 8, held_out: 64, ..small },
            Task::Recall => Self { length: 32, steps: 300, ..small },
            Task::Mqar => Self { length: 64, pairs: Some(4), steps: 600, ..small },
            Task::Listops => Self { length: 200, held_out: 500, ..small },
            Task::Text => Self { length: 1024, steps: 500, batch_size: 4, held_out: 32, ..small },
            Task::Protein => Self { length: 256, steps: 500, batch_size: 16, held_out: 256, ..small },
        }
    }

    /// Returns the configuration of the model. Positions are rotary: relative, and without
    /// parameters.
    pub(super) fn model(
        &self,
        source: &dyn Source,
        attention: &AttentionPattern,
        context: usize,
    ) -> Result<ModelConfig> {
        let config = ModelConfig {
            vocab_size: source.vocabulary(),
            hidden_size: self.hidden_size,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.heads,
            head_dim: None,
            feed_forward_size: 4 * self.hidden_size,
            context,
            feed_forward: FeedForwardKind::Gelu,
            norm: NormKind::LayerNorm,
            norm_position: NormPosition::Pre,
            norm_eps: 1e-5,
            positions: Positions::Rotary { base: 10_000.0 },
            tied_head: false,
            bias: true,
            qkv_bias: false,
            dropout: 0.0,
            attention: AttentionConfig::Softmax,
            attention_by_layer: Default::default(),
            borders: None,
            leak: false,
        };
        config.with_attention(attention)
    }
}
