//! Portable random numbers: ChaCha12 for the bits, explicit `f64` arithmetic and `libm` for
//! everything else.

use std::f64::consts::TAU;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

/// What random numbers are for. Every use has its own ChaCha stream, so no two share any, whatever
/// the sizes.
#[derive(Clone, Copy)]
pub(super) enum Stream {
    /// Row lengths ([`super::Radii::Chi`]).
    Radii,
    /// The order of row lengths ([`super::Radii::Quantile`]).
    Permutation,
    /// Phases of the random Fourier map.
    Offsets,
    /// Directions of one block of rows.
    Block(u64),
}

impl Stream {
    /// This stream of `seed`, from its start.
    pub(super) fn open(self, seed: u64) -> Rng {
        let id = match self {
            Self::Radii => 0,
            Self::Permutation => 1,
            Self::Offsets => 2,
            Self::Block(b) => 3 + b,
        };
        // Expanded here because `seed_from_u64` may change with a release of rand_core.
        let mut key = [0; 32];
        let mut state = seed;
        for word in key.chunks_exact_mut(8) {
            state = state.wrapping_add(GOLDEN_GAMMA);
            word.copy_from_slice(&mix(state).to_le_bytes());
        }
        let mut chacha = ChaCha12Rng::from_seed(key);
        chacha.set_stream(id);
        Rng(chacha)
    }
}

/// A stream of random numbers.
pub(super) struct Rng(ChaCha12Rng);

impl Rng {
    /// Uniform on the open interval (0, 1): `(k + ½) 2⁻⁵²` for `k` of 52 bits, each exact in `f64`.
    pub(super) fn uniform(&mut self) -> f64 {
        const STEP: f64 = 1.0 / (1u64 << 52) as f64;
        ((self.0.next_u64() >> 12) as f64 + 0.5) * STEP
    }

    /// Fills `out` with independent standard normals, in pairs by Box and Muller's transform. It
    /// can produce no zero and no infinity, as `uniform` stays off both ends. All normal numbers
    /// whose bits count come from here; see [`super::draw_normal`] for why no other crate's do.
    pub(super) fn fill_normal(&mut self, out: &mut [f64]) {
        for pair in out.chunks_mut(2) {
            // A square root is exact everywhere.
            let radius = (-2.0 * libm::log(self.uniform())).sqrt();
            let angle = TAU * self.uniform();
            pair[0] = radius * libm::cos(angle);
            if let Some(second) = pair.get_mut(1) {
                *second = radius * libm::sin(angle);
            }
        }
    }

    /// −1 or 1, equally likely.
    pub(super) fn sign(&mut self) -> f64 {
        if self.0.next_u64() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// Puts `items` in a uniformly random order (Fisher and Yates).
    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            // ⌊u (last + 1)⌋ in fixed point; the bias, at most (last + 1) 2⁻⁶⁴, cannot be seen.
            let pick = (u128::from(self.0.next_u64()) * (last as u128 + 1)) >> 64;
            items.swap(last, pick as usize);
        }
    }
}

/// A new seed for sub-stream `stream` (a layer's index, a redraw's count, ...) of `seed`.
///
/// Mixed twice with SplitMix64's finaliser ([Steele, Lea & Flood,
/// 2014](https://doi.org/10.1145/2714064.2660195)): neighbouring seeds and streams give unrelated
/// results, streams of one seed never coincide, and derivations nest
/// (`derive_seed(derive_seed(seed, layer), redraw)`).
pub fn derive_seed(seed: u64, stream: u64) -> u64 {
    let base = mix(seed.wrapping_add(GOLDEN_GAMMA));
    mix(base.wrapping_add(stream.wrapping_mul(GOLDEN_GAMMA)))
}

/// 2⁶⁴ divided by the golden ratio, made odd: SplitMix64's increment.
const GOLDEN_GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// SplitMix64's finaliser, a bijection in which every input bit flips every output bit about half
/// the time.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SplitMix64's published outputs for seed 1234567: the key expansion is that generator.
    #[test]
    fn mix_is_splitmix64() {
        let outputs = [1, 2, 3].map(|i| mix(1_234_567u64.wrapping_add(GOLDEN_GAMMA.wrapping_mul(i))));
        assert_eq!(outputs, [6457827717110365317, 3203168211198807973, 9817491932198370423]);
    }

    #[test]
    fn normals_have_normal_moments_and_tails() {
        let n = 200_000;
        let mut z = vec![0.0; n];
        Stream::Block(0).open(7).fill_normal(&mut z);
        let mean = |f: &dyn Fn(f64) -> f64| z.iter().map(|&z| f(z)).sum::<f64>() / n as f64;
        // (statistic, expected value, standard deviation of one sample)
        let cases = [
            ("mean", mean(&|z| z), 0.0, 1.0),
            ("variance", mean(&|z| z * z), 1.0, 2f64.sqrt()),
            ("skewness", mean(&|z| z.powi(3)), 0.0, 15f64.sqrt()),
            ("kurtosis", mean(&|z| z.powi(4)), 3.0, 96f64.sqrt()),
            ("P(z > 2)", mean(&|z| f64::from(z > 2.0)), 0.022750, 0.1491),
        ];
        for (name, got, expected, sd) in cases {
            let errors = (got - expected) / (sd / (n as f64).sqrt());
            assert!(errors.abs() < 4.0, "{name}: {got}, expected {expected}, off by {errors} standard errors");
        }
        // The two halves of a pair are independent.
        let pairs = z.chunks_exact(2).map(|p| p[0] * p[1]).sum::<f64>() / (n as f64 / 2.0).sqrt();
        assert!(pairs.abs() < 4.0, "correlation of a pair: {pairs} standard errors");
    }

    #[test]
    fn signs_and_shuffles_are_fair() {
        let mut rng = Stream::Permutation.open(1);
        let sum: f64 = (0..10_000).map(|_| rng.sign()).sum();
        assert!(sum.abs() < 400.0, "sum of 10,000 signs: {sum}");

        let mut orders = std::collections::BTreeMap::new();
        for _ in 0..6000 {
            let mut items = [0, 1, 2];
            rng.shuffle(&mut items);
            *orders.entry(items).or_insert(0) += 1;
        }
        assert_eq!(orders.len(), 6);
        for (order, count) in orders {
            assert!((880..1120).contains(&count), "{order:?} came {count} times of 6000, expected about 1000");
        }
    }
}
