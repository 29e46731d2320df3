//! The projection Ω as the Metal kernel reads it.

use candle_core::{D, DType, Result, Tensor};

use crate::projection::input_scale;

/// `Projection` is Ω times the scale of queries and keys, `D^-1/4`, and the factor of logarithms to
/// base 2.
#[derive(Debug)]
pub(crate) struct Projection {
    /// The projection transposed, `(D, F)`, both padded with zeros to multiples of 8: a column for
    /// each feature. f32, contiguous.
    pub(super) columns: Tensor,
    /// The head dimension `D`.
    pub(super) dim: usize,
    /// The number of features `F`.
    pub(super) features: usize,
}

impl Projection {
    /// Packs `omega`, `(M, D)`. Hyperbolic features are the positive ones of its rows and of their
    /// negatives.
    pub(crate) fn new(omega: &Tensor, hyperbolic: bool) -> Result<Self> {
        let dim = omega.dim(1)?;
        let rows = (omega.detach().to_dtype(DType::F32)? * (input_scale(dim) * std::f64::consts::LOG2_E))?;
        let rows = if hyperbolic { Tensor::cat(&[&rows, &rows.neg()?], 0)? } else { rows };
        let features = rows.dim(0)?;
        let padding = |n: usize| n.next_multiple_of(8) - n;
        let padded = rows.pad_with_zeros(0, 0, padding(features))?.pad_with_zeros(D::Minus1, 0, padding(dim))?;
        Ok(Self { columns: padded.t()?.contiguous()?, dim, features })
    }

    /// The factor in `‖x‖²/2 = offset_scale·‖k‖²`, in base 2.
    pub(super) fn offset_scale(&self) -> f32 {
        (0.5 * input_scale(self.dim).powi(2) * std::f64::consts::LOG2_E) as f32
    }

    /// `½ log₂ F`: by this much the kernel's logarithms exceed those of features divided by `√F`.
    pub(super) fn shift(&self) -> f32 {
        (0.5 * (self.features as f64).log2()) as f32
    }
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_column_for_each_feature() -> Result<()> {
        let omega = Tensor::arange(1f32, 28.0, &Device::Cpu)?.reshape((3, 9))?;
        let projection = Projection::new(&omega, true)?;
        assert_eq!((projection.dim, projection.features), (9, 6));
        let columns = projection.columns.to_vec2::<f32>()?;
        let unit = 9f32.powf(-0.25) * std::f32::consts::LOG2_E;
        for (d, row) in columns.iter().enumerate() {
            for (r, x) in row.iter().enumerate() {
                let sign = if r < 3 { 1.0 } else { -1.0 };
                let expected = if d < 9 && r < 6 { sign * unit * (r % 3 * 9 + d + 1) as f32 } else { 0.0 };
                assert!((x - expected).abs() < 1e-4, "{x} at ({d}, {r}), not {expected}");
            }
        }
        assert_eq!((columns.len(), columns[0].len()), (16, 8));
        // By the formulas: half of |x|² with x = k / 9^(1/4), and ½ log2 of six features.
        assert!((projection.offset_scale() - std::f32::consts::LOG2_E / 6.0).abs() < 1e-6);
        assert!((projection.shift() - 0.5 * 6f32.log2()).abs() < 1e-6);
        Ok(())
    }
}
