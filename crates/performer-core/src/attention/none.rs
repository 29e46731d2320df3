//! No attention: the control that says what a model does without any.

use candle_core::{Result, Tensor};

use super::{Attention, Inputs, Mask, Path, Segment, State, inputs::Sizes};

/// Outputs of zero, whatever finite numbers the inputs are. All gradients are zero too, and none is
/// missing, so that a layer around it can be trained like others.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoAttention;

impl NoAttention {
    fn zeros(inputs: Inputs<'_>, sizes: Sizes) -> Result<Tensor> {
        inputs.check_finite()?;
        let zeros = sizes.zeros(inputs.q)?;
        if sizes.is_empty() {
            return Ok(zeros);
        }
        // A product with the number 0 has no gradient in Candle; one with a tensor of zeros has.
        [inputs.q, inputs.k, inputs.v].into_iter().try_fold(zeros, |zeros, t| {
            let first = t.narrow(0, 0, 1)?.narrow(1, 0, 1)?.narrow(2, 0, 1)?.narrow(3, 0, 1)?;
            zeros.broadcast_add(&(&first * first.zeros_like()?)?)
        })
    }
}

impl Attention for NoAttention {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        inputs.refuse_gates("the attention none")?;
        Self::zeros(inputs, inputs.sizes_under(mask)?)
    }

    fn forward_segment(&self, inputs: Inputs<'_>, _: &Segment) -> Result<Tensor> {
        self.forward(inputs, &Mask::causal())
    }

    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        inputs.refuse_gates("the attention none")?;
        inputs.sizes_under(mask)?;
        Ok(Path::Composed { why: "there is nothing to compute".into() })
    }

    fn advance(&self, inputs: Inputs<'_>, _: &mut State) -> Result<Tensor> {
        inputs.refuse_gates("the attention none")?;
        Self::zeros(inputs, inputs.sizes()?)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Var};

    use super::*;

    /// Outputs are 0, and so are the gradients, which exist: an optimiser may ask for them.
    #[test]
    fn outputs_and_gradients_are_zero() -> Result<()> {
        let made = |heads, width| Var::randn(1f32, 1.0, (2, heads, 5, width), &Device::Cpu);
        let (q, k, v) = (made(4, 6)?, made(2, 6)?, made(2, 3)?);
        let inputs = Inputs::new(&q, &k, &v);
        let mut state = State::new();
        let outputs = [NoAttention.forward(inputs, &Mask::causal())?, NoAttention.extend(inputs, &mut state)?];
        for out in outputs {
            assert_eq!((out.dims(), out.dtype()), (&[2, 4, 5, 3][..], DType::F32));
            assert_eq!(out.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
        }
        let store = NoAttention.forward(inputs, &Mask::causal())?.sum_all()?.backward()?;
        for input in [&q, &k, &v] {
            let grad = store.get(input.as_tensor()).expect("a gradient");
            assert_eq!(grad.abs()?.max_all()?.to_scalar::<f32>()?, 0.0);
        }
        Ok(())
    }
}
