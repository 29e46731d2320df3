//! This module reads [GGUF](https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) files of the
//! `llama` architecture, which are widened to f32 as they are loaded, with the tokenizer that they
//! carry.

use std::{fs::File, io::Cursor, path::Path, sync::Mutex};

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_core::{
    Device, Tensor,
    quantized::gguf_file::{Content, Value},
};
use memmap2::Mmap;

use super::{
    LlamaSizes, Part, Pretrained, Source, read_parameters, refuse_rest,
    vocabulary::{ByteLevel, LLAMA3, Scored, Spaces},
};
use crate::{config::ModelConfig, data::Tokenizer};

/// Kinds of tokens, as llama.cpp counts them.
const UNKNOWN: i64 = 2;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;
const BYTE: i64 = 6;

/// Reads a file.
pub(super) fn open(path: &Path) -> Result<Pretrained> {
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    // SAFETY: a map is sound as long as nobody changes the file beneath it while it is read, which
    // takes seconds.
    let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot memory-map {}", path.display()))?;
    read(&map).with_context(|| format!("cannot load {}", path.display()))
}

fn read(bytes: &[u8]) -> Result<Pretrained> {
    let damaged = "the file is damaged or incomplete: copy it again";
    refuse_no_alignment(bytes).context(damaged)?;
    let mut cursor = Cursor::new(bytes);
    let content = Content::read(&mut cursor).context(damaged)?;
    refuse_lying_shapes(&content, bytes.len()).context(damaged)?;
    let gguf = Gguf { content, reader: Mutex::new(cursor) };
    let mut config = gguf.config()?;
    let (tensors, left) = read_parameters(&config, &gguf, |name| part(name, &config))?;
    refuse_rest(&left, |_| false)?;
    let tokenizer = gguf.tokenizer().context("tokenizer")?;
    config.borders = tokenizer.borders_for_config();
    Ok(Pretrained { config, tensors, tokenizer })
}

/// Refuses an alignment of zero, by which Candle's reader would divide.
fn refuse_no_alignment(bytes: &[u8]) -> Result<()> {
    let name = b"general.alignment";
    for place in memchr::memmem::find_iter(bytes, name) {
        // Behind the name stand the number of its type, 0 to 5 for whole numbers of 1, 1, 2, 2, 4
        // and 4 bytes, and the number.
        let rest = &bytes[place + name.len()..];
        let Some((kind, number)) = rest.split_first_chunk::<4>() else { continue };
        let Some(&width) = [1usize, 1, 2, 2, 4, 4].get(u32::from_le_bytes(*kind) as usize) else { continue };
        if number.get(..width).is_some_and(|number| number.iter().all(|&byte| byte == 0)) {
            bail!("general.alignment is 0");
        }
    }
    Ok(())
}

/// Refuses tensors without elements, of which Candle's reader would make a slice at no sound
/// address, and tensors of more elements than a file of this length can hold: the product of their
/// dimensions may overflow, and the reader would take what is left of it for the size.
fn refuse_lying_shapes(content: &Content, length: usize) -> Result<()> {
    for (name, info) in &content.tensor_infos {
        let count = info.shape.dims().iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
        // The narrowest type takes more than one bit for an element.
        if count.is_none_or(|count| count == 0 || count > length.saturating_mul(8)) {
            bail!("tensor {name} has shape {:?}, and the file has {length} bytes", info.shape.dims());
        }
    }
    Ok(())
}

/// Returns where a parameter lies; llama.cpp's rotary positions turn neighbours.
fn part(name: &str, config: &ModelConfig) -> Result<Part> {
    let interleaved = match name {
        _ if name.contains("q_proj") => Some(config.heads),
        _ if name.contains("k_proj") => Some(config.kv_heads),
        _ => None,
    };
    let name = name
        .replace("model.embed_tokens", "token_embd")
        .replace("model.norm", "output_norm")
        .replace("lm_head", "output")
        .replace("model.layers.", "blk.")
        .replace("input_layernorm", "attn_norm")
        .replace("post_attention_layernorm", "ffn_norm")
        .replace("self_attn.o_proj", "attn_output")
        .replace("self_attn.", "attn_")
        .replace("mlp.", "ffn_")
        .replace("_proj", "");
    Ok(Part { interleaved, ..Part::whole(name) })
}

struct Gguf<'a> {
    content: Content,
    reader: Mutex<Cursor<&'a [u8]>>,
}

impl Source for Gguf<'_> {
    fn names(&self) -> Vec<String> {
        self.content.tensor_infos.keys().cloned().collect()
    }

    fn load(&self, name: &str) -> Result<Tensor> {
        let mut reader = self.reader.lock().map_err(|_| anyhow!("a thread died while it read the file"))?;
        let tensor = self.content.tensor(&mut *reader, name, &Device::Cpu);
        let tensor = tensor.context("the file is damaged or incomplete: copy it again")?;
        Ok(tensor.dequantize(&Device::Cpu)?)
    }
}

impl Gguf<'_> {
    fn config(&self) -> Result<ModelConfig> {
        let architecture = self.text("general.architecture")?.context("general.architecture is missing")?;
        ensure!(
            architecture == "llama",
            "general.architecture is {architecture}; only llama is supported (take the model's Hugging Face folder instead)"
        );
        for (name, harmless) in [
            ("llama.expert_count", 0.0),
            ("llama.attention.sliding_window", 0.0),
            ("llama.rope.scaling.factor", 1.0),
            ("llama.rope.scale_linear", 1.0),
        ] {
            if let Some(value) = self.number(name)?.filter(|&value| value != harmless) {
                bail!("{name} is {value}, which is not supported; take a model without it");
            }
        }
        if let Some(kind) = self.text("llama.rope.scaling.type")?.filter(|&kind| kind != "none") {
            bail!("llama.rope.scaling.type is {kind}, which is not supported; take a model without scaled positions");
        }
        let (hidden_size, heads) = (self.size("llama.embedding_length")?, self.size("llama.attention.head_count")?);
        let head_dim = match self.number("llama.attention.key_length")? {
            Some(length) => length as usize,
            None => hidden_size.checked_div(heads).unwrap_or(0),
        };
        for name in ["llama.rope.dimension_count", "llama.attention.value_length"] {
            if let Some(value) = self.number(name)?.filter(|&value| value != head_dim as f64) {
                bail!("{name} is {value} where heads have dimension {head_dim}, which is not supported");
            }
        }
        let embedding =
            self.content.tensor_infos.get("token_embd.weight").context("the tensor token_embd.weight is missing")?;
        let sizes = LlamaSizes {
            vocab_size: embedding.shape.dims().first().copied().unwrap_or(0),
            hidden_size,
            layers: self.size("llama.block_count")?,
            heads,
            kv_heads: self.number("llama.attention.head_count_kv")?.map_or(heads, |n| n as usize),
            head_dim: Some(head_dim),
            feed_forward_size: self.size("llama.feed_forward_length")?,
            context: self.size("llama.context_length")?,
            norm_eps: self
                .number("llama.attention.layer_norm_rms_epsilon")?
                .context("llama.attention.layer_norm_rms_epsilon is missing")?,
            rotary_base: self.number("llama.rope.freq_base")?.unwrap_or(10_000.0),
            tied_head: !self.content.tensor_infos.contains_key("output.weight"),
        };
        Ok(sizes.config())
    }

    fn tokenizer(&self) -> Result<Tokenizer> {
        let tokens = self.list("tokenizer.ggml.tokens", |v| v.to_string().ok().cloned())?;
        let kinds = match self.content.metadata.contains_key("tokenizer.ggml.token_type") {
            true => self.list("tokenizer.ggml.token_type", whole)?,
            false => vec![1; tokens.len()],
        };
        ensure!(kinds.len() == tokens.len(), "{} tokens have {} kinds: the file is damaged", tokens.len(), kinds.len());
        let count = tokens.len();
        let model = self.text("tokenizer.ggml.model")?.context("tokenizer.ggml.model is missing")?;
        let words = self.text("tokenizer.ggml.pre")?.unwrap_or("default");
        let begin = self.id("tokenizer.ggml.bos_token_id")?;
        // Where the file does not say, llama.cpp begins texts of these kinds with the token.
        let is_usual = model == "llama" || LLAMA3.contains(&words);
        let has_begin = self.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(is_usual);
        let begin = begin.filter(|_| has_begin);
        let json = match model {
            "gpt2" => {
                let of = |kind| (0..tokens.len()).filter(|&id| kinds[id] == kind).collect();
                let byte_level = ByteLevel {
                    merges: self.list("tokenizer.ggml.merges", |v| v.to_string().ok().cloned())?,
                    control: of(CONTROL),
                    user_defined: of(USER_DEFINED),
                    words,
                    begin,
                    tokens,
                };
                byte_level.tokenizer_json()?
            }
            "llama" => {
                let scores = self.list("tokenizer.ggml.scores", |v| v.to_f32().ok())?;
                ensure!(
                    scores.len() == tokens.len(),
                    "{} tokens have {} scores: the file is damaged",
                    tokens.len(),
                    scores.len()
                );
                let prefixed = self.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
                let mut scored = Scored::new(if prefixed { Spaces::Marked } else { Spaces::MarkedOnly });
                for ((token, kind), score) in tokens.into_iter().zip(kinds).zip(scores) {
                    match kind {
                        UNKNOWN => scored.push_unknown(&token),
                        CONTROL => scored.push_control(&token),
                        USER_DEFINED => scored.push_user_defined(&token),
                        BYTE => scored.push_byte(byte(&token)?),
                        _ => scored.push(token, score),
                    }
                }
                if let Some(begin) = begin {
                    scored.begin_with(begin);
                }
                scored.tokenizer_json()?
            }
            other => bail!("tokenizer.ggml.model is {other}; supported are gpt2 (byte-level) and llama (scores)"),
        };
        // A chat model may end its turn by a token of its own, without which it can be read too.
        let end = self.id("tokenizer.ggml.eos_token_id")?;
        let end_of_turn = self.id("tokenizer.ggml.eot_token_id").ok().flatten();
        let end_of_turn = end_of_turn.filter(|&id| (id as usize) < count && end != Some(id));
        let stop: Vec<u32> = end.into_iter().chain(end_of_turn).collect();
        Tokenizer::of_model(json, &stop)
    }

    fn text(&self, name: &str) -> Result<Option<&str>> {
        match self.content.metadata.get(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => bail!("{name} is {other:?}; it must be a text"),
        }
    }

    fn flag(&self, name: &str) -> Result<Option<bool>> {
        match self.content.metadata.get(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => bail!("{name} is {other:?}; it must be true or false"),
        }
    }

    fn number(&self, name: &str) -> Result<Option<f64>> {
        let Some(value) = self.content.metadata.get(name) else { return Ok(None) };
        let number = match value {
            Value::F32(x) => Some(f64::from(*x)),
            Value::F64(x) => Some(*x),
            other => whole(other).map(|x| x as f64),
        };
        number.map(Some).with_context(|| format!("{name} is {value:?}; it must be a number"))
    }

    fn size(&self, name: &str) -> Result<usize> {
        let value = self.content.metadata.get(name).with_context(|| format!("{name} is missing"))?;
        let size = whole(value).and_then(|size| usize::try_from(size).ok());
        size.with_context(|| format!("{name} is {value:?}; it must be a whole number of at least 0"))
    }

    fn id(&self, name: &str) -> Result<Option<u32>> {
        let Some(value) = self.content.metadata.get(name) else { return Ok(None) };
        let id = whole(value).and_then(|id| u32::try_from(id).ok());
        id.map(Some).with_context(|| format!("{name} is {value:?}; it must be the id of a token"))
    }

    fn list<T>(&self, name: &str, entry: impl Fn(&Value) -> Option<T>) -> Result<Vec<T>> {
        let Some(value) = self.content.metadata.get(name) else { bail!("{name} is missing") };
        let list = value.to_vec().with_context(|| format!("{name} must be a list"))?;
        let read = |value| entry(value).with_context(|| format!("{name} holds {value:?}, which does not belong there"));
        list.iter().map(read).collect()
    }
}

fn whole(value: &Value) -> Option<i64> {
    Some(match value {
        Value::U8(x) => i64::from(*x),
        Value::I8(x) => i64::from(*x),
        Value::U16(x) => i64::from(*x),
        Value::I16(x) => i64::from(*x),
        Value::U32(x) => i64::from(*x),
        Value::I32(x) => i64::from(*x),
        Value::U64(x) => i64::try_from(*x).ok()?,
        Value::I64(x) => *x,
        _ => return None,
    })
}

/// Returns the byte that a token such as `<0x0A>` stands for.
fn byte(token: &str) -> Result<u8> {
    let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
    byte.with_context(|| format!("token {token:?} should stand for a byte, as <0x0A> does"))
}
