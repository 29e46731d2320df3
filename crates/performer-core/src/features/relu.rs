//! The ReLU map of generalised attention.

use candle_core::{Result, Tensor};

use super::{FeatureMap, Features, project, transposed};

/// The ε of [`Relu`], which keeps every denominator positive: the value of the paper's own code.
pub const RELU_EPSILON: f64 = 1e-3;

/// The map `φ(x) = M^-½ relu(ω·x) + ε`, `F = M`: an arc-cosine kernel, up to terms in
/// ε = [`RELU_EPSILON`].
///
/// It is the best map on protein sequences in Choromanski et al. 2020
/// (<https://arxiv.org/abs/2009.14794>, section 4.4), and does not estimate softmax.
#[derive(Clone, Debug)]
pub struct Relu {
    projection_t: Tensor,
}

impl Relu {
    /// `projection` is Ω, shape `(M, D)`.
    ///
    /// # Errors
    /// If `projection` has another rank than 2, or M or D is 0.
    pub fn new(projection: Tensor) -> Result<Self> {
        Ok(Self { projection_t: transposed(&projection)? })
    }
}

impl FeatureMap for Relu {
    fn input_dim(&self) -> usize {
        self.projection_t.dims()[0]
    }

    fn feature_dim(&self) -> usize {
        self.projection_t.dims()[1]
    }

    fn rectified_form(&self) -> Option<(Tensor, f64)> {
        Some((self.projection_t.t().ok()?, RELU_EPSILON))
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let norm = (self.feature_dim() as f64).powf(-0.5);
        let values = project(x, &self.projection_t)?.relu()?.affine(norm, RELU_EPSILON)?;
        Ok(Features::Linear { values, log_scale: None })
    }
}
