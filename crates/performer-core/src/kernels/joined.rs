//! Keys and further numbers as one tensor. A custom operation of Candle takes at most three
//! tensors; attention with forget gates has a fourth, and a feature map that is trained has
//! parameters as well. So the keys and all that is neither queries nor values become one tensor,
//! which costs one copy of the keys. Its gradient is one tensor too, of which both parts are views.

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor};

use super::{
    contiguous, for_heads,
    fresh::Fresh,
    operation::{Operation, Stored, apply},
    rows::Heads,
};

/// `JoinedKeys` says what a tensor of keys and further numbers consists of: first the keys
/// `(B, Hkv, Tk, D)`, contiguous, then the numbers. All of them are f32, whatever the keys were,
/// since sums of forget gates would lose too much in half types.
pub(super) struct JoinedKeys {
    keys: Shape,
}

impl JoinedKeys {
    /// Joins keys `(B, Hkv, Tk, D)`, whose rows are contiguous, and f32 numbers of any shape.
    pub(super) fn new(keys: &Tensor, numbers: &Tensor) -> Result<(Self, Tensor)> {
        let shape = keys.shape().clone();
        let operation = JoinKeys { keys: shape.clone(), dtype: keys.dtype(), numbers: numbers.shape().clone() };
        Ok((Self { keys: shape }, apply(operation, [keys, numbers])?))
    }

    /// The keys and the numbers of a joined tensor that is stored on the CPU.
    pub(super) fn split<'a>(
        &self,
        (storage, layout): Stored<'a, CpuStorage>,
    ) -> Result<((&'a CpuStorage, Layout), &'a [f32])> {
        let numbers = &contiguous(storage, layout)?[self.keys.elem_count()..];
        let keys = Layout::contiguous_with_offset(self.keys.clone(), layout.start_offset());
        Ok(((storage, keys), numbers))
    }

    /// The keys of a joined tensor, as a view, and a copy of the numbers, for a backward pass.
    pub(super) fn parts(&self, joined: &Tensor) -> Result<(Tensor, Vec<f32>)> {
        let (joined, keys) = (joined.detach(), self.keys.elem_count());
        let numbers = joined.narrow(0, keys, joined.elem_count() - keys)?.to_vec1()?;
        Ok((joined.narrow(0, 0, keys)?.reshape(&self.keys)?, numbers))
    }

    /// Joins the gradients of keys and of numbers; those of the keys have room for the others.
    pub(super) fn gradient(mut keys: Vec<f32>, numbers: &[f32], like: &Tensor) -> Result<Tensor> {
        keys.extend_from_slice(numbers);
        Tensor::from_vec(keys, like.shape(), like.device())
    }
}

/// `JoinKeys` is the joining as one differentiable operation on `(keys, numbers)`.
struct JoinKeys {
    keys: Shape,
    dtype: DType,
    numbers: Shape,
}

impl Operation<2> for JoinKeys {
    fn name(&self) -> &'static str {
        "join-keys"
    }

    fn cpu(&self, [(s1, l1), (s2, l2)]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        let (batch, key_heads, tokens, width) = self.keys.dims4()?;
        let (keys, numbers) = (Heads::new(s1, l1)?, contiguous(s2, l2)?);
        let (heads, size) = (batch * key_heads, tokens * width);
        let mut out = Fresh::new(heads * size + numbers.len());
        // The numbers come after the heads, in parts of the same size.
        let work = out.parts(size).into_iter().enumerate().collect();
        for_heads(work, |(n, part)| {
            let to = part.take();
            match n.checked_sub(heads) {
                None => keys.head(n).copy(0, tokens, to, width),
                Some(n) => to.copy_from_slice(&numbers[n * size..n * size + to.len()]),
            }
        });
        let out = out.finish();
        let shape = Shape::from(out.len());
        Ok((CpuStorage::F32(out), shape))
    }

    fn backward(&self, _: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (grad, keys) = (grad.contiguous()?, self.keys.elem_count());
        let of_keys = grad.narrow(0, 0, keys)?.reshape(&self.keys)?.to_dtype(self.dtype)?;
        let of_numbers = grad.narrow(0, keys, self.numbers.elem_count())?.reshape(&self.numbers)?;
        Ok([Some(of_keys), Some(of_numbers)])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};
    use half::bf16;

    use super::*;

    #[test]
    fn keys_and_numbers_come_apart_again() -> Result<()> {
        let device = &Device::Cpu;
        // Tokens before heads, as a projection leaves them, and more numbers than a head has.
        let keys = Var::from_tensor(&Tensor::arange(0f32, 24.0, device)?.reshape((2, 3, 2, 2))?)?;
        let numbers = Var::from_tensor(&Tensor::arange(100f32, 109.0, device)?.reshape((3, 3))?)?;
        let heads = keys.transpose(1, 2)?;
        let (joined, all) = JoinedKeys::new(&heads, &numbers)?;
        let (storage, layout) = all.storage_and_layout();
        let candle_core::Storage::Cpu(storage) = &*storage else { panic!("on the CPU") };
        let ((_, of_keys), of_numbers) = joined.split((storage, layout))?;
        assert_eq!(of_keys.dims(), [2, 2, 3, 2]);
        assert_eq!(of_numbers, (100..109).map(|n| n as f32).collect::<Vec<_>>());
        let (view, copy) = joined.parts(&all)?;
        assert_eq!(view.flatten_all()?.to_vec1::<f32>()?, heads.flatten_all()?.to_vec1::<f32>()?);
        assert_eq!(copy, of_numbers);
        // Each number's gradient is its weight in this sum.
        let weights = Tensor::arange(1f32, 34.0, device)?;
        let gradients = (&all * &weights)?.sum_all()?.backward()?;
        let of = |x: &Tensor| gradients.get(x).expect("a gradient").flatten_all()?.to_vec1::<f32>();
        let of_heads = weights.narrow(0, 0, 24)?.reshape((2, 2, 3, 2))?.transpose(1, 2)?.flatten_all()?;
        assert_eq!(of(&keys)?, of_heads.to_vec1::<f32>()?);
        assert_eq!(of(&numbers)?, (25..34).map(|n| n as f32).collect::<Vec<_>>());
        Ok(())
    }

    #[test]
    fn half_types_are_widened_and_their_gradients_narrowed() -> Result<()> {
        let device = &Device::Cpu;
        let keys = Var::from_slice(&[bf16::from_f32(0.5), bf16::from_f32(-3.0)], (1, 1, 1, 2), device)?;
        let gates = Var::from_slice(&[-0.1f32], (1, 1, 1), device)?;
        let (_, all) = JoinedKeys::new(&keys, &gates)?;
        assert_eq!(all.to_vec1::<f32>()?, [0.5, -3.0, -0.1]);
        let gradients = all.sqr()?.sum_all()?.backward()?;
        let of_keys = gradients.get(&keys).expect("a gradient").flatten_all()?;
        assert_eq!(of_keys.to_vec1::<bf16>()?, [1.0, -6.0].map(bf16::from_f32));
        assert_eq!(gradients.get(&gates).expect("a gradient").flatten_all()?.to_vec1::<f32>()?, [-0.2]);
        Ok(())
    }
}
