//! Features that are computed before attention, by Candle's operations or by a kernel of their own,
//! for kernels of attention that do not know the feature map.

use candle_core::{DType, Result, Tensor};

use super::backend::Call;
#[cfg(feature = "cuda")]
use crate::kernels::{cuda, operation::apply, quadratic::QuadraticFeatures};
use crate::{
    attention::{inputs::rows, layout::Folded},
    features::{FeatureMap, Pair, scale_or_zero},
    ops,
};

/// In which form features are ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReadyForm {
    /// Rows are log-features, `(.., F)`.
    Log,
    /// Rows are features, `(.., F)`; those of keys end with their log-scale, `(.., F + 1)`.
    Signed,
}

/// Features of queries and keys, f32, heads folded into the batch: `N = B·Hkv`.
pub(super) struct Ready {
    pub(super) form: ReadyForm,
    /// `F`.
    pub(super) features: usize,
    /// `(N, G, Tq, F)`.
    pub(super) q: Tensor,
    /// `(N, 1, Tk, F)`, or `F + 1`.
    pub(super) k: Tensor,
    /// `(N, 1, Tk, Dv)`.
    pub(super) v: Tensor,
    /// Visible keys as 1 and hidden ones as 0, u8, `(N·Tk)`.
    pub(super) visible: Option<Tensor>,
}

impl Ready {
    pub(super) fn new(call: &Call<'_>) -> Result<Self> {
        let folded = Folded::new(call.inputs, call.mask)?;
        let (map, features) = (call.map, call.map.feature_dim());
        let (form, q, k) = match quadratic(map, &folded)? {
            Some([q, k]) => (ReadyForm::Signed, q, k),
            None => match Pair::of(map, &folded.q, &folded.k)? {
                Pair::Log { q, k } => (ReadyForm::Log, q, k),
                Pair::Linear { q, k, log_scale } => {
                    let scale = scale_or_zero(log_scale, &k)?;
                    (ReadyForm::Signed, q, ops::cat(&[&k, &scale], 2)?)
                }
            },
        };
        debug_assert_eq!(q.dtype(), DType::F32);
        let visible = folded.visible.as_ref().map(|visible| visible.ne(0.0)?.flatten_all()?.contiguous());
        Ok(Self {
            form,
            features,
            q: rows(&ops::transpose(&q, 1, 2)?)?,
            k: rows(&with_one_head(&k)?)?,
            v: with_one_head(&folded.v)?,
            visible: visible.transpose()?,
        })
    }
}

/// Makes `(N, T, F)` rows of one head, `(N, 1, T, F)`.
fn with_one_head(rows: &Tensor) -> Result<Tensor> {
    let (n, tokens, width) = rows.dims3()?;
    ops::reshape(rows, (n, 1, tokens, width))
}

/// The features of queries and of keys, these with their log-scale of 0, where a kernel of CUDA
/// computes those of the map.
#[cfg(feature = "cuda")]
fn quadratic(map: &dyn FeatureMap, folded: &Folded) -> Result<Option<[Tensor; 2]>> {
    let Some(second) = map.quadratic_form().filter(|_| cuda::takes(&folded.q) && cuda::takes(&folded.k)) else {
        return Ok(None);
    };
    let features = |x: &Tensor, zeros| apply(QuadraticFeatures { second: second as f32, zeros }, [x]);
    Ok(Some([features(&folded.q, 0)?, features(&folded.k, 1)?]))
}

/// Only CUDA has such a kernel; on the CPU those of attention compute these features.
#[cfg(not(feature = "cuda"))]
fn quadratic(_: &dyn FeatureMap, _: &Folded) -> Result<Option<[Tensor; 2]>> {
    Ok(None)
}
