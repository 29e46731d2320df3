//! Features that Candle's operations have computed, for kernels that do not know the feature map.

use candle_core::{D, DType, Result, Tensor};

use super::backend::Call;
use crate::{
    attention::{inputs::rows, layout::Folded},
    features::{Pair, scale_or_zero},
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
        let (form, q, k) = match Pair::of(map, &folded.q, &folded.k)? {
            Pair::Log { q, k } => (ReadyForm::Log, q, k),
            Pair::Linear { q, k, log_scale } => {
                let scale = scale_or_zero(log_scale, &k)?;
                (ReadyForm::Signed, q, Tensor::cat(&[&k, &scale], D::Minus1)?)
            }
        };
        debug_assert_eq!(q.dtype(), DType::F32);
        let visible = folded.visible.as_ref().map(|visible| visible.ne(0.0)?.flatten_all()?.contiguous());
        Ok(Self {
            form,
            features,
            q: rows(&q.transpose(1, 2)?)?,
            k: rows(&k.unsqueeze(1)?)?,
            v: folded.v.unsqueeze(1)?,
            visible: visible.transpose()?,
        })
    }
}
