//! Every feature map, written once over [`Scalar`] straight from its formula.

use super::kernel::FittedSide;
use super::scalar::Scalar;
use crate::features::{FeatureMapKind, RELU_EPSILON};

/// Computes φ(x) of one row (see [`FeatureMapKind`] for the maps).
///
/// `x` is a query or key of head dimension D, *already scaled* by `D^-1/4`; `projection` is Ω,
/// `(M, D)` row-major (empty for the maps that have none); `offsets` are the M phases b of the two
/// phase maps (empty for the others).
///
/// # Panics
///
/// If the projection or the offsets are missing, superfluous, or do not fit `x`.
pub fn features(map: FeatureMapKind, projection: &[f64], offsets: &[f64], x: &[f64]) -> Vec<f64> {
    generic_features(map, projection, offsets, x)
}

/// Computes [`features`] over any [`Scalar`].
pub(super) fn generic_features<S: Scalar>(map: FeatureMapKind, projection: &[f64], offsets: &[f64], x: &[S]) -> Vec<S> {
    check(map, projection, offsets, x.len());
    // ω_r·x for each row r of the projection.
    let projected: Vec<S> = projection.chunks(x.len()).map(|omega| dot_constant(omega, x)).collect();
    let m = projected.len() as f64;
    let each = |feature: &dyn Fn(S) -> S| projected.iter().map(|&p| feature(p)).collect::<Vec<S>>();
    // e^{|x|²/2}
    let growth = || (S::from(0.5) * squared_norm(x)).exp();

    match map {
        FeatureMapKind::Positive
        | FeatureMapKind::Hyperbolic
        | FeatureMapKind::Optimal
        | FeatureMapKind::Dense
        | FeatureMapKind::Learned => log_features(map, projection, x).into_iter().map(S::exp).collect(),
        FeatureMapKind::Trigonometric => {
            let scale = S::from(m.powf(-0.5)) * growth();
            let mut out = each(&|p| scale * p.sin());
            out.extend(each(&|p| scale * p.cos()));
            out
        }
        FeatureMapKind::Phase | FeatureMapKind::GaussianPhase => {
            let mut scale = S::from((2.0 / m).sqrt());
            if map == FeatureMapKind::Phase {
                scale = scale * growth();
            }
            (projected.iter().zip(offsets)).map(|(&p, &b)| scale * (p + S::from(b)).cos()).collect()
        }
        FeatureMapKind::Relu => each(&|p| {
            let relu = if p.value() > 0.0 { p } else { S::from(0.0) };
            S::from(m.powf(-0.5)) * relu + S::from(RELU_EPSILON)
        }),
        FeatureMapKind::Hedgehog => {
            let mut out = Vec::new();
            for sign in [1.0, -1.0] {
                let signed: Vec<S> = projected.iter().map(|&p| S::from(sign) * p).collect();
                let max = signed.iter().map(|p| p.value()).fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<S> = signed.iter().map(|&p| (p - S::from(max)).exp()).collect();
                let sum = powers.iter().fold(S::from(0.0), |sum, &p| sum + p);
                out.extend(powers.iter().map(|&p| p * sum.recip()));
            }
            out
        }
        FeatureMapKind::Elu => x
            .iter()
            // elu(x) + 1 = x + 1 above zero and e^x − 1 + 1 below.
            .map(|&x| if x.value() > 0.0 { x + S::from(1.0) } else { x.exp() })
            .collect(),
        FeatureMapKind::Exp => x.iter().map(|&x| x.exp()).collect(),
        FeatureMapKind::Taylor2 => taylor2(x),
        FeatureMapKind::Limit(n) => limit(n, x),
        FeatureMapKind::HermiteTail => {
            let norm = squared_norm(x);
            let half = S::from(0.5);
            let mut out = taylor2(x);
            out.extend(each(&|p| {
                let hermite = S::from(1.0) + p + half * (p * p - norm);
                S::from(m.powf(-0.5)) * ((p - half * norm).exp() - hermite)
            }));
            out
        }
    }
}

/// Computes ln φ(x) of the maps that are exponentials throughout, where large inputs would overflow
/// φ itself.
pub(super) fn log_features<S: Scalar>(map: FeatureMapKind, projection: &[f64], x: &[S]) -> Vec<S> {
    check(map, projection, &[], x.len());
    let m = (projection.len() / x.len()) as f64;
    let half_norm = S::from(0.5) * squared_norm(x);
    let signs: &[f64] = match map {
        FeatureMapKind::Hyperbolic => &[1.0, -1.0],
        _ => &[1.0],
    };
    // ln of (M)^-½, or of (2M)^-½ with both signs.
    let log_scale = S::from(-0.5 * (signs.len() as f64 * m).ln());
    let a = match map {
        FeatureMapKind::Optimal | FeatureMapKind::Dense => optimal(x.len() as f64),
        _ => 0.0,
    };
    let mut out = Vec::new();
    for &sign in signs {
        for omega in projection.chunks(x.len()) {
            let squares: f64 = omega.iter().map(|w| w * w).sum();
            let constant = a * squares + 0.25 * x.len() as f64 * (1.0 - 4.0 * a).ln();
            let linear = S::from(sign * (1.0 - 4.0 * a).sqrt()) * dot_constant(omega, x);
            out.push(linear - half_norm + log_scale + S::from(constant));
        }
    }
    out
}

/// Computes the logarithms of the features of one side that was fitted or trained; see
/// [`FittedSide`].
pub(super) fn fitted_log_features<S: Scalar>(side: FittedSide<'_>, x: &[S]) -> Vec<S> {
    let dim = x.len();
    assert!(dim > 0 && side.rows.len().is_multiple_of(dim), "rows of fitted features for head dimension {dim}");
    let m = side.rows.len() / dim;
    assert!([0, m].contains(&side.log_weights.len()), "weights of {m} fitted features");
    assert!([0, dim * dim].contains(&side.metric.len()), "a metric for head dimension {dim}");
    let turned: Vec<S> = match side.metric {
        [] => x.to_vec(),
        metric => metric.chunks(dim).map(|row| dot_constant(row, x)).collect(),
    };
    let common = S::from(-0.5) * squared_norm(&turned) + S::from(-0.5 * (m as f64).ln());
    let weight = |r: usize| S::from(side.log_weights.get(r).copied().unwrap_or(0.0));
    side.rows.chunks(dim).enumerate().map(|(r, row)| dot_constant(row, x) + weight(r) + common).collect()
}

/// Computes the `A` of FAVOR++ for unit normal queries and keys, as its paper has it (theorem 3.2):
/// with `s = E‖x + y‖² = 2√D`.
fn optimal(d: f64) -> f64 {
    let s = 2.0 * d.sqrt();
    let rho = (((2.0 * s + d).powi(2) + 8.0 * d * s).sqrt() - 2.0 * s - d) / (4.0 * s);
    (1.0 - 1.0 / rho) / 8.0
}

/// Computes `[1, x_i, x_i²/√2, x_i x_j (i < j)]`, whose dot products are 1 + x·y + (x·y)²/2.
fn taylor2<S: Scalar>(x: &[S]) -> Vec<S> {
    let mut out = vec![S::from(1.0)];
    out.extend(x);
    for i in 0..x.len() {
        out.push(S::from(0.5f64.sqrt()) * x[i] * x[i]);
        for j in i + 1..x.len() {
            out.push(x[i] * x[j]);
        }
    }
    out
}

/// Computes every monomial of degree n in `u = [1, x/√n]` times the root of its multinomial
/// coefficient, whose dot products are `(u(x)·u(y))^n = (1 + x·y/n)^n`.
fn limit<S: Scalar>(n: u32, x: &[S]) -> Vec<S> {
    let mut u = vec![S::from(1.0)];
    u.extend(x.iter().map(|&x| S::from(f64::from(n).powf(-0.5)) * x));
    let mut out = Vec::new();
    monomials(&u, n, 1.0, S::from(1.0), &mut out);
    out
}

/// Pushes `√coefficient · factor · monomial` for the monomials of `degree` in `u`, the multinomial
/// coefficient being built up as a product of binomials: which of the remaining places go to the
/// first variable, and so on.
fn monomials<S: Scalar>(u: &[S], degree: u32, coefficient: f64, factor: S, out: &mut Vec<S>) {
    if degree == 0 {
        out.push(S::from(coefficient.sqrt()) * factor);
        return;
    }
    let Some((&first, rest)) = u.split_first() else {
        return; // Places are left, and no variable to fill them.
    };
    let (mut binomial, mut power) = (1.0, S::from(1.0));
    for exponent in 0..=degree {
        monomials(rest, degree - exponent, coefficient * binomial, factor * power, out);
        binomial *= f64::from(degree - exponent) / f64::from(exponent + 1);
        power = power * first;
    }
}

fn dot_constant<S: Scalar>(omega: &[f64], x: &[S]) -> S {
    let mut sum = S::from(0.0);
    for (&omega, &x) in omega.iter().zip(x) {
        sum = sum + S::from(omega) * x;
    }
    sum
}

fn squared_norm<S: Scalar>(x: &[S]) -> S {
    x.iter().fold(S::from(0.0), |sum, &x| sum + x * x)
}

fn check(map: FeatureMapKind, projection: &[f64], offsets: &[f64], head_dim: usize) {
    assert!(head_dim > 0, "{map:?} features of an empty row");
    if map.is_random() {
        assert!(
            !projection.is_empty() && projection.len().is_multiple_of(head_dim),
            "{map:?} needs a projection (M, {head_dim}), not {} numbers",
            projection.len()
        );
    } else {
        assert!(projection.is_empty(), "{map:?} has no projection");
    }
    let expected = if map.has_offsets() { projection.len() / head_dim } else { 0 };
    assert_eq!(offsets.len(), expected, "number of offsets for {map:?}");
}
