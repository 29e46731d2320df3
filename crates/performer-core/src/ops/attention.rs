//! Exact attention as a function.

use candle_core::{Result, Tensor};

use crate::attention::{Attention, Inputs, Mask, Softmax};

/// Computes exact attention `softmax(q·kᵀ/√D) v` with gradients, where `candle_nn::ops::sdpa` and
/// `candle_nn::attention::flash_attn` have none: [`Softmax`] as a function.
///
/// # Shapes
/// `q` is `(B, H, Tq, D)`, `k` is `(B, Hkv, Tk, D)`, `v` is `(B, Hkv, Tk, Dv)`, and the output is
/// `(B, H, Tq, Dv)`; `H` is a multiple of `Hkv`, so keys and values of grouped heads need no
/// copies.
///
/// # Errors
/// If shapes or types do not fit each other or the mask, and on the CPU if a value is not finite.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use performer_core::{Mask, ops};
///
/// # fn main() -> candle_core::Result<()> {
/// let q = Var::from_tensor(&Tensor::randn(0f32, 1.0, (1, 8, 100, 16), &Device::Cpu)?)?;
/// let kv = Tensor::randn(0f32, 1.0, (1, 2, 100, 16), &Device::Cpu)?;
/// let out = ops::softmax_attention(&q, &kv, &kv, &Mask::causal())?;
/// assert!(out.sqr()?.sum_all()?.backward()?.get(&q).is_some());
/// # Ok(())
/// # }
/// ```
pub fn softmax_attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Tensor> {
    Softmax::new().forward(Inputs::new(q, k, v), mask)
}
