//! This module saves and loads checkpoints: a checkpoint is a folder that holds a whole model at
//! every moment, whatever interrupts the writing of it.
//!
//! ```text
//! DIR/config.json              the model's configuration
//! DIR/tokenizer.json           the tokenizer, in the format of Hugging Face
//! DIR/model.safetensors        parameters and buffers (the random projections among them)
//! DIR/optimizer.safetensors    moments of the optimiser        ┐ only where training
//! DIR/train_state.json         step, seeds, schedule and so on ┘ can be resumed
//! ```
//!
//! The folder is plain: other tools read these five files, and other files in it (logs, plots, a
//! model card) are left alone. Saving over a checkpoint takes the disk space of both for a moment.
//!
//! # How a save survives a kill
//!
//! Five files cannot be replaced in one system call, but one can. So `model.safetensors` is the
//! commit, and its header lists the BLAKE3 digests of the files that belong to it, that of
//! `train_state.json` without the times in it, so that equal trainings give equal models:
//!
//! 1. write `config.json.new`, ..., and last `model.safetensors.new` with the digests of the
//!    others; sync all of them;
//! 2. rename `model.safetensors.new` to `model.safetensors`: before this the old checkpoint counts,
//!    from here on the new one;
//! 3. rename the other `.new` files to their names, and remove training state that the new
//!    checkpoint does not have.
//!
//! A reader takes a `.new` file if its digest is the one that `model.safetensors` lists, and the
//! plain name otherwise. Hence a kill before step 2 leaves `.new` files that match nothing and are
//! ignored; a kill after it leaves some that match and are used. The next save first completes step
//! 3 for those and removes the rest. Where nothing was interrupted there are no `.new` files. A
//! `config.json` or `tokenizer.json` edited by hand is then taken as it is; the state of a training
//! must be the one that `model.safetensors` lists, and `model.safetensors` itself the bytes that
//! were written, of which it holds a digest.

mod weights_file;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use safetensors::SafeTensors;
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

pub(crate) use weights_file::{check_digest, write_durably, write_safetensors, write_with_digest};

const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
pub(crate) const MODEL: &str = "model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
pub(crate) const TRAIN_STATE: &str = "train_state.json";

/// The files whose digests `model.safetensors` lists, in the order in which they are written.
const COMPANIONS: [&str; 4] = [CONFIG, TOKENIZER, OPTIMIZER, TRAIN_STATE];

/// The state of a training, with which it goes on.
pub(crate) const TRAINING: [&str; 2] = [OPTIMIZER, TRAIN_STATE];

/// Files that tell of the model beside them: of its training, or of its conversion.
pub(crate) const REPORTS: [&str; 7] =
    ["metrics.json", "metrics.jsonl", "loss.svg", "loss.png", "convert.json", "convert.svg", "convert.png"];

/// Names of the fields of a training state that say how long something took.
const TIMES: [&str; 2] = ["seconds", "epoch_seconds"];

/// The most bytes of a header that readers of safetensors accept.
const MAX_HEADER: u64 = 100_000_000;

/// Header keys of `model.safetensors` that belong to this module: the digests, and the mark that
/// other tools ask for.
const DIGESTS_KEY: &str = "checkpoint_files";
const FORMAT_KEY: &str = "format";

/// A `Checkpoint` is a model with what is needed to use it.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    /// Content of `config.json`.
    pub config: Value,
    /// Content of `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// Parameters and buffers by name.
    pub tensors: HashMap<String, Tensor>,
    /// Free text for the header of `model.safetensors`: program version, seed, source of the
    /// data... The keys `format`, `checkpoint_files` and `blake3` are reserved.
    pub metadata: BTreeMap<String, String>,
}

/// A `TrainingState` is what a run needs to resume besides the model.
#[derive(Clone, Debug)]
pub struct TrainingState {
    /// The state of the optimiser by name.
    pub optimizer: HashMap<String, Tensor>,
    /// Content of `train_state.json`.
    pub progress: Value,
}

/// Refuses a folder in which a saved model would replace something: one of the five files, the list
/// of a model in several files, or one of `others`.
///
/// # Errors
/// [`Cause::WouldReplace`](crate::errors::Cause) with the first such file.
pub(crate) fn require_free(dir: &Path, others: &[&str]) -> Result<()> {
    let own = [MODEL, CONFIG, TOKENIZER, OPTIMIZER, TRAIN_STATE, "model.safetensors.index.json"];
    crate::files::require_free(dir, &[&own, others].concat())
}

/// Removes those of [`REPORTS`] that `is_stale` says are of a model that was in a folder before.
///
/// # Errors
/// If one of them cannot be removed.
pub(crate) fn remove_reports(dir: &Path, is_stale: impl Fn(&str) -> bool) -> Result<()> {
    REPORTS.iter().filter(|name| is_stale(name)).try_for_each(|name| remove(&dir.join(name), &mut |_| Ok(())))
}

/// Finishes a save of a checkpoint into the folder that was stopped after its commit: the files
/// that belong to the committed model get their names. Others that wait are removed.
///
/// # Errors
/// If the files cannot be read, renamed or removed.
pub(crate) fn finish_save(dir: &Path) -> Result<()> {
    settle(dir, &mut |_| Ok(()))
}

/// Removes the state of a training, for a model that has none and takes the place of one that had.
///
/// # Errors
/// If it cannot be removed.
pub(crate) fn remove_training(dir: &Path) -> Result<()> {
    TRAINING.iter().try_for_each(|name| remove(&dir.join(name), &mut |_| Ok(())))
}

impl Checkpoint {
    /// Saves into the folder `dir`, which is created where needed; a checkpoint there is replaced
    /// as a whole, in one step.
    ///
    /// A run that saves its starting point before the first step finds out then, not hours later,
    /// whether it can.
    ///
    /// # Errors
    /// If there is no permission or no space, or `dir` is not a folder; the checkpoint that was
    /// there is kept.
    pub fn save(&self, dir: &Path, training: Option<&TrainingState>) -> Result<()> {
        self.save_over(dir, training, &mut || Ok(()))
    }

    /// Saves as [`Self::save`] does, in place of a model to which other files in the folder belong:
    /// `clear` removes these. It is called when the new checkpoint is whole on the disk, before it
    /// takes the place of the old one, so that a full disk leaves the old model and its files.
    ///
    /// # Errors
    /// As [`Self::save`]; also if `clear` fails.
    pub(crate) fn save_over(
        &self,
        dir: &Path,
        training: Option<&TrainingState>,
        clear: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut stage = |stage: &str| if stage == COMMIT { clear() } else { Ok(()) };
        let saved = self.save_in_stages(dir, training, &mut stage);
        if saved.is_err() {
            // Frees the space of files without use; the error to report is the first one.
            let _ = settle(dir, &mut |_| Ok(()));
        }
        saved.with_context(|| {
            format!(
                "cannot save a checkpoint in {}: check free space and permissions, or choose another folder \
                 (a checkpoint saved there before is intact)",
                dir.display()
            )
        })
    }

    /// Does what [`Self::save`] does, calling `stage` before everything that changes the disk, so
    /// that tests can stop it anywhere.
    fn save_in_stages(&self, dir: &Path, training: Option<&TrainingState>, stage: Stage<'_>) -> Result<()> {
        stage("create the folder")?;
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        settle(dir, stage)?;

        let mut digests = BTreeMap::new();
        let mut write = |name: &'static str, content: Content<'_>, stage: Stage<'_>| -> Result<()> {
            stage(&format!("write {name}"))?;
            digests.insert(name, write_durably(&pending(dir, name), content)?);
            Ok(())
        };
        write(CONFIG, &|out| write_json(out, &self.config), stage)?;
        write(TOKENIZER, &|out| out.write_all(&self.tokenizer), stage)?;
        if let Some(training) = training {
            let tensors = &training.optimizer;
            let content = |out: &mut dyn Write| write_safetensors(out, tensors, &BTreeMap::new());
            write(OPTIMIZER, &content, stage)?;
            write(TRAIN_STATE, &|out| write_json(out, &training.progress), stage)?;
            digests.insert(TRAIN_STATE, digest_without_times(&training.progress)?);
        }

        let mut metadata = self.metadata.clone();
        metadata.insert(FORMAT_KEY.to_owned(), "pt".to_owned());
        metadata.insert(DIGESTS_KEY.to_owned(), serde_json::to_string(&digests)?);
        stage(&format!("write {MODEL}"))?;
        write_durably(&pending(dir, MODEL), |out| write_with_digest(out, &self.tensors, &metadata))?;
        sync_folder(dir)?;
        stage(COMMIT)?;
        rename(&pending(dir, MODEL), &dir.join(MODEL))?;
        sync_folder(dir)?;
        settle(dir, stage)
    }

    /// Loads the model in the folder `dir` onto `device`. Folders written by other tools need
    /// `config.json`, `tokenizer.json` and `model.safetensors`.
    ///
    /// # Errors
    /// If the folder is missing, or a file is missing or damaged; the message names it.
    pub fn load(dir: &Path, device: &Device) -> Result<Self> {
        require_folder(dir)?;
        let path = dir.join(MODEL);
        let bytes = read(&path)?;
        let (metadata, digests) = read_header(&bytes, &path)?;
        let tokenizer = read_companion(dir, TOKENIZER, &digests)?;
        parse_json::<IgnoredAny>(&tokenizer, &dir.join(TOKENIZER))?;
        let config = read_companion(dir, CONFIG, &digests)?;
        let config = parse_json(&config, &dir.join(CONFIG))?;
        Ok(Self { config, tokenizer, tensors: parse_safetensors(&bytes, &path, device)?, metadata })
    }

    /// Makes a checkpoint of the contents of `config.json`, `tokenizer.json` and
    /// `model.safetensors`, where there is no folder that holds them.
    ///
    /// # Errors
    /// If one of them is damaged; the message names it.
    pub fn from_bytes(config: &[u8], tokenizer: Vec<u8>, weights: &[u8], device: &Device) -> Result<Self> {
        let path = Path::new(MODEL);
        let (metadata, _) = read_header(weights, path)?;
        parse_json::<IgnoredAny>(&tokenizer, Path::new(TOKENIZER))?;
        let config = parse_json(config, Path::new(CONFIG))?;
        Ok(Self { config, tokenizer, tensors: parse_safetensors(weights, path, device)?, metadata })
    }

    /// Returns the configuration as a type of the caller's.
    ///
    /// # Errors
    /// If `config.json` lacks a field of that type, or has one with another kind of value.
    pub fn config_as<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.config)
            .with_context(|| format!("{CONFIG} does not describe a model that this program knows"))
    }
}

impl TrainingState {
    /// Whether the model in `dir` has a training state, which may still have its pending name if
    /// the process was killed.
    ///
    /// # Errors
    /// If the model file cannot be read.
    pub fn is_in(dir: &Path) -> Result<bool> {
        let is_listed = committed_digests(dir)?.is_some_and(|digests| digests.contains_key(TRAIN_STATE));
        Ok(is_listed && (dir.join(TRAIN_STATE).exists() || pending(dir, TRAIN_STATE).exists()))
    }

    /// Loads the training state that belongs to the model in `dir`.
    ///
    /// # Errors
    /// As [`Checkpoint::load`]; also if the model was saved without a training state, or with
    /// another one than the folder holds: a training that went on from weights, optimiser and
    /// progress of different steps would be one that no run could have had.
    pub fn load(dir: &Path, device: &Device) -> Result<Self> {
        require_folder(dir)?;
        let digests = committed_digests(dir)?.unwrap_or_default();
        ensure!(
            digests.contains_key(OPTIMIZER) && digests.contains_key(TRAIN_STATE),
            "{} holds no training state: its model can be used, but its training cannot be resumed",
            dir.display()
        );
        let optimizer = read_as_saved(dir, OPTIMIZER, &digests)?;
        let progress = read_as_saved(dir, TRAIN_STATE, &digests)?;
        Ok(Self {
            optimizer: parse_safetensors(&optimizer, &dir.join(OPTIMIZER), device)?,
            progress: parse_json(&progress, &dir.join(TRAIN_STATE))?,
        })
    }

    /// Returns the progress as a type of the caller's.
    ///
    /// # Errors
    /// If the saved progress lacks a field of that type, or has one with another kind of value, as
    /// that of another version may.
    pub fn progress_as<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.progress)
            .with_context(|| format!("{TRAIN_STATE} was not written by this program, or by another version of it"))
    }
}

/// The stage in which the new checkpoint takes the place of the old one.
const COMMIT: &str = "commit";

/// A `Stage` is told what is about to happen; its error stops the save there.
type Stage<'a> = &'a mut dyn FnMut(&str) -> Result<()>;

type Content<'a> = &'a dyn Fn(&mut dyn Write) -> io::Result<()>;

/// `Digests` are digests by file name.
type Digests = BTreeMap<String, String>;

/// Returns the path at which a file waits until the checkpoint that it belongs to is committed.
fn pending(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.new"))
}

/// Gives the files of the committed checkpoint their names and removes files that belong to none.
/// It changes nothing if it has already run to its end.
fn settle(dir: &Path, stage: Stage<'_>) -> Result<()> {
    let committed = committed_digests(dir)?;
    for name in COMPANIONS {
        let (path, pending) = (dir.join(name), pending(dir, name));
        let digest = committed.as_ref().and_then(|digests| digests.get(name));
        if is_pending(name, &pending, digest)? {
            stage(&format!("rename {name}"))?;
            rename(&pending, &path)?;
        } else {
            remove(&pending, stage)?;
        }
        if committed.is_some() && digest.is_none() {
            remove(&path, stage)?;
        }
    }
    remove(&pending(dir, MODEL), stage)?;
    sync_folder(dir)
}

/// Whether a file that waits is the one of this digest. All but the state of a training may be
/// large, and are not read into memory.
fn is_pending(name: &str, pending: &Path, digest: Option<&String>) -> Result<bool> {
    let Some(digest) = digest else { return Ok(false) };
    if name == TRAIN_STATE
        && let Ok(content) = fs::read(pending)
    {
        return Ok(is_of_digest(name, &content, digest));
    }
    Ok(file_digest(pending)?.as_ref() == Some(digest))
}

/// Whether the weights in a folder are those of a checkpoint, whatever lies beside them.
///
/// # Errors
/// If there is a `model.safetensors` that cannot be read.
pub(crate) fn has_checkpoint(dir: &Path) -> Result<bool> {
    Ok(committed_digests(dir)?.is_some())
}

/// Returns the digests listed by `model.safetensors`; `None` if there is no such file or it was not
/// written by this module.
fn committed_digests(dir: &Path) -> Result<Option<Digests>> {
    let path = dir.join(MODEL);
    let header = || {
        let mut file = File::open(&path)?;
        let mut length = [0; 8];
        file.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        // A damaged file may tell any length, which is not to be taken into memory.
        if length > file.metadata()?.len().min(MAX_HEADER) {
            return Err(io::Error::from(ErrorKind::UnexpectedEof));
        }
        let mut header = Vec::new();
        file.take(length).read_to_end(&mut header)?;
        Ok::<_, io::Error>(header)
    };
    let header = match header() {
        Ok(header) => header,
        Err(e) if [ErrorKind::NotFound, ErrorKind::UnexpectedEof].contains(&e.kind()) => {
            return Ok(None);
        }
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    let header: Value = serde_json::from_slice(&header).unwrap_or_default();
    let digests = header["__metadata__"][DIGESTS_KEY].as_str();
    Ok(digests.and_then(|text| parse_digests(text.to_owned())))
}

fn parse_digests(text: String) -> Option<Digests> {
    serde_json::from_str(&text).ok()
}

/// Reads a file beside the model: the pending one if the model lists its digest.
fn read_companion(dir: &Path, name: &str, digests: &Digests) -> Result<Vec<u8>> {
    if let Some(digest) = digests.get(name)
        && let Ok(bytes) = fs::read(pending(dir, name))
        && is_of_digest(name, &bytes, digest)
    {
        return Ok(bytes);
    }
    read(&dir.join(name))
}

/// Reads a file beside the model that must be the one saved with it.
fn read_as_saved(dir: &Path, name: &str, digests: &Digests) -> Result<Vec<u8>> {
    let bytes = read_companion(dir, name, digests)?;
    ensure!(
        digests.get(name).is_some_and(|digest| is_of_digest(name, &bytes, digest)),
        "{} was not saved together with {MODEL} beside it, or was changed or cut short since: copy both from the folder of \
         one save; without it, the model can be used, and its training cannot be resumed",
        dir.join(name).display()
    );
    Ok(bytes)
}

/// Refuses what is no folder.
///
/// # Errors
/// If there is nothing, or a file.
pub(crate) fn require_folder(dir: &Path) -> Result<()> {
    ensure!(dir.exists(), "there is no folder {}: check the path, or train a model there first", dir.display());
    ensure!(dir.is_dir(), "{} is a file: give the checkpoint folder that holds {MODEL}", dir.display());
    Ok(())
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| match e.kind() {
        ErrorKind::NotFound if [OPTIMIZER, TRAIN_STATE].iter().any(|name| path.ends_with(name)) => anyhow::anyhow!(
            "{} is missing: the model beside it can be used, and a new training can begin from its weights, but the training that \
             made it cannot be resumed",
            path.display()
        ),
        ErrorKind::NotFound => anyhow::anyhow!(
            "{} is missing: give the folder of a finished save, with {CONFIG}, {TOKENIZER} and {MODEL}",
            path.display()
        ),
        _ => anyhow::Error::new(e).context(format!("cannot read {}", path.display())),
    })
}

/// Checks the digest of a file of weights, and returns what its header tells beside the tensors:
/// the caller's metadata, and the digests of the files saved with it.
fn read_header(weights: &[u8], path: &Path) -> Result<(BTreeMap<String, String>, Digests)> {
    check_digest(weights).with_context(|| damaged(path))?;
    let header = SafeTensors::read_metadata(weights).with_context(|| damaged(path))?;
    let mut metadata: BTreeMap<_, _> = header.1.metadata().clone().unwrap_or_default().into_iter().collect();
    let digests = metadata.remove(DIGESTS_KEY).and_then(parse_digests).unwrap_or_default();
    metadata.remove(FORMAT_KEY);
    metadata.remove(weights_file::DIGEST_KEY);
    Ok((metadata, digests))
}

fn damaged(path: &Path) -> String {
    format!("{} is damaged or incomplete: copy it again, or train again", path.display())
}

fn parse_safetensors(bytes: &[u8], path: &Path, device: &Device) -> Result<HashMap<String, Tensor>> {
    candle_core::safetensors::load_buffer(bytes, device).with_context(|| damaged(path))
}

fn parse_json<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T> {
    serde_json::from_slice(bytes).with_context(|| format!("{} is not JSON: restore or remove it", path.display()))
}

fn write_json(out: &mut dyn Write, value: &Value) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    out.write_all(b"\n")
}

/// Removes the times that a training took from its state.
fn remove_times(state: &mut Value) {
    match state {
        Value::Object(fields) => {
            fields.retain(|name, _| !TIMES.contains(&name.as_str()));
            fields.values_mut().for_each(remove_times);
        }
        Value::Array(all) => all.iter_mut().for_each(remove_times),
        _ => {}
    }
}

/// Returns the digest of a training state without the times that it has: they differ between two
/// trainings that are equal otherwise, and so would the model's file, which lists the digest.
fn digest_without_times(state: &Value) -> Result<String> {
    let mut state = state.clone();
    remove_times(&mut state);
    let mut digest = blake3::Hasher::new();
    write_json(&mut digest, &state)?;
    Ok(digest.finalize().to_hex().to_string())
}

/// Whether the content of a file is that of which a model lists this digest. Models of earlier
/// versions list the digest of a training state with its times.
fn is_of_digest(name: &str, content: &[u8], digest: &str) -> bool {
    let timeless = || digest_without_times(&serde_json::from_slice(content).ok()?).ok();
    blake3::hash(content).to_hex().as_str() == digest || name == TRAIN_STATE && timeless().as_deref() == Some(digest)
}

fn file_digest(path: &Path) -> Result<Option<String>> {
    let file = match File::open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        file => file,
    };
    let mut digest = blake3::Hasher::new();
    file.and_then(|file| digest.update_reader(file).map(drop))
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(digest.finalize().to_hex().to_string()))
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))
}

fn remove(path: &Path, stage: Stage<'_>) -> Result<()> {
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    stage(&format!("remove {}", path.display()))?;
    crate::files::remove(path)
}

/// Makes renames and new names in a folder durable. Only Unix lets a folder be synced, and not on
/// every file system: what has no such call is saved as well as it can be there.
fn sync_folder(dir: &Path) -> Result<()> {
    if cfg!(unix) {
        match File::open(dir).and_then(|folder| folder.sync_all()) {
            Err(e) if [ErrorKind::InvalidInput, ErrorKind::Unsupported].contains(&e.kind()) => {}
            synced => synced.with_context(|| format!("cannot sync {}", dir.display()))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
