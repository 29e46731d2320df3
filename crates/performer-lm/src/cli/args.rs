//! This module has the arguments that several commands share.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use clap::Args;
use performer_dist::{One, Ranks, local_size};

use super::output;
use crate::{
    config::{AttentionConfig, ModelConfig, Positions, Precision, Preset, TrainingConfig},
    data::{DataSpec, Prepared, TokenFile, Tokenizer, prepare, prepare_held_out, prepare_text, prepare_with_test},
    device::DeviceKind,
    errors::Cause,
    parallel::{cores, threads_on},
    train::Schedule,
};

/// Arguments of every command.
#[derive(Args)]
pub(super) struct Global {
    /// Where to compute.
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto, global = true)]
    device: DeviceKind,
    /// CPU threads [default: all cores, divided among the processes of mpirun]. Results do not
    /// depend on it.
    #[arg(long, global = true)]
    threads: Option<usize>,
}

/// `Machine` is the device and the number of threads that [`Global`] selects, and the processes
/// that were started together.
pub(super) struct Machine {
    pub(super) device: Device,
    pub(super) threads: usize,
    pub(super) ranks: Arc<dyn Ranks>,
}

/// The most threads that are started where there are fewer cores: each takes memory, and time to
/// start.
const MAX_THREADS: usize = 1024;

impl Global {
    /// Opens the device and sets up threads. It must run before anything else uses Candle. `passes`
    /// says how many forward passes the command runs side by side at most; threads that are left
    /// over work inside of each.
    pub(super) fn configure(self, passes: usize) -> Result<Machine> {
        let cores = cores();
        let threads = match self.threads {
            Some(0) => bail!("--threads is 0; it must be at least 1"),
            Some(threads) if threads > MAX_THREADS.max(cores) => {
                let most = MAX_THREADS.max(cores);
                bail!(
                    "--threads is {threads}; it must be at most {most}, and more than the {cores} cores make nothing faster"
                )
            }
            Some(threads) => threads,
            None => (cores / local_size()).max(1),
        };
        // While a pass runs on each thread, Candle's own pools would only compete for the cores.
        let inside = inside(threads, passes).to_string();
        // SAFETY: no other thread has been started yet.
        unsafe {
            std::env::set_var("RAYON_NUM_THREADS", &inside);
            // Candle's pool for elementwise operations spins while it waits, on cores that the
            // kernels' own threads need.
            if std::env::var_os("CANDLE_NUM_THREADS").is_none() {
                std::env::set_var("CANDLE_NUM_THREADS", "1");
            }
        }
        // Tokenizers use rayon's pool, so it gets all threads.
        rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("cannot start threads")?;
        let device = self.device.open(output::note)?;
        let threads = threads_on(&device, threads);
        Ok(Machine { device, threads, ranks: Arc::new(One) })
    }
}

/// The threads of each of so many passes, which run side by side.
fn inside(threads: usize, passes: usize) -> usize {
    (threads / passes.max(1)).max(1)
}

/// Refuses to write a model into the folder of the model that it is made from: if the program were
/// stopped half-way, both would be lost.
pub(super) fn require_another_folder(model: &str, out: &Path) -> Result<()> {
    let model = Path::new(model);
    let folder = if model.is_file() { model.parent().filter(|p| !p.as_os_str().is_empty()) } else { Some(model) };
    let same = |a: &Path, b: &Path| matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b);
    ensure!(
        !same(folder.unwrap_or(Path::new(".")), out),
        Cause::AnotherFolder(format!(
            "{} is the folder of the model itself, which would be lost: choose another folder",
            out.display()
        ))
    );
    Ok(())
}

/// Returns the name and the tokens of a text to measure a model on: all of a text file, or the
/// held-out part of `sample`, `tinystories` or a folder.
pub(super) fn held_out(text: &str, tokenizer: &Tokenizer) -> Result<(String, Arc<TokenFile>)> {
    let spec: DataSpec = text.parse().map_err(|error| anyhow::anyhow!("the text {text}: {error}"))?;
    if let DataSpec::Path(path) = &spec
        && path.is_file()
    {
        let name = path.file_name().map_or_else(|| text.to_string(), |name| name.to_string_lossy().into_owned());
        return Ok((format!("file:{name}"), prepare_text(path, tokenizer, &output::TERMINAL)?.into()));
    }
    let (name, tokens) = prepare_held_out(&spec, tokenizer, &output::TERMINAL).context("cannot prepare the text")?;
    Ok((name, tokens.into()))
}

/// What to train on.
#[derive(Args)]
pub(super) struct DataArgs {
    /// auto, tinystories, sample, a text file with <|endoftext|> lines, or a folder with train.txt
    /// and valid.txt [default: auto].
    ///
    /// Where the folder has a test.txt, by which nothing is chosen, results are of that too.
    ///
    /// auto takes TinyStories if it has been downloaded before, else the sample that comes with the
    /// program; tinystories downloads it (2 GB, once).
    #[arg(long)]
    pub(super) data: Option<DataSpec>,
    /// Tokens of the byte-level BPE that is trained on the training text [default: the preset's;
    /// 4096 for data, 512 for lab ablate].
    #[arg(long)]
    vocab_size: Option<usize>,
    /// A tokenizer.json to use instead.
    #[arg(long)]
    pub(super) tokenizer: Option<PathBuf>,
}

impl DataArgs {
    pub(super) fn spec(&self) -> DataSpec {
        self.data.clone().unwrap_or_default()
    }

    /// Returns the number of tokens that was given, or that of the tokenizer that was given.
    pub(super) fn vocab_size_asked_for(&self, data: &Prepared) -> Option<usize> {
        self.vocab_size.or_else(|| self.tokenizer.is_some().then(|| data.tokenizer.vocab_size()))
    }

    /// Refuses a number of tokens beside a tokenizer, which has its own.
    fn check(&self) -> Result<()> {
        ensure!(
            self.vocab_size.is_none() || self.tokenizer.is_none(),
            "--vocab-size: the tokenizer of --tokenizer has its own number of tokens; leave one of the two out"
        );
        Ok(())
    }

    pub(super) fn prepare(&self, vocab_size: usize) -> Result<Prepared> {
        self.check()?;
        prepare(&self.spec(), self.vocab_size.unwrap_or(vocab_size), self.tokenizer.as_deref(), &output::TERMINAL)
    }

    /// Prepares the data with a test split in any case.
    pub(super) fn prepare_with_test(&self, vocab_size: usize) -> Result<Prepared> {
        self.check()?;
        let vocab_size = self.vocab_size.unwrap_or(vocab_size);
        prepare_with_test(&self.spec(), vocab_size, self.tokenizer.as_deref(), &output::TERMINAL)
    }
}

/// What to train and how: a preset and what to change in it.
#[derive(Args)]
pub(super) struct RecipeArgs {
    /// Model and training settings to start from.
    #[arg(long, value_enum, default_value_t = Preset::Seed)]
    pub(super) preset: Preset,
    /// A config.json to use for the model instead of the preset's.
    #[arg(long)]
    config: Option<PathBuf>,
    /// Passes over the training text.
    #[arg(long)]
    epochs: Option<usize>,
    /// Stop after so many optimiser steps.
    #[arg(long)]
    max_steps: Option<usize>,
    /// Train on so many tokens from the beginning of the text; 0 for all [default: the preset's].
    #[arg(long)]
    max_train_tokens: Option<usize>,
    /// Sequences a step.
    #[arg(long)]
    batch_size: Option<usize>,
    /// Sequences a forward pass; a step runs its passes side by side on the threads, and where it
    /// has at most half as many passes, several threads work on each [default: the preset's, all of
    /// a step's on a GPU].
    #[arg(long)]
    micro_batch: Option<usize>,
    /// Type of activations and matrix products; weights stay f32.
    #[arg(long, value_enum)]
    dtype: Option<Precision>,
    /// Tokens a sequence.
    #[arg(long)]
    context: Option<usize>,
    /// Peak learning rate.
    #[arg(long)]
    pub(super) learning_rate: Option<f64>,
    /// constant, one-cycle or warmup-cosine, with settings as in warmup-cosine:warmup_steps=100.
    #[arg(long)]
    schedule: Option<Schedule>,
    /// Dropout probability.
    #[arg(long)]
    dropout: Option<f32>,
    /// Steps between redraws of random features; 0 never.
    #[arg(long)]
    redraw_every: Option<usize>,
    /// Steps between fits of features that can be fitted (map=dense, map=optimal) to the model's
    /// own queries and keys, the first before the first step; 0 never.
    #[arg(long)]
    fit_every: Option<usize>,
    /// Steps between validations; 0 after each epoch only.
    #[arg(long)]
    eval_every: Option<usize>,
    /// Steps between checkpoints. A run is saved after each epoch and every ten minutes too; with
    /// 0 only then.
    #[arg(long)]
    save_every: Option<usize>,
}

/// Epochs over the embedded sample, which has a third of a million tokens: after more of them the
/// validation loss of the preset `seed` rises.
const SAMPLE_EPOCHS: usize = 20;

/// The context of the preset `seed` on the sample: whole stories fit in.
const SAMPLE_CONTEXT: usize = 128;

/// Sequences of a step on the sample with the preset `seed`. With the preset's 128, a run of this
/// length has too few steps to learn more than words.
const SAMPLE_BATCH: usize = 32;

/// The peak learning rate on the sample with the preset `seed`.
const SAMPLE_RATE: f64 = 4e-3;

impl RecipeArgs {
    /// The number of forward passes of one step, by the options alone. `new_on` is what a new model
    /// is trained on, if it is one that takes the settings that suit the sample.
    pub(super) fn passes(&self, new_on: Option<&DataSpec>) -> usize {
        // Wrong settings are refused later, in words of their own.
        let Ok((_, training)) = self.preset.load() else { return usize::MAX };
        let takes_those = self.preset == Preset::Seed && self.config.is_none();
        let on_sample = takes_those && new_on.is_some_and(|data| data.resolved() == DataSpec::Sample);
        let rows = if on_sample { SAMPLE_BATCH } else { training.batch_size };
        let rows = self.batch_size.unwrap_or(rows).max(1);
        rows.div_ceil(self.micro_batch.unwrap_or(training.micro_batch).clamp(1, rows))
    }

    /// Returns the settings for training on `data`: on the sample, those that suit it in place of
    /// the preset's. What an option says is kept. `rates` are those that a comparison tries in
    /// place of the one rate, if it tries several.
    pub(super) fn for_data(
        &self,
        data: &Prepared,
        mut model: ModelConfig,
        mut training: TrainingConfig,
        rates: &[f64],
    ) -> (ModelConfig, TrainingConfig) {
        if data.corpus_name != "sample" {
            return (model, training);
        }
        training.epochs = self.epochs.unwrap_or(SAMPLE_EPOCHS);
        if self.preset == Preset::Seed && self.config.is_none() {
            model.context = self.context.unwrap_or(SAMPLE_CONTEXT);
            training.batch_size = self.batch_size.unwrap_or(SAMPLE_BATCH);
            if self.micro_batch.is_none() {
                training.micro_batch = training.micro_batch.min(training.batch_size);
            }
            training.learning_rate = self.learning_rate.unwrap_or(SAMPLE_RATE);
        }
        let rates = match rates {
            [] => format!("rate {:e}", training.learning_rate),
            rates => format!("rates {}", rates.iter().map(f64::to_string).collect::<Vec<_>>().join(" and ")),
        };
        output::note(&format!(
            "the sample's stories are composed from a grammar: they are easier than other text, and perplexities on \
             them compare with no other text's\nsettings for the sample: {} epochs, {} sequences of {} tokens a step, \
             {rates} (--epochs, --batch-size, --context and --learning-rate change them)",
            training.epochs, training.batch_size, model.context
        ));
        (model, training)
    }

    /// Returns the configuration of the model and its training on a machine.
    pub(super) fn load(&self, machine: &Machine) -> Result<(ModelConfig, TrainingConfig)> {
        let (mut model, _) = self.preset.load()?;
        if let Some(path) = &self.config {
            let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            model = serde_json::from_str(&text).with_context(|| format!("{} is no model config", path.display()))?;
            // The values are the file's, so what is wrong with them is not called by an option.
            model.validate().map_err(|error| anyhow::anyhow!("{}: {error:#}", path.display()))?;
        }
        self.of_model(model, machine)
    }

    /// Returns the configuration of a model that is to be trained further, and its training.
    ///
    /// # Errors
    /// If a setting is out of range, or a model with learned positions is to have another context.
    pub(super) fn of_weights(&self, model: ModelConfig, machine: &Machine) -> Result<(ModelConfig, TrainingConfig)> {
        ensure!(
            model.positions != Positions::Learned || self.context.is_none_or(|context| context == model.context),
            "--context: a model with learned positions keeps its context of {}",
            model.context
        );
        self.of_model(model, machine)
    }

    /// Refuses options that none of the attentions to be trained has a use for.
    ///
    /// # Errors
    /// Names the option, and attentions that have a use for it.
    pub(super) fn require_use<'a>(&self, attentions: impl Iterator<Item = &'a AttentionConfig>) -> Result<()> {
        let maps: Vec<_> =
            attentions.flat_map(AttentionConfig::by_head).filter_map(|one| Some(one.favor()?.map)).collect();
        let asked = |steps: Option<usize>| steps.is_some_and(|steps| steps > 0);
        ensure!(
            !asked(self.redraw_every) || maps.iter().any(|map| map.is_random() && !map.has_parameters()),
            "--redraw-every: no attention here has random features to draw anew, as favor:map=positive has"
        );
        ensure!(
            !asked(self.fit_every) || maps.iter().any(|map| map.is_fitted() && !map.is_trained()),
            "--fit-every: no attention here has features to fit, as favor:map=dense and favor:map=optimal have"
        );
        Ok(())
    }

    /// Refuses what says how long a training is or what it keeps, where `--steps` says how many
    /// steps are timed and nothing is kept.
    ///
    /// # Errors
    /// Names the option.
    pub(super) fn require_steps_alone(&self) -> Result<()> {
        let given = [
            ("--epochs", self.epochs.is_some()),
            ("--max-steps", self.max_steps.is_some()),
            ("--eval-every", self.eval_every.is_some()),
            ("--save-every", self.save_every.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((option, _)) => bail!("{option}: --steps says how many steps are timed"),
            None => Ok(()),
        }
    }

    fn of_model(&self, mut model: ModelConfig, machine: &Machine) -> Result<(ModelConfig, TrainingConfig)> {
        let (_, mut training) = self.preset.load()?;
        fn change<T: Clone>(setting: &mut T, value: &Option<T>) {
            if let Some(value) = value {
                *setting = value.clone();
            }
        }
        change(&mut model.context, &self.context);
        change(&mut model.dropout, &self.dropout);
        change(&mut training.epochs, &self.epochs);
        change(&mut training.batch_size, &self.batch_size);
        change(&mut training.micro_batch, &self.micro_batch);
        change(&mut training.dtype, &self.dtype);
        change(&mut training.learning_rate, &self.learning_rate);
        change(&mut training.schedule, &self.schedule);
        change(&mut training.redraw_every, &self.redraw_every);
        change(&mut training.fit_every, &self.fit_every);
        change(&mut training.eval_every, &self.eval_every);
        change(&mut training.save_every, &self.save_every);
        if !machine.device.is_cpu() && self.micro_batch.is_none() {
            // A GPU runs one pass after another, so larger passes are better.
            training.micro_batch = training.batch_size;
        }
        training.max_steps = self.max_steps.or(training.max_steps);
        model.validate()?;
        training.validate()?;
        training.max_train_tokens = self.max_train_tokens.or(training.max_train_tokens).filter(|&tokens| tokens > 0);
        Ok((model, training))
    }
}
