//! The sizes of a layer, and which parts it has.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{
    convolutions::{CONVOLUTIONS, identity},
    gates::biases_of,
};
use crate::attention::LayerParts;

/// The sizes of a [`MultiHeadAttention`](super::MultiHeadAttention).
///
/// # Example
/// ```
/// use performer_core::MultiHeadConfig;
///
/// // Eight query heads over two key heads, with biases as in Qwen2.
/// let config = MultiHeadConfig::new(512, 8).with_kv_heads(2).with_qkv_bias(true);
/// assert_eq!(config.head_dim, 64);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct MultiHeadConfig {
    /// Model dimension `E`.
    pub hidden: usize,
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads `Hkv`, a divisor of `heads`.
    pub kv_heads: usize,
    /// Head dimension `D`; usually `E/H`. Queries and keys may have
    /// [another](LayerParts::key_dim).
    pub head_dim: usize,
    /// Whether q, k and v projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has one.
    pub output_bias: bool,
    /// What the layer has beside its projections.
    pub parts: LayerParts,
}

impl MultiHeadConfig {
    /// `heads` equal heads of dimension `hidden / heads`, no biases, no further parts.
    ///
    /// Where `hidden` is no multiple of `heads`, `head_dim` is 0, for
    /// [`Self::with_head_dim`] to set: a layer refuses it.
    pub fn new(hidden: usize, heads: usize) -> Self {
        Self {
            hidden,
            heads,
            kv_heads: heads,
            head_dim: if hidden.is_multiple_of(heads) { hidden / heads.max(1) } else { 0 },
            qkv_bias: false,
            output_bias: false,
            parts: LayerParts::default(),
        }
    }

    /// Sets the key and value heads `Hkv`, a divisor of the query heads.
    #[must_use]
    pub fn with_kv_heads(mut self, kv_heads: usize) -> Self {
        self.kv_heads = kv_heads;
        self
    }

    /// Sets the head dimension `D`.
    #[must_use]
    pub fn with_head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = head_dim;
        self
    }

    /// The dimension `Dk` of the queries and keys of a head: `D`, unless the parts say otherwise.
    pub fn key_dim(&self) -> usize {
        self.parts.key_dim.unwrap_or(self.head_dim)
    }

    /// Sets whether the projections of queries, keys and values have a bias.
    #[must_use]
    pub fn with_qkv_bias(mut self, qkv_bias: bool) -> Self {
        self.qkv_bias = qkv_bias;
        self
    }

    /// Sets whether the output projection has a bias.
    #[must_use]
    pub fn with_output_bias(mut self, output_bias: bool) -> Self {
        self.output_bias = output_bias;
        self
    }

    /// Sets the parts of the layer beside its linear maps and its attention.
    #[must_use]
    pub fn with_parts(mut self, parts: LayerParts) -> Self {
        self.parts = parts;
        self
    }

    /// The weights of new convolutions and output gates, if the layer is to have them, by the names
    /// that [`MultiHeadAttention`](super::MultiHeadAttention) reads: they change nothing, so a
    /// trained layer is given these parts by putting them beside its weights. Forget gates
    /// ([`Self::constant_gates`]), norms and another scale of logits would change it, and are left
    /// out.
    ///
    /// # Errors
    /// If memory runs out.
    pub fn neutral_parts(&self, device: &Device) -> Result<Vec<(String, Tensor)>> {
        let channels = [self.heads * self.key_dim(), self.kv_heads * self.key_dim(), self.kv_heads * self.head_dim];
        let mut weights = Vec::new();
        if self.parts.convolution {
            for (name, channels) in CONVOLUTIONS.into_iter().zip(channels) {
                weights.push((format!("{name}.weight"), identity(channels, DType::F32, device)?));
            }
        }
        if self.parts.output_gate {
            let shape = (self.heads * self.head_dim, self.hidden);
            weights.push(("output_gate.weight".into(), Tensor::zeros(shape, DType::F32, device)?));
        }
        Ok(weights)
    }

    /// The weights of forget gates that forget at a constant pace, by the names that
    /// [`MultiHeadAttention`](super::MultiHeadAttention) reads: a token's factor is `1 − 1/τ`, for
    /// the time constant τ, in tokens, of each key head. The larger τ, the less a trained layer is
    /// changed by being given such gates.
    ///
    /// # Errors
    /// If there is not one time constant for each key head, or one is not finite and above 1.
    pub fn constant_gates(&self, time_constants: &[f64], device: &Device) -> Result<[(String, Tensor); 2]> {
        if time_constants.len() != self.kv_heads {
            bail!("{} time constants for {} key heads; give one for each", time_constants.len(), self.kv_heads);
        }
        if let Some(tau) = time_constants.iter().find(|tau| !(tau.is_finite() && **tau > 1.0)) {
            bail!("time constant {tau}: it is a number of tokens above 1");
        }
        let weight = Tensor::zeros((self.kv_heads, self.hidden), DType::F32, device)?;
        let bias = biases_of(time_constants, DType::F32)?.to_device(device)?;
        Ok([("gate.weight".into(), weight), ("gate.bias".into(), bias)])
    }
}
