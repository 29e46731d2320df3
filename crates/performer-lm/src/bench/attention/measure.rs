//! This module times every implementation at every size.

use anyhow::{Context, Result};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor, Var};
use performer_core::{Attention, Favor, FavorConfig, Inputs, Mask, Softmax, Tape};

use super::{
    super::{Effort, Timing, time, window_of_equal_state},
    Implementation, Point, Sweep,
};
use crate::memory;

/// The largest score matrices, in bytes, that are asked of an implementation that makes them.
const SCORES: usize = 1 << 28;

/// How often every point is measured.
const ROUNDS: usize = 3;

/// Measures every point of a sweep. Other work of the machine comes in bursts of seconds, so rounds
/// are apart in time, and the middle one counts.
pub(super) fn points(
    sweep: &Sweep,
    effort: Effort,
    device: &Device,
    progress: &mut impl FnMut(String),
) -> Result<Vec<Point>> {
    let effort = Effort { time: effort.time / ROUNDS as u32, runs: effort.runs.div_ceil(ROUNDS) };
    let mut rounds = Vec::new();
    for i in 1..=ROUNDS {
        rounds.push(round(sweep, effort, device, &mut |what| progress(format!("{what} ({i} of {ROUNDS})")))?);
    }
    Ok(middle(&rounds))
}

/// Measures every point once.
fn round(sweep: &Sweep, effort: Effort, device: &Device, progress: &mut impl FnMut(String)) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    for &tokens in &sweep.tokens {
        for (implementation, features, attention) in implementations(sweep, tokens, device)? {
            let gated = implementation.is_gated();
            for backward in [false, true].into_iter().filter(|&backward| sweep.backward || !backward) {
                let favor = features.map(|m| format!(" M={m}")).unwrap_or_default();
                progress(format!("{}{favor}, {tokens} tokens", implementation.name()));
                let (timing, memory) = measure(sweep, tokens, (&*attention, gated), backward, effort, device)?;
                let mut point = Point {
                    implementation,
                    tokens,
                    features,
                    backward,
                    timing,
                    gflops: 0.0,
                    extra_bytes: memory.map(|m| m.extra),
                    peak_bytes: memory.map(|m| m.peak),
                };
                point.count(sweep);
                points.push(point);
            }
        }
    }
    Ok(points)
}

/// Returns, for each point, the round with the middle median.
fn middle(rounds: &[Vec<Point>]) -> Vec<Point> {
    let of_one = |i: usize| {
        let mut points: Vec<&Point> = rounds.iter().map(|round| &round[i]).collect();
        points.sort_by(|a, b| a.timing.median_ms.total_cmp(&b.timing.median_ms));
        points[points.len() / 2].clone()
    };
    (0..rounds.first().map_or(0, Vec::len)).map(of_one).collect()
}

type Candidate = (Implementation, Option<usize>, Box<dyn Attention>);

fn implementations(sweep: &Sweep, tokens: usize, device: &Device) -> Result<Vec<Candidate>> {
    let mut all: Vec<Candidate> = Vec::new();
    if sweep.softmax {
        all.push((Implementation::SoftmaxFused, None, Box::new(Softmax::new())));
        if sweep.gates {
            all.push((Implementation::SoftmaxGated, None, Box::new(Softmax::new())));
        }
    }
    let scores = [sweep.batch, sweep.heads, tokens, tokens].into_iter().fold(4, usize::saturating_mul);
    if sweep.softmax && sweep.composed && scores <= SCORES {
        all.push((Implementation::SoftmaxCandle, None, Box::new(CandleSoftmax::new(tokens, sweep.causal, device)?)));
    }
    for &features in &sweep.features {
        let config = FavorConfig::default().with_features(features);
        let favor = || Favor::new(&config, sweep.head_dim, 1, DType::F32, device);
        all.push((Implementation::FavorFused, Some(features), Box::new(favor()?)));
        if sweep.gates {
            all.push((Implementation::FavorGated, Some(features), Box::new(favor()?)));
        }
        if sweep.windows {
            let window = || Softmax::new().with_window(window_of_equal_state(features, sweep.head_dim));
            all.push((Implementation::WindowFused, Some(features), Box::new(window()?)));
            if sweep.gates {
                all.push((Implementation::WindowGated, Some(features), Box::new(window()?)));
            }
        }
        if sweep.composed {
            all.push((Implementation::FavorComposed, Some(features), Box::new(favor()?.composed())));
        }
    }
    Ok(all)
}

/// `Memory` counts bytes in use at once.
#[derive(Clone, Copy)]
struct Memory {
    extra: u64,
    peak: u64,
}

/// Returns gates that forget as those of a new model do: within 4, 16, 64 and 256 tokens, one head
/// after the other.
fn new_gates(sweep: &Sweep, tokens: usize, device: &Device) -> candle_core::Result<Tensor> {
    let of_head: Vec<f32> = (0..sweep.heads).map(|head| -(0.25f32.powi(head as i32 % 4 + 1))).collect();
    let shape = (sweep.batch, sweep.heads, tokens);
    Tensor::from_vec(of_head, (1, sweep.heads, 1), device)?.broadcast_as(shape)?.contiguous()
}

fn measure(
    sweep: &Sweep,
    tokens: usize,
    (attention, gated): (&dyn Attention, bool),
    backward: bool,
    effort: Effort,
    device: &Device,
) -> Result<(Timing, Option<Memory>)> {
    let shape = (sweep.batch, sweep.heads, tokens, sweep.head_dim);
    let random = || Tensor::randn(0f32, 1.0, shape, device);
    let mask = if sweep.causal { Mask::causal() } else { Mask::full() };
    let gates = gated.then(|| new_gates(sweep, tokens, device)).transpose()?;
    if !backward {
        let (q, k, v) = (random()?, random()?, random()?);
        return repeat(effort, device, || attention.forward(inputs(&q, &k, &v, gates.as_ref()), &mask).map(drop));
    }
    let variable = || Var::from_tensor(&random()?);
    let (q, k, v, gradient) = (variable()?, variable()?, variable()?, random()?);
    let gates = gates.map(|gates| Var::from_tensor(&gates)).transpose()?;
    repeat(effort, device, || {
        let tape = Tape::start();
        let out = attention.forward(inputs(&q, &k, &v, gates.as_deref()), &mask)?;
        // Training takes the tape's backward pass where it knows all operations, and Candle's else.
        if tape.unrecorded(&out) == 0 {
            return tape.backward_from(&out, &gradient).map(drop);
        }
        if !device.is_cpu() {
            return (out * &gradient)?.sum_all()?.backward().map(drop);
        }
        out.apply_op1(Handed(gradient.clone()))?.backward().map(drop)
    })
}

fn inputs<'a>(q: &'a Tensor, k: &'a Tensor, v: &'a Tensor, gates: Option<&'a Tensor>) -> Inputs<'a> {
    let inputs = Inputs::new(q, k, v);
    match gates {
        Some(gates) => inputs.with_gates(gates),
        None => inputs,
    }
}

/// Times `work`, and counts its memory once.
fn repeat(
    effort: Effort,
    device: &Device,
    mut work: impl FnMut() -> candle_core::Result<()>,
) -> Result<(Timing, Option<Memory>)> {
    // The first run starts threads and makes all that is made once.
    work().context("attention failed")?;
    let before = memory::live();
    let (result, extra) = memory::extra(&mut work);
    result.context("attention failed")?;
    let memory = extra.filter(|_| device.is_cpu()).map(|extra| Memory { extra, peak: before + extra });
    Ok((time(effort, device, work)?, memory))
}

/// `Handed` gives a fixed gradient to its input, as a loss would, at no cost of its own.
struct Handed(Tensor);

impl CustomOp1 for Handed {
    fn name(&self) -> &'static str {
        "handed-gradient"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// `CandleSoftmax` is softmax attention as one writes it with Candle.
#[derive(Debug)]
struct CandleSoftmax {
    /// The mask that is added to scores: −∞ where a key is not seen. It is made once.
    hidden: Option<Tensor>,
}

impl CandleSoftmax {
    fn new(tokens: usize, causal: bool, device: &Device) -> Result<Self> {
        let hidden = |i| if i % tokens > i / tokens { f32::NEG_INFINITY } else { 0.0 };
        let hidden = || Tensor::from_iter((0..tokens * tokens).map(hidden), device)?.reshape((tokens, tokens));
        Ok(Self { hidden: causal.then(hidden).transpose()? })
    }
}

impl Attention for CandleSoftmax {
    fn forward(&self, inputs: Inputs<'_>, _: &Mask) -> candle_core::Result<Tensor> {
        let Inputs { q, k, v, .. } = inputs;
        let scale = (q.dim(3)? as f64).sqrt().recip();
        let mut scores = (q.contiguous()?.matmul(&k.t()?.contiguous()?)? * scale)?;
        if let Some(hidden) = &self.hidden {
            scores = scores.broadcast_add(hidden)?;
        }
        candle_nn::ops::softmax(&scores, candle_core::D::Minus1)?.matmul(&v.contiguous()?)
    }

    fn advance(&self, _: Inputs<'_>, _: &mut performer_core::State) -> candle_core::Result<Tensor> {
        candle_core::bail!("softmax in Candle's operations is measured in one pass only")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softmax_in_candle_s_operations_is_softmax() -> candle_core::Result<()> {
        let random = || Tensor::randn(0f32, 1.0, (2, 3, 9, 4), &Device::Cpu);
        let (q, k, v) = (random()?, random()?, random()?);
        for mask in [Mask::causal(), Mask::full()] {
            let candle = CandleSoftmax::new(9, mask.is_causal(), &Device::Cpu).expect("it can be made");
            let difference = (candle.forward(Inputs::new(&q, &k, &v), &mask)?
                - Softmax::new().forward(Inputs::new(&q, &k, &v), &mask)?)?;
            assert!(difference.abs()?.max_all()?.to_scalar::<f32>()? < 1e-5, "causal {}", mask.is_causal());
        }
        Ok(())
    }

    #[test]
    fn the_middle_round_of_each_point_counts() {
        let point = |tokens: usize, median_ms: f64| Point {
            implementation: Implementation::FavorFused,
            tokens,
            features: None,
            backward: false,
            timing: Timing { median_ms, quartiles_ms: (median_ms, median_ms), runs: 1 },
            gflops: 0.0,
            extra_bytes: None,
            peak_bytes: None,
        };
        let rounds = [[1.0, 9.0], [50.0, 2.0], [2.0, 3.0]].map(|[a, b]| vec![point(1, a), point(2, b)]);
        let found: Vec<_> = middle(&rounds).iter().map(|p| (p.tokens, p.timing.median_ms)).collect();
        assert_eq!(found, [(1, 2.0), (2, 3.0)]);
    }
}
