//! The plain linear transformer's map.

use candle_core::{Result, Tensor};

use super::{FeatureMap, Features};

/// `φ(x) = elu(x) + 1`, elementwise, `F = D`. Katharopoulos et al. 2020, <https://arxiv.org/abs/2006.16236>, eq. 7.
#[derive(Clone, Debug)]
pub struct Elu {
    dim: usize,
}

impl Elu {
    /// `dim`: the head dimension `D`.
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

    /// In logarithms, `min(x, 0) + ln(1 + max(x, 0))`: computed as `elu(x) + 1` it rounds to 0 from x = −17 on in f32,
    /// and a denominator with it.
    fn features(&self, x: &Tensor) -> Result<Features> {
        let negative = x.neg()?.relu()?;
        let positive = x.relu()?.affine(1.0, 1.0)?.log()?;
        Ok(Features::Log((positive - negative)?))
    }
}
