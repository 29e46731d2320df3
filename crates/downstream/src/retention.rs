//! Retention (Sun et al. 2023, <https://arxiv.org/abs/2307.08621>): linear attention whose past
//! fades by a constant factor a token, `o_t = D^-½ Σ_{j≤t} γ^{t−j} (q_t·k_j) v_j`, with a `γ` for
//! each head.

use candle_core::{Result, Tensor, bail};
use performer_core::attention::{Identity, Memory, StateRecord};
use performer_core::{Attention, Inputs, Mask, State};

/// Retention with decays `γ_h = 1 − 2^{−5−h}`, as in the paper.
#[derive(Debug)]
pub struct Retention {
    heads: usize,
}

impl Retention {
    pub fn new(heads: usize) -> Self {
        Self { heads }
    }

    /// `ln γ`, shape `(H, 1, 1)`.
    fn log_decays(&self, like: &Tensor) -> Result<Tensor> {
        let logs: Vec<f32> = (0..self.heads).map(|h| (1.0 - 2f32.powi(-5 - h as i32)).ln()).collect();
        Tensor::from_vec(logs, (self.heads, 1, 1), like.device())?.to_dtype(like.dtype())
    }

    /// Retention of `T` tokens after those whose sum is `before`, and the sum after the last of
    /// them.
    fn retain(&self, inputs: Inputs<'_>, before: Option<&Tensor>) -> Result<(Tensor, Tensor)> {
        inputs.refuse_gates("retention with constant decay")?;
        let sizes = inputs.sizes()?;
        if sizes.heads != self.heads || sizes.key_heads != self.heads {
            bail!("retention was made for {} heads, but q has {} and k has {}", self.heads, sizes.heads, sizes.key_heads);
        }
        let (t, scale) = (sizes.queries, (sizes.head_dim as f64).powf(-0.5));
        let (q, k, v) = ((inputs.q.contiguous()? * scale)?, inputs.k.contiguous()?, inputs.v.contiguous()?);
        let log_decays = self.log_decays(&q)?;
        let positions = Tensor::arange(0f32, t as f32, q.device())?.to_dtype(q.dtype())?;
        // γ^{i−j} for keys j that are not after query i.
        let distances = positions.reshape((t, 1))?.broadcast_sub(&positions.reshape((1, t))?)?;
        let visible = distances.ge(0.0)?.to_dtype(q.dtype())?;
        let weights = log_decays.broadcast_mul(&distances.relu()?.unsqueeze(0)?)?.exp()?.broadcast_mul(&visible)?;
        let mut out = q.matmul(&k.t()?.contiguous()?)?.broadcast_mul(&weights)?.matmul(&v)?;
        // What is left of each key at the end of these tokens, γ^{T−1−j}.
        let ages = ((positions.affine(-1.0, t as f64 - 1.0))?).reshape((1, t, 1))?;
        let left = log_decays.broadcast_mul(&ages)?.exp()?;
        let mut sum = k.broadcast_mul(&left)?.t()?.contiguous()?.matmul(&v)?;
        if let Some(before) = before {
            let since = log_decays.broadcast_mul(&(positions + 1.0)?.reshape((1, t, 1))?)?.exp()?;
            out = (out + q.matmul(before)?.broadcast_mul(&since)?)?;
            sum = (sum + before.broadcast_mul(&(log_decays * t as f64)?.exp()?)?)?;
        }
        Ok((out, sum))
    }
}

impl Attention for Retention {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        inputs.sizes_under(mask)?;
        if !mask.is_causal() || mask.visible().is_some() {
            bail!("retention is causal and hides no keys; give it Mask::causal()");
        }
        Ok(self.retain(inputs, None)?.0)
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        state.advance_with(|before: Option<&Sum>| {
            let (out, sum) = self.retain(inputs, before.map(|sum| &sum.0))?;
            Ok((out, Sum(sum)))
        })
    }

    fn identity(&self) -> Result<Identity> {
        Ok(Identity::new("retention").with("heads", self.heads))
    }
}

/// `Σ_j γ^{t−j} k_j v_jᵀ`, shape `(B, H, D, Dv)`.
#[derive(Clone, Debug)]
struct Sum(Tensor);

impl Memory for Sum {
    fn kind() -> &'static str {
        "a decayed sum of keys and values"
    }

    fn bytes(&self) -> usize {
        self.0.elem_count() * self.0.dtype().size_in_bytes()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        Ok(StateRecord::new().with_tensor("sum", self.0.clone()))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        Ok(Self(record.tensor("sum")?.clone()))
    }
}
