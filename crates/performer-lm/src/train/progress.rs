//! This module shows a run to the user as it goes: on stderr, as a bar with loss, tokens per second
//! and time left.

use std::{
    cell::Cell,
    io::Write,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressStyle};

use super::Record;
use crate::eval::Evaluation;

/// Weight of the newest step in the speed shown.
const SMOOTHING: f64 = 0.1;

pub(super) struct Progress {
    bar: ProgressBar,
    speed: Cell<f64>,
}

impl Progress {
    pub(super) fn new(name: &str, step: usize, total: usize) -> Self {
        let bar = ProgressBar::new(total as u64).with_position(step as u64);
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] step {pos}/{len}  {msg}  left {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(name.to_string());
        bar.reset_eta();
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, speed: Cell::new(0.0) }
    }

    pub(super) fn step(&self, step: usize, record: &Record, tokens: usize, seconds: f64) {
        let now = tokens as f64 / seconds.max(1e-9);
        let old = self.speed.get();
        self.speed.set(if old == 0.0 { now } else { old + SMOOTHING * (now - old) });
        self.bar.set_position(step as u64);
        let loss = record.train_loss.unwrap_or(f64::NAN);
        self.bar.set_message(format!("loss {loss:.3}  {:.1}k tokens/s", self.speed.get() / 1000.0));
    }

    pub(super) fn message(&self, text: &str) {
        self.bar.set_message(text.to_string());
    }

    pub(super) fn validation(&self, step: usize, e: &Evaluation, sample: &str) {
        let speed = self.speed.get() / 1000.0;
        self.line(&format!(
            "{}  step {step:>6}  validation {:.4} nats/token  perplexity {:.2}  {speed:.1}k tokens/s",
            self.bar.prefix(),
            e.val_loss,
            e.perplexity
        ));
        if !sample.is_empty() {
            self.line(&format!("  | {}", sample.replace('\n', " ")));
        }
    }

    pub(super) fn finish(&self, step: usize, e: &Evaluation, sample: &str) {
        self.validation(step, e, sample);
        self.bar.finish_and_clear();
    }

    fn line(&self, text: &str) {
        line(&self.bar, text);
    }
}

/// Prints a line above the bar, or without a bar if there is no terminal.
fn line(bar: &ProgressBar, text: &str) {
    if bar.is_hidden() {
        // If stderr is closed, there is nobody to tell.
        let _ = writeln!(std::io::stderr(), "{text}");
    } else {
        bar.println(text);
    }
}

/// A `Bar` shows steps with a loss, for loops without validation.
pub(crate) struct Bar {
    bar: ProgressBar,
    begun: Instant,
    tokens: Cell<usize>,
}

impl Bar {
    pub(crate) fn new(name: &str, steps: usize) -> Self {
        let bar = ProgressBar::new(steps as u64);
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] step {pos}/{len}  {msg}  left {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(name.to_string());
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar, begun: Instant::now(), tokens: Cell::new(0) }
    }

    /// Advances the bar after a step of `tokens` tokens.
    pub(crate) fn step(&self, step: usize, loss: f64, tokens: usize) {
        self.tokens.set(self.tokens.get() + tokens);
        let speed = self.tokens.get() as f64 / self.begun.elapsed().as_secs_f64().max(1e-9);
        self.bar.set_position(step as u64);
        self.bar.set_message(format!("loss {loss:.4}  {:.1}k tokens/s", speed / 1000.0));
    }

    /// Removes the bar and leaves a line.
    pub(crate) fn finish(self, text: &str) {
        line(&self.bar, text);
        self.bar.finish_and_clear();
    }
}
