//! A linear map `x Wᵀ + b` as one differentiable operation on any device. Candle's autograd adds
//! every gradient to zeros at every node it passes, so that a reshape, a transposition and a cast
//! around a product would each cost three more passes over memory.
//!
//! # Shapes
//!
//! ```text
//! x (.., K) or heads (B, H, T, D) with K = H·D, W (N, K), b (N)
//! forward:  x as rows (R, K) -> x Wᵀ + b (R, N) -> `Linear::shape`
//! backward: g (R, N) -> dx = g W (R, K) -> the shape of x;  dW = gᵀ x (N, K);  db = Σ_rows g (N)
//! ```

use candle_core::{
    CpuStorage, CudaStorage, CustomOp2, CustomOp3, DType, Layout, MetalStorage, Result, Shape, Tensor,
    backend::{BackendDevice, BackendStorage},
    op::Add,
};
use pulp::Arch;

use super::{contiguous, with_storages};
use crate::ops::matmul;

/// `Linear` computes `x Wᵀ` or `x Wᵀ + b`, in the type of `x`, for rows of `x`, `W` `(N, K)` and
/// `b` `(N)`.
pub(crate) struct Linear {
    /// The shape of the result, which has as many rows of `N` as there are rows of `x`.
    pub(crate) shape: Shape,
    /// Whether `x` is heads `(B, H, T, D)`, where all heads of a token make one row; else `x` is
    /// contiguous, `(.., K)`.
    pub(crate) heads: bool,
}

/// An operand: a storage and its layout.
type Operand<'a, S> = (&'a S, &'a Layout);

impl Linear {
    /// Computes `x Wᵀ`.
    fn product<S: BackendStorage>(&self, x: Operand<S>, weight: Operand<S>) -> Result<S>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        let (n, k) = weight.1.shape().dims2()?;
        let merged = if self.heads { Some(x.1.transpose(1, 2)?) } else { None };
        let layout = merged.as_ref().unwrap_or(x.1);
        let copied = if layout.is_contiguous() { None } else { Some(copy(x.0, layout)?) };
        let (rows, start) = copied.as_ref().map_or((x.0, layout.start_offset()), |copied| (copied, 0));
        let cast = if weight.0.dtype() == x.0.dtype() { None } else { Some(weight.0.to_dtype(weight.1, x.0.dtype())?) };
        let plain = Layout::contiguous(weight.1.shape());
        let (weight, layout) = cast.as_ref().map_or(weight, |cast| (cast, &plain));
        let count = x.1.shape().elem_count() / k;
        let at = Layout::contiguous_with_offset((count, k), start);
        rows.matmul(weight, (1, count, n, k), &at, &layout.transpose(0, 1)?)
    }

    /// Computes `x Wᵀ + b`.
    fn with_bias<S: BackendStorage>(&self, x: Operand<S>, weight: Operand<S>, bias: Operand<S>) -> Result<S>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        let out = self.product(x, weight)?;
        let n = weight.1.dims()[0];
        let layout = Layout::contiguous((self.shape.elem_count() / n, n));
        let cast = bias.0.to_dtype(bias.1, out.dtype())?;
        out.binary_impl::<Add>(&cast, &layout, &Layout::contiguous(n).broadcast_as(layout.shape())?)
    }

    /// Computes the gradients of `x` and of the weight; `None` for one that is not tracked.
    fn gradients(&self, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (n, k) = weight.dims2()?;
        let grad = grad.reshape((grad.elem_count() / n, n))?;
        let of_x = || {
            let rows = matmul(&grad, &weight.detach().to_dtype(x.dtype())?)?;
            if !self.heads {
                return rows.reshape(x.shape());
            }
            let (b, h, t, d) = x.dims4()?;
            rows.reshape((b, t, h, d))?.transpose(1, 2)
        };
        let of_weight = || {
            let x = if self.heads { x.detach().transpose(1, 2)? } else { x.detach() };
            matmul(&grad.t()?, &x.reshape((x.elem_count() / k, k))?)?.to_dtype(weight.dtype())
        };
        Ok([x.track_op().then(of_x).transpose()?, weight.track_op().then(of_weight).transpose()?])
    }
}

/// Copies a strided tensor to contiguous memory.
fn copy<S: BackendStorage>(from: &S, layout: &Layout) -> Result<S>
where
    S::Device: BackendDevice<Storage = S>,
{
    // SAFETY: the copy fills all of it.
    let mut to = unsafe { from.device().alloc_uninit(layout.shape(), from.dtype()) }?;
    from.copy_strided_src(&mut to, 0, layout)?;
    Ok(to)
}

/// Defines the forward passes of the devices, which are all the same.
macro_rules! forward {
    (product: $($name:ident $storage:ident),+) => {$(
        fn $name(&self, s1: &$storage, l1: &Layout, s2: &$storage, l2: &Layout) -> Result<($storage, Shape)> {
            Ok((self.product((s1, l1), (s2, l2))?, self.shape.clone()))
        }
    )+};
    (with_bias: $($name:ident $storage:ident),+) => {$(
        fn $name(
            &self,
            s1: &$storage,
            l1: &Layout,
            s2: &$storage,
            l2: &Layout,
            s3: &$storage,
            l3: &Layout,
        ) -> Result<($storage, Shape)> {
            Ok((self.with_bias((s1, l1), (s2, l2), (s3, l3))?, self.shape.clone()))
        }
    )+};
}

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    forward!(product: cpu_fwd CpuStorage, cuda_fwd CudaStorage, metal_fwd MetalStorage);

    fn bwd(&self, x: &Tensor, weight: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let [dx, dw] = self.gradients(x, weight, grad)?;
        Ok((dx, dw))
    }
}

impl CustomOp3 for Linear {
    fn name(&self) -> &'static str {
        "linear-with-bias"
    }

    forward!(with_bias: cuda_fwd CudaStorage, metal_fwd MetalStorage);

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        // Candle would broadcast the bias one entry at a time.
        if let (CpuStorage::F32(_), CpuStorage::F32(_)) = (s1, s3)
            && let CpuStorage::F32(mut out) = self.product((s1, l1), (s2, l2))?
        {
            let bias = contiguous(s3, l3)?;
            Arch::new().dispatch(
                #[inline(always)]
                || {
                    for row in out.chunks_exact_mut(bias.len()) {
                        row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
                    }
                },
            );
            return Ok((CpuStorage::F32(out), self.shape.clone()));
        }
        Ok((self.with_bias((s1, l1), (s2, l2), (s3, l3))?, self.shape.clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dw] = self.gradients(x, weight, grad)?;
        let db = bias.track_op().then(|| bias_gradient(bias, grad)).transpose()?;
        Ok((dx, dw, db))
    }
}

/// Computes the gradient of the bias: the sum of the rows of `grad`, in f32 at least.
fn bias_gradient(bias: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let n = bias.elem_count();
    let grad = grad.reshape((grad.elem_count() / n, n))?;
    if !grad.device().is_cpu() || grad.dtype() != DType::F32 {
        let wide = if grad.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        return grad.to_dtype(wide)?.sum(0)?.to_dtype(bias.dtype());
    }
    let mut sums = vec![0f32; n];
    with_storages([&grad], |[(storage, layout)]| {
        let grad = contiguous(storage, layout)?;
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for row in grad.chunks_exact(n) {
                    for (sum, g) in sums.iter_mut().zip(row) {
                        *sum += g;
                    }
                }
            },
        );
        Ok(())
    })?;
    Tensor::from_vec(sums, bias.shape(), bias.device())?.to_dtype(bias.dtype())
}
