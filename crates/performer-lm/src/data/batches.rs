//! This module cuts a stream of tokens into windows and makes batches of them: shuffled for
//! training, in order for evaluation.

use std::{
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result, bail};
use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::tokens::TokenFile;

/// A `Batch` holds rows of input tokens and of the targets that follow them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// The input tokens, shape `(rows, context)`, row after row.
    pub inputs: Vec<u32>,
    /// The targets, shape `(rows, context)`: the token after each input.
    pub targets: Vec<u32>,
    /// Number of rows.
    pub rows: usize,
    /// Tokens in a row.
    pub context: usize,
}

impl Batch {
    /// Reads the windows that start at the positions `starts`.
    fn read(tokens: &TokenFile, starts: impl Iterator<Item = usize>, context: usize) -> Self {
        let mut batch = Self { inputs: Vec::new(), targets: Vec::new(), rows: 0, context };
        for start in starts {
            let window = tokens.read(start..start + context + 1);
            batch.inputs.extend(&window[..context]);
            batch.targets.extend(&window[1..]);
            batch.rows += 1;
        }
        batch
    }

    /// Returns the input tokens as a tensor, shape `(rows, context)`.
    pub fn ids(&self, device: &Device) -> Result<Tensor> {
        Ok(Tensor::from_slice(&self.inputs, (self.rows, self.context), device)?)
    }
}

/// Returns the number of whole windows of `context` inputs and their targets.
fn windows(tokens: &TokenFile, context: usize) -> usize {
    tokens.len().saturating_sub(1) / context
}

/// `Batches` yields the batches of training.
///
/// The stream is cut into windows that do not overlap; every epoch visits each window once, in an
/// order of its own. Two remainders are not trained on: the end of the stream where it is shorter
/// than a window, and the windows at the end of an epoch that do not fill a batch. The latter are
/// other windows in every epoch. The order depends on seed and epoch alone, so a run resumes at
/// `(epoch, index)` without replaying anything.
#[derive(Debug)]
pub struct Batches {
    tokens: Arc<TokenFile>,
    context: usize,
    batch_size: usize,
    windows: u32,
    seed: u64,
    /// The epoch used last, with its order of windows.
    order: Mutex<Option<(u64, Arc<[u32]>)>>,
}

impl Batches {
    /// Makes batches of `batch_size` windows of `context` inputs.
    ///
    /// # Errors
    /// If context or batch size is zero, or the stream does not fill one batch.
    pub fn new(tokens: Arc<TokenFile>, context: usize, batch_size: usize, seed: u64) -> Result<Self> {
        if context == 0 || batch_size == 0 {
            bail!("context ({context}) and batch size ({batch_size}) must be at least 1");
        }
        let windows = windows(&tokens, context);
        if windows < batch_size {
            bail!(
                "{} tokens of training text are {windows} windows of {context} tokens, fewer than one batch of \
                 {batch_size}; use a shorter context or more text, or smaller batches where they can be chosen",
                tokens.len()
            );
        }
        let windows = u32::try_from(windows).context("too many windows; use a longer context")?;
        Ok(Self { tokens, context, batch_size, windows, seed, order: Mutex::new(None) })
    }

    /// Keeps only the first `tokens` tokens of the stream, but at least one batch.
    pub fn limited_to(mut self, tokens: usize) -> Self {
        let windows = (tokens / self.context).max(self.batch_size);
        self.windows = self.windows.min(u32::try_from(windows).unwrap_or(u32::MAX));
        self
    }

    /// Returns the number of whole batches in an epoch, at least 1.
    pub fn batches_per_epoch(&self) -> usize {
        self.windows as usize / self.batch_size
    }

    /// Returns the number of tokens that one batch trains on.
    pub fn tokens_per_batch(&self) -> usize {
        self.context * self.batch_size
    }

    /// Returns `(epoch, index)` of step number `step`, counted from 0 over all epochs.
    pub fn position(&self, step: u64) -> (u64, usize) {
        let per_epoch = self.batches_per_epoch() as u64;
        (step / per_epoch, (step % per_epoch) as usize)
    }

    /// Returns the batch number `index` of an epoch.
    ///
    /// # Errors
    /// If `index` is [`Self::batches_per_epoch`] or more.
    pub fn batch(&self, epoch: u64, index: usize) -> Result<Batch> {
        self.part(epoch, index, 0..self.batch_size, 0..self.context)
    }

    /// Returns some of the rows of a batch, and of each some of the tokens. Nothing else is read.
    ///
    /// # Errors
    /// As [`Self::batch`]; also if the batch has no such rows or tokens.
    pub fn part(&self, epoch: u64, index: usize, rows: Range<usize>, tokens: Range<usize>) -> Result<Batch> {
        if index >= self.batches_per_epoch() {
            bail!("there is no batch {index}: an epoch has {}", self.batches_per_epoch());
        }
        let (has_rows, has_tokens) = (rows.end <= self.batch_size, tokens.end <= self.context);
        if !has_rows || !has_tokens || rows.start > rows.end || tokens.start > tokens.end {
            bail!(
                "rows {rows:?} and tokens {tokens:?} are not in a batch of {} rows of {} tokens",
                self.batch_size,
                self.context
            );
        }
        let order = self.order(epoch);
        let picked = &order[index * self.batch_size..][rows];
        let starts = picked.iter().map(|&window| window as usize * self.context + tokens.start);
        Ok(Batch::read(&self.tokens, starts, tokens.len()))
    }

    fn order(&self, epoch: u64) -> Arc<[u32]> {
        let mut order = self.order.lock().unwrap_or_else(PoisonError::into_inner);
        match &*order {
            Some((known, order)) if *known == epoch => order.clone(),
            _ => {
                let new: Arc<[u32]> = shuffled(self.windows, self.seed, epoch).into();
                *order = Some((epoch, new.clone()));
                new
            }
        }
    }
}

/// Returns the numbers below `n`, shuffled by Fisher-Yates on ChaCha8 with the epoch as its stream.
/// The algorithm is written out here so that no new version of a library changes the order: saved
/// runs depend on it.
fn shuffled(n: u32, seed: u64, epoch: u64) -> Vec<u32> {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(epoch);
    let mut order: Vec<u32> = (0..n).collect();
    for i in (1..order.len()).rev() {
        let j = (u128::from(rng.next_u64()) * (i as u128 + 1)) >> 64;
        order.swap(i, j as usize);
    }
    order
}

/// Returns the windows of a stream in order, so that every token but the first is a target exactly
/// once: batches of `rows` windows of `context` tokens, then, if tokens remain, a batch of fewer
/// rows, then a single shorter window.
///
/// # Errors
/// If the context or the number of rows is zero, or the stream has fewer than two tokens.
pub fn eval_windows(tokens: &TokenFile, context: usize, rows: usize) -> Result<EvalWindows<'_>> {
    if context == 0 || rows == 0 {
        bail!("context ({context}) and rows ({rows}) must be at least 1");
    }
    if tokens.len() < 2 {
        bail!("there is nothing to predict in a text of {} tokens", tokens.len());
    }
    Ok(EvalWindows { tokens, context, rows, next: 0, end: tokens.len() - 1 })
}

/// `EvalWindows` is the iterator that [`eval_windows`] returns.
#[derive(Debug)]
pub struct EvalWindows<'a> {
    tokens: &'a TokenFile,
    context: usize,
    rows: usize,
    /// Position of the next input.
    next: usize,
    /// Position after the last input.
    end: usize,
}

impl EvalWindows<'_> {
    /// Keeps only the first `targets` targets.
    pub fn first(mut self, targets: usize) -> Self {
        self.end = self.end.min(self.next.saturating_add(targets));
        self
    }

    /// Returns the batch of this number, counted from the next one. No other is read.
    ///
    /// # Errors
    /// If no more than `index` batches are left.
    pub fn batch(&self, index: usize) -> Result<Batch> {
        let whole = (self.end - self.next) / self.context * self.context;
        let before = index.saturating_mul(self.rows).saturating_mul(self.context);
        let mut rest = Self { next: self.next + before.min(whole), ..*self };
        match rest.next() {
            Some(batch) if index < self.len() => Ok(batch),
            _ => bail!("there is no batch {index}: {} are left", self.len()),
        }
    }
}

impl Iterator for EvalWindows<'_> {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        let left = self.end - self.next;
        if left == 0 {
            return None;
        }
        let context = self.context.min(left);
        let rows = self.rows.min(left / context);
        let start = self.next;
        self.next += rows * context;
        let starts = (0..rows).map(|row| start + row * context);
        Some(Batch::read(self.tokens, starts, context))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.end - self.next;
        let whole = left / self.context;
        let batches = whole.div_ceil(self.rows) + usize::from(!left.is_multiple_of(self.context));
        (batches, Some(batches))
    }
}

impl ExactSizeIterator for EvalWindows<'_> {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a stream in which every token equals its position.
    fn stream(len: u32) -> Arc<TokenFile> {
        let tokens: Vec<u32> = (0..len).collect();
        Arc::new(TokenFile::from_tokens(&tokens, 0).unwrap())
    }

    fn epoch(batches: &Batches, epoch: u64) -> Vec<Batch> {
        let all = 0..batches.batches_per_epoch();
        all.map(|index| batches.batch(epoch, index).unwrap()).collect()
    }

    fn starts(batches: &[Batch]) -> Vec<u32> {
        let rows = batches.iter().flat_map(|b| b.inputs.chunks(b.context));
        rows.map(|row| row[0]).collect()
    }

    #[test]
    fn a_limit_keeps_to_the_beginning() {
        let batches = |limit| Batches::new(stream(101), 5, 2, 7).unwrap().limited_to(limit);
        let mut seen = starts(&epoch(&batches(31), 0));
        seen.sort_unstable();
        assert_eq!(seen, [0, 5, 10, 15, 20, 25]);
        assert_eq!(batches(0).batches_per_epoch(), 1);
        assert_eq!(batches(1000).batches_per_epoch(), 10);
    }

    #[test]
    fn an_epoch_takes_each_window_once() {
        let batches = Batches::new(stream(12 * 5 + 3), 5, 4, 7).unwrap();
        assert_eq!((batches.batches_per_epoch(), batches.tokens_per_batch()), (3, 20));
        for e in 0..3 {
            let all = epoch(&batches, e);
            let mut starts = starts(&all);
            starts.sort();
            assert_eq!(starts, (0..12).map(|w| w * 5).collect::<Vec<_>>());
            for batch in &all {
                assert_eq!((batch.rows, batch.context), (4, 5));
                assert_eq!(batch.inputs.len(), 20);
                // Every token equals its position, so a window is contiguous if and only if its
                // targets are its inputs plus one.
                for row in batch.inputs.chunks(5) {
                    assert!(row.windows(2).all(|pair| pair[1] == pair[0] + 1));
                }
                let next: Vec<_> = batch.inputs.iter().map(|token| token + 1).collect();
                assert_eq!(batch.targets, next);
            }
        }
    }

    #[test]
    fn a_part_is_what_the_batch_has_there() {
        let batches = Batches::new(stream(200), 6, 4, 7).unwrap();
        let whole = batches.batch(1, 2).unwrap();
        let part = batches.part(1, 2, 1..3, 2..5).unwrap();
        assert_eq!((part.rows, part.context), (2, 3));
        let inputs: Vec<u32> = (1..3).flat_map(|row| whole.inputs[row * 6 + 2..row * 6 + 5].to_vec()).collect();
        let targets: Vec<u32> = inputs.iter().map(|token| token + 1).collect();
        assert_eq!((part.inputs, part.targets), (inputs, targets));
        assert_eq!(batches.part(1, 2, 4..4, 0..6).unwrap().rows, 0);
        assert!(batches.part(1, 2, 3..5, 0..6).is_err() && batches.part(1, 2, 0..1, 0..7).is_err());
    }

    #[test]
    fn order_is_a_function_of_seed_and_epoch() {
        let new = |seed| Batches::new(stream(500), 3, 2, seed).unwrap();
        let (one, two, other) = (new(1), new(1), new(2));
        let first = epoch(&one, 0);
        assert_ne!(starts(&first), starts(&epoch(&one, 1)));
        assert_ne!(starts(&first), starts(&epoch(&other, 0)));
        // A batch does not depend on the batches read before it.
        assert_eq!(two.batch(5, 3).unwrap(), one.batch(5, 3).unwrap());
        assert_eq!(epoch(&two, 0), first);
        assert_eq!(one.batch(0, 9).unwrap(), first[9]);
        // The order is fixed for all versions and machines.
        assert_eq!(shuffled(8, 1, 0), [6, 1, 0, 7, 5, 4, 2, 3]);
    }

    #[test]
    fn partial_batches_are_left_out() {
        let batches = Batches::new(stream(7 * 5 + 1), 5, 3, 0).unwrap();
        assert_eq!(batches.batches_per_epoch(), 2);
        assert!(batches.batch(0, 2).is_err());
        let backwards = |start, end| Range { start, end };
        for (rows, tokens) in [(0..4, 0..5), (0..3, 0..6), (backwards(2, 1), 0..5), (0..3, backwards(3, 2))] {
            assert!(batches.part(0, 0, rows, tokens).is_err());
        }
        let positions = [0, 1, 2, 5].map(|step| batches.position(step));
        assert_eq!(positions, [(0, 0), (0, 1), (1, 0), (2, 1)]);
    }

    #[test]
    fn the_last_target_needs_a_token() {
        assert!(Batches::new(stream(11), 5, 2, 0).is_ok());
        let error = Batches::new(stream(10), 5, 2, 0).unwrap_err().to_string();
        assert!(error.contains("fewer than one batch"), "{error}");
        assert!(Batches::new(stream(0), 5, 1, 0).is_err());
        assert!(Batches::new(stream(9), 0, 1, 0).is_err());
        assert!(Batches::new(stream(9), 1, 0, 0).is_err());
    }

    #[test]
    fn evaluation_predicts_every_token_once() {
        for (len, context, rows) in [(2, 5, 3), (6, 5, 3), (7, 5, 3), (100, 5, 3), (91, 5, 3), (90, 1, 1)] {
            let tokens = stream(len);
            let mut windows = eval_windows(&tokens, context, rows).unwrap();
            let mut all = Vec::new();
            for left in (0..windows.len()).rev() {
                all.extend(windows.next());
                assert_eq!(windows.len(), left, "{len} {context} {rows}");
            }
            assert!(windows.next().is_none());
            let windows = eval_windows(&tokens, context, rows).unwrap();
            for (index, batch) in all.iter().enumerate() {
                assert_eq!(windows.batch(index).unwrap(), *batch, "{len} {context} {rows}");
            }
            assert!(windows.batch(all.len()).is_err() && windows.batch(usize::MAX).is_err());
            let targets: Vec<_> = all.iter().flat_map(|b| b.targets.clone()).collect();
            assert_eq!(targets, (1..len).collect::<Vec<_>>());
            for batch in &all {
                assert_eq!(batch.inputs.len(), batch.rows * batch.context);
                assert!(batch.rows <= rows && batch.context <= context);
            }
        }
        assert!(eval_windows(&stream(1), 5, 3).is_err());
        assert!(eval_windows(&stream(9), 0, 3).is_err());
    }
}
