//! What a head of attention looks at, as a matrix: linear attention never computes one.
//!
//! An attention's output is a mean of the values, so with unit vectors for values it is the weights
//! themselves: exactly those that the model uses, whatever its features.

use anyhow::{Context, Result};
use candle_core::{DType, Tensor};
use performer_core::{Attention, Inputs, Mask, Softmax};
use performer_lm::model::Decoder;

/// Returns the causal weights of the model's own attention, with its forget gates if it has any,
/// and those of softmax alone from the same queries and keys, `T · T` numbers each.
///
/// # Errors
/// If the model cannot compute these tokens.
pub(crate) fn of_head(model: &Decoder, ids: &[u32], layer: usize, head: usize) -> Result<[Vec<f32>; 2]> {
    let ids = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let mut found = None;
    model.hidden_through(&ids, |at, inputs| {
        let attention = model.attention(at);
        if at == layer {
            let alone = Inputs::new(inputs.q, inputs.k, inputs.v);
            found = Some([weights(attention, inputs)?, weights(&Softmax::new(), alone)?]);
        }
        attention.forward(inputs, &Mask::causal())
    })?;
    let [own, softmax] = found.context("the layer was not computed")?;
    let of_head = |all: &Tensor| all.get(0)?.get(head)?.flatten_all()?.to_vec1();
    Ok([of_head(&own)?, of_head(&softmax)?])
}

/// Returns the causal weights of an attention for the queries `(B, H, T, D)`, keys `(B, Hkv, T, D)`
/// and gates of its inputs: `(B, H, T, T)`.
fn weights(attention: &dyn Attention, inputs: Inputs<'_>) -> candle_core::Result<Tensor> {
    let (b, heads, t, _) = inputs.k.dims4()?;
    let unit = Tensor::eye(t, DType::F32, inputs.k.device())?.broadcast_as((b, heads, t, t))?.contiguous()?;
    let mut of_units = Inputs::new(inputs.q, inputs.k, &unit);
    of_units.gates = inputs.gates;
    attention.forward(of_units, &Mask::causal())
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use performer_core::{Favor, FavorConfig};

    const T: usize = 7;
    const D: usize = 8;

    /// Numbers from −1.5 to 1.5 that are the same every time.
    fn numbers(phase: f64) -> Tensor {
        let turns = Tensor::arange(0f32, (2 * T * D) as f32, &Device::Cpu).unwrap();
        let waves = turns.affine(1.7, phase).unwrap().sin().unwrap();
        waves.affine(1.5, 0.0).unwrap().reshape((1, 2, T, D)).unwrap()
    }

    /// Compares weights with a kernel matrix, row by row over its sum up to the diagonal.
    fn compare(weights: &Tensor, kernel: &Tensor) {
        for head in 0..2 {
            let (weights, kernel): (Vec<Vec<f32>>, Vec<Vec<f32>>) = (
                weights.get(0).unwrap().get(head).unwrap().to_vec2().unwrap(),
                kernel.get(0).unwrap().get(head).unwrap().to_vec2().unwrap(),
            );
            for (i, (row, kernel)) in weights.iter().zip(&kernel).enumerate() {
                let sum: f32 = kernel[..=i].iter().sum();
                for (j, weight) in row.iter().enumerate() {
                    let expected = if j <= i { kernel[j] / sum } else { 0.0 };
                    assert!((weight - expected).abs() <= 1e-5, "head {head}, {i} to {j}: {weight} {expected}");
                }
            }
        }
    }

    #[test]
    fn of_softmax() {
        let (q, k) = (numbers(0.0), numbers(0.6));
        let scores = (q.matmul(&k.t().unwrap().contiguous().unwrap()).unwrap() / (D as f64).sqrt()).unwrap();
        compare(&weights(&Softmax::new(), Inputs::new(&q, &k, &q)).unwrap(), &scores.exp().unwrap());
    }

    /// A gate of ln ½ halves the weight of all that stands before it.
    #[test]
    fn of_softmax_with_gates() {
        let (q, k) = (numbers(0.0), numbers(0.6));
        let scores = (q.matmul(&k.t().unwrap().contiguous().unwrap()).unwrap() / (D as f64).sqrt()).unwrap();
        let gates = Tensor::full(0.5f32.ln(), (1, 2, T), &Device::Cpu).unwrap();
        let distance = |n: usize| (n / T).saturating_sub(n % T) as i32;
        let decays: Vec<f32> = (0..T * T).map(|n| 0.5f32.powi(distance(n))).collect();
        let decays = Tensor::from_vec(decays, (T, T), &Device::Cpu).unwrap();
        let kernel = scores.exp().unwrap().broadcast_mul(&decays).unwrap();
        compare(&weights(&Softmax::new(), Inputs::new(&q, &k, &q).with_gates(&gates)).unwrap(), &kernel);
    }

    #[test]
    fn of_favor_are_its_features_products() {
        let (q, k) = (numbers(0.0), numbers(0.6));
        let favor = Favor::new(&FavorConfig::default().with_features(32), D, 5, DType::F32, &Device::Cpu).unwrap();
        let scale = (D as f64).powf(-0.25);
        let kernel = favor.map().kernel(&(&q * scale).unwrap(), &(&k * scale).unwrap()).unwrap();
        compare(&weights(&favor, Inputs::new(&q, &k, &q)).unwrap(), &kernel);
    }
}
