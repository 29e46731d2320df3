//! This module is the decoder-only language model: token embedding, blocks of attention and
//! feed-forward, and output head.
//!
//! Parameter names are those of Hugging Face's Llama family,
//! `model.layers.0.self_attn.q_proj.weight` and so on. Random projections are saved beside them as
//! buffers, `model.layers.0.self_attn.projection`, and never trained.

mod block;
pub(crate) mod fit;
mod given;
mod init;
mod losses;
pub mod pretrained;
mod state;

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Embedding, Linear, VarBuilder, VarMap, embedding, linear_no_bias};
use performer_core::{Attention, AttentionConfig, Inputs, Mask, Path, Rotary, State, ops, projection::derive_seed};

use crate::config::{ModelConfig, NormPosition, Positions};
pub use block::Dropout;
use block::{Block, Norm, Tokens, heads};
use given::{Given, Weights};
pub use state::DecoderState;

/// The least number of rotary positions: a model may generate far beyond its training context, and
/// a linear one costs nothing more there. Those beyond a table are computed where they are needed.
const ROTARY_POSITIONS: usize = 1 << 24;

/// Streams of random numbers drawn from one seed.
const INIT_STREAM: u64 = 1;
const FEATURES_STREAM: u64 = 2;

/// A `Decoder` is a decoder-only language model with its parameters.
///
/// It takes ids of tokens, u32 `(B, T)` of B sequences, and gives logits of what comes next, in
/// f32: after each token, `(B, T, V)` ([`Self::forward`]), or going on from a state and after the
/// last one, `(B, V)` ([`Self::extend`]). V is the vocabulary size of the configuration. Between
/// its layers are `(B, T, E)`, E being the hidden size.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use performer_lm::{config::Preset, model::Decoder};
///
/// let (config, _) = Preset::Seed.load()?;
/// let model = Decoder::new(&config, 1, &Device::Cpu)?;
/// let ids = Tensor::new(&[[17u32, 4, 250]], &Device::Cpu)?;
/// assert_eq!(model.forward(&ids, None)?.dims(), [1, 3, config.vocab_size]);
/// # anyhow::Ok(())
/// ```
pub struct Decoder {
    config: ModelConfig,
    parameters: VarMap,
    /// The weights that are no parameters, by name.
    constants: HashMap<String, Tensor>,
    embed_tokens: Embedding,
    embed_positions: Option<Embedding>,
    blocks: Vec<Block>,
    norm: Option<Norm>,
    head: Linear,
    device: Device,
    compute: DType,
}

impl Decoder {
    /// Makes a new f32 model. Its features depend on `seed`, and each weight on `seed` and its
    /// name, so models that differ in their attention start from the same weights. Feature maps
    /// that are to be trained are parameters, a set for each key head.
    ///
    /// # Errors
    /// If the configuration is invalid.
    pub fn new(config: &ModelConfig, seed: u64, device: &Device) -> Result<Self> {
        let parameters = VarMap::new();
        let vb = VarBuilder::from_varmap(&parameters, DType::F32, device);
        let mut model = Self::assemble(config, parameters, vb, seed, positions_of(config))?;
        init::initialise(&model.named_parameters(), config, derive_seed(seed, INIT_STREAM))?;
        model.register_maps()?;
        Ok(model)
    }

    /// Makes the model of the weights that `vb` returns and registers in `parameters`.
    fn assemble(config: &ModelConfig, parameters: VarMap, vb: VarBuilder, seed: u64, positions: usize) -> Result<Self> {
        config.validate()?;
        let device = vb.device();
        let model_vb = vb.pp("model");
        let embed_tokens = embedding(config.vocab_size, config.hidden_size, model_vb.pp("embed_tokens"))?;
        let embed_positions = match config.positions {
            Positions::Learned => Some(embedding(config.context, config.hidden_size, model_vb.pp("embed_positions"))?),
            Positions::Rotary { .. } => None,
        };
        // Layers with queries and keys of one dimension share a table.
        let mut tables: HashMap<usize, Rotary> = HashMap::new();
        let mut blocks = Vec::with_capacity(config.layers);
        for i in 0..config.layers {
            let attention = build_attention(config, i, layer_seed(seed, i, 0), device)?;
            let rotary = match (config.positions, config.key_dim(i)) {
                (Positions::Learned, _) => None,
                (Positions::Rotary { .. }, dim) if tables.contains_key(&dim) => tables.get(&dim).cloned(),
                (Positions::Rotary { base }, dim) => {
                    let table = Rotary::new(dim, positions, base, device)?;
                    tables.insert(dim, table.clone());
                    Some(table)
                }
            };
            let (parts, vb) = (config.attention_of(i).parts(), model_vb.pp(format!("layers.{i}")));
            blocks.push(Block::new(config, attention, parts, rotary, vb)?);
        }
        let norm = match config.norm_position {
            NormPosition::Pre => Some(Norm::new(config, model_vb.pp("norm"))?),
            NormPosition::Post => None,
        };
        let head = if config.tied_head {
            Linear::new(embed_tokens.embeddings().clone(), None)
        } else {
            linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?
        };
        Ok(Self {
            config: config.clone(),
            parameters,
            constants: HashMap::new(),
            embed_tokens,
            embed_positions,
            blocks,
            norm,
            head,
            device: device.clone(),
            compute: DType::F32,
        })
    }

    /// Makes a model with given weights and buffers, such as those that [`Self::tensors`] returned,
    /// to be trained further: all that [`Self::new`] makes parameters are parameters. A model that
    /// is used and not trained is faster if it is [`Self::frozen`].
    ///
    /// # Errors
    /// If a tensor is missing or has another shape; the message names the first one.
    pub fn from_tensors(config: &ModelConfig, tensors: &HashMap<String, Tensor>, device: &Device) -> Result<Self> {
        require_features_in(config, tensors)?;
        let parameters = VarMap::new();
        let given = Given { tensors, weights: Weights::Parameters(parameters.clone()) };
        let vb = VarBuilder::from_backend(Box::new(given), DType::F32, device.clone());
        let mut model = Self::assemble(config, parameters, vb, 0, positions_of(config))?.with_buffers(tensors)?;
        model.register_maps()?;
        Ok(model)
    }

    /// Makes a model of constants with given weights and buffers, such as those that
    /// [`Self::tensors`] returned: it has no parameters, nothing is kept for a backward pass, and
    /// fused kernels take its feature maps. It shares the memory of tensors that are on `device` in
    /// f32 already.
    ///
    /// # Errors
    /// As [`Self::from_tensors`].
    pub fn frozen(config: &ModelConfig, tensors: &HashMap<String, Tensor>, device: &Device) -> Result<Self> {
        let constants = tensors.iter().map(|(name, tensor)| (name.clone(), tensor.detach())).collect();
        Self::over(config, &constants, positions_of(config), device)
    }

    /// Makes a model whose weights are the given tensors themselves, so that gradients flow to
    /// whatever they were computed from. It has no parameters of its own and no more positions than
    /// the configuration's context: it is made quickly, for one pass of training.
    ///
    /// # Errors
    /// As [`Self::from_tensors`].
    pub fn over_tensors(config: &ModelConfig, tensors: &HashMap<String, Tensor>, device: &Device) -> Result<Self> {
        Self::over(config, tensors, config.context, device)
    }

    fn over(
        config: &ModelConfig,
        tensors: &HashMap<String, Tensor>,
        positions: usize,
        device: &Device,
    ) -> Result<Self> {
        require_features_in(config, tensors)?;
        let constants = Arc::new(Mutex::new(HashMap::new()));
        let given = Given { tensors, weights: Weights::Constants(Arc::clone(&constants)) };
        let vb = VarBuilder::from_backend(Box::new(given), DType::F32, device.clone());
        let mut model = Self::assemble(config, VarMap::new(), vb, 0, positions)?.with_buffers(tensors)?;
        model.constants = std::mem::take(&mut *locked(&constants));
        Ok(model)
    }

    fn with_buffers(mut self, tensors: &HashMap<String, Tensor>) -> Result<Self> {
        for (i, block) in self.blocks.iter_mut().enumerate() {
            let prefix = buffer_prefix(i);
            block
                .load_buffers(&|name| tensors.get(&format!("{prefix}{name}")).cloned())
                .with_context(|| format!("random features of layer {i}"))?;
        }
        Ok(self)
    }

    /// Makes parameters of the feature maps that are to be trained, a set for each key head: they
    /// are among [`Self::named_parameters`], get gradients and are computed by operations that have
    /// a backward pass.
    fn register_maps(&mut self) -> Result<()> {
        let mut parameters = locked(self.parameters.data());
        for (i, block) in self.blocks.iter_mut().enumerate() {
            let groups = self.config.attention_of(i).by_head();
            let is_trained = |one: &AttentionConfig| one.favor().is_some_and(|favor| favor.map.is_trained());
            if !groups.iter().any(is_trained) {
                continue;
            }
            let mut given = HashMap::new();
            for (name, tensor) in block.attention().buffers() {
                if !name.contains("feature_map.") {
                    // Random features of other heads.
                    given.insert(name, tensor);
                    continue;
                }
                let copies = vec![&tensor; self.config.kv_heads / groups.len() / tensor.dim(0)?];
                let var = Var::from_tensor(&Tensor::cat(&copies, 0)?)?;
                // A factor of all features of a query cancels, and its gradient is only noise.
                if name.ends_with("feature_map.query_metric") {
                    given.insert(name, var.as_detached_tensor());
                    continue;
                }
                given.insert(name.clone(), var.as_tensor().clone());
                parameters.insert(in_layer(i, &name), var);
            }
            block.load_buffers(&|name| given.get(name).cloned())?;
        }
        Ok(())
    }

    /// Returns the model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Returns the device of the weights.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Computes activations in `dtype` from now on; the weights stay f32, and so do losses and
    /// logits.
    pub fn compute_in(mut self, dtype: DType) -> Self {
        self.compute = dtype;
        self
    }

    /// Returns the trained parameters in the order of their names.
    pub fn named_parameters(&self) -> Vec<(String, Var)> {
        let map = locked(self.parameters.data());
        let mut named: Vec<_> = map.iter().map(|(name, var)| (name.clone(), var.clone())).collect();
        named.sort_by(|a, b| a.0.cmp(&b.0));
        named
    }

    /// Returns the number of numbers that training moves or has moved: weights, and feature maps
    /// that are trained. It is the same for a model that is frozen.
    pub fn parameter_count(&self) -> usize {
        let mut counts: HashMap<String, usize> =
            self.named_parameters().into_iter().map(|(name, var)| (name, var.elem_count())).collect();
        counts.extend(self.constants.iter().map(|(name, weight)| (name.clone(), weight.elem_count())));
        for (i, block) in self.blocks.iter().enumerate() {
            let trained = block.attention().trained_buffers();
            for (name, map) in block.attention().buffers().into_iter().filter(|(name, _)| trained.contains(name)) {
                counts.insert(in_layer(i, &name), map.elem_count());
            }
        }
        counts.values().sum()
    }

    /// Returns the attention of a layer, counted from 0.
    pub fn attention(&self, layer: usize) -> &dyn Attention {
        self.blocks[layer].attention()
    }

    /// Returns which implementation computes the attention of each layer in one pass over whole
    /// sequences, with gradients if the pass is one of training.
    ///
    /// # Errors
    /// If the attention of a layer cannot take inputs of this model's sizes.
    pub fn paths(&self, training: bool) -> Result<Vec<Path>> {
        let probe = |heads, dim| -> Result<Tensor> {
            let x = Tensor::zeros((1, heads, 2, dim), self.compute, &self.device)?;
            Ok(if training { Var::from_tensor(&x)?.into_inner() } else { x })
        };
        let (heads, kv_heads) = (self.config.heads, self.config.kv_heads);
        let v = probe(kv_heads, self.config.head_dim())?;
        let gates = Tensor::zeros((1, kv_heads, 2), DType::F32, &self.device)?;
        let path = |(layer, block): (usize, &Block)| {
            let dim = self.config.key_dim(layer);
            let (q, k) = (probe(heads, dim)?, probe(kv_heads, dim)?);
            let inputs = Inputs::new(&q, &k, &v);
            let gated = self.config.attention_of(layer).is_gated();
            Ok(block.attention().path(if gated { inputs.with_gates(&gates) } else { inputs }, &self.mask())?)
        };
        self.blocks.iter().enumerate().map(path).collect()
    }

    /// Returns the buffers of a new model of this configuration: random features, by name.
    pub(crate) fn buffers(config: &ModelConfig, seed: u64, device: &Device) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for layer in 0..config.layers {
            let attention = build_attention(config, layer, layer_seed(seed, layer, 0), device)?;
            all.extend(attention.buffers().into_iter().map(|(name, buffer)| (in_layer(layer, &name), buffer)));
        }
        Ok(all)
    }

    /// Returns the weights, by name, of the parts of layers in this configuration that change
    /// nothing while they are new; a model without these parts is given them by adding the weights.
    pub(crate) fn neutral_parts(config: &ModelConfig, device: &Device) -> Result<Vec<(String, Tensor)>> {
        let mut all = Vec::new();
        for layer in 0..config.layers {
            let weights = heads(config, config.attention_of(layer).parts()).neutral_parts(device)?;
            all.extend(weights.into_iter().map(|(name, weight)| (in_layer(layer, &name), weight)));
        }
        Ok(all)
    }

    /// Returns the weights, by name, of forget gates of a layer in this configuration that forget
    /// at a constant pace, which `time_constants` says for each key head, in tokens; nothing where
    /// the layer has no gates.
    pub(crate) fn constant_gates(
        config: &ModelConfig,
        layer: usize,
        time_constants: &[f64],
        device: &Device,
    ) -> Result<Vec<(String, Tensor)>> {
        if !config.attention_of(layer).is_gated() {
            return Ok(Vec::new());
        }
        let sizes = heads(config, config.attention_of(layer).parts());
        let weights = sizes.constant_gates(time_constants, device)?;
        Ok(weights.into_iter().map(|(name, weight)| (in_layer(layer, &name), weight)).collect())
    }

    /// Returns everything to save: parameters and buffers by name.
    pub fn tensors(&self) -> HashMap<String, Tensor> {
        let mut tensors = self.constants.clone();
        tensors.extend(self.named_parameters().into_iter().map(|(name, var)| (name, var.as_detached_tensor())));
        for (i, block) in self.blocks.iter().enumerate() {
            for (name, buffer) in block.attention().buffers() {
                tensors.insert(in_layer(i, &name), buffer);
            }
        }
        tensors
    }

    /// Refuses tensors of which this model, made of them, has not used some: without its biases,
    /// say, a model computes something else.
    ///
    /// # Errors
    /// With the first tensor that is not used, in the order of names.
    pub(crate) fn require_all_of(&self, tensors: &HashMap<String, Tensor>) -> Result<()> {
        let used = self.tensors();
        let mut left: Vec<&String> = tensors.keys().filter(|name| !used.contains_key(*name)).collect();
        left.sort();
        ensure!(
            left.is_empty(),
            "the weights hold {}, for which the model's config has no place ({} such tensors of {}): they belong to another config",
            left[0],
            left.len(),
            tensors.len()
        );
        Ok(())
    }

    /// Returns a model with the same weights and its features off, the control of linear attention
    /// ([`ModelConfig::features_off`]), or `None` if no layer has linear attention.
    ///
    /// # Errors
    /// If there is no memory for another model.
    pub fn features_off(&self) -> Result<Option<Self>> {
        self.config.features_off().map(|config| self.with_config(&config)).transpose()
    }

    /// Returns a model of this configuration with the weights of this one, which must suit it.
    pub(crate) fn with_config(&self, config: &ModelConfig) -> Result<Self> {
        Ok(Self::from_tensors(config, &self.tensors(), &self.device)?.compute_in(self.compute))
    }

    /// Measures the decoding state of one sequence of the model's context: its bytes in all layers,
    /// in f32, as the saved model keeps it. A model that leaks has none.
    ///
    /// # Errors
    /// If there is no memory for another model.
    pub fn state_bytes(&self) -> Result<usize> {
        if self.config.leak {
            return Ok(0);
        }
        let saved = Self::from_tensors(&self.config, &self.tensors(), &self.device)?;
        let mut state = saved.new_state();
        saved.extend(&Tensor::zeros((1, self.config.context), DType::U32, &self.device)?, &mut state)?;
        Ok(state.bytes())
    }

    /// Draws the random features of every layer anew: the `count`-th time in a run of this `seed`.
    ///
    /// # Errors
    /// If the features of a layer cannot be made; those of the layers before it are new then.
    pub fn redraw(&mut self, seed: u64, count: u64) -> Result<()> {
        for (i, block) in self.blocks.iter_mut().enumerate() {
            block.redraw(layer_seed(seed, i, count))?;
        }
        Ok(())
    }

    /// Computes the logits of the next token at every position: ids `(B, T)` → `(B, T, V)`.
    /// `dropout` is for training only.
    ///
    /// # Errors
    /// If `T` exceeds the positions of the model, or, on the CPU, an id lies beyond the vocabulary.
    pub fn forward(&self, ids: &Tensor, dropout: Option<&Dropout>) -> Result<Tensor> {
        self.logits(&self.hidden(ids, Tokens::Whole(&self.mask()), dropout)?)
    }

    /// Runs the forward pass without the last norm and the output head, with `attend(layer,
    /// inputs)` in place of each layer's attention, to measure the inputs of attention or to try
    /// other attentions. The inputs are those of [`MultiHeadAttention::forward_through`]: queries,
    /// keys, values, and gates where the layer has them. Returns `(B, T, E)`.
    ///
    /// # Errors
    /// As [`Self::forward`], with an error of `attend`, or if `attend` returns another shape.
    ///
    /// [`MultiHeadAttention::forward_through`]: performer_core::MultiHeadAttention::forward_through
    pub fn hidden_through(
        &self,
        ids: &Tensor,
        mut attend: impl FnMut(usize, Inputs<'_>) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = self.embed(ids, 0)?;
        for (i, block) in self.blocks.iter().enumerate() {
            x = block.forward_through(&x, |inputs| attend(i, inputs))?;
        }
        Ok(x)
    }

    /// Replaces the attention of a layer, counted from 0. Parameters of the feature map that it had
    /// are gone, and the new one's are constants until the model is made anew of [`Self::tensors`].
    pub fn set_attention(&mut self, layer: usize, attention: Box<dyn Attention>) {
        let own = buffer_prefix(layer);
        let is_of_map = |name: &str| name.starts_with(&own) && name.contains(".feature_map.");
        locked(self.parameters.data()).retain(|name, _| !is_of_map(name));
        self.blocks[layer].set_attention(attention);
    }

    /// Returns which tokens each token sees when the model is trained and evaluated.
    pub(super) fn mask(&self) -> Mask {
        if self.config.leak { Mask::full() } else { Mask::causal() }
    }

    fn hidden(&self, ids: &Tensor, tokens: Tokens<'_>, dropout: Option<&Dropout>) -> Result<Tensor> {
        let start = match tokens {
            Tokens::Whole(_) => 0,
            Tokens::Segment(segment) => segment.index() * ids.dim(1)?,
        };
        let mut x = self.embed(ids, start)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, tokens, dropout).with_context(|| format!("layer {layer}"))?;
        }
        Ok(x)
    }

    /// Returns the state before the first token.
    pub fn new_state(&self) -> DecoderState {
        DecoderState { layers: vec![State::new(); self.blocks.len()] }
    }

    /// Returns how many more tokens `state` can take, because learned positions and rotary tables
    /// are finite.
    pub fn positions_left(&self, state: &DecoderState) -> usize {
        let all = match self.config.positions {
            Positions::Learned => self.config.context,
            Positions::Rotary { .. } => positions_of(&self.config),
        };
        all.saturating_sub(state.tokens())
    }

    /// Extends the state by the next tokens, ids `(B, T)` with `T` of at least 1, and returns the
    /// logits after the last of them, `(B, V)`.
    ///
    /// # Errors
    /// If `T` is 0 or exceeds [`Self::positions_left`], the model leaks, or, on the CPU, an id lies
    /// beyond the vocabulary; the state is then what it was. After an error of the device it cannot
    /// be used further, since some layers may have gone on.
    pub fn extend(&self, ids: &Tensor, state: &mut DecoderState) -> Result<Tensor> {
        self.config.require_causal()?;
        ensure!(ids.dims2()?.1 > 0, "a state cannot be extended by no tokens: give at least one");
        let (held, own) = (state.layers.len(), self.blocks.len());
        ensure!(held == own, "the state is of a model with {held} layers, and this one has {own}");
        let mut x = self.embed(ids, state.tokens())?;
        for (block, state) in self.blocks.iter().zip(&mut state.layers) {
            x = block.extend(&x, state)?;
        }
        let last = x.narrow(1, x.dim(1)? - 1, 1)?;
        Ok(self.logits(&last)?.squeeze(1)?)
    }

    fn embed(&self, ids: &Tensor, start: usize) -> Result<Tensor> {
        let x = ops::to_dtype(&ops::embedding(self.embed_tokens.embeddings(), ids)?, self.compute)?;
        let Some(positions) = &self.embed_positions else { return Ok(x) };
        let (t, max) = (ids.dim(1)?, self.config.context);
        ensure!(
            start + t <= max,
            "positions {start}..{} lie beyond the {max} this model learned; shorten the text, or train a model with rotary \
             positions",
            start + t
        );
        let positions = ops::narrow(positions.embeddings(), 0, start, t)?;
        Ok(ops::add_to_each(&x, &ops::to_dtype(&positions, self.compute)?)?)
    }

    fn logits(&self, x: &Tensor) -> Result<Tensor> {
        Ok(ops::linear(&self.last_norm(x)?, self.head.weight(), None)?.to_dtype(DType::F32)?)
    }

    fn last_norm(&self, x: &Tensor) -> Result<Tensor> {
        match &self.norm {
            Some(norm) => Ok(norm.forward(x)?),
            None => Ok(x.clone()),
        }
    }
}

/// Locks a map even if a thread panicked while it held the lock, since an insertion leaves a map
/// whole either way.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Refuses a configuration with more random features than its tensors hold numbers, before features
/// of that size are made.
fn require_features_in(config: &ModelConfig, tensors: &HashMap<String, Tensor>) -> Result<()> {
    let held = tensors.values().map(Tensor::elem_count).fold(0usize, usize::saturating_add);
    for layer in 0..config.layers {
        let linear = config.attention_of(layer).by_head().iter().filter_map(AttentionConfig::favor);
        let drawn = linear.filter(|favor| favor.map.is_random()).map(|favor| favor.features);
        let features = drawn.fold(0, usize::saturating_add);
        ensure!(
            features.saturating_mul(config.key_dim(layer)) <= held,
            "attention {} of layer {layer}: the weights do not hold {features} features of dimension {}; they belong to another \
             config",
            config.attention_of(layer),
            config.key_dim(layer)
        );
    }
    Ok(())
}

/// Returns the positions of the rotary table of a model that may generate.
fn positions_of(config: &ModelConfig) -> usize {
    config.context.max(ROTARY_POSITIONS)
}

fn buffer_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.self_attn.")
}

/// Returns the name in the model of what its layer calls `name`.
fn in_layer(layer: usize, name: &str) -> String {
    buffer_prefix(layer) + name
}

/// Returns the seed of a layer: every layer, and every redraw of it, has features of its own.
fn layer_seed(seed: u64, layer: usize, count: u64) -> u64 {
    derive_seed(derive_seed(derive_seed(seed, FEATURES_STREAM), layer as u64), count)
}

fn build_attention(config: &ModelConfig, layer: usize, seed: u64, device: &Device) -> Result<Box<dyn Attention>> {
    // The head dimension is that of values; where queries and keys have another, `build` takes it
    // from the parts of the attention.
    Ok(config.attention_of(layer).build(config.head_dim(), seed, DType::F32, device)?)
}
