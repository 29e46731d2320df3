//! Trigonometric maps: random Fourier features of the Gaussian kernel, and their softmax forms.
//!
//! Rahimi & Recht 2007; Choromanski et al. 2020, section 2.3. The softmax kernel is the Gaussian
//! one times `e^{‖x‖²/2} e^{‖y‖²/2}`: that factor is carried as a log-scale, the rest lies between
//! −√2 and √2. Features are signed, so a denominator can come close to zero: these maps are for
//! study rather than for training.

use candle_core::{D, Result, Tensor, bail};

use super::{FeatureMap, Features, half_square_norm, project, transposed};

/// The map `φ(x) = M^-½ e^{‖x‖²/2} [sin(ω·x), cos(ω·x)]`, `F = 2M`: unbiased for the softmax
/// kernel.
///
/// With `SM = e^{x·y}`, its mean squared error for independent Gaussian rows is
/// `(1/2M) e^{‖x+y‖²} SM^-2 (1 − e^{−‖x−y‖²})²` (Choromanski et al. 2020, Lemma 2).
#[derive(Clone, Debug)]
pub struct Trigonometric {
    projection_t: Tensor,
}

impl Trigonometric {
    /// `projection` is Ω, shape `(M, D)`.
    ///
    /// # Errors
    /// If `projection` has another rank than 2, or M or D is 0.
    pub fn new(projection: Tensor) -> Result<Self> {
        Ok(Self { projection_t: transposed(&projection)? })
    }
}

impl FeatureMap for Trigonometric {
    fn input_dim(&self) -> usize {
        self.projection_t.dims()[0]
    }

    fn feature_dim(&self) -> usize {
        2 * self.projection_t.dims()[1]
    }

    fn constants(&self) -> Vec<Tensor> {
        vec![self.projection_t.clone()]
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let u = project(x, &self.projection_t)?;
        let norm = (self.projection_t.dims()[1] as f64).powf(-0.5);
        let values = (Tensor::cat(&[u.sin()?, u.cos()?], D::Minus1)? * norm)?;
        Ok(Features::Linear { values, log_scale: Some(half_square_norm(x)?) })
    }
}

/// The map `φ(x) = (2/M)^½ cos(ω·x + b)`, `b ~ U[0, 2π)`, `F = M`: unbiased for the Gaussian
/// kernel, or for softmax with the factor `e^{‖x‖²/2}`.
#[derive(Clone, Debug)]
pub struct Phase {
    projection_t: Tensor,
    offsets: Tensor,
    softmax: bool,
}

impl Phase {
    /// `projection` is Ω, shape `(M, D)`; `offsets` is `b`, shape `(M)`; with `softmax` the map
    /// estimates `e^{x·y}` instead of `e^{−‖x−y‖²/2}`.
    ///
    /// # Errors
    /// If `projection` has another rank than 2, if M or D is 0, or if `offsets` has another shape
    /// than `(M)`.
    pub fn new(projection: Tensor, offsets: Tensor, softmax: bool) -> Result<Self> {
        let projection_t = transposed(&projection)?;
        if offsets.dims() != &projection.dims()[..1] {
            bail!(
                "offsets have shape {:?}; with a projection {:?} they must be ({})",
                offsets.dims(),
                projection.dims(),
                projection.dims()[0]
            );
        }
        Ok(Self { projection_t, offsets: offsets.copy()?, softmax })
    }
}

impl FeatureMap for Phase {
    /// The two maps are told apart, so that neither goes on from a state of the other.
    fn name(&self) -> &'static str {
        if self.softmax { "Phase" } else { "GaussianPhase" }
    }

    fn input_dim(&self) -> usize {
        self.projection_t.dims()[0]
    }

    fn feature_dim(&self) -> usize {
        self.projection_t.dims()[1]
    }

    fn constants(&self) -> Vec<Tensor> {
        vec![self.projection_t.clone(), self.offsets.clone()]
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let u = project(x, &self.projection_t)?;
        let norm = (2.0 / self.feature_dim() as f64).sqrt();
        let values = (u.broadcast_add(&self.offsets.to_dtype(x.dtype())?)?.cos()? * norm)?;
        let log_scale = if self.softmax { Some(half_square_norm(x)?) } else { None };
        Ok(Features::Linear { values, log_scale })
    }
}
