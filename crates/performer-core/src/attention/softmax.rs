//! Exact softmax attention: the baseline, and the truth FAVOR approximates. Fused on the CPU, differentiable Candle ops elsewhere.

use candle_core::{D, DType, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;

use super::{
    Attention, Mask, State,
    input::{FLOOR, Inputs, Rows, check_shapes, rows, values_and_one, visible},
    state::Memory,
};
use crate::kernels::{self, softmax};

/// First capacity of a key-value cache, in tokens; it grows by as much.
const CACHE_TOKENS: usize = 256;

/// `softmax(q·kᵀ/√D) v` with gradients: `O(T²)` time; memory `O(T)` where it is fused (f32, f16 and bf16 on the CPU), `O(T²)`
/// elsewhere.
#[derive(Clone, Debug, Default)]
pub struct Softmax {
    composed: bool,
}

impl Softmax {
    /// Exact attention has no settings.
    pub fn new() -> Self {
        Self::default()
    }

    /// Never uses the fused CPU kernel: the same numbers from Candle's own operations, slower, as a second opinion on it.
    pub fn composed(mut self) -> Self {
        self.composed = true;
        self
    }

    /// With an offset, query `t` sees keys `0..=offset + t`.
    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask, offset: Option<usize>) -> Result<Tensor> {
        if self.composed || !kernels::takes(q) {
            let inputs = Inputs::new(q, k, v, mask)?;
            return inputs.output(&attend(&inputs, offset, None)?.0);
        }
        check_shapes(q, k, v, mask)?;
        let ((b, h, tq, _), (_, _, tk, dv)) = (q.dims4()?, v.dims4()?);
        if b * tq == 0 || tk == 0 {
            return Tensor::zeros((b, h, tq, dv), q.dtype(), q.device());
        }
        let visible = mask.keys().map(visible).transpose()?;
        softmax::softmax(&rows(q)?, &rows(k)?, &rows(v)?, softmax::Seen { offset, window: None, visible }, false)
    }

    /// Attention of query `t` to the last `window` of the keys `0..=offset + t`, and the logarithms of its denominators:
    /// `(B, H, Tq, Dv)` and `(B, H, Tq, 1)`. Nothing is empty.
    pub(super) fn with_logs(
        &self,
        [q, k, v]: [&Tensor; 3],
        mask: &Mask,
        offset: usize,
        window: usize,
    ) -> Result<(Tensor, Tensor)> {
        if self.composed || !kernels::takes(q) {
            let inputs = Inputs::new(q, k, v, mask)?;
            let (values, logs) = attend(&inputs, Some(offset), Some(window))?;
            return Ok((inputs.output(&values)?, inputs.output(&logs)?));
        }
        let dv = v.dim(3)?;
        let visible = mask.keys().map(visible).transpose()?;
        let seen = softmax::Seen { offset: Some(offset), window: Some(window), visible };
        let rows = softmax::softmax(&rows(q)?, &rows(k)?, &rows(v)?, seen, true)?;
        Ok((rows.narrow(3, 0, dv)?, rows.narrow(3, dv, 1)?))
    }
}

impl Attention for Softmax {
    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Tensor> {
        self.attend(q, k, v, mask, if mask.is_causal() { Some(0) } else { None })
    }

    fn extend(&self, q: &Tensor, k: &Tensor, v: &Tensor, state: &mut State) -> Result<Tensor> {
        // The new part before the cache is touched.
        Inputs::new(q, k, v, &Mask::causal())?;
        state.check_batch(q)?;
        let (new, past) = (k.dim(2)?, state.tokens());
        let fresh = || Memory::Cache(KvCache::new(2, CACHE_TOKENS.max(new)));
        let Memory::Cache(cache) = state.memory.get_or_insert_with(fresh) else {
            bail!("state: it was made by linear attention and cannot go on with softmax")
        };
        check_cached("k", k, cache.k()?)?;
        check_cached("v", v, cache.v()?)?;
        let (k, v) = cache.append(&k.detach().contiguous()?, &v.detach().contiguous()?)?;
        state.advance(q)?;
        let q = q.detach();
        // Keys and values were checked when they came.
        if q.dim(2)? == 1 && q.elem_count() > 0 && !self.composed && kernels::takes(&q) {
            return softmax::step(&rows(&q)?, &k, &v);
        }
        self.attend(&q, &k, &v, &Mask::full(), Some(past))
    }
}

/// Refuses `new` keys or values that differ from the cached ones in more than their number.
fn check_cached(name: &str, new: &Tensor, cached: Option<Tensor>) -> Result<()> {
    if let Some(cached) = cached
        && (cached.dtype() != new.dtype() || [0, 1, 3].into_iter().any(|i| cached.dims()[i] != new.dims()[i]))
    {
        bail!(
            "{name} has shape {:?} and dtype {:?} but the state's cache has {:?} and {:?}; a state belongs to one layer and one \
             batch",
            new.dims(),
            new.dtype(),
            cached.dims(),
            cached.dtype()
        );
    }
    Ok(())
}

/// `(N, Tq·G, Dv)` and the logarithms of the denominators, `(N, Tq·G, 1)`. With `offset`, query `t` sees keys `0..=offset + t`; with
/// `window`, the last so many of them.
fn attend(inputs: &Inputs, offset: Option<usize>, window: Option<usize>) -> Result<(Tensor, Tensor)> {
    let (n, tq, g, d) = inputs.q.dims4()?;
    let tk = inputs.k.dim(1)?;
    if n * tq == 0 || tk == 0 {
        let zeros = |width| Tensor::zeros((n, tq * g, width), inputs.v.dtype(), inputs.v.device());
        return Ok((zeros(inputs.v.dim(2)?)?, zeros(1)?));
    }
    let rows = inputs.q.reshape((n, tq * g, d))?;
    let mut scores = rows.matmul(&inputs.k.transpose(1, 2)?.contiguous()?)?;
    if let Some(offset) = offset {
        scores = scores.broadcast_add(&causal_bias([tq, g, tk], offset, window, &scores)?)?;
    }
    if let Some(keys) = &inputs.keys {
        let hidden = Tensor::full(f32::NEG_INFINITY, keys.shape(), keys.device())?.to_dtype(keys.dtype())?;
        let bias = keys.eq(0.0)?.where_cond(&hidden, &keys.zeros_like()?)?;
        scores = scores.broadcast_add(&bias.transpose(1, 2)?)?;
    }
    // The row maximum cancels: a constant to the gradient.
    let max = scores.detach().max_keepdim(D::Minus1)?.maximum(FLOOR)?;
    let weights = scores.broadcast_sub(&max)?.exp()?;
    let num_den = weights.matmul(&values_and_one(&inputs.v, inputs.keys.as_ref())?)?;
    let rows = Rows::new(&num_den, Some(&max))?;
    Ok((rows.values, rows.logs.unwrap_or(max)))
}

/// `(Tq·G, Tk)`: 0 where query `t` may see key `j <= offset + t` among the last `window`, else `−∞`.
fn causal_bias([tq, g, tk]: [usize; 3], offset: usize, window: Option<usize>, like: &Tensor) -> Result<Tensor> {
    let (dtype, device) = (like.dtype(), like.device());
    // Row t·G + g belongs to query t.
    let visible_to: Vec<u32> = (0..tq * g).map(|row| (row / g + offset) as u32).collect();
    let visible_to = Tensor::from_vec(visible_to, (tq * g, 1), device)?;
    let keys = Tensor::arange(0, tk as u32, device)?.reshape((1, tk))?;
    let mut hidden = keys.broadcast_gt(&visible_to)?;
    if let Some(window) = window {
        let far = (keys.to_dtype(DType::F64)? + window as f64)?.broadcast_le(&visible_to.to_dtype(DType::F64)?)?;
        hidden = (hidden + far)?;
    }
    let shape = hidden.shape();
    hidden.where_cond(
        &Tensor::full(f32::NEG_INFINITY, shape, device)?.to_dtype(dtype)?,
        &Tensor::zeros(shape, dtype, device)?,
    )
}
