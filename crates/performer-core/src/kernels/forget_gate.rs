//! The forget gates of a layer as one operation, on CUDA.
//!
//! Candle's operations took some seventy launches a layer for them in a training step, and on an
//! H100 a third of the time of all of it. We suppose that the slowest were the layer's input in
//! f32, and the product that sums over all tokens for a few numbers of each head.
//!
//! # Shapes
//!
//! ```text
//! forward:  x (B, T, E), weight (H, E), bias (H) -> gates (B, H, T) = log σ(x weightᵀ + bias), f32
//! backward: gradient of the gates (B, H, T) -> dx (B, T, E), dweight (H, E), dbias (H)
//! ```

use candle_core::{CudaStorage, Result, Shape, Tensor};

use super::{
    cuda,
    operation::{Operation, Stored},
};

/// `ForgetGate` computes `log σ(x wᵀ + b)` of contiguous rows, with a contiguous weight and a bias
/// in f32.
pub(crate) struct ForgetGate;

impl Operation<3> for ForgetGate {
    fn name(&self) -> &'static str {
        "forget-gate"
    }

    fn cuda(&self, [x, weight, bias]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        cuda::forget_gate::forward(x, weight, bias)
    }

    fn backward(&self, [x, weight, _]: [&Tensor; 3], gates: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let grad = grad.contiguous()?;
        let gradients = cuda::with_storages([x, weight, gates, &grad], |[x, weight, gates, grad]| {
            cuda::forget_gate::backward(x, weight, gates, grad)
        })?;
        Ok(gradients.map(Some))
    }
}
