// FAVOR over one head, chunk by chunk: what the forward and the backward kernels share.
//
// A pass has two sides. The *builder* brings features f and the sums `S = sum f [y, u]` over them;
// the *reader*, whose row i sees the builder's rows up to i, brings weights for the same features.
// In the forward pass and for the gradient of queries, keys build and queries read; for the
// gradients of keys and values, queries build, from the last token to the first, and keys read.
// Logarithms are to base 2; the factor log2(e) is in the projection.
//
// Shapes of one chunk in a block (C tokens, D head dimension, F features, V values of the slice):
//
//   x (C, D)            -> `take_features` -> logarithms of features (C, F), of builder or reader
//   logarithms, c (F)   -> `weigh`         -> features f (C, F), 2^-c times as large, rounded;
//                                             added (F) = f^T u, u (C)
//   f, y (C, V)         -> `absorb`        -> S (F, V) += f^T y
//   added               -> `set_scale`     -> norm (F) += added, when the next chunk is taken
//   reader's w (C, F)   -> w S + tril(w f^T) y (C, V), w norm + tril(w f^T) u (C)
//
//   pass                      builder x, y, u                   reader's rows -> result
//   forward                   keys, values, 1                   queries -> outputs
//   gradient of queries       keys, values, 1                   queries, g, e -> dq
//   gradients of keys, values queries, g, e (in reverse order)  keys, values, 1 -> dk, dv
//
// where g is the gradient of the outputs and e = -g.out; see favor_backward.cu. Where all keys are
// seen, the builder's sums come from `favor_sums` and `favor_combine`, and the triangle falls away.
//
// Scale. In a chunk, feature r of the builder is divided by 2^c[r], where c[r] is the largest
// logarithm before the chunk and of its first row, which every row of the chunk may see. The
// logarithms of a later row may exceed c[r] by up to LIMIT; the first row that exceeds it by more
// begins a chunk of its own. So where a chunk ends depends on its past alone, and no row's numbers
// depend on what comes after it.
//
// Forget gates (GATED). Between a query and an earlier key stands the factor e^(sum of the gates
// after the key, up to the query's own). A factor common to all that a query sees cancels in its
// quotient, so a gate is a shift of logarithms and nothing else. In a chunk these are counted from
// its first row: a row of the builder weighs more by what is forgotten from the first row to it,
// since the rows that see it have forgotten that much less of it; a row of the reader weighs less
// by that. Older sums forget from chunk to chunk by their scales, without a product. A strong gate
// lifts the rows after it above the limit, and they begin a chunk of their own.
//
// Macros:
//
//   MAP       Where features come from:
//             0  They are computed here. Feature r of a row is exp(w_r.x - |x|^2/2), where x is
//                DIM^(-1/4) times the row. For queries exp(-|x|^2/2) is left out, and for both the
//                factor FEATURES^(-1/2), since they cancel in the quotient; where logarithms of
//                denominators are returned, the host corrects these.
//             1  Rows are log-features.
//             2  Rows are signed features, and keys have the logarithm of their scale as one more
//                number.
//             3  They are computed here: exp(a_r.x) of queries and exp(b_r.x + h_r - |P x|^2/2) of
//                keys, with a, b, h and P for each key head or one set for all (`KeyForm`).
//             Features of 1 and 2 are called "ready". They are f32; those of 2 may also be bf16.
//   METRIC    Whether there is a P, with MAP 3 only; 0 if it is not given.
//   DIM, FEATURES, VALUES   The sizes of a query, of its features and of a value.
//   SLICE     The values that one block takes, a multiple of 16.
//   CHUNK     The most tokens of a chunk: 16, 32 or 64.
//   CAUSAL    1: a query sees the keys up to its own. 0: it sees all keys.
//   GATED     Whether there are forget gates; only with CAUSAL.
//   STORAGE   What tensors hold; see tile.cuh.
//   LOGS      Whether a row of outputs has the logarithm of its denominator after its values; only
//             with f32 and positive features. 0 if it is not given.
//   PARTIAL   Whether gradients are parts in f32 that are still to be added up; 0 if it is not
//             given.

#ifndef PERFORMER_FAVOR
#define PERFORMER_FAVOR

#include "tile.cuh"

#ifndef LOGS
#define LOGS 0
#endif
#ifndef METRIC
#define METRIC 0
#endif

constexpr bool READY = MAP == 1 || MAP == 2, SIGNED = MAP == 2, OWN_KEYS = MAP == 3;
static_assert(!READY || STORAGE == 0 || (SIGNED && STORAGE == 2),
              "ready features are f32, or bf16 where they are signed");
static_assert(!GATED || CAUSAL, "gates say what is forgotten from token to token");
static_assert(!METRIC || OWN_KEYS, "only keys with a form of their own have a metric");
static_assert(!LOGS || (STORAGE == 0 && !SIGNED), "logarithms of denominators are of positive features, in f32");

// The sizes of matrices: tokens of a chunk; head dimension and features, each padded to 16; values
// of a slice. With ready features nothing is D numbers wide, and 16 only keeps the types valid.
constexpr int C = CHUNK, D = READY ? 16 : round_up(DIM, 16), F = round_up(FEATURES, 16), V = SLICE;
constexpr int SPLITS = divide_up(VALUES, V);
// The numbers of a row of outputs; with a logarithm, each row begins at a multiple of 16 bytes.
constexpr int OUT_WIDTH = LOGS ? round_up(VALUES + 1, 4) : VALUES;
// The groups into which the warps of a block are divided, and the warps of each: see `Sums` in
// tile.cuh.
constexpr int ROW_GROUPS = C == 64 ? 2 : 1, TURNS = WARPS / ROW_GROUPS;

// The blocks that a multiprocessor of Hopper runs at once; one computes while another waits. Two
// blocks have room if each thread has at most 128 registers. For gradients that is enough where
// chunks have 64 tokens, which the host chooses for at most 128 features in half types only, and
// slices have at most 64 values.
constexpr int GRADIENTS_AT_ONCE = C == 64 && V <= 64 ? 2 : 1;
// The kernels for outputs and for sums hold fewer matrices. With up to 160 signed features in bf16
// and slices of at most 64 values, two of their blocks fit with shorter chunks too.
constexpr int AT_ONCE = SIGNED && STORAGE == 2 && F <= 160 && V <= 64 ? 2 : GRADIENTS_AT_ONCE;

// Matrices in the registers of a block: features, values, products of pairs of rows, rows of
// queries or keys; and Memory, the sums S, which stay there from chunk to chunk.
typedef Sums<C, F, ROW_GROUPS> Features;
typedef Sums<C, V, ROW_GROUPS> Values;
typedef Sums<C, C, ROW_GROUPS> Pairs;
typedef Sums<C, D, ROW_GROUPS> Inputs;
typedef Sums<F, V, 4> Memory;

// The type of gradients: f32 where the parts of several blocks are still to be added up.
#if defined(PARTIAL) && PARTIAL
typedef float Result;
#else
typedef Stored Result;
#endif

constexpr float LOG2E = 1.4426950408889634f;
// 2^46 is about e^32, the limit of the kernels on the CPU.
constexpr float LIMIT = 46.0f;
// FLOOR stands for minus infinity in running maxima, but is finite: -inf - FLOOR is -inf and not
// NaN.
constexpr float FLOOR = -1e37f;

// KeyForm holds what features of keys have of their own (MAP 3): `tables` sets of numbers, one for
// each key head, or one for all. Kernels over chunks get factors packed by `favor_pack`;
// `favor_step` gets plain matrices, `projection` (FEATURES, DIM) and `metric` (DIM, DIM).
struct KeyForm {
    // b as a factor (D, F) in base 2, and as a factor (F, D) in base e.
    const uint4 *projection, *back;
    // The number that is added to each log-feature, which is the logarithm of its weight, in base
    // e: FEATURES numbers a set.
    const float* weights;
    // P and P^T P as factors (D, D), without a scale; only with METRIC.
    const uint4 *metric, *square;
    long long tables;
};
static_assert(sizeof(KeyForm) == 48 && OFFSET(KeyForm, back) == 8 && OFFSET(KeyForm, weights) == 16 && OFFSET(KeyForm, metric) == 24 &&
                  OFFSET(KeyForm, square) == 32 && OFFSET(KeyForm, tables) == 40,
              "the host has another layout");

// Problem holds the sizes and strides of one call.
struct Problem {
    // Query heads, and how many of them read one key head.
    int heads, group;
    int queries, keys;
    // The tokens of a segment, which need not be a multiple of anything here, and how many segments
    // there are.
    int segment, segments;
    Strides q, k, v;
    // A key k has the offset -|x|^2/2 = -offset_scale |k|^2 in base 2, where x = k DIM^(-1/4).
    float offset_scale;
    // Forget gates of the keys, (B, Hkv, Tk), in base e.
    const float* gates;
    // What features of keys have of their own, with MAP 3 only. The factors `projection` and `back`
    // of queries then have `form.tables` sets of numbers too.
    KeyForm form;
};
static_assert(sizeof(Problem) == 160 && OFFSET(Problem, group) == 4 && OFFSET(Problem, queries) == 8 && OFFSET(Problem, keys) == 12 &&
                  OFFSET(Problem, segment) == 16 && OFFSET(Problem, segments) == 20 && OFFSET(Problem, q) == 24 &&
                  OFFSET(Problem, k) == 48 && OFFSET(Problem, v) == 72 && OFFSET(Problem, offset_scale) == 96 &&
                  OFFSET(Problem, gates) == 104 && OFFSET(Problem, form) == 112,
              "the host has another layout");

// Tensors are the addresses that the gradient kernels take.
struct Tensors {
    // Inputs, and the gradient of outputs (B, H, Tq, OUT_WIDTH).
    const Stored *q, *k, *v, *grad;
    // Which keys are visible, (B, Tk); null if all are.
    const unsigned char* visible;
    // The projection packed as a factor (D, F) in base 2, and as a factor (F, D) for gradients: in
    // base e, or in base 2 with EXACT, see favor_bf16_backward.cu.
    const uint4 *projection, *back;
    // The logarithm in base 2 of each query's denominator, (B, H, Tq), or infinity where it sees no
    // key; with signed features, the logarithm of the denominator's scale alone.
    const float* logs;
    // e, one number a query: read, or written by the gradient of queries for that of keys.
    float* delta;
    // 1/denominator, (B, H, Tq); only with signed features.
    const float* denominators;
    // Records of what lies before each segment (after it where queries build), (segments, B, H',
    // RECORD), with H' the heads of the builder. Where all keys are seen, one record of all,
    // (B, H', RECORD). Null where a causal sequence is one segment.
    float* before;
    // For each key, the gradient of its shift by gates, which is minus the sum of the gates up to
    // its token: the sum of the gradients of its log-features, less the gradient of the logarithm
    // of its token's denominator where there is one; `factor_j` of favor_backward.cu, (SPLITS, B,
    // H, Tk). `favor_gate_gradients` adds them up. Only with gates.
    float* factors;
    // The gradients of log-features, (SPLITS, B, H, T, FEATURES), of which those of the map are
    // made; only with MAP 3, and only if they are asked for.
    float* of_features;
};
static_assert(sizeof(Tensors) == 104 && OFFSET(Tensors, k) == 8 && OFFSET(Tensors, v) == 16 && OFFSET(Tensors, grad) == 24 &&
                  OFFSET(Tensors, visible) == 32 && OFFSET(Tensors, projection) == 40 && OFFSET(Tensors, back) == 48 &&
                  OFFSET(Tensors, logs) == 56 && OFFSET(Tensors, delta) == 64 && OFFSET(Tensors, denominators) == 72 &&
                  OFFSET(Tensors, before) == 80 && OFFSET(Tensors, factors) == 88 &&
                  OFFSET(Tensors, of_features) == 96,
              "the host has another layout");

// A record holds the sums of one head in global memory, all of them f32: the scales c (F), the sums
// of f u over the builder's rows (F), which are called norms, and the sums S of f y (F, SPLITS V).
// The sums of feature r are divided by 2^c[r].
constexpr int RECORD = F * (2 + SPLITS * V);
__device__ inline float* scales_of(float* record) { return record; }
__device__ inline float* norms_of(float* record) { return record + F; }
__device__ inline float* sums_of(float* record, int split) { return record + 2 * F + split * V; }

// Returns the gates of a key head's tokens.
__device__ inline const float* gates_of(const Problem& p, int key_index) {
    return GATED ? p.gates + (long long)key_index * p.keys : nullptr;
}

// Place says which head, slice of the values and segment a block has.
struct Place {
    int head, split, segment, batch, key_head;
    // Counted through the batch.
    int query_index, key_index;

    // `blockIdx.y` counts segments from `first_segment` on.
    __device__ explicit Place(const Problem& p, int first_segment = 0) {
        int index = blockIdx.x / SPLITS;
        split = blockIdx.x % SPLITS;
        segment = first_segment + blockIdx.y;
        batch = index / p.heads;
        head = index % p.heads;
        key_head = head / p.group;
        query_index = index;
        key_index = batch * (p.heads / p.group) + key_head;
    }
};

// ---- Where features come from.

// Linear is the linear map of which features are exponentials.
struct Linear {
    // A factor (D, F), in base 2.
    Packed factor;
    // What is added to the logarithm of each feature, in base e; null where nothing is.
    const float* weights;
};

// Returns which set of numbers a key head has.
__device__ inline long long table_of(const Problem& p, int key_head) {
    return OWN_KEYS && p.form.tables > 1 ? key_head : 0;
}

// The 16-byte pieces of a packed factor (D, F) or (F, D), and of one (D, D), of one set.
constexpr long long PIECES = D / 16 * (F / 16) * 64, SQUARE_PIECES = D / 16 * (D / 16) * 64;

// Returns the linear map of the features of keys (KEYS) or of queries, whose factor is
// `projection`.
template <bool KEYS>
__device__ Linear linear_of(const Problem& p, const Place& place, const uint4* projection) {
    long long table = table_of(p, place.key_head);
    if (OWN_KEYS && KEYS) return {{p.form.projection + table * PIECES, D / 16}, p.form.weights + table * FEATURES};
    return {{projection + table * PIECES, D / 16}, nullptr};
}

// Returns the factor (F, D) that makes gradients of keys (KEYS) or of queries, whose own is `back`.
template <bool KEYS>
__device__ Packed back_of(const Problem& p, const Place& place, const uint4* back) {
    return {(OWN_KEYS && KEYS ? p.form.back : back) + table_of(p, place.key_head) * PIECES, F / 16};
}

// Returns a factor (D, D) of a head: P, or P^T P.
__device__ inline Packed square_of(const Problem& p, const Place& place, const uint4* squares) {
    return {squares + table_of(p, place.key_head) * SQUARE_PIECES, D / 16};
}

// ---- Forget gates.

// Gates holds what is forgotten between the rows of a chunk, as logarithms to base 2; without gates
// it holds nothing.
struct Gates {
#if GATED
    alignas(16) float of_rows[C];
    alignas(16) float of_scales;
    // What is forgotten from the chunk's first row to a row, at most 0. In a chunk that is counted
    // from its last row, as `gather` does: minus what is forgotten from the row to the last.
    __device__ float since(int row) const { return of_rows[row]; }
    __device__ void set_since(int row, float x) { of_rows[row] = x; }
    // What scales have still to forget: the sum of the gates after the token for which they hold,
    // up to the last token taken. `sum_steps` adds the gates up to the row from which the next
    // chunk is counted; `forget`, or `enter` of favor_bf16.cuh, then lowers the scales by it.
    __device__ float pending() const { return of_scales; }
    __device__ void set_pending(float x) { of_scales = x; }
#else
    __device__ float since(int) const { return 0; }
    __device__ void set_since(int, float) {}
    __device__ float pending() const { return 0; }
    __device__ void set_pending(float) {}
#endif
};

// The signs with which `since` enters the logarithms of rows.
constexpr int BUILDS = -1, READS = 1;

// Steps are what one warp holds of the gates of a chunk: what is forgotten from each row to the
// next that a pass takes, some of them in each lane. If TO_LAST, rows are counted from the last.
template <bool TO_LAST>
struct Steps {
    static constexpr int EACH = divide_up(C, 32);
    float x[EACH];
    // From the row before the chunk to its first.
    float first;

    __device__ static int row(int i) {
        int at = EACH * lane() + i;
        return TO_LAST ? C - 1 - at : at;
    }
};

// Loads what is forgotten between the rows of a chunk from the gates of a head's `tokens` tokens. A
// token's gate lies between the token before and itself, in whichever order the rows are.
template <bool TO_LAST>
__device__ Steps<TO_LAST> load_steps(const float* gates, Span span, int tokens) {
    Steps<TO_LAST> steps;
    auto before = [&](int row) {
        long long token = span.token(row) + (span.step < 0);
        return row < span.count && token < tokens ? gates[token] * LOG2E : 0.0f;
    };
    for (int i = 0; i < steps.EACH; i++) {
        int row = steps.row(i);
        steps.x[i] = TO_LAST && row >= 0 ? before(row + 1) : !TO_LAST && row > 0 ? before(row) : 0.0f;
    }
    steps.first = before(0);
    return steps;
}

// Adds up the steps, by one warp; other warps may read the results after a barrier. A row gets the
// sum of the steps between it and the row from which rows are counted. No sum is a difference of
// longer ones, which would lose digits and let a row depend on rows further on.
template <bool TO_LAST>
__device__ void sum_steps(Gates& gates, Steps<TO_LAST> steps) {
    for (int i = 1; i < steps.EACH; i++) steps.x[i] += steps.x[i - 1];
    float sum = steps.x[steps.EACH - 1];
    for (int reach = 1; reach < 32; reach *= 2) {
        float other = from_lane(sum, lane() >= reach ? lane() - reach : lane());
        if (lane() >= reach) sum += other;
    }
    float earlier = from_lane(sum, lane() ? lane() - 1 : 0), all = from_lane(sum, 31);
    for (int i = 0; i < steps.EACH; i++) {
        float x = steps.x[i] + (lane() ? earlier : 0.0f);
        int row = steps.row(i);
        if (row >= 0 && row < C) gates.set_since(row, TO_LAST ? -x : x);
    }
    if (lane() == 0) gates.set_pending(gates.pending() + steps.first + (TO_LAST ? all : 0.0f));
}

// Sets `gates` to what is forgotten between the rows of a chunk: the first warp does so, and other
// warps may read it after a barrier.
template <bool TO_LAST>
__device__ void measure(Gates& gates, const float* of_tokens, Span span, int tokens) {
    if (warp() == 0) sum_steps(gates, load_steps<TO_LAST>(of_tokens, span, tokens));
}

// ---- Rows, and the logarithms of their features.

// Side holds the rows of queries or keys of one chunk.
struct Side {
    // Queries or keys; not used where features come ready.
    alignas(16) Operand x[PARTS][C][D + PAD];
    // Added to the logarithms of a row.
    float offset[C];
};

// Loads rows of queries or keys. `keep(token)` says whether the row counts; the numbers of other
// rows are not looked at.
template <class F_>
__device__ void load_side(Side& side, Rows<const Stored> from, Span span, F_ keep) {
    if (READY) return;
    load_rows<C, D, PARTS>(&side.x[0][0][0], D + PAD, C * (D + PAD), from, span, 0, DIM,
                           [&](int row) { return keep(span.token(row)) ? 1.0f : 0.0f; });
}

// Computes the offsets of loaded keys: -|x|^2/2, or -|Px|^2/2, or the logarithm of the scale that
// comes with a key; and what is forgotten, as of rows that build or read (SIDE). P is `metric`,
// and sums of squares go through `squares`; both are for METRIC only.
template <int SIDE, class F_>
__device__ void set_key_offsets(Side& side, const Gates& gates, Rows<const Stored> from, Span span, float offset_scale, F_ keep,
                                const Packed& metric, float (&squares)[TURNS][C]) {
    constexpr int EACH = THREADS / C;
    int row = threadIdx.x / EACH, part = threadIdx.x % EACH;
    float square = 0;
    if (METRIC) {
        Inputs turned;
        turned.zero();
        turned.add_packed<PARTS>(&side.x[0][0][0], D + PAD, C * (D + PAD), metric, D);
        turned.over_columns(squares, Add(), [](int, int, float x) { return x * x; });
        __syncthreads();
        square = together(squares, row, Add());
    } else if (!READY) {
        for (int d = part; d < D; d += EACH) {
            float x = widen(side.x[0][row][d]);
            if (PARTS == 2) x += widen(side.x[PARTS - 1][row][d]);
            square += x * x;
        }
        for (int mask = 1; mask < EACH; mask *= 2) square += from_lane_xor(square, mask);
    }
    if (part == 0) {
        float offset = -offset_scale * square;
        bool counts = row < span.count && keep(span.token(row));
        if (SIGNED && counts) offset = widen(from.first[span.token(row) * from.stride + FEATURES]) * LOG2E;
        if (GATED) offset += SIDE * gates.since(row);
        side.offset[row] = counts ? offset : -infinity();
    }
}

// Adds what is forgotten to the offsets of queries that build or read (SIDE).
template <int SIDE>
__device__ void forget_rows(Side& side, const Gates& gates) {
    for (int row = threadIdx.x; GATED && row < C; row += THREADS) side.offset[row] += SIDE * gates.since(row);
}

// Computes the logarithms of features, with the rows' `offsets` where asked for; or signed
// features.
__device__ void take_features(Features& to, const Side& side, Rows<const Stored> from, Span span, const Linear& linear, bool offsets) {
    to.zero();
    if (READY) {
        to.each([&](int row, int column, float& x) {
            if (row < span.count && column < FEATURES) {
                x = widen(from.first[span.token(row) * from.stride + column]) * (SIGNED ? 1.0f : LOG2E);
            }
        });
    } else {
        to.add_packed<PARTS>(&side.x[0][0][0], D + PAD, C * (D + PAD), linear.factor, D);
    }
    if (SIGNED) return;
    to.each([&](int row, int column, float& x) {
        if (OWN_KEYS && linear.weights && column < FEATURES) x += linear.weights[column] * LOG2E;
        if (offsets) x += side.offset[row];
        if (F != FEATURES && column >= FEATURES) x = -infinity();
    });
}

// ---- The builder.

// Builder is the shared memory of the builder: a chunk's rows, its features, and the sums before
// it.
struct Builder : Side, Gates {
    // What the features weigh: y, values or gradients of outputs; and u, which stands beside y: 1
    // beside a value, e beside a gradient.
    alignas(16) Operand y[C][V + PAD];
    float unit[C];
    // The features of the chunk, 2^-scale times as large.
    alignas(16) Operand features[C][F + PAD];
    // The sums before the chunk at its scale: S, and the sums of u.
    alignas(16) Operand sums[F][V + PAD];
    float norm[F], scale[F];
    // The running maximum of each logarithm, the logarithms of the chunk's first row, and the
    // factor that brings older sums to the chunk's scale.
    float running[F], first[F], factor[F];
    // A number from each group of rows: the largest logarithms of the chunk, and what the chunk
    // adds to `norm`.
    float largest[ROW_GROUPS][F], added[ROW_GROUPS][F];
    // The most by which a logarithm of each row exceeds its scale, a part from each warp of a
    // group; before that, sums of squares of keys.
    float excess[TURNS][C];
};

// Begins with the sums of `record`, or with sums over nothing.
__device__ inline void begin(Builder& b, Memory& memory, float* record, int split) {
    for (int r = threadIdx.x; r < F; r += THREADS) {
        b.scale[r] = b.running[r] = record ? scales_of(record)[r] : FLOOR;
        b.norm[r] = record ? norms_of(record)[r] : 0.0f;
        for (int g = 0; g < ROW_GROUPS; g++) b.added[g][r] = 0;
    }
    if (threadIdx.x == 0) b.set_pending(0);
    memory.zero();
    if (record) memory.each([&](int row, int column, float& x) { x = sums_of(record, split)[row * SPLITS * V + column]; });
}

// Makes sums forget, by their scales alone.
__device__ inline void forget(Builder& b, int r) {
    if (!GATED) return;
    b.scale[r] += b.pending();
    b.running[r] += b.pending();
}

// Brings `norm` to another scale, with what the last chunk added.
__device__ inline void set_scale(Builder& b, int r, float scale) {
    b.factor[r] = power_of_two(b.scale[r] - scale);
    b.norm[r] = (b.norm[r] + together(b.added, r, Add())) * b.factor[r];
    b.scale[r] = scale;
}

// Writes the sums to `record`, at the scale of the running maximum.
__device__ inline void leave(Builder& b, Memory& memory, float* record, int split) {
    __syncthreads();
    for (int r = threadIdx.x; r < F; r += THREADS) {
        forget(b, r);
        set_scale(b, r, b.running[r]);
        if (split == 0) {
            scales_of(record)[r] = b.scale[r];
            norms_of(record)[r] = b.norm[r];
        }
    }
    __syncthreads();
    memory.each([&](int row, int column, float& x) { sums_of(record, split)[row * SPLITS * V + column] = x * b.factor[row]; });
}

// Turns logarithms into features and stores them in shared memory; those of rows from the n-th on
// are zero. `added` gets their products with u, which `set_scale` brings into `norm`.
__device__ inline void weigh(Builder& b, Features& f, int n) {
    f.each([&](int row, int column, float& x) {
        float weight = SIGNED ? x * power_of_two(b.offset[row] - b.scale[column]) : power_of_two(x - b.scale[column]);
        x = row < n ? rounded(weight) : 0.0f;
    });
    f.store(&b.features[0][0], F + PAD);
    f.over_rows(b.added, Add(), [&](int row, int, float x) { return x * b.unit[row]; });
}

// Takes a causal chunk whose rows are loaded, and returns how many of them the chunk has.
// Afterwards `features`, `memory`, its copy `sums` and `norm` are at the chunk's scale and a reader
// may begin at once; the chunk itself is not in the sums before `absorb`.
__device__ inline int enter(Builder& b, Memory& memory, Rows<const Stored> from, Span span, const Linear& linear) {
    Features f;
    take_features(f, b, from, span, linear, true);
    f.each([&](int row, int column, float& x) {
        if (row == 0) b.first[column] = SIGNED ? b.offset[0] : x;
    });
    __syncthreads();
    for (int r = threadIdx.x; r < F; r += THREADS) {
        forget(b, r);
        set_scale(b, r, fmaxf(b.running[r], b.first[r]));
    }
    __syncthreads();
    f.over_columns(b.excess, Largest(), [&](int row, int column, float x) { return (SIGNED ? b.offset[row] : x) - b.scale[column]; });
    __syncthreads();
    int n = span.count;
    for (int start = 32 * (divide_up(C, 32) - 1); start >= 0; start -= 32) {
        int row = start + lane();
        unsigned over = lanes_where(row > 0 && row < C && together(b.excess, row < C ? row : 0, Largest()) > LIMIT);
        if (over) n = min(n, start + __ffs(over) - 1);
    }
    f.over_rows(b.largest, Largest(), [&](int row, int, float x) { return row < n ? (SIGNED ? b.offset[row] : x) : -infinity(); });
    weigh(b, f, n);
    memory.each([&](int row, int, float& x) { x *= b.factor[row]; });
    memory.store(&b.sums[0][0], V + PAD);
    __syncthreads();
    for (int r = threadIdx.x; r < F; r += THREADS) b.running[r] = fmaxf(b.scale[r], together(b.largest, r, Largest()));
    if (GATED && threadIdx.x == 0) b.set_pending(b.since(n - 1));
    return n;
}

// Adds the chunk that has entered to the sums: by additions in f32, since a sequence is long.
__device__ inline void absorb(Builder& b, Memory& memory) {
    memory.add_apart<true, false>(&b.features[0][0], F + PAD, &b.y[0][0], V + PAD, C);
}

// Takes a chunk of which all rows are seen at once: its scale is the running maximum with the
// chunk. With gates, logarithms are counted from the chunk's last row, where those that count most
// lose no digits.
__device__ inline void gather(Builder& b, Memory& memory, Rows<const Stored> from, Span span, const Linear& linear) {
    Features f;
    take_features(f, b, from, span, linear, true);
    f.over_rows(b.largest, Largest(), [&](int row, int, float x) { return SIGNED ? b.offset[row] : x; });
    __syncthreads();
    for (int r = threadIdx.x; r < F; r += THREADS) {
        forget(b, r);
        b.running[r] = fmaxf(b.running[r], together(b.largest, r, Largest()));
        set_scale(b, r, b.running[r]);
    }
    __syncthreads();
    weigh(b, f, span.count);
    memory.each([&](int row, int, float& x) { x *= b.factor[row]; });
    if (GATED && threadIdx.x == 0) b.set_pending(0);
    __syncthreads();
    absorb(b, memory);
}

// Reads the sums of all chunks, for a reader that sees all of them.
__device__ inline void recall(Builder& b, float* record, int split) {
    for (int r = threadIdx.x; r < F; r += THREADS) {
        b.scale[r] = scales_of(record)[r];
        b.norm[r] = norms_of(record)[r];
    }
    for (int i = threadIdx.x; i < F * V; i += THREADS) {
        narrow(sums_of(record, split)[i / V * SPLITS * V + i % V], b.sums[i / V][i % V]);
    }
}

#endif
