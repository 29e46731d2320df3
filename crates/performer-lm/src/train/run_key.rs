//! This module has the key of a run: everything that determines its result, field by field.
//!
//! A command that finds an earlier result in its folder returns it, or resumes from it, only if the
//! key stored with that result is the key of the run that is asked for. Every command that keeps
//! results uses this one key:
//!
//! | command | model | settings | data |
//! |---|---|---|---|
//! | `train`, `compare`, `lab ablate` | as trained | [`TrainingConfig`] | tokens and tokenizer |
//! | `convert` | the student | those of the stages done | tokens and tokenizer; a teacher |
//! | `lab tasks` | as trained | the task's recipe | what examples are made from |
//!
//! A result without a key was written by an older version of this program. What determined it is
//! unknown, so it is refused.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    path::Path,
};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::git_revision;
use crate::{
    checkpoint::write_safetensors,
    config::{ModelConfig, TrainingConfig},
    data::Prepared,
    device::kind,
    errors::Cause,
};

/// Value of [`RunKey::run`] for a training run.
pub(super) const TRAINING: &str = "training";

/// The most differences that an error lists.
const SHOWN_DIFFERENCES: usize = 4;

/// The most characters of a value that an error shows.
const SHOWN_CHARACTERS: usize = 60;

/// A `RunKey` is everything that determines the result of a run.
///
/// # What is not in the key, and why
///
/// - The number of threads and of processes: gradients of parts of a batch are added in a fixed
///   order, so on the CPU it changes no bit of a result. The number of segments that processes cut
///   a sequence into is not in the key either, though it changes rounding and which units dropout
///   drops: a run may go on with other processes than it began with.
/// - Names of folders and files, and how the command line spells the data: the digests of what was
///   read say more than a name does.
/// - The steps between checkpoints: a run that resumes goes on as if it had never stopped. The
///   steps between validations are in the key, for they decide the curve that is drawn.
/// - The model of a GPU. The kind of device is in the key, because kinds add in different orders;
///   two GPUs of one kind are taken to be the same, and a report names the GPU.
///
/// # Revisions of the program
///
/// A finished result of another revision is refused: a table has results of one revision only. A
/// training that another revision began goes on, for hours of work should not be lost to an
/// upgrade; it is said to the listener, and recorded as a [`Leg`]. The same holds for another kind
/// of device. A revision that ends in `-dirty` names all uncommitted changes alike, and the key
/// cannot tell them apart: for results that count, commit first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunKey {
    /// What the run makes: `training`, `conversion`, or `task` and its name.
    pub run: String,
    /// The model as it is trained, with the size of the tokenizer's vocabulary.
    pub model: ModelConfig,
    /// How it is trained, converted or taught.
    pub settings: Value,
    /// Digests of what is read, by name.
    pub data: BTreeMap<String, String>,
    /// Digest of the teacher's config and weights, where there is a teacher.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub teacher: Option<String>,
    /// Digest of the config and the weights that a training began with, where they are not drawn
    /// from the seed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initial: Option<String>,
    /// Seed of everything random.
    pub seed: u64,
    /// Kind of device: `cpu`, `cuda` or `metal`.
    pub device: String,
    /// Revision of this program.
    pub revision: String,
}

/// A `Leg` is an earlier part of a run that was made by another revision of the program, or on
/// another kind of device, than the part that followed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Leg {
    /// Where this part ended: so many steps, or the name of a stage.
    pub until: String,
    /// Revision that made it.
    pub revision: String,
    /// Kind of device that it was made on.
    pub device: String,
}

/// `Earlier` is a file with an earlier result, and what can be removed to make the result again.
#[derive(Clone, Copy, Debug)]
pub struct Earlier<'a> {
    /// The key stored with the result.
    pub key: Option<&'a RunKey>,
    /// Path of the file that holds the result, which the error about a difference names.
    pub file: &'a Path,
    /// The folder of everything that belongs to the result. `None` where the file holds other
    /// results too, which nobody should be told to remove.
    pub remove: Option<&'a Path>,
}

/// A `Difference` is a field in which two keys differ.
struct Difference {
    field: String,
    earlier: Value,
    now: Value,
}

impl RunKey {
    /// Makes the key of a run of this program on a device, whose `settings` serialise to a JSON
    /// object.
    ///
    /// # Errors
    /// If the settings cannot be written as JSON.
    pub fn new(
        run: impl Into<String>,
        model: &ModelConfig,
        settings: &impl Serialize,
        data: BTreeMap<String, String>,
        seed: u64,
        device: &Device,
    ) -> Result<Self> {
        Ok(Self {
            run: run.into(),
            model: model.clone(),
            settings: serde_json::to_value(settings)?,
            data,
            teacher: None,
            initial: None,
            seed,
            device: kind(device).into(),
            revision: git_revision().into(),
        })
    }

    /// Makes the key of a training run.
    ///
    /// # Errors
    /// If the training settings cannot be written as JSON.
    pub fn of_training(
        model: &ModelConfig,
        training: &TrainingConfig,
        data: &Prepared,
        device: &Device,
    ) -> Result<Self> {
        let mut settings = serde_json::to_value(training)?;
        if let Some(settings) = settings.as_object_mut() {
            // The seed is a field of the key itself; how often a run is saved does not change it.
            settings.remove("seed");
            settings.remove("save_every");
        }
        Self::new(TRAINING, model, &settings, digests(data), training.seed, device)
    }

    /// Checks that an earlier finished result may be returned for this run.
    ///
    /// # Errors
    /// If the result has no key, or another one. The message has the first few fields that differ
    /// with their two values, the file, and what to do.
    pub fn check(&self, earlier: Earlier) -> Result<()> {
        let key = earlier.require_key()?;
        let differences = self.differences(key)?;
        ensure!(differences.is_empty(), refusal(&differences, earlier));
        Ok(())
    }

    /// Allows an interrupted run to be gone on with as this run. The revision and the kind of
    /// device may differ: then the answer is a warning that says so, to be shown to the user.
    ///
    /// # Errors
    /// As [`Self::check`], for every other field.
    pub fn check_interrupted(&self, earlier: Earlier) -> Result<Option<String>> {
        let key = earlier.require_key()?;
        let is_program = |d: &Difference| d.field == "revision" || d.field == "device";
        let (program, others): (Vec<_>, Vec<_>) = self.differences(key)?.into_iter().partition(is_program);
        ensure!(others.is_empty(), refusal(&others, earlier));
        let (file, listed) = (earlier.file.display(), listed(&program));
        Ok((!program.is_empty()).then(|| {
            format!("warning: {file} was begun otherwise: {listed}. Rounding may differ from then on, which the result records")
        }))
    }

    /// Says whether two runs differ in their attention and in nothing else.
    ///
    /// # Errors
    /// If the model cannot have the other's attention.
    pub fn differs_in_attention_alone(&self, other: &Self) -> Result<bool> {
        let pattern = other.model.pattern();
        if self.model.pattern() == pattern {
            return Ok(false);
        }
        let with_its_attention = Self { model: self.model.clone().with_attention(&pattern)?, ..self.clone() };
        Ok(with_its_attention.differences(other)?.is_empty())
    }

    /// Makes the leg of a run that had this key and ended at `until`.
    pub fn leg(&self, until: impl Into<String>) -> Leg {
        Leg { until: until.into(), revision: self.revision.clone(), device: self.device.clone() }
    }

    fn differences(&self, earlier: &Self) -> Result<Vec<Difference>> {
        // Keys are compared as text, so that an f32 is compared and shown as it is written.
        let value = |key: &Self| -> Result<Value> { Ok(serde_json::from_str(&serde_json::to_string(key)?)?) };
        let mut differences = Vec::new();
        compare("", &value(earlier)?, &value(self)?, &mut differences);
        Ok(differences)
    }
}

impl<'a> Earlier<'a> {
    fn require_key(&self) -> Result<&'a RunKey> {
        self.key.with_context(|| {
            Cause::AnotherFolder(format!(
                "{} has no key that says what determined it: an older version of this program wrote it, so it \
                 cannot be told whether it belongs to this run. {}",
                self.file.display(),
                self.advice()
            ))
        })
    }

    /// What to do about a result that is not the one of this run.
    fn advice(&self) -> String {
        match self.remove {
            Some(remove) => format!("Choose another folder, or remove {} to make it again", remove.display()),
            None => "Choose another folder".into(),
        }
    }
}

/// Digests of prepared data: the tokens of both splits, and the tokenizer.
pub(crate) fn digests(data: &Prepared) -> BTreeMap<String, String> {
    let digests = [
        ("training tokens", data.train.digest()),
        ("held-out tokens", data.valid.digest()),
        ("tokenizer", data.tokenizer.hash()),
    ];
    let test = data.test.iter().map(|test| ("test tokens", test.digest()));
    digests.into_iter().chain(test).map(|(name, digest)| (name.to_string(), digest.to_hex().to_string())).collect()
}

/// Returns the digest of a model's configuration and weights. The context is left out: it is the
/// length at which a caller chose to use the model, and is in the key of that caller.
pub(crate) fn model_digest(config: &ModelConfig, tensors: &HashMap<String, Tensor>) -> Result<String> {
    let config = ModelConfig { context: 1, ..config.clone() };
    let metadata = BTreeMap::from([("config".to_string(), serde_json::to_string(&config)?)]);
    let mut digest = blake3::Hasher::new();
    write_safetensors(&mut digest, tensors, &metadata)?;
    Ok(digest.finalize().to_hex().to_string())
}

/// Appends where two values differ, field by field; a field that is missing is null.
fn compare(field: &str, earlier: &Value, now: &Value, differences: &mut Vec<Difference>) {
    if let (Value::Object(a), Value::Object(b)) = (earlier, now) {
        for name in a.keys().chain(b.keys()).collect::<BTreeSet<_>>() {
            let path = if field.is_empty() { name.clone() } else { format!("{field}.{name}") };
            let of = |object: &serde_json::Map<String, Value>| object.get(name).cloned().unwrap_or(Value::Null);
            compare(&path, &of(a), &of(b), differences);
        }
    } else if earlier != now {
        differences.push(Difference { field: field.to_string(), earlier: earlier.clone(), now: now.clone() });
    }
}

fn refusal(differences: &[Difference], earlier: Earlier) -> Cause {
    let mut text = format!("{} belongs to another run: {}", earlier.file.display(), listed(differences));
    text += &format!(". {}", earlier.advice());
    if differences.iter().any(|d| d.field == "revision") {
        text += "; results of two revisions of this program are not put together";
    }
    // Passes on a GPU are larger by default, so a run that goes on there has another number.
    if let [Difference { field, earlier, .. }] = differences
        && field == "settings.micro_batch"
    {
        text += &format!("; with micro_batch {earlier} (--micro-batch) it goes on");
    }
    Cause::AnotherFolder(text)
}

fn listed(differences: &[Difference]) -> String {
    list(differences, |d| format!("{} was {} and is now {}", d.field, shown(&d.earlier), shown(&d.now)))
}

/// Lists where what another process has differs from what the first has.
pub(super) fn listed_apart(first: &Value, other: &Value) -> String {
    let mut differences = Vec::new();
    compare("", first, other, &mut differences);
    list(&differences, |d| format!("{} is {} and not {}", d.field, shown(&d.now), shown(&d.earlier)))
}

fn list(differences: &[Difference], show: impl Fn(&Difference) -> String) -> String {
    let mut parts: Vec<String> = differences.iter().take(SHOWN_DIFFERENCES).map(show).collect();
    if differences.len() > SHOWN_DIFFERENCES {
        parts.push(format!("and {} more", differences.len() - SHOWN_DIFFERENCES));
    }
    parts.join(", ")
}

/// Formats a value for an error: without quotes, "none" for null, and digests by their beginning.
fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "none".to_string(),
        Value::String(text) if text.len() == 64 && text.bytes().all(|b| b.is_ascii_hexdigit()) => {
            text[..12].to_string()
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Preset;

    #[test]
    fn a_refusal_names_the_first_fields_that_differ_and_what_to_do() -> Result<()> {
        let (model, _) = Preset::Seed.load()?;
        let data = BTreeMap::from([("training tokens".to_string(), "ab".repeat(32))]);
        let settings = serde_json::json!({ "learning_rate": 0.002, "schedule": { "kind": "constant" } });
        let now = RunKey::new("training", &model, &settings, data, 1, &Device::Cpu)?;
        let (file, remove) = (Path::new("runs/a/metrics.json"), Path::new("runs/a"));
        let refused =
            |key: &RunKey| now.check(Earlier { key: Some(key), file, remove: Some(remove) }).unwrap_err().to_string();
        assert!(now.check(Earlier { key: Some(&now), file, remove: None }).is_ok());

        let mut one = now.clone();
        one.data.insert("training tokens".into(), "0123456789abcdef".repeat(4));
        assert_eq!(
            refused(&one),
            "runs/a/metrics.json belongs to another run: data.training tokens was 0123456789ab and is now \
             abababababab. Choose another folder, or remove runs/a to make it again"
        );
        let mut passes = now.clone();
        passes.settings["micro_batch"] = 16.into();
        assert!(refused(&passes).ends_with("; with micro_batch 16 (--micro-batch) it goes on"), "{}", refused(&passes));
        let mut many = one.clone();
        many.model.dropout += 0.1;
        many.seed = 2;
        many.teacher = Some("x".repeat(100));
        many.settings = serde_json::json!({ "learning_rate": 0.002 });
        many.device = "cuda".into();
        let error = refused(&many);
        for part in ["device was cuda and is now cpu", "seed was 2 and is now 1", "and 2 more"] {
            assert!(error.contains(part), "{part} is not in {error}");
        }
        assert_eq!(serde_json::from_str::<RunKey>(&serde_json::to_string(&many)?)?, many);
        Ok(())
    }
}
