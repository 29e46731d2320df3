//! This module reads model folders in the format of Hugging Face's tools.

use std::{collections::HashMap, fs, path::Path};

use anyhow::{Context, Error, Result, ensure};
use candle_core::{DType, Device, Tensor, safetensors};
use serde::de::DeserializeOwned;
use tokenizers::Tokenizer;

/// A `Folder` holds the content of `config.json`, `model.safetensors` and `tokenizer.json`.
pub(crate) struct Folder<C> {
    pub(crate) config: C,
    pub(crate) weights: HashMap<String, Tensor>,
    pub(crate) tokenizer: Tokenizer,
}

impl<C: DeserializeOwned> Folder<C> {
    /// Reads all three files; weights are widened to f32.
    ///
    /// # Errors
    /// If a file is missing or does not hold what its name says.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let files = ["config.json", "model.safetensors", "tokenizer.json"].map(|name| path.join(name));
        for file in &files {
            ensure!(
                file.is_file(),
                "there is no {}: give a folder with config.json, model.safetensors (in one piece) and tokenizer.json",
                file.display()
            );
        }
        let [config, weights, tokenizer] = files;
        let text = fs::read_to_string(&config).with_context(|| format!("cannot read {}", config.display()))?;
        let bad = |file: &Path, what: &str| format!("{} does not hold {what}", file.display());
        let wide = |(name, tensor): (String, Tensor)| Ok((name, tensor.to_dtype(DType::F32)?));
        Ok(Self {
            config: serde_json::from_str(&text).with_context(|| bad(&config, "a config of this kind of model"))?,
            weights: safetensors::load(&weights, &Device::Cpu)
                .and_then(|tensors| tensors.into_iter().map(wide).collect())
                .with_context(|| bad(&weights, "tensors"))?,
            tokenizer: Tokenizer::from_file(&tokenizer)
                .map_err(Error::msg)
                .with_context(|| bad(&tokenizer, "a tokenizer"))?,
        })
    }
}
