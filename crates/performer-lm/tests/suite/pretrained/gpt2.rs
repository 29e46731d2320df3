//! These tests compare GPT-2 with its equations in plain f64.

use anyhow::Result;
use candle_core::DType;
use serde_json::{Value, json};

use super::support::*;

const E: usize = 16;
const HEADS: usize = 4;
const INNER: usize = 40;
const LAYERS: usize = 2;
const CONTEXT: usize = 32;

fn weights() -> Result<Weights> {
    let mut w = Weights::new();
    matrix(&mut w, "transformer.wte.weight", VOCAB, E)?;
    matrix(&mut w, "transformer.wpe.weight", CONTEXT, E)?;
    for part in ["weight", "bias"] {
        vector(&mut w, &format!("transformer.ln_f.{part}"), E)?;
    }
    for i in 0..LAYERS {
        for part in ["weight", "bias"] {
            for norm in ["ln_1", "ln_2"] {
                vector(&mut w, &format!("transformer.h.{i}.{norm}.{part}"), E)?;
            }
        }
        // Conv1D has weights of shape (in, out).
        for (name, rows, columns) in
            [("attn.c_attn", E, 3 * E), ("attn.c_proj", E, E), ("mlp.c_fc", E, INNER), ("mlp.c_proj", INNER, E)]
        {
            matrix(&mut w, &format!("transformer.h.{i}.{name}.weight"), rows, columns)?;
            vector(&mut w, &format!("transformer.h.{i}.{name}.bias"), columns)?;
        }
    }
    Ok(w)
}

fn config(activation: &str) -> Value {
    json!({
        "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": E, "n_head": HEADS, "n_layer": LAYERS, "n_positions": CONTEXT,
        "n_inner": INNER, "activation_function": activation, "layer_norm_epsilon": 1e-3, "eos_token_id": 0,
    })
}

/// Writes a folder with a small model.
#[cfg(feature = "cli")]
pub(crate) fn write_example(dir: &std::path::Path) -> Result<()> {
    write_folder(dir, &config("gelu_new"), &weights()?)
}

type Rows = Vec<Vec<f64>>;

struct Plain<'a> {
    weights: &'a Weights,
    gelu: fn(f64) -> f64,
}

impl Plain<'_> {
    fn rows(&self, name: &str) -> Rows {
        let t = self.weights[&format!("transformer.{name}")].to_dtype(DType::F64).unwrap();
        if t.rank() == 1 { vec![t.to_vec1().unwrap()] } else { t.to_vec2().unwrap() }
    }

    fn conv1d(&self, x: &Rows, name: &str) -> Rows {
        let (w, b) = (self.rows(&format!("{name}.weight")), self.rows(&format!("{name}.bias")).remove(0));
        let row = |x: &Vec<f64>| -> Vec<f64> {
            (0..b.len()).map(|j| b[j] + x.iter().zip(&w).map(|(x, w)| x * w[j]).sum::<f64>()).collect()
        };
        x.iter().map(row).collect()
    }

    fn norm(&self, x: &Rows, name: &str) -> Rows {
        let (w, b) = (self.rows(&format!("{name}.weight")).remove(0), self.rows(&format!("{name}.bias")).remove(0));
        let row = |x: &Vec<f64>| -> Vec<f64> {
            let mean = x.iter().sum::<f64>() / E as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / E as f64;
            (0..E).map(|i| (x[i] - mean) / (variance + 1e-3).sqrt() * w[i] + b[i]).collect()
        };
        x.iter().map(row).collect()
    }

    fn attention(&self, x: &Rows, layer: usize) -> Rows {
        let qkv = self.conv1d(x, &format!("h.{layer}.attn.c_attn"));
        let d = E / HEADS;
        let mut out = vec![vec![0.0; E]; x.len()];
        for h in 0..HEADS {
            for t in 0..x.len() {
                let q = &qkv[t][h * d..][..d];
                let score = |s: usize| -> f64 {
                    let k = &qkv[s][E + h * d..][..d];
                    q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (d as f64).sqrt()
                };
                let weights: Vec<f64> = (0..=t).map(|s| score(s).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (s, weight) in weights.iter().enumerate() {
                    for i in 0..d {
                        out[t][h * d + i] += weight / total * qkv[s][2 * E + h * d + i];
                    }
                }
            }
        }
        self.conv1d(&out, &format!("h.{layer}.attn.c_proj"))
    }

    fn logits(&self, ids: &[u32]) -> Vec<Vec<f32>> {
        let (wte, wpe) = (self.rows("wte.weight"), self.rows("wpe.weight"));
        let add = |a: &[f64], b: &[f64]| -> Vec<f64> { a.iter().zip(b).map(|(a, b)| a + b).collect() };
        let mut x: Rows = ids.iter().enumerate().map(|(t, &id)| add(&wte[id as usize], &wpe[t])).collect();
        for layer in 0..LAYERS {
            let attended = self.attention(&self.norm(&x, &format!("h.{layer}.ln_1")), layer);
            x = x.iter().zip(&attended).map(|(a, b)| add(a, b)).collect();
            let mut inner = self.conv1d(&self.norm(&x, &format!("h.{layer}.ln_2")), &format!("h.{layer}.mlp.c_fc"));
            inner.iter_mut().flatten().for_each(|x| *x = (self.gelu)(*x));
            let out = self.conv1d(&inner, &format!("h.{layer}.mlp.c_proj"));
            x = x.iter().zip(&out).map(|(a, b)| add(a, b)).collect();
        }
        let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>() as f32;
        self.norm(&x, "ln_f").iter().map(|x| wte.iter().map(|w| dot(x, w)).collect()).collect()
    }
}

fn gelu_tanh(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

/// Computes `x Φ(x)`, with Φ from integrating its density by Simpson's rule from 0.
fn gelu_exact(x: f64) -> f64 {
    let n = 2000;
    let h = x / f64::from(n);
    let density = |t: f64| (-t * t / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let weight = |i| {
        if i == 0 || i == n {
            1.0
        } else if i % 2 == 1 {
            4.0
        } else {
            2.0
        }
    };
    let integral: f64 = (0..=n).map(|i| weight(i) * density(f64::from(i) * h)).sum::<f64>() * h / 3.0;
    x * (0.5 + integral)
}

#[test]
fn gpt2_is_its_equations() -> Result<()> {
    let weights = weights()?;
    for (activation, gelu) in [("gelu_new", gelu_tanh as fn(f64) -> f64), ("gelu", gelu_exact)] {
        let dir = tempfile::tempdir()?;
        write_folder(dir.path(), &config(activation), &weights)?;
        let expected = Plain { weights: &weights, gelu }.logits(&ids(29));
        assert_same(&logits(&open(dir.path())?, &ids(29))?, &expected);
    }
    Ok(())
}

/// The first published files have no prefix, a causal mask for every layer, and no field for the
/// output head.
#[test]
fn old_files_of_gpt2_are_read() -> Result<()> {
    let mut weights = weights()?;
    let expected = Plain { weights: &weights, gelu: gelu_tanh }.logits(&ids(9));
    weights = weights.into_iter().map(|(name, t)| (name.replace("transformer.", ""), t)).collect();
    weights.insert("h.0.attn.bias".into(), random("mask", &[1, 1, CONTEXT, CONTEXT], 0.0, 1.0)?);
    weights.insert("h.0.attn.masked_bias".into(), random("mask", &[1], 0.0, 1.0)?);
    let dir = tempfile::tempdir()?;
    write_folder(dir.path(), &config("gelu_new"), &weights)?;
    assert_same(&logits(&open(dir.path())?, &ids(9))?, &expected);

    for (field, value) in [("scale_attn_by_inverse_layer_idx", json!(true)), ("activation_function", json!("relu"))] {
        let mut bad = config("gelu_new");
        bad[field] = value;
        write_folder(dir.path(), &bad, &weights)?;
        let error = refusal(dir.path());
        assert!(error.contains(field) && error.contains("config.json"), "{error}");
    }
    // Where the width of the feed-forward layers is not given, it is four times this one.
    let mut bad = config("gelu_new");
    (bad["n_embd"], bad["n_inner"]) = (json!(usize::MAX), Value::Null);
    write_folder(dir.path(), &bad, &weights)?;
    let error = refusal(dir.path());
    assert!(error.contains("hidden_size is") && error.contains("at most"), "{error}");
    weights.remove("h.1.attn.c_attn.bias");
    write_folder(dir.path(), &config("gelu_new"), &weights)?;
    assert!(refusal(dir.path()).contains("h.1.attn.c_attn.bias"));
    Ok(())
}
