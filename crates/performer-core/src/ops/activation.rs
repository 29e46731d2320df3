//! Activations: GELU, SwiGLU and softmax.

use candle_core::{D, Result, Tensor};

use super::{contiguous, is_fused, is_half, to_dtype};
use crate::kernels::compute_dtype;
use crate::{
    kernels::{
        activation::{Gate, Gelu},
        operation::apply,
    },
    tape::record,
};

/// GELU takes every number `x` to `x σ(2u)` with `u = √(2/π) (x + 0.044715 x³)`, its tanh form
/// (Hendrycks & Gimpel 2016, <https://arxiv.org/abs/1606.08415>).
///
/// The result has the shape and type of `x`, which is f16, bf16, f32 or f64.
///
/// # Errors
/// Only if the device fails: every shape and each of these types is taken.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if is_fused(x) {
        return apply(Gelu, [&x.contiguous()?]);
    }
    if !x.device().is_metal() {
        return x.gelu();
    }
    // Candle's gradient of GELU takes powers of negative numbers, which Metal may compute by a
    // logarithm. Those of products and of tanh do not.
    let cube = (x.sqr()? * x)?;
    let tanh = ((x + (cube * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?.tanh()?;
    (x * 0.5)? * (tanh + 1.0)?
}

/// SwiGLU multiplies `x` by a gate, `g σ(g) ∘ x` (Shazeer 2020,
/// <https://arxiv.org/abs/2002.05202>).
///
/// `gate` and `x` have one shape and type, which the result has too. `candle_nn::ops::swiglu` takes
/// the two side by side in one tensor instead. [`crate::nn::SwiGlu`] is the whole feed-forward
/// layer.
///
/// # Errors
/// If `gate` and `x` differ in shape or type.
pub fn swiglu(gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    if is_fused(gate) { apply(Gate::Swiglu, [&gate.contiguous()?, &x.contiguous()?]) } else { gate.silu()? * x }
}

/// A gate multiplies `x` by `2σ(g)`, which is 1 where the gate `g` is 0. Both have one shape and
/// type, and both get gradients.
pub(crate) fn sigmoid_gate(gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    if is_fused(x) && gate.dtype() == x.dtype() {
        return apply(Gate::Output, [&contiguous(gate)?, &contiguous(x)?]);
    }
    if is_half(x) {
        let (gate, wide) = (to_dtype(gate, compute_dtype(x.dtype()))?, to_dtype(x, compute_dtype(x.dtype()))?);
        return to_dtype(&sigmoid_gate(&gate, &wide)?, x.dtype());
    }
    // 2σ(g) = 1 + tanh(g/2), with the derivative (1 − tanh²(g/2))/2.
    let tanh = (gate * 0.5)?.tanh()?;
    let factor = (&tanh + 1.0)?;
    let out = (x * &factor)?;
    let (tanh, factor, of) = (tanh.detach(), factor.detach(), x.detach());
    record(&out, &[gate, x], move |grad| {
        let slope = ((tanh.sqr()? * -0.5)? + 0.5)?;
        Ok(vec![Some(((grad * &of)? * slope)?), Some((grad * &factor)?)])
    });
    Ok(out)
}

/// Softmax computes `e^{x_i} / Σ_j e^{x_j}` over the last dimension.
///
/// `x` is `(.., N)` of f16, bf16, f32 or f64, with any strides, and the result has its shape and
/// type. Half types are summed in f32. Gradients go to `x`, where
/// `candle_nn::ops::softmax_last_dim` gives none.
///
/// # Errors
/// If `x` has no dimension.
///
/// # Example
/// ```
/// use candle_core::{Device, Var};
/// use performer_core::ops;
///
/// # fn main() -> candle_core::Result<()> {
/// let x = Var::new(&[[0f32, 0.0, 0.0, 0.0]], &Device::Cpu)?;
/// let y = ops::softmax(&x)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0.25; 4]]);
/// assert!(y.sqr()?.sum_all()?.backward()?.get(&x).is_some());
/// # Ok(())
/// # }
/// ```
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    candle_nn::ops::softmax(&x.to_dtype(compute_dtype(x.dtype()))?, D::Minus1)?.to_dtype(x.dtype())
}
