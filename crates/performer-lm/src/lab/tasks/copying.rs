//! This task is long-range copying: a string of random symbols, a separator, and the string again,
//! which is to be predicted.

use rand_chacha::ChaCha8Rng;

use super::example::{Example, Source, Split};
use crate::draw::below;

/// Number of different symbols.
const SYMBOLS: usize = 32;

pub(super) struct Copying {
    /// Number of symbols of the string.
    pub(super) length: usize,
}

impl Source for Copying {
    fn vocabulary(&self) -> usize {
        SYMBOLS + 1
    }

    fn describe(&self) -> String {
        format!(
            "{} random symbols out of {SYMBOLS}, a separator, and the same symbols again, which are to be predicted: {} tokens, each answer {} \
             tokens after the symbol it repeats",
            self.length,
            2 * self.length,
            self.length
        )
    }

    fn draw(&self, _: Split, rng: &mut ChaCha8Rng) -> Example {
        let symbols: Vec<u32> = (0..self.length).map(|_| below(rng, SYMBOLS) as u32).collect();
        let mut ids = symbols.clone();
        ids.push(SYMBOLS as u32);
        ids.extend(&symbols[..self.length - 1]);
        let answers = symbols.into_iter().enumerate().map(|(i, symbol)| (self.length + i, symbol)).collect();
        Example { ids, answers }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn the_answers_are_the_string_and_the_input_is_one_behind() {
        let length = 9;
        let example = Copying { length }.draw(Split::Train, &mut ChaCha8Rng::seed_from_u64(1));
        assert_eq!(example.ids.len(), 2 * length);
        assert_eq!(example.ids[length], SYMBOLS as u32);
        assert_eq!(example.answers.len(), length);
        for (i, &(place, target)) in example.answers.iter().enumerate() {
            assert_eq!(target, example.ids[i]);
            assert!((target as usize) < SYMBOLS);
            // Read causally, the position sees every symbol of the string, and of the copy the
            // symbols before its own.
            assert_eq!(place, length + i);
            if i > 0 {
                assert_eq!(example.ids[place], example.answers[i - 1].1);
            }
        }
    }
}
