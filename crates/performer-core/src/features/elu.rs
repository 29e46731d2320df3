//! The feature map of the linear transformer, `elu(x) + 1`.

use candle_core::{Result, Tensor};

use super::{FeatureMap, Features};

/// The map `φ(x) = elu(x) + 1`, elementwise, `F = D`. Katharopoulos et al. 2020,
/// <https://arxiv.org/abs/2006.16236>, eq. 7.
#[derive(Clone, Debug)]
pub struct Elu {
    dim: usize,
}

impl Elu {
    /// `dim` is the head dimension `D`.
    pub fn new(dim: usize) -> Self {
        Self { dim }
    }
}

impl FeatureMap for Elu {
    fn input_dim(&self) -> usize {
        self.dim
    }

    fn feature_dim(&self) -> usize {
        self.dim
    }

    /// Computes the features in logarithms, `min(x, 0) + ln(1 + max(x, 0))`: as `elu(x) + 1` they
    /// would round to 0 from x = −17 on in f32, and a denominator with them.
    fn features(&self, x: &Tensor) -> Result<Features> {
        // Candle's derivative of `relu` at 0 is 1. Two of them, of x and of −x, would give a number
        // that is exactly 0 twice its gradient.
        let positive = x.relu()?;
        let negative = (x - &positive)?;
        Ok(Features::Log((positive.affine(1.0, 1.0)?.log()? + negative)?))
    }
}
