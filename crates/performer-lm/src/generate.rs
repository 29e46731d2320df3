//! This module generates text: it prefills the decoding state with the prompt, then samples one
//! token at a time.

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Tensor};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};

use crate::{
    data::{StreamDecoder, Tokenizer},
    errors::Cause,
    model::{Decoder, DecoderState},
};

/// `Sampling` says how the next token is chosen.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// The temperature, by which logits are divided; 0 always takes the likeliest token.
    pub temperature: f64,
    /// Keeps only this many of the likeliest tokens.
    pub top_k: Option<usize>,
    /// Keeps the likeliest tokens up to this total probability.
    pub top_p: Option<f64>,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.8, top_k: None, top_p: Some(0.95), seed: 42 }
    }
}

/// A `Sampler` chooses tokens from logits.
pub struct Sampler {
    sampling: Sampling,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// Makes a sampler.
    ///
    /// # Errors
    /// If a setting is out of range; the message names it.
    pub fn new(sampling: Sampling) -> Result<Self> {
        let Sampling { temperature, top_k, top_p, seed } = sampling;
        ensure!(
            temperature.is_finite() && temperature >= 0.0,
            Cause::setting("", "temperature", temperature, "at least 0")
        );
        ensure!(top_k != Some(0), Cause::setting("", "top_k", 0, "at least 1"));
        if let Some(p) = top_p {
            ensure!(p > 0.0 && p <= 1.0, Cause::setting("", "top_p", p, "above 0 and at most 1"));
        }
        Ok(Self { sampling, rng: ChaCha8Rng::seed_from_u64(seed) })
    }

    /// Returns the id of the next token.
    ///
    /// # Errors
    /// If no logit is finite.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32> {
        let mut ranked: Vec<(usize, f64)> =
            logits.iter().map(|&l| f64::from(l)).enumerate().filter(|(_, l)| l.is_finite()).collect();
        // Ties go to the lower id, which makes the order unique.
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let Some(&(best, top)) = ranked.first() else { bail!("no logit is finite: the model's weights are damaged") };
        if self.sampling.temperature == 0.0 {
            return Ok(best as u32);
        }
        if let Some(k) = self.sampling.top_k {
            ranked.truncate(k);
        }
        for (_, l) in &mut ranked {
            *l = ((*l - top) / self.sampling.temperature).exp();
        }
        let mut total: f64 = ranked.iter().map(|(_, w)| w).sum();
        if let Some(p) = self.sampling.top_p {
            let mut sum = 0.0;
            let kept = ranked.iter().position(|(_, w)| {
                sum += w;
                sum >= p * total
            });
            ranked.truncate(kept.map_or(ranked.len(), |i| i + 1));
            total = ranked.iter().map(|(_, w)| w).sum();
        }
        let mut point = (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64 * total;
        for (id, weight) in &ranked {
            point -= weight;
            if point < 0.0 {
                return Ok(*id as u32);
            }
        }
        Ok(ranked[ranked.len() - 1].0 as u32)
    }
}

/// `Stop` says why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The model ended the text.
    EndOfText,
    /// As many tokens as asked for were generated.
    MaxTokens,
    /// The model has no more positions.
    PositionsUsedUp,
    /// The receiver of the text asked to stop.
    Interrupted,
}

/// `Generation` describes what was generated.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Number of tokens after the prompt.
    pub tokens: usize,
    /// Why generation ended.
    pub stop: Stop,
    /// Size of the decoding state at the end, in bytes.
    pub state_bytes: usize,
}

/// Returns what a model writes after the words with which stories begin, those words included, or
/// `None` if it leaks or has too few learned positions for them, or if its tokenizer has no tokens
/// for them.
///
/// # Errors
/// As [`generate`].
pub fn begin_story(model: &Decoder, tokenizer: &Tokenizer, max_tokens: usize) -> Result<Option<String>> {
    let mut text = String::from("Once upon a time");
    let Ok(ids) = tokenizer.encode(&text) else { return Ok(None) };
    if model.config().leak || model.positions_left(&model.new_state()) <= ids.len() {
        return Ok(None);
    }
    let prompt = text.clone();
    generate(model, tokenizer, &prompt, max_tokens, Sampling::default(), |piece| {
        text.push_str(piece);
        Ok(true)
    })?;
    Ok(Some(text))
}

/// A `Continuation` is a text that is about to be continued: its settings are in range, and its
/// prompt has room in the model.
pub struct Continuation<'a> {
    model: &'a Decoder,
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    /// The token before a text, and those of the prompt.
    ids: Vec<u32>,
    /// Whether the end of a text is followed by another text.
    past_ends: bool,
}

impl<'a> Continuation<'a> {
    /// Prepares to continue `prompt`.
    ///
    /// # Errors
    /// If the prompt cannot be encoded, or has more tokens than the model has positions after the
    /// token that begins a text; if a setting of `sampling` is out of range, or the model leaks.
    pub fn new(model: &'a Decoder, tokenizer: &'a Tokenizer, prompt: &str, sampling: Sampling) -> Result<Self> {
        model.config().require_causal()?;
        let sampler = Sampler::new(sampling)?;
        // A text begins after the token between documents.
        let mut ids = vec![tokenizer.eot()];
        ids.extend(tokenizer.encode(prompt)?);
        let positions = model.positions_left(&model.new_state());
        ensure!(
            ids.len() <= positions,
            "the prompt has {} tokens, and the model has positions for {} after the beginning of a text: leave out {} tokens of \
             it, the first ones if what follows the last is asked for",
            ids.len() - 1,
            positions - 1,
            ids.len() - positions
        );
        Ok(Self { model, tokenizer, sampler, ids, past_ends: false })
    }

    /// Goes on after the end of a text with the next one, as the texts of training followed each
    /// other, so that only the number of tokens ends the generation. The tokens that end a text
    /// are counted, read by the model, and shown as an empty line.
    #[must_use]
    pub fn past_ends(self) -> Self {
        Self { past_ends: true, ..self }
    }

    /// Returns how many tokens can follow, until the model has no more positions.
    pub fn room(&self) -> usize {
        // The last token needs no position: nothing is predicted after it.
        self.model.positions_left(&self.model.new_state()) - self.ids.len() + 1
    }

    /// Begins to write, one token at a time.
    pub fn begin(self) -> Writing<'a> {
        let Self { model, tokenizer, sampler, ids, past_ends } = self;
        let stream = tokenizer.stream_after(&ids);
        Writing { model, tokenizer, sampler, past_ends, stream, state: model.new_state(), next: ids, tokens: 0 }
    }

    /// Generates at most `max_tokens` tokens, and hands the text that each completes to `emit`,
    /// until `emit` returns `false`. A token that ends within a character completes an empty text.
    ///
    /// # Errors
    /// If no logit is finite, or `emit` fails.
    pub fn write(self, max_tokens: usize, mut emit: impl FnMut(&str) -> Result<bool>) -> Result<Generation> {
        let mut writing = self.begin();
        let mut stop = Stop::MaxTokens;
        while writing.tokens() < max_tokens {
            match writing.step()? {
                Step::Ended(why) => {
                    stop = why;
                    break;
                }
                Step::Text(text) => {
                    if !emit(&text)? {
                        stop = Stop::Interrupted;
                        break;
                    }
                }
            }
        }
        let (tokens, state_bytes) = (writing.tokens(), writing.state_bytes());
        let rest = writing.rest()?;
        if stop != Stop::Interrupted && !rest.is_empty() {
            emit(&rest)?;
        }
        Ok(Generation { tokens, stop, state_bytes })
    }
}

/// `Step` is what one more token brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The text that it completed, which is empty while a character is incomplete.
    Text(String),
    /// Nothing: the text has ended, and every further step says so.
    Ended(Stop),
}

/// A `Writing` is a text that is being written, token by token, at the caller's pace.
pub struct Writing<'a> {
    model: &'a Decoder,
    tokenizer: &'a Tokenizer,
    sampler: Sampler,
    past_ends: bool,
    stream: StreamDecoder<'a>,
    state: DecoderState,
    /// What the model has not read yet: all of the prompt, and from then on the last token; empty
    /// after the end.
    next: Vec<u32>,
    tokens: usize,
}

impl Writing<'_> {
    /// Writes one more token.
    ///
    /// # Errors
    /// If no logit is finite.
    pub fn step(&mut self) -> Result<Step> {
        let Self { model, tokenizer, state, next: ids, .. } = self;
        if ids.is_empty() {
            return Ok(Step::Ended(Stop::EndOfText));
        }
        if model.positions_left(state) < ids.len() {
            return Ok(Step::Ended(Stop::PositionsUsedUp));
        }
        let input = Tensor::from_slice(ids, (1, ids.len()), model.device())?;
        let logits = model.extend(&input, state)?.squeeze(0)?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        let next = self.sampler.sample(&logits)?;
        let is_end = tokenizer.borders().is_end(next);
        if is_end && !self.past_ends {
            ids.clear();
            return Ok(Step::Ended(Stop::EndOfText));
        }
        self.tokens += 1;
        *ids = vec![next];
        self.shown(next, is_end).map(Step::Text)
    }

    /// The text that a token adds: at the end of a text, what is left of a character that was never
    /// completed, and an empty line.
    fn shown(&mut self, next: u32, is_end: bool) -> Result<String> {
        if !is_end {
            return Ok(self.stream.push(next)?.unwrap_or_default());
        }
        Ok(self.rest_before(&[next])? + "\n\n")
    }

    /// Returns what is left of a character that was never completed, and begins anew after `ids`.
    fn rest_before(&mut self, ids: &[u32]) -> Result<String> {
        std::mem::replace(&mut self.stream, self.tokenizer.stream_after(ids)).finish()
    }

    /// Returns what is left, at the end of a text, of a character that was never completed; nothing
    /// when it is asked for again.
    ///
    /// # Errors
    /// As [`StreamDecoder::finish`].
    pub fn rest(&mut self) -> Result<String> {
        self.rest_before(&[self.tokenizer.eot()])
    }

    /// Returns the number of tokens written so far, those of the prompt not counted.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Returns the number of tokens that the model has read: the one before a text, those of the
    /// prompt, and those that were written, the last one not before a further step is taken.
    pub fn tokens_read(&self) -> usize {
        self.state.tokens()
    }

    /// Returns the size of the decoding state in bytes.
    pub fn state_bytes(&self) -> usize {
        self.state.bytes()
    }
}

/// Continues `prompt` by at most `max_tokens` tokens: [`Continuation::new`] and
/// [`Continuation::write`].
///
/// # Errors
/// Those of [`Continuation::new`] and [`Continuation::write`].
pub fn generate(
    model: &Decoder,
    tokenizer: &Tokenizer,
    prompt: &str,
    max_tokens: usize,
    sampling: Sampling,
    emit: impl FnMut(&str) -> Result<bool>,
) -> Result<Generation> {
    Continuation::new(model, tokenizer, prompt, sampling)?.write(max_tokens, emit)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{
        config::{ModelConfig, Preset},
        data::{DataSpec, prepare},
        listener::Silent,
    };

    /// A tokenizer of the sample, and a model that was not trained.
    fn untrained() -> Result<(Tokenizer, Decoder)> {
        let tokenizer = prepare(&DataSpec::Sample, 300, None, &Silent)?.tokenizer;
        let (preset, _) = Preset::Seed.load()?;
        let config = ModelConfig { vocab_size: tokenizer.vocab_size(), ..preset };
        let model = Decoder::new(&config, 1, &Device::Cpu)?;
        Ok((tokenizer, model))
    }

    fn counts(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut sampler = Sampler::new(sampling).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..20_000 {
            counts[sampler.sample(logits).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0, 1.0, 2.0, f32::NEG_INFINITY];
        for temperature in [0.5, 1.0, 2.0] {
            let plain = Sampling { temperature, top_k: None, top_p: None, seed: 1 };
            let weights: Vec<f64> = logits.iter().map(|&l: &f32| (f64::from(l) / temperature).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (count, weight) in counts(plain, &logits).into_iter().zip(weights) {
                let p = weight / total;
                // Five standard errors.
                assert!((count as f64 / 20_000.0 - p).abs() <= 5.0 * (p * (1.0 - p) / 20_000.0).sqrt());
            }
        }
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [3.0, 2.0, 1.0, 0.0];
        let base = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 1 };
        let k = counts(Sampling { top_k: Some(2), ..base.clone() }, &logits);
        assert!(k[0] > 0 && k[1] > 0 && k[2] == 0 && k[3] == 0, "{k:?}");
        // The probabilities are .64 .24 .09 .03: the first two reach 0.8.
        let p = counts(Sampling { top_p: Some(0.8), ..base.clone() }, &logits);
        assert!(p[0] > 0 && p[1] > 0 && p[2] == 0 && p[3] == 0, "{p:?}");
        let greedy = counts(Sampling { temperature: 0.0, ..base }, &logits);
        assert_eq!(greedy[0], 20_000);
    }

    #[test]
    fn settings_out_of_range_are_named() {
        for (sampling, word) in [
            (Sampling { temperature: -1.0, ..Sampling::default() }, "temperature"),
            (Sampling { top_k: Some(0), ..Sampling::default() }, "top_k"),
            (Sampling { top_p: Some(0.0), ..Sampling::default() }, "top_p"),
        ] {
            let error = Sampler::new(sampling).err().unwrap().to_string();
            assert!(error.contains(word) && !error.contains("Some"), "{error}");
        }
    }

    /// Where a text goes on past its end, the first byte of a character that was never completed is
    /// shown before the end, and is no part of the next text.
    #[test]
    fn an_incomplete_character_stays_in_its_text() -> Result<()> {
        let (tokenizer, model) = untrained()?;
        let mut writing = Continuation::new(&model, &tokenizer, "One", Sampling::default())?.begin();
        let [first, ..] = tokenizer.encode("é")?[..] else { panic!("an é has tokens") };
        let [letter] = tokenizer.encode("A")?[..] else { panic!("an A is one token") };
        let end = tokenizer.borders().end.expect("an end");
        let shown = [(first, false), (end, true), (letter, false)].map(|(next, is_end)| writing.shown(next, is_end));
        assert_eq!(shown.map(Result::unwrap), ["", "\u{fffd}\n\n", "A"]);
        Ok(())
    }

    /// The first byte of a character completes no text. Whoever has said that this is enough is not
    /// handed what is left of the character either.
    #[test]
    fn nothing_is_handed_over_after_it_is_enough() -> Result<()> {
        let (tokenizer, model) = untrained()?;
        let mut incomplete = 0;
        for seed in 0..40 {
            let sampling = Sampling { temperature: 1.0, top_k: None, top_p: None, seed };
            let mut texts = Vec::new();
            let generation = generate(&model, &tokenizer, "", 5, sampling, |text| {
                texts.push(text.to_owned());
                Ok(false)
            })?;
            if generation.stop == Stop::Interrupted {
                assert_eq!(texts.len(), 1, "{texts:?}");
                incomplete += usize::from(texts[0].is_empty());
            }
        }
        assert!(incomplete > 0);
        Ok(())
    }
}
