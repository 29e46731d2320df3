// FAVOR, forward: `out = sum_j f(q).f(k_j) v_j / sum_j f(q).f(k_j)`, causal or over all keys
// (CAUSAL). f are the features of a query or key. favor.cuh explains them, the macros, and the
// terms builder, reader, scale and record.
//
// A block has one query head, one slice of the values and one segment of the tokens, and takes one
// chunk after the other. Where there are several segments, or all keys are seen, `favor_sums` has
// made the sums of each segment and `favor_combine` has added them up. Features never leave the
// block. Heads and slices are often fewer than the blocks that keep a card busy; then a sequence is
// divided into segments (`Blocks::segments` on the host), at the cost of a pass that sums each.
//
//   q (B, H, Tq, DIM), k (B, Hkv, Tk, DIM), v (B, Hkv, Tk, VALUES), a chunk of C tokens at a time:
//   k, v      -> builder: features f (C, F), sums S (F, V), norm (F)
//   q, scale  -> weights w (C, F), a row divided by its largest
//   w, f      -> pairs tril(w f^T) (C, C)
//   numerator = w S + pairs v (C, V), denominator = w norm + pairs 1 (C)
//             -> out (B, H, Tq, VALUES)
//             -> logs (B, H, Tq) = log2(denominator) + log2(what the row of w was divided by)
//
// Signed features have no logarithm of their denominators: `logs` gets that of the scale, and
// `denominators` (B, H, Tq) gets 1/denominator. Where no key is seen, `logs` are infinite. With
// gates, they are of what a query sees at its own token, after its gate.
//
// With LOGS, a row of `out` has OUT_WIDTH numbers: after its values stands the number that `logs`
// has, in base e, or FLOOR where no key is seen; what follows it is not written.
//
// `exact` (B, H, Tq, VALUES), if given, gets outputs before rounding. `after` (B, Hkv, RECORD), if
// given, gets the sums after the last token.

#include "favor.cuh"

// Shared is the shared memory of a block.
struct Shared {
    Builder builder;
    Side reader;
    // The weights of queries, 2^(logarithm + scale - largest); or signed features.
    alignas(16) Operand weights[C][F + PAD];
    alignas(16) Operand pairs[C][C + PAD];
    // Reductions over columns, a part from each warp of a group: the largest logarithm, and the
    // parts of the denominator from the sums and from the chunk.
    float largest[TURNS][C], past[TURNS][C], present[TURNS][C];
    // The largest logarithm of each row, to which its weights are relative (with signed features,
    // the scale), and 1/denominator, or 0 where the denominator is 0.
    float shift[C], inverse[C];
};
static_assert(sizeof(Shared) == SHARED_FORWARD, "the host asks for another size of shared memory");

// Computes the outputs of one query head, slice of the values and segment. Launch: grid
// (B H SPLITS, segments), where the slice varies fastest, THREADS threads, SHARED_FORWARD bytes of
// dynamic shared memory. `visible` (B, Tk) is nonzero for keys that count, null where all do.
// `projection` is packed by `favor_pack`, null for ready features. `before` holds the sums before
// each segment, (segments, B, Hkv, RECORD), or is null where nothing comes before; without CAUSAL
// it holds the sums of all keys, (B, Hkv, RECORD).
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
favor_forward(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, const uint4* projection,
              float* before, Stored* out, float* exact, float* logs, float* denominators, float* after) {
    extern __shared__ uint4 shared_memory[];
    Shared& s = *(Shared*)shared_memory;
    Builder& b = s.builder;
    Place place(p);
    Rows<const Stored> queries = rows_of(q, p.q, place.batch, place.head);
    Rows<const Stored> keys = rows_of(k, p.k, place.batch, place.key_head);
    Rows<const Stored> values = rows_of(v, p.v, place.batch, place.key_head);
    Linear of_queries = linear_of<false>(p, place, projection), of_keys = linear_of<true>(p, place, projection);
    Packed metric = square_of(p, place, p.form.metric);
    const unsigned char* key_mask = visible ? visible + (long long)place.batch * p.keys : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    int column = place.split * V;
    int key_heads = gridDim.x / SPLITS / p.group;
    float* record = before ? before + ((long long)(CAUSAL ? place.segment : 0) * key_heads + place.key_index) * RECORD : nullptr;

    Memory memory;
    if (CAUSAL) {
        begin(b, memory, record, place.split);
        for (int i = threadIdx.x; i < C; i += THREADS) b.unit[i] = 1;
    } else {
        recall(b, record, place.split);
    }

    const float* gates = gates_of(p, place.key_index);
    int end = min(p.queries, (place.segment + 1) * p.segment);
    for (int start = place.segment * p.segment, n; start < end; start += n) {
        Span span = {start, min(C, end - start), 1};
        n = span.count;
        load_side(s.reader, queries, span, [](long long) { return true; });
        if (GATED) measure<false>(b, gates, span, p.keys);
        if (CAUSAL) {
            load_side(b, keys, span, keep);
            load_rows<C, V, 1>(&b.y[0][0], V + PAD, 0, values, span, column, VALUES - column,
                               [&](int row) { return keep(span.token(row)) ? 1.0f : 0.0f; });
        }
        // The next chunk begins here unless this one ends early.
        Span next = {start + n, max(0, min(C, end - start - n)), 1};
        ask_for_rows(queries, next, READY ? FEATURES : DIM);
        if (CAUSAL) {
            ask_for_rows(keys, next, READY ? FEATURES : DIM);
            ask_for_rows({values.first + column, values.stride}, next, min(V, VALUES - column));
        }
        __syncthreads();
        if (CAUSAL) {
            set_key_offsets<BUILDS>(b, b, keys, span, p.offset_scale, keep, metric, b.excess);
            __syncthreads();
            n = enter(b, memory, keys, span, of_keys);
            // This adds the chunk to the sums in registers. The reader reads their copy in shared
            // memory, which `enter` made and which does not hold the chunk.
            absorb(b, memory);
        }

        Features w;
        take_features(w, s.reader, queries, span, of_queries, false);
        if (!SIGNED) {
            w.each([&](int, int column, float& x) { x += b.scale[column]; });
            w.over_columns(s.largest, Largest(), [](int, int, float x) { return x; });
        }
        __syncthreads();
        if (threadIdx.x < C) s.shift[threadIdx.x] = SIGNED ? b.scale[0] : together(s.largest, threadIdx.x, Largest());
        __syncthreads();
        w.each([&](int row, int, float& x) { x = rounded(SIGNED ? x : power_of_two(x - s.shift[row])); });
        w.store(&s.weights[0][0], F + PAD);
        w.over_columns(s.past, Add(), [&](int, int column, float x) { return x * b.norm[column]; });
        __syncthreads();

        Values rows;
        rows.zero();
        rows.add<false, false>(&s.weights[0][0], F + PAD, &b.sums[0][0], V + PAD, F);
        if (CAUSAL) {
            Pairs pairs;
            pairs.zero();
            pairs.add<false, true>(&s.weights[0][0], F + PAD, &b.features[0][0], F + PAD, F);
            pairs.each([](int row, int column, float& x) { x = column <= row ? rounded(x) : 0.0f; });
            pairs.store(&s.pairs[0][0], C + PAD);
            pairs.over_columns(s.present, Add(), [](int, int, float x) { return x; });
            __syncthreads();
            rows.add<false, false>(&s.pairs[0][0], C + PAD, &b.y[0][0], V + PAD, C);
        }
        if ((int)threadIdx.x < n) {
            int row = threadIdx.x;
            float sum = together(s.past, row, Add()) + (CAUSAL ? together(s.present, row, Add()) : 0.0f);
            s.inverse[row] = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (place.split == 0 && logs) {
                long long at = (long long)place.query_index * p.queries + start + row;
                bool none = SIGNED ? s.shift[row] <= FLOOR : sum == 0.0f;
                float log = none ? infinity() : SIGNED ? s.shift[row] : s.shift[row] + logarithm(sum);
                logs[at] = GATED ? log + b.since(row) : log;
                if (LOGS) narrow(none ? FLOOR : logs[at] / LOG2E, out[at * OUT_WIDTH + VALUES]);
                if (SIGNED) denominators[at] = s.inverse[row];
            }
        }
        __syncthreads();
        long long first = (long long)place.query_index * p.queries + start;
        rows.each([&](int row, int c, float& x) {
            if (row >= n || column + c >= VALUES) return;
            // A sum of underflown terms may be -0, which must not reveal how many terms it had.
            float y = x * s.inverse[row] + 0.0f;
            narrow(y, out[(first + row) * OUT_WIDTH + column + c]);
            if (exact) exact[(first + row) * VALUES + column + c] = y;
        });
        __syncthreads();
    }
    if (CAUSAL && after && place.segment == p.segments - 1 && place.head % p.group == 0) {
        leave(b, memory, after + (long long)place.key_index * RECORD, place.split);
    }
}
