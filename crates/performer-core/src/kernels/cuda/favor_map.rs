//! Where the kernels of FAVOR get features from, and how the numbers of a feature map are packed
//! for them: see `Packed` in `tile.cuh`, and `KeyForm` in `favor.cuh`.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use candle_core::{DType, Device, Result, Tensor, backend::BackendStorage};

use super::{Source, THREADS, View, buffer::Buffer, favor_call::HEADERS, memory::synchronize, source, with_storages};
use crate::{
    kernels::favor::blocks::MapKind,
    projection::{factor_is_bf16, input_scale},
};

/// The kernel that packs numbers of a map for the others.
const PACK: Source = source!("favor_pack.cu", HEADERS);

/// `Map` says where features come from.
#[derive(Clone, Debug)]
pub(crate) enum Map {
    /// Positive or hyperbolic features, computed in the kernel.
    Exponential(Arc<Projection>),
    /// Positive features whose keys have rows and weights of their own, computed in the kernel.
    OwnKeys(Arc<OwnKeys>),
    /// The rows are log-features already: `(.., F)`, f32.
    Log {
        /// The number of features `F`.
        features: usize,
    },
    /// The rows are signed features, and a row of keys has its log-scale as one more number:
    /// `(.., F)` for queries and `(.., F + 1)` for keys; f32, or bf16 where log-scales are 0.
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
            Self::OwnKeys(_) => MapKind::OwnKeys,
            Self::Log { .. } => MapKind::Log,
            Self::Signed { .. } => MapKind::Signed,
        }
    }

    /// Whether the kernels take rows of this type. Log-features have too few digits in half types,
    /// and signed features may be too large for f16.
    pub(super) fn takes(&self, dtype: DType) -> bool {
        match self {
            Self::Exponential(_) | Self::OwnKeys(_) => true,
            Self::Log { .. } => dtype == DType::F32,
            Self::Signed { .. } => matches!(dtype, DType::F32 | DType::BF16),
        }
    }

    /// The number of features `F`.
    pub(super) fn features(&self) -> usize {
        match self {
            Self::Exponential(projection) => projection.features,
            Self::OwnKeys(map) => map.features,
            Self::Log { features } | Self::Signed { features } => *features,
        }
    }

    /// Whether each row of the projection gives two features, with both signs.
    pub(super) fn is_hyperbolic(&self) -> bool {
        matches!(self, Self::Exponential(projection) if projection.hyperbolic)
    }

    /// The numbers of a map that the kernels compute features by.
    pub(super) fn numbers(&self) -> Option<&Tensor> {
        match self {
            Self::Exponential(projection) => Some(&projection.omega),
            Self::OwnKeys(map) => Some(&map.queries),
            _ => None,
        }
    }

    /// Packs the numbers of a map that the kernels compute features by.
    pub(super) fn packed(&self, packing: Packing) -> Result<Option<Arc<Packed>>> {
        Ok(match self {
            Self::Exponential(projection) => Some(projection.packed(packing)?),
            Self::OwnKeys(map) => Some(map.packed(packing)?),
            _ => None,
        })
    }
}

/// `Packing` says how a projection is packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Packing {
    /// For f32.
    Single,
    /// For half types: every number in two parts.
    Parts,
    /// For half types, where the factor for features is exact in bf16, so that its first part is
    /// all of it. The factor for gradients is then in base 2 as well, for it is exact in bf16 only
    /// there.
    Exact,
}

impl Packing {
    /// The type of operands, by the code of `StoredType`. Half types share theirs, which are bf16.
    fn storage(self) -> u8 {
        if self == Self::Single { 0 } else { 2 }
    }
}

/// `Packed` is what the kernels read of a map.
#[derive(Debug)]
pub(super) struct Packed {
    /// The factor that makes features of queries (and of keys, where they have none of their own),
    /// and the factor that makes gradients of rows.
    pub(super) queries: [Buffer; 2],
    pub(super) keys: Option<PackedKeys>,
}

/// `PackedKeys` is what the kernels read of keys' own form: `KeyForm` of `favor.cuh`.
#[derive(Debug)]
pub(super) struct PackedKeys {
    /// The factor that makes features of keys, and the factor that makes their gradients.
    pub(super) factors: [Buffer; 2],
    pub(super) weights: Buffer,
    /// `P` and `PᵀP`.
    pub(super) metric: Option<[Buffer; 2]>,
    /// The number of sets of numbers.
    pub(super) tables: usize,
}

/// Matrices that are packed alike: `tables` of them, one after the other, each with rows of `dim`
/// numbers.
struct Matrices<'a> {
    numbers: View<'a>,
    tables: usize,
    /// The features that the rows give.
    features: usize,
    dim: usize,
    hyperbolic: bool,
    /// Whether the factor for features is followed by its transpose, which teams read.
    transposed: bool,
}

impl Matrices<'_> {
    /// Packs the matrices times `scale`: as factors for features, or `back` for gradients.
    fn pack(&self, packing: Packing, scale: f32, back: bool) -> Result<Buffer> {
        let device = self.numbers.0.device();
        let tiles = self.dim.div_ceil(16) * self.features.div_ceil(16);
        let kernel = PACK.kernel(device, "favor_pack", &[("STORAGE", &packing.storage())], 0)?;
        // Each of 64 threads writes 16 bytes of a tile.
        let twice = self.transposed && packing != Packing::Single && !back;
        let pieces = tiles * 64 * if twice { 2 } else { 1 };
        let mut packed = Buffer::new(device, self.tables * pieces * 4)?;
        let launch = kernel.launch().input(self.numbers)?;
        let launch = launch.value(self.features as i32).value(self.dim as i32).value(i32::from(self.hyperbolic));
        let launch = launch.value(scale).value(i32::from(back)).value(pieces as i32);
        let grid = [pieces.div_ceil(THREADS), self.tables, 1];
        // SAFETY: there are that many matrices, and there is room for every tile.
        unsafe { launch.output(&mut packed.storage)?.run(grid, THREADS) }?;
        Ok(packed)
    }

    /// Packs rows as the factor for features, in base 2, and the factor for gradients.
    fn factors(&self, packing: Packing, scale: f32) -> Result<[Buffer; 2]> {
        let in_base_2 = scale * std::f32::consts::LOG2_E;
        let back = if packing == Packing::Exact { in_base_2 } else { scale };
        Ok([self.pack(packing, in_base_2, false)?, self.pack(packing, back, true)?])
    }
}

/// A tensor as the kernels read numbers of a map: f32, contiguous, without its history.
fn plain(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().to_dtype(DType::F32)?.contiguous()
}

/// What was packed, by how it was packed.
type Cache = Mutex<HashMap<Packing, Arc<Packed>>>;

/// Returns what is packed in a cache, packing it at the first call. Where it is `shared` by
/// threads, the device is waited for: each thread has a queue of its own there.
fn cached(
    cache: &Cache,
    packing: Packing,
    shared: Option<&Device>,
    pack: impl FnOnce() -> Result<Packed>,
) -> Result<Arc<Packed>> {
    let mut all = cache.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(packed) = all.get(&packing) {
        return Ok(Arc::clone(packed));
    }
    let packed = Arc::new(pack()?);
    if let Some(device) = shared {
        synchronize(device.as_cuda_device()?)?;
    }
    all.insert(packing, Arc::clone(&packed));
    Ok(packed)
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
    packed: Cache,
}

impl Projection {
    pub(crate) fn new(omega: &Tensor, hyperbolic: bool) -> Result<Self> {
        let (m, dim) = omega.dims2()?;
        let omega = plain(omega)?;
        let features = if hyperbolic { 2 * m } else { m };
        let exact = factor_is_bf16(&omega.flatten_all()?.to_vec1::<f32>()?, dim);
        Ok(Self { omega, hyperbolic, features, dim, exact, packed: Cache::default() })
    }

    /// The factor `D^-1/4`.
    pub(super) fn scale(&self) -> f32 {
        input_scale(self.dim) as f32
    }

    /// Whether the factor that makes features is exact in bf16.
    pub(super) fn is_exact(&self) -> bool {
        self.exact
    }

    fn packed(&self, packing: Packing) -> Result<Arc<Packed>> {
        cached(&self.packed, packing, Some(self.omega.device()), || {
            with_storages([&self.omega], |[omega]| {
                let matrices = Matrices {
                    numbers: omega,
                    tables: 1,
                    features: self.features,
                    dim: self.dim,
                    hyperbolic: self.hyperbolic,
                    transposed: true,
                };
                Ok(Packed { queries: matrices.factors(packing, self.scale())?, keys: None })
            })
        })
    }
}

/// `OwnKeys` is a map `exp(a·x)` of queries and `exp(b·y + w − ‖Py‖²/2)` of keys, with numbers for
/// each of `H` key heads, or one set for all (`H` = 1).
#[derive(Debug)]
pub(crate) struct OwnKeys {
    /// `a` and `b`, `(H, M, D)`, f32, contiguous.
    pub(super) queries: Tensor,
    pub(super) keys: Tensor,
    /// `w`, `(H, M)`.
    pub(super) weights: Tensor,
    /// `P`, `(H, D, D)`; the identity where it is missing.
    pub(super) metric: Option<Tensor>,
    tables: usize,
    features: usize,
    dim: usize,
    /// Whether several threads may use it, and not one call alone.
    shared: bool,
    packed: Cache,
}

impl OwnKeys {
    /// A map that lasts, which several threads may use.
    pub(crate) fn lasting(numbers: [&Tensor; 3], metric: Option<&Tensor>) -> Result<Self> {
        let made = Self::of_a_call(numbers, metric)?;
        // Another thread may read these numbers first, and each has a queue of its own on the card.
        synchronize(made.queries.device().as_cuda_device()?)?;
        Ok(Self { shared: true, ..made })
    }

    /// A map for one call.
    pub(crate) fn of_a_call([queries, keys, weights]: [&Tensor; 3], metric: Option<&Tensor>) -> Result<Self> {
        let (tables, features, dim) = queries.dims3()?;
        Ok(Self {
            queries: plain(queries)?,
            keys: plain(keys)?,
            weights: plain(weights)?,
            metric: metric.map(plain).transpose()?,
            tables,
            features,
            dim,
            shared: false,
            packed: Cache::default(),
        })
    }

    /// The number of key heads that there are numbers for; 1 serves any number.
    pub(crate) fn heads(&self) -> usize {
        self.tables
    }

    /// The factor `D^-1/4`.
    pub(super) fn scale(&self) -> f32 {
        input_scale(self.dim) as f32
    }

    /// Describes the matrices in `numbers`, one for each set of parameters, of `rows` rows of `D`
    /// numbers each.
    fn matrices<'a>(&self, numbers: View<'a>, rows: usize) -> Matrices<'a> {
        Matrices { numbers, tables: self.tables, features: rows, dim: self.dim, hyperbolic: false, transposed: false }
    }

    fn packed(&self, packing: Packing) -> Result<Arc<Packed>> {
        let (features, dim) = (self.features, self.dim);
        cached(&self.packed, packing, self.shared.then(|| self.queries.device()), || {
            with_storages([&self.queries, &self.keys, &self.weights], |[queries, keys, weights]| {
                let mut own_weights = Buffer::new(weights.0.device(), self.tables * features)?;
                weights.0.copy_strided_src(&mut own_weights.storage, 0, weights.1)?;
                let pack_square = |matrix: &Tensor| {
                    with_storages([matrix], |[matrix]| self.matrices(matrix, dim).pack(packing, 1.0, false))
                };
                let pack_metric = |p: &Tensor| -> Result<[Buffer; 2]> {
                    Ok([pack_square(p)?, pack_square(&p.transpose(1, 2)?.contiguous()?.matmul(p)?)?])
                };
                let of_keys = PackedKeys {
                    factors: self.matrices(keys, features).factors(packing, self.scale())?,
                    weights: own_weights,
                    metric: self.metric.as_ref().map(pack_metric).transpose()?,
                    tables: self.tables,
                };
                let queries = self.matrices(queries, features).factors(packing, self.scale())?;
                Ok(Packed { queries, keys: Some(of_keys) })
            })
        })
    }

    /// Computes the gradients of the parameters `(H, 2·M·D + M)` (the rows of queries, the rows of
    /// keys, the weights) from those of log-features `(S, B, H', T, M)`, of which there are parts
    /// for `S` slices of the values and for each of `H'` query heads. `q` and `k` are
    /// `(B, H', T, D)` and `(B, Hkv, T, D)`.
    pub(super) fn parameter_gradients(&self, [q, k]: [&Tensor; 2], of_features: [Tensor; 2]) -> Result<Tensor> {
        let (m, d) = (self.features, self.dim);
        let (batch, heads, queries, _) = q.dims4()?;
        let (_, key_heads, keys, _) = k.dims4()?;
        let group = heads / key_heads;
        let [of_q, of_k] = of_features.map(|parts| if parts.dim(0)? == 1 { parts.squeeze(0) } else { parts.sum(0) });
        let of_k = of_k?.reshape((batch * key_heads, group, keys, m))?;
        let of_k = if group == 1 { of_k.squeeze(1)? } else { of_k.sum(1)? };
        // Sums over the batch, the heads of a group and, if one set serves all, the key heads.
        let of_tables = |sums: Tensor, group: usize| -> Result<Tensor> {
            let sums = sums.reshape((batch, key_heads, group, ()))?.sum((0, 2))?;
            if self.tables == 1 { sums.sum_keepdim(0) } else { Ok(sums) }
        };
        let rows = |of: Tensor, x: &Tensor, heads: usize, tokens: usize| -> Result<Tensor> {
            let x = plain(x)?.reshape((batch * heads, tokens, d))?;
            let sums = of.reshape((batch * heads, tokens, m))?.transpose(1, 2)?.matmul(&x)?;
            of_tables(sums, heads / key_heads)? * f64::from(self.scale())
        };
        let weights = of_tables(of_k.sum(1)?, 1)?;
        Tensor::cat(&[rows(of_q?, q, heads, queries)?, rows(of_k, k, key_heads, keys)?, weights], 1)
    }
}
