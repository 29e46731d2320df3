//! Rows of attention as features estimate them: the products of the features of queries and keys,
//! signed ones too, in f64.

use candle_core::{D, DType, Result, Tensor};
use performer_core::Features;

/// Features `(.., T, F)` of queries and of keys, scaled to the range of f64.
pub(crate) struct FeatureRows {
    /// Those of queries, `(.., Tq, F)`.
    pub(crate) queries: Tensor,
    /// Those of keys, `(.., Tk, F)`.
    pub(crate) keys: Tensor,
    /// The logarithm of the factor that the features of each query lack, `(.., Tq, 1)`. Rows that
    /// are normalised do without it; the lab needs it to add exact kernels to estimated ones.
    #[cfg_attr(not(feature = "lab"), allow(dead_code))]
    pub(crate) log_scale: Tensor,
}

impl FeatureRows {
    /// Takes features in f64 as a map gives them.
    ///
    /// # Errors
    /// If those of queries and of keys are of two forms.
    pub(crate) fn new(queries: Features, keys: Features) -> Result<Self> {
        match (queries, keys) {
            (Features::Log(x), Features::Log(y)) => {
                // Keys are scaled feature by feature, so that no feature of a key underflows beside
                // a larger one that hardly occurs in the query.
                let largest = y.max_keepdim(D::Minus2)?;
                let x = x.broadcast_add(&largest)?;
                let log_scale = x.max_keepdim(D::Minus1)?;
                let queries = x.broadcast_sub(&log_scale)?.exp()?;
                Ok(Self { queries, keys: y.broadcast_sub(&largest)?.exp()?, log_scale })
            }
            (
                Features::Linear { values: queries, log_scale: x_scale },
                Features::Linear { values: mut keys, log_scale: y_scale },
            ) => {
                let mut log_scale = match x_scale {
                    Some(scale) => scale,
                    None => queries.narrow(D::Minus1, 0, 1)?.zeros_like()?.to_dtype(DType::F64)?,
                };
                if let Some(scale) = y_scale {
                    let largest = scale.max_keepdim(D::Minus2)?;
                    keys = keys.broadcast_mul(&scale.broadcast_sub(&largest)?.exp()?)?;
                    log_scale = log_scale.broadcast_add(&largest)?;
                }
                Ok(Self { queries, keys, log_scale })
            }
            _ => candle_core::bail!("a feature map must give the features of queries and keys in one form"),
        }
    }
}

/// Divides each row of a kernel `(Tq, Tk)` by its sum; a row whose sum is zero is not changed.
pub(crate) fn normalised(kernel: &Tensor) -> Result<Tensor> {
    let sums = kernel.sum_keepdim(1)?;
    let empty = sums.eq(0.0)?.to_dtype(DType::F64)?;
    kernel.broadcast_div(&(sums + empty)?)
}
