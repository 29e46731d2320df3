//! Rotary positions (Su et al. 2021): each pair `(i, i + D/2)` of a row turns by the angle of its
//! token. `x (B, H, T, D)`, `cos` and `sin` `(T, D/2)` → `(B, H, T, D)`; the gradient turns back by
//! the same angles.
//!
//! Candle's form with a gradient makes four and a half tensors of the size of its input, each with
//! a gradient. This operation makes one each way, from rows with any strides.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{contiguous, rows::Heads, with_storages};

/// `Rotary` turns rows `(B, H, T, D)`, each contiguous, by the angles whose cosines and sines are
/// given (f32 and contiguous, `(T, D/2)`).
pub(crate) struct Rotary {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl CustomOp1 for Rotary {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(self.turn(storage, layout, 1.0)?), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        cuda::rotary::turn((storage, layout), &self.cos, &self.sin, 1.0)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        #[cfg(feature = "cuda")]
        if grad.device().is_cuda() {
            let turned = cuda::with_storages([&grad], |[grad]| cuda::rotary::turn(grad, &self.cos, &self.sin, -1.0));
            let (back, shape) = turned?;
            return Ok(Some(cuda::tensor(back, shape)));
        }
        let back = with_storages([&grad], |[(storage, layout)]| self.turn(storage, layout, -1.0))?;
        Ok(Some(Tensor::from_vec(back, grad.shape(), grad.device())?))
    }
}

impl Rotary {
    /// Turns the rows, or back if `direction` is −1.
    fn turn(&self, storage: &CpuStorage, layout: &Layout, direction: f32) -> Result<Vec<f32>> {
        let (b, h, tokens, width) = layout.shape().dims4()?;
        let (x, half) = (Heads::new(storage, layout)?, width / 2);
        if width % 2 != 0 || [&self.cos, &self.sin].iter().any(|t| t.dims() != [tokens, half]) {
            bail!("rotary: rows {:?} need tables ({tokens}, {half}), not {:?}", layout.dims(), self.cos.dims());
        }
        let mut out = Vec::with_capacity(layout.shape().elem_count());
        with_storages([&self.cos, &self.sin], |[cos, sin]| {
            let (cos, sin) = (contiguous(cos.0, cos.1)?, contiguous(sin.0, sin.1)?);
            for head in 0..b * h {
                let (head, mut scratch) = (x.head(head), Vec::new());
                let (rows, stride) = head.read(0, tokens, &mut scratch);
                for t in 0..tokens {
                    let (first, second) = rows[t * stride..][..width].split_at(half);
                    let (cos, sin) = (&cos[t * half..][..half], &sin[t * half..][..half]);
                    let pairs = || first.iter().zip(second).zip(cos.iter().zip(sin));
                    out.extend(pairs().map(|((a, b), (c, s))| a * c - direction * s * b));
                    out.extend(pairs().map(|((a, b), (c, s))| direction * s * a + b * c));
                }
            }
            Ok(())
        })?;
        Ok(out)
    }
}
