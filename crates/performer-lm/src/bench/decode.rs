//! This module measures decoding alone: time per token and bytes of state over the length of the
//! context, of FAVOR+, of softmax with its cache, and of the rival of FAVOR+ whose state is
//! constant as well, a window of softmax with as many numbers of state.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use performer_core::{Attention, Favor, FavorConfig, Inputs, Softmax, State};
use serde::{Deserialize, Serialize};

use super::{Effort, Timing, require_room, time, window_of_equal_state};
use crate::{
    errors::Cause,
    machine::Machine,
    plot::{Axis, Chart, Scale, Series},
};

/// The most tokens that a prefill takes at once.
const PREFILL: usize = 4096;

/// Number of tokens decoded before anything is measured.
const WARM_UP: usize = 300;

/// A `Sweep` says what is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// Numbers of tokens of context before the measured ones.
    pub contexts: Vec<usize>,
    /// The longest context of softmax, whose key-value cache grows.
    pub softmax_limit: usize,
    /// Number of random features.
    pub features: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Number of heads.
    pub heads: usize,
}

impl Sweep {
    /// The length of the window whose state is as large as that of the features, to whole tokens.
    fn window(&self) -> usize {
        window_of_equal_state(self.features, self.head_dim)
    }

    fn name_of_window(&self) -> String {
        format!("softmax:window={}", self.window())
    }
}

/// A `Point` is one measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// `favor`, `softmax` or `softmax:window=W`.
    pub attention: String,
    /// Number of tokens of context.
    pub context: usize,
    /// Time per token.
    #[serde(flatten)]
    pub timing: Timing,
    /// Size of the decoding state, in bytes.
    pub state_bytes: usize,
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
    /// The measurements.
    pub points: Vec<Point>,
}

/// Measures FAVOR+ and the window at every context, and softmax at those up to its limit;
/// `progress` is called with what comes next.
///
/// # Errors
/// If features, head dimension, heads or a context are 0, if they make tensors that no memory
/// holds, or if the device cannot compute an attention.
pub fn run(
    sweep: &Sweep,
    device: &Device,
    threads: usize,
    effort: Effort,
    mut progress: impl FnMut(String),
) -> Result<Report> {
    let least = sweep.contexts.iter().copied().min().unwrap_or(1);
    for (name, size) in
        [("features", sweep.features), ("head_dim", sweep.head_dim), ("heads", sweep.heads), ("contexts", least)]
    {
        ensure!(size > 0, Cause::setting("", name, size, "at least 1"));
    }
    for (name, size) in [("tokens", PREFILL), ("features", sweep.features)] {
        require_room(&[(name, size), ("heads", sweep.heads), ("numbers a head", sweep.head_dim)])?;
    }
    let config = FavorConfig::default().with_features(sweep.features);
    let favor = Favor::new(&config, sweep.head_dim, 1, DType::F32, device)?;
    let (softmax, window) = (Softmax::new(), Softmax::new().with_window(sweep.window())?);
    let mut points = Vec::new();
    let name_of_window = sweep.name_of_window();
    let all: [(&str, &dyn Attention, usize); 3] = [
        ("favor", &favor, usize::MAX),
        (&name_of_window, &window, usize::MAX),
        ("softmax", &softmax, sweep.softmax_limit),
    ];
    for (name, attention, limit) in all {
        let mut contexts: Vec<usize> = sweep.contexts.iter().copied().filter(|&c| c <= limit).collect();
        contexts.sort_unstable();
        contexts.dedup();
        let mut state = State::new();
        // Some hundred tokens go into another state first, so that the first context measured does
        // not include a cold start.
        let mut other = State::new();
        for _ in 0..WARM_UP {
            let [q, k, v] = random(sweep, 1, device)?;
            attention.extend(Inputs::new(&q, &k, &v), &mut other)?;
        }
        for context in contexts {
            progress(format!("{name}, {context} tokens of context"));
            while state.tokens() < context {
                let [q, k, v] = random(sweep, PREFILL.min(context - state.tokens()), device)?;
                attention.extend(Inputs::new(&q, &k, &v), &mut state)?;
            }
            let [q, k, v] = random(sweep, 1, device)?;
            let state_bytes = state.bytes();
            // The measured tokens belong to a copy, so that the next context is as long as it says.
            // Each lengthens the copy: all of them by at most a tenth of the context, or by the
            // fewest runs that were asked for if these are more.
            let mut copy = state.clone();
            let few = Effort { time: std::time::Duration::ZERO, runs: effort.runs.max((context / 10).min(500)) };
            let timing = time(few, device, || attention.extend(Inputs::new(&q, &k, &v), &mut copy).map(drop))?;
            points.push(Point { attention: name.into(), context, timing, state_bytes });
        }
    }
    Ok(Report { machine: Machine::with(device), threads, sweep: sweep.clone(), points })
}

fn random(sweep: &Sweep, tokens: usize, device: &Device) -> candle_core::Result<[Tensor; 3]> {
    let one = || Tensor::randn(0f32, 1.0, (1, sweep.heads, tokens, sweep.head_dim), device);
    Ok([one()?, one()?, one()?])
}

impl Report {
    /// Draws time per token over context, both axes logarithmic.
    pub fn chart(&self) -> Chart {
        let s = &self.sweep;
        let window = s.name_of_window();
        let series = [
            ("favor", format!("favor M={}", s.features)),
            (&window, format!("window of {}", s.window())),
            ("softmax", "softmax, KV cache".into()),
        ]
        .map(|(attention, name)| {
            let points = self.points.iter().filter(|p| p.attention == attention);
            Series::new(name, points.map(|p| (p.context as f64, p.timing.median_ms * 1e3)))
        });
        Chart {
            title: "Decoding: time a token".into(),
            subtitle: Some(format!(
                "one layer of {} heads of {}, f32, {}",
                s.heads,
                s.head_dim,
                self.machine.at_work(self.threads)
            )),
            x: Axis::new("context (tokens)", Scale::Log10),
            y: Axis::new("time (µs)", Scale::Log10),
            series: series.into(),
            ..Chart::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_favor_and_of_windows_do_not_grow() -> Result<()> {
        let sweep = Sweep { contexts: vec![300, 10], softmax_limit: 100, features: 16, head_dim: 16, heads: 2 };
        let effort = Effort { time: std::time::Duration::ZERO, runs: 2 };
        let report = run(&sweep, &Device::Cpu, 1, effort, |_| {})?;
        let points: Vec<_> = report.points.iter().map(|p| (p.attention.as_str(), p.context)).collect();
        // 16 features of 16 + 2 numbers are 9 tokens of 16 + 16, beside the query's own.
        let window = "softmax:window=10";
        assert_eq!(points, [("favor", 10), ("favor", 300), (window, 10), (window, 300), ("softmax", 10)]);
        for points in report.points.chunks(2).take(2) {
            assert_eq!(points[0].state_bytes, points[1].state_bytes);
        }
        assert_eq!(report.points[0].state_bytes, report.points[2].state_bytes);
        let chart = report.chart().to_svg()?;
        assert!(chart.contains("KV cache") && chart.contains("window of 10"));
        Ok(())
    }
}
