//! Linear maps of rows and of heads.

use candle_core::{Result, Shape, Tensor, bail};

use super::{activation::swiglu, add, contiguous, is_fused, rotary::turn};
use crate::kernels::{
    heads::ToHeads,
    linear::{Linear, LinearResidual},
    operation::apply,
    rotary::Rotary,
    swiglu::SwigluLinear,
};

/// A linear map takes rows `x` to `x Wᵀ + b`: `x` `(.., K)`, `weight` `(N, K)`, `bias` `(N)` →
/// `(.., N)`, of the type of `x`.
///
/// # Errors
/// If the shapes do not fit.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    map_rows(&contiguous(x)?, weight, bias, None, mapped(x, weight)?, false)
}

/// A linear map added to a residual, `r + x Wᵀ + b`: [`linear`], with a `residual` of the shape and
/// type of its result, which gets a gradient too. Without a bias it is one operation, which spares
/// autograd the additions of gradients that an addition of its own would cost.
///
/// # Errors
/// If shapes or types do not fit.
pub fn linear_residual(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, residual: &Tensor) -> Result<Tensor> {
    map_rows(&contiguous(x)?, weight, bias, Some(residual), mapped(x, weight)?, false)
}

/// The two linear maps of a gated feed-forward layer with their gate, [`swiglu`] of `x W_gᵀ` and
/// `x W_uᵀ`: `x` `(.., K)`, `gate` and `up` `(N, K)` → `(.., N)`, of the type of `x`.
///
/// Where [`swiglu`] is fused it is one operation with one gradient of `x`. Both products are kept
/// for the backward pass, as separate operations would keep them.
///
/// # Errors
/// If the shapes do not fit.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor};
/// use performer_core::ops;
///
/// # fn main() -> candle_core::Result<()> {
/// let normal = |shape| Tensor::randn(0f32, 1.0, shape, &Device::Cpu);
/// let (x, gate, up) = (normal((5, 8))?, normal((20, 8))?, normal((20, 8))?);
/// let one = ops::swiglu_linear(&x, &gate, &up)?;
/// let separate = ops::swiglu(&ops::linear(&x, &gate, None)?, &ops::linear(&x, &up, None)?)?;
/// assert_eq!(one.to_vec2::<f32>()?, separate.to_vec2::<f32>()?);
/// # Ok(())
/// # }
/// ```
pub fn swiglu_linear(x: &Tensor, gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    if gate.dims() != up.dims() {
        bail!("swiglu: gate has shape {:?} and up {:?}; both must be the same (N, K)", gate.dims(), up.dims());
    }
    if !is_fused(x) || gate.elem_count() == 0 {
        return swiglu(&linear(x, gate, None)?, &linear(x, up, None)?);
    }
    let shape = mapped(x, gate)?;
    let x = contiguous(x)?;
    apply(SwigluLinear::new([&x, gate, up], shape), [&x, gate, up])
}

/// The shape of [`linear`]'s result.
fn mapped(x: &Tensor, weight: &Tensor) -> Result<Shape> {
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
    Ok(shape.into())
}

/// [`linear`] of `x` `(B, T, K)` by a weight `(H·D, K)`, as heads `(B, H, T, D)`, turned by rotary
/// positions if there are any, whose tables are `(1, T, D/2)`, f32 and constant.
pub(crate) fn linear_to_heads(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    heads: usize,
    rotary: Option<Rotary>,
) -> Result<Tensor> {
    let ((b, t, _), n) = (x.dims3()?, weight.dim(0)?);
    let shape = Shape::from((b, t, heads, n / heads));
    let x = contiguous(x)?;
    if x.elem_count() == 0 || weight.elem_count() == 0 {
        return map_rows(&x, weight, bias, None, shape, false)?.transpose(1, 2);
    }
    if let Some(Rotary { cos, sin, pairs }) = &rotary
        && !is_fused(&x)
    {
        let heads = linear_to_heads(&x, weight, bias, heads, None)?;
        return turn(&heads, &cos.squeeze(0)?, &sin.squeeze(0)?, *pairs);
    }
    let map = ToHeads { linear: Linear { shape, heads: false }, rotary };
    check_bias(weight, bias)?;
    match bias {
        None => apply(map, [&x, weight]),
        Some(bias) => apply(map, [&x, weight, &contiguous(bias)?]),
    }
}

/// [`linear`] of heads `x` `(B, H, T, D)`, side by side in each token, by a weight `(N, H·D)` →
/// `(B, T, N)`, added to a residual if there is one.
pub(crate) fn linear_of_heads(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
) -> Result<Tensor> {
    let ((b, h, t, d), (n, k)) = (x.dims4()?, weight.dims2()?);
    if h * d != k {
        bail!(
            "linear: heads have shape {:?}; {h} times {d} must be {k}, as the weight is {:?}",
            x.dims(),
            weight.dims()
        );
    }
    map_rows(x, weight, bias, residual, (b, t, n).into(), true)
}

/// Applies [`Linear`], and answers for tensors without numbers, which it cannot take.
fn map_rows(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    residual: Option<&Tensor>,
    shape: Shape,
    heads: bool,
) -> Result<Tensor> {
    check_bias(weight, bias)?;
    if let Some(residual) = residual
        && (residual.shape() != &shape || residual.dtype() != x.dtype())
    {
        bail!(
            "linear: the residual is {:?} {:?}, to which {:?} {:?} cannot be added",
            residual.dtype(),
            residual.dims(),
            x.dtype(),
            shape.dims()
        );
    }
    let plus = |y: Tensor| residual.map_or(Ok(y.clone()), |residual| add(residual, &y));
    if x.elem_count() == 0 || weight.elem_count() == 0 {
        let zeros = Tensor::zeros(shape, x.dtype(), x.device())?;
        return match bias {
            Some(bias) if zeros.elem_count() > 0 => plus(zeros.broadcast_add(&bias.to_dtype(x.dtype())?)?),
            _ => plus(zeros),
        };
    }
    let map = Linear { shape, heads };
    match (bias, residual) {
        (None, None) => apply(map, [x, weight]),
        (None, Some(residual)) => apply(LinearResidual(map), [x, weight, residual]),
        (Some(bias), _) => plus(apply(map, [x, weight, &contiguous(bias)?])?),
    }
}

/// Refuses a bias of another size than the weight's rows.
fn check_bias(weight: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let rows = weight.dim(0)?;
    match bias {
        Some(bias) if bias.dims() != [rows] => {
            bail!("linear: bias has shape {:?}; it must be [{rows}], as the weight is {:?}", bias.dims(), weight.dims())
        }
        _ => Ok(()),
    }
}
