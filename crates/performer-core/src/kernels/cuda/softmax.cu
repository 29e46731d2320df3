// Exact softmax attention in tiles of keys with a running maximum (Milakov and Gimelshein 2018, Dao
// et al. 2022); nothing of size T x T reaches memory. The backward pass computes scores again from
// the logarithms of the denominators: once with queries as rows, for their gradient, and once with
// keys as rows, for those of keys and values. Each number is added up by one block in a fixed
// order.
//
// With forget gates, scores are shifted by what is forgotten from key to query. The sums of ds over
// the keys of each query, and over the queries of each key, are then results too: softmax_gates.cu
// computes the gradients of the gates from them.
//
// With a window, steps of keys that no query of a block sees are left out, and so are steps of
// queries that see no key of a block: time is proportional to tokens times the window.
//
//   q (B, H, Tq, DIM), k (B, Hkv, Tk, DIM), v (B, Hkv, Tk, VALUES);
//   a block has R rows and takes K columns a step
//   forward:   q (R, D), k (K, D) -> scores log2(e) q.k/sqrt(DIM) (R, K)
//              scores             -> weights 2^(score - maximum) (R, K)
//              weights, v (K, V)  -> numerators (R, V), denominators (R) -> out (R, V), logs (R)
//   g, out     -> delta = g.out - h (R), by softmax_delta; h is the gradient of the logarithm of
//                 the denominator, 0 where that is no result. The derivative of that logarithm
//                 with respect to a score is p, so h adds p h to ds.
//   backward:  q, k, logs         -> weights p = 2^(score - log)
//              g (R, V), v, delta -> ds = p (g v^T - delta)
//              ds, k, q, p, g     -> dq = ds k/sqrt(DIM), dk = ds^T q/sqrt(DIM), dv = p^T g
//
// These kernels are for f32, and for half types where heads are too large for softmax_half.cu.

// Tiles of f32 are twice as large, so its blocks are half as large.
#if STORAGE == 0
#define BLOCK_WARPS 4
#endif
#include "softmax.cuh"

// The rows of a block, 16 for each warp, and the columns of scores that it computes in a step.
constexpr int R = 16 * WARPS, K = R / 2;

typedef Sums<R, K, WARPS> Scores;

// Shared is the shared memory of a block.
struct Shared {
    // Of the rows: queries and gradients of outputs, or keys and values. Of the columns (`across`):
    // the other two.
    alignas(16) Operand x[R][D + PAD];
    alignas(16) Operand y[R][V + PAD];
    alignas(16) Operand across_x[K][D + PAD];
    alignas(16) Operand across_y[K][V + PAD];
    // The weights of rows, or their gradients; each warp has its own rows.
    alignas(16) Operand weights[R][K + PAD];
    // For each key: 0, or -inf where it is hidden. For each query: the logarithm of its
    // denominator, and delta.
    float hidden[R], log[R], delta[R];
#if GATED
    GateSum of_rows[R], of_columns[K];
#endif
};
static_assert(sizeof(Shared) == SHARED, "the host asks for another size of shared memory");

// Loads keys or values of `span`; the numbers of hidden keys are not looked at.
template <int ROWS, int COLUMNS>
__device__ void load_keys(Operand* to, Rows<const Stored> from, Span span, int width, const unsigned char* key_mask) {
    load_rows<ROWS, COLUMNS, 1>(to, COLUMNS + PAD, 0, from, span, 0, width,
                                [&](int row) { return !key_mask || key_mask[span.token(row)] ? 1.0f : 0.0f; });
}
// Loads the rows of `span`, all of which count.
template <int ROWS, int COLUMNS>
__device__ void load_all(Operand* to, Rows<const Stored> from, Span span, int width) {
    load_rows<ROWS, COLUMNS, 1>(to, COLUMNS + PAD, 0, from, span, 0, width, [](int) { return 1.0f; });
}
// Whether the registers of a block that computes dk and dv have room for both and, beside them, for
// a product that is computed apart. Wider heads add within the tensor cores, with the loss that
// add_far tells of.
constexpr bool NARROW = D + V <= 128;

// Computes sums += A B, A (R, depth) and B (depth, columns) in shared memory. If APART, the product
// of this call is computed by itself and then added to the sums in f32: tensor cores truncate what
// they accumulate, so sums that stayed in them over a long sequence would shrink.
template <bool APART, class T>
__device__ void add_far(T& sums, const Operand* left, int left_stride, const Operand* right, int right_stride, int depth) {
    if (!APART) return sums.template add<false, false>(left, left_stride, right, right_stride, depth);
    T part;
    part.zero();
    part.template add<false, false>(left, left_stride, right, right_stride, depth);
    sums.each_with(part, [](int, int, float& sum, float& x) { sum += x; });
}
// Loads the sums of gates of `count` rows or columns: for the i-th, the sum up to key own + i, and
// zero for those beyond `span`.
__device__ inline void load_gates(GateSum* to, int count, const Problem& p, int key_index, int own, Span span) {
    for (int i = threadIdx.x; i < count; i += THREADS) to[i] = gate_sum(p, key_index, own + i, i < span.count);
}
// Returns the logarithm to base 2 of what is forgotten between a row and a column: rows are queries
// and columns keys if ROWS, else rows are keys and columns queries.
template <bool ROWS>
__device__ float forgotten(const Shared& s, int row, int column) {
#if GATED
    return ROWS ? between(s.of_rows[row], s.of_columns[column]) : between(s.of_columns[column], s.of_rows[row]);
#else
    return 0;
#endif
}
// Says which keys of `span` are hidden.
__device__ inline void hide(float* hidden, int count, Span span, const unsigned char* key_mask) {
    for (int i = threadIdx.x; i < count; i += THREADS) {
        hidden[i] = i < span.count && (!key_mask || key_mask[span.token(i)]) ? 0.0f : -infinity();
    }
}

// Adds the sums over columns, of the lane's two rows, to `total`, where there are gates.
__device__ inline void add_rows(float (&total)[2], Scores& x) {
#if GATED
    float sum[2];
    x.over_my_columns(x, sum, Add(), [](int, int, float x, float) { return x; });
    for (int i = 0; i < 2; i++) total[i] += sum[i];
#endif
}

// Computes `out` (B, H, Tq, p.width) and `logs` (B, H, Tq), the logarithms of the denominators to
// base 2, infinite where a query sees no key. `visible` (B, Tk) is null where all keys count.
// Launch: grid (B H, ceil(Tq/R)), THREADS threads, SHARED bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_forward(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, Stored* out, float* logs) {
    extern __shared__ uint4 shared_memory[];
    Shared& s = *(Shared*)shared_memory;
    int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    // The queries that see most keys come first.
    int start = (gridDim.y - 1 - blockIdx.y) * R;
    Span rows = {start, min(R, p.queries - start), 1};
    Rows<const Stored> keys = rows_of(k, p.k, batch, head / p.group), values = rows_of(v, p.v, batch, head / p.group);
    const unsigned char* key_mask = visible ? visible + (long long)batch * p.keys : nullptr;
    load_all<R, D>(&s.x[0][0], rows_of(q, p.q, batch, head), rows, DIM);

    Sums<R, V, WARPS> sums;
    sums.zero();
    float largest[2] = {FLOOR, FLOOR}, denominator[2] = {0, 0};
#if GATED
    int key_index = batch * (p.heads / p.group) + head / p.group;
    load_gates(s.of_rows, R, p, key_index, p.offset + start, rows);
#endif
    KeySteps<K> steps(p, start, rows.count);
    for (int first = steps.begin(); first < steps.reach; first = steps.after(first)) {
        Span columns = {first, min(K, steps.reach - first), 1};
        __syncthreads();
        load_keys<K, D>(&s.across_x[0][0], keys, columns, DIM, key_mask);
        load_keys<K, V>(&s.across_y[0][0], values, columns, VALUES, key_mask);
        hide(s.hidden, K, columns, key_mask);
#if GATED
        load_gates(s.of_columns, K, p, key_index, first, columns);
#endif
        __syncthreads();
        Scores scores;
        scores.zero();
        scores.template add<false, true>(&s.x[0][0], D + PAD, &s.across_x[0][0], D + PAD, D);
        scores.each([&](int row, int column, float& x) {
            bool unseen = is_unseen(p, p.offset + start + row, first + column);
            x = unseen ? -infinity() : x * p.scale + s.hidden[column] + forgotten<true>(s, row, column);
        });
        float now[2], decay[2], sum[2];
        scores.over_my_columns(scores, now, Largest(), [](int, int, float x, float) { return x; });
        for (int i = 0; i < 2; i++) {
            now[i] = fmaxf(now[i], largest[i]);
            decay[i] = power_of_two(largest[i] - now[i]);
            largest[i] = now[i];
        }
        scores.each_of_mine([&](int i, int, int, float& x) { x = rounded(power_of_two(x - now[i])); });
        scores.over_my_columns(scores, sum, Add(), [](int, int, float x, float) { return x; });
        for (int i = 0; i < 2; i++) denominator[i] = denominator[i] * decay[i] + sum[i];
        sums.each_of_mine([&](int i, int, int, float& x) { x *= decay[i]; });
        scores.store(&s.weights[0][0], K + PAD);
        __syncwarp();
        add_far<true>(sums, &s.weights[0][0], K + PAD, &s.across_y[0][0], V + PAD, K);
    }
    long long at = ((long long)blockIdx.x * p.queries + start);
    sums.each_of_mine([&](int i, int row, int column, float& x) {
        if (row >= rows.count) return;
        // A row that sees no key is zero, and has weight 0 for every key in the backward pass.
        bool sees = denominator[i] != 0.0f;
        Stored* to = out + (at + row) * p.width;
        if (column < VALUES) narrow(sees ? x / denominator[i] : 0.0f, to[column]);
        if (column != 0) return;
        float log = largest[i] + logarithm(denominator[i]);
        logs[at + row] = sees ? log : infinity();
        for (int c = VALUES; c < p.width; c++) narrow(c > VALUES ? 0.0f : sees ? log * LN2 : FLOOR, to[c]);
    });
}

// Loads the logarithms and g.out of queries; a query beyond the last gets weight 0.
__device__ inline void load_logs(Shared& s, int count, const float* logs, const float* delta, long long first, Span span) {
    for (int i = threadIdx.x; i < count; i += THREADS) {
        bool has = i < span.count;
        s.log[i] = has ? logs[first + span.token(i)] : infinity();
        s.delta[i] = has ? delta[first + span.token(i)] : 0.0f;
    }
}

// Computes dq (B, H, Tq, DIM) and, with gates, `row_sums` (B, H, Tq), the sums of ds over keys.
// Launch: grid (B H, ceil(Tq/R)), THREADS threads, SHARED bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_query_gradients(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, const Stored* grad,
                        const float* logs, const float* delta, Stored* dq, float* row_sums) {
    extern __shared__ uint4 shared_memory[];
    Shared& s = *(Shared*)shared_memory;
    int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    int start = (gridDim.y - 1 - blockIdx.y) * R;
    Span rows = {start, min(R, p.queries - start), 1};
    long long first_query = (long long)blockIdx.x * p.queries;
    Rows<const Stored> keys = rows_of(k, p.k, batch, head / p.group), values = rows_of(v, p.v, batch, head / p.group);
    const unsigned char* key_mask = visible ? visible + (long long)batch * p.keys : nullptr;
    load_all<R, D>(&s.x[0][0], rows_of(q, p.q, batch, head), rows, DIM);
    load_all<R, V>(&s.y[0][0], Rows<const Stored>{grad + first_query * p.width, p.width}, rows, VALUES);
    load_logs(s, R, logs, delta, first_query, rows);

    Sums<R, D, WARPS> sums;
    sums.zero();
    float total[2] = {0, 0};
#if GATED
    int key_index = batch * (p.heads / p.group) + head / p.group;
    load_gates(s.of_rows, R, p, key_index, p.offset + start, rows);
#endif
    KeySteps<K> steps(p, start, rows.count);
    for (int first = steps.begin(); first < steps.reach; first = steps.after(first)) {
        Span columns = {first, min(K, steps.reach - first), 1};
        __syncthreads();
        load_keys<K, D>(&s.across_x[0][0], keys, columns, DIM, key_mask);
        load_keys<K, V>(&s.across_y[0][0], values, columns, VALUES, key_mask);
        hide(s.hidden, K, columns, key_mask);
#if GATED
        load_gates(s.of_columns, K, p, key_index, first, columns);
#endif
        __syncthreads();
        Scores scores, products;
        scores.zero();
        scores.template add<false, true>(&s.x[0][0], D + PAD, &s.across_x[0][0], D + PAD, D);
        products.zero();
        products.template add<false, true>(&s.y[0][0], V + PAD, &s.across_y[0][0], V + PAD, V);
        scores.each_with(products, [&](int row, int column, float& x, float& product) {
            bool unseen = is_unseen(p, p.offset + start + row, first + column);
            float score = x * p.scale + s.hidden[column] + forgotten<true>(s, row, column);
            float weight = unseen ? 0.0f : power_of_two(score - s.log[row]);
            x = weight * (product - s.delta[row]);
        });
        add_rows(total, scores);
        scores.store(&s.weights[0][0], K + PAD);
        __syncwarp();
        add_far<true>(sums, &s.weights[0][0], K + PAD, &s.across_x[0][0], D + PAD, K);
    }
    sums.each_of_mine([&](int i, int row, int column, float& x) {
        if (row >= rows.count) return;
        if (GATED && column == 0) row_sums[first_query + start + row] = total[i];
        if (column < DIM) narrow(x * p.slope, dq[(first_query + start + row) * DIM + column]);
    });
}

// Computes dk (B, Hkv, Tk, DIM), dv (B, Hkv, Tk, VALUES) and, with gates, `column_sums`
// (B, Hkv, Tk), the sums of ds over the queries of all heads of the group. A block has one key head
// and R keys, and goes through these heads one after the other. Launch: grid (B Hkv, ceil(Tk/R)),
// THREADS threads, SHARED bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_key_gradients(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, const Stored* grad,
                      const float* logs, const float* delta, Stored* dk, Stored* dv, float* column_sums) {
    extern __shared__ uint4 shared_memory[];
    Shared& s = *(Shared*)shared_memory;
    int key_heads = p.heads / p.group, batch = blockIdx.x / key_heads, key_head = blockIdx.x % key_heads;
    // Early keys are seen by most queries, and come first.
    int start = blockIdx.y * R;
    Span rows = {start, min(R, p.keys - start), 1};
    const unsigned char* key_mask = visible ? visible + (long long)batch * p.keys : nullptr;
    load_keys<R, D>(&s.x[0][0], rows_of(k, p.k, batch, key_head), rows, DIM, key_mask);
    load_keys<R, V>(&s.y[0][0], rows_of(v, p.v, batch, key_head), rows, VALUES, key_mask);
    hide(s.hidden, R, rows, key_mask);
#if GATED
    load_gates(s.of_rows, R, p, blockIdx.x, start, rows);
#endif

    float total[2] = {0, 0};
    Sums<R, D, WARPS> key_sums;
    Sums<R, V, WARPS> value_sums;
    key_sums.zero();
    value_sums.zero();
    // Queries before `begin` see none of the block's keys, since all of these are later; queries
    // from `end` on see none, since all lie before their windows.
    int begin = p.offset < 0 ? 0 : max(0, start - p.offset) / K * K, end = end_of_queries(p, start, rows.count);
    for (int head = key_head * p.group; head < (key_head + 1) * p.group; head++) {
        Rows<const Stored> queries = rows_of(q, p.q, batch, head);
        long long first_query = ((long long)batch * p.heads + head) * p.queries;
        for (int first = begin; first < end; first += K) {
            Span columns = {first, min(K, end - first), 1};
            __syncthreads();
            load_all<K, D>(&s.across_x[0][0], queries, columns, DIM);
            load_all<K, V>(&s.across_y[0][0], Rows<const Stored>{grad + first_query * p.width, p.width}, columns, VALUES);
            load_logs(s, K, logs, delta, first_query, columns);
#if GATED
            load_gates(s.of_columns, K, p, blockIdx.x, p.offset + first, columns);
#endif
            __syncthreads();
            Scores scores, products;
            scores.zero();
            scores.template add<false, true>(&s.x[0][0], D + PAD, &s.across_x[0][0], D + PAD, D);
            products.zero();
            products.template add<false, true>(&s.y[0][0], V + PAD, &s.across_y[0][0], V + PAD, V);
            scores.each_with(products, [&](int row, int column, float& x, float& product) {
                bool unseen = is_unseen(p, p.offset + first + column, start + row);
                float score = x * p.scale + s.hidden[row] + forgotten<false>(s, row, column);
                x = unseen ? 0.0f : power_of_two(score - s.log[column]);
                product = x * (product - s.delta[column]);
            });
            scores.store(&s.weights[0][0], K + PAD);
            __syncwarp();
            add_far<NARROW>(value_sums, &s.weights[0][0], K + PAD, &s.across_y[0][0], V + PAD, K);
            __syncwarp();
            add_rows(total, products);
            products.store(&s.weights[0][0], K + PAD);
            __syncwarp();
            add_far<NARROW>(key_sums, &s.weights[0][0], K + PAD, &s.across_x[0][0], D + PAD, K);
        }
    }
    long long at = (long long)blockIdx.x * p.keys + start;
    key_sums.each_of_mine([&](int i, int row, int column, float& x) {
        if (row >= rows.count) return;
        if (GATED && column == 0) column_sums[at + row] = total[i];
        if (column < DIM) narrow(x * p.slope, dk[(at + row) * DIM + column]);
    });
    value_sums.each([&](int row, int column, float& x) {
        if (row < rows.count && column < VALUES) narrow(x, dv[(at + row) * VALUES + column]);
    });
}
