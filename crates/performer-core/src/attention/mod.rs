//! Attention behind one trait: exact softmax and FAVOR; bidirectional, causal, and decoding with a
//! state.
//!
//! Every implementation computes `o_i = Σ_j K(q_i, k_j) v_j / Σ_j K(q_i, k_j)` over the keys that
//! row `i` sees; [`AttentionConfig::None`] alone does not, whose outputs are 0. The [`Mask`] says
//! which keys are seen, and a window keeps only the last of them. Implementations differ in `K` and
//! in cost: [`Softmax`] takes `K = e^{q·k/√D}` at `O(T²)`, or at `O(T·W)` over a window of `W`
//! tokens where that is fused; [`Favor`] takes `φ(q)·φ(k)` with any feature map φ, which lets the
//! sums be reordered, at `O(T)`; [`Windowed`] takes the first for near keys and the second for far
//! ones. FAVOR with positive orthogonal random features is the FAVOR+ of the paper. Forget gates
//! multiply `K` by a factor for what is forgotten from key `j` to query `i`, see [`Inputs::gates`].
//!
//! # An attention of your own
//! Implement [`Attention`] with [`Attention::forward`] and [`Attention::advance`], and [`Memory`]
//! for whatever it remembers while decoding. It goes into a
//! [`MultiHeadAttention`](crate::MultiHeadAttention) and into [`ByHead`]. A [`Windowed`] takes no
//! attention but [`Favor`] behind its window: give that a feature map of yours by
//! [`Favor::with_map`]. Here, each output is the mean of all values so far:
//! ```
//! use candle_core::{D, DType, Device, Result, Tensor};
//! use performer_core::attention::{Memory, StateRecord};
//! use performer_core::{Attention, Inputs, Mask, State};
//!
//! #[derive(Debug)]
//! struct RunningMean;
//!
//! #[derive(Clone, Debug)]
//! struct Sum(Tensor);
//!
//! impl Memory for Sum {
//!     fn kind() -> &'static str { "the sum of all values" }
//!     fn bytes(&self) -> usize { self.0.elem_count() * self.0.dtype().size_in_bytes() }
//!     fn duplicate(&self) -> Box<dyn Memory> { Box::new(self.clone()) }
//!     fn save(&self) -> Result<StateRecord> {
//!         Ok(StateRecord::new().with_tensor("sum", self.0.clone()))
//!     }
//!     fn load(record: &StateRecord) -> Result<Self> { Ok(Self(record.tensor("sum")?.clone())) }
//! }
//!
//! impl RunningMean {
//!     /// Means over values `(B, H, T, Dv)` after `before` tokens whose sum is `sum`, and the last
//!     /// sum.
//!     fn means(v: &Tensor, sum: Option<&Tensor>, before: usize) -> Result<(Tensor, Tensor)> {
//!         let mut sums = v.cumsum(2)?;
//!         if let Some(sum) = sum {
//!             sums = sums.broadcast_add(sum)?;
//!         }
//!         let tokens = v.dim(2)?;
//!         let (first, end) = ((before + 1) as f32, (before + tokens + 1) as f32);
//!         let counts = Tensor::arange(first, end, v.device())?.to_dtype(v.dtype())?;
//!         let means = sums.broadcast_div(&counts.reshape((tokens, 1))?)?;
//!         Ok((means, sums.narrow(2, tokens - 1, 1)?))
//!     }
//!
//!     /// Refuses what would give wrong numbers: gates, and groups of heads.
//!     fn check(inputs: Inputs<'_>) -> Result<()> {
//!         inputs.refuse_gates("the running mean")?;
//!         let sizes = inputs.sizes()?;
//!         if sizes.heads != sizes.key_heads {
//!             candle_core::bail!("the running mean has no groups of heads");
//!         }
//!         Ok(())
//!     }
//! }
//!
//! impl Attention for RunningMean {
//!     fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
//!         let sizes = inputs.sizes_under(mask)?;
//!         Self::check(inputs)?;
//!         if !mask.is_causal() || mask.visible().is_some() {
//!             candle_core::bail!("the running mean is causal and sees all earlier tokens");
//!         }
//!         if sizes.is_empty() {
//!             return sizes.zeros(inputs.q);
//!         }
//!         Ok(Self::means(inputs.v, None, 0)?.0)
//!     }
//!
//!     fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
//!         let sizes = inputs.sizes()?;
//!         if sizes.is_empty() {
//!             return sizes.zeros(inputs.q);
//!         }
//!         Self::check(inputs)?;
//!         let tokens = state.tokens();
//!         state.advance_with(|before: Option<&Sum>| {
//!             let (out, sum) = Self::means(inputs.v, before.map(|sum| &sum.0), tokens)?;
//!             Ok((out, Sum(sum)))
//!         })
//!     }
//! }
//!
//! # fn main() -> Result<()> {
//! let x = Tensor::randn(0f32, 1.0, (1, 2, 10, 4), &Device::Cpu)?;
//! let mut state = State::new();
//! for t in 0..10 {
//!     let token = x.narrow(2, t, 1)?;
//!     RunningMean.extend(Inputs::new(&token, &token, &token), &mut state)?;
//! }
//! assert_eq!(state.tokens(), 10);
//! # Ok(())
//! # }
//! ```

mod by_head;
mod config;
mod exact;
mod favor;
mod gates;
mod identity;
mod inputs;
mod layout;
mod mask;
mod none;
mod parts;
mod path;
mod quotient;
mod record;
mod segments;
mod softmax;
mod state;
mod text;
mod windowed;

use std::fmt;

use candle_core::{Result, Tensor, bail};

pub use by_head::ByHead;
pub use config::AttentionConfig;
pub use favor::{Favor, FavorConfig, SegmentSums};
pub use identity::Identity;
pub(crate) use inputs::Tensors;
pub use inputs::{Inputs, Sizes};
pub use mask::Mask;
pub use parts::LayerParts;
pub use path::Path;
pub use record::StateRecord;
pub use segments::{Neighbours, Segment};
pub use softmax::Softmax;
pub use state::{Memory, State};
pub use windowed::Windowed;

/// Multi-head attention over given queries, keys and values, in one pass or token by token.
///
/// Queries are `(B, H, Tq, D)`, keys `(B, Hkv, Tk, D)` and values `(B, Hkv, Tk, Dv)`, in one type
/// (see [`Inputs`]); the output is `(B, H, Tq, Dv)` in that type. Features, sums of features and
/// the states that hold them are f32, or f64 where the inputs are f64; but CUDA kernels for half
/// types round features to bf16 for matrix products. Exact softmax keeps keys and values in the
/// type of the inputs; [`Windowed`] keeps those of its window in the type of FAVOR's sums, with
/// which they are joined.
///
/// Callers use [`Self::forward`] and [`Self::extend`]. Implementations provide [`Self::forward`]
/// and [`Self::advance`], and [`Self::buffers`] with [`Self::load_buffers`] if there is anything to
/// save; the [module's page](self) has a complete example.
///
/// # Errors
/// Shapes or dtypes that do not fit, and on the CPU NaN or infinite values in `q`, `k`, `v`. (On a
/// GPU looking would stall the queue, so there they pass through.) The message names the argument,
/// what it was and what it must be.
pub trait Attention: fmt::Debug + Send + Sync {
    /// Computes attention in one pass, with gradients to the inputs.
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor>;

    /// Computes causal attention of the next tokens after those that `state` has seen, and brings
    /// the state's memory up to the last of them. An implementation provides this method; callers
    /// use [`Self::extend`]. Only an attention that wraps another one calls the other's `advance`.
    ///
    /// `extend` has already checked that the inputs fit each other and the state, detached them
    /// from gradients, and counts the tokens afterwards, so that [`State::tokens`] is the number of
    /// earlier tokens here. After an error the memory must be what it was.
    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor>;

    /// Computes causal attention that goes on where `state` stands: of a whole prompt, or of one
    /// token.
    ///
    /// Splitting a sequence in any way and extending piece by piece gives what one causal pass
    /// gives, up to rounding. It is for inference: the state carries no gradient. A fresh [`State`]
    /// starts a sequence. All sequences of a state have seen the same number of tokens, and there
    /// is no mask for padding: texts of different lengths are decoded with a state each.
    ///
    /// # Errors
    /// As for [`Self::forward`], and if the state was made by another attention, with another seed,
    /// or for inputs of other sizes or another dtype. The state is then what it was.
    fn extend(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let sizes = inputs.sizes_under(&Mask::causal())?;
        let (identity, dtype) = (self.identity()?, inputs.q.dtype());
        state.check(&identity, sizes, dtype)?;
        let before = state.tokens();
        let out = self.advance(inputs.map(|x| Ok(x.detach()))?.inputs(), state)?;
        state.count(before, identity, sizes, dtype);
        Ok(out)
    }

    /// Computes causal attention of a segment of a sequence whose other segments are computed
    /// elsewhere, with gradients across the borders: what [`Self::forward`] over the whole sequence
    /// has there, up to rounding. All segments have the same number of tokens. An implementation
    /// receives the tensors of earlier segments from [`Segment::earlier`], or merged from
    /// [`Segment::merged_before`]; later segments change no output. Where outputs depend on no
    /// other token, it can call [`Self::forward`].
    ///
    /// # Errors
    /// As for [`Self::forward`]; if another segment does not take part; and unless overridden,
    /// always.
    fn forward_segment(&self, inputs: Inputs<'_>, segment: &Segment) -> Result<Tensor> {
        let _ = (inputs, segment);
        bail!(
            "{self:?} cannot compute a sequence in segments. These can: Favor over a map with positive features, \
             Softmax, Windowed, the attention none, ByHead over any of them, and an attention of yours that implements \
             Attention::forward_segment"
        )
    }

    /// What this attention is: states that an attention of another identity made are refused.
    /// Unless overridden, it is the type's name and a digest of [`Self::buffers`], which is made at
    /// each call of [`Self::extend`]; keep it where that is too slow.
    ///
    /// # Errors
    /// If the buffers cannot be read.
    fn identity(&self) -> Result<Identity> {
        let buffers = self.buffers();
        Identity::new(std::any::type_name::<Self>()).with_digest(buffers.iter().map(|(_, tensor)| tensor))
    }

    /// Which implementation computes these inputs: fused kernels, or composed operations and why.
    ///
    /// # Errors
    /// As for [`Self::forward`].
    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        inputs.sizes_under(mask)?;
        Ok(Path::Composed { why: "this attention has no fused kernels".into() })
    }

    /// What to save with the model beside the parameters of its layers: random projections, feature
    /// maps that were fitted or trained.
    fn buffers(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Takes over what was saved; `get` returns the tensor of a name in [`Self::buffers`], if it
    /// was saved. Where `get` returns variables, a fitted or trained feature map computes with
    /// them, and they get gradients.
    ///
    /// # Errors
    /// If a buffer is missing or has another shape. The attention then keeps the numbers that it
    /// had, perhaps as copies: variables that are trained have to be loaded again.
    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        let _ = get;
        Ok(())
    }

    /// The names among [`Self::buffers`] that are meant to be trained; none, unless overridden.
    ///
    /// In a layer a trained buffer whose name has a dot, as `map.weight`, and whose first dimension
    /// is 1 is repeated for each key head, and with it the buffers of the same prefix that are not
    /// trained. One without a dot keeps its shape.
    fn trained_buffers(&self) -> Vec<String> {
        Vec::new()
    }

    /// How many key heads the buffer of this name is for, in a layer with `key_heads` key heads:
    /// all of them, unless overridden by an attention that divides them. A trained buffer is given
    /// parameters for each.
    fn key_heads_of(&self, buffer: &str, key_heads: usize) -> usize {
        let _ = buffer;
        key_heads
    }

    /// Draws new random features from `seed`; nothing where there are none.
    ///
    /// # Errors
    /// If the features cannot be made.
    fn redraw(&mut self, seed: u64) -> Result<()> {
        let _ = seed;
        Ok(())
    }
}
