//! The Hedgehog map (Zhang et al. 2024, <https://arxiv.org/abs/2402.04347>, section 4.2): features
//! that are a softmax themselves, trained to give spiky attention without an exponential of
//! unbounded size.

use candle_core::{D, Result, Tensor, bail};

use super::{FeatureMap, Features, project_by_head};

/// The map `φ(x) = [softmax(a x), softmax(−a x)]` for queries, and with `b` in place of `a` for
/// keys; each softmax runs over the `M` rows, `F = 2M`. Each of `H` key heads has parameters of its
/// own, or one set serves all (`H` = 1).
#[derive(Clone, Debug)]
pub struct Hedgehog {
    /// `a`, shape `(H, M, D)`.
    queries: Tensor,
    /// `b`, shape `(H, M, D)`.
    keys: Tensor,
}

impl Hedgehog {
    /// Starts both sides at the rows `(M, D)`.
    ///
    /// # Errors
    /// If `rows` has another rank than 2, or M or D is 0.
    pub fn new(rows: &Tensor) -> Result<Self> {
        let rows = rows.detach().unsqueeze(0)?.contiguous()?;
        Self { queries: rows.clone(), keys: rows }.checked()
    }

    fn checked(self) -> Result<Self> {
        let Ok((h, m, d)) = self.queries.dims3() else {
            bail!("queries of hedgehog features have shape {:?}; it must be (heads, M, D)", self.queries.dims())
        };
        if h * m * d == 0 || self.keys.dims() != self.queries.dims() {
            bail!(
                "queries and keys of hedgehog features have shapes {:?} and {:?}; they must be the same (heads, M, D), none of it 0",
                self.queries.dims(),
                self.keys.dims()
            );
        }
        Ok(self)
    }
}

/// Computes `log [softmax(w x), softmax(−w x)]`.
fn features(x: &Tensor, w: &Tensor) -> Result<Features> {
    let linear = project_by_head(x, w)?;
    let log_softmax = |x: &Tensor| candle_nn::ops::log_softmax(x, D::Minus1);
    Ok(Features::Log(Tensor::cat(&[log_softmax(&linear)?, log_softmax(&linear.neg()?)?], D::Minus1)?))
}

impl FeatureMap for Hedgehog {
    fn input_dim(&self) -> usize {
        self.queries.dims()[2]
    }

    fn feature_dim(&self) -> usize {
        2 * self.queries.dims()[1]
    }

    fn heads(&self) -> usize {
        self.queries.dims()[0]
    }

    fn features(&self, x: &Tensor) -> Result<Features> {
        features(x, &self.queries)
    }

    fn key_features(&self, y: &Tensor) -> Result<Features> {
        features(y, &self.keys)
    }

    fn parameters(&self) -> Vec<(&'static str, &Tensor)> {
        vec![("queries", &self.queries), ("keys", &self.keys)]
    }

    fn with_parameters(&self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<Box<dyn FeatureMap>> {
        let need = |name: &str| match get(name) {
            Some(tensor) => Ok(tensor),
            None => bail!("{name} is missing among the parameters of hedgehog features"),
        };
        let other = Self { queries: need("queries")?, keys: need("keys")? }.checked()?;
        if other.queries.dims()[1..] != self.queries.dims()[1..] {
            bail!(
                "queries of hedgehog features are {:?}; they must be {:?}",
                other.queries.dims(),
                self.queries.dims()
            );
        }
        Ok(Box::new(other))
    }
}
