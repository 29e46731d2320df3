//! The plain exponential of each dimension.

use candle_core::{DType, Device, Result, Tensor};

use super::{ExponentialForm, FeatureMap, Features, KeyForm};

/// `φ(x) = e^x`, elementwise, `F = D`: a positive map without random features. Efficient attention
/// (Shen et al. 2018, <https://arxiv.org/abs/1812.01243>) takes the same exponentials of queries
/// and keys. It divides those of a query by their sum over the dimensions, and those of the keys in
/// a dimension by their sum over the tokens; here only the weights of a query are divided by their
/// sum over the keys.
///
/// It is a linear map (the identity) and an exponential, so the fused kernels compute it.
#[derive(Clone, Debug)]
pub struct Exp {
    dim: usize,
    /// The identity, `(1, D, D)`.
    identity: Tensor,
    /// The metric of keys, zeros `(1, D, D)`: the form has −‖Py‖²/2, and `e^x` has nothing of a
    /// key's length.
    zeros: Tensor,
    /// What undoes the factor `F^-½` that the form has, `½ ln D`, shape `(1, D)`.
    log_weights: Tensor,
}

impl Exp {
    /// Makes the map for rows of width `dim`, the head dimension `D`; its constants live on
    /// `device`.
    ///
    /// # Errors
    /// If they cannot be made there.
    pub fn new(dim: usize, device: &Device) -> Result<Self> {
        let identity = Tensor::eye(dim, DType::F32, device)?.unsqueeze(0)?;
        let log_weights = Tensor::full(0.5 * (dim as f32).ln(), (1, dim), device)?;
        Ok(Self { dim, zeros: identity.zeros_like()?, identity, log_weights })
    }
}

impl FeatureMap for Exp {
    fn input_dim(&self) -> usize {
        self.dim
    }

    fn feature_dim(&self) -> usize {
        self.dim
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        Ok(Features::Log(x.clone()))
    }

    fn exponential_form(&self) -> Option<ExponentialForm> {
        Some(ExponentialForm {
            projection: self.identity.clone(),
            hyperbolic: false,
            keys: Some(KeyForm {
                projection: self.identity.clone(),
                log_weights: self.log_weights.clone(),
                metric: Some(self.zeros.clone()),
            }),
        })
    }

    /// The kernels leave nothing out of a query's features.
    fn query_offset(&self, x: &Tensor) -> Result<Tensor> {
        x.narrow(candle_core::D::Minus1, 0, 1)?.zeros_like()
    }
}
