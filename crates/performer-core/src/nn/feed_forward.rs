//! The feed-forward layer with a SwiGLU gate.

use candle_core::{Result, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear_no_bias};

use crate::ops;

/// `SwiGlu` is the feed-forward layer `W_down (g σ(g) ∘ W_up x)` with `g = W_gate x` (Shazeer 2020,
/// <https://arxiv.org/abs/2002.05202>), as Llama and its relatives have it, without biases.
///
/// Inputs are `(.., E)`, as are outputs. The weights are `gate_proj.weight` and `up_proj.weight`
/// `(F, E)`, and `down_proj.weight` `(E, F)`, as in Hugging Face checkpoints; gradients go to all
/// of them.
///
/// # Example
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap};
/// use performer_core::nn::SwiGlu;
///
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let feed_forward = SwiGlu::new(8, 20, vb)?;
/// let x = Tensor::randn(0f32, 1.0, (2, 3, 8), &Device::Cpu)?;
/// let y = feed_forward.forward(&x)?;
/// assert_eq!(y.dims(), [2, 3, 8]);
/// let gradients = y.sqr()?.sum_all()?.backward()?;
/// assert!(vars.all_vars().iter().all(|var| gradients.get(var).is_some()));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct SwiGlu {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl SwiGlu {
    /// Makes the layer's weights, or reads them, from `vb`: from `hidden` numbers (E) over
    /// `intermediate` (F) back to `hidden`.
    ///
    /// # Errors
    /// If `vb` has other shapes, or lacks a weight and cannot make it.
    pub fn new(hidden: usize, intermediate: usize, vb: VarBuilder) -> Result<Self> {
        Ok(Self {
            gate: linear_no_bias(hidden, intermediate, vb.pp("gate_proj"))?,
            up: linear_no_bias(hidden, intermediate, vb.pp("up_proj"))?,
            down: linear_no_bias(intermediate, hidden, vb.pp("down_proj"))?,
        })
    }
}

impl Module for SwiGlu {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let inner = ops::swiglu_linear(x, self.gate.weight(), self.up.weight())?;
        ops::linear(&inner, self.down.weight(), None)
    }
}
