//! Linear attention over all keys at once: `φ(Q) (φ(K)ᵀ [V, 1])`, bidirectional or across
//! sequences.
//!
//! Every row sees all visible keys, so log-features `l_r` are scaled by one maximum over the keys
//! for each feature: with `c_r = max_j l_r(k_j)` the weights `exp(l_r(k_j) − c_r)` of the keys are
//! at most 1, and so are a query's weights `exp(l_r(q) + c_r − max_s(l_s(q) + c_s))`, the largest
//! of which is exactly 1. Nothing overflows, the denominator is at least 1 where a key is visible,
//! and no ε is needed. Other features are divided by the largest scale of a key, if they have one.

use candle_core::{D, Result, Tensor};

use crate::{
    attention::{
        layout::Folded,
        quotient::{normalise, values_and_one},
    },
    features::{FeatureMap, Pair},
    kernels::FLOOR,
};

/// Computes attention of all queries over all visible keys, `(N, Tq·G, Dv)`.
pub(super) fn attend(map: &dyn FeatureMap, inputs: &Folded) -> Result<Tensor> {
    let (n, tq, g, _) = inputs.q.dims4()?;
    let f = map.feature_dim();
    let v1 = values_and_one(&inputs.v, inputs.visible.as_ref())?;
    let num_den = match Pair::of(map, &inputs.q, &inputs.k)? {
        Pair::Log { q: lq, k: lk } => {
            let lk = hide(&lk, inputs.visible.as_ref())?;
            let c = lk.detach().max_keepdim(1)?.maximum(FLOOR)?;
            let sums = lk.broadcast_sub(&c)?.exp()?.transpose(1, 2)?.contiguous()?.matmul(&v1)?;
            query_weights(&lq.reshape((n, tq * g, f))?, &c)?.0.matmul(&sums)?
        }
        Pair::Linear { q, k, log_scale } => {
            let k = match log_scale {
                None => k,
                Some(scale) => {
                    let scale = hide(&scale, inputs.visible.as_ref())?;
                    let c = scale.detach().max_keepdim(1)?.maximum(FLOOR)?;
                    k.broadcast_mul(&scale.broadcast_sub(&c)?.exp()?)?
                }
            };
            q.reshape((n, tq * g, f))?.matmul(&k.transpose(1, 2)?.contiguous()?.matmul(&v1)?)?
        }
    };
    normalise(&num_den)
}

/// Computes `exp(lq + c − max_r(lq + c))`: rows of features relative to the keys' scale `c`; and
/// that maximum, which cancels.
pub(super) fn query_weights(lq: &Tensor, c: &Tensor) -> Result<(Tensor, Tensor)> {
    let shifted = lq.broadcast_add(c)?;
    let max = shifted.detach().max_keepdim(D::Minus1)?;
    Ok((shifted.broadcast_sub(&max)?.exp()?, max))
}

/// Sets the rows of hidden keys to `−∞`: they must not raise a maximum.
pub(super) fn hide(log: &Tensor, keys: Option<&Tensor>) -> Result<Tensor> {
    let Some(keys) = keys else { return Ok(log.clone()) };
    let hidden = Tensor::full(f32::NEG_INFINITY, log.shape(), log.device())?.to_dtype(log.dtype())?;
    keys.ne(0.0)?.expand(log.shape())?.contiguous()?.where_cond(log, &hidden)
}
