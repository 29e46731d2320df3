//! This module gives a student the forget gates that its teacher does not have.
//!
//! New gates forget at a constant pace, which does not depend on the text. At first it is so slow
//! that hardly anything is forgotten within the context ([`lasting`]). Calibration then makes the
//! pace of each key head such that its attention looks as far back, on average, as the teacher's
//! does ([`paced`]): features estimate weights badly, and what they scatter over the whole text is
//! brought back to the distances at which the teacher looks. Later stages train the gates.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor};
use performer_core::{Attention, Inputs, Mask, Softmax};

use super::{calibrate::ROWS, plan::has_paced_gates};
use crate::{
    config::ModelConfig,
    data::{Batches, Prepared},
    model::Decoder,
};

/// The time constant of gates that forget hardly anything, in contexts. Gates that forget less get
/// gradients that are smaller by as much.
const LASTING: f64 = 16.0;

/// The shortest time constant that calibration chooses, in tokens.
const SHORTEST: f64 = 2.0;

/// How often the range of time constants is halved, on a logarithmic scale: 2 to 8,192 tokens are
/// 12 doublings, so the last range is less than a thousandth wide.
const HALVINGS: usize = 14;

/// Returns the weights, by name, of forget gates in all layers of a configuration that have them.
/// They forget hardly anything within its context.
pub(super) fn lasting(config: &ModelConfig, device: &Device) -> Result<Vec<(String, Tensor)>> {
    let time_constants = vec![longest(config); config.kv_heads];
    let layers = (0..config.layers).map(|layer| Decoder::constant_gates(config, layer, &time_constants, device));
    Ok(layers.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
}

fn longest(config: &ModelConfig) -> f64 {
    LASTING * config.context as f64
}

/// Returns the weights, by name, of forget gates with which each key head of a student looks as far
/// back on average as its teacher's, at the teacher's own queries and keys of training text.
pub(super) fn paced(teacher: &Decoder, student: &Decoder, data: &Prepared, seed: u64) -> Result<Vec<(String, Tensor)>> {
    let config = student.config();
    let batch = Batches::new(data.train.clone(), config.context, ROWS, seed)?.batch(0, 0)?;
    let ids = batch.ids(teacher.device())?;
    let mut weights = Vec::new();
    let mut error = None;
    teacher.hidden_through(&ids, |layer, inputs| {
        let [q, k, v] = [inputs.q, inputs.k, inputs.v].map(Tensor::detach);
        if has_paced_gates(config.attention_of(layer)) {
            let paced = time_constants(student.attention(layer), &q, &k, longest(config))
                .and_then(|constants| Decoder::constant_gates(config, layer, &constants, student.device()))
                .with_context(|| format!("layer {layer}: no pace can be found for its forget gates"));
            match paced {
                Ok(paced) => weights.extend(paced),
                Err(e) => error = error.take().or(Some(e)),
            }
        }
        Softmax::new().forward(Inputs::new(&q, &k, &v), &Mask::causal())
    })?;
    error.map_or(Ok(weights), Err)
}

/// Returns, for each key head, the time constant with which `attention` looks as far back on
/// average as softmax does, for queries `(B, H, T, D)` and keys `(B, Hkv, T, D)`. It is at most
/// `longest`, where softmax looks further back than that.
fn time_constants(attention: &dyn Attention, q: &Tensor, k: &Tensor, longest: f64) -> Result<Vec<f64>> {
    let (b, heads, t, _) = k.dims4()?;
    let wanted = mean_distances(&Softmax::new(), q, k, None)?;
    // The ends of the range in which each head's logarithm of a time constant lies.
    let mut ranges = vec![(SHORTEST.ln(), longest.ln()); heads];
    for _ in 0..HALVINGS {
        let middles: Vec<f64> = ranges.iter().map(|(low, high)| 0.5 * (low + high)).collect();
        let gates: Vec<f32> = middles.iter().map(|log| (-(-log).exp()).ln_1p() as f32).collect();
        let gates = Tensor::from_vec(gates, (1, heads, 1), k.device())?.broadcast_as((b, heads, t))?.contiguous()?;
        let found = mean_distances(attention, q, k, Some(&gates))?;
        for (head, range) in ranges.iter_mut().enumerate() {
            let end = if found[head] > wanted[head] { &mut range.1 } else { &mut range.0 };
            *end = middles[head];
        }
    }
    // Where softmax looks further back than every time constant that was tried, only the low ends
    // moved, and the high end is still `longest`.
    Ok(ranges.into_iter().map(|(_, high)| high.exp()).collect())
}

/// Returns for each key head how many tokens back its queries look on average, in the weights of a
/// causal attention. Values that are their own positions make outputs that are the mean positions
/// looked at.
fn mean_distances(attention: &dyn Attention, q: &Tensor, k: &Tensor, gates: Option<&Tensor>) -> Result<Vec<f64>> {
    let (b, heads, t, d) = k.dims4()?;
    let group = q.dim(1)? / heads;
    let positions = Tensor::arange(0.0, t as f32, k.device())?.to_dtype(k.dtype())?;
    let values = positions.reshape((1, 1, t, 1))?.broadcast_as((b, heads, t, d))?.contiguous()?;
    let mut inputs = Inputs::new(q, k, &values);
    inputs.gates = gates;
    let means = attention.forward(inputs, &Mask::causal())?.narrow(3, 0, 1)?.squeeze(3)?.to_dtype(DType::F32)?;
    let distances = positions.to_dtype(DType::F32)?.broadcast_sub(&means)?;
    // On the CPU, since Metal has no f64.
    let mean = distances.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.reshape((b, heads, group * t))?.mean((0, 2))?;
    Ok(mean.to_vec1()?)
}

#[cfg(test)]
mod tests {
    use performer_core::AttentionConfig;

    use super::*;

    fn decayed_means(d: usize) -> Result<Box<dyn Attention>> {
        let config = AttentionConfig::Uniform;
        Ok(config.build(d, 1, DType::F32, &Device::Cpu)?)
    }

    /// Equal weights, that is uniform attention, look back by half of the positions before a query;
    /// gates of a constant pace by as much as the weights `γ^d` say.
    #[test]
    fn distances_are_those_of_the_weights() -> Result<()> {
        let (t, gamma) = (9, 0.75f64);
        let q = Tensor::randn(0f32, 1.0, (2, 2, t, 4), &Device::Cpu)?;
        let k = Tensor::randn(0f32, 1.0, (2, 1, t, 4), &Device::Cpu)?;
        let uniform = decayed_means(4)?;
        let gates = Tensor::full(gamma.ln() as f32, (2, 1, t), &Device::Cpu)?;
        let mean = |weight: &dyn Fn(usize) -> f64| {
            let of_query = |i: usize| {
                let sum: f64 = (0..=i).map(weight).sum();
                (0..=i).map(|d| weight(d) * d as f64).sum::<f64>() / sum
            };
            (0..t).map(of_query).sum::<f64>() / t as f64
        };
        let near = |found: Vec<f64>, expected: f64| {
            assert!(found.len() == 1 && (found[0] - expected).abs() < 1e-5, "{found:?} and {expected}");
        };
        near(mean_distances(&*uniform, &q, &k, None)?, mean(&|_| 1.0));
        near(mean_distances(&*uniform, &q, &k, Some(&gates))?, mean(&|d| gamma.powi(d as i32)));
        Ok(())
    }

    /// Decayed means are given the pace with which they look as far back as softmax, head by head;
    /// where softmax looks at everything alike, hardly anything is forgotten.
    #[test]
    fn the_pace_makes_distances_those_of_softmax() -> Result<()> {
        let (t, longest) = (64, 1024.0);
        // The first head looks at all keys alike; the second at the neighbours of a query, since
        // its queries and keys turn with their positions.
        let turn = |scale: f64| -> Result<Tensor> {
            let angles = (Tensor::arange(0.0, t as f32, &Device::Cpu)? * 0.04)?;
            Ok((Tensor::stack(&[angles.cos()?, angles.sin()?], 1)? * scale)?)
        };
        let x = Tensor::stack(&[turn(0.0)?, turn(9.0)?], 0)?.unsqueeze(0)?;
        let uniform = decayed_means(2)?;
        let found = time_constants(&*uniform, &x, &x, longest)?;
        assert!((found[0] / longest - 1.0).abs() < 1e-9, "{found:?}");
        assert!((2.5..32.0).contains(&found[1]), "{found:?}");
        let gates: Vec<f32> = found.iter().map(|tau| (1.0 - 1.0 / tau).ln() as f32).collect();
        let gates = Tensor::from_vec(gates, (1, 2, 1), &Device::Cpu)?.broadcast_as((1, 2, t))?.contiguous()?;
        let (paced, wanted) =
            (mean_distances(&*uniform, &x, &x, Some(&gates))?, mean_distances(&Softmax::new(), &x, &x, None)?);
        assert!((paced[1] / wanted[1] - 1.0).abs() < 0.01, "{paced:?} and {wanted:?}");
        Ok(())
    }
}
