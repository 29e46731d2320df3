//! Linear maps of rows and of heads.

use candle_core::{DType, Result, Shape, Tensor, bail};

use crate::kernels::{linear::Linear, operation::apply};

/// The product of two matrices, `(N, K)` and `(K, M)`, of one type. Candle has none for bf16 on the
/// CPU: there it is made in f32 and rounded.
pub(crate) fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.device().is_cpu() && a.dtype() == DType::BF16 {
        return a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.to_dtype(DType::BF16);
    }
    a.matmul(b)
}

/// A linear map takes rows `x` to `x Wᵀ + b`: `x` `(.., K)`, `weight` `(N, K)`, `bias` `(N)` →
/// `(.., N)`, of the type of `x`.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let mut shape = x.dims().to_vec();
    let Some(last) = shape.last_mut() else { bail!("linear: x has shape []; it must have rows") };
    let (n, k) = weight.dims2()?;
    if *last != k {
        bail!(
            "linear: x has shape {:?}; its last dimension must be {k}, as the weight is {:?}",
            x.dims(),
            weight.dims()
        );
    }
    *last = n;
    map_rows(&x.contiguous()?, weight, bias, shape.into(), false)
}

/// [`linear`] of `x` `(B, T, K)` by a weight `(H·D, K)`, as heads: → `(B, H, T, D)`, a view
/// of `(B, T, H, D)`.
pub(crate) fn linear_to_heads(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, heads: usize) -> Result<Tensor> {
    let ((b, t, _), n) = (x.dims3()?, weight.dim(0)?);
    map_rows(&x.contiguous()?, weight, bias, (b, t, heads, n / heads).into(), false)?.transpose(1, 2)
}

/// [`linear`] of heads `x` `(B, H, T, D)`, side by side in each token, by a weight `(N, H·D)` →
/// `(B, T, N)`.
pub(crate) fn linear_of_heads(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let ((b, h, t, d), (n, k)) = (x.dims4()?, weight.dims2()?);
    if h * d != k {
        bail!(
            "linear: heads have shape {:?}; {h} times {d} must be {k}, as the weight is {:?}",
            x.dims(),
            weight.dims()
        );
    }
    map_rows(x, weight, bias, (b, t, n).into(), true)
}

/// Applies [`Linear`], and answers for tensors without numbers, which it cannot take.
fn map_rows(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, shape: Shape, heads: bool) -> Result<Tensor> {
    if let Some(bias) = bias
        && bias.dims() != [weight.dim(0)?]
    {
        bail!(
            "linear: bias has shape {:?}; it must be [{}], as the weight is {:?}",
            bias.dims(),
            weight.dim(0)?,
            weight.dims()
        );
    }
    if x.elem_count() == 0 || weight.elem_count() == 0 {
        let zeros = Tensor::zeros(shape, x.dtype(), x.device())?;
        return match bias {
            Some(bias) if zeros.elem_count() > 0 => zeros.broadcast_add(&bias.to_dtype(x.dtype())?),
            _ => Ok(zeros),
        };
    }
    let map = Linear { shape, heads };
    match bias {
        None => apply(map, [x, weight]),
        Some(bias) => apply(map, [x, weight, &bias.contiguous()?]),
    }
}
