//! A linear map `x Wᵀ + b` with the reshaping, transposition and cast around it, as one
//! differentiable operation on any device. As nodes of their own these would cost three more passes
//! over memory each, because Candle's autograd adds every gradient to zeros at every node it
//! passes.
//!
//! # Shapes
//!
//! ```text
//! x (.., K) or heads (B, H, T, D) with K = H·D, W (N, K), b (N)
//! forward:  x as rows (R, K) -> x Wᵀ + b (R, N) -> `Linear::shape`
//! backward: g (R, N) -> dx = g W (R, K) -> the shape of x;  dW = gᵀ x (N, K);  db = Σ_rows g (N)
//! ```

use candle_core::{
    CpuStorage, CudaStorage, DType, Layout, MetalStorage, Result, Shape, Tensor,
    backend::{BackendDevice, BackendStorage},
    op::Add,
};

use super::{
    compute_dtype, contiguous, copy,
    heads::arrange,
    instructions::arch,
    matmul,
    operation::{Operation, Stored},
    with_storages,
};

/// `Linear` computes `x Wᵀ` or `x Wᵀ + b`, in the type of `x`, for rows of `x`, `W` `(N, K)` and
/// `b` `(N)`.
pub(crate) struct Linear {
    /// The shape of the result, which has as many rows of `N` as there are rows of `x`.
    pub(crate) shape: Shape,
    /// Whether `x` is heads `(B, H, T, D)`, where all heads of a token make one row; else `x` is
    /// contiguous, `(.., K)`.
    pub(crate) heads: bool,
}

impl Linear {
    /// Computes `x Wᵀ`.
    fn product<S: BackendStorage>(&self, x: Stored<'_, S>, weight: Stored<'_, S>) -> Result<S>
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

    /// Copies heads by a kernel that takes them, which is faster than Candle's, so that the heads
    /// of a token lie side by side.
    #[cfg(feature = "cuda")]
    fn merged_on_cuda(&self, x: Stored<'_, CudaStorage>) -> Result<Option<(CudaStorage, Layout)>> {
        use super::cuda::heads;
        if !self.heads || !heads::takes(x.0.dtype(), x.1) || x.1.transpose(1, 2)?.is_contiguous() {
            return Ok(None);
        }
        let (b, h, t, d) = x.1.shape().dims4()?;
        Ok(Some((heads::arrange(x, true, None)?, Layout::contiguous((b, t, h, d)).transpose(1, 2)?)))
    }

    /// Computes `x Wᵀ + b`.
    fn with_bias<S: BackendStorage>(&self, x: Stored<'_, S>, weight: Stored<'_, S>, bias: Stored<'_, S>) -> Result<S>
    where
        S::Device: BackendDevice<Storage = S>,
    {
        let out = self.product(x, weight)?;
        let n = weight.1.dims()[0];
        let layout = Layout::contiguous((self.shape.elem_count() / n, n));
        // Metal has no conversion of a type to itself.
        let cast = if bias.0.dtype() == out.dtype() { None } else { Some(bias.0.to_dtype(bias.1, out.dtype())?) };
        let plain = Layout::contiguous(n);
        let (bias, numbers) = cast.as_ref().map_or(bias, |cast| (cast, &plain));
        out.binary_impl::<Add>(bias, &layout, &numbers.broadcast_as(layout.shape())?)
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
            arrange(&rows.reshape((b, t, h, d))?.transpose(1, 2)?, false, None)
        };
        let of_weight = || {
            let x = if self.heads { arrange(x, true, None)? } else { x.detach() };
            matmul(&grad.t()?, &x.reshape((x.elem_count() / k, k))?)?.to_dtype(weight.dtype())
        };
        Ok([x.track_op().then(of_x).transpose()?, weight.track_op().then(of_weight).transpose()?])
    }
}

impl Operation<2> for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu(&self, [x, weight]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        Ok((self.product(x, weight)?, self.shape.clone()))
    }

    fn cuda(&self, [x, weight]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        #[cfg(feature = "cuda")]
        if let Some((rows, layout)) = self.merged_on_cuda(x)? {
            return Ok((self.product((&rows, &layout), weight)?, self.shape.clone()));
        }
        Ok((self.product(x, weight)?, self.shape.clone()))
    }

    fn metal(&self, [x, weight]: [Stored<'_, MetalStorage>; 2]) -> Result<(MetalStorage, Shape)> {
        Ok((self.product(x, weight)?, self.shape.clone()))
    }

    fn backward(&self, [x, weight]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        self.gradients(x, weight, grad)
    }
}

impl Operation<3> for Linear {
    fn name(&self) -> &'static str {
        "linear-with-bias"
    }

    fn cpu(&self, [x, weight, bias]: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        // Candle would broadcast the bias one entry at a time.
        if let (CpuStorage::F32(_), CpuStorage::F32(_)) = (x.0, bias.0)
            && let CpuStorage::F32(mut out) = self.product(x, weight)?
        {
            let bias = contiguous(bias)?;
            arch().dispatch(
                #[inline(always)]
                || {
                    for row in out.chunks_exact_mut(bias.len()) {
                        row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias);
                    }
                },
            );
            return Ok((CpuStorage::F32(out), self.shape.clone()));
        }
        Ok((self.with_bias(x, weight, bias)?, self.shape.clone()))
    }

    fn cuda(&self, [x, weight, bias]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        #[cfg(feature = "cuda")]
        if let Some((rows, layout)) = self.merged_on_cuda(x)? {
            return Ok((self.with_bias((&rows, &layout), weight, bias)?, self.shape.clone()));
        }
        Ok((self.with_bias(x, weight, bias)?, self.shape.clone()))
    }

    fn metal(&self, [x, weight, bias]: [Stored<'_, MetalStorage>; 3]) -> Result<(MetalStorage, Shape)> {
        Ok((self.with_bias(x, weight, bias)?, self.shape.clone()))
    }

    fn backward(&self, [x, weight, bias]: [&Tensor; 3], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [dx, dw] = self.gradients(x, weight, grad)?;
        let db = bias.track_op().then(|| bias_gradient(bias, grad)).transpose()?;
        Ok([dx, dw, db])
    }
}

/// `LinearResidual` computes `x Wᵀ + r` for a residual `r` of the shape and type of the result. An
/// addition of its own would be a node whose two gradients Candle adds to zeros.
pub(crate) struct LinearResidual(pub(crate) Linear);

/// Adds contiguous numbers of one shape.
fn plus<S: BackendStorage>(out: (S, Shape), residual: Stored<'_, S>) -> Result<(S, Shape)> {
    let sum = out.0.binary_impl::<Add>(residual.0, &Layout::contiguous(&out.1), residual.1)?;
    Ok((sum, out.1))
}

impl Operation<3> for LinearResidual {
    fn name(&self) -> &'static str {
        "linear-residual"
    }

    fn cpu(&self, [x, weight, residual]: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        plus(self.0.cpu([x, weight])?, residual)
    }

    fn cuda(&self, [x, weight, residual]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        plus(self.0.cuda([x, weight])?, residual)
    }

    fn metal(&self, [x, weight, residual]: [Stored<'_, MetalStorage>; 3]) -> Result<(MetalStorage, Shape)> {
        plus(self.0.metal([x, weight])?, residual)
    }

    fn backward(&self, [x, weight, residual]: [&Tensor; 3], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [dx, dw] = self.0.gradients(x, weight, grad)?;
        Ok([dx, dw, residual.track_op().then(|| grad.clone())])
    }
}

/// Computes the gradient of the bias: the sum of the rows of `grad`, in f32 at least.
fn bias_gradient(bias: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let n = bias.elem_count();
    let grad = grad.reshape((grad.elem_count() / n, n))?;
    if !grad.device().is_cpu() || grad.dtype() != DType::F32 {
        return grad.to_dtype(compute_dtype(grad.dtype()))?.sum(0)?.to_dtype(bias.dtype());
    }
    let mut sums = vec![0f32; n];
    with_storages([&grad], |[grad]| {
        let grad = contiguous(grad)?;
        arch().dispatch(
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
