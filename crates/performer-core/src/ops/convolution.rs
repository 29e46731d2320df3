//! Short convolutions along tokens.

use candle_core::{Result, Tensor, bail};

use super::{contiguous, is_fused, is_half, reshape, rotary::turn, to_dtype, transpose};
use crate::kernels::compute_dtype;
use crate::{
    kernels::{
        convolution::{ConvolvedHeads, ShortConvolution, TAPS},
        operation::apply,
        rotary::Rotary,
    },
    tape::record,
};

/// A short convolution mixes each token with the three before it, every channel by a filter of its
/// own: `y_t = Σ_j w_j ∘ x_{t−3+j}` over `j = 0..=3`, where rows before the first are zeros. It is
/// what linear attention has in front of queries, keys and values (Yang et al. 2024,
/// <https://arxiv.org/abs/2412.06464>), here without an activation.
///
/// Rows `x` are `(B, T, C)` of f16, bf16, f32 or f64, with any strides; `weight` is `(C, 4)`, whose
/// last column is the token's own factor, so `[0, 0, 0, 1]` changes nothing. The result has the
/// shape and type of `x`. Half types are summed in f32. Outputs at a token have the same bits
/// whatever comes after it. Gradients go to `x` and `weight`.
///
/// # Errors
/// If the shapes do not fit.
///
/// # Example
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use performer_core::ops;
///
/// # fn main() -> candle_core::Result<()> {
/// let x = Tensor::new(&[[[1f32], [2.0], [3.0]]], &Device::Cpu)?;
/// // The token before, and half of the token itself.
/// let weight = Var::new(&[[0f32, 0.0, 1.0, 0.5]], &Device::Cpu)?;
/// let y = ops::short_convolution(&x, &weight)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [0.5, 2.0, 3.5]);
/// assert!(y.sum_all()?.backward()?.get(&weight).is_some());
/// # Ok(())
/// # }
/// ```
pub fn short_convolution(x: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let channels = match *x.dims() {
        [_, _, channels] if weight.dims() == [channels, TAPS] => channels,
        _ => bail!(
            "short convolution: x has shape {:?} and its weight {:?}; they must be (batch, tokens, channels) and \
             (channels, {TAPS})",
            x.dims(),
            weight.dims()
        ),
    };
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    let weight = to_dtype(weight, compute_dtype(x.dtype()))?;
    if is_fused(x) {
        return apply(ShortConvolution, [&contiguous(x)?, &contiguous(&weight)?]);
    }
    if is_half(x) {
        return to_dtype(&short_convolution(&to_dtype(x, compute_dtype(x.dtype()))?, &weight)?, x.dtype());
    }
    // Rows before the first are zeros, and so are gradients after the last.
    let (tokens, past) = (x.dim(1)?, TAPS - 1);
    let padded = x.pad_with_zeros(1, past, 0)?;
    let tap = move |weight: &Tensor, j: usize| weight.narrow(1, j, 1)?.reshape(channels);
    let sum = |of: &dyn Fn(usize) -> Result<Tensor>| (1..TAPS).try_fold(of(0)?, |sum, j| sum + of(j)?);
    let out = sum(&|j| padded.narrow(1, j, tokens)?.broadcast_mul(&tap(&weight, j)?))?;
    let (rows, filters) = (padded.detach(), weight.detach());
    record(&out, &[x, &weight], move |grad| {
        let later = grad.pad_with_zeros(1, 0, past)?;
        let of_x = sum(&|j| later.narrow(1, past - j, tokens)?.broadcast_mul(&tap(&filters, j)?))?;
        let of_tap = |j| (rows.narrow(1, j, tokens)? * grad)?.sum((0, 1));
        let of_weight = Tensor::stack(&(0..TAPS).map(of_tap).collect::<Result<Vec<_>>>()?, 1)?;
        Ok(vec![Some(of_x), Some(of_weight)])
    });
    Ok(out)
}

/// [`short_convolution`] of rows `(B, past + T, H·D)`, as heads `(B, H, T, D)`, turned by rotary
/// positions if there are any, whose tables are `(1, T, D/2)`, f32 and constant. The first `past`
/// rows belong to earlier tokens and are left out of the result.
pub(crate) fn convolved_heads(
    rows: &Tensor,
    weight: &Tensor,
    heads: usize,
    rotary: Option<Rotary>,
    past: usize,
) -> Result<Tensor> {
    let (b, t, c) = rows.dims3()?;
    if is_fused(rows) && past == 0 && weight.dims() == [c, TAPS] {
        let weight = contiguous(&to_dtype(weight, compute_dtype(rows.dtype()))?)?;
        return apply(ConvolvedHeads { heads, rotary }, [&contiguous(rows)?, &weight]);
    }
    let tokens = t - past;
    let new = super::narrow(&short_convolution(rows, weight)?, 1, past, tokens)?;
    let heads = transpose(&reshape(&new, (b, tokens, heads, c / heads))?, 1, 2)?;
    match rotary {
        Some(Rotary { cos, sin, pairs }) if heads.elem_count() > 0 => {
            turn(&heads, &cos.squeeze(0)?, &sin.squeeze(0)?, pairs)
        }
        _ => Ok(heads),
    }
}

/// Puts zeros in the place of the rows `(B, T, C)` of hidden tokens, whatever numbers they hold;
/// `visible` is u8, `(B, T)` or `(1, T)`.
pub(crate) fn hide(rows: &Tensor, visible: &Tensor) -> Result<Tensor> {
    let visible = visible.to_device(rows.device())?.unsqueeze(2)?.broadcast_as(rows.shape())?;
    let keep = move |x: &Tensor| visible.where_cond(x, &x.zeros_like()?);
    let out = keep(rows)?;
    record(&out, &[rows], move |grad| Ok(vec![Some(keep(grad)?)]));
    Ok(out)
}
