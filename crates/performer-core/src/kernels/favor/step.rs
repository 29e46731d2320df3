//! A decoding step: the key of one more token enters the sums and its queries read them, in one
//! pass over `S`. It costs `O(F·Dv)` a head, whatever came before.

use pulp::{Simd, WithSimd};

use super::super::{
    rows::Span,
    vector::{add, add_max, add_scaled, decay_add, dot, exp, exp_minus, multiply, scale},
};
use super::{Head, Sums, padded, tile::log_of};

/// `Step` is a decoding step of one key head: the outputs `(G, 1, Dv)`, or `(G, 1, Dv + 1)` with
/// logarithms, from finite inputs of one token.
pub(super) struct Step<'a> {
    pub(super) head: &'a Head<'a>,
    pub(super) sums: &'a mut Sums,
    pub(super) out: &'a mut [f32],
}

impl WithSimd for Step<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Self { head, sums, out } = self;
        let (f, features, dv, width) =
            (head.map.features(), padded(head.map.features()), head.v.width, padded(head.v.width));
        let out_width = head.out_width();
        let mut scratch = std::mem::take(&mut sums.scratch);
        scratch.rows.resize((2 + head.q.len()) * features + (1 + head.q.len()) * width, 0.0);
        let (key, rest) = scratch.rows.split_at_mut(features);
        let (decay, rest) = rest.split_at_mut(features);
        let (weights, rest) = rest.split_at_mut(head.q.len() * features);
        let (value, rows) = rest.split_at_mut(width);

        if let Some(gates) = head.gates {
            sums.forget(gates[0]);
        }
        let log = head.map.key(simd, &head.k, key, &mut scratch.map);
        if head.map.is_signed() {
            let new = sums.scale[0].max(log);
            decay.fill(exp(sums.scale[0] - new));
            scale(simd, key, exp(log - new));
            sums.scale[0] = new;
        } else {
            for ((key, decay), c) in key.iter_mut().zip(decay.iter_mut()).zip(&mut sums.scale) {
                let new = if *key > *c { *key } else { *c };
                *decay = *c - new;
                *key -= new;
                *c = new;
            }
            // The padding becomes −∞, whose exponential is 0: it enters the padded norms and
            // products.
            key[f..].fill(f32::NEG_INFINITY);
            decay[f..].fill(f32::NEG_INFINITY);
            exp_minus(simd, key, 0.0);
            exp_minus(simd, decay, 0.0);
        }
        multiply(simd, &mut sums.norm, decay);
        add(simd, &mut sums.norm, key);
        let mut largest = std::mem::take(&mut scratch.largest);
        largest.clear();
        for (q, weights) in head.q.iter().zip(weights.chunks_exact_mut(features)) {
            head.map.queries(simd, q, Span::of(0), weights, &mut scratch.map);
            if head.map.is_signed() {
                continue;
            }
            weights[f..].fill(f32::NEG_INFINITY);
            let m = add_max(simd, &mut weights[..f], &sums.scale);
            exp_minus(simd, weights, m);
            largest.push(m);
        }

        head.v.copy(0, 1, value, width);
        rows.fill(0.0);
        for (r, sum) in sums.sums.chunks_exact_mut(width).enumerate() {
            decay_add(simd, sum, value, decay[r], key[r]);
            for (weights, row) in weights.chunks_exact(features).zip(rows.chunks_exact_mut(width)) {
                add_scaled(simd, row, sum, weights[r]);
            }
        }
        let rows = rows.chunks_exact(width).zip(weights.chunks_exact(features));
        for (g, (out, (row, weights))) in out.chunks_exact_mut(out_width).zip(rows).enumerate() {
            let den = dot(simd, weights, &sums.norm);
            let factor = if den == 0.0 { 0.0 } else { den.recip() };
            out[..dv].iter_mut().zip(row).for_each(|(out, &x)| *out = x * factor);
            if let Some(log) = out.get_mut(dv) {
                *log = log_of(den, largest[g]);
            }
        }
        scratch.largest = largest;
        sums.scratch = scratch;
    }
}
