//! Causal FAVOR over one key head and the query heads of its group, chunk by chunk.
//!
//! Within a chunk the features of all rows are products of small tiles, which run at the speed of the multiply-add units;
//! between chunks only the prefix sums `S = Σ φ(k)[v, 1]` are carried.
//!
//! **Scale.** In a chunk, feature `r` of a key is divided by `e^{c_r}`, `c_r` being the largest log-feature of all keys before the chunk
//! and of its first: every row of the chunk may see it. A later key may exceed it by `e^LIMIT`, which f32 has room for; the first key
//! that exceeds it by more begins a chunk of its own. So where a chunk ends depends on the past alone, and a row's numbers do
//! not depend on where its chunk ends: rows at positions `≤ t` are bit-identical whatever comes after `t`. A query's weights are
//! divided by their largest, so its denominator is at least 1.
//!
//! **Backward**, with `dn_t = g_t/den_t` and `e_t = −g_t·o_t/den_t`: a scan in the order of the tokens carries `S` again and gives
//! `dφ(q_t) = S_t [dn_t, e_t]`; one in reverse carries `R_j = Σ_{t≥j} φ(q_t) [dn_t, e_t]ᵀ` and gives `dφ(k_j) = R_j [v_j, 1]` and
//! `dv_j = R_jᵀ φ(k_j)`. Features are computed again, borders and scales of the chunks are kept: `F/64` numbers a token.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use pulp::{Arch, Simd, WithSimd};

use super::super::{
    gemm::{Into, Left, Right, gemm},
    rows::Rows,
    transpose::transpose,
    vector::{LANES, add, exp, multiply, sum},
};
use super::{
    CHUNK, Head, Sums,
    exponential::LinearGradient,
    padded,
    tile::{OutputGradient, Tile},
};

/// What the forward pass leaves to the backward pass, for one key head.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// First token of each chunk.
    starts: Vec<usize>,
    /// Scales of each chunk, one after the other.
    scales: Vec<f32>,
    /// Denominators, head by head.
    dens: Vec<f32>,
}

impl Saved {
    fn chunk(&self, i: usize, tokens: usize) -> [usize; 2] {
        let end = self.starts.get(i + 1).copied().unwrap_or(tokens);
        [self.starts[i], end - self.starts[i]]
    }

    fn scale(&self, i: usize) -> &[f32] {
        let width = self.scales.len() / self.starts.len();
        &self.scales[i * width..(i + 1) * width]
    }
}

/// The forward pass: outputs `(G, T, Dv)`, sums and saved scales. Returns whether every input was finite; if not, the outputs mean
/// nothing. `spare`: there are threads to spare, so queries read their chunks beside the scan over the keys. The bits are the same.
pub(super) fn forward(head: &Head, sums: &mut Sums, out: &mut [f32], saved: &mut Saved, spare: bool) -> bool {
    let (tokens, width) = (head.k.tokens, head.out_width());
    let Saved { starts, scales, dens } = saved;
    dens.resize(head.q.len() * tokens, 0.0);
    let outputs = out.chunks_exact_mut(tokens * width).zip(dens.chunks_exact_mut(tokens));
    let outputs = outputs.map(|(rows, dens)| Output { rows, dens }).collect();
    let (busy, finite) = (AtomicUsize::new(0), AtomicBool::new(true));
    let keys_finite = if spare && tokens > CHUNK {
        rayon::scope(|scope| {
            let helpers = Some(Helpers { scope, busy: &busy, finite: &finite });
            Arch::new().dispatch(Scan { head, sums, outputs, starts, scales, helpers })
        })
    } else {
        Arch::new().dispatch(Scan { head, sums, outputs, starts, scales, helpers: None })
    };
    keys_finite && finite.into_inner()
}

/// Rows of outputs and denominators of one query head.
struct Output<'a> {
    rows: &'a mut [f32],
    dens: &'a mut [f32],
}

impl<'a> Output<'a> {
    /// Splits the first `n` tokens off.
    fn take(&mut self, n: usize, width: usize) -> Self {
        let rows = self.rows.split_off_mut(..n * width).expect("no more tokens than there are");
        let dens = self.dens.split_off_mut(..n).expect("no more tokens than there are");
        Self { rows, dens }
    }
}

/// Threads that queries may be left to.
struct Helpers<'a, 'scope> {
    scope: &'a rayon::Scope<'scope>,
    /// Chunks that wait for a thread or have one.
    busy: &'scope AtomicUsize,
    finite: &'scope AtomicBool,
}

/// The scan over the keys.
struct Scan<'a, 'scope> {
    head: &'scope Head<'scope>,
    sums: &'a mut Sums,
    outputs: Vec<Output<'scope>>,
    starts: &'a mut Vec<usize>,
    scales: &'a mut Vec<f32>,
    helpers: Option<Helpers<'a, 'scope>>,
}

impl WithSimd for Scan<'_, '_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Self { head, sums, mut outputs, starts, scales, helpers } = self;
        let (tokens, width) = (head.k.tokens, head.out_width());
        let mut tile = Tile::new(head);
        let mut work = Work::new(&tile);
        let mut finite = true;
        // Each waiting chunk keeps a copy of the sums.
        let most = 2 * candle_core::utils::get_num_threads();
        let (mut start, mut limit) = (0, CHUNK);
        while start < tokens {
            let count = limit.min(tokens - start);
            finite &= head.k.are_finite(start, count) & head.v.are_finite(start, count);
            tile.load_keys(simd, start, count);
            let n = tile.enter(simd, sums, count);
            limit = if n < count { LANES } else { (2 * limit).min(CHUNK) };
            starts.push(start);
            scales.extend_from_slice(&sums.scale);
            tile.weigh_keys(simd, &sums.scale, n);
            tile.load_values(start, n);
            let mut outputs: Vec<Output> = outputs.iter_mut().map(|output| output.take(n, width)).collect();
            match &helpers {
                Some(helpers) if helpers.busy.load(Ordering::Relaxed) < most => {
                    let before = sums.clone();
                    tile.add_keys(simd, n, sums);
                    let next = tile.next();
                    let chunk = Chunk { head, tile: std::mem::replace(&mut tile, next), sums: before, start, outputs };
                    let (busy, finite) = (helpers.busy, helpers.finite);
                    busy.fetch_add(1, Ordering::Relaxed);
                    helpers.scope.spawn(move |_| {
                        finite.fetch_and(Arch::new().dispatch(chunk), Ordering::Relaxed);
                        busy.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                _ => {
                    finite &= read(simd, head, &mut tile, sums, start, &mut outputs, &mut work);
                    tile.add_keys(simd, n, sums);
                }
            }
            start += n;
        }
        sums.rescale(simd, tile.largest());
        finite
    }
}

/// A chunk with weighed keys, its values, the sums before it and where its outputs go.
struct Chunk<'a> {
    head: &'a Head<'a>,
    tile: Tile<'a>,
    sums: Sums,
    start: usize,
    outputs: Vec<Output<'a>>,
}

impl WithSimd for Chunk<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, simd: S) -> bool {
        let mut work = Work::new(&self.tile);
        read(simd, self.head, &mut self.tile, &self.sums, self.start, &mut self.outputs, &mut work)
    }
}

/// Memory that a chunk is read in.
struct Work {
    weights: Vec<f32>,
    triangle: Vec<f32>,
    rows: Vec<f32>,
}

impl Work {
    fn new(tile: &Tile) -> Self {
        Self {
            weights: vec![0f32; CHUNK * tile.features],
            triangle: vec![0f32; CHUNK * CHUNK],
            rows: vec![0f32; CHUNK * tile.width],
        }
    }
}

/// What the queries of a chunk read from the sums before it and from its own keys. Returns whether they were finite.
#[inline(always)]
fn read<S: Simd>(
    simd: S,
    head: &Head,
    tile: &mut Tile,
    sums: &Sums,
    start: usize,
    outputs: &mut [Output],
    work: &mut Work,
) -> bool {
    let Work { weights, triangle, rows } = work;
    let mut finite = true;
    for (q, Output { rows: out, dens }) in head.q.iter().zip(outputs) {
        let n = dens.len();
        finite &= q.are_finite(start, n);
        tile.load_queries(simd, q, start, n, &sums.scale, weights);
        tile.products(simd, n, weights, triangle);
        tile.read_sums(simd, n, weights, sums, rows);
        tile.read_chunk(simd, n, triangle, rows);
        for (i, (den, weights)) in dens.iter_mut().zip(weights.chunks_exact(tile.features)).enumerate() {
            let seen = (i / LANES + 1) * LANES;
            *den = tile.past(simd, weights, sums) + sum(simd, &triangle[i * CHUNK..i * CHUNK + seen]);
        }
        tile.write(n, rows, dens, out);
    }
    finite
}

/// The backward pass. `spare`: there are threads to spare, so both scans run side by side.
pub(super) fn backward(queries: QueryGradients, keys: KeyGradients, spare: bool) {
    if spare {
        rayon::join(|| Arch::new().dispatch(queries), || Arch::new().dispatch(keys));
    } else {
        Arch::new().dispatch(queries);
        Arch::new().dispatch(keys);
    }
}

/// Gradients of the queries: a scan in the order of the tokens.
pub(super) struct QueryGradients<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) saved: &'a Saved,
    /// Outputs and their gradients, one query head after the other.
    pub(super) out: &'a [Rows<'a>],
    pub(super) grad: &'a [Rows<'a>],
    /// `(G, T, ·)`, to be filled.
    pub(super) dq: &'a mut [f32],
    pub(super) linear: Option<&'a mut LinearGradient>,
}

impl WithSimd for QueryGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, saved, out, grad, dq, mut linear } = self;
        let tokens = head.k.tokens;
        let mut tile = Tile::new(head);
        let (f, width, features) = (head.map.features(), tile.width, tile.features);
        let mut weights = vec![0f32; CHUNK * features];
        let mut dphi = vec![0f32; CHUNK * features];
        let mut keys = vec![0f32; CHUNK * features];
        let mut values = vec![0f32; width * CHUNK];
        let mut triangle = vec![0f32; CHUNK * CHUNK];
        let mut output = OutputGradient::new(head.v.width);
        // Sᵀ: a row of features for each value.
        let mut sums = vec![0f32; head.v.width * features];
        let mut norm = vec![0f32; features];
        let mut scale = saved.scale(0).to_vec();
        for chunk in 0..saved.starts.len() {
            let [start, n] = saved.chunk(chunk, tokens);
            tile.load_keys(simd, start, n);
            let new = saved.scale(chunk);
            decay_columns(simd, &scale, new, &mut sums, &mut norm);
            scale.copy_from_slice(new);
            tile.weigh_keys(simd, new, n);
            transpose(&tile.keys, CHUNK, [f, n], &mut keys, features);
            tile.load_values(start, n);
            tile.transpose_values(n, &mut values);
            for (g, q) in head.q.iter().enumerate() {
                tile.load_queries(simd, q, start, n, new, &mut weights);
                output.load(simd, &out[g], &grad[g], &saved.dens[g * tokens..], [start, n]);
                let right = Right { values: &sums, stride: features };
                let left = Left::rows(&output.dn, width);
                gemm(simd, Into::Zero, [n, features, head.v.width], left, right, &mut dphi, features);
                output.triangle(simd, n, &values, &mut triangle);
                for i in (0..n).step_by(LANES) {
                    let (rows, seen) = (LANES.min(n - i), (i + LANES).min(n));
                    let left = Left::rows(&triangle[i * CHUNK..], CHUNK);
                    let right = Right { values: &keys, stride: features };
                    let to = &mut dphi[i * features..];
                    gemm(simd, Into::Sum, [rows, features, seen], left, right, to, features);
                }
                tile.query_logs(simd, n, &weights, &output, &norm, &mut dphi);
                let row = g * tokens + start;
                let to = &mut dq[row * q.width..(row + n) * q.width];
                let (linear, at) = (linear.as_deref_mut(), [start, n]);
                head.map.query_gradients(simd, (&mut dphi, &weights), (q, at), to, linear, &mut tile.scratch);
            }
            let left = Left::transposed(&tile.values, width);
            let right = Right { values: &keys, stride: features };
            gemm(simd, Into::Sum, [head.v.width, features, n], left, right, &mut sums, features);
            for row in keys.chunks_exact(features).take(n) {
                add(simd, &mut norm, row);
            }
        }
    }
}

/// Gradients of keys and values: a scan in reverse.
pub(super) struct KeyGradients<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) saved: &'a Saved,
    pub(super) out: &'a [Rows<'a>],
    pub(super) grad: &'a [Rows<'a>],
    /// `(T, ·)`, to be filled.
    pub(super) dk: &'a mut [f32],
    /// `(T, Dv)`, to be filled.
    pub(super) dv: &'a mut [f32],
    pub(super) linear: Option<&'a mut LinearGradient>,
}

impl WithSimd for KeyGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, saved, out, grad, dk, dv, mut linear } = self;
        let (tokens, kd, vd) = (head.k.tokens, head.k.width, head.v.width);
        let mut tile = Tile::new(head);
        let (f, width, features) = (head.map.features(), tile.width, tile.features);
        let mut weights = vec![0f32; CHUNK * features];
        let mut dphi = vec![0f32; f * CHUNK];
        let mut rows = vec![0f32; CHUNK * width];
        let mut values = vec![0f32; width * CHUNK];
        let mut products = vec![0f32; CHUNK * CHUNK];
        let mut triangle = vec![0f32; CHUNK * CHUNK];
        let mut output = OutputGradient::new(vd);
        // R, and its part of the normaliser.
        let mut future = Sums::new(f, head.map.scales(), vd);
        let last = saved.starts.len() - 1;
        future.scale.copy_from_slice(saved.scale(last));
        for chunk in (0..=last).rev() {
            let [start, n] = saved.chunk(chunk, tokens);
            let columns = padded(n);
            tile.load_keys(simd, start, n);
            future.rescale_queries(simd, saved.scale(chunk));
            tile.weigh_keys(simd, saved.scale(chunk), n);
            tile.load_values(start, n);
            tile.transpose_values(n, &mut values);

            // What later chunks make of this one's keys and values, then what its own queries do.
            tile.read_future(simd, n, &values, &future, &mut rows, &mut dphi);
            for (g, q) in head.q.iter().enumerate() {
                tile.load_queries(simd, q, start, n, saved.scale(chunk), &mut weights);
                output.load(simd, &out[g], &grad[g], &saved.dens[g * tokens..], [start, n]);
                tile.products(simd, n, &weights, &mut products);
                output.triangle(simd, n, &values, &mut triangle);
                let right = Right { values: &output.dn, stride: width };
                for j in (0..n).step_by(LANES) {
                    let (keys, after) = (LANES.min(n - j), n - j);
                    let left = Left::transposed(&products[j * CHUNK + j..], CHUNK);
                    let right = Right { values: &right.values[j * width..], stride: width };
                    gemm(simd, Into::Sum, [keys, width, after], left, right, &mut rows[j * width..], width);
                }
                for j in (0..columns).step_by(2 * LANES) {
                    let left = Left::transposed(&weights[j * features..], features);
                    let right = Right { values: &triangle[j * CHUNK + j..], stride: CHUNK };
                    let to = &mut dphi[j..];
                    gemm(simd, Into::Sum, [f, (columns - j).min(2 * LANES), n - j], left, right, to, CHUNK);
                }
                tile.add_output_gradient(simd, n, &weights, &output, &mut future);
            }
            let (dk, dv) = (&mut dk[start * kd..(start + n) * kd], &mut dv[start * vd..(start + n) * vd]);
            tile.write_key_gradients(simd, [start, n], &rows, &mut dphi, [dk, dv], linear.as_deref_mut());
        }
    }
}

/// Sums scaled by `e^old`, a row of features for each value: to scale `e^new`.
#[inline(always)]
fn decay_columns<S: Simd>(simd: S, old: &[f32], new: &[f32], sums: &mut [f32], norm: &mut [f32]) {
    if old == new {
        return;
    }
    let mut factors = vec![0f32; norm.len()];
    match new {
        &[new] => factors.fill(exp(old[0] - new)),
        _ => {
            for ((factor, &old), &new) in factors.iter_mut().zip(old).zip(new) {
                *factor = exp(old - new);
            }
        }
    }
    for row in sums.chunks_exact_mut(norm.len()) {
        multiply(simd, row, &factors);
    }
    multiply(simd, norm, &factors);
}
