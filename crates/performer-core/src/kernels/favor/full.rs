//! FAVOR without a causal mask (bidirectional, or across sequences) for one key head and the query
//! heads of its group.
//!
//! One pass over the keys makes `S = Σ φ(k)[v, 1]`, scaled by a running maximum per feature; one
//! pass over the queries reads it. Backward: one pass over the queries gives
//! `dφ(q_i) = S [dn_i, e_i]` and `R = Σ φ(q_i) [dn_i, e_i]ᵀ`, one over the keys
//! `dφ(k_j) = R [v_j, 1]` and `dv_j = Rᵀ φ(k_j)`, with `dn = g/den` and `e = (h − g·o)/den` for the
//! gradients `g` of the outputs `o` and `h` of the logarithms of the denominators `den` (`h = 0`
//! where no logarithms are returned).

use pulp::{Simd, WithSimd};

use super::super::{
    for_heads,
    gemm::{Accumulate, Left, Right, gemm},
    instructions::arch,
    rows::{Rows, Span},
    transpose::transpose,
    vector::dot,
};
use super::{
    CHUNK, Head, Sums,
    exponential::LinearGradient,
    tile::{OutputGradient, Tile},
};

/// The tokens of a piece: what a thread takes at a time where there are more threads than heads.
const PIECE: usize = 4 * CHUNK;

/// `Saved` is what the forward pass keeps for the backward pass.
#[derive(Debug, Default)]
pub(super) struct Saved {
    sums: Option<Sums>,
    /// Denominators, one query head after the other.
    dens: Vec<f32>,
}

/// Computes the forward pass of one key head: adds all keys to `sums`, which hold none before, and
/// writes the outputs `(G, Tq, Dv)`, or `(G, Tq, Dv + 1)` with logarithms. Returns whether every
/// input was finite; if not, the outputs mean nothing. `spare` says that there are more threads
/// than heads: the queries are then divided into pieces, which changes no bit of the results.
pub(super) fn forward(head: &Head, mut sums: Sums, out: &mut [f32], saved: &mut Saved, spare: bool) -> bool {
    let (width, tokens) = (head.out_width(), head.q[0].tokens);
    let mut finite = arch().dispatch(Keys { head, sums: &mut sums });
    saved.dens.resize(head.q.len() * tokens, 0.0);
    let piece = if spare { PIECE } else { tokens };
    let mut work = Vec::new();
    let outputs = out.chunks_exact_mut(tokens * width).zip(saved.dens.chunks_exact_mut(tokens));
    for (q, (out, dens)) in head.q.iter().zip(outputs) {
        let pieces = out.chunks_mut(piece * width).zip(dens.chunks_mut(piece)).enumerate();
        work.extend(pieces.map(|(i, (out, dens))| Queries { head, q, sums: &sums, start: i * piece, out, dens }));
    }
    finite &= !for_heads(work, |queries| arch().dispatch(queries)).contains(&false);
    saved.sums = Some(sums);
    finite
}

/// `Keys` is the pass over the keys, which makes the sums.
struct Keys<'a> {
    head: &'a Head<'a>,
    /// Sums over no key, to be filled.
    sums: &'a mut Sums,
}

impl WithSimd for Keys<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Self { head, sums } = self;
        let mut tile = Tile::new(head);
        let mut finite = true;
        for Span { start, count: n } in chunks(0, head.k.tokens) {
            finite &= head.k.are_finite(start, n) & head.v.are_finite(start, n);
            tile.load_keys(simd, start, n);
            tile.raise(simd, sums, n);
            tile.weigh_keys(simd, &sums.scale, n);
            tile.load_values(start, n);
            tile.add_keys(simd, n, sums);
        }
        finite
    }
}

/// `Queries` is the pass over a piece of one query head from token `start` on, which reads the
/// sums.
struct Queries<'a> {
    head: &'a Head<'a>,
    q: &'a Rows<'a>,
    sums: &'a Sums,
    start: usize,
    out: &'a mut [f32],
    dens: &'a mut [f32],
}

impl WithSimd for Queries<'_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Self { head, q, sums, start: first, out, dens } = self;
        let width = head.out_width();
        let mut tile = Tile::new(head);
        let mut weights = vec![0f32; CHUNK * tile.features];
        let mut rows = vec![0f32; CHUNK * tile.width];
        let mut finite = true;
        for Span { start, count: n } in chunks(first, first + dens.len()) {
            finite &= q.are_finite(start, n);
            tile.load_queries(simd, q, start, n, &sums.scale, &mut weights);
            tile.read_sums(simd, n, &weights, sums, &mut rows);
            let dens = &mut dens[start - first..start - first + n];
            for (den, weights) in dens.iter_mut().zip(weights.chunks_exact(tile.features)) {
                *den = dot(simd, weights, &sums.norm);
            }
            tile.write(n, &rows, dens, &mut out[(start - first) * width..(start - first + n) * width]);
        }
        finite
    }
}

/// The arguments of the backward pass, with the gradients `(G, Tq, ·)`, `(Tk, ·)` and `(Tk, Dv)`
/// that it fills.
pub(super) struct Gradients<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) saved: &'a Saved,
    /// Outputs and their gradients, one query head after the other.
    pub(super) out: &'a [Rows<'a>],
    pub(super) grad: &'a [Rows<'a>],
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
    /// The gradients of the map's parameters for queries and for keys, where it is trained.
    pub(super) linear: Option<&'a mut [LinearGradient; 2]>,
}

/// The backward pass. With `spare` threads, pieces of the keys run side by side, with the same
/// bits.
pub(super) fn backward(gradients: Gradients, spare: bool) {
    let Gradients { head, saved, out, grad, dq, dk, dv, linear } = gradients;
    let (of_queries, mut of_keys) = match linear {
        Some([queries, keys]) => (Some(queries), Some(keys)),
        None => (None, None),
    };
    let Some(sums) = &saved.sums else { return };
    let dens = &saved.dens[..];
    let mut future = Sums::new(head.map.features(), head.map.scales(), head.v.width);
    arch().dispatch(QueryGradients { head, sums, dens, out, grad, dq, future: &mut future, linear: of_queries });
    // A trained map's gradient is a sum over tokens, whose order must not depend on the number of
    // threads.
    let piece = if spare && of_keys.is_none() { PIECE } else { head.k.tokens };
    let pieces = dk.chunks_mut(piece * head.k.width).zip(dv.chunks_mut(piece * head.v.width)).enumerate();
    let work = pieces.map(|(i, (dk, dv))| {
        let linear = of_keys.take();
        KeyGradients { head, sums, future: &future, start: i * piece, dk, dv, linear }
    });
    for_heads(work.collect(), |keys| arch().dispatch(keys));
}

/// `QueryGradients` is the pass over the queries, which gives their gradients and `R` (`future`).
struct QueryGradients<'a> {
    head: &'a Head<'a>,
    sums: &'a Sums,
    dens: &'a [f32],
    out: &'a [Rows<'a>],
    grad: &'a [Rows<'a>],
    dq: &'a mut [f32],
    future: &'a mut Sums,
    linear: Option<&'a mut LinearGradient>,
}

impl WithSimd for QueryGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, sums, dens, out, grad, dq, future, mut linear } = self;
        let mut tile = Tile::new(head);
        let (f, width, features, vd) = (head.map.features(), tile.width, tile.features, head.v.width);
        let mut weights = vec![0f32; CHUNK * features];
        let mut dphi = vec![0f32; CHUNK * features];
        let mut output = OutputGradient::new(vd);
        let mut columns = vec![0f32; width * features];
        transpose(&sums.sums, width, [f, vd], &mut columns, features);
        for (g, q) in head.q.iter().enumerate() {
            for span @ Span { start, count: n } in chunks(0, q.tokens) {
                tile.load_queries(simd, q, start, n, &sums.scale, &mut weights);
                let dens = &dens[g * q.tokens..];
                output.load(simd, (&out[g], &grad[g]), dens, span, &mut tile.scratch.rows);
                let right = Right { values: &columns, stride: features };
                gemm(
                    simd,
                    Accumulate::No,
                    [n, features, vd],
                    Left::rows(&output.dn, width),
                    right,
                    &mut dphi,
                    features,
                );
                tile.add_output_gradient(simd, n, &weights, &output, future);
                tile.finish_query_gradients(simd, n, &weights, &output, &sums.norm, &mut dphi);
                let to = &mut dq[(g * q.tokens + start) * q.width..][..n * q.width];
                let (linear, at) = (linear.as_deref_mut(), span);
                head.map.query_gradients(simd, (&mut dphi, &weights), (q, at), to, linear, &mut tile.scratch);
            }
        }
    }
}

/// `KeyGradients` is the pass over a piece of the keys from token `start` on, which gives the
/// gradients of keys and values.
struct KeyGradients<'a> {
    head: &'a Head<'a>,
    sums: &'a Sums,
    future: &'a Sums,
    start: usize,
    dk: &'a mut [f32],
    dv: &'a mut [f32],
    linear: Option<&'a mut LinearGradient>,
}

impl WithSimd for KeyGradients<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, sums, future, start: first, dk, dv, mut linear } = self;
        let mut tile = Tile::new(head);
        let (kd, vd) = (head.k.width, head.v.width);
        let mut dphi = vec![0f32; head.map.features() * CHUNK];
        let mut rows = vec![0f32; CHUNK * tile.width];
        let mut values = vec![0f32; tile.width * CHUNK];
        for span @ Span { start, count: n } in chunks(first, first + dv.len() / vd) {
            tile.load_keys(simd, start, n);
            tile.weigh_keys(simd, &sums.scale, n);
            tile.load_values(start, n);
            tile.transpose_values(n, &mut values);
            tile.read_future(simd, n, &values, future, &mut rows, &mut dphi);
            let at = start - first;
            let (dk, dv) = (&mut dk[at * kd..(at + n) * kd], &mut dv[at * vd..(at + n) * vd]);
            tile.write_key_gradients(simd, span, &rows, &mut dphi, ([dk, dv], None), linear.as_deref_mut());
        }
    }
}

/// Divides tokens into chunks.
fn chunks(start: usize, end: usize) -> impl Iterator<Item = Span> {
    (start..end).step_by(CHUNK).map(move |start| Span { start, count: CHUNK.min(end - start) })
}
