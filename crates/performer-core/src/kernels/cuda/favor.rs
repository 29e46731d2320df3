//! FAVOR on CUDA: one differentiable operation, and the state of decoding. `favor.cuh` describes
//! the kernels and their chain of shapes; this file puts them together.
//! What bounds their time is in `docs/LOG.md` of the repository.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{
    CpuStorage, D, DType, Device, Layout, Result, Shape, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

use super::super::{
    beside::{AttentionPasses, apply_beside},
    operation::{Operation, Stored, apply},
};
use super::{
    CudaDevice, CudaStorage, View,
    buffer::Buffer,
    favor_call::{Call, Given, Gradients, Saved},
    shared_as_on_an_a100, storage, with_storages,
};
use crate::kernels::favor::{
    blocks::{Blocks, MOST_FEATURES, MOST_WIDTH, MapKind},
    records,
};

pub(crate) use super::favor_map::{Map, OwnKeys, Projection};

/// Whether the kernels take queries `q` and values `v` at this number of features, which they
/// compute themselves or, where they are not `computed`, read.
pub(crate) fn takes(q: &Tensor, v: &Tensor, features: usize, computed: bool) -> bool {
    let fits = |t: &Tensor| t.dims().last().is_some_and(|&width| (1..=MOST_WIDTH).contains(&width));
    let is_taken = super::attention_takes(q) && fits(q) && fits(v) && features <= MOST_FEATURES;
    is_taken && have_room(q, v, features, computed).unwrap_or(false)
}

/// Whether thread blocks have room on the card of `q`.
fn have_room(q: &Tensor, v: &Tensor, features: usize, computed: bool) -> Result<bool> {
    let (dim, values) = (q.dim(D::Minus1)?, v.dim(D::Minus1)?);
    let most = shared_as_on_an_a100(q.device().as_cuda_device()?)?;
    // Features that are read are f32, or of the type of the queries where quadratic.cu made them.
    let (kind, dtypes) =
        if computed { (MapKind::Computed, vec![q.dtype()]) } else { (MapKind::Log, vec![q.dtype(), DType::F32]) };
    for dtype in dtypes {
        let storage = storage(dtype)?;
        let fits = |causal| Blocks::choose(causal, true, storage, kind, [dim, features, values], most).fit(most);
        if !fits(true) || !fits(false) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Computes FAVOR attention: `q` `(B, H, Tq, ·)`, `k` `(B, Hkv, Tk, ·)`, `v` `(B, Hkv, Tk, Dv)` →
/// `(B, H, Tq, Dv)`. The last dimension of each is contiguous and nothing is empty. `visible` is
/// `(B, Tk)`, u8, contiguous. A row that sees no key is zero. `gates` are `(B, Hkv, Tk)`, f32,
/// contiguous, and need a causal mask. `parameters` are those of which an [`OwnKeys`] was made, if
/// they may ask for gradients; [`OwnKeys::parameter_gradients`] says how they lie.
///
/// With `logs` the logarithm of its denominator, `−1e37` where no key is seen, stands after the
/// values of each row, and room for up to three numbers after it: `(B, H, Tq, ≥ Dv + 1)`. Where the
/// kernels compute features, denominators lack the factor that all features of a query share, and
/// the factor `1/√F` of keys.
///
/// # Errors
/// If logarithms are asked for of other inputs than f32, or of features that may be negative.
pub(crate) fn favor(
    map: &Map,
    qkv: [&Tensor; 3],
    [gates, parameters]: [Option<&Tensor>; 2],
    visible: Option<Tensor>,
    causal: bool,
    logs: bool,
) -> Result<Tensor> {
    check_logs(map, qkv[0], logs)?;
    let tracked = qkv.into_iter().chain(gates).chain(parameters).any(Tensor::track_op);
    let trained = parameters.is_some_and(Tensor::track_op);
    let passes = Passes { map: map.clone(), causal, visible, tracked, trained, logs, saved: Mutex::new(None) };
    let others: Vec<&Tensor> = gates.into_iter().chain(parameters.filter(|_| trained)).collect();
    match &others[..] {
        [] => apply(Favor(passes), qkv),
        others => apply_beside(FavorBeside { passes, gated: gates.is_some() }, qkv, others),
    }
}

/// Refuses logarithms of denominators where the kernels have none.
fn check_logs(map: &Map, q: &Tensor, logs: bool) -> Result<()> {
    if logs && (q.dtype() != DType::F32 || map.kind() == MapKind::Signed) {
        bail!(
            "favor with logarithms on CUDA: q is {:?} and features are {:?}; q must be f32 and features positive",
            q.dtype(),
            map.kind()
        );
    }
    Ok(())
}

/// `Passes` holds a forward pass and what its backward pass needs.
struct Passes {
    map: Map,
    causal: bool,
    visible: Option<Tensor>,
    /// Whether a backward pass may follow.
    tracked: bool,
    /// Whether a backward pass has gradients of the map's parameters.
    trained: bool,
    /// Whether the logarithm of each row's denominator stands after its values.
    logs: bool,
    saved: Mutex<Option<Saved>>,
}

impl Passes {
    /// Calls `work` with the problem of these tensors.
    fn with_call<R>(&self, views: [View; 3], gates: Option<View>, work: impl FnOnce(&Call) -> Result<R>) -> Result<R> {
        let given = Given { visible: None, gates, tracked: self.tracked, trained: self.trained, logs: self.logs };
        match &self.visible {
            None => work(&Call::new(&self.map, views, given, self.causal)?),
            Some(visible) => with_storages([visible], |[visible]| {
                work(&Call::new(&self.map, views, Given { visible: Some(visible), ..given }, self.causal)?)
            }),
        }
    }

    fn forward(&self, views: [View; 3], gates: Option<View>) -> Result<(CudaStorage, Shape)> {
        let (out, saved) = self.with_call(views, gates, |call| call.forward(None, None))?;
        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(saved);
        let shape = out.layout.shape().clone();
        Ok((out.storage, shape))
    }

    /// Returns the gradients of the inputs.
    fn backward(&self, views: [View; 3], gates: Option<View>, out: &Tensor, grad: &Tensor) -> Result<Gradients> {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(saved) = &*saved else { bail!("favor: the backward pass needs a forward pass before it") };
        with_storages([out, &grad.contiguous()?], |[out, grad]| {
            self.with_call(views, gates, |call| call.backward(out, grad, saved))
        })
    }
}

/// `Favor` is FAVOR attention as one differentiable operation on `(q, k, v)`.
struct Favor(Passes);

impl Operation<3> for Favor {
    fn name(&self) -> &'static str {
        "favor"
    }

    fn cuda(&self, [(s1, l1), (s2, l2), (s3, l3)]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        self.0.forward([(s1, l1), (s2, l2), (s3, l3)], None)
    }

    fn backward(&self, qkv: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let gradients = with_storages(qkv, |views| self.0.backward(views, None, out, grad))?;
        Ok(gradients.qkv.map(|gradient| Some(gradient.tensor())))
    }
}

/// `FavorBeside` has the passes of FAVOR attention with gates, with parameters of the map, or with
/// both, in this order.
struct FavorBeside {
    passes: Passes,
    /// Whether the first input beside `q`, `k` and `v` is gates.
    gated: bool,
}

impl AttentionPasses for FavorBeside {
    fn name(&self) -> &'static str {
        "favor-beside"
    }

    fn cuda(&self, qkv: [View; 3], beside: &[View]) -> Result<(CudaStorage, Shape)> {
        self.passes.forward(qkv, self.gated.then(|| beside[0]))
    }

    fn backward(
        &self,
        qkv @ [q, k, v]: [&Tensor; 3],
        beside: &[&Tensor],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Tensor; 3], Vec<Tensor>)> {
        let gradients = match self.gated {
            false => with_storages(qkv, |views| self.passes.backward(views, None, out, grad)),
            true => with_storages([q, k, v, beside[0]], |[q, k, v, gates]| {
                self.passes.backward([q, k, v], Some(gates), out, grad)
            }),
        }?;
        let of_parameters = match (&self.passes.map, gradients.features) {
            (Map::OwnKeys(map), Some(of_features)) => {
                Some(map.parameter_gradients([q, k], of_features.map(Buffer::tensor))?)
            }
            _ => None,
        };
        let of_others = gradients.gates.map(Buffer::tensor).into_iter().chain(of_parameters).collect();
        Ok((gradients.qkv.map(Buffer::tensor), of_others))
    }
}

/// `Sums` holds the prefix sums of all key heads, which decoding carries on; their size does not
/// depend on the number of tokens.
#[derive(Clone, Debug)]
pub(crate) struct Sums {
    records: Records,
    shape: RecordShape,
}

/// Where the records of [`Sums`] are: one for each key head. They are never written to again, so
/// that a clone may go on from them too.
#[derive(Clone, Debug)]
enum Records {
    /// In the memory of the card that made them.
    Card(Arc<Buffer>),
    /// As they were saved, `(B, Hkv, F·(2 + Dv))`: the next tokens' card takes them.
    Loaded(Tensor),
}

/// The sizes of records; those of features and values are padded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RecordShape {
    batch: usize,
    key_heads: usize,
    features: usize,
    values: usize,
}

impl RecordShape {
    fn of(call: &Call, [batch, key_heads]: [usize; 2]) -> Self {
        let b = &call.blocks;
        Self { batch, key_heads, features: b.f(), values: b.splits() * b.slice }
    }

    /// The number of numbers.
    fn count(&self) -> usize {
        self.batch * self.key_heads * self.features * (2 + self.values)
    }
}

impl Sums {
    pub(crate) fn bytes(&self) -> usize {
        4 * self.shape.count()
    }

    /// Copies the sums to the host: scales and norms `(B, Hkv, 1, F)` and sums `(B, Hkv, F, Dv)`,
    /// see [`records`].
    pub(crate) fn save(&self) -> Result<[Tensor; 3]> {
        let RecordShape { batch, key_heads, features, values } = self.shape;
        let records = match &self.records {
            Records::Card(buffer) => {
                let CpuStorage::F32(numbers) = buffer.storage.to_cpu_storage()? else {
                    bail!("state: the sums of the CUDA kernels are not f32")
                };
                Tensor::from_vec(numbers, (batch, key_heads, features * (2 + values)), &Device::Cpu)?
            }
            Records::Loaded(records) => records.to_device(&Device::Cpu)?,
        };
        records::apart(&records, features)
    }

    /// The sums that were saved.
    pub(crate) fn load(saved: [&Tensor; 3]) -> Result<Self> {
        let records = records::together(saved)?;
        let (batch, key_heads, features, values) = saved[2].dims4()?;
        Ok(Self { records: Records::Loaded(records), shape: RecordShape { batch, key_heads, features, values } })
    }

    /// The records in the memory of this card. Those of another card go over the host.
    fn on(&self, device: &CudaDevice) -> Result<Arc<Buffer>> {
        let numbers = match &self.records {
            Records::Card(buffer) if buffer.storage.device().same_device(device) => return Ok(Arc::clone(buffer)),
            Records::Card(buffer) => buffer.storage.to_cpu_storage()?,
            Records::Loaded(records) => {
                CpuStorage::F32(records.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?)
            }
        };
        let layout = Layout::contiguous(self.shape.count());
        let storage = device.storage_from_cpu_storage_owned(numbers)?;
        Ok(Arc::new(Buffer { storage, layout }))
    }
}

/// Computes causal FAVOR of tokens that follow those in `sums`, and replaces `sums` by those after
/// the last token. For inference: no gradient is recorded. Outputs, `gates` and `logs` are those of
/// [`favor`]; tokens without gates forget nothing. `heads` are the batch and its key heads, which
/// tensors of ready features have folded into one.
///
/// # Errors
/// Those of [`favor`], and if `sums` are of other sizes; they are then left as they were.
pub(crate) fn extend(
    map: &Map,
    qkv: [&Tensor; 3],
    gates: Option<&Tensor>,
    logs: bool,
    heads: [usize; 2],
    sums: &mut Option<Sums>,
) -> Result<Tensor> {
    check_logs(map, qkv[0], logs)?;
    let given = Given { logs, ..Given::default() };
    let (out, next) = match gates {
        None => with_storages(qkv, |views| extended(map, views, given, heads, sums.as_ref())),
        Some(gates) => {
            let [q, k, v] = qkv;
            with_storages([q, k, v, gates], |[q, k, v, gates]| {
                extended(map, [q, k, v], Given { gates: Some(gates), ..given }, heads, sums.as_ref())
            })
        }
    }?;
    sums.replace(next);
    Ok(out.tensor())
}

/// Computes the outputs of tokens that follow those in `sums`, and the sums after them.
fn extended(
    map: &Map,
    views: [View; 3],
    given: Given,
    heads: [usize; 2],
    sums: Option<&Sums>,
) -> Result<(Buffer, Sums)> {
    let call = Call::new(map, views, given, true)?;
    let shape = RecordShape::of(&call, heads);
    if let Some(sums) = sums
        && sums.shape != shape
    {
        bail!(
            "state: it holds sums of {:?}, but this input needs {shape:?}; a state belongs to one layer, \
             one batch and, for some sizes of heads, cards with as much shared memory",
            sums.shape
        );
    }
    let before = sums.map(|sums| sums.on(call.device)).transpose()?;
    let before = before.as_ref().map(|before| before.view());
    // The new sums go to other memory: thread blocks may still read the old ones while another
    // writes.
    let mut records = Buffer::new(call.device, shape.count())?;
    let out = match before {
        // Where many query heads read one key head, a step may have no room where a pass has.
        Some(before) if call.queries == 1 && call.step_fits()? => call.step(before, &mut records)?,
        _ => call.forward(before, Some(&mut records))?.0,
    };
    Ok((out, Sums { records: Records::Card(Arc::new(records)), shape }))
}
