//! This module measures how far two sets of embeddings of the same sentences agree.

use serde::Serialize;

/// An `Agreement` compares one set of unit vectors with another.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Agreement {
    /// The mean cosine between the two embeddings of a sentence.
    pub(crate) mean_cosine: f64,
    /// The smallest cosine between the two embeddings of a sentence.
    pub(crate) min_cosine: f64,
    /// Spearman's rank correlation of the similarities of all pairs of sentences.
    pub(crate) rank_correlation: f64,
    /// Share of the sentences that have the same nearest neighbour in both sets.
    pub(crate) same_neighbour: f64,
    /// The largest difference between corresponding numbers.
    pub(crate) max_difference: f64,
}

impl Agreement {
    /// Compares two sets of at least three sentences.
    pub(crate) fn new(original: &[Vec<f32>], other: &[Vec<f32>]) -> Self {
        let cosines: Vec<f64> = original.iter().zip(other).map(|(a, b)| dot(a, b)).collect();
        let numbers = original.iter().flatten().zip(other.iter().flatten());
        let same = (0..original.len()).filter(|&i| neighbour(original, i) == neighbour(other, i)).count();
        Self {
            mean_cosine: mean(&cosines),
            min_cosine: cosines.iter().copied().fold(f64::INFINITY, f64::min),
            rank_correlation: correlation(&ranks(&similarities(original)), &ranks(&similarities(other))),
            same_neighbour: same as f64 / original.len() as f64,
            max_difference: numbers.map(|(a, b)| f64::from((a - b).abs())).fold(0.0, f64::max),
        }
    }

    /// Returns the means over draws of the features, but the worst of `min_cosine` and
    /// `max_difference`.
    pub(crate) fn over(draws: &[Self]) -> Self {
        let average = |field: fn(&Self) -> f64| mean(&draws.iter().map(field).collect::<Vec<_>>());
        Self {
            mean_cosine: average(|a| a.mean_cosine),
            min_cosine: draws.iter().map(|a| a.min_cosine).fold(f64::INFINITY, f64::min),
            rank_correlation: average(|a| a.rank_correlation),
            same_neighbour: average(|a| a.same_neighbour),
            max_difference: draws.iter().map(|a| a.max_difference).fold(0.0, f64::max),
        }
    }
}

/// Computes `a·b`, the cosine of unit vectors.
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn mean(x: &[f64]) -> f64 {
    x.iter().sum::<f64>() / x.len() as f64
}

/// Computes the similarity of every pair of two sentences.
fn similarities(embeddings: &[Vec<f32>]) -> Vec<f64> {
    let pairs = (0..embeddings.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    pairs.map(|(i, j)| dot(&embeddings[i], &embeddings[j])).collect()
}

/// Returns the sentence that is most similar to sentence `i`.
fn neighbour(embeddings: &[Vec<f32>], i: usize) -> Option<usize> {
    let similarity = |j: &usize| dot(&embeddings[i], &embeddings[*j]);
    (0..embeddings.len()).filter(|&j| j != i).max_by(|a, b| similarity(a).total_cmp(&similarity(b)))
}

/// Returns the rank of each number.
fn ranks(x: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..x.len()).collect();
    order.sort_by(|&a, &b| x[a].total_cmp(&x[b]));
    let mut ranks = vec![0.0; x.len()];
    for (rank, i) in order.into_iter().enumerate() {
        ranks[i] = rank as f64;
    }
    ranks
}

/// Computes Pearson's correlation.
fn correlation(x: &[f64], y: &[f64]) -> f64 {
    let (mx, my) = (mean(x), mean(y));
    let sum = |f: &dyn Fn(f64, f64) -> f64| x.iter().zip(y).map(|(x, y)| f(x - mx, y - my)).sum::<f64>();
    sum(&|x, y| x * y) / (sum(&|x, _| x * x) * sum(&|_, y| y * y)).sqrt()
}
