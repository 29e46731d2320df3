//! Exponential maps of the softmax kernel: all features positive, given in logarithms.
//!
//! Choromanski et al. 2020, <https://arxiv.org/abs/2009.14794>, Lemma 1.

use candle_core::{D, Result, Tensor};

use super::{ExponentialForm, FeatureMap, Features, project, transposed};

/// The map of positive random features, `φ(x)_r = M^-½ exp(ω_r·x − ‖x‖²/2)`, `F = M`.
///
/// It is unbiased for `SM = e^{x·y}`; its mean squared error for independent Gaussian rows is
/// `(1/M) e^{‖x+y‖²} SM² (1 − e^{−‖x+y‖²})` (Choromanski et al. 2020, Lemma 2).
#[derive(Clone, Debug)]
pub struct Positive {
    projection_t: Tensor,
}

impl Positive {
    /// `projection` is Ω, shape `(M, D)`.
    ///
    /// # Errors
    /// If `projection` has another rank than 2, or M or D is 0.
    pub fn new(projection: Tensor) -> Result<Self> {
        Ok(Self { projection_t: transposed(&projection)? })
    }
}

impl FeatureMap for Positive {
    fn input_dim(&self) -> usize {
        self.projection_t.dims()[0]
    }

    fn feature_dim(&self) -> usize {
        self.projection_t.dims()[1]
    }

    fn exponential_form(&self) -> Option<ExponentialForm> {
        let projection = self.projection_t.t().ok()?.unsqueeze(0).ok()?;
        Some(ExponentialForm { projection, hyperbolic: false, keys: None })
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        Ok(Features::Log(project(x, &self.projection_t)?.broadcast_sub(&self.query_offset(x)?)?))
    }
}

/// The map of hyperbolic random features, `(2M)^-½ exp(±ω_r·x − ‖x‖²/2)`, `F = 2M`, all `+` before
/// all `−`.
///
/// It is unbiased for `e^{x·y}`; its MSE is `½(1 − e^{−‖x+y‖²})` times that of [`Positive`] at the
/// same `M`.
#[derive(Clone, Debug)]
pub struct Hyperbolic {
    projection_t: Tensor,
}

impl Hyperbolic {
    /// `projection` is Ω, shape `(M, D)`.
    ///
    /// # Errors
    /// If `projection` has another rank than 2, or M or D is 0.
    pub fn new(projection: Tensor) -> Result<Self> {
        Ok(Self { projection_t: transposed(&projection)? })
    }
}

impl FeatureMap for Hyperbolic {
    fn input_dim(&self) -> usize {
        self.projection_t.dims()[0]
    }

    fn feature_dim(&self) -> usize {
        2 * self.projection_t.dims()[1]
    }

    fn exponential_form(&self) -> Option<ExponentialForm> {
        let projection = self.projection_t.t().ok()?.unsqueeze(0).ok()?;
        Some(ExponentialForm { projection, hyperbolic: true, keys: None })
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let u = project(x, &self.projection_t)?;
        let both = Tensor::cat(&[&u, &u.neg()?], D::Minus1)?;
        Ok(Features::Log(both.broadcast_sub(&self.query_offset(x)?)?))
    }
}
