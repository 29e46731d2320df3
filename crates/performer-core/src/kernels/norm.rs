//! LayerNorm and RMSNorm of rows, each as one operation with a backward pass.
//!
//! # Shapes
//!
//! ```text
//! forward:  x (.., E), weight (E), bias (E) -> mean, scale of each row -> out (.., E)
//! backward: g (.., E), x, weight -> dx (.., E), dweight (E), dbias (E)
//! ```

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Result, Shape, Tensor, bail};
use pulp::{Simd, WithSimd};

use super::{
    contiguous,
    instructions::arch,
    operation::{Operation, Stored},
    vector::{dot, sum},
    with_storages,
};

/// `Norm` computes `(x − μ)/√(σ² + ε)` for each row, or `x/√(mean x² + ε)` without `center`, times
/// a weight, plus a bias if there is one.
pub(crate) struct Norm {
    pub(crate) eps: f32,
    pub(crate) center: bool,
}

impl Norm {
    fn forward(
        &self,
        x: Stored<'_, CpuStorage>,
        weight: Stored<'_, CpuStorage>,
        bias: Option<Stored<'_, CpuStorage>>,
    ) -> Result<(CpuStorage, Shape)> {
        let (rows, of_weight) = (x.1.shape(), weight.1.dims());
        let (x, weight) = (contiguous(x)?, contiguous(weight)?);
        let bias = bias.map(contiguous).transpose()?;
        if weight.is_empty() || !x.len().is_multiple_of(weight.len()) || bias.is_some_and(|b| b.len() != weight.len()) {
            bail!(
                "norm: rows {rows:?} need a weight and a bias of their last dimension, not \
                 {of_weight:?}"
            );
        }
        let mut out = vec![0f32; x.len()];
        arch().dispatch(Forward { norm: self, x, weight, bias, out: &mut out });
        Ok((CpuStorage::F32(out), rows.clone()))
    }

    /// Computes the gradients of rows, weight and bias.
    fn backward(&self, x: &Tensor, weight: &Tensor, grad: &Tensor) -> Result<[Tensor; 3]> {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() {
            return super::cuda::norm::backward(self, x, weight, grad);
        }
        let grad = grad.contiguous()?;
        let (mut dx, mut dw, mut db) =
            (vec![0f32; x.elem_count()], vec![0f32; weight.elem_count()], vec![0f32; weight.elem_count()]);
        with_storages([x, weight, &grad], |[x, weight, grad]| {
            let (x, weight, grad) = (contiguous(x)?, contiguous(weight)?, contiguous(grad)?);
            let (dx, dw, db) = (&mut dx[..], &mut dw[..], &mut db[..]);
            arch().dispatch(Backward { norm: self, x, weight, grad, dx, dw, db });
            Ok(())
        })?;
        Ok([
            Tensor::from_vec(dx, x.shape(), x.device())?,
            Tensor::from_vec(dw, weight.shape(), x.device())?,
            Tensor::from_vec(db, weight.shape(), x.device())?,
        ])
    }

    /// Writes the row minus its mean to `centred` and returns `1/√(σ² + ε)`.
    #[inline(always)]
    fn statistics<S: Simd>(&self, simd: S, row: &[f32], centred: &mut [f32]) -> f32 {
        let mean = if self.center { sum(simd, row) / row.len() as f32 } else { 0.0 };
        for (c, x) in centred.iter_mut().zip(row) {
            *c = x - mean;
        }
        (dot(simd, centred, centred) / row.len() as f32 + self.eps).sqrt().recip()
    }
}

/// `Forward` is the forward pass over all rows.
struct Forward<'a> {
    norm: &'a Norm,
    x: &'a [f32],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    out: &'a mut [f32],
}

impl WithSimd for Forward<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let e = self.weight.len();
        for (row, out) in self.x.chunks_exact(e).zip(self.out.chunks_exact_mut(e)) {
            let scale = self.norm.statistics(simd, row, out);
            match self.bias {
                Some(bias) => {
                    for ((o, w), b) in out.iter_mut().zip(self.weight).zip(bias) {
                        *o = *o * scale * w + b;
                    }
                }
                None => {
                    for (o, w) in out.iter_mut().zip(self.weight) {
                        *o *= scale * w;
                    }
                }
            }
        }
    }
}

/// `Backward` is the backward pass over all rows.
struct Backward<'a> {
    norm: &'a Norm,
    x: &'a [f32],
    weight: &'a [f32],
    grad: &'a [f32],
    dx: &'a mut [f32],
    dw: &'a mut [f32],
    db: &'a mut [f32],
}

impl WithSimd for Backward<'_> {
    type Output = ();

    /// With `x̂` the normalised row and `h = g ∘ w`:
    /// `dx = (h − mean h − x̂ mean(h ∘ x̂))/√(σ² + ε)`, where the first mean is left out if none
    /// was subtracted.
    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let e = self.weight.len();
        let mut unit = vec![0f32; e];
        let rows = self.x.chunks_exact(e).zip(self.grad.chunks_exact(e)).zip(self.dx.chunks_exact_mut(e));
        for ((row, grad), dx) in rows {
            let scale = self.norm.statistics(simd, row, &mut unit);
            for (((((unit, &g), &w), dx), dw), db) in
                unit.iter_mut().zip(grad).zip(self.weight).zip(dx.iter_mut()).zip(&mut *self.dw).zip(&mut *self.db)
            {
                *unit *= scale;
                *dx = g * w;
                *dw += g * *unit;
                *db += g;
            }
            let mean = if self.norm.center { sum(simd, dx) / e as f32 } else { 0.0 };
            let along = dot(simd, dx, &unit) / e as f32;
            for (dx, unit) in dx.iter_mut().zip(&unit) {
                *dx = (*dx - mean - unit * along) * scale;
            }
        }
    }
}

impl Operation<2> for Norm {
    fn name(&self) -> &'static str {
        "norm"
    }

    fn cpu(&self, [x, weight]: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        self.forward(x, weight, None)
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [x, weight]: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        super::cuda::norm::forward(self, x, weight, None)
    }

    fn backward(&self, [x, weight]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let [dx, dw, _] = self.backward(x, weight, grad)?;
        Ok([Some(dx), Some(dw)])
    }
}

impl Operation<3> for Norm {
    fn name(&self) -> &'static str {
        "norm-with-bias"
    }

    fn cpu(&self, [x, weight, bias]: [Stored<'_, CpuStorage>; 3]) -> Result<(CpuStorage, Shape)> {
        self.forward(x, weight, Some(bias))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [x, weight, bias]: [Stored<'_, CudaStorage>; 3]) -> Result<(CudaStorage, Shape)> {
        super::cuda::norm::forward(self, x, weight, Some(bias))
    }

    fn backward(&self, [x, weight, _]: [&Tensor; 3], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 3]> {
        let [dx, dw, db] = self.backward(x, weight, grad)?;
        Ok([Some(dx), Some(dw), Some(db)])
    }
}
