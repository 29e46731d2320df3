//! This module trains one model with several attentions and seeds, and compares the results. Runs
//! of one seed have equal initial weights where shapes agree, equal data in equal order, and equal
//! schedules; only the attention differs.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::{
    config::{AttentionPattern, ModelConfig, TrainingConfig},
    data::Prepared,
    errors::{Cause, STOPPED},
    files,
    listener::Listener,
    machine::Machine,
    model::Decoder,
    plot::{Axis, Chart, Scale, Series},
    train::{Control, Record, Report, RunOptions, find, find_or_run, read_log, run_name, training_batches},
};

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
    /// Folder for the results and for one checkpoint folder per run.
    pub out: &'a Path,
    /// The data as the command line spells it.
    pub data: String,
    /// Device on which the models are trained.
    pub device: Device,
    /// Number of worker threads on the CPU.
    pub threads: usize,
    /// Flag that is set from outside to stop.
    pub stop: &'a std::sync::atomic::AtomicBool,
    /// Is told of steps, validations, and what a person should know.
    pub listener: &'a dyn Listener,
    /// The command that runs this, for the record.
    pub command: String,
}

/// An `Outcome` is the content of `compare.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The command that ran the comparison.
    pub command: String,
    /// The machine on which it ran.
    pub machine: Machine,
    /// Name of the corpus.
    pub corpus: String,
    /// Configuration of the model; every run replaces its attention.
    pub config: ModelConfig,
    /// Training settings; every run replaces the seed.
    pub training: TrainingConfig,
    /// One report for each run.
    pub runs: Vec<Report>,
    /// One summary for each attention.
    pub summary: Vec<Summary>,
}

/// A `Summary` describes the runs of one attention over all seeds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// The attention, as the command line takes it.
    pub attention_spec: String,
    /// The seeds run.
    pub seeds: Vec<u64>,
    /// Number of trained parameters.
    #[serde(default)]
    pub params: usize,
    /// Bytes of decoding state of one sequence of the model's context, in all layers.
    #[serde(default)]
    pub state_bytes: usize,
    /// Whether that state grows with every token.
    #[serde(default)]
    pub state_grows: bool,
    /// Mean validation loss, in nats per token.
    pub val_loss: f64,
    /// Standard deviation of the validation loss over the seeds; 0 for one seed.
    pub val_loss_std: f64,
    /// Mean perplexity.
    pub perplexity: f64,
    /// Mean bits per byte.
    pub bits_per_byte: f64,
    /// The trained models with their features off, means over the seeds; `None` if they have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub features_off: Option<Control>,
    /// Mean perplexity divided by that of the first attention, minus 1, over the seeds that both
    /// have.
    pub perplexity_gap: f64,
    /// Seconds that a whole epoch of training takes at the median speed.
    pub epoch_seconds: f64,
    /// Tokens per second, the median over the runs.
    pub tokens_per_second: f64,
}

impl Comparison<'_> {
    /// Trains every run that has not been trained yet. `compare.json`, `loss.svg` and `loss.png`
    /// are written after every run, so that a comparison that is stopped keeps its results so far,
    /// and continues there when started again.
    ///
    /// # Errors
    /// If a run fails or is stopped, or a run of other settings is in the folder.
    pub fn run(&self, data: &Prepared) -> Result<Outcome> {
        ensure!(!self.attentions.is_empty() && !self.seeds.is_empty(), "nothing to compare: give attentions and seeds");
        self.check(data)?;
        let batches = training_batches(&self.config, &self.training, data)?;
        let epoch_tokens = batches.batches_per_epoch() * batches.tokens_per_batch();
        let mut outcome = None;
        let mut runs = Vec::new();
        for &seed in &self.seeds {
            for attention in &self.attentions {
                let (config, training) = self.recipe(attention, seed)?;
                let out = self.folder(attention, seed);
                let report = find_or_run(&config, &training, data, self.options(&out))?;
                let Some(report) = report else { bail!(Cause::Stopped(STOPPED.into())) };
                runs.push(report);
                outcome = Some(self.save(data, &runs, epoch_tokens)?);
            }
        }
        outcome.ok_or_else(|| anyhow::anyhow!("no run was made"))
    }

    /// Returns the configuration and the training settings of a run.
    fn recipe(&self, attention: &AttentionPattern, seed: u64) -> Result<(ModelConfig, TrainingConfig)> {
        let config = self.config.clone().with_attention(attention)?;
        Ok((config, TrainingConfig { seed, ..self.training.clone() }))
    }

    fn folder(&self, attention: &AttentionPattern, seed: u64) -> PathBuf {
        self.out.join(run_name(attention, seed))
    }

    fn options<'b>(&'b self, out: &'b Path) -> RunOptions<'b> {
        RunOptions {
            out,
            data: &self.data,
            device: self.device.clone(),
            threads: self.threads,
            stop: self.stop,
            samples: false,
            listener: self.listener,
        }
    }

    /// Fails now where a run would fail hours later.
    fn check(&self, data: &Prepared) -> Result<()> {
        files::require_own(self.out, ("compare.json", "runs"), &["table.md", "loss.svg", "loss.png"])?;
        for (i, attention) in self.attentions.iter().enumerate() {
            ensure!(!self.attentions[..i].contains(attention), "attention {attention} is given twice");
            for (j, &seed) in self.seeds.iter().enumerate() {
                ensure!(!self.seeds[..j].contains(&seed), "seed {seed} is given twice");
                let (config, training) = self.recipe(attention, seed)?;
                if j == 0 {
                    Decoder::new(&config, 0, &self.device).with_context(|| format!("attention {attention}"))?;
                }
                find(&config, &training, data, &self.options(&self.folder(attention, seed)))?;
            }
        }
        Ok(())
    }

    fn save(&self, data: &Prepared, runs: &[Report], epoch_tokens: usize) -> Result<Outcome> {
        let outcome = Outcome {
            command: self.command.clone(),
            machine: Machine::with(&self.device),
            corpus: data.corpus_name.clone(),
            config: ModelConfig { vocab_size: data.tokenizer.vocab_size(), ..self.config.clone() },
            training: self.training.clone(),
            runs: runs.to_vec(),
            summary: summarise(runs, epoch_tokens),
        };
        files::write_json(&self.out.join("compare.json"), &outcome)?;
        self.plot(&outcome)?.save(&self.out.join("loss"))?;
        Ok(outcome)
    }

    /// Plots validation loss against training tokens: the mean over seeds, with the range as a
    /// band.
    fn plot(&self, outcome: &Outcome) -> Result<Chart> {
        let mut series = Vec::new();
        for attention in &self.attentions {
            let spec = attention.to_string();
            let seeds: Vec<u64> = outcome.runs.iter().filter(|r| r.attention_spec == spec).map(|r| r.seed).collect();
            let logs: Vec<Vec<Record>> = seeds
                .iter()
                .map(|&seed| read_log(&self.folder(attention, seed).join("metrics.jsonl")))
                .collect::<Result<_>>()?;
            let curves: Vec<Vec<(f64, f64)>> = logs.iter().map(|log| validation_curve(log)).collect();
            let Some(shortest) = curves.iter().map(Vec::len).min() else { continue };
            let mut points = Vec::new();
            let mut band = Vec::new();
            for i in 0..shortest {
                let losses: Vec<f64> = curves.iter().map(|c| c[i].1).collect();
                points.push((curves[0][i].0, mean(&losses)));
                let low = losses.iter().copied().fold(f64::INFINITY, f64::min);
                let high = losses.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                band.push((low, high));
            }
            series.push(Series { band: (curves.len() > 1).then_some(band), ..Series::new(spec, points) });
        }
        let runs = outcome.summary.iter().map(|s| s.seeds.len()).max().unwrap_or(0);
        Ok(Chart {
            title: format!("Validation loss on {}", outcome.corpus),
            subtitle: Some(format!(
                "{} layers, dim {}, context {}; mean of {runs} seed(s), band: smallest to largest; without the first quarter",
                outcome.config.layers, outcome.config.hidden_size, outcome.config.context
            )),
            x: Axis::new("training tokens", Scale::Linear),
            y: Axis::new("validation loss (nats per token)", Scale::Linear),
            series: series.into_iter().map(without_first_quarter).collect(),
            ..Chart::default()
        })
    }
}

/// Drops the first quarter of a curve: the steep fall at the beginning would flatten the
/// differences at the end.
fn without_first_quarter(mut series: Series) -> Series {
    let end = series.points.last().map_or(0.0, |p| p.0);
    let skip = series.points.iter().take_while(|p| p.0 < end / 4.0).count();
    series.points.drain(..skip);
    if let Some(band) = &mut series.band {
        band.drain(..skip);
    }
    series
}

/// Returns the points of validation loss against tokens: quick validations, and the whole
/// validation at the end.
fn validation_curve(log: &[Record]) -> Vec<(f64, f64)> {
    log.iter().filter_map(|r| r.val_loss.map(|loss| (r.tokens as f64, loss))).collect()
}

fn summarise(runs: &[Report], epoch_tokens: usize) -> Vec<Summary> {
    let mut specs: Vec<&str> = Vec::new();
    for run in runs {
        if !specs.contains(&run.attention_spec.as_str()) {
            specs.push(&run.attention_spec);
        }
    }
    let mut summary: Vec<Summary> = Vec::new();
    for spec in specs {
        let of =
            |f: fn(&Report) -> f64| -> Vec<f64> { runs.iter().filter(|r| r.attention_spec == spec).map(f).collect() };
        let losses = of(|r| r.val_loss);
        let val_loss = mean(&losses);
        let spread = losses.iter().map(|l| (l - val_loss).powi(2)).sum::<f64>();
        let first = runs.first().map_or("", |r| r.attention_spec.as_str());
        let at = |spec: &str, seed: u64| runs.iter().find(|r| r.attention_spec == spec && r.seed == seed);
        let pairs: Vec<(f64, f64)> = runs
            .iter()
            .filter_map(|r| Some((at(spec, r.seed)?.perplexity, r.perplexity)).filter(|_| r.attention_spec == first))
            .collect();
        let ratio = pairs.iter().map(|p| p.0).sum::<f64>() / pairs.iter().map(|p| p.1).sum::<f64>();
        let tokens_per_second = median(of(|r| r.tokens_per_second));
        let run = runs.iter().find(|r| r.attention_spec == spec);
        let controls: Vec<&Control> =
            runs.iter().filter(|r| r.attention_spec == spec).filter_map(|r| r.features_off.as_ref()).collect();
        let mean_of = |f: fn(&Control) -> f64| mean(&controls.iter().map(|c| f(c)).collect::<Vec<_>>());
        summary.push(Summary {
            attention_spec: spec.to_string(),
            params: run.map_or(0, |r| r.params),
            state_bytes: run.map_or(0, |r| r.state_bytes),
            state_grows: run.is_some_and(|r| r.state_grows),
            features_off: controls.first().map(|control| Control {
                attention_spec: control.attention_spec.clone(),
                val_loss: mean_of(|c| c.val_loss),
                perplexity: mean_of(|c| c.perplexity),
                bits_per_byte: mean_of(|c| c.bits_per_byte),
            }),
            seeds: runs.iter().filter(|r| r.attention_spec == spec).map(|r| r.seed).collect(),
            val_loss,
            val_loss_std: if losses.len() > 1 { (spread / (losses.len() - 1) as f64).sqrt() } else { 0.0 },
            perplexity: mean(&of(|r| r.perplexity)),
            bits_per_byte: mean(&of(|r| r.bits_per_byte)),
            perplexity_gap: ratio - 1.0,
            epoch_seconds: epoch_tokens as f64 / tokens_per_second,
            tokens_per_second,
        });
    }
    summary
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(spec: &str, seed: u64, val_loss: f64) -> Report {
        Report {
            attention: "favor".into(),
            attention_spec: spec.into(),
            seed,
            params: 1,
            state_bytes: 100,
            state_grows: spec == "softmax",
            features_off: spec.starts_with("favor").then(|| Control {
                attention_spec: "uniform".into(),
                val_loss: val_loss + 1.0,
                perplexity: (val_loss + 1.0).exp(),
                bits_per_byte: (val_loss + 1.0) / 3.0,
            }),
            val_loss,
            perplexity: val_loss.exp(),
            bits_per_byte: val_loss / 3.0,
            epoch_seconds: vec![seed as f64, 10.0],
            tokens_per_second: 100.0 * seed as f64,
            corpus: "test".into(),
            steps: 1,
            tokens: 1,
            threads: 1,
            dtype: crate::config::Precision::F32,
            device: "cpu".into(),
            revision: String::new(),
            key: None,
            earlier_legs: Vec::new(),
        }
    }

    #[test]
    fn summary_is_by_attention_against_the_first() {
        let runs = [
            report("softmax", 1, 3.0),
            report("favor:m=8", 1, 3.1),
            report("softmax", 2, 3.2),
            report("favor:m=8", 2, 3.1),
        ];
        let summary = summarise(&runs, 1500);
        assert_eq!(summary.iter().map(|s| s.attention_spec.as_str()).collect::<Vec<_>>(), ["softmax", "favor:m=8"]);
        assert!((summary[0].val_loss - 3.1).abs() < 1e-12);
        assert!((summary[0].val_loss_std - 0.02f64.sqrt()).abs() < 1e-12);
        assert_eq!(summary[1].val_loss_std, 0.0);
        assert_eq!(summary[0].epoch_seconds, 10.0);
        assert_eq!(summary[0].tokens_per_second, 150.0);
        assert_eq!((summary[0].state_grows, summary[1].state_grows, summary[1].state_bytes), (true, false, 100));
        assert_eq!(summary[0].features_off, None);
        let control = summary[1].features_off.as_ref().unwrap();
        assert_eq!(control.attention_spec, "uniform");
        assert!((control.val_loss - 4.1).abs() < 1e-12);
        let expected = 3.1f64.exp() / ((3.0f64.exp() + 3.2f64.exp()) / 2.0) - 1.0;
        assert!((summary[1].perplexity_gap - expected).abs() < 1e-12);
    }
}
