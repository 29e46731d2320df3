//! LayerNorm and RMSNorm.

use candle_core::{D, DType, Result, Tensor, bail};

use super::{contiguous, is_fused, is_half, to_dtype};
use crate::kernels::compute_dtype;
use crate::kernels::{norm::Norm, operation::apply};

/// LayerNorm computes `w ∘ (x − mean x)/√(var x + ε) + b` over the last dimension (Ba et al. 2016,
/// <https://arxiv.org/abs/1607.06450>).
///
/// Rows `x` are `(.., E)`, `weight` and `bias` are `(E)`, and the result is `(.., E)` of the type
/// of `x`: f16, bf16, f32 or f64. Half types are normalised in f32. `x` may have any strides.
/// Gradients go to `x`, `weight` and `bias`, where `candle_nn::ops::layer_norm` gives none.
///
/// # Errors
/// If `weight` or `bias` has not one number for each of the last dimension of `x`.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use performer_core::ops;
///
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::new(&[[1f32, 2.0, 3.0], [4.0, 9.0, 5.0]], &Device::Cpu)?;
/// let weight = Var::new(&[1f32, 1.0, 1.0], &Device::Cpu)?;
/// let bias = Var::new(&[0f32, 0.0, 0.0], &Device::Cpu)?;
/// let loss = ops::layer_norm(&x, &weight, &bias, 1e-5)?.sqr()?.sum_all()?;
/// assert!(loss.backward()?.get(&weight).is_some());
///
/// let fused = candle_nn::ops::layer_norm(&x, &weight, &bias, 1e-5)?.sqr()?.sum_all()?;
/// assert!(fused.backward()?.get(&weight).is_none());
/// # Ok(())
/// # }
/// ```
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    normalise(x, weight, Some(bias), eps, true)
}

/// RMSNorm computes `w ∘ x/√(mean x² + ε)` over the last dimension (Zhang & Sennrich 2019,
/// <https://arxiv.org/abs/1910.07467>).
///
/// Rows `x` are `(.., E)`, `weight` is `(E)`, and the result is `(.., E)` of the type of `x`: f16,
/// bf16, f32 or f64. Half types are normalised in f32. `x` may have any strides. Gradients go to
/// `x` and `weight`, where `candle_nn::ops::rms_norm` gives none.
///
/// # Errors
/// If `weight` has not one number for each of the last dimension of `x`.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use performer_core::ops;
///
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::new(&[[3f32, 4.0]], &Device::Cpu)?;
/// let weight = Var::new(&[1f32, 2.0], &Device::Cpu)?;
/// let y = ops::rms_norm(&x, &weight, 0.0)?;
/// assert!((y.get(0)?.get(1)?.to_scalar::<f32>()? - 8.0 / 12.5f32.sqrt()).abs() < 1e-6);
/// assert!(y.sum_all()?.backward()?.get(&weight).is_some());
/// # Ok(())
/// # }
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    normalise(x, weight, None, eps, false)
}

/// Divides rows by `√(mean x² + ε)`, after subtracting their mean if `center`, and applies a weight
/// and perhaps a bias.
pub(crate) fn normalise(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64, center: bool) -> Result<Tensor> {
    let width = x.dim(D::Minus1)?;
    for (name, t) in [("weight", Some(weight)), ("bias", bias)] {
        if let Some(t) = t
            && t.dims() != [width]
        {
            bail!("norm: x has shape {:?}, so its {name} must have shape [{width}], not {:?}", x.dims(), t.dims());
        }
    }
    // Metal's means divide by the number of rows, which may be 0 here.
    if x.elem_count() == 0 && x.device().is_metal() {
        return Ok(x.clone());
    }
    let weight = to_dtype(weight, compute_dtype(x.dtype()))?;
    let bias = bias.map(|bias| to_dtype(bias, compute_dtype(x.dtype()))).transpose()?;
    if is_fused(x) {
        let norm = Norm { eps: eps as f32, center };
        return match bias {
            None => apply(norm, [&contiguous(x)?, &contiguous(&weight)?]),
            Some(bias) => apply(norm, [&contiguous(x)?, &contiguous(&weight)?, &contiguous(&bias)?]),
        };
    }
    if is_half(x) {
        return normalise(&x.to_dtype(DType::F32)?, &weight, bias.as_ref(), eps, center)?.to_dtype(x.dtype());
    }
    let x = if center { x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)? } else { x.clone() };
    // Candle's own norm takes ε in f32.
    let root = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    let y = x.broadcast_div(&root)?.broadcast_mul(&weight)?;
    match bias {
        None => Ok(y),
        Some(bias) => y.broadcast_add(&bias),
    }
}
