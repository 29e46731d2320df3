//! What a listener is told of training: steps with their loss and the tokens a second, and the
//! results of validations.

use std::{cell::Cell, time::Instant};

use crate::{
    config::ModelConfig,
    eval::{Evaluation, guessing, is_worse_than_guessing, show_perplexity},
    listener::{Bar, Listener, Silent, Unit, show_speed},
};

/// Weight of the newest step in the speed of a run.
const SMOOTHING: f64 = 0.1;

/// The progress of a training run.
pub(super) struct Progress<'a> {
    listener: &'a dyn Listener,
    bar: Box<dyn Bar + 'a>,
    name: String,
    vocabulary: usize,
    /// The loss of the last validation.
    last: Cell<Option<f64>>,
    speed: Cell<f64>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(listener: &'a dyn Listener, model: &ModelConfig, step: usize, total: usize) -> Self {
        let name = model.attention_text();
        let bar = listener.begin(&name, Unit::Steps, step as u64, total as u64);
        Self { listener, bar, name, vocabulary: model.vocab_size, last: Cell::new(None), speed: Cell::new(0.0) }
    }

    pub(super) fn step(&self, step: usize, loss: f64, tokens: usize, seconds: f64) {
        let now = tokens as f64 / seconds.max(1e-9);
        let old = self.speed.get();
        self.speed.set(if old == 0.0 { now } else { old + SMOOTHING * (now - old) });
        self.bar.step(step, loss, self.speed.get());
    }

    /// Ends the bar of the steps, since all of them are saved: what follows is told by notes, and
    /// to stop it would lose nothing.
    pub(super) fn end(&mut self) {
        self.bar = Box::new(Silent);
    }

    /// Says what is done after the steps.
    pub(super) fn message(&self, text: &str) {
        self.listener.note(&format!("{}  {text}", self.name));
    }

    pub(super) fn validation(&self, step: usize, e: &Evaluation, sample: &str) {
        self.bar.validation(step, e.val_loss);
        // A run that goes on after its last step has taken none.
        let speed = Some(self.speed.get()).filter(|&speed| speed > 0.0);
        self.listener.note(&format!(
            "{}  step {step:>6}  validation {:.4} nats/token  perplexity {}{}",
            self.name,
            e.val_loss,
            show_perplexity(e.perplexity, 2),
            speed.map_or_else(String::new, |speed| format!("  {}", show_speed(speed)))
        ));
        let rises = self.last.replace(Some(e.val_loss)).is_none_or(|last| e.val_loss > last);
        if rises && is_worse_than_guessing(e.val_loss, self.vocabulary) {
            self.listener.note(&format!(
                "warning: this is above {:.4}, the loss of a guess among all {} tokens{}: the model gets worse; lower the learning rate",
                guessing(self.vocabulary),
                self.vocabulary,
                if e.val_loss > 2.0 * guessing(self.vocabulary) { " by far" } else { "" },
            ));
        }
        if !sample.is_empty() {
            self.listener.note(&format!("  | {}", sample.replace('\n', " ")));
        }
    }
}

/// The progress of a training without validations.
pub(crate) struct StepBar<'a> {
    bar: Box<dyn Bar + 'a>,
    begun: Instant,
    tokens: Cell<usize>,
}

impl<'a> StepBar<'a> {
    /// A bar for a training of `steps` steps, of which an earlier process has taken `done`.
    pub(crate) fn new(listener: &'a dyn Listener, name: &str, done: usize, steps: usize) -> Self {
        let bar = listener.begin(name, Unit::Steps, done as u64, steps as u64);
        Self { bar, begun: Instant::now(), tokens: Cell::new(0) }
    }

    /// Advances the bar after a step of `tokens` tokens.
    pub(crate) fn step(&self, step: usize, loss: f64, tokens: usize) {
        self.tokens.set(self.tokens.get() + tokens);
        let seconds = self.begun.elapsed().as_secs_f64().max(1e-9);
        self.bar.step(step, loss, self.tokens.get() as f64 / seconds);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[test]
    fn a_bar_begins_where_the_training_goes_on() {
        struct Told(AtomicU64);
        impl Listener for Told {
            fn begin(&self, _: &str, _: Unit, done: u64, _: u64) -> Box<dyn Bar + '_> {
                self.0.store(done, Ordering::Relaxed);
                Box::new(crate::listener::Silent)
            }
        }
        let told = Told(AtomicU64::new(0));
        drop(StepBar::new(&told, "it", 7, 10));
        assert_eq!(told.0.into_inner(), 7);
    }
}
