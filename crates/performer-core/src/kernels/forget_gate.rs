//! The forget gates of a layer as one operation, on CUDA.
//!
//! With Candle's operations the gates of a layer took some seventy launches in a training step.
//! Some of these operations the tape (`crate::tape`) cannot record, so the whole backward pass went
//! through Candle's own. On an H100 this cost a third of a step.
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
