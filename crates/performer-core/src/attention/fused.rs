//! The fused CPU kernels behind FAVOR: checks, layout, and the state of decoding.

use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor, bail};

use super::{
    Mask, State,
    input::{Inputs, check_head_dim, check_shapes, rows, visible},
    state::Memory,
};
use crate::{
    features::{FeatureMap, Features},
    kernels::favor::{self, Form, Map, Sums},
};

/// Attention in one pass. `maps`: the feature map in the kernels' own form, if it has one. With `logs`, rows end with the logarithms
/// of their denominators; features must be positive.
pub(super) fn forward(
    map: &dyn FeatureMap,
    maps: Option<&Arc<[Map]>>,
    [q, k, v]: [&Tensor; 3],
    mask: &Mask,
    logs: bool,
) -> Result<Tensor> {
    check_shapes(q, k, v, mask)?;
    check_head_dim(map, q)?;
    let ((b, h, tq, _), (_, _, tk, dv)) = (q.dims4()?, v.dims4()?);
    if b * tq == 0 || tk == 0 {
        return Tensor::zeros((b, h, tq, dv), q.dtype(), q.device());
    }
    match maps {
        Some(maps) => {
            check_heads(maps, k)?;
            let visible = mask.keys().map(visible).transpose()?;
            let form = Form { maps: Arc::clone(maps), logs };
            favor::favor(&form, &rows(q)?, &rows(k)?, &rows(v)?, visible, mask.is_causal())
        }
        None => {
            let inputs = Inputs::new(q, k, v, mask)?;
            let ready = Ready::new(map, &inputs, logs)?;
            let visible = inputs.keys.as_ref().map(visible).transpose()?;
            favor::favor(&ready.form, &ready.q, &ready.k, &ready.v, visible, mask.is_causal())?
                .reshape((b, h, tq, dv + usize::from(logs)))?
                .to_dtype(q.dtype())
        }
    }
}

/// Causal attention from `state` on.
pub(super) fn extend(
    map: &dyn FeatureMap,
    maps: Option<&Arc<[Map]>>,
    [q, k, v]: [&Tensor; 3],
    state: &mut State,
    logs: bool,
) -> Result<Tensor> {
    check_shapes(q, k, v, &Mask::causal())?;
    check_head_dim(map, q)?;
    let ((b, h, t, _), (_, hkv, _, dv)) = (q.dims4()?, v.dims4()?);
    if b * t == 0 {
        return Tensor::zeros((b, h, t, dv), q.dtype(), q.device());
    }
    let dtype = q.dtype();
    let ready;
    let (form, q, k, v) = match maps {
        Some(maps) => {
            check_heads(maps, k)?;
            (&Form { maps: Arc::clone(maps), logs }, &rows(q)?, &rows(k)?, &rows(v)?)
        }
        None => {
            ready = Ready::new(map, &Inputs::new(q, k, v, &Mask::causal())?, logs)?;
            (&ready.form, &ready.q, &ready.k, &ready.v)
        }
    };
    let fresh: Sums = form.fresh(dv);
    let heads = b * hkv;
    if let Some(memory) = &state.memory {
        let Memory::Kernel(sums) = memory else {
            bail!("state: it was made by another attention and cannot go on with FAVOR")
        };
        if sums.len() != heads || sums.iter().any(|sums| !sums.same_sizes(&fresh)) {
            bail!(
                "state: it holds sums of {} heads, {}, but this input needs {heads}, {}; a state belongs to one layer and one batch",
                sums.len(),
                sums[0].describe(),
                fresh.describe()
            );
        }
    }
    let mut sums = match state.memory.take() {
        Some(Memory::Kernel(sums)) => sums,
        _ => vec![fresh; heads],
    };
    // After an error the sums are what they were.
    let out = favor::extend(form, q, k, v, &mut sums, state.tokens() > 0);
    if state.tokens() > 0 || out.is_ok() {
        state.memory = Some(Memory::Kernel(sums));
    }
    out?.reshape((b, h, t, dv + usize::from(logs)))?.to_dtype(dtype)
}

/// Refuses keys `(B, Hkv, T, D)` of other heads than those the maps were fitted to.
fn check_heads(maps: &[Map], k: &Tensor) -> Result<()> {
    let heads = k.dim(1)?;
    if maps.len() != 1 && maps.len() != heads {
        bail!("k has shape {:?}; the feature map was fitted to {} key heads", k.dims(), maps.len());
    }
    Ok(())
}

/// Features that are computed in Candle's ops and handed to the kernel: heads folded into the batch.
struct Ready {
    form: Form,
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Ready {
    fn new(map: &dyn FeatureMap, inputs: &Inputs, logs: bool) -> Result<Self> {
        let features = map.feature_dim();
        let (map, q, k) = match (map.features(&inputs.q)?, map.key_features(&inputs.k)?) {
            (Features::Log(q), Features::Log(k)) => (Map::Log { features }, q, k),
            (Features::Linear { values: q, .. }, Features::Linear { values: k, log_scale }) => {
                let scale = match log_scale {
                    Some(scale) => scale,
                    None => k.narrow(D::Minus1, 0, 1)?.zeros_like()?,
                };
                (Map::Signed { features }, q, Tensor::cat(&[&k, &scale], D::Minus1)?)
            }
            _ => bail!("feature map {map:?} returned two kinds of features"),
        };
        debug_assert_eq!(q.dtype(), DType::F32);
        let form = Form { logs, ..Form::of(map) };
        Ok(Self { form, q: rows(&q.transpose(1, 2)?)?, k: rows(&k.unsqueeze(1)?)?, v: inputs.v.unsqueeze(1)? })
    }
}
