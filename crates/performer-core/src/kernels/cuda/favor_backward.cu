// FAVOR, backward. L is the logarithm of a query's denominator, and c the scales by whose powers of
// two the sums over keys are divided (favor.cuh); these logarithms are to base 2. A query's weights
// `w = 2^(logarithm + c - L)` are already divided by its denominator, so that out = sum_r w_r S_r.
// With g the gradient of out, e = -g.out, and n_r the sum of feature r over the keys (`norm`), the
// gradients of the natural logarithms of features are
//
//     d logarithm(q)_r = w_r (g.S_r + e n_r)
//     d logarithm(k)_r = f_r (v.R_r + m_r),  dv = sum_r f_r R_r
//     [R, m] = sum of w [g, e] over the queries that see the key, its own token's among them
//
// The two have one form: the reader's rows [y', u'] meet the builder's sums of [y, u]. Keys read
// where KEYS is true, and queries where it is false. For keys the scan runs from the last token to
// the first. The forward pass keeps
//
//   - L;
//   - the sums before each segment, where there are several;
//   - 1/denominator, with signed features: g is multiplied by it when it is loaded;
//   - the outputs before rounding, for half types where values are in several slices.
//
// With LOGS, L itself has a gradient l, which stands after g in a row of OUT_WIDTH numbers. Since
// d L = sum_r w_r n_r d logarithm(q)_r, it is added to e and to nothing else.
//
// With gates, between a reader's row and a builder's stands the same factor whichever side reads,
// so both scans forget alike, each in its own order. A gate shifts the logarithms of keys, and L
// itself, which is counted at the query's own token:
//
//     factor_j = sum_r d logarithm(k_j)_r - l_j,  d gate_t = -sum_{j >= t} factor_j
//
// The shares of one query in the sums over r of all keys add up to its l (0 without LOGS). The
// factor of its own token has -l. So the factors of a sequence add up to zero, and the gradient of
// the first gate is zero.
//
//   queries read: q (C, DIM), g (C, V), S (F, V), norm (F) -> d (C, F) -> dq (C, DIM), and e (C)
//   keys read:    k (C, DIM), v (C, V), R (F, V), m (F)    -> dv (C, V), d (C, F) -> dk (C, DIM)
//   results, of query heads: dq (SPLITS, B, H, Tq, DIM), dk (SPLITS, B, H, Tk, DIM),
//                            dv (B, H, Tk, VALUES), factors (SPLITS, B, H, Tk)
//
// where d is the gradient of the logarithms of features, or of signed features. With ready
// features, rows of dq and dk have FEATURES numbers instead of DIM; with signed ones, a row of dk
// has one more, the gradient of the key's log-scale. `favor_reduce` adds up slices and groups.
// Where the map itself is trained, d is written too (`of_features`).

#include "favor.cuh"

// Shared is the shared memory of a block.
struct Shared {
    Builder builder;
    Side reader;
    // The reader's [y', u']: gradients of outputs and e, or values and 1.
    alignas(16) Operand y[C][V + PAD];
    float unit[C];
    // The two are never needed at the same time.
    union {
        // What the sums lost by rounding, for half types: g.S + e n is small beside its terms.
        alignas(16) Operand rest[F][V + PAD];
        struct {
            // In turn the weights of the reader's features, what `pairs` lost by rounding, and the
            // gradients of the features' logarithms.
            Operand weights[C * ((F > C ? F : C) + PAD)];
            // First the products of the reader's weights with the builder's features, for dv; then
            // those of the reader's [y', u'] with the builder's [y, u], for d.
            Operand pairs[C][C + PAD];
        };
    };
    // Sums over columns, a part from each warp of a group. `total` is of the gradients of
    // log-features. `sum` is of w g.S, which gives g.out. `weight` is of w n: for signed features
    // this is the denominator; for positive ones, whose w is already divided by it, it is 1 up to
    // rounding. Then e = -sum/weight, plus l with LOGS.
    float total[TURNS][C], sum[TURNS][C], weight[TURNS][C];
};
static_assert(sizeof(Shared) == SHARED_BACKWARD, "the host asks for another size of shared memory");

// The gradients of a query's log-features sum to zero, since a common shift cancels in the
// quotient. Where a block has all values (SPLITS is 1), the kernel for dq solves this for e.
// Otherwise `favor_delta` computes e from `out` before rounding: a rounding error of `out` would be
// in every gradient.
constexpr bool OWN_DELTA = SPLITS == 1;

// Returns the gradient of a row's logarithm, which stands after the gradients of its values.
__device__ inline float of_logarithm(const Stored* grad, long long row) {
    return LOGS ? widen(grad[row * OUT_WIDTH + VALUES]) : 0.0f;
}

// Returns the gradient of a query's logarithm; zero where it sees no key, for which L is infinite.
__device__ inline float of_logarithm(const Tensors& t, long long query) {
    return LOGS && t.logs[query] != infinity() ? of_logarithm(t.grad, query) : 0.0f;
}

// Computes e = l - g.out, or -g.out/denominator with signed features, which have no l. A warp has
// one row of `out` and `grad`, (rows, OUT_WIDTH) each.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_delta(long long rows, const float* out, const Stored* grad, const float* denominators, float* delta) {
    long long row = (long long)blockIdx.x * WARPS + warp();
    if (row >= rows) return;
    float sum = 0, factor = denominators ? denominators[row] : 1.0f;
    for (int i = lane(); i < VALUES; i += 32) {
        // The gradient comes with its factor, and is rounded, as the products see it.
        sum += out[row * OUT_WIDTH + i] * rounded(widen(grad[row * OUT_WIDTH + i]) * factor);
    }
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane() == 0) delta[row] = of_logarithm(grad, row) - sum;
}

// Computes the gradients of queries, or (KEYS) of keys and values.
template <bool KEYS>
__device__ void gradients(const Problem& p, const Tensors& t, Result* dx, Result* dy) {
    extern __shared__ uint4 shared_memory[];
    Shared& s = *(Shared*)shared_memory;
    Builder& b = s.builder;
    Place place(p);
    Strides dense = {(long long)p.heads * p.queries * OUT_WIDTH, (long long)p.queries * OUT_WIDTH, OUT_WIDTH};
    Rows<const Stored> queries = rows_of(t.q, p.q, place.batch, place.head);
    Rows<const Stored> grads = rows_of(t.grad, dense, place.batch, place.head);
    Rows<const Stored> keys = rows_of(t.k, p.k, place.batch, place.key_head);
    Rows<const Stored> values = rows_of(t.v, p.v, place.batch, place.key_head);
    Linear of_queries = linear_of<false>(p, place, t.projection), of_keys = linear_of<true>(p, place, t.projection);
    Packed back = back_of<KEYS>(p, place, t.back);
    Packed metric = square_of(p, place, p.form.metric), square = square_of(p, place, p.form.square);
    const unsigned char* key_mask = t.visible ? t.visible + (long long)place.batch * p.keys : nullptr;
    auto keep = [&](long long token) { return !key_mask || key_mask[token]; };
    auto always = [](long long) { return true; };
    long long first_query = (long long)place.query_index * p.queries;
    int column = place.split * V;
    int tokens = KEYS ? p.keys : p.queries;
    // Units belong to the whole width of values and are counted in one slice only.
    float once = place.split == 0;
    const float* gates = gates_of(p, place.key_index);

    int builders = gridDim.x / SPLITS / (KEYS ? 1 : p.group), builder = KEYS ? place.query_index : place.key_index;
    float* record = t.before ? t.before + ((long long)(CAUSAL ? place.segment : 0) * builders + builder) * RECORD : nullptr;
    Memory memory;
    if (CAUSAL) {
        begin(b, memory, record, place.split);
    } else {
        recall(b, record, place.split);
    }

    // These load the rows of one side; for queries, with what the forward pass kept of them.
    auto load_queries = [&](Side& side, Operand* y, float* unit, Span span) {
        load_side(side, queries, span, always);
        load_rows<C, V, 1>(y, V + PAD, 0, grads, span, column, VALUES - column,
                           [&](int row) { return SIGNED ? t.denominators[first_query + span.token(row)] : 1.0f; });
        for (int row = threadIdx.x; row < C; row += THREADS) {
            bool has = row < span.count;
            long long at = first_query + span.token(row);
            side.offset[row] = has ? -t.logs[at] : -infinity();
            unit[row] = has && (KEYS || !OWN_DELTA) ? t.delta[at] : 0.0f;
        }
    };
    auto load_keys = [&](Side& side, Operand* y, float* unit, Span span) {
        load_side(side, keys, span, keep);
        load_rows<C, V, 1>(y, V + PAD, 0, values, span, column, VALUES - column,
                           [&](int row) { return keep(span.token(row)) ? 1.0f : 0.0f; });
        for (int row = threadIdx.x; row < C; row += THREADS) unit[row] = 1;
    };

    int begins = place.segment * p.segment, ends = min(tokens, begins + p.segment);
    for (int done = 0, n; done < ends - begins; done += n) {
        Span span = {KEYS ? ends - 1 - done : begins + done, min(C, ends - begins - done), KEYS ? -1 : 1};
        n = span.count;
        if (KEYS) {
            load_keys(s.reader, &s.y[0][0], s.unit, span);
            if (CAUSAL) load_queries(b, &b.y[0][0], b.unit, span);
        } else {
            load_queries(s.reader, &s.y[0][0], s.unit, span);
            if (CAUSAL) load_keys(b, &b.y[0][0], b.unit, span);
        }
        // The next chunk begins here unless this one ends early.
        Span next = {(int)span.token(n), max(0, min(C, ends - begins - done - n)), span.step};
        if (KEYS || CAUSAL) {
            ask_for_rows(keys, next, READY ? FEATURES : DIM);
            ask_for_rows({values.first + column, values.stride}, next, min(V, VALUES - column));
        }
        if (!KEYS || CAUSAL) {
            ask_for_rows(queries, next, READY ? FEATURES : DIM);
            ask_for_rows({grads.first + column, grads.stride}, next, min(V, VALUES - column));
        }
        if (GATED) measure<false>(b, gates, span, p.keys);
        __syncthreads();
        if (KEYS) {
            set_key_offsets<READS>(s.reader, b, keys, span, p.offset_scale, keep, metric, b.excess);
            forget_rows<BUILDS>(b, b);
        } else if (CAUSAL) {
            set_key_offsets<BUILDS>(b, b, keys, span, p.offset_scale, keep, metric, b.excess);
            forget_rows<READS>(s.reader, b);
        }
        __syncthreads();
        if (CAUSAL) n = enter(b, memory, KEYS ? queries : keys, span, KEYS ? of_queries : of_keys);

        Features w;
        take_features(w, s.reader, KEYS ? keys : queries, span, KEYS ? of_keys : of_queries, true);
        Pairs pairs;
        if (KEYS) {
            w.each([&](int row, int column, float& x) {
                x = SIGNED ? x * power_of_two(s.reader.offset[row] + b.scale[column]) : power_of_two(x + b.scale[column]);
            });
            w.store(s.weights, F + PAD);
            __syncthreads();
            // dv = w R + tril(w f^T) y.
            Values rows;
            rows.zero();
            rows.add<false, false>(s.weights, F + PAD, &b.sums[0][0], V + PAD, F);
            if (CAUSAL) {
                pairs.zero();
                pairs.add<false, true>(s.weights, F + PAD, &b.features[0][0], F + PAD, F);
                pairs.each([](int row, int column, float& x) { x = column <= row ? x : 0.0f; });
                pairs.store(&s.pairs[0][0], C + PAD);
                __syncthreads();
                rows.add<false, false>(&s.pairs[0][0], C + PAD, &b.y[0][0], V + PAD, C);
            }
            Result* to = dy + (long long)place.query_index * p.keys * VALUES + column;
            rows.each([&](int row, int c, float& x) {
                if (row < n && column + c < VALUES) narrow(x, to[span.token(row) * VALUES + c]);
            });
            __syncthreads();
        } else {
            w.each([&](int row, int column, float& x) {
                x = SIGNED ? x * power_of_two(s.reader.offset[row] + b.scale[column]) : power_of_two(x + b.scale[column]);
            });
        }

        // d, still to be multiplied by w: y' S^T + u' norm^T + tril(y' y^T + u' u^T) f. Where e is
        // not known yet (own_delta), the terms of u' are left out, and are added once e is.
        Features d;
        d.zero();
        d.add<false, true>(&s.y[0][0], V + PAD, &b.sums[0][0], V + PAD, V);
        if (STORAGE != 0) {
            auto keep_rest = [&](int row, int column, float& x) { narrow(x - rounded(x), s.rest[row][column]); };
            if (CAUSAL) {
                memory.each(keep_rest);
            } else {
                for (int i = threadIdx.x; i < F * V; i += THREADS) keep_rest(i / V, i % V, sums_of(record, place.split)[i / V * SPLITS * V + i % V]);
            }
            __syncthreads();
            d.add<false, true>(&s.y[0][0], V + PAD, &s.rest[0][0], V + PAD, V);
            __syncthreads();
        }
        constexpr bool own_delta = !KEYS && OWN_DELTA;
        if (!own_delta) d.each([&](int row, int column, float& x) { x += once * s.unit[row] * b.norm[column]; });
        if (CAUSAL) {
            pairs.zero();
            pairs.add<false, true>(&s.y[0][0], V + PAD, &b.y[0][0], V + PAD, V);
            pairs.each([&](int row, int column, float& x) {
                if (!own_delta) x += once * s.unit[row] * b.unit[column];
                if (column > row) x = 0;
            });
            pairs.store(&s.pairs[0][0], C + PAD);
            Operand* lost = s.weights;
            if (STORAGE != 0) pairs.each([&](int row, int column, float& x) { narrow(x - rounded(x), lost[row * (C + PAD) + column]); });
            __syncthreads();
            d.add<false, false>(&s.pairs[0][0], C + PAD, &b.features[0][0], F + PAD, C);
            if (STORAGE != 0) d.add<false, false>(lost, C + PAD, &b.features[0][0], F + PAD, C);
        }
        if (own_delta) {
            // This is the e for which the gradients of a row's logarithms sum to zero.
            Features norms;
            norms.zero();
            if (CAUSAL) norms.add_prefixes(&b.features[0][0], F + PAD);
            norms.each([&](int, int column, float& x) { x += b.norm[column]; });
            auto product = [](int, int, float x, float y) { return x * y; };
            w.over_columns_with(d, s.sum, Add(), product);
            w.over_columns_with(norms, s.weight, Add(), product);
            __syncthreads();
            if (threadIdx.x < C) {
                int row = threadIdx.x;
                float weight = together(s.weight, row, Add());
                s.unit[row] = weight == 0.0f ? 0.0f : -together(s.sum, row, Add()) / weight;
                if (row < n) {
                    long long query = first_query + span.token(row);
                    s.unit[row] += of_logarithm(t, query);
                    t.delta[query] = s.unit[row];
                }
            }
            __syncthreads();
            d.each_with(norms, [&](int row, int, float& x, float& norm) { x += s.unit[row] * norm; });
        }
        if (CAUSAL) {
            absorb(b, memory);
            __syncthreads();
        }
        if (SIGNED) {
            // The gradients of signed features, and of the keys' log-scales.
            if (KEYS) {
                d.each_with(w, [](int, int, float& x, float& weight) { weight *= x; });
                w.over_columns(s.total, Add(), [](int, int, float x) { return x; });
            }
            d.each([&](int row, int column, float& x) { x *= power_of_two(s.reader.offset[row] + b.scale[column]); });
        } else {
            d.each_with(w, [](int, int, float& x, float& weight) { x *= weight; });
            if (KEYS) d.over_columns(s.total, Add(), [](int, int, float x) { return x; });
            if (OWN_KEYS && t.of_features) {
                long long head = place.split * (long long)(gridDim.x / SPLITS) + place.query_index;
                float* to = t.of_features + head * tokens * FEATURES;
                d.each([&](int row, int column, float& x) {
                    if (row < n && column < FEATURES) to[span.token(row) * FEATURES + column] = x;
                });
            }
        }

        constexpr int ROW = READY ? FEATURES : DIM;
        int width = SIGNED && KEYS ? ROW + 1 : ROW;
        int rows_before = KEYS ? p.keys : p.queries;
        Result* to = dx + (place.split * (long long)(gridDim.x / SPLITS) + place.query_index) * rows_before * width;
        if (READY) {
            d.each([&](int row, int column, float& x) {
                if (row < n && column < FEATURES) narrow(x, to[span.token(row) * width + column]);
            });
            __syncthreads();
            if (SIGNED && KEYS && (int)threadIdx.x < n) {
                narrow(together(s.total, threadIdx.x, Add()), to[span.token(threadIdx.x) * width + FEATURES]);
            }
        } else {
            // In two parts for half types; the second goes where the features were.
            constexpr int halves = STORAGE == 0 ? 1 : 2;
            d.store(s.weights, F + PAD);
            __syncthreads();
            if (halves == 2) d.each([&](int row, int column, float& x) { narrow(x - rounded(x), b.features[row][column]); });
            __syncthreads();
            Inputs x;
            x.zero();
            x.add_packed<halves>(s.weights, F + PAD, (int)(&b.features[0][0] - s.weights), back, F);
            if (KEYS) {
                // The gradient of -norm |key|^2, or of -norm |P key|^2, in base e.
                auto of_norm = [&](int row, float key) {
                    return 2 * 0.6931471805599453f * p.offset_scale * key * together(s.total, row, Add());
                };
                if (METRIC) {
                    Inputs turned;
                    turned.zero();
                    turned.add_packed<PARTS>(&s.reader.x[0][0][0], D + PAD, C * (D + PAD), square, D);
                    x.each_with(turned, [&](int row, int, float& y, float& key) { y -= of_norm(row, key); });
                } else {
                    x.each([&](int row, int column, float& y) {
                        float key = widen(s.reader.x[0][row][column]);
                        if (PARTS == 2) key += widen(s.reader.x[PARTS - 1][row][column]);
                        y -= of_norm(row, key);
                    });
                }
            }
            x.each([&](int row, int column, float& y) {
                if (row < n && column < DIM) narrow(y, to[span.token(row) * width + column]);
            });
        }
        if (GATED && KEYS && (int)threadIdx.x < n) {
            long long index = place.split * (long long)(gridDim.x / SPLITS) + place.query_index;
            // As many queries as keys: with gates, a query sees the keys up to its own.
            float of_query = once * of_logarithm(t, first_query + span.token(threadIdx.x));
            t.factors[index * p.keys + span.token(threadIdx.x)] = together(s.total, threadIdx.x, Add()) - of_query;
        }
        __syncthreads();
    }
}

// Computes dq, and e into `t.delta` where SPLITS is 1; else `favor_delta` has computed e before.
// Launch: grid (B H SPLITS, segments of queries), THREADS threads, SHARED_BACKWARD bytes of dynamic
// shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, GRADIENTS_AT_ONCE) favor_query_gradients(Problem p, Tensors t, Result* dq) {
    gradients<false>(p, t, dq, nullptr);
}

// Computes dk and dv, one of each for every query head; `favor_reduce` adds up those of a group.
// It reads `t.delta`, so `favor_query_gradients` must have run before. Launch: grid
// (B H SPLITS, segments of keys), THREADS threads, SHARED_BACKWARD bytes of dynamic shared memory.
extern "C" __global__ void __launch_bounds__(THREADS, GRADIENTS_AT_ONCE) favor_key_gradients(Problem p, Tensors t, Result* dk, Result* dv) {
    gradients<true>(p, t, dk, dv);
}
