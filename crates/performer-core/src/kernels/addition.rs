//! Sums of two tensors of one shape. Candle's kernel for CUDA is launched with a thread for each
//! number; on an H200 it took three times as long for bf16 as memory needs.

#[cfg(feature = "cuda")]
use candle_core::{CpuStorage, CudaStorage, CustomOp2, Layout, Shape, bail};
use candle_core::{Result, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;

/// Computes `a + b` for tensors of one shape and type. The tape does not record it.
///
/// # Errors
/// If the shapes or types differ.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if a.shape() == b.shape()
        && a.dtype() == b.dtype()
        && a.device().same_device(b.device())
        && [a, b].iter().all(|t| cuda::takes(t) && t.is_contiguous())
    {
        return a.apply_op2(b, Addition);
    }
    a.add(b)
}

/// `Addition` is the sum of two contiguous tensors on CUDA as one of Candle's operations. It is no
/// `Operation` of ours, because the tape would record it as one whose backward pass makes tensors
/// of its own, and a sum passes on the gradient that it gets.
#[cfg(feature = "cuda")]
struct Addition;

#[cfg(feature = "cuda")]
impl CustomOp2 for Addition {
    fn name(&self) -> &'static str {
        "add"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        bail!("add: this operation has no kernel for the CPU, where Candle's own is used")
    }

    fn cuda_fwd(&self, a: &CudaStorage, of_a: &Layout, b: &CudaStorage, of_b: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::activation::add((a, of_a), (b, of_b))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((Some(grad.clone()), Some(grad.clone())))
    }
}
