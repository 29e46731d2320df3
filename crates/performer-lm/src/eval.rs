//! This module measures how well a model predicts text: cross-entropy in nats per token,
//! perplexity, bits per byte, and loss against position in the context.

use anyhow::{Result, bail, ensure};
use performer_dist::{One, Ranks, gather, share};
use serde::{Deserialize, Serialize};

use crate::{
    data::{Batch, TokenFile, eval_windows},
    errors::Cause,
    listener::{Listener, Silent, Unit},
    model::Decoder,
    parallel::in_order,
};

/// An `Evaluation` is a model's loss over a text, each token but the first predicted once, from at
/// most `context` tokens before it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Mean cross-entropy (negative log-likelihood), in nats per token.
    pub val_loss: f64,
    /// Perplexity, `e^val_loss`, or the largest number that there is.
    pub perplexity: f64,
    /// Bits per byte of text, which can be compared across tokenizers.
    pub bits_per_byte: f64,
    /// Number of tokens predicted.
    pub tokens: u64,
    /// Number of bytes of the text that they cover. Of a part of a text it is that part of the
    /// text's bytes, as if each token covered as many; then it and [`Evaluation::bits_per_byte`]
    /// are estimates.
    pub bytes: u64,
    /// Mean loss at each position of the context window, first position first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub loss_by_position: Vec<f64>,
}

/// Evaluates `model` over `tokens` in windows of the model's context.
///
/// # Errors
/// If the text has fewer than two tokens, a token lies beyond the model's vocabulary, or the mean
/// loss is not finite.
pub fn evaluate(model: &Decoder, tokens: &TokenFile, threads: usize) -> Result<Evaluation> {
    evaluate_over(&One, model, tokens, threads, (model.config().context, usize::MAX), &Silent)
}

/// Evaluates `model` over the first `limit` tokens that can be predicted, in windows of `context`
/// tokens. The listener is told how far it is.
///
/// # Errors
/// As [`evaluate`]; also if the limit or the context is 0, or the context is longer than the
/// learned positions of the model.
pub fn evaluate_windows(
    model: &Decoder,
    tokens: &TokenFile,
    threads: usize,
    context: usize,
    limit: usize,
    listener: &dyn Listener,
) -> Result<Evaluation> {
    evaluate_over(&One, model, tokens, threads, (context, limit), listener)
}

/// Does what [`evaluate_windows`] does on several ranks, each of which takes a part of the windows.
/// All get the result, whose bits do not depend on the number of ranks.
pub(crate) fn evaluate_over(
    ranks: &dyn Ranks,
    model: &Decoder,
    tokens: &TokenFile,
    threads: usize,
    (context, limit): (usize, usize),
    listener: &dyn Listener,
) -> Result<Evaluation> {
    ensure!(context > 0, Cause::setting("", "context", 0, "at least 1"));
    ensure!(limit > 0, "0 tokens are to be predicted; it must be at least 1");
    // No window is longer than the text.
    let context = context.min(tokens.len().saturating_sub(1).max(1));
    // About 4096 tokens in a pass are enough rows for the matrix products.
    let rows = (4096 / context).max(1);
    let windows = eval_windows(tokens, context, rows)?.first(limit);
    let own = share(windows.len(), ranks.rank(), ranks.size());
    let bar = listener.begin("measuring", Unit::Texts, 0, own.len() as u64);
    // Losses come in the order of the text, in which no window but the last is shorter than the
    // context.
    let (mut sums, mut known) = (vec![(0f64, 0u64); context], 0);
    let mut add = |loss: f32| {
        let sum = &mut sums[known % context];
        *sum = (sum.0 + f64::from(loss), sum.1 + 1);
        known += 1;
    };
    // The losses of one rank among several, which the others get.
    let (mut bytes, mut done) = (Vec::new(), 0);
    in_order(
        model.device(),
        own.len(),
        threads,
        |i| {
            let batch = windows.batch(own.start + i)?;
            check_vocabulary(&batch, model)?;
            let ids = batch.ids(model.device())?;
            Ok(model.losses(&ids, &batch.targets, None)?.to_vec1::<f32>()?)
        },
        |part| {
            if ranks.size() == 1 {
                part.into_iter().for_each(&mut add);
            } else {
                bytes.extend(part.into_iter().flat_map(f32::to_le_bytes));
            }
            done += 1;
            bar.advance(done);
            Ok(())
        },
    )?;
    if ranks.size() > 1 {
        let all = gather(ranks, &bytes)?.concat();
        all.chunks_exact(4).for_each(|loss| add(f32::from_le_bytes([loss[0], loss[1], loss[2], loss[3]])));
    }
    let (total, count) = sums.iter().fold((0.0, 0), |a, s| (a.0 + s.0, a.1 + s.1));
    let val_loss = total / count as f64;
    ensure!(
        val_loss.is_finite(),
        "the loss over this text is {val_loss}: the model's weights hold values that are not finite"
    );
    // A part of the text counts a proportional part of the bytes.
    let bytes = (tokens.bytes() as f64 * count as f64 / (tokens.len() - 1) as f64).round() as u64;
    Ok(Evaluation {
        val_loss,
        perplexity: perplexity(val_loss),
        bits_per_byte: total / std::f64::consts::LN_2 / bytes.max(1) as f64,
        tokens: count,
        bytes,
        loss_by_position: sums.iter().filter(|s| s.1 > 0).map(|s| s.0 / s.1 as f64).collect(),
    })
}

/// Returns the perplexity of a loss in nats per token, `e^loss`; the largest number that there is
/// where that is larger still, since JSON has no infinity.
pub(crate) fn perplexity(loss: f64) -> f64 {
    loss.exp().min(f64::MAX)
}

/// The least perplexity that is shown by its power of ten: more digits than that say nothing.
const HUGE: f64 = 1e6;

/// Formats a perplexity with so many digits after the point, or as 1.5e104 if it is huge.
pub(crate) fn show_perplexity(perplexity: f64, digits: usize) -> String {
    if perplexity < HUGE { format!("{perplexity:.digits$}") } else { format!("{perplexity:.1e}") }
}

/// Whether a loss, in nats per token, is well above that of a guess among all tokens of the
/// vocabulary, which a model has before it learns anything.
pub(crate) fn is_worse_than_guessing(loss: f64, vocabulary: usize) -> bool {
    loss > 1.1 * guessing(vocabulary)
}

/// Returns the loss of a guess among all tokens of the vocabulary, in nats per token.
pub(crate) fn guessing(vocabulary: usize) -> f64 {
    (vocabulary as f64).ln()
}

/// Refuses tokens for which the model has no embedding.
pub(crate) fn check_vocabulary(batch: &Batch, model: &Decoder) -> Result<()> {
    let vocabulary = model.config().vocab_size;
    match batch.inputs.iter().chain(&batch.targets).find(|&&id| id as usize >= vocabulary) {
        None => Ok(()),
        Some(id) => bail!(
            "token {id} lies beyond the model's vocabulary of {vocabulary}: text and model have different tokenizers"
        ),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;
    use crate::config::{ModelConfig, Positions, Preset};

    const VOCABULARY: usize = 20;
    const CONTEXT: usize = 5;
    const BYTES: u64 = 40;

    fn model() -> Result<Decoder> {
        let (config, _) = Preset::Seed.load()?;
        let positions = Positions::Rotary { base: 100.0 };
        let small = ModelConfig { hidden_size: 8, heads: 2, kv_heads: 2, feed_forward_size: 8, positions, ..config };
        let small = ModelConfig { vocab_size: VOCABULARY, layers: 1, context: CONTEXT, dropout: 0.0, ..small };
        Decoder::new(&small, 3, &Device::Cpu)
    }

    fn tokens() -> Vec<u32> {
        (0..13).map(|i| (i * 7 + 3) % VOCABULARY as u32).collect()
    }

    /// The losses of all tokens but the first in windows of a context, from the model's logits.
    fn losses(model: &Decoder, context: usize) -> Result<Vec<f64>> {
        let (tokens, mut losses) = (tokens(), Vec::new());
        for start in (0..tokens.len() - 1).step_by(context) {
            let end = (start + context).min(tokens.len() - 1);
            let ids = Tensor::new(&tokens[start..end], &Device::Cpu)?.unsqueeze(0)?;
            let logits = model.forward(&ids, None)?.squeeze(0)?.to_dtype(DType::F64)?.to_vec2::<f64>()?;
            for (row, &target) in logits.iter().zip(&tokens[start + 1..=end]) {
                losses.push(row.iter().map(|x| x.exp()).sum::<f64>().ln() - row[target as usize]);
            }
        }
        Ok(losses)
    }

    /// Compares an evaluation with losses, which cover so many bytes, by position in the context.
    #[track_caller]
    fn check(found: &Evaluation, losses: &[f64], bytes: u64, context: usize) {
        let close = |a: f64, b: f64| assert!((a - b).abs() < 1e-5, "{a} is not {b}");
        let mean = |all: &[f64]| all.iter().sum::<f64>() / all.len() as f64;
        close(found.val_loss, mean(losses));
        assert_eq!(found.perplexity, found.val_loss.exp());
        close(found.bits_per_byte, losses.iter().sum::<f64>() / 2f64.ln() / bytes as f64);
        assert_eq!((found.tokens, found.bytes), (losses.len() as u64, bytes));
        assert_eq!(found.loss_by_position.len(), context.min(losses.len()));
        for (at, &found) in found.loss_by_position.iter().enumerate() {
            let own: Vec<f64> = losses.iter().skip(at).step_by(context).copied().collect();
            close(found, mean(&own));
        }
    }

    #[test]
    fn an_evaluation_is_the_mean_of_the_losses() -> Result<()> {
        let (model, file) = (model()?, TokenFile::from_tokens(&tokens(), BYTES)?);
        let own = losses(&model, CONTEXT)?;
        assert!(own.iter().any(|loss| (loss - own[0]).abs() > 1e-3), "losses that are all alike test nothing");
        for threads in [1, 2] {
            check(&evaluate(&model, &file, threads)?, &own, BYTES, CONTEXT);
        }
        // Seven of twelve targets are of 23 bytes of 40, rounded.
        check(&evaluate_windows(&model, &file, 1, CONTEXT, 7, &Silent)?, &own[..7], 23, CONTEXT);
        // Positions that nothing was predicted at have no loss.
        check(&evaluate_windows(&model, &file, 1, CONTEXT, 3, &Silent)?, &own[..3], 10, CONTEXT);
        check(&evaluate_windows(&model, &file, 1, 100, usize::MAX, &Silent)?, &losses(&model, 12)?, BYTES, 12);
        // Of a text without bytes, one is counted.
        let none = evaluate(&model, &TokenFile::from_tokens(&tokens(), 0)?, 1)?;
        assert_eq!(none.bytes, 0);
        assert!((none.bits_per_byte - own.iter().sum::<f64>() / 2f64.ln()).abs() < 1e-4);
        Ok(())
    }

    #[test]
    fn what_cannot_be_evaluated_is_refused() -> Result<()> {
        let (model, file) = (model()?, TokenFile::from_tokens(&tokens(), BYTES)?);
        let error = |result: Result<Evaluation>| result.expect_err("it is refused").to_string();
        assert!(error(evaluate_windows(&model, &file, 1, 0, 9, &Silent)).contains("context is 0"));
        assert!(error(evaluate_windows(&model, &file, 1, 9, 0, &Silent)).contains("0 tokens"));
        assert!(error(evaluate(&model, &TokenFile::from_tokens(&[1], 1)?, 1)).contains("nothing to predict"));
        for beyond in [[1, 20], [20, 1]] {
            let foreign = TokenFile::from_tokens(&beyond, 2)?;
            assert!(error(evaluate(&model, &foreign, 1)).contains("token 20 lies beyond"));
        }
        evaluate(&model, &TokenFile::from_tokens(&[1, 19], 2)?, 1)?;
        Ok(())
    }

    #[test]
    fn perplexities_and_guesses() {
        assert_eq!((perplexity(0.0), perplexity(1.0), perplexity(800.0)), (1.0, 1f64.exp(), f64::MAX));
        assert_eq!(show_perplexity(19.636, 2), "19.64");
        assert_eq!(show_perplexity(999_999.0, 0), "999999");
        assert_eq!(show_perplexity(1e6, 2), "1.0e6");
        assert!((guessing(20) - 2.995_732).abs() < 1e-6);
        assert!(!is_worse_than_guessing(3.0, 20) && !is_worse_than_guessing(1.1 * guessing(20), 20));
        assert!(is_worse_than_guessing(3.3, 20));
    }
}
