// Exact softmax attention in half types, for heads of up to 64 numbers, in tiles of scores with a
// running maximum (Dao et al. 2022). Blocks are teams of four warps (team.cuh), which keep scores
// and weights in registers.
//
//   q (B, H, Tq, DIM), k (B, Hkv, Tk, DIM), v (B, Hkv, Tk, VALUES), visible (B, Tk) or null
//   forward:  score_ij = log2(e) q_i.k_j/sqrt(DIM) + what is forgotten from j to i, to base 2
//             logs_i = log2 sum_j 2^score_ij, out_i = sum_j 2^(score_ij - logs_i) v_j
//             -> out (B, H, Tq, VALUES), logs (B, H, Tq), infinite where no key is seen
//   backward: g = grad (B, H, Tq, VALUES), logs, delta (B, H, Tq) = g.out
//             p_ij = 2^(score_ij - logs_i), ds_ij = p_ij (g_i.v_j - delta_i)
//             -> dq (B, H, Tq, DIM) = ds k/sqrt(DIM), and with gates row_sums (B, H, Tq) of ds
//             -> dk (B, Hkv, Tk, DIM) = ds^T q/sqrt(DIM), dv (B, Hkv, Tk, VALUES) = p^T g, and
//                with gates column_sums (B, Hkv, Tk) of ds, all summed over the group's heads
//
// A block has R rows and goes through the columns, K a step; a step is copied to shared memory
// while the one before is computed. Rows are queries and columns keys, except for dk and dv, where
// rows are keys and columns queries. Launch: grid (B H, ceil(Tq/R)), or (B Hkv, ceil(Tk/R)) for dk
// and dv; TEAM_THREADS threads; SHARED_FORWARD or SHARED_BACKWARD bytes of dynamic shared memory.

#include "softmax.cuh"
#include "team.cuh"

static_assert(D <= 64 && V <= 64, "for other kernels");

// The rows of a block, two tiles of 16 for each warp, and the columns of a step, in the forward and
// in the backward pass.
constexpr int TALL = 2, R = 16 * TALL * TEAM, FORWARD = 64, BACKWARD = 32;

// Across holds the columns that a block goes through: one step is being read while the next is
// copied.
template <int K>
struct Across {
    alignas(16) Operand x[2][K][D + PAD];
    alignas(16) Operand y[2][K][V + PAD];
};
// ForwardShared is the shared memory of the forward kernel.
struct ForwardShared {
    alignas(16) Operand x[R][D + PAD];
    Across<FORWARD> across;
    // For each key of both steps: 0, or -inf where it is hidden.
    float hidden[2][FORWARD];
#if GATED
    // The sums of gates of both steps.
    GateSum gates[2][FORWARD];
#endif
};
// BackwardShared is the shared memory of the gradient kernels.
struct BackwardShared {
    alignas(16) Operand x[R][D + PAD];
    alignas(16) Operand y[R][V + PAD];
    Across<BACKWARD> across;
    float hidden[2][BACKWARD], log[2][BACKWARD], delta[2][BACKWARD];
#if GATED
    GateSum gates[2][BACKWARD];
#endif
};
static_assert(sizeof(ForwardShared) == SHARED_FORWARD && sizeof(BackwardShared) == SHARED_BACKWARD, "the host asks for another size of shared memory");

// Starts to copy keys and values, and says which keys are hidden.
template <int K>
__device__ void copy_keys(Across<K>& to, float (&hidden)[K], int stage, Rows<const Stored> keys, Rows<const Stored> values, Span span,
                          const unsigned char* key_mask) {
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    copy_rows<K, D, DIM, TEAM_THREADS>(&to.x[stage][0][0], D + PAD, keys, span, 0, keep);
    copy_rows<K, V, VALUES, TEAM_THREADS>(&to.y[stage][0][0], V + PAD, values, span, 0, keep);
    if (key_mask && threadIdx.x < K) hidden[threadIdx.x] = (int)threadIdx.x < span.count && key_mask[span.token(threadIdx.x)] ? 0.0f : -infinity();
    end_copies();
}

// Matrix is a warp's sums: TALL times N tiles.
template <int N>
using Matrix = Tile[TALL][N];

template <int N>
__device__ void zero(Matrix<N>& x) {
#pragma unroll
    for (int m = 0; m < TALL; m++) zero(x[m]);
}

// Loads the sums of gates of the columns of a step, whose own keys begin with `own`.
template <int K, class S>
__device__ void load_gates(S& s, int stage, const Problem& p, int key_index, int own, int count) {
#if GATED
    if (threadIdx.x < K) s.gates[stage][threadIdx.x] = gate_sum(p, key_index, own + threadIdx.x, (int)threadIdx.x < count);
#endif
}

// The first row of the warp's m-th tile, in the block.
__device__ inline int first_row(int m) { return 16 * (TALL * warp() + m); }
// The row in the block of the `h`-th of the two rows that the lane has in the m-th tile.
__device__ inline int row_of(int m, int h) { return first_row(m) + lane() / 4 + 8 * h; }

// RowGates are the sums of gates of the lane's rows.
struct RowGates {
    GateSum sums[TALL][2];

    // Of rows whose own keys begin with `own`.
    __device__ RowGates(const Problem& p, int key_index, int own, int count) {
#pragma unroll
        for (int i = 0; i < 2 * TALL; i++) {
            int row = row_of(i / 2, i % 2);
            if (GATED) sums[i / 2][i % 2] = gate_sum(p, key_index, own + row, row < count);
        }
    }
};
// Shifts scores, not yet scaled, by what is forgotten between rows and the columns of a step. ROWS
// says that rows are queries.
template <bool ROWS, int N, class S>
__device__ void forget(Tile (&scores)[N], const Problem& p, const GateSum (&rows)[2], const S& s, int stage) {
#if GATED
    float unscaled = 1 / p.scale;
    each(scores, [&](int h, int column, float& x) {
        GateSum other = s.gates[stage][column];
        x += unscaled * (ROWS ? between(rows[h], other) : between(other, rows[h]));
    });
#endif
}
// Writes the sums over columns of the lane's rows, of which its four lanes hold parts.
__device__ inline void put_sums(float* to, const float (&parts)[TALL][2], int count) {
#if GATED
#pragma unroll
    for (int i = 0; i < 2 * TALL; i++) {
        int row = row_of(i / 2, i % 2);
        float sum = over_row(parts[i / 2][i % 2], Add());
        if (lane() % 4 == 0 && row < count) to[row] = sum;
    }
#endif
}

// Unseen says why some of the warp's rows do not see some of the keys of a step.
struct Unseen {
    // Keys are of later tokens, or beyond the last.
    bool later;
    // Keys lie before the window.
    bool earlier;

    // For `count` keys from `first` on, where keys end at `reach`, and the block's rows begin with
    // query `start`.
    __device__ Unseen(const Problem& p, int first, int count, int reach, int start) : later(first + count > reach), earlier(false) {
        if (p.offset < 0) return;
        int own = p.offset + start + first_row(0), last_own = p.offset + start + first_row(TALL) - 1;
        later |= first + count - 1 > own;
        earlier = first <= last_own - p.window;
    }
};
// Sets the scores of the keys that the rows of the warp's m-th tile do not see to -inf. The
// comparison of each number is a selection and no branch.
template <int N>
__device__ void hide(Tile (&scores)[N], int m, Unseen unseen, const Problem& p, int first, int reach, int start) {
    if (unseen.later) {
        each(scores, [&](int h, int column, float& x) {
            int last = p.offset < 0 ? reach - 1 : min(reach - 1, p.offset + start + row_of(m, h));
            x = first + column > last ? -infinity() : x;
        });
    }
    if (unseen.earlier) {
        each(scores, [&](int h, int column, float& x) {
            x = is_before(p, p.offset + start + row_of(m, h), first + column) ? -infinity() : x;
        });
    }
}

// Computes x = rows times columns, both of `DEPTH` numbers.
template <int DEPTH, int N>
__device__ void multiply_rows(Matrix<N>& x, const Operand* rows, const Operand* columns) {
    zero(x);
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        Left left[TALL];
#pragma unroll
        for (int m = 0; m < TALL; m++) load<false>(left[m], rows, DEPTH + PAD, first_row(m), k);
#pragma unroll
        for (int n = 0; n < N; n++) {
            Right right;
            load<true>(right, columns, DEPTH + PAD, k, 16 * n);
#pragma unroll
            for (int m = 0; m < TALL; m++) multiply(x[m][n], left[m], right);
        }
    }
}

// Computes sums += weights times columns of WIDTH numbers.
template <int WIDTH, int N>
__device__ void add_columns(Matrix<WIDTH / 16>& sums, const Left (&weights)[TALL][N], const Operand* columns) {
#pragma unroll
    for (int k = 0; k < N; k++) {
#pragma unroll
        for (int n = 0; n < WIDTH / 16; n++) {
            Right right;
            load<false>(right, columns, WIDTH + PAD, 16 * k, 16 * n);
#pragma unroll
            for (int m = 0; m < TALL; m++) multiply(sums[m][n], weights[m][k], right);
        }
    }
}

// Rounds sums to left factors.
template <int N>
__device__ void round_to(Left (&to)[TALL][N], const Matrix<N>& x) {
#pragma unroll
    for (int m = 0; m < TALL; m++) {
#pragma unroll
        for (int n = 0; n < N; n++) to[m][n] = as_left(x[m][n]);
    }
}

// Computes the outputs and the logarithms of the denominators; a team has one query head and R
// queries.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
softmax_half_forward(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, Stored* out, float* logs) {
    extern __shared__ uint4 shared_memory[];
    ForwardShared& s = *(ForwardShared*)shared_memory;
    constexpr int K = FORWARD;
    int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    // The queries that see most keys come first.
    int start = (gridDim.y - 1 - blockIdx.y) * R;
    Span rows = {start, min(R, p.queries - start), 1};
    Rows<const Stored> keys = rows_of(k, p.k, batch, head / p.group), values = rows_of(v, p.v, batch, head / p.group);
    const unsigned char* key_mask = visible ? visible + (long long)batch * p.keys : nullptr;
    KeySteps<K> steps(p, start, rows.count);
    int reach = steps.reach, key_index = batch * (p.heads / p.group) + head / p.group;
    RowGates gates(p, key_index, p.offset + start, rows.count);
    auto copy = [&](int stage, int first) {
        Span columns = {first, max(0, min(K, reach - first)), 1};
        copy_keys(s.across, s.hidden[stage], stage, keys, values, columns, key_mask);
        load_gates<K>(s, stage, p, key_index, first, columns.count);
    };
    copy_rows<R, D, DIM, TEAM_THREADS>(&s.x[0][0], D + PAD, rows_of(q, p.q, batch, head), rows, 0, [](long long) { return true; });
    copy(0, steps.begin());

    Matrix<V / 16> sums;
    zero(sums);
    // Every column of `denominator` has the same number.
    float largest[TALL][2], denominator[TALL][4] = {};
#pragma unroll
    for (int m = 0; m < TALL; m++) largest[m][0] = largest[m][1] = FLOOR;
    for (int first = steps.begin(), stage = 0; first < reach; first = steps.after(first), stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        copy(stage ^ 1, steps.after(first));
        Matrix<K / 16> scores;
        multiply_rows<D>(scores, &s.x[0][0], &s.across.x[stage][0][0]);
#pragma unroll
        for (int m = 0; m < TALL; m++) forget<true>(scores[m], p, gates.sums[m], s, stage);
        Unseen unseen(p, first, K, reach, start);
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            hide(scores[m], m, unseen, p, first, reach, start);
            if (key_mask) each(scores[m], [&](int, int column, float& x) { x += s.hidden[stage][column]; });
        }
        float decay[TALL][2];
        bool changed = false;
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            float now[2] = {largest[m][0], largest[m][1]}, shift[2];
            each(scores[m], [&](int h, int, float& x) { now[h] = fmaxf(now[h], x); });
#pragma unroll
            for (int h = 0; h < 2; h++) {
                now[h] = over_row(now[h], Largest());
                decay[m][h] = power_of_two((largest[m][h] - now[h]) * p.scale);
                changed |= decay[m][h] != 1.0f;
                largest[m][h] = now[h];
                shift[h] = now[h] * p.scale;
            }
            each(scores[m], [&](int h, int, float& x) { x = power_of_two(x * p.scale - shift[h]); });
        }
        if (lanes_where(changed)) {
#pragma unroll
            for (int m = 0; m < TALL; m++) {
                each(sums[m], [&](int h, int, float& x) { x *= decay[m][h]; });
#pragma unroll
                for (int i = 0; i < 4; i++) denominator[m][i] *= decay[m][i / 2];
            }
        }
        Left weights[TALL][K / 16];
        round_to(weights, scores);
        unsigned one = pack(1.0f, 1.0f);
        Right ones = {{{one, one}, {one, one}}};
#pragma unroll
        for (int m = 0; m < TALL; m++) {
#pragma unroll
            for (int n = 0; n < K / 16; n++) multiply_half(denominator[m], weights[m][n], ones);
        }
        add_columns<V>(sums, weights, &s.across.y[stage][0][0]);
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
    long long at = (long long)blockIdx.x * p.queries + start;
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        float inverse[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            // A row that sees no key is zero, and has weight 0 for every key in the backward pass.
            float sum = denominator[m][2 * h];
            inverse[h] = sum == 0.0f ? 0.0f : 1.0f / sum;
            if (lane() % 4 == 0 && row_of(m, h) < rows.count) {
                logs[at + row_of(m, h)] = sum == 0.0f ? infinity() : largest[m][h] * p.scale + logarithm(sum);
            }
        }
        each(sums[m], [&](int h, int, float& x) { x *= inverse[h]; });
        put_rows<VALUES>(out + at * VALUES, sums[m], Span{0, rows.count, 1}, first_row(m), rows.count);
    }
}

// Computes dq; a team has one query head and R queries.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
softmax_half_query_gradients(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, const Stored* grad,
                             const float* logs, const float* delta, Stored* dq, float* row_sums) {
    extern __shared__ uint4 shared_memory[];
    BackwardShared& s = *(BackwardShared*)shared_memory;
    constexpr int K = BACKWARD;
    int batch = blockIdx.x / p.heads, head = blockIdx.x % p.heads;
    int start = (gridDim.y - 1 - blockIdx.y) * R;
    Span rows = {start, min(R, p.queries - start), 1};
    long long at = (long long)blockIdx.x * p.queries + start;
    Rows<const Stored> keys = rows_of(k, p.k, batch, head / p.group), values = rows_of(v, p.v, batch, head / p.group);
    const unsigned char* key_mask = visible ? visible + (long long)batch * p.keys : nullptr;
    auto always = [](long long) { return true; };
    KeySteps<K> steps(p, start, rows.count);
    int reach = steps.reach, key_index = batch * (p.heads / p.group) + head / p.group;
    RowGates gates(p, key_index, p.offset + start, rows.count);
    auto copy = [&](int stage, int first) {
        Span columns = {first, max(0, min(K, reach - first)), 1};
        copy_keys(s.across, s.hidden[stage], stage, keys, values, columns, key_mask);
        load_gates<K>(s, stage, p, key_index, first, columns.count);
    };
    copy_rows<R, D, DIM, TEAM_THREADS>(&s.x[0][0], D + PAD, rows_of(q, p.q, batch, head), rows, 0, always);
    copy_rows<R, V, VALUES, TEAM_THREADS>(&s.y[0][0], V + PAD, Rows<const Stored>{grad + (at - start) * VALUES, VALUES}, rows, 0, always);
    copy(0, steps.begin());
    // The logarithms and g.out of the lane's rows; rows beyond the last have weight 0.
    float log[TALL][2], product_of[TALL][2];
#pragma unroll
    for (int m = 0; m < TALL; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bool has = row_of(m, h) < rows.count;
            log[m][h] = has ? logs[at + row_of(m, h)] : infinity();
            product_of[m][h] = has ? delta[at + row_of(m, h)] : 0.0f;
        }
    }

    float total[TALL][2] = {};
    Matrix<D / 16> sums;
    zero(sums);
    for (int first = steps.begin(), stage = 0; first < reach; first = steps.after(first), stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        copy(stage ^ 1, steps.after(first));
        Matrix<K / 16> scores, products;
        multiply_rows<D>(scores, &s.x[0][0], &s.across.x[stage][0][0]);
        multiply_rows<V>(products, &s.y[0][0], &s.across.y[stage][0][0]);
        Unseen unseen(p, first, K, reach, start);
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            forget<true>(scores[m], p, gates.sums[m], s, stage);
            hide(scores[m], m, unseen, p, first, reach, start);
            if (key_mask) each(scores[m], [&](int, int column, float& x) { x += s.hidden[stage][column]; });
            each(scores[m], [&](int h, int, float& x) { x = power_of_two(x * p.scale - log[m][h]); });
            each(products[m], [&](int h, int, float& x) { x -= product_of[m][h]; });
            multiply_each(products[m], scores[m]);
            if (GATED) each(products[m], [&](int h, int, float& x) { total[m][h] += x; });
        }
        Left weights[TALL][K / 16];
        round_to(weights, products);
        add_columns<D>(sums, weights, &s.across.x[stage][0][0]);
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        each(sums[m], [&](int, int, float& x) { x *= p.slope; });
        put_rows<DIM>(dq + at * DIM, sums[m], Span{0, rows.count, 1}, first_row(m), rows.count);
    }
    put_sums(row_sums + at, total, rows.count);
}

// Computes dk and dv; a team has one key head and R keys, and goes through the queries of all heads
// of the group, one head after the other.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
softmax_half_key_gradients(Problem p, const Stored* q, const Stored* k, const Stored* v, const unsigned char* visible, const Stored* grad,
                           const float* logs, const float* delta, Stored* dk, Stored* dv, float* column_sums) {
    extern __shared__ uint4 shared_memory[];
    BackwardShared& s = *(BackwardShared*)shared_memory;
    constexpr int K = BACKWARD;
    int key_heads = p.heads / p.group, batch = blockIdx.x / key_heads, key_head = blockIdx.x % key_heads;
    // Early keys are seen by most queries, and come first.
    int start = blockIdx.y * R;
    Span rows = {start, min(R, p.keys - start), 1};
    const unsigned char* key_mask = visible ? visible + (long long)batch * p.keys : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    auto always = [](long long) { return true; };
    // Queries before `begin` see none of the block's keys, since all of these are later; queries
    // from `end` on see none, since all lie before their windows.
    int begin = p.offset < 0 ? 0 : max(0, start - p.offset) / K * K, end = end_of_queries(p, start, rows.count);
    int steps = begin < end ? divide_up(end - begin, K) : 0, all = steps * p.group;
    auto copy = [&](int stage, int step) {
        // After the last step nothing is copied, wherever it would lie.
        int head = key_head * p.group + (step < all ? step / steps : 0), first = begin + (step < all ? step % steps * K : 0);
        Span columns = {first, step < all ? min(K, end - first) : 0, 1};
        long long first_query = ((long long)batch * p.heads + head) * p.queries;
        copy_rows<K, D, DIM, TEAM_THREADS>(&s.across.x[stage][0][0], D + PAD, rows_of(q, p.q, batch, head), columns, 0, always);
        copy_rows<K, V, VALUES, TEAM_THREADS>(&s.across.y[stage][0][0], V + PAD, Rows<const Stored>{grad + first_query * VALUES, VALUES}, columns,
                                              0, always);
        if (threadIdx.x < K) {
            bool has = (int)threadIdx.x < columns.count;
            s.log[stage][threadIdx.x] = has ? logs[first_query + columns.token(threadIdx.x)] : infinity();
            s.delta[stage][threadIdx.x] = has ? delta[first_query + columns.token(threadIdx.x)] : 0.0f;
        }
        load_gates<K>(s, stage, p, blockIdx.x, p.offset + first, columns.count);
        end_copies();
    };
    copy_rows<R, D, DIM, TEAM_THREADS>(&s.x[0][0], D + PAD, rows_of(k, p.k, batch, key_head), rows, 0, keep);
    copy_rows<R, V, VALUES, TEAM_THREADS>(&s.y[0][0], V + PAD, rows_of(v, p.v, batch, key_head), rows, 0, keep);
    copy(0, 0);
    // Keys that are hidden or beyond the last have weight 0.
    bool counts[TALL][2];
#pragma unroll
    for (int m = 0; m < TALL; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) counts[m][h] = row_of(m, h) < rows.count && keep(start + row_of(m, h));
    }

    RowGates gates(p, blockIdx.x, start, rows.count);
    float total[TALL][2] = {};
    Matrix<D / 16> key_sums;
    Matrix<V / 16> value_sums;
    zero(key_sums);
    zero(value_sums);
    for (int step = 0, stage = 0; step < all; step++, stage ^= 1) {
        wait_for_copies<0>();
        __syncthreads();
        copy(stage ^ 1, step + 1);
        int first = begin + step % steps * K;
        Matrix<K / 16> scores, products;
        multiply_rows<D>(scores, &s.x[0][0], &s.across.x[stage][0][0]);
        multiply_rows<V>(products, &s.y[0][0], &s.across.y[stage][0][0]);
        // The rows are keys here, and the own keys of the step's queries begin with `own`.
        int own = p.offset + first;
        bool later = p.offset >= 0 && start + first_row(TALL) > own;
        bool earlier = p.offset >= 0 && start + first_row(0) <= own + K - 1 - p.window;
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            forget<false>(scores[m], p, gates.sums[m], s, stage);
            each(scores[m], [&](int h, int column, float& x) {
                x = counts[m][h] ? power_of_two(x * p.scale - s.log[stage][column]) : 0.0f;
            });
            if (later) each(scores[m], [&](int h, int column, float& x) { x = start + row_of(m, h) > own + column ? 0.0f : x; });
            if (earlier) {
                each(scores[m], [&](int h, int column, float& x) {
                    x = is_before(p, own + column, start + row_of(m, h)) ? 0.0f : x;
                });
            }
            each(products[m], [&](int, int column, float& x) { x -= s.delta[stage][column]; });
            multiply_each(products[m], scores[m]);
            if (GATED) each(products[m], [&](int h, int, float& x) { total[m][h] += x; });
        }
        Left weights[TALL][K / 16];
        round_to(weights, scores);
        add_columns<V>(value_sums, weights, &s.across.y[stage][0][0]);
        round_to(weights, products);
        add_columns<D>(key_sums, weights, &s.across.x[stage][0][0]);
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
    long long at = (long long)blockIdx.x * p.keys + start;
#pragma unroll
    for (int m = 0; m < TALL; m++) {
        each(key_sums[m], [&](int, int, float& x) { x *= p.slope; });
        put_rows<DIM>(dk + at * DIM, key_sums[m], Span{0, rows.count, 1}, first_row(m), rows.count);
        put_rows<VALUES>(dv + at * VALUES, value_sums[m], Span{0, rows.count, 1}, first_row(m), rows.count);
    }
    put_sums(column_sums + at, total, rows.count);
}
