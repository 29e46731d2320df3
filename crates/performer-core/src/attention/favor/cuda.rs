//! FAVOR by the fused kernels for CUDA: which maps and sizes they take, and what they remember.

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};

use super::{
    backend::{Backend, Call, Output},
    ready::{Ready, ReadyForm},
};
use crate::{
    attention::{Memory, Path, State, StateRecord, inputs::rows},
    features::{ExponentialForm, FeatureMap},
    kernels::cuda::favor::{self, Map, Projection, Sums},
    ops,
};

/// The fused kernels for CUDA, prepared for one feature map.
#[derive(Debug)]
pub(super) struct Cuda {
    /// Ω on the card, where the kernels compute the map's features; Candle's operations do
    /// otherwise.
    projection: Option<Arc<Projection>>,
}

impl Cuda {
    /// Prepares the kernels for `map`.
    pub(super) fn new(map: &dyn FeatureMap) -> Result<Self> {
        let Some(ExponentialForm { projection, hyperbolic, keys }) = map.exponential_form() else {
            return Ok(Self { projection: None });
        };
        // Maps of several heads, and those whose keys differ, come to these kernels as ready
        // features.
        if keys.is_some() || projection.dim(0)? != 1 || !projection.device().is_cuda() {
            return Ok(Self { projection: None });
        }
        Ok(Self { projection: Some(Arc::new(Projection::new(&projection.squeeze(0)?, hyperbolic)?)) })
    }
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
fn gates(call: &Call<'_>, folded: bool) -> Result<Option<Tensor>> {
    let sizes = call.sizes;
    let shape = if folded {
        (sizes.batch * sizes.key_heads, 1, sizes.keys)
    } else {
        (sizes.batch, sizes.key_heads, sizes.keys)
    };
    let take = |gates: &Tensor| ops::reshape(&ops::contiguous(&ops::to_dtype(gates, DType::F32)?)?, shape);
    call.inputs.gates.map(take).transpose()
}

impl Backend for Cuda {
    fn path(&self) -> Path {
        Path::Fused { device: "CUDA" }
    }

    fn refusal(&self, call: &Call<'_>) -> Option<String> {
        let (q, v) = (call.inputs.q, call.inputs.v);
        if !q.device().is_cuda() {
            Some("the CUDA kernels take tensors on a CUDA device".into())
        } else if call.logs && call.decoding.is_some() {
            Some(
                "the CUDA kernels that go on from a state return no logarithms of denominators, which a window needs"
                    .into(),
            )
        } else if call.logs && q.dtype() != DType::F32 {
            Some("the CUDA kernels return logarithms of denominators, which a window needs, in f32 alone".into())
        } else if !favor::takes(q, v, call.map.feature_dim()) {
            Some(format!(
                "the CUDA kernels do not take {:?} with heads of {} and {} and {} features",
                q.dtype(),
                call.sizes.head_dim,
                call.sizes.value_dim,
                call.map.feature_dim()
            ))
        } else {
            None
        }
    }

    fn forward(&self, call: &Call<'_>) -> Result<Output> {
        let (q, k, v) = (call.inputs.q, call.inputs.k, call.inputs.v);
        let (sizes, causal) = (call.sizes, call.mask.is_causal());
        match &self.projection {
            Some(projection) => {
                let visible = call.mask.visible_of(sizes.batch)?;
                let visible = visible.map(|visible| visible.flatten_all()?.contiguous()).transpose()?;
                let (map, gates) = (Map::Exponential(Arc::clone(projection)), gates(call, false)?);
                let qkv = [&rows(q)?, &rows(k)?, &rows(v)?];
                let (values, logs) = favor::favor(&map, qkv, gates.as_ref(), visible, causal, call.logs)?;
                // The kernels leave the factor 1/√M out of the features of keys as well.
                let of_keys = 0.5 * (call.map.feature_dim() as f64).ln();
                let complete = |logs: Tensor| ops::sub(&logs, &ops::affine(&call.query_offset()?, 1.0, of_keys)?);
                Ok(Output { values, logs: logs.map(complete).transpose()? })
            }
            None => {
                let (ready, gates) = (Ready::new(call)?, gates(call, true)?);
                let (visible, qkv) = (ready.visible.clone(), [&ready.q, &ready.k, &ready.v]);
                let (values, logs) = favor::favor(&form(&ready), qkv, gates.as_ref(), visible, causal, call.logs)?;
                let unfold = |rows: Tensor, width: usize| {
                    let rows = ops::reshape(&rows, (sizes.batch, sizes.heads, sizes.queries, width))?;
                    ops::to_dtype(&rows, q.dtype())
                };
                let logs = logs.map(|logs| unfold(logs, 1)).transpose()?;
                Ok(Output { values: unfold(values, sizes.value_dim)?, logs })
            }
        }
    }

    fn advance(&self, call: &Call<'_>, state: &mut State) -> Result<Output> {
        let (q, k, v) = (call.inputs.q, call.inputs.k, call.inputs.v);
        let heads = [call.sizes.batch, call.sizes.key_heads];
        let mut sums = state.take::<CudaSums>()?.map(|memory| memory.0);
        // After an error the sums are what they were.
        let out = match &self.projection {
            Some(projection) => {
                let map = Map::Exponential(Arc::clone(projection));
                gates(call, false).and_then(|gates| {
                    favor::extend(&map, [&rows(q)?, &rows(k)?, &rows(v)?], gates.as_ref(), heads, &mut sums)
                })
            }
            None => Ready::new(call).and_then(|ready| {
                let qkv = [&ready.q, &ready.k, &ready.v];
                favor::extend(&form(&ready), qkv, gates(call, true)?.as_ref(), heads, &mut sums)
            }),
        };
        if let Some(sums) = sums {
            state.set(CudaSums(sums));
        }
        let sizes = call.sizes;
        let values = out?.reshape((sizes.batch, sizes.heads, sizes.queries, sizes.value_dim))?.to_dtype(q.dtype())?;
        Ok(Output { values, logs: None })
    }
}

/// Prefix sums of the CUDA kernels. Scales are logarithms to base 2 and sizes are padded, so a
/// state goes on where it began: on CUDA, or on the CPU.
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
