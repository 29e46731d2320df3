//! The buffers of a layer's attention that its `VarMap` holds too: features, say, which are saved
//! with the weights.

use candle_core::{Result, Tensor, bail};

use crate::Attention;

/// A buffer of the attention that a `VarMap` holds, to be saved with the weights.
#[derive(Debug)]
pub(super) struct Registered {
    pub(super) name: String,
    /// The map's variable itself, cut off from gradients: it changes when the map is loaded.
    pub(super) stored: Tensor,
    /// A copy of the numbers that the attention was given last, to notice that the map was loaded
    /// since.
    pub(super) used: Tensor,
}

/// Refuses buffers of other names than before: the layer's `VarMap` would save others than the
/// layer computes with.
pub(super) fn require_same_names(before: &[(String, Tensor)], after: &[(String, Tensor)]) -> Result<()> {
    let missing_in = |all: &[(String, Tensor)], of: &[(String, Tensor)]| {
        of.iter().map(|(name, _)| name.clone()).find(|name| named(all, name).is_none())
    };
    if let Some(name) = missing_in(before, after) {
        bail!("buffer {name} is none of those that this layer was made with; make the layer anew with it");
    }
    if let Some(name) = missing_in(after, before) {
        bail!("buffer {name}, which this layer was made with, is missing; make the layer anew without it");
    }
    Ok(())
}

/// Writes the attention's buffers into the `VarMap`, or nothing where one of them does not fit.
pub(super) fn update_registered(all: &mut [Registered], attention: &dyn Attention) -> Result<()> {
    let buffers = attention.buffers();
    for registered in &*all {
        let Some(buffer) = named(&buffers, &registered.name) else { continue };
        if registered.stored.dims() != buffer.dims() {
            bail!(
                "buffer {} has shape {:?} now, but the VarMap holds {:?} of it; make the layer anew",
                registered.name,
                buffer.dims(),
                registered.stored.dims()
            );
        }
    }
    for Registered { name, stored, used } in all {
        let Some(buffer) = named(&buffers, name) else { continue };
        *used = buffer.to_dtype(stored.dtype())?.to_device(stored.device())?.copy()?;
        stored.slice_set(&used.contiguous()?, 0, 0)?;
    }
    Ok(())
}

/// Returns the tensor of a name.
pub(super) fn named(tensors: &[(String, Tensor)], name: &str) -> Option<Tensor> {
    tensors.iter().find(|(own, _)| own == name).map(|(_, tensor)| tensor.clone())
}

/// Whether two contiguous tensors of one type on the CPU have the same numbers, NaN included.
pub(super) fn same_numbers(a: &Tensor, b: &Tensor) -> Result<bool> {
    use candle_core::{CpuStorage, Storage};
    let ((a_storage, a_layout), (b_storage, b_layout)) = (a.storage_and_layout(), b.storage_and_layout());
    let ranges = (a_layout.contiguous_offsets(), b_layout.contiguous_offsets());
    let (Some((a0, a1)), Some((b0, b1))) = ranges else { bail!("a buffer of the attention is not contiguous") };
    let (Storage::Cpu(x), Storage::Cpu(y)) = (&*a_storage, &*b_storage) else {
        bail!("a buffer of the attention is not on the CPU")
    };
    macro_rules! compare {
        ($($bits:expr, $($kind:ident)|+;)+) => {
            match (x, y) {
                $($((CpuStorage::$kind(x), CpuStorage::$kind(y)) => {
                    x[a0..a1].iter().map($bits).eq(y[b0..b1].iter().map($bits))
                })+)+
                _ => bail!(
                    "a buffer of the attention is {:?} where the VarMap has {:?}; buffers may be f32, f64, f16, bf16, \
                     u8, u32 or i64",
                    b.dtype(),
                    a.dtype()
                ),
            }
        };
    }
    Ok(compare! {
        |x| x.to_bits(), F32 | F64 | F16 | BF16;
        |x| *x, U8 | U32 | I64;
    })
}
