//! This module writes model folders that Hugging Face's tools open.

use std::{
    collections::{BTreeMap, HashMap},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use candle_core::{D, Device, Tensor};
use serde_json::{Value, json};

use super::{
    Pretrained,
    families::Family,
    hugging_face::{CONFIG, GENERATION, INDEX, PERFORMER, Performer, TOKENIZER, WEIGHTS},
};
use crate::{
    checkpoint::{
        REPORTS, TRAINING, finish_save, remove_reports, remove_training, require_free, write_durably, write_with_digest,
    },
    data::Tokenizer,
    errors::Cause,
    files::{self, Lock, require_no_file},
    revision::git_revision,
};

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";

/// Writes a model as a Hugging Face folder, weights last.
///
/// A model with softmax attention becomes one of the architectures that those tools know. A
/// Performer keeps its family's weights and configuration and adds its attention, under a
/// `model_type` of its own, so that no program takes it for a softmax model. Its projections are
/// among the weights. [`Pretrained::open`] reads both kinds.
///
/// # Errors
/// If the model leaks, no such architecture describes it, some of its tensors have no place in it,
/// another process works in the folder, or the folder holds a file that would be replaced
/// ([`Cause::WouldReplace`]) or cannot be written to.
pub fn export(model: &Pretrained, dir: &Path) -> Result<()> {
    ensure!(
        ![WEIGHTS, INDEX].iter().any(|name| dir.join(name).exists()),
        Cause::WouldReplace(format!(
            "{} holds a model already: choose another folder, or remove it first",
            dir.display()
        ))
    );
    files::require_free(dir, &[GENERATION, TOKENIZER_CONFIG])?;
    require_free(dir, &REPORTS)?;
    export_over(model, dir)
}

/// Does what [`export`] does, in place of what the folder holds. At no moment are there files of
/// two models that look like one: the old weights go first, and the new ones come last.
///
/// # Errors
/// If the model leaks, no such architecture describes it, some of its tensors have no place in it,
/// the folder holds a model in several files, another process works there, or it cannot be written
/// to.
pub fn export_over(model: &Pretrained, dir: &Path) -> Result<()> {
    require_no_file(dir)?;
    ensure!(
        !dir.join(INDEX).exists(),
        "{} holds a model in several files: choose another folder, or remove it first",
        dir.display()
    );
    model.config.require_causal()?;
    // A model whose config leaves tensors out would be exported without them.
    model.decoder(&Device::Cpu)?;
    let family = Family::of_config(&model.config)?;
    let softmax = model.config.is_softmax();
    let weights = weights(family, model, softmax)?;
    let config = config(family, model, softmax)?;
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let _locks = Lock::without_a_file(dir)?;
    // Files of the model that is there may still have the names under which those of the new one
    // are written.
    finish_save(dir)?;
    let metadata =
        BTreeMap::from([("format".to_owned(), "pt".to_owned()), ("revision".to_owned(), git_revision().to_owned())]);
    let small = [
        (CONFIG, serde_json::to_vec_pretty(&config)?),
        (GENERATION, serde_json::to_vec_pretty(&tokens(&model.tokenizer))?),
        (TOKENIZER, model.tokenizer.as_bytes().to_vec()),
        (TOKENIZER_CONFIG, serde_json::to_vec_pretty(&tokenizer_config(model))?),
    ];
    let path = |name: &str| dir.join(name);
    let pending = |name: &str| dir.join(format!("{name}.new"));
    // Whatever can fail for want of space or of permission comes before the old model is touched.
    let prepare = || -> Result<()> {
        for name in small.iter().map(|(name, _)| *name).chain([WEIGHTS]).chain(REPORTS).chain(TRAINING) {
            ensure!(!path(name).is_dir(), "{} is a folder: remove it, or choose another folder", path(name).display());
        }
        write_durably(&pending(WEIGHTS), |out| write_with_digest(out, &weights, &metadata))?;
        small.iter().try_for_each(|(name, bytes)| write_durably(&pending(name), |out| out.write_all(bytes)).map(drop))
    };
    prepare().inspect_err(|_| {
        // Frees the space; the error to report is the first one.
        for name in small.iter().map(|(name, _)| *name).chain([WEIGHTS]) {
            let _ = std::fs::remove_file(pending(name));
        }
    })?;
    if path(WEIGHTS).exists() {
        std::fs::remove_file(path(WEIGHTS)).with_context(|| format!("cannot remove {}", path(WEIGHTS).display()))?;
    }
    remove_reports(dir, |_| true)?;
    remove_training(dir)?;
    for name in small.iter().map(|(name, _)| *name).chain([WEIGHTS]) {
        std::fs::rename(pending(name), path(name)).with_context(|| format!("cannot write {}", path(name).display()))?;
    }
    Ok(())
}

fn config(family: Family, model: &Pretrained, softmax: bool) -> Result<Value> {
    let mut config = family.write(&model.config);
    let performer = Performer {
        base: family.model_type().to_owned(),
        attention: model.config.attention.clone(),
        attention_by_layer: model.config.attention_by_layer.clone(),
        borders: Some(model.tokenizer.borders().clone()),
    };
    let own = if !softmax {
        json!({"model_type": PERFORMER, "architectures": ["PerformerForCausalLM"], "performer": performer})
    } else if are_found_again(&model.tokenizer)? {
        json!({"model_type": family.model_type(), "architectures": [family.architecture()]})
    } else {
        // Other programs pass over a field that they do not know.
        json!({"model_type": family.model_type(), "architectures": [family.architecture()], "performer": performer})
    };
    for more in [own, tokens(&model.tokenizer), json!({"dtype": "float32", "torch_dtype": "float32"})] {
        if let (Value::Object(config), Value::Object(more)) = (&mut config, more) {
            config.extend(more);
        }
    }
    Ok(config)
}

/// Returns the tokens at the borders of a text, as `config.json` and `generation_config.json` name
/// them.
fn tokens(tokenizer: &Tokenizer) -> Value {
    let end = ends(tokenizer);
    let end = if let [one] = end[..] { json!(one) } else { json!(end) };
    json!({"bos_token_id": tokenizer.eot(), "eos_token_id": end})
}

/// Returns the tokens that end a text.
fn ends(tokenizer: &Tokenizer) -> Vec<u32> {
    let borders = tokenizer.borders();
    let mut end: Vec<u32> = borders.end.into_iter().chain(borders.stop.iter().copied()).collect();
    if end.is_empty() {
        end.extend(borders.begin);
    }
    end
}

/// Whether a program that knows the `tokenizer.json` and the tokens that end a text, and nothing
/// else, finds the borders of this tokenizer. A model that was trained with one token between
/// documents has others than a tokenizer that itself puts a token before every text.
fn are_found_again(tokenizer: &Tokenizer) -> Result<bool> {
    let again = Tokenizer::of_model(tokenizer.as_bytes().to_vec(), &ends(tokenizer))?;
    Ok(again.borders() == tokenizer.borders())
}

fn tokenizer_config(model: &Pretrained) -> Value {
    let tokenizer = &model.tokenizer;
    let end = ends(tokenizer).first().copied().unwrap_or(tokenizer.eot());
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": tokenizer.token(tokenizer.eot()), "eos_token": tokenizer.token(end),
        "model_max_length": model.config.context, "clean_up_tokenization_spaces": false,
    })
}

/// Returns the weights under the family's names. Where attention is not softmax, the tensors that
/// the family does not have are added under ours: features, and the weights of gates and other
/// parts.
fn weights(family: Family, model: &Pretrained, softmax: bool) -> Result<HashMap<String, Tensor>> {
    let mut parts: BTreeMap<String, Vec<(usize, Tensor)>> = BTreeMap::new();
    let mut weights = HashMap::new();
    let parameters: std::collections::HashSet<String> = super::parameter_names(&model.config).into_iter().collect();
    for name in &parameters {
        let tensor = model.tensors.get(name).with_context(|| format!("the model lacks {name}"))?;
        let part = family.part(name);
        let tensor = if part.transposed { tensor.t()? } else { tensor.clone() };
        parts.entry(part.name).or_default().push((part.third.unwrap_or(0), tensor));
    }
    for (name, mut thirds) in parts {
        thirds.sort_by_key(|third| third.0);
        let tensors: Vec<Tensor> = thirds.into_iter().map(|third| third.1).collect();
        weights.insert(name, Tensor::cat(&tensors, D::Minus1)?.contiguous()?);
    }
    if !softmax {
        let buffers = model.tensors.iter().filter(|(name, _)| !parameters.contains(*name));
        weights.extend(buffers.map(|(name, tensor)| (name.clone(), tensor.clone())));
    }
    Ok(weights)
}
