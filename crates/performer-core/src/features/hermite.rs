//! The Hermite-tail map: the Taylor-2 kernel exactly, and random features for the remainder.
//!
//! `exp(ω·x − ‖x‖²/2)` is the generating function of the Hermite polynomials, at `ω·x/‖x‖` with
//! powers of `‖x‖`. They are orthogonal for Gaussian ω. The terms up to the second degree, `h₂`,
//! estimate `1 + z + z²/2`, which is known: so they are left out of the random features, and the
//! Taylor-2 map takes their place without variance.

use candle_core::{D, Result, Tensor};

use super::{FeatureMap, Features, Taylor2, half_square_norm, project, transposed};

/// The map of Taylor-2 features ⊕ `M^-½ (exp(ω·x − ‖x‖²/2) − h₂(x))` with
/// `h₂(x) = 1 + ω·x + ((ω·x)² − ‖x‖²)/2`, `F = 1 + D + D(D+1)/2 + M`.
///
/// `E[h₂(x) h₂(y)]` is the Taylor-2 kernel and orthogonal to the remainder, so the sum is unbiased
/// for `e^{x·y}` and all variance is in the tail. Features are signed.
#[derive(Clone, Debug)]
pub struct HermiteTail {
    projection_t: Tensor,
    taylor: Taylor2,
}

impl HermiteTail {
    /// `projection` is Ω, shape `(M, D)`.
    ///
    /// # Errors
    /// If `projection` has another rank than 2, if M or D is 0, or if `D(D+1)/2` exceeds 16384.
    pub fn new(projection: Tensor) -> Result<Self> {
        let projection_t = transposed(&projection)?;
        let taylor = Taylor2::new(projection_t.dim(0)?, projection.device())?;
        Ok(Self { projection_t, taylor })
    }
}

impl FeatureMap for HermiteTail {
    fn input_dim(&self) -> usize {
        self.projection_t.dims()[0]
    }

    fn feature_dim(&self) -> usize {
        self.taylor.feature_dim() + self.projection_t.dims()[1]
    }

    fn constants(&self) -> Vec<Tensor> {
        vec![self.projection_t.clone()]
    }

    /// Computes the features. The largest exponential of a row, at least 1, sets its scale, which
    /// is a constant to the gradient since it cancels in the product.
    fn features(&self, x: &Tensor) -> Result<Features> {
        let u = project(x, &self.projection_t)?;
        let half_norm = half_square_norm(x)?;
        let log = u.broadcast_sub(&half_norm)?;
        let scale = log.detach().max_keepdim(D::Minus1)?.relu()?;
        let shrink = scale.neg()?.exp()?;
        let h2 = ((u.sqr()? * 0.5)? + &u)?.broadcast_sub(&half_norm.affine(1.0, -1.0)?)?;
        let tail = (log.broadcast_sub(&scale)?.exp()? - h2.broadcast_mul(&shrink)?)?;
        let tail = (tail * (self.projection_t.dims()[1] as f64).powf(-0.5))?;
        let exact = self.taylor.values(x)?.broadcast_mul(&shrink)?;
        let values = Tensor::cat(&[&exact, &tail], D::Minus1)?;
        Ok(Features::Linear { values, log_scale: Some(scale) })
    }
}
