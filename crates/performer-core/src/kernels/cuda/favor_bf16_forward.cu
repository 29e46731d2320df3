// Causal FAVOR, forward, in bf16, for heads of up to 64 numbers and up to 128 features:
//
//   out_i = sum_{j <= i} phi(q_i).phi(k_j) v_j / sum_{j <= i} phi(q_i).phi(k_j)
//   phi(k)_r = exp(w_r.x - |x|^2/2) with x = DIM^(-1/4) k; of queries exp(-|x|^2/2) is left out,
//   since it cancels. With gates, each term has the factor e^(sum of the gates after j, up to i).
//
//   q (B, H, T, DIM), k (B, Hkv, T, DIM), v (B, Hkv, T, VALUES), visible (B, T) or null,
//   before (segments, B, Hkv, RECORD) or null: the sums before each segment
//   -> out (B, H, T, VALUES); after (B, Hkv, RECORD), if given: the sums after the last token;
//      logs (B, H, T): the denominators' logarithms to base 2, infinite where no key is seen
//
// Macro WGMMA: 1, products are those of Hopper's warpgroups (favor_wgmma.cuh); 0, those of single
// warps, which every card has.

#ifndef WGMMA
#define WGMMA 0
#endif
#if WGMMA
#include "favor_wgmma.cuh"
typedef GroupBuilder ForwardBuilder;
#else
#include "favor_bf16.cuh"
typedef TeamBuilder ForwardBuilder;
#endif

// TeamForward is the shared memory of a block: the builder, and the reader's queries.
struct TeamForward {
    ForwardBuilder builder;
    alignas(16) Operand x[C][D + PAD];
};
static_assert(sizeof(TeamForward) == SHARED_FORWARD, "the host asks for another size of shared memory");

// Computes `out`, `logs` and `after`; a team has one query head and one segment. Launch: grid
// (B H, segments), TEAM_THREADS threads, SHARED_FORWARD bytes of dynamic shared memory. `exact` and
// `denominators` are not used: the list of arguments is that of `favor_forward`, so that the host
// can launch either kernel.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
favor_bf16_forward(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, const uint4* projection,
                   float* before, Stored* out, float* exact, float* logs, float* denominators, float* after) {
    extern __shared__ __align__(1024) uint4 shared_memory[];
    TeamForward& s = *(TeamForward*)shared_memory;
    ForwardBuilder& b = s.builder;
    Place place(p);
    Rows<const Stored> queries = rows_of(q, p.q, place.batch, place.head);
    Rows<const Stored> keys = rows_of(k, p.k, place.batch, place.key_head);
    Rows<const Stored> values = rows_of(v, p.v, place.batch, place.key_head);
    Packed packed = {projection, D / 16};
    const unsigned char* key_mask = visible ? visible + (long long)place.batch * p.keys : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    int end = min(p.queries, (place.segment + 1) * p.segment);
    auto span_from = [&](int start) { return Span{start, max(0, min(C, end - start)), 1}; };
    auto copy_keys = [&](Span span) {
        copy_rows<C, D, DIM, TEAM_THREADS>(b.at_x(), keys, span, 0, keep);
    };
    auto copy_values = [&](Span span) {
        copy_rows<C, V, VALUES, TEAM_THREADS>(b.at_y(), values, span, 0, keep);
    };
    auto copy_queries = [&](Span span) {
        copy_rows<16, D, DIM, 32>(&s.x[0][0], D + PAD, queries, span, 16 * warp(), [](long long) { return true; });
    };

    const float* gates = gates_of(p, place.key_index);
    Span span = span_from(place.segment * p.segment);
    Steps<false> steps;
    if (GATED && warp() == 0) steps = load_steps<false>(gates, span, p.keys);
    copy_keys(span);
    copy_queries(span);
    end_copies();
    copy_values(span);
    end_copies();
    int key_heads = gridDim.x / p.group;
    prepare(b, packed);
    Own<false> own;
    begin(b, own, before ? before + ((long long)place.segment * key_heads + place.key_index) * RECORD : nullptr);
    if (threadIdx.x < C) set_unit(b, threadIdx.x, 1);

    while (span.count > 0) {
        wait_for_copies<1>();
        b.share();
        if (GATED && warp() == 0) sum_steps(b, steps);
        __syncthreads();
        set_key_offsets(b, span, p.offset_scale, keep);
        __syncthreads();
        int n = enter(b, own, span.count, packed);
        Span next = span_from(span.first + n);
        copy_keys(next);
        if (GATED && warp() == 0) steps = load_steps<false>(gates, next, p.keys);
        // This adds the chunk to the sums in registers. The reader reads their copy in shared
        // memory, which `enter` made and which does not hold the chunk.
        absorb(b, own);

        Tile w[P / 16];
        start_weights(w, b, {0, 0});
        add_logarithms(w, b, &s.x[0][0], packed);
        __syncwarp();
        copy_queries(next);
        end_copies();
        float shift[2] = {-infinity(), -infinity()};
        each(w, [&](int h, int, float& x) { shift[h] = fmaxf(shift[h], x); });
        for (int h = 0; h < 2; h++) shift[h] = over_row(shift[h], Largest());
        each(w, [&](int h, int, float& x) { x = power_of_two(x - shift[h]); });
        Left weights[P / 16];
#pragma unroll
        for (int i = 0; i < P / 16; i++) weights[i] = as_left(w[i]);

        // The numerators, and the denominators as the sums of units.
        Tile rows[V / 16];
        float units[4];
        read_sums(rows, units, weights, b);

        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float sum = from_lane(units[2 * h] + units[2 * h + 1], first_of_row());
            inverse[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
            int row = 16 * warp() + lane() / 4 + 8 * h;
            if (logs && row < n && lane() % 4 == 0) {
                float log = sum == 0.0f ? infinity() : shift[h] + logarithm(sum);
                logs[(long long)place.query_index * p.queries + span.first + row] = GATED ? log + b.since(row) : log;
            }
        }
        // A sum of underflown terms may be -0, which must not reveal how many terms it had.
        each(rows, [&](int h, int, float& x) { x = x * inverse[h] + 0.0f; });
        put_rows<VALUES>(out + (long long)place.query_index * p.queries * VALUES, rows, span, 16 * warp(), n);
        __syncthreads();
        copy_values(next);
        end_copies();
        span = next;
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
    if (after && place.segment == p.segments - 1 && place.head % p.group == 0) leave(b, own, after + (long long)place.key_index * RECORD);
}
