//! This module is a training run: batches of text, validated, logged, saved, and reported at the
//! end. Its loop is the one that every training shares, in `steps`.
//!
//! Everything random is a function of the seed and the step: the order of the data, the features
//! and their redraws, dropout. So a run that is stopped anywhere and resumes from its checkpoint
//! continues as if it had never been stopped.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Result, bail, ensure};
use candle_core::{Device, Tensor};
use performer_core::{attention::Segment, ops, projection::derive_seed};

use super::{
    AdamW, Checkpoint, Earlier, Gradients, Grid, Leg, Pace, RunKey, Step, Steps, TrainingState,
    folder::{LOG, REPORT, RunState, STATE, as_trained},
    git_revision,
    log::{Log, Record},
    progress::Progress,
    report::{Control, Report, TestLoss, by_range},
    run_key::{digests, model_digest},
    segments::SharedSequence,
    shared::{agreed, any_asked, gradients, led, require_equal, require_equal_weights},
    take_steps,
};
use crate::{
    checkpoint::{remove_reports, require_folder},
    config::{ModelConfig, Positions, Precision, TrainingConfig},
    data::{Batches, DataSpec, Prepared, TokenFile, Tokenizer},
    device::{describe, explain_memory},
    errors::Cause,
    eval::{Evaluation, check_vocabulary, evaluate_over},
    files::{Lock, between},
    generate::begin_story,
    listener::Listener,
    model::{Decoder, Dropout, pretrained::Pretrained},
};

/// Number of tokens of a validation in the middle of a run; the last validation takes all.
const QUICK_VALIDATION_TOKENS: usize = 65_536;

/// Number of tokens, at least, whose queries and keys features are fitted to.
const FIT_TOKENS: usize = 8192;

/// Sequences of a pass over these: their keys and queries are all in memory at once.
const FIT_ROWS: usize = 16;

/// Most tokens over which the loss by position is measured.
const POSITION_TOKENS: usize = 1 << 18;

/// Number of ranges of positions in that measurement, over one context.
const POSITION_RANGES: usize = 16;

/// The stream of the seed from which dropout draws.
const DROPOUT_STREAM: u64 = 3;

/// A flag to stop that is never set, for short runs that nobody needs to interrupt or to resume.
#[cfg(feature = "lab")]
pub(crate) static NEVER: AtomicBool = AtomicBool::new(false);

/// `RunOptions` says where and how a run takes place. It holds no training setting; of all that is
/// here, only the kind of device can change the result, by rounding.
pub struct RunOptions<'a> {
    /// Folder for checkpoints and `metrics.jsonl`.
    pub out: &'a Path,
    /// The data as the command line spells it, for resuming.
    pub data: &'a str,
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

/// A `Trainer` is a run in progress.
pub struct Trainer<'a> {
    model: Decoder,
    optimizer: AdamW,
    batches: Batches,
    data: &'a Prepared,
    training: TrainingConfig,
    options: RunOptions<'a>,
    /// On the rank that writes files.
    log: Option<Log>,
    epoch_seconds: Vec<f64>,
    key: RunKey,
    earlier_legs: Vec<Leg>,
    data_from_here: Option<PathBuf>,
    /// The step of the checkpoint that the folder holds.
    saved: usize,
    /// Keeps other processes from the folder, on the rank that writes to it.
    _lock: Option<Lock>,
}

impl<'a> Trainer<'a> {
    /// Begins a run, with the vocabulary of the data's tokenizer. The folder is written to at once,
    /// so that a folder that cannot be written to is found out now.
    ///
    /// # Errors
    /// If a configuration is invalid, its features are of no use at its context, there is too
    /// little data for one batch, or the folder cannot be written.
    pub fn new(
        config: &ModelConfig,
        training: &TrainingConfig,
        data: &'a Prepared,
        options: RunOptions<'a>,
    ) -> Result<Self> {
        Self::exactly(&as_trained(config, data), training, data, options)
    }

    /// Begins a run with exactly this configuration, whose vocabulary may be larger than the
    /// tokenizer's.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn exactly(
        config: &ModelConfig,
        training: &TrainingConfig,
        data: &'a Prepared,
        options: RunOptions<'a>,
    ) -> Result<Self> {
        Self::begin(config, training, data, options, None)
    }

    /// Begins a run with the weights of `model`, whatever trained them, in place of weights drawn
    /// from the seed. The data must be encoded with its tokenizer.
    ///
    /// # Errors
    /// As [`Self::new`]; also if the weights are not those of the model's configuration.
    pub fn from_weights(
        model: &Pretrained,
        training: &TrainingConfig,
        data: &'a Prepared,
        options: RunOptions<'a>,
    ) -> Result<Self> {
        Self::begin(&model.config, training, data, options, Some(&model.tensors))
    }

    fn begin(
        config: &ModelConfig,
        training: &TrainingConfig,
        data: &'a Prepared,
        options: RunOptions<'a>,
        weights: Option<&HashMap<String, Tensor>>,
    ) -> Result<Self> {
        let ranks = options.ranks.clone();
        let model = || {
            training.validate()?;
            config.validate()?;
            require_features(config)?;
            // Too little text is found out before a large model is made.
            training_batches(config, training, data)?;
            let Some(weights) = weights else {
                return Ok((Decoder::new(config, training.seed, &options.device)?, None));
            };
            let model = Decoder::from_tensors(config, weights, &options.device)?;
            model.require_all_of(weights)?;
            Ok((model, Some(model_digest(config, weights)?)))
        };
        let (model, initial) = agreed(&ranks, model())?;
        agreed(&ranks, require_segments(&model, &ranks))?;
        let lock = led(&ranks, || Lock::of(options.out))?;
        let model = model.compute_in(training.dtype.dtype());
        let mut trainer = agreed(&ranks, Self::assemble(model, training.clone(), data, options, 0, lock))?;
        trainer.key.initial = initial;
        trainer.require_equal()?;
        // Reports of what was in this folder before would be mistaken for those of this run; its log
        // is open already.
        led(&ranks, || remove_reports(trainer.options.out, |name| name != LOG))?;
        trainer.save()?;
        Ok(trainer)
    }

    /// Resumes the run of which `options.out` holds a checkpoint, where it was stopped.
    ///
    /// # Errors
    /// If there is no such checkpoint, it has no key, or training data, model or other settings
    /// differ from those with which the run began.
    pub fn resume(data: &'a Prepared, options: RunOptions<'a>) -> Result<Self> {
        let ranks = options.ranks.clone();
        agreed(&ranks, require_folder(options.out))?;
        // What another process is about to replace must not be read.
        let lock = led(&ranks, || Lock::of(options.out))?;
        let trainer = agreed(&ranks, Self::reopen(data, options, lock))?;
        trainer.require_equal()?;
        Ok(trainer)
    }

    fn reopen(data: &'a Prepared, options: RunOptions<'a>, lock: Option<Lock>) -> Result<Self> {
        let checkpoint = Checkpoint::load(options.out, &options.device)?;
        let saved = TrainingState::load(options.out, &options.device)?;
        let state = RunState::of(&saved, options.out)?;
        ensure!(
            state.key.as_ref().is_none_or(|key| key.data == digests(data)),
            Cause::OtherData(format!(
                "{} was trained on other data (corpus {}): resume with the data and the tokenizer it began with",
                options.out.display(),
                state.corpus
            ))
        );
        let config: ModelConfig = checkpoint.config_as()?;
        state.training.validate()?;
        let mut key = RunKey::of_training(&config, &state.training, data, &options.device)?;
        // What a run began with is no setting that could be changed on the way.
        key.initial = state.key.as_ref().and_then(|key| key.initial.clone());
        let file = options.out.join(STATE);
        let earlier = Earlier { key: state.key.as_ref(), file: &file, remove: options.out };
        let mixed = key.check_interrupted(earlier)?;
        if let Some(text) = &mixed {
            options.listener.note(text);
        }
        let model = Decoder::from_tensors(&config, &checkpoint.tensors, &options.device)?
            .compute_in(state.training.dtype.dtype());
        model.require_all_of(&checkpoint.tensors)?;
        require_segments(&model, &options.ranks)?;
        let mut trainer = Self::assemble(model, state.training, data, options, state.step, lock)?;
        trainer.optimizer.load_state(&saved.optimizer)?;
        trainer.key.initial = key.initial;
        if trainer.options.data == state.data_spec {
            trainer.data_from_here = state.data_from_here;
        }
        trainer.epoch_seconds = state.epoch_seconds;
        trainer.earlier_legs = state.earlier_legs;
        trainer
            .earlier_legs
            .extend(state.key.filter(|_| mixed.is_some()).map(|key| key.leg(format!("step {}", state.step))));
        Ok(trainer)
    }

    fn assemble(
        model: Decoder,
        training: TrainingConfig,
        data: &'a Prepared,
        options: RunOptions<'a>,
        step: usize,
        lock: Option<Lock>,
    ) -> Result<Self> {
        let optimizer = AdamW::new(model.named_parameters()?, training.optimizer)?;
        let batches = training_batches(model.config(), &training, data)?;
        let key = RunKey::of_training(model.config(), &training, data, &options.device)?;
        let log = || Log::open(&options.out.join(LOG), step);
        let log = options.ranks.leads().then(log).transpose()?;
        let (epoch_seconds, earlier_legs) = (Vec::new(), Vec::new());
        let data_from_here = match options.data.parse()? {
            DataSpec::Path(path) if path.is_relative() => between(options.out, &path),
            _ => None,
        };
        Ok(Self {
            model,
            optimizer,
            batches,
            data,
            training,
            options,
            log,
            epoch_seconds,
            key,
            earlier_legs,
            data_from_here,
            saved: step,
            _lock: lock,
        })
    }

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
    /// stopped before, it saves and returns `None`.
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
            // The run saves by steps and epochs: see `after`.
            save_after: None,
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
        let evaluation = self.evaluate(&self.model, &self.data.valid)?;
        self.log_validation(&evaluation, true)?;
        let control = self.model.features_off()?;
        let report = self.report(&evaluation, control.as_ref(), &progress)?;
        progress.validation(self.step(), &evaluation, "");
        Ok(Some(report))
    }

    /// Refuses ranks that train something else than the first.
    fn require_equal(&self) -> Result<()> {
        let what = serde_json::json!({ "run": self.key, "step": self.step() });
        require_equal(&self.options.ranks, &what)
    }

    /// Evaluates a model over all of a text, each rank over a part.
    fn evaluate(&self, model: &Decoder, tokens: &TokenFile) -> Result<Evaluation> {
        self.evaluate_in(model, tokens, (model.config().context, usize::MAX))
    }

    /// Evaluates a model in windows of this context and over so many tokens at most.
    fn evaluate_in(&self, model: &Decoder, tokens: &TokenFile, windows: (usize, usize)) -> Result<Evaluation> {
        evaluate_over(self.options.ranks.world(), model, tokens, self.options.threads, windows)
    }

    /// Returns the number of steps taken.
    fn step(&self) -> usize {
        self.optimizer.steps()
    }

    /// Names the settings that decide how much memory a step needs.
    fn memory_settings(&self) -> String {
        let (t, model) = (&self.training, self.model.config());
        let bf16 = if t.dtype == Precision::F32 { ", or compute in bf16" } else { "" };
        format!("the micro-batch (it is {}) or the context (it is {}){bf16}", t.micro_batch, model.context)
    }

    /// Computes the gradients of a step's micro-batches side by side, and adds them in order. This
    /// rank reads and computes its share of them, and its segment of their sequences, if these are
    /// cut; then one after the other, as the ranks that share a sequence wait for each other.
    fn batch_gradients(&self, step: usize) -> Result<(f64, Gradients)> {
        let (context, dropout) = (self.model.config().context, self.model.config().dropout);
        let rows = self.training.batch_size;
        let micro = self.training.micro_batch.min(rows);
        let count = rows.div_ceil(micro);
        let own = self.options.ranks.share(count);
        let (epoch, index) = self.batches.position(step as u64);
        let of_own = (own.start * micro).min(rows)..(own.end * micro).min(rows);
        let sequence = self.options.ranks.sequence();
        let (segment, segments) = (sequence.rank(), sequence.size());
        let tokens = context / segments;
        let batch = self.batches.part(epoch, index, of_own.clone(), segment * tokens..(segment + 1) * tokens)?;
        check_vocabulary(&batch, &self.model)?;
        let threads = if segments > 1 { 1 } else { self.options.threads };
        let parameters = self.optimizer.parameters();
        gradients(&self.options.ranks, count, threads, parameters, |i| {
            let part = i * micro - of_own.start..((i + 1) * micro).min(rows) - of_own.start;
            let shape = (part.len(), tokens);
            let part = part.start * tokens..part.end * tokens;
            let ids = Tensor::from_slice(&batch.inputs[part.clone()], shape, self.model.device())?;
            let seed = derive_seed(derive_seed(self.training.seed, DROPOUT_STREAM), (step * count + i) as u64);
            // Segments drop other units than one process would.
            let seed = if segments > 1 { derive_seed(seed, segment as u64) } else { seed };
            let dropout = (dropout > 0.0).then(|| Dropout::new(dropout, seed));
            let mean =
                |losses: &Tensor| ops::scale(&ops::sum_all(losses)?, 1.0 / self.batches.tokens_per_batch() as f64);
            if segments == 1 {
                return Ok(mean(&self.model.losses(&ids, &batch.targets[part], dropout.as_ref())?)?);
            }
            let segment = Segment::new(Arc::new(SharedSequence::new(Arc::clone(sequence))));
            let losses = self.model.losses_of_segment(&ids, &batch.targets[part], dropout.as_ref(), &segment)?;
            Ok(segment.close(&mean(&losses)?)?)
        })
    }

    /// Fits features to the model's queries and keys of the batches from this step on.
    fn fit_features(&mut self, step: usize) -> Result<()> {
        let mut moments = self.model.no_moments();
        for later in 0..FIT_TOKENS.div_ceil(self.batches.tokens_per_batch()) {
            let (epoch, index) = self.batches.position((step + later) as u64);
            let batch = self.batches.batch(epoch, index)?;
            check_vocabulary(&batch, &self.model)?;
            let tokens = batch.inputs.len().min(FIT_TOKENS.div_ceil(batch.context) * batch.context);
            for part in batch.inputs[..tokens].chunks(FIT_ROWS * batch.context) {
                let ids = Tensor::from_slice(part, (part.len() / batch.context, batch.context), self.model.device())?;
                self.model.add_moments(&ids, &mut moments)?;
            }
        }
        let count = step / self.training.fit_every;
        self.model.fit_features(&moments, self.training.seed, count as u64)
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

    /// Generates a few words, by which the user can follow what the model learns.
    fn sample(&self) -> Result<String> {
        if !self.options.samples || !self.options.ranks.leads() {
            return Ok(String::new());
        }
        Ok(begin_story(&self.model, &self.data.tokenizer, 40)?.unwrap_or_default())
    }

    fn save(&mut self) -> Result<()> {
        let state = RunState {
            step: self.step(),
            epoch_seconds: self.epoch_seconds.clone(),
            training: self.training.clone(),
            corpus: self.data.corpus_name.clone(),
            data_spec: self.options.data.to_string(),
            data_from_here: self.data_from_here.clone(),
            key: Some(self.key.clone()),
            earlier_legs: self.earlier_legs.clone(),
        };
        require_equal_weights(&self.options.ranks, || model_digest(self.model.config(), &self.model.tensors()?))?;
        led(&self.options.ranks, || {
            let progress = serde_json::to_value(state)?;
            let training = TrainingState { optimizer: self.optimizer.state()?, progress };
            checkpoint(&self.model, &self.data.tokenizer, &self.data.corpus_name, self.step())?
                .save(self.options.out, Some(&training))
        })?;
        self.saved = self.step();
        Ok(())
    }

    /// Measures the trained model on all of the held-out text and by position, and reports. `off`
    /// is the model with its features off.
    fn report(&self, evaluation: &Evaluation, off: Option<&Decoder>, progress: &Progress) -> Result<Report> {
        let features_off = match off {
            Some(off) => {
                progress.message("validating with the features off");
                let evaluation = self.evaluate(off, &self.data.valid)?;
                Some(Control {
                    attention_spec: off.config().pattern().to_string(),
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
            attention_spec: config.pattern().to_string(),
            seed: self.training.seed,
            params: self.model.parameter_count()?,
            state_bytes: self.model.state_bytes()?,
            state_grows: config.growing_layers() > 0,
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
        led(&self.options.ranks, || crate::files::write_json(&self.options.out.join(REPORT), &report))?;
        Ok(report)
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
        if fit > 0 && step.is_multiple_of(fit) {
            run.fit_features(step)?;
        }
        run.batch_gradients(step).map_err(|e| explain_memory(e, &run.options.device, run.memory_settings(), true))
    }

    fn stops(&mut self, asked: bool) -> Result<bool> {
        any_asked(&self.run.options.ranks, asked)
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
        if step.number == self.total {
            return Ok(());
        }
        let due = |every: usize| every > 0 && step.number.is_multiple_of(every);
        let epoch_ends = step.number.is_multiple_of(run.batches.batches_per_epoch());
        if due(run.training.eval_every) || epoch_ends {
            let windows = (run.model.config().context, QUICK_VALIDATION_TOKENS);
            let quick = run.evaluate_in(&run.model, &run.data.valid, windows)?;
            run.log_validation(&quick, false)?;
            self.progress.validation(step.number, &quick, &run.sample()?);
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

/// Refuses features that no sequence of the model's context is long enough for.
pub(super) fn require_features(config: &ModelConfig) -> Result<()> {
    match config.idle_features() {
        Some(layer) => bail!(config.of_idle_features(layer)),
        None => Ok(()),
    }
}

/// Refuses ranks that share sequences which this model cannot compute in segments.
fn require_segments(model: &Decoder, ranks: &Grid) -> Result<()> {
    match ranks.sequence().size() {
        1 => Ok(()),
        segments => model.require_segments(segments),
    }
}

/// Returns the batches on which a run trains.
///
/// # Errors
/// If there is too little text for one batch.
pub fn training_batches(config: &ModelConfig, training: &TrainingConfig, data: &Prepared) -> Result<Batches> {
    let batches = Batches::new(data.train.clone(), config.context, training.batch_size, training.seed)?;
    Ok(match training.max_train_tokens {
        Some(tokens) => batches.limited_to(tokens),
        None => batches,
    })
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
        tensors: model.tensors()?,
        metadata: metadata.into_iter().map(|(k, v)| (k.to_string(), v)).collect(),
    })
}
