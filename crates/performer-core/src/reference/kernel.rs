//! The kernels κ(x, y), their values and their gradients.

use super::features::{fitted_log_features, generic_features, log_features};
use super::scalar::{Dual, Scalar};
use crate::features::FeatureMapKind;

/// The kernel κ that weighs the values.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Kernel<'a> {
    /// `e^{x·y}`: exact attention.
    Softmax,
    /// 1: means of the values, whatever queries and keys are.
    Uniform,
    /// `φ(x)·φ(y)`.
    Features {
        /// φ.
        map: FeatureMapKind,
        /// Ω, `(M, D)`, the same for every head; empty for the maps without one.
        projection: &'a [f64],
        /// b, `(M)`, for the phase maps; empty for the others.
        offsets: &'a [f64],
    },
    /// `φ(x)·φ'(y)` of exponential features that were fitted or trained, where queries have a map
    /// φ and keys another, φ'; [`Kernel::Features`] has one map for both.
    Fitted {
        /// φ.
        queries: FittedSide<'a>,
        /// φ', with as many features.
        keys: FittedSide<'a>,
    },
}

/// The features of one side, queries or keys, that were fitted or trained.
///
/// With M features, a row x of D numbers, scaled by `D^-1/4`, has the features
/// `φ(x)_r = e^{a_r·x + w_r − ‖Gx‖²/2} / √M`. All heads of a call share the parameters, so heads
/// that have their own take a call each.
#[derive(Clone, Copy, Debug)]
pub struct FittedSide<'a> {
    /// The rows a, `(M, D)`.
    pub rows: &'a [f64],
    /// w, `(M)`; empty for zeros.
    pub log_weights: &'a [f64],
    /// G, `(D, D)`, by which the length of x is measured; empty for the identity.
    pub metric: &'a [f64],
}

/// Which of its two arguments a kernel reads a row as.
#[derive(Clone, Copy)]
pub(super) enum Side {
    Query,
    Key,
}

impl Kernel<'_> {
    /// Computes κ(x, y) of two rows already scaled by `D^-1/4`.
    pub fn evaluate(&self, x: &[f64], y: &[f64]) -> f64 {
        self.form().combine(&self.code(Side::Query, x), &self.code(Side::Key, y), 0.0)
    }

    /// The form in which κ is computed.
    pub(super) fn form(&self) -> Form {
        match self {
            Kernel::Softmax => Form::ExpOfDot,
            Kernel::Uniform | Kernel::Fitted { .. } => Form::SumOfExps,
            Kernel::Features { map, .. } => match map {
                FeatureMapKind::Positive
                | FeatureMapKind::Hyperbolic
                | FeatureMapKind::Optimal
                | FeatureMapKind::Dense
                | FeatureMapKind::Learned => Form::SumOfExps,
                _ => Form::Dot,
            },
        }
    }

    /// Computes the code of a scaled row: what κ needs to know of it as a query or as a key; see
    /// [`Form`].
    pub(super) fn code<S: Scalar>(&self, side: Side, x: &[S]) -> Vec<S> {
        match *self {
            Kernel::Softmax => x.to_vec(),
            Kernel::Uniform => vec![S::from(0.0)],
            Kernel::Features { map, projection, offsets } => match self.form() {
                Form::SumOfExps => log_features(map, projection, x),
                _ => generic_features(map, projection, offsets, x),
            },
            Kernel::Fitted { queries, keys } => match side {
                Side::Query => fitted_log_features(queries, x),
                Side::Key => fitted_log_features(keys, x),
            },
        }
    }

    /// Computes the gradient of a loss with respect to the row x, from that with respect to
    /// `code(side, x)`: one pass of dual numbers for each element of x.
    pub(super) fn code_backward(&self, side: Side, x: &[f64], grad_code: &[f64]) -> Vec<f64> {
        // A row without influence has no gradient, whatever it holds: padding may be NaN.
        if grad_code.iter().all(|&g| g == 0.0) {
            return vec![0.0; x.len()];
        }
        let mut dual: Vec<Dual> = x.iter().map(|&x| Dual::from(x)).collect();
        let mut grad = Vec::new();
        for d in 0..x.len() {
            dual[d].derivative = 1.0;
            let code = self.code(side, &dual);
            dual[d].derivative = 0.0;
            grad.push(code.iter().zip(grad_code).map(|(c, g)| c.derivative * g).sum());
        }
        grad
    }
}

/// `Form` says how κ(x, y) is computed from the codes a of x and b of y.
///
/// The two forms with exponentials take them only of what both codes make together, less a constant
/// of the query's row, so that inputs of any size stay in the range of `f64`; the constant cancels
/// between numerator and denominator.
#[derive(Clone, Copy)]
pub(super) enum Form {
    /// `e^{a·b}`, where codes are the rows themselves.
    ExpOfDot,
    /// `Σ_r e^{a_r + b_r}`, where codes are ln φ.
    SumOfExps,
    /// `a·b`, where codes are φ.
    Dot,
}

impl Form {
    /// Computes the largest exponent in κ(x, y); 0 where there is none.
    pub(super) fn exponent(self, a: &[f64], b: &[f64]) -> f64 {
        match self {
            Form::ExpOfDot => dot(a, b),
            Form::SumOfExps => (a.iter().zip(b)).fold(f64::NEG_INFINITY, |max, (a, b)| max.max(a + b)),
            Form::Dot => 0.0,
        }
    }

    /// Computes `e^-shift κ(x, y)`.
    pub(super) fn combine(self, a: &[f64], b: &[f64], shift: f64) -> f64 {
        match self {
            Form::ExpOfDot => (dot(a, b) - shift).exp(),
            Form::SumOfExps => a.iter().zip(b).map(|(a, b)| (a + b - shift).exp()).sum(),
            Form::Dot => dot(a, b) * (-shift).exp(),
        }
    }

    /// Adds to `grad_a` and `grad_b` the gradients of `grad · combine(a, b, shift)`.
    pub(super) fn combine_backward(
        self,
        (a, b): (&[f64], &[f64]),
        shift: f64,
        grad: f64,
        (grad_a, grad_b): (&mut [f64], &mut [f64]),
    ) {
        match self {
            Form::ExpOfDot => {
                let kernel = (dot(a, b) - shift).exp();
                add_scaled(grad_a, grad * kernel, b);
                add_scaled(grad_b, grad * kernel, a);
            }
            Form::SumOfExps => {
                for r in 0..a.len() {
                    let term = grad * (a[r] + b[r] - shift).exp();
                    grad_a[r] += term;
                    grad_b[r] += term;
                }
            }
            Form::Dot => {
                let grad = grad * (-shift).exp();
                add_scaled(grad_a, grad, b);
                add_scaled(grad_b, grad, a);
            }
        }
    }
}

/// Computes `a·b`.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Adds `factor · row` to `sum`.
pub(super) fn add_scaled(sum: &mut [f64], factor: f64, row: &[f64]) {
    for (sum, value) in sum.iter_mut().zip(row) {
        *sum += factor * value;
    }
}
