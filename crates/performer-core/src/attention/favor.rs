//! FAVOR: attention through feature maps, `O(T)`.

#[cfg(feature = "cuda")]
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::{
    Attention, Mask, State, causal, full,
    fused::{self, Source},
    input::{Inputs, Rows, check_head_dim},
    state::Memory,
};
#[cfg(feature = "cuda")]
use crate::features::ExponentialForm;
use crate::{
    features::{FeatureMap, FeatureMapKind, RandomParameters},
    kernels,
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
    /// Where the fused kernels have the map's features from.
    source: Source,
    /// Its projection on the card, where the CUDA kernels compute it.
    #[cfg(feature = "cuda")]
    projection: Option<Arc<kernels::cuda::favor::Projection>>,
    /// The same for the Metal kernel.
    #[cfg(feature = "metal")]
    metal: Option<kernels::metal::Projection>,
    chunk: usize,
    composed: bool,
    parameters: Parameters,
}

/// What the map is made from, so that it can be saved, loaded and drawn again.
#[derive(Debug)]
enum Parameters {
    /// Drawn from a seed.
    Random(FavorConfig, RandomParameters),
    /// The map's own, if it has any.
    OfMap,
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
        let mut favor = Self::with_map(config.map.build(head_dim, Some(&parameters), device)?)?;
        if !config.map.has_parameters() {
            favor.parameters = Parameters::Random(config.clone(), parameters);
        }
        Ok(favor)
    }

    /// FAVOR over any feature map, one of yours included. [`FeatureMap::parameters`] are its buffers, and redrawing leaves it alone.
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
            source: Source::of(&*map)?,
            #[cfg(feature = "cuda")]
            projection: projection_on_card(&*map)?,
            #[cfg(feature = "metal")]
            metal: super::metal::projection(&*map)?,
            map,
            chunk,
            composed: false,
            parameters: Parameters::OfMap,
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

    fn set_map(&mut self, map: Box<dyn FeatureMap>) -> Result<()> {
        self.source = Source::of(&*map)?;
        #[cfg(feature = "cuda")]
        {
            self.projection = projection_on_card(&*map)?;
        }
        #[cfg(feature = "metal")]
        {
            self.metal = super::metal::projection(&*map)?;
        }
        self.map = map;
        Ok(())
    }

    fn set_random(&mut self, config: FavorConfig, random: RandomParameters) -> Result<()> {
        self.set_map(config.map.build(self.map.input_dim(), Some(&random), random.projection.device())?)?;
        self.parameters = Parameters::Random(config, random);
        Ok(())
    }

    /// Causal attention and the logarithms of its denominators, in the scale of the kernel that the map estimates: `(B, H, T, Dv)` and
    /// `(B, H, T, 1)`. With `state`, from there on.
    pub(super) fn with_logs(
        &self,
        [q, k, v]: [&Tensor; 3],
        mask: &Mask,
        state: Option<&mut State>,
    ) -> Result<(Tensor, Tensor)> {
        let (b, h, t, d) = q.dims4()?;
        let (hkv, dv) = (k.dim(1)?, v.dim(3)?);
        let scaled = (q.to_dtype(compute(q.dtype()))? * (d as f64).powf(-0.25))?;
        // As many rows of queries as there are key heads, see FeatureMap::features.
        let offset = || -> Result<Tensor> {
            let rows = scaled.contiguous()?.reshape((b * hkv, (h / hkv) * t, d))?;
            self.map.query_offset(&rows)?.reshape((b, h, t, 1))
        };
        if self.is_fused(q) {
            let rows = match state {
                None => fused::forward(&*self.map, &self.source, [q, k, v], mask, true)?,
                Some(state) => {
                    let rows = fused::extend(&*self.map, &self.source, [q, k, v], state, true)?;
                    state.advance(q)?;
                    rows
                }
            };
            let (values, logs) = (rows.narrow(3, 0, dv)?, rows.narrow(3, dv, 1)?);
            // Ready features hold all of it; the kernels' own leave out what a query's share.
            let logs = if matches!(self.source, Source::Ready) { logs } else { (logs - offset()?)? };
            return Ok((values, logs));
        }
        let inputs = self.inputs(q, k, v, mask)?;
        let rows = match state {
            None => causal::forward(&*self.map, &inputs, self.chunk)?,
            Some(state) => {
                let rows = self.extend_composed(&inputs, state)?;
                state.advance(q)?;
                rows
            }
        };
        let Some(logs) = &rows.logs else {
            bail!("feature map {:?} has signed features, which cannot be joined with exact attention", self.map)
        };
        Ok((inputs.output(&rows.values)?, inputs.output(logs)?))
    }

    fn extend_composed(&self, inputs: &Inputs, state: &mut State) -> Result<Rows> {
        let past = match &state.memory {
            None => None,
            Some(Memory::Sums(sums)) => Some(sums),
            Some(_) => bail!("state: it was made by the fused kernels and cannot go on with composed operations"),
        };
        let (rows, sums) = causal::extend(&*self.map, inputs, self.chunk, past)?;
        state.memory = Some(Memory::Sums(sums.detach()));
        Ok(rows)
    }

    /// Whether the CUDA kernels take it; others, larger ones too, go through composed operations.
    #[cfg(feature = "cuda")]
    fn is_for_cuda(&self, q: &Tensor, v: &Tensor) -> bool {
        !self.composed && kernels::cuda::favor::takes(q, v, self.map.feature_dim())
    }

    /// The projection, if the Metal kernel takes causal attention over these tensors.
    #[cfg(feature = "metal")]
    fn for_metal(&self, qkv: [&Tensor; 3]) -> Option<&kernels::metal::Projection> {
        self.metal.as_ref().filter(|_| !self.composed && super::metal::takes(&*self.map, qkv))
    }

    fn is_fused(&self, q: &Tensor) -> bool {
        !self.composed && kernels::takes(q)
    }
}

/// The type that is computed in.
pub(super) fn compute(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

#[cfg(feature = "cuda")]
fn projection_on_card(map: &dyn FeatureMap) -> Result<Option<Arc<kernels::cuda::favor::Projection>>> {
    let Some(ExponentialForm { projection, hyperbolic, keys }) = map.exponential_form() else { return Ok(None) };
    // Maps of several heads, and those whose keys differ, come to these kernels as ready features.
    if keys.is_some() || projection.dim(0)? != 1 || !projection.device().is_cuda() {
        return Ok(None);
    }
    Ok(Some(Arc::new(kernels::cuda::favor::Projection::new(&projection.squeeze(0)?, hyperbolic)?)))
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
            return fused::forward(&*self.map, &self.source, [q, k, v], mask, false);
        }
        #[cfg(feature = "cuda")]
        if self.is_for_cuda(q, v) {
            return super::cuda::forward(&*self.map, self.projection.as_ref(), q, k, v, mask);
        }
        #[cfg(feature = "metal")]
        if mask.is_causal()
            && let Some(projection) = self.for_metal([q, k, v])
        {
            return super::metal::forward(&*self.map, projection, [q, k, v], mask);
        }
        let inputs = self.inputs(q, k, v, mask)?;
        let (n, tq, g, _) = inputs.q.dims4()?;
        let rows = if n * tq == 0 || inputs.k.dim(1)? == 0 {
            Tensor::zeros((n, tq * g, inputs.v.dim(2)?), inputs.v.dtype(), inputs.v.device())?
        } else if mask.is_causal() {
            causal::forward(&*self.map, &inputs, self.chunk)?.values
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
            let out = fused::extend(&*self.map, &self.source, [q, k, v], state, false)?;
            state.advance(q)?;
            return Ok(out);
        }
        #[cfg(feature = "cuda")]
        if self.is_for_cuda(q, v) {
            let out = super::cuda::extend(&*self.map, self.projection.as_ref(), q, k, v, state)?;
            state.advance(q)?;
            return Ok(out);
        }
        // A token alone, after others, is a few small operations.
        #[cfg(feature = "metal")]
        if let Some(projection) = self.for_metal([q, k, v])
            && (q.dim(2)? > 1 || state.memory.is_none())
        {
            let out = super::metal::extend(&*self.map, projection, [q, k, v], state)?;
            state.advance(q)?;
            return Ok(out);
        }
        let inputs = self.inputs(q, k, v, &Mask::causal())?;
        let (n, t, g, _) = inputs.q.dims4()?;
        let rows = if n * t == 0 {
            Tensor::zeros((n, t * g, inputs.v.dim(2)?), inputs.v.dtype(), inputs.v.device())?
        } else {
            self.extend_composed(&inputs, state)?.values
        };
        state.advance(q)?;
        inputs.output(&rows)
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        match &self.parameters {
            Parameters::Random(_, random) => {
                let offsets = random.offsets.iter().map(|offsets| ("offsets".to_string(), offsets.clone()));
                std::iter::once(("projection".to_string(), random.projection.clone())).chain(offsets).collect()
            }
            Parameters::OfMap => {
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
                None => bail!("buffer {name} {:?} is missing", old.dims()),
            }
        };
        match &self.parameters {
            Parameters::Random(config, random) => {
                let projection = take("projection", &random.projection)?;
                let offsets = random.offsets.as_ref().map(|o| take("offsets", o)).transpose()?;
                self.set_random(config.clone(), RandomParameters { projection, offsets })
            }
            Parameters::OfMap => {
                let parameters = self.map.parameters();
                let Some((_, like)) = parameters.first() else { return Ok(()) };
                let (dtype, device) = (like.dtype(), like.device());
                // Of how many heads they are, only what was saved can tell: the map looks at the shapes.
                let map = self.map.with_parameters(&|name| {
                    let tensor = get(&format!("feature_map.{name}"))?;
                    tensor.to_dtype(dtype).ok()?.to_device(device).ok()
                })?;
                self.set_map(map)
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
