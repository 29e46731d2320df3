//! This task is multi-query associative recall (Arora et al. 2023,
//! <https://arxiv.org/abs/2312.04927>): pairs of a key token and a value token, then every key once
//! more among random tokens, where its value is to be predicted.
//!
//! It is harder than [`recall`](super::recall): key and value are two tokens, so a model has to
//! move what stands before a value to the value first, and then to look it up. As in the paper,
//! queries come sooner rather than later: the share of those that come `g` places after the last
//! pair falls as `g^(a−1)` with `a = 0.01`.

use anyhow::{Result, ensure};
use rand_chacha::{ChaCha8Rng, rand_core::Rng};

use super::example::{Example, Source, Split};
use crate::draw::{below, shuffle};

/// Number of different keys.
const KEYS: usize = 128;

/// Number of different values; their tokens come after those of the keys.
const VALUES: usize = 128;

/// The exponent `a` of the distances of queries.
const POWER: f64 = 0.01;

pub(super) struct Mqar {
    pairs: usize,
    length: usize,
}

impl Mqar {
    /// Makes sequences of `length` tokens with `pairs` pairs, each of which is asked for once.
    ///
    /// # Errors
    /// If there are no pairs, more than there are keys, or too many for the length.
    pub(super) fn new(pairs: usize, length: usize) -> Result<Self> {
        ensure!(
            (1..=KEYS).contains(&pairs),
            "{pairs} pairs to recall; there must be at least 1 and at most {KEYS}, the number of keys"
        );
        // A query and its answer take two places.
        ensure!(
            length >= 4 * pairs,
            "{pairs} pairs and as many queries with answers need {} tokens, but sequences have {length}",
            4 * pairs
        );
        Ok(Self { pairs, length })
    }

    /// Draws where the queries stand, in tokens after the last pair. These numbers are even, since
    /// a query and its answer take two tokens, and each comes at most once.
    fn places(&self, rng: &mut ChaCha8Rng) -> Vec<usize> {
        let free = (self.length - 2 * self.pairs) / 2;
        let weight = |place: usize| ((place + 1) as f64).powf(POWER - 1.0);
        let mut weights: Vec<f64> = (0..free).map(weight).collect();
        (0..self.pairs)
            .map(|_| {
                let mut left = unit(rng) * weights.iter().sum::<f64>();
                let at = weights.iter().position(|w| {
                    left -= w;
                    *w > 0.0 && left < 0.0
                });
                // Rounding may leave nothing: then the last free place is taken.
                let at = at.or_else(|| weights.iter().rposition(|w| *w > 0.0)).unwrap_or(0);
                weights[at] = 0.0;
                2 * at
            })
            .collect()
    }
}

/// Draws a number in `[0, 1)`.
fn unit(rng: &mut ChaCha8Rng) -> f64 {
    f64::from(rng.next_u32()) / (f64::from(u32::MAX) + 1.0)
}

impl Source for Mqar {
    fn vocabulary(&self) -> usize {
        KEYS + VALUES
    }

    fn describe(&self) -> String {
        format!(
            "{} of {KEYS} keys, each followed by one of {VALUES} values, then the keys again in random order among random tokens, each to be followed \
             by its value: {} tokens",
            self.pairs, self.length
        )
    }

    fn draw(&self, _: Split, rng: &mut ChaCha8Rng) -> Example {
        let mut keys: Vec<u32> = (0..KEYS as u32).collect();
        shuffle(&mut keys, rng);
        let mut pairs: Vec<[u32; 2]> =
            keys.into_iter().take(self.pairs).map(|key| [key, (KEYS + below(rng, VALUES)) as u32]).collect();
        let mut ids: Vec<u32> = pairs.concat();
        // Random tokens are values, so that no key stands anywhere but in its pair and its query.
        ids.resize_with(self.length, || (KEYS + below(rng, VALUES)) as u32);
        shuffle(&mut pairs, rng);
        let mut answers: Vec<(usize, u32)> = Vec::with_capacity(self.pairs);
        for ([key, value], place) in pairs.into_iter().zip(self.places(rng)) {
            let at = 2 * self.pairs + place;
            (ids[at], ids[at + 1]) = (key, value);
            answers.push((at, value));
        }
        answers.sort_unstable();
        Example { ids, answers }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn every_answer_is_the_value_that_stood_after_its_key() {
        let (pairs, length) = (8, 64);
        let mqar = Mqar::new(pairs, length).unwrap();
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let mut early = 0;
        for _ in 0..200 {
            let Example { ids, answers } = mqar.draw(Split::Train, &mut rng);
            assert_eq!((ids.len(), answers.len()), (length, pairs));
            assert!(answers.windows(2).all(|two| two[0].0 < two[1].0), "two queries at one place: {answers:?}");
            for (place, value) in answers {
                assert!(place >= 2 * pairs);
                let key = ids[place];
                let stood: Vec<usize> = (0..length).filter(|&i| ids[i] == key).collect();
                assert_eq!(stood.len(), 2, "key {key} stands in its pair and in its query only");
                assert_eq!((ids[stood[0] + 1], ids[place + 1]), (value, value));
                assert!((key as usize) < KEYS && (KEYS..KEYS + VALUES).contains(&(value as usize)));
                early += usize::from(place < 2 * pairs + (length - 2 * pairs) / 2);
            }
        }
        // Of 24 places the first 12 have 82% of the weight; without repetition somewhat less.
        let share = early as f64 / (200 * pairs) as f64;
        assert!((0.6..0.82).contains(&share), "{share} of the queries are in the first half");
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let error = |pairs, length| Mqar::new(pairs, length).err().expect("an error").to_string();
        assert!(error(0, 64).contains("at least 1"));
        assert!(error(129, 4096).contains("at most 128"));
        assert!(error(17, 64).contains("need 68 tokens"));
        // Every place is taken: there is one way to draw them.
        let full = Mqar::new(16, 64).unwrap().draw(Split::Train, &mut ChaCha8Rng::seed_from_u64(1));
        assert_eq!(full.answers.iter().map(|a| a.0).collect::<Vec<_>>(), (16..32).map(|i| 2 * i).collect::<Vec<_>>());
    }
}
