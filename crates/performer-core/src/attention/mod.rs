//! Attention behind one trait: exact softmax and FAVOR; bidirectional, causal, and decoding with a state.
//!
//! Every implementation computes `o_i = Σ_j K(q_i, k_j) v_j / Σ_j K(q_i, k_j)` over the keys that the [`Mask`] lets row `i`
//! see. They differ in `K` and in cost: [`Softmax`] takes `K = e^{q·k/√D}` at `O(T²)`; [`Favor`] takes `φ(q)·φ(k)`, which
//! lets the sums be reordered, at `O(T)`.

mod causal;
#[cfg(feature = "cuda")]
mod cuda;
mod favor;
mod full;
mod fused;
mod input;
#[cfg(feature = "metal")]
mod metal;
mod softmax;
mod state;
mod windowed;

use std::fmt;

use candle_core::{Result, Tensor};

pub use favor::{Favor, FavorConfig};
pub use softmax::Softmax;
pub use state::{PrefixSums, State};
pub use windowed::Windowed;

/// Which keys a query may see.
///
/// The default sees every key.
#[derive(Clone, Debug, Default)]
pub struct Mask {
    causal: bool,
    keys: Option<Tensor>,
}

impl Mask {
    /// Every query sees every key: self-attention in an encoder, or cross-attention.
    pub fn full() -> Self {
        Self::default()
    }

    /// Query `t` sees keys `0..=t`; needs as many queries as keys.
    pub fn causal() -> Self {
        Self { causal: true, keys: None }
    }

    /// Hides padding besides: `keys` has shape `(B, Tk)`, of any number type, zero where a key must not be seen: the attention
    /// mask of a tokenizer as it is.
    ///
    /// Hidden keys and values may hold any finite numbers. A row that sees no key at all yields zeros.
    pub fn with_keys(mut self, keys: &Tensor) -> Self {
        self.keys = Some(keys.clone());
        self
    }

    /// Whether query `t` is kept from keys after `t`.
    pub fn is_causal(&self) -> bool {
        self.causal
    }

    /// The key-padding mask, if any.
    pub fn keys(&self) -> Option<&Tensor> {
        self.keys.as_ref()
    }
}

/// Multi-head attention over given queries, keys and values.
///
/// # Shapes
/// `q` is `(B, H, Tq, D)`, `k` is `(B, Hkv, Tk, D)`, `v` is `(B, Hkv, Tk, Dv)`; `H` is a multiple of `Hkv` (grouped-query
/// heads: query head `h` reads key head `h / (H/Hkv)`). The output is `(B, H, Tq, Dv)`. Any strides are accepted.
///
/// # Numbers
/// f32, f64, f16 and bf16, the same for all three; the output has it too. Half types are widened: features, sums and
/// states are f32 (f64 for f64).
///
/// # Errors
/// Shapes or dtypes that do not fit, and on the CPU NaN or infinite values in `q`, `k`, `v`. (On a GPU looking would stall
/// the queue, so there they pass through.) The message names the argument, what it was and what it must be.
pub trait Attention: fmt::Debug + Send + Sync {
    /// Attention in one pass.
    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Tensor>;

    /// Causal attention that goes on where `state` stands: a whole prompt, or one token.
    ///
    /// Splitting a sequence in any way and extending piece by piece gives what one causal pass gives, up to rounding. For
    /// inference: the state carries no gradient. A fresh [`State`] starts a sequence.
    fn extend(&self, q: &Tensor, k: &Tensor, v: &Tensor, state: &mut State) -> Result<Tensor>;

    /// What to save with the model beside the parameters of its layers: random projections, feature maps that were fitted or trained.
    fn buffers(&self) -> Vec<(String, Tensor)> {
        Vec::new()
    }

    /// Takes over what was saved; `get` returns the tensor of a name in [`Self::buffers`], if it was saved. A feature map of given variables
    /// passes gradients to them.
    ///
    /// # Errors
    /// If a buffer is missing or has another shape.
    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        let _ = get;
        Ok(())
    }

    /// Draws new random features from `seed`; nothing where there are none.
    fn redraw(&mut self, seed: u64) -> Result<()> {
        let _ = seed;
        Ok(())
    }
}
