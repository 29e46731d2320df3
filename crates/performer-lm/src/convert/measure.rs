//! This module measures a student on held-out text and compares its predictions with its teacher's.

use anyhow::{Context, Result, ensure};
use candle_core::{D, Tensor};
use serde::{Deserialize, Serialize};

use super::{Plan, Point, Stage};
use crate::{
    config::{AttentionConfig, ModelConfig},
    data::{Batch, TokenFile, eval_windows},
    errors::Cause,
    eval::{check_vocabulary, perplexity},
    model::Decoder,
    recall::{Examiner, Recall},
    train::in_order,
};

/// `Predictions` say how well a student predicts a text, and how often it agrees with its teacher.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Predictions {
    /// Mean cross-entropy, in nats per token.
    pub val_loss: f64,
    /// Perplexity, `e^val_loss`.
    pub perplexity: f64,
    /// Share of positions at which student and teacher have the same likeliest next token.
    pub top1_agreement: f64,
}

/// `Measured` is the result of measuring a student.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Its predictions of the held-out text.
    #[serde(flatten)]
    pub held_out: Predictions,
    /// Its predictions of the second text, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub second: Option<Predictions>,
    /// Its recall in texts of each length that was asked for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recall: Vec<Recall>,
}

/// Measures the student on all that the plan names. Returns `None` if the plan was stopped.
///
/// # Errors
/// Those of [`predictions`] and of [`Examiner::measure`].
pub(super) fn measure(
    plan: &Plan,
    teacher: &Decoder,
    student: &Decoder,
    tokens: &TokenFile,
) -> Result<Option<Measured>> {
    let Some(held_out) = predictions(plan, teacher, student, tokens)? else { return Ok(None) };
    let second = match &plan.second {
        Some(second) => {
            let about = || format!("on the second text, {}", second.name);
            let Some(found) = predictions(plan, teacher, student, second.tokens).with_context(about)? else {
                return Ok(None);
            };
            Some(found)
        }
        None => None,
    };
    let examiner = Examiner { tokenizer: &plan.teacher.tokenizer, text: tokens, threads: plan.threads };
    let mut recall = Vec::with_capacity(plan.recall.len());
    for &length in &plan.recall {
        if plan.is_stopped() {
            return Ok(None);
        }
        recall.push(examiner.measure(student, length)?);
    }
    Ok(Some(Measured { held_out, second, recall }))
}

/// Measures the student over about the first tokens of a text, as many as the plan says, in windows
/// of its context. Returns `None` if the plan was stopped.
///
/// # Errors
/// If a loss is not finite: which token is likeliest then means nothing.
pub(super) fn predictions(
    plan: &Plan,
    teacher: &Decoder,
    student: &Decoder,
    tokens: &TokenFile,
) -> Result<Option<Predictions>> {
    let limit = plan.measure_tokens;
    let context = student.config().context.min(tokens.len().saturating_sub(1).max(1));
    let rows = (1024 / context).max(1);
    let windows: Vec<Batch> = eval_windows(tokens, context, rows)?.take(limit.div_ceil(rows * context)).collect();
    let (mut loss, mut same, mut count) = (0.0, 0.0, 0.0);
    let measured = in_order(
        windows.len(),
        plan.threads,
        |i| {
            ensure!(!plan.is_stopped(), Cause::Stopped("stopped while it was measured".into()));
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
    );
    if measured.as_ref().is_err_and(|error| matches!(error.downcast_ref(), Some(Cause::Stopped(_)))) {
        return Ok(None);
    }
    measured?;
    let val_loss = loss / count;
    ensure!(
        val_loss.is_finite(),
        "its loss on held-out text is {val_loss}: its weights hold values that are not finite, or too large"
    );
    Ok(Some(Predictions { val_loss, perplexity: perplexity(val_loss), top1_agreement: same / count }))
}

/// What an error of a measurement is about.
pub(super) fn about(stage: &str) -> String {
    match stage {
        "teacher" => "cannot measure the teacher".into(),
        "swap" => "cannot measure the teacher with features drawn at random in it".into(),
        _ => format!("cannot measure the model after the stage '{stage}'"),
    }
}

/// `Measurements` are what a model is measured as after a stage.
pub(super) struct Measurements {
    pub(super) measured: Measured,
    pub(super) without_window: Option<Measured>,
    pub(super) features_off: Option<Measured>,
}

impl Measurements {
    /// Measures a model, without its windows and with its features off too where it has them;
    /// `None` if it was stopped.
    pub(super) fn of(model: &Decoder, measure: &dyn Fn(&Decoder) -> Result<Option<Measured>>) -> Result<Option<Self>> {
        let Some(measured) = measure(model)? else { return Ok(None) };
        let mut whole = Self { measured, without_window: None, features_off: None };
        let others =
            [(&mut whole.without_window, without_windows(model)?), (&mut whole.features_off, model.features_off()?)];
        for (place, model) in others {
            let Some(model) = model else { continue };
            *place = measure(&model)?;
            if place.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(whole))
    }

    pub(super) fn stage(self, name: &str, tokens: u64, seconds: f64, points: Vec<Point>) -> Stage {
        let Self { measured, without_window, features_off } = self;
        Stage { name: name.into(), tokens, seconds, measured, without_window, features_off, points }
    }
}

/// Returns the student with its windows switched off, or `None` if it has none beside features.
fn without_windows(student: &Decoder) -> Result<Option<Decoder>> {
    let config = student.config();
    let has_both = |attention: &AttentionConfig| attention.window().is_some() && attention.favor().is_some();
    if !(0..config.layers).any(|i| has_both(config.attention_of(i))) {
        return Ok(None);
    }
    fn bare(attention: &AttentionConfig) -> AttentionConfig {
        match attention {
            AttentionConfig::Windowed { far, .. } => AttentionConfig::Favor(far.clone()),
            AttentionConfig::Equipped { parts, of } => {
                AttentionConfig::Equipped { parts: *parts, of: Box::new(bare(of)) }
            }
            other => other.clone(),
        }
    }
    let config = ModelConfig {
        attention: bare(&config.attention),
        attention_by_layer: config.attention_by_layer.iter().map(|(&i, a)| (i, bare(a))).collect(),
        ..config.clone()
    };
    Ok(Some(Decoder::frozen(&config, &student.tensors()?, student.device())?))
}
