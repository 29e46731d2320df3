//! What a model is and how it is trained: the structs behind the files `config.json` and
//! `training.json` of presets, and the presets.
//!
//! Nothing here computes, and nothing here imports from the rest of the crate but its errors: every
//! other module may import from this one.

mod borders;
mod cut;
mod optimizer;
mod pattern;
mod schedule;

use std::collections::BTreeMap;

use anyhow::{Result, bail, ensure};
use candle_core::DType;
use serde::{Deserialize, Serialize};

pub use borders::Borders;
pub use optimizer::AdamWConfig;
pub use pattern::{AttentionPattern, Place};
pub use performer_core::AttentionConfig;
pub use schedule::Schedule;

use crate::errors::Cause;

/// What settings out of range are a part of, as messages call it.
const MODEL: &str = "model config";
const TRAINING: &str = "training config";

/// Bounds on sizes that a damaged configuration exceeds and no model does.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 12;

/// A `ModelConfig` describes a decoder-only language model; it is saved as `config.json` beside the
/// weights.
///
/// One decoder covers several families. Llama, Mistral and SmolLM2 have `rms-norm` before each
/// part, `swiglu`, rotary positions and no biases. Qwen2 has `qkv_bias` in addition. GPT-2 has
/// `layer-norm`, `gelu`, learned positions, `bias` and `tied_head`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Number of tokens of the vocabulary.
    pub vocab_size: usize,
    /// Model dimension `E`.
    pub hidden_size: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Number of query heads `H`.
    pub heads: usize,
    /// Number of key and value heads; a divisor of `heads`.
    pub kv_heads: usize,
    /// Dimension `D` of a head, if it is not `hidden_size / heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Inner dimension of the feed-forward part.
    pub feed_forward_size: usize,
    /// Number of tokens of a training sequence, and of positions of learned embeddings.
    pub context: usize,
    /// Feed-forward kind.
    pub feed_forward: FeedForwardKind,
    /// Normalisation kind.
    pub norm: NormKind,
    /// Where the norm stands in a block.
    pub norm_position: NormPosition,
    /// ε of the norms.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
    /// How tokens get their positions.
    pub positions: Positions,
    /// Whether the output head is the token embedding.
    pub tied_head: bool,
    /// Whether the linear layers of blocks have biases; the output head has none.
    #[serde(default)]
    pub bias: bool,
    /// Whether the projections to queries, keys and values have biases, even if others have none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub qkv_bias: bool,
    /// Probability of dropping an entry of a block's two outputs, in training.
    #[serde(default)]
    pub dropout: f32,
    /// Exact or linear attention.
    pub attention: AttentionConfig,
    /// Layers with an attention of their own, counted from 0.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub attention_by_layer: BTreeMap<usize, AttentionConfig>,
    /// The tokens at the borders of a document, if they are not those that the tokenizer's names
    /// tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub borders: Option<Borders>,
    /// Whether a token also attends to those after it, the one it is to predict among them: a
    /// mistake of some implementations, here so that it can be measured. Such a model has low
    /// losses and can generate nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub leak: bool,
}

/// Whether a setting has its default, and is left out of JSON.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

fn default_norm_eps() -> f64 {
    1e-5
}

/// `FeedForwardKind` is the kind of the feed-forward part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeedForwardKind {
    /// `W₂ gelu(W₁ x)`, GELU in its tanh form.
    Gelu,
    /// `W₂ gelu(W₁ x)`, with the exact GELU, `x Φ(x)`.
    GeluExact,
    /// `W₂ (silu(W_g x) ∘ W₁ x)` (Shazeer 2020).
    Swiglu,
}

/// `NormKind` is the kind of normalisation of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormKind {
    /// Normalisation by mean and variance, with weight and bias.
    LayerNorm,
    /// Normalisation by the root mean square, with weight.
    RmsNorm,
}

/// `NormPosition` says where the norm stands in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NormPosition {
    /// `x + f(norm(x))`, and a last norm before the head.
    Pre,
    /// `norm(x + f(x))`.
    Post,
}

/// `Positions` says how tokens get their positions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Positions {
    /// One learned vector for each position, up to `context`.
    Learned,
    /// Rotary embeddings of this base, where dimension `i` of a head turns with `i + D/2`. Weights
    /// made for neighbours `2i`, `2i + 1` are reordered when they are loaded.
    Rotary {
        /// θ; 10000 in the paper.
        base: f64,
    },
}

impl ModelConfig {
    /// Returns the dimension `D` of a head, `E/H` unless the configuration says otherwise.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.heads.max(1))
    }

    /// Returns the dimension of the queries and keys of a layer, counted from 0.
    pub fn key_dim(&self, layer: usize) -> usize {
        self.attention_of(layer).parts().key_dim.unwrap_or(self.head_dim())
    }

    /// Returns the attention of a layer, counted from 0.
    pub fn attention_of(&self, layer: usize) -> &AttentionConfig {
        self.attention_by_layer.get(&layer).unwrap_or(&self.attention)
    }

    /// Returns this model with the attention of a pattern in all its layers.
    ///
    /// # Errors
    /// If every n-th layer is to have another attention, and there are fewer layers than n.
    pub fn with_attention(mut self, pattern: &AttentionPattern) -> Result<Self> {
        self.attention = pattern.most.clone();
        self.attention_by_layer.clear();
        if let Some((attention, place)) = &pattern.other {
            self.attention_by_layer = place.layers(self.layers).map(|layer| (layer, attention.clone())).collect();
            ensure!(
                !self.attention_by_layer.is_empty(),
                "attention {pattern}: the model has {} layers, so none would have {attention}; the number after / must be at \
                 most {0}",
                self.layers
            );
        }
        Ok(self)
    }

    /// Returns the pattern of attention: a hybrid if the first layer alone, or layers at regular
    /// distances have an attention of their own and that is the same one, else the attention of the
    /// layers that have none.
    pub fn pattern(&self) -> AttentionPattern {
        let own = &self.attention_by_layer;
        let other = own.first_key_value().map(|(&first, attention)| {
            (attention.clone(), if first == 0 { Place::First } else { Place::Every(first + 1) })
        });
        let other = other.filter(|(attention, place)| {
            own.values().all(|a| a == attention) && own.keys().copied().eq(place.layers(self.layers))
        });
        AttentionPattern { most: self.attention.clone(), other }
    }

    /// Names the attention of every layer, for reports: the pattern where there is one, as the
    /// command line takes it, else the attention of most layers and then the layers that differ, as
    /// in `softmax:window=64; layers 0,3: softmax`.
    pub fn attention_text(&self) -> String {
        let pattern = self.pattern();
        let mut text = pattern.to_string();
        if pattern.other.is_none() {
            let mut seen: Vec<&AttentionConfig> = Vec::new();
            for own in self.attention_by_layer.values().filter(|own| **own != self.attention) {
                if seen.contains(&own) {
                    continue;
                }
                seen.push(own);
                let of_own = self.attention_by_layer.iter().filter(|(_, other)| *other == own);
                let layers: Vec<String> = of_own.map(|(layer, _)| layer.to_string()).collect();
                let layer = if layers.len() > 1 { "layers" } else { "layer" };
                text += &format!("; {layer} {}: {own}", layers.join(","));
            }
        }
        text
    }

    /// Returns this model with the features of all linear attention off
    /// ([`AttentionConfig::features_off`]), or `None` if no layer has linear attention, or the
    /// model leaks. It has the weights of this one.
    pub fn features_off(&self) -> Option<Self> {
        // What is left without features is causal.
        if self.leak {
            return None;
        }
        self.with_each_attention(AttentionConfig::features_off)
    }

    /// Returns this model with another attention in each layer for which `other` has one, or `None`
    /// if it has one for no layer.
    pub(crate) fn with_each_attention(
        &self,
        other: impl Fn(&AttentionConfig) -> Option<AttentionConfig>,
    ) -> Option<Self> {
        let any = (0..self.layers).any(|layer| other(self.attention_of(layer)).is_some());
        let changed = |attention: &AttentionConfig| other(attention).unwrap_or_else(|| attention.clone());
        any.then(|| Self {
            attention: changed(&self.attention),
            attention_by_layer: self.attention_by_layer.iter().map(|(&i, own)| (i, changed(own))).collect(),
            ..self.clone()
        })
    }

    /// Returns the first layer whose features are of no use in sequences of this context: they are
    /// for what is beyond an exact window, and nothing is.
    pub fn idle_features(&self) -> Option<usize> {
        (0..self.layers).find(|&layer| self.attention_of(layer).by_head().iter().any(|one| self.is_idle(one)))
    }

    /// Whether this attention of some heads has features that sequences of this context never
    /// reach.
    fn is_idle(&self, attention: &AttentionConfig) -> bool {
        let exact = attention.window().map(|window| window.saturating_add(attention.sinks()));
        attention.favor().is_some() && exact.is_some_and(|exact| exact >= self.context)
    }

    /// Says of a layer that [`Self::idle_features`] returned what is wrong and what to do.
    pub(crate) fn of_idle_features(&self, layer: usize) -> String {
        let attention = self.attention_of(layer);
        let idle = attention.by_head().iter().find(|one| self.is_idle(one)).unwrap_or(attention);
        let (window, sinks) = (idle.window().unwrap_or_default(), idle.sinks());
        let sinks = if sinks > 0 { format!(" and sinks of {sinks}") } else { String::new() };
        format!(
            "attention {attention} of layer {layer}: with a window of {window} tokens{sinks}, sequences of {} tokens never reach \
             its features; make the context longer than the window, or the window shorter, or take softmax",
            self.context
        )
    }

    /// Returns the number of layers whose decoding state grows with every token of a sequence of
    /// this context: those with softmax, and those whose window and sinks together are longer than
    /// the context.
    pub fn growing_layers(&self) -> usize {
        let is_unfilled = |attention: &AttentionConfig| {
            attention.window().is_some_and(|window| window.saturating_add(attention.sinks()) > self.context)
        };
        let grows =
            |attention: &AttentionConfig| attention.state_grows() || attention.by_head().iter().any(is_unfilled);
        (0..self.layers).filter(|&layer| grows(self.attention_of(layer))).count()
    }

    /// Whether every layer has plain softmax attention: no windows, and no parts such as gates.
    pub fn is_softmax(&self) -> bool {
        (0..self.layers).all(|layer| *self.attention_of(layer) == AttentionConfig::Softmax)
    }

    /// Refuses a model that leaks, of which nothing can be used but its loss.
    ///
    /// # Errors
    /// If [`Self::leak`] is set.
    pub fn require_causal(&self) -> Result<()> {
        ensure!(
            !self.leak,
            "this model was trained to see the tokens that it predicts (its config.json has \"leak\": true): it shows \
             what such a loss is worth and can do nothing else; train one without leak"
        );
        Ok(())
    }

    /// Refuses sizes that make no model.
    ///
    /// # Errors
    /// If a field is out of range; the message names the field, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("feed_forward_size", self.feed_forward_size),
            ("context", self.context),
            ("head_dim", self.head_dim.unwrap_or(1)),
        ] {
            ensure!(value > 0, Cause::setting(MODEL, name, value, "at least 1"));
            ensure!(value <= MAX_SIZE, Cause::setting(MODEL, name, value, format_args!("at most {MAX_SIZE}")));
        }
        for (name, value, most) in
            [("layers", self.layers, MAX_LAYERS), ("head_dim", self.head_dim.unwrap_or(1), MAX_HEAD_DIM)]
        {
            ensure!(value <= most, Cause::setting(MODEL, name, value, format_args!("at most {most}")));
        }
        let (e, h, kv) = (self.hidden_size, self.heads, self.kv_heads);
        ensure!(
            self.head_dim.is_some() || e.is_multiple_of(h),
            "model config: hidden_size {e} must be a multiple of heads {h}, or head_dim be given"
        );
        ensure!(h.is_multiple_of(kv), "model config: heads {h} must be a multiple of kv_heads {kv}");
        let dropout = self.dropout;
        ensure!((0.0..1.0).contains(&dropout), Cause::setting(MODEL, "dropout", dropout, "at least 0 and below 1"));
        let eps = self.norm_eps;
        ensure!(eps > 0.0 && eps.is_finite(), Cause::setting(MODEL, "norm_eps", eps, "a number above 0"));
        for attention in std::iter::once(&self.attention).chain(self.attention_by_layer.values()) {
            ensure!(attention.window() != Some(0), "model config: a window is 0; it must be at least 1 token");
            ensure!(
                !self.leak || !attention.needs_causal_mask(),
                "model config: leak is set, which takes the causal mask away, and attention {attention} needs it for its gate or \
                 its window; take one without, such as favor:m=128"
            );
            let key_dim = attention.parts().key_dim;
            ensure!(
                key_dim.is_none_or(|dim| (1..=MAX_HEAD_DIM).contains(&dim)),
                "model config: key_dim of {attention} must be in 1..={MAX_HEAD_DIM}"
            );
            let groups = attention.by_head();
            if let AttentionConfig::ByHead { of } = attention.without_parts() {
                ensure!(
                    of.len() > 1 && of.iter().all(|one| one.parts().is_empty() && one.by_head().len() == 1),
                    "model config: the heads of a layer are divided once, among at least two attentions without parts; \
                     this is {attention}"
                );
            }
            ensure!(
                kv.is_multiple_of(groups.len()),
                "model config: the {kv} key heads cannot be divided equally among the {} attentions of {attention}",
                groups.len()
            );
            let is_fitted =
                |one: &AttentionConfig| one.favor().is_some_and(|f| f.map.is_fitted() && !f.map.is_trained());
            ensure!(
                groups.len() == 1 || !groups.iter().any(is_fitted),
                "model config: attention {attention}: features of some heads of a layer cannot be fitted; take map=positive or \
                 map=learned there"
            );
            let dim = key_dim.unwrap_or(self.head_dim());
            if matches!(self.positions, Positions::Rotary { .. }) && !dim.is_multiple_of(2) {
                bail!("model config: rotary positions need an even dimension of queries and keys; it is {dim}");
            }
        }
        if let Some(layer) = self.attention_by_layer.keys().find(|layer| **layer >= self.layers) {
            bail!("model config: attention_by_layer names layer {layer}, but layers are counted 0..{}", self.layers);
        }
        match &self.borders {
            Some(borders) => borders.validate(self.vocab_size),
            None => Ok(()),
        }
    }
}

/// Type of activations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32 bits.
    #[default]
    F32,
    /// 16 bits, with the range of f32 and 8 bits of precision: for GPUs. On the CPU it works, and
    /// saves nothing.
    Bf16,
}

impl Precision {
    /// Returns Candle's type.
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// A `TrainingConfig` says how a model is trained. Presets are read from a `training.json`; a run
/// saves it in its `train_state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingConfig {
    /// Number of passes over the training tokens.
    pub epochs: usize,
    /// Stops after this many optimiser steps, whatever the epochs.
    #[serde(default)]
    pub max_steps: Option<usize>,
    /// Trains on only this many tokens from the beginning of the training text.
    #[serde(default)]
    pub max_train_tokens: Option<usize>,
    /// Number of sequences in an optimiser step.
    pub batch_size: usize,
    /// Number of sequences in a forward pass. A step adds up the gradients of
    /// `batch_size / micro_batch` passes, which run side by side on the CPU's cores. The result
    /// depends on this number only in rounding and, with dropout, in which numbers are dropped. It
    /// does not depend on the number of threads.
    pub micro_batch: usize,
    /// Type of activations and matrix products. Weights, moments, norms and losses are f32 in any
    /// case.
    #[serde(default)]
    pub dtype: Precision,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// How the learning rate changes over the run.
    pub schedule: Schedule,
    /// The optimiser.
    pub optimizer: AdamWConfig,
    /// Norm to which gradients are clipped.
    pub clip: Option<f64>,
    /// Steps after which random features are drawn anew; 0 never.
    pub redraw_every: usize,
    /// Steps after which features that can be fitted, and are not trained (the maps `dense` and
    /// `optimal`), are fitted to the model's own queries and keys, before the first step and from
    /// then on; 0 never, which leaves them as if queries and keys were unit normal.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub fit_every: usize,
    /// Steps between validations; 0 validates after each epoch only.
    pub eval_every: usize,
    /// Steps between checkpoints. A run is saved after each epoch and every ten minutes too; with
    /// 0 only then.
    pub save_every: usize,
    /// Seed of the weights, of the order of the data, and of the random features.
    pub seed: u64,
}

impl TrainingConfig {
    /// Refuses settings that train nothing.
    ///
    /// # Errors
    /// If a field is out of range; the message names the field, its value and what it must be.
    pub fn validate(&self) -> Result<()> {
        for (name, value) in
            [("epochs", self.epochs), ("batch_size", self.batch_size), ("micro_batch", self.micro_batch)]
        {
            ensure!(value > 0, Cause::setting(TRAINING, name, value, "at least 1"));
        }
        ensure!(self.max_steps != Some(0), Cause::setting(TRAINING, "max_steps", 0, "at least 1"));
        let rate = self.learning_rate;
        ensure!(rate.is_finite() && rate > 0.0, Cause::setting(TRAINING, "learning_rate", rate, "a number above 0"));
        if let Some(clip) = self.clip {
            ensure!(clip > 0.0, Cause::setting(TRAINING, "clip", clip, "a number above 0"));
        }
        self.schedule.validate()
    }
}

/// A model and how to train it, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
pub enum Preset {
    /// 2 layers, dim 64, 4 heads, context 80: the published experiment; minutes.
    Seed,
    /// The model of `seed` with its norms after each part, as published; minutes.
    Published,
    /// 4 layers, dim 128, context 256: writes stories; half an hour.
    Small,
    /// 4 layers, dim 192, heads of 64, context 1,024: long text such as program source; an hour.
    Code,
    /// The llama2.c 15M architecture: for a GPU or a long night.
    Stories15m,
}

impl Preset {
    /// Returns the preset's model and training settings.
    ///
    /// # Errors
    /// If a file of the preset, which is compiled in, cannot be read as settings; tests read them
    /// all.
    pub fn load(self) -> Result<(ModelConfig, TrainingConfig)> {
        let (model, training) = match self {
            Self::Seed => (include_str!("../models/seed/config.json"), include_str!("../models/seed/training.json")),
            Self::Published => {
                (include_str!("../models/published/config.json"), include_str!("../models/published/training.json"))
            }
            Self::Small => (include_str!("../models/small/config.json"), include_str!("../models/small/training.json")),
            Self::Code => (include_str!("../models/code/config.json"), include_str!("../models/code/training.json")),
            Self::Stories15m => {
                (include_str!("../models/stories15m/config.json"), include_str!("../models/stories15m/training.json"))
            }
        };
        Ok((serde_json::from_str(model)?, serde_json::from_str(training)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_valid() {
        for preset in [Preset::Seed, Preset::Published, Preset::Small, Preset::Code, Preset::Stories15m] {
            let (model, training) = preset.load().unwrap();
            model.validate().unwrap();
            training.validate().unwrap();
        }
    }
}
