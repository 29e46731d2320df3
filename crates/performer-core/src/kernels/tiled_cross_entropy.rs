//! Cross-entropy of a linear head on any device and for any type: logits in tiles of rows, of
//! bounded size, computed again for the gradient.
//!
//! # Shapes
//!
//! ```text
//! forward, for each tile of R rows:  x (R, E), W (V, E) -> logits (R, V) -> loss (R), log (R)
//! backward, for each tile of R rows: logits, log, g (R) -> dlogits = g (softmax − onehot) (R, V)
//!                                    -> dx = dlogits W (R, E), dW (V, E) += dlogitsᵀ x
//! ```

use candle_core::{
    CpuStorage, CudaStorage, D, DType, MetalStorage, Result, Shape, Storage, Tensor, backend::BackendStorage, bail,
};

use super::{
    compute_dtype, matmul,
    operation::{Operation, Stored, apply},
    rows::Span,
};

/// The most bytes of one tensor of logits; a tile has one row at least. Where Candle's operations
/// compute the losses, up to three more tensors of f32 of as many numbers exist beside it.
const BYTES: usize = 256 << 20;

/// Computes `−log softmax(W x_i)[target_i]` for hidden states `x` `(N, E)`, a head `W` `(V, E)` and
/// u32 targets `(N)` → `(N)`, f32 or f64.
///
/// Products are made in the type of `x`, sums over them in f32 or f64.
pub(crate) fn cross_entropy(x: &Tensor, weight: &Tensor, targets: Tensor) -> Result<Tensor> {
    let tiles = Tiles { rows: rows_of_tile(weight.dim(0)?, x.dtype()), targets };
    in_tiles(x, weight, tiles)
}

/// How many rows of logits over a vocabulary are in memory at a time.
fn rows_of_tile(vocabulary: usize, dtype: DType) -> usize {
    let row = vocabulary * dtype.size_in_bytes();
    (BYTES / row.max(1)).max(1)
}

/// Computes the losses in the given tiles.
fn in_tiles(x: &Tensor, weight: &Tensor, tiles: Tiles) -> Result<Tensor> {
    let (rows, head) = (x.detach(), weight.detach().to_dtype(x.dtype())?);
    let mut parts = [Vec::new(), Vec::new()];
    for Span { start, count } in tiles.each(&rows)? {
        let logits = matmul(&rows.narrow(0, start, count)?, &head.t()?)?;
        let [loss, log] = losses(&logits, &tiles.targets.narrow(0, start, count)?)?;
        parts[0].push(loss);
        parts[1].push(log);
    }
    let [losses, logs] = parts.map(|parts| Tensor::cat(&parts, 0));
    apply(TiledCrossEntropy { tiles, losses: losses?, logs: logs? }, [x, weight])
}

/// `Tiles` says how many rows a tile of logits has, and which targets the rows have.
struct Tiles {
    rows: usize,
    targets: Tensor,
}

impl Tiles {
    /// The rows of each tile.
    fn each(&self, x: &Tensor) -> Result<impl Iterator<Item = Span>> {
        let (all, rows) = (x.dim(0)?, self.rows);
        // An empty tensor is one empty tile.
        Ok((0..all.max(1)).step_by(rows).map(move |start| Span { start, count: rows.min(all - start) }))
    }
}

/// Computes the losses and the logarithms of the denominators for a tile of logits.
fn losses(logits: &Tensor, targets: &Tensor) -> Result<[Tensor; 2]> {
    #[cfg(feature = "cuda")]
    if on_cuda(logits) {
        return super::cuda::cross_entropy::losses(logits, targets);
    }
    let logits = logits.to_dtype(compute_dtype(logits.dtype()))?;
    let largest = logits.max_keepdim(D::Minus1)?;
    let logs = (logits.broadcast_sub(&largest)?.exp()?.sum_keepdim(D::Minus1)?.log()? + largest)?;
    let losses = (&logs - logits.gather(&targets.unsqueeze(1)?, D::Minus1)?)?;
    Ok([losses.squeeze(1)?, logs.squeeze(1)?])
}

/// Computes `g_i (softmax − onehot(target))` for a tile of logits, in their type.
fn gradients(logits: Tensor, targets: &Tensor, logs: &Tensor, grad: &Tensor) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if on_cuda(&logits) {
        return super::cuda::cross_entropy::gradients(logits, targets, logs, grad);
    }
    let shares = logits.to_dtype(logs.dtype())?.broadcast_sub(&logs.unsqueeze(1)?)?.exp()?;
    let targets = targets.unsqueeze(1)?;
    let ones = targets.to_dtype(logs.dtype())?.ones_like()?;
    let difference = shares.scatter_add(&targets, &ones.neg()?, D::Minus1)?;
    difference.broadcast_mul(&grad.unsqueeze(1)?)?.to_dtype(logits.dtype())
}

#[cfg(feature = "cuda")]
fn on_cuda(logits: &Tensor) -> bool {
    logits.device().is_cuda() && logits.dtype() != DType::F64 && logits.elem_count() > 0
}

/// `TiledCrossEntropy` holds losses computed before the operation, and what its gradient needs.
struct TiledCrossEntropy {
    tiles: Tiles,
    losses: Tensor,
    logs: Tensor,
}

/// Returns the losses that were computed before, as the operation's result on `$device`.
macro_rules! computed {
    ($self:ident, $device:ident) => {{
        let (storage, layout) = $self.losses.storage_and_layout();
        let Storage::$device(storage) = &*storage else { bail!("cross-entropy: hidden states and targets are apart") };
        Ok((storage.try_clone(layout)?, layout.shape().clone()))
    }};
}

impl Operation<2> for TiledCrossEntropy {
    fn name(&self) -> &'static str {
        "tiled-cross-entropy"
    }

    fn cpu(&self, _: [Stored<'_, CpuStorage>; 2]) -> Result<(CpuStorage, Shape)> {
        computed!(self, Cpu)
    }

    fn cuda(&self, _: [Stored<'_, CudaStorage>; 2]) -> Result<(CudaStorage, Shape)> {
        computed!(self, Cuda)
    }

    fn metal(&self, _: [Stored<'_, MetalStorage>; 2]) -> Result<(MetalStorage, Shape)> {
        computed!(self, Metal)
    }

    fn backward(&self, [x, weight]: [&Tensor; 2], _: &Tensor, grad: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let (x, weight, grad) = (x.detach(), weight.detach(), grad.detach().contiguous()?);
        let head = weight.to_dtype(x.dtype())?;
        let (mut dx, mut dw) = (Vec::new(), None);
        for Span { start, count } in self.tiles.each(&x)? {
            let part = |t: &Tensor| t.narrow(0, start, count);
            let rows = part(&x)?;
            let logits = matmul(&rows, &head.t()?)?;
            let logits = gradients(logits, &part(&self.tiles.targets)?, &part(&self.logs)?, &part(&grad)?)?;
            dx.push(matmul(&logits, &head)?);
            let share = matmul(&logits.t()?, &rows)?.to_dtype(compute_dtype(x.dtype()))?;
            dw = Some(match dw {
                None => share,
                Some(sum) => (sum + share)?,
            });
        }
        let dw = dw.map(|dw| dw.to_dtype(weight.dtype())).transpose()?;
        Ok([Some(Tensor::cat(&dx, 0)?), dw])
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;

    #[test]
    fn a_tile_has_a_bounded_size_and_one_row_at_least() {
        assert_eq!(rows_of_tile(32_000, DType::F32), 2_097);
        assert_eq!(rows_of_tile(32_000, DType::BF16), 4_194);
        assert_eq!(rows_of_tile(1 << 30, DType::F64), 1);
        assert_eq!(rows_of_tile(0, DType::F32), BYTES);
    }

    /// Returns the losses and both gradients.
    fn run(rows: usize, dtype: DType) -> Result<Vec<Vec<f64>>> {
        let numbers = |shape: (usize, usize), salt: f64| {
            let values: Vec<f64> = (0..shape.0 * shape.1).map(|i| ((i as f64 + salt) * 12.9898).sin() * 2.0).collect();
            Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
        };
        let (n, e, vocabulary) = (23, 5, 11);
        let (x, w) = (Var::from_tensor(&numbers((n, e), 0.0)?)?, Var::from_tensor(&numbers((vocabulary, e), 5.0)?)?);
        let targets: Vec<u32> = (0..n).map(|i| (i * 7 % vocabulary) as u32).collect();
        let targets = Tensor::from_vec(targets, n, &Device::Cpu)?;
        let losses = in_tiles(&x, &w, Tiles { rows, targets })?;
        let weights = numbers((n, 1), 77.0)?.squeeze(1)?.to_dtype(losses.dtype())?;
        let gradients = (&losses * weights)?.sum_all()?.backward()?;
        let of = |v: &Var| gradients.get(v).cloned().ok_or_else(|| candle_core::Error::msg("no gradient"));
        [losses.clone(), of(&x)?, of(&w)?].iter().map(|t| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1()).collect()
    }

    #[test]
    fn tiles_and_half_types_change_rounding_only() -> Result<()> {
        let whole = run(100, DType::F64)?;
        for (rows, dtype, tolerance) in [(7, DType::F64, 1e-13), (7, DType::F32, 1e-5), (4, DType::BF16, 0.1)] {
            for (got, want) in run(rows, dtype)?.iter().zip(&whole) {
                let largest = want.iter().fold(1.0f64, |m, x| m.max(x.abs()));
                for (g, w) in got.iter().zip(want) {
                    assert!((g - w).abs() < tolerance * largest, "{dtype:?}, {rows} rows: {g} is not {w}");
                }
            }
        }
        Ok(())
    }
}
