//! This module treats the gradients of many parameters as one value: they are taken from a backward
//! pass, summed over micro-batches, and measured.

use std::ops::Range;

use anyhow::{Context, Result, ensure};
use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Storage, Tensor, Var, backprop::GradStore, bail};
use performer_core::Tape;
use rayon::prelude::*;

use crate::parallel::in_order;

/// How many numbers of a large tensor a thread takes at a time.
pub(super) const PIECE: usize = 1 << 16;

/// `Gradients` holds the gradients of a list of parameters, in the order of that list.
///
/// Sums over micro-batches computed in several threads are taken here, in an order that the caller
/// fixes, so that a run does not depend on which thread finishes first.
#[derive(Clone, Debug)]
pub struct Gradients {
    /// One entry for each parameter; `None` where the loss does not depend on it.
    pub tensors: Vec<Option<Tensor>>,
}

impl Gradients {
    /// Takes the gradients of `params` (usually
    /// [`AdamW::parameters`](super::optimizer::AdamW::parameters)) from the result of
    /// `Tensor::backward`.
    ///
    /// # Errors
    /// If the device has no memory for the copy of a gradient that is not contiguous.
    pub fn from_store(store: &GradStore, params: &[(String, Var)]) -> Result<Self> {
        let tensors = params
            .iter()
            .map(|(_, var)| store.get(var).map(|g| g.detach().contiguous()).transpose())
            .collect::<candle_core::Result<_>>()?;
        Ok(Self { tensors })
    }

    /// Takes the gradients of `params` from a vector that holds the numbers of all, one parameter
    /// after another. Each becomes a tensor of its own memory, with nothing else in it, since the
    /// optimiser takes tensors that begin where their memory does. (Candle's `copy` of a part of a
    /// tensor copies all of it and keeps the place of the part.)
    #[cfg(any(feature = "nccl", test))]
    pub(super) fn cut_from(flat: &Tensor, params: &[(String, Var)]) -> Result<Self> {
        let mut start = 0;
        let tensor = |(_, var): &(String, Var)| {
            let count = var.elem_count();
            start += count;
            let gradient = flat.narrow(0, start - count, count)?.force_contiguous()?.reshape(var.shape())?;
            Ok(Some(gradient.to_dtype(var.dtype())?))
        };
        Ok(Self { tensors: params.iter().map(tensor).collect::<Result<_>>()? })
    }

    /// Computes the sums of `loss(0..parts)` and of their gradients for `params`, on up to
    /// `threads` threads. `loss` returns a scalar.
    pub(crate) fn of_parts(
        parts: usize,
        threads: usize,
        params: &[(String, Var)],
        loss: impl Fn(usize) -> Result<Tensor> + Sync,
    ) -> Result<(f64, Self)> {
        let mut sum = None::<Self>;
        let losses = Self::of_each(0..parts, threads, params, loss, |gradients| {
            match &mut sum {
                None => sum = Some(gradients),
                Some(sum) => sum.add(gradients)?,
            }
            Ok(())
        })?;
        Ok((losses.iter().sum(), sum.context("the batch is empty")?))
    }

    /// Computes the losses of `parts` and gives their gradients for `params` to `take`, in order.
    pub(super) fn of_each(
        parts: Range<usize>,
        threads: usize,
        params: &[(String, Var)],
        loss: impl Fn(usize) -> Result<Tensor> + Sync,
        mut take: impl FnMut(Self) -> Result<()>,
    ) -> Result<Vec<f64>> {
        let mut losses = Vec::with_capacity(parts.len());
        in_order(
            params.first().map_or(&Device::Cpu, |(_, var)| var.device()),
            parts.len(),
            threads,
            |i| {
                let tape = Tape::start();
                let loss = loss(parts.start + i)?;
                let gradients = Self::from_store(&tape.backward(&loss)?, params)?;
                Ok((loss.detach(), gradients))
            },
            |(loss, gradients)| {
                losses.push(loss);
                take(gradients)
            },
        )?;
        // Losses are read after everything is queued, because each reading waits for the device.
        losses.iter().map(|loss| Ok(f64::from(loss.to_scalar::<f32>()?))).collect()
    }

    /// Adds `other`, which must belong to the same parameters.
    ///
    /// # Errors
    /// If `other` has another number of gradients, and nothing is added; or if two of one parameter
    /// differ in shape, type or device, and the sum is incomplete.
    pub fn add(&mut self, other: Self) -> Result<()> {
        ensure!(
            self.tensors.len() == other.tensors.len(),
            "cannot add gradients of {} parameters to gradients of {}",
            other.tensors.len(),
            self.tensors.len()
        );
        for (mine, theirs) in self.tensors.iter_mut().zip(other.tensors) {
            *mine = match (mine.take(), theirs) {
                (Some(a), Some(b)) => Some(sum(a, &b)?),
                (a, b) => a.or(b),
            };
        }
        Ok(())
    }

    /// Returns the L2 norm of all gradients together.
    ///
    /// # Errors
    /// If the device fails. A norm that is not finite is returned.
    pub fn norm(&self) -> Result<f64> {
        Ok(self.squared_norms()?.iter().sum::<f64>().sqrt())
    }

    /// Returns the squared L2 norm of every gradient, zero where there is none. Sums run in `f64`
    /// on the CPU; elsewhere in `f32` within one tensor, or one block of it, and all of them come
    /// back in a single transfer.
    pub(super) fn squared_norms(&self) -> Result<Vec<f64>> {
        let mut norms = vec![0.0; self.tensors.len()];
        let mut on_device = Vec::new();
        #[cfg(feature = "cuda")]
        let mut on_cuda = Vec::new();
        for (i, gradient) in self.tensors.iter().enumerate() {
            let Some(gradient) = gradient else { continue };
            #[cfg(feature = "cuda")]
            if super::cuda::takes(gradient) {
                on_cuda.push((i, gradient));
                continue;
            }
            if gradient.device().is_cpu() {
                norms[i] = squared_norm_on_cpu(gradient)?;
            } else {
                let sum = gradient.to_dtype(DType::F32)?.sqr()?.sum_all()?;
                on_device.push((i, sum));
            }
        }
        #[cfg(feature = "cuda")]
        if !on_cuda.is_empty() {
            let (indices, tensors): (Vec<_>, Vec<_>) = on_cuda.into_iter().unzip();
            for (i, sum) in indices.into_iter().zip(super::cuda::squared_norms(&tensors)?) {
                norms[i] = sum;
            }
        }
        if !on_device.is_empty() {
            let (indices, sums): (Vec<_>, Vec<_>) = on_device.into_iter().unzip();
            for (i, sum) in indices.into_iter().zip(Tensor::stack(&sums, 0)?.to_vec1::<f32>()?) {
                norms[i] = f64::from(sum);
            }
        }
        Ok(norms)
    }
}

/// Returns `a + b`, in the memory of `a` if possible: a new tensor of the size of all weights costs
/// more than its additions.
fn sum(a: Tensor, b: &Tensor) -> candle_core::Result<Tensor> {
    let plain = |t: &Tensor| t.device().is_cpu() && t.dtype() == DType::F32 && t.is_contiguous();
    if plain(&a) && plain(b) && a.shape() == b.shape() {
        a.inplace_op2(b, &AddTo)?;
        return Ok(a);
    }
    a + b
}

/// `AddTo` computes `a += b` of contiguous f32.
struct AddTo;

impl InplaceOp2 for AddTo {
    fn name(&self) -> &'static str {
        "add-to"
    }

    fn cpu_fwd(&self, s1: &mut CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> candle_core::Result<()> {
        let (CpuStorage::F32(a), CpuStorage::F32(b)) = (s1, s2) else { bail!("add-to takes f32") };
        let (Some((a_start, a_end)), Some((b_start, b_end))) = (l1.contiguous_offsets(), l2.contiguous_offsets())
        else {
            bail!("add-to takes contiguous tensors")
        };
        let (a, b) = (&mut a[a_start..a_end], &b[b_start..b_end]);
        let add = |a: &mut [f32], b: &[f32]| a.iter_mut().zip(b).for_each(|(a, b)| *a += b);
        if a.len() <= PIECE {
            add(a, b);
        } else {
            a.par_chunks_mut(PIECE).zip(b.par_chunks(PIECE)).for_each(|(a, b)| add(a, b));
        }
        Ok(())
    }
}

fn squared_norm_of(data: &[f32]) -> f64 {
    // These are independent sums, so that the additions do not wait for one another.
    let mut lanes = [0f64; 8];
    let chunks = data.chunks_exact(lanes.len());
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f64::from(x) * f64::from(x);
    }
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    lanes.iter().sum()
}

fn squared_norm_on_cpu(gradient: &Tensor) -> Result<f64> {
    {
        let (storage, layout) = gradient.storage_and_layout();
        if let (Storage::Cpu(CpuStorage::F32(data)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
            if end - start <= PIECE {
                return Ok(squared_norm_of(&data[start..end]));
            }
            // Pieces have one size and are added in their order, which gives the same bits on any
            // number of threads.
            let pieces: Vec<f64> = data[start..end].par_chunks(PIECE).map(squared_norm_of).collect();
            return Ok(pieces.iter().sum());
        }
    }
    let sum = gradient.to_dtype(DType::F64)?.sqr()?.sum_all()?;
    Ok(sum.to_scalar::<f64>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params() -> Result<Vec<(String, Var)>> {
        let a = Var::from_tensor(&Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((2, 3))?)?;
        let b = Var::from_tensor(&Tensor::arange(0f32, 11., &Device::Cpu)?)?;
        Ok(vec![("a".to_owned(), a), ("b".to_owned(), b)])
    }

    fn of(store: Tensor, params: &[(String, Var)]) -> Result<Gradients> {
        Gradients::from_store(&store.backward()?, params)
    }

    #[test]
    fn gradients_of_micro_batches_add_up_in_parameter_order() -> Result<()> {
        let params = params()?;
        let (a, b) = (&params[0].1, &params[1].1);
        let mut sum = of(a.sqr()?.sum_all()?, &params)?;
        assert!(sum.tensors[1].is_none());
        sum.add(of((a.sum_all()? + b.sum_all()?)?, &params)?)?;
        let first = sum.tensors[0].as_ref().map(|t| t.to_vec2::<f32>());
        assert_eq!(first.unwrap()?, [[1., 3., 5.], [7., 9., 11.]]);
        let second = sum.tensors[1].as_ref().map(|t| t.to_vec1::<f32>());
        assert_eq!(second.unwrap()?, [1.; 11]);
        assert!(sum.add(Gradients { tensors: vec![] }).is_err());
        Ok(())
    }

    /// The optimiser on CUDA refuses tensors that begin behind others in their memory.
    #[test]
    fn gradients_that_are_cut_from_a_vector_have_memory_of_their_own() -> Result<()> {
        let params = params()?;
        let flat = Tensor::arange(0f32, 17., &Device::Cpu)?;
        let cut = Gradients::cut_from(&flat, &params)?;
        let [Some(a), Some(b)] = &cut.tensors[..] else { panic!("two gradients") };
        assert_eq!(a.to_vec2::<f32>()?, [[0., 1., 2.], [3., 4., 5.]]);
        assert_eq!(b.to_vec1::<f32>()?, (6..17).map(|n| n as f32).collect::<Vec<_>>());
        for (gradient, count) in [(a, 6), (b, 11)] {
            let (storage, layout) = gradient.storage_and_layout();
            let Storage::Cpu(CpuStorage::F32(numbers)) = &*storage else { panic!("f32 on the CPU") };
            assert_eq!((layout.start_offset(), numbers.len()), (0, count));
        }
        Ok(())
    }

    #[test]
    fn norm_runs_over_all_tensors_types_and_layouts() -> Result<()> {
        let params = params()?;
        let (a, b) = (&params[0].1, &params[1].1);
        // The gradients are 2a and 2b, so the squared norm is 4 (Σa² + Σb²) = 4 (55 + 385).
        let loss = (a.sqr()?.sum_all()? + b.sqr()?.sum_all()?)?;
        let mut grads = of(loss, &params)?;
        let expected = 1760f64.sqrt();
        assert_eq!(grads.norm()?, expected);
        for dtype in [DType::F64, DType::BF16] {
            let cast = |t: &Option<Tensor>| t.as_ref().map(|t| t.to_dtype(dtype)).transpose();
            let tensors = grads.tensors.iter().map(cast);
            let cast = Gradients { tensors: tensors.collect::<candle_core::Result<_>>()? };
            assert_eq!(cast.norm()?, expected);
        }
        grads.tensors[0] = grads.tensors[0].as_ref().map(|t| t.t()).transpose()?;
        assert_eq!(grads.norm()?, expected);
        Ok(())
    }
}
