//! The records of CUDA's prefix sums as tensors, to be saved: `favor.cuh` has a record of each key
//! head, its `F` scales, `F` norms and `(F, Dv)` sums one after the other. `F` and `Dv` are padded
//! to whole tiles, and scales are logarithms to base 2.

use candle_core::{D, DType, Result, Tensor, bail};

/// Takes records `(B, Hkv, F·(2 + Dv))` apart: scales and norms `(B, Hkv, 1, F)` and sums
/// `(B, Hkv, F, Dv)`.
pub(crate) fn apart(records: &Tensor, features: usize) -> Result<[Tensor; 3]> {
    let (batch, heads, length) = records.dims3()?;
    let part = |start, count, rows: usize| {
        records.narrow(2, start, count)?.contiguous()?.reshape((batch, heads, rows, count / rows))
    };
    let sums = length - 2 * features;
    Ok([part(0, features, 1)?, part(features, features, 1)?, part(2 * features, sums, features)?])
}

/// Puts together what [`apart`] has taken apart.
pub(crate) fn together([scale, norm, sums]: [&Tensor; 3]) -> Result<Tensor> {
    let (batch, heads, features, _) = sums.dims4()?;
    let right = sums.elem_count() > 0
        && [scale, norm].iter().all(|t| t.dims() == [batch, heads, 1, features])
        && [scale, norm, sums].iter().all(|t| t.dtype() == DType::F32);
    if !right {
        bail!(
            "saved state: sums {:?}, norms {:?} and scales {:?} do not belong together",
            sums.dims(),
            norm.dims(),
            scale.dims()
        );
    }
    let flat = |t: &Tensor| t.flatten_from(2);
    Tensor::cat(&[flat(scale)?, flat(norm)?, flat(sums)?], D::Minus1)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn records_come_back_and_their_parts_lie_where_the_kernels_have_them() -> Result<()> {
        let (batch, heads, features, values) = (2, 3, 4, 5);
        let length = features * (2 + values);
        let all = (batch * heads * length) as u32;
        let records = Tensor::arange(0, all, &Device::Cpu)?.to_dtype(DType::F32)?.reshape((batch, heads, length))?;
        let [scale, norm, sums] = apart(&records, features)?;
        assert_eq!(sums.dims(), [batch, heads, features, values]);
        let at = |t: &Tensor| t.get(1)?.get(2)?.flatten_all()?.to_vec1::<f32>();
        let record = (5 * length) as f32;
        assert_eq!(at(&scale)?, [0.0, 1.0, 2.0, 3.0].map(|i| record + i));
        assert_eq!(at(&norm)?, [4.0, 5.0, 6.0, 7.0].map(|i| record + i));
        assert_eq!(sums.get(1)?.get(2)?.to_vec2::<f32>()?[3], [23.0, 24.0, 25.0, 26.0, 27.0].map(|i| record + i));
        let back = together([&scale, &norm, &sums])?;
        assert_eq!(back.flatten_all()?.to_vec1::<f32>()?, records.flatten_all()?.to_vec1::<f32>()?);
        // The last have no features, which nothing can be divided by.
        let none = |t: &Tensor| t.narrow(3, 0, 0);
        for wrong in [[&scale.narrow(3, 0, 3)?, &norm, &sums], [&none(&scale)?, &none(&norm)?, &sums.narrow(2, 0, 0)?]]
        {
            let error = together(wrong).unwrap_err().to_string();
            assert!(error.contains("do not belong together"), "{error}");
        }
        Ok(())
    }
}
