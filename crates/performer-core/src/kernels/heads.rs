//! Heads: rows `(B, T, H·D)`, as linear maps make and take them, and `(B, H, T, D)`, as attention
//! does.
//!
//! Candle's autograd adds the gradient of every node to zeros, those of a transposition too, and
//! with strides that is slow. Here a linear map, its division into heads and rotary positions are
//! one node.

use candle_core::{CpuStorage, CudaStorage, Layout, MetalStorage, Result, Shape, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    copy,
    linear::Linear,
    operation::{Operation, Stored},
    rotary::Rotary,
    with_storages,
};

/// Copies heads `(B, H, T, D)` to contiguous memory, as `(B, T, H, D)` if `merged`, and turns them
/// by rotary positions, if there are any, in a direction of 1 or −1. No gradient passes.
///
/// Rotary positions need f32 on the CPU and a type of the kernels on CUDA; other devices have none.
pub(super) fn arrange(x: &Tensor, merged: bool, turn: Option<(&Rotary, f32)>) -> Result<Tensor> {
    let x = x.detach();
    let (b, h, t, d) = x.dims4()?;
    let shape = if merged { (b, t, h, d) } else { (b, h, t, d) };
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && cuda::heads::takes(x.dtype(), x.layout()) {
        let out = cuda::with_storages([&x], |[x]| cuda::heads::arrange(x, merged, turn))?;
        return Ok(cuda::tensor(out, shape));
    }
    match turn {
        Some((rotary, direction)) => {
            let out = with_storages([&x], |[x]| rotary.turn(x, direction, merged))?;
            Tensor::from_vec(out, shape, x.device())
        }
        None if merged => x.transpose(1, 2)?.contiguous(),
        None => x.contiguous(),
    }
}

/// `ToHeads` is a linear map of rows `(B, T, K)` by a weight `(H·D, K)` and perhaps a bias
/// `(H·D)` to heads `(B, H, T, D)`, turned by rotary positions if there are any.
pub(crate) struct ToHeads {
    /// The map to `(B, T, H, D)`.
    pub(crate) linear: Linear,
    /// Only where fused kernels take the rows.
    pub(crate) rotary: Option<Rotary>,
}

impl ToHeads {
    /// The rows of `linear`, contiguous as `(B, T, H, D)`, seen as heads `(B, H, T, D)`.
    fn layout(&self) -> Result<Layout> {
        Layout::contiguous(&self.linear.shape).transpose(1, 2)
    }
}

impl<const N: usize> Operation<N> for ToHeads
where
    Linear: Operation<N>,
{
    fn name(&self) -> &'static str {
        "linear-to-heads"
    }

    fn cpu(&self, inputs: [Stored<'_, CpuStorage>; N]) -> Result<(CpuStorage, Shape)> {
        let ((rows, _), layout) = (self.linear.cpu(inputs)?, self.layout()?);
        let heads = match &self.rotary {
            Some(rotary) => CpuStorage::F32(rotary.turn((&rows, &layout), 1.0, false)?),
            None if layout.is_contiguous() => rows,
            None => copy(&rows, &layout)?,
        };
        Ok((heads, layout.shape().clone()))
    }

    fn cuda(&self, inputs: [Stored<'_, CudaStorage>; N]) -> Result<(CudaStorage, Shape)> {
        let ((rows, _), layout) = (self.linear.cuda(inputs)?, self.layout()?);
        #[cfg(feature = "cuda")]
        if cuda::heads::takes(candle_core::backend::BackendStorage::dtype(&rows), &layout) {
            let turn = self.rotary.as_ref().map(|rotary| (rotary, 1.0));
            return Ok((cuda::heads::arrange((&rows, &layout), false, turn)?, layout.shape().clone()));
        }
        Ok((copy(&rows, &layout)?, layout.shape().clone()))
    }

    fn metal(&self, inputs: [Stored<'_, MetalStorage>; N]) -> Result<(MetalStorage, Shape)> {
        let ((rows, _), layout) = (self.linear.metal(inputs)?, self.layout()?);
        Ok((copy(&rows, &layout)?, layout.shape().clone()))
    }

    fn backward(&self, inputs: [&Tensor; N], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        let turn = self.rotary.as_ref().map(|rotary| (rotary, -1.0));
        self.linear.backward(inputs, out, &arrange(grad, true, turn)?)
    }
}
