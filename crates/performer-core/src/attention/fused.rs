//! The fused CPU kernels behind FAVOR: checks, layout, and the state of decoding.

use std::sync::Arc;

use candle_core::{D, DType, Result, Tensor, bail};

use super::{
    Mask, State,
    input::{Inputs, check_head_dim, check_shapes, rows, visible},
    state::Memory,
};
use crate::{
    features::{ExponentialForm, FeatureMap, Features, KeyForm},
    kernels::favor::{self, Exponential, Form, Map, Rectified, Sums, Trained},
};

/// Where the kernels have features from.
#[derive(Debug)]
pub(super) enum Source {
    /// They compute them, by numbers that do not change.
    Constant(Arc<[Map]>),
    /// They compute them, by variables: read at every call, and given gradients.
    Trained,
    /// Candle's operations make them.
    Ready,
}

impl Source {
    /// For the features of `map`.
    pub(super) fn of(map: &dyn FeatureMap) -> Result<Self> {
        if let Some((projection, epsilon)) = map.rectified_form() {
            if !projection.device().is_cpu() || projection.track_op() {
                return Ok(Self::Ready);
            }
            let projection = projection.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            let rectified = Rectified::new(&projection, map.input_dim(), epsilon as f32);
            return Ok(Self::Constant([Map::Rectified(Arc::new(rectified))].into()));
        }
        let Some(form) = map.exponential_form() else { return Ok(Self::Ready) };
        let ExponentialForm { projection, hyperbolic, keys } = &form;
        if !projection.device().is_cpu() {
            return Ok(Self::Ready);
        }
        let of_keys =
            keys.iter().flat_map(|keys| [Some(&keys.projection), Some(&keys.log_weights), keys.metric.as_ref()]);
        if of_keys.flatten().chain([projection]).any(Tensor::track_op) {
            return Ok(if trained(&form).is_some() { Self::Trained } else { Self::Ready });
        }
        let numbers = |t: &Tensor, head| t.get(head)?.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
        let kernel = |head| -> Result<Map> {
            let mut form = Exponential::new(&numbers(projection, head)?, map.input_dim(), *hyperbolic);
            if let Some(keys) = keys {
                let metric = keys.metric.as_ref().map(|p| numbers(p, head)).transpose()?;
                let (rows, weights) = (numbers(&keys.projection, head)?, numbers(&keys.log_weights, head)?);
                form = form.with_keys(&rows, &weights, metric.as_deref());
            }
            Ok(Map::Exponential(Arc::new(form)))
        };
        let maps: Vec<Map> = (0..projection.dim(0)?).map(kernel).collect::<Result<_>>()?;
        Ok(Self::Constant(maps.into()))
    }
}

/// The parameters of a form whose gradients the kernels know: queries' rows, keys' rows, keys' weights.
fn trained(form: &ExponentialForm) -> Option<[&Tensor; 3]> {
    match form {
        ExponentialForm {
            projection,
            hyperbolic: false,
            keys: Some(KeyForm { projection: keys, log_weights, metric: None }),
        } => Some([projection, keys, log_weights]),
        _ => None,
    }
}

/// The parameters of a [`Source::Trained`] map as they are now.
fn parameters(map: &dyn FeatureMap) -> Result<Trained> {
    let form = map.exponential_form();
    let Some([queries, keys, log_weights]) = form.as_ref().and_then(trained) else {
        bail!("feature map {map:?} is no longer of the form that it was made in")
    };
    Trained::new(queries, keys, log_weights)
}

/// Attention in one pass. With `logs`, rows end with the logarithms of their denominators; features must be positive.
pub(super) fn forward(
    map: &dyn FeatureMap,
    source: &Source,
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
    match source {
        Source::Constant(maps) => {
            check_heads(maps, k)?;
            let visible = mask.keys().map(visible).transpose()?;
            let form = Form { maps: Arc::clone(maps), logs };
            favor::favor(&form, &rows(q)?, &rows(k)?, &rows(v)?, visible, mask.is_causal())
        }
        Source::Trained => {
            let trained = parameters(map)?;
            check_heads(trained.maps(), k)?;
            let visible = mask.keys().map(visible).transpose()?;
            trained.favor(&rows(q)?, k, v, visible, mask.is_causal(), logs)
        }
        Source::Ready => {
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
    source: &Source,
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
    let constant = match source {
        Source::Constant(maps) => Some(Arc::clone(maps)),
        Source::Trained => Some(Arc::clone(parameters(map)?.maps())),
        Source::Ready => None,
    };
    let ready;
    let (form, q, k, v) = match constant {
        Some(maps) => {
            check_heads(&maps, k)?;
            (&Form { maps, logs }, &rows(q)?, &rows(k)?, &rows(v)?)
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
pub(super) struct Ready {
    pub(super) form: Form,
    pub(super) q: Tensor,
    pub(super) k: Tensor,
    pub(super) v: Tensor,
}

impl Ready {
    pub(super) fn new(map: &dyn FeatureMap, inputs: &Inputs, logs: bool) -> Result<Self> {
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
