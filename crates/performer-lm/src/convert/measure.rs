//! This module measures a student on held-out text and compares its predictions with its teacher's.

use anyhow::Result;
use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use crate::{
    data::{Batch, TokenFile, eval_windows},
    eval::check_vocabulary,
    model::Decoder,
    train::in_order,
};

/// `Measured` is the result of measuring a student: how well it predicts, and how often it agrees
/// with its teacher.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Mean cross-entropy, in nats per token.
    pub val_loss: f64,
    /// Perplexity, `e^val_loss`.
    pub perplexity: f64,
    /// Share of positions at which student and teacher have the same likeliest next token.
    pub top1_agreement: f64,
}

/// Measures the student over about the first `limit` tokens, in windows of its context.
pub(super) fn measure(
    teacher: &Decoder,
    student: &Decoder,
    tokens: &TokenFile,
    limit: usize,
    threads: usize,
) -> Result<Measured> {
    let context = student.config().context.min(tokens.len().saturating_sub(1).max(1));
    let rows = (1024 / context).max(1);
    let windows: Vec<Batch> = eval_windows(tokens, context, rows)?.take(limit.div_ceil(rows * context)).collect();
    let (mut loss, mut same, mut count) = (0.0, 0.0, 0.0);
    in_order(
        windows.len(),
        threads,
        |i| {
            let batch = &windows[i];
            check_vocabulary(batch, student)?;
            let ids = Tensor::from_slice(&batch.inputs, (batch.rows, batch.context), student.device())?;
            let losses = student.losses(&ids, &batch.targets, None)?.to_vec1::<f32>()?;
            let likeliest = |model: &Decoder| -> Result<Vec<u32>> {
                Ok(model.forward(&ids, None)?.argmax(D::Minus1)?.flatten_all()?.to_vec1()?)
            };
            let same = likeliest(teacher)?.iter().zip(likeliest(student)?).filter(|(t, s)| **t == *s).count();
            Ok((losses.iter().map(|&l| f64::from(l)).sum::<f64>(), same, losses.len()))
        },
        |(losses, agreeing, tokens)| {
            loss += losses;
            same += agreeing as f64;
            count += tokens as f64;
            Ok(())
        },
    )?;
    let val_loss = loss / count;
    Ok(Measured { val_loss, perplexity: val_loss.exp(), top1_agreement: same / count })
}
