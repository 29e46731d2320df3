//! The forget gates of a layer, which it computes from its input.

use candle_core::{DType, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder};

use crate::{
    kernels::{activation::LogSigmoid, operation::apply},
    ops,
};

/// Time constants of new gates in tokens, which the heads take in turn.
const TIME_CONSTANTS: [f64; 4] = [4.0, 16.0, 64.0, 256.0];

/// The weights of a forget gate, made or read.
pub(super) fn forget_gate(hidden: usize, heads: usize, vb: &VarBuilder) -> Result<Linear> {
    let weight = vb.get_with_hints((heads, hidden), "weight", Init::Const(0.0))?;
    let known = vb.contains_tensor("bias");
    let bias = vb.get_with_hints(heads, "bias", Init::Const(0.0))?;
    if !known {
        let biases = TIME_CONSTANTS.iter().cycle().take(heads).map(|tau| (tau - 1.0).ln());
        let biases = Tensor::from_iter(biases, bias.device())?.to_dtype(bias.dtype())?;
        bias.slice_set(&biases, 0, 0)?;
    }
    Ok(Linear::new(weight, Some(bias)))
}

/// Computes gates `(B, Hkv, T)` of `x` `(B, T, E)`, in f32 (f64 for f64): half types have too few
/// digits for gates near 0, which remember for long.
pub(super) fn gates(gate: &Linear, x: &Tensor) -> Result<Tensor> {
    let wide = if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
    let bias = gate.bias().map(|bias| ops::to_dtype(bias, wide)).transpose()?;
    let z = ops::linear(&ops::to_dtype(x, wide)?, &ops::to_dtype(gate.weight(), wide)?, bias.as_ref())?;
    ops::contiguous(&ops::transpose(&log_sigmoid(&z)?, 1, 2)?)
}

/// Computes `log σ(z) = −log(1 + e^{−z})` without overflow.
fn log_sigmoid(z: &Tensor) -> Result<Tensor> {
    if z.device().is_cpu() && z.dtype() == DType::F32 {
        return apply(LogSigmoid, [&ops::contiguous(z)?]);
    }
    // Both terms have a kink at 0, and their sum and its gradient have none.
    let size = z.abs()?;
    ((z - &size)? * 0.5)? - (size.neg()?.exp()? + 1.0)?.log()?
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    /// The operation on the CPU and Candle's operations agree with f64, gradients included, at 0
    /// and where one digit of the other form would be left.
    #[test]
    fn log_sigmoid_has_its_digits() -> Result<()> {
        let numbers = [-200.0f32, -30.0, -1.0, 0.0, 0.5, 5.5, 14.0, 60.0];
        let of = |dtype| -> Result<(Vec<f64>, Vec<f64>)> {
            let z = Var::from_tensor(&Tensor::new(&numbers, &Device::Cpu)?.to_dtype(dtype)?)?;
            let out = log_sigmoid(&z)?;
            let gradients = out.sum_all()?.backward()?;
            let gradient = gradients.get(&z).expect("a gradient");
            Ok((out.to_dtype(DType::F64)?.to_vec1()?, gradient.to_dtype(DType::F64)?.to_vec1()?))
        };
        let (fused, composed) = (of(DType::F32)?, of(DType::F64)?);
        for (i, z) in numbers.map(f64::from).into_iter().enumerate() {
            let (value, slope) = (z.min(0.0) - (-z.abs()).exp().ln_1p(), 1.0 / (1.0 + z.exp()));
            assert!((fused.0[i] / value - 1.0).abs() < 1e-6, "{z}: {} and {value}", fused.0[i]);
            assert!((fused.1[i] / slope - 1.0).abs() < 1e-5, "{z}: slope {} and {slope}", fused.1[i]);
            assert!((composed.0[i] - value).abs() < 1e-12 && (composed.1[i] - slope).abs() < 1e-12, "{z}");
        }
        Ok(())
    }
}
