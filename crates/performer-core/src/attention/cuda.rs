//! The fused CUDA kernels behind FAVOR: which form of a map they take, layout, and the state of decoding.

use std::sync::Arc;

use candle_core::{Result, Tensor, bail};

use super::{
    Mask, State,
    fused::Ready,
    input::{Inputs, check_head_dim, check_shapes, rows},
    state::Memory,
};
use crate::{
    features::FeatureMap,
    kernels::{
        cuda::favor::{self, Map, Projection},
        favor::Map as CpuMap,
    },
};

/// Attention in one pass. `projection`: Ω, where the kernels make the map's features.
pub(super) fn forward(
    map: &dyn FeatureMap,
    projection: Option<&Arc<Projection>>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Mask,
) -> Result<Tensor> {
    check_shapes(q, k, v, mask)?;
    check_head_dim(map, q)?;
    let ((b, h, tq, _), (_, _, tk, dv)) = (q.dims4()?, v.dims4()?);
    if b * tq == 0 || tk == 0 {
        return Tensor::zeros((b, h, tq, dv), q.dtype(), q.device());
    }
    let visible = |keys: &Tensor| keys.ne(0.0)?.flatten_all()?.contiguous();
    match projection {
        Some(projection) => {
            let visible = mask.keys().map(visible).transpose()?;
            let map = Map::Exponential(Arc::clone(projection));
            favor::favor(&map, &rows(q)?, &rows(k)?, &rows(v)?, visible, mask.is_causal())
        }
        None => {
            let inputs = Inputs::new(q, k, v, mask)?;
            let ready = Ready::new(map, &inputs, false)?;
            let visible = inputs.keys.as_ref().map(visible).transpose()?;
            favor::favor(&form(&ready)?, &ready.q, &ready.k, &ready.v, visible, mask.is_causal())?
                .reshape((b, h, tq, dv))?
                .to_dtype(q.dtype())
        }
    }
}

/// Causal attention from `state` on.
pub(super) fn extend(
    map: &dyn FeatureMap,
    projection: Option<&Arc<Projection>>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    state: &mut State,
) -> Result<Tensor> {
    check_shapes(q, k, v, &Mask::causal())?;
    check_head_dim(map, q)?;
    let ((b, h, t, _), (_, _, _, dv)) = (q.dims4()?, v.dims4()?);
    if b * t == 0 {
        return Tensor::zeros((b, h, t, dv), q.dtype(), q.device());
    }
    let mut sums = match state.memory.take() {
        None => None,
        Some(Memory::Cuda(sums)) => Some(sums),
        other => {
            state.memory = other;
            bail!("state: it was made by another attention, or elsewhere, and cannot go on with FAVOR on CUDA")
        }
    };
    // After an error the sums are what they were.
    let out = match projection {
        Some(projection) => {
            let map = Map::Exponential(Arc::clone(projection));
            rows(q).and_then(|q| favor::extend(&map, &q, &rows(k)?, &rows(v)?, &mut sums))
        }
        None => Inputs::new(q, k, v, &Mask::causal())
            .and_then(|inputs| Ready::new(map, &inputs, false))
            .and_then(|ready| favor::extend(&form(&ready)?, &ready.q, &ready.k, &ready.v, &mut sums)),
    };
    state.memory = sums.map(Memory::Cuda);
    out?.reshape((b, h, t, dv))?.to_dtype(q.dtype())
}

/// What ready features are to the CUDA kernels.
fn form(ready: &Ready) -> Result<Map> {
    match &ready.form.maps[0] {
        CpuMap::Log { features } => Ok(Map::Log { features: *features }),
        CpuMap::Signed { features } => Ok(Map::Signed { features: *features }),
        CpuMap::Exponential(_) | CpuMap::Rectified(_) => bail!("ready features have no projection"),
    }
}
