//! Exact attention to the near, FAVOR to the far, in one normalisation.
//!
//! With a window of `W` tokens, query `i` weighs keys `j > i − W` by `e^{q·k/√D}` and all earlier ones by `φ(q)·φ(k)`:
//! `o_i = (Σ_near e^{s_ij} v_j + Σ_far φ_i·φ_j v_j) / (Σ_near e^{s_ij} + Σ_far φ_i·φ_j)`. The window slides a token at a time: what is near
//! depends on the distance alone, not on chunks of a kernel. Both parts are fused operations that return the logarithms of their
//! denominators; the far one gets queries `W..` over keys `..T − W`, which is causal attention between them.

use candle_core::{Result, Tensor, bail};

use super::{Attention, Favor, Mask, Softmax, State, input::check_shapes, state::Memory};
use crate::features::Features;

/// Causal attention, exact to the last `window` tokens and by FAVOR to those before: `O(T·(W + F))` time, decoding state of `W` keys and
/// values and FAVOR's sums. Features must be positive.
#[derive(Debug)]
pub struct Windowed {
    window: usize,
    near: Softmax,
    far: Favor,
}

impl Windowed {
    /// Exact to `window` tokens, the query's own among them, and `far` beyond.
    ///
    /// # Errors
    /// If `window` is 0, or the features of `far` are signed: a sum of theirs cannot be joined with a positive one.
    pub fn new(window: usize, far: Favor) -> Result<Self> {
        if window == 0 {
            bail!("window is 0; it must be at least 1, the query's own token");
        }
        let map = far.map();
        let row = Tensor::zeros((1, 1, map.input_dim()), candle_core::DType::F32, &candle_core::Device::Cpu)?;
        if map.exponential_form().is_none() && !matches!(map.features(&row), Ok(Features::Log(_)) | Err(_)) {
            bail!("feature map {map:?} has signed features; a window needs positive ones, such as map=positive");
        }
        Ok(Self { window, near: Softmax::new(), far })
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

/// Tokens `start..start + len` of `(B, H, T, D)`.
fn tokens(x: &Tensor, start: usize, len: usize) -> Result<Tensor> {
    x.narrow(2, start, len)
}

/// Two parts of one attention, each its quotients and logarithms of denominators.
fn join((near, near_log): (&Tensor, &Tensor), (far, far_log): (&Tensor, &Tensor)) -> Result<Tensor> {
    // Cancels: a constant to the gradient.
    let max = near_log.maximum(far_log)?.detach();
    let (near_weight, far_weight) = ((near_log - &max)?.exp()?, (far_log - &max)?.exp()?);
    let sum = (near.broadcast_mul(&near_weight)? + far.broadcast_mul(&far_weight)?)?;
    sum.broadcast_div(&(near_weight + far_weight)?)
}

impl Attention for Windowed {
    fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, mask: &Mask) -> Result<Tensor> {
        check_shapes(q, k, v, mask)?;
        if !mask.is_causal() {
            bail!("attention with a window is causal; give it Mask::causal()");
        }
        let (w, t) = (self.window, q.dim(2)?);
        if q.elem_count() == 0 {
            return Softmax::new().forward(q, k, v, mask);
        }
        let dtype = q.dtype();
        // Logarithms of denominators need more digits than half types have.
        let wide = super::favor::compute(dtype);
        let [q, k, v] = [q.to_dtype(wide)?, k.to_dtype(wide)?, v.to_dtype(wide)?];
        let (near, near_log) = self.near.with_logs([&q, &k, &v], mask, 0, w)?;
        if t <= w {
            return near.to_dtype(dtype);
        }
        let far = t - w;
        let mask = match mask.keys() {
            None => Mask::causal(),
            Some(keys) => Mask::causal().with_keys(&keys.narrow(1, 0, far)?),
        };
        let inputs = [tokens(&q, w, far)?, tokens(&k, 0, far)?, tokens(&v, 0, far)?];
        let (rows, logs) = self.far.with_logs(inputs.each_ref(), &mask, None)?;
        let joined = join((&tokens(&near, w, far)?, &tokens(&near_log, w, far)?), (&rows, &logs))?;
        Tensor::cat(&[&tokens(&near, 0, w)?, &joined], 2)?.to_dtype(dtype)
    }

    fn extend(&self, q: &Tensor, k: &Tensor, v: &Tensor, state: &mut State) -> Result<Tensor> {
        check_shapes(q, k, v, &Mask::causal())?;
        state.check_batch(q)?;
        if q.elem_count() == 0 {
            return Softmax::new().forward(q, k, v, &Mask::causal());
        }
        let (dtype, wide) = (q.dtype(), super::favor::compute(q.dtype()));
        let [q, k, v] = [q, k, v].map(|x| x.detach().to_dtype(wide));
        let (q, mut k, mut v) = (q?, k?, v?);
        let mut far = State::new();
        match &state.memory {
            None => {}
            Some(Memory::Window { keys, values, far: sums }) => {
                far = (**sums).clone();
                if keys.dim(1)? != k.dim(1)? || keys.dim(3)? != k.dim(3)? || values.dim(3)? != v.dim(3)? {
                    bail!(
                        "state: its window holds keys {:?} but k is {:?}; a state belongs to one layer",
                        keys.dims(),
                        k.dims()
                    );
                }
                k = Tensor::cat(&[keys, &k], 2)?;
                v = Tensor::cat(&[values, &v], 2)?;
            }
            Some(_) => bail!("state: it was made by another attention and cannot go on with a window"),
        }
        let (w, t, all) = (self.window, q.dim(2)?, k.dim(2)?);
        let (mut out, near_log) = self.near.with_logs([&q, &k, &v], &Mask::full(), all - t, w)?;
        // Keys that leave the window, one with each of the last queries.
        let leaving = all.saturating_sub(w);
        if leaving > 0 {
            let first = t - leaving;
            let inputs = [tokens(&q, first, leaving)?, tokens(&k, 0, leaving)?, tokens(&v, 0, leaving)?];
            let (rows, logs) = self.far.with_logs(inputs.each_ref(), &Mask::causal(), Some(&mut far))?;
            let near = (&tokens(&out, first, leaving)?, &tokens(&near_log, first, leaving)?);
            let joined = join(near, (&rows, &logs))?;
            out = if first == 0 { joined } else { Tensor::cat(&[&tokens(&out, 0, first)?, &joined], 2)? };
        }
        let kept = all.min(w);
        let keep = |x: &Tensor| tokens(x, all - kept, kept)?.contiguous();
        state.memory = Some(Memory::Window { keys: keep(&k)?, values: keep(&v)?, far: Box::new(far) });
        state.advance(&q)?;
        out.to_dtype(dtype)
    }

    fn buffers(&self) -> Vec<(String, Tensor)> {
        self.far.buffers()
    }

    fn load_buffers(&mut self, get: &dyn Fn(&str) -> Option<Tensor>) -> Result<()> {
        self.far.load_buffers(get)
    }

    fn redraw(&mut self, seed: u64) -> Result<()> {
        self.far.redraw(seed)
    }
}
