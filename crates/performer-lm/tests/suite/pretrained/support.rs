//! This module makes small random models in the files of other programs.

use std::{collections::HashMap, path::Path};

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use performer_core::projection::draw_normal;
use performer_lm::model::pretrained::Pretrained;
use serde_json::{Value, json};

pub(crate) const VOCAB: usize = 60;

pub(crate) type Weights = HashMap<String, Tensor>;

/// Returns normal numbers with standard deviation `std` around `mean`, as a function of the name.
pub(crate) fn random(name: &str, shape: &[usize], mean: f64, std: f64) -> Result<Tensor> {
    let seed = name.bytes().fold(7u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let n = shape.iter().product();
    let normal = draw_normal(n, seed)?;
    let values: Vec<f32> = normal.into_iter().map(|x| (mean + std * x) as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Adds a matrix whose numbers are so large that attention is far from uniform and biases matter.
pub(crate) fn matrix(weights: &mut Weights, name: &str, rows: usize, columns: usize) -> Result<()> {
    let std = if name.contains("embed") || name.contains("w") && name.contains("te.") {
        0.7
    } else {
        1.2 / (columns as f64).sqrt()
    };
    weights.insert(name.to_owned(), random(name, &[rows, columns], 0.0, std)?);
    Ok(())
}

/// Adds a vector: a norm's weight around 1, or a bias around 0.
pub(crate) fn vector(weights: &mut Weights, name: &str, n: usize) -> Result<()> {
    let mean = if name.ends_with("weight") { 1.0 } else { 0.0 };
    weights.insert(name.to_owned(), random(name, &[n], mean, 0.3)?);
    Ok(())
}

/// `Sizes` are the sizes of a small Llama with two query heads to a key head.
#[derive(Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) layers: usize,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

pub(crate) const SMALL: Sizes =
    Sizes { vocab: VOCAB, hidden: 24, inner: 40, layers: 2, heads: 6, kv_heads: 3, head_dim: 4 };

/// Returns the weights of a Llama-style model under Hugging Face's names.
pub(crate) fn llama_weights(s: Sizes, qkv_bias: bool, tied: bool) -> Result<Weights> {
    let mut w = Weights::new();
    matrix(&mut w, "model.embed_tokens.weight", s.vocab, s.hidden)?;
    vector(&mut w, "model.norm.weight", s.hidden)?;
    if !tied {
        matrix(&mut w, "lm_head.weight", s.vocab, s.hidden)?;
    }
    for i in 0..s.layers {
        let layer = format!("model.layers.{i}");
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            vector(&mut w, &format!("{layer}.{norm}.weight"), s.hidden)?;
        }
        for (name, heads) in [("q_proj", s.heads), ("k_proj", s.kv_heads), ("v_proj", s.kv_heads)] {
            matrix(&mut w, &format!("{layer}.self_attn.{name}.weight"), heads * s.head_dim, s.hidden)?;
            if qkv_bias {
                vector(&mut w, &format!("{layer}.self_attn.{name}.bias"), heads * s.head_dim)?;
            }
        }
        matrix(&mut w, &format!("{layer}.self_attn.o_proj.weight"), s.hidden, s.heads * s.head_dim)?;
        matrix(&mut w, &format!("{layer}.mlp.gate_proj.weight"), s.inner, s.hidden)?;
        matrix(&mut w, &format!("{layer}.mlp.up_proj.weight"), s.inner, s.hidden)?;
        matrix(&mut w, &format!("{layer}.mlp.down_proj.weight"), s.hidden, s.inner)?;
    }
    Ok(w)
}

/// Returns the `config.json` that belongs to these weights.
pub(crate) fn llama_config(s: Sizes, model_type: &str, tied: bool) -> Value {
    json!({
        "model_type": model_type, "vocab_size": s.vocab, "hidden_size": s.hidden, "intermediate_size": s.inner,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-4, "rope_theta": 500.0, "hidden_act": "silu",
        "tie_word_embeddings": tied, "bos_token_id": 0, "eos_token_id": 0,
    })
}

/// Returns a tokenizer of words `w1`, `w2`, ... with `<|endoftext|>` as token 0.
pub(crate) fn word_tokenizer() -> Value {
    let mut vocab: HashMap<String, usize> = (1..VOCAB).map(|i| (format!("w{i}"), i)).collect();
    vocab.insert("<|endoftext|>".into(), 0);
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "added_tokens": [{"id": 0, "content": "<|endoftext|>", "single_word": false, "lstrip": false, "rstrip": false,
                          "normalized": false, "special": true}],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w1"},
    })
}

pub(crate) fn write_json(path: &Path, value: &Value) {
    std::fs::write(path, value.to_string()).unwrap();
}

/// Writes a folder with one file of weights.
pub(crate) fn write_folder(dir: &Path, config: &Value, weights: &Weights) -> Result<()> {
    write_json(&dir.join("config.json"), config);
    write_json(&dir.join("tokenizer.json"), &word_tokenizer());
    Ok(candle_core::safetensors::save(weights, dir.join("model.safetensors"))?)
}

pub(crate) fn open(path: &Path) -> Result<Pretrained> {
    Pretrained::open(path.to_str().unwrap())
}

/// Returns the error of opening, with its causes.
pub(crate) fn refusal(path: &Path) -> String {
    format!("{:#}", open(path).expect_err("it must be refused"))
}

/// Returns some tokens, none of them twice in a row.
pub(crate) fn ids(n: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * 17 + i * i * 5 + 3) % VOCAB) as u32).collect()
}

/// Returns our logits after every token of a text.
pub(crate) fn logits(model: &Pretrained, ids: &[u32]) -> Result<Vec<Vec<f32>>> {
    let model = model.decoder(&Device::Cpu)?;
    Ok(model
        .forward(&Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?, None)?
        .squeeze(0)?
        .to_dtype(DType::F32)?
        .to_vec2()?)
}

/// Returns the logits after every token of a text, from a model that gives those after the last
/// token only.
pub(crate) fn logits_of_prefixes(
    ids: &[u32],
    mut last: impl FnMut(&Tensor) -> candle_core::Result<Tensor>,
) -> Result<Vec<Vec<f32>>> {
    let mut all = Vec::new();
    for end in 1..=ids.len() {
        all.push(last(&Tensor::new(&ids[..end], &Device::Cpu)?.unsqueeze(0)?)?.flatten_all()?.to_vec1()?);
    }
    Ok(all)
}

/// Compares logits, which must not be all alike, and may differ by at most `1e-4`.
pub(crate) fn assert_same(ours: &[Vec<f32>], theirs: &[Vec<f32>]) {
    assert_eq!(ours.len(), theirs.len());
    let spread = theirs.iter().flatten().fold(0f32, |most, x| most.max(x.abs()));
    assert!(spread > 0.5 && spread < 100.0, "logits up to {spread} test nothing");
    for (t, (ours, theirs)) in ours.iter().zip(theirs).enumerate() {
        assert_eq!(ours.len(), theirs.len());
        for (id, (a, b)) in ours.iter().zip(theirs).enumerate() {
            assert!((a - b).abs() <= 1e-4, "logit {id} after token {t} is {a}, not {b}");
        }
    }
}
