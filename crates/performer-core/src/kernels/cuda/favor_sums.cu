// FAVOR's sums over the tokens of each segment: over keys (QUERIES is 0), for outputs and the
// gradient of queries, or over queries (QUERIES is 1), for the gradients of keys and values.
//
//   x (B, H', T, DIM), y (B, H', T, VALUES) -> records (segments, B, H', RECORD)
//
// Over keys, x is k, y is v, H' is Hkv, and every row has the unit u = 1. Over queries, x is q, y
// is the gradient of the outputs, H' is H, u is the query's e, and f are its weights w (see
// favor_backward.cu). A record holds the scales of the features f, the sums of f u and the sums of
// f y. With CAUSAL, no other segment reads the last segment of keys or the first of queries, so
// these are left out and their records are not written.
//
// With gates, a record is what is left of the rows at the segment's last token (of queries, at its
// first), and `decays` (segments, B, H') gets the logarithm to base 2 of the factor by which the
// segment shrinks the sums before it (of queries, those after it).

#include "favor.cuh"

static_assert(sizeof(Builder) == SHARED_SUMS, "the host asks for another size of shared memory");

// Computes the record of one segment. Launch: grid (B H' SPLITS, segments), or one segment fewer
// with CAUSAL, where blockIdx.y then begins with segment 0 of keys or segment 1 of queries; THREADS
// threads, SHARED_SUMS bytes of dynamic shared memory. In `p`, `heads` and `queries` are H' and T,
// `q` and `v` are the strides of x and y, and `group` is 1 for keys. `logs`, `unit` (e) and, for
// signed features, `denominators`, each (B, H, T), belong to queries and are `logs`, `delta` and
// `denominators` of `Tensors`; `visible` (B, T) belongs to keys, and is null where all count.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
favor_sums(Problem p, const Stored* x, const Stored* y, const unsigned char* visible, const uint4* projection, const float* logs,
           const float* unit, const float* denominators, float* records, float* decays) {
    extern __shared__ uint4 shared_memory[];
    Builder& b = *(Builder*)shared_memory;
    Place place(p, CAUSAL && QUERIES ? 1 : 0);
    Rows<const Stored> x_rows = rows_of(x, p.q, place.batch, place.head);
    Rows<const Stored> y_rows = rows_of(y, p.v, place.batch, place.head);
    Linear linear = linear_of<!QUERIES>(p, place, projection);
    Packed metric = square_of(p, place, p.form.metric);
    const unsigned char* key_mask = visible ? visible + (long long)place.batch * p.queries : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    long long first = (long long)place.query_index * p.queries;
    int column = place.split * V;

    Memory memory;
    begin(b, memory, nullptr, place.split);
    const float* gates = gates_of(p, place.key_index);
    float decay = 0;
    int begins = place.segment * p.segment, ends = min(p.queries, begins + p.segment);
    // Returns the chunk that begins at a token; queries forget from the last token to the first.
    constexpr bool reverse = GATED && QUERIES;
    auto span_from = [&](int start) {
        return reverse ? Span{start, max(0, min(C, start - begins + 1)), -1} : Span{start, max(0, min(C, ends - start)), 1};
    };
    for (Span span = span_from(reverse ? ends - 1 : begins), next; span.count > 0; span = next) {
        next = span_from((int)span.token(C));
        load_side(b, x_rows, span, keep);
        load_rows<C, V, 1>(&b.y[0][0], V + PAD, 0, y_rows, span, column, VALUES - column, [&](int row) {
            long long token = span.token(row);
            return !keep(token) ? 0.0f : QUERIES && SIGNED ? denominators[first + token] : 1.0f;
        });
        if (GATED) measure<true>(b, gates, span, p.keys);
        ask_for_rows(x_rows, next, READY ? FEATURES : DIM);
        ask_for_rows({y_rows.first + column, y_rows.stride}, next, min(V, VALUES - column));
        if (QUERIES) {
            for (int row = threadIdx.x; row < C; row += THREADS) {
                b.offset[row] = row < span.count ? -logs[first + span.token(row)] : -infinity();
                b.unit[row] = row < span.count ? unit[first + span.token(row)] : 0.0f;
            }
            __syncthreads();
            if (GATED) {
                forget_rows<BUILDS>(b, b);
                __syncthreads();
            }
        } else {
            for (int row = threadIdx.x; row < C; row += THREADS) b.unit[row] = 1;
            __syncthreads();
            set_key_offsets<BUILDS>(b, b, x_rows, span, p.offset_scale, keep, metric, b.excess);
            __syncthreads();
        }
        if (GATED) decay += b.pending();
        gather(b, memory, x_rows, span, linear);
        __syncthreads();
    }
    long long index = (long long)place.segment * (gridDim.x / SPLITS) + place.query_index;
    if (GATED && place.split == 0 && threadIdx.x == 0) decays[index] = decay;
    leave(b, memory, records + index * RECORD, place.split);
}
