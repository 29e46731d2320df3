//! This module takes the queries, keys and values of every head of a pretrained softmax model while
//! the model reads a text.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use performer_core::{Attention, Mask, Softmax, features::fit::Moments, projection::derive_seed};
use serde_json::{Value, json};

use super::error::{Problem, QUERIES, Set};
use crate::{
    config::AttentionConfig,
    convert::moments,
    data::{DataSpec, Prepared, eval_windows, prepare_for},
    errors::Cause,
    listener::Listener,
    model::pretrained::Pretrained,
    train::{digests, model_digest},
};

/// The context in which heads are looked at, where the model's is longer and none is given.
const MOST_CONTEXT: usize = 512;

/// A `Source` says where heads come from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The softmax model, as [`Pretrained::open`] takes it.
    pub model: String,
    /// The text that the model reads.
    pub data: DataSpec,
    /// Number of tokens of a window; `None` for the model's context, but at most 512 where its
    /// positions are not learned.
    pub context: Option<usize>,
    /// The largest number of windows of held-out text that errors are measured on; a short text has
    /// fewer.
    pub windows: usize,
    /// Number of training tokens that features are fitted to.
    pub calibrate_tokens: usize,
    /// Seed of the order of the training tokens.
    pub seed: u64,
}

/// `Heads` holds queries, keys and values of every head of a model, with the moments that features
/// are fitted to.
pub struct Heads {
    model: String,
    corpus: String,
    context: usize,
    /// Digests of the model and of the text, by name.
    digests: BTreeMap<String, String>,
    /// The heads of each layer.
    layers: Vec<Vec<Head>>,
}

struct Head {
    /// `q`, `k`, `v` of each window, shape `(T, D)` each.
    windows: Vec<[Tensor; 3]>,
    moments: Moments,
    logit_deviation: f64,
}

/// Returns the path of the softmax model that comes with the project, if it is where this program
/// was built.
pub fn shipped() -> Option<PathBuf> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stories/softmax").canonicalize().ok()?;
    path.join("model.safetensors").is_file().then_some(path)
}

impl Heads {
    /// Returns the number of tokens of a window of text.
    pub(super) fn context(&self) -> usize {
        self.context
    }

    /// Reads a model and runs it on text.
    ///
    /// # Errors
    /// What keeps the model or the text from being read; a model that is not all softmax; a context
    /// of fewer than 16 tokens, or other than the model's where its positions are learned; held-out
    /// text too short for a window; no windows, or no tokens that features are fitted to.
    pub fn read(source: &Source, device: &Device, listener: &dyn Listener) -> Result<Self> {
        ensure!(source.windows > 0, Cause::setting("", "windows", 0, "at least 1"));
        ensure!(source.calibrate_tokens > 0, Cause::setting("", "calibrate_tokens", 0, "at least 1"));
        let mut model = Pretrained::open_with(&source.model, listener)?;
        let asked = source.context.unwrap_or(model.config.context);
        ensure!(asked >= 16, Cause::setting("", "context", asked, "at least 16, or it says nothing about attention"));
        model.set_context(source.context, MOST_CONTEXT)?;
        let context = model.config.context;
        if let Some(layer) =
            (0..model.config.layers).find(|&i| *model.config.attention_of(i) != AttentionConfig::Softmax)
        {
            bail!(
                "layer {layer} of {} has attention {}; errors are measured against softmax models",
                source.model,
                model.config.attention_of(layer)
            );
        }
        let data = prepare_for(&source.data, &model.tokenizer, listener).context("cannot prepare the text")?;
        let mut digests = digests(&data);
        digests.insert("model".to_string(), model_digest(&model.config, &model.tensors)?);
        let decoder = model.decoder(device)?;
        let config = decoder.config().clone();
        let (by_layer, _) = moments(&decoder, &data, source.calibrate_tokens, source.seed)?;
        let group = config.heads / config.kv_heads;
        let mut layers: Vec<Vec<Head>> = Vec::new();
        for moments in &by_layer {
            let deviations = moments.logit_deviation()?;
            let head = |head: usize| Head {
                windows: Vec::new(),
                moments: moments.head(head / group),
                logit_deviation: deviations[head / group],
            };
            layers.push((0..config.heads).map(head).collect());
        }
        for ids in windows(&data, context, source.windows)? {
            decoder.hidden_through(&ids.to_device(device)?, |layer, inputs| {
                for (head, kept) in layers[layer].iter_mut().enumerate() {
                    let of = |x: &Tensor, head: usize| x.detach().get(0)?.get(head)?.to_device(&Device::Cpu);
                    kept.windows.push([of(inputs.q, head)?, of(inputs.k, head / group)?, of(inputs.v, head / group)?]);
                }
                Softmax::new().forward(inputs, &Mask::causal())
            })?;
        }
        Ok(Self { model: name(&source.model), corpus: data.corpus_name, context, digests, layers })
    }

    /// Returns the layer of each problem of [`Self::set`].
    pub(super) fn layers(&self) -> Vec<usize> {
        let layer = |(layer, heads): (usize, &Vec<Head>)| {
            let count = heads.iter().map(|head| head.windows.len()).sum();
            std::iter::repeat_n(layer, count)
        };
        self.layers.iter().enumerate().flat_map(layer).collect()
    }

    /// Returns the number of layers.
    pub(super) fn layer_count(&self) -> usize {
        self.layers.len()
    }

    /// Returns the number of heads of a layer.
    pub(super) fn heads_of(&self, layer: usize) -> usize {
        self.layers[layer].len()
    }

    /// Returns the largest standard deviation of the logits among the heads of a layer.
    pub(super) fn deviation_of(&self, layer: usize) -> f64 {
        self.layers[layer].iter().map(|head| head.logit_deviation).fold(0.0, f64::max)
    }

    /// Returns the problems of all heads, causal.
    pub(super) fn set(&self) -> Result<Set> {
        self.problems(&self.layers, format!("heads of {}", self.model))
    }

    /// Returns the problems of one layer, head by head; each head has as many problems as there are
    /// windows.
    pub(super) fn set_of(&self, layer: usize) -> Result<Set> {
        self.problems(&self.layers[layer..=layer], format!("layer {layer}"))
    }

    fn problems(&self, layers: &[Vec<Head>], name: String) -> Result<Set> {
        let mut problems = Vec::new();
        for head in layers.iter().flatten() {
            for [q, k, v] in &head.windows {
                let queries = QUERIES / head.windows.len().min(4);
                problems.push(Problem::new([q, k, v], true, queries, head.moments.clone())?);
            }
        }
        Ok(Set { name, problems })
    }

    /// Describes the heads in a sentence.
    pub(super) fn describe(&self) -> String {
        let mut deviations: Vec<f64> = self.layers.iter().flatten().map(|head| head.logit_deviation).collect();
        deviations.sort_by(f64::total_cmp);
        let windows = self.layers[0][0].windows.len();
        format!(
            "{}: {} heads of {} layers, causal, {windows} window(s) of {} tokens of held-out text ({}); their logits have standard deviations of {:.2} to \
             {:.2}, the median {:.2}.",
            self.model,
            deviations.len(),
            self.layers.len(),
            self.context,
            self.corpus,
            deviations[0],
            deviations[deviations.len() - 1],
            deviations[deviations.len() / 2]
        )
    }

    /// Describes the heads as JSON.
    pub(super) fn json(&self) -> Value {
        let deviations: Vec<Vec<f64>> =
            self.layers.iter().map(|heads| heads.iter().map(|head| head.logit_deviation).collect()).collect();
        json!({
            "model": self.model, "corpus": self.corpus, "context": self.context, "digests": self.digests,
            "logit_deviations": deviations,
        })
    }
}

/// Returns the last two parts of a path, which identify a model on any machine.
fn name(model: &str) -> String {
    let parts: Vec<&str> = model.split(['/', '\\']).filter(|part| !part.is_empty()).collect();
    parts[parts.len().saturating_sub(2)..].join("/")
}

/// Returns windows of held-out text, shape `(1, T)` each, spread over the whole text.
fn windows(data: &Prepared, context: usize, count: usize) -> Result<Vec<Tensor>> {
    let all: Vec<_> = eval_windows(&data.valid, context, 1)?.filter(|batch| batch.context == context).collect();
    ensure!(
        !all.is_empty(),
        "the held-out text has {} tokens; a window takes {}: give more text or a smaller context",
        data.valid.len(),
        context + 1
    );
    let count = count.min(all.len());
    (0..count).map(|i| &all[i * all.len() / count]).map(|batch| batch.ids(&Device::Cpu)).collect()
}

/// Returns the seed of the draws for a layer.
pub(super) fn layer_seed(seed: u64, layer: usize) -> u64 {
    derive_seed(seed, layer as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{data::TokenFile, listener::Silent};

    #[test]
    fn windows_are_spread_over_the_whole_text() -> Result<()> {
        let sample = crate::data::prepare(&crate::data::DataSpec::Sample, 300, None, &Silent)?;
        let tokens: Vec<u32> = (0..5 * 16 + 1).collect();
        let data = Prepared { valid: TokenFile::from_tokens(&tokens, 100)?.into(), ..sample };
        for (count, starts) in [(1, &[0][..]), (2, &[0, 32]), (3, &[0, 16, 48]), (9, &[0, 16, 32, 48, 64])] {
            let found = windows(&data, 16, count)?
                .iter()
                .map(|w| w.flatten_all()?.get(0)?.to_scalar())
                .collect::<candle_core::Result<Vec<u32>>>()?;
            assert_eq!(found, starts);
        }
        Ok(())
    }
}
