//! Exact softmax attention: the baseline, and the truth FAVOR approximates. It is fused on the CPU
//! and on CUDA, and made of differentiable Candle operations elsewhere.

use std::sync::Arc;

use candle_core::{D, Device, Result, Tensor, bail};
use candle_nn::kv_cache::KvCache;

use super::{
    Attention, Identity, Inputs, Mask, Memory, Path, Segment, State, StateRecord,
    exact::{Exact, check_sinks, check_window},
    gates,
    inputs::{Sizes, contiguous_rows},
    layout::Folded,
    quotient::{Rows, values_and_logs, values_and_one},
    state::bytes_of,
};
use crate::kernels::{self, FLOOR, softmax};

/// The least first capacity of a key-value cache, in tokens; a longer prompt sets its own. A cache
/// that is full grows to twice its size, or to what is needed if that is more.
const CACHE_TOKENS: usize = 256;

/// `softmax(q·kᵀ/√D) v` with gradients: `O(T²)` time; memory `O(T)` where it is fused (f32, f16 and
/// bf16, on the CPU and on CUDA up to 128 dimensions), `O(T²)` elsewhere.
///
/// With [`Self::with_window`], causal attention to the last tokens alone, with a state of constant
/// size and, where it is fused, in linear time: what linear attention has to be better than.
#[derive(Clone, Debug, Default)]
pub struct Softmax {
    composed: bool,
    window: Option<usize>,
    sinks: usize,
}

impl Softmax {
    /// Makes attention to every key that the mask shows, by fused kernels where there are any;
    /// [`Self::with_window`] limits it to the last tokens.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets each query see the last `window` tokens only, its own among them: `O(T·W)` time where
    /// it is fused, since pairs of tiles that no window joins are left out, and a decoding state of
    /// `W − 1` keys and values.
    ///
    /// # Errors
    /// If `window` is 0, or above `usize::MAX / 256`.
    pub fn with_window(mut self, window: usize) -> Result<Self> {
        check_window(window)?;
        self.window = Some(window);
        Ok(self)
    }

    /// Lets each query also see the first `sinks` tokens of the sequence that came before it,
    /// however far they are: attention sinks (Xiao et al. 2023,
    /// <https://arxiv.org/abs/2309.17453>), on which trained models lay weight that they have no
    /// other use for. The decoding state has that many more keys and values. Sinks are positions:
    /// one that a mask hides is hidden, and no other token takes its place. Forget gates act on
    /// sinks as on every key.
    ///
    /// # Errors
    /// If there is no window, without which every token is seen anyway, or if there are more sinks
    /// than any text has tokens.
    pub fn with_sinks(mut self, sinks: usize) -> Result<Self> {
        check_sinks(sinks)?;
        if self.window.is_none() && sinks > 0 {
            bail!("sinks are {sinks}, but there is no window; call with_window first, or leave sinks out");
        }
        self.sinks = sinks;
        Ok(self)
    }

    /// Tokens that a query sees, where they are limited, beside [`Self::sinks`].
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Tokens at the beginning that every query sees beside its window.
    pub fn sinks(&self) -> usize {
        self.sinks
    }

    /// Never uses the fused kernels: Candle's own operations compute the same up to rounding, more
    /// slowly, to check the kernels against.
    pub fn composed(mut self) -> Self {
        self.composed = true;
        self
    }

    /// Computes attention to the keys of `mask`; with an offset, query `t` sees keys
    /// `0..=offset + t` of them.
    fn attend(&self, inputs: Inputs<'_>, sizes: Sizes, mask: &Mask, offset: Option<usize>) -> Result<Tensor> {
        if sizes.is_empty() {
            return sizes.zeros(inputs.q);
        }
        match self.kernel(inputs) {
            Ok(Kernel::Cpu) => {
                let visible = mask.visible_flags(sizes.batch)?;
                let seen = softmax::Seen { offset, window: self.window, sinks: self.sinks, visible };
                let gates = inputs.gates.map(gates::for_kernels).transpose()?;
                softmax::softmax(inputs.contiguous_rows()?.each_ref(), gates.as_ref(), seen, false)
            }
            #[cfg(feature = "cuda")]
            Ok(Kernel::Cuda) => {
                let (window, sinks) = (self.window, self.sinks);
                let visible = mask.visible_of(sizes.batch, inputs.q.device())?;
                let seen = kernels::cuda::softmax::Seen { offset, window, sinks, visible };
                let gates = inputs.gates.map(gates::for_kernels).transpose()?;
                kernels::cuda::softmax::softmax(inputs.contiguous_rows()?.each_ref(), gates.as_ref(), seen)
            }
            Err(_) => {
                let folded = Folded::new(inputs, mask)?;
                folded.output(&attend(&folded, offset, self.window, self.sinks)?.0)
            }
        }
    }

    /// Returns the kernel that takes these inputs, or why there is none.
    fn kernel(&self, inputs: Inputs<'_>) -> std::result::Result<Kernel, String> {
        let q = inputs.q;
        if self.composed {
            return Err("it was asked for".into());
        }
        #[cfg(feature = "cuda")]
        if kernels::cuda::softmax::takes(q, inputs.v) {
            return Ok(Kernel::Cuda);
        }
        if kernels::takes(q) {
            return Ok(Kernel::Cpu);
        }
        Err(match q.device() {
            Device::Cpu => format!("the CPU's kernels take f32, f16 and bf16, not {:?}", q.dtype()),
            Device::Cuda(_) => format!(
                "the CUDA kernels take f32, f16 and bf16 with heads up to 128 where the card has shared memory for them, \
                 not {:?} with heads of {} and {}",
                q.dtype(),
                q.dims()[3],
                inputs.v.dims()[3]
            ),
            Device::Metal(_) => "exact softmax has no kernel for Metal here".into(),
        })
    }

    /// Computes attention of query `t` to the last `window` of the keys `0..=offset + t` and the
    /// first `sinks`, and the logarithms of its denominators: `(B, H, Tq, Dv)` and `(B, H, Tq, 1)`.
    /// Nothing is empty.
    pub(super) fn with_logs(
        &self,
        inputs: Inputs<'_>,
        mask: &Mask,
        offset: usize,
        (window, sinks): (usize, usize),
    ) -> Result<(Tensor, Tensor)> {
        let (q, offset, window) = (inputs.q, Some(offset), Some(window));
        match self.kernel(inputs) {
            Ok(Kernel::Cpu) => {
                let visible = mask.visible_flags(q.dim(0)?)?;
                let seen = softmax::Seen { offset, window, sinks, visible };
                let gates = inputs.gates.map(gates::for_kernels).transpose()?;
                let rows = softmax::softmax(inputs.contiguous_rows()?.each_ref(), gates.as_ref(), seen, true)?;
                values_and_logs(&rows, inputs.v.dim(3)?)
            }
            #[cfg(feature = "cuda")]
            Ok(Kernel::Cuda) if q.dtype() == candle_core::DType::F32 => {
                let visible = mask.visible_of(q.dim(0)?, q.device())?;
                let seen = kernels::cuda::softmax::Seen { offset, window, sinks, visible };
                let (qkv, gates) = (inputs.contiguous_rows()?, inputs.gates.map(gates::for_kernels).transpose()?);
                let rows = kernels::cuda::softmax::softmax_with_logs(qkv.each_ref(), gates.as_ref(), seen)?;
                values_and_logs(&rows, inputs.v.dim(3)?)
            }
            _ => {
                let folded = Folded::new(inputs, mask)?;
                let (values, logs) = attend(&folded, offset, window, sinks)?;
                Ok((folded.output(&values)?, folded.output(&logs)?))
            }
        }
    }

    /// The path of attention without logarithms, which is that of [`Self::with_logs`] too where the
    /// inputs are f32 or f64; CUDA has no logarithms for half types.
    pub(super) fn path_with_logs(&self, inputs: Inputs<'_>) -> Path {
        match self.kernel(inputs) {
            Ok(Kernel::Cpu) => Path::Fused { device: "CPU" },
            #[cfg(feature = "cuda")]
            Ok(Kernel::Cuda) => Path::Fused { device: "CUDA" },
            Err(why) => Path::Composed { why },
        }
    }
}

/// The fused kernels of exact attention.
enum Kernel {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda,
}

impl Attention for Softmax {
    fn forward(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Tensor> {
        let sizes = self.sizes(inputs, mask)?;
        let gates = gates::moved_to_visible(inputs, mask)?;
        let inputs = inputs.with_gates_of(gates.as_ref());
        self.attend(inputs, sizes, mask, if mask.is_causal() { Some(0) } else { None })
    }

    fn forward_segment(&self, inputs: Inputs<'_>, segment: &Segment) -> Result<Tensor> {
        inputs.sizes_under(&Mask::causal())?;
        if self.sinks > 0 {
            bail!("softmax attention with {} sinks cannot be computed in segments; leave the sinks out", self.sinks);
        }
        // Without a window, all keys and values.
        let seen = Exact::in_segment(inputs, segment, self.window.map_or(usize::MAX, |window| window - 1))?;
        let all = Inputs::new(inputs.q, &seen.keys, &seen.values).with_gates_of(seen.gates.as_ref());
        self.attend(all, all.sizes()?, &Mask::full(), Some(seen.len()? - inputs.q.dim(2)?))
    }

    fn advance(&self, inputs: Inputs<'_>, state: &mut State) -> Result<Tensor> {
        let sizes = inputs.sizes()?;
        if sizes.is_empty() {
            return sizes.zeros(inputs.q);
        }
        let Inputs { q, k, v, .. } = inputs;
        // The new part, before the cache is touched.
        inputs.check_finite()?;
        if let Some(window) = self.window {
            return self.advance_window(inputs, state, window);
        }
        let past = state.tokens();
        let memory = state.take::<KeysAndValues>()?;
        let held = memory.as_ref().map_or(0, |memory| memory.cache.current_seq_len());
        if held != past {
            memory.into_iter().for_each(|memory| state.set(memory));
            bail!("state: it counts {past} tokens and holds the keys of {held} tokens; the file it is from is damaged");
        }
        let mut memory = memory.unwrap_or_else(|| KeysAndValues::new(sizes.keys));
        let gates_before = memory.gates.clone();
        let appended = memory.append(k, v, inputs.gates, past);
        let out =
            appended.and_then(|(k, v)| self.attend_last(Inputs::new(q, &k, &v).with_gates_of(memory.gates.as_ref())));
        if out.is_err() {
            memory.cut(past, gates_before)?;
        }
        if out.is_ok() || past > 0 {
            state.set(memory);
        }
        out
    }

    fn identity(&self) -> Result<Identity> {
        static WHOLE: std::sync::OnceLock<Identity> = std::sync::OnceLock::new();
        let whole = WHOLE.get_or_init(|| Identity::new("softmax")).clone();
        let identity = match self.window {
            None => whole,
            Some(window) => whole.with("window", window),
        };
        Ok(if self.sinks > 0 { identity.with("sinks", self.sinks) } else { identity })
    }

    fn path(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Path> {
        self.sizes(inputs, mask)?;
        Ok(self.path_with_logs(inputs))
    }
}

impl Softmax {
    /// The sizes of inputs under a mask, which must be causal where there is a window.
    fn sizes(&self, inputs: Inputs<'_>, mask: &Mask) -> Result<Sizes> {
        let sizes = inputs.sizes_under(mask)?;
        if self.window.is_some() && !mask.is_causal() {
            bail!("softmax attention with a window is causal; give it Mask::causal()");
        }
        Ok(sizes)
    }

    /// Computes attention of the last tokens, whose queries these are, to all keys. Keys and values
    /// were checked when they came.
    fn attend_last(&self, all: Inputs<'_>) -> Result<Tensor> {
        let sizes = all.sizes()?;
        if sizes.queries == 1 && matches!(self.kernel(all), Ok(Kernel::Cpu)) {
            return softmax::step(&contiguous_rows(all.q)?, all.k, all.v, all.gates);
        }
        self.attend(all, sizes, &Mask::full(), Some(sizes.keys - sizes.queries))
    }

    /// Computes [`Attention::advance`] where there is a window. Nothing is empty.
    fn advance_window(&self, inputs: Inputs<'_>, state: &mut State, window: usize) -> Result<Tensor> {
        state.require_memory()?;
        state.advance_with(|past: Option<&LastKeysAndValues>| {
            if let Some(past) = past {
                past.0.require_at_most(self.sinks + window - 1)?;
            }
            let seen = Exact::append(past.map(|past| &past.0), inputs)?;
            let gates = seen.gates_with_missing(self.sinks)?;
            let inputs = Inputs::new(inputs.q, &seen.keys, &seen.values).with_gates_of(gates.as_ref());
            let out = self.attend_last(inputs)?;
            // The next token sees these and itself.
            Ok((out, LastKeysAndValues(seen.keep(self.sinks, window - 1)?)))
        })
    }
}

/// `LastKeysAndValues` holds the keys and values that the next token of a window sees beside its
/// own: `W − 1` and those of the sinks, fewer at the beginning.
#[derive(Clone, Debug)]
struct LastKeysAndValues(Exact);

impl Memory for LastKeysAndValues {
    fn kind() -> &'static str {
        "the last keys and values of exact attention"
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        // Buffers that are shared are not written to.
        Box::new(self.clone())
    }

    fn save(&self) -> Result<StateRecord> {
        self.0.save()
    }

    fn load(record: &StateRecord) -> Result<Self> {
        Exact::load(record).map(Self)
    }
}

/// `KeysAndValues` holds every key and value so far, in buffers with room for more.
#[derive(Debug)]
struct KeysAndValues {
    cache: KvCache,
    /// Counts who holds the buffers: new tokens are written into them in place, so whoever shares
    /// them copies them first.
    shared: Arc<()>,
    /// `(B, Hkv, T)`; `None` if no token had a gate.
    gates: Option<Tensor>,
}

impl KeysAndValues {
    /// An empty cache, for `tokens` to begin with.
    fn new(tokens: usize) -> Self {
        Self { cache: KvCache::new(2, CACHE_TOKENS.max(tokens)), shared: Arc::default(), gates: None }
    }

    /// Adds tokens `(B, Hkv, T, ·)` to `past` others; returns all keys and all values.
    fn append(&mut self, k: &Tensor, v: &Tensor, gates: Option<&Tensor>, past: usize) -> Result<(Tensor, Tensor)> {
        let gates = gates::append(self.gates.as_ref(), past, gates, k)?;
        let (room, needed) = (self.cache.k_cache().max_seq_len(), past + k.dim(2)?);
        if Arc::strong_count(&self.shared) > 1 || needed > room {
            // Room that doubles is copied as often as it doubles. Candle's cache would grow by what
            // it began with, and copy all of it each time.
            let mut own = Self::new(if needed > room { needed.max(2 * room) } else { room });
            if let (Some(k), Some(v)) = (self.cache.k()?, self.cache.v()?) {
                own.cache.append(&k.contiguous()?, &v.contiguous()?)?;
            }
            *self = own;
        }
        self.gates = gates;
        self.cache.append(&k.contiguous()?, &v.contiguous()?)
    }

    /// Forgets all tokens but the first `tokens`, which had these gates.
    fn cut(&mut self, tokens: usize, gates: Option<Tensor>) -> Result<()> {
        let mut own = Self::new(self.cache.k_cache().max_seq_len());
        if let (Some(k), Some(v)) = (self.cache.k()?, self.cache.v()?)
            && tokens > 0
        {
            let first = |t: &Tensor| t.narrow(2, 0, tokens)?.contiguous();
            own.cache.append(&first(&k)?, &first(&v)?)?;
        }
        *self = Self { gates, ..own };
        Ok(())
    }
}

impl Memory for KeysAndValues {
    fn kind() -> &'static str {
        "keys and values of exact attention"
    }

    fn bytes(&self) -> usize {
        let current = [self.cache.k_cache(), self.cache.v_cache()].map(|cache| cache.current_data().ok().flatten());
        current.iter().flatten().chain(&self.gates).map(bytes_of).sum()
    }

    fn duplicate(&self) -> Box<dyn Memory> {
        Box::new(Self { cache: self.cache.clone(), shared: Arc::clone(&self.shared), gates: self.gates.clone() })
    }

    fn save(&self) -> Result<StateRecord> {
        let mut record = StateRecord::new();
        if let (Some(k), Some(v)) = (self.cache.k()?, self.cache.v()?) {
            record = record.with_tensor("keys", k.copy()?).with_tensor("values", v.copy()?);
        }
        Ok(record.with_gates(self.gates.as_ref()))
    }

    fn load(record: &StateRecord) -> Result<Self> {
        let (k, v) = (record.tensor("keys")?, record.tensor("values")?);
        let ((b, h, t, _), (vb, vh, vt, _)) = (k.dims4()?, v.dims4()?);
        if (b, h, t) != (vb, vh, vt) || k.dtype() != v.dtype() {
            bail!("saved state: keys {:?} and values {:?} do not belong together", k.dims(), v.dims());
        }
        let mut memory = Self::new(t);
        memory.append(k, v, record.gates(k)?.as_ref(), 0)?;
        Ok(memory)
    }
}

/// Computes attention `(N, Tq·G, Dv)` and the logarithms of the denominators, `(N, Tq·G, 1)`. With
/// `offset`, query `t` sees keys `0..=offset + t`; with `window`, the last so many of them and the
/// first `sinks`.
fn attend(inputs: &Folded, offset: Option<usize>, window: Option<usize>, sinks: usize) -> Result<(Tensor, Tensor)> {
    let (n, tq, g, d) = inputs.q.dims4()?;
    let tk = inputs.k.dim(1)?;
    if n * tq == 0 || tk == 0 {
        let zeros = |width| Tensor::zeros((n, tq * g, width), inputs.v.dtype(), inputs.v.device());
        return Ok((zeros(inputs.v.dim(2)?)?, zeros(1)?));
    }
    let rows = inputs.q.reshape((n, tq * g, d))?;
    let mut scores = rows.matmul(&inputs.k.transpose(1, 2)?.contiguous()?)?;
    if let Some(gates) = &inputs.gates {
        let between = gates::between(gates, tq)?.unsqueeze(2)?.expand((n, tq, g, tk))?;
        scores = (scores + between.contiguous()?.reshape((n, tq * g, tk))?)?;
    }
    if let Some(offset) = offset {
        scores = scores.broadcast_add(&causal_bias([tq, g, tk], offset, (window, sinks), &scores)?)?;
    }
    if let Some(keys) = &inputs.visible {
        let hidden = Tensor::full(f32::NEG_INFINITY, keys.shape(), keys.device())?.to_dtype(keys.dtype())?;
        let bias = keys.eq(0.0)?.where_cond(&hidden, &keys.zeros_like()?)?;
        scores = scores.broadcast_add(&bias.transpose(1, 2)?)?;
    }
    // The row maximum cancels: a constant to the gradient.
    let max = scores.detach().max_keepdim(D::Minus1)?.maximum(FLOOR)?;
    let weights = scores.broadcast_sub(&max)?.exp()?;
    let num_den = weights.matmul(&values_and_one(&inputs.v, inputs.visible.as_ref())?)?;
    let rows = Rows::new(&num_den, Some(&max))?;
    Ok((rows.values, rows.logs.unwrap_or(max)))
}

/// Returns `(Tq·G, Tk)`, which is 0 where query `t` may see key `j <= offset + t` among the last
/// `window` or the first `sinks`, else `−∞`.
fn causal_bias(
    [tq, g, tk]: [usize; 3],
    offset: usize,
    (window, sinks): (Option<usize>, usize),
    like: &Tensor,
) -> Result<Tensor> {
    let (dtype, device) = (like.dtype(), like.device());
    // Row t·G + g belongs to query t.
    let visible_to: Vec<u32> = (0..tq * g).map(|row| (row / g + offset) as u32).collect();
    let visible_to = Tensor::from_vec(visible_to, (tq * g, 1), device)?;
    let keys = Tensor::arange(0, tk as u32, device)?.reshape((1, tk))?;
    let mut hidden = keys.broadcast_gt(&visible_to)?;
    if let Some(window) = window {
        let first: Vec<u32> = (0..tq * g).map(|row| (row / g + offset + 1).saturating_sub(window) as u32).collect();
        let far = keys.broadcast_lt(&Tensor::from_vec(first, (tq * g, 1), device)?)?;
        hidden = (hidden + far.broadcast_mul(&keys.ge(sinks.min(tk) as u32)?)?)?;
    }
    let shape = hidden.shape();
    hidden.where_cond(
        &Tensor::full(f32::NEG_INFINITY, shape, device)?.to_dtype(dtype)?,
        &Tensor::zeros(shape, dtype, device)?,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After an error the cache is what it was, and goes on as one that knew no error does.
    #[test]
    fn what_was_appended_before_an_error_is_forgotten() -> Result<()> {
        let x = Tensor::arange(0f32, 12.0, &Device::Cpu)?.reshape((1, 1, 12, 1))?;
        let gates = (x.squeeze(3)? * -0.1)?;
        let part =
            |from, tokens| Ok::<_, candle_core::Error>((x.narrow(2, from, tokens)?, gates.narrow(2, from, tokens)?));
        let ((first, _), (wrong, gates_of_wrong), (last, gates_of_last)) = (part(0, 3)?, part(3, 5)?, part(8, 2)?);
        let mut cut = KeysAndValues::new(3);
        cut.append(&first, &first, None, 0)?;
        let other = cut.duplicate();
        cut.append(&wrong, &wrong, Some(&gates_of_wrong), 3)?;
        cut.cut(3, None)?;
        let saved = |memory: &dyn Memory| -> Result<Vec<(String, Vec<f32>)>> {
            let tensors = memory.save()?.tensors.into_iter();
            tensors.map(|(name, tensor)| Ok((name, tensor.flatten_all()?.to_vec1()?))).collect()
        };
        assert_eq!(saved(&cut)?, saved(&*other)?);
        let mut whole = KeysAndValues::new(3);
        whole.append(&first, &first, None, 0)?;
        cut.append(&last, &last, Some(&gates_of_last), 3)?;
        whole.append(&last, &last, Some(&gates_of_last), 3)?;
        assert_eq!(saved(&cut)?, saved(&whole)?);
        // With nothing before the error, nothing is left.
        cut.cut(0, None)?;
        assert_eq!((cut.cache.current_seq_len(), cut.bytes()), (0, 0));
        Ok(())
    }
}
