//! Activation functions: GELU in its tanh form (Hendrycks & Gimpel 2016), `x σ(2u)` with
//! `u = √(2/π) (x + 0.044715 x³)`; SwiGLU (Shazeer 2020), `g σ(g) x`; and output gates, `2σ(g) x`.
//!
//! On the CPU, Candle's call a scalar `tanh` and `powf`, or `exp`, for each element: GELU was a
//! fifth of a whole training step of a small model. Here each is one vectorised operation, forward
//! and backward.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, backend::BackendStorage, bail};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    contiguous,
    instructions::arch,
    operation::{Operation, Stored},
    vector::exp,
    with_storages,
};

const SQRT_2_OVER_PI: f32 = 0.797_884_6;
const CUBIC: f32 = 0.044_715;

/// `Gelu` computes GELU of contiguous numbers.
pub(crate) struct Gelu;

/// Computes `σ(x)` with an exponent of at most 0, so that nothing overflows.
#[inline(always)]
fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let below = e / (1.0 + e);
    if x < 0.0 { below } else { 1.0 - below }
}

/// Computes `σ(2u)`, the factor of `x` in GELU.
#[inline(always)]
fn gate(x: f32) -> f32 {
    sigmoid(2.0 * SQRT_2_OVER_PI * (x + CUBIC * x * x * x))
}

/// Computes the derivative of GELU.
#[inline(always)]
fn derivative(x: f32) -> f32 {
    let g = gate(x);
    // Where the second term is 0 by far, its last factor must not be infinite.
    let x = x.clamp(-100.0, 100.0);
    g + 2.0 * x * g * (1.0 - g) * SQRT_2_OVER_PI * (1.0 + 3.0 * CUBIC * x * x)
}

impl Operation<1> for Gelu {
    fn name(&self) -> &'static str {
        "gelu"
    }

    fn cpu(&self, [x]: [Stored<'_, CpuStorage>; 1]) -> Result<(CpuStorage, Shape)> {
        let (x, shape) = (contiguous(x)?, x.1.shape());
        let mut out = vec![0f32; x.len()];
        arch().dispatch(
            #[inline(always)]
            || {
                for (o, &x) in out.iter_mut().zip(x) {
                    *o = x * gate(x);
                }
            },
        );
        Ok((CpuStorage::F32(out), shape.clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [(storage, layout)]: [Stored<'_, CudaStorage>; 1]) -> Result<(CudaStorage, Shape)> {
        cuda::activation::gelu((storage, layout))
    }

    fn backward(&self, [x]: [&Tensor; 1], _out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return Ok([Some(cuda::activation::gelu_backward(x, grad)?)]);
        }
        let grad = grad.contiguous()?;
        let mut out = vec![0f32; x.elem_count()];
        with_storages([x, &grad], |[x, grad]| {
            let (xs, gs) = (contiguous(x)?, contiguous(grad)?);
            arch().dispatch(
                #[inline(always)]
                || {
                    for ((o, &x), &g) in out.iter_mut().zip(xs).zip(gs) {
                        *o = g * derivative(x);
                    }
                },
            );
            Ok(())
        })?;
        Ok([Some(Tensor::from_vec(out, x.shape(), x.device())?)])
    }
}

/// `LogSigmoid` computes `log σ(z) = −log(1 + e^{−z})` of contiguous numbers, on the CPU. Near 0 it
/// has all its digits, which `log(1 + e^{−z})` loses where `e^{−z}` is small.
pub(crate) struct LogSigmoid;

impl Operation<1> for LogSigmoid {
    fn name(&self) -> &'static str {
        "log-sigmoid"
    }

    fn cpu(&self, [z]: [Stored<'_, CpuStorage>; 1]) -> Result<(CpuStorage, Shape)> {
        let out = contiguous(z)?.iter().map(|z| z.min(0.0) - (-z.abs()).exp().ln_1p()).collect();
        Ok((CpuStorage::F32(out), z.1.shape().clone()))
    }

    fn backward(&self, [z]: [&Tensor; 1], _out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let grad = grad.contiguous()?;
        let of_z = with_storages([z, &grad], |[z, grad]| {
            let pairs = contiguous(z)?.iter().zip(contiguous(grad)?);
            Ok(pairs.map(|(z, g)| g * sigmoid(-z)).collect::<Vec<f32>>())
        })?;
        Ok([Some(Tensor::from_vec(of_z, z.shape(), z.device())?)])
    }
}

/// Returns `f(g, x)` of contiguous gates and numbers of one shape and type.
fn gated(name: &str, inputs: [Stored<'_, CpuStorage>; 2], f: impl Fn(f32, f32) -> f32) -> Result<(CpuStorage, Shape)> {
    let of = inputs.map(|(storage, layout)| (storage.dtype(), layout.dims()));
    if of[0] != of[1] {
        bail!("{name}: gates and numbers must have one type and shape, not {of:?}");
    }
    let (gates, xs) = (contiguous(inputs[0])?, contiguous(inputs[1])?);
    let mut out = vec![0f32; xs.len()];
    arch().dispatch(
        #[inline(always)]
        || {
            for ((o, &g), &x) in out.iter_mut().zip(gates).zip(xs) {
                *o = f(g, x);
            }
        },
    );
    Ok((CpuStorage::F32(out), inputs[0].1.shape().clone()))
}

/// Returns the gradients of contiguous gates and numbers, which are `f(g, x, gradient)`.
fn gated_gradients(
    gate: &Tensor,
    x: &Tensor,
    grad: &Tensor,
    f: impl Fn(f32, f32, f32) -> [f32; 2],
) -> Result<[Option<Tensor>; 2]> {
    let grad = grad.contiguous()?;
    let (mut dgate, mut dx) = (vec![0f32; x.elem_count()], vec![0f32; x.elem_count()]);
    with_storages([gate, x, &grad], |[gate, x, grad]| {
        let (gates, xs) = (contiguous(gate)?, contiguous(x)?);
        let grads = contiguous(grad)?;
        arch().dispatch(
            #[inline(always)]
            || {
                let outputs = dgate.iter_mut().zip(&mut dx);
                for ((((dgate, dx), &g), &x), &grad) in outputs.zip(gates).zip(xs).zip(grads) {
                    [*dgate, *dx] = f(g, x, grad);
                }
            },
        );
        Ok(())
    })?;
    let tensor = |values| Tensor::from_vec(values, x.shape(), x.device()).map(Some);
    Ok([tensor(dgate)?, tensor(dx)?])
}

/// A `Gate` multiplies contiguous numbers `x` by a function of contiguous gates `g` of their shape
/// and type.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Gate {
    /// `g σ(g) x`, SwiGLU.
    Swiglu,
    /// `2σ(g) x`, the gate of a layer's output, which is 1 where `g` is 0.
    Output,
}

impl Operation<2> for Gate {
    fn name(&self) -> &'static str {
        match self {
            Self::Swiglu => "swiglu",
            Self::Output => "sigmoid-gate",
        }
    }

    fn cpu(&self, inputs: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        match self {
            Self::Swiglu => gated(
                self.name(),
                inputs,
                #[inline(always)]
                |g, x| g * sigmoid(g) * x,
            ),
            Self::Output => gated(
                self.name(),
                inputs,
                #[inline(always)]
                |g, x| 2.0 * sigmoid(g) * x,
            ),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [gate, x]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        cuda::activation::gate(*self, gate, x)
    }

    fn backward(&self, [gate, x]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return Ok(cuda::activation::gate_backward(*self, gate, x, grad)?.map(Some));
        }
        match self {
            Self::Swiglu => gated_gradients(
                gate,
                x,
                grad,
                #[inline(always)]
                |g, x, grad| {
                    let s = sigmoid(g);
                    [grad * x * s * (1.0 + g * (1.0 - s)), grad * g * s]
                },
            ),
            Self::Output => gated_gradients(
                gate,
                x,
                grad,
                #[inline(always)]
                |g, x, grad| {
                    let s = sigmoid(g);
                    [2.0 * grad * x * s * (1.0 - s), 2.0 * grad * s]
                },
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::operation::apply;
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn agrees_with_candle_forward_and_backward() -> Result<()> {
        let values: Vec<f32> = (-400..=400).map(|i| i as f32 / 40.0).chain([-50.0, 50.0, 0.0]).collect();
        let x = Var::from_tensor(&Tensor::new(values, &Device::Cpu)?)?;
        let difference = |a: &Tensor, b: &Tensor| (a - b)?.abs()?.max(0)?.to_scalar::<f32>();
        let (ours, theirs) = (apply(Gelu, [x.as_tensor()])?, x.gelu()?);
        assert!(difference(&ours, &theirs)? < 2e-6);
        let gradient = |y: &Tensor| -> Result<Tensor> {
            let grads = y.sqr()?.sum_all()?.backward()?;
            grads.get(&x).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"))
        };
        assert!(difference(&gradient(&ours)?, &gradient(&theirs)?)? < 2e-4);
        Ok(())
    }
}
