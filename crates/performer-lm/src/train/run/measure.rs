//! What a run measures of its model: the loss on held-out text on the way, and at the end the loss
//! on all of it with features on and off, the loss by position, and the report that has them.

use anyhow::Result;

use super::{RunOptions, Trainer};
use crate::{
    config::Positions,
    data::TokenFile,
    device::describe,
    eval::{Evaluation, evaluate_over},
    files::write_json,
    generate::begin_story,
    model::Decoder,
    train::{
        Control, Report, TestLoss, folder::REPORT, git_revision, progress::Progress, report::by_range, shared::led,
    },
};

/// Most tokens over which the loss by position is measured.
const POSITION_TOKENS: usize = 1 << 18;

/// Number of ranges of positions in that measurement, over one context.
const POSITION_RANGES: usize = 16;

impl Trainer<'_> {
    /// Evaluates a model over all of a text, each rank over a part.
    pub(super) fn evaluate(&self, model: &Decoder, tokens: &TokenFile) -> Result<Evaluation> {
        self.evaluate_in(model, tokens, (model.config().context, usize::MAX))
    }

    /// Evaluates a model in windows of this context and over so many tokens at most.
    pub(super) fn evaluate_in(
        &self,
        model: &Decoder,
        tokens: &TokenFile,
        windows: (usize, usize),
    ) -> Result<Evaluation> {
        let RunOptions { ranks, threads, listener, .. } = &self.options;
        evaluate_over(ranks.world(), model, tokens, *threads, windows, *listener)
    }

    /// Generates a few words, by which the user can follow what the model learns.
    pub(super) fn sample(&self) -> Result<String> {
        if !self.options.samples || !self.options.ranks.leads() {
            return Ok(String::new());
        }
        Ok(begin_story(&self.model, &self.data.tokenizer, 40)?.unwrap_or_default())
    }

    /// Reports a run whose loss on all of the held-out text is `evaluation`: measures what is left,
    /// which is the model with its features off (`off`), the test split and the loss by position,
    /// and writes the report into the run's folder.
    pub(super) fn report(&self, evaluation: &Evaluation, off: Option<&Decoder>, progress: &Progress) -> Result<Report> {
        let features_off = match off {
            Some(off) => {
                progress.message("validating with the features off");
                let evaluation = self.evaluate(off, &self.data.valid)?;
                Some(Control {
                    attention_spec: off.config().attention_text(),
                    val_loss: evaluation.val_loss,
                    perplexity: evaluation.perplexity,
                    bits_per_byte: evaluation.bits_per_byte,
                })
            }
            None => None,
        };
        let test = match &self.data.test {
            Some(tokens) => {
                progress.message("measuring on the test split");
                let evaluation = self.evaluate(&self.model, tokens)?;
                Some(TestLoss {
                    loss: evaluation.val_loss,
                    perplexity: evaluation.perplexity,
                    bits_per_byte: evaluation.bits_per_byte,
                    features_off: off.map(|off| self.evaluate(off, tokens)).transpose()?.map(|e| e.val_loss),
                })
            }
            None => None,
        };
        progress.message("measuring the loss by position");
        let config = self.model.config();
        let contexts = if config.positions == Positions::Learned { 1 } else { 2 };
        let windows =
            self.evaluate_in(&self.model, self.data.reported(), (contexts * config.context, POSITION_TOKENS))?;
        let report = Report {
            attention: config.pattern().kind().to_string(),
            attention_spec: config.attention_text(),
            seed: self.training.seed,
            params: self.model.parameter_count(),
            state_bytes: self.model.state_bytes()?,
            // A model that leaks cannot decode.
            state_grows: !config.leak && config.growing_layers() > 0,
            features_off,
            test,
            loss_by_position: by_range(&windows.loss_by_position, contexts * POSITION_RANGES),
            val_loss: evaluation.val_loss,
            perplexity: evaluation.perplexity,
            bits_per_byte: evaluation.bits_per_byte,
            epoch_seconds: self.epoch_seconds.clone(),
            tokens_per_second: self.tokens() as f64 / self.epoch_seconds.iter().sum::<f64>().max(1e-9),
            corpus: self.data.corpus_name.clone(),
            steps: self.step(),
            tokens: self.tokens(),
            threads: self.options.threads,
            ranks: self.options.ranks.world().size(),
            device: describe(&self.options.device),
            dtype: self.training.dtype,
            revision: git_revision().to_string(),
            key: Some(self.key.clone()),
            earlier_legs: self.earlier_legs.clone(),
        };
        led(&self.options.ranks, || write_json(&self.options.out.join(REPORT), &report))?;
        Ok(report)
    }
}
