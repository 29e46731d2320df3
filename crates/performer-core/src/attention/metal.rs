//! The fused Metal kernel behind FAVOR: when it is taken, layout, and the state of decoding.

use candle_core::{DType, Result, Tensor, bail};

use super::{
    Mask, PrefixSums, State,
    input::{check_head_dim, check_shapes, rows},
    state::Memory,
};
use crate::{
    features::{ExponentialForm, FeatureMap},
    kernels::metal::{Projection, favor},
};

/// Ω on the device, if the kernel can make the map's features: positive ones of one projection for all heads, which is no variable.
pub(super) fn projection(map: &dyn FeatureMap) -> Result<Option<Projection>> {
    let Some(ExponentialForm { projection, hyperbolic, keys: None }) = map.exponential_form() else { return Ok(None) };
    if projection.dim(0)? != 1 || !projection.device().is_metal() || projection.track_op() {
        return Ok(None);
    }
    Ok(Some(Projection::new(&projection.squeeze(0)?, hyperbolic)?))
}

/// Whether the kernel takes causal attention over these, which want no gradient; others go through composed operations.
pub(super) fn takes(map: &dyn FeatureMap, [q, k, v]: [&Tensor; 3]) -> bool {
    favor::takes(q, v, map.feature_dim()) && ![q, k, v].iter().any(|t| t.track_op())
}

/// Causal attention in one pass.
pub(super) fn forward(
    map: &dyn FeatureMap,
    projection: &Projection,
    [q, k, v]: [&Tensor; 3],
    mask: &Mask,
) -> Result<Tensor> {
    check_shapes(q, k, v, mask)?;
    check_head_dim(map, q)?;
    let visible = mask.keys().map(|keys| keys.ne(0.0)?.contiguous()).transpose()?;
    Ok(favor::favor(projection, [&rows(q)?, &rows(k)?, &rows(v)?], visible.as_ref(), None, false)?.0)
}

/// Causal attention from `state` on, which composed operations can go on from, and it from theirs.
pub(super) fn extend(
    map: &dyn FeatureMap,
    projection: &Projection,
    [q, k, v]: [&Tensor; 3],
    state: &mut State,
) -> Result<Tensor> {
    check_shapes(q, k, v, &Mask::causal())?;
    check_head_dim(map, q)?;
    let (b, hkv, _, dv) = v.dims4()?;
    let before = match &state.memory {
        None => None,
        Some(Memory::Sums(PrefixSums { log_scale, sums })) => Some([log_scale.contiguous()?, sums.contiguous()?]),
        Some(_) => bail!("state: it was made by another attention and cannot go on with FAVOR on Metal"),
    };
    if let Some(Memory::Sums(sums)) = &state.memory {
        let features = map.feature_dim();
        sums.check([b * hkv, features, dv + 1], [b * hkv, 1, features], DType::F32)?;
    }
    let (out, after) = favor::favor(projection, [&rows(q)?, &rows(k)?, &rows(v)?], None, before.as_ref(), true)?;
    state.memory = after.map(|[log_scale, sums]| Memory::Sums(PrefixSums { log_scale, sums }));
    Ok(out)
}
