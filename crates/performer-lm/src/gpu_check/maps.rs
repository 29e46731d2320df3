//! This module checks FAVOR over maps whose keys have rows and weights of their own, which are
//! fitted to a model or trained: outputs and gradients against Candle's own operations in f64 on
//! the CPU, and decoding against one pass on the same device.

use anyhow::{Context, Result};
use candle_core::{DType, Device, Tensor, Var};
use performer_core::{Attention, Favor, Inputs, Mask, State, Windowed, features::Fitted};

use super::{Check, Extent, Item, Random, error_of, numbers, relative_error, tolerance};

/// A `Case` is one problem.
#[derive(Clone, Copy, Debug)]
struct Case {
    dtype: DType,
    /// Whether the map's parameters get gradients.
    trained: bool,
    /// Whether keys have a metric of their own.
    metric: bool,
    /// Whether each key head has parameters of its own.
    by_head: bool,
    gated: bool,
    /// The last keys to which attention is exact.
    window: Option<usize>,
    features: usize,
    heads: usize,
    tokens: usize,
}

/// The batch, the key heads and the head dimension of all cases.
const BATCH: usize = 2;
const KEY_HEADS: usize = 2;
const DIM: usize = 64;

fn cases(extent: Extent) -> Vec<Case> {
    let base = Case {
        dtype: DType::F32,
        trained: false,
        metric: false,
        by_head: true,
        gated: false,
        window: None,
        features: 128,
        heads: 2,
        tokens: 70,
    };
    let mut cases = vec![
        Case { metric: true, ..base },
        Case { trained: true, heads: 4, ..base },
        Case { trained: true, gated: true, window: Some(20), ..base },
        Case { trained: true, gated: true, dtype: DType::BF16, ..base },
    ];
    if extent == Extent::Full {
        cases.extend([
            Case { by_head: false, metric: true, gated: true, tokens: 1, ..base },
            Case { by_head: false, trained: true, heads: 4, tokens: 500, ..base },
            Case { trained: true, features: 256, heads: 4, ..base },
            Case { metric: true, window: Some(33), tokens: 150, ..base },
            Case { metric: true, dtype: DType::BF16, tokens: 150, ..base },
            Case { trained: true, dtype: DType::F16, ..base },
        ]);
    }
    cases
}

impl Case {
    fn name(&self) -> String {
        let dtype = self.dtype.as_str();
        let kind = if self.trained { "trained" } else { "fitted" };
        let flags = [(self.metric, " with a metric"), (self.by_head, " by head"), (self.gated, " gated")];
        let mut flags: String = flags.into_iter().filter(|(has, _)| *has).map(|(_, flag)| flag).collect();
        if let Some(window) = self.window {
            flags += &format!(" window of {window}");
        }
        let Self { features, heads, tokens, .. } = self;
        format!("favor {kind} M={features} {dtype}{flags}, {BATCH}x{heads}/{KEY_HEADS} heads of {DIM}, {tokens} tokens")
    }
}

/// Returns an item for each case.
pub(super) fn items(extent: Extent) -> Vec<Item> {
    let item = |(i, case): (usize, Case)| Item::checks(case.name(), move |device| check(case, i as u64, device));
    cases(extent).into_iter().enumerate().map(item).collect()
}

/// Makes all comparisons for a case.
fn check(case: Case, seed: u64, device: &Device) -> Result<Vec<Check>> {
    let numbers = Numbers::new(case, seed)?;
    let (name, tolerance) = (case.name(), tolerance(case.dtype));
    let mut checks = Vec::new();
    match numbers.against_composed(device) {
        Ok(errors) => {
            for (part, error) in errors {
                // A gate's gradient is a sum in which almost all cancels, so roundings of half
                // types show more in it than elsewhere.
                let tolerance = if part == "gates" && case.dtype != DType::F32 { 2.0 * tolerance } else { tolerance };
                checks.push(Check::of(format!("{name}: {part}"), Ok(error), tolerance));
            }
        }
        Err(error) => checks.push(Check::of(name.clone(), Err(error), tolerance)),
    }
    if case.tokens > 1 {
        checks.push(Check::of(format!("{name}: decoding against one pass"), numbers.decoding(device), tolerance));
    }
    let path = numbers.path(device)?;
    Ok(checks.into_iter().map(|check| check.by(&path)).collect())
}

/// `Numbers` are the numbers of a case, which every type and device gets alike.
struct Numbers {
    case: Case,
    /// By name and shape: first what attention takes, then the parameters of the map.
    all: Vec<(&'static str, Vec<usize>, Vec<f64>)>,
    gradient: Vec<f64>,
}

impl Numbers {
    fn new(case: Case, seed: u64) -> Result<Self> {
        let Case { dtype, features, heads, tokens, .. } = case;
        let mut random = Random::new(seed);
        let mut all = Vec::new();
        for (name, heads) in [("q", heads), ("k", KEY_HEADS), ("v", KEY_HEADS)] {
            let shape = vec![BATCH, heads, tokens, DIM];
            all.push((name, shape.clone(), random.normal(shape.iter().product(), 1.0, dtype)?));
        }
        if case.gated {
            let gates = (0..BATCH * KEY_HEADS * tokens).map(|_| -(6.0 * random.unit() - 5.0).exp());
            all.push(("gates", vec![BATCH, KEY_HEADS, tokens], gates.map(|gate| f64::from(gate as f32)).collect()));
        }
        let tables = if case.by_head { KEY_HEADS } else { 1 };
        for (name, shape, deviation) in [
            ("queries", vec![tables, features, DIM], 1.0),
            ("keys", vec![tables, features, DIM], 1.0),
            ("log_weights", vec![tables, features], 0.5),
        ] {
            all.push((name, shape.clone(), random.normal(shape.iter().product(), deviation, DType::F32)?));
        }
        if case.metric {
            let shape = vec![tables, DIM, DIM];
            all.push(("key_metric", shape.clone(), random.normal(shape.iter().product(), 0.1, DType::F32)?));
        }
        let gradient = random.normal(BATCH * heads * tokens * DIM, 1.0, dtype)?;
        Ok(Self { case, all, gradient })
    }

    /// The type of a tensor: gates and parameters are not in half types.
    fn dtype(name: &str, dtype: DType) -> DType {
        if ["q", "k", "v"].contains(&name) || dtype == DType::F64 { dtype } else { DType::F32 }
    }

    fn vars(&self, device: &Device, dtype: DType) -> Result<Vec<(&'static str, Var)>> {
        let var = |(name, shape, numbers): &(&'static str, Vec<usize>, Vec<f64>)| {
            let tensor = Tensor::from_slice(numbers, shape.as_slice(), &Device::Cpu)?;
            Ok((*name, Var::from_tensor(&tensor.to_dtype(Self::dtype(name, dtype))?.to_device(device)?)?))
        };
        self.all.iter().map(var).collect()
    }

    /// The attention over the map of these parameters, by its kernels or `composed`.
    fn attention(&self, vars: &[(&'static str, Var)], composed: bool) -> Result<Box<dyn Attention>> {
        let get = |name: &str| {
            let (_, var) = vars.iter().find(|(of, _)| *of == name)?;
            Some(if self.case.trained { var.as_tensor().clone() } else { var.detach() })
        };
        let favor = Favor::with_map(Box::new(Fitted::from_tensors(&get)?))?;
        let favor = if composed { favor.composed() } else { favor };
        Ok(match self.case.window {
            None => Box::new(favor),
            Some(window) if composed => Box::new(Windowed::new(window, favor)?.composed()),
            Some(window) => Box::new(Windowed::new(window, favor)?),
        })
    }

    /// The output and the gradients of all variables that have one.
    fn outcome(&self, device: &Device, dtype: DType, composed: bool) -> Result<Vec<(&'static str, Vec<f64>)>> {
        let vars = self.vars(device, dtype)?;
        let attention = self.attention(&vars, composed)?;
        let inputs = inputs(&vars)?;
        let out = attention.forward(inputs, &Mask::causal())?;
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let gradient =
            Tensor::from_slice(&self.gradient, out.dims(), &Device::Cpu)?.to_dtype(wide)?.to_device(device)?;
        let gradients = (out.to_dtype(wide)? * gradient)?.sum_all()?.backward()?;
        let mut outcome = vec![("output", numbers(&out)?)];
        for (name, var) in &vars {
            if self.case.trained || ["q", "k", "v", "gates"].contains(name) {
                let gradient = gradients.get(var).with_context(|| format!("{name} has no gradient"))?;
                outcome.push((name, numbers(gradient)?));
            }
        }
        Ok(outcome)
    }

    /// What computes the attention.
    fn path(&self, device: &Device) -> Result<String> {
        let vars = self.vars(device, self.case.dtype)?;
        Ok(self.attention(&vars, false)?.path(inputs(&vars)?, &Mask::causal())?.to_string())
    }

    fn against_composed(&self, device: &Device) -> Result<Vec<(&'static str, f64)>> {
        let got = self.outcome(device, self.case.dtype, false)?;
        let want = self.outcome(&Device::Cpu, DType::F64, true)?;
        Ok(got.iter().zip(&want).map(|((name, got), (_, want))| (*name, error_of(got, want))).collect())
    }

    /// Compares a prefill and single tokens with one pass.
    fn decoding(&self, device: &Device) -> Result<f64> {
        let vars = self.vars(device, self.case.dtype)?;
        let attention = self.attention(&vars, false)?;
        let all = inputs(&vars)?;
        let whole = numbers(&attention.forward(all, &Mask::causal())?)?;
        let tokens = self.case.tokens;
        let prefill = tokens - 4;
        let mut state = State::new();
        let mut parts = Vec::new();
        for (start, count) in [(0, prefill)].into_iter().chain((prefill..tokens).map(|token| (token, 1))) {
            let part = |t: &Tensor| t.narrow(2, start, count);
            let (q, k, v) = (part(all.q)?, part(all.k)?, part(all.v)?);
            let gates = all.gates.map(part).transpose()?;
            let mut inputs = Inputs::new(&q, &k, &v);
            inputs.gates = gates.as_ref();
            parts.push(attention.extend(inputs, &mut state)?);
        }
        Ok(relative_error(&numbers(&Tensor::cat(&parts, 2)?)?, &whole))
    }
}

/// The inputs of attention among variables.
fn inputs<'a>(vars: &'a [(&'static str, Var)]) -> Result<Inputs<'a>> {
    let get = |name: &str| vars.iter().find(|(of, _)| *of == name).map(|(_, var)| var.as_tensor());
    let need = |name: &str| get(name).with_context(|| format!("{name} is missing"));
    let mut inputs = Inputs::new(need("q")?, need("k")?, need("v")?);
    inputs.gates = get("gates");
    Ok(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_cases_pass_on_the_cpu() -> Result<()> {
        for (i, case) in cases(Extent::Full).into_iter().enumerate() {
            let checks = check(case, i as u64, &Device::Cpu)?;
            let failed: Vec<&Check> = checks.iter().filter(|check| !check.passed).collect();
            assert!(failed.is_empty(), "{failed:#?}");
        }
        Ok(())
    }
}
