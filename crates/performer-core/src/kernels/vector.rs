//! Elementwise functions that the compiler can vectorise.

/// Lanes of one AVX-512 register of f32; narrower machines take several registers.
pub const LANES: usize = 16;

/// `e^x` for `x ≤ 0` to about 2 ulp, without branches; 0 below −87, where f32 ends. NaN stays NaN.
///
/// `2^n · p(r)` with `x = n ln 2 + r`, `|r| ≤ ln 2 / 2`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // 1.5·2²³ rounds to an integer; the 127 besides makes the low bits the exponent field of 2^n.
    const ROUND: f32 = 12_582_912.0 + 127.0;
    let clamped = if x < -87.0 { -87.0 } else { x };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * LN2_HIGH - n * LN2_LOW;
    // Taylor to the sixth power: the remainder is below 1.3e-7 relative on |r| ≤ 0.347.
    let p = 1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0 + r * (1.0 / 24.0 + r * (1.0 / 120.0 + r * (1.0 / 720.0))))));
    let value = p * f32::from_bits(shifted.to_bits() << 23);
    if x < -87.0 { 0.0 } else { value }
}

/// `Σ a_i b_i` in [`LANES`] partial sums, a fixed order that vectorises. Lengths are multiples of [`LANES`].
#[inline(always)]
pub(crate) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sum = [0f32; LANES];
    for (a, b) in a.chunks_exact(LANES).zip(b.chunks_exact(LANES)) {
        for i in 0..LANES {
            sum[i] += a[i] * b[i];
        }
    }
    sum.iter().sum()
}

/// The largest entry. The length is a multiple of [`LANES`].
#[inline(always)]
pub(crate) fn max(a: &[f32]) -> f32 {
    let mut max = [f32::NEG_INFINITY; LANES];
    for a in a.chunks_exact(LANES) {
        for i in 0..LANES {
            max[i] = if a[i] > max[i] { a[i] } else { max[i] };
        }
    }
    max.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn reductions_cover_every_lane() {
        let a: Vec<f32> = (0..48).map(|i| i as f32).collect();
        assert_eq!(dot(&a, &[1.0; 48]), 48.0 * 47.0 / 2.0);
        for i in 0..48 {
            let mut a = vec![-1.0; 48];
            a[i] = 3.0;
            assert_eq!(max(&a), 3.0);
        }
    }
}
