//! This module has the attentions that take the place of the model's softmax.

use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Tensor, bail};
use performer_core::{
    Attention, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, ProjectionKind, Radii, Softmax, State,
    features::{
        Fitted,
        fit::{Moments, Options, fit},
    },
    projection::{derive_seed, draw_tensor},
};

/// A `Kind` is a kind of random features.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    map: FeatureMapKind,
    radii: Radii,
    /// Whether the features are fitted to the model's queries and keys, and if so, whether these
    /// are centred first.
    fitted: Option<bool>,
}

use FeatureMapKind::{Dense, Optimal, Positive};

/// The kinds that are compared.
pub(crate) const KINDS: [Kind; 5] = [
    Kind { name: "FAVOR+", map: Positive, radii: Radii::Chi, fitted: None },
    Kind { name: "FAVOR+, radii √D", map: Positive, radii: Radii::Sqrt, fitted: None },
    Kind { name: "FAVOR++, fitted", map: Optimal, radii: Radii::Chi, fitted: Some(false) },
    Kind { name: "FAVOR#, fitted", map: Dense, radii: Radii::Chi, fitted: Some(false) },
    CENTRED,
];

/// The kind that comes nearest without training; training begins from its features.
pub(crate) const CENTRED: Kind =
    Kind { name: "FAVOR#, fitted and centred", map: Dense, radii: Radii::Chi, fitted: Some(true) };

impl Kind {
    /// Builds FAVOR with `features` features of this kind for a layer whose queries and keys have
    /// these `moments`; `draw` is a seed for all layers.
    pub(crate) fn attention(
        &self,
        layer: usize,
        features: usize,
        moments: &Moments,
        draw: u64,
    ) -> Result<Arc<dyn Attention>> {
        if self.fitted.is_some() {
            let fitted = self.fitted_features(layer, features, moments, draw)?;
            return Ok(Arc::new(Favor::with_map(Box::new(fitted))?));
        }
        let config = FavorConfig::default()
            .with_map(self.map)
            .with_features(features)
            .with_projection(ProjectionKind::Orthogonal)
            .with_radii(self.radii);
        let seed = derive_seed(draw, layer as u64);
        Ok(Arc::new(Favor::new(&config, moments.head_dim(), seed, DType::F32, &Device::Cpu)?))
    }

    /// Fits features of this kind's map to `moments`; the other arguments are those of
    /// [`Self::attention`].
    pub(crate) fn fitted_features(
        &self,
        layer: usize,
        features: usize,
        moments: &Moments,
        draw: u64,
    ) -> Result<Fitted> {
        let centre = self.fitted == Some(true);
        let (kind, seed) = (ProjectionKind::Orthogonal, derive_seed(draw, layer as u64));
        let omega = draw_tensor(kind, self.radii, features, moments.head_dim(), seed, DType::F64, &Device::Cpu)?;
        fit(&omega, moments, Options::new(self.map).with_centre(centre))?.to(DType::F32, &Device::Cpu)
    }
}

/// `Observed` is softmax attention that collects the moments of queries and keys; tokens must have
/// no padding.
#[derive(Debug)]
pub(crate) struct Observed(Mutex<Moments>);

impl Observed {
    pub(crate) fn new(heads: usize, head_dim: usize) -> Result<Self> {
        Ok(Self(Mutex::new(Moments::new(heads, head_dim)?)))
    }

    pub(crate) fn moments(&self) -> Moments {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }
}

impl Attention for Observed {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(inputs.q, inputs.k)?;
        Softmax::new().forward(inputs, mask)
    }

    fn advance(&self, _: Inputs<'_>, _: &mut State) -> Result<Tensor> {
        bail!("an encoder does not decode")
    }
}

/// `Uniform` is attention that weighs all keys equally; an approximation must be better than that.
#[derive(Debug)]
pub(crate) struct Uniform;

impl Attention for Uniform {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        let zero = inputs.q.zeros_like()?;
        Softmax::new().forward(Inputs::new(&zero, inputs.k, inputs.v), mask)
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let zero = inputs.q.zeros_like()?;
        Softmax::new().advance(Inputs::new(&zero, inputs.k, inputs.v), state)
    }
}
