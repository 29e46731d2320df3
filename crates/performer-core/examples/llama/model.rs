//! This module is Llama in the form of `candle_transformers::models::llama`, with the same names
//! and the same weights. What the swap changed is marked `SWAP`; everything else is the same,
//! except that tracing and flash attention are left out.

use std::sync::Arc;

use candle_core::{DType, Device, IndexOp, Result, Tensor, bail};
use candle_nn::{
    Embedding, Linear, Module, RmsNorm, VarBuilder, embedding, linear_no_bias, ops::silu, rms_norm, rotary_emb::rope,
};
use candle_transformers::models::llama::Config;
use performer_core::{Attention, Inputs, Mask, State};

/// A `Cache` holds the decoding state of each layer, and the rotary tables.
pub(crate) struct Cache {
    use_kv_cache: bool,
    // SWAP: was `kvs: Vec<Option<(Tensor, Tensor)>>`, which grows with the text; causal masks were
    // cached here as well.
    pub(crate) states: Vec<State>,
    /// The rotary tables, shape `(max_position_embeddings, D/2)` each.
    cos: Tensor,
    sin: Tensor,
}

impl Cache {
    pub(crate) fn new(use_kv_cache: bool, dtype: DType, config: &Config, device: &Device) -> Result<Self> {
        if config.rope_scaling.is_some() {
            bail!("the model scales its rotary positions (rope_scaling), which this example leaves out");
        }
        let head_dim = config.hidden_size / config.num_attention_heads;
        let inv_freq: Vec<f32> =
            (0..head_dim).step_by(2).map(|i| 1.0 / config.rope_theta.powf(i as f32 / head_dim as f32)).collect();
        let inv_freq = Tensor::new(inv_freq, device)?.unsqueeze(0)?;
        let positions = Tensor::arange(0, config.max_position_embeddings as u32, device)?.to_dtype(DType::F32)?;
        let angles = positions.unsqueeze(1)?.matmul(&inv_freq)?;
        Ok(Self {
            use_kv_cache,
            states: vec![State::new(); config.num_hidden_layers],
            cos: angles.cos()?.to_dtype(dtype)?,
            sin: angles.sin()?.to_dtype(dtype)?,
        })
    }
}

struct CausalSelfAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: usize,
    // SWAP: this is new. An `Arc` lets a model derive `Clone` as before.
    attention: Arc<dyn Attention>,
}

impl CausalSelfAttention {
    fn apply_rotary_emb(&self, x: &Tensor, index_pos: usize, cache: &Cache) -> Result<Tensor> {
        let (max, seq_len) = (cache.cos.dim(0)?, x.dim(2)?);
        if index_pos + seq_len > max {
            bail!("{} tokens are more than the {max} positions that the model knows", index_pos + seq_len);
        }
        rope(x, &cache.cos.narrow(0, index_pos, seq_len)?, &cache.sin.narrow(0, index_pos, seq_len)?)
    }

    fn forward(&self, x: &Tensor, index_pos: usize, block_idx: usize, cache: &mut Cache) -> Result<Tensor> {
        let (b_sz, seq_len, _) = x.dims3()?;
        let heads = |linear: &Linear, n: usize| {
            linear.forward(x)?.reshape((b_sz, seq_len, n, self.head_dim))?.transpose(1, 2)?.contiguous()
        };
        let q = heads(&self.q_proj, self.num_attention_heads)?;
        let k = heads(&self.k_proj, self.num_key_value_heads)?;
        let v = heads(&self.v_proj, self.num_key_value_heads)?;
        let q = self.apply_rotary_emb(&q, index_pos, cache)?;
        let k = self.apply_rotary_emb(&k, index_pos, cache)?;

        // SWAP: was the cache's concatenation, `repeat_kv`, `q·kᵀ/√D`, the mask, softmax and `· v`.
        let y = if cache.use_kv_cache {
            self.attention.extend(Inputs::new(&q, &k, &v), &mut cache.states[block_idx])?
        } else {
            self.attention.forward(Inputs::new(&q, &k, &v), &Mask::causal())?
        };

        let y = y.transpose(1, 2)?.reshape((b_sz, seq_len, self.num_attention_heads * self.head_dim))?;
        self.o_proj.forward(&y)
    }

    fn load(vb: VarBuilder, cfg: &Config, attention: Arc<dyn Attention>) -> Result<Self> {
        let head_dim = cfg.hidden_size / cfg.num_attention_heads;
        let (q, kv) = (head_dim * cfg.num_attention_heads, head_dim * cfg.num_key_value_heads);
        Ok(Self {
            q_proj: linear_no_bias(cfg.hidden_size, q, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(cfg.hidden_size, kv, vb.pp("k_proj"))?,
            v_proj: linear_no_bias(cfg.hidden_size, kv, vb.pp("v_proj"))?,
            o_proj: linear_no_bias(q, cfg.hidden_size, vb.pp("o_proj"))?,
            num_attention_heads: cfg.num_attention_heads,
            num_key_value_heads: cfg.num_key_value_heads,
            head_dim,
            attention,
        })
    }
}

struct Mlp {
    c_fc1: Linear,
    c_fc2: Linear,
    c_proj: Linear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.c_proj.forward(&(silu(&self.c_fc1.forward(x)?)? * self.c_fc2.forward(x)?)?)
    }

    fn load(vb: VarBuilder, cfg: &Config) -> Result<Self> {
        let (hidden, inner) = (cfg.hidden_size, cfg.intermediate_size);
        Ok(Self {
            c_fc1: linear_no_bias(hidden, inner, vb.pp("gate_proj"))?,
            c_fc2: linear_no_bias(hidden, inner, vb.pp("up_proj"))?,
            c_proj: linear_no_bias(inner, hidden, vb.pp("down_proj"))?,
        })
    }
}

struct Block {
    rms_1: RmsNorm,
    attn: CausalSelfAttention,
    rms_2: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn forward(&self, x: &Tensor, index_pos: usize, block_idx: usize, cache: &mut Cache) -> Result<Tensor> {
        let x = (self.attn.forward(&self.rms_1.forward(x)?, index_pos, block_idx, cache)? + x)?;
        self.mlp.forward(&self.rms_2.forward(&x)?)? + x
    }

    fn load(vb: VarBuilder, cfg: &Config, attention: Arc<dyn Attention>) -> Result<Self> {
        let norm = |name| rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp(name));
        Ok(Self {
            rms_1: norm("input_layernorm")?,
            attn: CausalSelfAttention::load(vb.pp("self_attn"), cfg, attention)?,
            rms_2: norm("post_attention_layernorm")?,
            mlp: Mlp::load(vb.pp("mlp"), cfg)?,
        })
    }
}

/// `Llama` is the model.
pub(crate) struct Llama {
    wte: Embedding,
    blocks: Vec<Block>,
    ln_f: RmsNorm,
    lm_head: Linear,
}

impl Llama {
    /// Computes the logits `(B, V)` of the token after `x` `(B, T)`, whose first token has the
    /// position `index_pos`.
    pub(crate) fn forward(&self, x: &Tensor, index_pos: usize, cache: &mut Cache) -> Result<Tensor> {
        let (_, seq_len) = x.dims2()?;
        let mut x = self.wte.forward(x)?;
        for (block_idx, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, index_pos, block_idx, cache)?;
        }
        let x = self.ln_f.forward(&x)?.i((.., seq_len - 1, ..))?.contiguous()?;
        self.lm_head.forward(&x)?.to_dtype(DType::F32)
    }

    // SWAP: `attention` is new; it makes the attention of each layer.
    pub(crate) fn load(
        vb: VarBuilder,
        cfg: &Config,
        attention: &dyn Fn(usize) -> Result<Arc<dyn Attention>>,
    ) -> Result<Self> {
        let wte = embedding(cfg.vocab_size, cfg.hidden_size, vb.pp("model.embed_tokens"))?;
        let lm_head = if cfg.tie_word_embeddings {
            Linear::new(wte.embeddings().clone(), None)
        } else {
            linear_no_bias(cfg.hidden_size, cfg.vocab_size, vb.pp("lm_head"))?
        };
        let blocks = (0..cfg.num_hidden_layers)
            .map(|i| Block::load(vb.pp(format!("model.layers.{i}")), cfg, attention(i)?))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { wte, blocks, ln_f: rms_norm(cfg.hidden_size, cfg.rms_norm_eps, vb.pp("model.norm"))?, lm_head })
    }
}
