//! Polynomial features as one operation, on CUDA: [`FeatureMap::quadratic_form`].
//!
//! Candle's operations gather the factors of every product, and add the gradients of what they
//! gathered one after the other. On an H100 that took most of a training step.
//!
//! # Shapes
//!
//! ```text
//! forward:  x (.., D) -> with s = scale x: [1, s, w_ij s_i s_j for i <= j, zeros] (.., W)
//! backward: gradient of the features (.., W), x -> dx (.., D)
//! ```
//!
//! All are of the type of `x`: f32, f16 or bf16.
//!
//! [`FeatureMap::quadratic_form`]: crate::FeatureMap::quadratic_form

use candle_core::{CudaStorage, Result, Shape, Tensor};

use super::{
    cuda,
    operation::{Operation, Stored},
};

/// `QuadraticFeatures` computes features of contiguous rows, which are multiplied by a scale first.
/// Products of features are `1 + z + c z²` with `z = scale² x·y`.
pub(crate) struct QuadraticFeatures {
    /// What rows are multiplied by.
    pub(crate) scale: f32,
    /// `c`.
    pub(crate) second: f32,
    /// The number of zeros after the features.
    pub(crate) zeros: usize,
}

impl QuadraticFeatures {
    /// The numbers `W` of a row of features, for rows of `dim` numbers.
    pub(crate) fn width(&self, dim: usize) -> usize {
        1 + dim + dim * (dim + 1) / 2 + self.zeros
    }
}

impl Operation<1> for QuadraticFeatures {
    fn name(&self) -> &'static str {
        "quadratic-features"
    }

    fn cuda(&self, [x]: [Stored<'_, CudaStorage>; 1]) -> Result<(CudaStorage, Shape)> {
        cuda::quadratic::forward(self, x)
    }

    fn backward(&self, [x]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let grad = grad.contiguous()?;
        Ok([Some(cuda::with_storages([x, &grad], |[x, grad]| cuda::quadratic::backward(self, x, grad))?)])
    }
}
