//! Exponential features of any linear form, with a set of parameters for each key head: fitted to a
//! model's own queries and keys, or trained.
//!
//! `log φ(x)_r = a_r·x − ‖Gx‖²/2 − ln(M)/2` for queries and
//! `log φ(y)_r = b_r·y + w_r − ‖Py‖²/2 − ln(M)/2` for keys. Random features that are scaled,
//! centred or balanced are of this form ([`super::fit`]), and so are trained ones.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{ExponentialForm, FeatureMap, Features, KeyForm, project_by_head};
use crate::ops;

/// The map of exponential features with parameters for each of `H` key heads, or one set for all
/// (`H` = 1).
///
/// A parameter that is a variable gets a gradient.
#[derive(Clone, Debug)]
pub struct Fitted {
    /// `a`, shape `(H, M, D)`.
    queries: Tensor,
    /// `b`, shape `(H, M, D)`.
    keys: Tensor,
    /// `w`, shape `(H, M)`.
    log_weights: Tensor,
    /// `G`, shape `(H, D, D)`; `None` is the identity.
    query_metric: Option<Tensor>,
    /// `P`, shape `(H, D, D)`; `None` is the identity.
    key_metric: Option<Tensor>,
}

impl Fitted {
    /// The map with rows of queries `a` `(H, M, D)`, rows of keys `b` `(H, M, D)` and weights of
    /// keys `w` `(H, M)`, whose metrics `G` and `P` are the identity.
    ///
    /// # Errors
    /// If their shapes do not fit each other, or a dimension is 0.
    pub fn new(queries: Tensor, keys: Tensor, log_weights: Tensor) -> Result<Self> {
        let fitted = Self { queries, keys, log_weights, query_metric: None, key_metric: None };
        fitted.check()?;
        Ok(fitted)
    }

    /// Sets the metrics `G` of queries and `P` of keys, each `(H, D, D)`.
    ///
    /// # Errors
    /// If one has another shape.
    pub fn with_metrics(mut self, queries: Tensor, keys: Tensor) -> Result<Self> {
        (self.query_metric, self.key_metric) = (Some(queries), Some(keys));
        self.check()?;
        Ok(self)
    }

    /// The map of positive random features of Ω `(M, D)`, to be fitted or trained.
    ///
    /// # Errors
    /// If Ω is no matrix, a dimension of it is 0, or its device has no memory for a copy.
    pub fn positive(projection: &Tensor) -> Result<Self> {
        let (features, _) = projection.dims2()?;
        let rows = projection.detach().unsqueeze(0)?.contiguous()?;
        let log_weights = Tensor::zeros((1, features), projection.dtype(), projection.device())?;
        Self::new(rows.clone(), rows, log_weights)
    }

    /// Converts all parameters to another dtype and device.
    ///
    /// # Errors
    /// If Candle cannot convert to that dtype, or the device has no memory for the copies.
    pub fn to(&self, dtype: DType, device: &Device) -> Result<Self> {
        self.each(|tensor| tensor.to_dtype(dtype)?.to_device(device))
    }

    /// Applies `change` to every parameter.
    fn each(&self, change: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            queries: change(&self.queries)?,
            keys: change(&self.keys)?,
            log_weights: change(&self.log_weights)?,
            query_metric: self.query_metric.as_ref().map(&change).transpose()?,
            key_metric: self.key_metric.as_ref().map(&change).transpose()?,
        })
    }

    /// Returns the parameters by name.
    pub fn tensors(&self) -> Vec<(&'static str, &Tensor)> {
        let mut all = vec![("queries", &self.queries), ("keys", &self.keys), ("log_weights", &self.log_weights)];
        all.extend(self.query_metric.as_ref().map(|t| ("query_metric", t)));
        all.extend(self.key_metric.as_ref().map(|t| ("key_metric", t)));
        all
    }

    /// Builds the map from tensors by name, as [`Self::tensors`] gives them.
    ///
    /// # Errors
    /// If one is missing, or they do not fit each other.
    pub fn from_tensors(get: &dyn Fn(&str) -> Option<Tensor>) -> Result<Self> {
        let need = |name: &str| match get(name) {
            Some(t) => Ok(t),
            None => bail!("{name} is missing among the parameters of a fitted feature map"),
        };
        let fitted = Self {
            queries: need("queries")?,
            keys: need("keys")?,
            log_weights: need("log_weights")?,
            query_metric: get("query_metric"),
            key_metric: get("key_metric"),
        };
        fitted.check()?;
        Ok(fitted)
    }

    fn check(&self) -> Result<()> {
        let Ok((h, m, d)) = self.queries.dims3() else {
            bail!("queries of a fitted feature map have shape {:?}; it must be (heads, M, D)", self.queries.dims())
        };
        if h * m * d == 0 {
            bail!("queries of a fitted feature map have shape {:?}; no dimension may be 0", self.queries.dims());
        }
        for (name, tensor) in self.tensors() {
            let expected: &[usize] = match name {
                "queries" | "keys" => &[h, m, d],
                "log_weights" => &[h, m],
                _ => &[h, d, d],
            };
            if tensor.dims() != expected {
                bail!("{name} of a fitted feature map has shape {:?}; it must be {expected:?}", tensor.dims());
            }
        }
        Ok(())
    }

    /// Computes `‖mx‖²/2 + ln(M)/2`, the offset common to all log-features of a row,
    /// `(.., D) → (.., 1)`.
    fn shared(&self, x: &Tensor, metric: Option<&Tensor>) -> Result<Tensor> {
        let turned = metric.map(|m| project_by_head(x, m)).transpose()?;
        let square = ops::sum_last(&ops::sqr(turned.as_ref().unwrap_or(x))?)?;
        ops::affine(&square, 0.5, 0.5 * (self.feature_dim() as f64).ln())
    }
}

impl FeatureMap for Fitted {
    fn input_dim(&self) -> usize {
        self.queries.dims()[2]
    }

    fn feature_dim(&self) -> usize {
        self.queries.dims()[1]
    }

    fn heads(&self) -> usize {
        self.queries.dims()[0]
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        let shared = self.shared(x, self.query_metric.as_ref())?;
        Ok(Features::Log(project_by_head(x, &self.queries)?.broadcast_sub(&shared)?))
    }

    fn key_features(&self, y: &Tensor) -> Result<Features> {
        let linear = project_by_head(y, &self.keys)?;
        let (h, m) = self.log_weights.dims2()?;
        // Heads come one after the other, for as many batch entries as there are.
        let rows = linear.reshape((linear.dim(0)? / h, h, (), m))?;
        let weights = self.log_weights.to_dtype(y.dtype())?.reshape((1, h, 1, m))?;
        let linear = rows.broadcast_add(&weights)?.reshape(linear.shape())?;
        Ok(Features::Log(linear.broadcast_sub(&self.shared(y, self.key_metric.as_ref())?)?))
    }

    fn parameters(&self) -> Vec<(&'static str, &Tensor)> {
        self.tensors()
    }

    /// All but `query_metric`, which multiplies all features of a query alike and so cancels in
    /// attention over features: its gradient is rounding noise. Beside an exact window it weighs
    /// features against the window, and stays as it was fitted there too.
    fn trained_parameters(&self) -> Vec<&'static str> {
        self.tensors().into_iter().map(|(name, _)| name).filter(|&name| name != "query_metric").collect()
    }

    fn with_parameters(&self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<Box<dyn FeatureMap>> {
        let other = Self::from_tensors(get)?;
        let (m, d) = (self.feature_dim(), self.input_dim());
        if (other.feature_dim(), other.input_dim()) != (m, d) {
            bail!("queries have {} features of {}; they must have {m} of {d}", other.feature_dim(), other.input_dim());
        }
        Ok(Box::new(other))
    }

    fn exponential_form(&self) -> Option<ExponentialForm> {
        let keys = KeyForm {
            projection: self.keys.clone(),
            log_weights: self.log_weights.clone(),
            metric: self.key_metric.clone(),
        };
        Some(ExponentialForm { projection: self.queries.clone(), hyperbolic: false, keys: Some(keys) })
    }

    fn query_offset(&self, x: &Tensor) -> Result<Tensor> {
        self.shared(x, self.query_metric.as_ref())
    }
}
