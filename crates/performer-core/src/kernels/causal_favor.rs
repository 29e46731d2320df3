//! Causal linear attention over positive features, fused: `(log φ(q), log φ(k), v) → o`, f32, with a backward.
//!
//! Token by token, the recurrence of decoding: with the running maximum `c_r = max_{j≤t} l_r(k_j)`,
//!
//! `S ← e^{c − c'} S + e^{l(k_t) − c'} [v_t, 1]`, `w_r = e^{l_r(q_t) + c'_r − m}`, `[num, den] = w·S`, `o_t = num / den`.
//!
//! Every exponent is at most 0 and only the past is read. `S` is `F·(Dv+1)` floats and stays in the first-level cache, so the
//! `4F(Dv+1)` FLOP a token run at that cache's speed, with no product thrown away above the diagonal.
//!
//! Backward, with `dn_t = [g_t, −g_t·o_t] / den_t`: a forward scan gives `dl_r(q_t) = w_r (S_r·dn_t)`; a reverse scan keeps
//! `R_r = Σ_{t≥j} e^{l_r(q_t) − m_t + c_r(j)} dn_t` and gives `dl_r(k_j) = e^{l_r(k_j) − c_r(j)} (R_r·[v_j, 1])` and
//! `dv_j = Σ_r e^{l_r(k_j) − c_r(j)} R_r`. Maxima are kept at the borders of blocks and recomputed inside: nothing of size
//! `T·F` is stored besides the gradients themselves.

use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Storage, Tensor, bail};
use rayon::prelude::*;

use super::vector::{LANES, dot, exp, max};

/// Tokens between two kept maxima in the backward pass.
const BLOCK: usize = 64;

/// Stands for `−∞` in a maximum; see the attention's own.
const FLOOR: f32 = -1e37;

/// Whether the kernel takes these tensors.
pub(crate) fn takes(t: &Tensor) -> bool {
    t.dtype() == candle_core::DType::F32 && matches!(t.device(), Device::Cpu)
}

/// `lq` is `(N, T, G, F)`, `lk` is `(N, T, F)` (`−∞` where hidden), `v` is `(N, T, Dv)`; returns `(N, T·G, Dv)`. A row that
/// sees no key is zero.
pub(crate) fn causal_favor(lq: &Tensor, lk: &Tensor, v: &Tensor) -> Result<Tensor> {
    lq.contiguous()?.apply_op3(&lk.contiguous()?, &v.contiguous()?, CausalFavor)
}

struct CausalFavor;

#[derive(Clone, Copy)]
struct Sizes {
    n: usize,
    t: usize,
    g: usize,
    f: usize,
    dv: usize,
    /// `f` rounded up to whole lanes.
    padded: usize,
}

impl Sizes {
    fn new(lq: &Layout, v: &Layout) -> Result<Self> {
        let (n, t, g, f) = lq.shape().dims4()?;
        Ok(Self { n, t, g, f, dv: v.shape().dims()[2], padded: f.next_multiple_of(LANES) })
    }
}

impl CustomOp3 for CausalFavor {
    fn name(&self) -> &'static str {
        "causal-favor"
    }

    fn cpu_fwd(
        &self,
        s1: &CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
        s3: &CpuStorage,
        l3: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let s = Sizes::new(l1, l3)?;
        let (lq, lk, v) = (values(s1, l1)?, values(s2, l2)?, values(s3, l3)?);
        let mut out = vec![0f32; s.n * s.t * s.g * s.dv];
        for_heads(out.chunks_exact_mut((s.t * s.g * s.dv).max(1)).enumerate().collect(), |(n, out)| {
            let head = Head::new(s, n, lq, lk, v);
            pulp::Arch::new().dispatch(
                #[inline(always)]
                || head.forward(out),
            );
        });
        Ok((CpuStorage::F32(out), Shape::from((s.n, s.t * s.g, s.dv))))
    }

    fn bwd(
        &self,
        lq: &Tensor,
        lk: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (lq, lk, v, out, grad) =
            (lq.detach(), lk.detach(), v.detach(), out.detach().contiguous()?, grad.detach().contiguous()?);
        let s = Sizes::new(lq.layout(), v.layout())?;
        let (mut dlq, mut dlk, mut dv) =
            (vec![0f32; s.n * s.t * s.g * s.f], vec![0f32; s.n * s.t * s.f], vec![0f32; s.n * s.t * s.dv]);
        with_values([&lq, &lk, &v, &out, &grad], |[lq, lk, v, out, grad]| {
            let rows = s.t * s.g * s.dv;
            let heads = dlq
                .chunks_exact_mut((s.t * s.g * s.f).max(1))
                .zip(dlk.chunks_exact_mut((s.t * s.f).max(1)))
                .zip(dv.chunks_exact_mut((s.t * s.dv).max(1)))
                .enumerate()
                .collect();
            for_heads(heads, |(n, ((dlq, dlk), dv))| {
                let head = Head::new(s, n, lq, lk, v);
                let (out, grad) = (&out[n * rows..(n + 1) * rows], &grad[n * rows..(n + 1) * rows]);
                pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || head.backward(out, grad, dlq, dlk, dv),
                );
            });
        })?;
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device());
        Ok((Some(tensor(dlq, &lq)?), Some(tensor(dlk, &lk)?), Some(tensor(dv, &v)?)))
    }
}

/// Inputs of one key head and the query heads of its group.
struct Head<'a> {
    s: Sizes,
    lq: &'a [f32],
    lk: &'a [f32],
    v: &'a [f32],
}

/// Scales and weights of one token, whole lanes wide: what is beyond `F` stays at weight 0.
struct Weights {
    /// Running maximum `c`.
    c: Vec<f32>,
    /// `e^{c − c'}`.
    decay: Vec<f32>,
    /// `e^{l(k) − c'}`.
    key: Vec<f32>,
    /// `e^{l(q) + c' − m}`.
    query: Vec<f32>,
}

impl Weights {
    fn new(padded: usize) -> Self {
        let zeros = || vec![0f32; padded];
        Self { c: vec![FLOOR; padded], decay: zeros(), key: zeros(), query: zeros() }
    }

    #[inline(always)]
    fn take_key(&mut self, lk: &[f32]) {
        for (((c, decay), key), &l) in self.c.iter_mut().zip(&mut self.decay).zip(&mut self.key).zip(lk) {
            let new = if l > *c { l } else { *c };
            *decay = exp(*c - new);
            *key = exp(l - new);
            *c = new;
        }
    }

    #[inline(always)]
    fn take_query(&mut self, lq: &[f32]) {
        self.query.fill(f32::NEG_INFINITY);
        for ((query, &c), &l) in self.query.iter_mut().zip(&self.c).zip(lq) {
            *query = l + c;
        }
        let m = max(&self.query);
        for query in &mut self.query {
            *query = exp(*query - m);
        }
    }
}

impl<'a> Head<'a> {
    fn new(s: Sizes, n: usize, lq: &'a [f32], lk: &'a [f32], v: &'a [f32]) -> Self {
        let part = |x: &'a [f32], size: usize| &x[n * size..(n + 1) * size];
        Self { s, lq: part(lq, s.t * s.g * s.f), lk: part(lk, s.t * s.f), v: part(v, s.t * s.dv) }
    }

    #[inline(always)]
    fn key(&self, t: usize) -> &[f32] {
        &self.lk[t * self.s.f..(t + 1) * self.s.f]
    }

    #[inline(always)]
    fn query(&self, row: usize) -> &[f32] {
        &self.lq[row * self.s.f..(row + 1) * self.s.f]
    }

    /// `S_d ← decay ∘ S_d + key · [v, 1]_d`. `sums` holds a row of features for each value dimension, the normaliser last.
    #[inline(always)]
    fn add_key(&self, sums: &mut [f32], w: &Weights, t: usize) {
        let v = &self.v[t * self.s.dv..(t + 1) * self.s.dv];
        for (sum, &v) in sums.chunks_exact_mut(self.s.padded).zip(v.iter().chain(&[1.0])) {
            for ((s, &decay), &key) in sum.iter_mut().zip(&w.decay).zip(&w.key) {
                *s = *s * decay + key * v;
            }
        }
    }

    #[inline(always)]
    fn forward(&self, out: &mut [f32]) {
        let Sizes { t, g, dv, padded, .. } = self.s;
        let mut w = Weights::new(padded);
        let mut sums = vec![0f32; (dv + 1) * padded];
        for t in 0..t {
            w.take_key(self.key(t));
            self.add_key(&mut sums, &w, t);
            for row in t * g..(t + 1) * g {
                w.take_query(self.query(row));
                let den = dot(&w.query, &sums[dv * padded..]);
                let scale = if den == 0.0 { 0.0 } else { den.recip() };
                for (o, sum) in out[row * dv..(row + 1) * dv].iter_mut().zip(sums.chunks_exact(padded)) {
                    *o = dot(&w.query, sum) * scale;
                }
            }
        }
    }

    /// `dn = [g, −g·o] / den`.
    #[inline(always)]
    fn grad_of_sums(dn: &mut [f32], grad: &[f32], out: &[f32], den: f32) {
        let scale = if den == 0.0 { 0.0 } else { den.recip() };
        let mut product = 0.0;
        for ((d, &g), &o) in dn.iter_mut().zip(grad).zip(out) {
            *d = g * scale;
            product += g * o;
        }
        dn[grad.len()] = -product * scale;
    }

    #[inline(always)]
    fn backward(&self, out: &[f32], grad: &[f32], dlq: &mut [f32], dlk: &mut [f32], dv: &mut [f32]) {
        let Sizes { t: tokens, g, f, dv: width, padded, .. } = self.s;
        let mut w = Weights::new(padded);
        let mut dn = vec![0f32; width + 1];
        let mut product = vec![0f32; padded];
        let mut dens = vec![0f32; tokens * g];
        let mut borders = Vec::with_capacity(tokens.div_ceil(BLOCK));

        // Forward scan: S again, and with it dl(q).
        let mut sums = vec![0f32; (width + 1) * padded];
        for t in 0..tokens {
            if t % BLOCK == 0 {
                borders.push(w.c.clone());
            }
            w.take_key(self.key(t));
            self.add_key(&mut sums, &w, t);
            for row in t * g..(t + 1) * g {
                w.take_query(self.query(row));
                dens[row] = dot(&w.query, &sums[width * padded..]);
                let values = row * width..(row + 1) * width;
                Self::grad_of_sums(&mut dn, &grad[values.clone()], &out[values], dens[row]);
                product.fill(0.0);
                for (sum, &dn) in sums.chunks_exact(padded).zip(&dn) {
                    for (p, &s) in product.iter_mut().zip(sum) {
                        *p += s * dn;
                    }
                }
                for ((d, &p), &q) in dlq[row * f..(row + 1) * f].iter_mut().zip(&product).zip(&w.query) {
                    *d = p * q;
                }
            }
        }

        // Reverse scan, block by block: R, and with it dl(k) and dv.
        let mut block: Vec<Weights> = (0..BLOCK.min(tokens)).map(|_| Weights::new(padded)).collect();
        let mut future = sums;
        future.fill(0.0);
        let mut decay = vec![0f32; padded];
        for (start, border) in borders.iter().enumerate().rev().map(|(i, c)| (i * BLOCK, c)) {
            let end = (start + BLOCK).min(tokens);
            let mut c = border.clone();
            for t in start..end {
                let w = &mut block[t - start];
                w.c.copy_from_slice(&c);
                w.take_key(self.key(t));
                c.copy_from_slice(&w.c);
            }
            for t in (start..end).rev() {
                let w = &mut block[t - start];
                // What the future was scaled by shrinks to this token's scale once.
                for sum in future.chunks_exact_mut(padded) {
                    for (s, &d) in sum.iter_mut().zip(&decay) {
                        *s *= d;
                    }
                }
                for (row, &den) in dens.iter().enumerate().take((t + 1) * g).skip(t * g) {
                    w.take_query(self.query(row));
                    let values = row * width..(row + 1) * width;
                    Self::grad_of_sums(&mut dn, &grad[values.clone()], &out[values], den);
                    for (sum, &dn) in future.chunks_exact_mut(padded).zip(&dn) {
                        for (s, &q) in sum.iter_mut().zip(&w.query) {
                            *s += q * dn;
                        }
                    }
                }
                product.fill(0.0);
                let v = &self.v[t * width..(t + 1) * width];
                for (sum, &v) in future.chunks_exact(padded).zip(v.iter().chain(&[1.0])) {
                    for (p, &s) in product.iter_mut().zip(sum) {
                        *p += s * v;
                    }
                }
                for ((d, &p), &k) in dlk[t * f..(t + 1) * f].iter_mut().zip(&product).zip(&w.key) {
                    *d = p * k;
                }
                for (d, sum) in dv[t * width..(t + 1) * width].iter_mut().zip(future.chunks_exact(padded)) {
                    *d = dot(&w.key, sum);
                }
                decay.copy_from_slice(&w.decay);
            }
        }
    }
}

/// Runs `work` on every item, on as many threads as Candle may use. Each item is one head's own memory, so the result does
/// not depend on the number of threads.
fn for_heads<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync + Send) {
    if candle_core::utils::get_num_threads() == 1 || items.len() == 1 {
        items.into_iter().for_each(work);
    } else {
        items.into_par_iter().for_each(work);
    }
}

fn values<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(values), Some((start, end))) => Ok(&values[start..end]),
        _ => bail!("causal-favor: inputs must be contiguous f32"),
    }
}

/// The values of CPU tensors, for the time of `work`.
fn with_values<const N: usize, R>(tensors: [&Tensor; N], work: impl FnOnce([&[f32]; N]) -> R) -> Result<R> {
    let guards = tensors.map(|t| t.storage_and_layout());
    let mut slices: [&[f32]; N] = [&[]; N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&guards) {
        let Storage::Cpu(storage) = &**storage else { bail!("causal-favor: inputs have left the CPU") };
        *slice = values(storage, layout)?;
    }
    Ok(work(slices))
}
