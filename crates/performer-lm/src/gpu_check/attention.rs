//! This module checks attention against the reference: forward pass, gradients, decoding, causality
//! bit by bit, and large inputs.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use performer_core::{
    Attention, Favor, FavorConfig, FeatureMapKind, Inputs, Mask, Softmax, State, Windowed,
    reference::{self, Kernel, Shape},
};

use super::{Check, Extent, Item, Random, error_of, numbers, relative_error, tolerance, without_warpgroups};

/// A `Case` is one problem. Its numbers of tokens are no multiples of 16, so that the last tokens
/// do not fill what kernels take at a time.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Number of random features; `None` for softmax.
    features: Option<usize>,
    map: FeatureMapKind,
    dtype: DType,
    batch: usize,
    heads: usize,
    kv_heads: usize,
    tokens: usize,
    dim: usize,
    causal: bool,
    masked: bool,
    /// Whether there are forget gates.
    gated: bool,
    /// The last keys to which attention is exact, and the first ones beside them. Softmax sees no
    /// others, and features attend to the others.
    window: Option<(usize, usize)>,
}

impl Case {
    fn name(&self) -> String {
        let attention = match self.features {
            None => "softmax".to_string(),
            Some(m) => format!("favor {} M={m}", self.map),
        };
        let dtype = self.dtype.as_str();
        let Self { batch, heads, kv_heads, tokens, dim, .. } = self;
        let flags = [(self.causal, " causal"), (self.masked, " masked"), (self.gated, " gated")];
        let mut flags: String = flags.into_iter().filter(|(has, _)| *has).map(|(_, flag)| flag).collect();
        if let Some((window, sinks)) = self.window {
            flags += &format!(" window of {window} and {sinks} sinks");
        }
        format!("{attention} {dtype}{flags}, {batch}x{heads}/{kv_heads} heads of {dim}, {tokens} tokens")
    }
}

/// What the cases below differ from.
const BASE: Case = Case {
    features: Some(128),
    map: FeatureMapKind::Positive,
    dtype: DType::F32,
    batch: 1,
    heads: 2,
    kv_heads: 2,
    tokens: 200,
    dim: 64,
    causal: true,
    masked: false,
    gated: false,
    window: None,
};

fn cases(extent: Extent, gpu: bool) -> Vec<Case> {
    let mut all = Vec::new();
    let dtypes = match extent {
        Extent::Quick => &[DType::F32, DType::BF16][..],
        Extent::Full => &[DType::F32, DType::BF16, DType::F16],
    };
    for &dtype in dtypes {
        // Each further shape is another set of kernels to compile, which takes a second or two; f16
        // has the kernels of bf16 except for conversions.
        let few = extent == Extent::Quick || dtype == DType::F16;
        for features in [None, Some(128)] {
            let base = Case { features, dtype, ..BASE };
            all.push(Case { tokens: 70, ..base });
            all.push(Case { tokens: 63, batch: 2, heads: 4, masked: true, ..base });
            all.push(Case { tokens: 90, causal: false, masked: true, ..base });
            // This sequence is so long that GPUs cut a head's sequence into segments, as they do
            // for FAVOR.
            if !few || (gpu && features.is_some()) {
                all.push(Case { tokens: 1100, heads: 1, kv_heads: 1, ..base });
            }
            // With gates and with windows kernels differ.
            let gated = Case { gated: true, ..base };
            all.push(Case { tokens: 70, ..gated });
            all.push(Case { tokens: 63, batch: 2, heads: 4, masked: true, ..gated });
            if features.is_some() && (!few || gpu) {
                all.push(Case { tokens: 1100, heads: 1, kv_heads: 1, ..gated });
            }
            all.push(Case { tokens: 100, heads: 4, window: Some((33, 0)), ..base });
            all.push(Case { tokens: 150, window: Some((20, 5)), masked: true, ..base });
            all.push(Case { tokens: 100, window: Some((40, 3)), ..gated });
            all.push(Case { tokens: 100, window: Some((20, 3)), masked: true, ..gated });
            // Logarithms of denominators have gradients across the borders of segments.
            if features.is_some() && (!few || gpu) {
                all.push(Case { tokens: 1100, heads: 1, kv_heads: 1, window: Some((20, 2)), ..gated });
            }
            if few {
                continue;
            }
            all.push(base);
            all.push(Case { tokens: 1, ..base });
            all.push(Case { tokens: 515, heads: 1, kv_heads: 1, ..base });
            all.push(Case { causal: false, ..base });
            for dim in [16, 40, 128] {
                all.push(Case { dim, tokens: 100, ..base });
            }
            // Several thread blocks share a row's values.
            all.push(Case { dim: 128, tokens: 100, window: Some((20, 2)), ..gated });
        }
        if !few {
            // Rows of heads are no multiple of 16 bytes.
            all.push(Case { features: Some(24), dim: 50, dtype, tokens: 100, ..BASE });
            for features in [24, 256, 512] {
                all.push(Case { features: Some(features), dtype, tokens: 100, ..BASE });
            }
            for map in [FeatureMapKind::Hyperbolic, FeatureMapKind::Relu] {
                for gated in [false, true] {
                    all.push(Case { map, features: Some(32), dtype, tokens: 100, gated, ..BASE });
                }
            }
        }
    }
    all
}

/// Returns an item for each case.
pub(super) fn items(extent: Extent, gpu: bool) -> Vec<Item> {
    let item = |(i, case): (usize, Case)| Item::checks(case.name(), move |device| check(case, i as u64, device));
    cases(extent, gpu).into_iter().enumerate().map(item).collect()
}

/// Returns an item for each case in which FAVOR's forward kernel takes products of warpgroups on
/// Hopper, without these. No other kernel than this one differs.
pub(super) fn items_without_warpgroups(extent: Extent) -> Vec<Item> {
    let base = Case { dtype: DType::BF16, tokens: 70, ..BASE };
    let mut cases = vec![base, Case { tokens: 63, batch: 2, heads: 4, masked: true, ..base }];
    if extent == Extent::Full {
        cases.push(Case { tokens: 1100, heads: 1, kv_heads: 1, ..base });
        cases.push(Case { tokens: 1100, heads: 1, kv_heads: 1, gated: true, ..base });
        cases.push(Case { tokens: 100, features: Some(24), dim: 56, ..base });
    }
    cases.push(Case { gated: true, ..base });
    let item = |(i, case): (usize, Case)| {
        Item::checks(format!("{}, without warpgroups", case.name()), move |device| {
            let mut checks = without_warpgroups(|| check(case, i as u64, device))?;
            checks.iter_mut().for_each(|check| check.what += ", without warpgroups");
            Ok(checks)
        })
    };
    cases.into_iter().enumerate().map(item).collect()
}

/// Makes all comparisons for a case.
fn check(case: Case, seed: u64, device: &Device) -> Result<Vec<Check>> {
    let problem = Problem::new(case, seed, device)?;
    let (name, tolerance) = (case.name(), tolerance(case.dtype));
    let mut checks = Vec::new();
    match problem.against_reference() {
        Ok(errors) => {
            for (part, error) in errors {
                // A gate's gradient is a sum over many tokens in which almost all cancels. Kernels
                // for f16 round a chunk's features, which shows in it: up to 2%.
                let double = part == "gradient of gates" && case.dtype == DType::F16;
                let tolerance = if double { 2.0 * tolerance } else { tolerance };
                checks.push(Check::of(format!("{name}: {part}"), Ok(error), tolerance));
            }
        }
        Err(error) => checks.push(Check::of(name.clone(), Err(error), tolerance)),
    }
    checks.push(Check::of(format!("{name}: q, k 30 times as long"), problem.large_inputs(), tolerance));
    if case.causal && case.tokens > 1 {
        checks.push(Check::of(format!("{name}: bits that the future changes"), problem.leak(), 0.0));
        if !case.masked {
            checks.push(Check::of(format!("{name}: decoding against one pass"), problem.decoding(), tolerance));
            if case.features.is_some() {
                let what = format!("{name}: bits that saving, selecting and joining states changes");
                checks.push(Check::of(what, problem.states(), 0.0));
            }
        }
    }
    let path = problem.path()?;
    Ok(checks.into_iter().map(|check| check.by(&path)).collect())
}

/// The inputs of attention, with gates if there are some.
pub(super) fn inputs<'a>([q, k, v]: [&'a Tensor; 3], gates: Option<&'a Tensor>) -> Inputs<'a> {
    let mut inputs = Inputs::new(q, k, v);
    inputs.gates = gates;
    inputs
}

/// Softmax attention with a window and sinks, or to all keys.
fn softmax(window: Option<(usize, usize)>) -> candle_core::Result<Softmax> {
    match window {
        None => Ok(Softmax::new()),
        Some((window, sinks)) => Softmax::new().with_window(window)?.with_sinks(sinks),
    }
}

/// FAVOR beyond a window of exact attention, or to all keys.
fn beyond(window: Option<(usize, usize)>, far: Favor) -> candle_core::Result<Box<dyn Attention>> {
    Ok(match window {
        None => Box::new(far),
        Some((window, sinks)) => Box::new(Windowed::new(window, far)?.with_sinks(sinks)?),
    })
}

struct Problem<'a> {
    case: Case,
    device: &'a Device,
    attention: Box<dyn Attention>,
    projection: Vec<f64>,
    shape: Shape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    gradient: Vec<f64>,
    keys: Option<Vec<bool>>,
    gates: Option<Vec<f64>>,
}

impl<'a> Problem<'a> {
    fn new(case: Case, seed: u64, device: &'a Device) -> Result<Self> {
        let Case { batch, heads, kv_heads, tokens, dim, dtype, .. } = case;
        let shape = Shape { batch, heads, kv_heads, q_len: tokens, k_len: tokens, head_dim: dim, value_dim: dim };
        let (attention, projection): (Box<dyn Attention>, _) = match case.features {
            None => (Box::new(softmax(case.window)?), Vec::new()),
            Some(features) => {
                let config = FavorConfig::default().with_features(features).with_map(case.map);
                let favor = Favor::new(&config, dim, seed, DType::F32, device)?;
                let rows = favor.buffers().into_iter().find(|(name, _)| name == "projection");
                let (_, rows) = rows.context("the feature map has no projection")?;
                (beyond(case.window, favor)?, numbers(&rows)?)
            }
        };
        let mut random = Random::new(seed);
        // Tokens in the middle, visible ones before and after them, that no mask lets through.
        let padding = tokens / 3..tokens / 2;
        Ok(Self {
            q: random.normal(shape.q_count(), 1.0, dtype)?,
            k: random.normal(shape.k_count(), 1.0, dtype)?,
            v: random.normal(shape.v_count(), 1.0, dtype)?,
            gradient: random.normal(shape.output_count(), 1.0, dtype)?,
            // The first token is visible, so that causal rows see something.
            keys: case.masked.then(|| {
                let is_visible = |i| i % tokens == 0 || (random.unit() < 0.7 && !padding.contains(&(i % tokens)));
                (0..batch * tokens).map(is_visible).collect()
            }),
            // Gates forget at every pace; one in 32 forgets everything, and those of padding are of
            // a size that leaves f32 no digit of anything else.
            gates: case.gated.then(|| {
                let mut gate = |i| match random.unit() {
                    _ if case.masked && padding.contains(&(i % tokens)) => -1e9,
                    unit if unit < 1.0 / 32.0 => -40.0,
                    _ => -(8.0 * random.unit() - 7.0).exp(),
                };
                (0..batch * kv_heads * tokens).map(|i| f64::from(gate(i) as f32)).collect()
            }),
            case,
            device,
            attention,
            projection,
            shape,
        })
    }

    /// Makes a tensor in which the heads of each token lie side by side, as in a layer.
    fn tensor(&self, values: &[f64], heads: usize) -> candle_core::Result<Tensor> {
        let dims = (self.shape.batch, heads, self.shape.q_len, self.shape.head_dim);
        let dense =
            Tensor::from_slice(values, dims, &Device::Cpu)?.to_dtype(self.case.dtype)?.to_device(self.device)?;
        dense.transpose(1, 2)?.contiguous()?.transpose(1, 2)
    }

    fn mask(&self) -> candle_core::Result<Mask> {
        let mask = if self.case.causal { Mask::causal() } else { Mask::full() };
        Ok(match &self.keys {
            None => mask,
            Some(keys) => {
                let keys: Vec<u8> = keys.iter().map(|&k| u8::from(k)).collect();
                mask.with_keys(&Tensor::from_vec(keys, (self.shape.batch, self.shape.k_len), self.device)?)?
            }
        })
    }

    /// Makes a tensor of gates.
    fn gate_tensor(&self, gates: Option<&[f64]>) -> candle_core::Result<Option<Tensor>> {
        let dims = (self.shape.batch, self.case.kv_heads, self.shape.k_len);
        let tensor =
            |gates| Tensor::from_slice(gates, dims, &Device::Cpu)?.to_dtype(DType::F32)?.to_device(self.device);
        gates.map(tensor).transpose()
    }

    fn forward(&self, q: &[f64], k: &[f64], v: &[f64], gates: Option<&[f64]>) -> candle_core::Result<Tensor> {
        let (h, kv) = (self.case.heads, self.case.kv_heads);
        let (q, k, v, gates) = (self.tensor(q, h)?, self.tensor(k, kv)?, self.tensor(v, kv)?, self.gate_tensor(gates)?);
        self.attention.forward(inputs([&q, &k, &v], gates.as_ref()), &self.mask()?)
    }

    /// What computes the attention.
    fn path(&self) -> candle_core::Result<String> {
        let (h, kv) = (self.case.heads, self.case.kv_heads);
        let (q, k, v) = (self.tensor(&self.q, h)?, self.tensor(&self.k, kv)?, self.tensor(&self.v, kv)?);
        let gates = self.gate_tensor(self.gates.as_deref())?;
        Ok(self.attention.path(inputs([&q, &k, &v], gates.as_ref()), &self.mask()?)?.to_string())
    }

    /// Returns the output and the gradients of q, k and v, and of gates if there are some, for
    /// queries and keys `scale` times as long.
    fn outcome(&self, scale: f64) -> Result<Vec<Vec<f64>>> {
        let (h, kv) = (self.case.heads, self.case.kv_heads);
        let var = |values: &[f64], scale: f64, heads| {
            Var::from_tensor(&self.tensor(&values.iter().map(|x| x * scale).collect::<Vec<_>>(), heads)?)
        };
        let (q, k, v) = (var(&self.q, scale, h)?, var(&self.k, scale, kv)?, var(&self.v, 1.0, kv)?);
        let gates = self.gate_tensor(self.gates.as_deref())?.as_ref().map(Var::from_tensor).transpose()?;
        let out = self.attention.forward(inputs([&q, &k, &v], gates.as_deref()), &self.mask()?)?;
        let gradient = self.tensor(&self.gradient, h)?.to_dtype(DType::F32)?;
        let gradients = (out.to_dtype(DType::F32)? * gradient)?.sum_all()?.backward()?;
        let of = |v: &Var| numbers(gradients.get(v).context("an input has no gradient")?).map_err(anyhow::Error::from);
        let mut outcome = vec![numbers(&out)?, of(&q)?, of(&k)?, of(&v)?];
        if let Some(gates) = &gates {
            outcome.push(of(gates)?);
        }
        Ok(outcome)
    }

    /// The outcome by the f64 reference.
    fn reference(&self) -> Vec<Vec<f64>> {
        let features = Kernel::Features { map: self.case.map, projection: &self.projection, offsets: &[] };
        let features = self.case.features.map(|_| features);
        // An exact window stands before features that have one.
        let kernel = features.filter(|_| self.case.window.is_none()).unwrap_or(Kernel::Softmax);
        let inputs = reference::Inputs {
            shape: self.shape,
            q: &self.q,
            k: &self.k,
            v: &self.v,
            window: self.case.window.map(|(window, _)| window),
            before_window: features.filter(|_| self.case.window.is_some()),
            sinks: self.case.window.map_or(0, |(_, sinks)| sinks),
            causal: self.case.causal,
            key_mask: self.keys.as_deref(),
            gates: self.gates.as_deref(),
        };
        let output = reference::attention(kernel, inputs);
        let gradients = reference::attention_backward(kernel, inputs, &self.gradient);
        vec![output, gradients.q, gradients.k, gradients.v, gradients.gates]
    }

    fn against_reference(&self) -> Result<Vec<(&'static str, f64)>> {
        let got = self.outcome(1.0)?;
        let want = self.reference();
        let names = ["output", "gradient of q", "gradient of k", "gradient of v", "gradient of gates"];
        let named = names.into_iter().take(got.len()).enumerate();
        let mut errors: Vec<_> = named.map(|(i, name)| (name, error_of(&got[i], &want[i]))).collect();
        // Where no gradient is wanted, another kernel may compute the output.
        let inference = numbers(&self.forward(&self.q, &self.k, &self.v, self.gates.as_deref())?)?;
        errors.push(("output without gradients", relative_error(&inference, &want[0])));
        Ok(errors)
    }

    /// Returns how far outputs leave the range of the values; fails if anything is not finite.
    fn large_inputs(&self) -> Result<f64> {
        let outcome = self.outcome(30.0)?;
        let long = |x: &[f64]| x.iter().map(|x| 30.0 * x).collect::<Vec<_>>();
        let inference = numbers(&self.forward(&long(&self.q), &long(&self.k), &self.v, self.gates.as_deref())?)?;
        ensure!(outcome.iter().flatten().chain(&inference).all(|x| x.is_finite()), "a number is not finite");
        let signed = matches!(self.case.map, FeatureMapKind::Relu) && self.case.features.is_some();
        let largest = self.v.iter().fold(0.0f64, |m, x| m.max(x.abs()));
        let beyond = outcome[0].iter().fold(0.0f64, |m, x| m.max(x.abs() - largest)) / largest;
        Ok(if signed { 0.0 } else { beyond.max(0.0) })
    }

    /// Returns how many outputs before a token change their bits when the inputs from that token on
    /// change.
    fn leak(&self) -> Result<f64> {
        let (tokens, dim) = (self.case.tokens, self.case.dim);
        let from = tokens / 2;
        let changed = |values: &[f64]| -> Vec<f64> {
            let rows = values.chunks_exact(dim).enumerate();
            rows.flat_map(|(i, row)| row.iter().map(move |x| if i % tokens >= from { 3.0 - 7.0 * x } else { *x }))
                .collect()
        };
        let gates = self.gates.as_ref().map(|gates| {
            let gates = gates.iter().enumerate();
            gates.map(|(i, gate)| if i % tokens >= from { 3.0 * gate - 1.0 } else { *gate }).collect::<Vec<_>>()
        });
        let before = numbers(&self.forward(&self.q, &self.k, &self.v, self.gates.as_deref())?)?;
        let changed = self.forward(&changed(&self.q), &changed(&self.k), &changed(&self.v), gates.as_deref())?;
        let after = numbers(&changed)?;
        let rows = before.chunks_exact(dim).zip(after.chunks_exact(dim)).enumerate();
        let past = rows.filter(|(i, _)| i % tokens < from).flat_map(|(_, (a, b))| a.iter().zip(b));
        Ok(past.filter(|(a, b)| a.to_bits() != b.to_bits()).count() as f64)
    }

    /// Returns how many outputs have other bits if the state before them was saved and loaded, its
    /// rows taken apart and joined again.
    fn states(&self) -> Result<f64> {
        let (h, kv) = (self.case.heads, self.case.kv_heads);
        let (q, k, v) = (self.tensor(&self.q, h)?, self.tensor(&self.k, kv)?, self.tensor(&self.v, kv)?);
        let gates = self.gate_tensor(self.gates.as_deref())?;
        let extend = |start: usize, count: usize, state: &mut State| {
            let part = |t: &Tensor| t.narrow(2, start, count);
            let gates = gates.as_ref().map(part).transpose()?;
            self.attention.extend(inputs([&part(&q)?, &part(&k)?, &part(&v)?], gates.as_ref()), state)
        };
        let seen = self.case.tokens.div_ceil(2);
        let mut state = State::new();
        extend(0, seen, &mut state)?;
        let loaded = State::from_record(&state.record()?)?;
        let rows = (0..self.case.batch).map(|row| loaded.select(&[row])).collect::<candle_core::Result<Vec<_>>>()?;
        let mut joined = State::join(&rows.iter().collect::<Vec<_>>())?;
        let mut differing = 0;
        // One token goes through the kernel of a step, and several through that of a pass.
        for (start, count) in [(seen, 1), (seen + 1, self.case.tokens - seen - 1)] {
            if count > 0 {
                let [here, there] = [&mut state, &mut joined].map(|state| numbers(&extend(start, count, state)?));
                differing += here?.iter().zip(&there?).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
            }
        }
        Ok(differing as f64)
    }

    /// Compares a prefill and single tokens with one pass.
    fn decoding(&self) -> Result<f64> {
        let (h, kv, tokens) = (self.case.heads, self.case.kv_heads, self.case.tokens);
        let (q, k, v) = (self.tensor(&self.q, h)?, self.tensor(&self.k, kv)?, self.tensor(&self.v, kv)?);
        let gates = self.gate_tensor(self.gates.as_deref())?;
        let whole = self.attention.forward(inputs([&q, &k, &v], gates.as_ref()), &Mask::causal())?;
        let whole = numbers(&whole)?;
        let prefill = tokens - tokens.div_ceil(2).min(5);
        let mut state = State::new();
        let mut parts = Vec::new();
        let mut take = |start: usize, count: usize| -> candle_core::Result<()> {
            let part = |t: &Tensor| t.narrow(2, start, count);
            let gates = gates.as_ref().map(part).transpose()?;
            let (q, k, v) = (part(&q)?, part(&k)?, part(&v)?);
            parts.push(self.attention.extend(inputs([&q, &k, &v], gates.as_ref()), &mut state)?);
            Ok(())
        };
        if prefill > 0 {
            take(0, prefill)?;
        }
        for token in prefill..tokens {
            take(token, 1)?;
        }
        Ok(relative_error(&numbers(&Tensor::cat(&parts, 2)?)?, &whole))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[ignore = "minutes without optimisation; gpu-check --quick has the small cases"]
    fn all_cases_pass_on_the_cpu() -> Result<()> {
        let mut checks = Vec::new();
        for (i, case) in cases(Extent::Full, false).into_iter().enumerate() {
            checks.extend(check(case, i as u64, &Device::Cpu)?);
        }
        let failed: Vec<&Check> = checks.iter().filter(|c| !c.passed).collect();
        assert!(failed.is_empty(), "{failed:#?}");
        Ok(())
    }
}
