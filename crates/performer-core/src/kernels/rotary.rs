//! Rotary positions (Su et al. 2021): the pairs of each row turn by the angles of their token.
//!
//! Candle's form with a gradient makes four tensors and a half of the size of its input, each with
//! a gradient. Here it is one each way, from rows with any strides.

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::{CpuStorage, Layout, Result, Shape, Tensor, bail};

#[cfg(feature = "cuda")]
use super::cuda;
use super::{
    contiguous,
    heads::arrange,
    operation::{Operation, Stored},
    rows::Heads,
    with_storages,
};

/// Which two numbers of a row of `D` make the `i`-th pair.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pairs {
    /// `(i, i + D/2)`, as in GPT-NeoX and Hugging Face checkpoints.
    Halves,
    /// `(2i, 2i + 1)`, as in the paper and GPT-J.
    Neighbours,
}

/// Turns rows `(B, H, T, D)`, each contiguous, by the angles whose cosine and sine are given, f32
/// and contiguous, `(1, T, D/2)` for all sequences or `(B, T, D/2)`.
pub(crate) struct Rotary {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
    pub(crate) pairs: Pairs,
}

impl Operation<1> for Rotary {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu(&self, [x]: [Stored<'_, CpuStorage>; 1]) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(self.turn(x, 1.0, false)?), x.1.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda(&self, [x]: [Stored<'_, CudaStorage>; 1]) -> Result<(CudaStorage, Shape)> {
        Ok((cuda::heads::arrange(x, false, Some((self, 1.0)))?, x.1.shape().clone()))
    }

    fn backward(&self, [_]: [&Tensor; 1], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 1]> {
        Ok([Some(arrange(&grad.contiguous()?, false, Some((self, -1.0)))?)])
    }
}

impl Rotary {
    /// Turns the rows of heads `(B, H, T, D)`, or back if `direction` is −1; the result is
    /// contiguous, `(B, T, H, D)` if `merged`.
    pub(super) fn turn(&self, x: Stored<'_, CpuStorage>, direction: f32, merged: bool) -> Result<Vec<f32>> {
        let layout = x.1;
        let (b, h, tokens, width) = layout.shape().dims4()?;
        let (x, half) = (Heads::new(x)?, width / 2);
        self.check(layout)?;
        // Numbers of a table from one sequence to the next.
        let step = if self.cos.dims()[0] == 1 { 0 } else { tokens * half };
        let mut out = Vec::with_capacity(layout.shape().elem_count());
        with_storages([&self.cos, &self.sin], |[cos, sin]| {
            let (cos, sin) = (contiguous(cos)?, contiguous(sin)?);
            let mut turn = |batch: usize, rows: &[f32], t: usize| {
                let row = &rows[..width];
                let angles = batch * step + t * half;
                let angles = || cos[angles..][..half].iter().zip(&sin[angles..][..half]);
                match self.pairs {
                    Pairs::Halves => {
                        let (first, second) = row.split_at(half);
                        let pairs = || first.iter().zip(second).zip(angles());
                        out.extend(pairs().map(|((a, b), (c, s))| a * c - direction * s * b));
                        out.extend(pairs().map(|((a, b), (c, s))| direction * s * a + b * c));
                    }
                    Pairs::Neighbours => {
                        let pairs = row.as_chunks::<2>().0.iter().zip(angles());
                        out.extend(
                            pairs.flat_map(|([a, b], (c, s))| [a * c - direction * s * b, direction * s * a + b * c]),
                        );
                    }
                }
            };
            for batch in 0..b {
                let heads = x.heads(batch * h, h);
                let mut scratch = vec![Vec::new(); h];
                let rows = heads.iter().zip(&mut scratch).map(|(head, scratch)| head.read(0, tokens, scratch));
                let rows: Vec<_> = rows.collect();
                if merged {
                    for t in 0..tokens {
                        rows.iter().for_each(|(rows, stride)| turn(batch, &rows[t * stride..], t));
                    }
                } else {
                    for (rows, stride) in &rows {
                        (0..tokens).for_each(|t| turn(batch, &rows[t * stride..], t));
                    }
                }
            }
            Ok(())
        })?;
        Ok(out)
    }

    /// Refuses tables that do not fit rows.
    pub(super) fn check(&self, layout: &Layout) -> Result<()> {
        let (b, _, tokens, width) = layout.shape().dims4()?;
        let fits = |t: &Tensor| matches!(*t.dims(), [n, rows, half] if (n == 1 || n == b) && rows == tokens && 2 * half == width);
        if !fits(&self.cos) || self.cos.dims() != self.sin.dims() {
            bail!("rotary: rows {:?} with tables {:?} and {:?}", layout.dims(), self.cos.dims(), self.sin.dims());
        }
        Ok(())
    }
}
