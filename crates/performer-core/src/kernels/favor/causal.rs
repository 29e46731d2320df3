//! Causal FAVOR for one key head and the query heads of its group, chunk by chunk.
//!
//! Within a chunk the features and products of all rows are products of small matrices, which run
//! at the speed of the multiply-add units; from chunk to chunk, the prefix sums `S = Σ φ(k)[v, 1]`
//! and the largest value of each log-feature so far are carried.
//!
//! **Scale.** In a chunk, feature `r` of a key is divided by `e^{c_r}`, where `c_r` is the largest
//! log-feature of all keys before the chunk and of its first key, which every row of the chunk may
//! see. The log-feature of a later key may exceed `c_r` by `LIMIT` (in `tile.rs`), since f32 has
//! room for `e^LIMIT`; the first key that exceeds it by more begins a chunk of its own. So where a
//! chunk ends depends on the past alone, and the numbers of a row do not depend on where its chunk
//! ends: rows at positions `≤ t` are bit-identical whatever comes after `t`. The weights of a query
//! are divided by their largest, so that, where features are positive and a key is seen, its
//! denominator is at least 1. With forget gates, the log-features of a chunk's keys are shifted by
//! minus the sum of the gates after the chunk's first token, and the limit holds for the shifted
//! ones: keys after a strong gate count for more than those before it, and may begin a new chunk.
//! Whatever its keys are, a chunk also ends before the token at which that sum falls below
//! `−LIMIT`.

use std::{
    ops::Range,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
};

use pulp::{Simd, WithSimd};

use super::super::{
    fresh::Part,
    instructions::arch,
    rows::Span,
    threads,
    vector::{LANES, dot, sum},
};
use super::{
    CHUNK, Head, Sums,
    tile::{LIMIT, Tile},
};

/// The most chunks of a segment. The backward pass keeps their features: 0.7 MB with 128 features,
/// values of 64 and one query head for each key head, which fits a second-level cache. More
/// features or larger groups may not fit.
pub(super) const SEGMENT_CHUNKS: usize = 16;

/// `Saved` is what the forward pass of one key head keeps for the backward pass.
#[derive(Debug, Default)]
pub(super) struct Saved {
    /// Denominators, one query head after the other.
    pub(super) dens: Vec<f32>,
    /// `None` where no backward pass will follow.
    pub(super) chunks: Option<Chunks>,
}

impl Saved {
    pub(super) fn for_backward() -> Self {
        Self { dens: Vec::new(), chunks: Some(Chunks::default()) }
    }
}

/// `Chunks` records where the chunks of a key head begin, their scales, and the prefix sums before
/// some of them.
#[derive(Debug, Default)]
pub(super) struct Chunks {
    /// The first token of each chunk.
    starts: Vec<usize>,
    /// The scales of each chunk, one chunk after the other.
    scales: Vec<f32>,
    pub(super) segments: Vec<Segment>,
}

/// `Segment` is a run of chunks from the `first` on, with the sums over all keys before them.
#[derive(Debug)]
pub(super) struct Segment {
    pub(super) first: usize,
    /// `(F, padded(Dv))`; empty where no key comes before.
    pub(super) sums: Vec<f32>,
    /// `padded(F)` numbers; empty where no key comes before.
    pub(super) norm: Vec<f32>,
}

impl Chunks {
    /// Adds a chunk that begins at token `start`; `sums` are those before it, at its scale. A
    /// segment ends after [`SEGMENT_CHUNKS`].
    fn push(&mut self, start: usize, sums: &Sums) {
        let is_full = |segment: &Segment| self.count() >= segment.first + SEGMENT_CHUNKS;
        if self.segments.last().is_none_or(is_full) {
            let kept = |values: &Vec<f32>| if start == 0 { Vec::new() } else { values.clone() };
            self.segments.push(Segment { first: self.count(), sums: kept(&sums.sums), norm: kept(&sums.norm) });
        }
        self.starts.push(start);
        self.scales.extend_from_slice(&sums.scale);
    }

    pub(super) fn count(&self) -> usize {
        self.starts.len()
    }

    /// The first token of chunk `i`.
    pub(super) fn start(&self, i: usize) -> usize {
        self.starts[i]
    }

    /// The tokens of chunk `i`, in a sequence of `tokens`.
    pub(super) fn chunk(&self, i: usize, tokens: usize) -> Span {
        let (start, end) = (self.starts[i], self.starts.get(i + 1).copied().unwrap_or(tokens));
        Span { start, count: end - start }
    }

    /// The scales of chunk `i`.
    pub(super) fn scale(&self, i: usize) -> &[f32] {
        let width = self.scales.len() / self.starts.len();
        &self.scales[i * width..(i + 1) * width]
    }

    /// The chunks of a segment.
    pub(super) fn range(&self, segment: usize) -> Range<usize> {
        let end = self.segments.get(segment + 1).map_or(self.count(), |next| next.first);
        self.segments[segment].first..end
    }
}

/// Computes the forward pass of one key head: writes the outputs `(G, T, Dv)`, or `(G, T, Dv + 1)`
/// with logarithms, to `out` and the denominators `(G, T)` to `saved`, and adds the keys to `sums`.
/// Returns whether every input was finite; if not, the outputs mean nothing. `spare` says that
/// there are more threads than heads: other threads then compute the outputs of a chunk while this
/// one goes on to the next keys, which changes no bit of the results.
pub(super) fn forward(head: &Head, sums: &mut Sums, out: Part, saved: &mut Saved, spare: bool) -> bool {
    let (tokens, width) = (head.k.tokens, head.out_width());
    let Saved { dens, chunks } = saved;
    let chunks = chunks.as_mut();
    dens.resize(head.q.len() * tokens, 0.0);
    let outputs = out.parts(tokens * width).into_iter().zip(dens.chunks_exact_mut(tokens));
    let outputs = outputs.map(|(rows, dens)| Output { rows, dens }).collect();
    let (busy, finite) = (AtomicUsize::new(0), AtomicBool::new(true));
    let keys_finite = if spare && tokens > CHUNK {
        rayon::scope(|scope| {
            let helpers = Some(Helpers { scope, busy: &busy, finite: &finite });
            arch().dispatch(Scan { head, sums, outputs, chunks, helpers })
        })
    } else {
        arch().dispatch(Scan { head, sums, outputs, chunks, helpers: None })
    };
    keys_finite && finite.into_inner()
}

/// `Output` is where the outputs and denominators of one query head go.
struct Output<'a> {
    rows: Part<'a>,
    dens: &'a mut [f32],
}

impl<'a> Output<'a> {
    /// Splits the first `n` tokens off.
    fn take(&mut self, n: usize, width: usize) -> Self {
        let rows = self.rows.split(n * width);
        let dens = self.dens.split_off_mut(..n).expect("no more tokens than there are");
        Self { rows, dens }
    }
}

/// `Helpers` are the threads to which the scan may leave the queries of a chunk.
struct Helpers<'a, 'scope> {
    scope: &'a rayon::Scope<'scope>,
    /// The number of chunks that wait for a thread or have one.
    busy: &'scope AtomicUsize,
    finite: &'scope AtomicBool,
}

/// `Scan` goes through the keys in the order of the tokens; the queries of a chunk read the sums
/// before the chunk's keys are added.
struct Scan<'a, 'scope> {
    head: &'scope Head<'scope>,
    sums: &'a mut Sums,
    outputs: Vec<Output<'scope>>,
    chunks: Option<&'a mut Chunks>,
    helpers: Option<Helpers<'a, 'scope>>,
}

impl WithSimd for Scan<'_, '_> {
    type Output = bool;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> bool {
        let Self { head, sums, mut outputs, mut chunks, helpers } = self;
        let (tokens, width) = (head.k.tokens, head.out_width());
        let mut tile = Tile::new(head);
        let mut work = Work::new(&tile);
        let mut finite = true;
        // Each waiting chunk keeps a copy of the sums, so their number is bounded.
        let most = 2 * threads();
        let (mut start, mut load_at_most) = (0, CHUNK);
        while start < tokens {
            let mut count = load_at_most.min(tokens - start);
            if let Some(gates) = head.gates {
                // The keys after these would most likely begin a new chunk, and would have been
                // loaded for nothing.
                count = before_forgetting(&gates[start..start + count]);
            }
            finite &= head.k.are_finite(start, count) & head.v.are_finite(start, count);
            if let Some(gates) = head.gates {
                tile.forget(sums, gates[start]);
            }
            tile.load_keys(simd, start, count);
            let n = tile.enter(simd, sums, count);
            // After a chunk that ended early, fewer keys are loaded: the next chunk may end early
            // too, and keys that it does not take are loaded again for the one after it.
            load_at_most = if n < count { LANES } else { (2 * load_at_most).min(CHUNK) };
            if let Some(chunks) = &mut chunks {
                chunks.push(start, sums);
            }
            tile.weigh_keys(simd, &sums.scale, n);
            tile.load_values(start, n);
            let forgotten = tile.forgotten(n);
            let outputs: Vec<Output> = outputs.iter_mut().map(|output| output.take(n, width)).collect();
            match &helpers {
                Some(helpers) if helpers.busy.load(Ordering::Relaxed) < most => {
                    let before = sums.clone();
                    tile.add_keys(simd, n, sums);
                    let next = tile.next();
                    let chunk = Chunk { head, tile: std::mem::replace(&mut tile, next), sums: before, start, outputs };
                    let (busy, finite) = (helpers.busy, helpers.finite);
                    busy.fetch_add(1, Ordering::Relaxed);
                    helpers.scope.spawn(move |_| {
                        finite.fetch_and(arch().dispatch(chunk), Ordering::Relaxed);
                        busy.fetch_sub(1, Ordering::Relaxed);
                    });
                }
                _ => {
                    finite &= read(simd, head, &mut tile, sums, start, outputs, &mut work);
                    tile.add_keys(simd, n, sums);
                }
            }
            if head.gates.is_some() {
                tile.forget(sums, forgotten);
            }
            start += n;
        }
        sums.rescale(simd, tile.running_maxima());
        finite
    }
}

/// Returns how many tokens come before the first at which the sum of the gates, from the second on,
/// falls below `−LIMIT`: at least 1, and all tokens where there is none. `gates` are at most 0.
fn before_forgetting(gates: &[f32]) -> usize {
    let mut forgotten = 0.0;
    let more = gates[1..].iter().position(|gate| {
        forgotten -= gate;
        forgotten > LIMIT
    });
    more.map_or(gates.len(), |more| more + 1)
}

/// `Chunk` is a chunk left to another thread: its weighed keys and values, the sums before it, and
/// where its outputs go.
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
        read(simd, self.head, &mut self.tile, &self.sums, self.start, self.outputs, &mut work)
    }
}

/// `Work` is the working memory in which the outputs of a chunk are computed.
struct Work {
    /// The weights of queries, `(CHUNK, padded(F))`.
    weights: Vec<f32>,
    /// The products `φ(q_i)·φ(k_j)` for `j ≤ i`, `(CHUNK, CHUNK)`.
    triangle: Vec<f32>,
    /// The numerators, `(CHUNK, padded(Dv))`.
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

/// Computes the outputs of a chunk's queries from the sums before it and its own keys. Returns
/// whether the queries were finite.
#[inline(always)]
fn read<S: Simd>(
    simd: S,
    head: &Head,
    tile: &mut Tile,
    sums: &Sums,
    start: usize,
    outputs: Vec<Output>,
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
            *den = dot(simd, weights, &sums.norm) + sum(simd, &triangle[i * CHUNK..i * CHUNK + seen]);
        }
        tile.write(n, rows, dens, out.take());
    }
    finite
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_gate_does_not_end_a_chunk() {
        let half = -LIMIT / 2.0;
        for (gates, tokens) in [
            (&[-1e30][..], 1),
            (&[-1e30, half, half], 3),
            (&[-1e30, half, half, -0.5, 0.0], 3),
            (&[0.0, 0.0, -1e30], 2),
            (&[half, -1e30, -1e30], 1),
        ] {
            assert_eq!(before_forgetting(gates), tokens, "{gates:?}");
        }
    }

    /// Sums that were stored before every chunk would take many times the memory.
    #[test]
    fn sums_are_kept_once_a_segment_of_sixteen_chunks() {
        for tokens in [CHUNK, 3] {
            let (mut chunks, sums) = (Chunks::default(), Sums::new(3, 3, 2));
            (0..40).for_each(|i| chunks.push(i * tokens, &sums));
            let starts: Vec<_> = chunks.segments.iter().map(|segment| chunks.start(segment.first)).collect();
            assert_eq!(starts, [0, SEGMENT_CHUNKS * tokens, 2 * SEGMENT_CHUNKS * tokens]);
            assert!(chunks.segments[0].sums.is_empty() && !chunks.segments[1].sums.is_empty());
            assert_eq!(chunks.range(2), 32..40);
        }
    }
}
