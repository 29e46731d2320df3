//! Gradients and parts of sequences that go from card to card by NCCL, without the processor.

use std::sync::Arc;

use anyhow::{Error, Result};
use candle_core::{
    DType, Device, Storage, Tensor, Var,
    backend::BackendStorage,
    bail,
    cuda_backend::{
        CudaStorageSlice,
        cudarc::driver::{CudaStream, DevicePtr},
    },
};
use performer_dist::{Card, CardMemory, Cards, Nccl, Ranks, agree_on};

use super::{Gradients, shared::present};

/// Connects the cards of all ranks, where there are several and all of them compute on cards.
///
/// # Errors
/// If some compute on cards and some do not, or the cards cannot be connected.
pub fn connect(ranks: Arc<dyn Ranks>, device: &Device, deadline: std::time::Duration) -> Result<Arc<dyn Ranks>> {
    let kind = if device.is_cuda() { "a card" } else { "the processor" };
    if let Some(other) =
        agree_on(&*ranks, kind, |first, other| format!("it computes on {other}, and rank 0 on {first}"))?
    {
        return Err(other.into());
    }
    if ranks.size() == 1 || !device.is_cuda() {
        return Ok(ranks);
    }
    let card = CudaCard(device.as_cuda_device()?.cuda_stream());
    Ok(Arc::new(Nccl::over(ranks, Arc::new(card), deadline).map_err(Error::msg)?))
}

/// The card on which Candle computes, and its stream.
#[derive(Debug)]
struct CudaCard(Arc<CudaStream>);

impl Card for CudaCard {
    fn bind(&self) -> std::result::Result<(), String> {
        self.0.context().bind_to_thread().map_err(|error| error.to_string())
    }

    fn stream(&self) -> u64 {
        self.0.cu_stream() as u64
    }

    fn wait(&self) -> std::result::Result<(), String> {
        self.0.synchronize().map_err(|error| error.to_string())
    }
}

/// Returns where the numbers of a tensor lie on its card.
///
/// # Errors
/// If the tensor is not contiguous, not on CUDA, or of a type that cards do not exchange.
fn memory(x: &Tensor) -> candle_core::Result<CardMemory> {
    let (storage, layout) = x.storage_and_layout();
    let (Storage::Cuda(storage), Some((start, end))) = (&*storage, layout.contiguous_offsets()) else {
        bail!("cards exchange contiguous tensors on CUDA devices, not {:?} on {:?}", layout, x.device());
    };
    let stream = storage.device().cuda_stream();
    let address = match &storage.slice {
        CudaStorageSlice::F32(numbers) => numbers.device_ptr(&stream).0,
        CudaStorageSlice::BF16(numbers) => numbers.device_ptr(&stream).0,
        CudaStorageSlice::F16(numbers) => numbers.device_ptr(&stream).0,
        CudaStorageSlice::F64(numbers) => numbers.device_ptr(&stream).0,
        _ => bail!("cards exchange f32, bf16, f16 and f64, not {:?}", x.dtype()),
    };
    let size = x.dtype().size_in_bytes();
    Ok(CardMemory { address: address + (start * size) as u64, bytes: (end - start) * size })
}

/// Sums the gradients of all ranks in f32; `None` are those of a rank that had nothing to compute.
/// Where a sequence is cut over ranks, a parameter may have no gradient on one of them; it counts
/// as zero there.
pub(super) fn sum(
    cards: &dyn Cards,
    own: Option<&Gradients>,
    params: &[(String, Var)],
    cut: bool,
) -> Result<Gradients> {
    let mut numbers = Vec::with_capacity(params.len());
    for (i, (_, var)) in params.iter().enumerate() {
        numbers.push(match own.map(|own| present(own, params, i, cut)).transpose()?.flatten() {
            Some(gradient) => gradient.to_dtype(DType::F32)?.flatten_all()?,
            None => Tensor::zeros(var.elem_count(), DType::F32, var.device())?,
        });
    }
    // One tensor is not copied by `cat`, and the gradient itself must stay as it is.
    let flat = if let [only] = &numbers[..] { only.copy()? } else { Tensor::cat(&numbers, 0)? };
    drop(numbers);
    // SAFETY: the memory is that of `flat`, which nothing else uses.
    if let Err(error) = unsafe { cards.sum(memory(&flat)?) } {
        // The card may still write there.
        std::mem::forget(flat);
        return Err(error.into());
    }
    Gradients::cut_from(&flat, params)
}

/// Sends a contiguous tensor to one rank and receives one like it from another; see
/// [`Neighbours::exchange`](performer_core::attention::Neighbours::exchange).
pub(super) fn exchange(
    cards: &dyn Cards,
    x: &Tensor,
    to: Option<usize>,
    from: Option<usize>,
) -> candle_core::Result<Option<Tensor>> {
    let received = from.map(|_| Tensor::zeros(x.shape(), x.dtype(), x.device())).transpose()?;
    let send = to.map(|to| Ok::<_, candle_core::Error>((to, memory(x)?))).transpose()?;
    let receive = match (from, &received) {
        (Some(from), Some(received)) => Some((from, memory(received)?)),
        _ => None,
    };
    // SAFETY: the memory is that of these tensors; nothing else uses the second, and the first is
    // only read.
    if let Err(error) = unsafe { cards.exchange(send, receive) } {
        // The card may still use it.
        std::mem::forget((x.clone(), received));
        return Err(candle_core::Error::wrap(error));
    }
    Ok(received)
}
