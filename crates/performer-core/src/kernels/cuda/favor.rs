//! FAVOR on CUDA: one differentiable operation, and the state of decoding. `favor.cuh` describes
//! the kernels and their chain of shapes; this file puts them together.
//!
//! On an H200 no kernel can be faster than 119 ps a token and head at 64 dimensions and up to 128
//! features in one pass, 300 ps in two (arithmetic alone, bf16); the projection's low part adds to
//! that.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{
    CpuStorage, DType, Device, Layout, Result, Shape, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

use super::super::operation::{Operation, Stored, apply};
use super::{
    CudaDevice, CudaStorage, Source, THREADS, View,
    buffer::Buffer,
    favor_call::{Call, Given, HEADERS, Saved},
    with_storages,
};
use crate::{
    kernels::favor::{
        blocks::{MOST_FEATURES, MOST_WIDTH, MapKind},
        records,
    },
    ops,
    projection::factor_is_bf16,
};

/// The kernel that packs the projection for the others.
const PACK: Source = Source {
    name: "performer-core/src/kernels/cuda/favor_pack.cu",
    text: include_str!("favor_pack.cu"),
    headers: HEADERS,
};

/// `Map` says where features come from.
#[derive(Clone, Debug)]
pub(crate) enum Map {
    /// Positive or hyperbolic features, computed in the kernel.
    Exponential(Arc<Projection>),
    /// The rows are log-features already: `(.., F)`, f32.
    Log {
        /// The number of features `F`.
        features: usize,
    },
    /// The rows are signed features, and a row of keys has its log-scale as one more number:
    /// `(.., F)` for queries and `(.., F + 1)` for keys, f32.
    Signed {
        /// The number of features `F`.
        features: usize,
    },
}

impl Map {
    /// The value of the macro `MAP` of `favor.cuh`.
    pub(super) fn kind(&self) -> MapKind {
        match self {
            Self::Exponential(_) => MapKind::Computed,
            Self::Log { .. } => MapKind::Log,
            Self::Signed { .. } => MapKind::Signed,
        }
    }

    pub(super) fn features(&self) -> usize {
        match self {
            Self::Exponential(projection) => projection.features,
            Self::Log { features } | Self::Signed { features } => *features,
        }
    }

    pub(super) fn hyperbolic(&self) -> bool {
        matches!(self, Self::Exponential(projection) if projection.hyperbolic)
    }
}

/// Whether the kernels take queries `q` and values `v` at this number of features.
pub(crate) fn takes(q: &Tensor, v: &Tensor, features: usize) -> bool {
    let narrow = |t: &Tensor| t.dims().last().is_some_and(|&width| (1..=MOST_WIDTH).contains(&width));
    super::takes(q) && narrow(q) && narrow(v) && features <= MOST_FEATURES
}

/// `Projection` is Ω on the device, as drawn and packed for the kernels.
#[derive(Debug)]
pub(crate) struct Projection {
    /// Ω, `(M, D)`, f32, contiguous.
    pub(super) omega: Tensor,
    hyperbolic: bool,
    features: usize,
    dim: usize,
    /// Whether the factor that makes features is exact in bf16.
    exact: bool,
    /// The packed projection: the factor that makes features, and the factor that makes gradients
    /// of rows.
    packed: Mutex<HashMap<Packing, Arc<[Buffer; 2]>>>,
}

/// `Packing` says how a projection is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Packing {
    /// For f32.
    Single,
    /// For half types: every number in two parts.
    Parts,
    /// For half types, where the first part of the factor for features is all of it. The factor
    /// for gradients is in base 2 as well, so that this holds for it too.
    Exact,
}

impl Projection {
    pub(crate) fn new(omega: &Tensor, hyperbolic: bool) -> Result<Self> {
        let (m, dim) = omega.dims2()?;
        let omega = omega.detach().to_dtype(DType::F32)?.contiguous()?;
        let features = if hyperbolic { 2 * m } else { m };
        let exact = factor_is_bf16(&omega.flatten_all()?.to_vec1::<f32>()?, dim);
        Ok(Self { omega, hyperbolic, features, dim, exact, packed: Mutex::default() })
    }

    /// The factor `D^-1/4`.
    pub(super) fn scale(&self) -> f32 {
        (self.dim as f64).powf(-0.25) as f32
    }

    /// Whether the factor that makes features is exact in bf16.
    pub(super) fn is_exact(&self) -> bool {
        self.exact
    }

    /// Returns the packed projection, packing it at the first call.
    pub(super) fn packed(&self, packing: Packing) -> Result<Arc<[Buffer; 2]>> {
        // Half types share their operands, which are bf16.
        let storage = if packing == Packing::Single { 0 } else { 2 };
        let mut all = self.packed.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(packed) = all.get(&packing) {
            return Ok(Arc::clone(packed));
        }
        let packed = with_storages([&self.omega], |[omega]| {
            let device = omega.0.device();
            let tiles = self.dim.div_ceil(16) * self.features.div_ceil(16);
            let kernel = PACK.kernel(device, "favor_pack", &[("STORAGE", &storage)], 0)?;
            let pack = |scale: f32, back: i32| -> Result<Buffer> {
                // The factor for features is stored twice for half types; each of 64 threads writes
                // 16 bytes of a tile.
                let pieces = tiles * 64 * if storage != 0 && back == 0 { 2 } else { 1 };
                let mut packed = Buffer::new(device, pieces * 4)?;
                let launch =
                    kernel.launch().input(omega.0, omega.1)?.value(self.features as i32).value(self.dim as i32);
                let launch = launch.value(i32::from(self.hyperbolic)).value(scale).value(back);
                // SAFETY: the projection is (M, D), and there is room for every tile.
                unsafe { launch.output(&mut packed.storage)?.run([pieces.div_ceil(THREADS), 1, 1], THREADS) }?;
                Ok(packed)
            };
            let in_base_2 = self.scale() * std::f32::consts::LOG2_E;
            let back = if packing == Packing::Exact { in_base_2 } else { self.scale() };
            Ok(Arc::new([pack(in_base_2, 0)?, pack(back, 1)?]))
        })?;
        all.insert(packing, Arc::clone(&packed));
        Ok(packed)
    }
}

/// Computes FAVOR attention: `q` `(B, H, Tq, ·)`, `k` `(B, Hkv, Tk, ·)`, `v` `(B, Hkv, Tk, Dv)` →
/// `(B, H, Tq, Dv)`. The last dimension of each is contiguous and nothing is empty. `visible` is
/// `(B, Tk)`, u8, contiguous. A row that sees no key is zero. `gates` are `(B, Hkv, Tk)`, f32,
/// contiguous, and need a causal mask.
///
/// With `logs` come the logarithms of the denominators `(B, H, Tq, 1)`, `−1e37` where no key is
/// seen. Where the kernels compute features, denominators lack the factor that all features of a
/// query share, and the factor `1/√F` of keys.
///
/// # Errors
/// If logarithms are asked for of other inputs than f32, or of features that may be negative.
pub(crate) fn favor(
    map: &Map,
    qkv: [&Tensor; 3],
    gates: Option<&Tensor>,
    visible: Option<Tensor>,
    causal: bool,
    logs: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let [q, _, v] = qkv;
    if logs && (q.dtype() != DType::F32 || map.kind() == MapKind::Signed) {
        bail!(
            "favor with logarithms on CUDA: q is {:?} and features are {:?}; q must be f32 and features positive",
            q.dtype(),
            map.kind()
        );
    }
    let tracked = qkv.into_iter().chain(gates).any(Tensor::track_op);
    let passes = Passes { map: map.clone(), causal, visible, tracked, logs, saved: Mutex::new(None) };
    let rows = match gates {
        None => apply(Favor(passes), qkv)?,
        Some(gates) => {
            let gradients = Arc::new(Mutex::new(None));
            let joined = apply(Joined(Arc::clone(&gradients)), qkv)?;
            apply(Gated { passes, qkv: qkv.map(Tensor::detach), gradients }, [&joined, gates])?
        }
    };
    if !logs {
        return Ok((rows, None));
    }
    let values = v.dim(3)?;
    Ok((ops::narrow(&rows, 3, 0, values)?, Some(ops::narrow(&rows, 3, values, 1)?)))
}

/// `Passes` holds a forward pass and what its backward pass needs.
struct Passes {
    map: Map,
    causal: bool,
    visible: Option<Tensor>,
    /// Whether a backward pass may follow.
    tracked: bool,
    /// Whether the logarithm of each row's denominator stands after its values.
    logs: bool,
    saved: Mutex<Option<Saved>>,
}

impl Passes {
    /// Calls `work` with the problem of these tensors.
    fn with_call<R>(&self, views: [View; 3], gates: Option<View>, work: impl FnOnce(&Call) -> Result<R>) -> Result<R> {
        let given = Given { visible: None, gates, tracked: self.tracked, logs: self.logs };
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

    /// Returns the gradients of queries, keys and values, and of gates where there are some.
    fn backward(
        &self,
        views: [View; 3],
        gates: Option<View>,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Tensor; 3], Option<Tensor>)> {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(saved) = &*saved else { bail!("favor: the backward pass needs a forward pass before it") };
        let (gradients, of_gates) = with_storages([out, &grad.contiguous()?], |[out, grad]| {
            self.with_call(views, gates, |call| call.backward(out, grad, saved))
        })?;
        Ok((gradients.map(Buffer::tensor), of_gates.map(Buffer::tensor)))
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
        let (gradients, _) = with_storages(qkv, |views| self.0.backward(views, None, out, grad))?;
        Ok(gradients.map(Some))
    }
}

/// The gradients of `(q, k, v)` on their way from [`Gated`] to [`Joined`].
type Handover = Arc<Mutex<Option<[Tensor; 3]>>>;

/// `Joined` stands for `(q, k, v)` as one operand: an operation takes three tensors, and with gates
/// there are four. Its output is one number, which says nothing; its backward pass returns the
/// gradients that [`Gated`] has left, which comes before it in every backward pass.
struct Joined(Handover);

impl Operation<3> for Joined {
    fn name(&self) -> &'static str {
        "favor-joined"
    }

    fn cuda(&self, [(q, _), ..]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        Ok((q.device().zeros_impl(&Shape::from(1), DType::F32)?, Shape::from(1)))
    }

    fn backward(&self, _: [&Tensor; 3], _: &Tensor, _: &Tensor) -> Result<[Option<Tensor>; 3]> {
        match self.0.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(gradients) => Ok(gradients.map(Some)),
            None => bail!("favor: the gradients of q, k and v are gone before they were asked for"),
        }
    }
}

/// `Gated` is FAVOR attention with gates as one differentiable operation on `(joined, gates)`.
struct Gated {
    passes: Passes,
    qkv: [Tensor; 3],
    gradients: Handover,
}

impl Operation<2> for Gated {
    fn name(&self) -> &'static str {
        "favor-gated"
    }

    fn cuda(&self, [_, (gates, layout)]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        with_storages(self.qkv.each_ref(), |views| self.passes.forward(views, Some((gates, layout))))
    }

    fn backward(&self, [joined, gates]: [&Tensor; 2], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let [q, k, v] = &self.qkv;
        let (gradients, of_gates) = with_storages([q, k, v, gates], |[q, k, v, gates]| {
            self.passes.backward([q, k, v], Some(gates), out, grad)
        })?;
        *self.gradients.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradients);
        Ok([Some(joined.zeros_like()?), of_gates])
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

    /// The records in the memory of a card.
    fn on(&self, device: &CudaDevice) -> Result<Arc<Buffer>> {
        let records = match &self.records {
            Records::Card(buffer) => return Ok(Arc::clone(buffer)),
            Records::Loaded(records) => records,
        };
        let numbers = records.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>()?;
        let layout = Layout::contiguous(numbers.len());
        let storage = device.storage_from_cpu_storage_owned(CpuStorage::F32(numbers))?;
        Ok(Arc::new(Buffer { storage, layout }))
    }
}

/// Computes causal FAVOR of tokens that follow those in `sums`, and replaces `sums` by those after
/// the last token. For inference: no gradient is recorded.
/// `gates` are those of [`favor`]; tokens without gates forget nothing. `heads` are the batch and
/// its key heads, which tensors of ready features have folded into one.
pub(crate) fn extend(
    map: &Map,
    qkv: [&Tensor; 3],
    gates: Option<&Tensor>,
    heads: [usize; 2],
    sums: &mut Option<Sums>,
) -> Result<Tensor> {
    let (out, next) = match gates {
        None => with_storages(qkv, |views| extended(map, views, None, heads, sums.as_ref())),
        Some(gates) => {
            let [q, k, v] = qkv;
            with_storages([q, k, v, gates], |[q, k, v, gates]| {
                extended(map, [q, k, v], Some(gates), heads, sums.as_ref())
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
    gates: Option<View>,
    heads: [usize; 2],
    sums: Option<&Sums>,
) -> Result<(Buffer, Sums)> {
    let call = Call::new(map, views, Given { gates, ..Given::default() }, true)?;
    let shape = RecordShape::of(&call, heads);
    if let Some(sums) = sums
        && sums.shape != shape
    {
        bail!(
            "state: it holds sums of {:?}, but this input needs {shape:?}; a state belongs to one layer and one batch",
            sums.shape
        );
    }
    let before = sums.map(|sums| sums.on(call.device)).transpose()?;
    let before = before.as_ref().map(|before| before.view());
    // The new sums go to other memory: thread blocks may still read the old ones while another
    // writes.
    let mut records = Buffer::new(call.device, shape.count())?;
    let out = match before {
        Some(before) if call.queries == 1 => call.step(map, before, &mut records)?,
        _ => call.forward(before, Some(&mut records))?.0,
    };
    Ok((out, Sums { records: Records::Card(Arc::new(records)), shape }))
}
