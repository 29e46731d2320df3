//! The forget gates of a layer, which it computes from its input.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder};

#[cfg(feature = "cuda")]
use crate::kernels::{cuda, forget_gate::ForgetGate};
use crate::{
    kernels::{activation::LogSigmoid, compute_dtype, operation::apply},
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
        let constants: Vec<f64> = TIME_CONSTANTS.into_iter().cycle().take(heads).collect();
        bias.slice_set(&biases_of(&constants, bias.dtype())?.to_device(bias.device())?, 0, 0)?;
    }
    Ok(Linear::new(weight, Some(bias)))
}

/// The biases `ln(τ − 1)`, which alone make `e^g = σ(ln(τ − 1)) = 1 − 1/τ`, one for each time
/// constant τ, on the CPU, since Metal cannot convert from f64.
pub(super) fn biases_of(time_constants: &[f64], dtype: DType) -> Result<Tensor> {
    Tensor::from_iter(time_constants.iter().map(|tau| (tau - 1.0).ln()), &Device::Cpu)?.to_dtype(dtype)
}

/// Computes gates `(B, Hkv, T)` of `x` `(B, T, E)`, in f32 (f64 for f64): half types have too few
/// digits for gates near 0, which remember for long.
pub(super) fn gates(gate: &Linear, x: &Tensor) -> Result<Tensor> {
    let wide = compute_dtype(x.dtype());
    let weight = ops::to_dtype(gate.weight(), wide)?;
    let bias = gate.bias().map(|bias| ops::to_dtype(bias, wide)).transpose()?;
    #[cfg(feature = "cuda")]
    if let Some(bias) = bias.as_ref().filter(|_| cuda::takes(x)) {
        return apply(ForgetGate, [&ops::contiguous(x)?, &ops::contiguous(&weight)?, &ops::contiguous(bias)?]);
    }
    let z = ops::linear(&ops::to_dtype(x, wide)?, &weight, bias.as_ref())?;
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
    use crate::{AttentionConfig, LayerParts, MultiHeadAttention, MultiHeadConfig};

    /// A layer with gates of a constant pace forgets by `1 − 1/τ` in each head, whatever it reads.
    #[test]
    fn gates_of_a_constant_pace_do_not_depend_on_the_text() -> Result<()> {
        let device = Device::Cpu;
        let parts = LayerParts::default().with_gate(true);
        let config = MultiHeadConfig::new(8, 4).with_kv_heads(2).with_parts(parts);
        let mut weights: std::collections::HashMap<String, Tensor> = [("q_proj", 8), ("k_proj", 4), ("v_proj", 4)]
            .into_iter()
            .map(|(name, rows)| Ok((format!("{name}.weight"), Tensor::randn(0f32, 1.0, (rows, 8), &device)?)))
            .collect::<Result<_>>()?;
        weights.insert("o_proj.weight".into(), Tensor::zeros((8, 8), DType::F32, &device)?);
        weights.extend(config.constant_gates(&[4.0, 1000.0], &device)?);
        let softmax = AttentionConfig::Softmax.build(2, 1, DType::F32, &device)?;
        let vb = VarBuilder::from_tensors(weights, DType::F32, &device);
        let layer = MultiHeadAttention::without_buffers(&config, softmax, None, vb)?;
        let x = Tensor::randn(0f32, 3.0, (1, 5, 8), &device)?;
        let gates = layer.gates(&x)?.expect("it has gates").squeeze(0)?.to_vec2::<f32>()?;
        for (gates, tau) in gates.iter().zip([4f64, 1000.0]) {
            let expected = (1.0 - 1.0 / tau).ln();
            assert!(gates.iter().all(|&g| (f64::from(g) / expected - 1.0).abs() < 1e-4), "{gates:?} and {expected}");
        }

        for (bad, words) in [(&[4.0][..], "1 time constants for 2 key heads"), (&[4.0, 1.0], "time constant 1: it is")]
        {
            let error = config.constant_gates(bad, &device).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
        Ok(())
    }

    /// The fused operation in f32 and Candle's operations in f64 agree with the formula, gradients
    /// included: at 0, and for large z, where the logarithm of a rounded σ(z) has hardly a digit.
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
