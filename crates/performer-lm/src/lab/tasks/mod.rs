//! This experiment measures what an attention costs in quality: small tasks, each learned with
//! every attention from equal weights, on equal examples, for equally many steps.

mod copying;
mod example;
mod learn;
mod listops;
mod mqar;
mod protein;
mod recall;
mod recipe;
mod report;
mod text;

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use performer_dist::{agree_on, gather};
use serde::{Deserialize, Serialize};

use super::Findings;
use crate::{
    config::{AttentionConfig, AttentionPattern},
    errors::{Cause, STOPPED_FOR_GOOD, require_once},
    files::{self, Lock},
    listener::Listener,
    train::{Earlier, Grid, agreed, any_asked, led, run_name},
};
use example::Source;
use learn::Setting;
pub use learn::{Point, Run, Score};
pub use recipe::Recipe;
use report::Metric;

/// File name of the finished runs.
const RUNS: &str = "tasks-runs.json";

/// Name of the folder that holds the checkpoints of stopped runs, each in a folder of its own.
const INTERRUPTED: &str = "tasks-interrupted";

/// The largest size of an example: a bound that mistakes exceed and no task does.
const MAX_LENGTH: usize = 1 << 20;

/// The attentions that are compared by default. The window alone is the control of the window with
/// features, and the fading averages (`uniform:gate`) are that of the features with a gate.
pub const ATTENTIONS: [&str; 10] = [
    "softmax",
    "softmax:window=32",
    "uniform:gate",
    "favor:m=64",
    "favor:m=64,gate",
    "favor:m=64,map=learned",
    "favor:m=64,map=relu",
    "favor:map=elu",
    "favor:map=taylor2",
    "favor:m=64,window=32",
];

/// What is learned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "cli", derive(clap::ValueEnum))]
#[serde(rename_all = "kebab-case")]
pub enum Task {
    /// Write a random string from memory.
    Copying,
    /// Answer keys with the values they stood with.
    Recall,
    /// Answer keys with the values that followed them, two tokens a pair, among random tokens.
    Mqar,
    /// The value of a nested expression (Long Range Arena).
    Listops,
    /// The next byte of a long text.
    Text,
    /// Masked residues of proteins.
    Protein,
}

impl Task {
    /// Every task.
    pub const ALL: [Self; 6] = [Self::Copying, Self::Recall, Self::Mqar, Self::Listops, Self::Text, Self::Protein];

    fn title(self) -> &'static str {
        match self {
            Self::Copying => "Long-range copying",
            Self::Recall => "Associative recall",
            Self::Mqar => "Multi-query associative recall",
            Self::Listops => "ListOps",
            Self::Text => "Long text, byte by byte",
            Self::Protein => "Proteins, masked residues",
        }
    }

    /// Whether attention is causal in this task.
    fn is_causal(self) -> bool {
        match self {
            Self::Copying | Self::Recall | Self::Mqar | Self::Text => true,
            Self::Listops | Self::Protein => false,
        }
    }

    fn metric(self) -> Metric {
        match self {
            Self::Copying | Self::Recall | Self::Mqar | Self::Listops => Metric::Accuracy,
            Self::Text => Metric::BitsPerByte,
            Self::Protein => Metric::Perplexity,
        }
    }
}

/// Writes the task as the command line takes it.
impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Copying => "copying",
            Self::Recall => "recall",
            Self::Mqar => "mqar",
            Self::Listops => "listops",
            Self::Text => "text",
            Self::Protein => "protein",
        })
    }
}

/// A `Plan` says what is compared, and on what.
pub struct Plan<'a> {
    /// The tasks.
    pub tasks: Vec<Task>,
    /// The attentions; the others are compared with the first.
    pub attentions: Vec<AttentionPattern>,
    /// The seeds with which each run is repeated.
    pub seeds: Vec<u64>,
    /// Texts for [`Task::Text`].
    pub texts: Vec<PathBuf>,
    /// A FASTA file for [`Task::Protein`].
    pub proteins: Option<PathBuf>,
    /// Size of an example, if it is not the task's own.
    pub length: Option<usize>,
    /// Pairs of a sequence of [`Task::Mqar`], if it is not the task's own number.
    pub pairs: Option<usize>,
    /// Number of optimiser steps, if it is not the task's own.
    pub steps: Option<usize>,
    /// Peak learning rate, if it is not the task's own.
    pub learning_rate: Option<f64>,
    /// Device on which the models are trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop.
    pub stop: &'a AtomicBool,
    /// Receiver of steps, finished runs and notices to the user.
    pub listener: &'a dyn Listener,
    /// Folder that keeps finished runs, which are not made again.
    pub out: Option<&'a Path>,
    /// The processes that share the experiment: each makes whole runs. All of them see the folder.
    pub ranks: Grid,
}

/// Learns every task with every attention and seed, except for runs that are in the folder already.
///
/// # Errors
/// If settings make no sense, a file that a task needs is missing, a run diverges, or the
/// experiment is stopped, or ranks do not share the folder.
pub fn run(plan: &Plan) -> Result<Findings> {
    ensure!(
        !plan.tasks.is_empty() && !plan.attentions.is_empty() && !plan.seeds.is_empty(),
        "nothing to compare: give at least one task, one attention and one seed"
    );
    require_once("seed", &plan.seeds)?;
    require_once("attention", &plan.attentions)?;
    require_once("task", &plan.tasks)?;
    for &task in &plan.tasks {
        ensure!(
            plan.attentions.iter().any(|attention| can_learn(attention, task)),
            "the task {task} is read from both sides, and every attention that is given needs a causal mask for its gate or its \
             window; give one without, such as favor"
        );
    }
    ensure!(
        plan.length.is_none() || plan.tasks.len() == 1,
        "length means something else in every task: give it with one task"
    );
    ensure!(
        plan.pairs.is_none() || plan.tasks.contains(&Task::Mqar),
        "pairs is a setting of the task mqar, which is not among those to learn"
    );
    if let Some(rate) = plan.learning_rate {
        ensure!(rate > 0.0 && rate.is_finite(), Cause::setting("", "learning_rate", rate, "a number above 0"));
    }
    for (name, size) in [("steps", plan.steps), ("length", plan.length)] {
        ensure!(size != Some(0), Cause::setting("", name, 0, "at least 1"));
    }
    for (name, size) in [("length", plan.length), ("pairs", plan.pairs)] {
        if let Some(size) = size.filter(|&size| size > MAX_LENGTH) {
            bail!(Cause::setting("", name, size, format_args!("at most {MAX_LENGTH}")));
        }
    }
    let settings: Vec<Setting> = plan.tasks.iter().map(|&task| plan.setting(task)).collect::<Result<_>>()?;
    // This fails now where a run would fail minutes later.
    for setting in &settings {
        for attention in plan.attentions.iter().filter(|attention| can_learn(attention, setting.task)) {
            setting.model(attention, 0)?;
        }
    }
    // Another process would write the finished runs of its own over those of this one.
    let _lock = led(&plan.ranks, || plan.out.map(Lock::of).transpose())?;
    let mut kept = agreed(&plan.ranks, Kept::open(plan.out))?;
    let mut all = Vec::new();
    for setting in &settings {
        for &seed in &plan.seeds {
            let able = plan.attentions.iter().filter(|attention| can_learn(attention, setting.task));
            all.extend(able.map(|attention| (setting, attention, seed)));
        }
    }
    let mut missing = Vec::new();
    for &(setting, attention, seed) in &all {
        let run = (setting, attention, seed);
        let is_same = |other: &(&Setting, &AttentionPattern, u64)| {
            (other.0.task, other.1, other.2) == (setting.task, attention, seed)
        };
        if kept.find(setting, attention, seed)?.is_some() || missing.iter().any(is_same) {
            continue;
        }
        missing.push(run);
        if let Some(folder) = plan.interrupted(setting.task, attention, seed) {
            setting.interrupted(attention, seed, &folder)?;
        }
    }
    plan.make(&missing, &mut kept)?;
    let mut found = Vec::new();
    for setting in &settings {
        let mut runs = Vec::new();
        for (_, attention, seed) in all.iter().filter(|(of, ..)| of.task == setting.task) {
            runs.push(kept.find(setting, attention, *seed)?.context("a run is missing that was made")?.clone());
        }
        found.push((setting, runs));
    }
    Ok(report::findings(plan, &found))
}

/// Whether an attention can learn a task: one that needs a causal mask cannot learn a bidirectional
/// task.
fn can_learn(attention: &AttentionPattern, task: Task) -> bool {
    task.is_causal() || !attention.attentions().any(AttentionConfig::needs_causal_mask)
}

impl Plan<'_> {
    /// Makes runs, as many at a time as there are ranks, and keeps them.
    fn make(&self, missing: &[(&Setting, &AttentionPattern, u64)], kept: &mut Kept) -> Result<()> {
        let world = self.ranks.world();
        let key = |(setting, attention, seed): &(&Setting, &AttentionPattern, u64)| setting.key(attention, *seed);
        let keys = missing.iter().map(key).collect::<Result<Vec<_>>>()?;
        let differs = |_: &str, _: &str| {
            "it would make other runs than rank 0: it has other settings, finds other finished runs (all \
             processes need one folder for results, on a file system that all of them see), reads another \
             text, computes on another kind of device, or is another build"
                .into()
        };
        if let Some(other) = agree_on(world, &serde_json::to_string(&keys)?, differs)? {
            return Err(other.into());
        }
        for round in missing.chunks(world.size()) {
            let own = round.get(world.rank()).map(|(setting, attention, seed)| {
                setting.run(attention, *seed, self.interrupted(setting.task, attention, *seed).as_deref())
            });
            let stopped = any_asked(&self.ranks, matches!(own, Some(Ok(None))))?;
            // What other ranks have finished is kept before all fail with the first that failed.
            let (own, outcome) = match own.transpose() {
                Ok(own) => (own.flatten(), Ok(())),
                Err(error) => (None, Err(error)),
            };
            let made = serde_json::to_vec(&own)?;
            for (made, (setting, attention, seed)) in gather(world, &made)?.iter().zip(round) {
                let Some(run) = serde_json::from_slice::<Option<Run>>(made)? else { continue };
                kept.runs.push(run);
                led(&self.ranks, || {
                    kept.save()?;
                    match self.interrupted(setting.task, attention, *seed).filter(|folder| folder.exists()) {
                        Some(folder) => std::fs::remove_dir_all(&folder)
                            .with_context(|| format!("cannot remove {}", folder.display())),
                        None => Ok(()),
                    }
                })?;
            }
            agreed(&self.ranks, outcome)?;
            let text = match self.out {
                Some(_) => "stopped; the same experiment in the same folder goes on from here",
                None => STOPPED_FOR_GOOD,
            };
            ensure!(!stopped, Cause::Stopped(text.into()));
        }
        Ok(())
    }

    /// Returns the folder in which a run is saved if it is stopped.
    fn interrupted(&self, task: Task, attention: &AttentionPattern, seed: u64) -> Option<PathBuf> {
        Some(self.out?.join(INTERRUPTED).join(format!("{task}-{}", run_name(attention, seed))))
    }

    fn setting(&self, task: Task) -> Result<Setting<'_>> {
        let mut recipe = Recipe::of(task);
        recipe.length = self.length.unwrap_or(recipe.length);
        recipe.steps = self.steps.unwrap_or(recipe.steps);
        recipe.learning_rate = self.learning_rate.unwrap_or(recipe.learning_rate);
        let length = recipe.length;
        recipe.pairs = recipe.pairs.map(|own| self.pairs.unwrap_or(own));
        let source: Box<dyn Source> = match task {
            Task::Copying => Box::new(copying::Copying { length }),
            Task::Recall => Box::new(recall::Recall { pairs: length }),
            Task::Mqar => Box::new(mqar::Mqar::new(recipe.pairs.unwrap_or_default(), length)?),
            Task::Listops => Box::new(listops::Listops::new(length)?),
            Task::Text => Box::new(text::Text::new(&self.texts, length)?),
            Task::Protein => Box::new(protein::Protein::new(self.proteins.as_deref(), length)?),
        };
        Ok(Setting::new(task, recipe, source, &self.device, self.threads, self.stop, self.listener))
    }
}

/// `Kept` holds the finished runs, and keeps them in a file if there is a folder.
struct Kept {
    path: Option<PathBuf>,
    runs: Vec<Run>,
}

impl Kept {
    fn open(folder: Option<&Path>) -> Result<Self> {
        let Some(folder) = folder else { return Ok(Self { path: None, runs: Vec::new() }) };
        let path = folder.join(RUNS);
        if !path.exists() {
            return Ok(Self { path: Some(path), runs: Vec::new() });
        }
        let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let runs = serde_json::from_slice(&text)
            .with_context(|| format!("{} is damaged: remove it to make all runs again", path.display()))?;
        Ok(Self { path: Some(path), runs })
    }

    /// Returns the run of a task with an attention and a seed, if it is there.
    ///
    /// # Errors
    /// If the run has other settings, other data, or another revision of this program.
    fn find(&self, setting: &Setting, attention: &AttentionPattern, seed: u64) -> Result<Option<&Run>> {
        let name = attention.to_string();
        let is_wanted = |run: &&Run| (run.task, run.seed) == (setting.task, seed) && run.attention == name;
        let Some(run) = self.runs.iter().find(is_wanted) else { return Ok(None) };
        // Without a file, all runs are of this call.
        let Some(path) = &self.path else { return Ok(Some(run)) };
        let earlier = Earlier { key: run.key.as_ref(), file: path, remove: None };
        setting.key(attention, seed)?.check(earlier).with_context(|| {
            format!("the task {} with {name}, seed {seed}, cannot be taken from an earlier run", setting.task)
        })?;
        Ok(Some(run))
    }

    fn save(&self) -> Result<()> {
        match &self.path {
            Some(path) => files::write_json(path, &self.runs),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
