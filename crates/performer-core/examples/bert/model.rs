//! This module is BERT in the form of `candle_transformers::models::bert`, with the same names and
//! the same weights. What the swap changed is marked `SWAP`; everything else is the same, except
//! that tracing and dropout, which is for training, are left out.

use std::sync::Arc;

use candle_core::{Result, Tensor};
use candle_nn::{Embedding, Linear, Module, VarBuilder, embedding, linear};
use candle_transformers::models::bert::{Config, HiddenAct};
// SWAP: these norms are from candle_nn there, where they pass no gradient back.
use performer_core::{
    Attention, Inputs, Mask,
    nn::{LayerNorm, layer_norm},
};

struct BertEmbeddings {
    word_embeddings: Embedding,
    position_embeddings: Embedding,
    token_type_embeddings: Embedding,
    layer_norm: LayerNorm,
}

impl BertEmbeddings {
    fn load(vb: VarBuilder, config: &Config) -> Result<Self> {
        let table = |rows, name| embedding(rows, config.hidden_size, vb.pp(name));
        Ok(Self {
            word_embeddings: table(config.vocab_size, "word_embeddings")?,
            position_embeddings: table(config.max_position_embeddings, "position_embeddings")?,
            token_type_embeddings: table(config.type_vocab_size, "token_type_embeddings")?,
            layer_norm: norm(vb, config)?,
        })
    }

    fn forward(&self, input_ids: &Tensor, token_type_ids: &Tensor) -> Result<Tensor> {
        let position_ids = Tensor::arange(0, input_ids.dim(1)? as u32, input_ids.device())?;
        let tokens =
            (self.word_embeddings.forward(input_ids)? + self.token_type_embeddings.forward(token_type_ids)?)?;
        self.layer_norm.forward(&tokens.broadcast_add(&self.position_embeddings.forward(&position_ids)?)?)
    }
}

struct BertSelfAttention {
    query: Linear,
    key: Linear,
    value: Linear,
    num_attention_heads: usize,
    attention_head_size: usize,
    // SWAP: this is new. An `Arc` lets a model derive `Clone` as before.
    attention: Arc<dyn Attention>,
}

impl BertSelfAttention {
    fn load(vb: VarBuilder, config: &Config, attention: Arc<dyn Attention>) -> Result<Self> {
        let attention_head_size = config.hidden_size / config.num_attention_heads;
        let all_head_size = config.num_attention_heads * attention_head_size;
        let part = |name| linear(config.hidden_size, all_head_size, vb.pp(name));
        Ok(Self {
            query: part("query")?,
            key: part("key")?,
            value: part("value")?,
            num_attention_heads: config.num_attention_heads,
            attention_head_size,
            attention,
        })
    }

    fn transpose_for_scores(&self, xs: &Tensor) -> Result<Tensor> {
        let (b, t, _) = xs.dims3()?;
        xs.reshape((b, t, self.num_attention_heads, self.attention_head_size))?.transpose(1, 2)
    }

    fn forward(&self, hidden_states: &Tensor, mask: &Mask) -> Result<Tensor> {
        let query_layer = self.transpose_for_scores(&self.query.forward(hidden_states)?)?;
        let key_layer = self.transpose_for_scores(&self.key.forward(hidden_states)?)?;
        let value_layer = self.transpose_for_scores(&self.value.forward(hidden_states)?)?;

        // SWAP: was `q·kᵀ/√D`, adding the mask, softmax and `· v`.
        let context_layer = self.attention.forward(Inputs::new(&query_layer, &key_layer, &value_layer), mask)?;

        context_layer.transpose(1, 2)?.contiguous()?.flatten_from(2)
    }
}

/// `BertOutput` computes `norm(dense(x) + residual)`, with which both halves of a layer end.
struct BertOutput {
    dense: Linear,
    layer_norm: LayerNorm,
}

impl BertOutput {
    fn load(vb: VarBuilder, size: usize, config: &Config) -> Result<Self> {
        Ok(Self { dense: linear(size, config.hidden_size, vb.pp("dense"))?, layer_norm: norm(vb, config)? })
    }

    fn forward(&self, hidden_states: &Tensor, input_tensor: &Tensor) -> Result<Tensor> {
        self.layer_norm.forward(&(self.dense.forward(hidden_states)? + input_tensor)?)
    }
}

struct BertLayer {
    self_attention: BertSelfAttention,
    self_output: BertOutput,
    intermediate: Linear,
    intermediate_act: HiddenAct,
    output: BertOutput,
}

impl BertLayer {
    fn load(vb: VarBuilder, config: &Config, attention: Arc<dyn Attention>) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            self_attention: BertSelfAttention::load(vb.pp("attention.self"), config, attention)?,
            self_output: BertOutput::load(vb.pp("attention.output"), hidden, config)?,
            intermediate: linear(hidden, inner, vb.pp("intermediate.dense"))?,
            intermediate_act: config.hidden_act,
            output: BertOutput::load(vb.pp("output"), inner, config)?,
        })
    }

    fn forward(&self, hidden_states: &Tensor, mask: &Mask) -> Result<Tensor> {
        let context = self.self_attention.forward(hidden_states, mask)?;
        let attention_output = self.self_output.forward(&context, hidden_states)?;
        let inner = self.intermediate.forward(&attention_output)?;
        let inner = match self.intermediate_act {
            HiddenAct::Gelu => inner.gelu_erf()?,
            HiddenAct::GeluApproximate => inner.gelu()?,
            HiddenAct::Relu => inner.relu()?,
        };
        self.output.forward(&inner, &attention_output)
    }
}

/// `BertModel` is the encoder.
pub(crate) struct BertModel {
    embeddings: BertEmbeddings,
    layers: Vec<BertLayer>,
}

impl BertModel {
    // SWAP: `attention` is new; it makes the attention of each layer.
    pub(crate) fn load(
        vb: VarBuilder,
        config: &Config,
        attention: &dyn Fn(usize) -> Result<Arc<dyn Attention>>,
    ) -> Result<Self> {
        let layers = (0..config.num_hidden_layers)
            .map(|i| BertLayer::load(vb.pp(format!("encoder.layer.{i}")), config, attention(i)?))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { embeddings: BertEmbeddings::load(vb.pp("embeddings"), config)?, layers })
    }

    /// Computes hidden states `(B, T, E)` of token ids `(B, T)`; `attention_mask` `(B, T)` is 0
    /// where there is padding.
    pub(crate) fn forward(
        &self,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        attention_mask: &Tensor,
    ) -> Result<Tensor> {
        self.forward_by_layer(input_ids, token_type_ids, attention_mask, &mut |_| ())
    }

    /// Computes what [`Self::forward`] does, and calls `watch` with the hidden states after each
    /// layer.
    pub(crate) fn forward_by_layer(
        &self,
        input_ids: &Tensor,
        token_type_ids: &Tensor,
        attention_mask: &Tensor,
        watch: &mut dyn FnMut(&Tensor),
    ) -> Result<Tensor> {
        // SWAP: the mask was turned into numbers to add to the scores; now it becomes a `Mask`,
        // once for all layers.
        let mask = Mask::full().with_keys(attention_mask)?;
        let mut hidden_states = self.embeddings.forward(input_ids, token_type_ids)?;
        for layer in &self.layers {
            hidden_states = layer.forward(&hidden_states, &mask)?;
            watch(&hidden_states);
        }
        Ok(hidden_states)
    }
}

fn norm(vb: VarBuilder, config: &Config) -> Result<LayerNorm> {
    layer_norm(config.hidden_size, config.layer_norm_eps, vb.pp("LayerNorm"))
}
