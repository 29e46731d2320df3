//! These tests check the layer around attention: gradients, positions, decoding, saving, redrawing.

use std::collections::HashMap;

use crate::common::{ALL_MAPS, Random, assert_tensor_close, tensor, values};
use candle_core::{DType, Device, Error, Result, Tensor, Var, safetensors};
use candle_nn::{VarBuilder, VarMap};
use performer_core::features::{FeatureMapKind, Fitted};
use performer_core::{
    Attention, AttentionConfig, Favor, FavorConfig, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig,
    Rotary, Softmax, State,
};

const DEVICE: Device = Device::Cpu;
const HIDDEN: usize = 24;
const HEAD_DIM: usize = 6;

/// Returns a configuration with grouped heads and biases everywhere.
fn config() -> MultiHeadConfig {
    let config = MultiHeadConfig::new(HIDDEN, 4);
    assert_eq!(config.head_dim, HEAD_DIM);
    config.with_kv_heads(2).with_qkv_bias(true).with_output_bias(true)
}

fn favor(map: FeatureMapKind, seed: u64) -> Result<Box<dyn Attention>> {
    let config = FavorConfig::default().with_map(map).with_features(16);
    Ok(Box::new(Favor::new(&config, HEAD_DIM, seed, DType::F32, &DEVICE)?))
}

/// Returns softmax and every map.
fn attentions() -> Result<Vec<(String, Box<dyn Attention>)>> {
    let mut all: Vec<(String, Box<dyn Attention>)> = vec![("softmax".into(), Box::new(Softmax::new()))];
    for map in ALL_MAPS {
        all.push((map.to_string(), favor(map, 1)?));
    }
    Ok(all)
}

/// Returns a layer and its variables, the same ones every time.
fn layer(attention: Box<dyn Attention>, rotary: bool) -> Result<(MultiHeadAttention, VarMap)> {
    let vars = VarMap::new();
    let rotary = if rotary { Some(Rotary::new(HEAD_DIM, 64, 1e4, &DEVICE)?) } else { None };
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
    let layer = MultiHeadAttention::new(&config(), attention, rotary, vb)?;
    set_weights(&vars)?;
    Ok((layer, vars))
}

/// Sets the weights of a layer, which Candle draws without a seed, to the same numbers every time,
/// short enough to keep the signed maps near their kernels.
fn set_weights(vars: &VarMap) -> Result<()> {
    let data = vars.data().lock().unwrap();
    let mut names: Vec<&String> = data.keys().filter(|name| is_weight(name)).collect();
    names.sort();
    for (seed, name) in names.into_iter().enumerate() {
        data[name].set(&(random(100 + seed as u64, data[name].dims())? * 0.08)?)?;
    }
    Ok(())
}

/// Whether a variable is a weight of the layer; the others are buffers of its attention.
fn is_weight(name: &str) -> bool {
    name.contains("_proj.")
}

fn random(seed: u64, dims: &[usize]) -> Result<Tensor> {
    tensor(&Random::new(seed).normal(dims.iter().product(), 1.0), dims, DType::F32, &DEVICE)
}

/// Every parameter gets a gradient. Layers of Candle without a backward pass lose gradients
/// silently.
#[test]
fn every_parameter_has_a_gradient() -> Result<()> {
    for (name, attention) in attentions()? {
        for rotary in [false, true] {
            for mask in [Mask::causal(), Mask::full()] {
                let (layer, vars) = layer(clone(&*attention, &name)?, rotary)?;
                let y = layer.forward(&random(2, &[2, 20, HIDDEN])?, &mask)?;
                let gradients = (&y * random(3, &[2, 20, HIDDEN])?)?.sum_all()?.backward()?;
                let data = vars.data().lock().unwrap();
                assert_eq!(data.keys().filter(|name| is_weight(name)).count(), 8, "{name}: {:?}", data.keys());
                let trained = layer.attention().trained_buffers();
                // What is trained is among what is saved.
                assert!(trained.iter().all(|trained| data.contains_key(trained)), "{name}: {trained:?}");
                for (parameter, var) in data.iter() {
                    // Random features are saved with the weights, and never trained.
                    if !is_weight(parameter) && !trained.contains(parameter) {
                        assert!(gradients.get(var).is_none(), "{name}: {parameter} is random and has a gradient");
                        continue;
                    }
                    // A bias of the keys adds one constant to all logits of a row, so softmax has
                    // no gradient for it.
                    if parameter == "k_proj.bias" && name == "softmax" && !rotary {
                        continue;
                    }
                    let Some(gradient) = gradients.get(var) else { panic!("{name}: {parameter} has no gradient") };
                    let largest = values(gradient)?.into_iter().fold(0.0, |max: f64, g| max.max(g.abs()));
                    assert!(largest.is_finite() && largest > 1e-6, "{name}: {parameter}: largest gradient {largest}");
                }
            }
        }
    }
    Ok(())
}

/// The layer's own operations are compared with Candle's, one by one.
#[test]
fn a_layer_is_its_formula_with_the_same_gradients() -> Result<()> {
    let (layer, vars) = layer(Box::new(Softmax::new()), true)?;
    let x = Var::from_tensor(&random(3, &[2, 9, HIDDEN])?)?;
    let weight = random(4, &[2, 9, HIDDEN])?;
    let data = vars.data().lock().unwrap();
    let apply = |name: &str, x: &Tensor| -> Result<Tensor> {
        let var = |part: &str| data[&format!("{name}.{part}")].as_tensor();
        x.broadcast_matmul(&var("weight").t()?)?.broadcast_add(var("bias"))
    };
    let heads = |name: &str, count: usize| -> Result<Tensor> {
        apply(name, &x)?.reshape((2, 9, count, HEAD_DIM))?.transpose(1, 2)
    };
    let rotary = Rotary::new(HEAD_DIM, 64, 1e4, &DEVICE)?;
    let (q, k) = (rotary.apply(&heads("q_proj", 4)?, 0)?, rotary.apply(&heads("k_proj", 2)?, 0)?);
    let out = Softmax::new().composed().forward(Inputs::new(&q, &k, &heads("v_proj", 2)?), &Mask::causal())?;
    let want = apply("o_proj", &out.transpose(1, 2)?.contiguous()?.reshape((2, 9, HIDDEN))?)?;
    let got = layer.forward(&x, &Mask::causal())?;
    assert_tensor_close("output", &got, &values(&want)?, 1e-5);
    let [got, want] = [got, want].map(|out| (out * &weight)?.sum_all()?.backward());
    let (got, want) = (got?, want?);
    for (name, var) in data.iter().map(|(name, var)| (name.as_str(), var)).chain([("x", &x)]) {
        assert_tensor_close(name, got.get(var).unwrap(), &values(want.get(var).unwrap())?, 1e-5);
    }
    Ok(())
}

/// With a residual the layer computes the sum of both, to the bit, and so do the gradients.
#[test]
fn a_layer_adds_to_its_residual() -> Result<()> {
    for bias in [false, true] {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
        let config = config().with_output_bias(bias);
        let rotary = Rotary::new(HEAD_DIM, 64, 1e4, &DEVICE)?.interleaved();
        let layer = MultiHeadAttention::new(&config, Box::new(Softmax::new()), Some(rotary), vb)?;
        let x = Var::from_tensor(&random(3, &[2, 9, HIDDEN])?)?;
        let residual = Var::from_tensor(&random(5, &[2, 9, HIDDEN])?)?;
        let weight = random(4, &[2, 9, HIDDEN])?;
        let run = |out: Tensor| -> Result<Vec<Vec<f64>>> {
            let gradients = (&out * &weight)?.sum_all()?.backward()?;
            let mut all = vec![values(&out)?];
            for var in [&x, &residual].into_iter().chain(&vars.all_vars()) {
                all.push(values(gradients.get(var).expect("everything has a gradient"))?);
            }
            Ok(all)
        };
        let one = run(layer.forward_residual(&x, &Mask::causal(), &residual)?)?;
        assert_eq!(one, run((residual.as_tensor() + layer.forward(&x, &Mask::causal())?)?)?, "bias {bias}");
    }
    Ok(())
}

fn clone(attention: &dyn Attention, name: &str) -> Result<Box<dyn Attention>> {
    let Ok(map) = name.parse() else { return Ok(Box::new(Softmax::new())) };
    let mut copy = favor(map, 99)?;
    let buffers: HashMap<String, Tensor> = attention.buffers().into_iter().collect();
    copy.load_buffers(&|name| buffers.get(name).cloned())?;
    Ok(copy)
}

/// Rotary positions turn pairs `(i, i + D/2)`, as complex numbers, by `t / base^{2i/D}`: at the
/// first positions, across the end of the table that is kept, and beyond it. A table of all 2⁴⁰
/// positions would not fit any memory.
#[test]
fn rotary_is_a_plain_rotation() -> Result<()> {
    let (d, t, base) = (6, 5, 100f64);
    let rotary = Rotary::new(d, 1 << 40, base, &DEVICE)?;
    for (dtype, start) in
        [(DType::F32, 3), (DType::F64, 3), (DType::F32, 32_763), (DType::F32, 32_766), (DType::F32, 1_000_000)]
    {
        let tolerance = 1e-6;
        let x = random(4, &[2, 3, t, d])?.to_dtype(dtype)?;
        let mut expected = values(&x)?;
        for (row, x) in expected.chunks_mut(d).enumerate() {
            for i in 0..d / 2 {
                let angle = (start + row % t) as f64 / base.powf(2.0 * i as f64 / d as f64);
                let (re, im) = (x[i], x[i + d / 2]);
                (x[i], x[i + d / 2]) = (re * angle.cos() - im * angle.sin(), re * angle.sin() + im * angle.cos());
            }
        }
        let turned = rotary.apply(&x, start)?;
        assert_eq!(turned.dtype(), dtype);
        assert_tensor_close(&format!("{dtype:?} from {start}"), &turned, &expected, tolerance);
    }
    Ok(())
}

/// `q_s · k_t` depends on `s − t` alone, and lengths do not change.
#[test]
fn rotary_products_are_relative() -> Result<()> {
    let rotary = Rotary::new(HEAD_DIM, 64, 1e4, &DEVICE)?;
    let (q, k) = (random(5, &[1, 1, 1, HEAD_DIM])?, random(6, &[1, 1, 1, HEAD_DIM])?);
    let product = |s, t| (rotary.apply(&q, s)? * rotary.apply(&k, t)?)?.sum_all()?.to_scalar::<f32>();
    for (s, t) in [(0, 0), (5, 2), (2, 5), (40, 0)] {
        let here = product(s, t)?;
        for shift in [1, 7, 20] {
            let there = product(s + shift, t + shift)?;
            assert!((here - there).abs() < 1e-5, "({s}, {t}): {here}, shifted by {shift}: {there}");
        }
    }
    assert!((product(5, 2)? - product(2, 5)?).abs() > 1e-3);
    let norm = |x: &Tensor| x.sqr()?.sum_all()?.to_scalar::<f32>();
    assert!((norm(&rotary.apply(&q, 33)?)? - norm(&q)?).abs() < 1e-5);
    Ok(())
}

#[test]
fn decoding_is_one_pass() -> Result<()> {
    for (name, attention) in attentions()? {
        for rotary in [false, true] {
            let (layer, _) = layer(clone(&*attention, &name)?, rotary)?;
            let x = random(7, &[2, 40, HIDDEN])?;
            let whole = values(&layer.forward(&x, &Mask::causal())?)?;
            let mut state = State::new();
            let mut outputs = vec![layer.extend(&x.narrow(1, 0, 25)?, &mut state)?];
            for t in 25..40 {
                outputs.push(layer.extend(&x.narrow(1, t, 1)?, &mut state)?);
            }
            let what = format!("{name}, rotary {rotary}");
            assert_tensor_close(&what, &Tensor::cat(&outputs, 1)?, &whole, 1e-5);
        }
    }
    Ok(())
}

/// One call saves weights and buffers, and one call loads them into a layer that was made from
/// another seed.
#[test]
fn a_saved_layer_is_the_same_layer() -> Result<()> {
    let x = random(8, &[1, 20, HIDDEN])?;
    let rotary = || Rotary::new(HEAD_DIM, 64, 1e4, &DEVICE);
    for map in ALL_MAPS {
        let (original, vars) = layer(favor(map, 1)?, true)?;
        let expected = values(&original.forward(&x, &Mask::causal())?)?;
        let path = std::env::temp_dir().join(format!("performer-core-{}-{map}.safetensors", std::process::id()));
        vars.save(&path)?;
        let saved = safetensors::load(&path, &DEVICE)?;
        assert_eq!(saved.contains_key("projection"), map.is_random() && !map.has_parameters(), "{map}");
        assert_eq!(saved.contains_key("feature_map.queries"), map.has_parameters(), "{map}");
        assert_eq!(saved.contains_key("offsets"), map.has_offsets(), "{map}");

        let vb = VarBuilder::from_tensors(saved.clone(), DType::F32, &DEVICE);
        let loaded = MultiHeadAttention::new(&config(), favor(map, 2)?, Some(rotary()?), vb.clone())?;
        assert_tensor_close(&map.to_string(), &loaded.forward(&x, &Mask::causal())?, &expected, 0.0);

        // This layer does not load buffers, so it keeps the features of its own seed.
        let mut other = MultiHeadAttention::without_buffers(&config(), favor(map, 2)?, Some(rotary()?), vb)?;
        if map.is_random() {
            let fresh = values(&other.forward(&x, &Mask::causal())?)?;
            assert_ne!(fresh, expected, "{map}: another seed must draw other features");
        }
        other.load_buffers(&|name| saved.get(name).cloned())?;
        assert_tensor_close(&map.to_string(), &other.forward(&x, &Mask::causal())?, &expected, 0.0);

        // A file of the weights alone would give other outputs.
        for buffer in saved.keys().filter(|name| !is_weight(name)) {
            let mut partial = saved.clone();
            partial.remove(buffer);
            let vb = VarBuilder::from_tensors(partial, DType::F32, &DEVICE);
            let error = MultiHeadAttention::new(&config(), favor(map, 2)?, None, vb).expect_err("a missing buffer");
            assert!(error.to_string().contains(&format!("buffer {buffer}")), "{map}: {error}");
        }

        // Candle's other way: a map over which a layer was made is loaded.
        let mut vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
        let mut stale = MultiHeadAttention::new(&config(), favor(map, 3)?, Some(rotary()?), vb)?;
        vars.load(&path)?;
        if map.is_random() && !map.is_trained() {
            for result in [stale.forward(&x, &Mask::causal()), stale.extend(&x, &mut State::new())] {
                let error = result.expect_err("the projection of the seed beside the weights of the file");
                assert!(error.to_string().contains("reload_buffers"), "{map}: {error}");
            }
        }
        stale.reload_buffers()?;
        assert_tensor_close(&map.to_string(), &stale.forward(&x, &Mask::causal())?, &expected, 0.0);
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

/// Trained features are variables of the `VarMap` before and after it is loaded, or given buffers.
#[test]
fn loading_goes_on_training() -> Result<()> {
    let x = random(1, &[1, 9, HIDDEN])?;
    let own = Fitted::positive(&random(3, &[16, HEAD_DIM])?)?;
    for (name, attention) in [
        ("learned", favor(FeatureMapKind::Learned, 1)?),
        ("hedgehog", favor(FeatureMapKind::Hedgehog, 1)?),
        ("a map of one's own", Box::new(Favor::with_map(Box::new(own))?.trained()) as Box<dyn Attention>),
        ("random and learned", {
            let text: AttentionConfig = "favor:m=8|favor:m=8,map=learned".parse().map_err(Error::msg)?;
            text.build(HEAD_DIM, 1, DType::F32, &DEVICE)?
        }),
    ] {
        let (mut layer, vars) = layer(attention, false)?;
        let trained: Vec<String> = layer.attention().trained_buffers();
        assert!(!trained.is_empty(), "{name}");
        let var = |of: &str| vars.data().lock().unwrap()[of].clone();
        let are_trained = |layer: &MultiHeadAttention, when: &str| -> Result<()> {
            let gradients = layer.forward(&x, &Mask::causal())?.sqr()?.sum_all()?.backward()?;
            for of in &trained {
                let gradient =
                    gradients.get(&var(of)).unwrap_or_else(|| panic!("{name}, {when}: {of} has no gradient"));
                assert!(values(gradient)?.iter().any(|&g| g != 0.0), "{name}, {when}: the gradient of {of} is zero");
            }
            Ok(())
        };
        are_trained(&layer, "made")?;
        let before = values(&layer.forward(&x, &Mask::causal())?)?;
        let saved: HashMap<String, Tensor> = layer
            .attention()
            .buffers()
            .into_iter()
            .map(|(of, tensor)| Ok((of, tensor.copy()?)))
            .collect::<Result<_>>()?;
        for of in &trained {
            var(of).set(&(var(of).as_tensor() * 1.5)?)?;
        }
        layer.reload_buffers()?;
        are_trained(&layer, "reloaded")?;
        assert_ne!(values(&layer.forward(&x, &Mask::causal())?)?, before, "{name}");
        layer.load_buffers(&|of| saved.get(of).cloned())?;
        are_trained(&layer, "given buffers")?;
        assert_tensor_close(name, &layer.forward(&x, &Mask::causal())?, &before, 0.0);
        for of in &trained {
            assert_eq!(values(&var(of))?, values(&saved[of])?, "{name}: {of} in the VarMap");
        }
        // What cannot be taken over changes nothing.
        let narrow = |of: &str| saved.get(of).and_then(|tensor| tensor.narrow(1, 0, 1).ok());
        assert!(layer.load_buffers(&narrow).is_err(), "{name}");
        assert_tensor_close(name, &layer.forward(&x, &Mask::causal())?, &before, 0.0);
        are_trained(&layer, "refused buffers")?;
    }
    Ok(())
}

/// An attention may have buffers of any type that a VarMap holds, and NaN in them.
#[test]
fn buffers_of_other_types_belong_to_the_layer_too() -> Result<()> {
    for dtype in [DType::BF16, DType::F16, DType::F64] {
        let map = Fitted::positive(&random(1, &[16, HEAD_DIM])?)?.to(dtype, &DEVICE)?;
        let (layer, vars) = layer(Box::new(Favor::with_map(Box::new(map))?), false)?;
        let x = random(1, &[1, 5, HIDDEN])?;
        assert!(layer.forward(&x, &Mask::causal()).is_ok(), "{dtype:?}");
        let data = vars.data().lock().unwrap();
        let weights = &data["feature_map.log_weights"];
        assert_eq!(weights.dtype(), dtype);
        weights.set(&(weights.as_tensor() + 1.0)?)?;
        drop(data);
        let error = layer.forward(&x, &Mask::causal()).expect_err("other buffers in the VarMap").to_string();
        assert!(error.contains("reload_buffers"), "{dtype:?}: {error}");
    }
    Ok(())
}

/// The map of variables holds redrawn features, so it saves them.
#[test]
fn redrawn_features_reach_the_variables() -> Result<()> {
    let (mut layer, vars) = layer(favor(FeatureMapKind::Positive, 1)?, false)?;
    let stored = || values(vars.data().lock().unwrap()["projection"].as_tensor());
    let before = stored()?;
    layer.redraw(2)?;
    assert_ne!(stored()?, before);
    let buffers = layer.attention().buffers();
    assert_eq!(stored()?, values(&buffers[0].1)?);
    assert!(layer.forward(&random(1, &[1, 5, HIDDEN])?, &Mask::causal()).is_ok());
    Ok(())
}

#[test]
fn redrawing_changes_random_features_and_the_seed_restores_them() -> Result<()> {
    let x = random(9, &[1, 20, HIDDEN])?;
    for map in ALL_MAPS {
        let (mut layer, _) = layer(favor(map, 1)?, false)?;
        let first = values(&layer.forward(&x, &Mask::causal())?)?;
        layer.redraw(2)?;
        let second = values(&layer.forward(&x, &Mask::causal())?)?;
        // What was fitted or trained depends on the rows it began with.
        assert_eq!(first != second, map.is_random() && !map.has_parameters(), "{map}");
        layer.redraw(1)?;
        assert_eq!(values(&layer.forward(&x, &Mask::causal())?)?, first, "{map}");
    }
    let mut softmax = Softmax::new();
    softmax.redraw(2)?;
    assert!(softmax.buffers().is_empty());
    Ok(())
}

/// Each query sees the same context; the context's padding is hidden.
#[test]
fn cross_attention_reads_the_context() -> Result<()> {
    for (name, attention) in attentions()? {
        let (layer, _) = layer(attention, false)?;
        let (x, context) = (random(10, &[2, 7, HIDDEN])?, random(11, &[2, 12, HIDDEN])?);
        let mask: Vec<bool> = (0..24).map(|n| n % 12 < 9).collect();
        let mask = Mask::full().with_keys(&crate::common::mask_tensor(&mask, &[2, 12], &DEVICE)?)?;
        let whole = layer.cross(&x, &context, &mask)?;
        assert_eq!(whole.dims(), [2, 7, HIDDEN]);
        let short = context.narrow(1, 0, 9)?;
        for t in 0..7 {
            let alone = layer.cross(&x.narrow(1, t, 1)?, &short, &Mask::full())?;
            assert_tensor_close(&format!("{name}, query {t}"), &whole.narrow(1, t, 1)?, &values(&alone)?, 1e-5);
        }
        let other = layer.cross(&x, &(context * -1.0)?, &mask)?;
        assert_ne!(values(&other)?, values(&whole)?, "{name}");
    }
    Ok(())
}

/// Queries and the context's keys are both turned by their own positions, each from the first on.
#[test]
fn cross_attention_turns_both_sides() -> Result<()> {
    let (layer, vars) = layer(Box::new(Softmax::new()), true)?;
    let (x, context) = (random(10, &[2, 7, HIDDEN])?, random(11, &[2, 12, HIDDEN])?);
    let weights = vars.data().lock().unwrap();
    let heads = |x: &Tensor, name: &str, heads: usize| -> Result<Tensor> {
        let (b, t, _) = x.dims3()?;
        let get = |part: &str| weights[&format!("{name}.{part}")].as_tensor().clone();
        let rows = x.broadcast_matmul(&get("weight").t()?)?.broadcast_add(&get("bias"))?;
        rows.reshape((b, t, heads, HEAD_DIM))?.transpose(1, 2)?.contiguous()
    };
    let rotary = Rotary::new(HEAD_DIM, 64, 1e4, &DEVICE)?;
    let (q, k) = (rotary.apply(&heads(&x, "q_proj", 4)?, 0)?, rotary.apply(&heads(&context, "k_proj", 2)?, 0)?);
    let v = heads(&context, "v_proj", 2)?;
    let out = Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::full())?;
    let out = out.transpose(1, 2)?.contiguous()?.reshape((2, 7, HIDDEN))?;
    let (weight, bias) = (weights["o_proj.weight"].as_tensor(), weights["o_proj.bias"].as_tensor());
    let want = out.broadcast_matmul(&weight.t()?)?.broadcast_add(bias)?;
    drop(weights);
    assert_tensor_close("cross", &layer.cross(&x, &context, &Mask::full())?, &values(&want)?, 1e-5);
    Ok(())
}

#[test]
fn more_attentions_than_key_heads_are_refused() -> Result<()> {
    let attention: AttentionConfig = "favor:m=8,map=learned|favor:m=4,map=learned".parse().map_err(Error::msg)?;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
    let attention = attention.build(HEAD_DIM, 1, DType::F32, &DEVICE)?;
    let error = MultiHeadAttention::new(&config().with_kv_heads(1), attention, None, vb).expect_err("one key head");
    assert!(error.to_string().contains("1 key heads cannot be divided among more attentions"), "{error}");
    Ok(())
}

#[test]
fn empty_sequences_stay_empty() -> Result<()> {
    for (name, attention) in attentions()? {
        for rotary in [false, true] {
            let (layer, _) = layer(clone(&*attention, &name)?, rotary)?;
            let parts = LayerParts::default().with_convolution(true);
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &DEVICE);
            let convolved = config().with_parts(parts);
            let convolved = MultiHeadAttention::new(&convolved, clone(&*attention, &name)?, None, vb)?;
            for dims in [[2, 0, HIDDEN], [0, 5, HIDDEN], [0, 0, HIDDEN]] {
                let x = Tensor::zeros(&dims, DType::F32, &DEVICE)?;
                assert_eq!(convolved.extend(&x, &mut State::new())?.dims(), dims, "{name}, convolved");
            }
            for dims in [[2, 0, HIDDEN], [0, 5, HIDDEN], [0, 0, HIDDEN]] {
                let x = Tensor::zeros(&dims, DType::F32, &DEVICE)?;
                for mask in [Mask::causal(), Mask::full()] {
                    assert_eq!(layer.forward(&x, &mask)?.dims(), dims, "{name}");
                }
                assert_eq!(layer.extend(&x, &mut State::new())?.dims(), dims, "{name}");
            }
        }
    }
    Ok(())
}

/// A gated layer begins with gates of its time constants, is saved and loaded whole, decodes as one
/// pass, and gives its gates a gradient.
#[test]
fn a_layer_makes_its_own_gates() -> Result<()> {
    let config = config().with_parts(LayerParts::default().with_gate(true)).with_kv_heads(4);
    for (name, attention) in attentions()? {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
        let mut layer = MultiHeadAttention::new(&config, attention, None, vb)?;
        let x = random(4, &[2, 20, HIDDEN])?;
        layer.forward_through(&x, |inputs| {
            let gates = values(inputs.gates.expect("gates"))?;
            for (head, gates) in gates.chunks(20).enumerate() {
                let tau = [4.0f64, 16.0, 64.0, 256.0][head % 4];
                assert!(gates.iter().all(|g| (g - (1.0 - 1.0 / tau).ln()).abs() < 1e-6), "{gates:?}");
            }
            Softmax::new().forward(inputs, &Mask::causal())
        })?;
        set_weights(&vars)?;
        vars.data().lock().unwrap()["gate.weight"].set(&random(5, &[4, HIDDEN])?)?;
        let y = layer.forward(&x, &Mask::causal())?;
        let gradients = (&y * random(6, &[2, 20, HIDDEN])?)?.sum_all()?.backward()?;
        for (name, var) in vars.data().lock().unwrap().iter().filter(|(name, _)| name.starts_with("gate.")) {
            let size = gradients.get(var).expect("a gradient").abs()?.sum_all()?.to_scalar::<f32>()?;
            assert!(size > 1e-6, "{name}: {size}");
        }
        let mut state = State::new();
        let pieces = [(0, 7), (7, 1), (8, 12)].map(|(start, n)| layer.extend(&x.narrow(1, start, n)?, &mut state));
        let pieces = pieces.into_iter().collect::<Result<Vec<_>>>()?;
        assert_tensor_close(&name, &Tensor::cat(&pieces, 1)?, &values(&y)?, 1e-5);
        assert!(layer.forward(&x, &Mask::full()).is_err_and(|e| e.to_string().contains("forget gates")), "{name}");

        let saved: HashMap<String, Tensor> = vars
            .data()
            .lock()
            .unwrap()
            .iter()
            .map(|(name, var)| (name.clone(), var.as_tensor().copy().unwrap()))
            .collect();
        let other = attentions()?.into_iter().find(|(other, _)| *other == name).expect("there").1;
        let loaded =
            MultiHeadAttention::new(&config, other, None, VarBuilder::from_tensors(saved, DType::F32, &DEVICE))?;
        assert_eq!(values(&loaded.forward(&x, &Mask::causal())?)?, values(&y)?, "{name}");
        // Gates without an attention that has them are refused by name.
        layer.set_attention("none".parse::<performer_core::AttentionConfig>().expect("a name").build(
            HEAD_DIM,
            1,
            DType::F32,
            &DEVICE,
        )?);
        assert!(layer.forward(&x, &Mask::causal()).is_err_and(|e| e.to_string().contains("no forget gates")));
    }
    Ok(())
}
