//! This module measures attention alone: time over sequence length and features, one implementation
//! beside another, and the lengths at which they cross.

mod measure;

use std::fmt;

use anyhow::{Result, bail};
use candle_core::Device;
use serde::{Deserialize, Serialize};

use super::{Effort, Timing, matmul_rate, require_room, window_of_equal_state};
use crate::{
    errors::Cause,
    machine::Machine,
    plot::{At, Axis, Chart, Color, Marker, Scale, Series, Style},
};

/// Number of tokens of a chunk, for counting operations.
const CHUNK: f64 = 32.0;

/// A `Sweep` says what is measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    /// Sequence lengths.
    pub tokens: Vec<usize>,
    /// Numbers of random features.
    pub features: Vec<usize>,
    /// Head dimension.
    pub head_dim: usize,
    /// Number of sequences.
    pub batch: usize,
    /// Number of heads of each sequence.
    pub heads: usize,
    /// Whether attention is causal.
    pub causal: bool,
    /// Whether composed operations are measured as well as fused ones.
    pub composed: bool,
    /// Whether exact softmax is measured.
    #[serde(default = "yes")]
    pub softmax: bool,
    /// Whether the backward pass is measured as well as the forward pass.
    #[serde(default = "yes")]
    pub backward: bool,
    /// Whether fused attention is measured with forget gates as well as without.
    #[serde(default)]
    pub gates: bool,
    /// Whether a window of softmax with as many numbers of decoding state stands beside each number
    /// of features.
    #[serde(default)]
    pub windows: bool,
}

fn yes() -> bool {
    true
}

/// An `Implementation` is an implementation of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Implementation {
    /// FAVOR+ in one fused operation.
    FavorFused,
    /// FAVOR+ in one fused operation, with forget gates.
    FavorGated,
    /// FAVOR+ in Candle's operations.
    FavorComposed,
    /// Exact softmax in one fused operation.
    SoftmaxFused,
    /// Exact softmax in one fused operation, with forget gates. Keys that a gate has faded to
    /// almost nothing are left out, so its time depends on the gates.
    SoftmaxGated,
    /// Exact softmax over a window with as many numbers of decoding state as some number of
    /// features, in one fused operation.
    WindowFused,
    /// Exact softmax over such a window, with forget gates, in one fused operation.
    WindowGated,
    /// Exact softmax as one writes it with Candle: product, mask, `candle_nn::ops::softmax`,
    /// product.
    SoftmaxCandle,
    /// PyTorch's `scaled_dot_product_attention`.
    TorchSdpa,
    /// A plain chunked FAVOR+ in PyTorch.
    TorchFavor,
}

impl Implementation {
    /// Returns the name of the implementation for readers.
    pub fn name(self) -> &'static str {
        match self {
            Self::FavorFused => "favor fused",
            Self::FavorGated => "favor fused, gated",
            Self::FavorComposed => "favor composed",
            Self::SoftmaxFused => "softmax fused",
            Self::SoftmaxGated => "softmax fused, gated",
            Self::WindowFused => "window of equal state",
            Self::WindowGated => "window of equal state, gated",
            Self::SoftmaxCandle => "softmax in Candle ops",
            Self::TorchSdpa => "PyTorch SDPA",
            Self::TorchFavor => "PyTorch chunked favor",
        }
    }

    /// Whether it is exact softmax over all keys, without gates.
    fn is_softmax(self) -> bool {
        matches!(self, Self::SoftmaxFused | Self::SoftmaxCandle | Self::TorchSdpa)
    }

    fn is_window(self) -> bool {
        matches!(self, Self::WindowFused | Self::WindowGated)
    }

    fn is_gated(self) -> bool {
        matches!(self, Self::FavorGated | Self::SoftmaxGated | Self::WindowGated)
    }
}

/// A `Point` is one measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// The implementation that was measured.
    pub implementation: Implementation,
    /// Sequence length.
    pub tokens: usize,
    /// Number of random features, for FAVOR+; for a window, the number of features whose state it
    /// equals.
    pub features: Option<usize>,
    /// Whether the backward pass is included.
    pub backward: bool,
    /// Time that the implementation took.
    #[serde(flatten)]
    pub timing: Timing,
    /// Billions of FLOP per second, counted by [`flop`].
    #[serde(default)]
    pub gflops: f64,
    /// The most bytes in use at once beyond the inputs `q`, `k`, `v` and the output's gradient, if
    /// known; the output and the other gradients are included.
    #[serde(default)]
    pub extra_bytes: Option<u64>,
    /// The most bytes of the whole program in use at once, if known.
    #[serde(default)]
    pub peak_bytes: Option<u64>,
}

impl Point {
    /// Counts the operations of the point, and with them its rate.
    fn count(&mut self, sweep: &Sweep) {
        let flop = match self.features {
            Some(m) if self.implementation.is_window() => {
                flop_of_window(sweep, self.tokens, window_of_equal_state(m, sweep.head_dim), self.backward)
            }
            features => flop(sweep, self.tokens, features, self.backward),
        };
        self.gflops = flop / self.timing.median_ms / 1e6;
    }
}

/// A `Crossover` is the length from which on FAVOR+ is faster than softmax.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crossover {
    /// Number of random features.
    pub features: usize,
    /// Whether the backward pass is included.
    pub backward: bool,
    /// Number of tokens, interpolated between the measured lengths; `None` if the times do not
    /// cross there.
    pub tokens: Option<f64>,
    /// Whether FAVOR+ is faster at every measured length.
    pub ahead_at_once: bool,
    /// Number of tokens at which both cost the same number of FLOP.
    pub by_flop: f64,
}

/// A `Report` holds all that was measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// The machine on which it was measured.
    pub machine: Machine,
    /// Number of threads.
    pub threads: usize,
    /// Name of the device.
    pub device: String,
    /// What was measured.
    pub sweep: Sweep,
    /// Billions of FLOP per second of a product of two 1024×1024 matrices.
    pub matmul_gflops: f64,
    /// The measurements.
    pub points: Vec<Point>,
    /// Crossovers of fused FAVOR+ and the fastest softmax implementation.
    pub crossovers: Vec<Crossover>,
}

/// `Others` holds measurements of another program, such as those that `scripts/torch_attention.py`
/// writes.
#[derive(Clone, Debug, Deserialize)]
pub struct Others {
    /// Their shapes, which must equal ours.
    pub sweep: OtherSweep,
    /// How they were measured.
    #[serde(default)]
    pub about: OtherAbout,
    /// The measurements.
    pub points: Vec<Point>,
}

/// An `OtherSweep` is the part of a [`Sweep`] that must agree for two to be comparable.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct OtherSweep {
    head_dim: usize,
    batch: usize,
    heads: usize,
    causal: bool,
}

impl fmt::Display for OtherSweep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { head_dim, batch, heads, causal } = self;
        let direction = if *causal { "causal" } else { "bidirectional" };
        write!(f, "{batch} sequences of {heads} heads of {head_dim}, {direction}")
    }
}

/// An `OtherAbout` is what another program says of how it measured.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct OtherAbout {
    /// The type of the numbers, such as `f32`, which it is in older files that do not say.
    #[serde(default)]
    dtype: Option<String>,
}

impl Others {
    /// The type of the numbers that were measured.
    pub fn dtype(&self) -> &str {
        self.about.dtype.as_deref().unwrap_or("f32")
    }

    /// Returns the milliseconds of PyTorch's exact causal attention with `heads` sequences times
    /// heads, if they are among the measurements.
    pub fn sdpa(&self, heads: usize, head_dim: usize, tokens: usize, backward: bool) -> Option<f64> {
        let s = &self.sweep;
        if (s.batch * s.heads, s.head_dim, s.causal) != (heads, head_dim, true) {
            return None;
        }
        let wanted = (Implementation::TorchSdpa, tokens, backward);
        self.points.iter().find(|p| (p.implementation, p.tokens, p.backward) == wanted).map(|p| p.timing.median_ms)
    }
}

/// Counts the FLOP of attention over all heads, without exponentials. FAVOR+ takes `8MD + C(M + D)`
/// for each token and head forward and `26MD + C(4M + 3D)` with the backward pass, which computes
/// features again; `C` is 32, or 0 if attention is not causal. Softmax takes `4D` and `14D` for
/// each pair of a query and a key that it sees.
pub fn flop(sweep: &Sweep, tokens: usize, features: Option<usize>, backward: bool) -> f64 {
    let (t, d) = (tokens as f64, sweep.head_dim as f64);
    let rows = (sweep.batch * sweep.heads) as f64 * t;
    let triangle = if sweep.causal { CHUNK } else { 0.0 };
    match features {
        Some(m) => {
            let m = m as f64;
            let [sums, of_features, of_values] = if backward { [26.0, 4.0, 3.0] } else { [8.0, 1.0, 1.0] };
            rows * (sums * m * d + triangle * (of_features * m + of_values * d))
        }
        None => {
            let seen = if sweep.causal { (t + 1.0) / 2.0 } else { t };
            rows * seen * d * if backward { 14.0 } else { 4.0 }
        }
    }
}

/// Counts the FLOP of a window of softmax as [`flop`] counts those of softmax. Those of gates are
/// not counted.
fn flop_of_window(sweep: &Sweep, tokens: usize, window: usize, backward: bool) -> f64 {
    let (t, w) = (tokens as f64, window.min(tokens) as f64);
    // The first queries see fewer keys than the window has.
    let pairs = t * w - w * (w - 1.0) / 2.0;
    (sweep.batch * sweep.heads) as f64 * pairs * sweep.head_dim as f64 * if backward { 14.0 } else { 4.0 }
}

/// Returns the number of tokens at which FAVOR+ and softmax cost the same number of FLOP.
fn crossover_by_flop(sweep: &Sweep, features: usize, backward: bool) -> f64 {
    // FAVOR+ is linear in the tokens, softmax quadratic.
    let t = 1 << 20;
    let exact = flop(sweep, t, None, backward) / flop(sweep, t, Some(features), backward);
    t as f64 / exact
}

/// Measures every implementation at every size; `progress` is called with what comes next.
///
/// # Errors
/// If a size of `sweep` is 0 or makes tensors that no memory holds, if `others` were measured at
/// other sizes, or if the device cannot compute an implementation.
pub fn run(
    sweep: &Sweep,
    device: &Device,
    threads: usize,
    effort: Effort,
    others: Option<Others>,
    mut progress: impl FnMut(String),
) -> Result<Report> {
    let least = |sizes: &[usize]| sizes.iter().copied().min().unwrap_or(1);
    for (name, size) in [
        ("head_dim", sweep.head_dim),
        ("batch", sweep.batch),
        ("heads", sweep.heads),
        ("tokens", least(&sweep.tokens)),
        ("features", least(&sweep.features)),
    ] {
        if size == 0 {
            bail!(Cause::setting("", name, size, "at least 1"));
        }
    }
    let mut sweep = sweep.clone();
    // Crossovers and the lines of the charts go from each length to the next.
    sweep.tokens.sort_unstable();
    sweep.tokens.dedup();
    sweep.features.sort_unstable();
    sweep.features.dedup();
    let sweep = &sweep;
    let ours = OtherSweep { head_dim: sweep.head_dim, batch: sweep.batch, heads: sweep.heads, causal: sweep.causal };
    if let Some(others) = &others {
        if others.sweep != ours {
            bail!("the other measurements are of {}, these of {ours}; give both the same sizes", others.sweep);
        }
        if others.dtype() != "f32" {
            bail!("the other measurements are of {}, these of f32; measure both in f32", others.dtype());
        }
    }
    if !sweep.causal && (sweep.gates || sweep.windows) {
        bail!("forget gates and windows belong to causal attention");
    }
    let most = |sizes: &[usize]| sizes.iter().copied().max().unwrap_or(1);
    for (name, size) in [("tokens", most(&sweep.tokens)), ("features", most(&sweep.features))] {
        let heads = [("sequences", sweep.batch), ("heads", sweep.heads), ("numbers a head", sweep.head_dim)];
        require_room(&[&[(name, size)], &heads[..]].concat())?;
    }
    progress("the rate of matrix products".into());
    let mut report = Report {
        machine: Machine::with(device),
        threads,
        device: crate::device::describe(device),
        sweep: sweep.clone(),
        matmul_gflops: matmul_rate(effort, device)?,
        points: Vec::new(),
        crossovers: Vec::new(),
    };
    report.points = measure::points(sweep, effort, device, &mut progress)?;
    for mut point in others.into_iter().flat_map(|others| others.points) {
        point.count(sweep);
        report.points.push(point);
    }
    report.crossovers = report.find_crossovers();
    Ok(report)
}

impl Report {
    /// Returns the measurement of an implementation at a size.
    pub fn point(
        &self,
        implementation: Implementation,
        tokens: usize,
        features: Option<usize>,
        backward: bool,
    ) -> Option<&Point> {
        self.points.iter().find(|p| {
            (p.implementation, p.tokens, p.features, p.backward) == (implementation, tokens, features, backward)
        })
    }

    /// Returns the time of the fastest exact attention.
    fn softmax(&self, tokens: usize, backward: bool) -> Option<f64> {
        let exact = self.points.iter().filter(|p| p.implementation.is_softmax());
        let times = exact.filter(|p| p.tokens == tokens && p.backward == backward).map(|p| p.timing.median_ms);
        times.min_by(f64::total_cmp)
    }

    fn find_crossovers(&self) -> Vec<Crossover> {
        let mut found = Vec::new();
        for backward in [false, true] {
            for &features in &self.sweep.features {
                let ratios: Vec<(f64, f64)> = self
                    .sweep
                    .tokens
                    .iter()
                    .filter_map(|&t| {
                        let favor = self.point(Implementation::FavorFused, t, Some(features), backward)?;
                        Some((t as f64, favor.timing.median_ms / self.softmax(t, backward)?))
                    })
                    .collect();
                // Where softmax or this pass was not measured there is nothing to say.
                if ratios.is_empty() {
                    continue;
                }
                found.push(Crossover {
                    features,
                    backward,
                    tokens: crossing(&ratios),
                    ahead_at_once: ratios.iter().all(|r| r.1 <= 1.0),
                    by_flop: crossover_by_flop(&self.sweep, features, backward),
                });
            }
        }
        found
    }

    /// Draws time over length, both axes logarithmic, with the crossovers that FLOP alone would
    /// give.
    pub fn chart(&self, backward: bool) -> Chart {
        const COLORS: [Color; 5] = [Color::Blue, Color::Green, Color::Vermillion, Color::Purple, Color::Sky];
        let s = &self.sweep;
        let mut kinds: Vec<(Implementation, Option<usize>)> = Vec::new();
        for point in &self.points {
            if !kinds.contains(&(point.implementation, point.features)) {
                kinds.push((point.implementation, point.features));
            }
        }
        let series = kinds.into_iter().map(|(implementation, features)| {
            let points = self
                .points
                .iter()
                .filter(|p| p.implementation == implementation && p.features == features && p.backward == backward);
            let points: Vec<(f64, f64)> = points.map(|p| (p.tokens as f64, p.timing.median_ms)).collect();
            let name = match features {
                Some(m) => format!("{}, M={m}", implementation.name()),
                None => implementation.name().to_string(),
            };
            let color = match features.and_then(|m| s.features.iter().position(|&f| f == m)) {
                Some(i) => COLORS[i % COLORS.len()],
                None => Color::Black,
            };
            let style = match implementation {
                Implementation::FavorFused | Implementation::SoftmaxFused => Style::Solid,
                Implementation::FavorComposed | Implementation::SoftmaxCandle => Style::Dotted,
                Implementation::WindowFused | Implementation::WindowGated => Style::Dashed,
                Implementation::FavorGated | Implementation::SoftmaxGated => Style::Dotted,
                Implementation::TorchSdpa | Implementation::TorchFavor => Style::Dashed,
            };
            Series { style, color: Some(color), ..Series::new(name, points) }
        });
        let (low, high) = (s.tokens.iter().min(), s.tokens.iter().max());
        let visible = |c: &&Crossover| {
            c.backward == backward && low.zip(high).is_some_and(|(&l, &h)| (l as f64..=h as f64).contains(&c.by_flop))
        };
        Chart {
            title: format!("{} attention, {}", if s.causal { "Causal" } else { "Bidirectional" }, pass(backward)),
            subtitle: Some(format!(
                "batch {}, {} heads of {}, f32, {}; vertical lines: as many FLOP",
                s.batch,
                s.heads,
                s.head_dim,
                self.machine.at_work(self.threads)
            )),
            x: Axis::new("sequence length T (tokens)", Scale::Log2),
            y: Axis::new("time (ms)", Scale::Log10),
            series: series.filter(|s| !s.points.is_empty()).collect(),
            lines: self
                .crossovers
                .iter()
                .filter(visible)
                .map(|c| Marker { at: At::X(c.by_flop), label: format!("M={}", c.features) })
                .collect(),
        }
    }
}

/// Returns the name of a pass.
pub fn pass(backward: bool) -> &'static str {
    if backward { "forward and backward" } else { "forward" }
}

/// Returns where a ratio over lengths falls to 1 for good, interpolated on logarithms.
fn crossing(ratios: &[(f64, f64)]) -> Option<f64> {
    let last_above = ratios.iter().rposition(|r| r.1 > 1.0)?;
    let ((t0, r0), (t1, r1)) = (ratios[last_above], *ratios.get(last_above + 1)?);
    let share = r0.ln() / (r0.ln() - r1.ln());
    Some((t0.ln() + share * (t1.ln() - t0.ln())).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep() -> Sweep {
        Sweep {
            tokens: vec![16, 32],
            features: vec![8],
            head_dim: 4,
            batch: 1,
            heads: 2,
            causal: true,
            composed: true,
            softmax: true,
            backward: true,
            gates: false,
            windows: false,
        }
    }

    #[test]
    fn lines_cross_where_their_ratio_is_one() {
        // The ratio is 2 at 100 and 1/2 at 400, so on logarithms it is 1 at 200.
        assert!((crossing(&[(50.0, 3.0), (100.0, 2.0), (400.0, 0.5)]).unwrap() - 200.0).abs() < 1e-9);
        assert_eq!(crossing(&[(100.0, 0.5), (200.0, 0.4)]), None);
        assert_eq!(crossing(&[(100.0, 2.0), (200.0, 1.5)]), None);
    }

    #[test]
    fn flop_cross_near_four_times_the_features() {
        let sweep = Sweep { head_dim: 64, ..sweep() };
        for m in [64, 128, 256] {
            let t = crossover_by_flop(&sweep, m, false);
            let expected = 4.0 * m as f64 + CHUNK * (m as f64 + 64.0) / 128.0;
            assert!((t / expected - 1.0).abs() < 1e-3, "{t}, not {expected}");
        }
    }

    #[test]
    fn a_small_sweep_measures_everything_and_draws() -> Result<()> {
        let effort = Effort { time: std::time::Duration::ZERO, runs: 1 };
        let torch = r#"{"sweep": {"head_dim": 4, "batch": 1, "heads": 2, "causal": true}, "points": [{"implementation": "torch-sdpa",
            "tokens": 16, "features": null, "backward": false, "median_ms": 1e-9, "quartiles_ms": [1.0, 3.0], "runs": 5}]}"#;
        let report = run(&sweep(), &Device::Cpu, 1, effort, Some(serde_json::from_str(torch)?), |_| {})?;
        // There are two lengths, two passes, four implementations of ours, and one measurement of
        // PyTorch.
        assert_eq!(report.points.len(), 2 * 2 * 4 + 1);
        assert!(report.points.iter().all(|p| p.gflops > 0.0));
        assert_eq!(report.softmax(16, false), Some(1e-9), "the faster of all softmax counts");
        assert!(report.chart(false).to_svg()?.contains("PyTorch SDPA"));
        let text = serde_json::to_string(&report)?;
        assert_eq!(serde_json::from_str::<Report>(&text)?.points.len(), report.points.len());
        let other = torch.replace("\"heads\": 2", "\"heads\": 3");
        let others = Some(serde_json::from_str(&other)?);
        let refused = run(&sweep(), &Device::Cpu, 1, effort, others, |what| panic!("{what} is measured first"));
        let error = refused.expect_err("other sizes").to_string();
        assert!(error.contains("1 sequences of 3 heads of 4, causal, these of 1 sequences of 2 heads"), "{error}");
        // Lengths are measured and drawn in their order, however they are given.
        let unordered = Sweep { tokens: vec![32, 16, 32], composed: false, backward: false, ..sweep() };
        let ordered = run(&unordered, &Device::Cpu, 1, effort, None, |_| {})?;
        assert_eq!(ordered.sweep.tokens, [16, 32]);
        assert_eq!(ordered.points.len(), 4);
        let less = Sweep { softmax: false, backward: false, composed: false, ..sweep() };
        let report = run(&less, &Device::Cpu, 1, effort, None, |_| {})?;
        assert!(report.points.iter().all(|p| p.implementation == Implementation::FavorFused && !p.backward));
        assert_eq!((report.points.len(), report.softmax(16, false)), (2, None));
        Ok(())
    }

    #[test]
    fn gates_and_windows_stand_beside_and_do_not_count_as_softmax() -> Result<()> {
        let effort = Effort { time: std::time::Duration::ZERO, runs: 1 };
        let more = Sweep { gates: true, windows: true, composed: false, ..sweep() };
        let mut report = run(&more, &Device::Cpu, 1, effort, None, |_| {})?;
        // Softmax, FAVOR and a window, each with gates and without, at two lengths in two passes.
        assert_eq!(report.points.len(), 6 * 2 * 2);
        assert!(report.points.iter().all(|p| p.gflops > 0.0));
        // Whatever else is faster, a crossover is with exact softmax over all keys.
        for point in &mut report.points {
            let is_exact = point.implementation == Implementation::SoftmaxFused;
            point.timing.median_ms = if is_exact { 2.0 } else { 1.0 };
        }
        assert_eq!(report.softmax(32, true), Some(2.0));
        assert!(run(&Sweep { causal: false, ..more }, &Device::Cpu, 1, effort, None, |_| {}).is_err());
        Ok(())
    }

    #[test]
    fn a_window_as_long_as_the_text_costs_what_softmax_does() {
        let (sweep, exact) = (sweep(), |backward| flop(&sweep(), 32, None, backward));
        for backward in [false, true] {
            assert_eq!(flop_of_window(&sweep, 32, 32, backward), exact(backward));
            assert_eq!(flop_of_window(&sweep, 32, 99, backward), exact(backward));
            assert!(flop_of_window(&sweep, 32, 8, backward) < exact(backward) / 2.0);
        }
    }
}
