//! This module computes one head's exact attention, and the errors of an estimate of it.

use candle_core::{D, DType, Device, Result, Tensor};
use performer_core::{FeatureMap, features::fit::Moments};
use serde::Serialize;

use crate::feature_rows::{FeatureRows, normalised};

/// A `Problem` holds queries, keys and values of one head, with their exact attention.
pub(crate) struct Problem {
    /// Scaled queries `D^-¼ q` at which rows are compared, shape `(Tq, D)`.
    x: Tensor,
    /// Scaled keys, shape `(Tk, D)`.
    y: Tensor,
    v: Tensor,
    /// 1 where a query sees a key, 0 elsewhere, shape `(Tq, Tk)`.
    visible: Tensor,
    /// How many tokens each key lies before each query, shape `(Tq, Tk)`.
    distance: Tensor,
    /// Rows of exact attention, shape `(Tq, Tk)`.
    weights: Tensor,
    /// The exact output, `weights · v`.
    output: Tensor,
    /// The moments to which features are fitted.
    pub(crate) moments: Moments,
}

/// `Errors` are the errors of an estimate of attention.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Errors {
    /// Total variation between rows, `½ Σ_j |p_j − p̂_j|`, the mean over queries: 0 if equal, 1 if
    /// disjoint, above 1 only with negative weights.
    pub(crate) rows: f64,
    /// Relative error of the outputs of all queries, `‖O − Ô‖ / ‖O‖`.
    pub(crate) output: f64,
}

impl Errors {
    /// Returns the mean over problems.
    pub(crate) fn mean(all: &[Self]) -> Self {
        let n = all.len() as f64;
        Self {
            rows: all.iter().map(|e| e.rows).sum::<f64>() / n,
            output: all.iter().map(|e| e.output).sum::<f64>() / n,
        }
    }
}

impl Problem {
    /// Makes the problem of one head's `q`, `k`, `v`, shape `(T, D)` each, as attention gets them,
    /// compared at about `queries` of its queries.
    pub(crate) fn new([q, k, v]: [&Tensor; 3], causal: bool, queries: usize, moments: Moments) -> Result<Self> {
        let (t, d) = q.dims2()?;
        let scale = (d as f64).powf(-0.25);
        let double = |x: &Tensor| x.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.contiguous();
        let (y, v) = ((double(k)? * scale)?, double(v)?);
        // The first query of a causal head sees one key only, so there is nothing to estimate.
        let first = usize::from(causal && t > 1);
        let step = (t - first).div_ceil(queries.max(1));
        let at: Vec<usize> = (first..t).step_by(step).collect();
        let positions = Tensor::new(at.iter().map(|&i| i as u32).collect::<Vec<_>>(), &Device::Cpu)?;
        let x = (double(q)?.index_select(&positions, 0)? * scale)?;
        let distances: Vec<f64> = at.iter().flat_map(|&i| (0..t).map(move |j| i as f64 - j as f64)).collect();
        let distance = Tensor::from_vec(distances, (at.len(), t), &Device::Cpu)?;
        let visible = if causal { distance.ge(0.0)?.to_dtype(DType::F64)? } else { distance.ones_like()? };
        let logits = x.matmul(&y.t()?)?;
        let weights = normalised(&(stable(&logits)?.exp()? * &visible)?)?;
        let output = weights.matmul(&v)?;
        Ok(Self { x, y, v, visible, distance, weights, output, moments })
    }

    /// Returns the dimension of the head.
    pub(crate) fn head_dim(&self) -> usize {
        self.x.dims()[1]
    }

    /// Returns the rows of attention by estimated kernels, shape `(Tq, Tk)`; kernels of the last
    /// `window` keys are exact.
    pub(crate) fn estimate(&self, map: &dyn FeatureMap, window: usize) -> Result<Tensor> {
        let (queries, keys, log_scale) = scaled(map, &self.x, &self.y)?;
        let mut kernel = (queries.matmul(&keys.t()?)? * &self.visible)?;
        if window > 0 {
            let near = (self.distance.lt(window as f64)?.to_dtype(DType::F64)? * &self.visible)?;
            let logits = self.x.matmul(&self.y.t()?)?;
            let hidden = near.affine(-1.0, 1.0)?.affine(-1e300, 0.0)?;
            let shift = (&logits + &hidden)?.max_keepdim(1)?.maximum(&log_scale)?;
            let exact = ((logits.broadcast_sub(&shift)? + hidden)?.exp()? * &near)?;
            let far = (kernel * near.affine(-1.0, 1.0)?)?;
            kernel = (exact + far.broadcast_mul(&(log_scale - shift)?.exp()?)?)?;
        }
        normalised(&kernel)
    }

    /// Computes the errors of rows of attention, shape `(Tq, Tk)`.
    pub(crate) fn errors(&self, rows: &Tensor) -> Result<Errors> {
        let queries = rows.dims()[0] as f64;
        let variation = 0.5 * (rows - &self.weights)?.abs()?.sum_all()?.to_scalar::<f64>()? / queries;
        let norm = |t: &Tensor| -> Result<f64> { Ok(t.sqr()?.sum_all()?.to_scalar::<f64>()?.sqrt()) };
        let output = norm(&(rows.matmul(&self.v)? - &self.output)?)? / norm(&self.output)?.max(1e-300);
        Ok(Errors { rows: variation, output })
    }

    /// Returns the errors of attention that weighs all keys equally: an estimate with larger errors
    /// carries no information.
    pub(crate) fn uniform(&self) -> Result<Errors> {
        self.errors(&normalised(&self.visible)?)
    }
}

/// Subtracts its largest entry from each row.
fn stable(logits: &Tensor) -> Result<Tensor> {
    logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?)
}

/// Returns the features of queries `(Tq, F)` and of keys `(Tk, F)`, scaled to the range of f64, and
/// for each query the logarithm of the factor that its features then lack.
pub(super) fn scaled(map: &dyn FeatureMap, x: &Tensor, y: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let rows = FeatureRows::new(map.features(&x.unsqueeze(0)?)?, map.key_features(&y.unsqueeze(0)?)?)?;
    Ok((rows.queries.squeeze(0)?, rows.keys.squeeze(0)?, rows.log_scale.squeeze(0)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use performer_core::{
        Attention, FeatureMapKind, Mask, ProjectionKind, Radii, Softmax, features::RandomParameters,
        projection::draw_tensor,
    };

    const T: usize = 13;
    const DIM: usize = 3;

    fn normal(seed: u64) -> Tensor {
        draw_tensor(ProjectionKind::Gaussian, Radii::Chi, T, DIM, seed, DType::F64, &Device::Cpu).unwrap()
    }

    fn problem(causal: bool) -> Problem {
        let [q, k, v] = [1, 2, 3].map(normal);
        let mut moments = Moments::new(1, DIM).unwrap();
        let heads = |x: &Tensor| x.reshape((1, 1, T, DIM)).unwrap();
        moments.add(&heads(&q), &heads(&k)).unwrap();
        Problem::new([&q, &k, &v], causal, T, moments).unwrap()
    }

    fn positive() -> Box<dyn FeatureMap> {
        let projection =
            draw_tensor(ProjectionKind::Orthogonal, Radii::Chi, 8, DIM, 4, DType::F64, &Device::Cpu).unwrap();
        let random = RandomParameters { projection, offsets: None };
        FeatureMapKind::Positive.build(DIM, Some(&random), &Device::Cpu).unwrap()
    }

    fn assert_close(a: &Tensor, b: &Tensor) {
        let worst = (a - b).unwrap().abs().unwrap().max_all().unwrap().to_scalar::<f64>().unwrap();
        assert!(worst < 1e-12, "{worst}");
    }

    #[test]
    fn exact_attention_is_that_of_the_crate() {
        let [q, k, v] = [1, 2, 3].map(|seed| normal(seed).reshape((1, 1, T, DIM)).unwrap());
        for (causal, mask, first) in [(true, Mask::causal(), 1), (false, Mask::full(), 0)] {
            let expected = Softmax::new()
                .forward(performer_core::Inputs::new(&q, &k, &v), &mask)
                .unwrap()
                .reshape((T, DIM))
                .unwrap();
            assert_close(&problem(causal).output, &expected.narrow(0, first, T - first).unwrap());
        }
    }

    #[test]
    fn estimates_are_normalised_kernels() {
        for causal in [true, false] {
            let p = problem(causal);
            let map = positive();
            let kernel = (map.kernel(&p.x, &p.y).unwrap() * &p.visible).unwrap();
            let expected = kernel.broadcast_div(&kernel.sum_keepdim(1).unwrap()).unwrap();
            assert_close(&p.estimate(&*map, 0).unwrap(), &expected);
        }
    }

    #[test]
    fn a_window_over_all_is_exact_and_a_small_one_keeps_the_kernel() {
        let p = problem(true);
        let map = positive();
        let all = p.errors(&p.estimate(&*map, T).unwrap()).unwrap();
        assert!(all.rows < 1e-12 && all.output < 1e-12, "{all:?}");
        let exact = p.x.matmul(&p.y.t().unwrap()).unwrap().exp().unwrap();
        let near = p.distance.lt(4.0).unwrap();
        let kernel = near.where_cond(&exact, &map.kernel(&p.x, &p.y).unwrap()).unwrap();
        let kernel = (kernel * &p.visible).unwrap();
        let expected = kernel.broadcast_div(&kernel.sum_keepdim(1).unwrap()).unwrap();
        assert_close(&p.estimate(&*map, 4).unwrap(), &expected);
    }

    #[test]
    fn uniform_attention_is_the_mean_of_values() {
        let p = problem(false);
        let mean = p.v.mean_keepdim(0).unwrap();
        let off = p.output.broadcast_sub(&mean).unwrap().sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
        let norm = p.output.sqr().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
        assert!((p.uniform().unwrap().output - (off / norm).sqrt()).abs() < 1e-12);
    }
}
