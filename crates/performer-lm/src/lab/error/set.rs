//! This module measures several problems together: Gaussian inputs, or the heads of a model.

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use performer_core::{
    ProjectionKind, Radii,
    features::fit::Moments,
    projection::{derive_seed, draw_tensor},
};
use rayon::prelude::*;

use super::{
    estimator::Estimator,
    problem::{Errors, Problem},
};

/// About how many queries of each head are compared.
pub(crate) const QUERIES: usize = 128;

/// A `Set` holds the problems over which errors are averaged.
pub(crate) struct Set {
    /// Name of the problems, such as `unit Gaussian`.
    pub(crate) name: String,
    pub(crate) problems: Vec<Problem>,
}

impl Set {
    /// Draws one bidirectional head of `tokens` queries, keys and values with normal entries; those
    /// of queries and keys have this standard deviation.
    pub(crate) fn gaussian(name: &str, tokens: usize, d: usize, deviation: f64, seed: u64) -> Result<Self> {
        let [q, k, v] = gaussian(tokens, d, seed)?;
        let (q, k) = ((q * deviation)?, (k * deviation)?);
        let moments = moments(&q, &k)?;
        let problem = Problem::new([&q, &k, &v], false, QUERIES, moments)?;
        Ok(Self { name: name.into(), problems: vec![problem] })
    }

    /// Returns the dimension of the heads.
    pub(crate) fn head_dim(&self) -> usize {
        self.problems[0].head_dim()
    }

    /// Returns the errors of each draw in each problem: `[draw][problem]`.
    pub(crate) fn all(&self, estimator: &Estimator, m: usize, draws: usize, seed: u64) -> Result<Vec<Vec<Errors>>> {
        self.windowed(estimator, m, 0, draws, seed)
    }

    /// Does what [`Self::all`] does, with exact attention to the last `window` keys.
    pub(crate) fn windowed(
        &self,
        estimator: &Estimator,
        m: usize,
        window: usize,
        draws: usize,
        seed: u64,
    ) -> Result<Vec<Vec<Errors>>> {
        // A map without randomness gives the same errors every time.
        let draws = if estimator.map.is_random() { draws } else { 1 };
        self.each(draws, |draw, at| Ok(self.problems[at].errors(&self.rows(estimator, m, window, draw, at, seed)?)?))
    }

    /// Returns the errors of each draw, the mean over problems.
    pub(crate) fn errors(&self, estimator: &Estimator, m: usize, draws: usize, seed: u64) -> Result<Vec<Errors>> {
        Ok(self.all(estimator, m, draws, seed)?.iter().map(|errors| Errors::mean(errors)).collect())
    }

    /// Does what [`Self::all`] does, for attention averaged over `redraws` draws.
    pub(crate) fn averaged(
        &self,
        estimator: &Estimator,
        m: usize,
        redraws: usize,
        draws: usize,
        seed: u64,
    ) -> Result<Vec<Vec<Errors>>> {
        let one = |draw: usize, at: usize| -> Result<Errors> {
            let mut sum = self.rows(estimator, m, 0, draw, at, seed)?;
            for again in 1..redraws {
                sum = (sum + self.rows(estimator, m, 0, draw, at, derive_seed(seed, again as u64))?)?;
            }
            Ok(self.problems[at].errors(&(sum / redraws as f64)?)?)
        };
        self.each(draws, one)
    }

    /// Calls `one(draw, problem)` for each draw and problem, in parallel.
    fn each(&self, draws: usize, one: impl Fn(usize, usize) -> Result<Errors> + Sync) -> Result<Vec<Vec<Errors>>> {
        let count = self.problems.len();
        let flat: Vec<Errors> =
            (0..draws * count).into_par_iter().map(|i| one(i / count, i % count)).collect::<Result<_>>()?;
        Ok(flat.chunks(count).map(<[Errors]>::to_vec).collect())
    }

    /// Returns the errors of uniform attention, the mean over problems.
    pub(crate) fn uniform(&self) -> Result<Errors> {
        let all = self.problems.iter().map(|problem| Ok(problem.uniform()?));
        Ok(Errors::mean(&all.collect::<Result<Vec<_>>>()?))
    }

    fn rows(
        &self,
        estimator: &Estimator,
        m: usize,
        window: usize,
        draw: usize,
        at: usize,
        seed: u64,
    ) -> Result<Tensor> {
        let problem = &self.problems[at];
        let seed = derive_seed(derive_seed(seed, draw as u64), at as u64);
        let map = estimator.build(m, problem.head_dim(), seed, &problem.moments)?;
        Ok(problem.estimate(&*map, window)?)
    }
}

/// Draws queries, keys and values with unit normal entries, shape `(T, D)` each, in f64.
pub(super) fn gaussian(tokens: usize, d: usize, seed: u64) -> Result<[Tensor; 3]> {
    let draw = |stream| {
        let seed = derive_seed(seed, stream);
        draw_tensor(ProjectionKind::Gaussian, Radii::Chi, tokens, d, seed, DType::F64, &Device::Cpu)
    };
    Ok([draw(1)?, draw(2)?, draw(3)?])
}

/// Computes the moments of one head's queries and keys, shape `(T, D)` each.
pub(super) fn moments(q: &Tensor, k: &Tensor) -> Result<Moments> {
    let mut moments = Moments::new(1, q.dim(1)?)?;
    moments.add(&q.unsqueeze(0)?.unsqueeze(0)?, &k.unsqueeze(0)?.unsqueeze(0)?)?;
    Ok(moments)
}
