//! This task is associative recall: pairs of a key and a value, then every key again in another
//! order, each to be answered with its value. Arora et al. 2023
//! (<https://arxiv.org/abs/2312.04927>) also ask many queries of one sequence.
//!
//! A pair is one token here. So one layer of attention can solve the task, and it measures how many
//! associations attention holds. Where key and value are two tokens, two layers must first learn to
//! work together: softmax answered about 40% of 8 such pairs correctly after 1.5 million tokens,
//! which is not a matter of the kernel.

use rand_chacha::ChaCha8Rng;

use super::example::{Example, Source, Split};
use crate::draw::{below, shuffle};

/// Number of different values.
const VALUES: usize = 8;

pub(super) struct Recall {
    /// Number of pairs of a sequence, which is also the number of different keys.
    pub(super) pairs: usize,
}

impl Recall {
    /// Returns the token of a pair; the tokens of single keys come after those of all pairs.
    fn pair(key: usize, value: usize) -> u32 {
        (key * VALUES + value) as u32
    }
}

impl Source for Recall {
    fn vocabulary(&self) -> usize {
        self.pairs * VALUES + self.pairs
    }

    fn describe(&self) -> String {
        format!(
            "{} keys in random order, each in one token with one of {VALUES} values, then the keys alone in another order, each to be answered with its \
             value: {} tokens",
            self.pairs,
            2 * self.pairs
        )
    }

    fn draw(&self, _: Split, rng: &mut ChaCha8Rng) -> Example {
        let mut pairs: Vec<(usize, usize)> = (0..self.pairs).map(|key| (key, below(rng, VALUES))).collect();
        shuffle(&mut pairs, rng);
        let mut ids: Vec<u32> = pairs.iter().map(|&(key, value)| Self::pair(key, value)).collect();
        shuffle(&mut pairs, rng);
        let mut answers = Vec::with_capacity(self.pairs);
        for (key, value) in pairs {
            answers.push((ids.len(), value as u32));
            ids.push((self.pairs * VALUES + key) as u32);
        }
        Example { ids, answers }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn every_answer_stands_in_the_context_with_its_key() {
        let recall = Recall { pairs: 11 };
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        let mut orders = Vec::new();
        for _ in 0..20 {
            let Example { ids, answers } = recall.draw(Split::Train, &mut rng);
            assert_eq!((ids.len(), answers.len()), (22, 11));
            let (pairs, queries) = ids.split_at(11);
            let values: HashMap<u32, u32> = pairs.iter().map(|id| (id / VALUES as u32, id % VALUES as u32)).collect();
            assert_eq!(values.len(), 11, "a key comes twice");
            for (i, &(place, value)) in answers.iter().enumerate() {
                assert_eq!(place, 11 + i);
                assert_eq!(values[&(queries[i] - 88)], value);
            }
            assert!(ids.iter().all(|&id| (id as usize) < recall.vocabulary()));
            orders.push(queries.to_vec());
        }
        orders.dedup();
        assert_eq!(orders.len(), 20, "the order of the queries is always the same");
    }
}
