//! Attention with inputs beside queries, keys and values: forget gates, the parameters of a feature
//! map that is trained, or both. A custom operation of Candle takes at most three tensors. So one
//! number stands in for the queries, keys and values as the first operand, and nothing is copied.
//!
//! ```text
//! q, k, v -> stand-in (1);   stand-in, gates, parameters -> out
//! ```
//!
//! The operation reads the numbers of `q`, `k` and `v` from the tensors themselves. Its backward
//! pass computes all gradients, and leaves those of `q`, `k` and `v` for the backward pass of the
//! stand-in, which comes after it in every backward pass.

use std::{
    sync::{Arc, Mutex, PoisonError},
    thread::{self, ThreadId},
};

use candle_core::{
    CpuStorage, CudaStorage, DType, Result, Shape, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    operation::{Operation, Stored, apply},
    with_storages,
};

/// The forward and the backward pass of attention with one or two inputs beside `q`, `k` and `v`.
pub(crate) trait AttentionPasses: Send + Sync + 'static {
    /// The name of the operation in messages.
    fn name(&self) -> &'static str;

    /// Computes the output on the CPU.
    fn cpu(&self, qkv: [Stored<'_, CpuStorage>; 3], beside: &[Stored<'_, CpuStorage>]) -> Result<(CpuStorage, Shape)> {
        let _ = (qkv, beside);
        bail!("{}: this operation has no kernel for the CPU", self.name())
    }

    /// Computes the output on a CUDA device.
    #[cfg(feature = "cuda")]
    fn cuda(
        &self,
        qkv: [Stored<'_, CudaStorage>; 3],
        beside: &[Stored<'_, CudaStorage>],
    ) -> Result<(CudaStorage, Shape)> {
        let _ = (qkv, beside);
        bail!("{}: this operation has no kernel for CUDA", self.name())
    }

    /// Computes the gradients of `q`, `k` and `v`, and one of each input beside them, in the order
    /// of these, from the output and its gradient.
    fn backward(
        &self,
        qkv: [&Tensor; 3],
        beside: &[&Tensor],
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<([Tensor; 3], Vec<Tensor>)>;
}

/// Applies `passes` to `q`, `k` and `v` and one or two inputs beside them. It is recorded for the
/// backward pass.
pub(crate) fn apply_beside(passes: impl AttentionPasses, qkv: [&Tensor; 3], beside: &[&Tensor]) -> Result<Tensor> {
    let handover = Handover::default();
    let stand_in = apply(StandIn(Arc::clone(&handover)), qkv)?;
    let operation = Beside { passes, qkv: qkv.map(Tensor::detach), handover };
    match *beside {
        [one] => apply(operation, [&stand_in, one]),
        [one, two] => apply(operation, [&stand_in, one, two]),
        _ => bail!("{}: {} inputs beside q, k and v; it takes 1 or 2", operation.passes.name(), beside.len()),
    }
}

/// The gradients of `q`, `k` and `v` on their way from [`Beside`] to [`StandIn`], each with the
/// thread of its backward pass: others over the same graph may run at the same time.
type Handover = Arc<Mutex<Vec<(ThreadId, [Tensor; 3])>>>;

/// `StandIn` is the operation that makes one number of `q`, `k` and `v`. The number says nothing.
/// The operation's backward pass returns the gradients of `q`, `k` and `v` that [`Beside`] has
/// left.
struct StandIn(Handover);

impl Operation<3> for StandIn {
    fn name(&self) -> &'static str {
        "q, k and v"
    }

    fn cpu(&self, _: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn cuda(&self, [(q, _), ..]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        Ok((q.device().zeros_impl(&Shape::from(1), DType::F32)?, Shape::from(1)))
    }

    fn backward(&self, _: [&Tensor; 3], _: &Tensor, _: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // While a backward pass waits for Rayon's threads, its own thread may begin a second one
        // and bring it to its end. The second has then left its gradients behind those of the
        // first.
        match all.iter().rposition(|(of, _)| *of == thread::current().id()) {
            Some(last) => Ok(all.remove(last).1.map(Some)),
            None => bail!("attention: the gradients of q, k and v are gone before they were asked for"),
        }
    }
}

/// `Beside` is the operation on the stand-in and the inputs beside `q`, `k` and `v`.
struct Beside<P> {
    passes: P,
    qkv: [Tensor; 3],
    handover: Handover,
}

impl<const N: usize, P: AttentionPasses> Operation<N> for Beside<P> {
    fn name(&self) -> &'static str {
        self.passes.name()
    }

    fn cpu(&self, inputs: [Stored<'_, CpuStorage>; N]) -> Result<(CpuStorage, Shape)> {
        with_storages(self.qkv.each_ref(), |qkv| self.passes.cpu(qkv, &inputs[1..]))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, inputs: [Stored<'_, CudaStorage>; N]) -> Result<(CudaStorage, Shape)> {
        cuda::with_storages(self.qkv.each_ref(), |qkv| self.passes.cuda(qkv, &inputs[1..]))
    }

    fn backward(&self, inputs: [&Tensor; N], out: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; N]> {
        let (of_qkv, of_others) = self.passes.backward(self.qkv.each_ref(), &inputs[1..], out, grad)?;
        if of_others.len() != N - 1 {
            bail!("{}: {} gradients of {} inputs beside q, k and v", self.passes.name(), of_others.len(), N - 1);
        }
        // Nobody would take them where none of q, k and v asks for a gradient. Those that a
        // backward pass leaves which fails after this are kept until the graph is dropped.
        if inputs[0].track_op() {
            self.handover.lock().unwrap_or_else(PoisonError::into_inner).push((thread::current().id(), of_qkv));
        }
        let mut gradients = std::iter::once(inputs[0].zeros_like()?).chain(of_others);
        Ok(std::array::from_fn(|_| gradients.next()))
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Error, Var, backprop::GradStore};
    use rayon::prelude::*;

    use super::super::contiguous;
    use super::*;
    use crate::{Tape, ops};

    /// `q k + v b`, and `+ c` where there is a second input beside them, number by number.
    struct Example;

    impl AttentionPasses for Example {
        fn name(&self) -> &'static str {
            "example"
        }

        fn cpu(
            &self,
            qkv: [Stored<'_, CpuStorage>; 3],
            others: &[Stored<'_, CpuStorage>],
        ) -> Result<(CpuStorage, Shape)> {
            let numbers = qkv.iter().chain(others).map(|input| contiguous(*input));
            let all = numbers.collect::<Result<Vec<_>>>()?;
            let out = |i: usize| all[0][i] * all[1][i] + all[2][i] * all[3][i] + all.get(4).map_or(0.0, |c| c[i]);
            Ok((CpuStorage::F32((0..all[0].len()).map(out).collect()), qkv[0].1.shape().clone()))
        }

        fn backward(
            &self,
            [q, k, v]: [&Tensor; 3],
            others: &[&Tensor],
            _: &Tensor,
            grad: &Tensor,
        ) -> Result<([Tensor; 3], Vec<Tensor>)> {
            let of_others = [(grad * v)?, grad.clone()].into_iter().take(others.len()).collect();
            Ok(([(grad * k)?, (grad * q)?, (grad * others[0])?], of_others))
        }
    }

    fn numbers(first: f32) -> Result<Tensor> {
        Tensor::from_slice(&[first, first + 1.0], 2, &Device::Cpu)
    }

    /// Whichever of the five inputs ask for a gradient get theirs, and no others.
    #[test]
    fn each_input_that_asks_has_its_gradient() -> Result<()> {
        let expected = [[2f32, 3.0], [1.0, 2.0], [4.0, 5.0], [3.0, 4.0], [1.0, 1.0]];
        for asks in 0..32u32 {
            let vars = (0..5).map(|n| Var::from_tensor(&numbers(n as f32 + 1.0)?)).collect::<Result<Vec<_>>>()?;
            let given = |n: usize| if asks & 1 << n != 0 { vars[n].as_tensor().clone() } else { vars[n].detach() };
            let [q, k, v, b, c] = std::array::from_fn(given);
            let out = apply_beside(Example, [&q, &k, &v], &[&b, &c])?;
            // 1·2 + 3·4 + 5 and 2·3 + 4·5 + 6.
            assert_eq!(out.to_vec1::<f32>()?, [19.0, 32.0]);
            if asks == 0 {
                assert!(!out.track_op());
                continue;
            }
            // The handover is used anew by each backward pass.
            for _ in 0..2 {
                let gradients = out.sum_all()?.backward()?;
                for (n, (var, expected)) in vars.iter().zip(&expected).enumerate() {
                    let of = gradients.get(var).map(Tensor::to_vec1::<f32>).transpose()?;
                    assert_eq!(of.as_deref(), (asks & 1 << n != 0).then_some(&expected[..]), "input {n} of {asks:05b}");
                }
            }
        }
        Ok(())
    }

    /// One tensor is queries, keys and values, the output is used twice, and several threads go
    /// back over one graph at the same time; the tape's backward pass gives the same.
    #[test]
    fn one_tensor_in_three_places_has_one_gradient() -> Result<()> {
        let (x, b) = (Var::from_tensor(&numbers(1.0)?)?, Var::from_tensor(&numbers(3.0)?)?);
        let loss = || {
            let out = apply_beside(Example, [&x, &x, &x], &[&b])?;
            ops::sum_all(&ops::add(&out, &ops::mul(&out, &numbers(2.0)?)?)?)
        };
        // Each output has the weight 3 or 4 in the loss; its slope is 2 x + b in x, and x in b.
        let check = |gradients: &GradStore| -> Result<()> {
            let of = |var: &Var| gradients.get(var).expect("a gradient").to_vec1::<f32>();
            assert_eq!((of(&x)?, of(&b)?), (vec![15.0, 32.0], vec![3.0, 8.0]));
            Ok(())
        };
        let tape = Tape::start();
        let recorded = loss()?;
        assert_eq!(tape.unrecorded(&recorded), 0);
        check(&tape.backward(&recorded)?)?;
        // Each of these goes back with another weight, so none may take what another has left.
        let loss = loss()?;
        (1..200u8).into_par_iter().try_for_each(|n| {
            let gradients = (&loss * f64::from(n))?.backward()?;
            let of_x = gradients.get(&x).expect("a gradient").to_vec1::<f32>()?;
            assert_eq!(of_x, [15.0, 32.0].map(|slope| slope * f32::from(n)), "weight {n}");
            Ok(())
        })
    }

    /// A thread takes what it has left itself, the last first, and nothing of another thread.
    #[test]
    fn each_thread_takes_what_it_has_left() -> Result<()> {
        let other = thread::spawn(|| thread::current().id()).join().expect("a thread");
        let own = thread::current().id();
        let left = |of: ThreadId, first: f32| Ok::<_, Error>((of, [numbers(first)?, numbers(first)?, numbers(first)?]));
        let stand_in = StandIn(Arc::new(Mutex::new(vec![left(own, 1.0)?, left(own, 3.0)?, left(other, 5.0)?])));
        let x = numbers(0.0)?;
        let take = || Operation::<3>::backward(&stand_in, [&x; 3], &x, &x);
        for first in [3f32, 1.0] {
            for taken in take()? {
                assert_eq!(taken.expect("a gradient").to_vec1::<f32>()?, [first, first + 1.0]);
            }
        }
        assert!(take().expect_err("nothing is left").to_string().contains("gone before"));
        Ok(())
    }

    #[test]
    fn no_more_than_two_inputs_stand_beside() -> Result<()> {
        let x = numbers(1.0)?;
        let one = apply_beside(Example, [&x, &x, &x], &[&x])?;
        assert_eq!(one.to_vec1::<f32>()?, [2.0, 8.0]);
        for others in [&[][..], &[&x; 3]] {
            let error = apply_beside(Example, [&x, &x, &x], others).expect_err("an error").to_string();
            assert!(error.contains(&format!("{} inputs beside", others.len())), "{error}");
        }
        Ok(())
    }
}
