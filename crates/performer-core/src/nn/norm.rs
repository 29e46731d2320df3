//! LayerNorm and RMSNorm with their weights.

use candle_core::{Result, Tensor};
use candle_nn::{LayerNormConfig, Module, VarBuilder};

use crate::ops::normalise;

/// `LayerNorm` normalises over the last dimension, `w ∘ (x − mean x)/√(var x + ε) + b` (Ba et al.
/// 2016, <https://arxiv.org/abs/1607.06450>), and passes gradients to its input, weight and bias.
///
/// It takes the place of `candle_nn::LayerNorm`, whose configurations it shares: without the bias,
/// and without subtracting the mean. Inputs are `(.., E)` with any strides, of f16, bf16, f32 or
/// f64; the weight `(E)` may be f32 where they are of a half type.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use performer_core::nn::layer_norm;
///
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let norm = layer_norm(8, 1e-5, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let x = Tensor::randn(0f32, 1.0, (2, 3, 8), &Device::Cpu)?;
/// let gradients = norm.forward(&x)?.sqr()?.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm(candle_nn::LayerNorm);

impl LayerNorm {
    /// Makes a norm of a weight and a bias, `(E)` each.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self(candle_nn::LayerNorm::new(weight, bias, eps))
    }

    /// Makes a norm of a weight `(E)`, without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self(candle_nn::LayerNorm::new_no_bias(weight, eps))
    }

    /// The weight, `(E)`.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// The bias, `(E)`, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.0.bias()
    }

    /// The number ε that is added to the variance.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// Whether the mean is subtracted.
    pub fn remove_mean(&self) -> bool {
        self.0.remove_mean()
    }
}

impl From<candle_nn::LayerNorm> for LayerNorm {
    fn from(norm: candle_nn::LayerNorm) -> Self {
        Self(norm)
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalise(x, self.weight(), self.bias(), self.eps(), self.remove_mean())
    }
}

/// `layer_norm` makes or loads a [`LayerNorm`] over `size` numbers, with `weight` and `bias` of
/// `vb`, or `gamma` and `beta` as old checkpoints call them. `config` is ε or a
/// [`LayerNormConfig`].
///
/// # Errors
/// If `vb` has other shapes, or lacks a parameter and cannot make it.
pub fn layer_norm<C: Into<LayerNormConfig>>(size: usize, config: C, vb: VarBuilder) -> Result<LayerNorm> {
    candle_nn::layer_norm(size, config, vb).map(LayerNorm)
}

/// `layer_norm_no_bias` makes or loads a [`LayerNorm`] over `size` numbers that has only a
/// `weight`.
///
/// # Errors
/// If `vb` has another shape, or lacks the weight and cannot make it.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder) -> Result<LayerNorm> {
    candle_nn::layer_norm_no_bias(size, eps, vb).map(LayerNorm)
}

/// `RmsNorm` normalises over the last dimension, `w ∘ x/√(mean x² + ε)` (Zhang & Sennrich 2019,
/// <https://arxiv.org/abs/1910.07467>), and passes gradients to its input and weight.
///
/// It takes the place of `candle_nn::RmsNorm`. Inputs are `(.., E)` with any strides, of f16, bf16,
/// f32 or f64; the weight `(E)` may be f32 where they are of a half type.
#[derive(Clone, Debug)]
pub struct RmsNorm(candle_nn::RmsNorm);

impl RmsNorm {
    /// Makes a norm of a weight `(E)`.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(candle_nn::RmsNorm::new(weight, eps))
    }

    /// The weight, `(E)`.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// The number ε that is added to the mean square.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }
}

impl From<candle_nn::RmsNorm> for RmsNorm {
    fn from(norm: candle_nn::RmsNorm) -> Self {
        Self(norm)
    }
}

impl Module for RmsNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        normalise(x, self.weight(), None, self.eps(), false)
    }
}

/// `rms_norm` makes or loads an [`RmsNorm`] over `size` numbers, with `weight` of `vb`.
///
/// # Errors
/// If `vb` has another shape, or lacks the weight and cannot make it.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder) -> Result<RmsNorm> {
    candle_nn::rms_norm(size, eps, vb).map(RmsNorm)
}
