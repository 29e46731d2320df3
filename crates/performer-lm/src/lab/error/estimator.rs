//! This module describes the estimators that are compared: a feature map, how its rows are drawn,
//! and what it is fitted to.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use performer_core::{
    FeatureMap, FeatureMapKind, ProjectionKind, Radii,
    features::{
        RandomParameters,
        fit::{Moments, Options, fit},
    },
    projection::{draw_offsets, draw_tensor},
};

use super::unsigned;

/// `Rows` says how the rows of Ω are drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Rows {
    /// Rows as `performer-core` draws them.
    Drawn(ProjectionKind, Radii),
    /// Orthogonal blocks from a QR decomposition whose signs are not corrected.
    Unsigned,
}

/// An `Estimator` estimates attention by a feature map.
#[derive(Clone, Debug)]
pub(crate) struct Estimator {
    pub(crate) name: &'static str,
    pub(crate) map: FeatureMapKind,
    pub(crate) rows: Rows,
    /// `(centred, balanced)` if the map is fitted to the moments of queries and keys.
    pub(crate) fitted: Option<(bool, bool)>,
}

impl Estimator {
    /// Makes an estimator with orthogonal rows of χ-distributed lengths.
    pub(crate) const fn orthogonal(name: &'static str, map: FeatureMapKind) -> Self {
        Self { name, map, rows: Rows::Drawn(ProjectionKind::Orthogonal, Radii::Chi), fitted: None }
    }

    /// Returns the estimator with rows drawn in another way.
    pub(crate) const fn drawn(self, projection: ProjectionKind, radii: Radii) -> Self {
        Self { rows: Rows::Drawn(projection, radii), ..self }
    }

    /// Returns the estimator with rows of a QR decomposition without the sign correction.
    pub(crate) const fn unsigned(self) -> Self {
        Self { rows: Rows::Unsigned, ..self }
    }

    /// Returns the estimator fitted to moments.
    pub(crate) const fn fitted(self, centre: bool, balance: bool) -> Self {
        Self { fitted: Some((centre, balance)), ..self }
    }

    /// Returns the number of rows `M` that makes `features` features of dimension `d`, or `None` if
    /// none does. Maps without rows have a fixed number of features; see [`Self::fixed`].
    pub(crate) fn rows_for(&self, features: usize, d: usize) -> Option<usize> {
        match self.map {
            FeatureMapKind::Hyperbolic | FeatureMapKind::Trigonometric | FeatureMapKind::Hedgehog => {
                Some(features / 2).filter(|&m| m > 0)
            }
            FeatureMapKind::HermiteTail => features.checked_sub(taylor(d)).filter(|&m| m > 0),
            map if map.is_random() => Some(features),
            _ => None,
        }
    }

    /// Returns the number of features of a map without rows.
    pub(crate) fn fixed(&self, d: usize) -> Option<usize> {
        let map = (!self.map.is_random()).then(|| self.map.build(d, None, &Device::Cpu));
        map.and_then(|map| map.ok()).map(|map| map.feature_dim())
    }

    /// Builds the map with `m` rows of dimension `d`.
    pub(crate) fn build(&self, m: usize, d: usize, seed: u64, moments: &Moments) -> Result<Box<dyn FeatureMap>> {
        if !self.map.is_random() {
            return Ok(self.map.build(d, None, &Device::Cpu)?);
        }
        let projection = match self.rows {
            Rows::Drawn(kind, radii) => draw_tensor(kind, radii, m, d, seed, DType::F64, &Device::Cpu)?,
            Rows::Unsigned => Tensor::from_vec(unsigned::draw(m, d, seed)?, (m, d), &Device::Cpu)?,
        };
        if let Some((centre, balance)) = self.fitted {
            return Ok(Box::new(fit(
                &projection,
                moments,
                Options::new(self.map).with_centre(centre).with_balance(balance),
            )?));
        }
        let offsets = match self.map.has_offsets() {
            true => Some(Tensor::new(draw_offsets(m, seed)?, &Device::Cpu)?),
            false => None,
        };
        Ok(self.map.build(d, Some(&RandomParameters { projection, offsets }), &Device::Cpu)?)
    }
}

/// Returns the number of features of Taylor-2.
fn taylor(d: usize) -> usize {
    1 + d + d * (d + 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_are_as_many_as_asked_for() {
        let d = 6;
        let mut moments = Moments::new(1, d).unwrap();
        let rows = draw_tensor(ProjectionKind::Gaussian, Radii::Chi, 50, d, 1, DType::F64, &Device::Cpu).unwrap();
        let rows = rows.reshape((1, 1, 50, d)).unwrap();
        moments.add(&rows, &rows).unwrap();
        for map in FeatureMapKind::NAMED {
            let estimator = Estimator::orthogonal("", map);
            let (m, expected) = match estimator.fixed(d) {
                Some(fixed) => (0, fixed),
                None => (estimator.rows_for(64, d).unwrap(), 64),
            };
            assert_eq!(estimator.build(m, d, 1, &moments).unwrap().feature_dim(), expected, "{map}");
        }
        assert_eq!(Estimator::orthogonal("", FeatureMapKind::HermiteTail).rows_for(taylor(d), d), None);
        let fitted = Estimator::orthogonal("", FeatureMapKind::Dense).fitted(true, true);
        assert_eq!(fitted.build(10, d, 1, &moments).unwrap().feature_dim(), 10);
    }
}
