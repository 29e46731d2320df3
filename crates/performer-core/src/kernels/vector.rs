//! Elementwise functions and reductions, on vectors of the machine at hand. Slices are whole
//! vectors long, a multiple of [`LANES`], unless a function says otherwise.

use pulp::Simd;

/// The f32 lanes of one AVX-512 register; narrower machines take several registers.
pub(crate) const LANES: usize = 16;

const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding 1.5·2²³ to a number rounds it to an integer `n`, since such sums have no bits after the
/// point. The 127 more is the bias of f32's exponents: the lowest bits of the sum are then
/// `n + 127`, and shifted left by 23 they are the number `2^n`.
const ROUND: f32 = 12_582_912.0 + 127.0;
/// The coefficients of `e^r ≈ 1 + r + Σ_i SERIES_i r^{5−i}`, a minimax approximation: its relative
/// error is below 1.05e-7 on `|r| ≤ ln 2 / 2`, where Taylor's series to the sixth power has 1.6e-7.
const SERIES: [f32; 4] = [0.008_312_52, 0.041_890_156, 0.166_671_14, 0.499_992_3];

/// Computes `e^x` for `x ≤ 88` to about 2 ulp, without branches. Below −87 the result is 0: near
/// there the normal numbers of f32 end. NaN stays NaN.
///
/// It is `2^n · p(r)` with `x = n ln 2 + r`, `|r| ≤ ln 2 / 2`.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = if x < -87.0 { -87.0 } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    let [a, b, c, d] = SERIES;
    let p = 1.0 + r * (1.0 + r * (d + r * (c + r * (b + r * a))));
    let value = p * f32::from_bits(shifted.to_bits() << 23);
    if x < -87.0 { 0.0 } else { value }
}

/// Computes [`exp`] on vectors, for `x ≤ 88`.
#[inline(always)]
pub(super) fn exp_simd<S: Simd>(simd: S, x: S::f32s) -> S::f32s {
    exp_simd_above(simd, x, simd.splat_f32s(-87.0))
}

/// Computes [`exp_simd`], with 0 below `low ≥ −87`.
#[inline(always)]
fn exp_simd_above<S: Simd>(simd: S, x: S::f32s, low: S::f32s) -> S::f32s {
    let round = simd.splat_f32s(ROUND);
    let shifted = simd.mul_add_e_f32s(x, simd.splat_f32s(std::f32::consts::LOG2_E), round);
    let n = simd.sub_f32s(shifted, round);
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-LN2_HIGH), x);
    let r = simd.mul_add_e_f32s(n, simd.splat_f32s(-LN2_LOW), r);
    let [a, b, c, d] = SERIES;
    let mut p = simd.splat_f32s(a);
    for c in [b, c, d, 1.0, 1.0] {
        p = simd.mul_add_e_f32s(p, r, simd.splat_f32s(c));
    }
    // Below −87 the value computed here is meaningless; 0 is taken instead.
    let scale = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(shifted), simd.splat_u32s(23));
    let value = simd.mul_f32s(p, simd.transmute_f32s_u32s(scale));
    simd.select_f32s(simd.less_than_f32s(x, low), simd.splat_f32s(0.0), value)
}

// The functions below have loops and no closures, which would keep the compiler from using the
// vectors of the machine at hand.

/// Defines an elementwise function `x_i ← expression`, of vectors `x` and perhaps `y`.
macro_rules! elementwise {
    ($(#[$doc:meta])* $name:ident($simd:ident, $x:ident $(, $scalar:ident)*) => $value:expr) => {
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name<S: Simd>($simd: S, $x: &mut [f32] $(, $scalar: f32)*) {
            $(let $scalar = $simd.splat_f32s($scalar);)*
            let (vectors, rest) = S::as_mut_simd_f32s($x);
            debug_assert!(rest.is_empty());
            for to in vectors {
                let $x = *to;
                *to = $value;
            }
        }
    };
    ($(#[$doc:meta])* $name:ident($simd:ident, $x:ident, [$y:ident] $(, $scalar:ident)*) => $value:expr) => {
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name<S: Simd>($simd: S, $x: &mut [f32], $y: &[f32] $(, $scalar: f32)*) {
            $(let $scalar = $simd.splat_f32s($scalar);)*
            let ((vectors, rest), (others, _)) = (S::as_mut_simd_f32s($x), S::as_simd_f32s($y));
            debug_assert!(rest.is_empty());
            for (to, &$y) in vectors.iter_mut().zip(others) {
                let $x = *to;
                *to = $value;
            }
        }
    };
}

elementwise!(/// `a x`
    scale(simd, x, a) => simd.mul_f32s(x, a));
elementwise!(/// `x + a`
    shift(simd, x, a) => simd.add_f32s(x, a));
elementwise!(/// `max(x, 0)`
    rectify(simd, x) => simd.max_f32s(x, simd.splat_f32s(0.0)));
elementwise!(/// `x` where `y > a`, else 0
    where_above(simd, x, [y], a) => simd.select_f32s(simd.less_than_f32s(a, y), x, simd.splat_f32s(0.0)));
elementwise!(/// `a x + b`
    affine(simd, x, a, b) => simd.mul_add_e_f32s(x, a, b));
elementwise!(/// `e^{x − a}` for `x − a ≤ 88`
    exp_minus(simd, x, a) => exp_simd(simd, simd.sub_f32s(x, a)));
elementwise!(/// `e^{x − a}` for `x − a ≤ 88`, and 0 where `x − a` is below `low ≥ −87`
    exp_minus_above(simd, x, a, low) => exp_simd_above(simd, simd.sub_f32s(x, a), low));
elementwise!(/// `x + y`
    add(simd, x, [y]) => simd.add_f32s(x, y));
elementwise!(/// `x − y`
    subtract(simd, x, [y]) => simd.sub_f32s(x, y));
elementwise!(/// `x y`
    multiply(simd, x, [y]) => simd.mul_f32s(x, y));
elementwise!(/// `x y` where `y > 0`, else 0, even if `x` is infinite
    multiply_by_positive(simd, x, [y]) => simd.select_f32s(
        simd.less_than_f32s(simd.splat_f32s(0.0), y), simd.mul_f32s(x, y), simd.splat_f32s(0.0)));
elementwise!(/// `x + (y + a)`
    add_shifted(simd, x, [y], a) => simd.add_f32s(x, simd.add_f32s(y, a)));
elementwise!(/// `x + a y`
    add_scaled(simd, x, [y], a) => simd.mul_add_e_f32s(y, a, x));
elementwise!(/// `b x + a y`
    decay_add(simd, x, [y], b, a) => simd.mul_add_e_f32s(y, a, simd.mul_f32s(x, b)));
elementwise!(/// `e^{x − y}` for `x − y ≤ 88`
    exp_minus_each(simd, x, [y]) => exp_simd(simd, simd.sub_f32s(x, y)));
elementwise!(/// `e^{x − y}` for `x − y ≤ 88`, and 0 where `x − y` is below `low ≥ −87`
    exp_minus_each_above(simd, x, [y], low) => exp_simd_above(simd, simd.sub_f32s(x, y), low));
elementwise!(/// `max(x, y)`
    max_each(simd, x, [y]) => simd.max_f32s(x, y));

/// Computes `x_j ← e^{x_j − y_j − a}` for exponents `≤ 88`, and 0 where the exponent is below
/// `low ≥ −87`.
#[inline(always)]
pub(super) fn exp_minus_both<S: Simd>(simd: S, x: &mut [f32], y: &[f32], a: f32, low: f32) {
    let (a, low) = (simd.splat_f32s(a), simd.splat_f32s(low));
    let ((vectors, rest), (others, _)) = (S::as_mut_simd_f32s(x), S::as_simd_f32s(y));
    debug_assert!(rest.is_empty());
    for (x, &y) in vectors.iter_mut().zip(others) {
        *x = exp_simd_above(simd, simd.sub_f32s(simd.sub_f32s(*x, y), a), low);
    }
}

/// Returns `max_i (x_i − y_i)`.
#[inline(always)]
pub(super) fn max_difference<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let mut max = simd.splat_f32s(f32::NEG_INFINITY);
    for (&x, &y) in S::as_simd_f32s(x).0.iter().zip(S::as_simd_f32s(y).0) {
        max = simd.max_f32s(max, simd.sub_f32s(x, y));
    }
    simd.reduce_max_f32s(max)
}

/// Computes `x ← x + y` and returns `max x_i`, for any length.
#[inline(always)]
pub(super) fn add_max<S: Simd>(simd: S, x: &mut [f32], y: &[f32]) -> f32 {
    let ((vectors, rest), (others, other_rest)) = (S::as_mut_simd_f32s(x), S::as_simd_f32s(y));
    let mut max = simd.splat_f32s(f32::NEG_INFINITY);
    for (x, &y) in vectors.iter_mut().zip(others) {
        *x = simd.add_f32s(*x, y);
        max = simd.max_f32s(max, *x);
    }
    let mut max = simd.reduce_max_f32s(max);
    for (x, y) in rest.iter_mut().zip(other_rest) {
        *x += y;
        max = max.max(*x);
    }
    max
}

/// Defines a reduction of each column of rows `stride` apart, starting from `start`, perhaps with a
/// number for each row. A few columns at a time stay in registers: in memory, each row would wait
/// for the one before to be stored.
macro_rules! columns {
    ($(#[$doc:meta])* $name:ident($simd:ident, $sum:ident, $x:ident $(, $scalar:ident)?) from $start:expr => $value:expr) => {
        $(#[$doc])*
        #[inline(always)]
        pub(super) fn $name<S: Simd>($simd: S, rows: &[f32], stride: usize, $($scalar: &[f32],)? to: &mut [f32]) {
            const AT_ONCE: usize = 4;
            let (to, rest) = S::as_mut_simd_f32s(to);
            debug_assert!(rest.is_empty());
            for (n, to) in to.chunks_mut(AT_ONCE).enumerate() {
                let mut sums = [$simd.splat_f32s($start); AT_ONCE];
                let rows = rows.chunks_exact(stride);
                $(let rows = rows.zip($scalar);)?
                for row in rows {
                    $(let (row, $scalar) = row;
                    let $scalar = $simd.splat_f32s(*$scalar);)?
                    for ($sum, &$x) in sums.iter_mut().zip(&S::as_simd_f32s(row).0[n * AT_ONCE..]) {
                        *$sum = $value;
                    }
                }
                to.copy_from_slice(&sums[..to.len()]);
            }
        }
    };
}

columns!(/// `Σ_i x_ij`
    column_sums(simd, sum, x) from 0.0 => simd.add_f32s(*sum, x));
columns!(/// `Σ_i x_ij²`
    column_squares(simd, sum, x) from 0.0 => simd.mul_add_e_f32s(x, x, *sum));
columns!(/// `max_i (x_ij − a_i)`
    column_excess(simd, sum, x, a) from f32::NEG_INFINITY => simd.max_f32s(*sum, simd.sub_f32s(x, a)));

/// Returns `Σ x_i` in a fixed order, for any length.
#[inline(always)]
pub(super) fn sum<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let (vectors, rest) = S::as_simd_f32s(x);
    let mut sum = simd.splat_f32s(0.0);
    for &x in vectors {
        sum = simd.add_f32s(sum, x);
    }
    let mut sum = simd.reduce_sum_f32s(sum);
    for x in rest {
        sum += x;
    }
    sum
}

/// Returns `Σ x_i y_i` in a fixed order, for any length.
#[inline(always)]
pub(super) fn dot<S: Simd>(simd: S, x: &[f32], y: &[f32]) -> f32 {
    let ((vectors, rest), (others, other_rest)) = (S::as_simd_f32s(x), S::as_simd_f32s(y));
    let mut sum = simd.splat_f32s(0.0);
    for (&x, &y) in vectors.iter().zip(others) {
        sum = simd.mul_add_e_f32s(x, y, sum);
    }
    let mut sum = simd.reduce_sum_f32s(sum);
    for (x, y) in rest.iter().zip(other_rest) {
        sum += x * y;
    }
    sum
}

/// Returns `max x_i`.
#[inline(always)]
pub(super) fn max<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let mut max = simd.splat_f32s(f32::NEG_INFINITY);
    for &x in S::as_simd_f32s(x).0 {
        max = simd.max_f32s(max, x);
    }
    simd.reduce_max_f32s(max)
}

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::{super::instructions::arch, *};

    #[test]
    fn exp_is_the_exponential() {
        for i in 0..=87_000 {
            let x = -(i as f32) / 1000.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got / want - 1.0).abs() < 3e-7, "exp({x}) = {got}, not {want}");
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1e37), 0.0);
    }

    struct OnVectors<'a>(&'a mut [f32]);

    impl WithSimd for OnVectors<'_> {
        type Output = [f32; 3];
        fn with_simd<S: Simd>(self, simd: S) -> [f32; 3] {
            let results = [sum(simd, self.0), dot(simd, self.0, self.0), max(simd, self.0)];
            exp_minus(simd, self.0, 0.0);
            results
        }
    }

    #[test]
    fn vectors_agree_with_scalars() {
        for offset in [-90.0, -40.0, -1.0, 40.0] {
            let before: Vec<f32> = (0..96).map(|i| offset + i as f32 / 2.0 - if i > 60 { 1e9 } else { 0.0 }).collect();
            let mut after = before.clone();
            let run = |x: &mut [f32]| arch().dispatch(OnVectors(x));
            run(&mut after);
            for (&x, &got) in before.iter().zip(&after) {
                let want = if x < -87.0 { 0.0 } else { f64::from(x).exp() };
                assert!((f64::from(got) - want).abs() <= 3e-7 * want, "exp({x}) = {got}, not {want}");
            }
        }
    }

    struct Above<'a>(&'a mut [f32], &'a [f32]);

    impl WithSimd for Above<'_> {
        type Output = ();
        fn with_simd<S: Simd>(self, simd: S) {
            exp_minus_each_above(simd, self.0, self.1, -60.0);
        }
    }

    #[test]
    fn exponentials_are_zero_below_a_bound() {
        let mut x: Vec<f32> = (0..96).map(|i| i as f32 - 90.0).collect();
        let y = vec![7f32; 96];
        let before = x.clone();
        arch().dispatch(Above(&mut x, &y));
        for (x, &got) in before.iter().map(|x| x - 7.0).zip(&x) {
            let want = if x < -60.0 { 0.0 } else { f64::from(x).exp() };
            assert!((f64::from(got) - want).abs() <= 3e-7 * want, "exp({x}) = {got}, not {want}");
        }
    }

    #[test]
    fn reductions_cover_every_lane() {
        for i in 0..48 {
            let mut a = vec![-1.0; 48];
            a[i] = 3.0;
            assert_eq!(arch().dispatch(OnVectors(&mut a)), [-44.0, 56.0, 3.0]);
        }
    }
}
