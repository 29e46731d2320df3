//! Functions that a transformer needs around its attention, each with a gradient.
//!
//! Several operations of `candle_nn` have no backward pass and say nothing: `ops::layer_norm`,
//! `ops::rms_norm`, `ops::softmax_last_dim` and the rotary positions of `rotary_emb` return a
//! tensor to which no gradient can come back, so whatever lies before them is never trained. The
//! functions of this module take what those take, give the same numbers to rounding, and have a
//! gradient. The modules of [`crate::nn`] hold the weights and call them.
//!
//! | `candle_nn` | here |
//! |---|---|
//! | `ops::layer_norm` | [`layer_norm`] |
//! | `ops::rms_norm` | [`rms_norm`] |
//! | `ops::softmax_last_dim` | [`softmax`] |
//! | `rotary_emb::rope` | [`rotary`] |
//! | `rotary_emb::rope_i` | [`rotary_interleaved`] |
//! | `loss::cross_entropy`, which has a gradient, but leaves nothing out | [`cross_entropy`] |
//!
//! Tensors of f32 on the CPU, and of f32, f16 and bf16 on CUDA, take one fused operation each way.
//! Other types and devices take Candle's composed operations, with these exceptions. On the CPU,
//! [`softmax_attention`] is fused for f16 and bf16 too, and norms, rotary positions and
//! [`short_convolution`] convert these types to f32 and back around the fused operation. [`linear`]
//! is one operation for every type and device that Candle has a matrix product for (bf16 on the CPU
//! needs candle-core 0.11.1), and [`linear_cross_entropy`] makes its logits in tiles. [`softmax`],
//! [`cross_entropy`] and plain operations such as [`reshape`] and [`gelu_erf`] are Candle's
//! everywhere, and [`embedding`] and [`add`] are outside CUDA.
//!
//! Weights may be f32 while the tensors they meet are f16 or bf16: matrix products are made in the
//! type of `x`, norms in f32, and gradients of f32 weights come back in f32. A model can so be
//! trained in bf16 with the f32 weights that the optimiser adds to (Micikevicius et al. 2017,
//! <https://arxiv.org/abs/1710.03740>).

mod activation;
mod attention;
mod convolution;
mod embedding;
mod linear;
mod loss;
mod norm;
mod plain;
mod rotary;

use candle_core::{DType, Tensor};

#[cfg(feature = "cuda")]
use crate::kernels::cuda;

pub(crate) use activation::sigmoid_gate;
pub use activation::{gelu, softmax, swiglu};
pub use attention::softmax_attention;
pub use convolution::short_convolution;
pub(crate) use convolution::{convolved_heads, hide};
pub use embedding::embedding;
pub use linear::{linear, linear_residual, swiglu_linear};
pub(crate) use linear::{linear_of_heads, linear_to_heads};
pub use loss::{Targets, cross_entropy, linear_cross_entropy, linear_distillation};
pub(crate) use norm::normalise;
pub use norm::{layer_norm, rms_norm};
pub use plain::{
    add, add_to_each, affine, broadcast_as, cat, contiguous, div, exp, gelu_erf, index_select, mul, narrow, reshape,
    rows, scale, sqr, sub, sum_all, sum_last, to_dtype, transpose,
};
pub use rotary::{rotary, rotary_interleaved};

/// Whether a fused CPU kernel takes the tensor.
fn is_fused_on_cpu(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32 && x.elem_count() > 0
}

/// Whether a fused kernel takes the tensor, on whichever device it lies.
fn is_fused(x: &Tensor) -> bool {
    #[cfg(feature = "cuda")]
    if cuda::takes(x) {
        return true;
    }
    is_fused_on_cpu(x)
}

fn is_half(x: &Tensor) -> bool {
    matches!(x.dtype(), DType::F16 | DType::BF16)
}
