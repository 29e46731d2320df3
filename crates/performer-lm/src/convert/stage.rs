//! This module keeps a conversion on disk as one checkpoint, which holds the student after the last
//! finished stage, the report so far and, where a stage of training was interrupted, what that
//! stage needs to resume.
//!
//! The student of an unfinished stage is no model yet: its adapters are not merged, and its feature
//! maps are parameters. So the weights of the checkpoint stay those before the stage, and the
//! parameters in training are stored with the moments of the optimiser.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{CONTROL, CONVERSION, Plan, Point, Report};
use crate::checkpoint::TRAIN_STATE;
use crate::data::DataSpec;
use crate::errors::Cause;
use crate::train::{AdamW, Checkpoint, RunKey, TrainingState};

/// Prefix of the names of parameters among the tensors of the optimiser.
const PARAMETER: &str = "p.";

/// `Progress` is the content of `train_state.json`.
#[derive(Serialize, Deserialize)]
pub(super) struct Progress {
    /// Key of the stage in progress, or of the student if there is none.
    pub(super) key: Option<RunKey>,
    /// The report of the finished stages.
    pub(super) report: Report,
    /// [`Plan::data`] as the command line spelt it; `None` in states of versions that did not
    /// record it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_spec: Option<String>,
    /// The path from the folder to the data, where they were named by a relative one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    data_from_here: Option<PathBuf>,
    /// The stage in progress, if any.
    pub(super) stage: Option<InProgress>,
}

/// `InProgress` describes a stage that was interrupted.
#[derive(Serialize, Deserialize)]
pub(super) struct InProgress {
    pub(super) name: String,
    /// Number of steps taken.
    pub(super) steps: usize,
    /// The points measured so far.
    points: Vec<Point>,
    /// Seconds spent so far.
    seconds: f64,
    /// The parameters, and the moments of the optimiser.
    #[serde(skip)]
    tensors: HashMap<String, Tensor>,
}

impl Progress {
    /// Makes the progress of a conversion on `data` whose folder is `dir`.
    pub(super) fn new(
        key: Option<RunKey>,
        report: &Report,
        data: Option<&DataSpec>,
        dir: &Path,
        stage: Option<InProgress>,
    ) -> Self {
        let data_spec = data.map(DataSpec::to_string);
        let data_from_here = data.and_then(|data| data.path_from(dir));
        Self { key, report: report.clone(), data_spec, data_from_here, stage }
    }

    /// Reads the progress of the conversion in `dir`.
    pub(super) fn load(dir: &Path, device: &Device) -> Result<Self> {
        let state = TrainingState::load(dir, device)?;
        ensure!(
            state.progress["key"]["run"] == CONVERSION,
            Cause::WouldReplace(format!(
                "{} holds a model in training that is no conversion, and would be lost: choose another folder",
                dir.display()
            ))
        );
        let mut progress: Self = state.progress_as()?;
        if let Some(stage) = &mut progress.stage {
            stage.tensors = state.optimizer;
        }
        Ok(progress)
    }

    /// Saves the progress with the student and the optimiser's tensors.
    pub(super) fn save(&self, student: &Checkpoint, dir: &Path, optimizer: HashMap<String, Tensor>) -> Result<()> {
        self.save_over(student, dir, optimizer, &mut || Ok(()))
    }

    /// Saves as [`Self::save`] does, in place of another model; `clear` removes the files beside it
    /// that tell of that one ([`Checkpoint::save_over`]).
    pub(super) fn save_over(
        &self,
        student: &Checkpoint,
        dir: &Path,
        optimizer: HashMap<String, Tensor>,
        clear: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        student.save_over(dir, Some(&TrainingState { optimizer, progress: serde_json::to_value(self)? }), clear)
    }
}

/// Returns the stage of the conversion in `dir` that is not finished yet, before which the weights
/// there were saved. The control is no such stage, for it changes other weights.
pub fn unfinished_stage(dir: &Path) -> Option<String> {
    let state: Value = serde_json::from_slice(&std::fs::read(dir.join(TRAIN_STATE)).ok()?).ok()?;
    let name = state["stage"]["name"].as_str()?;
    (name != CONTROL).then(|| name.into())
}

/// A `Bookmark` knows where a stage of training stands, and saves it.
pub(super) struct Bookmark<'a> {
    pub(super) name: &'static str,
    dir: &'a Path,
    data: Option<&'a DataSpec>,
    key: RunKey,
    /// The student before the stage.
    checkpoint: Checkpoint,
    /// The report before the stage.
    report: &'a Report,
    interrupted: Option<InProgress>,
    begun: Instant,
}

impl<'a> Bookmark<'a> {
    /// Makes the bookmark of a stage that begins, or resumes where it was interrupted.
    pub(super) fn new(
        plan: &'a Plan,
        key: RunKey,
        name: &'static str,
        checkpoint: Checkpoint,
        report: &'a Report,
        interrupted: Option<InProgress>,
    ) -> Self {
        let interrupted = interrupted.filter(|stage| stage.name == name);
        Self { name, dir: plan.out, data: plan.data, key, checkpoint, report, interrupted, begun: Instant::now() }
    }

    /// Returns the seconds that the stage took before it was interrupted.
    pub(super) fn seconds(&self) -> f64 {
        self.interrupted.as_ref().map_or(0.0, |stage| stage.seconds)
    }

    /// Returns the student before the stage.
    pub(super) fn into_checkpoint(self) -> Checkpoint {
        self.checkpoint
    }

    /// Restores parameters and optimiser if the stage was interrupted, and returns the points
    /// measured so far.
    pub(super) fn restore(&self, optimizer: &mut AdamW) -> Result<Vec<Point>> {
        let Some(stage) = &self.interrupted else { return Ok(Vec::new()) };
        let damaged = || {
            format!(
                "{} has no whole state of {}: remove that file to begin the stage again",
                self.dir.join("train_state.json").display(),
                self.name
            )
        };
        let (parameters, moments): (HashMap<_, _>, HashMap<_, _>) =
            stage.tensors.clone().into_iter().partition(|(name, _)| name.starts_with(PARAMETER));
        optimizer.load_state(&moments).with_context(damaged)?;
        for (name, var) in optimizer.parameters() {
            let value = parameters.get(&format!("{PARAMETER}{name}"));
            let value = value.with_context(|| format!("{name} is missing")).with_context(damaged)?;
            var.set(&value.to_device(var.device())?.to_dtype(var.dtype())?).with_context(damaged)?;
        }
        Ok(stage.points.clone())
    }

    /// Saves what the stage needs to resume.
    pub(super) fn save(&self, optimizer: &AdamW, points: &[Point]) -> Result<()> {
        let mut tensors = optimizer.state()?;
        let parameters = optimizer.parameters().iter();
        tensors.extend(parameters.map(|(name, var)| (format!("{PARAMETER}{name}"), var.as_detached_tensor())));
        let stage = InProgress {
            name: self.name.to_string(),
            steps: optimizer.steps(),
            points: points.to_vec(),
            seconds: self.seconds() + self.begun.elapsed().as_secs_f64(),
            tensors: HashMap::new(),
        };
        let progress = Progress::new(Some(self.key.clone()), self.report, self.data, self.dir, Some(stage));
        progress.save(&self.checkpoint, self.dir, tensors)
    }
}
