//! FAVOR attention (Choromanski et al. 2020) on the CPU as one fused operation:
//! `out_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)`, over `j ≤ i` where it is causal. Features,
//! prefix sums and normalisation take one pass over `q`, `k` and `v`. The backward pass computes
//! the features again instead of keeping them. Neither the features of all tokens `(T, F)` nor
//! scores `(T, T)` are stored.
//!
//! Arithmetic is f32; tensors may be f32, f16 or bf16, with any strides between rows. Heads run
//! side by side on Rayon's threads; the numbers of a head do not depend on how many threads there
//! are.
//!
//! # Shapes
//!
//! The unit of work is one key head `k (T, D)`, `v (T, Dv)` with the `G` query heads `q (T, D)` of
//! its group (grouped-query attention). `F` is the number of features, `C ≤ 32` the tokens of a
//! chunk. A causal pass does this with each chunk, carrying `S` and `z` to the next:
//!
//! ```text
//! k (C, D)            -> log-features l(k) (F, C), scale c (F)
//! l(k), c             -> key features  φ(k) = e^{l − c} (F, C)
//! q (C, D), c         -> query features φ(q) = e^{l + c − max_r(l + c)} (C, F)
//! φ(q), φ(k)          -> products, their lower triangle P (C, C)
//! φ(q), S, P, v       -> numerators   φ(q) S + P v (C, Dv)
//! φ(q), z, P          -> denominators φ(q) z + P 1 (C)
//!                     -> out = numerator / denominator (C, Dv), or (C, Dv + 1) with logarithms
//! φ(k), v             -> S += φ(k) v (F, Dv), z += φ(k) 1 (F)
//! ```
//!
//! The backward pass takes the gradients `g (C, Dv)` of the outputs and `h (C)` of the logarithms
//! of the denominators; `h` is 0 where no logarithms are returned. `R (F, Dv)` and `r (F)` are sums
//! over the queries after a chunk, as `S` and `z` are sums over the keys before it:
//!
//! ```text
//! g, h, out, den      -> dn = g/den (C, Dv), e = (h − g·out)/den (C)
//! dn, e, v            -> dP = tril(dn vᵀ + e) (C, C)
//! dn, e, S, z, dP     -> dφ(q) = dn Sᵀ + e zᵀ + dP φ(k)ᵀ (C, F) -> dl = dφ ∘ φ -> dq (C, D)
//! φ(k), dn, P, R      -> dv = φ(k)ᵀ R + Pᵀ dn (C, Dv)
//! v, R, r, φ(q), dP   -> dφ(k) = R vᵀ + r 1ᵀ + φ(q)ᵀ dP (F, C) -> dl = dφ ∘ φ -> dk (C, D)
//! φ(q), dn, e         -> R += φ(q)ᵀ dn (F, Dv), r += φ(q)ᵀ e (F)
//! ```
//!
//! A forget gate `a_t ≤ 0` is the natural logarithm of the factor by which token `t` multiplies the
//! weights of all keys before it. So key `j` has the factor `e^{s_i − s_j}` for query `i`, where
//! `s` sums the gates up to a token. The part `e^{s_i}` cancels in the quotient. Within a chunk,
//! gates therefore only shift the log-features of keys: `l(k_j) −= s_j − s_start`, counted from the
//! chunk's first token, since a long sum would lose digits. Between chunks, `S` and `z` are made
//! smaller through their scale: the gates after the first token of one chunk up to that of the next
//! are added to `c`. The gradient of a gate is `da_t = Σ_{j≥t} (h_j − Σ_r dl_r(k_j))`, where `h_j`
//! is summed over the query heads of the group.
//!
//! Without a causal mask `P` falls away: `S` and `z` are sums over all keys, `R` and `r` over all
//! queries.
//!
//! `blocks` and `records` belong to the CUDA kernels. They stand here because `cuda` is compiled
//! with that feature alone, and their tests need no CUDA.

mod beside;
#[cfg(any(test, feature = "cuda"))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod blocks;
mod causal;
mod causal_backward;
mod exponential;
mod full;
mod map;
mod op;
mod quadratic;
#[cfg(any(test, feature = "cuda"))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod records;
mod rectified;
mod step;
mod tile;
mod trained;

use std::{fmt, sync::Arc};

use candle_core::{CpuStorage, Layout, Result, Tensor};
use pulp::Simd;

use super::{
    FLOOR, check_finite, for_heads, for_heads_of_step,
    fresh::Fresh,
    instructions::arch,
    operation::Stored,
    padded,
    rows::{Heads, Rows},
    spare_threads,
    vector::{self, exp},
    with_storages,
};
pub(crate) use exponential::Exponential;
pub(crate) use map::Map;
pub(crate) use op::favor;
pub(crate) use quadratic::Quadratic;
pub(crate) use rectified::Rectified;
pub(crate) use trained::Trained;

/// The most tokens of a chunk. Work inside a chunk grows with its length, work between chunks does
/// not: of 32, 48 and 64, this was fastest with 64 to 256 features.
const CHUNK: usize = 32;

/// `Sums` holds the prefix sums of one key head, divided by their scale:
/// `Σ_j φ(k_j) [v_j, 1] / e^scale`.
#[derive(Clone)]
pub(crate) struct Sums {
    /// The logarithms of the scales: one for each feature, or one for all where features are
    /// "signed", which means that they may be zero or negative and are kept without logarithms.
    scale: Vec<f32>,
    /// `S`, the part with `v_j`: `(F, padded(Dv))`.
    sums: Vec<f32>,
    /// `z`, the part with 1: `padded(F)` numbers.
    norm: Vec<f32>,
    features: usize,
    values: usize,
    scratch: Scratch,
}

/// `Scratch` is working memory for decoding steps, kept from one step to the next.
#[derive(Clone, Debug, Default)]
struct Scratch {
    rows: Vec<f32>,
    largest: Vec<f32>,
    map: map::Scratch,
}

impl fmt::Debug for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sums of {}", self.describe())
    }
}

/// Returns an exponent that is at most 0 in exact arithmetic. Rounding may lift it above 0: sums of
/// gates near −1e30 are off by up to 1e23, and the exponential of that would be infinite.
#[inline(always)]
fn at_most_zero(x: f32) -> f32 {
    x.min(0.0)
}

impl Sums {
    /// Sums over no key: all zero, with a scale lower than that of any key.
    pub(crate) fn new(features: usize, scales: usize, values: usize) -> Self {
        // The scale is finite, so that −∞ − scale is −∞ and not NaN.
        Self {
            scale: vec![FLOOR as f32; scales],
            sums: vec![0.0; features * padded(values)],
            norm: vec![0.0; padded(features)],
            features,
            values,
            scratch: Scratch::default(),
        }
    }

    /// Returns the sums with these log-scales (one a feature, or one for all), norms (one a
    /// feature) and sums `(F, Dv)`.
    pub(crate) fn of(scale: &[f32], norm: &[f32], sums: &[f32], values: usize) -> Self {
        let mut new = Self::new(norm.len(), scale.len(), values);
        new.scale.copy_from_slice(scale);
        new.norm[..norm.len()].copy_from_slice(norm);
        for (row, given) in new.sums.chunks_exact_mut(padded(values)).zip(sums.chunks_exact(values)) {
            row[..values].copy_from_slice(given);
        }
        new
    }

    /// The log-scales and their shape, `(1, F)` or `(1, 1)`.
    pub(crate) fn scale(&self) -> (Vec<f32>, [usize; 2]) {
        (self.scale.clone(), [1, self.scale.len()])
    }

    /// The normalisers, `(1, F)`.
    pub(crate) fn norm(&self) -> (Vec<f32>, [usize; 2]) {
        (self.norm[..self.features].to_vec(), [1, self.features])
    }

    /// The sums over values, `(F, Dv)`.
    pub(crate) fn sums(&self) -> (Vec<f32>, [usize; 2]) {
        let rows = self.sums.chunks_exact(padded(self.values));
        (rows.flat_map(|row| &row[..self.values]).copied().collect(), [self.features, self.values])
    }

    /// The size of the numbers in bytes.
    pub(crate) fn bytes(&self) -> usize {
        4 * (self.scale.len() + self.sums.len() + self.norm.len())
    }

    /// Whether both have equally many scales, features and values.
    pub(crate) fn same_sizes(&self, other: &Self) -> bool {
        let sizes = |s: &Self| (s.scale.len(), s.features, s.values);
        sizes(self) == sizes(other)
    }

    /// The sizes, as text for error messages.
    pub(crate) fn describe(&self) -> String {
        format!("{} scales, {} features and {} values", self.scale.len(), self.features, self.values)
    }

    /// Multiplies the sums by `e^by`, by their scale alone.
    fn forget(&mut self, by: f32) {
        self.scale.iter_mut().for_each(|scale| *scale += by);
    }

    /// Brings sums over keys to the new `scale`: multiplies them by `e^{old − new}`.
    #[inline(always)]
    fn rescale<S: Simd>(&mut self, simd: S, scale: &[f32]) {
        self.rescale_by(simd, scale, 1.0);
    }

    /// Brings sums over queries to the new `scale`: multiplies them by `e^{new − old}`, since the
    /// weights of queries have the keys' scale as a factor.
    #[inline(always)]
    fn rescale_queries<S: Simd>(&mut self, simd: S, scale: &[f32]) {
        self.rescale_by(simd, scale, -1.0);
    }

    #[inline(always)]
    fn rescale_by<S: Simd>(&mut self, simd: S, scale: &[f32], sign: f32) {
        let one_for_all = self.scale.len() == 1;
        if one_for_all && scale[0] != self.scale[0] {
            let factor = exp(at_most_zero(sign * (self.scale[0] - scale[0])));
            vector::scale(simd, &mut self.sums, factor);
            vector::scale(simd, &mut self.norm, factor);
        } else if !one_for_all {
            let row = self.sums.len() / self.scale.len();
            let rows = self.sums.chunks_exact_mut(row).zip(&mut self.norm).zip(&self.scale).zip(scale);
            for (((row, norm), &old), &new) in rows {
                if old != new {
                    let factor = exp(at_most_zero(sign * (old - new)));
                    *norm *= factor;
                    vector::scale(simd, row, factor);
                }
            }
        }
        self.scale.copy_from_slice(scale);
    }
}

/// `Head` is one key head, with the query heads of its group.
struct Head<'a> {
    map: &'a Map,
    /// Whether each row of outputs ends with the logarithm of its denominator.
    logs: bool,
    q: Vec<Rows<'a>>,
    k: Rows<'a>,
    v: Rows<'a>,
    /// Which keys are visible, `(Tk)`; all where it is `None`.
    visible: Option<&'a [bool]>,
    /// Forget gates, `(Tk)`.
    gates: Option<&'a [f32]>,
}

impl Head<'_> {
    /// The sum of the gates after token `from` up to token `to`.
    fn forgotten(&self, from: usize, to: usize) -> f32 {
        self.gates.map_or(0.0, |gates| gates[from + 1..=to].iter().sum())
    }

    /// The length of a row of outputs.
    fn out_width(&self) -> usize {
        self.v.width + usize::from(self.logs)
    }

    fn is_finite(&self) -> bool {
        self.q.iter().chain([&self.k, &self.v]).all(|rows| rows.are_finite(0, rows.tokens))
    }
}

/// `Form` says what is computed: with which feature maps, and whether logarithms are returned.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    /// One map for all key heads, or one for each.
    pub(crate) maps: Arc<[Map]>,
    /// Whether each row of outputs ends with the logarithm of its denominator `Σ_j φ(q)·φ(k_j)`, in
    /// which `φ(q)` lacks the factor common to all features of the query; `−1e37` where no key is
    /// seen. Needs positive features.
    pub(crate) logs: bool,
}

impl Form {
    /// The number of features `F`.
    fn features(&self) -> usize {
        self.maps[0].features()
    }

    /// The number of scales in [`Sums`].
    fn scales(&self) -> usize {
        self.maps[0].scales()
    }

    /// Sums over no key, for values of dimension `values`.
    pub(crate) fn fresh(&self, values: usize) -> Sums {
        Sums::new(self.features(), self.scales(), values)
    }
}

/// Computes causal FAVOR of `T` tokens that follow those in `sums`, and adds their keys to `sums`:
/// `q` `(B, H, T, ·)`, `k` `(B, Hkv, T, ·)`, `v` `(B, Hkv, T, Dv)` → `(B, H, T, Dv)`, or `Dv + 1`
/// with logarithms. The last dimension of `q` and `k` is what the map takes, see [`Map`]. `sums`
/// has an entry for each of the `B·Hkv` key heads; `begun` says that they hold earlier tokens.
/// `gates` `(B, Hkv, T)` are logarithms, at most 0. No gradient is recorded.
pub(crate) fn extend(
    form: &Form,
    [q, k, v]: [&Tensor; 3],
    gates: Option<&[f32]>,
    sums: &mut [Sums],
    begun: bool,
) -> Result<Tensor> {
    let (b, h, t, _) = q.dims4()?;
    let width = v.dim(3)? + usize::from(form.logs);
    let mut out = Fresh::new(b * h * t * width);
    with_storages([q, k, v], |[q, k, v]| {
        let inputs = Inputs::new(form, [q, k, v], None, gates)?;
        let spare = spare_threads(sums.len());
        // The inputs are checked before the sums are touched, so that an error leaves the state as
        // it was.
        inputs.check(|| {
            let is_finite = |n| inputs.head(n).is_finite();
            let heads = 0..sums.len();
            // A single token is checked in less time than it takes to wake another thread.
            if t == 1 { heads.map(is_finite).collect() } else { for_heads(heads.collect(), is_finite) }
        })?;
        // The sums of a key head are written once, and read by each query head of its group.
        let bytes = (1 + inputs.group) * sums.iter().map(Sums::bytes).sum::<usize>();
        let work = out.parts(inputs.group * t * width).into_iter().zip(sums).enumerate().collect();
        // The first token takes the path of whole sequences even if it is alone: otherwise its last
        // bit would depend on whether others follow.
        if t == 1 && begun {
            for_heads_of_step(work, bytes, |(n, (out, sums))| {
                arch().dispatch(step::Step { head: &inputs.head(n), sums, out: out.take() });
            });
        } else {
            for_heads(work, |(n, (out, sums))| {
                causal::forward(&inputs.head(n), sums, out, &mut causal::Saved::default(), spare);
            });
        }
        Ok(())
    })?;
    Tensor::from_vec(out.finish(), (b, h, t, width), q.device())?.to_dtype(q.dtype())
}

/// `Inputs` gives access to `q`, `k` and `v` head by head.
struct Inputs<'a> {
    form: &'a Form,
    named: [(&'static str, &'a CpuStorage, &'a Layout); 3],
    q: Heads<'a>,
    k: Heads<'a>,
    v: Heads<'a>,
    visible: Option<&'a [bool]>,
    /// Forget gates, `(B, Hkv, Tk)`.
    gates: Option<&'a [f32]>,
    /// The number of query heads that share a key head.
    group: usize,
    key_heads: usize,
    keys: usize,
}

impl<'a> Inputs<'a> {
    fn new(
        form: &'a Form,
        [q, k, v]: [Stored<'a, CpuStorage>; 3],
        visible: Option<&'a [bool]>,
        gates: Option<&'a [f32]>,
    ) -> Result<Self> {
        let (heads, (_, key_heads, keys, _)) = (q.1.dims()[1], k.1.shape().dims4()?);
        Ok(Self {
            form,
            named: [("q", q.0, q.1), ("k", k.0, k.1), ("v", v.0, v.1)],
            q: Heads::new(q)?,
            k: Heads::new(k)?,
            v: Heads::new(v)?,
            visible,
            gates,
            group: heads / key_heads,
            key_heads,
            keys,
        })
    }

    /// The `n`-th key head, counted through the batch.
    fn head(&'a self, n: usize) -> Head<'a> {
        let batch = n / self.key_heads;
        Head {
            // There are as many maps as key heads, or one for all.
            map: &self.form.maps[n % self.form.maps.len()],
            logs: self.form.logs,
            q: self.q.heads(n * self.group, self.group),
            k: self.k.head(n),
            v: self.v.head(n),
            visible: self.visible.map(|visible| &visible[batch * self.keys..(batch + 1) * self.keys]),
            gates: self.gates.map(|gates| &gates[n * self.keys..(n + 1) * self.keys]),
        }
    }

    /// Runs `work`, which returns whether the inputs were finite, head by head; if any was not, the
    /// error says which number of which tensor.
    fn check(&self, work: impl FnOnce() -> Vec<bool>) -> Result<()> {
        if work().contains(&false) {
            self.named.iter().try_for_each(|(name, storage, layout)| check_finite(name, storage, layout))?;
        }
        Ok(())
    }
}
