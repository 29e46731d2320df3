//! What decoding carries from token to token.

use candle_core::{DType, Result, Tensor};
use candle_nn::kv_cache::KvCache;

use crate::kernels;

/// Everything an [`Attention`](super::Attention) must remember of the tokens so far, for one layer.
///
/// Exact softmax keeps every key and value; FAVOR keeps prefix sums of constant size, see [`PrefixSums`]. A clone of a softmax
/// state shares its cache buffer, so extend only one of the two.
#[derive(Clone, Debug, Default)]
pub struct State {
    tokens: usize,
    batch: usize,
    pub(super) memory: Option<Memory>,
}

/// What the tokens so far left behind.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    /// Every key and value.
    Cache(KvCache),
    /// Sums as tensors.
    Sums(PrefixSums),
    /// Sums of the fused CPU kernels, by key head.
    Kernel(Vec<kernels::favor::Sums>),
    /// The last keys and values `(B, Hkv, W, ·)`, and what is before them.
    Window { keys: Tensor, values: Tensor, far: Box<State> },
}

impl State {
    /// The state before the first token.
    pub fn new() -> Self {
        Self::default()
    }

    /// Tokens seen so far.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Counts the tokens of `q` `(B, H, T, D)`, once they are in.
    pub(super) fn advance(&mut self, q: &Tensor) -> Result<()> {
        self.batch = q.dim(0)?;
        self.tokens += q.dim(2)?;
        Ok(())
    }

    /// Refuses a `q` `(B, H, T, D)` of another batch size than that of the tokens so far.
    pub(super) fn check_batch(&self, q: &Tensor) -> Result<()> {
        if self.tokens > 0 && q.dims().first() != Some(&self.batch) {
            candle_core::bail!("q has shape {:?} but the state is of a batch of {}", q.dims(), self.batch);
        }
        Ok(())
    }

    /// Bytes of what is remembered: constant in the number of tokens for FAVOR, linear for softmax (whose cache is
    /// allocated in larger pieces).
    pub fn bytes(&self) -> usize {
        let size = |t: &Tensor| t.elem_count() * t.dtype().size_in_bytes();
        match &self.memory {
            None => 0,
            Some(Memory::Cache(c)) => {
                let current = [c.k_cache(), c.v_cache()].map(|c| c.current_data().ok().flatten());
                current.iter().flatten().map(size).sum()
            }
            Some(Memory::Sums(s)) => size(&s.log_scale) + size(&s.sums),
            Some(Memory::Window { keys, values, far }) => size(keys) + size(values) + far.bytes(),
            Some(Memory::Kernel(heads)) => heads.iter().map(kernels::favor::Sums::bytes).sum(),
        }
    }
}

/// Prefix sums over the keys seen so far, per key head: `N = B·Hkv`, `F` features, `Dv` values.
///
/// The sums are stored divided by `e^{log_scale}`, where `log_scale` is the running maximum of the log-features: every
/// stored term is at most 1 in its feature, and the largest is exactly 1.
#[derive(Clone, Debug)]
pub struct PrefixSums {
    /// `c`: shape `(N, 1, F)` for positive features (a maximum per feature), `(N, 1, 1)` for signed ones.
    pub log_scale: Tensor,
    /// `Σ_j φ(k_j) [v_j, 1] / e^c`: shape `(N, F, Dv + 1)`.
    pub sums: Tensor,
}

impl PrefixSums {
    pub(super) fn detach(self) -> Self {
        Self { log_scale: self.log_scale.detach(), sums: self.sums.detach() }
    }

    /// Checks that a state belongs to inputs that make sums and scales of these shapes.
    pub(super) fn check(&self, sums: [usize; 3], scales: [usize; 3], dtype: DType) -> Result<()> {
        if self.sums.dims() != sums || self.log_scale.dims() != scales || self.sums.dtype() != dtype {
            candle_core::bail!(
                "state: its sums have shape {:?}, its scales {:?}, and dtype {:?}, but this input needs {sums:?} = (batch x key \
                 heads, features, value dim + 1), {scales:?} and {dtype:?}; a state belongs to one layer and one batch",
                self.sums.dims(),
                self.log_scale.dims(),
                self.sums.dtype(),
            );
        }
        Ok(())
    }
}
