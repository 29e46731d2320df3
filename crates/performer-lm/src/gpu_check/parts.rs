//! This module checks the operations of a transformer around its attention, on the device, against
//! the same operations in f64 on the CPU.

use std::collections::HashMap;

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var, backprop::GradStore};
use candle_nn::{LayerNormConfig, Module, VarBuilder};
use performer_core::{
    Attention, Favor, FavorConfig, FeatureMapKind, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig,
    Rotary, Softmax, Tape, nn, ops,
};

use super::{Check, Item, Random, numbers, relative_error, tolerance};
use crate::{
    config::{ModelConfig, Preset},
    model::Decoder,
    train::{AdamW, AdamWConfig, Gradients},
};

/// An operation and the shapes of its inputs.
type Operation = (&'static str, &'static [&'static [usize]], fn(&[Tensor]) -> candle_core::Result<Tensor>);

const OPERATIONS: &[Operation] = &[
    ("layer norm", &[&[3, 37, 72], &[72], &[72]], |t| ops::layer_norm(&t[0], &t[1], &t[2], 1e-5)),
    ("layer norm without a bias", &[&[3, 37, 72], &[72]], |t| {
        nn::LayerNorm::new_no_bias(t[1].clone(), 1e-5).forward(&t[0])
    }),
    ("rms norm", &[&[1100, 288], &[288]], |t| ops::rms_norm(&t[0], &t[1], 1e-5)),
    // Rows that are no multiple of 16 bytes, and rows that are too long for registers.
    ("layer norm of narrow rows", &[&[3, 37, 70], &[70], &[70]], |t| ops::layer_norm(&t[0], &t[1], &t[2], 1e-5)),
    ("layer norm of long rows", &[&[11, 1040], &[1040], &[1040]], |t| ops::layer_norm(&t[0], &t[1], &t[2], 1e-5)),
    // Thread blocks take several rows in turn.
    ("rms norm of many rows", &[&[20_000, 16], &[16]], |t| ops::rms_norm(&t[0], &t[1], 1e-5)),
    ("rms norm with a bias", &[&[3, 37, 72], &[72], &[72]], |t| {
        let of_norm = HashMap::from([("weight".to_string(), t[1].clone()), ("bias".to_string(), t[2].clone())]);
        let config = LayerNormConfig { eps: 1e-5, remove_mean: false, affine: true };
        let vb = VarBuilder::from_tensors(of_norm, t[1].dtype(), t[1].device());
        nn::layer_norm(72, config, vb)?.forward(&t[0])
    }),
    ("linear with bias", &[&[5, 9, 24], &[40, 24], &[40]], |t| ops::linear(&t[0], &t[1], Some(&t[2]))),
    ("linear with residual", &[&[5, 9, 24], &[40, 24], &[5, 9, 40]], |t| {
        ops::linear_residual(&t[0], &t[1], None, &t[2])
    }),
    ("gated maps", &[&[5, 9, 24], &[40, 24], &[40, 24]], |t| {
        ops::swiglu_linear(&t[0], &(&t[1] * 0.2)?, &(&t[2] * 0.2)?)
    }),
    ("gelu", &[&[7, 333]], |t| ops::gelu(&t[0])),
    ("swiglu", &[&[7, 333], &[7, 333]], |t| ops::swiglu(&t[0], &t[1])),
    ("sum", &[&[7, 333], &[7, 333]], |t| ops::add(&t[0], &t[1])),
    ("sum, 16 bytes at a time", &[&[8, 333], &[8, 333]], |t| ops::add(&t[0], &t[1])),
    // One begins within 16 bytes, the other has strides.
    ("sum of parts", &[&[9, 333], &[333, 8]], |t| ops::add(&t[0].narrow(0, 1, 8)?, &t[1].t()?)),
    ("gelu, 16 bytes at a time", &[&[8, 333]], |t| ops::gelu(&t[0])),
    ("swiglu, 16 bytes at a time", &[&[8, 333], &[8, 333]], |t| ops::swiglu(&t[0], &t[1])),
    ("short convolution", &[&[3, 37, 24], &[24, 4]], |t| ops::short_convolution(&t[0], &(&t[1] * 0.5)?)),
    // Rows are no multiple of 16 bytes.
    ("short convolution of narrow rows", &[&[2, 70, 21], &[21, 4]], |t| ops::short_convolution(&t[0], &(&t[1] * 0.5)?)),
    ("embedding", &[&[50, 24]], |t| {
        let ids: Vec<u32> = (0..700).map(|i| i * 31 % 47).collect();
        ops::embedding(&t[0], &Tensor::from_vec(ids, (7, 100), t[0].device())?)
    }),
    ("rotary", &[&[2, 50, 3, 16]], |t| Rotary::new(16, 80, 1e4, t[0].device())?.apply(&t[0].transpose(1, 2)?, 7)),
    ("linear to heads and back", &[&[2, 33, 40], &[64, 40], &[64, 40], &[64, 40], &[40, 64]], |t| {
        let rotary = Rotary::new(16, 40, 1e4, t[0].device())?;
        projected(t, MultiHeadConfig::new(40, 4).with_head_dim(16), rotary)
    }),
    (
        "linear to convolved heads and back",
        &[&[2, 33, 40], &[64, 40], &[64, 40], &[64, 40], &[40, 64], &[64, 4], &[64, 4], &[64, 4]],
        |t| {
            let config = MultiHeadConfig::new(40, 4).with_head_dim(16);
            let config = config.with_parts(LayerParts::default().with_convolution(true));
            projected(t, config, Rotary::new(16, 40, 1e4, t[0].device())?)
        },
    ),
    // There are more heads, rows and numbers of a row than a warp has at a time, and no multiples
    // of these.
    ("forget gates", &[&[2, 33, 40], &[9, 40], &[9]], forget_gates),
    ("forget gates of long rows", &[&[1, 130, 700], &[2, 700], &[2]], forget_gates),
    ("output gates", &[&[2, 7, 40], &[40, 40], &[40, 40], &[40, 40], &[40, 40], &[40, 40]], |t| output_gates(t, 4)),
    // Their numbers are no multiple of 16 bytes.
    ("output gates of narrow heads", &[&[1, 7, 30], &[30, 30], &[30, 30], &[30, 30], &[30, 30], &[30, 30]], |t| {
        output_gates(t, 3)
    }),
    ("attention by taylor2", &[&[1, 4, 70, 16], &[1, 2, 70, 16], &[1, 2, 70, 24]], |t| {
        polynomial(FeatureMapKind::Taylor2, t, &Mask::causal())
    }),
    // Values are several slices.
    ("attention by taylor2 in both directions", &[&[2, 4, 33, 12], &[2, 2, 70, 12], &[2, 2, 70, 72]], |t| {
        polynomial(FeatureMapKind::Taylor2, t, &Mask::full().with_keys(&every_third_hidden(2, 70)?)?)
    }),
    ("attention by limit-2", &[&[1, 2, 33, 12], &[1, 2, 33, 12], &[1, 2, 33, 12]], |t| {
        polynomial(FeatureMapKind::Limit(2), t, &Mask::causal())
    }),
    // These are several segments.
    (
        "attention by taylor2 with forget gates",
        &[&[1, 2, 530, 16], &[1, 1, 530, 16], &[1, 1, 530, 24], &[1, 1, 530]],
        |t| polynomial(FeatureMapKind::Taylor2, t, &Mask::causal()),
    ),
    // Rows of heads are no multiple of 16 bytes.
    ("narrow heads", &[&[2, 9, 20], &[30, 20], &[30, 20], &[30, 20], &[20, 30]], |t| {
        let rotary = Rotary::new(10, 9, 1e4, t[0].device())?.interleaved();
        projected(t, MultiHeadConfig::new(20, 3).with_head_dim(10), rotary)
    }),
    ("cross-entropy, 16 bytes at a time", &[&[65, 20], &[2104, 20]], |t| {
        let targets: Vec<u32> = (0..65).map(|i| i * 31 % 2104).collect();
        ops::linear_cross_entropy(&t[0], &(&t[1] * 0.2)?, &targets[..].into())
    }),
    ("cross-entropy", &[&[65, 20], &[2100, 20]], |t| {
        let targets: Vec<u32> = (0..65).map(|i| i * 31 % 2100).collect();
        // The logits are of order one, as language models have them: in bf16 their error is 1/256
        // of their size.
        ops::linear_cross_entropy(&t[0], &(&t[1] * 0.2)?, &targets[..].into())
    }),
];

/// Computes a layer with the sum of queries, keys and values in place of its attention, from its
/// input and four weights, and filters of convolutions or a weight of output gates if it has some.
fn projected(t: &[Tensor], config: MultiHeadConfig, rotary: Rotary) -> candle_core::Result<Tensor> {
    let more = if config.parts.convolution { &["q_conv1d", "k_conv1d", "v_conv1d"][..] } else { &["output_gate"] };
    let names = ["q_proj", "k_proj", "v_proj", "o_proj"].iter().chain(more);
    let weights = names.zip(&t[1..]).map(|(name, weight)| (format!("{name}.weight"), weight.clone()));
    let vb = VarBuilder::from_tensors(weights.collect(), t[0].dtype(), t[0].device());
    MultiHeadAttention::without_buffers(&config, Box::new(Softmax::new()), Some(rotary), vb)?
        .forward_through(&t[0], |inputs| (inputs.q + inputs.k)? + inputs.v)
}

/// Computes a layer with output gates from its input, four weights and that of the gates.
fn output_gates(t: &[Tensor], heads: usize) -> candle_core::Result<Tensor> {
    let width = t[0].dim(2)?;
    let config = MultiHeadConfig::new(width, heads).with_parts(LayerParts::default().with_output_gate(true));
    // Small gates are rounded by little, as those of models are.
    let small = (&t[5] * 0.2)?;
    let t: Vec<Tensor> = t[..5].iter().cloned().chain([small]).collect();
    projected(&t, config, Rotary::new(width / heads, 40, 1e4, t[0].device())?)
}

/// Computes the forget gates of a layer from its input, a weight and a bias for each head.
fn forget_gates(t: &[Tensor]) -> candle_core::Result<Tensor> {
    let ((_, _, width), heads) = (t[0].dims3()?, t[2].elem_count());
    let parts = LayerParts::default().with_gate(true);
    let config = MultiHeadConfig::new(width, heads).with_head_dim(1).with_parts(parts);
    let zeros = |rows, columns| Tensor::zeros((rows, columns), t[0].dtype(), t[0].device());
    // Gates shall not be 0 or 1 alone, however long rows are.
    let weight = (&t[1] * (width as f64).powf(-0.5))?;
    let mut weights = HashMap::from([("gate.weight".to_string(), weight), ("gate.bias".to_string(), t[2].clone())]);
    for name in ["q_proj", "k_proj", "v_proj"] {
        weights.insert(format!("{name}.weight"), zeros(heads, width)?);
    }
    weights.insert("o_proj.weight".into(), zeros(width, heads)?);
    let vb = VarBuilder::from_tensors(weights, t[0].dtype(), t[0].device());
    let layer = MultiHeadAttention::without_buffers(&config, Box::new(Softmax::new()), None, vb)?;
    Ok(layer.gates(&t[0])?.expect("the layer has gates"))
}

/// A mask of keys that hides every third one.
fn every_third_hidden(batch: usize, keys: usize) -> candle_core::Result<Tensor> {
    let visible: Vec<u8> = (0..batch * keys).map(|i| u8::from(i % 3 > 0)).collect();
    Tensor::from_vec(visible, (batch, keys), &Device::Cpu)
}

/// Computes attention by polynomial features from queries, keys and values, and from numbers
/// of which forget gates are made, if there are some.
fn polynomial(map: FeatureMapKind, t: &[Tensor], mask: &Mask) -> candle_core::Result<Tensor> {
    let (dim, kind) = (t[0].dim(3)?, if t[0].dtype() == DType::F64 { DType::F64 } else { DType::F32 });
    let favor = Favor::new(&FavorConfig::default().with_map(map), dim, 1, kind, t[0].device())?;
    // What is forgotten at a token is at most a few per cent, so that far tokens count too.
    let gates = t.get(3).map(|x| x.to_dtype(kind)?.sqr()?.affine(-0.01, -0.001)).transpose()?;
    let inputs = Inputs::new(&t[0], &t[1], &t[2]);
    let inputs = match &gates {
        Some(gates) => inputs.with_gates(gates),
        None => inputs,
    };
    favor.forward(inputs, mask)
}

/// Attentions whose training keeps its tape. One operation that a tape does not record, wherever it
/// is, makes the whole backward pass Candle's, which adds every gradient to zeros.
const TAPED: [&str; 6] = [
    "softmax:gate,conv,output-gate,output-norm",
    "softmax:window=20,gate",
    "favor:m=16,gate,conv,output-gate,output-norm",
    "favor:m=16,map=learned,window=20,gate",
    "favor:map=taylor2,key-dim=8,gate",
    "uniform:gate",
];

/// Counts the tensors of a small model's loss that no tape records, and compares the gradients that
/// a tape computes with those of Candle's backward pass.
fn taped(attention: &str, device: &Device) -> Result<(f64, f64)> {
    let (config, _) = Preset::Seed.load()?;
    let attention = attention.parse().map_err(anyhow::Error::msg)?;
    let config = ModelConfig { attention, vocab_size: 300, layers: 1, ..config };
    let model = Decoder::new(&config, 1, device)?;
    let model = if device.is_cpu() { model } else { model.compute_in(DType::BF16) };
    let ids = Tensor::arange(0, 64u32, device)?.reshape((2, 32))?;
    let loss = || -> Result<Tensor> { Ok(ops::sum_all(&model.losses(&ids, &(1..65).collect::<Vec<u32>>(), None)?)?) };
    let want = loss()?.backward()?;
    let tape = Tape::start();
    let loss = loss()?;
    let unrecorded = tape.unrecorded(&loss) as f64;
    let got = tape.backward(&loss)?;
    let mut worst = 0f64;
    for (name, parameter) in model.named_parameters() {
        let of = |store: &GradStore| -> Result<Vec<f64>> {
            Ok(numbers(store.get(&parameter).with_context(|| format!("{name} has no gradient"))?)?)
        };
        worst = worst.max(relative_error(&of(&got)?, &of(&want)?));
    }
    Ok((unrecorded, worst))
}

/// Returns an item for each operation in each type, for the optimiser, and for the tape of each
/// attention.
pub(super) fn items() -> Vec<Item> {
    let mut items = Vec::new();
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for &(what, shapes, op) in OPERATIONS {
            let name = format!("{what} {}", dtype.as_str());
            items.push(one(name, tolerance(dtype), move |device| compare(device, dtype, shapes, &op)));
        }
    }
    items.push(one("AdamW, five steps".into(), tolerance(DType::F32), adamw));
    for attention in TAPED {
        let name = format!("operations of {attention} that no tape records");
        items.push(Item::checks(name.clone(), move |device| {
            let (unrecorded, error) = taped(attention, device)?;
            let gradients = format!("gradients of {attention} by a tape");
            let tolerance = tolerance(if device.is_cpu() { DType::F32 } else { DType::BF16 });
            let mut checks = vec![by_device(Check::of(gradients, Ok(error), tolerance), device)];
            // On Metal, attention with gradients is made of Candle's operations, which no tape
            // records.
            if !device.is_metal() {
                checks.insert(0, by_device(Check::of(name.clone(), Ok(unrecorded), 0.0), device));
            }
            Ok(checks)
        }));
    }
    items
}

/// Returns an item of one comparison, which has the item's name.
fn one(name: String, tolerance: f64, error: impl Fn(&Device) -> Result<f64> + 'static) -> Item {
    Item::checks(name.clone(), move |device| {
        Ok(vec![by_device(Check::of(name.clone(), error(device), tolerance), device)])
    })
}

/// Says of a check on Metal what computed it.
fn by_device(check: Check, device: &Device) -> Check {
    match device.is_metal() {
        true => check.by("composed operations, since Metal has a kernel for attention alone"),
        false => check,
    }
}

/// Returns the largest error of an operation's output and its gradients.
fn compare(
    device: &Device,
    dtype: DType,
    shapes: &[&[usize]],
    op: &dyn Fn(&[Tensor]) -> candle_core::Result<Tensor>,
) -> Result<f64> {
    let mut random = Random::new(7);
    let inputs: Vec<Vec<f64>> = shapes
        .iter()
        .map(|shape| random.normal(shape.iter().product(), 1.0, dtype))
        .collect::<candle_core::Result<_>>()?;
    let mut weights = None;
    let mut run = |device: &Device, dtype: DType| -> Result<Vec<Vec<f64>>> {
        let vars = inputs
            .iter()
            .zip(shapes)
            .map(|(x, &shape)| {
                Var::from_tensor(&Tensor::from_slice(x, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
            })
            .collect::<candle_core::Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let out = op(&tensors)?;
        // Every output has a weight of its own, which the type of the outputs can hold.
        let weights = match &weights {
            Some(weights) => weights,
            None => weights.insert(Random::new(8).normal(out.elem_count(), 1.0, DType::BF16)?),
        };
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let weights = Tensor::from_slice(weights, out.dims(), &Device::Cpu)?.to_dtype(wide)?.to_device(device)?;
        let gradients = (out.to_dtype(wide)? * weights)?.sum_all()?.backward()?;
        let mut all = vec![numbers(&out)?];
        for var in &vars {
            all.push(numbers(gradients.get(var).context("an input has no gradient")?)?);
        }
        Ok(all)
    };
    let (want, got) = (run(&Device::Cpu, DType::F64)?, run(device, dtype)?);
    Ok(got.iter().zip(&want).fold(0.0, |worst, (got, want)| relative_error(got, want).max(worst)))
}

/// Compares the parameters after some steps with clipping and decay, and the norms of the
/// gradients, with f64 on the CPU.
fn adamw(device: &Device) -> Result<f64> {
    let run = |device: &Device, dtype: DType| -> Result<Vec<f64>> {
        let mut random = Random::new(9);
        let mut tensor = |shape: &[usize]| -> Result<Tensor> {
            let values = random.normal(shape.iter().product(), 1.0, DType::F32)?;
            Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)?)
        };
        let shapes: [&[usize]; 3] = [&[300, 70], &[71], &[1]];
        let named = |(i, shape): (usize, &&[usize])| Ok((format!("p{i}.weight"), Var::from_tensor(&tensor(shape)?)?));
        let params = shapes.iter().enumerate().map(named).collect::<Result<Vec<_>>>()?;
        let mut optimizer = AdamW::new(params, AdamWConfig::default())?;
        let mut all = Vec::new();
        for _ in 0..5 {
            let tensors = shapes.iter().map(|shape| tensor(shape).map(Some)).collect::<Result<_>>()?;
            all.push(optimizer.step(&Gradients { tensors }, 0.01, Some(1.0))?);
        }
        for (_, var) in optimizer.parameters() {
            all.extend(numbers(var)?);
        }
        Ok(all)
    };
    Ok(relative_error(&run(device, DType::F32)?, &run(&Device::Cpu, DType::F64)?))
}
