//! Rows of a table by number.

use candle_core::{D, Result, Tensor};

#[cfg(feature = "cuda")]
use super::contiguous;
use super::{index_select, reshape, to_dtype};
use crate::kernels::compute_dtype;
#[cfg(feature = "cuda")]
use crate::kernels::{cuda, operation::apply};

/// An embedding looks up rows of `table` `(V, E)` by their numbers: u32 `ids` `(..)` → `(.., E)`,
/// of the type of the table.
///
/// # Errors
/// On the CPU, if an id lies beyond the table; a GPU does not tell.
pub fn embedding(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let mut shape = ids.dims().to_vec();
    shape.push(table.dim(D::Minus1)?);
    let ids = ids.flatten_all()?.contiguous()?;
    #[cfg(feature = "cuda")]
    if cuda::takes(table) && ids.elem_count() > 0 && ids.dtype() == candle_core::DType::U32 {
        return reshape(&apply(cuda::embedding::Embedding { ids }, [&contiguous(table)?])?, shape);
    }
    // Its gradient adds up rows, for which half types are too coarse.
    let rows = index_select(&to_dtype(table, compute_dtype(table.dtype()))?, &ids)?;
    reshape(&to_dtype(&rows, table.dtype())?, shape)
}
