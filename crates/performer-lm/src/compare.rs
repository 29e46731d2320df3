//! This module trains one model with several attentions and seeds, and compares the results. Runs
//! of one seed have equal initial weights where shapes agree, equal data in equal order, and equal
//! schedules; only the attention differs, and its learning rate where one is chosen for each.

mod charts;
mod names;
mod summary;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::{
    config::{AttentionPattern, ModelConfig, TrainingConfig},
    data::{DataSpec, Prepared},
    errors::{Cause, STOPPED, require_once},
    files,
    listener::Listener,
    machine::Machine,
    model::Decoder,
    train::{
        Found, Grid, Report, RunOptions, as_trained, digests, divided, find, find_or_run, is_divergence, led, made,
        require_one_plan, run_name, training_batches,
    },
};
#[cfg(feature = "cli")]
pub(crate) use charts::{loss_of_run, loss_of_runs};
use summary::summarise;
pub use summary::{Summary, TestSummary};

/// A `Comparison` says what is compared, and where the results go.
pub struct Comparison<'a> {
    /// Configuration of the model; its attention is replaced by each of `attentions`.
    pub config: ModelConfig,
    /// Training settings; the seed is replaced by each of `seeds`.
    pub training: TrainingConfig,
    /// The attentions to compare.
    pub attentions: Vec<AttentionPattern>,
    /// The seeds with which each attention is trained.
    pub seeds: Vec<u64>,
    /// Peak learning rates to choose from, if there are several: each attention is trained with
    /// each of them at the first seed, and the rate of the lowest validation loss is used for all
    /// seeds. Results are then of the test split, which the data must have. With none or one, every
    /// run has the rate of `training`, or that one.
    pub learning_rates: Vec<f64>,
    /// Folder for the results and for one checkpoint folder per run.
    pub out: &'a Path,
    /// Where the data come from, for [`RunOptions::data`].
    pub data: Option<DataSpec>,
    /// Device on which the models are trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop.
    pub stop: &'a std::sync::atomic::AtomicBool,
    /// Is told of steps, validations, and what a person should know.
    pub listener: &'a dyn Listener,
    /// The processes over which runs are spread, each run on one of them. All must see the folder
    /// `out`.
    pub ranks: Grid,
    /// The command that runs this, for the record.
    pub command: String,
}

/// An `Outcome` is the content of `compare.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The command that ran the comparison.
    pub command: String,
    /// The machine on which this was put together; runs that were found finished may be of another.
    pub machine: Machine,
    /// Name of the corpus.
    pub corpus: String,
    /// Configuration of the model; every run replaces its attention.
    pub config: ModelConfig,
    /// Training settings; every run replaces the seed, and the learning rate where several are
    /// tried.
    pub training: TrainingConfig,
    /// One report for each run of the chosen learning rate.
    pub runs: Vec<Report>,
    /// What each learning rate gave at the first seed, where one was chosen.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub learning_rates: Vec<RateTried>,
    /// One summary for each attention.
    pub summary: Vec<Summary>,
}

/// A `RateTried` is a run by which a learning rate was chosen or not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RateTried {
    /// The attention, as the command line takes it.
    pub attention_spec: String,
    /// Peak learning rate of the run.
    pub learning_rate: f64,
    /// Loss over the validation split at its end, in nats per token; `None` if the training
    /// diverged.
    pub val_loss: Option<f64>,
    /// Whether this rate was chosen.
    pub chosen: bool,
}

impl Outcome {
    /// Returns the attentions whose chosen learning rate is the lowest or the highest that was
    /// tried: a better one may lie beyond it.
    pub fn rates_at_the_edge(&self) -> Vec<&RateTried> {
        let all = || self.learning_rates.iter().map(|tried| tried.learning_rate);
        let (low, high) = (all().fold(f64::INFINITY, f64::min), all().fold(0.0, f64::max));
        let at_edge = |rate: f64| rate == low || rate == high;
        self.learning_rates.iter().filter(|tried| tried.chosen && at_edge(tried.learning_rate)).collect()
    }
}

/// A `Chosen` run is one whose results are reported.
struct Chosen {
    report: Report,
    learning_rate: f64,
    folder: PathBuf,
}

/// `FoundSoFar` is what a comparison knows while it trains.
#[derive(Default)]
struct FoundSoFar {
    /// The runs to report, in the order of the table: by seed, then by attention.
    chosen: Vec<Chosen>,
    tried: Vec<RateTried>,
    /// Folders of runs that diverged on another rank, or on this one.
    lost: Vec<PathBuf>,
}

impl Comparison<'_> {
    /// Trains every run that has not been trained yet. `compare.json` and the charts are written
    /// after every run, so that a comparison that is stopped keeps its results so far, and
    /// continues there when started again. Several ranks first train what can be trained side by
    /// side; results do not depend on their number.
    ///
    /// # Errors
    /// If a run fails or is stopped, a run of other settings is in the folder, a learning rate is
    /// to be chosen and the data has no test split, or ranks do not share the folder.
    pub fn run(&self, data: &Prepared) -> Result<Outcome> {
        ensure!(!self.attentions.is_empty() && !self.seeds.is_empty(), "nothing to compare: give attentions and seeds");
        ensure!(
            self.learning_rates.len() < 2 || data.test.is_some(),
            "learning rates are chosen by the validation split, so results need a test split, and the data has none"
        );
        led(&self.ranks, || self.check(data))?;
        let attentions: Vec<String> = self.attentions.iter().map(ToString::to_string).collect();
        let plan = serde_json::json!({
            "training": self.training, "attentions": attentions, "seeds": self.seeds, "learning_rates": self.rates(),
        });
        require_one_plan(&self.ranks, &as_trained(&self.config, data), &plan, data, &self.device)?;
        // Two comparisons in one folder would replace each other's outcome.
        let _lock = led(&self.ranks, || files::Lock::of(self.out))?;
        let mut found = FoundSoFar::default();
        let mut missing = Vec::new();
        for (i, &seed) in self.seeds.iter().enumerate() {
            // All seeds can be trained at once where no rate has to be chosen by the first.
            match i {
                0 if self.rates().len() > 1 => found.lost = self.divide(&self.seeds[..1], &found.tried, data)?,
                0 => drop(self.divide(&self.seeds, &found.tried, data)?),
                1 if self.rates().len() > 1 => drop(self.divide(&self.seeds[1..], &found.tried, data)?),
                _ => {}
            }
            // Finished runs come first, so that they are saved before further ones are trained.
            // Several ranks have made all runs by now, or fail here.
            for attention in &self.attentions {
                if self.ranks.world().size() > 1 || self.is_finished(attention, seed, &found, data)? {
                    self.choose(attention, seed, &mut found, data)?;
                } else {
                    missing.push((attention, seed));
                }
            }
            if !found.chosen.is_empty() && !self.would_lose_runs(&found)? {
                self.save(data, &found)?;
            }
        }
        for (attention, seed) in missing {
            self.choose(attention, seed, &mut found, data)?;
            if !self.would_lose_runs(&found)? {
                self.save(data, &found)?;
            }
        }
        self.save(data, &found)
    }

    /// Whether the outcome in the folder has runs of this comparison that are not found yet. That
    /// is so where a rate of theirs diverged, and is tried once more before they are found.
    fn would_lose_runs(&self, so_far: &FoundSoFar) -> Result<bool> {
        if !self.ranks.leads() {
            return Ok(false);
        }
        let path = self.out.join("compare.json");
        let earlier = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
        };
        // `check` has found that it is a comparison; one of an older version counts for nothing.
        let Ok(earlier) = serde_json::from_slice::<Outcome>(&earlier) else { return Ok(false) };
        let found: Vec<_> =
            so_far.chosen.iter().map(|run| self.place(run.report.seed, &run.report.attention_spec)).collect();
        let is_asked = |place: &(Option<usize>, Option<usize>)| place.0.is_some() && place.1.is_some();
        let places = earlier.runs.iter().map(|run| self.place(run.seed, &run.attention_spec));
        Ok(places.filter(is_asked).any(|place| !found.contains(&place)))
    }

    /// Returns where a run stands in the table: the number of its seed, and of its attention.
    fn place(&self, seed: u64, spec: &str) -> (Option<usize>, Option<usize>) {
        let attention = self.attentions.iter().position(|attention| attention.to_string() == spec);
        (self.seeds.iter().position(|&own| own == seed), attention)
    }

    /// Whether all runs of an attention with a seed are there, one for each learning rate. While
    /// the first seed has not chosen a rate, runs of other seeds do not count as finished.
    fn is_finished(
        &self,
        attention: &AttentionPattern,
        seed: u64,
        so_far: &FoundSoFar,
        data: &Prepared,
    ) -> Result<bool> {
        let rates = self.rates_of(attention, &so_far.tried);
        if rates.len() > 1 && self.seeds.first() != Some(&seed) {
            return Ok(false);
        }
        for rate in rates {
            let (config, training) = self.recipe(attention, seed, rate)?;
            let folder = self.folder(attention, seed, rate);
            let is_lost = so_far.lost.contains(&folder);
            if !is_lost && !matches!(find(&config, &training, data, &self.options(&folder))?, Found::Finished(_)) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Finds the runs of an attention with a seed, or makes them, and chooses the learning rate if
    /// there are several.
    fn choose(&self, attention: &AttentionPattern, seed: u64, so_far: &mut FoundSoFar, data: &Prepared) -> Result<()> {
        let spec = attention.to_string();
        let rates = self.rates_of(attention, &so_far.tried);
        let (mut runs, mut diverging) = (Vec::new(), Vec::new());
        for &rate in &rates {
            let made = match so_far.lost.contains(&self.folder(attention, seed, rate)) {
                true => None,
                false => Some(self.train(attention, seed, rate, data)),
            };
            let diverged = made.as_ref().is_none_or(|made| made.as_ref().is_err_and(is_divergence));
            // A rate that is too high loses to the others, if any of them is not.
            let Some(made) = made.filter(|_| rates.len() == 1 || !diverged) else {
                self.listener.note(&format!(
                    "warning: {attention} with the learning rate {rate} and seed {seed} diverged, so another rate is chosen"
                ));
                diverging.push(rate);
                continue;
            };
            runs.push(made.with_context(|| format!("{attention} with the learning rate {rate} and seed {seed}"))?);
        }
        ensure!(!runs.is_empty(), "{attention} diverged with every learning rate, seed {seed}; give lower ones");
        // The first of equal losses is taken, and a loss that is not a number comes last.
        let best = (0..runs.len()).min_by(|&a, &b| runs[a].report.val_loss.total_cmp(&runs[b].report.val_loss));
        let Some(best) = best else { bail!("no learning rate is given") };
        if rates.len() > 1 {
            let of = |learning_rate, val_loss, chosen| RateTried {
                attention_spec: spec.clone(),
                learning_rate,
                val_loss,
                chosen,
            };
            let ended = runs.iter().enumerate();
            so_far.tried.extend(ended.map(|(i, run)| of(run.learning_rate, Some(run.report.val_loss), i == best)));
            so_far.tried.extend(diverging.into_iter().map(|rate| of(rate, None, false)));
        }
        let run = runs.swap_remove(best);
        let place = |run: &Chosen| self.place(run.report.seed, &run.report.attention_spec);
        let after = so_far.chosen.partition_point(|other| place(other) < place(&run));
        so_far.chosen.insert(after, run);
        so_far.tried.sort_by_key(|tried| self.place(seed, &tried.attention_spec).1);
        Ok(())
    }

    /// Spreads the runs of some seeds over the ranks, if there are several. One process makes its
    /// runs in the order of the table. Returns the folders of the runs that diverged, which fails
    /// the others only where no other rate is tried in their place.
    fn divide(&self, seeds: &[u64], tried: &[RateTried], data: &Prepared) -> Result<Vec<PathBuf>> {
        if self.ranks.world().size() == 1 {
            return Ok(Vec::new());
        }
        let mut runs = Vec::new();
        for &seed in seeds {
            for attention in &self.attentions {
                runs.extend(self.rates_of(attention, tried).into_iter().map(|rate| (attention, seed, rate)));
            }
        }
        let is_one_of_several = |run: usize| self.rates_of(runs[run].0, tried).len() > 1;
        let ended = divided(&self.ranks, runs.len(), is_one_of_several, |run| {
            let (attention, seed, rate) = runs[run];
            let (config, training) = self.recipe(attention, seed, rate)?;
            find_or_run(&config, &training, data, self.options(&self.folder(attention, seed, rate)))
        })?;
        let Some(diverged) = ended else { bail!(Cause::Stopped(STOPPED.into())) };
        let folder = |run: usize| runs.get(run).map(|&(attention, seed, rate)| self.folder(attention, seed, rate));
        Ok(diverged.into_iter().filter_map(folder).collect())
    }

    /// Returns the learning rate that was chosen for an attention, or else those to be tried.
    fn rates_of(&self, attention: &AttentionPattern, tried: &[RateTried]) -> Vec<f64> {
        let spec = attention.to_string();
        let chosen = tried.iter().find(|rate| rate.chosen && rate.attention_spec == spec);
        chosen.map_or_else(|| self.rates(), |rate| vec![rate.learning_rate])
    }

    /// Returns the learning rates that are tried at the first seed.
    fn rates(&self) -> Vec<f64> {
        if self.learning_rates.is_empty() { vec![self.training.learning_rate] } else { self.learning_rates.clone() }
    }

    /// Returns which run this is, counted from 1, and of how many: all rates of all attentions at
    /// the first seed, and then one rate of each at the others.
    fn number_of(&self, attention: &AttentionPattern, seed: u64, rate: f64) -> (usize, usize) {
        let (rates, attentions) = (self.rates(), self.attentions.len());
        let attention = self.attentions.iter().position(|other| other == attention).unwrap_or(0);
        let number = match self.seeds.iter().position(|&other| other == seed).unwrap_or(0) {
            0 => attention * rates.len() + rates.iter().position(|&other| other == rate).unwrap_or(0),
            later => attentions * (rates.len() + later - 1) + attention,
        };
        (number + 1, self.runs())
    }

    /// Returns the number of runs.
    pub fn runs(&self) -> usize {
        self.attentions.len() * (self.rates().len() + self.seeds.len() - 1)
    }

    /// Makes one run, or finds it; one of several ranks finds what they have made.
    fn train(&self, attention: &AttentionPattern, seed: u64, learning_rate: f64, data: &Prepared) -> Result<Chosen> {
        let (config, training) = self.recipe(attention, seed, learning_rate)?;
        let folder = self.folder(attention, seed, learning_rate);
        let (number, all) = self.number_of(attention, seed, learning_rate);
        if all > 1 && self.ranks.world().size() == 1 {
            let found = find(&config, &training, data, &self.options(&folder))?;
            if !matches!(found, Found::Finished(_)) {
                let run = format!("{attention}, seed {seed}, learning rate {learning_rate:e}");
                self.listener.note(&format!("run {number} of {all}: {run}"));
            }
        }
        let report = made(&self.ranks, &config, &training, data, self.options(&folder))?;
        let Some(report) = report else { bail!(Cause::Stopped(STOPPED.into())) };
        Ok(Chosen { report, learning_rate, folder })
    }

    /// Returns the configuration and the training settings of a run.
    fn recipe(
        &self,
        attention: &AttentionPattern,
        seed: u64,
        learning_rate: f64,
    ) -> Result<(ModelConfig, TrainingConfig)> {
        let config = self.config.clone().with_attention(attention)?;
        Ok((config, TrainingConfig { seed, learning_rate, ..self.training.clone() }))
    }

    /// Returns the folder of a run, which names the learning rate where there are several.
    fn folder(&self, attention: &AttentionPattern, seed: u64, learning_rate: f64) -> PathBuf {
        let name = run_name(attention, seed);
        self.out.join(if self.learning_rates.len() > 1 { format!("{name}-rate{learning_rate}") } else { name })
    }

    fn options<'b>(&'b self, out: &'b Path) -> RunOptions<'b> {
        RunOptions {
            overwrite: true,
            data: self.data.as_ref(),
            device: self.device.clone(),
            threads: self.threads,
            stop: self.stop,
            listener: self.listener,
            ..RunOptions::new(out)
        }
    }

    /// Fails now where a run would fail hours later.
    fn check(&self, data: &Prepared) -> Result<()> {
        let written =
            ["table.md", "loss.svg", "loss.png", "positions.svg", "positions.png", "beside.svg", "beside.png"];
        files::require_own(self.out, ("compare.json", "runs"), &written)?;
        let rates = self.rates();
        require_once("learning rate", &rates)?;
        require_once("attention", &self.attentions)?;
        require_once("seed", &self.seeds)?;
        for rate in &rates {
            TrainingConfig { learning_rate: *rate, ..self.training.clone() }.validate()?;
        }
        for attention in &self.attentions {
            Decoder::new(&self.config.clone().with_attention(attention)?, 0, &self.device)
                .with_context(|| format!("attention {attention}"))?;
            for &seed in &self.seeds {
                for &rate in &rates {
                    let (config, training) = self.recipe(attention, seed, rate)?;
                    find(&config, &training, data, &self.options(&self.folder(attention, seed, rate)))?;
                }
            }
        }
        // Last, since an earlier run of the same name says more of what differs.
        self.require_same(data)
    }

    /// Refuses to replace the outcome of a comparison on other data or of another model.
    fn require_same(&self, data: &Prepared) -> Result<()> {
        let Ok(text) = std::fs::read(self.out.join("compare.json")) else { return Ok(()) };
        // One of another version may lack something that would be compared.
        let Ok(earlier) = serde_json::from_slice::<Outcome>(&text) else { return Ok(()) };
        // Where rates are tried, the held-out text is divided, which is the same text.
        let text =
            |data: &BTreeMap<String, String>| ["training tokens", "tokenizer"].map(|name| data.get(name).cloned());
        let now = text(&digests(data));
        let what = if earlier.runs.iter().filter_map(|run| run.key.as_ref()).any(|key| text(&key.data) != now) {
            format!("on other data, {}", earlier.corpus)
        } else if earlier.config != as_trained(&self.config, data) {
            "of another model".to_string()
        } else {
            return Ok(());
        };
        bail!(Cause::AnotherFolder(format!(
            "{} holds a comparison {what}, which would be replaced: choose another folder, or remove this one",
            self.out.display()
        )))
    }

    fn save(&self, data: &Prepared, FoundSoFar { chosen, tried, .. }: &FoundSoFar) -> Result<Outcome> {
        let runs: Vec<Report> = chosen.iter().map(|run| run.report.clone()).collect();
        let rates: Vec<f64> = chosen.iter().map(|run| run.learning_rate).collect();
        let folders: Vec<PathBuf> = chosen.iter().map(|run| run.folder.clone()).collect();
        let batches = training_batches(&self.config, &self.training, data)?;
        let epoch_tokens = batches.batches_per_epoch() * batches.tokens_per_batch();
        let outcome = Outcome {
            command: self.command.clone(),
            machine: Machine::with(&self.device),
            corpus: data.corpus_name.clone(),
            config: as_trained(&self.config, data),
            training: self.training.clone(),
            summary: summarise(&runs, &rates, epoch_tokens),
            learning_rates: tried.to_vec(),
            runs,
        };
        if !self.ranks.leads() {
            return Ok(outcome);
        }
        let path = self.out.join("compare.json");
        let json = files::as_json(&outcome)?;
        // The table is written when all runs are there. Until then, one of other numbers would be
        // taken for one of these; so it goes before they come, if the program ends in between.
        if std::fs::read(&path).ok().as_ref() != Some(&json) {
            files::remove(&self.out.join("table.md"))?;
        }
        files::write(&path, &json)?;
        charts::loss(&outcome, &folders)?.save(&self.out.join("loss"))?;
        for (name, chart) in [("positions", charts::positions(&outcome)), ("beside", charts::beside(&outcome))] {
            let stem = self.out.join(name);
            match chart {
                Some(chart) => drop(chart.save(&stem)?),
                // One of an earlier comparison would be taken for one of this.
                None => ["svg", "png"].iter().try_for_each(|end| files::remove(&stem.with_extension(end)))?,
            }
        }
        Ok(outcome)
    }
}
