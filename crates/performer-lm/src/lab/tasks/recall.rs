//! Associative recall: pairs of keys and values, then every key again in another order, each to be answered with its value (the multi-query form of
//! Arora et al. 2023, <https://arxiv.org/abs/2312.04927>).

use rand_chacha::ChaCha8Rng;

use super::example::{Example, Source, Split, below, shuffle};

pub(super) struct Recall {
    /// Pairs of a sequence. There are twice as many keys to choose from, and as many values.
    pub(super) pairs: usize,
}

impl Recall {
    fn keys(&self) -> usize {
        2 * self.pairs
    }
}

impl Source for Recall {
    fn vocabulary(&self) -> usize {
        2 * self.keys()
    }

    fn describe(&self) -> String {
        format!(
            "{} pairs of a key and a value, then all those keys in another order, each to be answered with its value: {} tokens; {} keys and {} \
             values there are, and no key comes twice; guessing among the values of the sequence would be right in one of {}",
            self.pairs,
            4 * self.pairs - 1,
            self.keys(),
            self.keys(),
            self.pairs
        )
    }

    fn draw(&self, _: Split, rng: &mut ChaCha8Rng) -> Example {
        let mut keys: Vec<u32> = (0..self.keys() as u32).collect();
        shuffle(&mut keys, rng);
        let value = |rng: &mut ChaCha8Rng| (self.keys() + below(rng, self.keys())) as u32;
        let mut pairs: Vec<(u32, u32)> = keys[..self.pairs].iter().map(|&key| (key, value(rng))).collect();
        let mut ids: Vec<u32> = pairs.iter().flat_map(|&(key, value)| [key, value]).collect();
        shuffle(&mut pairs, rng);
        let mut answers = Vec::with_capacity(self.pairs);
        for (key, value) in pairs {
            answers.push((ids.len(), value));
            ids.extend([key, value]);
        }
        // Nothing is asked after the last answer.
        ids.pop();
        Example { ids, answers }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn every_answer_stands_in_the_context_behind_its_key() {
        let recall = Recall { pairs: 11 };
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for _ in 0..20 {
            let Example { ids, answers } = recall.draw(Split::Train, &mut rng);
            assert_eq!(ids.len(), 4 * recall.pairs - 1);
            let pairs: HashMap<u32, u32> = ids[..2 * recall.pairs].chunks(2).map(|pair| (pair[0], pair[1])).collect();
            assert_eq!(pairs.len(), recall.pairs, "a key comes twice");
            let asked: HashMap<u32, u32> = answers.iter().map(|&(place, value)| (ids[place], value)).collect();
            assert_eq!(asked, pairs);
            assert!(answers.iter().all(|&(place, _)| place >= 2 * recall.pairs));
            assert!(ids.iter().all(|&id| (id as usize) < recall.vocabulary()));
        }
    }
}
