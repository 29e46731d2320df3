// Sums of causal FAVOR over the tokens of each segment, in bf16, for heads of up to 64 numbers and
// up to 128 features: over keys (QUERIES is 0), for outputs and the gradient of queries, or over
// queries (QUERIES is 1), for the gradients of keys and values.
//
//   x (B, H', T, DIM), y (B, H', T, VALUES) -> records (segments, B, H', RECORD),
//                                              decays (segments, B, H')
//
// Over keys, x is k, y is v, H' is Hkv, and every row has the unit u = 1. Over queries, x is q, y
// is the gradient g of the outputs, H' is H, and u is e = -g.out. A record (see favor.cuh) holds
// the scales of the features f, the sums of f u and the sums of f y; the features of a query are
// divided by its denominator. No other segment reads the last segment of keys or the first of
// queries, so these are left out and their records are not written. With gates, a record is what
// is left of the rows at the segment's last token (of queries, at its first), and `decays` gets
// the logarithm to base 2 of the factor by which the segment shrinks the sums before it (of
// queries, those after it).

#include "favor_bf16.cuh"

static_assert(sizeof(TeamBuilder) == SHARED_SUMS, "the host asks for another size of shared memory");

// Computes the record of one segment of one head. Launch: grid (B H', segments - 1), where
// blockIdx.y begins with segment 0 of keys or segment 1 of queries, TEAM_THREADS threads,
// SHARED_SUMS bytes of dynamic shared memory. In `p`, `heads` and `queries` are H' and T, `q` and
// `v` are the strides of x and y, and `group` is 1 for keys. `logs` (the logarithms to base 2 of
// the denominators) and `unit` (e), both (B, H, T), belong to queries; `visible` (B, T) belongs to
// keys, and is null where all count. `denominators` is not used.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
favor_bf16_sums(Problem p, const Stored* x, const Stored* y, const unsigned char* visible, const uint4* projection, const float* logs,
                const float* unit, const float* denominators, float* records, float* decays) {
    extern __shared__ uint4 shared_memory[];
    TeamBuilder& b = *(TeamBuilder*)shared_memory;
    Place place(p, CAUSAL && QUERIES ? 1 : 0);
    Rows<const Stored> x_rows = rows_of(x, p.q, place.batch, place.head);
    Rows<const Stored> y_rows = rows_of(y, p.v, place.batch, place.head);
    Packed packed = {projection, D / 16};
    const unsigned char* key_mask = visible ? visible + (long long)place.batch * p.queries : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    const float* gates = gates_of(p, place.key_index);
    int begins = place.segment * p.segment, ends = min(p.queries, begins + p.segment);
    // Returns the chunk that begins at a token; queries forget from the last token to the first.
    constexpr bool reverse = GATED && QUERIES;
    auto span_from = [&](int start) {
        return reverse ? Span{start, max(0, min(C, start - begins + 1)), -1} : Span{start, max(0, min(C, ends - start)), 1};
    };
    auto copy_builder_x = [&](Span span) {
        copy_rows<C, D, DIM, TEAM_THREADS>(&b.x[0][0], D + PAD, x_rows, span, 0, keep);
        end_copies();
    };
    auto copy_builder_y = [&](Span span) {
        copy_rows<C, V, VALUES, TEAM_THREADS>(&b.y[0][0], W, y_rows, span, 0, keep);
        end_copies();
    };
    long long first = (long long)place.query_index * p.queries;
    // These belong to the query in row threadIdx.x of the next chunk: minus the logarithm of its
    // denominator, and its e. A key has the unit 1, and its offset is computed.
    float next_offset = 0, next_unit = 1;
    auto read_kept = [&](Span span) {
        if (!QUERIES || threadIdx.x >= C) return;
        bool has = (int)threadIdx.x < span.count;
        next_offset = has ? -logs[first + span.token(threadIdx.x)] : -infinity();
        next_unit = has ? unit[first + span.token(threadIdx.x)] : 0.0f;
    };

    float decay = 0;
    Span span = span_from(reverse ? ends - 1 : begins);
    Steps<false> steps;
    if (GATED && warp() == 0) steps = load_steps<false>(gates, span, p.keys);
    copy_builder_x(span);
    copy_builder_y(span);
    read_kept(span);
    Own<true> own;
    begin(b, own, nullptr);
    while (span.count > 0) {
        wait_for_copies<1>();
        if (GATED && warp() == 0) sum_steps(b, steps);
        __syncthreads();
        if (threadIdx.x < C) set_unit(b, threadIdx.x, next_unit);
        if (QUERIES) {
            if (threadIdx.x < C) b.offset[threadIdx.x] = GATED ? next_offset - b.since(threadIdx.x) : next_offset;
        } else {
            set_key_offsets(b, span, p.offset_scale, keep);
        }
        __syncthreads();
        if (GATED) decay += b.pending();
        Span next = span_from((int)span.token(enter<false>(b, own, span.count, packed)));
        copy_builder_x(next);
        read_kept(next);
        if (GATED && warp() == 0) steps = load_steps<false>(gates, next, p.keys);
        absorb(b, own);
        __syncthreads();
        copy_builder_y(next);
        span = next;
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
    long long index = (long long)place.segment * gridDim.x + place.query_index;
    if (GATED && threadIdx.x == 0) decays[index] = decay + b.pending();
    leave(b, own, records + index * RECORD);
}
