//! Multi-head attention as a layer: the projections of queries, keys, values and outputs, heads,
//! rotary positions and [`LayerParts`](crate::LayerParts), around any [`Attention`].

mod config;
mod convolutions;
mod gates;
mod registered;

use std::cell::RefCell;

use candle_core::{Result, Shape, Tensor, bail};
use candle_nn::{Init, Linear, VarBuilder, linear_b};

use crate::{
    attention::{Attention, Inputs, Mask, Segment, State, Tensors},
    ops,
};
use convolutions::{Around, CONVOLUTIONS, K, LastRows, Q, V, filters};
use gates::{forget_gate, gates};
use registered::{Registered, named, require_same_names, same_numbers, update_registered};

pub use crate::nn::Rotary;
pub use config::MultiHeadConfig;

/// `o_proj(attention(q_proj(x), k_proj(x), v_proj(x)))` with heads, optional rotary positions, and
/// any attention.
///
/// `x` is `(B, T, E)`: batch, tokens, model dimension. The layer has `H` query heads and `Hkv` key
/// heads of dimension `D` (see [`MultiHeadConfig`]).
///
/// # Weights and buffers
/// Weights live under `q_proj`, `k_proj`, `v_proj`, `o_proj` of the `VarBuilder`, as in Hugging
/// Face checkpoints. What the attention draws or fits, its [buffers](Attention::buffers), lives
/// beside them: `projection` for FAVOR+. So a `VarMap` saves a layer completely, and a `VarBuilder`
/// over the file loads it completely; a file without the buffers is refused, since other random
/// features would give other outputs without a word. An optimiser over `VarMap::all_vars` trains
/// the maps that are meant to be trained and leaves random projections alone, for they get no
/// gradient.
///
/// # Parts
/// With all [`LayerParts`](crate::LayerParts) the layer is
/// `o_proj(norm(attention(..)) ∘ 2σ(output_gate x))` of convolved projections. Each part begins,
/// over a fresh `VarMap`, with weights of its own that are not drawn:
///
/// - **Forget gates**, one number a token and key head, `g = log σ(w·x + b)`: `gate.weight`
///   `(Hkv, E)` and `gate.bias` `(Hkv)`. New gates forget at a constant pace: weights are 0, and
///   biases `ln(τ − 1)` make `e^g = 1 − 1/τ` for time constants τ of 4, 16, 64 and 256 tokens,
///   which the key heads take in turn.
/// - **Short convolutions** ([`ops::short_convolution`]) of the projected rows of q, k and v,
///   before they are divided into heads and turned by rotary positions: `q_conv1d.weight`
///   `(H·D, 4)`, `k_conv1d.weight` and `v_conv1d.weight` `(Hkv·D, 4)`. New ones change nothing. The
///   names are those of flash-linear-attention, whose tensors have one dimension more, `(C, 1, 4)`.
/// - **Queries and keys of another dimension** `Dk` than values have `q_proj.weight` `(H·Dk, E)`,
///   `k_proj.weight` `(Hkv·Dk, E)` and filters of as many rows. The attention is then made for
///   heads of `Dk`, its logits are `q·k/√Dk`, and rotary positions are those of `Dk`.
/// - **Norms of outputs**: each head's output is divided by its root mean square (ε is 1e-5), as in
///   RetNet (Sun et al. 2023, <https://arxiv.org/abs/2307.08621>), and multiplied by
///   `output_norm.weight` `(D)`, at first 1. This changes a trained layer.
/// - **Output gates** multiply the outputs of all heads by `2σ(W x)`, where `W` is
///   `output_gate.weight` `(H·D, E)` (Qiu et al. 2025, <https://arxiv.org/abs/2505.06708>, without
///   the 2). It is 0 at first, which changes nothing.
/// - **Logits over Dk**: the layer divides queries by √Dk, where Dk is the dimension of queries and
///   keys. The attention divides by √Dk as always, so logits are `q·k/Dk` as in µP (Yang et al.
///   2022, <https://arxiv.org/abs/2203.03466>). It has no weights, and changes a trained layer.
///
/// Convolutions look back whatever the mask says; in cross-attention queries are convolved along
/// `x`, keys and values along `context`. A key that the mask hides counts as zeros in the
/// convolution of its neighbours, and so does the query of its token in self-attention: what
/// padding holds changes nothing on either side of it, and a sequence after padding on its left
/// begins as one without. (Queries of cross-attention have no mask.) While decoding, the layer
/// keeps its last three projected rows of q, k and v in the [`State`].
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use performer_core::{Favor, FavorConfig, Mask, MultiHeadAttention, MultiHeadConfig};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let config = MultiHeadConfig::new(32, 2);
/// let layer = |vb, seed| {
///     let favor = Favor::new(&FavorConfig::default(), config.head_dim, seed, DType::F32, &device)?;
///     MultiHeadAttention::new(&config, Box::new(favor), None, vb)
/// };
/// let vars = VarMap::new();
/// let saved = layer(VarBuilder::from_varmap(&vars, DType::F32, &device), 1)?;
/// let path = std::env::temp_dir().join("layer.safetensors");
/// vars.save(&path)?;
///
/// let file = candle_core::safetensors::load(&path, &device)?;
/// // Another seed, but the features come from the file.
/// let loaded = layer(VarBuilder::from_tensors(file, DType::F32, &device), 2)?;
/// let x = Tensor::randn(0f32, 1.0, (1, 9, 32), &device)?;
/// let numbers = |layer: &MultiHeadAttention| {
///     layer.forward(&x, &Mask::causal())?.flatten_all()?.to_vec1::<f32>()
/// };
/// assert_eq!(numbers(&saved)?, numbers(&loaded)?);
/// # std::fs::remove_file(&path)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MultiHeadAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    gate: Option<Linear>,
    /// The filters of q, k and v.
    convolutions: Option<[Tensor; 3]>,
    output_norm: Option<Tensor>,
    output_gate: Option<Tensor>,
    rotary: Option<Rotary>,
    attention: Box<dyn Attention>,
    /// The attention's buffers that a `VarMap` holds and that are not trained.
    registered: Vec<Registered>,
    /// The attention's trained buffers by name: variables of a `VarMap`, with which it computes.
    trained: Vec<(String, Tensor)>,
    config: MultiHeadConfig,
}

impl MultiHeadAttention {
    /// Makes the layer's weights and buffers, or reads them, from `vb`.
    ///
    /// Over a fresh `VarMap` both are made: weights are drawn by Candle, buffers are those of
    /// `attention`. Where `vb` has the layer's weights already, such as a file, it must have the
    /// buffers too.
    ///
    /// # Errors
    /// If the head counts do not fit, or `vb` lacks a weight or a buffer.
    pub fn new(
        config: &MultiHeadConfig,
        attention: Box<dyn Attention>,
        rotary: Option<Rotary>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let loading = vb.contains_tensor("q_proj.weight");
        let mut layer = Self::without_buffers(config, attention, rotary, vb.clone())?;
        layer.take_buffers(&vb, loading)?;
        Ok(layer)
    }

    /// Makes or reads the layer's weights alone; the attention stays as it was made, and its
    /// buffers are neither read nor registered. For putting a fresh attention around pretrained
    /// weights, and for programs that save and load [`Attention::buffers`] by themselves.
    ///
    /// # Errors
    /// If the head counts do not fit, or `vb` lacks a weight.
    pub fn without_buffers(
        config: &MultiHeadConfig,
        attention: Box<dyn Attention>,
        rotary: Option<Rotary>,
        vb: VarBuilder,
    ) -> Result<Self> {
        let MultiHeadConfig { hidden, heads, kv_heads, head_dim, parts, .. } = *config;
        if hidden == 0 || head_dim == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) || heads == 0 {
            bail!(
                "multi-head attention: hidden {hidden}, heads {heads}, kv_heads {kv_heads}, head_dim {head_dim}; all must be \
                 at least 1, heads a multiple of kv_heads, and head_dim is set by hand where hidden is no multiple of heads"
            );
        }
        let key_dim = config.key_dim();
        if key_dim == 0 {
            bail!("multi-head attention: key_dim is 0; leave it out, or give queries and keys at least one dimension");
        }
        let (q, k, v) = (heads * key_dim, kv_heads * key_dim, kv_heads * head_dim);
        let out = heads * head_dim;
        let weight = |there: bool, name: &str, shape: Shape, initial| {
            there.then(|| vb.pp(name).get_with_hints(shape, "weight", Init::Const(initial))).transpose()
        };
        Ok(Self {
            q_proj: linear_b(hidden, q, config.qkv_bias, vb.pp("q_proj"))?,
            k_proj: linear_b(hidden, k, config.qkv_bias, vb.pp("k_proj"))?,
            v_proj: linear_b(hidden, v, config.qkv_bias, vb.pp("v_proj"))?,
            o_proj: linear_b(out, hidden, config.output_bias, vb.pp("o_proj"))?,
            gate: if parts.gate { Some(forget_gate(hidden, kv_heads, &vb.pp("gate"))?) } else { None },
            convolutions: if parts.convolution {
                let [q_name, k_name, v_name] = CONVOLUTIONS.map(|name| vb.pp(name));
                Some([filters(q, &q_name)?, filters(k, &k_name)?, filters(v, &v_name)?])
            } else {
                None
            },
            output_norm: weight(parts.output_norm, "output_norm", head_dim.into(), 1.0)?,
            output_gate: weight(parts.output_gate, "output_gate", (out, hidden).into(), 0.0)?,
            rotary,
            attention,
            registered: Vec::new(),
            trained: Vec::new(),
            config: config.clone(),
        })
    }

    /// Reads the attention's buffers from `vb`, or registers them there where they are new.
    fn take_buffers(&mut self, vb: &VarBuilder, loading: bool) -> Result<()> {
        let trained = self.attention.trained_buffers();
        let (mut given, mut stored, mut variables) = (Vec::new(), Vec::new(), Vec::new());
        for (name, buffer) in self.attention.buffers() {
            // A trained map has its own parameters for each of its key heads. Its buffers that are
            // not trained are repeated for each of them too.
            let is_trained = trained.contains(&name);
            let map = |name: &str| name.rsplit_once('.').map(|(map, _)| map.to_string());
            let is_beside = trained.iter().any(|other| map(other).is_some() && map(other) == map(&name));
            let buffer = match buffer.dims().first() {
                Some(1) if is_beside => {
                    let heads = self.attention.key_heads_of(&name, self.config.kv_heads);
                    if heads == 0 {
                        bail!(
                            "multi-head attention: {} key heads cannot be divided among more attentions than that; \
                             give each attention at least one",
                            self.config.kv_heads
                        );
                    }
                    Tensor::cat(&vec![&buffer; heads], 0)?
                }
                _ => buffer,
            };
            let known = vb.contains_tensor(&name);
            if loading && !known {
                bail!(
                    "buffer {} {:?} is missing beside the layer's weights: they were saved without the random or \
                     trained features that they belong to; to draw new ones on purpose, use \
                     MultiHeadAttention::without_buffers",
                    if vb.prefix().is_empty() { name } else { format!("{}.{name}", vb.prefix()) },
                    buffer.dims()
                );
            }
            // A file's tensor is read with the shape that it has, which the attention checks. A
            // VarMap needs to be told the shape, which is then the buffer's.
            let unchecked = if known { vb.get_unchecked_dtype(&name, buffer.dtype()).ok() } else { None };
            let tensor = match unchecked {
                Some(tensor) => tensor,
                None => vb.get_with_hints_dtype(buffer.dims(), &name, Init::Const(0.0), buffer.dtype())?,
            };
            if !known {
                tensor.slice_set(&buffer.to_device(tensor.device())?.contiguous()?.copy()?, 0, 0)?;
            }
            if is_trained && tensor.is_variable() {
                variables.push((name.clone(), tensor.clone()));
                given.push((name, tensor));
                continue;
            }
            if tensor.is_variable() {
                stored.push((name.clone(), tensor.detach()));
            }
            given.push((name, tensor.detach().copy()?));
        }
        let dtype = given.first().map(|(_, tensor)| tensor.dtype());
        let unread = RefCell::new(None);
        let get = |name: &str| {
            // Saved maps may have more than this one has before it is loaded: metrics, say.
            let saved = || {
                let dtype = dtype.filter(|_| loading && vb.contains_tensor(name))?;
                let tensor = vb.get_unchecked_dtype(name, dtype);
                tensor.map_err(|error| unread.replace(Some((name.to_string(), error)))).ok()
            };
            named(&given, name).or_else(saved)
        };
        self.attention.load_buffers(&get)?;
        if let Some((name, error)) = unread.into_inner() {
            bail!(
                "buffer {} is there beside the layer's weights, and cannot be read for an attention that was made \
                 without it, as this one was; make it with such a buffer, which a VarMap asks for, or read it from a \
                 file: {error}",
                if vb.prefix().is_empty() { name } else { format!("{}.{name}", vb.prefix()) }
            );
        }
        self.trained = variables;
        self.registered = stored
            .into_iter()
            .map(|(name, stored)| Ok(Registered { used: stored.copy()?, name, stored }))
            .collect::<Result<_>>()?;
        Ok(())
    }

    /// Self-attention over `x` `(B, T, E)` → `(B, T, E)`.
    ///
    /// # Errors
    /// If `x` has another shape, as [`Attention::forward`], or if the `VarMap` of this layer was
    /// loaded since (see [`Self::reload_buffers`]).
    pub fn forward(&self, x: &Tensor, mask: &Mask) -> Result<Tensor> {
        self.attend(x, None, mask, None)
    }

    /// Self-attention added to a residual, `residual + forward(x)`: `x` and `residual` `(B, T, E)`
    /// → `(B, T, E)`, with a gradient to each. Where the output projection has no bias, the
    /// addition is a part of it, which spares autograd the additions of gradients that it would
    /// cost.
    ///
    /// # Errors
    /// As [`Self::forward`], and if the residual has another shape or type than the output.
    pub fn forward_residual(&self, x: &Tensor, mask: &Mask, residual: &Tensor) -> Result<Tensor> {
        self.attend(x, None, mask, Some(residual))
    }

    /// Attention of `x` `(B, Tq, E)` over `context` `(B, Tk, E)` → `(B, Tq, E)`.
    ///
    /// # Errors
    /// As [`Self::forward`].
    pub fn cross(&self, x: &Tensor, context: &Tensor, mask: &Mask) -> Result<Tensor> {
        self.attend(x, Some(context), mask, None)
    }

    /// Attention of `x` over `context`, or over `x` itself if there is none.
    fn attend(&self, x: &Tensor, context: Option<&Tensor>, mask: &Mask, residual: Option<&Tensor>) -> Result<Tensor> {
        self.check_registered()?;
        let projected = self.project(x, context, 0, Around::Mask(mask))?;
        self.merge(&self.attention.forward(projected.inputs(), mask)?, x, residual)
    }

    /// Causal self-attention of a segment of a sequence whose other segments are computed
    /// elsewhere: `x` `(B, T, E)` holds its tokens, as many as in every other segment, and
    /// `residual` is added to the output if there is one. Positions, convolutions and attention go
    /// on from the segments before. Every segment must call this for the same layers in the same
    /// order, and must [close](Segment::close) its loss before the backward pass.
    ///
    /// # Errors
    /// As [`Self::forward`] and [`Attention::forward_segment`]; also if a layer with convolutions
    /// meets a segment of fewer than 3 tokens.
    pub fn forward_segment(&self, x: &Tensor, segment: &Segment, residual: Option<&Tensor>) -> Result<Tensor> {
        self.check_registered()?;
        let start = if x.rank() == 3 { segment.index() * x.dim(1)? } else { 0 };
        let projected = self.project(x, None, start, Around::Segment(segment))?;
        self.merge(&self.attention.forward_segment(projected.inputs(), segment)?, x, residual)
    }

    /// Causal self-attention that goes on from `state`: `x` `(B, T, E)` holds the next `T` tokens.
    /// A state belongs to one layer: where the layer has convolutions, it holds what they need of
    /// the last tokens.
    ///
    /// # Errors
    /// As [`Self::forward`] and [`Attention::extend`], and if the state was made by a layer with
    /// convolutions and this one has none, or the other way round. The state is then what it was.
    pub fn extend(&self, x: &Tensor, state: &mut State) -> Result<Tensor> {
        self.check_registered()?;
        let before = match self.convolutions {
            Some(_) => state.take_of_layer::<LastRows>()?,
            None if state.has_memory_of_layer() => {
                bail!("state: it was made by a layer with short convolutions, and this one has none; begin a new state")
            }
            None => None,
        };
        let extended = self.extend_after(before.as_ref(), x, state);
        let after = match &extended {
            Ok((_, after)) => after.clone(),
            Err(_) => before,
        };
        if let Some(rows) = after {
            state.set_of_layer(rows);
        }
        Ok(extended?.0)
    }

    /// Goes on from `state` and the rows `before`; also returns the rows that are now the last, if
    /// there are any to keep.
    fn extend_after(
        &self,
        before: Option<&LastRows>,
        x: &Tensor,
        state: &mut State,
    ) -> Result<(Tensor, Option<LastRows>)> {
        let seen = state.tokens();
        match before {
            None if self.convolutions.is_some() && seen > 0 => bail!(
                "state: it has seen {seen} tokens without short convolutions, which this layer has: another layer or an \
                 attention alone made it; begin a new state"
            ),
            Some(before) if before.tokens != seen => bail!(
                "state: the attention in it has seen {seen} tokens and the layer's convolutions {}; extend it by the layer \
                 alone",
                before.tokens
            ),
            _ => {}
        }
        let mut rows = before.map_or_else(Default::default, |before| before.rows.clone().map(Some));
        let projected = self.project(x, None, seen, Around::Past(&mut rows))?;
        let out = self.merge(&self.attention.extend(projected.inputs(), state)?, x, None)?;
        let last = match (rows, state.tokens()) {
            ([Some(q), Some(k), Some(v)], tokens @ 1..) => Some(LastRows { tokens, rows: [q, k, v] }),
            _ => None,
        };
        Ok((out, last))
    }

    /// Self-attention with `attend` in place of the attention inside. It is given queries
    /// `(B, H, T, Dk)` and keys `(B, Hkv, T, Dk)` after rotary positions, values `(B, Hkv, T, D)`,
    /// and gates `(B, Hkv, T)` if the layer has them, where Dk is
    /// [`MultiHeadConfig::key_dim`]. This serves to look at what an attention is given, and to try
    /// another in its place. Convolutions go over all tokens here, since no mask is given.
    ///
    /// # Errors
    /// If `x` has another shape than `(B, T, E)`, and whatever `attend` returns.
    pub fn forward_through(&self, x: &Tensor, attend: impl FnOnce(Inputs<'_>) -> Result<Tensor>) -> Result<Tensor> {
        let projected = self.project(x, None, 0, Around::Mask(&Mask::full()))?;
        self.merge(&attend(projected.inputs())?, x, None)
    }

    /// The forget gates that the layer computes of `x` `(B, T, E)`: `(B, Hkv, T)`, the logarithms
    /// of factors; `None` if it has none. For trying an attention with other queries and keys than
    /// the layer's.
    ///
    /// # Errors
    /// If `x` has another shape.
    pub fn gates(&self, x: &Tensor) -> Result<Option<Tensor>> {
        x.dims3()?;
        self.gate.as_ref().map(|gate| gates(gate, x)).transpose()
    }

    /// The attention inside.
    pub fn attention(&self) -> &dyn Attention {
        &*self.attention
    }

    /// Puts another attention inside. Its buffers are not registered in a `VarMap`: whoever
    /// exchanges the attention of a layer saves and loads them.
    pub fn set_attention(&mut self, attention: Box<dyn Attention>) {
        self.attention = attention;
        self.registered.clear();
        self.trained.clear();
    }

    /// Draws new random features from `seed`, in the layer's `VarMap` too; nothing where there are
    /// none.
    ///
    /// # Errors
    /// As [`Attention::redraw`].
    pub fn redraw(&mut self, seed: u64) -> Result<()> {
        self.attention.redraw(seed)?;
        update_registered(&mut self.registered, &*self.attention)
    }

    /// Takes over saved buffers, into the layer's `VarMap` too; `get` returns the tensor of a name
    /// in [`Attention::buffers`], if it was saved. Trained ones stay variables, with these numbers.
    ///
    /// # Errors
    /// As [`Attention::load_buffers`].
    pub fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        let mut numbers = Vec::new();
        for (name, variable) in &self.trained {
            // The attention says which one is missing.
            let Some(saved) = get(name) else { continue };
            let saved = saved.to_dtype(variable.dtype())?.to_device(variable.device())?;
            // One set of parameters serves all key heads.
            let Ok(saved) = saved.broadcast_as(variable.shape()) else {
                bail!("buffer {name} has shape {:?}; it must be {:?}", saved.dims(), variable.dims());
            };
            numbers.push((variable, saved.force_contiguous()?));
        }
        let before = self.attention.buffers();
        let has_variables = !self.registered.is_empty() || !self.trained.is_empty();
        let loaded = self.attention.load_buffers(get);
        if !has_variables {
            return loaded;
        }
        let loaded = loaded
            .and_then(|()| require_same_names(&before, &self.attention.buffers()))
            .and_then(|()| update_registered(&mut self.registered, &*self.attention));
        if let Err(error) = loaded {
            // After an error the attention gets back the buffers that it had, the trained ones as
            // the variables of the `VarMap`: copies of them would not be trained any more.
            let own = |name: &str| named(&self.trained, name).or_else(|| named(&before, name));
            self.attention.load_buffers(&own)?;
            return Err(error);
        }
        if !numbers.is_empty() {
            for (variable, saved) in numbers {
                variable.slice_set(&saved, 0, 0)?;
            }
            let find = |name: &str| named(&self.trained, name).or_else(|| get(name));
            self.attention.load_buffers(&find)?;
        }
        Ok(())
    }

    /// Takes over the buffers that the layer's `VarMap` holds by now. Call it after `VarMap::load`
    /// of a map over which this layer has been made; until then the layer refuses to compute (on
    /// the CPU, where looking is cheap).
    ///
    /// # Errors
    /// As [`Attention::load_buffers`].
    pub fn reload_buffers(&mut self) -> Result<()> {
        let own = self.attention.buffers();
        let find = |name: &str| -> Option<Tensor> {
            let stored = self.registered.iter().find(|r| r.name == name).and_then(|r| r.stored.copy().ok());
            let held = named(&self.trained, name).or(stored);
            held.or_else(|| named(&own, name))
        };
        self.attention.load_buffers(&find)?;
        for registered in &mut self.registered {
            registered.used = registered.stored.copy()?;
        }
        Ok(())
    }

    /// Refuses to compute with buffers that are not those of the `VarMap` any more.
    fn check_registered(&self) -> Result<()> {
        for Registered { name, stored, used } in &self.registered {
            if stored.device().is_cpu() && !same_numbers(stored, used)? {
                bail!(
                    "buffer {name}: the VarMap of this layer was loaded after the layer was made; call \
                     MultiHeadAttention::reload_buffers, or make layers over a VarBuilder of the file"
                );
            }
        }
        Ok(())
    }

    /// What the attention is given of `x` and of `context`, which is `x` itself if there is none;
    /// the first token stands at position `start`.
    fn project(&self, x: &Tensor, context: Option<&Tensor>, start: usize, mut around: Around<'_>) -> Result<Tensors> {
        let c = &self.config;
        for (name, t) in [("x", Some(x)), ("context", context)] {
            if let Some(t) = t
                && (t.rank() != 3 || t.dims()[2] != c.hidden)
            {
                bail!("{name} has shape {:?}; it must be (batch, tokens, {})", t.dims(), c.hidden);
            }
        }
        let keys = context.unwrap_or(x);
        let mut split = |which: usize, linear: &Linear, x: &Tensor, heads: usize, rotary: Option<&Rotary>| {
            let (b, t, _) = x.dims3()?;
            let rotary = rotary.map(|rotary| rotary.at(&[b, heads, t, c.key_dim()], start)).transpose()?;
            let Some(filters) = &self.convolutions else {
                return ops::linear_to_heads(x, linear.weight(), linear.bias(), heads, rotary);
            };
            let rows = ops::linear(x, linear.weight(), linear.bias())?;
            let (rows, past) = around.rows(which, rows, which == Q && context.is_some())?;
            ops::convolved_heads(&rows, &filters[which], heads, rotary, past)
        };
        let q = split(Q, &self.q_proj, x, c.heads, self.rotary.as_ref())?;
        let q = if c.parts.mup_scale { ops::scale(&q, (c.key_dim() as f64).powf(-0.5))? } else { q };
        let k = split(K, &self.k_proj, keys, c.kv_heads, self.rotary.as_ref())?;
        let v = split(V, &self.v_proj, keys, c.kv_heads, None)?;
        let gates = self.gate.as_ref().map(|gate| gates(gate, keys)).transpose()?;
        Ok(Tensors { q, k, v, gates })
    }

    /// The layer's output for `x`, of the attention's outputs `(B, H, T, D)`.
    fn merge(&self, heads: &Tensor, x: &Tensor, residual: Option<&Tensor>) -> Result<Tensor> {
        let mut heads = heads.clone();
        if let Some(weight) = &self.output_norm {
            heads = ops::rms_norm(&heads, weight, OUTPUT_NORM_EPS)?;
        }
        if let Some(weight) = &self.output_gate {
            let gates = ops::linear_to_heads(x, weight, None, self.config.heads, None)?;
            heads = ops::sigmoid_gate(&gates, &heads)?;
        }
        ops::linear_of_heads(&heads, self.o_proj.weight(), self.o_proj.bias(), residual)
    }
}

/// ε of the norm of outputs.
const OUTPUT_NORM_EPS: f64 = 1e-5;
