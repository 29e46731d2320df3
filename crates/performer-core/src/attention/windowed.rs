//! Exact attention to the near, FAVOR to the far, in one normalisation.
//!
//! With a window of `W` tokens, query `i` weighs keys `j > i − W` by `e^{q·k/√D}` and all earlier
//! ones by `φ(q)·φ(k)`:
//! `o_i = (Σ_near e^{s_ij} v_j + Σ_far φ_i·φ_j v_j) / (Σ_near e^{s_ij} + Σ_far φ_i·φ_j)`. The
//! window slides a token at a time: what is near depends on the distance alone, not on chunks of a
//! kernel. Each part, near and far, returns its quotients and the logarithms of its denominators,
//! from which they are joined. The far part gets queries `W..` over keys `..T − W`: the `t`-th of
//! these queries sees the first `t` of these keys, which is causal attention. `N` sinks, the first
//! tokens, are near to every query and so never among the far keys: then the far part gets queries
//! `W + N..` over keys `N..T − W`.

use candle_core::{DType, Device, Result, Tensor, bail};

use super::{
    Attention, Favor, Identity, Inputs, Mask, Memory, Path, Segment, Softmax, State, StateRecord, Tensors,
    exact::{Exact, check_sinks, check_window},
    gates,
    quotient::join,
};
use crate::{features::Features, ops};

/// Causal attention, exact to the last `window` tokens and by FAVOR to those before, in `O(T·(W +
/// F))` time where the exact part is fused (see [`Softmax`]), else in `O(T²)`. The decoding state
/// holds the keys and values of `W` tokens and of the sinks, and FAVOR's sums. The feature map must
/// return [`Features::Log`], which `relu` does not.
#[derive(Debug)]
pub struct Windowed {
    window: usize,
    sinks: usize,
    near: Softmax,
    far: Favor,
    /// The identities of the far part and of the whole when this was last built, loaded or redrawn;
    /// the second is computed again where the first has changed. `None` only while it is built.
    identity: Option<(Identity, Identity)>,
}

impl Windowed {
    /// Exact to `window` tokens, the query's own among them, and `far` beyond.
    ///
    /// # Errors
    /// If `window` is 0 or above `usize::MAX / 256`, or the map of `far` does not return logarithms
    /// of its features, without which its sums cannot be joined with the window's. Whether the map
    /// estimates softmax is not checked: the sums of `elu`, `exp` and `hedgehog` are joined too.
    pub fn new(window: usize, far: Favor) -> Result<Self> {
        check_window(window)?;
        let map = far.map();
        let row = Tensor::zeros((map.heads(), 1, map.input_dim()), DType::F32, &Device::Cpu)?;
        // A map whose constants are on a GPU cannot be asked with a row on the CPU. Features of the
        // wrong kind are then found out by the first call, which needs their logarithms.
        if map.exponential_form().is_none() && !matches!(map.features(&row), Ok(Features::Log(_)) | Err(_)) {
            bail!(
                "the feature map {} does not return logarithms of its features, which a window needs, to be joined \
                 with softmax in one normalisation; choose one that does, such as map=positive",
                map.name()
            );
        }
        let mut windowed = Self { window, sinks: 0, near: Softmax::new(), far, identity: None };
        windowed.set_identity()?;
        Ok(windowed)
    }

    /// Makes attention to the first `sinks` tokens exact too, however far they are; see
    /// [`Softmax::with_sinks`].
    ///
    /// # Errors
    /// If there are more sinks than any text has tokens, or the features cannot be read.
    pub fn with_sinks(mut self, sinks: usize) -> Result<Self> {
        check_sinks(sinks)?;
        self.sinks = sinks;
        self.set_identity()?;
        Ok(self)
    }

    /// Computes both parts with Candle's own operations, on every device.
    pub fn composed(mut self) -> Self {
        self.near = self.near.composed();
        self.far = self.far.composed();
        self
    }
}

/// Returns tokens `start..start + len` of `(B, H, T, D)`, or of gates `(B, Hkv, T)`.
fn tokens(x: &Tensor, start: usize, len: usize) -> Result<Tensor> {
    ops::narrow(x, 2, start, len)
}

fn check_causal(mask: &Mask) -> Result<()> {
    if !mask.is_causal() {
        bail!("attention with a window is causal; give it Mask::causal()");
    }
    Ok(())
}

/// The queries from `query` on, and the keys, values and gates from `key` on: `count` of each.
fn part(of: Inputs<'_>, query: usize, key: usize, count: usize) -> Result<Tensors> {
    let gates = of.gates.map(|gates| tokens(gates, key, count)).transpose()?;
    Ok(Tensors { q: tokens(of.q, query, count)?, k: tokens(of.k, key, count)?, v: tokens(of.v, key, count)?, gates })
}

/// Adds to the logarithms `(B, H, T − W, 1)` of the far part's denominators the sums of the gates
/// within each query's window: the far part only has the gates up to the last token before it. The
/// far part begins with key `first`.
fn forget(logs: Tensor, gates: Option<&Tensor>, first: usize, window: usize) -> Result<Tensor> {
    let Some(gates) = gates else { return Ok(logs) };
    let gates = tokens(gates, first, gates.dim(2)? - first)?;
    let heads = logs.dim(1)?;
    ops::add(&logs, &gates::for_queries(&gates::sums_of_window(&gates, window)?, heads)?)
}

impl Attention for Windowed {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        let sizes = inputs.sizes_under(mask)?;
        check_causal(mask)?;
        if sizes.is_empty() {
            return sizes.zeros(inputs.q);
        }
        let (w, n, t) = (self.window, self.sinks, sizes.queries);
        let dtype = inputs.q.dtype();
        let gates = gates::moved_to_visible(inputs, mask)?;
        let wide = inputs.with_gates_of(gates.as_ref()).widened()?;
        let (near, near_log) = self.near.with_logs(wide.inputs(), mask, 0, (w, n))?;
        if t <= w + n {
            return ops::to_dtype(&near, dtype);
        }
        let far = t - w - n;
        let of_far = part(wide.inputs(), w + n, n, far)?;
        let (rows, logs) = self.far.with_logs(of_far.inputs(), &mask.of_keys(n, far)?, None)?;
        let logs = forget(logs, wide.gates.as_ref(), n, w)?;
        let joined = join((&tokens(&near, w + n, far)?, &tokens(&near_log, w + n, far)?), (&rows, &logs))?;
        ops::to_dtype(&ops::cat(&[&tokens(&near, 0, w + n)?, &joined], 2)?, dtype)
    }

    fn forward_segment(&self, inputs: Inputs<'_>, segment: &Segment) -> Result<Tensor> {
        let sizes = inputs.sizes_under(&Mask::causal())?;
        if self.sinks > 0 {
            bail!("attention with {} sinks cannot be computed in segments; leave the sinks out", self.sinks);
        }
        // Every segment has the same number of sequences, so none waits for what another would
        // send.
        if sizes.batch == 0 {
            return sizes.zeros(inputs.q);
        }
        let (w, t, dtype) = (self.window, sizes.queries, inputs.q.dtype());
        let wide = inputs.widened()?;
        let (own, q) = (wide.inputs(), &wide.q);
        let seen = Exact::in_segment(own, segment, w)?;
        let all = seen.len()?;
        let near_inputs = Inputs::new(q, &seen.keys, &seen.values).with_gates_of(seen.gates.as_ref());
        let (near, near_log) = self.near.with_logs(near_inputs, &Mask::full(), all - t, (w, 0))?;
        // Far keys lie W tokens before their queries: those of a segment begin in the one before.
        let (far, first) = (all.saturating_sub(w), w.saturating_sub(all - t));
        let has_far = |segment: usize| (segment + 1) * t > w;
        if far == 0 {
            self.far.no_sums(own)?.before(segment, has_far)?;
            return ops::to_dtype(&near, dtype);
        }
        let of_far = part(near_inputs, first, 0, far)?;
        let (rows, logs) = match self.far.sums_of_segment(of_far.inputs())?.before(segment, has_far)? {
            Some(before) => self.far.after_with_logs(of_far.inputs(), &before)?,
            None => self.far.with_logs(of_far.inputs(), &Mask::causal(), None)?,
        };
        let logs = forget(logs, seen.gates.as_ref(), 0, w)?;
        let joined = join((&tokens(&near, first, far)?, &tokens(&near_log, first, far)?), (&rows, &logs))?;
        let out = if first == 0 { joined } else { ops::cat(&[&tokens(&near, 0, first)?, &joined], 2)? };
        ops::to_dtype(&out, dtype)
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let sizes = inputs.sizes()?;
        if sizes.is_empty() {
            return sizes.zeros(inputs.q);
        }
        // The new part by itself, so that an error names a place in it, and not in what is
        // remembered.
        inputs.check_finite()?;
        state.require_memory()?;
        state.advance_with(|past| self.attend(inputs, past))
    }

    fn identity(&self) -> Result<Identity> {
        match &self.identity {
            Some((of_far, identity)) if *of_far == self.far.identity()? => Ok(identity.clone()),
            _ => self.identity_over(self.far.identity()?),
        }
    }

    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        check_causal(mask)?;
        inputs.sizes_under(mask)?;
        let wide = inputs.widened()?;
        Ok(self.near.path_with_logs(wide.inputs()).slower(self.far.path_with_logs(wide.inputs(), mask)?))
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
        let identity = self.identity_over(of_far.clone())?;
        self.identity = Some((of_far, identity));
        Ok(())
    }

    /// The identity over that of the far part.
    fn identity_over(&self, of_far: Identity) -> Result<Identity> {
        let identity = of_far.with("window", self.window);
        Ok(if self.sinks > 0 { identity.with("sinks", self.sinks) } else { identity })
    }

    /// Computes attention from what `past` remembers on, and what is to be remembered. Nothing is
    /// empty.
    fn attend(&self, inputs: Inputs<'_>, past: Option<&Window>) -> Result<(Tensor, Window)> {
        let dtype = inputs.q.dtype();
        let wide = inputs.widened()?;
        let q = &wide.q;
        if let Some(past) = past {
            past.exact.require_at_most(self.window + self.sinks)?;
        }
        let exact = Exact::append(past.map(|past| &past.exact), wide.inputs())?;
        let mut far = past.map_or_else(State::new, |past| past.far.clone());
        let gates = exact.gates_with_missing(self.sinks)?;
        let (w, n, t, all) = (self.window, self.sinks, q.dim(2)?, exact.len()?);
        let near_inputs = Inputs::new(q, &exact.keys, &exact.values).with_gates_of(gates.as_ref());
        let (mut out, near_log) = self.near.with_logs(near_inputs, &Mask::full(), all - t, (w, n))?;
        // Keys that leave the window, one with each of the last queries.
        let leaving = all.saturating_sub(w + n);
        if leaving > 0 {
            let first = t - leaving;
            let of_far = part(near_inputs.with_gates_of(exact.gates.as_ref()), first, n, leaving)?;
            let (rows, logs) = self.far.with_logs(of_far.inputs(), &Mask::causal(), Some(&mut far))?;
            let logs = forget(logs, exact.gates.as_ref(), n, w)?;
            let near = (&tokens(&out, first, leaving)?, &tokens(&near_log, first, leaving)?);
            let joined = join(near, (&rows, &logs))?;
            out = if first == 0 { joined } else { Tensor::cat(&[&tokens(&out, 0, first)?, &joined], 2)? };
        }
        Ok((out.to_dtype(dtype)?, Window { exact: exact.keep(n, w)?, far }))
    }
}

/// `Window` holds the keys and values of the window and of the sinks, and what is remembered of all
/// others.
#[derive(Clone, Debug)]
struct Window {
    /// The last `W` tokens and the sinks, fewer at the beginning.
    exact: Exact,
    far: State,
}

impl Memory for Window {
    fn kind() -> &'static str {
        "a window of keys and values with prefix sums"
    }

    fn bytes(&self) -> usize {
        self.exact.bytes() + self.far.bytes()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        // Buffers that are shared are not written to, and a clone of a state is independent.
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        Ok(self.exact.save()?.with_nested("far", self.far.record()?))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        Ok(Self { exact: Exact::load(record)?, far: State::from_record(&record.nested("far"))? })
    }
}
