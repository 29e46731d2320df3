//! Gradients of causal FAVOR for one key head and the query heads of its group.
//!
//! Let `g` be the gradients of the outputs `o`, `den` the denominators and `h` the gradients of
//! their logarithms (0 where these are not returned): `dn_t = g_t/den_t` and
//! `e_t = (h_t − g_t·o_t)/den_t`. A scan in the order of the tokens carries
//! `[S_t, z_t] = Σ_{j≤t} φ(k_j) [v_j, 1]ᵀ`, as the forward pass did, and gives
//! `dφ(q_t) = S_t dn_t + e_t z_t`; a scan in reverse carries
//! `[R_j, r_j] = Σ_{t≥j} φ(q_t) [dn_t, e_t]ᵀ` and gives `dφ(k_j) = R_j v_j + r_j` and
//! `dv_j = R_jᵀ φ(k_j)`. `S` and `R` are `(F, Dv)`, `z` and `r` are `(F)`.
//!
//! Both scans need the features of every chunk. So the tokens are taken in segments, the last one
//! first: the scan over a segment's queries begins with the sums that the forward pass kept there,
//! and leaves the features in the cache for the scan over its keys. The forward pass keeps
//! `F·Dv/512` numbers a token, beside `F/32` for the scales. Where chunks are short, because gates
//! forget much or keys grow, it keeps more: `F·Dv/16` and `F` if each token is a chunk of its own.

use pulp::{Simd, WithSimd};

use super::super::{
    fresh::Part,
    gemm::{Accumulate, Left, Right, gemm},
    instructions::arch,
    rows::{Rows, Span},
    transpose::transpose,
    vector::{LANES, add, exp, multiply},
};
use super::{
    CHUNK, Head, Sums, at_most_zero,
    causal::{Chunks, SEGMENT_CHUNKS, Saved},
    exponential::LinearGradient,
    padded,
    tile::{OutputGradient, Tile},
};

/// `Given` is what the backward pass reads: a head, what its forward pass kept, the outputs and
/// their gradients.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) saved: &'a Saved,
    /// One query head after the other, as are those of `grad`.
    pub(super) out: &'a [Rows<'a>],
    pub(super) grad: &'a [Rows<'a>],
}

/// `Gradients` is what the backward pass fills.
pub(super) struct Gradients<'a> {
    /// The gradients of queries, `(G, T, ·)`.
    pub(super) dq: Part<'a>,
    /// The gradients of keys, `(T, ·)`.
    pub(super) dk: Part<'a>,
    /// The gradients of values, `(T, Dv)`.
    pub(super) dv: Part<'a>,
    /// The gradients of the log-weights of keys, `(T)`, which those of gates are made of.
    pub(super) dlog: Option<&'a mut [f32]>,
    /// The gradients of the map's parameters for queries and for keys, where it is trained.
    pub(super) linear: Option<&'a mut [LinearGradient; 2]>,
}

/// The backward pass. With `spare` threads, both scans run side by side, with the same bits.
pub(super) fn backward(given: Given, gradients: Gradients, spare: bool) {
    let chunks = given.saved.chunks.as_ref().expect("a tracked forward pass keeps its chunks");
    let Gradients { dq, dk, dv, dlog, linear } = gradients;
    let (of_queries, of_keys) = match linear {
        Some([queries, keys]) => (Some(queries), Some(keys)),
        None => (None, None),
    };
    let dq = dq.parts(given.head.k.tokens * given.head.q[0].width);
    let queries = Some(OfQueries { dq, linear: of_queries });
    let keys = Some(OfKeys { dk, dv, dlog, linear: of_keys });
    let scans = |queries, keys| arch().dispatch(Scans { given, chunks, queries, keys });
    if spare {
        rayon::join(|| scans(queries, None), || scans(None, keys));
    } else {
        scans(queries, keys);
    }
}

/// `OfQueries` are the gradients that the scan over queries fills.
struct OfQueries<'a> {
    /// One for each query head.
    dq: Vec<Part<'a>>,
    linear: Option<&'a mut LinearGradient>,
}

/// `OfKeys` are the gradients that the scan over keys fills.
struct OfKeys<'a> {
    dk: Part<'a>,
    dv: Part<'a>,
    dlog: Option<&'a mut [f32]>,
    linear: Option<&'a mut LinearGradient>,
}

/// `Scans` is the scan over queries, the scan over keys, or both together.
struct Scans<'a> {
    given: Given<'a>,
    chunks: &'a Chunks,
    queries: Option<OfQueries<'a>>,
    keys: Option<OfKeys<'a>>,
}

impl WithSimd for Scans<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { given, chunks, queries, keys } = self;
        let mut queries = queries.map(|to| QueryScan::new(given, chunks, to));
        let mut keys = keys.map(|to| KeyScan::new(given, chunks, to));
        // Where there are both scans, the first leaves the features of a segment to the second.
        let both = queries.is_some() && keys.is_some();
        let kept = if both { chunks.count().min(SEGMENT_CHUNKS) } else { 1 };
        let mut features: Vec<Features> = (0..kept).map(|_| Features::new(given.head)).collect();
        for segment in (0..chunks.segments.len()).rev() {
            if let Some(queries) = &mut queries {
                queries.enter(segment);
                for (i, chunk) in chunks.range(segment).enumerate() {
                    queries.chunk(simd, chunk, &mut features[i % kept]);
                }
            }
            if let Some(keys) = &mut keys {
                for (i, chunk) in chunks.range(segment).enumerate().rev() {
                    keys.chunk(simd, chunk, &mut features[i % kept], both);
                }
            }
        }
    }
}

/// `Features` is what both scans need of a chunk.
struct Features {
    /// The weights of the keys, see [`Tile::keys`] and [`Tile::offsets`].
    keys: Vec<f32>,
    offsets: [f32; CHUNK],
    /// One for each query head.
    queries: Vec<QueryFeatures>,
}

/// `QueryFeatures` is what both scans need of a chunk of one query head.
struct QueryFeatures {
    /// The weights of the queries, `(C, padded(F))`.
    weights: Vec<f32>,
    output: OutputGradient,
    /// The gradients of the products of queries and keys, `(C, C)`.
    triangle: Vec<f32>,
}

impl Features {
    fn new(head: &Head) -> Self {
        let f = head.map.features();
        let of_query = || QueryFeatures {
            weights: vec![0f32; CHUNK * padded(f)],
            output: OutputGradient::new(head.v.width),
            triangle: vec![0f32; CHUNK * CHUNK],
        };
        let queries = head.q.iter().map(|_| of_query()).collect();
        Self { keys: vec![0f32; f * CHUNK], offsets: [0.0; CHUNK], queries }
    }

    /// Computes them for `n` tokens from `start` on. The weights of the keys stay in `tile`, which
    /// also gets the values; `values` receives the values transposed, a dimension a row.
    #[inline(always)]
    fn fill<S: Simd>(
        &mut self,
        simd: S,
        given: Given,
        Span { start, count: n }: Span,
        scale: &[f32],
        tile: &mut Tile,
        values: &mut [f32],
    ) {
        let Given { head, saved, out, grad } = given;
        tile.load_keys(simd, start, n);
        tile.weigh_keys(simd, scale, n);
        tile.load_values(start, n);
        tile.transpose_values(n, values);
        for (g, (q, to)) in head.q.iter().zip(&mut self.queries).enumerate() {
            tile.load_queries(simd, q, start, n, scale, &mut to.weights);
            let dens = &saved.dens[g * head.k.tokens..];
            to.output.load(simd, (&out[g], &grad[g]), dens, Span { start, count: n }, &mut tile.scratch.rows);
            to.output.triangle(simd, n, values, &mut to.triangle);
        }
    }
}

/// `QueryScan` computes the gradients of the queries, in the order of the tokens.
struct QueryScan<'a> {
    given: Given<'a>,
    chunks: &'a Chunks,
    to: OfQueries<'a>,
    /// The gradients of the segment's queries, one for each query head.
    dq: Vec<&'a mut [f32]>,
    tile: Tile<'a>,
    /// The weights of a chunk's keys, a key a row, `(CHUNK, padded(F))`.
    keys: Vec<f32>,
    /// `S` before the chunk, transposed, `(Dv, padded(F))`.
    sums: Vec<f32>,
    /// `z` before the chunk, `padded(F)` numbers.
    norm: Vec<f32>,
    /// The logarithms of the scales of `sums` and `norm`, as in [`Sums`].
    scale: Vec<f32>,
    /// The first token of the chunk to which `scale` belongs. Gates are counted from there.
    at: usize,
    /// The chunk's values, transposed, `(padded(Dv), CHUNK)`.
    values: Vec<f32>,
    /// The gradients of the features of the chunk's queries, `(CHUNK, padded(F))`.
    dphi: Vec<f32>,
}

impl<'a> QueryScan<'a> {
    fn new(given: Given<'a>, chunks: &'a Chunks, to: OfQueries<'a>) -> Self {
        let tile = Tile::new(given.head);
        let (features, width) = (tile.features, tile.width);
        Self {
            given,
            chunks,
            to,
            dq: Vec::new(),
            tile,
            keys: vec![0f32; CHUNK * features],
            sums: vec![0f32; given.head.v.width * features],
            norm: vec![0f32; features],
            scale: Vec::new(),
            at: 0,
            values: vec![0f32; width * CHUNK],
            dphi: vec![0f32; CHUNK * features],
        }
    }

    /// Begins a segment: takes the sums that the forward pass kept before it.
    fn enter(&mut self, segment: usize) {
        let from = &self.chunks.segments[segment];
        let head = self.given.head;
        let before = self.chunks.start(from.first) * head.q[0].width;
        self.dq = self.to.dq.iter_mut().map(|dq| dq.take_last(dq.len() - before)).collect();
        if from.sums.is_empty() {
            self.sums.fill(0.0);
            self.norm.fill(0.0);
        } else {
            let size = [head.map.features(), head.v.width];
            transpose(&from.sums, self.tile.width, size, &mut self.sums, self.tile.features);
            self.norm.copy_from_slice(&from.norm);
        }
        self.scale.clear();
        self.scale.extend_from_slice(self.chunks.scale(from.first));
        self.at = self.chunks.start(from.first);
    }

    /// Computes the gradients of the next chunk's queries and leaves its features in `of_chunk`.
    #[inline(always)]
    fn chunk<S: Simd>(&mut self, simd: S, chunk: usize, of_chunk: &mut Features) {
        let Self { given, chunks, to, dq, tile, keys, sums, norm, scale, at, values, dphi } = self;
        let head = given.head;
        let (f, vd) = (head.map.features(), head.v.width);
        let (features, width) = (tile.features, tile.width);
        let span = chunks.chunk(chunk, head.k.tokens);
        let Span { start, count: n } = span;
        let new = chunks.scale(chunk);
        of_chunk.fill(simd, *given, span, new, tile, values);
        if head.gates.is_some() {
            let forgotten = head.forgotten(*at, start);
            scale.iter_mut().for_each(|scale| *scale += forgotten);
            *at = start;
        }
        decay_columns(simd, scale, new, sums, norm);
        scale.copy_from_slice(new);
        transpose(&tile.keys, CHUNK, [f, n], keys, features);
        let of_queries = head.q.iter().zip(&of_chunk.queries).zip(dq);
        for ((q, QueryFeatures { weights, output, triangle }), dq) in of_queries {
            let (left, right) = (Left::rows(&output.dn, width), Right { values: sums, stride: features });
            gemm(simd, Accumulate::No, [n, features, vd], left, right, dphi, features);
            let right = Right { values: keys, stride: features };
            for i in (0..n).step_by(LANES) {
                let (rows, seen) = (LANES.min(n - i), (i + LANES).min(n));
                let left = Left::rows(&triangle[i * CHUNK..], CHUNK);
                gemm(simd, Accumulate::Yes, [rows, features, seen], left, right, &mut dphi[i * features..], features);
            }
            tile.finish_query_gradients(simd, n, weights, output, norm, dphi);
            let dq = dq.split_off_mut(..n * q.width).expect("as many rows as tokens");
            let (linear, at) = (to.linear.as_deref_mut(), span);
            head.map.query_gradients(simd, (dphi, weights), (q, at), dq, linear, &mut tile.scratch);
        }
        let (left, right) = (Left::transposed(tile.values(), width), Right { values: keys, stride: features });
        gemm(simd, Accumulate::Yes, [vd, features, n], left, right, sums, features);
        for row in keys.chunks_exact(features).take(n) {
            add(simd, norm, row);
        }
        std::mem::swap(&mut tile.keys, &mut of_chunk.keys);
        of_chunk.offsets = tile.offsets;
    }
}

/// `KeyScan` computes the gradients of keys and values, from the last token to the first.
struct KeyScan<'a> {
    given: Given<'a>,
    chunks: &'a Chunks,
    to: OfKeys<'a>,
    tile: Tile<'a>,
    /// `R` and `r`, the sums over the queries after a chunk (`future.sums` and `future.norm`).
    future: Sums,
    /// The first token of the chunk to which the scale of `future` belongs. Gates are counted from
    /// there.
    at: usize,
    /// The chunk's values, transposed, `(padded(Dv), CHUNK)`.
    values: Vec<f32>,
    /// The gradients of the chunk's values, `(CHUNK, padded(Dv))`.
    rows: Vec<f32>,
    /// The gradients of the features of the chunk's keys, `(F, CHUNK)`.
    dphi: Vec<f32>,
    /// The products `φ(q_i)·φ(k_j)` for one query head, `(CHUNK, CHUNK)`, a query a row.
    products: Vec<f32>,
}

impl<'a> KeyScan<'a> {
    fn new(given: Given<'a>, chunks: &'a Chunks, to: OfKeys<'a>) -> Self {
        let head = given.head;
        let (tile, f) = (Tile::new(head), head.map.features());
        let mut future = Sums::new(f, head.map.scales(), head.v.width);
        future.scale.copy_from_slice(chunks.scale(chunks.count() - 1));
        Self {
            given,
            chunks,
            to,
            future,
            at: chunks.start(chunks.count() - 1),
            values: vec![0f32; tile.width * CHUNK],
            rows: vec![0f32; CHUNK * tile.width],
            tile,
            dphi: vec![0f32; f * CHUNK],
            products: vec![0f32; CHUNK * CHUNK],
        }
    }

    /// Computes the gradients of the keys and values of chunk `chunk`. Chunks come from the last to
    /// the first. `filled` says that `of_chunk` already holds the chunk's features.
    #[inline(always)]
    fn chunk<S: Simd>(&mut self, simd: S, chunk: usize, of_chunk: &mut Features, filled: bool) {
        let Self { given, chunks, to, tile, future, at, values, rows, dphi, products } = self;
        let head = given.head;
        let (kd, vd, f) = (head.k.width, head.v.width, head.map.features());
        let (features, width) = (tile.features, tile.width);
        let span = chunks.chunk(chunk, head.k.tokens);
        let Span { start, count: n } = span;
        let (columns, scale) = (padded(n), chunks.scale(chunk));
        if filled {
            std::mem::swap(&mut tile.keys, &mut of_chunk.keys);
            tile.offsets = of_chunk.offsets;
            tile.load_values(start, n);
            tile.transpose_values(n, values);
        } else {
            of_chunk.fill(simd, *given, span, scale, tile, values);
        }
        if head.gates.is_some() {
            // The weights of queries have the keys' scale as a factor, and the scale of `future` is
            // as of token `at`. To bring it back to the earlier token `start`, the sum of the gates
            // between the two, which is at most 0, is subtracted from it.
            future.forget(-head.forgotten(start, *at));
            *at = start;
        }
        future.rescale_queries(simd, scale);

        // First the part from the queries of later chunks, then that from the chunk's own queries.
        tile.read_future(simd, n, values, future, rows, dphi);
        for QueryFeatures { weights, output, triangle } in &of_chunk.queries {
            tile.products(simd, n, weights, products);
            for j in (0..n).step_by(LANES) {
                let (keys, after) = (LANES.min(n - j), n - j);
                let left = Left::transposed(&products[j * CHUNK + j..], CHUNK);
                let right = Right { values: &output.dn[j * width..], stride: width };
                gemm(simd, Accumulate::Yes, [keys, width, after], left, right, &mut rows[j * width..], width);
            }
            for j in (0..columns).step_by(2 * LANES) {
                let left = Left::transposed(&weights[j * features..], features);
                let right = Right { values: &triangle[j * CHUNK + j..], stride: CHUNK };
                let size = [f, (columns - j).min(2 * LANES), n - j];
                gemm(simd, Accumulate::Yes, size, left, right, &mut dphi[j..], CHUNK);
            }
            tile.add_output_gradient(simd, n, weights, output, future);
        }
        let (dk, dv) = (to.dk.take_last(n * kd), to.dv.take_last(n * vd));
        let dlog = to.dlog.as_deref_mut().map(|dlog| &mut dlog[start..start + n]);
        tile.write_key_gradients(simd, span, rows, dphi, ([dk, dv], dlog), to.linear.as_deref_mut());
    }
}

/// Brings transposed sums (a value dimension a row of features) from scale `old` to `new`.
#[inline(always)]
fn decay_columns<S: Simd>(simd: S, old: &[f32], new: &[f32], sums: &mut [f32], norm: &mut [f32]) {
    if old == new {
        return;
    }
    let mut factors = vec![0f32; norm.len()];
    match new {
        &[new] => factors.fill(exp(at_most_zero(old[0] - new))),
        _ => {
            for ((factor, &old), &new) in factors.iter_mut().zip(old).zip(new) {
                *factor = exp(at_most_zero(old - new));
            }
        }
    }
    for row in sums.chunks_exact_mut(norm.len()) {
        multiply(simd, row, &factors);
    }
    multiply(simd, norm, &factors);
}
