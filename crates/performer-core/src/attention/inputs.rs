//! What a caller hands to attention: queries, keys, values, and gates where an attention has them.

use candle_core::{D, DType, Result, Tensor, bail};

use super::{Mask, gates, layout::check_finite};
use crate::{kernels::compute_dtype, ops};

/// The tensors that attention is computed from.
///
/// # Shapes
/// `q` is `(B, H, Tq, D)`, `k` is `(B, Hkv, Tk, D)`, `v` is `(B, Hkv, Tk, Dv)`, where `H` is a
/// multiple of `Hkv` (grouped-query attention: query head `h` reads key head `h / (H/Hkv)`).
/// `gates` is `(B, Hkv, Tk)`. Any strides are accepted.
///
/// # Numbers
/// `q`, `k` and `v` have one type, which is f32, f64, f16 or bf16. Gates are f32 or f64, since the
/// half types have too few digits for a sum over many tokens; they are computed with in f64 where
/// `q` is f64, else in f32.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use performer_core::{Attention, Inputs, Mask, Softmax};
///
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::randn(0f32, 1.0, (1, 4, 10, 16), &Device::Cpu)?;
/// let out = Softmax::new().forward(Inputs::new(&x, &x, &x), &Mask::causal())?;
/// assert_eq!(out.dims(), [1, 4, 10, 16]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Inputs<'a> {
    /// Queries, `(B, H, Tq, D)`.
    pub q: &'a Tensor,
    /// Keys, `(B, Hkv, Tk, D)`.
    pub k: &'a Tensor,
    /// Values, `(B, Hkv, Tk, Dv)`.
    pub v: &'a Tensor,
    /// Forget gates `g ≤ 0`, `(B, Hkv, Tk)`: before token `t` is taken in, everything that a key
    /// head remembers is multiplied by `e^{g_t}`. So key `j` counts for query `i` by the factor
    /// `e^{c_i − c_j}`, where `c_t` is the sum of the gates up to `t`: added to the logits of
    /// softmax this is the forgetting transformer (Lin et al. 2025,
    /// <https://arxiv.org/abs/2503.02130>), and constant gates are the decay of RetNet (Sun et al.
    /// 2023, <https://arxiv.org/abs/2307.08621>). Without gates nothing is forgotten, which is what
    /// gates of 0 say. They need a causal mask; the gate of a hidden key counts for the visible
    /// ones before it. Gates lie in `-1e30..=0`. An attention that has no gates refuses them.
    pub gates: Option<&'a Tensor>,
}

impl<'a> Inputs<'a> {
    /// Queries `(B, H, Tq, D)`, keys `(B, Hkv, Tk, D)` and values `(B, Hkv, Tk, Dv)` without gates.
    /// Whoever computes with them finds out whether they fit each other, as [`Self::sizes`] does.
    pub fn new(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor) -> Self {
        Self { q, k, v, gates: None }
    }

    /// Refuses NaN, infinity and gates out of their range, on the CPU. Elsewhere it checks nothing,
    /// since it would have to wait for the device on every call.
    pub(super) fn check_finite(&self) -> Result<()> {
        for (name, t) in [("q", self.q), ("k", self.k), ("v", self.v)] {
            check_finite(t, name)?;
        }
        self.gates.map_or(Ok(()), gates::check)
    }

    /// Adds forget gates `(B, Hkv, Tk)`, which are logarithms: 0 keeps everything.
    pub fn with_gates(mut self, gates: &'a Tensor) -> Self {
        self.gates = Some(gates);
        self
    }

    /// The sizes of these inputs.
    ///
    /// # Errors
    /// If shapes, types or devices do not fit each other. The message names the tensor, what it has
    /// and what it must have.
    pub fn sizes(&self) -> Result<Sizes> {
        let Self { q, k, v, gates } = *self;
        for (name, t) in [("q", q), ("k", k), ("v", v)] {
            if t.rank() != 4 {
                bail!("{name} has shape {:?}; it must be (batch, heads, tokens, head dim)", t.dims());
            }
            if !matches!(t.dtype(), DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
                bail!("{name} has dtype {:?}; it must be f32, f64, f16 or bf16", t.dtype());
            }
            if t.dtype() != q.dtype() {
                bail!("{name} has dtype {:?}; it must have that of q, {:?}", t.dtype(), q.dtype());
            }
            require_beside(q, name, t)?;
        }
        let (b, h, tq, d) = q.dims4()?;
        let (kb, hkv, tk, kd) = k.dims4()?;
        if d == 0 || kd != d {
            bail!("k has shape {:?}; its head dim must be that of q {:?} and at least 1", k.dims(), q.dims());
        }
        if kb != b {
            bail!("k has shape {:?}; its batch must be that of q {:?}", k.dims(), q.dims());
        }
        if hkv == 0 || !h.is_multiple_of(hkv) {
            bail!("k has {hkv} heads, shape {:?}; the {h} heads of q must be a multiple of them", k.dims());
        }
        if h == 0 {
            bail!("q has shape {:?}; its heads must be at least 1", q.dims());
        }
        if v.dims()[..3] != [b, hkv, tk] || v.dims()[3] == 0 {
            bail!(
                "v has shape {:?}; it must be ({b}, {hkv}, {tk}, value dim) as k is {:?}, with a value dim of at \
                 least 1",
                v.dims(),
                k.dims()
            );
        }
        if let Some(gates) = gates {
            if gates.dims() != [b, hkv, tk] {
                bail!(
                    "gates have shape {:?}; they must be ({b}, {hkv}, {tk}) = (batch, key heads, keys)",
                    gates.dims()
                );
            }
            if !matches!(gates.dtype(), DType::F32 | DType::F64) {
                bail!("gates have dtype {:?}; they must be f32 or f64", gates.dtype());
            }
            require_beside(q, "gates", gates)?;
        }
        Ok(Sizes { batch: b, heads: h, key_heads: hkv, queries: tq, keys: tk, head_dim: d, value_dim: v.dim(3)? })
    }

    /// The sizes of these inputs, which must fit `mask` as well.
    ///
    /// # Errors
    /// As [`Self::sizes`], if a causal mask meets another number of queries than of keys, if there
    /// are gates and no causal mask, or if the mask hides keys of another batch or length.
    pub fn sizes_under(&self, mask: &Mask) -> Result<Sizes> {
        let sizes = self.sizes()?;
        let Sizes { batch, queries, keys, .. } = sizes;
        if mask.is_causal() && queries != keys {
            bail!(
                "causal attention of {queries} queries over {keys} keys; it needs the same number of each (to go \
                 on from earlier keys, use extend with a state)"
            );
        }
        if self.gates.is_some() && !mask.is_causal() {
            bail!("the inputs have forget gates, which say what is forgotten from token to token; give Mask::causal()");
        }
        mask.check_keys(batch, keys)?;
        Ok(sizes)
    }

    /// Refuses gates: for attentions that have none.
    ///
    /// # Errors
    /// If there are gates. `attention` says who refuses them.
    pub fn refuse_gates(&self, attention: &str) -> Result<()> {
        if self.gates.is_some() {
            bail!("{attention} has no forget gates, but the inputs have some; leave them out");
        }
        Ok(())
    }

    /// These inputs with the gates of others.
    pub(crate) fn with_gates_of(self, gates: Option<&'a Tensor>) -> Self {
        Self { gates, ..self }
    }

    /// Whether a gradient may be asked of any of these tensors.
    #[cfg(feature = "metal")]
    pub(crate) fn tracked(&self) -> bool {
        [Some(self.q), Some(self.k), Some(self.v), self.gates].into_iter().flatten().any(Tensor::track_op)
    }
}

/// The sizes of [`Inputs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sizes {
    /// `B`.
    pub batch: usize,
    /// Query heads `H`.
    pub heads: usize,
    /// Key and value heads `Hkv`.
    pub key_heads: usize,
    /// Queries `Tq`.
    pub queries: usize,
    /// Keys `Tk`.
    pub keys: usize,
    /// Head dimension `D` of queries and keys.
    pub head_dim: usize,
    /// Head dimension `Dv` of values.
    pub value_dim: usize,
}

impl Sizes {
    /// Whether there is nothing to compute: no output, or no key that any query could see.
    pub fn is_empty(&self) -> bool {
        self.batch * self.queries == 0 || self.keys == 0
    }

    /// The output where nothing is computed: zeros `(B, H, Tq, Dv)` of the type of `like`.
    ///
    /// # Errors
    /// If the device has no memory for them.
    pub fn zeros(&self, like: &Tensor) -> Result<Tensor> {
        Tensor::zeros((self.batch, self.heads, self.queries, self.value_dim), like.dtype(), like.device())
    }
}

/// Refuses a tensor on another device than the queries.
fn require_beside(q: &Tensor, name: &str, t: &Tensor) -> Result<()> {
    if !t.device().same_device(q.device()) {
        bail!("{name}: on {:?}, but q is on {:?}; move it there", t.device().location(), q.device().location());
    }
    Ok(())
}

/// Tensors that own what [`Inputs`] borrow.
pub(crate) struct Tensors {
    pub(crate) q: Tensor,
    pub(crate) k: Tensor,
    pub(crate) v: Tensor,
    pub(crate) gates: Option<Tensor>,
}

impl Tensors {
    pub(crate) fn inputs(&self) -> Inputs<'_> {
        Inputs::new(&self.q, &self.k, &self.v).with_gates_of(self.gates.as_ref())
    }
}

impl Inputs<'_> {
    /// Does the same with each of the tensors.
    pub(super) fn map(self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Tensors> {
        let gates = self.gates.map(&change).transpose()?;
        Ok(Tensors { q: change(self.q)?, k: change(self.k)?, v: change(self.v)?, gates })
    }

    /// The inputs in the type of their computation: logarithms of denominators need more digits
    /// than half types have.
    pub(super) fn widened(self) -> Result<Tensors> {
        let wide = compute_dtype(self.q.dtype());
        self.map(|x| ops::to_dtype(x, wide))
    }

    /// Queries, keys and values with contiguous rows, as all kernels read them.
    pub(super) fn contiguous_rows(self) -> Result<[Tensor; 3]> {
        Ok([contiguous_rows(self.q)?, contiguous_rows(self.k)?, contiguous_rows(self.v)?])
    }
}

/// A tensor `(B, H, T, D)` with contiguous rows, as all kernels read it.
pub(super) fn contiguous_rows(x: &Tensor) -> Result<Tensor> {
    if x.dim(D::Minus1)? == 1 || x.stride()[3] == 1 { Ok(x.clone()) } else { ops::contiguous(x) }
}
