//! This module is a training run: batches of text, validated, logged, saved, and reported at the
//! end. How a run begins and resumes is in `begin`, what a step computes in `batch`, and what is
//! measured of the model in `measure`. The loop is the one that every training shares, in `steps`.
//!
//! Everything random is a function of the seed and the step: the order of the data, the features
//! and their redraws, dropout. So a run that is stopped anywhere and resumes from its checkpoint
//! continues as if it had never been stopped.

mod batch;
mod begin;
mod measure;

use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use anyhow::Result;
use candle_core::Device;

use super::{
    AdamW, Checkpoint, Gradients, Grid, Leg, Pace, RunKey, Step, Steps, TrainingState,
    folder::RunState,
    git_revision,
    log::{Log, Record},
    progress::Progress,
    report::Report,
    run_key::model_digest,
    shared::{any_asked, led, require_equal, require_equal_weights},
    steps::failed,
    take_steps,
};
use crate::{
    config::TrainingConfig,
    data::{Batches, DataSpec, Prepared, Tokenizer},
    device::explain_memory,
    errors::Cause,
    eval::Evaluation,
    files::Lock,
    listener::{Listener, Silent},
    model::Decoder,
    parallel::cores,
};
pub use batch::training_batches;
pub(super) use begin::require_features;

/// Number of tokens of a validation in the middle of a run; the last validation takes all.
const QUICK_VALIDATION_TOKENS: usize = 65_536;

/// Time after which a run is saved, between two steps, besides where its settings say so.
const SAVE_AFTER: Duration = Duration::from_secs(600);

/// A flag to stop that is never set: the default of runs and conversions.
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// `RunOptions` says where and how a run takes place. It holds no training setting; of all that is
/// here, only the kind of device and, as their field says, the ranks can change the result.
///
/// [`Self::new`] gives every field a value, so that a caller writes only those that differ:
///
/// ```
/// use performer_lm::train::RunOptions;
/// # use std::path::Path;
///
/// let options = RunOptions { overwrite: true, samples: true,
/// ..RunOptions::new(Path::new("runs/mine")) };
/// ```
#[derive(Clone)]
pub struct RunOptions<'a> {
    /// Folder for checkpoints and `metrics.jsonl`.
    pub out: &'a Path,
    /// Whether a new training may replace a model that is in the folder already.
    pub overwrite: bool,
    /// Where the data come from, which the folder keeps so that a run that is resumed finds them;
    /// `None` for data without a name, such as those made in memory. A run that is resumed without
    /// a name keeps the one that it has.
    pub data: Option<&'a DataSpec>,
    /// Device on which the model is trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to save and stop.
    pub stop: &'a AtomicBool,
    /// Whether to generate a few words at every validation but the last, after which the whole
    /// model is at hand.
    pub samples: bool,
    /// Is told of steps, validations, and what a person should know.
    pub listener: &'a dyn Listener,
    /// The processes that train this model together, [`Grid::one`] for one alone. All of them call
    /// the same functions of a [`Trainer`], the first of them writes to the folder, and to resume,
    /// all must be able to read it. Their number changes no bit of the result on the CPU; the
    /// number of segments that they cut a sequence into changes it by rounding, and changes which
    /// units dropout drops.
    pub ranks: Grid,
}

impl<'a> RunOptions<'a> {
    /// Returns the options of a run by one process on all cores of the CPU, which replaces nothing
    /// that the folder `out` holds, says nothing, and goes on to its end.
    pub fn new(out: &'a Path) -> Self {
        Self {
            out,
            overwrite: false,
            data: None,
            device: Device::Cpu,
            threads: cores(),
            stop: &NEVER,
            samples: false,
            listener: &Silent,
            ranks: Grid::one(),
        }
    }
}

/// A `Trainer` is a run in progress.
pub struct Trainer<'a> {
    model: Decoder,
    optimizer: AdamW,
    batches: Batches,
    data: &'a Prepared,
    pub(super) training: TrainingConfig,
    options: RunOptions<'a>,
    /// The open log, on the rank that writes files; `None` on the others.
    log: Option<Log>,
    epoch_seconds: Vec<f64>,
    key: RunKey,
    earlier_legs: Vec<Leg>,
    /// The data as the command line spells them, if they have a name.
    data_spec: Option<String>,
    data_from_here: Option<PathBuf>,
    /// The step of the checkpoint that the folder holds.
    saved: usize,
    /// Keeps other processes from the folder, on the rank that writes to it.
    _lock: Option<Lock>,
}

impl<'a> Trainer<'a> {
    /// Returns the model as it is now.
    pub fn model(&self) -> &Decoder {
        &self.model
    }

    /// Returns the processes that train together.
    pub fn ranks(&self) -> &Grid {
        &self.options.ranks
    }

    /// Returns the training settings.
    pub fn training(&self) -> &TrainingConfig {
        &self.training
    }

    /// Returns the number of tokens of one epoch.
    pub fn tokens_per_epoch(&self) -> usize {
        self.batches.batches_per_epoch() * self.batches.tokens_per_batch()
    }

    /// Returns the number of steps of the whole run.
    pub fn total_steps(&self) -> usize {
        let all = self.training.epochs.saturating_mul(self.batches.batches_per_epoch());
        self.training.max_steps.map_or(all, |max| max.min(all))
    }

    /// Trains to the end, saves, validates on all of the held-out text, and reports. If it is
    /// stopped before, it saves and returns `None`. The model is in the folder, for
    /// [`load_model`](super::load_model).
    ///
    /// # Errors
    /// If a loss or gradient is not finite, or the checkpoint cannot be written.
    pub fn run(mut self) -> Result<Option<Report>> {
        let total = self.total_steps();
        let mut progress = Progress::new(self.options.listener, self.model.config(), self.step(), total);
        let training = self.training.clone();
        let pace = Pace {
            name: "training",
            steps: total,
            rate: training.learning_rate,
            schedule: training.schedule,
            clip: training.clip,
            save_after: SAVE_AFTER,
            stop: self.options.stop,
        };
        let taken = take_steps(&mut InProgress { run: &mut self, progress: &progress, total }, &pace);
        if let Err(error) = &taken
            && let Some(Cause::Diverged { .. }) = error.downcast_ref()
        {
            let (step, out) = (self.saved, self.options.out.display());
            self.options.listener.note(&format!("{out} holds the checkpoint of step {step}, the last one before"));
        }
        if !taken? {
            return Ok(None);
        }
        self.save()?;
        if any_asked(&self.options.ranks, self.options.stop.load(Ordering::Relaxed))? {
            return Ok(None);
        }
        progress.end();
        progress.message("validating on all of the held-out text");
        let evaluation = self.evaluate(&self.model, &self.data.valid);
        let evaluation = evaluation.map_err(|error| failed(error, "training", self.step(), None))?;
        self.log_validation(&evaluation, true)?;
        let control = self.model.features_off()?;
        let report = self.report(&evaluation, control.as_ref(), &progress)?;
        progress.validation(self.step(), &evaluation, "");
        Ok(Some(report))
    }

    /// Refuses ranks that train something else than the first.
    fn require_equal(&self) -> Result<()> {
        // How often a run is saved is not in its key, and all ranks take part in saving.
        let what = serde_json::json!({ "run": self.key, "step": self.step(), "save_every": self.training.save_every });
        require_equal(&self.options.ranks, &what)
    }

    /// Returns the number of steps taken.
    pub fn step(&self) -> usize {
        self.optimizer.steps()
    }

    fn tokens(&self) -> u64 {
        (self.step() * self.batches.tokens_per_batch()) as u64
    }

    fn log_validation(&mut self, evaluation: &Evaluation, whole: bool) -> Result<()> {
        self.write_log(&Record {
            step: self.step(),
            epoch: self.batches.position(self.step().saturating_sub(1) as u64).0 as usize,
            tokens: self.tokens(),
            train_loss: None,
            learning_rate: None,
            gradient_norm: None,
            val_loss: Some(evaluation.val_loss),
            whole: Some(whole),
        })
    }

    fn write_log(&mut self, record: &Record) -> Result<()> {
        self.log.as_mut().map_or(Ok(()), |log| log.write(record))
    }

    fn save(&mut self) -> Result<()> {
        self.save_over(&mut || Ok(()))
    }

    /// Saves a checkpoint; `clear` removes what belongs to a model that it replaces
    /// ([`Checkpoint::save_over`]).
    fn save_over(&mut self, clear: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let state = RunState {
            step: self.step(),
            epoch_seconds: self.epoch_seconds.clone(),
            training: self.training.clone(),
            corpus: self.data.corpus_name.clone(),
            data_spec: self.data_spec.clone(),
            data_from_here: self.data_from_here.clone(),
            key: Some(self.key.clone()),
            earlier_legs: self.earlier_legs.clone(),
        };
        require_equal_weights(&self.options.ranks, || model_digest(self.model.config(), &self.model.tensors()))?;
        led(&self.options.ranks, || {
            // A power cut must not leave a checkpoint whose steps the log lacks.
            self.log.as_ref().map_or(Ok(()), Log::sync)?;
            let progress = serde_json::to_value(state)?;
            let training = TrainingState { optimizer: self.optimizer.state()?, progress };
            checkpoint(&self.model, &self.data.tokenizer, &self.data.corpus_name, self.step())?.save_over(
                self.options.out,
                Some(&training),
                clear,
            )
        })?;
        self.saved = self.step();
        Ok(())
    }
}

/// `InProgress` joins a [`Trainer`] to its progress display, for [`take_steps`].
struct InProgress<'r, 'a> {
    run: &'r mut Trainer<'a>,
    progress: &'r Progress<'r>,
    total: usize,
}

impl Steps for InProgress<'_, '_> {
    fn optimizer(&mut self) -> &mut AdamW {
        &mut self.run.optimizer
    }

    fn gradients(&mut self, step: usize) -> Result<(f64, Gradients)> {
        let run = &mut *self.run;
        let redraw = run.training.redraw_every;
        if redraw > 0 && step > 0 && step.is_multiple_of(redraw) {
            run.model.redraw(run.training.seed, (step / redraw) as u64)?;
        }
        let fit = run.training.fit_every;
        if fit > 0 && step.is_multiple_of(fit) && run.model.has_fits() {
            run.fit_features(step)?;
        }
        run.batch_gradients(step).map_err(|e| explain_memory(e, &run.options.device, run.memory_settings(), true))
    }

    fn stops(&mut self, asked: bool) -> Result<bool> {
        any_asked(&self.run.options.ranks, asked)
    }

    fn saves(&mut self, due: bool) -> Result<bool> {
        any_asked(&self.run.options.ranks, due)
    }

    fn after(&mut self, step: &Step) -> Result<()> {
        let run = &mut *self.run;
        let epoch = run.batches.position(step.number as u64 - 1).0 as usize;
        if run.epoch_seconds.len() <= epoch {
            run.epoch_seconds.resize(epoch + 1, 0.0);
        }
        run.epoch_seconds[epoch] += step.seconds;
        let record = Record {
            step: step.number,
            epoch,
            tokens: run.tokens(),
            train_loss: Some(step.loss),
            learning_rate: Some(step.rate),
            gradient_norm: Some(step.norm),
            val_loss: None,
            whole: None,
        };
        self.progress.step(step.number, step.loss, run.batches.tokens_per_batch(), step.seconds);
        run.write_log(&record)?;
        let ends = step.number == self.total;
        let due = |every: usize| every > 0 && step.number.is_multiple_of(every);
        let epoch_ends = step.number.is_multiple_of(run.batches.batches_per_epoch());
        // All of the held-out text is read when the steps are done. Where that is more than was
        // read on the way, the curve needs a last point over the same text as the others.
        let validates = if ends {
            run.data.valid.len() > QUICK_VALIDATION_TOKENS + 1
        } else {
            due(run.training.eval_every) || epoch_ends
        };
        if validates {
            let windows = (run.model.config().context, QUICK_VALIDATION_TOKENS);
            let quick = run.evaluate_in(&run.model, &run.data.valid, windows)?;
            run.log_validation(&quick, false)?;
            if !ends {
                self.progress.validation(step.number, &quick, &run.sample()?);
            }
        }
        if ends {
            return Ok(());
        }
        if due(run.training.save_every) || epoch_ends {
            run.save()?;
        }
        Ok(())
    }

    fn save(&mut self) -> Result<()> {
        self.run.save()
    }
}

fn checkpoint(model: &Decoder, tokenizer: &Tokenizer, corpus: &str, step: usize) -> Result<Checkpoint> {
    let metadata = [
        ("program", format!("performer-lm {}", env!("CARGO_PKG_VERSION"))),
        ("revision", git_revision().to_string()),
        ("corpus", corpus.to_string()),
        ("step", step.to_string()),
    ];
    Ok(Checkpoint {
        config: serde_json::to_value(model.config())?,
        tokenizer: tokenizer.as_bytes().to_vec(),
        tensors: model.tensors(),
        metadata: metadata.into_iter().map(|(k, v)| (k.to_string(), v)).collect(),
    })
}
