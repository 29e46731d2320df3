// Causal FAVOR in bf16, for heads of up to 64 numbers and up to 128 features: what the forward and
// the backward kernels share. Builder, reader, scales and chunks are those of favor.cuh, and so is
// the chain of shapes. There every matrix goes through shared memory; here only what other warps
// read does, which takes less than half of the instructions.
//
// A block is a team of four warps. As builder, each warp has a quarter of the features, with their
// sums and scales in registers: it computes the features transposed, so that a scale belongs to a
// row, and the features are at once the left factor of what they add to the sums. As reader, each
// warp has 16 of the chunk's rows with all features, whose weights are at once left factors too:
//
//   builder, a warp:  x (64, D) -> features^T (P/4, 64) -> S (P/4, V), units (P/4) in registers
//                     -> copies of features (P, 64), S and units (P, W) in shared memory
//   reader, a warp:   x (16, D) -> weights (16, P) -> pairs (16, 64) -> rows (16, V), units (16)
//
// Rows of the next chunk are copied as soon as nothing reads what they overwrite: x of the builder
// once the chunk has entered, its y at the end of the chunk; the reader's own once their weights
// are known in the forward pass, and at the end of the chunk in the backward pass.
//
// Macro EXACT: 1 says that the packed projection, which has the factor DIM^(-1/4) log2(e), is exact
// in bf16. Then the second pieces of `Packed`, what rounding left over, are zero, and the products
// with them are left out. It is exact in base 2 only, so the factor for gradients is in base 2 as
// well, and `multiply_back` multiplies by ln 2.
//
// A product waits for the one before that adds to the same sums, some 30 cycles, and a warp has few
// others beside it to fill them. So loops go over different sums inside, over terms outside.

#ifndef PERFORMER_FAVOR_BF16
#define PERFORMER_FAVOR_BF16

#include "favor.cuh"
#include "team.cuh"

static_assert(STORAGE == 2 && MAP == 0 && CAUSAL && C == 64 && D <= 64 && V <= 64 && SPLITS == 1 && FEATURES <= 128, "for other kernels");

static_assert(C == 16 * TEAM, "a warp reads 16 rows");
// P is FEATURES rounded up to 64, so that all four warps have equally many tiles of 16 features;
// MINE is how many. Records and the packed projection have F features. (This P is not the metric of
// favor.cuh, which these kernels do not take.)
constexpr int P = round_up(FEATURES, 16 * TEAM), MINE = P / (16 * TEAM);
// The length of a row of values with its unit in two halves, the upper bits and the rest, padded to
// 8.
constexpr int W = V + 8;

// ---- Numbers in two parts.

__device__ inline float low_half(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// Returns what `as_left` lost by rounding.
__device__ inline Left lost(const Tile& x, const Left& y) {
    Left z;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        z.x[i] = pack_bf16(x[i / 2][i % 2 * 2] - low_half(y.x[i]), x[i / 2][i % 2 * 2 + 1] - high_half(y.x[i]));
    }
    return z;
}

// Splits a number into its upper bits and the rest, side by side as two operands.
__device__ inline unsigned halves(float x) {
    unsigned high = pack_bf16(x, 0.0f);
    return high | pack_bf16(0.0f, x - low_half(high));
}

// Computes sums += a left factor of 32 columns (`a`, `b`) times the units of 32 rows from `row` on.
// Columns 0 and 1 of `units` are the halves of a unit, and the other six are arbitrary. So only the
// first of the four lanes that hold a row gets its sum, in two numbers that are still to be added.
__device__ inline void multiply_units(float (&sums)[4], const Left& a, const Left& b, const Padded& units, int row) {
    unsigned x[4];
    load_matrices(x, units(row + lane(), 0), true);
    multiply_bf16(sums, a.x, {x[0], x[1]});
    multiply_bf16(sums, b.x, {x[2], x[3]});
}

// ---- The builder.

// TeamBuilder is the shared memory of a team's builder.
struct TeamBuilder : Gates {
    alignas(16) Operand x[C][D + PAD];
    // Values y with their units u.
    alignas(16) Operand y[C][W];
    // The features of the chunk, 2^-scale times as large; the sums before it, with those of units.
    alignas(16) Operand features[P][C + PAD];
    alignas(16) Operand sums[P][W];
    float offset[C], unit[C], scale[P], norm[P];
    // The row before which each warp's features end the chunk; C where they do not.
    int breaks[TEAM];

    // Where the numbers of its matrices are, and the units beside values and sums.
    __device__ Padded at_x() { return {&x[0][0], D + PAD}; }
    __device__ Padded at_y() { return {&y[0][0], W}; }
    __device__ Padded at_features() { return {&features[0][0], C + PAD}; }
    __device__ Padded at_sums() { return {&sums[0][0], W}; }
    __device__ Padded units_of_y() { return {&y[0][V], W}; }
    __device__ Padded units_of_sums() { return {&sums[0][V], W}; }
    // Makes what the thread wrote here visible to products after the next barrier. Products of
    // single warps see it without this; those of favor_wgmma.cuh do not.
    __device__ void share() {}
};

// Own is what a warp holds in registers for its features: the sums of [y, u] before the chunk,
// scales and running maxima, and the chunk's features. If WHOLE, for gradients and for the sums of
// segments, sums are of features that are not rounded: `rest` is what rounding lost.
template <bool WHOLE>
struct Own {
    Tile sums[MINE][V / 16];
    // The sums of u: numbers 2h and 2h + 1 are still to be added, and give that of the lane's row
    // h; only the first of the four lanes that hold a row has it (see `multiply_units`).
    float units[MINE][4];
    float scale[MINE][2], running[MINE][2];
    Left features[MINE][C / 16], rest[WHOLE ? MINE : 1][WHOLE ? C / 16 : 1];

    __device__ static int tile(int m) { return m * TEAM + warp(); }
    __device__ static int row(int m, int half) { return 16 * tile(m) + lane() / 4 + 8 * half; }
};

// Puts into shared memory what stays there: nothing here, the projection in favor_wgmma.cuh.
__device__ inline void prepare(TeamBuilder&, const Packed&) {}

// Begins with the sums of `record`, or with sums over nothing.
template <class Builder, bool WHOLE>
__device__ void begin(Builder& b, Own<WHOLE>& own, float* record) {
    if (threadIdx.x == 0) b.set_pending(0);
#pragma unroll
    for (int m = 0; m < MINE; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = own.row(m, h);
            bool has = record && r < F;
            own.scale[m][h] = own.running[m][h] = has ? scales_of(record)[r] : FLOOR;
            own.units[m][2 * h] = has ? norms_of(record)[r] : 0.0f;
            own.units[m][2 * h + 1] = 0;
        }
        each(own.sums[m], [&](int h, int column, float& x) {
            int r = own.row(m, h);
            x = record && r < F ? sums_of(record, 0)[r * V + column] : 0.0f;
        });
    }
}

// Writes the sums to `record`, at the scale of the running maximum.
template <class Builder, bool WHOLE>
__device__ void leave(const Builder& b, Own<WHOLE>& own, float* record) {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        float factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int r = own.row(m, h);
            factor[h] = power_of_two(own.scale[m][h] - own.running[m][h]);
            if (r < F && lane() % 4 == 0) {
                scales_of(record)[r] = GATED ? own.running[m][h] + b.pending() : own.running[m][h];
                norms_of(record)[r] = (own.units[m][2 * h] + own.units[m][2 * h + 1]) * factor[h];
            }
        }
        each(own.sums[m], [&](int h, int column, float& x) {
            int r = own.row(m, h);
            if (r < F) sums_of(record, 0)[r * V + column] = x * factor[h];
        });
    }
}

// Sets the unit of a row of the builder.
template <class Builder>
__device__ void set_unit(Builder& b, int row, float unit) {
    b.unit[row] = unit;
    *(unsigned*)b.units_of_y()(row, 0) = halves(unit);
}

// Computes the offsets of keys, -|x|^2/2 in base 2; two threads have one row.
template <class Builder, class F_>
__device__ void set_key_offsets(Builder& b, Span span, float offset_scale, F_ keep) {
    int row = threadIdx.x / 2;
    float square = 0;
#pragma unroll
    for (int piece = 0; piece < D / 16; piece++) {
        uint4 x = *(const uint4*)b.at_x()(row, 16 * piece + 8 * (threadIdx.x % 2));
        const unsigned pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) square += low_half(pairs[i]) * low_half(pairs[i]) + high_half(pairs[i]) * high_half(pairs[i]);
    }
    square += from_lane_xor(square, 1);
    if (threadIdx.x % 2) return;
    b.offset[row] = row < span.count && keep(span.token(row)) ? -offset_scale * square : -infinity();
    if (GATED) b.offset[row] -= b.since(row);
}

// Calls `f(m, half, token, pair)` for the features of the chunk that the thread holds; a pair is
// those of a token and the next.
template <class F_>
__device__ void each_feature(Left (&features)[MINE][C / 16], F_ f) {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
#pragma unroll
        for (int j = 0; j < C / 16; j++) {
#pragma unroll
            for (int i = 0; i < 4; i++) f(m, i % 2, 16 * j + column_in_tile(i / 2), features[m][j].x[i]);
        }
    }
}

// Copies the warp's features of the chunk to shared memory; `low` gets what rounding them lost.
template <class Builder, bool WHOLE>
__device__ void store_features(Builder& b, const Own<WHOLE>& own, Operand* low) {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
#pragma unroll
        for (int j = 0; j < C / 16; j++) {
            store(b.at_features(), 16 * own.tile(m), 16 * j, own.features[m][j]);
            if constexpr (WHOLE && GATED) {
                if (low) store(Padded{low, C + PAD}, 16 * own.tile(m), 16 * j, own.rest[m][j]);
            }
        }
    }
}

// Ends the chunk before the first row with a feature above 2^LIMIT, if there is one; returns how
// many rows the chunk has then.
template <class Builder, bool WHOLE>
__device__ int break_chunk(Builder& b, Own<WHOLE>& own, int count, Operand* low) {
    int first = C;
    each_feature(own.features, [&](int, int, int token, unsigned pair) {
        float limit = power_of_two(LIMIT);
        if (low_half(pair) > limit && token > 0) first = min(first, token);
        if (high_half(pair) > limit) first = min(first, token + 1);
    });
    for (int mask = 1; mask < 32; mask *= 2) first = min(first, (int)from_lane_xor((float)first, mask));
    if (lane() == 0) b.breaks[warp()] = first;
    __syncthreads();
    int n = count;
    for (int i = 0; i < TEAM; i++) n = min(n, b.breaks[i]);
    float largest[MINE][2] = {};
    auto counting = [&](int token) { return (token < n ? 0x0000ffffu : 0u) | (token + 1 < n ? 0xffff0000u : 0u); };
    if constexpr (WHOLE) each_feature(own.rest, [&](int, int, int token, unsigned& pair) { pair &= counting(token); });
    each_feature(own.features, [&](int m, int h, int token, unsigned& pair) {
        pair &= counting(token);
        largest[m][h] = fmaxf(largest[m][h], fmaxf(low_half(pair), high_half(pair)));
    });
    for (int m = 0; m < MINE; m++) {
        for (int h = 0; h < 2; h++) {
            float most = over_row(largest[m][h], Largest());
            own.running[m][h] = most > 1.0f ? own.scale[m][h] + logarithm(most) : own.scale[m][h];
        }
    }
    store_features(b, own, low);
    b.share();
    __syncthreads();
    return n;
}

// Adds the products of the projection's rows with the rows of the builder, (P/4, 64) for a warp.
template <bool WHOLE>
__device__ void add_products(Tile (&x)[MINE][C / 16], const TeamBuilder& b, const Own<WHOLE>& own, const Packed& projection) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        Left high[MINE], low[MINE];
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            if (P != F && own.tile(m) >= F / 16) continue;
            projection.load_transposed(high[m], false, k, 16 * own.tile(m), F);
            if (!EXACT) projection.load_transposed(low[m], true, k, 16 * own.tile(m), F);
        }
#pragma unroll
        for (int j = 0; j < C / 16; j++) {
            Right right;
            load<true>(right, &b.x[0][0], D + PAD, k, 16 * j);
#pragma unroll
            for (int m = 0; m < MINE; m++) {
                if (P == F || own.tile(m) < F / 16) multiply(x[m][j], high[m], right);
            }
            if (EXACT) continue;
#pragma unroll
            for (int m = 0; m < MINE; m++) {
                if (P == F || own.tile(m) < F / 16) multiply(x[m][j], low[m], right);
            }
        }
    }
}

// Takes a chunk whose rows are loaded and offsets known; returns how many rows the chunk has.
// Afterwards a reader may begin (if READ). The chunk itself is not in the sums before `absorb`.
// `rest` gets what rounding the sums lost, `low`, with gates, what rounding the features lost, and
// `before` the sums of the features before each run of 16 rows.
template <bool READ = true, class Builder, bool WHOLE>
__device__ int enter(Builder& b, Own<WHOLE>& own, int count, const Packed& projection, Operand* rest = nullptr,
                     Operand* low = nullptr, float (*before)[P] = nullptr) {
    if (GATED) {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
#pragma unroll
            for (int h = 0; h < 2; h++) own.scale[m][h] += b.pending(), own.running[m][h] += b.pending();
        }
    }
    Tile x[MINE][C / 16];
#pragma unroll
    for (int j = 0; j < C / 16; j++) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float offset = b.offset[16 * j + column_in_tile(i / 4) + i % 2];
#pragma unroll
            for (int m = 0; m < MINE; m++) x[m][j][i / 4][i % 4] = offset;
        }
    }
    add_products(x, b, own, projection);
    bool over = false, changed = false;
    float factor[MINE][2];
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        if (FEATURES != P) {
            each(x[m], [&](int h, int, float& y) { y = own.row(m, h) < FEATURES ? y : -infinity(); });
        }
        float largest[2] = {-infinity(), -infinity()};
        each(x[m], [&](int h, int, float& y) { largest[h] = fmaxf(largest[h], y); });
#pragma unroll
        for (int h = 0; h < 2; h++) {
            largest[h] = over_row(largest[h], Largest());
            float scale = fmaxf(own.running[m][h], from_lane(x[m][0][0][2 * h], first_of_row()));
            factor[m][h] = power_of_two(own.scale[m][h] - scale);
            changed |= factor[m][h] != 1.0f;
            // This asks a little early: `break_chunk` decides, by features, which are approximate
            // powers of two and rounded.
            over |= largest[h] - scale > LIMIT - 1;
            own.scale[m][h] = scale;
            own.running[m][h] = fmaxf(scale, largest[h]);
            if (lane() % 4 == 0) b.scale[own.row(m, h)] = scale;
        }
        each(x[m], [&](int h, int, float& y) { y = power_of_two(y - own.scale[m][h]); });
#pragma unroll
        for (int j = 0; j < C / 16; j++) {
            own.features[m][j] = as_left(x[m][j]);
            if constexpr (WHOLE) own.rest[m][j] = lost(x[m][j], own.features[m][j]);
        }
    }
    if (READ) store_features(b, own, low);
    if (lanes_where(changed)) {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            each(own.sums[m], [&](int h, int, float& y) { y *= factor[m][h]; });
#pragma unroll
            for (int i = 0; i < 4; i++) own.units[m][i] *= factor[m][i / 2];
        }
    }
#pragma unroll
    for (int m = 0; m < MINE && READ; m++) {
#pragma unroll
        for (int n = 0; n < V / 16; n++) {
            Left rounded = as_left(own.sums[m][n]);
            store(b.at_sums(), 16 * own.tile(m), 16 * n, rounded);
            if (rest) store(Padded{rest, W}, 16 * own.tile(m), 16 * n, lost(own.sums[m][n], rounded));
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (lane() % 4) continue;
            float norm = own.units[m][2 * h] + own.units[m][2 * h + 1];
            *(unsigned*)b.units_of_sums()(own.row(m, h), 0) = halves(norm);
            b.norm[own.row(m, h)] = norm;
        }
    }
    if (before) {
        // Two ones of bf16: a product with them adds up each feature over 16 rows.
        constexpr unsigned ONES = 0x3f803f80;
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            float first = own.units[m][0] + own.units[m][1], second = own.units[m][2] + own.units[m][3];
            float sums[4] = {first, first, second, second};
#pragma unroll
            for (int j = 0; j < C / 16; j++) {
                if (lane() % 4 == 0) before[j][own.row(m, 0)] = sums[0], before[j][own.row(m, 1)] = sums[2];
                multiply_bf16(sums, own.features[m][j].x, {ONES, ONES});
                if constexpr (WHOLE && GATED) multiply_bf16(sums, own.rest[m][j].x, {ONES, ONES});
            }
        }
    }
    wait_for_copies<0>();
    b.share();
    int n = __syncthreads_or(over) ? break_chunk(b, own, count, low) : count;
    if (GATED && threadIdx.x == 0) b.set_pending(b.since(n - 1));
    return n;
}

// Adds the chunk's units to their sums.
template <class Builder, bool WHOLE>
__device__ void absorb_units(Builder& b, Own<WHOLE>& own) {
    Padded units = b.units_of_y();
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        float chunk[4] = {};
#pragma unroll
        for (int k = 0; k < C / 16; k += 2) {
            multiply_units(chunk, own.features[m][k], own.features[m][k + 1], units, 16 * k);
            if constexpr (WHOLE) multiply_units(chunk, own.rest[m][k], own.rest[m][k + 1], units, 16 * k);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) own.units[m][i] += chunk[i];
    }
}

// Adds the chunk that has entered to the sums: by additions in f32, since tensor cores truncate
// what they add up, and a sequence is long.
template <bool WHOLE>
__device__ void absorb(TeamBuilder& b, Own<WHOLE>& own) {
#pragma unroll
    for (int n = 0; n < V / 16; n++) {
        Tile chunk[MINE];
        zero(chunk);
#pragma unroll
        for (int k = 0; k < C / 16; k++) {
            Right y;
            load<false>(y, &b.y[0][0], W, 16 * k, 16 * n);
#pragma unroll
            for (int m = 0; m < MINE; m++) multiply(chunk[m], own.features[m][k], y);
            if constexpr (WHOLE) {
#pragma unroll
                for (int m = 0; m < MINE; m++) multiply(chunk[m], own.rest[m][k], y);
            }
        }
#pragma unroll
        for (int m = 0; m < MINE; m++) add_each(own.sums[m][n], chunk[m]);
    }
    absorb_units(b, own);
}

// ---- The reader: a warp's 16 rows.

// Adds the logarithms of the features of a matrix of rows to what `x` holds.
__device__ inline void add_logarithms(Tile (&x)[P / 16], const TeamBuilder&, const Operand* rows, const Packed& projection) {
#pragma unroll
    for (int k = 0; k < D; k += 16) {
        Left left;
        load<false>(left, rows, D + PAD, 16 * warp(), k);
#pragma unroll
        for (int n = 0; n < F / 16; n++) {
            Right right;
            projection.load_rounded(right, k, 16 * n);
            multiply(x[n], left, right);
        }
        if (EXACT) continue;
#pragma unroll
        for (int n = 0; n < F / 16; n++) {
            Right right;
            projection.load_rest(right, k, 16 * n);
            multiply(x[n], left, right);
        }
    }
}

// Starts the logarithms of weights with the scale of each feature plus the offset of each row;
// `offsets` are those of the lane's two rows.
template <class Builder>
__device__ void start_weights(Tile (&x)[P / 16], const Builder& b, const float (&offsets)[2]) {
    each(x, [&](int h, int column, float& y) { y = FEATURES == P || column < FEATURES ? b.scale[column] + offsets[h] : -infinity(); });
}

// Computes x += `left` times those rows of the builder that do not come after the warp's own. Each
// has DEPTH numbers: a column of memory, or a row of it where `transposed`.
template <int DEPTH, bool transposed>
__device__ void multiply_pairs(Tile (&x)[C / 16], const Left (&left)[DEPTH / 16], const Operand* right, int stride) {
#pragma unroll
    for (int k = 0; k < DEPTH / 16; k++) {
#pragma unroll
        for (int j = 0; j < C / 16; j++) {
            if (j > warp()) continue;
            Right y;
            load<transposed>(y, right, stride, 16 * k, 16 * j);
            multiply(x[j], left[k], y);
        }
    }
}

// Computes x and units += the first `depth` tiles of `left` times rows of W numbers with their
// units.
template <int DEPTH>
__device__ void multiply_rows(Tile (&x)[V / 16], float (&units)[4], const Left (&left)[DEPTH], Operand* right, int depth) {
#pragma unroll
    for (int k = 0; k < DEPTH; k++) {
        if (k >= depth) continue;
#pragma unroll
        for (int n = 0; n < V / 16; n++) {
            Right y;
            load<false>(y, right, W, 16 * k, 16 * n);
            multiply(x[n], left[k], y);
        }
        // The tiles of `left` after `depth` are zero.
        if (k % 2 == 0) multiply_units(units, left[k], left[k + 1], {right + V, W}, 16 * k);
    }
}

// Zeroes the products with rows of the builder that the reader's row does not see; `x` holds those
// with the builder's rows from 16 j on.
__device__ inline void hide_later(Tile& x, int j) {
    if (j != warp()) return;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (column_in_tile(i / 4) + i % 2 > row_in_tile(i % 4)) x[i / 4][i % 4] = 0;
    }
}

// Computes what the warp's rows see, by their weights: x, from the sums before the chunk and from
// the chunk's rows up to their own; and `units`, the same combination of units.
__device__ inline void read_sums(Tile (&x)[V / 16], float (&units)[4], const Left (&weights)[P / 16], TeamBuilder& b) {
    Tile pairs[C / 16];
    zero(pairs);
    multiply_pairs<P, false>(pairs, weights, &b.features[0][0], C + PAD);
    Left counted[C / 16];
#pragma unroll
    for (int j = 0; j < C / 16; j++) {
        hide_later(pairs[j], j);
        counted[j] = as_left(pairs[j]);
    }
    zero(x);
#pragma unroll
    for (int i = 0; i < 4; i++) units[i] = 0;
    multiply_rows<P / 16>(x, units, weights, &b.sums[0][0], P / 16);
    multiply_rows<C / 16>(x, units, counted, &b.y[0][0], warp() + 1);
}

#endif
