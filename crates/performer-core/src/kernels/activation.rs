//! GELU, tanh form (Hendrycks & Gimpel 2016): `x σ(2u)` with `u = √(2/π) (x + 0.044715 x³)`.
//!
//! Candle's takes a scalar `tanh` and `powf` an element on the CPU, a fifth of a whole training step of a small model. Here it is one
//! vectorised operation each way.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{contiguous, vector::exp, with_storages};

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// GELU of contiguous numbers.
pub(crate) struct Gelu;

/// `σ(2u)`: exponents stay at most 0, so nothing overflows.
#[inline(always)]
fn gate(x: f32) -> f32 {
    let u = SQRT_2_OVER_PI * (x + CUBIC * x * x * x);
    let e = exp(-2.0 * u.abs());
    let below = e / (1.0 + e);
    if u < 0.0 { below } else { 1.0 - below }
}

#[inline(always)]
fn derivative(x: f32) -> f32 {
    let g = gate(x);
    g + 2.0 * x * g * (1.0 - g) * SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = contiguous(storage, layout)?;
        let mut out = vec![0f32; x.len()];
        pulp::Arch::new().dispatch(
            #[inline(always)]
            || {
                for (o, &x) in out.iter_mut().zip(x) {
                    *o = x * gate(x);
                }
            },
        );
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::activation::gelu((storage, layout))
    }

    fn bwd(&self, x: &Tensor, _out: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return cuda::activation::gelu_backward(x, grad).map(Some);
        }
        let grad = grad.contiguous()?;
        let mut out = vec![0f32; x.elem_count()];
        with_storages([x, &grad], |[x, grad]| {
            let (xs, gs) = (contiguous(x.0, x.1)?, contiguous(grad.0, grad.1)?);
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || {
                    for ((o, &x), &g) in out.iter_mut().zip(xs).zip(gs) {
                        *o = g * derivative(x);
                    }
                },
            );
            Ok(())
        })?;
        Ok(Some(Tensor::from_vec(out, x.shape(), x.device())?))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn agrees_with_candle_forward_and_backward() -> Result<()> {
        let values: Vec<f32> = (-400..=400).map(|i| i as f32 / 40.0).chain([-50.0, 50.0, 0.0]).collect();
        let x = Var::from_tensor(&Tensor::new(values, &Device::Cpu)?)?;
        let difference = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max(0)?.to_scalar::<f32>();
        let (ours, theirs) = (x.apply_op1(Gelu)?, x.gelu()?);
        assert!(difference(&ours, &theirs)? < 2e-6);
        let gradient = |y: &Tensor| -> Result<Tensor> {
            let grads = y.sqr()?.sum_all()?.backward()?;
            grads.get(&x).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
        };
        assert!(difference(&gradient(&ours)?, &gradient(&theirs)?)? < 2e-4);
        Ok(())
    }
}
