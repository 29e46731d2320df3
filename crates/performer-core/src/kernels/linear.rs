//! Adding a bias to rows. Candle broadcasts it entry by entry, and sums its gradient so too.

use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor, bail};
use pulp::Arch;

use super::{contiguous, with_storages};

/// `x + b` for rows `x` `(.., N)` and a bias `(N)`.
pub(crate) struct AddBias;

impl CustomOp2 for AddBias {
    fn name(&self) -> &'static str {
        "add-bias"
    }

    fn cpu_fwd(&self, s1: &CpuStorage, l1: &Layout, s2: &CpuStorage, l2: &Layout) -> Result<(CpuStorage, Shape)> {
        let (x, bias) = (contiguous(s1, l1)?, contiguous(s2, l2)?);
        if bias.is_empty() || !x.len().is_multiple_of(bias.len()) {
            bail!("a bias {:?} does not fit rows {:?}", l2.dims(), l1.dims());
        }
        let mut out = vec![0f32; x.len()];
        Arch::new().dispatch(
            #[inline(always)]
            || {
                for (out, x) in out.chunks_exact_mut(bias.len()).zip(x.chunks_exact(bias.len())) {
                    for ((out, x), bias) in out.iter_mut().zip(x).zip(bias) {
                        *out = x + bias;
                    }
                }
            },
        );
        Ok((CpuStorage::F32(out), l1.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, bias: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let mut sums = vec![0f32; bias.elem_count()];
        with_storages([&grad], |[(storage, layout)]| {
            let grad = contiguous(storage, layout)?;
            Arch::new().dispatch(
                #[inline(always)]
                || {
                    for row in grad.chunks_exact(sums.len()) {
                        for (sum, g) in sums.iter_mut().zip(row) {
                            *sum += g;
                        }
                    }
                },
            );
            Ok(())
        })?;
        let sums = Tensor::from_vec(sums, bias.shape(), bias.device())?;
        Ok((Some(grad), Some(sums)))
    }
}
