//! What a transformer needs around its attention, with gradients: Candle's own fused norms have none, and its composed forms walk
//! over memory many times. f32 on the CPU is fused; other types and devices take Candle's operations.

use candle_core::{D, DType, Result, Tensor, bail};

use crate::kernels::{cross_entropy::CrossEntropy, linear::AddBias, norm::Norm};

fn is_fused(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32 && x.elem_count() > 0
}

/// `w ∘ (x − mean x)/√(var x + ε) + b` over the last dimension: `x` `(.., E)`, `weight` and `bias` `(E)` → `(.., E)`.
///
/// Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    if is_fused(x) {
        return x.contiguous()?.apply_op3(weight, bias, Norm { eps: eps as f32, center: true });
    }
    let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    candle_nn::ops::rms_norm_slow(&x, weight, eps as f32)?.broadcast_add(bias)
}

/// `w ∘ x/√(mean x² + ε)` over the last dimension: `x` `(.., E)`, `weight` `(E)` → `(.., E)`.
///
/// Zhang & Sennrich 2019, <https://arxiv.org/abs/1910.07467>.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    if is_fused(x) {
        return x.contiguous()?.apply_op2(weight, Norm { eps: eps as f32, center: false });
    }
    candle_nn::ops::rms_norm_slow(x, weight, eps as f32)
}

/// `x Wᵀ + b`: `x` `(.., K)`, `weight` `(N, K)`, `bias` `(N)` → `(.., N)`.
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
    // Rows in two dimensions: Candle multiplies a batch of matrices one by one, and none at all if it is empty.
    let rows = x.reshape((x.elem_count() / k.max(1), k))?.matmul(&weight.t()?)?.reshape(shape)?;
    match bias {
        None => Ok(rows),
        Some(bias) if is_fused(&rows) => rows.apply_op2(bias, AddBias),
        Some(bias) => rows.broadcast_add(bias),
    }
}

/// Negative log-likelihood in nats of each target under `softmax(W x)`: hidden states `x` `(N, E)`, a language model's head `weight`
/// `(V, E)`, `N` targets → `(N)`. On the CPU the logits `(N, V)` are never made as a whole.
///
/// # Errors
/// If a target lies beyond the vocabulary, or the number of targets is not `N`.
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let ((n, e), (vocabulary, width)) = (x.dims2()?, weight.dims2()?);
    if targets.len() != n {
        bail!("cross-entropy of {n} hidden states with {} targets; it needs one each", targets.len());
    }
    if e != width {
        bail!("cross-entropy: hidden states have shape {:?} and the head {:?}", x.dims(), weight.dims());
    }
    if let Some(bad) = targets.iter().find(|&&t| t as usize >= vocabulary) {
        bail!("target {bad} lies beyond the vocabulary of {vocabulary}");
    }
    if is_fused(x) {
        return x.contiguous()?.apply_op2(&weight.contiguous()?, CrossEntropy::new(targets));
    }
    let targets = Tensor::from_vec(targets.to_vec(), (n, 1), x.device())?;
    let logits = x.matmul(&weight.t()?)?;
    candle_nn::ops::log_softmax(&logits, D::Minus1)?.gather(&targets, D::Minus1)?.squeeze(1)?.neg()
}
