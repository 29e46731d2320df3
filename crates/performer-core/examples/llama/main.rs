//! This example runs a pretrained Llama with softmax, with FAVOR+, and with FAVOR+ behind a window
//! of exact attention.
//!
//! [`model`] is `candle_transformers::models::llama` with its attention exchanged. In a copy of
//! that file, the exchange takes these lines:
//!
//! ```text
//! // struct CausalSelfAttention, and an argument of each `load` to hand it down:
//! attention: Arc<dyn Attention>,
//! // struct Cache, for `kvs`:
//! states: Vec<State>,
//! // CausalSelfAttention::forward, for the cache, repeat_kv, the mask and softmax:
//! let y = self.attention.extend(Inputs::new(&q, &k, &v), &mut cache.states[block_idx])?;
//! ```
//!
//! To run it, give a Hugging Face folder of a Llama, SmolLM2 or TinyLlama (`performer-lm export`
//! writes one from other files):
//!
//! ```text
//! cargo run --release -p performer-core --example llama -- \
//!     FOLDER [softmax|favor|window|all] [PROMPT]
//! ```
//!
//! It continues the prompt greedily and prints the text, tokens per second, and the size of the
//! decoding state in bytes, which grows with the text for softmax and is constant for the others.
//! Weights trained with softmax have heads that are sharper than 128 random features can
//! approximate, so `favor` alone writes nonsense; `window`, which is exact for the last tokens,
//! stays near the model. `performer-lm convert` trains a model to work with its features.

#[path = "../shared/folder.rs"]
mod folder;
mod model;

use std::{env, path::Path, process, sync::Arc, time::Instant};

use anyhow::{Context, Error, Result, bail, ensure};
use candle_core::{D, DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Config, LlamaConfig, LlamaEosToks};
use performer_core::{Attention, Favor, FavorConfig, Softmax, Windowed, projection::derive_seed};
use tokenizers::Tokenizer;

use folder::Folder;
use model::{Cache, Llama};

const USAGE: &str = "usage: llama FOLDER [softmax|favor|window|all] [PROMPT]";
const NAMES: [&str; 3] = ["softmax", "window", "favor"];
const TOKENS: usize = 160;
const WINDOW: usize = 32;
const DEVICE: Device = Device::Cpu;

fn main() {
    if let Err(error) = run() {
        eprintln!("error: {error:#}");
        process::exit(1);
    }
}

fn run() -> Result<()> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let (path, name, prompt) = match &arguments[..] {
        [path] => (path, "all", None),
        [path, name] => (path, name.as_str(), None),
        [path, name, prompt] => (path, name.as_str(), Some(prompt.as_str())),
        _ => bail!(USAGE),
    };
    let names: Vec<&str> = NAMES.into_iter().filter(|n| name == *n || name == "all").collect();
    ensure!(!names.is_empty(), "unknown attention '{name}'; {USAGE}");
    let Folder { config, weights, tokenizer } = Folder::<LlamaConfig>::open(Path::new(path))?;
    let config = config.into_config(false);
    let heads = config.num_attention_heads;
    ensure!(
        heads > 0 && config.hidden_size.is_multiple_of(2 * heads),
        "{path}/config.json has {heads} heads for a hidden_size of {}; each must get an even number",
        config.hidden_size
    );
    let vb = VarBuilder::from_tensors(weights, DType::F32, &DEVICE);
    for name in names {
        let head_dim = config.hidden_size / heads;
        let llama = Llama::load(vb.clone(), &config, &|layer| attention(name, head_dim, layer))
            .with_context(|| format!("{path} holds no Llama as its config.json describes it"))?;
        generate(name, &llama, &config, &tokenizer, prompt.unwrap_or("Once upon a time"))?;
    }
    Ok(())
}

/// Builds the attention of a name for one layer; nothing else differs between the models.
fn attention(name: &str, head_dim: usize, layer: usize) -> candle_core::Result<Arc<dyn Attention>> {
    let favor = || Favor::new(&FavorConfig::default(), head_dim, derive_seed(42, layer as u64), DType::F32, &DEVICE);
    Ok(match name {
        "softmax" => Arc::new(Softmax::new()),
        "favor" => Arc::new(favor()?),
        "window" => Arc::new(Windowed::new(WINDOW, favor()?)?),
        other => candle_core::bail!("unknown attention '{other}'"),
    })
}

/// Continues the prompt with the likeliest tokens, and prints the text, its speed and the size of
/// the state.
fn generate(name: &str, llama: &Llama, config: &Config, tokenizer: &Tokenizer, prompt: &str) -> Result<()> {
    let encoding = tokenizer.encode(prompt, true).map_err(Error::msg)?;
    let mut tokens = encoding.get_ids().to_vec();
    ensure!(!tokens.is_empty(), "the prompt has no tokens");
    let ends = |token| match &config.eos_token_id {
        None => false,
        Some(LlamaEosToks::Single(end)) => token == *end,
        Some(LlamaEosToks::Multiple(ends)) => ends.contains(&token),
    };
    let mut cache = Cache::new(true, DType::F32, config, &DEVICE)?;
    let mut memory = Vec::new();
    let (mut seen, start) = (0, Instant::now());
    // The prompt is read in one pass, then one token at a time.
    while tokens.len() < (encoding.len() + TOKENS).min(config.max_position_embeddings) {
        let new = Tensor::new(&tokens[seen..], &DEVICE)?.unsqueeze(0)?;
        let logits = llama.forward(&new, seen, &mut cache)?;
        seen = tokens.len();
        memory.push(cache.states.iter().map(performer_core::State::bytes).sum::<usize>());
        let next = logits.argmax(D::Minus1)?.squeeze(0)?.to_scalar::<u32>()?;
        if ends(next) {
            break;
        }
        tokens.push(next);
    }
    let seconds = start.elapsed().as_secs_f64();
    let text = tokenizer.decode(&tokens, true).map_err(Error::msg)?;
    println!("== {name}: {:.0} tokens/s", (tokens.len() - encoding.len()) as f64 / seconds);
    if let (Some(first), Some(last)) = (memory.first(), memory.last()) {
        println!("   remembers {first} bytes after the prompt, {last} after {seen} tokens");
    }
    println!("{text}\n");
    Ok(())
}
