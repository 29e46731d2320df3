//! How a run begins, from new or given weights, and how it resumes from its checkpoint: what is
//! refused before the first step, and what the parts of a [`Trainer`] start as.

use std::collections::HashMap;

use anyhow::{Result, bail, ensure};
use candle_core::{DType, Tensor};

use super::{RunOptions, Trainer, training_batches};
use crate::{
    checkpoint::{MODEL, remove_reports, require_folder},
    config::{ModelConfig, TrainingConfig},
    data::{DataSpec, Prepared},
    errors::Cause,
    files::Lock,
    model::{Decoder, pretrained::Pretrained},
    train::{
        AdamW, Checkpoint, Earlier, Grid, RunKey, TrainingState,
        folder::{LOG, RunState, STATE, as_trained},
        log::Log,
        run_key::{digests, model_digest},
        shared::{agreed, led},
    },
};

/// Refuses a folder that holds a model, unless the options allow to replace it.
fn require_free(options: &RunOptions) -> Result<()> {
    let out = options.out;
    let is_taken = !options.overwrite && (out.join(MODEL).exists() || TrainingState::is_in(out)?);
    let text = || format!("{} holds a model already, which a new training would replace", out.display());
    ensure!(!is_taken, Cause::WouldReplace(text()));
    Ok(())
}

/// Refuses weights that are not finite. They would be found at the first step, when what was in the
/// folder before is gone, and be taken for a learning rate that is too high.
fn require_finite(weights: &HashMap<String, Tensor>) -> Result<()> {
    let mut named: Vec<_> = weights.iter().collect();
    named.sort_by_key(|(name, _)| *name);
    for (name, tensor) in named {
        // 0 times a number that is not finite is NaN, and so is a sum with it.
        let sum = (tensor.to_dtype(DType::F32)? * 0.0)?.sum_all()?.to_scalar::<f32>()?;
        ensure!(sum == 0.0, "the weights to begin with are not finite in {name}: the file is damaged");
    }
    Ok(())
}

impl<'a> Trainer<'a> {
    /// Begins a run, with the vocabulary of the data's tokenizer. The folder is written to at once,
    /// so that a folder that cannot be written to is found out now.
    ///
    /// # Errors
    /// If a configuration is invalid, its features are of no use at its context, there is too
    /// little data for one batch, if the folder cannot be written or, with
    /// [`Cause::WouldReplace`], if a model is in it and the options do not allow to replace it
    /// ([`find`](crate::train::find) tells whether it is one of this training).
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
    /// As [`Self::new`]; also if the weights are not those of the model's configuration, or not
    /// finite.
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
            require_finite(weights)?;
            Ok((model, Some(model_digest(config, weights)?)))
        };
        led(&ranks, || require_free(&options))?;
        let (model, initial) = agreed(&ranks, model())?;
        agreed(&ranks, require_segments(&model, &ranks))?;
        let lock = led(&ranks, || Lock::of(options.out))?;
        // Another process may have trained there while the model was made.
        led(&ranks, || require_free(&options))?;
        let model = model.compute_in(training.dtype.dtype());
        let mut trainer = agreed(&ranks, Self::assemble(model, training.clone(), data, options, 0, lock))?;
        trainer.key.initial = initial;
        trainer.require_equal()?;
        // What was in this folder before stays until the first checkpoint is on the disk. Its
        // reports, and what its log holds, would be mistaken for those of this run.
        let (out, mut log) = (trainer.options.out, None);
        trainer.save_over(&mut || {
            remove_reports(out, |name| name != LOG)?;
            log = Some(Log::open(&out.join(LOG), 0)?);
            Ok(())
        })?;
        trainer.log = log;
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
        let mut trainer = agreed(&ranks, Self::reopen(data, options, lock))?;
        trainer.require_equal()?;
        trainer.open_log()?;
        Ok(trainer)
    }

    fn reopen(data: &'a Prepared, options: RunOptions<'a>, lock: Option<Lock>) -> Result<Self> {
        let checkpoint = Checkpoint::load(options.out, &options.device)?;
        let saved = TrainingState::load(options.out, &options.device)?;
        let state = RunState::of(&saved, options.out)?;
        ensure!(
            state.key.as_ref().is_none_or(|key| key.data == digests(data)),
            Cause::OtherData(format!(
                "{} was trained on other data (corpus {}): resume with the data and the tokenizer it began with, or a \
                 run of compare by that command",
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
        let earlier = Earlier { key: state.key.as_ref(), file: &file, remove: Some(options.out) };
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
        // A caller that names no data has those at hand that the folder names.
        if trainer.options.data.is_none() || trainer.data_spec == state.data_spec {
            trainer.data_spec = state.data_spec;
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
        let optimizer = AdamW::new(model.named_parameters(), training.optimizer)?;
        let batches = training_batches(model.config(), &training, data)?;
        let key = RunKey::of_training(model.config(), &training, data, &options.device)?;
        let (epoch_seconds, earlier_legs) = (Vec::new(), Vec::new());
        let data_spec = options.data.map(DataSpec::to_string);
        let data_from_here = options.data.and_then(|data| data.path_from(options.out));
        Ok(Self {
            model,
            optimizer,
            batches,
            data,
            training,
            options,
            log: None,
            epoch_seconds,
            key,
            earlier_legs,
            data_spec,
            data_from_here,
            saved: step,
            _lock: lock,
        })
    }

    /// Opens the log on the rank that writes it, and takes off what is later than the run's step. A
    /// run that is refused has to leave the log of an earlier one as it was, so this comes last.
    fn open_log(&mut self) -> Result<()> {
        let (path, step) = (self.options.out.join(LOG), self.saved);
        self.log = led(&self.options.ranks, || Log::open(&path, step))?;
        Ok(())
    }
}

/// Refuses features that no sequence of the model's context is long enough for.
pub(in crate::train) fn require_features(config: &ModelConfig) -> Result<()> {
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
