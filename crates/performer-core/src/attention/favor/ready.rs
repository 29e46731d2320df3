//! Features that are computed before attention, by Candle's operations or by a kernel of their own,
//! for kernels of attention that do not know the feature map.

use candle_core::{DType, Result, Tensor};

use super::backend::Call;
#[cfg(feature = "cuda")]
use crate::kernels::{cuda, operation::apply, quadratic::QuadraticFeatures};
use crate::{
    attention::{inputs::contiguous_rows, layout::Folded},
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

/// Features of queries and keys, and the values. Those of [`Ready::new`] are f32, with heads folded
/// into the batch, `N = B·Hkv`; the shapes below are theirs. [`Ready::unfolded`] has others.
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
        // The rows are scaled already.
        let (form, q, k) = match quadratic(map, [&folded.q, &folded.k], 1.0)? {
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
            q: contiguous_rows(&ops::transpose(&q, 1, 2)?)?,
            k: contiguous_rows(&with_one_head(&k)?)?,
            v: with_one_head(&folded.v)?,
            visible: visible.transpose()?,
        })
    }
}

/// The least `c` of features in bf16. Their products `1 + z + c z²` are at least `1 − 1/(4c)`,
/// which is ½ here. With a smaller `c` they come near zero, where rounding takes most of their
/// digits.
#[cfg(feature = "cuda")]
const LEAST_SECOND_IN_BF16: f64 = 0.5;

#[cfg(feature = "cuda")]
impl Ready {
    /// Computes features by a kernel of CUDA, in the type of queries and keys, without folding
    /// heads into the batch: `(B, H, Tq, F)`, `(B, Hkv, Tk, F + 1)` and values `(B, Hkv, Tk, Dv)`.
    /// So models in bf16 keep their features in half as many bytes. Outputs then differ by what
    /// bf16 rounds from those in f32, and from those of a state, which goes on in f32. Returns
    /// nothing for maps of which there is no such kernel, and for types in which their features
    /// lose too much: f16, whose largest number they may exceed, and bf16 for some maps.
    pub(super) fn unfolded(call: &Call<'_>) -> Result<Option<Self>> {
        let (q, k, v) = (call.inputs.q, call.inputs.k, call.inputs.v);
        let takes = |second: f64| match q.dtype() {
            DType::F32 => true,
            DType::BF16 => second >= LEAST_SECOND_IN_BF16,
            _ => false,
        };
        if !call.map.quadratic_form().is_some_and(takes) {
            return Ok(None);
        }
        let visible = call.mask.visible_of(call.sizes.batch, q.device())?;
        let (q, mut k) = (ops::contiguous(q)?, ops::contiguous(k)?);
        if let Some(visible) = &visible {
            // The features of a large hidden key would be infinite, see `Folded::new`.
            let shown = visible.to_dtype(DType::F32)?.to_dtype(k.dtype())?.unsqueeze(1)?.unsqueeze(3)?;
            k = ops::mul(&k, &shown.broadcast_as(k.shape())?)?;
        }
        let scale = crate::projection::input_scale(call.sizes.head_dim);
        let Some([q, k]) = quadratic(call.map, [&q, &k], scale)? else { return Ok(None) };
        let visible = visible.map(|visible| visible.flatten_all()).transpose()?;
        Ok(Some(Self {
            form: ReadyForm::Signed,
            features: call.map.feature_dim(),
            q,
            k,
            v: contiguous_rows(v)?,
            visible,
        }))
    }
}

/// Makes `(N, T, F)` rows of one head, `(N, 1, T, F)`.
fn with_one_head(rows: &Tensor) -> Result<Tensor> {
    let (n, tokens, width) = rows.dims3()?;
    ops::reshape(rows, (n, 1, tokens, width))
}

/// Computes the features of queries `(.., D) → (.., F)` and of keys `(.., D) → (.., F + 1)` by a
/// CUDA kernel, after multiplying both by `scale`. The last number of a key is its log-scale, which
/// is 0 for these maps. Returns `None` where the kernel does not take the map or the tensors.
#[cfg(feature = "cuda")]
fn quadratic(map: &dyn FeatureMap, [q, k]: [&Tensor; 2], scale: f64) -> Result<Option<[Tensor; 2]>> {
    let Some(second) = map.quadratic_form().filter(|_| cuda::takes(q) && cuda::takes(k)) else {
        return Ok(None);
    };
    let (scale, second) = (scale as f32, second as f32);
    let features = |x: &Tensor, zeros| apply(QuadraticFeatures { scale, second, zeros }, [x]);
    Ok(Some([features(q, 0)?, features(k, 1)?]))
}

/// Only CUDA has such a kernel; on the CPU those of attention compute these features.
#[cfg(not(feature = "cuda"))]
fn quadratic(_: &dyn FeatureMap, _: [&Tensor; 2], _: f64) -> Result<Option<[Tensor; 2]>> {
    Ok(None)
}
