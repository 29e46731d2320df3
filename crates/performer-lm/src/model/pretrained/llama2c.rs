//! This module reads [llama2.c](https://github.com/karpathy/llama2.c)'s models: float32 `.bin`
//! files of versions 0 and 1, each beside its tokenizer.
//!
//! Version 0 is 7 numbers (dimension, inner dimension, layers, heads, key and value heads,
//! vocabulary, context; a negative vocabulary says that the output head is not the embedding), then
//! the weights. Version 1 has a magic number, a version and a flag around those numbers in a header
//! of 256 bytes, and another order of the weights. The tokenizer is the file that is named after
//! the size of the vocabulary, such as `tok512.bin` for 512 tokens, or else `tokenizer.bin`.

use std::{collections::HashMap, fs::File, path::Path};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use memmap2::Mmap;

use super::{
    LlamaSizes, Pretrained, half_split,
    vocabulary::{Scored, Spaces},
};
use crate::data::{Borders, Tokenizer};

/// The magic number "ak42", which stands before every version but the first.
const MAGIC: u32 = 0x616b_3432;

/// Size of the header of the versions that have a magic number.
const HEADER: usize = 256;

/// ε of the norms, which no header gives.
const NORM_EPS: f64 = 1e-5;

/// The token with which every story begins; no token ends a story.
const BEGIN: u32 = 1;

/// Reads a model and the tokenizer beside it.
pub(super) fn open(path: &Path) -> Result<Pretrained> {
    let what = || format!("{} is no llama2.c model that this program reads", path.display());
    let file = File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    // SAFETY: a map is sound as long as nobody changes the file beneath it while it is read, which
    // takes seconds.
    let map = unsafe { Mmap::map(&file) }.with_context(|| format!("cannot memory-map {}", path.display()))?;
    let mut config;
    let tensors;
    {
        let (header, data) = Header::read(&map).with_context(what)?;
        config = header.sizes().config();
        config.validate().with_context(what)?;
        tensors = header.tensors(data).with_context(what)?;
    }
    let tokenizer = tokenizer(path, config.vocab_size)?;
    config.borders = tokenizer.borders_for_config();
    Ok(Pretrained { config, tensors, tokenizer })
}

struct Header {
    version: u32,
    dim: usize,
    hidden: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    vocab: usize,
    context: usize,
    tied_head: bool,
}

impl Header {
    /// Returns the header, and the bytes behind it.
    fn read(bytes: &[u8]) -> Result<(Self, &[u8])> {
        let number = |i: usize| bytes.get(4 * i..4 * i + 4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        let number = |i| number(i).context("its header is incomplete: copy it again");
        let marked = number(0)? as u32 == MAGIC;
        let version = if marked { number(1)? as u32 } else { 0 };
        ensure!(
            version <= 1,
            "it has version {version}, with quantised weights; export it as float32 (llama2.c's export.py --version 1)"
        );
        let first = if marked { 2 } else { 0 };
        let mut fields = [0; 7];
        for (i, field) in fields.iter_mut().enumerate() {
            *field = number(first + i)?;
        }
        let tied_head = if marked { bytes.get(36).is_some_and(|&flag| flag != 0) } else { fields[5] > 0 };
        fields[5] = fields[5].saturating_abs();
        if let Some(bad) = fields.iter().find(|&&field| field <= 0) {
            bail!("its header holds {bad} where a size must stand: give the .bin of a model, not of a tokenizer");
        }
        let [dim, hidden, layers, heads, kv_heads, vocab, context] = fields.map(|field| field as usize);
        ensure!(dim.is_multiple_of(heads), "its header says dimension {dim} for {heads} heads: copy it again");
        let data = bytes.get(if marked { HEADER } else { 28 }..).unwrap_or_default();
        Ok((Self { version, dim, hidden, layers, heads, kv_heads, vocab, context, tied_head }, data))
    }

    fn sizes(&self) -> LlamaSizes {
        LlamaSizes {
            vocab_size: self.vocab,
            hidden_size: self.dim,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: None,
            feed_forward_size: self.hidden,
            context: self.context,
            norm_eps: NORM_EPS,
            rotary_base: 10_000.0,
            tied_head: self.tied_head,
        }
    }

    /// Returns the weights under our names; rotary positions of llama2.c turn neighbours.
    fn tensors(&self, data: &[u8]) -> Result<HashMap<String, Tensor>> {
        let (e, kv) = (self.dim, self.dim / self.heads * self.kv_heads);
        let embedding = Group::one("model.embed_tokens.weight", self.vocab, e);
        let attention_norm = Group::layers("input_layernorm", 1, e);
        let feed_forward_norm = Group::layers("post_attention_layernorm", 1, e);
        let norm = Group::one("model.norm.weight", 1, e);
        let head = Group::one("lm_head.weight", self.vocab, e);
        let attention = [("q_proj", e, e), ("k_proj", kv, e), ("v_proj", kv, e), ("o_proj", e, e)]
            .map(|(name, rows, columns)| Group::layers(format!("self_attn.{name}"), rows, columns));
        let feed_forward = [("gate_proj", self.hidden, e), ("down_proj", e, self.hidden), ("up_proj", self.hidden, e)]
            .map(|(name, rows, columns)| Group::layers(format!("mlp.{name}"), rows, columns));
        let groups: Vec<Group> = if self.version == 0 {
            // Behind the last norm lie tables of the rotary angles.
            let angles = [(); 2].map(|()| Group::one("", self.context, e / self.heads / 2));
            let first = [embedding, attention_norm].into_iter().chain(attention).chain([feed_forward_norm]);
            first.chain(feed_forward).chain([norm]).chain(angles).chain([head]).collect()
        } else {
            let first = [attention_norm, feed_forward_norm, norm, embedding].into_iter();
            first.chain(attention).chain(feed_forward).chain([head]).collect()
        };
        let mut reader = Reader { data, at: 0 };
        let mut tensors = HashMap::new();
        for group in groups {
            if group.name == "lm_head.weight" && self.tied_head {
                continue;
            }
            for layer in 0..if group.is_layered { self.layers } else { 1 } {
                let tensor = reader.matrix(group.rows, group.columns)?;
                let name = match &*group.name {
                    "" => continue,
                    name if group.is_layered => format!("model.layers.{layer}.{name}.weight"),
                    name => name.to_owned(),
                };
                let tensor = match &*group.name {
                    "self_attn.q_proj" => half_split(&tensor, self.heads)?,
                    "self_attn.k_proj" => half_split(&tensor, self.kv_heads)?,
                    name if name.contains("norm") => tensor.squeeze(0)?,
                    _ => tensor,
                };
                tensors.insert(name, tensor);
            }
        }
        ensure!(
            reader.at == data.len(),
            "its header says {} bytes of weights and there are {}: copy it again",
            reader.at,
            data.len()
        );
        Ok(tensors)
    }
}

/// A `Group` is a matrix, or one matrix for each layer.
struct Group {
    name: String,
    rows: usize,
    columns: usize,
    is_layered: bool,
}

impl Group {
    fn one(name: impl Into<String>, rows: usize, columns: usize) -> Self {
        Self { name: name.into(), rows, columns, is_layered: false }
    }

    fn layers(name: impl Into<String>, rows: usize, columns: usize) -> Self {
        Self { name: name.into(), rows, columns, is_layered: true }
    }
}

struct Reader<'a> {
    data: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn matrix(&mut self, rows: usize, columns: usize) -> Result<Tensor> {
        let bytes = rows.saturating_mul(columns).saturating_mul(4);
        let Some(part) = self.data.get(self.at..self.at.saturating_add(bytes)) else {
            bail!("it is incomplete: its weights end after {} bytes; copy it again", self.data.len())
        };
        self.at += bytes;
        let values = part.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        Ok(Tensor::from_vec(values, (rows, columns), &Device::Cpu)?)
    }
}

/// Reads the tokenizer beside a model.
fn tokenizer(model: &Path, vocab_size: usize) -> Result<Tokenizer> {
    let names = [format!("tok{vocab_size}.bin"), "tokenizer.bin".to_owned()];
    let Some(path) = names.iter().map(|name| model.with_file_name(name)).find(|path| path.exists()) else {
        bail!("{} needs its tokenizer beside it: put {} or {} there", model.display(), names[0], names[1])
    };
    let read = || {
        let scored = read_vocabulary(&std::fs::read(&path)?, vocab_size)?;
        Tokenizer::with_borders(scored.tokenizer_json()?, Some(Borders::beginning(BEGIN)))
    };
    read().with_context(|| format!("cannot read the tokenizer {} of a model of {vocab_size} tokens", path.display()))
}

/// Reads a `tokenizer.bin`: the length of the longest token, then each token's score, length and
/// bytes. The first three tokens are unknown, begin and end, the next 256 are the bytes.
fn read_vocabulary(bytes: &[u8], vocab_size: usize) -> Result<Scored> {
    let mut at = 4usize;
    let mut take = |n: usize| {
        let part =
            bytes.get(at..at.saturating_add(n)).context("it is too short: copy it again, or find the right one")?;
        at += n;
        Ok::<_, anyhow::Error>(part)
    };
    let mut scored = Scored::new(Spaces::Plain);
    for id in 0..vocab_size {
        let score = take(4)?.try_into().map(f32::from_le_bytes)?;
        let length = take(4)?.try_into().map(u32::from_le_bytes)?;
        let text = String::from_utf8_lossy(take(length as usize)?).into_owned();
        match id {
            0 => scored.push_unknown("<unk>"),
            1 => scored.push_control("<s>"),
            2 => scored.push_control("</s>"),
            3..259 => scored.push_byte((id - 3) as u8),
            _ => scored.push(text, score),
        }
    }
    ensure!(at == bytes.len(), "it holds more tokens than the model: find the right one");
    ensure!(vocab_size > 259, "it has no tokens but the bytes");
    scored.begin_with(BEGIN);
    Ok(scored)
}
