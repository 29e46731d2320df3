//! This module opens models that others trained: all become one [`Decoder`], whose configuration
//! describes their families.
//!
//! | format | what reads it | which models |
//! |---|---|---|
//! | checkpoints of this program | [`Checkpoint`] | any decoder |
//! | Hugging Face folders, hub ids | `hugging_face` | the families in `families` |
//! | llama2.c `.bin` beside its tokenizer | `llama2c` | Llama |
//! | GGUF | `gguf` | Llama |
//!
//! The families are Llama, Mistral, SmolLM2, Qwen2, StarCoder2 and GPT-2.
//!
//! What would change a model's numbers and is not supported (scaled rotary positions, sliding
//! windows, quantised safetensors) is refused by name. [`export`] writes Hugging Face folders.

mod export;
mod families;
mod fields;
mod gguf;
mod hugging_face;
mod llama2c;
mod vocabulary;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs::File,
    io::Read,
    path::Path,
};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{D, DType, Device, Tensor};

use super::Decoder;
use crate::{
    checkpoint::{Checkpoint, has_checkpoint},
    config::{AttentionConfig, FeedForwardKind, ModelConfig, NormKind, NormPosition, Positions},
    data::{Tokenizer, hub::Hub},
    listener::{Listener, Silent},
};
pub use export::{export, export_over};

/// A `Pretrained` is a model that was read from a file or folder.
#[derive(Clone, Debug)]
pub struct Pretrained {
    /// Its configuration. Models of other programs have softmax attention; one that this crate
    /// saved has its own.
    pub config: ModelConfig,
    /// Parameters and buffers under this crate's names, on the CPU.
    pub tensors: HashMap<String, Tensor>,
    /// Its tokenizer, which knows the borders of documents.
    pub tokenizer: Tokenizer,
}

impl Pretrained {
    /// Opens a checkpoint folder, a Hugging Face folder, a llama2.c `.bin`, a `.gguf`, or the model
    /// of a hub id `owner/name`.
    ///
    /// # Errors
    /// If anything is missing, damaged or not supported; the message names the file and the field,
    /// and says what to do.
    pub fn open(source: &str) -> Result<Self> {
        Self::open_with(source, &Silent)
    }

    /// Sets the context to `asked` tokens or, where nothing is asked, to that of the model, but at
    /// most `most` tokens. Learned positions belong to a context, so a model with them keeps its
    /// own.
    ///
    /// # Errors
    /// If a model with learned positions is asked for another context.
    // The commands and experiments that call it are not part of a library without them.
    #[cfg(any(test, feature = "lab"))]
    pub(crate) fn set_context(&mut self, asked: Option<usize>, most: usize) -> Result<()> {
        let own = self.config.context;
        let most = if self.config.positions == Positions::Learned { own } else { most };
        let context = asked.unwrap_or(own.min(most));
        ensure!(
            context == own || self.config.positions != Positions::Learned,
            crate::errors::Cause::setting(
                "",
                "context",
                context,
                format_args!("{own}, for which the model has learned positions")
            )
        );
        self.config.context = context;
        Ok(())
    }

    /// Opens a model as [`Self::open`] does, and tells `listener` of a download from the hub.
    ///
    /// # Errors
    /// Those of [`Self::open`].
    pub fn open_with(source: &str, listener: &dyn Listener) -> Result<Self> {
        let path = Path::new(source);
        let opened = if path.is_dir() {
            folder(path)?
        } else if path.is_file() {
            file(path)?
        } else if is_hub_id(source) {
            let folder = Hub::from_env().and_then(|hub| hub.model(source, listener)).with_context(|| {
                format!(
                    "there is no file or folder {source}, and the Hugging Face hub does not give a model of that name"
                )
            })?;
            hugging_face::open(&folder)?
        } else {
            bail!("there is no file or folder {source}: give {FORMATS}")
        };
        opened.require_vocabulary().with_context(|| source.to_owned())?;
        Ok(opened)
    }

    /// Opens a checkpoint of this program from the contents of its `config.json`, `tokenizer.json`
    /// and `model.safetensors`, where there is no file system, as in a browser.
    ///
    /// # Errors
    /// If one of them is damaged, or they do not belong together; the message says which.
    pub fn from_bytes(config: &[u8], tokenizer: Vec<u8>, weights: &[u8]) -> Result<Self> {
        let opened = of_checkpoint(Checkpoint::from_bytes(config, tokenizer, weights, &Device::Cpu)?)?;
        opened.require_vocabulary()?;
        Ok(opened)
    }

    fn require_vocabulary(&self) -> Result<()> {
        let (tokens, embeddings) = (self.tokenizer.vocab_size(), self.config.vocab_size);
        ensure!(
            tokens <= embeddings,
            "the tokenizer has {tokens} tokens and the model {embeddings}; they do not belong together"
        );
        Ok(())
    }

    /// Builds the model on a device, to be used: its weights are constants
    /// ([`Decoder::frozen`]). To train it further, make it by [`Decoder::from_tensors`].
    ///
    /// # Errors
    /// If a tensor is missing, has another shape, or has no place in the configuration; the message
    /// names the first one.
    pub fn decoder(&self, device: &Device) -> Result<Decoder> {
        let model = Decoder::frozen(&self.config, &self.tensors, device)?;
        model.require_all_of(&self.tensors)?;
        Ok(model)
    }
}

/// Opens a model as [`Pretrained::open`] does, and builds it on a device.
///
/// # Errors
/// As [`Pretrained::open`] and [`Pretrained::decoder`].
pub fn load(source: &str, device: &Device) -> Result<(Decoder, Tokenizer)> {
    load_with(source, device, &Silent)
}

/// Loads a model as [`load`] does, and tells `listener` of a download from the hub.
///
/// # Errors
/// Those of [`load`].
pub fn load_with(source: &str, device: &Device, listener: &dyn Listener) -> Result<(Decoder, Tokenizer)> {
    let opened = Pretrained::open_with(source, listener)?;
    let model = opened.decoder(device).with_context(|| format!("cannot build the model in {source}"))?;
    Ok((model, opened.tokenizer))
}

/// Loads the model in a folder as [`load`] does, whatever the folder is called.
///
/// # Errors
/// As [`load`].
pub(crate) fn load_folder(dir: &Path, device: &Device) -> Result<(Decoder, Tokenizer)> {
    let opened = folder(dir)?;
    opened.require_vocabulary().with_context(|| dir.display().to_string())?;
    let model = opened.decoder(device).with_context(|| format!("cannot build the model in {}", dir.display()))?;
    Ok((model, opened.tokenizer))
}

/// The sources that [`Pretrained::open`] takes.
const FORMATS: &str = "a checkpoint folder, a Hugging Face folder or the id of a model on the hub (owner/name), a llama2.c .bin, or a \
                       .gguf file";

fn folder(dir: &Path) -> Result<Pretrained> {
    // While one of our checkpoints replaces a model of Hugging Face's, its weights may be there
    // before its configuration has its name.
    if !has_checkpoint(dir)? && hugging_face::is_folder(dir) {
        return hugging_face::open(dir);
    }
    of_checkpoint(Checkpoint::load(dir, &Device::Cpu)?)
        .with_context(|| format!("cannot read the model in {}", dir.display()))
}

fn of_checkpoint(checkpoint: Checkpoint) -> Result<Pretrained> {
    let config: ModelConfig = checkpoint.config_as()?;
    let tokenizer = Tokenizer::with_borders(checkpoint.tokenizer, config.borders.clone()).context("tokenizer.json")?;
    Ok(Pretrained { config, tensors: checkpoint.tensors, tokenizer })
}

fn file(path: &Path) -> Result<Pretrained> {
    let mut magic = Vec::new();
    let read = File::open(path).and_then(|file| file.take(4).read_to_end(&mut magic));
    read.with_context(|| format!("cannot read {}", path.display()))?;
    match path.extension().and_then(|extension| extension.to_str()) {
        _ if magic == *b"GGUF" => gguf::open(path),
        _ if is_pickle(&magic) => bail!("{}", of_pickle(path)),
        Some("gguf") => bail!("{} is no GGUF file: it does not begin so; copy it again", path.display()),
        Some("bin") => llama2c::open(path),
        Some("safetensors") => bail!("{} is part of a model: give the folder it lies in", path.display()),
        _ => bail!("{} is no model that this program knows: give {FORMATS}", path.display()),
    }
}

/// Whether a file that begins so is a pickle: an archive as PyTorch writes it, or the pickle
/// itself.
fn is_pickle(magic: &[u8]) -> bool {
    magic.starts_with(b"PK\x03\x04") || matches!(magic, [0x80, 2..=5, ..])
}

/// Says of a file of weights that it is a pickle, and what to do.
fn of_pickle(path: &Path) -> String {
    format!(
        "{} is a pickle, as PyTorch saves weights: to load one runs whatever code is in it, so this program does not; take the \
         model's safetensors, or let transformers' save_pretrained write them",
        path.display()
    )
}

/// Whether a text is `owner/name`, of the characters that the hub allows.
fn is_hub_id(text: &str) -> bool {
    let is_name = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    text.split_once('/').is_some_and(|(owner, name)| is_name(owner) && is_name(name))
}

/// `LlamaSizes` are the sizes of a Llama-style model, which the formats spell differently.
struct LlamaSizes {
    vocab_size: usize,
    hidden_size: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: Option<usize>,
    feed_forward_size: usize,
    context: usize,
    norm_eps: f64,
    rotary_base: f64,
    tied_head: bool,
}

impl LlamaSizes {
    /// Returns the configuration of a model with softmax attention and no biases.
    fn config(self) -> ModelConfig {
        ModelConfig {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim.filter(|d| d.checked_mul(self.heads) != Some(self.hidden_size)),
            feed_forward_size: self.feed_forward_size,
            context: self.context,
            feed_forward: FeedForwardKind::Swiglu,
            norm: NormKind::RmsNorm,
            norm_position: NormPosition::Pre,
            norm_eps: self.norm_eps,
            positions: Positions::Rotary { base: self.rotary_base },
            tied_head: self.tied_head,
            bias: false,
            qkv_bias: false,
            dropout: 0.0,
            attention: AttentionConfig::Softmax,
            attention_by_layer: BTreeMap::new(),
            borders: None,
            leak: false,
        }
    }
}

/// A `Source` holds tensors by the names that a file gives them.
trait Source {
    /// Returns every name.
    fn names(&self) -> Vec<String>;

    /// Loads the tensor of a name.
    fn load(&self, name: &str) -> Result<Tensor>;
}

/// A `Part` says where one of our parameters lies in a file, and how it is stored.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    /// Name of the tensor in the file.
    name: String,
    /// Whether the tensor is stored as `(in, out)`.
    transposed: bool,
    /// Which part of the tensor's outputs is the parameter, where queries, keys and values, 0 to 2,
    /// are one tensor.
    third: Option<usize>,
    /// The number of heads, where rotary positions turn the neighbours `2i` and `2i + 1` instead of
    /// `i` and `i + D/2`.
    interleaved: Option<usize>,
}

impl Part {
    fn whole(name: impl Into<String>) -> Self {
        Self { name: name.into(), transposed: false, third: None, interleaved: None }
    }

    /// Reads the parameter, f32 and contiguous; `values` is the width of the values of all heads.
    fn read(&self, stored: &Tensor, values: usize) -> Result<Tensor> {
        let mut tensor = stored.clone();
        if let Some(third) = self.third {
            // Queries and keys are as wide as each other, and may be narrower than values.
            let all = tensor.dim(D::Minus1)?;
            let queries = all.saturating_sub(values) / 2;
            let width = if third == 2 { all - 2 * queries } else { queries };
            tensor = tensor.narrow(D::Minus1, third * queries, width)?;
        }
        if self.transposed && tensor.rank() == 2 {
            tensor = tensor.t()?;
        }
        if let Some(heads) = self.interleaved {
            tensor = half_split(&tensor, heads)?;
        }
        Ok(tensor.to_dtype(DType::F32)?.contiguous()?)
    }
}

/// Reorders rows of a query or key projection `(H·D, E)`, or entries of its bias, from the order in
/// which rotary positions turn neighbours to the order in which they turn halves.
fn half_split(rows: &Tensor, heads: usize) -> Result<Tensor> {
    let (n, rest) = (rows.dim(0)?, rows.elem_count() / rows.dim(0)?.max(1));
    ensure!(
        heads > 0 && n.is_multiple_of(2 * heads),
        "{n} rows do not make {heads} heads of an even dimension, which rotary positions need"
    );
    let order = rows.contiguous()?.reshape((heads, n / heads / 2, 2, rest))?.transpose(1, 2)?;
    Ok(order.contiguous()?.reshape(rows.shape())?)
}

/// Returns the names of a decoder's parameters, as [`Decoder`] asks for them.
fn parameter_names(config: &ModelConfig) -> Vec<String> {
    let mut names = vec!["model.embed_tokens.weight".to_owned()];
    let norm = |prefix: &str| {
        let bias = (config.norm == NormKind::LayerNorm).then(|| format!("{prefix}.bias"));
        std::iter::once(format!("{prefix}.weight")).chain(bias)
    };
    let linear = |prefix: &str, bias: bool| {
        std::iter::once(format!("{prefix}.weight")).chain(bias.then(|| format!("{prefix}.bias")))
    };
    if config.positions == Positions::Learned {
        names.push("model.embed_positions.weight".to_owned());
    }
    for i in 0..config.layers {
        let layer = format!("model.layers.{i}");
        for part in ["input_layernorm", "post_attention_layernorm"] {
            names.extend(norm(&format!("{layer}.{part}")));
        }
        for part in ["q_proj", "k_proj", "v_proj"] {
            names.extend(linear(&format!("{layer}.self_attn.{part}"), config.bias || config.qkv_bias));
        }
        names.extend(linear(&format!("{layer}.self_attn.o_proj"), config.bias));
        let gate = (config.feed_forward == FeedForwardKind::Swiglu).then_some("gate_proj");
        for part in gate.into_iter().chain(["up_proj", "down_proj"]) {
            names.extend(linear(&format!("{layer}.mlp.{part}"), config.bias));
        }
    }
    if config.norm_position == NormPosition::Pre {
        names.extend(norm("model.norm"));
    }
    if !config.tied_head {
        names.push("lm_head.weight".to_owned());
    }
    names
}

/// Reads every parameter of `config` from `source`, each from where `part` says, and returns them
/// with the names that were not read.
fn read_parameters(
    config: &ModelConfig,
    source: &dyn Source,
    part: impl Fn(&str) -> Result<Part>,
) -> Result<(HashMap<String, Tensor>, Vec<String>)> {
    config.validate()?;
    let mut left: HashSet<String> = source.names().into_iter().collect();
    let all = left.clone();
    let mut parameters = HashMap::new();
    for name in parameter_names(config) {
        let part = part(&name)?;
        // Models without an output head are saved without the prefix of the model around them.
        let bare = part.name.split_once('.').map_or("", |(_, bare)| bare);
        let Some(found) = [&*part.name, bare].into_iter().find(|&name| all.contains(name)) else {
            bail!("the weights lack {}: the file is incomplete, or the config is of another model", part.name)
        };
        let tensor = source.load(found).and_then(|stored| part.read(&stored, config.heads * config.head_dim()));
        parameters.insert(name, tensor.with_context(|| format!("cannot read {found}"))?);
        left.remove(found);
    }
    let mut left: Vec<String> = left.into_iter().collect();
    left.sort();
    Ok((parameters, left))
}

/// Refuses tensors for which our models have no place.
fn refuse_rest(left: &[String], is_known: impl Fn(&str) -> bool) -> Result<()> {
    match left.iter().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => bail!(
            "the weights hold {name}, for which the architecture that the config names has no place: it is another model, which this \
             program does not support"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_ids_are_told_from_paths() {
        assert!(is_hub_id("HuggingFaceTB/SmolLM2-135M") && is_hub_id("openai-community/gpt2"));
        for path in ["gpt2", "./model", "../model", "/a/b", "a/b/c", "a/", "/b", "C:\\x/y", "a b/c"] {
            assert!(!is_hub_id(path), "{path}");
        }
    }

    #[test]
    fn learned_positions_keep_their_context() -> Result<()> {
        use crate::{
            config::Preset,
            data::{DataSpec, prepare},
        };
        let tokenizer = prepare(&DataSpec::Sample, 300, None, &Silent)?.tokenizer;
        let of = |positions| -> Result<Pretrained> {
            let config = ModelConfig { positions, context: 1000, ..Preset::Seed.load()?.0 };
            Ok(Pretrained { config, tensors: HashMap::new(), tokenizer: tokenizer.clone() })
        };
        let rotary = Positions::Rotary { base: 1e4 };
        for (positions, asked, most, expected) in [
            (rotary, None, 512, 512),
            (rotary, None, 2000, 1000),
            (rotary, Some(2000), 512, 2000),
            (Positions::Learned, None, 512, 1000),
            (Positions::Learned, Some(1000), 512, 1000),
        ] {
            let mut model = of(positions)?;
            model.set_context(asked, most)?;
            assert_eq!(model.config.context, expected, "{positions:?}, {asked:?}, {most}");
        }
        let error = of(Positions::Learned)?.set_context(Some(512), 512).unwrap_err().to_string();
        assert!(error.contains("context is 512") && error.contains("1000"), "{error}");
        Ok(())
    }

    #[test]
    fn parameter_names_are_those_of_the_decoder() -> Result<()> {
        use crate::config::Preset::{Code, Seed, Small, Stories15m};
        for preset in [Seed, Small, Code, Stories15m] {
            for qkv_bias in [false, true] {
                for norm_position in [NormPosition::Pre, NormPosition::Post] {
                    let preset = preset.load()?.0;
                    // No family of other programs has the forget gates of presets.
                    let attention = performer_core::AttentionConfig::Softmax;
                    let config = ModelConfig { qkv_bias, norm_position, attention, vocab_size: 9, layers: 2, ..preset };
                    let mut names = parameter_names(&config);
                    names.sort();
                    let model = Decoder::new(&config, 0, &Device::Cpu)?;
                    let expected: Vec<String> = model.named_parameters().into_iter().map(|(name, _)| name).collect();
                    assert_eq!(names, expected);
                }
            }
        }
        Ok(())
    }

    #[test]
    fn halves_are_split() -> Result<()> {
        // Two heads of dimension 4.
        let rows = Tensor::arange(0u32, 8, &Device::Cpu)?.reshape((8, 1))?;
        assert_eq!(half_split(&rows, 2)?.flatten_all()?.to_vec1::<u32>()?, [0, 2, 1, 3, 4, 6, 5, 7]);
        assert!(half_split(&rows, 8).is_err());
        Ok(())
    }
}
