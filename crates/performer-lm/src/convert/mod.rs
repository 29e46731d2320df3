//! From a pretrained softmax model to a Performer: calibrate, transfer the attention, fine-tune.
//!
//! 1. **Calibrate** (`statistics`): the teacher reads text; means and covariances of each head's queries and keys are what features are
//!    fitted to ([`performer_core::features::fit`]). No weight changes.
//! 2. **Transfer** (`transfer`): feature maps alone are trained, in all layers at once, so that each layer's attention returns what the
//!    teacher's returns on the teacher's own hidden states.
//! 3. **Fine-tune** (`tune`): all weights are trained on the next token and on the teacher's distribution of it.
//!
//! After each stage the student is saved, and measured beside the teacher on the same held-out tokens.

mod descend;
mod measure;
mod statistics;
mod transfer;
mod tune;

use std::{path::Path, sync::atomic::AtomicBool, time::Instant};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{Device, Tensor};
use performer_core::{Attention, Favor, FeatureMapKind, Windowed, features::Fitted};
use serde::{Deserialize, Serialize};

use crate::{
    config::{AttentionConfig, ModelConfig},
    data::Prepared,
    files,
    model::{Decoder, pretrained::Pretrained},
    plot::{At, Axis, Chart, Marker, Scale, Series},
    train::{Checkpoint, git_revision},
};
pub use measure::Measured;
pub(crate) use statistics::moments;
pub use statistics::{HeadReport, inspect};
pub use tune::Tuning;

/// File of the [`Report`].
const REPORT: &str = "convert.json";

/// What is converted, and how far.
pub struct Plan<'a> {
    /// The softmax model.
    pub teacher: &'a Pretrained,
    /// The student's config: the teacher's with other attention.
    pub config: ModelConfig,
    /// Folder of the student.
    pub out: &'a Path,
    /// Device of both models.
    pub device: Device,
    /// Worker threads on the CPU.
    pub threads: usize,
    /// Set from outside to stop after the step in progress.
    pub stop: &'a AtomicBool,
    /// Tokens that statistics are taken from; 0 fits nothing.
    pub calibrate_tokens: usize,
    /// Steps of the transfer; 0 leaves it out.
    pub transfer_steps: usize,
    /// Its peak learning rate.
    pub transfer_rate: f64,
    /// Sequences of a step.
    pub batch_size: usize,
    /// The fine-tuning, if any.
    pub tuning: Option<Tuning>,
    /// Held-out tokens that each stage is measured on.
    pub measure_tokens: usize,
    /// Seed of features and data order.
    pub seed: u64,
}

/// A stage and what it came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Stage {
    /// `teacher`, `swap` (plain random features), `calibrate`, `transfer`, `tune`.
    pub name: String,
    /// Tokens the student had seen in all when it was done.
    pub tokens: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// The student on held-out text.
    #[serde(flatten)]
    pub measured: Measured,
    /// The same with every exact window switched off, where there are windows: what the features do by themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub without_window: Option<Measured>,
}

/// What a conversion came to: saved as `convert.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The attention converted to, as the command line takes it.
    pub attention_spec: String,
    /// What it was converted on.
    pub corpus: String,
    /// Held-out tokens measured on.
    pub measured_tokens: usize,
    /// The stages in order, the teacher first.
    pub stages: Vec<Stage>,
    /// Revision of this program.
    pub revision: String,
}

/// Converts; `progress` is told what comes next. `None` if it was stopped: run it again to go on after the last finished stage.
///
/// # Errors
/// A teacher that is not all softmax, attention without feature maps that can be fitted where stages need them, and what keeps files from
/// being written.
pub fn run(plan: &Plan, data: &Prepared, progress: &mut dyn FnMut(&str)) -> Result<Option<Report>> {
    check(plan)?;
    let teacher = plan.teacher.decoder(&plan.device).context("cannot build the teacher")?;
    let corpus = data.corpus_name.clone();
    let mut report = match finished(plan, &corpus)? {
        Some(report) => report,
        None => Report {
            attention_spec: plan.config.attention.to_string(),
            corpus,
            measured_tokens: plan.measure_tokens,
            stages: Vec::new(),
            revision: git_revision().to_string(),
        },
    };
    let measure =
        |student: &Decoder| measure::measure(&teacher, student, &data.valid, plan.measure_tokens, plan.threads);
    if report.stages.is_empty() {
        progress("the teacher, and features drawn at random in it");
        let started = Instant::now();
        let seconds = || started.elapsed().as_secs_f64();
        let mut add = |name: &str, student: &Decoder| -> Result<()> {
            let (measured, without_window) =
                (measure(student)?, without_windows(student)?.map(|s| measure(&s)).transpose()?);
            report.stages.push(Stage { name: name.into(), tokens: 0, seconds: seconds(), measured, without_window });
            Ok(())
        };
        add("teacher", &teacher)?;
        add("swap", &student(plan, plan.teacher.tensors.clone())?)?;
        save(plan, &student(plan, plan.teacher.tensors.clone())?, &report)?;
    }
    let stopped = || plan.stop.load(std::sync::atomic::Ordering::Relaxed);
    for name in ["calibrate", "transfer", "tune"] {
        let wanted = match name {
            "calibrate" => plan.calibrate_tokens > 0,
            "transfer" => plan.transfer_steps > 0,
            _ => plan.tuning.is_some(),
        };
        if !wanted || report.stages.iter().any(|stage| stage.name == name) {
            continue;
        }
        if stopped() {
            return Ok(None);
        }
        progress(name);
        let started = Instant::now();
        let checkpoint = Checkpoint::load(plan.out, &plan.device)?;
        let before = student(plan, checkpoint.tensors)?;
        let result = match name {
            "calibrate" => Some(statistics::calibrate(plan, &teacher, before, data)?),
            "transfer" => transfer::transfer(plan, &teacher, before, data)?,
            _ => tune::tune(plan, &teacher, before, data)?,
        };
        let Some((student, tokens)) = result else { return Ok(None) };
        let before = report.stages.last().map_or(0, |stage| stage.tokens);
        let without_window = without_windows(&student)?.map(|s| measure(&s)).transpose()?;
        report.stages.push(Stage {
            name: name.into(),
            tokens: before + tokens,
            seconds: started.elapsed().as_secs_f64(),
            measured: measure(&student)?,
            without_window,
        });
        save(plan, &student, &report)?;
    }
    Ok(Some(report))
}

fn check(plan: &Plan) -> Result<()> {
    plan.config.validate()?;
    let teacher = &plan.teacher.config;
    let layers = 0..teacher.layers;
    if let Some(layer) = layers.clone().find(|&i| *teacher.attention_of(i) != AttentionConfig::Softmax) {
        bail!(
            "layer {layer} of the model has attention {}; only softmax models can be converted",
            teacher.attention_of(layer)
        );
    }
    let favor: Vec<_> = layers.filter_map(|i| plan.config.attention_of(i).favor()).collect();
    ensure!(!favor.is_empty(), "no layer is to have linear attention: give --attention favor:...");
    if plan.calibrate_tokens + plan.transfer_steps > 0
        && let Some(other) = favor.iter().find(|favor| !favor.map.is_fitted())
    {
        bail!(
            "feature map {} cannot be fitted: use map=learned, map=dense or map=optimal, or --calibrate-tokens 0 --transfer-steps 0",
            other.map
        );
    }
    ensure!(
        plan.transfer_steps == 0 || favor.iter().any(|favor| favor.map == FeatureMapKind::Learned),
        "only map=learned can be trained: use it, or --transfer-steps 0"
    );
    Ok(())
}

/// The report in the folder, if it is of the same conversion.
fn finished(plan: &Plan, corpus: &str) -> Result<Option<Report>> {
    let path = plan.out.join(REPORT);
    if !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let report: Report = serde_json::from_str(&text)
        .with_context(|| format!("{} is damaged: remove it to convert from the start", path.display()))?;
    let same = report.attention_spec == plan.config.attention.to_string() && report.corpus == corpus;
    ensure!(
        same,
        "{} holds a conversion to {} on {}: choose another --out",
        plan.out.display(),
        report.attention_spec,
        report.corpus
    );
    Ok(Some(report))
}

/// The student of these tensors; feature maps that are not among them are drawn.
fn student(plan: &Plan, mut tensors: std::collections::HashMap<String, Tensor>) -> Result<Decoder> {
    let fresh = Decoder::buffers(&plan.config, plan.seed, &plan.device)?;
    for (name, tensor) in fresh {
        tensors.entry(name).or_insert(tensor);
    }
    Decoder::from_tensors(&plan.config, &tensors, &plan.device)
}

/// Saves the student and the report: the weights first, so that the report never promises more than there is.
fn save(plan: &Plan, student: &Decoder, report: &Report) -> Result<()> {
    let tokenizer = plan.teacher.tokenizer.as_bytes().to_vec();
    let stage = report.stages.last().map_or("", |stage| &stage.name);
    let metadata = [("converted_to", report.attention_spec.as_str()), ("corpus", &report.corpus), ("stage", stage)];
    let metadata = metadata.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let checkpoint = Checkpoint {
        config: serde_json::to_value(student.config())?,
        tokenizer,
        tensors: student.tensors()?,
        metadata,
    };
    checkpoint.save(plan.out, None)?;
    files::write_json(&plan.out.join(REPORT), report)
}

/// The student with its windows switched off, if it has any.
fn without_windows(student: &Decoder) -> Result<Option<Decoder>> {
    let config = student.config();
    if (0..config.layers).all(|i| config.attention_of(i).window().is_none()) {
        return Ok(None);
    }
    let bare = |attention: &AttentionConfig| match attention {
        AttentionConfig::Windowed { far, .. } => AttentionConfig::Favor(far.clone()),
        other => other.clone(),
    };
    let config = ModelConfig {
        attention: bare(&config.attention),
        attention_by_layer: config.attention_by_layer.iter().map(|(&i, a)| (i, bare(a))).collect(),
        ..config.clone()
    };
    Ok(Some(Decoder::from_tensors(&config, &student.tensors()?, student.device())?))
}

/// Attention of a config over a given feature map.
fn attention(config: &AttentionConfig, map: Favor) -> Result<Box<dyn Attention>> {
    Ok(match config.window() {
        None => Box::new(map),
        Some(window) => Box::new(Windowed::new(window, map)?),
    })
}

/// The fitted map of a layer of a student, if it has one.
fn fitted(student: &Decoder, layer: usize) -> Result<Option<Fitted>> {
    let buffers = student.attention(layer).buffers();
    let get = |name: &str| {
        let found = buffers.iter().find(|(n, _)| n.strip_prefix("feature_map.") == Some(name));
        found.map(|(_, tensor)| tensor.clone())
    };
    if get("queries").is_none() {
        return Ok(None);
    }
    Ok(Some(Fitted::from_tensors(&get)?))
}

impl Report {
    /// Loss over tokens used, with the teacher's as a line.
    pub fn chart(&self) -> Chart {
        let students: Vec<&Stage> = self.stages.iter().filter(|stage| stage.name != "teacher").collect();
        // The stages before training are all at zero tokens: stages in order are the axis.
        let points = |part: &dyn Fn(&Stage) -> Option<f64>| -> Vec<(f64, f64)> {
            let known = students.iter().enumerate().filter_map(|(i, stage)| Some((i as f64, part(stage)?)));
            known.collect()
        };
        let mut series = vec![Series::new("student", points(&|s| Some(s.measured.val_loss)))];
        let bare = points(&|s| s.without_window.as_ref().map(|m| m.val_loss));
        if !bare.is_empty() {
            series.push(Series::new("student, window off", bare));
        }
        let names: Vec<String> = students.iter().enumerate().map(|(i, s)| format!("{i} {}", s.name)).collect();
        let teacher = self.stages.iter().find(|stage| stage.name == "teacher");
        Chart {
            title: format!("Converting to {}", self.attention_spec),
            subtitle: Some(format!(
                "stages: {}; {} held-out tokens of {}",
                names.join(", "),
                self.measured_tokens,
                self.corpus
            )),
            x: Axis::new("stage", Scale::Linear),
            y: Axis::new("loss (nats per token)", Scale::Linear),
            series,
            lines: teacher
                .map(|t| Marker { at: At::Y(t.measured.val_loss), label: "teacher".into() })
                .into_iter()
                .collect(),
        }
    }
}
