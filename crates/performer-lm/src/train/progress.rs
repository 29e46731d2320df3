//! What a listener is told of training: steps with their loss and the tokens a second, and the
//! results of validations.

use std::{cell::Cell, time::Instant};

use crate::{
    eval::Evaluation,
    listener::{Bar, Listener, Unit},
};

/// Weight of the newest step in the speed of a run.
const SMOOTHING: f64 = 0.1;

/// The progress of a training run.
pub(super) struct Progress<'a> {
    listener: &'a dyn Listener,
    bar: Box<dyn Bar + 'a>,
    name: String,
    speed: Cell<f64>,
}

impl<'a> Progress<'a> {
    pub(super) fn new(listener: &'a dyn Listener, name: &str, step: usize, total: usize) -> Self {
        let bar = listener.begin(name, Unit::Steps, step as u64, total as u64);
        Self { listener, bar, name: name.to_string(), speed: Cell::new(0.0) }
    }

    pub(super) fn step(&self, step: usize, loss: f64, tokens: usize, seconds: f64) {
        let now = tokens as f64 / seconds.max(1e-9);
        let old = self.speed.get();
        self.speed.set(if old == 0.0 { now } else { old + SMOOTHING * (now - old) });
        self.bar.step(step, loss, self.speed.get());
    }

    pub(super) fn message(&self, text: &str) {
        self.bar.message(text);
    }

    pub(super) fn validation(&self, step: usize, e: &Evaluation, sample: &str) {
        self.listener.note(&format!(
            "{}  step {step:>6}  validation {:.4} nats/token  perplexity {:.2}  {:.1}k tokens/s",
            self.name,
            e.val_loss,
            e.perplexity,
            self.speed.get() / 1000.0
        ));
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
    pub(crate) fn new(listener: &'a dyn Listener, name: &str, steps: usize) -> Self {
        let bar = listener.begin(name, Unit::Steps, 0, steps as u64);
        Self { bar, begun: Instant::now(), tokens: Cell::new(0) }
    }

    /// Advances the bar after a step of `tokens` tokens.
    pub(crate) fn step(&self, step: usize, loss: f64, tokens: usize) {
        self.tokens.set(self.tokens.get() + tokens);
        let seconds = self.begun.elapsed().as_secs_f64().max(1e-9);
        self.bar.step(step, loss, self.tokens.get() as f64 / seconds);
    }
}
