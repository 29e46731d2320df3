//! `Tile` is one chunk of a key head in working memory, on the CPU, with the steps that the forward
//! and backward passes over a head are made of: it loads keys and values, turns the log-features
//! `l_r(k)` of keys into weights `e^{l_r − c_r}`, where `c_r` is the scale of feature `r` in the
//! sums, and multiplies weights, values and sums. In a causal chunk, `c_r` is the largest `l_r` of
//! all keys before the chunk and of its first key; without a causal mask, that of all keys read so
//! far. Signed features have one scale `c` for all. The equations are in `mod.rs`.

use pulp::Simd;

use super::super::{
    FLOOR,
    gemm::{Accumulate, Left, Right, gemm},
    rows::{Rows, Span},
    transpose::transpose,
    vector::{
        self, LANES, add_max, add_scaled, column_excess, column_sums, dot, exp, exp_minus_above, exp_minus_both,
        max_difference, multiply, shift, sum,
    },
};
use super::{CHUNK, Head, Sums, exponential::LinearGradient, map::Scratch, padded};

/// How far the log-feature of a key may exceed the maximum with which its causal chunk begins.
pub(super) const LIMIT: f32 = 32.0;

/// Weights of positive features, of queries and of keys, are 0 where their logarithm is below this.
/// In a chunk, the weights of keys are at most `e^LIMIT` and denominators at least 1. So a product
/// that is left out is at most `e^(NEGLIGIBLE + LIMIT)`, 7e-13, of its denominator. A query has at
/// most `32 F` such products there: with up to 2,000 features, all that is left out is less than
/// what f32 rounds. If such weights were kept, their products with other small numbers, gradients
/// above all, would be below the normal numbers of f32 (subnormal), with which processors compute
/// slowly.
const NEGLIGIBLE: f32 = -60.0;

/// `Tile` holds the keys and values of one chunk.
pub(super) struct Tile<'a> {
    head: &'a Head<'a>,
    /// `padded(F)`: the length of a query's row of features.
    pub(super) features: usize,
    /// `padded(Dv)`: the length of a row of values.
    pub(super) width: usize,
    /// The features of the keys, `(F, CHUNK)`. Once loaded, they are numbers `x` whose log-features
    /// are `x − offset_j` for the `j`-th key, or signed features. Once weighed, they are the
    /// weights `e^{l − c}`, or the signed features times the weight of their key.
    pub(super) keys: Vec<f32>,
    /// One number for each key, which is subtracted from the numbers in `keys`. Where features are
    /// signed, it is the logarithm of the key's weight, which [`Self::weigh_keys`] turns into the
    /// weight.
    pub(super) offsets: [f32; CHUNK],
    /// A padded copy of the rows of values, where those of the tensor cannot be used as they are.
    copied: Vec<f32>,
    /// The rows of values in the tensor itself, where they can.
    lent: Option<&'a [f32]>,
    /// The largest value of each log-feature over all keys so far, those of the present chunk
    /// included. The scale `c` of a causal chunk leaves out its keys after the first.
    running: Vec<f32>,
    /// The maximum of each log-feature over the loaded keys.
    highest: Vec<f32>,
    /// The largest `l(q) + c` over the features of each query; the weights of the query were
    /// divided by its exponential.
    largest: [f32; CHUNK],
    /// For each loaded key, the sum of the gates from the second loaded key to this one; 0 without
    /// gates. It is at most 0, since a gate is the logarithm of a factor of at most 1.
    forgotten: [f32; CHUNK],
    pub(super) scratch: Scratch,
}

impl<'a> Tile<'a> {
    pub(super) fn new(head: &'a Head<'a>) -> Self {
        let (f, width) = (head.map.features(), padded(head.v.width));
        Self {
            head,
            features: padded(f),
            width,
            keys: vec![0f32; f * CHUNK],
            offsets: [0.0; CHUNK],
            copied: vec![0f32; CHUNK * width],
            lent: None,
            running: Vec::new(),
            highest: Vec::new(),
            largest: [0.0; CHUNK],
            forgotten: [0.0; CHUNK],
            scratch: Scratch::default(),
        }
    }

    /// Makes a tile for the chunks after this one, which takes the running maxima with it.
    pub(super) fn next(&mut self) -> Self {
        Self { running: std::mem::take(&mut self.running), ..Self::new(self.head) }
    }

    /// Loads the log-features or signed values of `count` keys from token `start` on.
    #[inline(always)]
    pub(super) fn load_keys<S: Simd>(&mut self, simd: S, start: usize, count: usize) {
        let mut hidden = [f32::INFINITY; CHUNK];
        match self.head.visible {
            None => hidden[..count].fill(0.0),
            Some(visible) => {
                for (hidden, &visible) in hidden.iter_mut().zip(&visible[start..start + count]) {
                    *hidden = if visible { 0.0 } else { f32::INFINITY };
                }
            }
        }
        let Self { head, keys, offsets, scratch, forgotten, .. } = self;
        head.map.keys(simd, &head.k, Span { start, count }, &hidden, (keys, offsets), scratch);
        let Some(gates) = head.gates else { return };
        for j in 1..count {
            forgotten[j] = forgotten[j - 1] + gates[start + j];
        }
        // Weights are relative to the first loaded token. A later key has decayed less than the
        // first by minus this sum, so its log-weight is larger by as much. Offsets are subtracted
        // from log-features, but are themselves the log-weights where features are signed.
        let sign = if head.map.is_signed() { -1.0 } else { 1.0 };
        offsets.iter_mut().zip(forgotten).take(count).for_each(|(offset, forgotten)| *offset += sign * *forgotten);
    }

    /// The sum of the gates from the second to the `n`-th loaded key, counted from 1.
    pub(super) fn forgotten(&self, n: usize) -> f32 {
        self.forgotten[n - 1]
    }

    /// Moves the token that weights are relative to: multiplies the sums by `e^by`, and adds `by`
    /// to the running maxima, which are logarithms.
    pub(super) fn forget(&mut self, sums: &mut Sums, by: f32) {
        sums.forget(by);
        self.running.iter_mut().for_each(|running| *running += by);
    }

    /// Loads `n` values from token `start` on; those of hidden keys are 0.
    pub(super) fn load_values(&mut self, start: usize, n: usize) {
        self.lent = match (self.head.v.whole_vectors(), self.head.visible) {
            (Some((values, stride)), None) if stride == self.width => Some(&values[start * stride..]),
            _ => None,
        };
        if self.lent.is_some() {
            return;
        }
        self.head.v.copy(start, n, &mut self.copied, self.width);
        if let Some(visible) = self.head.visible {
            let rows = self.copied.chunks_exact_mut(self.width).zip(&visible[start..start + n]);
            rows.filter(|(_, visible)| !**visible).for_each(|(row, _)| row.fill(0.0));
        }
    }

    /// The loaded values; each row of `width` numbers belongs to a key.
    pub(super) fn values(&self) -> &[f32] {
        self.lent.unwrap_or(&self.copied)
    }

    /// Writes the loaded values transposed, one row for each dimension, with 0 from the `n`-th key
    /// to the end of the last vector.
    pub(super) fn transpose_values(&self, n: usize, to: &mut [f32]) {
        transpose(self.values(), self.width, [n, self.head.v.width], to, CHUNK);
        for row in to.chunks_exact_mut(CHUNK) {
            row[n..padded(n)].fill(0.0);
        }
    }

    /// Begins a causal chunk at the first of `count` loaded keys. The sums are brought to the
    /// maxima of the earlier keys and the first of these. The chunk takes the keys before the first
    /// one that exceeds these maxima by more than [`LIMIT`]; their number is returned.
    #[inline(always)]
    pub(super) fn enter<S: Simd>(&mut self, simd: S, sums: &mut Sums, count: usize) -> usize {
        let columns = padded(count);
        let Self { head, keys, offsets, running, highest, .. } = self;
        let (logs, offset) = logs(head, keys, offsets);
        if running.is_empty() {
            running.clone_from(&sums.scale);
        }
        highest.clear();
        for (row, running) in logs.chunks_exact(CHUNK).zip(running.iter_mut()) {
            let first = row[0] - offset[0];
            *running = if first > *running { first } else { *running };
            highest.push(max_difference(simd, &row[..columns], offset));
        }
        let mut excess = [0f32; CHUNK];
        column_excess(simd, logs, CHUNK, running, &mut excess[..columns]);
        sums.rescale(simd, running);
        let n = (1..count).find(|&j| excess[j] - offset[j] > LIMIT).unwrap_or(count);
        if n < count {
            for (row, highest) in logs.chunks_exact(CHUNK).zip(&mut *highest) {
                *highest = row[..n].iter().zip(offset).fold(f32::NEG_INFINITY, |m, (x, offset)| m.max(x - offset));
            }
        }
        for (running, &highest) in running.iter_mut().zip(&*highest) {
            *running = if highest > *running { highest } else { *running };
        }
        n
    }

    /// Brings the sums to the maxima over the first `n` loaded keys and all keys before them, as
    /// attention that is not causal needs.
    #[inline(always)]
    pub(super) fn raise<S: Simd>(&mut self, simd: S, sums: &mut Sums, n: usize) {
        let Self { head, keys, offsets, running, .. } = self;
        let (logs, offset) = logs(head, keys, offsets);
        running.clone_from(&sums.scale);
        for (running, row) in running.iter_mut().zip(logs.chunks_exact(CHUNK)) {
            *running = running.max(max_difference(simd, &row[..padded(n)], offset));
        }
        sums.rescale(simd, running);
    }

    /// The running maximum of each log-feature over all keys so far, for the chunk that follows.
    pub(super) fn running_maxima(&self) -> &[f32] {
        &self.running
    }

    /// Turns the first `n` loaded keys into weights, and sets the columns from there up to
    /// `padded(n)` to 0. Positive features become `e^{l − c_r}`, with a maximum `c_r` for each
    /// feature. Signed features of key `j` are multiplied by `e^{s_j − c}`, where `s_j` is its
    /// log-scale and `c` the maximum of all log-scales.
    #[inline(always)]
    pub(super) fn weigh_keys<S: Simd>(&mut self, simd: S, maxima: &[f32], n: usize) {
        let columns = padded(n);
        if self.head.map.is_signed() {
            for (j, s) in self.offsets.iter_mut().enumerate() {
                *s = if j < n { exp(*s - maxima[0]) } else { 0.0 };
            }
            for row in self.keys.chunks_exact_mut(CHUNK) {
                multiply(simd, &mut row[..columns], &self.offsets[..columns]);
            }
            return;
        }
        self.offsets[n..columns].fill(f32::INFINITY);
        for (row, &c) in self.keys.chunks_exact_mut(CHUNK).zip(maxima) {
            exp_minus_both(simd, &mut row[..columns], &self.offsets[..columns], c, NEGLIGIBLE);
        }
    }

    /// Computes the weights `e^{l_r(q) + c_r − max_r(l_r(q) + c_r)}` of `n` queries, one row for
    /// each query, where `r` counts features and `c` are the maxima; or the features themselves
    /// where they are signed.
    #[inline(always)]
    pub(super) fn load_queries<S: Simd>(
        &mut self,
        simd: S,
        q: &Rows,
        start: usize,
        n: usize,
        maxima: &[f32],
        to: &mut [f32],
    ) {
        let Self { head, largest, scratch, .. } = self;
        head.map.queries(simd, q, Span { start, count: n }, to, scratch);
        if head.map.is_signed() {
            return;
        }
        let f = head.map.features();
        for (row, m) in to.chunks_exact_mut(self.features).zip(largest).take(n) {
            row[f..].fill(f32::NEG_INFINITY);
            *m = add_max(simd, &mut row[..f], maxima);
            exp_minus_above(simd, row, *m, NEGLIGIBLE);
        }
    }

    /// Computes the products `φ(q_i)·φ(k_j)` of the chunk for `j ≤ i`, and 0 for later keys.
    #[inline(always)]
    pub(super) fn products<S: Simd>(&self, simd: S, n: usize, weights: &[f32], to: &mut [f32]) {
        let right = Right { values: &self.keys, stride: CHUNK };
        let f = self.head.map.features();
        for i in (0..n).step_by(LANES) {
            let (rows, columns) = (LANES.min(n - i), i + LANES);
            let left = Left::rows(&weights[i * self.features..], self.features);
            gemm(simd, Accumulate::No, [rows, columns, f], left, right, &mut to[i * CHUNK..], CHUNK);
            for row in i..i + rows {
                to[row * CHUNK + row + 1..(row + 1) * CHUNK].fill(0.0);
            }
        }
    }

    /// Computes the part of the queries' numerators that comes from the sums.
    #[inline(always)]
    pub(super) fn read_sums<S: Simd>(&self, simd: S, n: usize, weights: &[f32], sums: &Sums, to: &mut [f32]) {
        let (f, width) = (self.head.map.features(), self.width);
        let right = Right { values: &sums.sums, stride: width };
        gemm(simd, Accumulate::No, [n, width, f], Left::rows(weights, self.features), right, to, width);
    }

    /// Adds the part of the queries' numerators that comes from their own chunk.
    #[inline(always)]
    pub(super) fn read_chunk<S: Simd>(&self, simd: S, n: usize, triangle: &[f32], to: &mut [f32]) {
        let width = self.width;
        let right = Right { values: self.values(), stride: width };
        for i in (0..n).step_by(LANES) {
            let (rows, seen) = (LANES.min(n - i), (i + LANES).min(n));
            let left = Left::rows(&triangle[i * CHUNK..], CHUNK);
            gemm(simd, Accumulate::Yes, [rows, width, seen], left, right, &mut to[i * width..], width);
        }
    }

    /// Writes the outputs: numerators (`rows`) over denominators, and the logarithms of the
    /// denominators where they are asked for. A denominator of exactly zero means that no key was
    /// visible: the row is zero.
    pub(super) fn write(&self, n: usize, rows: &[f32], dens: &[f32], out: &mut [f32]) {
        let (dv, width) = (self.head.v.width, self.head.out_width());
        let outs = out.chunks_exact_mut(width).zip(&self.largest).zip(&self.forgotten);
        for ((((out, largest), forgotten), row), &den) in outs.zip(rows.chunks_exact(self.width)).zip(dens).take(n) {
            let scale = if den == 0.0 { 0.0 } else { den.recip() };
            for (out, &x) in out[..dv].iter_mut().zip(row) {
                // A sum of terms that underflow is −0 or 0, depending on how many keys were summed.
                // Adding 0 makes it 0, so that later keys do not change a bit of the output.
                *out = x * scale + 0.0;
            }
            if let Some(log) = out.get_mut(dv) {
                *log = log_of(den, *largest);
                if self.head.gates.is_some() {
                    // Weights are relative to the chunk's first token; the query itself is later.
                    *log += forgotten;
                }
            }
        }
    }

    /// Adds the first `n` weighed keys to the sums: `S += φ(K) V`, `z += φ(K) 1`.
    #[inline(always)]
    pub(super) fn add_keys<S: Simd>(&self, simd: S, n: usize, sums: &mut Sums) {
        let (f, width) = (self.head.map.features(), self.width);
        let right = Right { values: self.values(), stride: width };
        gemm(simd, Accumulate::Yes, [f, width, n], Left::rows(&self.keys, CHUNK), right, &mut sums.sums, width);
        for (norm, row) in sums.norm.iter_mut().zip(self.keys.chunks_exact(CHUNK)) {
            *norm += sum(simd, &row[..padded(n)]);
        }
    }

    /// Finishes the gradients `dφ` of the features of `n` queries, and turns them into those of the
    /// log-features, `dφ ∘ φ`. Signed features have no logarithms, so `dφ` is left as it is for
    /// them. `dphi` `(n, padded(F))` holds `dφ` on entry but for the term `e zᵀ`, where `z` is
    /// `norm`; this function adds that term.
    #[inline(always)]
    pub(super) fn finish_query_gradients<S: Simd>(
        &self,
        simd: S,
        n: usize,
        weights: &[f32],
        output: &OutputGradient,
        norm: &[f32],
        dphi: &mut [f32],
    ) {
        let rows = dphi.chunks_exact_mut(self.features).zip(weights.chunks_exact(self.features)).zip(&output.e);
        for ((dphi, weights), &e) in rows.take(n) {
            add_scaled(simd, dphi, norm, e);
            if !self.head.map.is_signed() {
                multiply(simd, dphi, weights);
            }
        }
    }

    /// Adds `n` queries to the sums over queries: `R += φ(Q)ᵀ dn` `(F, Dv)` in `future.sums`, and
    /// `r += φ(Q)ᵀ e` `(F)` in `future.norm`.
    #[inline(always)]
    pub(super) fn add_output_gradient<S: Simd>(
        &self,
        simd: S,
        n: usize,
        weights: &[f32],
        output: &OutputGradient,
        future: &mut Sums,
    ) {
        let (f, width) = (self.head.map.features(), self.width);
        let right = Right { values: &output.dn, stride: width };
        gemm(
            simd,
            Accumulate::Yes,
            [f, width, n],
            Left::transposed(weights, self.features),
            right,
            &mut future.sums,
            width,
        );
        for (weights, &e) in weights.chunks_exact(self.features).zip(&output.e).take(n) {
            add_scaled(simd, &mut future.norm, weights, e);
        }
    }

    /// Reads the sums over later queries: `dv = Rᵀ φ(k)`, one row for each key, and
    /// `dφ(k) = R [v, 1]`, one row for each feature. `values` has one row for each dimension.
    #[inline(always)]
    pub(super) fn read_future<S: Simd>(
        &self,
        simd: S,
        n: usize,
        values: &[f32],
        future: &Sums,
        dv: &mut [f32],
        dphi: &mut [f32],
    ) {
        let (f, width, columns) = (self.head.map.features(), self.width, padded(n));
        let right = Right { values: &future.sums, stride: width };
        gemm(simd, Accumulate::No, [n, width, f], Left::transposed(&self.keys, CHUNK), right, dv, width);
        let right = Right { values, stride: CHUNK };
        let left = Left::rows(&future.sums, width);
        gemm(simd, Accumulate::No, [f, columns, self.head.v.width], left, right, dphi, CHUNK);
        for (dphi, &norm) in dphi.chunks_exact_mut(CHUNK).zip(&future.norm) {
            shift(simd, &mut dphi[..columns], norm);
        }
    }

    /// Writes the gradients of the chunk's keys and values from those of features (`dphi`, a
    /// feature a row) and of padded values (`rows`, a key a row); `dlog` receives those of the
    /// keys' log-weights, which all features of a key share.
    #[inline(always)]
    pub(super) fn write_key_gradients<S: Simd>(
        &mut self,
        simd: S,
        Span { start, count: n }: Span,
        rows: &[f32],
        dphi: &mut [f32],
        ([dk, dv], dlog): ([&mut [f32]; 2], Option<&mut [f32]>),
        linear: Option<&mut LinearGradient>,
    ) {
        let (columns, vd) = (padded(n), self.head.v.width);
        dv.chunks_exact_mut(vd).zip(rows.chunks_exact(self.width)).for_each(|(dv, row)| dv.copy_from_slice(&row[..vd]));
        let mut scales = [0f32; CHUNK];
        let features = dphi.chunks_exact_mut(CHUNK).zip(self.keys.chunks_exact(CHUNK));
        if self.head.map.is_signed() {
            for (dphi, keys) in features {
                for j in 0..columns {
                    scales[j] += keys[j] * dphi[j];
                    dphi[j] *= self.offsets[j];
                }
            }
        } else {
            for (dphi, keys) in features {
                multiply(simd, &mut dphi[..columns], &keys[..columns]);
            }
        }
        if let Some(dlog) = dlog {
            let mut total = scales;
            if !self.head.map.is_signed() {
                column_sums(simd, dphi, CHUNK, &mut total[..columns]);
            }
            dlog.copy_from_slice(&total[..n]);
        }
        self.head.map.key_gradients(
            simd,
            (dphi, &self.keys, &scales, &self.offsets),
            (&self.head.k, Span { start, count: n }),
            dk,
            linear,
            &mut self.scratch,
        );
    }
}

/// Returns rows of numbers, a key a column, and one number for each key to subtract from its
/// column; scales are maxima of the differences. For positive features these are the `F` rows of
/// `keys` and the `offsets`; for signed features, one row, the keys' log-scales, and zeros.
fn logs<'t>(head: &Head, keys: &'t [f32], offsets: &'t [f32; CHUNK]) -> (&'t [f32], &'t [f32; CHUNK]) {
    if head.map.is_signed() { (offsets, &[0.0; CHUNK]) } else { (keys, offsets) }
}

/// The logarithm of a denominator that was divided by `e^largest`. It is finite even where no key
/// is seen: −∞ minus another −∞ would be NaN.
pub(super) fn log_of(den: f32, largest: f32) -> f32 {
    if den == 0.0 { FLOOR as f32 } else { largest + den.ln() }
}

/// `OutputGradient` holds `dn = g/den` and `e = (h − g·o)/den` for the rows of a chunk, where `g`
/// is the gradient of the output `o` and `h` that of the denominator's logarithm.
pub(super) struct OutputGradient {
    /// A query a row of `width` numbers.
    pub(super) dn: Vec<f32>,
    pub(super) e: [f32; CHUNK],
    /// The dimension of values, `Dv`.
    values: usize,
    /// `padded(Dv)`: the length of a row of `dn`.
    width: usize,
}

impl OutputGradient {
    pub(super) fn new(values: usize) -> Self {
        let width = padded(values);
        Self { values, dn: vec![0f32; CHUNK * width], e: [0.0; CHUNK], width }
    }

    /// Computes both for `n` queries from token `start` on.
    #[inline(always)]
    pub(super) fn load<S: Simd>(
        &mut self,
        simd: S,
        (out, grad): (&Rows, &Rows),
        dens: &[f32],
        Span { start, count: n }: Span,
        scratch: &mut Vec<f32>,
    ) {
        // A row may end with the logarithm, after the values.
        grad.first(self.values).copy(start, n, &mut self.dn, self.width);
        let (outs, stride) = out.first(self.values).read(start, n, scratch);
        for (i, dn) in self.dn.chunks_exact_mut(self.width).enumerate().take(n) {
            let out = &outs[i * stride..][..self.values];
            let den = dens[start + i];
            let scale = if den == 0.0 { 0.0 } else { den.recip() };
            let log = if grad.width > self.values { grad.number(start + i, self.values) } else { 0.0 };
            self.e[i] = (log - dot(simd, &dn[..self.values], out)) * scale;
            vector::scale(simd, dn, scale);
        }
    }

    /// Computes the gradient of the products of queries and keys: `dn_i·v_j + e_i` for `j ≤ i`, and
    /// 0 for later keys. `values` are the values, a dimension a row.
    #[inline(always)]
    pub(super) fn triangle<S: Simd>(&self, simd: S, n: usize, values: &[f32], to: &mut [f32]) {
        let right = Right { values, stride: CHUNK };
        for i in (0..n).step_by(LANES) {
            let (rows, columns) = (LANES.min(n - i), i + LANES);
            let left = Left::rows(&self.dn[i * self.width..], self.width);
            gemm(simd, Accumulate::No, [rows, columns, self.values], left, right, &mut to[i * CHUNK..], CHUNK);
            for row in i..i + rows {
                shift(simd, &mut to[row * CHUNK..row * CHUNK + columns], self.e[row]);
                to[row * CHUNK + row + 1..(row + 1) * CHUNK].fill(0.0);
            }
        }
    }
}
