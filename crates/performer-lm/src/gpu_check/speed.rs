//! This module measures how fast attention is: fused and composed, forward, with the backward pass
//! and decoding, over the length of the sequence.

use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{DType, Device, Tensor, Var};
use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, Softmax, State, Tape};
use serde::{Deserialize, Serialize};

use super::attention::inputs;
use super::{Extent, Item, Line, Part, has_warpgroups, without_warpgroups};
use crate::bench::attention::Others;

/// `Work` says what was timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Work {
    /// The forward pass.
    Forward,
    /// The forward and the backward pass, by a [`Tape`](performer_core::Tape).
    Both,
    /// The forward and the backward pass, by Candle's own, which adds every gradient to zeros.
    Autograd,
    /// One token after a context.
    Decode,
}

/// A `Speed` is one timing of causal attention.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Speed {
    /// `favor` or `softmax`, followed by `composed` if it is made of Candle's operations, by
    /// `gated` if it has forget gates, by `without warpgroups`, or by the window that softmax is
    /// limited to.
    pub attention: String,
    /// What was timed.
    pub work: Work,
    /// Number of tokens of the sequence, or of the context.
    pub tokens: usize,
    /// Number of sequences times heads.
    pub heads: usize,
    /// Head dimension.
    pub head_dim: usize,
    /// Number of random features, for FAVOR.
    pub features: Option<usize>,
    /// Type of the inputs.
    pub dtype: String,
    /// Median, in milliseconds.
    pub milliseconds: f64,
    /// Lower and upper quartile, in milliseconds.
    pub quartiles: (f64, f64),
    /// Picoseconds for each token and head; a decoding step has one token.
    pub picoseconds: f64,
    /// Milliseconds of PyTorch's exact attention at these sizes, if they were given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pytorch_milliseconds: Option<f64>,
    /// The most MiB of the device's memory in use, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
}

const HEAD_DIM: usize = 64;
const FEATURES: usize = 128;

/// Tokens of the window that softmax is timed with: its keys and values are as many numbers as the
/// sums of FAVOR's state, which are `FEATURES · (HEAD_DIM + 1)`. The scales of these sums, one more
/// for each feature, are not counted, so that timings compare with earlier ones.
const WINDOW: usize = 65;

/// The logarithm of what a forget gate keeps of the past at every token: a memory of a thousand
/// tokens, so that no kernel may leave out keys as forgotten at the lengths that are timed.
const GATE: f64 = -1e-3;

/// The most numbers that a composed operation may hold at a time.
const LARGEST: usize = 1 << 28;

/// Bytes of inputs that are used before any is used again: more than second-level caches hold.
const ROUND: usize = 256 << 20;

/// Returns an item for each timing.
pub(super) fn items(device: &Device, extent: Extent) -> Vec<Item> {
    let cpu = device.is_cpu();
    let (heads, lengths, contexts) = match extent {
        Extent::Quick => (2, &[128, 256][..], &[500][..]),
        Extent::Full => (64, &[512, 1024, 2048, 4096, 8192, 16384][..], &[1_000, 16_000, 64_000][..]),
    };
    let bench = move |device: &Device, heads: usize| Bench {
        device: device.clone(),
        dtype: if cpu { DType::F32 } else { DType::BF16 },
        heads,
        round: if cpu { 0 } else { ROUND },
    };
    let mut items = Vec::new();
    // One long sequence comes first, while the device's memory is almost empty.
    // On Metal, attention with gradients is composed, for which a million tokens are too many.
    if extent == Extent::Full && !cpu && !device.is_metal() {
        items.push(Item::new(Part::Timings, "favor, a million tokens", move |device| {
            let free = free_memory(device);
            let long = Bench { round: 0, ..bench(device, 8) };
            let speed = long.pass(Timed::Favor, 1 << 20, Work::Both)?;
            // Memory that was used stays with the program, so the loss of free memory is the most
            // in use.
            let used = free.zip(free_memory(device)).map(|(before, after)| (before.saturating_sub(after) >> 20) as u64);
            Ok(vec![Line::Speed(Speed { memory_mib: used, ..speed })])
        }));
    }
    for work in [Work::Forward, Work::Both, Work::Autograd] {
        for &tokens in lengths {
            for timed in Timed::ALL {
                if timed == Timed::FavorWithoutWarpgroups && (work != Work::Forward || !has_warpgroups(device)) {
                    continue;
                }
                // Gates and windows are beside the others in the two passes that training takes.
                let is_variant = matches!(timed, Timed::FavorGated | Timed::SoftmaxGated | Timed::SoftmaxWindow);
                if is_variant && work == Work::Autograd {
                    continue;
                }
                let of_scores = matches!(timed, Timed::Softmax | Timed::SoftmaxGated | Timed::SoftmaxWindow);
                let largest = match timed {
                    Timed::FavorComposed => heads * tokens * 2 * FEATURES,
                    Timed::SoftmaxComposed => heads * tokens * tokens,
                    // There, all attention but FAVOR's forward pass is composed as well.
                    _ if device.is_metal() && of_scores => heads * tokens * tokens,
                    Timed::FavorGated if device.is_metal() => heads * tokens * 2 * FEATURES,
                    Timed::Favor if device.is_metal() && work != Work::Forward => heads * tokens * 2 * FEATURES,
                    _ => 0,
                };
                // Composed operations have no other backward pass than Candle's.
                let is_composed = matches!(timed, Timed::FavorComposed | Timed::SoftmaxComposed);
                if largest <= LARGEST && (!is_composed || work != Work::Both) {
                    let name = format!("{}, {tokens} tokens, {}", timed.name(), format!("{work:?}").to_lowercase());
                    items.push(Item::new(Part::Timings, name, move |device| {
                        Ok(vec![Line::Speed(bench(device, heads).pass(timed, tokens, work)?)])
                    }));
                }
            }
        }
    }
    for &context in contexts {
        for timed in [Timed::Favor, Timed::Softmax] {
            let name = format!("{}, decoding after {context} tokens", timed.name());
            items.push(Item::new(Part::Timings, name, move |device| {
                Ok(vec![Line::Speed(bench(device, 8.min(heads)).decode(timed, context)?)])
            }));
        }
    }
    items
}

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timed {
    Favor,
    FavorGated,
    FavorWithoutWarpgroups,
    Softmax,
    SoftmaxGated,
    SoftmaxWindow,
    FavorComposed,
    SoftmaxComposed,
}

impl Timed {
    const ALL: [Self; 8] = [
        Self::Favor,
        Self::FavorGated,
        Self::FavorWithoutWarpgroups,
        Self::Softmax,
        Self::SoftmaxGated,
        Self::SoftmaxWindow,
        Self::FavorComposed,
        Self::SoftmaxComposed,
    ];

    fn name(self) -> String {
        match self {
            Self::Favor => "favor".into(),
            Self::FavorGated => "favor gated".into(),
            Self::FavorWithoutWarpgroups => "favor without warpgroups".into(),
            Self::Softmax => "softmax".into(),
            Self::SoftmaxGated => "softmax gated".into(),
            Self::SoftmaxWindow => format!("softmax, window of {WINDOW}"),
            Self::FavorComposed => "favor composed".into(),
            Self::SoftmaxComposed => "softmax composed".into(),
        }
    }

    fn features(self) -> Option<usize> {
        match self {
            Self::Favor | Self::FavorGated | Self::FavorWithoutWarpgroups | Self::FavorComposed => Some(FEATURES),
            Self::Softmax | Self::SoftmaxGated | Self::SoftmaxWindow | Self::SoftmaxComposed => None,
        }
    }

    fn is_gated(self) -> bool {
        matches!(self, Self::FavorGated | Self::SoftmaxGated)
    }

    fn build(self, device: &Device) -> Result<Box<dyn Attention>> {
        let config = FavorConfig::default().with_features(FEATURES);
        let favor = || Favor::new(&config, HEAD_DIM, 1, DType::F32, device);
        Ok(match self {
            Self::Favor | Self::FavorGated | Self::FavorWithoutWarpgroups => Box::new(favor()?),
            Self::FavorComposed => Box::new(favor()?.composed()),
            Self::Softmax | Self::SoftmaxGated => Box::new(Softmax::new()),
            Self::SoftmaxWindow => Box::new(Softmax::new().with_window(WINDOW)?),
            Self::SoftmaxComposed => Box::new(Softmax::new().composed()),
        })
    }
}

struct Bench {
    device: Device,
    dtype: DType,
    heads: usize,
    round: usize,
}

impl Bench {
    fn random(&self, tokens: usize) -> candle_core::Result<Tensor> {
        Tensor::randn(0f32, 1.0, (1, self.heads, tokens, HEAD_DIM), &self.device)?.to_dtype(self.dtype)
    }

    fn pass(&self, timed: Timed, tokens: usize, work: Work) -> Result<Speed> {
        let attention = timed.build(&self.device)?;
        let bytes = 3 * self.heads * tokens * HEAD_DIM * self.dtype.size_in_bytes();
        let sets = (0..(self.round / bytes).clamp(1, 64))
            .map(|_| {
                let var = || Var::from_tensor(&self.random(tokens)?);
                Ok([var()?, var()?, var()?])
            })
            .collect::<candle_core::Result<Vec<_>>>()?;
        let gates = (Tensor::ones((1, self.heads, tokens), DType::F32, &self.device)? * GATE)?;
        let gates = timed.is_gated().then(|| Var::from_tensor(&gates)).transpose()?;
        let mut next = 0;
        let times = time(&self.device, usize::MAX, || {
            let [q, k, v] = &sets[next % sets.len()];
            next += 1;
            // The gradient of the output is ones: a loss of its own would read and write outputs
            // several times more.
            if work == Work::Both {
                let tape = Tape::start();
                return tape
                    .backward(&attention.forward(inputs([q, k, v], gates.as_deref()), &Mask::causal())?)
                    .map(drop);
            }
            if work == Work::Autograd {
                return attention.forward(inputs([q, k, v], gates.as_deref()), &Mask::causal())?.backward().map(drop);
            }
            let [q, k, v] = [q, k, v].map(|x| x.as_detached_tensor());
            let gates = gates.as_ref().map(|gates| gates.as_detached_tensor());
            let forward = || attention.forward(inputs([&q, &k, &v], gates.as_ref()), &Mask::causal()).map(drop);
            if timed == Timed::FavorWithoutWarpgroups { without_warpgroups(forward) } else { forward() }
        })?;
        Ok(self.speed(timed, work, tokens, tokens, times))
    }

    fn decode(&self, timed: Timed, context: usize) -> Result<Speed> {
        let attention = timed.build(&self.device)?;
        let mut state = State::new();
        for start in (0..context).step_by(4096) {
            let count = 4096.min(context - start);
            attention
                .extend(Inputs::new(&self.random(count)?, &self.random(count)?, &self.random(count)?), &mut state)?;
        }
        let (q, k, v) = (self.random(1)?, self.random(1)?, self.random(1)?);
        // Each step makes the context longer by a token, which must not change what is measured.
        let most = context / 10;
        let times = time(&self.device, most, || attention.extend(Inputs::new(&q, &k, &v), &mut state).map(drop))?;
        Ok(self.speed(timed, Work::Decode, context, 1, times))
    }

    fn speed(&self, timed: Timed, work: Work, tokens: usize, per_pass: usize, [low, median, high]: [f64; 3]) -> Speed {
        Speed {
            attention: timed.name(),
            work,
            tokens,
            heads: self.heads,
            head_dim: HEAD_DIM,
            features: timed.features(),
            dtype: self.dtype.as_str().to_string(),
            milliseconds: median * 1e3,
            quartiles: (low * 1e3, high * 1e3),
            picoseconds: median * 1e12 / (per_pass * self.heads) as f64,
            pytorch_milliseconds: None,
            memory_mib: None,
        }
    }
}

impl Speed {
    /// Adds PyTorch's time for the same work and sizes, if there is one of the same type.
    pub(super) fn set_beside(&mut self, others: &Others) {
        let backward = match self.work {
            Work::Forward => false,
            Work::Both | Work::Autograd => true,
            Work::Decode => return,
        };
        if others.dtype() != self.dtype {
            return;
        }
        self.pytorch_milliseconds = others.sdpa(self.heads, self.head_dim, self.tokens, backward);
    }
}

/// Returns the quartiles of the seconds that `work` takes after a warm-up, by the device's own
/// clock if it has one. Short work is repeated between two readings of the clock. It is done about
/// `most` times at most, and at least seven times.
fn time(device: &Device, most: usize, mut work: impl FnMut() -> candle_core::Result<()>) -> Result<[f64; 3]> {
    let mut sample = |repeats: usize| -> Result<f64> {
        let seconds = clock(device, || {
            for _ in 0..repeats {
                work()?;
            }
            Ok(())
        })?;
        Ok(seconds / repeats as f64)
    };
    // The first run compiles kernels.
    sample(1)?;
    let once = sample(1)?;
    let repeats = ((0.005 / once) as usize).min(200).min(most / 5).max(1);
    let samples_wanted = (most / repeats).clamp(5, 30);
    let begun = Instant::now();
    let mut samples = Vec::new();
    while samples.len() < 5 || (samples.len() < samples_wanted && begun.elapsed() < Duration::from_millis(300)) {
        samples.push(sample(repeats)?);
    }
    samples.sort_by(f64::total_cmp);
    Ok([0.25, 0.5, 0.75].map(|share| samples[((samples.len() - 1) as f64 * share).round() as usize]))
}

/// Returns the seconds that `work` takes on the device.
fn clock(device: &Device, work: impl FnOnce() -> candle_core::Result<()>) -> Result<f64> {
    #[cfg(feature = "cuda")]
    if let Ok(device) = device.as_cuda_device() {
        let watch = performer_core::kernels::cuda::Stopwatch::start(device)?;
        work()?;
        return Ok(watch.stop(device)?);
    }
    let start = Instant::now();
    work()?;
    device.synchronize()?;
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(feature = "cuda")]
fn free_memory(device: &Device) -> Option<usize> {
    performer_core::kernels::cuda::free_memory(device.as_cuda_device().ok()?).ok().map(|(free, _)| free)
}

#[cfg(not(feature = "cuda"))]
fn free_memory(_: &Device) -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step that is timed makes the context longer, so it must not be done as often as one likes.
    #[test]
    fn work_is_done_about_as_often_as_allowed() {
        for most in [1, 50, 1000] {
            let mut count = 0;
            time(&Device::Cpu, most, || {
                count += 1;
                Ok(())
            })
            .unwrap();
            assert!(count <= most.max(5) + 2, "{count} of {most}");
        }
    }
}
