//! These tests hold short convolutions to their reference, alone and inside a layer with all its
//! parts: gradients, types, layouts, causality, padding, and decoding from a state.

use crate::common::{Random, assert_tensor_close, mask_tensor, tensor, values};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use performer_core::{
    Attention, AttentionConfig, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig, Rotary, State, Tape,
    ops,
    reference::{short_convolution, short_convolution_backward},
};

const DEVICE: Device = Device::Cpu;
const HIDDEN: usize = 24;
const HEAD_DIM: usize = 6;
/// Attentions of every kind that a layer has parts around.
const ATTENTIONS: [&str; 8] = [
    "softmax",
    "softmax:window=9",
    "favor:m=16",
    "favor:m=16,map=relu",
    "favor:m=16,window=7",
    "uniform",
    "favor:m=16,map=learned,window=4",
    "favor:map=taylor2",
];

/// The dimension of queries and keys: that of values, and smaller.
const KEY_DIMS: [Option<usize>; 2] = [None, Some(4)];

/// Every attention with every dimension of queries and keys.
fn attentions_and_key_dims() -> impl Iterator<Item = (&'static str, Option<usize>)> {
    ATTENTIONS.into_iter().flat_map(|attention| KEY_DIMS.map(|key_dim| (attention, key_dim)))
}

fn all_parts() -> LayerParts {
    convolution().with_gate(true).with_output_gate(true).with_output_norm(true).with_mup_scale(true)
}

fn convolution() -> LayerParts {
    LayerParts::default().with_convolution(true)
}

/// How rows `(B, T, C)` lie in memory.
#[derive(Clone, Copy, Debug)]
enum Layout {
    Contiguous,
    /// `(B, C, T)` seen through a transposition.
    Transposed,
    /// The middle of a larger tensor.
    Sliced,
}

impl Layout {
    fn place(self, x: &[f64], [b, t, c]: [usize; 3], dtype: DType) -> Result<(Var, Tensor)> {
        let plain = tensor(x, &[b, t, c], dtype, &DEVICE)?;
        let var = Var::from_tensor(&match self {
            Layout::Contiguous => plain,
            Layout::Transposed => plain.transpose(1, 2)?.contiguous()?,
            Layout::Sliced => plain.pad_with_zeros(1, 2, 1)?.pad_with_zeros(2, 1, 3)?,
        })?;
        let view = self.view(&var, [b, t, c])?;
        Ok((var, view))
    }

    fn view(self, x: &Tensor, [_, t, c]: [usize; 3]) -> Result<Tensor> {
        match self {
            Layout::Contiguous => Ok(x.clone()),
            Layout::Transposed => x.transpose(1, 2),
            Layout::Sliced => x.narrow(1, 2, t)?.narrow(2, 1, c),
        }
    }
}

/// The reference itself is held to finite differences: the convolution is linear in each argument,
/// so they have no error but rounding.
#[test]
fn the_reference_has_the_gradients_of_its_sum() {
    let (shape, mut random) = ([2, 5, 3], Random::new(1));
    let (x, w, g) = (random.normal(30, 1.0), random.normal(12, 1.0), random.normal(30, 1.0));
    let loss =
        |x: &[f64], w: &[f64]| -> f64 { short_convolution(x, w, shape).iter().zip(&g).map(|(y, g)| y * g).sum() };
    let [of_x, of_w] = short_convolution_backward(&x, &w, shape, &g);
    let moved = |values: &[f64], i: usize| -> Vec<f64> {
        values.iter().enumerate().map(|(n, v)| v + if n == i { 1.0 } else { 0.0 }).collect()
    };
    for (i, gradient) in of_x.iter().enumerate() {
        assert!((loss(&moved(&x, i), &w) - loss(&x, &w) - gradient).abs() < 1e-12, "x {i}");
    }
    for (i, gradient) in of_w.iter().enumerate() {
        assert!((loss(&x, &moved(&w, i)) - loss(&x, &w) - gradient).abs() < 1e-12, "weight {i}");
    }
    // The sum itself, at one place.
    let y = short_convolution(&x, &w, shape);
    let (t, c) = (3, 2);
    let want: f64 = (0..4).map(|j| w[4 * c + j] * x[(5 + t + j - 3) * 3 + c]).sum();
    assert!((y[(5 + t) * 3 + c] - want).abs() < 1e-15);
    assert!((y[c] - w[4 * c + 3] * x[c]).abs() < 1e-15, "rows before the first are zeros");
}

#[test]
fn agrees_with_the_reference() -> Result<()> {
    for shape in [[1, 1, 1], [2, 1, 5], [1, 3, 16], [2, 63, 24], [1, 128, 16], [3, 130, 7], [1, 500, 64], [1, 1000, 40]]
    {
        let [b, t, c] = shape;
        let mut random = Random::new((1000 * t + c) as u64);
        let (x, w, g) = (random.normal(b * t * c, 1.0), random.normal(4 * c, 0.5), random.normal(b * t * c, 1.0));
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5), (DType::F16, 2e-3), (DType::BF16, 1e-2)] {
            let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let rounded = |v: &[f64], dtype| values(&tensor(v, &[v.len()], dtype, &DEVICE)?);
            let (x, w) = (rounded(&x, dtype)?, rounded(&w, wide)?);
            let want = short_convolution(&x, &w, shape);
            let [want_x, want_w] = short_convolution_backward(&x, &w, shape, &g);
            let grad = tensor(&g, &shape, wide, &DEVICE)?;
            for layout in [Layout::Contiguous, Layout::Transposed, Layout::Sliced] {
                let what = format!("{shape:?} {dtype:?} {layout:?}");
                let (var, view) = layout.place(&x, shape, dtype)?;
                let weight = Var::from_tensor(&tensor(&w, &[c, 4], wide, &DEVICE)?)?;
                let out = ops::short_convolution(&view, &weight)?;
                assert_eq!((out.dims(), out.dtype()), (&shape[..], dtype), "{what}");
                assert_tensor_close(&what, &out, &want, tolerance);
                let gradients = (out.to_dtype(wide)? * &grad)?.sum_all()?.backward()?;
                let of_x = layout.view(gradients.get(&var).expect("a gradient of x"), shape)?;
                assert_tensor_close(&format!("{what}: gradient of x"), &of_x, &want_x, tolerance);
                let of_w = gradients.get(&weight).expect("a gradient of the weight");
                assert_tensor_close(&format!("{what}: gradient of the weight"), of_w, &want_w, tolerance);
            }
        }
    }
    Ok(())
}

/// The tape's backward pass is Candle's, to the bit where one kernel computes both, and knows every
/// operation in every type.
#[test]
fn a_tape_knows_convolutions() -> Result<()> {
    let shape = [2, 140, 12];
    let mut random = Random::new(5);
    let (x, w) = (random.normal(2 * 140 * 12, 1.0), random.normal(48, 1.0));
    for (dtype, tolerance) in [(DType::F32, 0.0), (DType::F64, 1e-14), (DType::BF16, 1e-6)] {
        let (x, w) = (
            Var::from_tensor(&tensor(&x, &shape, dtype, &DEVICE)?)?,
            Var::from_tensor(&tensor(&w, &[12, 4], DType::F64, &DEVICE)?.to_dtype(DType::F32)?)?,
        );
        let loss = || ops::sum_all(&ops::to_dtype(&ops::short_convolution(&ops::scale(&x, 0.5)?, &w)?, DType::F64)?);
        let want = loss()?.backward()?;
        let tape = Tape::start();
        let loss = loss()?;
        assert_eq!(tape.unrecorded(&loss), 0, "{dtype:?}");
        let got = tape.backward(&loss)?;
        for var in [&x, &w] {
            let want = values(want.get(var).expect("a gradient"))?;
            assert_tensor_close(&format!("{dtype:?}"), got.get(var).expect("a gradient"), &want, tolerance);
        }
    }
    Ok(())
}

#[test]
fn outputs_do_not_depend_on_what_comes_later() -> Result<()> {
    let mut random = Random::new(6);
    for dtype in [DType::F32, DType::BF16, DType::F64] {
        let x = tensor(&random.normal(300 * 8, 1.0), &[1, 300, 8], dtype, &DEVICE)?;
        let other = tensor(&random.normal(300 * 8, 1.0), &[1, 300, 8], dtype, &DEVICE)?;
        let weight = tensor(&random.normal(32, 1.0), &[8, 4], DType::F32, &DEVICE)?;
        let whole = ops::short_convolution(&x, &weight)?;
        for t in [1, 2, 3, 4, 127, 128, 129, 255, 299] {
            let mixed = Tensor::cat(&[&x.narrow(1, 0, t)?, &other.narrow(1, 0, 300 - t)?], 1)?;
            let want = values(&whole.narrow(1, 0, t)?)?;
            for changed in
                [ops::short_convolution(&mixed, &weight)?, ops::short_convolution(&x.narrow(1, 0, t)?, &weight)?]
            {
                assert_eq!(values(&changed.narrow(1, 0, t)?)?, want, "{dtype:?}, {t} tokens");
            }
        }
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &DEVICE);
    for (x, weight) in
        [(&[2, 3, 4][..], &[4, 3][..]), (&[2, 3, 4], &[3, 4]), (&[3, 4], &[4, 4]), (&[2, 3, 4], &[4, 1, 4])]
    {
        let error =
            ops::short_convolution(&zeros(x)?, &zeros(weight)?).expect_err("shapes that do not fit").to_string();
        assert!(error.contains(&format!("{x:?}")) && error.contains("(channels, 4)"), "{error}");
    }
    for dims in [[0, 5, 4], [2, 0, 4]] {
        assert_eq!(ops::short_convolution(&zeros(&dims)?, &zeros(&[4, 4])?)?.dims(), dims);
    }
    Ok(())
}

fn random(seed: u64, dims: &[usize]) -> Result<Tensor> {
    tensor(&Random::new(seed).normal(dims.iter().product(), 1.0), dims, DType::F32, &DEVICE)
}

/// A layer with these parts, whose variables are not the ones it begins with.
fn layer(attention: &str, parts: LayerParts, rotary: bool) -> Result<(MultiHeadAttention, VarMap)> {
    let config = MultiHeadConfig::new(HIDDEN, 4).with_kv_heads(2).with_qkv_bias(true).with_parts(parts);
    assert_eq!(config.head_dim, HEAD_DIM);
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
    let rotary = if rotary { Some(Rotary::new(config.key_dim(), 64, 1e4, &DEVICE)?) } else { None };
    let layer = MultiHeadAttention::new(&config, build(attention, parts)?, rotary, vb)?;
    {
        let data = vars.data().lock().unwrap();
        let is_drawn = |name: &&String| name.ends_with(".weight") || name.ends_with("_proj.bias");
        let mut names: Vec<&String> = data.keys().filter(is_drawn).collect();
        names.sort();
        for (seed, name) in names.into_iter().enumerate() {
            let scale = if name.contains("conv1d") { 0.5 } else { 0.1 };
            let drawn = (random(100 + seed as u64, data[name].dims())? * scale)?;
            let drawn = if name.starts_with("output_norm") { (drawn + 1.0)? } else { drawn };
            data[name].set(&drawn)?;
        }
    }
    Ok((layer, vars))
}

fn build(attention: &str, parts: LayerParts) -> Result<Box<dyn Attention>> {
    build_in(attention, parts, DType::F32)
}

fn build_in(attention: &str, parts: LayerParts, dtype: DType) -> Result<Box<dyn Attention>> {
    let of: AttentionConfig = attention.parse().map_err(candle_core::Error::msg)?;
    let config = AttentionConfig::Equipped { parts, of: Box::new(of) };
    config.build(HEAD_DIM, 3, dtype, &DEVICE)
}

/// A layer is its formula in f64, operation by operation, with the same gradients: convolutions
/// before heads and rotary positions, norms before gates.
#[test]
fn parts_stand_where_the_formula_has_them() -> Result<()> {
    // Windows of four tokens hide most of the nine.
    for of in ["favor:m=16", "softmax", "softmax:window=4", "favor:m=16,window=4"] {
        KEY_DIMS.into_iter().try_for_each(|key_dim| is_formula(of, all_parts().with_key_dim(key_dim)))?;
    }
    Ok(())
}

fn is_formula(of: &str, parts: LayerParts) -> Result<()> {
    let (layer, vars) = layer(of, parts, true)?;
    let attention = build_in(of, parts, DType::F64)?;
    let key_dim = parts.key_dim.unwrap_or(HEAD_DIM);
    // The features that the layer has.
    let rotary = Rotary::new(key_dim, 64, 1e4, &DEVICE)?;
    let x = Var::from_tensor(&random(3, &[2, 9, HIDDEN])?)?;
    let data = vars.data().lock().unwrap();
    let wide = |name: String| data[&name].as_tensor().to_dtype(DType::F64).expect("f32 widens to f64");
    let weight = |name: &str| wide(format!("{name}.weight"));
    let bias = |name: &str| wide(format!("{name}.bias"));
    let rows = |name: &str| x.to_dtype(DType::F64)?.broadcast_matmul(&weight(name).t()?);
    let convolved = |name: &str, heads: usize, dim: usize| -> Result<Tensor> {
        let rows = rows(&format!("{name}_proj"))?.broadcast_add(&bias(&format!("{name}_proj")))?;
        let filters = weight(&format!("{name}_conv1d"));
        let padded = rows.pad_with_zeros(1, 3, 0)?;
        let mut sum = rows.zeros_like()?;
        for j in 0..4 {
            sum = (sum + padded.narrow(1, j, 9)?.broadcast_mul(&filters.narrow(1, j, 1)?.squeeze(1)?)?)?;
        }
        sum.reshape((2, 9, heads, dim))?.transpose(1, 2)
    };
    let gates = rows("gate")?.broadcast_add(&bias("gate"))?;
    let gates = ((gates.neg()?.exp()? + 1.0)?.log()? * -1.0)?.transpose(1, 2)?.contiguous()?;
    let q = rotary.apply(&convolved("q", 4, key_dim)?, 0)?;
    let k = rotary.apply(&convolved("k", 2, key_dim)?, 0)?;
    let q = (q / (key_dim as f64).sqrt())?;
    let v = convolved("v", 2, HEAD_DIM)?;
    let out = attention.forward(Inputs::new(&q, &k, &v).with_gates(&gates), &Mask::causal())?;
    let size = (out.sqr()?.mean_keepdim(3)? + 1e-5)?.sqrt()?;
    let normed = out.broadcast_div(&size)?.broadcast_mul(&weight("output_norm"))?;
    let open = (candle_nn::ops::sigmoid(&rows("output_gate")?)? * 2.0)?;
    let gated = (normed.transpose(1, 2)?.contiguous()?.reshape((2, 9, HIDDEN))? * open)?;
    let want = gated.broadcast_matmul(&weight("o_proj").t()?)?;
    let got = layer.forward(&x, &Mask::causal())?;
    assert_tensor_close(&format!("output of {of}"), &got, &values(&want)?, 1e-5);
    let grad = random(4, &[2, 9, HIDDEN])?;
    let [got, want] = [got, want].map(|out| (&out * grad.to_dtype(out.dtype())?)?.sum_all()?.backward());
    let (got, want) = (got?, want?);
    let names = data.iter().filter(|(name, _)| *name != "projection").map(|(name, var)| (name.as_str(), var));
    for (name, var) in names.chain([("x", &x)]) {
        let what = format!("{of}, gradient of {name}");
        assert_tensor_close(&what, got.get(var).expect(name), &values(want.get(var).expect(name))?, 2e-5);
    }
    Ok(())
}

/// New convolutions and output gates change nothing, so a trained layer may be given them.
#[test]
fn new_parts_change_nothing() -> Result<()> {
    for (attention, key_dim) in attentions_and_key_dims() {
        let bare = LayerParts::default().with_key_dim(key_dim);
        let plain = MultiHeadConfig::new(HIDDEN, 4).with_kv_heads(2).with_parts(bare);
        let parts = bare.with_convolution(true).with_output_gate(true);
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &DEVICE);
        let with =
            MultiHeadAttention::new(&plain.clone().with_parts(parts), build(attention, bare)?, None, vb.clone())?;
        let without = MultiHeadAttention::new(&plain, build(attention, bare)?, None, vb)?;
        let x = random(1, &[2, 20, HIDDEN])?;
        let [with, without] = [with, without].map(|layer| values(&layer.forward(&x, &Mask::causal())?));
        assert_eq!(with?, without?, "{attention}");
        let names: Vec<String> =
            vars.data().lock().unwrap().keys().filter(|name| name.contains("conv")).cloned().collect();
        assert_eq!(names.len(), 3, "{names:?}");
    }
    Ok(())
}

#[test]
fn every_parameter_of_every_part_has_a_gradient() -> Result<()> {
    for (attention, key_dim) in attentions_and_key_dims() {
        let (layer, vars) = layer(attention, all_parts().with_key_dim(key_dim), true)?;
        let x = random(2, &[2, 20, HIDDEN])?;
        let grad = random(3, &[2, 20, HIDDEN])?;
        let loss = || (layer.forward(&x, &Mask::causal())? * &grad)?.sum_all();
        let gradients = loss()?.backward()?;
        let data = vars.data().lock().unwrap();
        assert_eq!(data.keys().filter(|name| !is_buffer(name)).count(), 14, "{attention}: {:?}", data.keys());
        for (name, var) in data.iter().filter(|(name, _)| !is_buffer(name)) {
            let Some(gradient) = gradients.get(var) else { panic!("{attention}: {name} has no gradient") };
            let largest = values(gradient)?.into_iter().fold(0.0, |max: f64, g| max.max(g.abs()));
            // Means of values do not depend on queries and keys.
            let unseen = attention == "uniform" && (name.starts_with("q_") || name.starts_with("k_"));
            assert!(largest.is_finite() && (largest > 1e-7 || unseen), "{attention}: {name}: largest {largest}");
        }
        // A tape knows all parts: if anything is unknown to it, it is in the attention.
        let (gated, _) = self::layer(attention, LayerParts::default().with_gate(true), true)?;
        let bare = {
            let tape = Tape::start();
            tape.unrecorded(&gated.forward(&x, &Mask::causal())?)
        };
        let tape = Tape::start();
        let flat = ops::reshape(&layer.forward(&x, &Mask::causal())?, (1, 2 * 20 * HIDDEN))?;
        let loss = ops::linear(&flat, &grad.reshape((1, 2 * 20 * HIDDEN))?, None)?;
        assert_eq!(tape.unrecorded(&loss), bare, "{attention}");
        let taped = tape.backward(&loss)?;
        for (name, var) in data.iter().filter(|(name, _)| !is_buffer(name)) {
            let Some(want) = gradients.get(var) else { continue };
            assert_tensor_close(&format!("{attention}: {name}"), taped.get(var).expect(name), &values(want)?, 1e-6);
        }
    }
    Ok(())
}

fn is_buffer(name: &str) -> bool {
    name == "projection" || name.starts_with("feature_map")
}

/// Outputs up to a token have the same bits whatever comes after it.
#[test]
fn a_layer_with_parts_is_causal_to_the_bit() -> Result<()> {
    for (attention, key_dim) in attentions_and_key_dims() {
        let (layer, _) = layer(attention, all_parts().with_key_dim(key_dim), true)?;
        let (x, other) = (random(7, &[2, 40, HIDDEN])?, random(8, &[2, 40, HIDDEN])?);
        let whole = layer.forward(&x, &Mask::causal())?;
        for t in [1, 2, 3, 17, 39] {
            let mixed = Tensor::cat(&[&x.narrow(1, 0, t)?, &other.narrow(1, 0, 40 - t)?], 1)?;
            let mixed = layer.forward(&mixed, &Mask::causal())?.narrow(1, 0, t)?;
            assert_eq!(values(&mixed)?, values(&whole.narrow(1, 0, t)?)?, "{attention}, {t} tokens");
        }
    }
    Ok(())
}

/// Extends `state` by tokens `start..end`.
fn extend(layer: &MultiHeadAttention, x: &Tensor, start: usize, end: usize, state: &mut State) -> Result<Tensor> {
    layer.extend(&x.narrow(1, start, end - start)?, state)
}

#[test]
fn any_split_is_one_pass() -> Result<()> {
    for (attention, key_dim) in attentions_and_key_dims() {
        for rotary in [false, true] {
            let (layer, _) = layer(attention, all_parts().with_key_dim(key_dim), rotary)?;
            let x = random(9, &[2, 30, HIDDEN])?;
            let whole = values(&layer.forward(&x, &Mask::causal())?)?;
            for cuts in [&[0, 30][..], &[0, 1, 2, 3, 4, 30], &[0, 20, 20, 21, 22, 25, 29, 30], &[0, 2, 5, 6, 30]] {
                let mut state = State::new();
                let parts = cuts.windows(2).map(|cut| extend(&layer, &x, cut[0], cut[1], &mut state));
                let parts = parts.collect::<Result<Vec<_>>>()?;
                let parts: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
                let what = format!("{attention}, {key_dim:?}, rotary {rotary}, {cuts:?}");
                assert_tensor_close(&what, &Tensor::cat(&parts, 1)?, &whole, 1e-5);
            }
        }
    }
    Ok(())
}

/// A state that was saved, cloned, or put together again from its rows goes on with the same bits.
#[test]
fn states_go_on_with_the_same_bits() -> Result<()> {
    for (i, attention) in ATTENTIONS.into_iter().enumerate() {
        let (layer, _) = layer(attention, all_parts(), true)?;
        let x = random(10, &[3, 30, HIDDEN])?;
        let prompt = |x: &Tensor| -> Result<State> {
            let mut state = State::new();
            extend(&layer, x, 0, 21, &mut state)?;
            Ok(state)
        };
        let rest = |x: &Tensor, mut state: State| -> Result<Vec<Vec<f64>>> {
            (21..30).map(|t| values(&extend(&layer, x, t, t + 1, &mut state)?)).collect()
        };
        let state = prompt(&x)?;
        let expected = rest(&x, state.clone())?;
        // The last rows of q, k and v count, and nothing else grows.
        let (mut bare, mut longer) = (State::new(), state.clone());
        layer.forward_through(&x.narrow(1, 0, 21)?, |inputs| layer.attention().extend(inputs, &mut bare))?;
        assert_eq!(state.bytes() - bare.bytes(), 3 * 3 * (HIDDEN + 2 * 2 * HEAD_DIM) * 4, "{attention}");
        if attention != "softmax" {
            extend(&layer, &x, 21, 30, &mut longer)?;
            assert_eq!(longer.bytes(), state.bytes(), "{attention}");
        }

        let path = std::env::temp_dir().join(format!("performer-convolution-{}-{i}.safetensors", std::process::id()));
        state.save(&path)?;
        let loaded = State::load(&path, &DEVICE)?;
        std::fs::remove_file(&path)?;
        assert_eq!(rest(&x, State::from_record(&loaded.record()?)?)?, expected, "{attention}, saved twice");
        assert_eq!(rest(&x, loaded)?, expected, "{attention}, saved");

        let fork = state.clone();
        let mut origin = state.clone();
        extend(&layer, &x, 2, 9, &mut origin)?;
        assert_eq!(rest(&x, fork)?, expected, "{attention}, forked");

        let rows = |order: &[u32]| x.index_select(&Tensor::from_slice(order, order.len(), &DEVICE)?, 0);
        // There and back again.
        let swapped = state.select(&[2, 0, 1])?;
        assert_eq!(rest(&x, swapped.select(&[1, 2, 0])?)?, expected, "{attention}, reordered");
        let apart: Vec<State> = (0..3).map(|row| state.select(&[row])).collect::<Result<_>>()?;
        let joined = State::join(&[&apart[0], &apart[1], &apart[2]])?;
        assert_eq!(rest(&x, joined)?, expected, "{attention}, joined");
        // Products of fewer rows may round otherwise, so other rows are compared as numbers.
        let order = [2, 0];
        let picked: Vec<usize> = order.iter().map(|&row| row as usize).collect();
        let again = State::join(&[&prompt(&rows(&order[..1])?)?, &prompt(&rows(&order[1..])?)?])?;
        for (what, state) in [("selected", state.select(&picked)?), ("joined from others", again)] {
            for (got, all) in rest(&rows(&order)?, state)?.iter().zip(&expected) {
                let want: Vec<f64> = picked.iter().flat_map(|row| all[row * HIDDEN..][..HIDDEN].to_vec()).collect();
                crate::common::assert_close(&format!("{attention}, {what}"), &[2, HIDDEN], got, &want, 1e-5);
            }
        }
    }
    Ok(())
}

#[test]
fn states_of_other_layers_are_refused() -> Result<()> {
    let refused = |result: Result<Tensor>, word: &str| {
        let error = result.expect_err(word).to_string();
        assert!(error.contains(word), "{error}");
    };
    for attention in ATTENTIONS {
        let (with, _) = layer(attention, convolution(), false)?;
        let (without, _) = layer(attention, LayerParts::default(), false)?;
        let x = random(11, &[2, 12, HIDDEN])?;
        let mut state = State::new();
        extend(&without, &x, 0, 5, &mut state)?;
        refused(extend(&with, &x, 5, 6, &mut state), "has seen 5 tokens without short convolutions");
        // The state is what it was.
        extend(&without, &x, 5, 6, &mut state)?;

        let mut state = State::new();
        extend(&with, &x, 0, 5, &mut state)?;
        refused(extend(&without, &x, 5, 6, &mut state), "made by a layer with short convolutions");
        let expected = values(&extend(&with, &x, 5, 6, &mut state.clone())?)?;
        // Another batch, and inputs that the attention refuses, leave the state as it was.
        refused(extend(&with, &x.narrow(0, 0, 1)?, 5, 6, &mut state), "one layer and one batch");
        let nan = (&x * f64::NAN)?;
        refused(extend(&with, &nan, 5, 6, &mut state), "NaN");
        assert_eq!(values(&extend(&with, &x, 5, 6, &mut state)?)?, expected, "{attention}");
        // The attention alone went on, and the convolutions do not know these tokens.
        without.forward_through(&x.narrow(1, 6, 1)?, |inputs| with.attention().extend(inputs, &mut state))?;
        refused(extend(&with, &x, 7, 8, &mut state), "extend it by the layer alone");
        // An empty beginning changes nothing.
        let mut state = State::new();
        assert_eq!(extend(&with, &x, 0, 0, &mut state)?.dims(), [2, 0, HIDDEN]);
        let first = extend(&with, &x, 0, 3, &mut state)?;
        assert_eq!(values(&first)?, values(&extend(&with, &x, 0, 3, &mut State::new())?)?, "{attention}");
    }
    Ok(())
}

/// What padding holds changes nothing, on either side. A sequence after padding begins as one
/// without.
#[test]
fn padding_does_not_reach_its_neighbours() -> Result<()> {
    let attentions = ["softmax", "favor:m=16", "favor:m=16,map=relu", "uniform"];
    for (attention, mask) in attentions.into_iter().flat_map(|a| [(a, Mask::causal()), (a, Mask::full())]) {
        let parts = all_parts().with_gate(false);
        let (layer, _) = layer(attention, parts, false)?;
        let (x, padding) = (random(12, &[1, 12, HIDDEN])?, random(13, &[1, 5, HIDDEN])?);
        let alone = values(&layer.forward(&x, &mask)?)?;
        for (left, right) in [(0, 5), (5, 0), (2, 3), (1, 1)] {
            let what = format!("{attention}, causal {}, {left} before and {right} after", mask.is_causal());
            let visible: Vec<bool> = (0..left + 12 + right).map(|t| (left..left + 12).contains(&t)).collect();
            let masked = mask.clone().with_keys(&mask_tensor(&visible, &[1, visible.len()], &DEVICE)?)?;
            let padded = |scale: f64| -> Result<Vec<f64>> {
                let padding = (&padding * scale)?;
                let all = [padding.narrow(1, 0, left)?, x.clone(), padding.narrow(1, 0, right)?];
                let all: Vec<&Tensor> = all.iter().filter(|part| part.elem_count() > 0).collect();
                values(&layer.forward(&Tensor::cat(&all, 1)?, &masked)?.narrow(1, left, 12)?)
            };
            assert_tensor_close(&what, &tensor(&padded(1.0)?, &[1, 12, HIDDEN], DType::F64, &DEVICE)?, &alone, 1e-5);
            assert_eq!(padded(1.0)?, padded(-7.0)?, "{what}");
        }
        // Keys of a context are hidden from each other as well.
        let visible: Vec<bool> = (0..17).map(|t| t >= 5).collect();
        let masked = Mask::full().with_keys(&mask_tensor(&visible, &[1, 17], &DEVICE)?)?;
        let context = Tensor::cat(&[&padding, &x], 1)?;
        let queries = random(14, &[1, 7, HIDDEN])?;
        let want = values(&layer.cross(&queries, &x, &Mask::full())?)?;
        assert_tensor_close(attention, &layer.cross(&queries, &context, &masked)?, &want, 1e-5);
        let short = Mask::full().with_keys(&mask_tensor(&visible[1..], &[1, 16], &DEVICE)?)?;
        let error = layer.forward(&context, &short).expect_err("a mask of another length").to_string();
        assert!(error.contains("key mask has shape [1, 16]"), "{error}");
    }
    // Gradients do not pass through hidden rows either.
    let (layer, _) = layer("softmax", all_parts(), true)?;
    let x = Var::from_tensor(&random(15, &[1, 10, HIDDEN])?)?;
    let visible: Vec<bool> = (0..10).map(|t| t != 4).collect();
    let mask = Mask::causal().with_keys(&mask_tensor(&visible, &[1, 10], &DEVICE)?)?;
    let tape = Tape::start();
    let out = ops::narrow(&layer.forward(&x, &mask)?, 1, 5, 5)?;
    let loss = ops::sum_all(&out)?;
    assert_eq!(tape.unrecorded(&loss), 0);
    let gradient = tape.backward(&loss)?.get(&x).expect("a gradient").narrow(1, 3, 2)?;
    let [before, hidden] = [0, 1].map(|t| gradient.narrow(1, t, 1)?.abs()?.sum_all()?.to_scalar::<f32>());
    // Forget gates of a hidden key count, and so their gradient is all there is.
    assert!(before? > 0.0);
    let gates_only = hidden?;
    let (layer, _) = self::layer("softmax", all_parts().with_gate(false), true)?;
    let out = layer.forward(&x, &mask)?.narrow(1, 5, 5)?.sum_all()?.backward()?;
    let hidden = out.get(&x).expect("a gradient").narrow(1, 4, 1)?.abs()?.sum_all()?.to_scalar::<f32>()?;
    assert!(hidden == 0.0 && gates_only > 0.0, "{hidden}, {gates_only}");
    Ok(())
}

/// Half types take the composed path around the same kernel, decoding included.
#[test]
fn layers_have_parts_in_bf16() -> Result<()> {
    let (layer, vars) = layer("favor:m=16", all_parts(), true)?;
    let x = random(16, &[2, 20, HIDDEN])?;
    let half = x.to_dtype(DType::BF16)?;
    let want = values(&layer.forward(&half.to_dtype(DType::F32)?, &Mask::causal())?)?;
    let out = layer.forward(&half, &Mask::causal())?;
    assert_eq!(out.dtype(), DType::BF16);
    assert_tensor_close("bf16", &out, &want, 1e-2);
    let gradients = out.to_dtype(DType::F32)?.sum_all()?.backward()?;
    for (name, var) in vars.data().lock().unwrap().iter().filter(|(name, _)| !is_buffer(name)) {
        assert!(gradients.get(var).is_some(), "{name} has no gradient");
    }
    let mut state = State::new();
    let pieces = [(0, 11), (11, 12), (12, 20)].map(|(start, end)| extend(&layer, &half, start, end, &mut state));
    let pieces = pieces.into_iter().collect::<Result<Vec<_>>>()?;
    assert_tensor_close("bf16, decoded", &Tensor::cat(&pieces, 1)?, &want, 1e-2);
    Ok(())
}
