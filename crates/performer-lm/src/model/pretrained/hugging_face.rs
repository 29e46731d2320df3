//! This module reads folders as Hugging Face writes them: `config.json`, `tokenizer.json`, and
//! `model.safetensors` or an index of several such files.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor, safetensors::MmapedSafetensors};
use memmap2::Mmap;
use serde::{Deserialize, Serialize};

use super::{Pretrained, Source, families::Family, fields::Fields, of_pickle, read_parameters, refuse_rest};
use crate::{
    checkpoint::check_digest,
    config::AttentionConfig,
    data::{Borders, Tokenizer, weights_index::shards},
};

pub(super) const CONFIG: &str = "config.json";
pub(super) const GENERATION: &str = "generation_config.json";
pub(super) const TOKENIZER: &str = "tokenizer.json";
pub(super) const WEIGHTS: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// Names that folders of PyTorch's own format give their weights.
const PICKLES: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// The `model_type` of a model whose attention is not softmax, which no other program takes for a
/// softmax model.
pub(super) const PERFORMER: &str = "performer";

/// `Performer` is what the field `performer` of such a model's configuration adds to its family's.
/// A model with softmax attention has the field only where its documents have other borders than
/// its tokenizer puts around a text.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Performer {
    /// The family's `model_type`.
    pub(super) base: String,
    pub(super) attention: AttentionConfig,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) attention_by_layer: BTreeMap<usize, AttentionConfig>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) borders: Option<Borders>,
}

/// Whether a folder is one of Hugging Face's and not one of our checkpoints.
pub(super) fn is_folder(dir: &Path) -> bool {
    Fields::read(&dir.join(CONFIG)).is_ok_and(|fields| matches!(fields.get::<String>("model_type"), Ok(Some(_))))
}

/// Reads a Hugging Face folder.
pub(super) fn open(dir: &Path) -> Result<Pretrained> {
    let path = dir.join(CONFIG);
    let fields = Fields::read(&path)?;
    let model_type: String = fields.need("model_type")?;
    let is_performer = model_type == PERFORMER;
    let performer: Option<Performer> =
        if is_performer { Some(fields.need("performer")?) } else { fields.get("performer")? };
    let base = performer.as_ref().map_or(&model_type, |performer| &performer.base);
    let family = Family::of(base).with_context(|| path.display().to_string())?;
    let mut config = family.read(&fields)?;
    // Before anything is checked: what positions and heads may be depends on the attention.
    if let Some(performer) = &performer {
        config.attention = performer.attention.clone();
        config.attention_by_layer = performer.attention_by_layer.clone();
    }

    let shards = Shards::open(dir)?;
    let weights = || format!("cannot read the weights in {}", dir.display());
    let (mut tensors, left) = read_parameters(&config, &shards, |name| Ok(family.part(name))).with_context(weights)?;
    if is_performer {
        // The remaining tensors are those of our attention: features, and parts such as gates.
        for name in left {
            tensors.insert(name.clone(), shards.load(&name).with_context(weights)?);
        }
    } else {
        refuse_rest(&left, |name| family.is_constant(name, &config)).with_context(weights)?;
    }
    let tokenizer = tokenizer(dir, &fields, performer.as_ref())?;
    config.borders = tokenizer.borders_for_config();
    Ok(Pretrained { config, tensors, tokenizer })
}

fn tokenizer(dir: &Path, config: &Fields, performer: Option<&Performer>) -> Result<Tokenizer> {
    let path = dir.join(TOKENIZER);
    let json = std::fs::read(&path).with_context(|| {
        format!(
            "cannot read {}: save the tokenizer in this format (transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) \
             writes it)",
            path.display()
        )
    })?;
    let read = || match performer.and_then(|performer| performer.borders.clone()) {
        Some(borders) => Tokenizer::with_borders(json, Some(borders)),
        None => {
            let mut stop = config.tokens("eos_token_id")?;
            let generation = dir.join(GENERATION);
            if generation.exists() {
                for token in Fields::read(&generation)?.tokens("eos_token_id")? {
                    if !stop.contains(&token) {
                        stop.push(token);
                    }
                }
            }
            Tokenizer::of_model(json, &stop)
        }
    };
    read().with_context(|| path.display().to_string())
}

/// `Shards` are the weights of a folder, memory-mapped.
struct Shards {
    files: Vec<(PathBuf, MmapedSafetensors)>,
    /// The file that holds a tensor.
    places: HashMap<String, usize>,
}

impl Shards {
    fn open(dir: &Path) -> Result<Self> {
        let index = dir.join(INDEX);
        let names: Vec<String> = if dir.join(WEIGHTS).exists() {
            vec![WEIGHTS.into()]
        } else if index.exists() {
            shards(&index)?.into_iter().collect()
        } else if let Some(path) = PICKLES.iter().map(|name| dir.join(name)).find(|path| path.exists()) {
            bail!("{}", of_pickle(&path))
        } else {
            bail!(
                "{} has no weights: give a folder with {WEIGHTS} or {INDEX} (older formats can be converted by transformers' \
                 save_pretrained)",
                dir.display()
            )
        };
        let mut places = HashMap::new();
        let mut files = Vec::new();
        for (i, name) in names.into_iter().enumerate() {
            let path = dir.join(name);
            let open = || -> Result<MmapedSafetensors> {
                // SAFETY: a map is sound as long as nobody changes the file beneath it while it is
                // read, which takes seconds.
                check_digest(&unsafe { Mmap::map(&File::open(&path)?) }?)?;
                // SAFETY: this map is kept, and so is sound as long as nobody changes the file.
                Ok(unsafe { MmapedSafetensors::new(&path) }?)
            };
            let file = open()
                .with_context(|| format!("{} is missing, damaged or incomplete: copy it again", path.display()))?;
            places.extend(file.tensors().into_iter().map(|(name, _)| (name, i)));
            files.push((path, file));
        }
        Ok(Self { files, places })
    }
}

impl Source for Shards {
    fn names(&self) -> Vec<String> {
        self.places.keys().cloned().collect()
    }

    fn load(&self, name: &str) -> Result<Tensor> {
        let Some((path, file)) = self.places.get(name).map(|&i| &self.files[i]) else {
            bail!("there is no tensor {name}")
        };
        file.load(name, &Device::Cpu).with_context(|| path.display().to_string())
    }
}
