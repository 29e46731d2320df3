//! This module is a transformer block: attention and feed-forward, each with a residual connection
//! and a norm.

use std::sync::{Mutex, PoisonError};

use candle_core::{Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear_b};
use performer_core::{
    Attention, Inputs, LayerParts, Mask, MultiHeadAttention, MultiHeadConfig, Rotary, State, attention::Segment, ops,
};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use crate::config::{FeedForwardKind, ModelConfig, NormKind, NormPosition};

/// `Tokens` says what the tokens of a forward pass are.
#[derive(Clone, Copy)]
pub(super) enum Tokens<'a> {
    /// Whole sequences, of which each token sees what the mask lets it see.
    Whole(&'a Mask),
    /// A segment of sequences whose other segments are computed elsewhere.
    Segment(&'a Segment),
}

/// A `Block` is one layer of the decoder.
pub(super) struct Block {
    attention: MultiHeadAttention,
    feed_forward: FeedForward,
    attention_norm: Norm,
    feed_forward_norm: Norm,
    position: NormPosition,
}

impl Block {
    pub(super) fn new(
        config: &ModelConfig,
        attention: Box<dyn Attention>,
        parts: LayerParts,
        rotary: Option<Rotary>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let heads = heads(config, parts);
        Ok(Self {
            attention: MultiHeadAttention::without_buffers(&heads, attention, rotary, vb.pp("self_attn"))?,
            feed_forward: FeedForward::new(config, vb.pp("mlp"))?,
            attention_norm: Norm::new(config, vb.pp("input_layernorm"))?,
            feed_forward_norm: Norm::new(config, vb.pp("post_attention_layernorm"))?,
            position: config.norm_position,
        })
    }

    pub(super) fn forward(&self, x: &Tensor, tokens: Tokens<'_>, dropout: Option<&Dropout>) -> Result<Tensor> {
        self.residuals(x, dropout, |x, residual| match (tokens, residual) {
            (Tokens::Whole(mask), Some(residual)) => self.attention.forward_residual(x, mask, residual),
            (Tokens::Whole(mask), None) => self.attention.forward(x, mask),
            (Tokens::Segment(segment), residual) => self.attention.forward_segment(x, segment, residual),
        })
    }

    pub(super) fn forward_through(
        &self,
        x: &Tensor,
        attend: impl FnOnce(Inputs<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        self.residuals(x, None, |x, residual| plus(residual, self.attention.forward_through(x, attend)?))
    }

    /// Computes the forget gates of a block that is given `x` `(B, T, E)`, if it has any.
    pub(super) fn gates(&self, x: &Tensor) -> Result<Option<Tensor>> {
        match self.position {
            NormPosition::Pre => self.attention.gates(&self.attention_norm.forward(x)?),
            NormPosition::Post => self.attention.gates(x),
        }
    }

    pub(super) fn set_attention(&mut self, attention: Box<dyn Attention>) {
        self.attention.set_attention(attention);
    }

    pub(super) fn extend(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        self.residuals(x, None, |x, residual| plus(residual, self.attention.extend(x, state)?))
    }

    /// Computes the block with `attend(x, residual)`, which adds the residual, where it is given
    /// one, to what it computes.
    fn residuals(
        &self,
        x: &Tensor,
        dropout: Option<&Dropout>,
        attend: impl FnOnce(&Tensor, Option<&Tensor>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        // With dropout, entries of the branch are dropped first and the residual is added
        // afterwards; without it, the branch adds the residual itself.
        fn before<'a>(x: &'a Tensor, dropout: Option<&Dropout>) -> Option<&'a Tensor> {
            dropout.is_none().then_some(x)
        }
        let after = |x: &Tensor, y: Tensor| match dropout {
            Some(dropout) => ops::add(x, &dropout.apply(&y)?),
            None => Ok(y),
        };
        let feed_forward = |x: &Tensor, inner: &Tensor| after(x, self.feed_forward.forward(inner, before(x, dropout))?);
        match self.position {
            NormPosition::Pre => {
                let x = &after(x, attend(&self.attention_norm.forward(x)?, before(x, dropout))?)?;
                feed_forward(x, &self.feed_forward_norm.forward(x)?)
            }
            NormPosition::Post => {
                let x = &self.attention_norm.forward(&after(x, attend(x, before(x, dropout))?)?)?;
                self.feed_forward_norm.forward(&feed_forward(x, x)?)
            }
        }
    }

    pub(super) fn attention(&self) -> &dyn Attention {
        self.attention.attention()
    }

    pub(super) fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        self.attention.load_buffers(get)
    }

    pub(super) fn redraw(&mut self, seed: u64) -> Result<()> {
        self.attention.redraw(seed)
    }
}

/// Returns the sizes of the attention of a layer with these parts.
pub(super) fn heads(config: &ModelConfig, parts: LayerParts) -> MultiHeadConfig {
    MultiHeadConfig::new(config.hidden_size, config.heads)
        .with_kv_heads(config.kv_heads)
        .with_head_dim(config.head_dim())
        .with_qkv_bias(config.bias || config.qkv_bias)
        .with_output_bias(config.bias)
        .with_parts(parts)
}

/// `FeedForward` computes `W₂ gelu(W₁ x)` or `W₂ (silu(W_g x) ∘ W₁ x)`.
struct FeedForward {
    kind: FeedForwardKind,
    gate: Option<Linear>,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    fn new(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        let (outer, inner) = (config.hidden_size, config.feed_forward_size);
        let gate = match config.feed_forward {
            FeedForwardKind::Gelu | FeedForwardKind::GeluExact => None,
            FeedForwardKind::Swiglu => Some(linear_b(outer, inner, config.bias, vb.pp("gate_proj"))?),
        };
        Ok(Self {
            kind: config.feed_forward,
            gate,
            up: linear_b(outer, inner, config.bias, vb.pp("up_proj"))?,
            down: linear_b(inner, outer, config.bias, vb.pp("down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let apply = |linear: &Linear, x: &Tensor| ops::linear(x, linear.weight(), linear.bias());
        let inner = match (&self.gate, self.kind) {
            (Some(gate), _) if gate.bias().is_none() && self.up.bias().is_none() => {
                ops::swiglu_linear(x, gate.weight(), self.up.weight())?
            }
            (Some(gate), _) => ops::swiglu(&apply(gate, x)?, &apply(&self.up, x)?)?,
            (None, FeedForwardKind::GeluExact) => ops::gelu_erf(&apply(&self.up, x)?)?,
            (None, _) => ops::gelu(&apply(&self.up, x)?)?,
        };
        match residual {
            Some(residual) => ops::linear_residual(&inner, self.down.weight(), self.down.bias(), residual),
            None => apply(&self.down, &inner),
        }
    }
}

/// Adds a branch to its residual, if there is one.
fn plus(residual: Option<&Tensor>, branch: Tensor) -> Result<Tensor> {
    match residual {
        Some(residual) => ops::add(residual, &branch),
        None => Ok(branch),
    }
}

/// `Norm` is LayerNorm or RMSNorm with gradients: Candle's fused ones pass none, and report no
/// error.
pub(super) struct Norm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl Norm {
    pub(super) fn new(config: &ModelConfig, vb: VarBuilder) -> Result<Self> {
        let e = config.hidden_size;
        let bias = match config.norm {
            NormKind::LayerNorm => Some(vb.get_with_hints(e, "bias", candle_nn::Init::Const(0.0))?),
            NormKind::RmsNorm => None,
        };
        Ok(Self { weight: vb.get_with_hints(e, "weight", candle_nn::Init::Const(1.0))?, bias, eps: config.norm_eps })
    }

    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match &self.bias {
            None => ops::rms_norm(x, &self.weight, self.eps),
            Some(bias) => ops::layer_norm(x, &self.weight, bias, self.eps),
        }
    }
}

/// `Dropout` drops by a seeded generator, so that a resumed run drops what the unbroken run would
/// have dropped.
pub struct Dropout {
    probability: f32,
    rng: Mutex<ChaCha8Rng>,
}

impl Dropout {
    /// Makes a dropout for one forward pass; `seed` must differ from pass to pass.
    pub fn new(probability: f32, seed: u64) -> Self {
        Self { probability, rng: Mutex::new(ChaCha8Rng::seed_from_u64(seed)) }
    }

    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let keep = 1.0 - self.probability;
        let threshold = (f64::from(keep) * 2f64.powi(32)) as u64;
        let mut rng = self.rng.lock().unwrap_or_else(PoisonError::into_inner);
        let mask: Vec<f32> = (0..x.elem_count())
            .map(|_| if u64::from(rng.next_u32()) < threshold { keep.recip() } else { 0.0 })
            .collect();
        ops::mul(x, &Tensor::from_vec(mask, x.shape(), x.device())?.to_dtype(x.dtype())?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    /// Of many numbers as many are dropped as asked for, and the others are scaled so that the mean
    /// stays.
    #[test]
    fn dropout_drops_its_share_and_scales_the_rest() -> Result<()> {
        let ones = Tensor::ones((100, 100), DType::F32, &Device::Cpu)?;
        let kept = Dropout::new(0.3, 1).apply(&ones)?.flatten_all()?.to_vec1::<f32>()?;
        let scale = (1f32 - 0.3).recip();
        assert!(kept.iter().all(|&x| x == 0.0 || (x - scale).abs() < 1e-6));
        let count = kept.iter().filter(|&&x| x != 0.0).count();
        assert!((6_800..7_200).contains(&count), "{count}");
        Ok(())
    }
}
