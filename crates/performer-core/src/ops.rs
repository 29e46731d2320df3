//! What a transformer needs around its attention, with gradients: Candle's own fused norms have none, and its composed forms walk
//! over memory many times. f32 on the CPU is fused, and f32, f16 and bf16 on CUDA; other types and devices take Candle's operations.
//!
//! Weights may be f32 while what they meet is f16 or bf16: products are made in the type of `x`, norms in f32, and gradients of weights come
//! back in f32. So a model trains in bf16 with the weights that the optimiser adds to in f32 (Micikevicius et al. 2017,
//! <https://arxiv.org/abs/1710.03740>).

use candle_core::{D, DType, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use crate::kernels::cuda;
use crate::kernels::{
    activation::{Gelu, Swiglu},
    cross_entropy::{CrossEntropy, Teacher},
    linear::Linear,
    norm::Norm,
    rotary::Rotary,
    tiled_cross_entropy,
};

fn is_fused_on_cpu(x: &Tensor) -> bool {
    x.device().is_cpu() && x.dtype() == DType::F32 && x.elem_count() > 0
}

/// Whether one operation of ours does it, on whichever device.
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

/// The type that sums over numbers of `x` are made in.
fn wide(x: &Tensor) -> DType {
    if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 }
}

/// `w ∘ (x − mean x)/√(var x + ε) + b` over the last dimension: `x` `(.., E)`, `weight` and `bias` `(E)` → `(.., E)`.
///
/// Ba et al. 2016, <https://arxiv.org/abs/1607.06450>.
pub fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let (weight, bias) = (weight.to_dtype(wide(x))?, bias.to_dtype(wide(x))?);
    if is_fused(x) {
        let norm = Norm { eps: eps as f32, center: true };
        return x.contiguous()?.apply_op3(&weight.contiguous()?, &bias.contiguous()?, norm);
    }
    if is_half(x) {
        return layer_norm(&x.to_dtype(DType::F32)?, &weight, &bias, eps)?.to_dtype(x.dtype());
    }
    let x = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    candle_nn::ops::rms_norm_slow(&x, &weight, eps as f32)?.broadcast_add(&bias)
}

/// `w ∘ x/√(mean x² + ε)` over the last dimension: `x` `(.., E)`, `weight` `(E)` → `(.., E)`.
///
/// Zhang & Sennrich 2019, <https://arxiv.org/abs/1910.07467>.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let weight = weight.to_dtype(wide(x))?;
    if is_fused(x) {
        return x.contiguous()?.apply_op2(&weight.contiguous()?, Norm { eps: eps as f32, center: false });
    }
    if is_half(x) {
        return rms_norm(&x.to_dtype(DType::F32)?, &weight, eps)?.to_dtype(x.dtype());
    }
    candle_nn::ops::rms_norm_slow(x, &weight, eps as f32)
}

/// The product of two matrices, `(N, K)` and `(K, M)`, of one type. Candle has none for bf16 on the CPU: there it is made in f32 and
/// rounded.
pub(crate) fn matmul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.device().is_cpu() && a.dtype() == DType::BF16 {
        return a.to_dtype(DType::F32)?.matmul(&b.to_dtype(DType::F32)?)?.to_dtype(DType::BF16);
    }
    a.matmul(b)
}

/// `x Wᵀ + b`: `x` `(.., K)`, `weight` `(N, K)`, `bias` `(N)` → `(.., N)`, of the type of `x`.
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

/// [`linear`] of `x` `(B, T, K)` by a weight `(H·D, K)`, as heads: → `(B, H, T, D)`, a view of `(B, T, H, D)`.
pub(crate) fn linear_to_heads(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, heads: usize) -> Result<Tensor> {
    let ((b, t, _), n) = (x.dims3()?, weight.dim(0)?);
    map_rows(&x.contiguous()?, weight, bias, (b, t, heads, n / heads).into(), false)?.transpose(1, 2)
}

/// [`linear`] of heads `x` `(B, H, T, D)`, side by side in each token, by a weight `(N, H·D)` → `(B, T, N)`.
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

/// What [`Linear`] does, and the same of nothing.
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
        None => x.apply_op2(weight, map),
        Some(bias) => x.apply_op3(weight, &bias.contiguous()?, map),
    }
}

/// Rows of `table` `(V, E)` by number: u32 `ids` `(..)` → `(.., E)`, of the type of the table.
///
/// # Errors
/// On the CPU, if an id lies beyond the table; a GPU does not tell.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(table.dim(D::Minus1)?);
    let ids = ids.flatten_all()?.contiguous()?;
    #[cfg(feature = "cuda")]
    if cuda::takes(table) && ids.elem_count() > 0 && ids.dtype() == DType::U32 {
        return table.contiguous()?.apply_op1(cuda::embedding::Embedding { ids })?.reshape(shape);
    }
    // Its gradient adds up rows, for which half types are too coarse.
    table.to_dtype(wide(table))?.index_select(&ids, 0)?.to_dtype(table.dtype())?.reshape(shape)
}

/// GELU of every number, tanh form: `x σ(2u)` with `u = √(2/π) (x + 0.044715 x³)`.
///
/// Hendrycks & Gimpel 2016, <https://arxiv.org/abs/1606.08415>.
pub fn gelu(x: &Tensor) -> Result<Tensor> {
    if is_fused(x) { x.contiguous()?.apply_op1(Gelu) } else { x.gelu() }
}

/// `g σ(g) ∘ x`: `gate` and `x` of one shape and type.
///
/// Shazeer 2020, <https://arxiv.org/abs/2002.05202>.
pub fn swiglu(gate: &Tensor, x: &Tensor) -> Result<Tensor> {
    if is_fused(gate) { gate.contiguous()?.apply_op2(&x.contiguous()?, Swiglu) } else { gate.silu()? * x }
}

/// Turns pairs `(i, i + D/2)` of `x` `(B, H, T, D)` by the angles whose `cos` and `sin` `(T, D/2)` are given, in f32 or f64.
///
/// Su et al. 2021, <https://arxiv.org/abs/2104.09864>.
pub(crate) fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let table = |t: &Tensor| t.to_dtype(wide(x))?.contiguous();
    if is_fused(x) {
        let x = if x.stride()[3] == 1 { x.clone() } else { x.contiguous()? };
        return x.apply_op1(Rotary { cos: table(cos)?, sin: table(sin)? });
    }
    if is_half(x) {
        return rotary(&x.to_dtype(DType::F32)?, cos, sin)?.to_dtype(x.dtype());
    }
    candle_nn::rotary_emb::rope_slow(x, &table(cos)?, &table(sin)?)
}

/// Negative log-likelihood in nats of each target under `softmax(W x)`: hidden states `x` `(N, E)`, a language model's head `weight`
/// `(V, E)`, `N` targets → `(N)`, f32 or f64. The logits `(N, V)` are made in tiles; on the CPU up to 128 MiB of
/// their exponentials are kept for the backward pass, beyond that none.
///
/// # Errors
/// If a target lies beyond the vocabulary, or the number of targets is not `N`.
pub fn linear_cross_entropy(x: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<Tensor> {
    check_head(x, weight, targets)?;
    if is_fused_on_cpu(x) && weight.dtype() == DType::F32 {
        return x.contiguous()?.apply_op2(&weight.contiguous()?, CrossEntropy::new(x, weight, targets, None));
    }
    let targets = Tensor::from_slice(targets, targets.len(), x.device())?;
    tiled_cross_entropy::cross_entropy(x, weight, targets)
}

/// Distillation (Hinton et al. 2015, <https://arxiv.org/abs/1503.02531>): the mean of `−log softmax(W x)` over a mixture of each target and
/// the distribution `softmax(W' x')` of a teacher, which has `share` of it and gets no gradient. Hidden states `x` `(N, E)` and a head
/// `weight` `(V, E)`, the teacher's `(N, E')` and `(V, E')`, `N` targets → `(N)`, nats. On the CPU in f32 all logits are made in tiles.
///
/// # Errors
/// As [`linear_cross_entropy`], or if the teacher has other rows or another vocabulary.
pub fn linear_distillation(
    x: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    teacher: (&Tensor, &Tensor),
    share: f64,
) -> Result<Tensor> {
    check_head(x, weight, targets)?;
    let (states, head) = (teacher.0.detach(), teacher.1.detach());
    check_head(&states, &head, targets)?;
    if head.dim(0)? != weight.dim(0)? {
        bail!("distillation: the teacher has a vocabulary of {}, the student one of {}", head.dim(0)?, weight.dim(0)?);
    }
    if [x, weight, &states, &head].iter().all(|t| is_fused_on_cpu(t)) {
        let teacher = Teacher { states: states.contiguous()?, head: head.contiguous()?, share: share as f32 };
        return x.contiguous()?.apply_op2(&weight.contiguous()?, CrossEntropy::new(x, weight, targets, Some(teacher)));
    }
    let logits = |x: &Tensor, w: &Tensor| -> Result<Tensor> {
        let logits = matmul(x, &w.to_dtype(x.dtype())?.t()?)?;
        if logits.dtype() == DType::F64 { Ok(logits) } else { logits.to_dtype(DType::F32) }
    };
    let logs = candle_nn::ops::log_softmax(&logits(x, weight)?, D::Minus1)?;
    let soft = candle_nn::ops::softmax(&logits(&states, &head)?, D::Minus1)?.to_dtype(logs.dtype())?;
    let targets = Tensor::from_slice(targets, (targets.len(), 1), x.device())?;
    let hard = logs.gather(&targets, D::Minus1)?.squeeze(1)?;
    (hard * (share - 1.0))? - ((soft * logs)?.sum(D::Minus1)? * share)?
}

/// Refuses targets `(N)` that hidden states `(N, E)` and a head `(V, E)` do not fit.
fn check_head(x: &Tensor, weight: &Tensor, targets: &[u32]) -> Result<()> {
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
    Ok(())
}
