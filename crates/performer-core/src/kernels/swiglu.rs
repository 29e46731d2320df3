//! Both linear maps of a gated feed-forward layer and their gate (Shazeer 2020) as one operation.
//!
//! As three operations they have a node each, and Candle's autograd adds the gradients of gates, of
//! numbers and, twice, of the rows to zeros.
//!
//! # Shapes
//!
//! ```text
//! x (.., K), W_g (N, K), W_u (N, K)
//! forward:  x -> g = x W_gᵀ, u = x W_uᵀ (.., N) -> g σ(g) ∘ u (.., N)
//! backward: d (.., N), g, u -> dg, du (.., N) -> dx = du W_u + dg W_g (.., K), dW_g, dW_u (N, K)
//! ```

use std::sync::{Mutex, PoisonError};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Storage, Tensor, bail, op::BackpropOp};

use super::{
    activation::Gate,
    linear::Linear,
    operation::{Operation, Stored},
};

/// `SwigluLinear` computes `swiglu(x W_gᵀ, x W_uᵀ)` of contiguous rows that fused kernels take.
pub(crate) struct SwigluLinear {
    linear: Linear,
    /// Whether any input is tracked, so that a backward pass may follow.
    keep: bool,
    /// `g` and `u`, for the backward pass.
    saved: Mutex<Option<[Tensor; 2]>>,
}

impl SwigluLinear {
    /// Makes the operation for `[x, w_gate, w_up]`, whose result has the shape `shape`.
    pub(crate) fn new(inputs: [&Tensor; 3], shape: Shape) -> Self {
        let keep = inputs.iter().any(|input| input.track_op());
        Self { linear: Linear { shape, heads: false }, keep, saved: Mutex::default() }
    }

    fn save(&self, gate: Storage, up: Storage) {
        if self.keep {
            let tensor = |storage| Tensor::from_storage(storage, self.linear.shape.clone(), BackpropOp::none(), false);
            *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some([tensor(gate), tensor(up)]);
        }
    }
}

/// Computes the operation by the kernels of a device.
macro_rules! forward {
    ($self:ident, $device:ident, $call:ident, $inputs:ident) => {{
        let [x, gate, up] = $inputs;
        let ((gate, shape), (up, _)) = ($self.linear.$call([x, gate])?, $self.linear.$call([x, up])?);
        let layout = Layout::contiguous(&shape);
        let out = Gate::Swiglu.$call([(&gate, &layout), (&up, &layout)])?;
        $self.save(Storage::$device(gate), Storage::$device(up));
        Ok(out)
    }};
}

impl Operation<3> for SwigluLinear {
    fn name(&self) -> &'static str {
        "swiglu-linear"
    }

    fn cpu(&self, inputs: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        forward!(self, Cpu, cpu, inputs)
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, inputs: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        forward!(self, Cuda, cuda, inputs)
    }

    fn backward(&self, [x, w_gate, w_up]: [&Tensor; 3], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let Some([gate, up]) = self.saved.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            bail!("swiglu-linear: the backward pass needs a forward pass with tracked inputs before it")
        };
        let [dgate, dup] = Gate::Swiglu.backward([&gate, &up], out, grad)?;
        let through = |weight, grad: Option<Tensor>| match grad {
            Some(grad) => self.linear.backward([x, weight], out, &grad),
            None => Ok([None, None]),
        };
        let ([dx, dw_up], [dx_of_gate, dw_gate]) = (through(w_up, dup)?, through(w_gate, dgate)?);
        let dx = match (dx, dx_of_gate) {
            (Some(a), Some(b)) => Some((a + b)?),
            (a, b) => a.or(b),
        };
        Ok([dx, dw_gate, dw_up])
    }
}
