//! This module converts a pretrained softmax model to a Performer in three stages: calibrate,
//! transfer the attention, fine-tune.
//!
//! 1. **Calibrate** (`calibrate`): the teacher reads text, and features are fitted to the means
//!    and covariances of each head's queries and keys ([`performer_core::features::fit`]). Forget
//!    gates, where the student has them, get a pace for each head (`gates`). No other weight
//!    changes.
//! 2. **Transfer** (`transfer`): the feature maps and forget gates alone are trained, in all layers
//!    at once, so that each layer's attention returns what the teacher's returns on the teacher's
//!    own hidden states.
//! 3. **Fine-tune** (`tune`): all weights or low-rank `adapters`, and all that the student has and
//!    the teacher has not, are trained on the next token and on the teacher's distribution of it.
//!
//! In a share of the steps of both trainings, the windows that stand before features may be
//! switched off (`windows`).
//!
//! After each stage the student is saved, and measured beside the teacher on the same held-out
//! tokens. All that an unfinished stage needs to resume is saved at intervals, and when the stage
//! is stopped (`stage`).
//!
//! The student after a stage is determined by a [`RunKey`] with the settings of that stage and of
//! those before it. So a conversion can be continued by a stage that it did not have; every other
//! change is refused.

mod adapters;
mod calibrate;
mod costs;
mod descend;
mod gates;
mod inspect;
mod measure;
mod plan;
mod report;
mod stage;
mod transfer;
mod tune;
mod windows;

use std::{collections::HashMap, time::Instant};

use anyhow::{Context, Result, ensure};
use candle_core::Tensor;
use serde_json::{Value, json};

use crate::{
    checkpoint::{REPORTS, remove_reports, require_free},
    config::ModelConfig,
    data::{Batches, Prepared},
    errors::Cause,
    files::{self, Lock, require_no_file, unread},
    model::Decoder,
    train::{Checkpoint, Earlier, RunKey, TrainingState, digests, git_revision, model_digest},
};
#[cfg(feature = "lab")]
pub(crate) use calibrate::moments;
pub use costs::{Costs, LayerCost, costs};
pub use inspect::{HeadReport, inspect};
pub use measure::{Measured, Predictions};
use measure::{Measurements, Meter, about};
use plan::check;
pub use plan::{Plan, Second};
pub use report::{Point, Report, Stage};
pub use stage::unfinished_stage;
use stage::{Bookmark, Progress};
pub use tune::Tuning;

/// File name of the [`Report`].
const REPORT: &str = "convert.json";

/// The stages that change the student, in order.
const STAGES: [&str; 3] = ["calibrate", "transfer", "tune"];

/// Key, in the metadata of the weights, of the last finished stage.
const STAGE: &str = "stage";

/// Name of the control: the fine-tuning of the teacher, for comparison.
const CONTROL: &str = "control";

/// Value of [`RunKey::run`] for a conversion.
const CONVERSION: &str = "conversion";

/// `Trained` is what a stage returns.
struct Trained {
    student: Decoder,
    tokens: u64,
    points: Vec<Point>,
}

/// What [`Cause::Stopped`] says of a conversion that was stopped before it wrote anything.
const NOTHING_SAVED: &str = "stopped; nothing was saved yet, so the same command begins again";

/// Converts the teacher stage by stage, as the plan says. Returns `None` if it was stopped after it
/// had saved something: run it again, without [`Plan::overwrite`], to go on after the last finished
/// stage.
///
/// # Errors
/// A teacher that is not all softmax, attention without feature maps that can be fitted where
/// stages need them, and what keeps files from being written. If it was stopped before anything was
/// saved ([`Cause::Stopped`]).
pub fn run(plan: &Plan, data: &Prepared) -> Result<Option<Report>> {
    check(plan)?;
    let teacher = plan.teacher.decoder(&plan.device).context("cannot build the teacher")?;
    let key = plan.key(data)?;
    let _lock = Lock::of(plan.out)?;
    let meter = Meter::new(plan, &teacher, &data.valid);
    let (mut report, mut interrupted) = match earlier(plan, &key)? {
        Some(Progress { report, stage, .. }) => (report, stage),
        None => {
            meter.check()?;
            // A text that is too short for the stages is refused before any of them.
            let stages = [("calibrate", calibrate::ROWS), ("transfer", plan.batch_size), ("tune", plan.batch_size)];
            for (_, rows) in stages.into_iter().filter(|(stage, _)| plan.wants(stage)) {
                Batches::new(data.train.clone(), plan.config.context, rows, plan.seed)?;
            }
            let report = Report {
                attention_spec: plan.config.attention_text(),
                corpus: data.corpus_name.clone(),
                measured_tokens: meter.held_out_tokens()?,
                second_corpus: plan.second.map(|second| second.name.to_string()),
                stages: Vec::new(),
                control: None,
                revision: git_revision().to_string(),
                key: Some(plan.key_after(&key, "")),
                earlier_legs: Vec::new(),
            };
            (report, None)
        }
    };
    if report.stages.is_empty() {
        let swapped = frozen_student(plan, plan.teacher.tensors.clone())?;
        for (name, title, student) in [
            ("teacher", "teacher", &teacher),
            ("swap", "swap: the teacher with another attention, untrained", &swapped),
        ] {
            plan.listener.note(title);
            let started = Instant::now();
            let measured = Measurements::of(student, &meter).with_context(|| about(name))?;
            let measurements = measured.ok_or_else(|| Cause::Stopped(NOTHING_SAVED.into()))?;
            report.stages.push(measurements.stage(name, 0, started.elapsed().as_secs_f64(), Vec::new()));
        }
        let mut clear = || if plan.overwrite { remove_reports(plan.out, |_| true) } else { Ok(()) };
        save(plan, &swapped, &report, &mut clear)?;
    }
    for name in STAGES {
        if !plan.wants(name) || report.stages.iter().any(|stage| stage.name == name) {
            continue;
        }
        if plan.is_stopped() {
            return Ok(None);
        }
        plan.listener.note(name);
        let started = Instant::now();
        let checkpoint = student_after(plan, &report)?;
        let tensors = checkpoint.tensors.clone();
        let bookmark = Bookmark::new(plan, plan.key_after(&key, name), name, checkpoint, &report, interrupted.take());
        let earlier_seconds = bookmark.seconds();
        let result = match (name, plan.tuning) {
            ("calibrate", _) => Some(calibrate::calibrate(plan, &teacher, frozen_student(plan, tensors)?, data)?),
            ("tune", Some(tuning)) => {
                tune::tune(plan, &bookmark, tuning, &teacher, trainable_student(plan, tensors)?, data, &meter)?
            }
            _ => transfer::transfer(plan, &bookmark, &teacher, trainable_student(plan, tensors)?, data, &meter)?,
        };
        let Some(Trained { student, tokens, points }) = result else { return Ok(None) };
        let before = report.stages.last().map_or(0, |stage| stage.tokens);
        let Some(measurements) = Measurements::of(&student, &meter).with_context(|| about(name))? else {
            return Ok(None);
        };
        let seconds = earlier_seconds + started.elapsed().as_secs_f64();
        report.stages.push(measurements.stage(name, before + tokens, seconds, points));
        report.key = Some(plan.key_after(&key, name));
        save(plan, &student, &report, &mut || Ok(()))?;
    }
    if let Some(tuning) = plan.tuning.filter(|_| plan.control && report.control.is_none()) {
        plan.listener.note("control: the teacher, fine-tuned in the same way");
        let started = Instant::now();
        let copy = Decoder::from_tensors(&plan.teacher.config, &plan.teacher.tensors, &plan.device)?;
        let checkpoint = student_after(plan, &report)?;
        let of_all = plan.key_after(&key, CONTROL);
        let bookmark = Bookmark::new(plan, of_all, CONTROL, checkpoint, &report, interrupted.take());
        let earlier_seconds = bookmark.seconds();
        let tuned = tune::tune(plan, &bookmark, tuning, &teacher, copy, data, &meter)?;
        let Some(Trained { student: tuned, tokens, points }) = tuned else { return Ok(None) };
        let checkpoint = bookmark.into_checkpoint();
        let Some(measured) = meter.measure(&tuned).with_context(|| about(CONTROL))? else { return Ok(None) };
        plan.listener.note(&format!("  measured: {:.4} nats/token", measured.held_out.val_loss));
        let seconds = earlier_seconds + started.elapsed().as_secs_f64();
        let alone = Measurements { measured, without_window: None, features_off: None };
        report.control = Some(alone.stage(CONTROL, tokens, seconds, points));
        save(plan, &frozen_student(plan, checkpoint.tensors)?, &report, &mut || Ok(()))?;
    }
    Ok(Some(report))
}

impl Plan<'_> {
    fn is_stopped(&self) -> bool {
        self.stop.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Returns the key of a conversion without the settings of its stages.
    fn key(&self, data: &Prepared) -> Result<RunKey> {
        // Every field is named, so that a new one must be put in its place: here, among the
        // settings of a stage, or among the settings that change no result.
        let Self {
            teacher,
            config,
            device,
            measure_tokens,
            second,
            recall,
            seed,
            // The fields from here to `points` are in `stage_settings`.
            calibrate_tokens: _,
            balance: _,
            transfer_steps: _,
            transfer_rate: _,
            drop_window: _,
            batch_size: _,
            tuning: _,
            points: _,
            // The control is an additional stage, which depends on the settings of tuning.
            control: _,
            out: _,
            overwrite: _,
            data: _,
            threads: _,
            stop: _,
            listener: _,
        } = self;
        let mut settings = json!({ "measured_tokens": measure_tokens });
        // What is not measured is not named, so that earlier conversions without it go on.
        if let Some(second) = second {
            settings["second_text"] = second.tokens.digest().to_hex().as_str().into();
        }
        if !recall.is_empty() {
            settings["recall"] = json!(recall);
        }
        let teacher = model_digest(&teacher.config, &teacher.tensors)?;
        let key = RunKey::new(CONVERSION, config, &settings, digests(data), *seed, device)?;
        Ok(RunKey { teacher: Some(teacher), ..key })
    }

    /// Returns the key of the student after a stage: the settings of that stage and of those before
    /// it. The names of the two measurements before all stages mean no stage, the name of the
    /// control means all stages.
    fn key_after(&self, key: &RunKey, stage: &str) -> RunKey {
        let count = match stage {
            CONTROL => STAGES.len(),
            _ => STAGES.iter().position(|name| *name == stage).map_or(0, |i| i + 1),
        };
        let mut key = key.clone();
        for name in &STAGES[..count] {
            key.settings[*name] = self.stage_settings(name);
        }
        key
    }

    /// Returns the settings on which a stage depends; null for a stage that is left out.
    fn stage_settings(&self, stage: &str) -> Value {
        let (batch_size, points) = (self.batch_size, self.points);
        let mut settings = match stage {
            "calibrate" => {
                return (self.calibrate_tokens > 0)
                    .then(|| json!({ "tokens": self.calibrate_tokens, "balance": self.balance }))
                    .into();
            }
            "transfer" => (self.transfer_steps > 0).then(|| {
                let (steps, rate) = (self.transfer_steps, self.transfer_rate);
                json!({ "steps": steps, "rate": rate, "batch_size": batch_size, "points": points })
            }),
            _ => self.tuning.map(|Tuning { steps, rate, distillation, adapters }| {
                json!({
                    "steps": steps, "rate": rate, "distillation": distillation, "adapters": adapters,
                    "batch_size": batch_size, "points": points,
                })
            }),
        };
        // What is not switched off is not named, so that earlier conversions go on.
        if let Some(settings) = settings.as_mut().filter(|_| self.drop_window > 0.0) {
            settings["drop_window"] = self.drop_window.into();
        }
        settings.into()
    }

    fn wants(&self, stage: &str) -> bool {
        !self.stage_settings(stage).is_null()
    }

    /// Whether a report has all stages that are asked for.
    fn is_done(&self, report: &Report) -> bool {
        let has = |name: &&str| report.stages.iter().any(|stage| stage.name == **name);
        STAGES.iter().filter(|name| self.wants(name)).all(has)
            && (report.control.is_some() || !self.control || self.tuning.is_none())
    }
}

/// Returns how far this conversion has got in its folder, if it was begun there.
///
/// # Errors
/// If the folder holds another conversion, one without a key, or a model that is no conversion and
/// would be lost.
fn earlier(plan: &Plan, key: &RunKey) -> Result<Option<Progress>> {
    let (out, file) = (plan.out, plan.out.join(REPORT));
    require_no_file(out)?;
    if plan.overwrite {
        return Ok(None);
    }
    let mut progress = if TrainingState::is_in(out)? {
        Progress::load(out, &plan.device)?
    } else if file.exists() {
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let report =
            serde_json::from_str(&text).with_context(|| unread(&file, &text, "stages", "convert from the start"))?;
        Progress::new(None, &report, plan.data, out, None)
    } else {
        ensure!(
            !out.join("model.safetensors").exists(),
            Cause::WouldReplace(format!(
                "{} holds a model that is no conversion, and would be lost: choose another folder",
                out.display()
            ))
        );
        require_free(out, &REPORTS)?;
        return Ok(None);
    };
    let report = &mut progress.report;
    let last = report.stages.last().map_or("", |stage| &stage.name).to_string();
    let now = plan.key_after(key, &last);
    let found = Earlier { key: report.key.as_ref(), file: &file, remove: Some(out) };
    if plan.is_done(report) {
        now.check(found)?;
        // The model beside the report must be the one it tells of.
        student_after(plan, report)?;
    } else if let Some(text) = now.check_interrupted(found)? {
        plan.listener.note(&text);
        let old = report.key.take();
        report.earlier_legs.extend(old.map(|key| key.leg(last)));
        report.revision = git_revision().to_string();
        report.key = Some(now);
    }
    if let Some(stage) = &progress.stage {
        let file = out.join("train_state.json");
        let found = Earlier { key: progress.key.as_ref(), file: &file, remove: Some(&file) };
        if let Some(text) = plan.key_after(key, &stage.name).check_interrupted(found)? {
            plan.listener.note(&text);
            let leg = progress.key.as_ref().map(|key| key.leg(format!("step {} of {}", stage.steps, stage.name)));
            progress.report.earlier_legs.extend(leg);
        }
    }
    // The process may have been killed between the checkpoint and the report.
    files::write_json(&file, &progress.report)?;
    Ok(Some(progress))
}

/// Loads the checkpoint of the student after the last stage of a report.
///
/// # Errors
/// If the folder holds the student after another stage: the next stage would be trained twice, or
/// on the wrong weights.
fn student_after(plan: &Plan, report: &Report) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::load(plan.out, &plan.device)?;
    let last = report.stages.last().map_or("", |stage| &stage.name);
    let found = checkpoint.metadata.get(STAGE).map_or("", String::as_str);
    ensure!(
        found == last,
        Cause::AnotherFolder(format!(
            "{} holds weights after the stage '{found}', but a report that ends with '{last}': choose another folder, or remove it to \
             convert from the start",
            plan.out.display()
        ))
    );
    Ok(checkpoint)
}

/// Makes the student of these tensors, to be used.
fn frozen_student(plan: &Plan, tensors: HashMap<String, Tensor>) -> Result<Decoder> {
    Decoder::frozen(&plan.config, &with_fresh(&plan.config, plan, tensors)?, &plan.device)
}

/// Makes the student of these tensors, to be trained.
fn trainable_student(plan: &Plan, tensors: HashMap<String, Tensor>) -> Result<Decoder> {
    Decoder::from_tensors(&plan.config, &with_fresh(&plan.config, plan, tensors)?, &plan.device)
}

/// Adds what a model of this configuration has and what is not among the tensors: feature maps are
/// drawn at random, convolutions and output gates begin without effect, and forget gates with
/// hardly any.
fn with_fresh(
    config: &ModelConfig,
    plan: &Plan,
    mut tensors: HashMap<String, Tensor>,
) -> Result<HashMap<String, Tensor>> {
    let drawn = Decoder::buffers(config, plan.seed, &plan.device)?;
    let parts = [Decoder::neutral_parts(config, &plan.device)?, gates::lasting(config, &plan.device)?].concat();
    for (name, tensor) in drawn.into_iter().chain(parts) {
        tensors.entry(name).or_insert(tensor);
    }
    Ok(tensors)
}

/// Saves the student and the report as one checkpoint, so that neither is ever without the other;
/// then saves the report as a file of its own. `clear` removes what belongs to a model that is
/// replaced ([`Checkpoint::save_over`]).
fn save(plan: &Plan, student: &Decoder, report: &Report, clear: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let stage = report.stages.last().map_or("", |stage| &stage.name);
    let metadata = [("converted_to", report.attention_spec.as_str()), ("corpus", &report.corpus), (STAGE, stage)];
    let metadata = metadata.into_iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    let checkpoint = Checkpoint {
        config: serde_json::to_value(student.config())?,
        tokenizer: plan.teacher.tokenizer.as_bytes().to_vec(),
        tensors: student.tensors(),
        metadata,
    };
    let progress = Progress::new(report.key.clone(), report, plan.data, plan.out, None);
    progress.save_over(&checkpoint, plan.out, Default::default(), clear)?;
    files::write_json(&plan.out.join(REPORT), report)
}
