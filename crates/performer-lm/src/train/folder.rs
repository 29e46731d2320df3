//! This module reads what a folder holds of a training run: its state, its result, and the data
//! that it trains on. It finds a run again, and goes on with it or begins it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::{
    Checkpoint, Earlier, Leg, Report, RunKey, RunOptions, Trainer, TrainingState, run::require_features,
    run_key::TRAINING,
};
use crate::{
    checkpoint::{MODEL, REPORTS, require_folder, require_free},
    config::{AttentionPattern, ModelConfig, Preset, TrainingConfig},
    data::{DataSpec, Prepared, Tokenizer},
    files::{require_no_file, unread},
    model::{Decoder, pretrained},
};

/// File name of the [`Report`].
pub(super) const REPORT: &str = "metrics.json";

/// File name of the log.
pub(super) const LOG: &str = "metrics.jsonl";

/// File name of the [`RunState`], for messages.
pub(super) const STATE: &str = "train_state.json";

/// `RunState` is the content of `train_state.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RunState {
    pub(super) step: usize,
    pub(super) epoch_seconds: Vec<f64>,
    pub(super) training: TrainingConfig,
    pub(super) corpus: String,
    /// [`RunOptions::data`] as the command line spells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data_spec: Option<String>,
    /// The path from the run's folder to the data, where the command line named the data by a path
    /// relative to the working directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) data_from_here: Option<PathBuf>,
    /// Key of the run; `None` in states of versions that did not record it.
    #[serde(default)]
    pub(super) key: Option<RunKey>,
    /// See [`Report::earlier_legs`].
    #[serde(default)]
    pub(super) earlier_legs: Vec<Leg>,
}

impl RunState {
    /// Returns the state of the training run in `dir`.
    pub(super) fn of(saved: &TrainingState, dir: &Path) -> Result<Self> {
        if let Some(run) = saved.progress["key"]["run"].as_str() {
            ensure!(
                run == TRAINING,
                "{} holds a {run}, which is no training run: go on with it by the command that began it",
                dir.display()
            );
        }
        saved.progress_as().with_context(|| format!("cannot go on with the run in {}", dir.display()))
    }
}

/// Loads a model and its tokenizer from a checkpoint folder.
///
/// # Errors
/// If anything is missing or damaged; the message names it.
pub fn load_model(dir: &Path, device: &Device) -> Result<(Decoder, Tokenizer)> {
    require_folder(dir)?;
    pretrained::load_folder(dir, device)
}

/// Whether a folder holds the report of a training that has ended.
pub fn is_finished(dir: &Path) -> bool {
    dir.join(REPORT).exists()
}

/// Whether a folder holds a training that [`Trainer::resume`] can go on with. A first save that was
/// interrupted counts too: its state still has another name.
pub fn is_begun(dir: &Path) -> Result<bool> {
    let is_training = |run: &str| run == TRAINING;
    let is_other = state_in(dir).is_some_and(|state| !state["key"]["run"].as_str().is_none_or(is_training));
    Ok(TrainingState::is_in(dir)? && !is_other)
}

/// Returns after which step the weights in a folder were saved, if it is that of a training which
/// has no result yet.
pub fn unfinished_step(dir: &Path) -> Option<u64> {
    if is_finished(dir) || !TrainingState::is_in(dir).unwrap_or(false) {
        return None;
    }
    let state = state_in(dir)?;
    if state["key"]["run"] == TRAINING { state["step"].as_u64() } else { None }
}

/// `Found` says what a folder holds of a run.
#[derive(Debug)]
pub enum Found {
    /// The folder holds nothing of the run.
    Nothing,
    /// The folder holds a checkpoint from which the run can resume.
    Begun,
    /// The folder holds the run's result.
    Finished(Box<Report>),
}

/// Looks for a run in `options.out`. Whoever plans several runs calls it for each before the first
/// begins, so that a folder that cannot be used is reported at once and not hours later.
///
/// # Errors
/// If the model has features that are of no use at its context; or if the folder holds a run with
/// another key or without one, a damaged run, or files of something else that a run would replace.
pub fn find(config: &ModelConfig, training: &TrainingConfig, data: &Prepared, options: &RunOptions) -> Result<Found> {
    require_features(config)?;
    require_no_file(options.out)?;
    let key = RunKey::of_training(&as_trained(config, data), training, data, &options.device)?;
    let file = options.out.join(REPORT);
    if file.exists() {
        let text = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let report: Report = serde_json::from_slice(&text)
            .with_context(|| unread(&file, &String::from_utf8_lossy(&text), "val_loss", "run it again"))?;
        key.check(Earlier { key: report.key.as_ref(), file: &file, remove: Some(options.out) })?;
        return Ok(Found::Finished(Box::new(report)));
    }
    let file = options.out.join(STATE);
    if !TrainingState::is_in(options.out)? {
        require_free(options.out, &REPORTS)?;
        return Ok(Found::Nothing);
    }
    let state = RunState::of(&TrainingState::load(options.out, &Device::Cpu)?, options.out)?;
    key.check_interrupted(Earlier { key: state.key.as_ref(), file: &file, remove: Some(options.out) })?;
    Ok(Found::Begun)
}

/// Returns the result of a run: the one that `options.out` holds, or else the result of resuming or
/// beginning the run there. Returns `None` if the run was stopped.
///
/// # Errors
/// As [`find`]; also if the run fails.
pub fn find_or_run(
    config: &ModelConfig,
    training: &TrainingConfig,
    data: &Prepared,
    options: RunOptions,
) -> Result<Option<Report>> {
    match find(config, training, data, &options)? {
        Found::Finished(report) => Ok(Some(*report)),
        Found::Begun => {
            let mut trainer = Trainer::resume(data, options)?;
            trainer.training.save_every = training.save_every;
            trainer.run()
        }
        Found::Nothing => Trainer::new(config, training, data, options)?.run(),
    }
}

/// Returns the finished runs in folders beside `out` that differ from the run of `report`, which is
/// in `out`, in their attention alone. Folders without a whole report of this version, the log of
/// losses and the model are passed over, and so is what cannot be read.
///
/// # Errors
/// If `out` is relative and the working folder is gone.
pub fn runs_beside(report: &Report, out: &Path) -> Result<Vec<(Report, PathBuf)>> {
    let Some(key) = &report.key else { return Ok(Vec::new()) };
    let out = std::path::absolute(out)?;
    let Some(parent) = out.parent() else { return Ok(Vec::new()) };
    let mut beside = Vec::new();
    for folder in std::fs::read_dir(parent).into_iter().flatten().flatten().map(|entry| entry.path()) {
        let Ok(text) = std::fs::read(folder.join(REPORT)) else { continue };
        let Ok(other) = serde_json::from_slice::<Report>(&text) else { continue };
        let is_whole = folder.join(LOG).is_file() && folder.join(MODEL).is_file();
        if is_whole && other.key.as_ref().is_some_and(|other| key.differs_in_attention_alone(other).unwrap_or(false)) {
            beside.push((other, folder));
        }
    }
    Ok(beside)
}

/// Returns the configuration with the vocabulary of the data's tokenizer and its borders of
/// documents.
pub(crate) fn as_trained(config: &ModelConfig, data: &Prepared) -> ModelConfig {
    let tokenizer = &data.tokenizer;
    ModelConfig { vocab_size: tokenizer.vocab_size(), borders: tokenizer.borders_for_config(), ..config.clone() }
}

/// `SavedData` says what a run trains on.
#[derive(Debug)]
pub struct SavedData {
    /// The data as they were named when the run began, for [`RunOptions::data`]; `None` if they had
    /// no name.
    pub named: Option<DataSpec>,
    /// Where they are for this process, which may be in another folder than the one that began it.
    pub spec: Option<DataSpec>,
    /// The tokenizer with which it is encoded.
    pub tokenizer: Tokenizer,
}

/// Returns what the run in a folder trains on.
///
/// # Errors
/// If the folder holds no training run that can be resumed, or a file of it is missing or damaged.
pub fn saved_data(dir: &Path) -> Result<SavedData> {
    let state = RunState::of(&TrainingState::load(dir, &Device::Cpu)?, dir)?;
    let parse = |spelt: String| -> Result<DataSpec> {
        spelt.parse().with_context(|| format!("{} names its data as {spelt:?}", dir.display()))
    };
    let named = state.data_spec.map(parse).transpose()?;
    let from_here = state.data_from_here.map(|path| dir.join(path)).filter(|path| path.exists());
    let spec = from_here.map(DataSpec::Path).or_else(|| named.clone());
    let checkpoint = Checkpoint::load(dir, &Device::Cpu)?;
    let borders = checkpoint.config_as::<ModelConfig>()?.borders;
    Ok(SavedData { named, spec, tokenizer: Tokenizer::with_borders(checkpoint.tokenizer, borders)? })
}

/// The training state in a folder as JSON, without its tensors.
fn state_in(dir: &Path) -> Option<serde_json::Value> {
    serde_json::from_slice(&std::fs::read(dir.join(STATE)).ok()?).ok()
}

/// Whether the run in a folder, a training or a conversion, learned from this file, or from a part
/// of it. Where it was given a folder, that is the training text in there.
pub fn trains_on(dir: &Path, file: &Path) -> bool {
    let Some(state) = state_in(dir) else { return false };
    let spelt = match state["data_spec"].as_str().map(str::parse) {
        Some(Ok(DataSpec::Path(path))) => Some(path),
        _ => None,
    };
    let from_here = state["data_from_here"].as_str().map(|path| dir.join(path));
    from_here.or(spelt).is_some_and(|path| DataSpec::Path(path).trains_on(file))
}

/// Returns how many forward passes a step of the run in a folder takes, if there is such a run.
pub fn saved_passes(dir: &Path) -> Option<usize> {
    let state = state_in(dir)?;
    let setting = |name: &str| usize::try_from(state["training"][name].as_u64()?).ok().filter(|&n| n > 0);
    Some(setting("batch_size")?.div_ceil(setting("micro_batch")?))
}

/// Returns the default folder of a run: `runs/PRESET-ATTENTION-seedN` in lower case, with `-leak`
/// behind it if the model leaks.
pub fn default_out(preset: Preset, config: &ModelConfig, seed: u64) -> PathBuf {
    let leak = if config.leak { "-leak" } else { "" };
    let name = format!("{preset:?}-{}{leak}", run_name(&config.pattern(), seed));
    Path::new("runs").join(name.to_lowercase())
}

/// Returns `ATTENTION-seedN`, of characters that every file system takes.
pub fn run_name(attention: &AttentionPattern, seed: u64) -> String {
    // `|` gets a character of its own, so that an attention by heads, `A|B`, and a hybrid of
    // layers, `A+B/n`, do not get one name.
    let name = attention.to_string().replace('|', "_");
    let name: String =
        name.chars().map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_') { c } else { '-' }).collect();
    format!("{}-seed{seed}", name.replace("m-", "m"))
}
