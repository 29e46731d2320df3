//! This module measures recall: whether a model finds again what it needs, far back in its context.
//!
//! A loss over ordinary text says little about it, since most tokens follow from the few before
//! them: linear attention and windows may keep the loss of softmax and lose its recall. Two tasks
//! measure it in texts of a chosen length, in the model's own vocabulary and without any training
//! for them:
//!
//! - **Pass keys** (Mohtashami & Jaggi 2023, <https://arxiv.org/abs/2305.16300>): a sentence in the
//!   middle of other text says a number of five digits, and the end of the text asks for it.
//! - **Pairs**, which is associative recall (Arora et al. 2023, <https://arxiv.org/abs/2312.04927>):
//!   pairs of tokens stand at the beginning of the text, and their first tokens come again at its
//!   end, each to be followed by its second.
//!
//! A window that does not reach back that far can do neither. A small model may be able to do
//! neither with any attention, so results mean something beside those of the model with softmax.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use candle_core::{D, Device, Tensor};
use candle_nn::ops::log_softmax;
use performer_core::Mask;
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use serde::{Deserialize, Serialize};

use crate::{
    data::{TokenFile, Tokenizer},
    draw::{below, shuffle},
    listener::{Listener, Unit},
    model::Decoder,
    parallel::in_order,
};

/// Number of texts of each task, whose pass keys stand at as many depths.
const TEXTS: usize = 8;

/// Number of pairs in a text.
const PAIRS: usize = 16;

/// Number of tokens at the beginning of the held-out text from which those of pairs are taken.
const KNOWN: usize = 65_536;

/// `Recall` is the result of a measurement with texts of one length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recall {
    /// Number of tokens of each text.
    pub tokens: usize,
    /// Share of the pass keys that the likeliest tokens spell, from 0 to 1.
    pub passkey: f64,
    /// Mean cross-entropy of the tokens of the pass keys, in nats: it tells models apart that spell
    /// none.
    pub passkey_loss: f64,
    /// Share of the pairs whose second token is the likeliest after the first, from 0 to 1.
    pub pairs: f64,
    /// Mean cross-entropy of the second tokens of pairs, in nats.
    pub pairs_loss: f64,
}

/// An `Examiner` makes texts that ask a model for something in them.
#[derive(Clone, Copy)]
pub struct Examiner<'a> {
    /// The tokenizer of the models.
    pub tokenizer: &'a Tokenizer,
    /// What the rest of the texts is taken from.
    pub text: &'a TokenFile,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Is told how far a measurement is.
    pub listener: &'a dyn Listener,
}

/// A `Question` is a text, and tokens of it that are to be predicted from those before them.
struct Question {
    ids: Vec<u32>,
    /// Positions of the tokens to be predicted, of which none is the first.
    answers: Vec<usize>,
}

/// An `Answer` is what a model makes of a token that it is to predict.
struct Answer {
    is_likeliest: bool,
    /// Cross-entropy in nats.
    loss: f64,
}

impl Examiner<'_> {
    /// Whether texts of `tokens` tokens can be made.
    ///
    /// # Errors
    /// If the length does not hold the questions; if the tokenizer cannot spell them, or the
    /// held-out text has too few different tokens.
    pub fn check(&self, tokens: usize) -> Result<()> {
        self.questions(tokens).map(|_| ())
    }

    /// Measures the recall of a model with texts of `tokens` tokens each. The same length gives
    /// every model the same texts.
    ///
    /// # Errors
    /// Those of [`Self::check`], and if the length is more than the model's positions.
    pub fn measure(&self, model: &Decoder, tokens: usize) -> Result<Recall> {
        require_positions(model, tokens)?;
        self.grade(model.device(), tokens, |question| answers(model, question))
    }

    /// Refuses lengths of which [`Self::measure`] would refuse one, so that it is found out before
    /// anything is measured.
    ///
    /// # Errors
    /// Those of [`Self::measure`] that do not come from computing.
    pub fn check_all(&self, model: &Decoder, lengths: &[usize]) -> Result<()> {
        lengths.iter().try_for_each(|&tokens| {
            require_positions(model, tokens)?;
            self.check(tokens)
        })
    }

    /// Grades what `answers` makes of the texts.
    fn grade(
        &self,
        device: &Device,
        tokens: usize,
        answers: impl Fn(&Question) -> Result<Vec<Answer>> + Sync,
    ) -> Result<Recall> {
        let questions = self.questions(tokens)?;
        let bar = self.listener.begin(&format!("recall over {tokens} tokens"), Unit::Texts, 0, questions.len() as u64);
        let mut all = Vec::with_capacity(questions.len());
        in_order(
            device,
            questions.len(),
            self.threads,
            |i| answers(&questions[i]),
            |answers| {
                all.push(answers);
                bar.advance(all.len() as u64);
                Ok(())
            },
        )?;
        let (keys, pairs) = all.split_at(TEXTS);
        let share = |right: usize, all: usize| right as f64 / all as f64;
        let loss = |texts: &[Vec<Answer>]| {
            let losses: Vec<f64> = texts.iter().flatten().map(|answer| answer.loss).collect();
            losses.iter().sum::<f64>() / losses.len() as f64
        };
        let spelt = keys.iter().filter(|answers| answers.iter().all(|answer| answer.is_likeliest)).count();
        let found = pairs.iter().flatten().filter(|answer| answer.is_likeliest).count();
        Ok(Recall {
            tokens,
            passkey: share(spelt, TEXTS),
            passkey_loss: loss(keys),
            pairs: share(found, TEXTS * PAIRS),
            pairs_loss: loss(pairs),
        })
    }

    /// Texts with pass keys, and then as many with pairs.
    fn questions(&self, tokens: usize) -> Result<Vec<Question>> {
        let known = self.known()?;
        let draw = |i| {
            let mut rng = ChaCha8Rng::seed_from_u64((tokens * 2 * TEXTS + i) as u64);
            if i < TEXTS { self.pass_key(tokens, i, &mut rng) } else { self.pairs(tokens, &known, &mut rng) }
        };
        (0..2 * TEXTS).map(draw).collect()
    }

    /// The pass key of the `i`-th text stands after `(i + ½) / TEXTS` of the other tokens.
    fn pass_key(&self, tokens: usize, i: usize, rng: &mut ChaCha8Rng) -> Result<Question> {
        let key = 10_000 + below(rng, 90_000);
        let told = self.tokenizer.encode(&format!("\nThe pass key is {key}. Remember it. {key} is the pass key.\n"))?;
        let asked = "\nWhat is the pass key? The pass key is";
        let with_answer = self.tokenizer.encode(&format!("{asked} {key}"))?;
        let asked = self.tokenizer.encode(asked)?;
        // Where the question ends and the answer begins, tokens may join.
        let common = asked.iter().zip(&with_answer).take_while(|(a, b)| a == b).count();
        let others = self.room(tokens, told.len() + with_answer.len())?;
        let filler = self.filler(others, rng)?;
        let (before, after) = filler.split_at(others * (2 * i + 1) / (2 * TEXTS));
        let ids = [before, &told, after, &with_answer].concat();
        Ok(Question { answers: (tokens - with_answer.len() + common..tokens).collect(), ids })
    }

    /// Pairs stand in lines, at the beginning and, in another order, at the end. Their first tokens
    /// stand nowhere between, as far as there are such tokens.
    fn pairs(&self, tokens: usize, known: &[u32], rng: &mut ChaCha8Rng) -> Result<Question> {
        let line = self.tokenizer.encode("\n")?;
        let entry = 2 + line.len();
        let filler = self.filler(self.room(tokens, 2 * PAIRS * entry)?, rng)?;
        let mut drawn = known.to_vec();
        shuffle(&mut drawn, rng);
        let between: BTreeSet<u32> = filler.iter().copied().collect();
        drawn.sort_by_key(|id| between.contains(id));
        let (firsts, others) = drawn.split_at(PAIRS);
        let mut pairs: Vec<[u32; 2]> = firsts.iter().zip(others).map(|(&first, &second)| [first, second]).collect();
        let list = |pairs: &[[u32; 2]]| pairs.iter().flat_map(|pair| [&pair[..], &line].concat()).collect::<Vec<u32>>();
        let beginning = list(&pairs);
        shuffle(&mut pairs, rng);
        let answers = (0..PAIRS).map(|i| beginning.len() + filler.len() + i * entry + 1).collect();
        Ok(Question { ids: [beginning, filler, list(&pairs)].concat(), answers })
    }

    /// Different tokens of the held-out text, in order; those at the borders of texts are not among
    /// them, nor those that are no text alone.
    fn known(&self) -> Result<Vec<u32>> {
        let borders = self.tokenizer.borders();
        let all: BTreeSet<u32> = self.text.read(0..self.text.len().min(KNOWN)).into_iter().collect();
        let mut known = Vec::new();
        for id in all {
            if !borders.is_end(id) && !self.tokenizer.decode(&[id])?.trim().is_empty() {
                known.push(id);
            }
        }
        ensure!(
            known.len() >= 2 * PAIRS,
            "the held-out text has {} different tokens; recall of {PAIRS} pairs needs {}: give a longer text",
            known.len(),
            2 * PAIRS
        );
        Ok(known)
    }

    fn room(&self, tokens: usize, question: usize) -> Result<usize> {
        ensure!(
            tokens >= question,
            "recall over {tokens} tokens: the question alone has {question} tokens; ask for more"
        );
        Ok(tokens - question)
    }

    /// Reads so many tokens from a random place of the held-out text, again from its beginning
    /// where it ends. Tokens at the borders of texts are left out: a model may have learned that
    /// nothing before one matters, and forget on purpose what it is to be asked for.
    fn filler(&self, tokens: usize, rng: &mut ChaCha8Rng) -> Result<Vec<u32>> {
        let (len, borders) = (self.text.len(), self.tokenizer.borders());
        let mut start = below(rng, len);
        let mut ids = Vec::with_capacity(tokens);
        // The loop ends, because a text that has no other tokens has too few different ones, and
        // was refused.
        while ids.len() < tokens {
            let end = len.min(start + tokens - ids.len());
            ids.extend(self.text.read(start..end).into_iter().filter(|&id| !borders.is_end(id)));
            start = if end == len { 0 } else { end };
        }
        Ok(ids)
    }
}

/// What a model makes of each token that it is to predict.
fn answers(model: &Decoder, question: &Question) -> Result<Vec<Answer>> {
    let Question { ids, answers } = question;
    let places: Vec<u32> = answers.iter().map(|answer| *answer as u32 - 1).collect();
    let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
    let logits = model.logits_at(&input, &Mask::causal(), &places)?;
    let likeliest = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
    let logits = log_softmax(&logits, D::Minus1)?.to_vec2::<f32>()?;
    let graded = answers.iter().zip(likeliest).zip(logits).map(|((&answer, likeliest), logits)| {
        let id = ids[answer];
        Answer { is_likeliest: id == likeliest, loss: -f64::from(logits[id as usize]) }
    });
    Ok(graded.collect())
}

/// Refuses texts that are longer than the model has positions.
fn require_positions(model: &Decoder, tokens: usize) -> Result<()> {
    let positions = model.positions_left(&model.new_state());
    ensure!(
        tokens <= positions,
        "recall over {tokens} tokens: the model has {positions} positions; ask for at most as many"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Borders, ModelConfig, Positions, Preset},
        data::{DataSpec, prepare},
        listener::Silent,
    };

    /// Texts have the length that was asked for, say what they ask for before they ask it, and do
    /// not depend on the model.
    #[test]
    fn questions_can_be_answered() -> Result<()> {
        let data = prepare(&DataSpec::Sample, 400, None, &Silent)?;
        let examiner = Examiner { tokenizer: &data.tokenizer, text: &data.valid, threads: 2, listener: &Silent };
        let known = examiner.known()?;
        let mut at = Vec::new();
        for i in 0..TEXTS {
            let mut rng = ChaCha8Rng::seed_from_u64(i as u64);
            let question = examiner.pass_key(300, i, &mut rng)?;
            assert_eq!(question.ids.len(), 300);
            assert!(!question.ids.contains(&data.tokenizer.eot()), "a separator of texts in text {i}");
            let answer: Vec<u32> = question.answers.iter().map(|&i| question.ids[i]).collect();
            let key = data.tokenizer.decode(&answer)?;
            assert!(key.trim().parse::<u32>().is_ok_and(|key| (10_000..100_000).contains(&key)), "{key:?}");
            let before = data.tokenizer.decode(&question.ids[..question.answers[0]])?;
            assert!(before.contains(&format!("The pass key is {}.", key.trim())), "{before}");
            assert!(before.ends_with("What is the pass key? The pass key is"), "{before}");
            at.push(before.find("The pass key is").expect("it was there"));

            let question = examiner.pairs(300, &known, &mut rng)?;
            assert_eq!((question.ids.len(), question.answers.len()), (300, PAIRS));
            assert!(!question.ids.contains(&data.tokenizer.eot()), "a separator of texts among pairs {i}");
            for &answer in &question.answers {
                let pair = [question.ids[answer - 1], question.ids[answer]];
                let first = question.ids.windows(2).position(|two| two == pair).expect("it is there");
                assert!(first + 1 < question.answers[0] - 1, "the pair at {answer} comes for the first time");
            }
        }
        assert!(at.is_sorted(), "pass keys at {at:?}");
        Ok(())
    }

    /// Where texts have a token before them and another one behind them, questions have neither.
    #[test]
    fn no_border_of_a_text_is_in_a_question() -> Result<()> {
        let data = prepare(&DataSpec::Sample, 400, None, &Silent)?;
        let (begin, end) = (1, data.tokenizer.eot());
        let borders = Borders { begin: Some(begin), end: Some(end), stop: Vec::new() };
        let tokenizer = Tokenizer::with_borders(data.tokenizer.as_bytes().to_vec(), Some(borders))?;
        let text = data.valid.read(0..data.valid.len());
        // The text of a tokenizer with these borders.
        let text: Vec<u32> =
            text.into_iter().flat_map(|id| if id == end { vec![end, begin] } else { vec![id] }).collect();
        let text = TokenFile::from_tokens(&text, data.valid.bytes())?;
        let examiner = Examiner { tokenizer: &tokenizer, text: &text, threads: 2, listener: &Silent };
        for (i, question) in examiner.questions(700)?.iter().enumerate() {
            assert!(!question.ids.iter().any(|&id| id == begin || id == end), "the border of a text in text {i}");
        }
        Ok(())
    }

    /// Looks for the longest ending of the last `sight` tokens before each answer that stood among
    /// them before, and says what followed: what an ideal induction head does.
    fn by_induction(question: &Question, sight: usize) -> Result<Vec<Answer>> {
        let answer = |&place: &usize| {
            let seen = &question.ids[place.saturating_sub(sight)..place];
            let common =
                |end: usize| seen[..end].iter().rev().zip(seen.iter().rev()).take_while(|(a, b)| a == b).count();
            let best = (1..seen.len()).max_by_key(|&end| common(end)).filter(|&end| common(end) > 0);
            let said = best.map(|end| seen[end]);
            Answer { is_likeliest: said == Some(question.ids[place]), loss: 0.0 }
        };
        Ok(question.answers.iter().map(answer).collect())
    }

    /// Whoever looks for what stood there before answers everything, and with a short window, next
    /// to nothing.
    #[test]
    fn induction_answers_everything_and_a_window_nothing() -> Result<()> {
        let data = prepare(&DataSpec::Sample, 400, None, &Silent)?;
        let examiner = Examiner { tokenizer: &data.tokenizer, text: &data.valid, threads: 2, listener: &Silent };
        for tokens in [256, 700] {
            let recall = examiner.grade(&Device::Cpu, tokens, |question| by_induction(question, usize::MAX))?;
            assert_eq!((recall.passkey, recall.pairs), (1.0, 1.0), "{tokens} tokens");
            let recall = examiner.grade(&Device::Cpu, tokens, |question| by_induction(question, 16))?;
            assert!(recall.passkey <= 0.125 && recall.pairs <= 0.1, "{tokens} tokens: {recall:?}");
        }
        Ok(())
    }

    /// A model that sees nothing of the first part of a text.
    #[test]
    fn only_what_is_seen_is_recalled() -> Result<()> {
        let data = prepare(&DataSpec::Sample, 400, None, &Silent)?;
        let examiner = Examiner { tokenizer: &data.tokenizer, text: &data.valid, threads: 2, listener: &Silent };
        let (preset, _) = Preset::Seed.load()?;
        let config = ModelConfig {
            vocab_size: data.tokenizer.vocab_size(),
            positions: Positions::Rotary { base: 1e4 },
            attention: "softmax:window=8".parse().expect("an attention"),
            ..preset
        };
        let model = Decoder::new(&config, 1, &Device::Cpu)?;
        let recall = examiner.measure(&model, 256)?;
        assert_eq!((recall.tokens, recall.passkey), (256, 0.0));
        assert!(recall.pairs < 0.1 && recall.pairs_loss > 4.0, "{recall:?}");
        assert_eq!(examiner.measure(&model, 256)?, recall);
        let error = examiner.measure(&model, 40).unwrap_err().to_string();
        assert!(error.contains("ask for more"), "{error}");
        assert_eq!(examiner.check(40).unwrap_err().to_string(), error);
        examiner.check(256)?;
        let learned = Decoder::new(&ModelConfig { positions: Positions::Learned, ..config }, 1, &Device::Cpu)?;
        let error = examiner.measure(&learned, 256).unwrap_err().to_string();
        assert!(error.contains("80 positions"), "{error}");
        Ok(())
    }
}
