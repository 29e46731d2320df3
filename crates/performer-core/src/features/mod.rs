//! Feature maps φ with `φ(x)·φ(y) ≈ K(x, y)`: one file a family, one small trait.
//!
#![doc = include_str!("maps.md")]
//!
//! `positive` is the map of FAVOR+, `optimal` that of FAVOR++, `dense` that of FAVOR#;
//! `h₂ = 1 + ω·x + ((ω·x)² − ‖x‖²)/2`. Rows `ω` of the projection Ω `(M, D)` come from
//! [`crate::projection`]; `z = x·y`. Rows `x` are already scaled by `D^-1/4`, so that
//! `x·y = q·k/√D`.
//!
//! A feature of a softmax kernel spans hundreds of orders of magnitude. A map therefore returns
//! [`Features`] in a form from which the attention can take the scale before it exponentiates.

mod constant;
mod elu;
mod exp;
mod exponential;
pub mod fit;
mod fitted;
mod hedgehog;
mod hermite;
mod kind;
mod polynomial;
mod relu;
mod trigonometric;

use std::fmt;

use candle_core::{D, Result, Tensor, bail};

use crate::ops;

pub(crate) use constant::Constant;
pub use elu::Elu;
pub use exp::Exp;
pub use exponential::{Hyperbolic, Positive};
pub use fitted::Fitted;
pub use hedgehog::Hedgehog;
pub use hermite::HermiteTail;
pub use kind::{FeatureMapKind, MapDescription, MapNumbers};
pub use polynomial::{Limit, Taylor2};
pub use relu::{RELU_EPSILON, Relu};
pub use trigonometric::{Phase, Trigonometric};

/// The features of many rows, in the form that keeps them in range.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Features {
    /// Log-features `log φ(x)`, shape `(..., F)`, of maps whose features are all positive.
    Log(Tensor),
    /// `φ(x) = e^{log_scale} · values`, of maps with signed features, or features of moderate size.
    Linear {
        /// Shape `(..., F)`.
        values: Tensor,
        /// Shape `(..., 1)`; `None` means zero.
        log_scale: Option<Tensor>,
    },
}

impl Features {
    /// Computes `φ(x)` itself, shape `(..., F)`. Overflows where the features do; the attention
    /// never calls it.
    ///
    /// # Errors
    /// If values and log-scale do not fit each other. Those of this crate's maps always do.
    pub fn materialize(&self) -> Result<Tensor> {
        match self {
            Self::Log(log) => log.exp(),
            Self::Linear { values, log_scale: None } => Ok(values.clone()),
            Self::Linear { values, log_scale: Some(s) } => values.broadcast_mul(&s.exp()?),
        }
    }
}

/// The features of queries and keys together, which a map returns in the same form.
pub(crate) enum Pair {
    /// Log-features, `(..., F)`.
    Log { q: Tensor, k: Tensor },
    /// Values `(..., F)` and the log-scale of the keys, `(..., 1)`. That of a query multiplies
    /// numerator and denominator alike, so it is left out.
    Linear { q: Tensor, k: Tensor, log_scale: Option<Tensor> },
}

impl Pair {
    /// Computes the features of queries and keys.
    ///
    /// # Errors
    /// If the map returns them in two forms, or not [`FeatureMap::feature_dim`] of each row.
    pub(crate) fn of(map: &dyn FeatureMap, queries: &Tensor, keys: &Tensor) -> Result<Self> {
        let require = |made: &Tensor, rows: &Tensor, width: usize| -> Result<()> {
            let (of, leading) = (made.dims(), &rows.dims()[..rows.rank() - 1]);
            if of.split_last() != Some((&width, leading)) {
                bail!(
                    "the feature map {} made {of:?} of rows {:?}; it must make {leading:?} and {width}",
                    map.name(),
                    rows.dims()
                );
            }
            Ok(())
        };
        let features = map.feature_dim();
        match (map.features(queries)?, map.key_features(keys)?) {
            (Features::Log(q), Features::Log(k)) => {
                require(&q, queries, features)?;
                require(&k, keys, features)?;
                Ok(Self::Log { q, k })
            }
            (Features::Linear { values: q, .. }, Features::Linear { values: k, log_scale }) => {
                require(&q, queries, features)?;
                require(&k, keys, features)?;
                log_scale.as_ref().map(|scale| require(scale, keys, 1)).transpose()?;
                Ok(Self::Linear { q, k, log_scale })
            }
            _ => bail!("the feature map {} returned two kinds of features", map.name()),
        }
    }
}

/// Returns a log-scale of values `(..., F)`, `(..., 1)`, which is 0 where there is none.
pub(crate) fn scale_or_zero(log_scale: Option<Tensor>, values: &Tensor) -> Result<Tensor> {
    match log_scale {
        Some(scale) => Ok(scale),
        None => values.narrow(D::Minus1, 0, 1)?.zeros_like(),
    }
}

/// The form of features `e^{−o(x)} exp(±ω_r·x)`, with parameters for each of `H` key heads, or one
/// set for all (`H` = 1).
///
/// For queries, `o` is [`FeatureMap::query_offset`], which cancels in attention. For keys it is
/// `‖x‖²/2 + ln(F)/2`, unless [`Self::keys`] has another form.
#[derive(Clone, Debug)]
pub struct ExponentialForm {
    /// Ω, shape `(H, M, D)`.
    pub projection: Tensor,
    /// Whether each row gives a feature with `+` and one with `−` (all `+` first), or one with `+`
    /// only.
    pub hyperbolic: bool,
    /// The form of the features of keys, where it is another.
    pub keys: Option<KeyForm>,
}

impl ExponentialForm {
    /// All tensors of the form.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let of_keys =
            self.keys.iter().flat_map(|keys| [Some(&keys.projection), Some(&keys.log_weights), keys.metric.as_ref()]);
        std::iter::once(&self.projection).chain(of_keys.flatten())
    }

    /// Whether a gradient may be asked of any of its tensors.
    pub(crate) fn tracked(&self) -> bool {
        self.tensors().any(Tensor::track_op)
    }

    /// The parameters whose gradients kernels know: rows of queries, rows of keys, weights of keys.
    /// `None` where the form has others.
    pub(crate) fn trained(&self) -> Option<[&Tensor; 3]> {
        match self {
            Self {
                projection,
                hyperbolic: false,
                keys: Some(KeyForm { projection: keys, log_weights, metric: None }),
            } => Some([projection, keys, log_weights]),
            _ => None,
        }
    }
}

/// The form of features of keys `F^-½ exp(b_r·y + w_r − ‖Py‖²/2)`.
#[derive(Clone, Debug)]
pub struct KeyForm {
    /// `b`, shape `(H, M, D)`.
    pub projection: Tensor,
    /// `w`, shape `(H, M)`.
    pub log_weights: Tensor,
    /// `P`, shape `(H, D, D)`; `None` is the identity.
    pub metric: Option<Tensor>,
}

/// A feature map φ: `R^D → R^F` with `φ(x)·φ(y) ≈ K(x, y)`.
pub trait FeatureMap: fmt::Debug + Send + Sync {
    /// The map's name in messages; the name of its type, unless overridden.
    fn name(&self) -> &'static str {
        let name = std::any::type_name::<Self>();
        name.rsplit("::").next().unwrap_or(name)
    }

    /// The width `D` of the rows that the map takes.
    fn input_dim(&self) -> usize;

    /// The number `F` of features of one row.
    fn feature_dim(&self) -> usize;

    /// The number of key heads that the map has parameters for; 1, unless overridden, serves any
    /// number.
    fn heads(&self) -> usize {
        1
    }

    /// Computes the features of the rows of `x`, shape `(..., D)`, f32 or f64, which are divided by
    /// `D^¼` already. Attention gives queries as `(B·Hkv, Tq, G, D)`, with the `G` query heads that
    /// read a key head, and keys as `(B·Hkv, Tk, D)`. So where a map has parameters for each key
    /// head, the first dimension counts key heads, batch by batch.
    ///
    /// # Errors
    /// If the rows are not of [`Self::input_dim`] numbers, or the first dimension is no multiple of
    /// [`Self::heads`].
    fn features(&self, x: &Tensor) -> Result<Features>;

    /// Computes the features of keys, where they differ from those of queries.
    ///
    /// # Errors
    /// Those of [`Self::features`].
    fn key_features(&self, y: &Tensor) -> Result<Features> {
        self.features(y)
    }

    /// Returns the linear map of which the features are exponentials, for kernels that compute
    /// features themselves. Where its tensors are variables, kernels give them gradients.
    fn exponential_form(&self) -> Option<ExponentialForm> {
        None
    }

    /// Returns Ω `(M, D)` and ε of features `M^-½ relu(ω_r·x) + ε`, another kind that kernels
    /// compute themselves.
    fn rectified_form(&self) -> Option<(Tensor, f64)> {
        None
    }

    /// Returns the `c` of features whose products are `1 + z + c z²`, in the order of
    /// [`Taylor2`], for kernels that compute them by themselves.
    fn quadratic_form(&self) -> Option<f64> {
        None
    }

    /// Computes the offset common to all log-features of a query, `(..., D) → (..., 1)`, for maps
    /// with [`Self::exponential_form`]: by this much they are less than the linear map. Kernels
    /// leave it out, since it cancels in attention.
    ///
    /// # Errors
    /// Those of [`Self::features`].
    fn query_offset(&self, x: &Tensor) -> Result<Tensor> {
        ops::affine(&half_square_norm(x)?, 1.0, 0.5 * (self.feature_dim() as f64).ln())
    }

    /// Returns the tensors of a map that is fitted or trained, by name; they are saved with the
    /// model. The first dimension of each counts key heads; 1 serves all. Tensors that are drawn
    /// from a seed are not among them.
    fn parameters(&self) -> Vec<(&'static str, &Tensor)> {
        Vec::new()
    }

    /// The names among [`Self::parameters`] that training changes, if the map is to be trained at
    /// all ([`crate::Favor::trained`]): all of them, unless overridden.
    fn trained_parameters(&self) -> Vec<&'static str> {
        self.parameters().into_iter().map(|(name, _)| name).collect()
    }

    /// The numbers of this map that are neither parameters nor tensors of a form: a random
    /// projection, or the `ε` or `c` of a form, where two maps of one name may differ in it; none,
    /// unless overridden. A state of an attention is refused by one whose map has other constants.
    fn constants(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// Returns this map with other parameters, which `get` finds by name: for any number of heads,
    /// and trainable where they are variables.
    ///
    /// # Errors
    /// If one is missing or has no fitting shape.
    fn with_parameters(&self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<Box<dyn FeatureMap>> {
        let _ = get;
        bail!("feature map {self:?} takes no other parameters: it does not implement with_parameters")
    }

    /// Computes the estimated kernel matrix `φ(x_i)·φ(y_j)`: `(..., Tq, D)`, `(..., Tk, D)` →
    /// `(..., Tq, Tk)`.
    ///
    /// It materialises every feature: for looking at an approximation, not for attention.
    ///
    /// # Errors
    /// Those of [`Self::features`], and if `x` and `y` have other leading dimensions.
    fn kernel(&self, x: &Tensor, y: &Tensor) -> Result<Tensor> {
        let phi_x = self.features(x)?.materialize()?;
        let phi_y = self.key_features(y)?.materialize()?;
        phi_x.matmul(&phi_y.transpose(D::Minus2, D::Minus1)?.contiguous()?)
    }
}

/// Refuses a map that has a form for kernels of other rows, features or heads than its own.
pub(crate) fn check_forms(map: &dyn FeatureMap) -> Result<()> {
    let (dim, features) = (map.input_dim(), map.feature_dim());
    let require = |name: &str, tensor: &Tensor, expected: &[usize]| -> Result<()> {
        if tensor.dims() != expected {
            bail!(
                "the feature map {} takes rows of {dim} and makes {features} features, so the {name} of its form for kernels \
                 must have shape {expected:?}, not {:?}",
                map.name(),
                tensor.dims()
            );
        }
        Ok(())
    };
    if let Some((projection, _)) = map.rectified_form() {
        return require("projection", &projection, &[features, dim]);
    }
    if map.quadratic_form().is_some() {
        let all = 1 + dim + dim * (dim + 1) / 2;
        if features != all {
            bail!(
                "the feature map {} has a quadratic form, which makes {all} features of rows of {dim}, not {features}",
                map.name()
            );
        }
        return Ok(());
    }
    let Some(form) = map.exponential_form() else { return Ok(()) };
    let heads = map.heads();
    if form.hyperbolic && !features.is_multiple_of(2) {
        bail!(
            "the feature map {} makes {features} features by a hyperbolic form, which makes two of every \
             row: an even number",
            map.name()
        );
    }
    let rows = if form.hyperbolic { features / 2 } else { features };
    require("projection", &form.projection, &[heads, rows, dim])?;
    if let Some(keys) = &form.keys {
        require("projection of keys", &keys.projection, &[heads, rows, dim])?;
        require("weights of keys", &keys.log_weights, &[heads, rows])?;
        keys.metric.as_ref().map(|metric| require("metric of keys", metric, &[heads, dim, dim])).transpose()?;
    }
    Ok(())
}

/// What a random feature map draws: constants to the gradient, saved with the model.
#[derive(Clone, Debug)]
pub struct RandomParameters {
    /// Ω, shape `(M, D)`, f32 or f64.
    pub projection: Tensor,
    /// `b`, shape `(M)`, for the phase maps.
    pub offsets: Option<Tensor>,
}

impl RandomParameters {
    fn check(&self, kind: FeatureMapKind, head_dim: usize) -> Result<()> {
        let dims = self.projection.dims();
        if dims.len() != 2 || dims[0] == 0 || dims[1] != head_dim {
            bail!("feature map {kind}: projection has shape {dims:?}; it must be (M, {head_dim}) with M >= 1");
        }
        if let Some(offsets) = &self.offsets
            && offsets.dims() != &dims[..1]
        {
            bail!("feature map {kind}: offsets have shape {:?}; they must be ({})", offsets.dims(), dims[0]);
        }
        Ok(())
    }
}

/// Computes `(..., D) · Ωᵀ → (..., M)`, with Ω cast to the dtype of `x`.
fn project(x: &Tensor, projection_t: &Tensor) -> Result<Tensor> {
    let d = x.dim(D::Minus1)?;
    let mut shape = x.dims().to_vec();
    if let Some(last) = shape.last_mut() {
        *last = projection_t.dim(1)?;
    }
    x.contiguous()?.reshape(((), d))?.matmul(&projection_t.to_dtype(x.dtype())?)?.reshape(shape)
}

/// Computes `x · wᵀ` head by head: `x` `(B·H, .., D)`, `w` `(H, O, D)` → `(B·H, .., O)`.
fn project_by_head(x: &Tensor, w: &Tensor) -> Result<Tensor> {
    let (h, o, d) = w.dims3()?;
    let dims = x.dims();
    if dims.len() < 2 {
        bail!("a feature map fitted to {h} key heads takes rows of each, (heads, .., {d}), not {dims:?}");
    }
    if !dims[0].is_multiple_of(h) {
        bail!("a feature map fitted to {h} key heads was given {} of them", dims[0]);
    }
    let rows = x.elem_count() / (dims[0] * d).max(1);
    let x = x.contiguous()?.reshape((dims[0] / h, h, rows, d))?;
    let w = w.to_dtype(x.dtype())?.transpose(1, 2)?.unsqueeze(0)?;
    let mut shape = dims.to_vec();
    shape[dims.len() - 1] = o;
    x.broadcast_matmul(&w.contiguous()?)?.reshape(shape)
}

/// Computes `‖x‖²/2` of every row, `(..., D) → (..., 1)`.
fn half_square_norm(x: &Tensor) -> Result<Tensor> {
    ops::scale(&ops::sum_last(&ops::sqr(x)?)?, 0.5)
}

/// Returns Ωᵀ, contiguous and detached from any gradient.
fn transposed(projection: &Tensor) -> Result<Tensor> {
    if projection.rank() != 2 || projection.elem_count() == 0 {
        bail!("projection has shape {:?}; it must be (M, D), both at least 1", projection.dims());
    }
    projection.detach().t()?.contiguous()
}
