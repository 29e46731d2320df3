//! This module is the loop that every training shares: training runs, the stages of a conversion,
//! and the lab's tasks.
//!
//! They differ in how a step's gradients are computed, in what is measured between steps, and in
//! what is saved: that is [`Steps`]. They share the rest: the learning rate of a step is a function
//! of its number, the optimiser counts the steps, and a stop from outside saves and ends the loop
//! between two steps. So a training that resumes from what it saved takes the steps that it would
//! have taken.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Error, Result};

use super::{AdamW, Gradients, Schedule};
use crate::errors::Cause;

/// `Pace` says how long and at which learning rates a training runs.
pub(crate) struct Pace<'a> {
    /// Name of the training, for errors.
    pub(crate) name: &'a str,
    /// Number of steps in all, including those already taken.
    pub(crate) steps: usize,
    /// Peak learning rate.
    pub(crate) rate: f64,
    /// Course of the learning rate.
    pub(crate) schedule: Schedule,
    /// Norm to which gradients are clipped.
    pub(crate) clip: Option<f64>,
    /// Time after which the training is saved between two steps, besides where it saves itself.
    pub(crate) save_after: Duration,
    /// Flag that is set from outside to save and stop.
    pub(crate) stop: &'a AtomicBool,
}

/// A `Step` describes a step that was taken.
pub(crate) struct Step {
    /// Its number, counted from 1.
    pub(crate) number: usize,
    /// Loss of its batch before the update.
    pub(crate) loss: f64,
    /// Its learning rate.
    pub(crate) rate: f64,
    /// Norm of the gradients before they were clipped.
    pub(crate) norm: f64,
    /// Seconds that the step took.
    pub(crate) seconds: f64,
}

/// `Steps` is a training, as the loop sees it.
pub(crate) trait Steps {
    /// Returns the optimiser, which counts the steps.
    fn optimizer(&mut self) -> &mut AdamW;

    /// Computes loss and gradients of the batch of a step, counted from 0.
    fn gradients(&mut self, step: usize) -> Result<(f64, Gradients)>;

    /// Whether the training stops before the next step, given whether this process was asked to:
    /// processes that train together stop together.
    fn stops(&mut self, asked: bool) -> Result<bool> {
        Ok(asked)
    }

    /// Whether the training is saved before the next step, given whether the time has come by this
    /// process's clock: processes that train together save together.
    fn saves(&mut self, due: bool) -> Result<bool> {
        Ok(due)
    }

    /// Logs, measures and shows a step; it is called after each step.
    fn after(&mut self, step: &Step) -> Result<()>;

    /// Saves what the training needs to resume.
    fn save(&mut self) -> Result<()>;
}

/// Takes the remaining steps. Returns `false` if the training was stopped before the last one; it
/// is saved then.
///
/// # Errors
/// [`Cause::Diverged`] where values are not finite; and whatever the training returns.
pub(crate) fn take_steps(training: &mut impl Steps, pace: &Pace) -> Result<bool> {
    let mut saved = Instant::now();
    loop {
        let step = training.optimizer().steps();
        if step >= pace.steps {
            return Ok(true);
        }
        let is_stopped = training.stops(pace.stop.load(Ordering::Relaxed))?;
        let is_due = training.saves(saved.elapsed() >= pace.save_after)?;
        if is_stopped || is_due {
            training.save()?;
            saved = Instant::now();
        }
        if is_stopped {
            return Ok(false);
        }
        let started = Instant::now();
        let (number, rate) = (step + 1, pace.schedule.lr(pace.rate, step, pace.steps));
        let (loss, gradients) = training.gradients(step).map_err(|e| failed(e, pace.name, number, None))?;
        let norm = training
            .optimizer()
            .step(&gradients, rate, pace.clip)
            .map_err(|e| failed(e, pace.name, number, Some(loss)))?;
        let step = Step { number, loss, rate, norm, seconds: started.elapsed().as_secs_f64() };
        // A validation may be the first to meet weights that are not finite.
        training
            .after(&step)
            .map_err(|e| if says_not_finite(&e) { failed(e, pace.name, number, Some(loss)) } else { e })?;
    }
}

/// Whether an error says that values are not finite.
fn says_not_finite(error: &Error) -> bool {
    // The last is how attention refuses gates out of their range, as one that is not finite is.
    let said = ["must be finite", "is not finite", "are not finite", "gates hold"];
    error.chain().any(|cause| said.iter().any(|text| cause.to_string().contains(text)))
}

/// Adds the training and the step to an error of the step or of what follows it: as
/// [`Cause::Diverged`] where the error says that values are not finite, else in words.
pub(super) fn failed(error: Error, training: &str, step: usize, loss: Option<f64>) -> Error {
    if says_not_finite(&error) {
        return error.context(Cause::Diverged { training: training.to_string(), step, loss });
    }
    error.context(format!("{training}, step {step} failed"))
}

#[cfg(test)]
mod tests {
    use candle_core::{Device, Var};

    use super::*;
    use crate::train::AdamWConfig;

    /// A training of one number, which records at which steps it was saved.
    struct Training {
        optimizer: AdamW,
        number: Var,
        /// Whether the processes that it trains with say yes when its time to be saved has come.
        others_agree: bool,
        saved: Vec<usize>,
    }

    impl Steps for Training {
        fn optimizer(&mut self) -> &mut AdamW {
            &mut self.optimizer
        }

        fn gradients(&mut self, _: usize) -> Result<(f64, Gradients)> {
            let loss = self.number.sqr()?;
            let gradients = Gradients::from_store(&loss.backward()?, self.optimizer.parameters())?;
            Ok((loss.to_scalar()?, gradients))
        }

        fn saves(&mut self, due: bool) -> Result<bool> {
            Ok(due && self.others_agree)
        }

        fn after(&mut self, _: &Step) -> Result<()> {
            Ok(())
        }

        fn save(&mut self) -> Result<()> {
            self.saved.push(self.optimizer.steps());
            Ok(())
        }
    }

    /// The steps at which a training of three is saved.
    fn saved_at(save_after: Duration, others_agree: bool) -> Vec<usize> {
        let number = Var::new(1f64, &Device::Cpu).unwrap();
        let optimizer = AdamW::new(vec![("number".into(), number.clone())], AdamWConfig::default()).unwrap();
        let mut training = Training { optimizer, number, others_agree, saved: vec![] };
        let stop = AtomicBool::new(false);
        let pace = Pace {
            name: "training",
            steps: 3,
            rate: 0.1,
            schedule: Schedule::Constant,
            clip: None,
            save_after,
            stop: &stop,
        };
        assert!(take_steps(&mut training, &pace).unwrap());
        training.saved
    }

    #[test]
    fn a_training_is_saved_whenever_its_time_has_come() {
        assert_eq!(saved_at(Duration::ZERO, true), [0, 1, 2]);
        assert_eq!(saved_at(Duration::ZERO, false), [0; 0]);
        assert_eq!(saved_at(Duration::MAX, true), [0; 0]);
    }
}
