// Causal FAVOR, backward, in bf16, for heads of up to 64 numbers and up to 128 features: the
// gradients dq, dk and dv, and those of forget gates in parts (`factors`). favor_backward.cu has
// the formulas; `Problem` and `Tensors` in favor.cuh describe the arguments.
//
// A kernel adds up one side of attention, the builder, and reads the sums from the other side, the
// reader. For dq the builder holds keys and the reader queries; for dk and dv the builder holds
// queries, from the last to the first, and the reader keys. A team of warps shares the builder;
// each warp has 16 rows of the reader in a chunk:
//
//   queries read: x (16, D), g (16, V) -> d (16, P) = g S^T + e norm + pairs -> dq (16, D), e (16)
//   keys read:    x (16, D), v (16, V) -> dv (16, V), d (16, P) = v R^T + m + pairs -> dk (16, D)
//
// S is the sum of phi(k) v^T over the keys of earlier chunks, and norm that of phi(k). With
// w = phi(q)/denominator, R is the sum of w g^T over the queries of later chunks and m that of e w,
// where g is the gradient of the outputs and e = -g.out. `pairs` comes from the rows of the chunk
// itself. d times the features (of a query: times w) is the gradient of their natural logarithms.

#include "favor_bf16.cuh"

// Gradients of gates are long sums in which almost all cancels (favor_gates.cu). So with gates, the
// products with features of a chunk take what rounding the features lost as well: by that the
// errors of these sums shrink tenfold.

// TeamBackward is the shared memory of a block: the builder, what rounding its sums lost, the
// reader's rows, and the sums of features before each run of 16 rows.
struct TeamBackward {
    TeamBuilder builder;
    alignas(16) Operand rest[P][W];
    // x holds the reader's rows, queries or keys; y holds the gradients of the outputs where
    // queries read, and the values where keys read.
    alignas(16) Operand x[C][D + PAD];
    alignas(16) Operand y[C][W];
    float before[C / 16][P];
#if GATED
    alignas(16) Operand low[P][C + PAD];
    __device__ Operand* lows() { return &low[0][0]; }
    __device__ const Operand* lows() const { return &low[0][0]; }
#else
    __device__ Operand* lows() const { return nullptr; }
#endif
};
static_assert(sizeof(TeamBackward) == SHARED_BACKWARD, "the host asks for another size of shared memory");

// Computes x += y times the transposed sums: the derivative of y.S with respect to each feature.
__device__ inline void multiply_sums(Tile (&x)[P / 16], const Operand* y, const Operand* sums) {
#pragma unroll
    for (int k = 0; k < V; k += 16) {
        Left left;
        load<false>(left, y, W, 16 * warp(), k);
#pragma unroll
        for (int n = 0; n < P / 16; n++) {
            Right right;
            load<true>(right, sums, W, k, 16 * n);
            multiply(x[n], left, right);
        }
    }
}

// Computes x += (the reader's y times the y of the builder's rows) times the features of those
// rows, over the rows of the chunk up to the reader's own. Where keys read (`units`), the product
// of a pair also has the query's e added, since the unit of a key is 1. Where queries read, their e
// is found only afterwards.
__device__ inline void multiply_values(Tile (&x)[P / 16], const TeamBackward& s, bool units) {
    const TeamBuilder& b = s.builder;
    Left rows[V / 16];
#pragma unroll
    for (int k = 0; k < V / 16; k++) load<false>(rows[k], &s.y[0][0], W, 16 * warp(), 16 * k);
#pragma unroll
    for (int j = 0; j < C / 16; j++) {
        if (j > warp()) continue;
        Tile pairs[1];
        each(pairs, [&](int, int column, float& pair) { pair = units ? b.unit[16 * j + column] : 0.0f; });
#pragma unroll
        for (int k = 0; k < V / 16; k++) {
            Right right;
            load<true>(right, &b.y[0][0], W, 16 * k, 16 * j);
            multiply(pairs[0], rows[k], right);
        }
        hide_later(pairs[0], j);
        Left high = as_left(pairs[0]), low = lost(pairs[0], high);
#pragma unroll
        for (int n = 0; n < P / 16; n += 2) {
            Right right[2];
            for (int i = 0; i < 2; i++) load<true>(right[i], &b.features[0][0], C + PAD, 16 * j, 16 * (n + i));
            for (int i = 0; i < 2; i++) multiply(x[n + i], high, right[i]);
            for (int i = 0; i < 2; i++) multiply(x[n + i], low, right[i]);
            for (int i = 0; i < 2 && GATED; i++) load<true>(right[i], s.lows(), C + PAD, 16 * j, 16 * (n + i));
            for (int i = 0; i < 2 && GATED; i++) multiply(x[n + i], high, right[i]);
        }
    }
}

// Computes x = the sums of features 16 n.. over all rows that each of the warp's rows sees;
// `diagonal` has ones up to the diagonal.
__device__ inline void sum_features(Tile& x, const TeamBackward& s, int n, const Left& diagonal) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = s.before[warp()][16 * n + column_in_tile(i / 4) + i % 2];
    Right right;
    load<true>(right, &s.builder.features[0][0], C + PAD, 16 * warp(), 16 * n);
    multiply(x, diagonal, right);
    if (!GATED) return;
    load<true>(right, s.lows(), C + PAD, 16 * warp(), 16 * n);
    multiply(x, diagonal, right);
}

// Computes the reader's weights. `offsets` are those of the lane's two rows.
__device__ inline void make_weights(Tile (&w)[P / 16], const TeamBuilder& b, const float (&offsets)[2], const Operand* x, const Packed& projection) {
    start_weights(w, b, offsets);
    add_logarithms(w, b, x, projection);
    each(w, [](int, int, float& x) { x = power_of_two(x); });
}

// Computes the gradient of rows from that of their features' logarithms.
__device__ inline void multiply_back(Tile (&x)[D / 16], const Tile (&logarithms)[P / 16], const Packed& back) {
    zero(x);
#pragma unroll
    for (int k = 0; k < F / 16; k++) {
        Left high = as_left(logarithms[k]), low = lost(logarithms[k], high);
        Right right[D / 16];
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            back.load_rounded(right[n], 16 * k, 16 * n);
            multiply(x[n], high, right[n]);
        }
#pragma unroll
        for (int n = 0; n < D / 16; n++) multiply(x[n], low, right[n]);
        if (EXACT) continue;
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
            back.load_rest(right[n], 16 * k, 16 * n);
            multiply(x[n], high, right[n]);
        }
    }
    // With EXACT, the packed factor is the projection times log2(e), for logarithms to base 2; the
    // gradient needs the projection itself.
    if (EXACT) each(x, [](int, int, float& y) { y *= 0.6931471805599453f; });
}

// Computes the gradients of queries, or (KEYS) of keys and values.
template <bool KEYS>
__device__ void team_gradients(const Problem& p, const Tensors& t, Result* dx, Result* dy) {
    extern __shared__ uint4 shared_memory[];
    TeamBackward& s = *(TeamBackward*)shared_memory;
    TeamBuilder& b = s.builder;
    Place place(p);
    Strides dense = {(long long)p.heads * p.queries * VALUES, (long long)p.queries * VALUES, VALUES};
    Rows<const Stored> queries = rows_of(t.q, p.q, place.batch, place.head);
    Rows<const Stored> grads = rows_of(t.grad, dense, place.batch, place.head);
    Rows<const Stored> keys = rows_of(t.k, p.k, place.batch, place.key_head);
    Rows<const Stored> values = rows_of(t.v, p.v, place.batch, place.key_head);
    Packed packed = {t.projection, D / 16}, back = {t.back, F / 16};
    const unsigned char* key_mask = t.visible ? t.visible + (long long)place.batch * p.keys : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    auto always = [](long long) { return true; };
    long long first_query = (long long)place.query_index * p.queries;
    int begins = place.segment * p.segment, ends = min(KEYS ? p.keys : p.queries, begins + p.segment);

    // Returns the chunk after the first `done` tokens; where keys read, chunks go from the last
    // token to the first.
    auto span_after = [&](int done) {
        return Span{KEYS ? ends - 1 - done : begins + done, max(0, min(C, ends - begins - done)), KEYS ? -1 : 1};
    };
    auto copy_builder_x = [&](Span span) {
        if (KEYS) {
            copy_rows<C, D, DIM, TEAM_THREADS>(&b.x[0][0], D + PAD, queries, span, 0, always);
        } else {
            copy_rows<C, D, DIM, TEAM_THREADS>(&b.x[0][0], D + PAD, keys, span, 0, keep);
        }
    };
    auto copy_builder_y = [&](Span span) {
        if (KEYS) {
            copy_rows<C, V, VALUES, TEAM_THREADS>(&b.y[0][0], W, grads, span, 0, always);
        } else {
            copy_rows<C, V, VALUES, TEAM_THREADS>(&b.y[0][0], W, values, span, 0, keep);
        }
    };
    auto copy_reader = [&](Span span) {
        if (KEYS) {
            copy_rows<16, D, DIM, 32>(&s.x[0][0], D + PAD, keys, span, 16 * warp(), keep);
            copy_rows<16, V, VALUES, 32>(&s.y[0][0], W, values, span, 16 * warp(), keep);
        } else {
            copy_rows<16, D, DIM, 32>(&s.x[0][0], D + PAD, queries, span, 16 * warp(), always);
            copy_rows<16, V, VALUES, 32>(&s.y[0][0], W, grads, span, 16 * warp(), always);
        }
    };
    // These belong to the query in row threadIdx.x of the next chunk's builder: `offset` is minus
    // the logarithm of its denominator, which the forward pass kept, and `unit` is its e, which the
    // kernel for dq kept.
    float offset = 0, unit = 1;
    auto read_kept = [&](Span span) {
        int row = threadIdx.x;
        bool has = row < span.count;
        offset = has ? -t.logs[first_query + span.token(row)] : -infinity();
        unit = has ? t.delta[first_query + span.token(row)] : 0.0f;
    };

    const float* gates = gates_of(p, place.key_index);
    int done = 0;
    Span span = span_after(0);
    Steps<false> steps;
    if (GATED && warp() == 0) steps = load_steps<false>(gates, span, p.keys);
    copy_builder_x(span);
    copy_reader(span);
    end_copies();
    copy_builder_y(span);
    end_copies();
    if (KEYS && threadIdx.x < C) read_kept(span);
    Own<true> own;
    int builders = gridDim.x / (KEYS ? 1 : p.group), builder = KEYS ? place.query_index : place.key_index;
    begin(b, own, t.before ? t.before + ((long long)place.segment * builders + builder) * RECORD : nullptr);
    if (!KEYS && threadIdx.x < C) set_unit(b, threadIdx.x, 1);

    while (span.count > 0) {
        wait_for_copies<1>();
        if (GATED && warp() == 0) sum_steps(b, steps);
        __syncthreads();
        if (!KEYS) {
            set_key_offsets(b, span, p.offset_scale, keep);
        } else if (threadIdx.x < C) {
            b.offset[threadIdx.x] = GATED ? offset - b.since(threadIdx.x) : offset;
            set_unit(b, threadIdx.x, unit);
        }
        // The offsets of the lane's two rows as reader; those of keys get their -|x|^2/2 below.
        float offsets[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int row = 16 * warp() + lane() / 4 + 8 * h;
            bool has = row < span.count && (!KEYS || keep(span.token(row)));
            offsets[h] = !has ? -infinity() : KEYS ? 0.0f : -t.logs[first_query + span.token(row)];
            if (GATED) offsets[h] += b.since(row);
        }
        __syncthreads();
        int n = enter(b, own, span.count, packed, &s.rest[0][0], s.lows(), KEYS ? nullptr : s.before);
        Span next = span_after(done + n);
        copy_builder_x(next);
        if (KEYS && threadIdx.x < C) read_kept(next);
        if (GATED && warp() == 0) steps = load_steps<false>(gates, next, p.keys);
        absorb(b, own);

        if (KEYS) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                float square = 0;
#pragma unroll
                for (int i = 0; i < D / 8; i++) {
                    unsigned pair = *(const unsigned*)&s.x[16 * warp() + lane() / 4 + 8 * h][8 * i + 2 * (lane() % 4)];
                    square += low_half(pair) * low_half(pair) + high_half(pair) * high_half(pair);
                }
                offsets[h] -= p.offset_scale * over_row(square, Add());
            }
        }
        Tile w[P / 16], d[P / 16];
        if (KEYS) {
            make_weights(w, b, offsets, &s.x[0][0], packed);
            Left weights[P / 16];
#pragma unroll
            for (int i = 0; i < P / 16; i++) weights[i] = as_left(w[i]);
            Tile sums[V / 16];
            float units[4];
            read_sums(sums, units, weights, b);
            put_rows<VALUES>(dy + (long long)place.query_index * p.keys * VALUES, sums, span, 16 * warp(), n);
        }

        // Where keys read, d begins with m, since the unit of a key is 1. Where queries read, the
        // term of e follows once e is known. Then come the rows of the chunk itself, and the sums
        // of the other chunks with what rounding them lost.
        each(d, [&](int, int column, float& x) { x = KEYS ? b.norm[column] : 0.0f; });
        multiply_values(d, s, KEYS);
        multiply_sums(d, &s.y[0][0], &b.sums[0][0]);
        multiply_sums(d, &s.y[0][0], &s.rest[0][0]);
        if (!KEYS) {
            make_weights(w, b, offsets, &s.x[0][0], packed);
            // The gradients of a query's log-features sum to zero, since a common shift cancels in
            // the quotient. This determines e, and is why dq has no term of the norm of q.
            float sum[2] = {}, weight[2] = {}, e[2];
            Left diagonal;
            lower_ones(diagonal, 0, 0);
#pragma unroll
            for (int i = 0; i < P / 16; i++) {
                Tile norms;
                sum_features(norms, s, i, diagonal);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[j / 2 % 2] += w[i][j / 4][j % 4] * d[i][j / 4][j % 4];
                    weight[j / 2 % 2] += w[i][j / 4][j % 4] * norms[j / 4][j % 4];
                }
            }
            for (int h = 0; h < 2; h++) {
                sum[h] = over_row(sum[h], Add()), weight[h] = over_row(weight[h], Add());
                e[h] = weight[h] == 0.0f ? 0.0f : -sum[h] / weight[h];
                int row = 16 * warp() + lane() / 4 + 8 * h;
                if (lane() % 4 == 0 && row < n) t.delta[first_query + span.token(row)] = e[h];
            }
#pragma unroll
            for (int i = 0; i < P / 16; i++) {
                Tile norms;
                sum_features(norms, s, i, diagonal);
#pragma unroll
                for (int j = 0; j < 8; j++) d[i][j / 4][j % 4] += e[j / 2 % 2] * norms[j / 4][j % 4];
            }
        }
        float total[2] = {};
#pragma unroll
        for (int i = 0; i < P / 16; i++) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
                d[i][j / 4][j % 4] *= w[i][j / 4][j % 4];
                total[j / 2 % 2] += d[i][j / 4][j % 4];
            }
        }
        Tile x[D / 16];
        multiply_back(x, d, back);
        if (KEYS) {
            for (int h = 0; h < 2; h++) {
                total[h] = over_row(total[h], Add());
                int row = 16 * warp() + lane() / 4 + 8 * h;
                if (GATED && lane() % 4 == 0 && row < n) t.factors[(long long)place.query_index * p.keys + span.token(row)] = total[h];
            }
            each(x, [&](int h, int column, float& y) {
                // The log-features of a key contain -norm |k|^2, in base 2; its derivative is -2
                // norm k, and ln 2 takes it to base e.
                float key = widen(s.x[16 * warp() + lane() / 4 + 8 * h][column]);
                y -= 2 * 0.6931471805599453f * p.offset_scale * key * total[h];
            });
        }
        put_rows<DIM>(dx + (long long)place.query_index * (KEYS ? p.keys : p.queries) * DIM, x, span, 16 * warp(), n);
        __syncthreads();
        copy_reader(next);
        end_copies();
        copy_builder_y(next);
        end_copies();
        done += n;
        span = next;
    }
    // No copy of this block may be under way when another block gets its memory.
    wait_for_copies<0>();
}

// Computes dq (B, H, Tq, DIM), and e into `t.delta` (B, H, Tq). Launch: grid (B H, segments of
// queries), TEAM_THREADS threads, SHARED_BACKWARD bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2) favor_bf16_query_gradients(Problem p, Tensors t, Result* dq) {
    team_gradients<false>(p, t, dq, nullptr);
}

// Computes dk (B, H, Tk, DIM) and dv (B, H, Tk, VALUES), one of each for every query head;
// `favor_reduce` adds up those of a group. It reads the e that `favor_bf16_query_gradients` has
// written to `t.delta`. Launch: grid (B H, segments of keys), TEAM_THREADS threads,
// SHARED_BACKWARD bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(TEAM_THREADS, 2)
favor_bf16_key_gradients(Problem p, Tensors t, Result* dk, Result* dv) {
    team_gradients<true>(p, t, dk, dv);
}
