//! This module measures how fast whole models generate: time per token and bytes of state over the
//! length of the text before it.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::{Device, Tensor};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};

use super::{Effort, Timing, time};
use crate::{
    machine::Machine,
    model::{Decoder, DecoderState},
    plot::{Axis, Chart, Scale, Series},
};

/// The most tokens that are read at once.
const PIECE: usize = 1024;

/// A `Sweep` says at which lengths models are measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// Numbers of tokens before the measured ones.
    pub contexts: Vec<usize>,
    /// Number of tokens that are measured at each; the first of them is not counted.
    pub tokens: usize,
}

/// A `Point` is one measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The model's name.
    pub model: String,
    /// Number of tokens before.
    pub context: usize,
    /// Time per token.
    #[serde(flatten)]
    pub timing: Timing,
    /// Tokens a second, by the median.
    pub tokens_per_second: f64,
    /// Size of the decoding state after the context, in bytes.
    pub state_bytes: usize,
    /// Seconds that it took to read the context.
    pub read_seconds: f64,
}

/// A `Report` holds all that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The machine on which it was measured.
    pub machine: Machine,
    /// Number of threads.
    pub threads: usize,
    /// What was measured.
    pub sweep: Sweep,
    /// Bytes of each model's weights, by its name, in the order of measurement.
    pub weights: Vec<(String, usize)>,
    /// The measurements.
    pub points: Vec<Point>,
}

impl Report {
    /// Begins a report without measurements.
    ///
    /// # Errors
    /// If a context is 0, or fewer than two tokens are to be measured.
    pub fn begin(sweep: Sweep, device: &Device, threads: usize) -> Result<Self> {
        ensure!(!sweep.contexts.contains(&0), "a context is 0; it must be at least 1 token");
        ensure!(sweep.tokens > 1, "tokens are {}; measure at least 2, of which the first is not counted", sweep.tokens);
        Ok(Self { machine: Machine::with(device), threads, sweep, weights: Vec::new(), points: Vec::new() })
    }

    /// Measures a model at every context. Its text is random tokens, whose speed is that of any
    /// others; `progress` is called with what comes next.
    ///
    /// # Errors
    /// If a model of this name was measured, or this one has too few positions, or fails.
    pub fn add(&mut self, name: &str, model: &Decoder, mut progress: impl FnMut(String)) -> Result<()> {
        ensure!(self.weights.iter().all(|(other, _)| other != name), "{name} is named twice: give each model once");
        let mut contexts = self.sweep.contexts.clone();
        contexts.sort_unstable();
        contexts.dedup();
        let mut state = model.new_state();
        let needed = contexts.last().map_or(0, |most| most.saturating_add(self.sweep.tokens));
        let positions = model.positions_left(&state);
        ensure!(
            needed <= positions,
            "{name} has positions for {positions} tokens, not for {needed}: shorten the contexts"
        );
        let bytes = model.tensors().values().map(|t| t.elem_count() * t.dtype().size_in_bytes()).sum();
        self.weights.push((name.to_string(), bytes));
        let vocabulary = model.config().vocab_size as u64;
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let mut read = |count: usize, state: &mut DecoderState| -> Result<()> {
            let ids: Vec<u32> = (0..count).map(|_| (random.next_u64() % vocabulary) as u32).collect();
            let logits = model.extend(&Tensor::from_vec(ids, (1, count), model.device())?, state)?;
            logits.device().synchronize().context("the device failed")
        };
        // A cold start is no part of the first measurement.
        read(2, &mut model.new_state())?;
        let mut read_seconds = 0.0;
        for context in contexts {
            progress(format!("{name}, {context} tokens before"));
            let started = Instant::now();
            while state.tokens() < context {
                read(PIECE.min(context - state.tokens()), &mut state)?;
            }
            read_seconds += started.elapsed().as_secs_f64();
            let state_bytes = state.bytes();
            // The measured tokens belong to a copy, so that the next context is as long as it says.
            let mut copy = state.clone();
            let few = Effort { time: std::time::Duration::ZERO, runs: self.sweep.tokens - 1 };
            let step = || read(1, &mut copy).map_err(candle_core::Error::msg);
            let timing = time(few, model.device(), step)?;
            let tokens_per_second = 1e3 / timing.median_ms;
            let model = name.to_string();
            self.points.push(Point { model, context, timing, tokens_per_second, state_bytes, read_seconds });
        }
        Ok(())
    }

    /// Draws tokens a second over the length of the text before.
    pub fn speed_chart(&self) -> Chart {
        self.chart("Generating: tokens a second", "tokens a second", |point| point.tokens_per_second)
    }

    /// Draws the size of the decoding state over the length of the text before.
    pub fn memory_chart(&self) -> Chart {
        self.chart("Generating: size of the decoding state", "state (MiB)", |point| {
            point.state_bytes as f64 / f64::from(1 << 20)
        })
    }

    fn chart(&self, title: &str, label: &str, y: impl Fn(&Point) -> f64) -> Chart {
        let series = self.weights.iter().map(|(name, _)| {
            let points = self.points.iter().filter(|point| point.model == *name);
            Series::new(name.clone(), points.map(|point| (point.context as f64, y(point))))
        });
        Chart {
            title: title.into(),
            subtitle: Some(format!("one text, f32, {}", self.machine.at_work(self.threads))),
            x: Axis::new("text before (tokens)", Scale::Log10),
            y: Axis::new(label, Scale::Log10),
            series: series.collect(),
            ..Chart::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{ModelConfig, Preset};

    fn model(attention: &str) -> Result<Decoder> {
        let config = ModelConfig {
            attention: attention.parse().map_err(anyhow::Error::msg)?,
            vocab_size: 9,
            ..Preset::Seed.load()?.0
        };
        Decoder::new(&config, 1, &Device::Cpu)
    }

    #[test]
    fn states_grow_with_softmax_alone_and_contexts_are_as_long_as_they_say() -> Result<()> {
        let sweep = Sweep { contexts: vec![40, 10, 40], tokens: 3 };
        let mut report = Report::begin(sweep, &Device::Cpu, 1)?;
        for attention in ["favor:m=8", "softmax"] {
            report.add(attention, &model(attention)?, |_| {})?;
        }
        let again = report.add("softmax", &model("softmax")?, |_| {}).unwrap_err().to_string();
        assert!(again.contains("named twice") && report.points.len() == 4, "{again}");
        let of = |i: usize| (report.points[i].model.as_str(), report.points[i].context, report.points[i].state_bytes);
        assert_eq!((of(0).0, of(0).1, of(1).1), ("favor:m=8", 10, 40));
        assert_eq!(of(0).2, of(1).2);
        assert_eq!(4 * of(2).2, of(3).2, "keys and values");
        assert!(report.speed_chart().to_svg()?.contains("favor:m=8"));
        assert!(report.memory_chart().to_svg()?.contains("MiB"));
        Ok(())
    }

    #[test]
    fn what_cannot_be_measured_is_refused() {
        let begin = |contexts, tokens| Report::begin(Sweep { contexts, tokens }, &Device::Cpu, 1);
        assert!(begin(vec![0], 2).is_err() && begin(vec![1], 1).is_err());
        let mut report = begin(vec![usize::MAX], 2).unwrap();
        let error = report.add("softmax", &model("softmax").unwrap(), |_| {}).unwrap_err().to_string();
        assert!(error.contains("positions") && report.points.is_empty(), "{error}");
    }
}
