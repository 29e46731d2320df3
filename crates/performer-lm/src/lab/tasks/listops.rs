//! This task is ListOps (Nangia and Bowman 2018, <https://arxiv.org/abs/1804.06028>) by the rules
//! of Long Range Arena (Tay et al. 2020, <https://arxiv.org/abs/2011.04006>): nested minima,
//! maxima, medians and sums modulo 10 of digits, of which the value is to be predicted.
//!
//! A node is an operation of 2 to 10 arguments with probability 1/4, and a digit otherwise or at
//! depth 10. A tree is kept if its length, counted in brackets and digits, lies strictly between
//! two bounds, which are 500 and 2000 in Long Range Arena. Parentheses, which the reader of Long
//! Range Arena drops, are left out.

use anyhow::{Result, ensure};
use rand_chacha::ChaCha8Rng;

use super::example::{Example, Source, Split};
use crate::draw::below;

const MAX_DEPTH: usize = 10;
const MAX_ARGUMENTS: usize = 10;

/// The tokens after the ten digits.
const MIN: u32 = 10;
const MAX: u32 = 11;
const MEDIAN: u32 = 12;
const SUM: u32 = 13;
const END: u32 = 14;
/// The token before the expression; the value of the expression is predicted there.
const CLASS: u32 = 15;
const VOCABULARY: usize = 16;

/// The greatest length that can be asked for: expressions must have more than a quarter of it, and
/// of those that the rules make, fewer than one in a thousand have 2,000 tokens.
const MAX_TOKENS: usize = 8000;

pub(super) struct Listops {
    /// The length that expressions must stay below, in tokens.
    max: usize,
}

impl Listops {
    /// Makes a source of expressions longer than a quarter of `max` and shorter than `max` tokens.
    pub(super) fn new(max: usize) -> Result<Self> {
        ensure!(
            (16..=MAX_TOKENS).contains(&max),
            "length is {max}; for ListOps it must lie between 16 and {MAX_TOKENS}, since the rules hardly ever make a \
             longer expression"
        );
        Ok(Self { max })
    }

    fn min(&self) -> usize {
        self.max / 4
    }

    /// Appends a node's tokens and returns its value; `None` once the expression is too long to be
    /// kept.
    fn node(&self, depth: usize, tokens: &mut Vec<u32>, rng: &mut ChaCha8Rng) -> Option<u32> {
        if depth >= MAX_DEPTH || below(rng, 4) != 0 {
            let digit = below(rng, 10) as u32;
            tokens.push(digit);
            return Some(digit);
        }
        let operation = [MIN, MAX, MEDIAN, SUM][below(rng, 4)];
        let count = 2 + below(rng, MAX_ARGUMENTS - 1);
        tokens.push(operation);
        let mut values = Vec::with_capacity(count);
        for _ in 0..count {
            values.push(self.node(depth + 1, tokens, rng)?);
            if tokens.len() >= self.max {
                return None;
            }
        }
        tokens.push(END);
        Some(apply(operation, &mut values))
    }
}

/// Applies an operation. The median of an even number of values is the mean of the middle two,
/// rounded down.
fn apply(operation: u32, values: &mut [u32]) -> u32 {
    values.sort_unstable();
    let (n, last) = (values.len(), values[values.len() - 1]);
    match operation {
        MIN => values[0],
        MAX => last,
        MEDIAN => (values[(n - 1) / 2] + values[n / 2]) / 2,
        _ => values.iter().sum::<u32>() % 10,
    }
}

impl Source for Listops {
    fn vocabulary(&self) -> usize {
        VOCABULARY
    }

    fn describe(&self) -> String {
        let short = if self.max < 2000 { ", shorter than Long Range Arena's 500 to 2000 (--length 2000)" } else { "" };
        format!(
            "expressions by the rules of Long Range Arena, depth up to {MAX_DEPTH}, up to {MAX_ARGUMENTS} arguments, {} to {} tokens{short}; the value is \
             predicted at a token before the expression, and all examples are fresh",
            self.min() + 1,
            self.max - 1
        )
    }

    fn draw(&self, _: Split, rng: &mut ChaCha8Rng) -> Example {
        loop {
            let mut ids = vec![CLASS];
            let value = self.node(1, &mut ids, rng);
            let length = ids.len() - 1;
            if let Some(value) = value
                && length > self.min()
                && length < self.max
            {
                return Example { ids, answers: vec![(0, value)] };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    /// Evaluates the text form of the data set, with parentheses, by a stack; it shares no code
    /// with the generator.
    fn evaluate(text: &str) -> u32 {
        let mut stack: Vec<(String, Vec<u32>)> = vec![(String::new(), Vec::new())];
        for word in text.split_whitespace().filter(|word| !["(", ")"].contains(word)) {
            if word.starts_with('[') {
                stack.push((word.to_string(), Vec::new()));
                continue;
            }
            let value = if word == "]" {
                let (operation, mut values) = stack.pop().unwrap();
                let n = values.len();
                match operation.as_str() {
                    "[MIN" => values.into_iter().min().unwrap(),
                    "[MAX" => values.into_iter().max().unwrap(),
                    "[SM" => values.into_iter().fold(0, |sum, value| (sum + value) % 10),
                    "[MED" => {
                        values.sort_unstable();
                        let twice = if n % 2 == 1 { 2 * values[n / 2] } else { values[n / 2 - 1] + values[n / 2] };
                        twice / 2
                    }
                    other => panic!("{other}"),
                }
            } else {
                word.parse().unwrap()
            };
            stack.last_mut().unwrap().1.push(value);
        }
        assert_eq!(stack.len(), 1);
        assert_eq!(stack[0].1.len(), 1);
        stack[0].1[0]
    }

    fn text(ids: &[u32]) -> String {
        let word = |&id: &u32| match id {
            MIN => "[MIN".to_string(),
            MAX => "[MAX".to_string(),
            MEDIAN => "[MED".to_string(),
            SUM => "[SM".to_string(),
            END => "]".to_string(),
            digit => digit.to_string(),
        };
        ids.iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_evaluator_knows_the_format() {
        assert_eq!(evaluate("( ( ( ( [MED 4 ) 1 ) 0 ) ] )"), 1);
        assert_eq!(evaluate("( ( ( [SM ( ( ( [MED 8 ) 3 ) ] ) ) 7 ) ] )"), 2);
    }

    #[test]
    fn expressions_evaluate_to_their_labels() {
        for (max, count) in [(40, 300), (2000, 20)] {
            let listops = Listops::new(max).unwrap();
            let mut rng = ChaCha8Rng::seed_from_u64(3);
            let mut seen = [0; VOCABULARY];
            for _ in 0..count {
                let Example { ids, answers } = listops.draw(Split::Train, &mut rng);
                let length = ids.len() - 1;
                assert!(length > max / 4 && length < max, "{length} tokens");
                assert_eq!(ids[0], CLASS);
                assert_eq!(answers, [(0, evaluate(&text(&ids[1..])))]);
                ids.iter().for_each(|&id| seen[id as usize] += 1);
            }
            assert!(seen.iter().all(|&n| n > 0), "{seen:?}");
        }
    }
}
