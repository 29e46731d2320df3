//! FAVOR: attention through feature maps, `O(T)`.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{
    Attention, Mask, State, causal, full, fused,
    input::{Inputs, check_head_dim},
    state::Memory,
};
use crate::{
    features::{ExponentialForm, FeatureMap, FeatureMapKind, RandomParameters},
    kernels::{self, favor::Exponential},
    projection::{self, ProjectionKind, Radii},
};

/// What FAVOR attention is made of; the default is FAVOR+ with 128 orthogonal positive features.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
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

/// FAVOR attention (Choromanski et al. 2020): any [`FeatureMap`], linear time and memory, constant decoding state.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use performer_core::{Attention, Favor, FavorConfig, Mask};
///
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let favor = Favor::new(&FavorConfig::default(), 64, 42, DType::F32, &device)?;
/// let q = Tensor::randn(0f32, 1.0, (1, 4, 1000, 64), &device)?;
/// let out = favor.forward(&q, &q, &q, &Mask::causal())?;
/// assert_eq!(out.dims(), [1, 4, 1000, 64]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Favor {
    map: Box<dyn FeatureMap>,
    /// The map as the fused kernels compute it.
    exponential: Option<Arc<Exponential>>,
    /// Its projection on the card, where the CUDA kernels compute it.
    #[cfg(feature = "cuda")]
    projection: Option<Arc<kernels::cuda::favor::Projection>>,
    chunk: usize,
    composed: bool,
    drawn: Option<Drawn>,
}

/// How the map's random parameters came about, so that they can be saved, loaded and drawn again.
#[derive(Debug)]
struct Drawn {
    config: FavorConfig,
    parameters: RandomParameters,
}

impl Favor {
    /// Draws the random features of `config` from `seed`, for heads of dimension `head_dim`.
    ///
    /// The projection is kept in f64 if `dtype` is f64, else in f32. The same seed gives the same features on every platform.
    ///
    /// # Errors
    /// If `features` or `head_dim` is 0, or the map cannot be built for that dimension.
    pub fn new(config: &FavorConfig, head_dim: usize, seed: u64, dtype: DType, device: &Device) -> Result<Self> {
        if head_dim == 0 {
            bail!("head_dim is 0; it must be at least 1");
        }
        if !config.map.is_random() {
            return Self::with_map(config.map.build(head_dim, None, device)?);
        }
        if config.features == 0 {
            bail!("features (M) is 0; it must be at least 1, and 128 is a good start");
        }
        let dtype = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let parameters = draw(config, head_dim, seed, dtype, device)?;
        let map = config.map.build(head_dim, Some(&parameters), device)?;
        let mut favor = Self::with_map(map)?;
        favor.drawn = Some(Drawn { config: config.clone(), parameters });
        Ok(favor)
    }

    /// FAVOR over any feature map, one of yours included. It has no buffers, and redrawing leaves it alone.
    pub fn with_map(map: Box<dyn FeatureMap>) -> Result<Self> {
        let head_dim = map.input_dim();
        if head_dim == 0 || map.feature_dim() == 0 {
            bail!(
                "feature map {map:?} takes rows of {head_dim} and makes {} features; both must be at least 1",
                map.feature_dim()
            );
        }
        // Inside a chunk of C tokens a row costs C(F + D) products, a chunk's state F·D/C a token: about even at C = D.
        let chunk = head_dim.next_power_of_two().clamp(16, 64);
        Ok(Self {
            exponential: exponential(&*map)?,
            #[cfg(feature = "cuda")]
            projection: projection_on_card(&*map)?,
            map,
            chunk,
            composed: false,
            drawn: None,
        })
    }

    /// Never uses the fused kernels: the same numbers from Candle's own operations, slower, as a second opinion on them.
    pub fn composed(mut self) -> Self {
        self.composed = true;
        self
    }

    /// The feature map, to look at kernels and features.
    pub fn map(&self) -> &dyn FeatureMap {
        &*self.map
    }

    /// Sets the tokens a chunk of causal attention takes in composed operations: cost and rounding change, the result does not.
    ///
    /// # Errors
    /// If `chunk` is no power of two.
    pub fn with_chunk(mut self, chunk: usize) -> Result<Self> {
        if !chunk.is_power_of_two() {
            bail!("chunk is {chunk}; it must be a power of two, such as 64");
        }
        self.chunk = chunk;
        Ok(self)
    }

    fn inputs(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Inputs> {
        let inputs = Inputs::new(q, k, v, mask)?;
        check_head_dim(&*self.map, q)?;
        Ok(inputs)
    }

    fn set_parameters(&mut self, parameters: RandomParameters) -> Result<()> {
        let Some(drawn) = &mut self.drawn else { return Ok(()) };
        self.map = drawn.config.map.build(self.map.input_dim(), Some(&parameters), parameters.projection.device())?;
        drawn.parameters = parameters;
        self.exponential = exponential(&*self.map)?;
        #[cfg(feature = "cuda")]
        {
            self.projection = projection_on_card(&*self.map)?;
        }
        Ok(())
    }

    /// Whether the CUDA kernels take it; others, larger ones too, go through composed operations.
    #[cfg(feature = "cuda")]
    fn is_for_cuda(&self, q: &Tensor, v: &Tensor) -> bool {
        !self.composed && kernels::cuda::favor::takes(q, v, self.map.feature_dim())
    }

    fn is_fused(&self, q: &Tensor) -> bool {
        !self.composed && kernels::takes(q)
    }
}

/// The form in which fused kernels compute a map's features, if it has one and lives on the CPU.
fn exponential(map: &dyn FeatureMap) -> Result<Option<Arc<Exponential>>> {
    let Some(ExponentialForm { projection, hyperbolic }) = map.exponential_form() else { return Ok(None) };
    if !projection.device().is_cpu() {
        return Ok(None);
    }
    let rows = projection.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
    Ok(Some(Arc::new(Exponential::new(&rows, map.input_dim(), hyperbolic))))
}

#[cfg(feature = "cuda")]
fn projection_on_card(map: &dyn FeatureMap) -> Result<Option<Arc<kernels::cuda::favor::Projection>>> {
    let Some(ExponentialForm { projection, hyperbolic }) = map.exponential_form() else { return Ok(None) };
    if !projection.device().is_cuda() {
        return Ok(None);
    }
    Ok(Some(Arc::new(kernels::cuda::favor::Projection::new(&projection, hyperbolic)?)))
}

fn draw(config: &FavorConfig, head_dim: usize, seed: u64, dtype: DType, device: &Device) -> Result<RandomParameters> {
    let m = config.features;
    let projection = projection::draw_tensor(config.projection, config.radii, m, head_dim, seed, dtype, device)?;
    let offsets = if config.map.has_offsets() {
        Some(
            Tensor::from_vec(projection::draw_offsets(m, seed)?, m, &Device::Cpu)?
                .to_dtype(dtype)?
                .to_device(device)?,
        )
    } else {
        None
    };
    Ok(RandomParameters { projection, offsets })
}

impl Attention for Favor {
    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Tensor> {
        if self.is_fused(q) {
            return fused::forward(&*self.map, self.exponential.as_ref(), q, k, v, mask);
        }
        #[cfg(feature = "cuda")]
        if self.is_for_cuda(q, v) {
            return super::cuda::forward(&*self.map, self.projection.as_ref(), q, k, v, mask);
        }
        let inputs = self.inputs(q, k, v, mask)?;
        let (n, tq, g, _) = inputs.q.dims4()?;
        let rows = if n * tq == 0 || inputs.k.dim(1)? == 0 {
            Tensor::zeros((n, tq * g, inputs.v.dim(2)?), inputs.v.dtype(), inputs.v.device())?
        } else if mask.is_causal() {
            causal::forward(&*self.map, &inputs, self.chunk)?
        } else {
            full::attend(&*self.map, &inputs)?
        };
        inputs.output(&rows)
    }

    fn extend(&self, q: &Tensor, k: &Tensor, v: &Tensor, state: &mut State) -> Result<Tensor> {
        state.check_batch(q)?;
        if let Some(Memory::Cache(_)) = &state.memory {
            bail!("state: it was made by softmax attention and cannot go on with FAVOR");
        }
        let (q, k, v) = (&q.detach(), &k.detach(), &v.detach());
        if self.is_fused(q) {
            let out = fused::extend(&*self.map, self.exponential.as_ref(), q, k, v, state)?;
            state.advance(q)?;
            return Ok(out);
        }
        #[cfg(feature = "cuda")]
        if self.is_for_cuda(q, v) {
            let out = super::cuda::extend(&*self.map, self.projection.as_ref(), q, k, v, state)?;
            state.advance(q)?;
            return Ok(out);
        }
        let inputs = self.inputs(q, k, v, &Mask::causal())?;
        let (n, t, g, _) = inputs.q.dims4()?;
        let rows = if n * t == 0 {
            Tensor::zeros((n, t * g, inputs.v.dim(2)?), inputs.v.dtype(), inputs.v.device())?
        } else {
            let past = match &state.memory {
                None => None,
                Some(Memory::Sums(sums)) => Some(sums),
                Some(_) => bail!("state: it was made by the fused kernels and cannot go on with composed operations"),
            };
            let (rows, sums) = causal::extend(&*self.map, &inputs, self.chunk, past)?;
            state.memory = Some(Memory::Sums(sums.detach()));
            rows
        };
        state.advance(q)?;
        inputs.output(&rows)
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        let Some(Drawn { parameters, .. }) = &self.drawn else { return Vec::new() };
        let mut buffers = vec![("projection".to_string(), parameters.projection.clone())];
        if let Some(offsets) = &parameters.offsets {
            buffers.push(("offsets".to_string(), offsets.clone()));
        }
        buffers
    }

    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        let Some(Drawn { parameters, .. }) = &self.drawn else { return Ok(()) };
        let take = |name: &str, old: &Tensor| -> Result<Tensor> {
            match get(name) {
                Some(t) if t.dims() == old.dims() => t.to_dtype(old.dtype())?.to_device(old.device()),
                Some(t) => bail!("buffer {name} has shape {:?}; it must be {:?}", t.dims(), old.dims()),
                None => bail!("buffer {name} {:?} is missing", old.dims()),
            }
        };
        let projection = take("projection", &parameters.projection)?;
        let offsets = parameters.offsets.as_ref().map(|o| take("offsets", o)).transpose()?;
        self.set_parameters(RandomParameters { projection, offsets })
    }

    fn redraw(&mut self, seed: u64) -> Result<()> {
        let Some(Drawn { config, parameters }) = &self.drawn else { return Ok(()) };
        let old = &parameters.projection;
        let parameters = draw(config, self.map.input_dim(), seed, old.dtype(), old.device())?;
        self.set_parameters(parameters)
    }
}
