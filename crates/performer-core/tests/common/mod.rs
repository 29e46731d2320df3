//! This module holds what the tests share: random inputs, conversion between tensors and plain
//! numbers, and comparison.

// Every test binary compiles this module and uses its own part of it.
#![allow(dead_code, unused_imports)]

use candle_core::{DType, Device, Result, Tensor};
use performer_core::features::FeatureMapKind;
use performer_core::reference::{Inputs, Kernel, Shape};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng as _, SeedableRng as _};

pub(crate) mod emulated;
mod ring;
mod run;

pub(crate) use ring::on_segments;
pub(crate) use run::{Layout, Outcome, all_kernels, conditioned_scale, is_positive};

/// Every feature map: those by name except `Dense`, which is `Optimal` until it is fitted, and the
/// limit map with two exponents.
pub(crate) const ALL_MAPS: [FeatureMapKind; FeatureMapKind::NAMED.len() + 1] = {
    let named = FeatureMapKind::NAMED;
    let mut all = [FeatureMapKind::Limit(2); FeatureMapKind::NAMED.len() + 1];
    all[1] = FeatureMapKind::Limit(4);
    let (mut from, mut to) = (0, 2);
    while from < named.len() {
        if !matches!(named[from], FeatureMapKind::Dense) {
            all[to] = named[from];
            to += 1;
        }
        from += 1;
    }
    all
};

/// `Random` draws random numbers that are the same on every machine and in every run.
pub(crate) struct Random(ChaCha8Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Random(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Draws a number that is uniform in [0, 1).
    pub(crate) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Draws `count` normal numbers of mean 0 and the given standard deviation (Box and Muller).
    /// Not `projection::draw_normal`: the inputs of tests do not depend on what is tested, and with
    /// other inputs two tests meet denominators of signed features near zero, and gradients that
    /// vanish, where rounding is all that is left.
    pub(crate) fn normal(&mut self, count: usize, deviation: f64) -> Vec<f64> {
        (0..count)
            .map(|_| {
                let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
                deviation * radius * (std::f64::consts::TAU * self.unit()).cos()
            })
            .collect()
    }

    /// Draws `count` numbers that are uniform in [low, high).
    pub(crate) fn uniform(&mut self, count: usize, low: f64, high: f64) -> Vec<f64> {
        (0..count).map(|_| low + (high - low) * self.unit()).collect()
    }

    /// Draws `count` choices, each true with the given probability.
    pub(crate) fn mask(&mut self, count: usize, probability: f64) -> Vec<bool> {
        (0..count).map(|_| self.unit() < probability).collect()
    }
}

/// A `Problem` is a random attention problem that owns what [`Inputs`] and [`Kernel`] borrow.
#[derive(Clone)]
pub(crate) struct Problem {
    pub(crate) shape: Shape,
    /// `None` for softmax attention.
    pub(crate) map: Option<FeatureMapKind>,
    pub(crate) projection: Vec<f64>,
    pub(crate) offsets: Vec<f64>,
    pub(crate) q: Vec<f64>,
    pub(crate) k: Vec<f64>,
    pub(crate) v: Vec<f64>,
    pub(crate) grad_output: Vec<f64>,
    pub(crate) causal: bool,
    /// The length of the exact window and the number of its sinks: softmax sees nothing before it,
    /// and features stand before it.
    pub(crate) window: Option<(usize, usize)>,
    pub(crate) key_mask: Option<Vec<bool>>,
    /// Gates `(B, Hkv, Tk)`.
    pub(crate) gates: Option<Vec<f64>>,
}

impl Problem {
    /// Draws unit normal queries, keys, values and output gradients, with `m` rows of unit normal
    /// projection for the maps that take one; bidirectional and unmasked until told otherwise.
    pub(crate) fn random(seed: u64, shape: Shape, map: Option<FeatureMapKind>, m: usize) -> Self {
        let mut random = Random::new(seed);
        let rows = if map.is_some_and(FeatureMapKind::is_random) { m } else { 0 };
        let phases = if map.is_some_and(FeatureMapKind::has_offsets) { m } else { 0 };
        Problem {
            shape,
            map,
            q: random.normal(shape.q_count(), 1.0),
            k: random.normal(shape.k_count(), 1.0),
            v: random.normal(shape.v_count(), 1.0),
            grad_output: random.normal(shape.output_count(), 1.0),
            projection: random.normal(rows * shape.head_dim, 1.0),
            offsets: random.uniform(phases, 0.0, std::f64::consts::TAU),
            causal: false,
            window: None,
            key_mask: None,
            gates: None,
        }
    }

    /// Makes the problem causal, with an exact window of the last `window` tokens and the first
    /// `sinks`.
    pub(crate) fn windowed(mut self, window: usize, sinks: usize) -> Self {
        self.window = Some((window, sinks));
        self.causal = true;
        self
    }

    /// Scales queries and keys by a factor. Short ones keep signed random features (trigonometric,
    /// phase) near their kernel, and so their denominators away from zero.
    pub(crate) fn scale_qk(mut self, factor: f64) -> Self {
        for value in self.q.iter_mut().chain(&mut self.k) {
            *value *= factor;
        }
        self
    }

    /// Makes the problem causal, with gates. In one head they forget at every pace: from the past
    /// of a thousand tokens to everything, e^-40, in one token of 32, so that little is left of
    /// what lies some tens of tokens back. In the next they forget so slowly that what lies a
    /// thousand tokens back still counts; mistakes in distant sums show there alone.
    pub(crate) fn gated(mut self, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let Shape { batch, kv_heads, k_len, .. } = self.shape;
        let exponents = random.uniform(batch * kv_heads * k_len, -7.0, 1.0);
        let gate = |(n, exponent): (usize, f64)| {
            let forgets_all = random.unit() < 1.0 / 32.0;
            match (n / k_len + seed as usize) % 2 {
                0 if forgets_all => -40.0,
                0 => -exponent.exp(),
                _ => -(exponent / 2.0 - 6.0).exp(),
            }
        };
        self.gates = Some(exponents.into_iter().enumerate().map(gate).collect());
        self.causal = true;
        self
    }

    /// The kernel of the problem: that of the window if there is one.
    pub(crate) fn kernel(&self) -> Kernel<'_> {
        self.features().filter(|_| self.window.is_none()).unwrap_or(Kernel::Softmax)
    }

    fn features(&self) -> Option<Kernel<'_>> {
        let (projection, offsets) = (&self.projection[..], &self.offsets[..]);
        self.map.map(|map| Kernel::Features { map, projection, offsets })
    }

    pub(crate) fn inputs(&self) -> Inputs<'_> {
        Inputs {
            shape: self.shape,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            causal: self.causal,
            window: self.window.map(|(window, _)| window),
            before_window: self.features().filter(|_| self.window.is_some()),
            sinks: self.window.map_or(0, |(_, sinks)| sinks),
            key_mask: self.key_mask.as_deref(),
            gates: self.gates.as_deref(),
        }
    }

    /// The shape of the queries, `(B, H, Tq, D)`.
    pub(crate) fn q_dims(&self) -> [usize; 4] {
        let s = self.shape;
        [s.batch, s.heads, s.q_len, s.head_dim]
    }

    /// The shape of the keys, `(B, Hkv, Tk, D)`.
    pub(crate) fn k_dims(&self) -> [usize; 4] {
        let s = self.shape;
        [s.batch, s.kv_heads, s.k_len, s.head_dim]
    }

    /// The shape of the values, `(B, Hkv, Tk, Dv)`.
    pub(crate) fn v_dims(&self) -> [usize; 4] {
        let s = self.shape;
        [s.batch, s.kv_heads, s.k_len, s.value_dim]
    }

    /// The shape of the gates, `(B, Hkv, Tk, 1)`.
    pub(crate) fn gate_dims(&self) -> [usize; 4] {
        let s = self.shape;
        [s.batch, s.kv_heads, s.k_len, 1]
    }

    /// The gates as a tensor `(B, Hkv, Tk)`, f64 or f32.
    pub(crate) fn gate_tensor(&self, dtype: DType) -> Result<Tensor> {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        tensor(self.gates.as_ref().expect("gates"), &self.gate_dims()[..3], wide, &Device::Cpu)
    }

    /// The shape of the output, `(B, H, Tq, Dv)`.
    pub(crate) fn output_dims(&self) -> [usize; 4] {
        let s = self.shape;
        [s.batch, s.heads, s.q_len, s.value_dim]
    }
}

/// Makes a tensor of the numbers, row-major, rounded to `dtype`.
pub(crate) fn tensor(values: &[f64], dims: &[usize], dtype: DType, device: &Device) -> Result<Tensor> {
    Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// Makes a `u8` tensor with 1 for true.
pub(crate) fn mask_tensor(mask: &[bool], dims: &[usize], device: &Device) -> Result<Tensor> {
    let mask: Vec<u8> = mask.iter().map(|&seen| seen.into()).collect();
    Tensor::from_slice(&mask, dims, device)
}

/// Returns the numbers of a tensor of any type, layout and device, row-major.
pub(crate) fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    tensor.to_device(&Device::Cpu)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Returns the largest `|actual − expected| / max|expected|`, and its index.
///
/// The error is relative to the largest element expected, not to each one, because sums round in
/// proportion to their largest terms; where all of `expected` is zero it is absolute. A NaN or an
/// infinity that is not expected counts as an infinite error.
pub(crate) fn max_error(actual: &[f64], expected: &[f64]) -> (f64, usize) {
    assert_eq!(actual.len(), expected.len(), "number of elements");
    let finite = expected.iter().filter(|e| e.is_finite());
    let scale = match finite.fold(0.0, |max: f64, e| max.max(e.abs())) {
        0.0 => 1.0,
        scale => scale,
    };
    let mut worst = (0.0, 0);
    for (index, (&a, &e)) in actual.iter().zip(expected).enumerate() {
        let error = if a == e || (a.is_nan() && e.is_nan()) {
            0.0
        } else if a.is_finite() && e.is_finite() {
            (a - e).abs() / scale
        } else {
            f64::INFINITY
        };
        if error > worst.0 {
            worst = (error, index);
        }
    }
    worst
}

/// Fails, saying where the worst element is, if [`max_error`] is above `tolerance`.
#[track_caller]
pub(crate) fn assert_close(what: &str, dims: &[usize], actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "{what}: number of elements");
    let (error, index) = max_error(actual, expected);
    if error > tolerance {
        // The index in each dimension, last one first.
        let mut rest = index;
        let mut position: Vec<usize> = Vec::new();
        for &size in dims.iter().rev() {
            position.push(rest % size);
            rest /= size;
        }
        position.reverse();
        panic!(
            "{what}: {} at {position:?} of {dims:?} should be {}: error {error:.3e} of the largest \
             element, more than {tolerance:.1e}",
            actual[index], expected[index]
        );
    }
}

/// Applies [`assert_close`] to a tensor and the numbers it should hold.
#[track_caller]
pub(crate) fn assert_tensor_close(what: &str, actual: &Tensor, expected: &[f64], tolerance: f64) {
    let numbers = match values(actual) {
        Ok(numbers) => numbers,
        Err(error) => panic!("{what}: cannot be read: {error}"),
    };
    assert_close(what, actual.dims(), &numbers, expected, tolerance);
}
