//! Multi-head attention as a layer: projections, positions, heads, dropout, around any [`Attention`].

use candle_core::{Result, Tensor, bail};
use candle_nn::{Linear, VarBuilder, linear_b, ops::dropout};

use crate::{
    attention::{Attention, Mask, State},
    ops,
};

pub use crate::nn::Rotary;

/// Shape of a [`MultiHeadAttention`].
#[derive(Clone, Debug)]
pub struct MultiHeadConfig {
    /// Model dimension `E`.
    pub hidden: usize,
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads `Hkv`, a divisor of `heads`.
    pub kv_heads: usize,
    /// Head dimension `D`; usually `E/H`.
    pub head_dim: usize,
    /// Whether q, k and v projections have a bias.
    pub qkv_bias: bool,
    /// Whether the output projection has one.
    pub output_bias: bool,
    /// Probability of dropping an entry of the output, in training.
    pub dropout: f32,
}

impl MultiHeadConfig {
    /// `heads` equal heads of dimension `hidden / heads`, no biases, no dropout.
    ///
    /// Where `hidden` is no multiple of `heads`, `head_dim` is 0, for you to set: a layer refuses it.
    pub fn new(hidden: usize, heads: usize) -> Self {
        Self {
            hidden,
            heads,
            kv_heads: heads,
            head_dim: if hidden.is_multiple_of(heads) { hidden / heads.max(1) } else { 0 },
            qkv_bias: false,
            output_bias: false,
            dropout: 0.0,
        }
    }
}

/// `o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))` with heads, optional rotary positions, and either attention.
///
/// Weights live under `q_proj`, `k_proj`, `v_proj`, `o_proj` of the `VarBuilder`, as in Hugging Face checkpoints. Random
/// projections are buffers of the attention, not variables: see [`Attention::buffers`].
#[derive(Debug)]
pub struct MultiHeadAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    rotary: Option<Rotary>,
    attention: Box<dyn Attention>,
    config: MultiHeadConfig,
}

impl MultiHeadAttention {
    /// Makes the layer's weights, or reads them, from `vb`.
    ///
    /// # Errors
    /// If the head counts do not fit, `dropout` is no probability below 1, or `vb` lacks a weight.
    pub fn new(
        config: &MultiHeadConfig,
        attention: Box<dyn Attention>,
        rotary: Option<Rotary>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let MultiHeadConfig { hidden, heads, kv_heads, head_dim, .. } = *config;
        if hidden == 0 || head_dim == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads == 0 {
            bail!(
                "multi-head attention: hidden {hidden}, heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}; all must be \
                 at least 1, heads a multiple of kv_heads, and head_dim is set by hand where hidden is no multiple of heads"
            );
        }
        if !(0.0..1.0).contains(&config.dropout) {
            bail!("multi-head attention: dropout is {}; it must be at least 0 and below 1", config.dropout);
        }
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        Ok(Self {
            q_proj: linear_b(hidden, q, config.qkv_bias, vb.pp("q_proj"))?,
            k_proj: linear_b(hidden, kv, config.qkv_bias, vb.pp("k_proj"))?,
            v_proj: linear_b(hidden, kv, config.qkv_bias, vb.pp("v_proj"))?,
            o_proj: linear_b(q, hidden, config.output_bias, vb.pp("o_proj"))?,
            rotary,
            attention,
            config: config.clone(),
        })
    }

    /// Self-attention over `x` `(B, T, E)` → `(B, T, E)`; `train` turns dropout on.
    pub fn forward(&self, x: &Tensor, mask: &Mask, train: bool) -> Result<Tensor> {
        self.cross(x, x, mask, train)
    }

    /// Attention of `x` `(B, Tq, E)` over `context` `(B, Tk, E)` → `(B, Tq, E)`.
    pub fn cross(&self, x: &Tensor, context: &Tensor, mask: &Mask, train: bool) -> Result<Tensor> {
        let (q, k, v) = self.project(x, context, 0)?;
        let out = self.merge(&self.attention.forward(&q, &k, &v, mask)?)?;
        if train && self.config.dropout > 0.0 { dropout(&out, self.config.dropout) } else { Ok(out) }
    }

    /// Causal self-attention that goes on from `state`: `x` `(B, T, E)` holds the next `T` tokens.
    pub fn extend(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        let (q, k, v) = self.project(x, x, state.tokens())?;
        self.merge(&self.attention.extend(&q, &k, &v, state)?)
    }

    /// Self-attention with `attend(q, k, v)` in place of the attention inside: `q` is `(B, H, T, D)`, `k` and `v` `(B, Hkv, T, D)`, after
    /// rotary positions. For looking at what an attention is given, and for trying another in its place.
    pub fn forward_through(
        &self,
        x: &Tensor,
        attend: impl FnOnce(&Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let (q, k, v) = self.project(x, x, 0)?;
        self.merge(&attend(&q, &k, &v)?)
    }

    /// The attention inside, to save its buffers.
    pub fn attention(&self) -> &dyn Attention {
        &*self.attention
    }

    /// The attention inside, to redraw it or load its buffers.
    pub fn attention_mut(&mut self) -> &mut dyn Attention {
        &mut *self.attention
    }

    /// Puts another attention inside.
    pub fn set_attention(&mut self, attention: Box<dyn Attention>) {
        self.attention = attention;
    }

    fn project(&self, x: &Tensor, context: &Tensor, start: usize) -> Result<(Tensor, Tensor, Tensor)> {
        let c = &self.config;
        for (name, t) in [("x", x), ("context", context)] {
            if t.rank() != 3 || t.dims()[2] != c.hidden {
                bail!("{name} has shape {:?}; it must be (batch, tokens, {})", t.dims(), c.hidden);
            }
        }
        let split = |linear: &Linear, x: &Tensor, heads: usize| -> Result<Tensor> {
            ops::linear_to_heads(x, linear.weight(), linear.bias(), heads)
        };
        let q = split(&self.q_proj, x, c.heads)?;
        let k = split(&self.k_proj, context, c.kv_heads)?;
        let v = split(&self.v_proj, context, c.kv_heads)?;
        match &self.rotary {
            None => Ok((q, k, v)),
            Some(rotary) => Ok((rotary.apply(&q, start)?, rotary.apply(&k, start)?, v)),
        }
    }

    fn merge(&self, heads: &Tensor) -> Result<Tensor> {
        ops::linear_of_heads(heads, self.o_proj.weight(), self.o_proj.bias())
    }
}
