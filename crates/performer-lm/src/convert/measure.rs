//! This module measures a student on held-out text and compares its predictions with its teacher's.

use std::cell::OnceCell;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use super::{Plan, Point, Stage, windows::without_windows};
use crate::{
    data::{Batch, TokenFile, eval_windows},
    errors::Cause,
    eval::{check_vocabulary, perplexity},
    listener::Unit,
    model::Decoder,
    parallel::in_order,
    recall::{Examiner, Recall},
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

/// A `Meter` measures students beside their teacher, whose predictions of a text it makes once.
pub(super) struct Meter<'a> {
    plan: &'a Plan<'a>,
    teacher: &'a Decoder,
    held_out: Text<'a>,
    second: Option<Text<'a>>,
}

/// A text that is measured on, and the teacher's likeliest tokens in it once they are known.
struct Text<'a> {
    tokens: &'a TokenFile,
    likeliest: OnceCell<Vec<u32>>,
}

impl<'a> Text<'a> {
    fn new(tokens: &'a TokenFile) -> Self {
        Self { tokens, likeliest: OnceCell::new() }
    }
}

impl<'a> Meter<'a> {
    /// Makes a meter for the held-out text, and for the plan's second text if there is one.
    pub(super) fn new(plan: &'a Plan<'a>, teacher: &'a Decoder, held_out: &'a TokenFile) -> Self {
        let second = plan.second.map(|second| Text::new(second.tokens));
        Self { plan, teacher, held_out: Text::new(held_out), second }
    }

    /// Refuses a plan whose recall cannot be measured, before anything is.
    ///
    /// # Errors
    /// Those of [`Examiner::check_all`].
    pub(super) fn check(&self) -> Result<()> {
        self.examiner().check_all(self.teacher, &self.plan.recall)
    }

    fn examiner(&self) -> Examiner<'a> {
        let (tokenizer, threads) = (&self.plan.teacher.tokenizer, self.plan.threads);
        Examiner { tokenizer, text: self.held_out.tokens, threads, listener: self.plan.listener }
    }

    /// Measures the student on all that the plan names. Returns `None` if the plan was stopped.
    ///
    /// # Errors
    /// If a loss is not finite, for then it means nothing which token is likeliest, and those of
    /// [`Examiner::measure`].
    pub(super) fn measure(&self, student: &Decoder) -> Result<Option<Measured>> {
        let Some(held_out) = self.predictions(student, &self.held_out)? else { return Ok(None) };
        let second = match &self.second {
            Some(text) => {
                let name = self.plan.second.map_or("", |second| second.name);
                let found = self.predictions(student, text);
                let Some(found) = found.with_context(|| format!("on the second text, {name}"))? else {
                    return Ok(None);
                };
                Some(found)
            }
            None => None,
        };
        let examiner = self.examiner();
        let mut recall = Vec::with_capacity(self.plan.recall.len());
        for &length in &self.plan.recall {
            if self.plan.is_stopped() {
                return Ok(None);
            }
            recall.push(examiner.measure(student, length)?);
        }
        Ok(Some(Measured { held_out, second, recall }))
    }

    /// Measures the student's loss on the held-out text alone. Returns `None` if the plan was
    /// stopped.
    ///
    /// # Errors
    /// If the loss is not finite.
    pub(super) fn loss(&self, student: &Decoder) -> Result<Option<f64>> {
        let Some(read) = self.read(student, self.held_out.tokens)? else { return Ok(None) };
        read.mean_loss().map(Some)
    }

    /// Returns the number of tokens of the held-out text that students are measured on: about as
    /// many as the plan says, or fewer where the text has fewer.
    ///
    /// # Errors
    /// If the text has no tokens to predict.
    pub(super) fn held_out_tokens(&self) -> Result<usize> {
        let windows = self.windows(self.teacher, self.held_out.tokens)?;
        Ok(windows.iter().map(|batch| batch.rows * batch.context).sum())
    }

    fn predictions(&self, student: &Decoder, text: &Text<'_>) -> Result<Option<Predictions>> {
        let Some(read) = self.read(student, text.tokens)? else { return Ok(None) };
        let val_loss = read.mean_loss()?;
        if text.likeliest.get().is_none() {
            // The teacher is the first model that is measured, unless an earlier process did so.
            let likeliest = if std::ptr::eq(student, self.teacher) {
                read.likeliest.clone()
            } else {
                let Some(read) = self.read(self.teacher, text.tokens)? else { return Ok(None) };
                read.likeliest
            };
            text.likeliest.get_or_init(|| likeliest);
        }
        let teachers = text.likeliest.get().into_iter().flatten();
        let same = teachers.zip(&read.likeliest).filter(|(teacher, student)| teacher == student).count();
        let top1_agreement = same as f64 / read.likeliest.len() as f64;
        Ok(Some(Predictions { val_loss, perplexity: perplexity(val_loss), top1_agreement }))
    }

    /// Returns windows of the model's context from the beginning of a text, which have about as
    /// many tokens as the plan says.
    fn windows(&self, model: &Decoder, tokens: &TokenFile) -> Result<Vec<Batch>> {
        let context = model.config().context;
        let rows = (1024 / context).max(1);
        let count = self.plan.measure_tokens.div_ceil(rows * context);
        Ok(eval_windows(tokens, context, rows)?.take(count).collect())
    }

    /// Reads the [windows](Self::windows) of a text. Returns `None` if the plan was stopped.
    fn read(&self, model: &Decoder, tokens: &TokenFile) -> Result<Option<Read>> {
        let plan = self.plan;
        let windows = self.windows(model, tokens)?;
        let bar = plan.listener.begin("measuring", Unit::Texts, 0, windows.len() as u64);
        let (mut read, mut finished) = (Read { loss: 0.0, likeliest: Vec::new() }, 0);
        let done = in_order(
            model.device(),
            windows.len(),
            plan.threads,
            |i| {
                ensure!(!plan.is_stopped(), Cause::Stopped("stopped while it was measured".into()));
                let batch = &windows[i];
                check_vocabulary(batch, model)?;
                let ids = batch.ids(model.device())?;
                let (losses, likeliest) = model.losses_and_likeliest(&ids, &batch.targets)?;
                Ok((losses.to_vec1::<f32>()?, likeliest.to_vec1::<u32>()?))
            },
            |(losses, likeliest)| {
                read.loss += losses.iter().map(|&loss| f64::from(loss)).sum::<f64>();
                read.likeliest.extend(likeliest);
                finished += 1;
                bar.advance(finished);
                Ok(())
            },
        );
        if done.as_ref().is_err_and(|error| matches!(error.downcast_ref(), Some(Cause::Stopped(_)))) {
            return Ok(None);
        }
        done?;
        Ok(Some(read))
    }
}

/// What a model says of a text.
struct Read {
    /// The sum of its losses.
    loss: f64,
    /// Its likeliest token at each position.
    likeliest: Vec<u32>,
}

impl Read {
    fn mean_loss(&self) -> Result<f64> {
        let loss = self.loss / self.likeliest.len() as f64;
        ensure!(
            loss.is_finite(),
            "its loss on held-out text is {loss}: its weights hold values that are not finite, or too large"
        );
        Ok(loss)
    }
}

/// What an error of a measurement is about.
pub(super) fn about(stage: &str) -> String {
    match stage {
        "teacher" => "cannot measure the teacher".into(),
        "swap" => "cannot measure the teacher with the new attention in it, untrained".into(),
        _ => format!("cannot measure the model after the stage '{stage}'"),
    }
}

/// `Measurements` are the results of a model after a stage: as it is, and without its windows and
/// with its features off where it has them.
pub(super) struct Measurements {
    pub(super) measured: Measured,
    pub(super) without_window: Option<Measured>,
    pub(super) features_off: Option<Measured>,
}

impl Measurements {
    /// Measures a model, without its windows and with its features off too where it has them, and
    /// tells the plan's listener each loss; `None` if it was stopped.
    pub(super) fn of(model: &Decoder, meter: &Meter<'_>) -> Result<Option<Self>> {
        let tell = |what: &str, measured: &Option<Measured>| {
            let loss = measured.as_ref().map(|measured| measured.held_out.val_loss);
            loss.inspect(|loss| meter.plan.listener.note(&format!("  {what}: {loss:.4} nats/token")));
        };
        let measured = meter.measure(model)?;
        tell("measured", &measured);
        let Some(measured) = measured else { return Ok(None) };
        let mut whole = Self { measured, without_window: None, features_off: None };
        let bare = without_windows(model.config());
        let bare = bare.map(|config| Decoder::frozen(&config, &model.tensors(), model.device())).transpose()?;
        let others = [
            ("without windows", &mut whole.without_window, bare),
            ("with features off", &mut whole.features_off, model.features_off()?),
        ];
        for (what, place, model) in others {
            let Some(model) = model else { continue };
            *place = meter.measure(&model)?;
            tell(what, place);
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
