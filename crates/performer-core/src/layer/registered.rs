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

/// Refuses an attention with buffers that the layer's `VarMap` lacks: it would not save them, and
/// the layer that is made of what it saves would be another one. A layer without a `VarMap` has
/// registered nothing, and takes any.
pub(super) fn require_registered(
    all: &[Registered],
    trained: &[(String, Tensor)],
    attention: &dyn Attention,
) -> Result<()> {
    let is_known =
        |name: &str| all.iter().any(|registered| registered.name == name) || trained.iter().any(|(own, _)| own == name);
    let unknown = attention.buffers().into_iter().find(|(name, _)| !is_known(name));
    match unknown.filter(|_| !all.is_empty() || !trained.is_empty()) {
        Some((name, _)) => bail!("buffer {name} is none that the layer's VarMap holds; make the layer anew with it"),
        None => Ok(()),
    }
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
