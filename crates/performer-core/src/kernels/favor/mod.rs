//! FAVOR on the CPU, fused: features, prefix sums and normalisation in one pass over `q`, `k`, `v`, with a backward pass that
//! computes features again instead of keeping them. Nothing of size `T·F` or `T·T` is made.
//!
//! f32 inside; f32, f16 or bf16 outside, any strides. Heads run side by side on Candle's threads; a head's numbers do not depend
//! on how many.

#[cfg(any(test, feature = "cuda"))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) mod blocks;
mod causal;
mod causal_backward;
mod exponential;
mod full;
mod map;
mod op;
mod rectified;
mod step;
mod tile;
mod trained;

use std::sync::Arc;

use candle_core::{CpuStorage, Layout, Result, Tensor};
use pulp::{Arch, Simd};

pub(crate) use exponential::Exponential;
pub(crate) use map::Map;
pub(crate) use op::favor;
pub(crate) use rectified::Rectified;
pub(crate) use trained::Trained;

use super::{
    check_finite, for_heads,
    fresh::Fresh,
    padded,
    rows::{Heads, Rows},
    spare_threads,
    vector::{self, exp},
    with_storages,
};

/// Most tokens a chunk has. Inside it the work grows with its length, between chunks it does not: of 32, 48 and 64, this was fastest with 64 to 256
/// features.
const CHUNK: usize = 32;

/// Prefix sums of one key head, scaled: `Σ_j φ(k_j) [v_j, 1] / e^scale`.
#[derive(Clone, Debug)]
pub(crate) struct Sums {
    /// Log-scales: one a feature, or one for all where features are signed.
    scale: Vec<f32>,
    /// `(F, padded(Dv))`.
    sums: Vec<f32>,
    /// `padded(F)`.
    norm: Vec<f32>,
    features: usize,
    values: usize,
    scratch: Scratch,
}

/// Memory that steps work in, kept from one to the next.
#[derive(Clone, Debug, Default)]
struct Scratch {
    rows: Vec<f32>,
    largest: Vec<f32>,
    map: map::Scratch,
}

impl Sums {
    /// The sums over no key, below any scale.
    pub(crate) fn new(features: usize, scales: usize, values: usize) -> Self {
        // Finite, so that −∞ − c is −∞ and not NaN.
        Self {
            scale: vec![-1e37; scales],
            sums: vec![0.0; features * padded(values)],
            norm: vec![0.0; padded(features)],
            features,
            values,
            scratch: Scratch::default(),
        }
    }

    /// Sums with these log-scales (one a feature, or one for all), norms (one a feature) and sums
    /// `(F, Dv)`.
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

    pub(crate) fn bytes(&self) -> usize {
        4 * (self.scale.len() + self.sums.len() + self.norm.len())
    }

    pub(crate) fn same_sizes(&self, other: &Self) -> bool {
        let sizes = |s: &Self| (s.scale.len(), s.features, s.values);
        sizes(self) == sizes(other)
    }

    /// Its sizes in words.
    pub(crate) fn describe(&self) -> String {
        format!("{} scales, {} features and {} values", self.scale.len(), self.features, self.values)
    }

    /// Brings the sums over keys to another scale: `e^{old − new}` times as large.
    #[inline(always)]
    fn rescale<S: Simd>(&mut self, simd: S, scale: &[f32]) {
        self.rescale_by(simd, scale, 1.0);
    }

    /// The same for sums over queries, whose weights have the keys' scale as a factor: `e^{new − old}` times as large.
    #[inline(always)]
    fn rescale_queries<S: Simd>(&mut self, simd: S, scale: &[f32]) {
        self.rescale_by(simd, scale, -1.0);
    }

    #[inline(always)]
    fn rescale_by<S: Simd>(&mut self, simd: S, scale: &[f32], sign: f32) {
        let one_for_all = self.scale.len() == 1;
        if one_for_all && scale[0] != self.scale[0] {
            let factor = exp(sign * (self.scale[0] - scale[0]));
            vector::scale(simd, &mut self.sums, factor);
            vector::scale(simd, &mut self.norm, factor);
        } else if !one_for_all {
            let row = self.sums.len() / self.scale.len();
            let rows = self.sums.chunks_exact_mut(row).zip(&mut self.norm).zip(&self.scale).zip(scale);
            for (((row, norm), &old), &new) in rows {
                if old != new {
                    let factor = exp(sign * (old - new));
                    *norm *= factor;
                    vector::scale(simd, row, factor);
                }
            }
        }
        self.scale.copy_from_slice(scale);
    }
}

/// One key head and the query heads of its group.
struct Head<'a> {
    map: &'a Map,
    /// Whether a row of outputs ends with the logarithm of its denominator.
    logs: bool,
    q: Vec<Rows<'a>>,
    k: Rows<'a>,
    v: Rows<'a>,
    visible: Option<&'a [bool]>,
}

impl Head<'_> {
    /// Numbers in a row of outputs.
    fn out_width(&self) -> usize {
        self.v.width + usize::from(self.logs)
    }

    fn is_finite(&self) -> bool {
        self.q.iter().chain([&self.k, &self.v]).all(|rows| rows.are_finite(0, rows.tokens))
    }
}

/// What is computed: by which features, and what of it is returned.
#[derive(Clone, Debug)]
pub(crate) struct Form {
    /// One for all key heads, or one for each.
    pub(crate) maps: Arc<[Map]>,
    /// Whether each row of outputs ends with the logarithm of its denominator `Σ_j φ(q)·φ(k_j)`, but for what scales all features of a
    /// query: `−1e37` where no key is seen. Features must be positive.
    pub(crate) logs: bool,
}

impl Form {
    /// `F`.
    fn features(&self) -> usize {
        self.maps[0].features()
    }

    /// Scales of a state.
    fn scales(&self) -> usize {
        self.maps[0].scales()
    }

    /// The sums over no key.
    pub(crate) fn fresh(&self, values: usize) -> Sums {
        Sums::new(self.features(), self.scales(), values)
    }
}

/// Causal FAVOR from `sums` on, one entry a key head, which go on to the last token. `begun`: they hold earlier tokens. For
/// inference: no gradient.
pub(crate) fn extend(
    form: &Form,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sums: &mut [Sums],
    begun: bool,
) -> Result<Tensor> {
    let (b, h, t, _) = q.dims4()?;
    let width = v.dim(3)? + usize::from(form.logs);
    let mut out = Fresh::new(b * h * t * width);
    with_storages([q, k, v], |[q, k, v]| {
        let inputs = Inputs::new(form, q, k, v, None)?;
        let spare = spare_threads(sums.len());
        // Before the sums are touched.
        inputs.check(|| (0..sums.len()).map(|n| inputs.head(n).is_finite()).collect())?;
        let work = out.parts(inputs.group * t * width).into_iter().zip(sums).enumerate().collect();
        for_heads(work, |(n, (out, sums))| {
            let head = &inputs.head(n);
            // A first token goes the way of all sequences, or its last bit would depend on whether others follow.
            if t == 1 && begun {
                Arch::new().dispatch(step::Step { head, sums, out: out.take() });
            } else {
                causal::forward(head, sums, out, &mut causal::Saved::default(), spare);
            }
        });
        Ok(())
    })?;
    Tensor::from_vec(out.finish(), (b, h, t, width), q.device())?.to_dtype(q.dtype())
}

/// The three tensors, head by head.
struct Inputs<'a> {
    form: &'a Form,
    named: [(&'static str, &'a CpuStorage, &'a Layout); 3],
    q: Heads<'a>,
    k: Heads<'a>,
    v: Heads<'a>,
    visible: Option<&'a [bool]>,
    /// Query heads of a key head.
    group: usize,
    key_heads: usize,
    keys: usize,
}

type Stored<'a> = (&'a CpuStorage, &'a Layout);

impl<'a> Inputs<'a> {
    fn new(form: &'a Form, q: Stored<'a>, k: Stored<'a>, v: Stored<'a>, visible: Option<&'a [bool]>) -> Result<Self> {
        let (heads, (_, key_heads, keys, _)) = (q.1.dims()[1], k.1.shape().dims4()?);
        Ok(Self {
            form,
            named: [("q", q.0, q.1), ("k", k.0, k.1), ("v", v.0, v.1)],
            q: Heads::new(q.0, q.1)?,
            k: Heads::new(k.0, k.1)?,
            v: Heads::new(v.0, v.1)?,
            visible,
            group: heads / key_heads,
            key_heads,
            keys,
        })
    }

    /// The `n`-th key head, counted through the batch.
    fn head(&'a self, n: usize) -> Head<'a> {
        let batch = n / self.key_heads;
        Head {
            // As many maps as key heads, or one.
            map: &self.form.maps[n % self.form.maps.len()],
            logs: self.form.logs,
            q: self.q.heads(n * self.group, self.group),
            k: self.k.head(n),
            v: self.v.head(n),
            visible: self.visible.map(|visible| &visible[batch * self.keys..(batch + 1) * self.keys]),
        }
    }

    /// Runs `work`, which says whether the inputs were finite; if not, says where.
    fn check(&self, work: impl FnOnce() -> Vec<bool>) -> Result<()> {
        if work().contains(&false) {
            self.named.iter().try_for_each(|(name, storage, layout)| check_finite(name, storage, layout))?;
        }
        Ok(())
    }
}
