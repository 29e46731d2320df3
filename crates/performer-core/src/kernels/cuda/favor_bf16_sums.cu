// The sums of segments in bf16: computes what favor_sums.cu does, for the sizes of favor_bf16.cuh
// and with the same arguments.
//
//   x (B, H', T, DIM), y (B, H', T, VALUES) -> records (segments, B, H', RECORD)

#include "favor_bf16.cuh"

static_assert(sizeof(TeamBuilder) == SHARED_SUMS, "the host asks for another size of shared memory");

// Computes the sums of one segment of one head of the builder.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
favor_bf16_sums(Problem p, const Stored* x, const Stored* y, const unsigned char* visible, const uint4* projection, const float* logs,
                const float* unit, const float* denominators, float* records) {
    extern __shared__ uint4 shared_memory[];
    TeamBuilder& b = *(TeamBuilder*)shared_memory;
    Place place(p);
    Rows<const Stored> rows = rows_of(x, p.q, place.batch, place.head);
    Rows<const Stored> weighed = rows_of(y, p.v, place.batch, place.head);
    Packed packed = {projection, D / 16};
    const unsigned char* seen = visible ? visible + (long long)place.batch * p.queries : nullptr;
    auto keep = [&](long long token) { return !seen || seen[token]; };
    int end = min(p.queries, (place.segment + 1) * p.segment);
    auto span_from = [&](int start) { return Span{start, max(0, min(C, end - start)), 1}; };
    auto copy_built = [&](Span span) {
        copy_rows<C, D, DIM, TEAM_THREADS>(&b.x[0][0], D + PAD, rows, span, 0, keep);
        end_copies();
    };
    auto copy_weighed = [&](Span span) {
        copy_rows<C, V, VALUES, TEAM_THREADS>(&b.y[0][0], W, weighed, span, 0, keep);
        end_copies();
    };
    long long first = (long long)place.query_index * p.queries;
    float next_offset = 0, next_unit = 1;
    auto read_left = [&](Span span) {
        if (!QUERIES || threadIdx.x >= C) return;
        bool has = (int)threadIdx.x < span.count;
        next_offset = has ? -logs[first + span.first + threadIdx.x] : -infinity();
        next_unit = has ? unit[first + span.first + threadIdx.x] : 0.0f;
    };

    Span span = span_from(place.segment * p.segment);
    copy_built(span);
    copy_weighed(span);
    read_left(span);
    Own<true> own;
    begin(own, nullptr);
    while (span.count > 0) {
        wait_for_copies<1>();
        __syncthreads();
        if (threadIdx.x < C) set_unit(b, threadIdx.x, next_unit);
        if (QUERIES) {
            if (threadIdx.x < C) b.offset[threadIdx.x] = next_offset;
        } else {
            set_key_offsets(b, span, p.norm, keep);
        }
        __syncthreads();
        Span next = span_from(span.first + enter<false>(b, own, span.count, packed));
        copy_built(next);
        read_left(next);
        absorb(b, own);
        __syncthreads();
        copy_weighed(next);
        span = next;
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
    leave(own, records + ((long long)place.segment * gridDim.x + place.query_index) * RECORD);
}
