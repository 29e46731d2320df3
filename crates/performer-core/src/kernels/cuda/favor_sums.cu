// The sums of segments: those over keys, for the forward pass and the gradient of queries; those
// over queries (QUERIES), for the gradients of keys and values.
//
//   x (B, H', T, DIM), y (B, H', T, VALUES) -> records (segments, B, H', RECORD)
//
// where x, y and H' are keys, values and key heads, or queries, gradients of outputs and query
// heads.

#include "favor.cuh"

static_assert(sizeof(Builder) == SHARED_SUMS, "the host asks for another size of shared memory");

// Computes the sums of one segment: a block has a head of the builder, a slice of the values and a
// segment. `logs` and `unit` belong to queries, as the gradient kernels take them.
extern "C" __global__ void __launch_bounds__(THREADS, AT_ONCE)
favor_sums(Problem p, const Stored* x, const Stored* y, const unsigned char* visible, const uint4* projection, const float* logs,
           const float* unit, const float* denominators, float* records) {
    extern __shared__ uint4 shared_memory[];
    Builder& b = *(Builder*)shared_memory;
    Place place(p);
    Rows<const Stored> rows = rows_of(x, p.q, place.batch, place.head);
    Rows<const Stored> weighed = rows_of(y, p.v, place.batch, place.head);
    Packed packed = {projection, D / 16};
    const unsigned char* seen = visible ? visible + (long long)place.batch * p.queries : nullptr;
    auto keep = [&](long long token) { return !seen || seen[token]; };
    long long first = (long long)place.query_index * p.queries;
    int column = place.split * V;

    Memory memory;
    begin(b, memory, nullptr, place.split);
    int end = min(p.queries, (place.segment + 1) * p.segment);
    for (int start = place.segment * p.segment; start < end; start += C) {
        Span span = {start, min(C, end - start), 1};
        load_side(b, rows, span, keep);
        load_rows<C, V, 1>(&b.y[0][0], V + PAD, 0, weighed, span, column, VALUES - column, [&](int row) {
            long long token = span.token(row);
            return !keep(token) ? 0.0f : QUERIES && SIGNED ? denominators[first + token] : 1.0f;
        });
        Span next = {start + C, max(0, min(C, end - start - C)), 1};
        ask_for_rows(rows, next, READY ? FEATURES : DIM);
        ask_for_rows({weighed.first + column, weighed.stride}, next, min(V, VALUES - column));
        if (QUERIES) {
            for (int row = threadIdx.x; row < C; row += THREADS) {
                b.offset[row] = row < span.count ? -logs[first + start + row] : -infinity();
                b.unit[row] = row < span.count ? unit[first + start + row] : 0.0f;
            }
            __syncthreads();
        } else {
            for (int row = threadIdx.x; row < C; row += THREADS) b.unit[row] = 1;
            __syncthreads();
            set_key_offsets(b, rows, span, p.norm, keep);
            __syncthreads();
        }
        gather(b, memory, rows, span, packed);
        __syncthreads();
    }
    leave(b, memory, records + ((long long)place.segment * (gridDim.x / SPLITS) + place.query_index) * RECORD, place.split);
}
