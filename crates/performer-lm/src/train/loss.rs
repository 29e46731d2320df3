//! Cross-entropy from logits.
//!
//! With a vocabulary of thousands the logits are the largest tensor of a step, and Candle's composed loss walks over them a
//! dozen times. On the CPU one operation reads them once forward and once backward; elsewhere the composed form serves.

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, bail};
use performer_core::kernels::vector::{LANES, exp};

/// Negative log-likelihood in nats of each target: logits `(N, V)`, `N` targets → `(N)`.
///
/// # Errors
/// If a target lies beyond the vocabulary, or the number of targets is not `N`.
pub fn cross_entropy(logits: &Tensor, targets: &[u32]) -> Result<Tensor> {
    let (n, vocabulary) = logits.dims2()?;
    if targets.len() != n {
        bail!("cross-entropy of {n} rows of logits with {} targets; it needs one each", targets.len());
    }
    if let Some(bad) = targets.iter().find(|&&t| t as usize >= vocabulary) {
        bail!("target {bad} lies beyond the vocabulary of {vocabulary}");
    }
    if logits.device().is_cpu() && logits.dtype() == candle_core::DType::F32 {
        return logits.contiguous()?.apply_op1(CrossEntropy { targets: targets.to_vec() });
    }
    let targets = Tensor::from_vec(targets.to_vec(), (n, 1), logits.device())?;
    candle_nn::ops::log_softmax(logits, D::Minus1)?.gather(&targets, D::Minus1)?.squeeze(1)?.neg()
}

struct CrossEntropy {
    targets: Vec<u32>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = contiguous(storage, layout)?;
        let n = self.targets.len();
        let losses = logits
            .chunks_exact((logits.len() / n.max(1)).max(1))
            .zip(&self.targets)
            .map(|(row, &target)| {
                let (max, sum) = max_and_sum(row);
                sum.ln() + max - row[target as usize]
            })
            .collect();
        Ok((CpuStorage::F32(losses), Shape::from(n)))
    }

    /// `softmax(logits) − onehot(target)`, times the gradient of each row's loss.
    fn bwd(&self, logits: &Tensor, _losses: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.to_vec1::<f32>()?;
        let op = Backward { targets: &self.targets, grad: &grad };
        let logits = logits.detach();
        let (storage, layout) = logits.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { bail!("cross-entropy: logits have left the CPU") };
        let values = op.compute(contiguous(storage, layout)?);
        Ok(Some(Tensor::from_vec(values, logits.shape(), logits.device())?))
    }
}

struct Backward<'a> {
    targets: &'a [u32],
    grad: &'a [f32],
}

impl Backward<'_> {
    fn compute(&self, logits: &[f32]) -> Vec<f32> {
        let vocabulary = (logits.len() / self.targets.len().max(1)).max(1);
        let mut values = Vec::with_capacity(logits.len());
        for (i, row) in logits.chunks_exact(vocabulary).enumerate() {
            let (max, sum) = max_and_sum(row);
            let scale = self.grad[i] / sum;
            let start = values.len();
            pulp::Arch::new().dispatch(|| values.extend(row.iter().map(|&x| exp(x - max) * scale)));
            values[start + self.targets[i] as usize] -= self.grad[i];
        }
        values
    }
}

fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("cross-entropy: logits must be contiguous f32"),
    }
}

/// The row's maximum `m` and `Σ e^{x − m}`.
fn max_and_sum(row: &[f32]) -> (f32, f32) {
    // Lanes let the compiler vectorise what floating-point order would forbid; the order is fixed, so is the result.
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || {
            let mut max = [f32::NEG_INFINITY; LANES];
            let chunks = row.chunks_exact(LANES);
            let rest = chunks.remainder();
            for chunk in chunks {
                for (m, &x) in max.iter_mut().zip(chunk) {
                    *m = if x > *m { x } else { *m };
                }
            }
            let max = max.iter().chain(rest).fold(f32::NEG_INFINITY, |m, &x| m.max(x));
            let mut sum = [0f32; LANES];
            for chunk in row.chunks_exact(LANES) {
                for (s, &x) in sum.iter_mut().zip(chunk) {
                    *s += exp(x - max);
                }
            }
            (max, sum.iter().sum::<f32>() + rest.iter().map(|&x| exp(x - max)).sum::<f32>())
        },
    )
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn agrees_with_composed_ops_forward_and_backward() -> Result<()> {
        let device = Device::Cpu;
        for (n, vocabulary) in [(1, 1), (3, 7), (5, 16), (4, 1000)] {
            let values: Vec<f32> = (0..n * vocabulary).map(|i| ((i * 7919 % 1013) as f32 / 50.0) - 10.0).collect();
            let logits = Var::from_tensor(&Tensor::from_vec(values, (n, vocabulary), &device)?)?;
            let targets: Vec<u32> = (0..n).map(|i| (i * 31 % vocabulary) as u32).collect();
            let weights = Tensor::arange(1f32, n as f32 + 1.0, &device)?;
            let index = Tensor::from_vec(targets.clone(), (n, 1), &device)?;
            let composed =
                candle_nn::ops::log_softmax(&logits, D::Minus1)?.gather(&index, D::Minus1)?.squeeze(1)?.neg()?;
            let fused = cross_entropy(&logits, &targets)?;
            let difference = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>();
            assert!(difference(&composed, &fused)? < 1e-5);
            let gradient = |loss: &Tensor| -> Result<Tensor> {
                let grads = (loss * &weights)?.sum_all()?.backward()?;
                grads.get(&logits).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
            };
            assert!(difference(&gradient(&composed)?, &gradient(&fused)?)? < 1e-5);
        }
        Ok(())
    }

    #[test]
    fn refuses_what_does_not_fit() -> Result<()> {
        let logits = Tensor::zeros((2, 4), candle_core::DType::F32, &Device::Cpu)?;
        assert!(cross_entropy(&logits, &[0]).unwrap_err().to_string().contains("one each"));
        assert!(cross_entropy(&logits, &[0, 4]).unwrap_err().to_string().contains("vocabulary of 4"));
        Ok(())
    }
}
