//! FAVOR: attention through feature maps, `O(T)`.
//!
//! [`Favor`] holds a feature map and, prepared for it, the [`backend`]s: fused kernels for the CPU,
//! CUDA and Metal, and composed operations for all else. The first backend that takes a call
//! computes it; [`Attention::path`] says which that is.

mod backend;
mod composed;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "metal")]
mod metal;
mod ready;
mod segment;

use std::fmt;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use self::backend::{Backends, Call, Output, check_heads};
pub use self::segment::SegmentSums;
use super::{Attention, Identity, Inputs, Mask, Path, Segment, State, gates};
use crate::{
    features::{FeatureMap, FeatureMapKind, RandomParameters},
    kernels::compute_dtype,
    projection::{self, ProjectionKind, Radii},
};

/// What FAVOR attention is made of; the default is FAVOR+ with 128 orthogonal positive features.
///
/// # Example
/// ```
/// use performer_core::{FavorConfig, FeatureMapKind};
///
/// let config = FavorConfig::default().with_map(FeatureMapKind::Hyperbolic).with_features(64);
/// assert_eq!(config.features, 64);
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
#[non_exhaustive]
pub struct FavorConfig {
    /// The feature map φ.
    pub map: FeatureMapKind,
    /// `M`, rows of the projection; deterministic maps ignore it.
    pub features: usize,
    /// How the rows' directions are drawn.
    pub projection: ProjectionKind,
    /// How the rows' lengths are drawn.
    pub radii: Radii,
}

impl Default for FavorConfig {
    fn default() -> Self {
        Self {
            map: FeatureMapKind::default(),
            features: 128,
            projection: ProjectionKind::default(),
            radii: Radii::default(),
        }
    }
}

impl FavorConfig {
    /// Sets the feature map φ.
    #[must_use]
    pub fn with_map(mut self, map: FeatureMapKind) -> Self {
        self.map = map;
        self
    }

    /// Sets `M`, the rows of the projection.
    #[must_use]
    pub fn with_features(mut self, features: usize) -> Self {
        self.features = features;
        self
    }

    /// Sets how the rows' directions are drawn.
    #[must_use]
    pub fn with_projection(mut self, projection: ProjectionKind) -> Self {
        self.projection = projection;
        self
    }

    /// Sets how the rows' lengths are drawn.
    #[must_use]
    pub fn with_radii(mut self, radii: Radii) -> Self {
        self.radii = radii;
        self
    }
}

/// FAVOR attention (Choromanski et al. 2020): any [`FeatureMap`], linear time and memory, constant
/// decoding state.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let favor = Favor::new(&FavorConfig::default(), 64, 42, DType::F32, &device)?;
/// let q = Tensor::randn(0f32, 1.0, (1, 4, 1000, 64), &device)?;
/// let out = favor.forward(Inputs::new(&q, &q, &q), &Mask::causal())?;
/// assert_eq!(out.dims(), [1, 4, 1000, 64]);
/// # Ok(())
/// # }
/// ```
pub struct Favor {
    map: Box<dyn FeatureMap>,
    backends: Backends,
    /// What states that it makes belong to; `None` where the map has variables, which may change.
    identity: Option<Identity>,
    /// Tokens that a chunk of causal attention has in composed operations.
    chunk: usize,
    /// Whether the fused kernels are left out.
    composed: bool,
    parameters: Parameters,
}

/// `Parameters` are what the map is made from, so that it can be saved, loaded and drawn again.
#[derive(Debug)]
enum Parameters {
    /// Drawn from a seed.
    Random(FavorConfig, RandomParameters),
    /// The map's own, if it has any, and whether they are meant to be trained.
    OfMap { trained: bool },
}

/// The most random features that are drawn: a number above it is a mistake, which would otherwise
/// show only when memory runs out.
const MAX_FEATURES: usize = 1 << 20;

/// The most tokens of a chunk: a sequence is padded to whole chunks, and memory within a chunk
/// grows with its square.
const MAX_CHUNK: usize = 1 << 12;

impl Favor {
    /// Draws the random features of `config` from `seed`, for heads of dimension `head_dim`.
    ///
    /// The projection is kept in f64 if `dtype` is f64, else in f32. The same seed gives the same
    /// features on every platform. For the maps `positive` and `hyperbolic`, the numbers of Ω that
    /// were drawn are moved by at most 1/256 of themselves, to where `d^-¼ log₂ e Ω` is exact in
    /// bf16: fused kernels for half types then need one matrix product where they need two
    /// otherwise. A projection that is loaded stays as it is.
    ///
    /// # Errors
    /// If `head_dim` is 0, `dtype` is none of f32, f64, f16 and bf16, or the map cannot be built
    /// for that dimension; for maps with random rows, if `features` is 0 or above 2²⁰.
    pub fn new(config: &FavorConfig, head_dim: usize, seed: u64, dtype: DType, device: &Device) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F64 | DType::F16 | DType::BF16) {
            bail!("FAVOR: dtype is {dtype:?}; it must be f32, f64, f16 or bf16");
        }
        if head_dim == 0 {
            bail!("head_dim is 0; it must be at least 1");
        }
        if !config.map.is_random() {
            return Self::with_map(config.map.build(head_dim, None, device)?);
        }
        if config.features == 0 {
            bail!("features (M) is 0; it must be at least 1, and 128 is a good start");
        }
        if config.features > MAX_FEATURES {
            bail!("features (M) is {}; it must be at most {MAX_FEATURES}, and 128 is a good start", config.features);
        }
        let parameters = draw(config, head_dim, seed, compute_dtype(dtype), device)?;
        let mut favor = Self::with_map(config.map.build(head_dim, Some(&parameters), device)?)?;
        favor.parameters = match config.map.has_parameters() {
            true => Parameters::OfMap { trained: config.map.is_trained() },
            false => Parameters::Random(config.clone(), parameters),
        };
        favor.identity = favor.constant_identity()?;
        Ok(favor)
    }

    /// FAVOR over any feature map, one of yours included. [`FeatureMap::parameters`] are its
    /// buffers, and redrawing leaves it alone. A layer saves and loads them, and does not train
    /// them unless [`Self::trained`] says so. Either way it gives the map tensors of its own by
    /// [`FeatureMap::with_parameters`]: a variable that the map was made with gets no gradient
    /// there, so train those of the layer's `VarMap`.
    ///
    /// # Errors
    /// If the map takes rows of 0 numbers or makes 0 features, or if the form that it has for
    /// kernels, such as [`FeatureMap::exponential_form`], is not of as many rows and features.
    pub fn with_map(map: Box<dyn FeatureMap>) -> Result<Self> {
        let head_dim = map.input_dim();
        if head_dim == 0 || map.feature_dim() == 0 {
            bail!(
                "the feature map {} takes rows of {head_dim} and makes {} features; both must be at least 1",
                map.name(),
                map.feature_dim()
            );
        }
        // A row costs about C(F + D)/2 products inside its chunk and 2·F·D with the sums, and the
        // sums before chunks are F·D/C numbers a token. C = D keeps all of these small.
        let chunk = head_dim.next_power_of_two().clamp(16, 64);
        let backends = Backends::new(&*map, chunk)?;
        let mut favor = Self {
            map,
            backends,
            identity: None,
            chunk,
            composed: false,
            parameters: Parameters::OfMap { trained: false },
        };
        favor.identity = favor.constant_identity()?;
        Ok(favor)
    }

    /// Has [`FeatureMap::trained_parameters`] trained: a layer that is made over a `VarMap` then
    /// holds them as variables, with a set for each key head. Nothing changes for a map whose
    /// numbers are drawn from a seed.
    pub fn trained(mut self) -> Self {
        if let Parameters::OfMap { trained } = &mut self.parameters {
            *trained = true;
        }
        self
    }

    /// Never uses the fused kernels: Candle's own operations compute the same up to rounding, more
    /// slowly, to check the kernels against.
    pub fn composed(mut self) -> Self {
        self.composed = true;
        self.backends = Backends::only_composed(self.chunk);
        self
    }

    /// The feature map, to look at kernels and features.
    pub fn map(&self) -> &dyn FeatureMap {
        &*self.map
    }

    /// Sets the tokens that a chunk of causal attention has in composed operations. It decides time
    /// and memory; results are equal up to rounding.
    ///
    /// # Errors
    /// If `chunk` is no power of two, or above 4,096.
    pub fn with_chunk(mut self, chunk: usize) -> Result<Self> {
        if !chunk.is_power_of_two() || chunk > MAX_CHUNK {
            bail!("chunk is {chunk}; it must be a power of two of at most {MAX_CHUNK}, such as 64");
        }
        self.chunk = chunk;
        self.backends.set_chunk(chunk);
        Ok(self)
    }

    fn set_map(&mut self, map: Box<dyn FeatureMap>) -> Result<()> {
        self.backends = self.backends_for(&*map)?;
        self.map = map;
        self.identity = self.constant_identity()?;
        Ok(())
    }

    fn backends_for(&self, map: &dyn FeatureMap) -> Result<Backends> {
        if self.composed { Ok(Backends::only_composed(self.chunk)) } else { Backends::new(map, self.chunk) }
    }

    fn set_random(&mut self, config: FavorConfig, random: RandomParameters) -> Result<()> {
        let map = config.map.build(self.map.input_dim(), Some(&random), random.projection.device())?;
        self.parameters = Parameters::Random(config, random);
        self.set_map(map)
    }

    /// Checks inputs, and puts what a backend needs into a call.
    fn call<'a>(&'a self, inputs: Inputs<'a>, mask: &'a Mask, logs: bool) -> Result<Call<'a>> {
        let sizes = inputs.sizes_under(mask)?;
        if sizes.head_dim != self.map.input_dim() {
            bail!(
                "q has shape {:?}; its head dim must be {}, for which the feature map was made",
                inputs.q.dims(),
                self.map.input_dim()
            );
        }
        check_heads(self.map.heads(), inputs.k)?;
        Ok(Call { map: &*self.map, inputs, mask, sizes, logs, begun: false })
    }

    /// Causal attention and the logarithms of its denominators, in the scale of the kernel that the
    /// map estimates: `(B, H, T, Dv)` and `(B, H, T, 1)`. With `state`, from there on. Nothing is
    /// empty.
    pub(super) fn with_logs(
        &self,
        inputs: Inputs<'_>,
        mask: &Mask,
        state: Option<&mut State>,
    ) -> Result<(Tensor, Tensor)> {
        let call = self.call(inputs, mask, true)?;
        let output = match state {
            None => self.backends.choose(&call).forward(&call)?,
            Some(state) => {
                let before = state.tokens();
                let output = self.advance_call(call, state)?;
                state.count(before, self.identity()?, call.sizes, inputs.q.dtype());
                output
            }
        };
        let Output { values, logs: Some(logs) } = output else {
            bail!("feature map {:?}: no logarithms of denominators were returned", self.map)
        };
        Ok((values, logs))
    }

    /// The path of [`Self::with_logs`].
    pub(super) fn path_with_logs(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        Ok(self.backends.path(&self.call(inputs, mask, true)?))
    }

    fn advance_call(&self, call: Call<'_>, state: &mut State) -> Result<Output> {
        state.require_memory()?;
        let call = Call { begun: state.tokens() > 0, ..call };
        self.backends.choose(&call).advance(&call, state)
    }

    /// The identity, where the map's numbers cannot change behind it.
    fn constant_identity(&self) -> Result<Option<Identity>> {
        let tracked = self.map.exponential_form().is_some_and(|form| form.tracked())
            || self.map.rectified_form().is_some_and(|(projection, _)| projection.track_op())
            || self.map.parameters().iter().any(|(_, tensor)| tensor.track_op());
        if tracked { Ok(None) } else { Ok(Some(self.current_identity()?)) }
    }

    /// The identity by the map's numbers as they are now.
    fn current_identity(&self) -> Result<Identity> {
        let map = &self.map;
        let mut numbers: Vec<Tensor> = map.parameters().into_iter().map(|(_, tensor)| tensor.clone()).collect();
        if let Some(form) = map.exponential_form() {
            numbers.extend(form.tensors().cloned());
        } else if let Some((projection, _)) = map.rectified_form() {
            numbers.push(projection);
        }
        match &self.parameters {
            Parameters::Random(_, random) => {
                numbers.push(random.projection.clone());
                numbers.extend(random.offsets.clone());
            }
            Parameters::OfMap { .. } => numbers.extend(map.constants()),
        }
        Identity::new("FAVOR")
            .with("map", map.name())
            .with("features", map.feature_dim())
            .with("head_dim", map.input_dim())
            .with_digest(&numbers)
    }
}

fn draw(config: &FavorConfig, head_dim: usize, seed: u64, dtype: DType, device: &Device) -> Result<RandomParameters> {
    let m = config.features;
    let mut omega = projection::draw(config.projection, config.radii, m, head_dim, seed)?;
    if config.map.is_exponential() {
        projection::round_factor(&mut omega, head_dim);
    }
    let projection = projection::tensor(omega, (m, head_dim), dtype, device)?;
    let offsets = || projection::tensor(projection::draw_offsets(m, seed)?, m, dtype, device);
    let offsets = config.map.has_offsets().then(offsets).transpose()?;
    Ok(RandomParameters { projection, offsets })
}

impl fmt::Debug for Favor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (map, features) = (self.map.name(), self.map.feature_dim());
        write!(f, "Favor {{ map: {map}, features: {features}, head_dim: {} }}", self.map.input_dim())
    }
}

impl Attention for Favor {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        inputs.sizes_under(mask)?;
        let gates = gates::moved_to_visible(inputs, mask)?;
        let call = self.call(inputs.with_gates_of(gates.as_ref()), mask, false)?;
        if call.sizes.is_empty() {
            return call.sizes.zeros(inputs.q);
        }
        Ok(self.backends.choose(&call).forward(&call)?.values)
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let mask = Mask::causal();
        let call = self.call(inputs, &mask, false)?;
        if call.sizes.is_empty() {
            return call.sizes.zeros(inputs.q);
        }
        Ok(self.advance_call(call, state)?.values)
    }

    fn forward_segment(&self, inputs: Inputs<'_>, segment: &Segment) -> Result<Tensor> {
        self.in_segment(inputs, segment)
    }

    fn identity(&self) -> Result<Identity> {
        match &self.identity {
            Some(identity) => Ok(identity.clone()),
            None => self.current_identity(),
        }
    }

    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        Ok(self.backends.path(&self.call(inputs, mask, false)?))
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        match &self.parameters {
            Parameters::Random(_, random) => {
                let offsets = random.offsets.iter().map(|offsets| ("offsets".to_string(), offsets.clone()));
                std::iter::once(("projection".to_string(), random.projection.clone())).chain(offsets).collect()
            }
            Parameters::OfMap { .. } => {
                let named = self.map.parameters().into_iter();
                named.map(|(name, tensor)| (format!("feature_map.{name}"), tensor.detach())).collect()
            }
        }
    }

    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        let take = |name: &str, old: &Tensor| -> Result<Tensor> {
            match get(name) {
                Some(t) if t.dims() == old.dims() => t.to_dtype(old.dtype())?.to_device(old.device()),
                Some(t) => bail!("buffer {name} has shape {:?}; it must be {:?}", t.dims(), old.dims()),
                None => bail!(
                    "buffer {name} {:?} is missing; it belongs to the model's weights, so save Attention::buffers with them",
                    old.dims()
                ),
            }
        };
        match &self.parameters {
            Parameters::Random(config, random) => {
                let projection = take("projection", &random.projection)?;
                let offsets = random.offsets.as_ref().map(|o| take("offsets", o)).transpose()?;
                self.set_random(config.clone(), RandomParameters { projection, offsets })
            }
            Parameters::OfMap { .. } => {
                let parameters = self.map.parameters();
                let Some((_, like)) = parameters.first() else { return Ok(()) };
                let (dtype, device) = (like.dtype(), like.device());
                // Of how many heads they are, only what was saved can tell: the map looks at the
                // shapes.
                let failure = std::cell::RefCell::new(None);
                let map = self.map.with_parameters(&|name| {
                    let tensor = get(&format!("feature_map.{name}"))?;
                    // A converted copy of a variable would not follow what training does to it.
                    if tensor.is_variable() && (tensor.dtype() != dtype || !tensor.device().same_device(device)) {
                        let error = format!(
                            "buffer feature_map.{name} is a variable of {:?} on {:?}; to be trained it must be of \
                             {dtype:?} on {:?}",
                            tensor.dtype(),
                            tensor.device().location(),
                            device.location()
                        );
                        failure.replace(Some(candle_core::Error::Msg(error)));
                        return None;
                    }
                    let converted = tensor.to_dtype(dtype).and_then(|tensor| tensor.to_device(device));
                    converted.map_err(|error| failure.replace(Some(error))).ok()
                });
                // Otherwise the map would call a tensor missing that only could not be converted.
                if let Some(error) = failure.into_inner() {
                    return Err(error);
                }
                self.set_map(map?)
            }
        }
    }

    fn trained_buffers(&self) -> Vec<String> {
        match &self.parameters {
            Parameters::Random(..) | Parameters::OfMap { trained: false } => Vec::new(),
            Parameters::OfMap { trained: true } => {
                self.map.trained_parameters().into_iter().map(|name| format!("feature_map.{name}")).collect()
            }
        }
    }

    fn redraw(&mut self, seed: u64) -> Result<()> {
        let Parameters::Random(config, RandomParameters { projection: old, .. }) = &self.parameters else {
            return Ok(());
        };
        let (config, parameters) =
            (config.clone(), draw(config, self.map.input_dim(), seed, old.dtype(), old.device())?);
        self.set_random(config, parameters)
    }
}
