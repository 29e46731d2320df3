//! Sums of forget gates between the queries of a tile and the keys before them, and how far back
//! these leave anything to see.
//!
//! Sums are made anew for each tile of queries, from its first query on in both directions, since
//! differences of long sums would lose digits. Keys are taken from the tile's own back to the
//! first, and sums go on from tile to tile. Sinks stand far before a window: for them one sum, of
//! the gates after the sinks, goes on from one tile of queries to the next.
//!
//! Gates are at most 0, so the sums only ever fall on the way back, and a score is at most
//! `|q|·|k|/√D` plus its sum. Once this is below what makes a weight zero, for every query of the
//! tile, all earlier keys have weights of zero, too, and need not be computed. The bits of the
//! results are the same as if they were. Lin et al. 2025, <https://arxiv.org/abs/2504.06949>, leave
//! out blocks by a similar bound, of weights that are small and not zero.

use std::ops::Range;

use pulp::Simd;

use super::{
    super::{
        rows::{Matrix, Span},
        vector::{add, add_shifted, dot, max_difference},
    },
    Head, KEYS, NEGLIGIBLE, QUERIES,
};

/// From `QUERIES - 1 - key` on, whether each query of a tile is later than the key: 0 or 1.
const IS_LATER: [f32; 2 * QUERIES] = {
    let mut is_later = [0.0; 2 * QUERIES];
    let mut n = QUERIES;
    while n < 2 * QUERIES {
        is_later[n] = 1.0;
        n += 1;
    }
    is_later
};

/// The longest window whose keys are all computed: to find out which of so few could be left out
/// takes longer than it saves.
const SHORT: usize = 4 * KEYS;

/// `Forgotten` holds sums of gates around the first query of a tile.
pub(super) struct Forgotten<'a> {
    head: &'a Head<'a>,
    /// `(Tk)`.
    gates: &'a [f32],
    /// The largest norm of the keys, or infinity where none is left out anyway.
    norm: f32,
    /// The position of the first query among the keys.
    own: usize,
    /// The first key of the window's tiles; keys before it are sinks, whose sums are in `sinks`.
    first: usize,
    /// Sums of the gates after each key from the first query's own on, up to each query: `(QUERIES,
    /// QUERIES)`, a key a row. 0 where the query is not later.
    within: Vec<f32>,
    /// An upper bound of each query's scores with keys up to `own`, before the sums of the gates up
    /// to `own` are added.
    bounds: [f32; QUERIES],
    /// Sums of the gates after each key of the last tile that was reached, up to the first query.
    keys: Vec<f32>,
    /// The first key of that tile.
    start: usize,
    /// The sum of the gates from the key `start` on, up to the first query.
    sum: f64,
    /// Sums of the gates after each sink before the key `first`, up to the first query.
    sinks: Vec<f32>,
    /// The sum of the gates from the first key after the sinks on, and the key that it ends before.
    /// Only later keys are ever added to it, so it has the same bits wherever a piece begins.
    since_sinks: (f64, usize),
}

impl<'a> Forgotten<'a> {
    /// Makes the sums for one query head; they hold nothing until [`Self::begin`]. `k` holds the
    /// keys at the two ranges `keys`, the only ones that will be looked at. Returns `None` if there
    /// are no gates.
    #[inline(always)]
    pub(super) fn new<S: Simd>(simd: S, head: &'a Head<'a>, k: &Matrix, keys: [Range<usize>; 2]) -> Option<Self> {
        let gates = head.gates?;
        let mut square = 0f32;
        if head.window.is_some_and(|window| window <= SHORT) {
            square = f32::INFINITY;
        } else {
            for j in keys.into_iter().flatten() {
                let row = k.row(j, head.k.width);
                square = square.max(dot(simd, row, row));
            }
        }
        Some(Self {
            head,
            gates,
            norm: square.sqrt(),
            own: 0,
            first: 0,
            within: vec![0.0; QUERIES * QUERIES],
            bounds: [0.0; QUERIES],
            keys: Vec::new(),
            start: 0,
            sum: 0.0,
            sinks: Vec::new(),
            since_sinks: (0.0, 0),
        })
    }

    /// Begins a tile of queries, which look at no key before `start`. `columns` `(D, QUERIES)` are
    /// the queries, transposed and divided by `√D`.
    #[inline(always)]
    pub(super) fn begin(&mut self, Span { start: i, count: queries }: Span, start: usize, columns: &[f32]) {
        let own = self.head.offset.unwrap_or(0) + i;
        (self.own, self.first) = (own, self.head.first(i).max(start));
        (self.start, self.sum) = (own + 1, 0.0);
        let mut sums = [0f32; QUERIES];
        for key in (0..queries).rev() {
            if let Some(&gate) = self.gates.get(own + key + 1) {
                // A product with 0 or 1 for each query keeps whole vectors together.
                let is_later = &IS_LATER[QUERIES - 1 - key..][..QUERIES];
                for (sum, is_later) in sums.iter_mut().zip(is_later) {
                    *sum += gate * is_later;
                }
            }
            self.within[key * QUERIES..(key + 1) * QUERIES].copy_from_slice(&sums);
        }
        self.bound(queries, columns);
        // Sinks from `first` on are among the tile's other keys.
        let sinks = self.head.sinks.min(self.first);
        if sinks > start {
            self.sum_sinks(sinks);
        }
    }

    /// Computes the bounds of the queries' scores. They are wider by a thousandth and by 1 than the
    /// numbers say, which is more than sums and products of f32 lose.
    #[inline(always)]
    fn bound(&mut self, queries: usize, columns: &[f32]) {
        if self.norm == f32::INFINITY {
            self.bounds = [f32::MAX; QUERIES];
            return;
        }
        let mut squares = [0f32; QUERIES];
        for row in columns.chunks_exact(QUERIES) {
            for (square, x) in squares.iter_mut().zip(row) {
                *square += x * x;
            }
        }
        self.bounds = [f32::NEG_INFINITY; QUERIES];
        for (t, bound) in self.bounds[..queries].iter_mut().enumerate() {
            // The smaller of NaN and a number is the number.
            let product = (squares[t].sqrt() * self.norm).min(f32::MAX);
            *bound = 1.001 * product + 0.999 * self.within[t] + 1.0;
        }
    }

    /// Computes the sums after each of the first `sinks` keys.
    fn sum_sinks(&mut self, sinks: usize) {
        let (gates, own, all) = (self.gates, self.own, self.head.sinks);
        let (mut since, end) = self.since_sinks;
        for gate in &gates[end.max(all)..(own + 1).max(all)] {
            since += f64::from(*gate);
        }
        self.since_sinks = (since, own + 1);
        let mut sum = gates[sinks..all.min(own + 1)].iter().fold(since, |sum, &gate| sum + f64::from(gate));
        self.sinks.resize(sinks, 0.0);
        for (sink, gate) in self.sinks.iter_mut().zip(&gates[..sinks]).rev() {
            *sink = sum as f32;
            sum += f64::from(*gate);
        }
    }

    /// Moves back to the tile `keys`; in the window, it computes the sums of gates that
    /// [`Self::add`] needs there. Returns false once the weights `e^{s − m}` of these keys and of
    /// all keys before them are zero for every query. `largest` holds for each query a finite
    /// number that is at most its `m`: the largest score so far (−1e37 before any), or in the
    /// backward pass the largest of all.
    #[inline(always)]
    pub(super) fn reaches<S: Simd>(&mut self, simd: S, keys: Span, largest: &[f32]) -> bool {
        let end = keys.start + keys.count;
        let bound = f64::from(max_difference(simd, &self.bounds, largest));
        let is_zero = |sum: f64| 0.999 * sum + bound < f64::from(NEGLIGIBLE);
        if keys.start < self.first {
            return !is_zero(f64::from(self.sinks[end - 1]));
        }
        while self.start > end {
            self.start -= 1;
            self.sum += f64::from(self.gates[self.start]);
            if is_zero(self.sum) {
                return false;
            }
        }
        if end <= self.own + 1 && is_zero(self.sum) {
            return false;
        }
        self.keys.clear();
        self.keys.resize(self.start.min(end).saturating_sub(keys.start), 0.0);
        for (key, &gate) in self.keys.iter_mut().zip(&self.gates[keys.start..]).rev() {
            *key = self.sum as f32;
            self.sum += f64::from(gate);
        }
        self.start = self.start.min(keys.start);
        true
    }

    /// Adds the sums of the gates after key `j`, of the tile that was reached, up to each of the
    /// queries to the key's scores.
    #[inline(always)]
    pub(super) fn add<S: Simd>(&self, simd: S, j: usize, to: &mut [f32]) {
        if j > self.own {
            // Queries before the key do not see it.
            add(simd, to, &self.within[(j - self.own) * QUERIES..][..QUERIES]);
            return;
        }
        let sum = if j < self.first { self.sinks[j] } else { self.keys[j - self.start] };
        add_shifted(simd, to, &self.within[..QUERIES], sum);
    }
}

#[cfg(test)]
mod tests {
    use pulp::WithSimd;

    use super::{
        super::super::{instructions::arch, rows::Rows},
        *,
    };

    /// How many tiles of keys the last 64 of 1,024 queries reach.
    struct Reached<'a>(&'a Head<'a>, f32);

    impl WithSimd for Reached<'_> {
        type Output = usize;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> usize {
            let Self(head, score) = self;
            let tile = Span { start: 960, count: QUERIES };
            let mut forgotten = Forgotten::new(simd, head, &Matrix::new(&head.k), [0..0, 0..1024]).expect("gates");
            forgotten.begin(tile, 0, &[1.0; 16 * QUERIES]);
            let reached = [score; QUERIES];
            head.tiles(tile, 0..1024).take_while(|&keys| forgotten.reaches(simd, keys, &reached)).count()
        }
    }

    /// Scores lie between −16 and 16, and each query has reached one. What is left out is what
    /// gates bring below −60 of that for certain, and no more than a tile later.
    #[test]
    fn tiles_end_where_weights_do() {
        let ones = vec![1f32; 1024 * 16];
        let rows = Rows::new(&ones, 16);
        for (gate, score, tokens) in [
            (0.0, 16.0, 1024.0),
            (-1.0, 16.0, 60.0),
            (-1.0, -16.0, 92.0),
            (-0.2, 16.0, 300.0),
            (-0.2, -16.0, 460.0),
            (-1e30, 16.0, 0.0),
        ] {
            let gates = vec![gate; 1024];
            let head = Head {
                q: rows,
                k: rows,
                v: rows,
                offset: Some(0),
                window: None,
                sinks: 0,
                visible: None,
                gates: Some(&gates),
            };
            let reached = arch().dispatch(Reached(&head, score));
            // The first query of the tile is in the middle of the last tile of keys.
            let farthest = (tokens / KEYS as f32 + 0.5).ceil() as usize;
            let with_slack = ((tokens * 1.01 + 2.0 / gate.abs().max(1e-3)) / KEYS as f32 + 0.5).ceil() as usize;
            assert!(
                (farthest.min(8)..=with_slack.min(8)).contains(&reached),
                "gates of {gate}, scores of {score}: {reached} tiles, not {farthest}"
            );
        }
    }
}
