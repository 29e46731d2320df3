//! FAVOR by the fused kernels for CUDA: which maps and sizes they take, and what they remember.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::{
    backend::{Backend, Call, Fused, Output, check_heads, join_parameters, trained_parameters},
    ready::{Ready, ReadyForm},
};
use crate::{
    attention::{Memory, State, StateRecord, gates},
    features::{ExponentialForm, FeatureMap},
    kernels::cuda::favor::{self, Map, OwnKeys, Projection, Sums},
    ops,
};

/// The fused kernels for CUDA, prepared for one feature map.
#[derive(Debug)]
pub(super) struct Cuda {
    source: Source,
}

/// Where the kernels get features from.
#[derive(Debug)]
enum Source {
    /// The kernels compute features, by numbers that do not change.
    Constant(Map),
    /// The kernels compute features by variables, which are read at every call and given gradients.
    Trained,
    /// Features are computed before, by Candle's operations or a kernel of their own, and the
    /// kernels of attention read them.
    Ready,
}

impl Source {
    /// The source for the features of `map`.
    fn of(map: &dyn FeatureMap) -> Result<Self> {
        let Some(form) = map.exponential_form() else { return Ok(Self::Ready) };
        let ExponentialForm { projection, hyperbolic, keys } = &form;
        if !projection.device().is_cuda() {
            return Ok(Self::Ready);
        }
        if form.tracked() {
            return Ok(if form.trained().is_some() { Self::Trained } else { Self::Ready });
        }
        Ok(match keys {
            None if projection.dim(0)? == 1 => {
                Self::Constant(Map::Exponential(Arc::new(Projection::new(&projection.squeeze(0)?, *hyperbolic)?)))
            }
            None => Self::Ready,
            Some(_) if *hyperbolic => Self::Ready,
            Some(keys) => {
                let numbers = [projection, &keys.projection, &keys.log_weights];
                Self::Constant(Map::OwnKeys(Arc::new(OwnKeys::lasting(numbers, keys.metric.as_ref())?)))
            }
        })
    }
}

impl Cuda {
    /// Prepares the kernels for `map`.
    pub(super) fn new(map: &dyn FeatureMap) -> Result<Self> {
        Ok(Self { source: Source::of(map)? })
    }

    /// The map of a call, where the kernels compute its features.
    fn computed(&self, call: &Call<'_>) -> Result<Option<Map>> {
        let map = match &self.source {
            Source::Ready => return Ok(None),
            Source::Constant(map) => map.clone(),
            Source::Trained => {
                let form = call.map.exponential_form();
                Map::OwnKeys(Arc::new(OwnKeys::of_a_call(trained_parameters(call.map, form.as_ref())?, None)?))
            }
        };
        if let Map::OwnKeys(map) = &map {
            check_heads(map.heads(), call.inputs.k)?;
        }
        Ok(Some(map))
    }

    /// The parameters that get gradients, see [`join_parameters`].
    fn parameters(&self, call: &Call<'_>) -> Result<Option<Tensor>> {
        let Source::Trained = self.source else { return Ok(None) };
        let form = call.map.exponential_form();
        Ok(Some(join_parameters(trained_parameters(call.map, form.as_ref())?)?))
    }
}

/// Adds to logarithms of denominators what the kernels leave out where they compute features: the
/// factor common to all features of a query, and the factor `1/√F` of keys.
fn complete(call: &Call<'_>, out: Output) -> Result<Output> {
    let of_keys = 0.5 * (call.map.feature_dim() as f64).ln();
    let complete = |logs: Tensor| ops::sub(&logs, &ops::affine(&call.query_offset()?, 1.0, of_keys)?);
    Ok(Output { logs: out.logs.map(complete).transpose()?, ..out })
}

/// Ready features as the kernels take them.
fn form(ready: &Ready) -> Map {
    let features = ready.features;
    match ready.form {
        ReadyForm::Log => Map::Log { features },
        ReadyForm::Signed => Map::Signed { features },
    }
}

/// Gates as the kernels take them: f32, contiguous. Heads of ready features are folded into the
/// batch.
fn gates_of(call: &Call<'_>, folded: bool) -> Result<Option<Tensor>> {
    let sizes = call.sizes;
    let shape = if folded {
        (sizes.batch * sizes.key_heads, 1, sizes.keys)
    } else {
        (sizes.batch, sizes.key_heads, sizes.keys)
    };
    let take = |gates: &Tensor| ops::reshape(&gates::for_kernels(gates)?, shape);
    call.inputs.gates.map(take).transpose()
}

impl Fused for Cuda {
    fn device(&self) -> &'static str {
        "CUDA"
    }

    fn refusal(&self, call: &Call<'_>) -> Option<String> {
        let (q, v) = (call.inputs.q, call.inputs.v);
        if !q.device().is_cuda() {
            Some("the CUDA kernels take tensors on a CUDA device".into())
        } else if call.logs && q.dtype() != DType::F32 {
            Some("the CUDA kernels return logarithms of denominators, which a window needs, in f32 alone".into())
        } else if !favor::takes(q, v, call.map.feature_dim(), !matches!(self.source, Source::Ready)) {
            Some(format!(
                "the CUDA kernels do not take {:?} with heads of {} and {} and {} features, or have no room for them in \
                 this card's shared memory",
                q.dtype(),
                call.sizes.head_dim,
                call.sizes.value_dim,
                call.map.feature_dim()
            ))
        } else {
            None
        }
    }
}

impl Backend for Cuda {
    fn forward(&self, call: &Call<'_>) -> Result<Output> {
        let causal = call.mask.is_causal();
        let Some(map) = self.computed(call)? else {
            let (ready, folded) = match Ready::unfolded(call)? {
                Some(ready) => (ready, false),
                None => (Ready::new(call)?, true),
            };
            let gates = gates_of(call, folded)?;
            let (visible, qkv) = (ready.visible.clone(), [&ready.q, &ready.k, &ready.v]);
            let beside = [gates.as_ref(), None];
            let rows = favor::favor(&form(&ready), qkv, beside, visible, causal, call.logs)?;
            return Output::of_rows(call, call.unfolded(&rows)?);
        };
        let visible = call.mask.visible_of(call.sizes.batch, call.inputs.q.device())?;
        let visible = visible.map(|visible| visible.flatten_all()?.contiguous()).transpose()?;
        let (gates, parameters) = (gates_of(call, false)?, self.parameters(call)?);
        let (qkv, beside) = (call.inputs.contiguous_rows()?, [gates.as_ref(), parameters.as_ref()]);
        let rows = favor::favor(&map, qkv.each_ref(), beside, visible, causal, call.logs)?;
        complete(call, Output::of_rows(call, rows)?)
    }

    fn advance(&self, call: &Call<'_>, state: &mut State) -> Result<Output> {
        let heads = [call.sizes.batch, call.sizes.key_heads];
        let mut sums = state.take::<CudaSums>()?.map(|memory| memory.0);
        // After an error the sums are what they were.
        let mut extend = || -> Result<Output> {
            let Some(map) = self.computed(call)? else {
                let ready = Ready::new(call)?;
                let (qkv, gates) = ([&ready.q, &ready.k, &ready.v], gates_of(call, true)?);
                let rows = favor::extend(&form(&ready), qkv, gates.as_ref(), call.logs, heads, &mut sums)?;
                return Output::of_rows(call, call.unfolded(&rows)?);
            };
            let (qkv, gates) = (call.inputs.contiguous_rows()?, gates_of(call, false)?);
            let rows = favor::extend(&map, qkv.each_ref(), gates.as_ref(), call.logs, heads, &mut sums)?;
            complete(call, Output::of_rows(call, rows)?)
        };
        let out = extend();
        if let Some(sums) = sums {
            state.set(CudaSums(sums));
        }
        out
    }
}

/// Prefix sums of the CUDA kernels. Scales are logarithms to base 2 and sizes are padded, so a
/// state that began on one kind of device cannot be continued on another.
#[derive(Clone, Debug)]
struct CudaSums(Sums);

impl Memory for CudaSums {
    fn kind() -> &'static str {
        "prefix sums of the fused CUDA kernels"
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        // The kernels write each state's sums into memory of their own.
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        let [scale, norm, sums] = self.0.save()?;
        Ok(StateRecord::new().with_tensor("scale", scale).with_tensor("norm", norm).with_tensor("sums", sums))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        Ok(Self(Sums::load([record.tensor("scale")?, record.tensor("norm")?, record.tensor("sums")?])?))
    }
}
