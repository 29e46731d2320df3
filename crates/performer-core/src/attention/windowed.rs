//! Exact attention to the near, FAVOR to the far, in one normalisation.
//!
//! With a window of `W` tokens, query `i` weighs keys `j > i − W` by `e^{q·k/√D}` and all earlier
//! ones by `φ(q)·φ(k)`:
//! `o_i = (Σ_near e^{s_ij} v_j + Σ_far φ_i·φ_j v_j) / (Σ_near e^{s_ij} + Σ_far φ_i·φ_j)`. The
//! window slides a token at a time: what is near depends on the distance alone, not on chunks of a
//! kernel. Both parts are fused operations that return the logarithms of their denominators; the
//! far one gets queries `W..` over keys `..T − W`, which is causal attention between them.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{
    Attention, Favor, Identity, Inputs, Mask, Memory, Path, Softmax, State, StateRecord, gates, layout::compute,
    state::bytes_of,
};
use crate::{features::Features, ops};

/// Causal attention, exact to the last `window` tokens and by FAVOR to those before: `O(T·(W + F))`
/// time, decoding state of `W` keys and values and FAVOR's sums. Features must be positive.
#[derive(Debug)]
pub struct Windowed {
    window: usize,
    near: Softmax,
    far: Favor,
    /// The far part's identity when it was last asked, and the whole's.
    identity: Option<(Identity, Identity)>,
}

impl Windowed {
    /// Exact to `window` tokens, the query's own among them, and `far` beyond.
    ///
    /// # Errors
    /// If `window` is 0, or the features of `far` are signed: a sum of theirs cannot be joined with
    /// a positive one.
    pub fn new(window: usize, far: Favor) -> Result<Self> {
        if window == 0 {
            bail!("window is 0; it must be at least 1, the query's own token");
        }
        let map = far.map();
        let row = Tensor::zeros((1, 1, map.input_dim()), DType::F32, &Device::Cpu)?;
        if map.exponential_form().is_none() && !matches!(map.features(&row), Ok(Features::Log(_)) | Err(_)) {
            bail!("feature map {map:?} has signed features; a window needs positive ones, such as map=positive");
        }
        let mut windowed = Self { window, near: Softmax::new(), far, identity: None };
        windowed.set_identity()?;
        Ok(windowed)
    }

    /// Never uses the fused CPU kernels.
    pub fn composed(mut self) -> Self {
        self.near = self.near.composed();
        self.far = self.far.composed();
        self
    }

    /// Tokens of exact attention.
    pub fn window(&self) -> usize {
        self.window
    }

    /// What attends to the far.
    pub fn far(&self) -> &Favor {
        &self.far
    }
}

/// Returns tokens `start..start + len` of `(B, H, T, D)`, or of gates `(B, Hkv, T)`.
fn tokens(x: &Tensor, start: usize, len: usize) -> Result<Tensor> {
    ops::narrow(x, 2, start, len)
}

/// Joins two parts of one attention, each given by its quotients and logarithms of denominators.
fn join((near, near_log): (&Tensor, &Tensor), (far, far_log): (&Tensor, &Tensor)) -> Result<Tensor> {
    // Cancels: a constant to the gradient.
    let max = near_log.maximum(far_log)?.detach();
    let weight = |log: &Tensor| ops::exp(&ops::sub(log, &max)?);
    let (near_weight, far_weight) = (weight(near_log)?, weight(far_log)?);
    let weighed = |part: &Tensor, weight: &Tensor| ops::mul(part, &ops::broadcast_as(weight, part.shape())?);
    let sum = ops::add(&weighed(near, &near_weight)?, &weighed(far, &far_weight)?)?;
    ops::div(&sum, &ops::broadcast_as(&ops::add(&near_weight, &far_weight)?, sum.shape())?)
}

/// Adds to the logarithms `(B, H, T − W, 1)` of the far part what was forgotten within the window:
/// the far part knows the gates up to the token that has just left it.
fn forget(logs: Tensor, gates: Option<&Tensor>, window: usize) -> Result<Tensor> {
    let Some(gates) = gates else { return Ok(logs) };
    let heads = logs.dim(1)?;
    ops::add(&logs, &gates::for_queries(&gates::sums_of_window(gates, window)?, heads)?)
}

impl Attention for Windowed {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        let sizes = inputs.sizes_under(mask)?;
        if !mask.is_causal() {
            bail!("attention with a window is causal; give it Mask::causal()");
        }
        if sizes.is_empty() {
            return sizes.zeros(inputs.q);
        }
        let (w, t) = (self.window, sizes.queries);
        let dtype = inputs.q.dtype();
        // Logarithms of denominators need more digits than half types have.
        let wide = compute(dtype);
        let widen = |x| ops::to_dtype(x, wide);
        let [q, k, v] = [widen(inputs.q)?, widen(inputs.k)?, widen(inputs.v)?];
        let gates = inputs.gates.map(widen).transpose()?;
        let inputs = Inputs::new(&q, &k, &v).with_gates_of(gates.as_ref());
        let (near, near_log) = self.near.with_logs(inputs, mask, 0, w)?;
        if t <= w {
            return ops::to_dtype(&near, dtype);
        }
        let far = t - w;
        let (far_q, far_k, far_v) = (tokens(&q, w, far)?, tokens(&k, 0, far)?, tokens(&v, 0, far)?);
        let far_gates = gates.as_ref().map(|gates| tokens(gates, 0, far)).transpose()?;
        let far_inputs = Inputs::new(&far_q, &far_k, &far_v).with_gates_of(far_gates.as_ref());
        let (rows, logs) = self.far.with_logs(far_inputs, &mask.first_keys(far)?, None)?;
        let logs = forget(logs, gates.as_ref(), w)?;
        let joined = join((&tokens(&near, w, far)?, &tokens(&near_log, w, far)?), (&rows, &logs))?;
        ops::to_dtype(&ops::cat(&[&tokens(&near, 0, w)?, &joined], 2)?, dtype)
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let sizes = inputs.sizes()?;
        if sizes.is_empty() {
            return sizes.zeros(inputs.q);
        }
        let past = state.take::<Window>()?;
        match self.attend(inputs, past.as_ref()) {
            Ok((out, window)) => {
                state.set(window);
                Ok(out)
            }
            Err(error) => {
                past.into_iter().for_each(|past| state.set(past));
                Err(error)
            }
        }
    }

    fn identity(&self) -> Result<Identity> {
        match &self.identity {
            Some((of_far, identity)) if *of_far == self.far.identity()? => Ok(identity.clone()),
            _ => Ok(self.far.identity()?.with("window", self.window)),
        }
    }

    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        inputs.sizes_under(mask)?;
        Ok(self.near.path_with_logs(inputs).slower(self.far.path_with_logs(inputs, mask)?))
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        self.far.buffers()
    }

    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        self.far.load_buffers(get)?;
        self.set_identity()
    }

    fn trained_buffers(&self) -> Vec<String> {
        self.far.trained_buffers()
    }

    fn redraw(&mut self, seed: u64) -> Result<()> {
        self.far.redraw(seed)?;
        self.set_identity()
    }
}

impl Windowed {
    /// Keeps the identity that belongs to the far part's.
    fn set_identity(&mut self) -> Result<()> {
        let of_far = self.far.identity()?;
        let identity = of_far.clone().with("window", self.window);
        self.identity = Some((of_far, identity));
        Ok(())
    }

    /// Computes attention from what `past` remembers on, and what is to be remembered. Nothing is
    /// empty.
    fn attend(&self, inputs: Inputs<'_>, past: Option<&Window>) -> Result<(Tensor, Window)> {
        let (dtype, wide) = (inputs.q.dtype(), compute(inputs.q.dtype()));
        let (q, mut k, mut v) = (inputs.q.to_dtype(wide)?, inputs.k.to_dtype(wide)?, inputs.v.to_dtype(wide)?);
        let mut far = State::new();
        let kept = past.map_or(Ok(0), |past| past.keys.dim(2))?;
        let gates = gates::append(past.and_then(|past| past.gates.as_ref()), kept, inputs.gates, &k)?;
        if let Some(Window { keys, values, far: before, .. }) = past {
            far = before.clone();
            k = Tensor::cat(&[keys, &k], 2)?;
            v = Tensor::cat(&[values, &v], 2)?;
        }
        let (w, t, all) = (self.window, q.dim(2)?, k.dim(2)?);
        let near_inputs = Inputs::new(&q, &k, &v).with_gates_of(gates.as_ref());
        let (mut out, near_log) = self.near.with_logs(near_inputs, &Mask::full(), all - t, w)?;
        // Keys that leave the window, one with each of the last queries.
        let leaving = all.saturating_sub(w);
        if leaving > 0 {
            let first = t - leaving;
            let (far_q, far_k, far_v) = (tokens(&q, first, leaving)?, tokens(&k, 0, leaving)?, tokens(&v, 0, leaving)?);
            let far_gates = gates.as_ref().map(|gates| tokens(gates, 0, leaving)).transpose()?;
            let inputs = Inputs::new(&far_q, &far_k, &far_v).with_gates_of(far_gates.as_ref());
            let (rows, logs) = self.far.with_logs(inputs, &Mask::causal(), Some(&mut far))?;
            let logs = forget(logs, gates.as_ref(), w)?;
            let near = (&tokens(&out, first, leaving)?, &tokens(&near_log, first, leaving)?);
            let joined = join(near, (&rows, &logs))?;
            out = if first == 0 { joined } else { Tensor::cat(&[&tokens(&out, 0, first)?, &joined], 2)? };
        }
        let kept = all.min(w);
        let keep = |x: &Tensor| tokens(x, all - kept, kept)?.contiguous();
        let gates = gates.as_ref().map(keep).transpose()?;
        Ok((out.to_dtype(dtype)?, Window { keys: keep(&k)?, values: keep(&v)?, gates, far }))
    }
}

/// `Window` holds the keys and values of the window, and what is remembered of all before them.
#[derive(Clone, Debug)]
struct Window {
    /// The last keys, `(B, Hkv, W, D)`, fewer at the beginning.
    keys: Tensor,
    /// The last values, `(B, Hkv, W, Dv)`.
    values: Tensor,
    /// Their gates, `(B, Hkv, W)`; `None` if no token had one.
    gates: Option<Tensor>,
    far: State,
}

impl Memory for Window {
    fn kind() -> &'static str {
        "a window of keys and values with prefix sums"
    }

    fn bytes(&self) -> usize {
        let gates = self.gates.as_ref().map_or(0, bytes_of);
        bytes_of(&self.keys) + bytes_of(&self.values) + gates + self.far.bytes()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        // Nothing writes to these tensors, and a clone of a state is independent.
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        let record = StateRecord::new().with_tensor("keys", self.keys.clone());
        let record = record.with_tensor("values", self.values.clone()).with_gates(self.gates.as_ref());
        Ok(record.with_nested("far", self.far.record()?))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        let (keys, values) = (record.tensor("keys")?.clone(), record.tensor("values")?.clone());
        let ((b, h, w, _), (vb, vh, vw, _)) = (keys.dims4()?, values.dims4()?);
        if (b, h, w) != (vb, vh, vw) {
            bail!("saved state: keys {:?} and values {:?} do not belong together", keys.dims(), values.dims());
        }
        Ok(Self { gates: record.gates(&keys)?, keys, values, far: State::from_record(&record.nested("far"))? })
    }
}
