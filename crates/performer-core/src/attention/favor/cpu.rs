//! FAVOR by the fused kernels for the CPU: where they get the features of a map from, and what they
//! remember.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{
    backend::{Backend, Call, Fused, Output, check_heads, join_parameters, trained_parameters},
    ready::{Ready, ReadyForm},
};
use crate::{
    attention::{Memory, State, StateRecord, gates},
    features::{ExponentialForm, FeatureMap},
    kernels::{
        self,
        favor::{self, Exponential, Form, Map, Quadratic, Rectified, Sums, Trained},
    },
    ops,
};

/// The fused kernels for the CPU, prepared for one feature map.
#[derive(Debug)]
pub(super) struct Cpu {
    source: Source,
}

/// Where the kernels get features from.
#[derive(Debug)]
enum Source {
    /// The kernels compute features, by numbers that do not change: one map for all key heads, or
    /// one for each.
    Constant(Arc<[Map]>),
    /// The kernels compute features by variables, which are read at every call and given gradients.
    Trained,
    /// Candle's operations compute features, and the kernels read them.
    Ready,
}

impl Source {
    /// The source for the features of `map`.
    fn of(map: &dyn FeatureMap) -> Result<Self> {
        if let Some((projection, epsilon)) = map.rectified_form() {
            if !projection.device().is_cpu() || projection.track_op() {
                return Ok(Self::Ready);
            }
            let projection = projection.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            let rectified = Rectified::new(&projection, map.input_dim(), epsilon as f32);
            return Ok(Self::Constant([Map::Rectified(Arc::new(rectified))].into()));
        }
        if let Some(second) = map.quadratic_form() {
            let quadratic = Quadratic::new(map.input_dim(), second);
            return Ok(Self::Constant([Map::Quadratic(Arc::new(quadratic))].into()));
        }
        let Some(form) = map.exponential_form() else { return Ok(Self::Ready) };
        let ExponentialForm { projection, hyperbolic, keys } = &form;
        // The kernels weight keys' features of one sign only.
        if !projection.device().is_cpu() || *hyperbolic && keys.is_some() {
            return Ok(Self::Ready);
        }
        if form.tracked() {
            return Ok(if form.trained().is_some() { Self::Trained } else { Self::Ready });
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

/// The parameters of a [`Source::Trained`] map as they are now.
fn parameters(map: &dyn FeatureMap) -> Result<Trained> {
    let form = map.exponential_form();
    let parameters = trained_parameters(map, form.as_ref())?;
    let (_, m, d) = parameters[0].dims3()?;
    Trained::new(join_parameters(parameters)?, [m, d])
}

/// Ready features as the kernels take them.
fn form(ready: &Ready, logs: bool) -> Form {
    let features = ready.features;
    let map = match ready.form {
        ReadyForm::Log => Map::Log { features },
        ReadyForm::Signed => Map::Signed { features },
    };
    Form { maps: [map].into(), logs }
}

impl Cpu {
    /// Prepares the kernels for `map`.
    pub(super) fn new(map: &dyn FeatureMap) -> Result<Self> {
        Ok(Self { source: Source::of(map)? })
    }

    /// Splits what the kernels return into values and logarithms.
    fn output(&self, call: &Call<'_>, rows: Tensor) -> Result<Output> {
        let out = Output::of_rows(call, rows)?;
        // Ready features hold all of a feature; where the kernels make them, they leave out what
        // all features of a query share.
        if matches!(self.source, Source::Ready) {
            return Ok(out);
        }
        let logs = out.logs.map(|logs| ops::sub(&logs, &call.query_offset()?)).transpose()?;
        Ok(Output { logs, ..out })
    }
}

impl Fused for Cpu {
    fn device(&self) -> &'static str {
        "CPU"
    }

    fn refusal(&self, call: &Call<'_>) -> Option<String> {
        let q = call.inputs.q;
        if !matches!(q.device(), Device::Cpu) {
            Some("the CPU's kernels take tensors on the CPU".into())
        } else if !kernels::takes(q) {
            Some(format!("the CPU's kernels take f32, f16 and bf16, not {:?}", q.dtype()))
        } else {
            None
        }
    }
}

impl Backend for Cpu {
    fn forward(&self, call: &Call<'_>) -> Result<Output> {
        let (inputs, sizes, causal) = (call.inputs, call.sizes, call.mask.is_causal());
        let visible = || call.mask.visible_flags(sizes.batch);
        let gates = inputs.gates.map(gates::for_kernels).transpose()?;
        let gates = gates.as_ref();
        let rows = match &self.source {
            Source::Constant(maps) => {
                check_heads(maps.len(), inputs.k)?;
                let form = Form { maps: Arc::clone(maps), logs: call.logs };
                favor::favor(form, inputs.contiguous_rows()?.each_ref(), gates, visible()?, causal)?
            }
            Source::Trained => {
                let trained = parameters(call.map)?;
                check_heads(trained.maps().len(), inputs.k)?;
                trained.favor(inputs.contiguous_rows()?.each_ref(), gates, visible()?, causal, call.logs)?
            }
            Source::Ready => {
                let ready = Ready::new(call)?;
                let flags =
                    |t: &Tensor| Ok::<_, candle_core::Error>(t.to_vec1::<u8>()?.iter().map(|&x| x != 0).collect());
                let visible = ready.visible.as_ref().map(flags).transpose()?;
                let qkv = [&ready.q, &ready.k, &ready.v];
                call.unfolded(&favor::favor(form(&ready, call.logs), qkv, gates, visible, causal)?)?
            }
        };
        self.output(call, rows)
    }

    fn advance(&self, call: &Call<'_>, state: &mut State) -> Result<Output> {
        let (inputs, sizes) = (call.inputs, call.sizes);
        let numbers = |gates: &Tensor| gates::for_kernels(gates)?.flatten_all()?.to_vec1::<f32>();
        let gates = inputs.gates.map(numbers).transpose()?;
        let constant = match &self.source {
            Source::Constant(maps) => Some(Arc::clone(maps)),
            Source::Trained => Some(Arc::clone(parameters(call.map)?.maps())),
            Source::Ready => None,
        };
        let (form, qkv) = match constant {
            Some(maps) => {
                check_heads(maps.len(), inputs.k)?;
                (Form { maps, logs: call.logs }, inputs.contiguous_rows()?)
            }
            None => {
                let ready = Ready::new(call)?;
                (form(&ready, call.logs), [ready.q, ready.k, ready.v])
            }
        };
        let fresh: Sums = form.fresh(sizes.value_dim);
        let heads = sizes.batch * sizes.key_heads;
        let mut memory = match state.take::<KernelSums>()? {
            None => KernelSums { batch: sizes.batch, heads: vec![fresh; heads] },
            Some(memory) => {
                if memory.heads.len() != heads || memory.heads.iter().any(|sums| !sums.same_sizes(&fresh)) {
                    let had = memory.heads.len();
                    let has = memory.heads.first().map_or_else(|| "none".into(), Sums::describe);
                    state.set(memory);
                    bail!(
                        "state: it holds sums of {had} heads, {has}, but this input needs {heads}, {}; a state \
                         belongs to one layer and one batch",
                        fresh.describe()
                    );
                }
                memory
            }
        };
        // After an error the sums are what they were.
        let out = favor::extend(&form, qkv.each_ref(), gates.as_deref(), &mut memory.heads, call.begun);
        if call.begun || out.is_ok() {
            state.set(memory);
        }
        self.output(call, call.unfolded(&out?)?)
    }
}

/// Prefix sums of the fused kernels, by sequence and key head.
#[derive(Clone, Debug)]
struct KernelSums {
    batch: usize,
    heads: Vec<Sums>,
}

impl Memory for KernelSums {
    fn kind() -> &'static str {
        "prefix sums of the fused CPU kernels"
    }

    fn bytes(&self) -> usize {
        self.heads.iter().map(Sums::bytes).sum()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        let key_heads = self.heads.len() / self.batch.max(1);
        let mut record = StateRecord::new();
        for (name, numbers) in
            [("scale", Sums::scale as fn(&Sums) -> (Vec<f32>, [usize; 2])), ("norm", Sums::norm), ("sums", Sums::sums)]
        {
            let heads: Vec<_> = self.heads.iter().map(numbers).collect();
            let [rows, width] = heads.first().map_or([0, 0], |(_, dims)| *dims);
            let numbers: Vec<f32> = heads.into_iter().flat_map(|(numbers, _)| numbers).collect();
            let tensor = Tensor::from_vec(numbers, (self.batch, key_heads, rows, width), &Device::Cpu)?;
            record = record.with_tensor(name, tensor);
        }
        Ok(record)
    }

    fn load(record: &StateRecord) -> Result<Self> {
        let [scale, norm, sums] = ["scale", "norm", "sums"].map(|name| record.tensor(name));
        let (scale, norm, sums) = (scale?, norm?, sums?);
        let ((batch, key_heads, features, values), scales) = (sums.dims4()?, scale.dim(candle_core::D::Minus1)?);
        let right = features > 0
            && values > 0
            && scale.dims() == [batch, key_heads, 1, scales]
            && norm.dims() == [batch, key_heads, 1, features]
            && [1, features].contains(&scales)
            && [scale, norm, sums].iter().all(|t| t.dtype() == DType::F32);
        if !right {
            bail!(
                "saved state: sums {:?}, norms {:?} and scales {:?} do not belong together",
                sums.dims(),
                norm.dims(),
                scale.dims()
            );
        }
        let by_head = |t: &Tensor| t.flatten(0, 1)?.flatten_from(1)?.to_vec2::<f32>();
        let (scale, norm, sums) = (by_head(scale)?, by_head(norm)?, by_head(sums)?);
        let heads = scale.iter().zip(&norm).zip(&sums);
        let heads = heads.map(|((scale, norm), sums)| Sums::of(scale, norm, sums, values)).collect();
        Ok(Self { batch, heads })
    }
}
