//! An embedding on CUDA whose gradient is computed by `embedding.cu`. Candle's gradient adds one
//! position after the other to every column, so that thousands of them wait in line.

use candle_core::{DType, Result, Shape, Tensor, backend::BackendStorage};

use super::super::operation::{Operation, Stored};
use super::{CudaStorage, STORED, Source, THREADS, allocate, contiguous, source, storage, tensor, with_storages};

const SOURCE: Source = source!("embedding.cu", STORED);

/// The tokens of a thread block, as in `embedding.cu`.
const TOKENS: usize = 4;

/// `Embedding` takes the rows `ids` (u32 and contiguous, `(N)`) of a table `(V, E)` → `(N, E)`.
pub(crate) struct Embedding {
    pub(crate) ids: Tensor,
}

impl Operation<1> for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cuda(&self, [(table, layout)]: [Stored<'_, CudaStorage>; 1]) -> Result<(CudaStorage, Shape)> {
        let (_, width) = layout.shape().dims2()?;
        with_storages([&self.ids], |[(ids, ids_layout)]| {
            Ok((table.index_select(ids, layout, ids_layout, 0)?, Shape::from((self.ids.elem_count(), width))))
        })
    }

    fn backward(&self, [table]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        let gradient = backward(&self.ids, grad, table.dim(0)?)?;
        Ok([Some(gradient.to_dtype(table.dtype())?)])
    }
}

/// Computes the sums of the rows of `grad` `(N, E)` by token, `(V, E)` in f32, for u32 ids `(N)`.
fn backward(ids: &Tensor, grad: &Tensor, vocabulary: usize) -> Result<Tensor> {
    let (n, width) = grad.dims2()?;
    with_storages([ids, &grad.contiguous()?], |[ids, grad]| {
        contiguous([ids, grad])?;
        let (device, shape) = (grad.0.device(), Shape::from((vocabulary, width)));
        let mut out = allocate(device, &shape, DType::F32)?;
        let kernel = SOURCE.kernel(device, "embedding_backward", &[("STORAGE", &storage(grad.0.dtype())?)], 0)?;
        let launch = kernel.launch().value(n as i32).value(vocabulary as i32).value(width as i32);
        let launch = launch.input(ids)?.input(grad)?;
        // SAFETY: the thread blocks write the rows of their tokens, all of the vocabulary together.
        unsafe { launch.output(&mut out)?.run([vocabulary.div_ceil(TOKENS), 1, 1], THREADS) }?;
        Ok(tensor(out, shape))
    })
}
