// Causal FAVOR, forward, with positive features:
// `out_i = sum_j f(q_i).f(k_j) v_j / sum_j f(q_i).f(k_j)` over j <= i, where feature r is
// exp(w_r.x - |x|^2/2) and x is DIM^(-1/4) times a query or key. For queries exp(-|x|^2/2) is left
// out, and for both the factor FEATURES^(-1/2), since they cancel in the quotient. Features never
// leave the threadgroup.
//
// A threadgroup has a query head and a slice of its values, and takes one chunk of tokens after the
// other. A simdgroup has eight of the values, with the sums `S = sum_j f(k_j) v_j` over all
// features in matrices of 8x8. How such a matrix lies in the lanes is not specified: single numbers
// are treated in threadgroup memory.
//
// Shapes of one chunk (C tokens, D head dimension, F features, V values of the slice):
//
//   k (C, D)                -> logarithms of keys' features (C, F), offsets (C)
//   logarithms, scale (F)   -> features of keys f (C, F)
//   q (C, D), scale         -> weights of queries w (C, F)
//   w, f                    -> pairs tril(w f^T) (C, C)
//   numerator = w S + pairs v (C, V), denominator = w norm + pairs 1 (C) -> out (C, V)
//   f, v (C, V)             -> S (F, V) += f^T v, norm (F) += f^T 1
//
// Scale. Logarithms are to base 2; the factor log2(e) is in the projection. In a chunk, feature r
// of keys is divided by 2^scale[r], the largest logarithm before the chunk and of its first row,
// which every row of the chunk may see. The logarithms of a later row may exceed scale[r] by up to
// LIMIT; the first row that exceeds it by more begins a chunk of its own. So where a chunk ends
// depends on its past alone, and no row's numbers depend on what comes after it. A row of queries
// is divided by 2^(its largest logarithm, of query and scale together), which cancels in the
// quotient.
//
// No infinity and no NaN stands for anything, since a compiler in fast mode may assume that there
// is none: FLOOR stands for what does not exist.
//
// Macros: STORAGE 0 f32, 1 f16, 2 bf16. DIM, FEATURES, VALUES: the sizes of a query, of its
// features, of a value. SLICE: the values that one threadgroup takes, a multiple of 8.

#ifdef __METAL_VERSION__
#include <metal_stdlib>
using namespace metal;
#define THREADGROUP_MEMORY(type, name) threadgroup type name
#endif

#define UNROLL _Pragma("clang loop unroll(full)")

#if STORAGE == 0
typedef float Stored;
inline float widened(float x) { return x; }
inline float narrowed(float x) { return x; }
#elif STORAGE == 1
typedef half Stored;
inline float widened(half x) { return float(x); }
inline half narrowed(float x) { return half(x); }
#else
// bf16 is handled by its bits, for devices without the type.
typedef ushort Stored;
inline float widened(ushort x) { return as_type<float>(uint(x) << 16); }
inline ushort narrowed(float x) {
    uint bits = as_type<uint>(x);
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return ushort(is_nan ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
#endif

constant constexpr int D = (DIM + 7) / 8 * 8, F = (FEATURES + 7) / 8 * 8, V = SLICE;
constant constexpr int SPLITS = (VALUES + V - 1) / V;
constant constexpr int SIMDGROUPS = V / 8, THREADS = 32 * SIMDGROUPS;
// The padding of rows in threadgroup memory, so that they begin in different banks.
constant constexpr int PAD = 4;

constant constexpr float LOG2E = 1.4426950408889634f;
// 2^46 is about e^32, the limit of the kernels on the CPU.
constant constexpr float LIMIT = 46.0f;
// FLOOR stands for minus infinity.
constant constexpr float FLOOR = -1e37f;

// Shared is the memory of a threadgroup, with chunks of `ROWS` tokens.
template <int ROWS>
struct Shared {
    static constant constexpr int TILES = (ROWS / 8) * (ROWS / 8);
    // Simdgroups divide the products of queries and keys among them: first by 8x8 tiles, then by
    // features.
    static constant constexpr int PARTS = SIMDGROUPS > TILES ? SIMDGROUPS / TILES : 1;

    // The rows x hold keys, then queries; y holds values, then outputs.
    float x[ROWS][D + PAD], y[ROWS][V + PAD];
    // Logarithms of keys' features, then features divided by 2^scale; logarithms of queries'
    // features, then weights.
    float keys[ROWS][F + PAD], queries[ROWS][F + PAD];
    // Products of weights and features.
    float pairs[ROWS][ROWS + PAD];
    // The parts of `pairs`, or one tile for each simdgroup.
    float tiles[SIMDGROUPS > TILES * PARTS ? SIMDGROUPS : TILES * PARTS][64];
    // For each feature: the scale of the sums, its running maximum, the sum of features, and the
    // factor that brings sums to the chunk's scale.
    float scale[F], running[F], norm[F], factor[F];
    // For each row: -|k|^2/2, or FLOOR for a key that does not count; the denominator's part from
    // earlier chunks; one divided by the denominator.
    float offset[ROWS], past[ROWS], inverse[ROWS];
    int ends[SIMDGROUPS];
};

// The most memory that a threadgroup may have.
constant constexpr int MOST_MEMORY = 32 << 10;
constant constexpr int C = sizeof(Shared<16>) <= MOST_MEMORY ? 16 : 8;
typedef Shared<C> Memory;
static_assert(sizeof(Memory) <= MOST_MEMORY, "a threadgroup has less memory");
constant constexpr int TILES = Memory::TILES, PARTS = Memory::PARTS;

typedef simdgroup_float8x8 Matrix;

inline Matrix zero() { return make_filled_simdgroup_matrix<float, 8, 8>(0.0f); }
inline void load(thread Matrix& to, threadgroup const float* from, int stride) { simdgroup_load(to, from, stride); }
inline void load_transposed(thread Matrix& to, threadgroup const float* from, int stride) {
    simdgroup_load(to, from, stride, ulong2(0, 0), true);
}
inline void add_product(thread Matrix& sum, thread Matrix& left, thread Matrix& right) {
    simdgroup_multiply_accumulate(sum, left, right, sum);
}

// Strides are the distances between batch entries, heads and tokens of a tensor.
struct Strides { long batch, head, token; };

// Problem holds the sizes and strides of one call.
struct Problem {
    Strides q, k, v;
    // Query heads, and how many of them read one key head; tokens.
    int heads, group, tokens;
    // Whether there is a mask; whether there are sums of earlier tokens; and whether sums are to be
    // left for later tokens.
    int masked, resumes, leaves;
    // `offset_scale` times |k|^2 is |x|^2/2 in base 2. The sums before and after are of features
    // divided by sqrt(F); `shift` is log2 of that, by which the logarithms here exceed theirs.
    float offset_scale, shift;
};
static_assert(sizeof(Strides) == 24 && __builtin_offsetof(Strides, head) == 8 && __builtin_offsetof(Strides, token) == 16, "the host has another layout");
static_assert(sizeof(Problem) == 104 && __builtin_offsetof(Problem, k) == 24 && __builtin_offsetof(Problem, v) == 48 && __builtin_offsetof(Problem, heads) == 72 &&
                  __builtin_offsetof(Problem, group) == 76 && __builtin_offsetof(Problem, tokens) == 80 && __builtin_offsetof(Problem, masked) == 84 &&
                  __builtin_offsetof(Problem, resumes) == 88 && __builtin_offsetof(Problem, leaves) == 92 && __builtin_offsetof(Problem, offset_scale) == 96 && __builtin_offsetof(Problem, shift) == 100,
              "the host has another layout");

// Loads rows of `width` numbers as a tile of C by `columns`, with zeros around them. The numbers of
// hidden rows are not looked at.
inline void load_rows(threadgroup float* to, int columns, device const Stored* from, long stride, int count, int width,
                      device const uchar* visible, int thread_index) {
    for (int i = thread_index; i < C * columns; i += THREADS) {
        int row = i / columns, column = i % columns;
        bool counts = row < count && column < width && (!visible || visible[row]);
        to[row * (columns + PAD) + column] = counts ? widened(from[row * stride + column]) : 0.0f;
    }
}

// Computes the logarithms of the features of the rows in `x`, without their offsets: x (C, D) times
// the projection (D, F).
inline void project(threadgroup const Memory& s, threadgroup float* to, device const float* projection, int simd_index) {
    for (int column = 8 * simd_index; column < F; column += 8 * SIMDGROUPS) {
        Matrix sums[C / 8], left, right;
        UNROLL for (int m = 0; m < C / 8; m++) sums[m] = zero();
        for (int d = 0; d < D; d += 8) {
            simdgroup_load(right, projection + d * F + column, F);
            UNROLL for (int m = 0; m < C / 8; m++) {
                load(left, &s.x[8 * m][d], D + PAD);
                add_product(sums[m], left, right);
            }
        }
        UNROLL for (int m = 0; m < C / 8; m++) simdgroup_store(sums[m], to + 8 * m * (F + PAD) + column, F + PAD);
    }
}

// Computes the offsets of keys; a simdgroup takes one row after the other.
inline void set_offsets(threadgroup Memory& s, float offset_scale, int count, device const uchar* visible, int simd_index, int lane) {
    for (int row = simd_index; row < C; row += SIMDGROUPS) {
        float square = 0;
        for (int d = lane; d < D; d += 32) square += s.x[row][d] * s.x[row][d];
        square = simd_sum(square);
        if (lane == 0) s.offset[row] = row < count && (!visible || visible[row]) ? -offset_scale * square : FLOOR;
    }
}

// Brings the scales to the chunk, and returns where the chunk ends as far as this thread's features
// show.
inline int begin_chunk(threadgroup Memory& s, int count, int thread_index) {
    int end = count;
    for (int r = thread_index; r < FEATURES; r += THREADS) {
        float scale = max(s.running[r], s.keys[0][r] + s.offset[0]);
        s.factor[r] = precise::exp2(s.scale[r] - scale);
        s.norm[r] *= s.factor[r];
        s.scale[r] = scale;
        for (int row = 1; row < end; row++) {
            if (s.keys[row][r] + s.offset[row] - scale > LIMIT) end = row;
        }
    }
    return end;
}

// Turns logarithms into the features of the keys of a chunk of `n` rows; others become zero.
inline void weigh_keys(threadgroup Memory& s, int n, int thread_index) {
    for (int r = thread_index; r < FEATURES; r += THREADS) {
        float scale = s.scale[r], largest = scale;
        for (int row = 0; row < C; row++) {
            float logarithm = s.keys[row][r] + s.offset[row];
            bool counts = row < n && s.offset[row] > FLOOR;
            s.keys[row][r] = counts ? precise::exp2(logarithm - scale) : 0.0f;
            if (counts) largest = max(largest, logarithm);
        }
        s.running[r] = largest;
    }
}

// Turns logarithms into the weights of queries, and computes the part of denominators that comes
// from the sums before the chunk; a simdgroup takes one row after the other.
inline void weigh_queries(threadgroup Memory& s, int simd_index, int lane) {
    for (int row = simd_index; row < C; row += SIMDGROUPS) {
        float largest = 2 * FLOOR, past = 0;
        for (int r = lane; r < FEATURES; r += 32) largest = max(largest, s.queries[row][r] + s.scale[r]);
        largest = simd_max(largest);
        for (int r = lane; r < FEATURES; r += 32) {
            float weight = precise::exp2(s.queries[row][r] + s.scale[r] - largest);
            s.queries[row][r] = weight;
            past += weight * s.norm[r];
        }
        past = simd_sum(past);
        if (lane == 0) s.past[row] = past;
    }
}

// Brings the sums of eight features to the scale of the chunk, to which `factor` leads: a product
// with a diagonal matrix, which most chunks need for few features.
inline void rescale(thread Matrix& sums, threadgroup const float* factor, threadgroup float* tile, int lane) {
    if (simd_all(factor[lane % 8] == 1.0f)) return;
    for (int i = lane; i < 64; i += 32) tile[i] = i / 8 == i % 8 ? factor[i / 8] : 0.0f;
    simdgroup_barrier(mem_flags::mem_threadgroup);
    Matrix diagonal, old = sums;
    load(diagonal, tile, 8);
    simdgroup_multiply(sums, diagonal, old);
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Computes the simdgroup's parts of the products of weights and features: 8x8 tiles, each over some
// of the features.
inline void multiply_pairs(threadgroup Memory& s, int simd_index) {
    for (int job = simd_index; job < TILES * PARTS; job += SIMDGROUPS) {
        int row = job % TILES / (C / 8) * 8, key = job % TILES % (C / 8) * 8;
        Matrix sum = zero(), left, right;
        for (int r = job / TILES * 8; r < F; r += 8 * PARTS) {
            load(left, &s.queries[row][r], F + PAD);
            load_transposed(right, &s.keys[key][r], F + PAD);
            add_product(sum, left, right);
        }
        simdgroup_store(sum, s.tiles[job], 8);
    }
}

// Adds up the parts; a row sees the keys up to its own.
inline void set_pairs(threadgroup Memory& s, int thread_index) {
    for (int i = thread_index; i < C * C; i += THREADS) {
        int row = i / C, key = i % C, tile = row / 8 * (C / 8) + key / 8;
        float sum = 0;
        for (int part = 0; part < PARTS; part++) sum += s.tiles[part * TILES + tile][row % 8 * 8 + key % 8];
        s.pairs[row][key] = key <= row ? sum : 0.0f;
    }
}

// Reads the sums of eight features and the simdgroup's values from memory, where a feature has a
// row of all VALUES and one number more.
inline void resume(thread Matrix& sums, device const float* from, int features, int values, threadgroup float* tile, int lane) {
    for (int i = lane; i < 64; i += 32) {
        int row = i / 8, column = i % 8;
        tile[i] = row < features && column < values ? from[row * (VALUES + 1) + column] : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    load(sums, tile, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Writes those sums to memory, at the scale of the running maxima.
inline void leave(thread Matrix& sums, device float* to, int features, int values, threadgroup const float* scale,
                  threadgroup const float* running, threadgroup float* tile, int lane) {
    simdgroup_store(sums, tile, 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = lane; i < 64; i += 32) {
        int row = i / 8, column = i % 8;
        if (row < features && column < values) to[row * (VALUES + 1) + column] = tile[i] * precise::exp2(scale[row] - running[row]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
}

// The kernel; see the head of this file. For key heads one after the other, `scales` are the
// logarithms to base e of what sums are divided by, (FEATURES), and `sums` are those of features
// times values, and of features, (FEATURES, VALUES + 1). Tensors that `p` declares missing are not
// touched.
[[max_total_threads_per_threadgroup(THREADS)]]
kernel void favor_forward(constant Problem& p [[buffer(0)]], device const Stored* q [[buffer(1)]], device const Stored* k [[buffer(2)]],
                          device const Stored* v [[buffer(3)]], device const uchar* visible [[buffer(4)]],
                          device const float* projection [[buffer(5)]], device Stored* out [[buffer(6)]],
                          device const float* scales_before [[buffer(7)]], device const float* sums_before [[buffer(8)]],
                          device float* scales_after [[buffer(9)]], device float* sums_after [[buffer(10)]],
                          uint group_index [[threadgroup_position_in_grid]], uint index_of_thread [[thread_index_in_threadgroup]],
                          uint index_of_simdgroup [[simdgroup_index_in_threadgroup]],
                          uint index_in_simdgroup [[thread_index_in_simdgroup]]) {
    THREADGROUP_MEMORY(Memory, s);
    const int thread_index = index_of_thread, simd_index = index_of_simdgroup, lane = index_in_simdgroup;
    const int index = group_index / SPLITS, column = group_index % SPLITS * V;
    const int batch = index / p.heads, head = index % p.heads, key_head = head / p.group;
    q += batch * p.q.batch + head * p.q.head;
    k += batch * p.k.batch + key_head * p.k.head;
    v += batch * p.v.batch + key_head * p.v.head + column;
    out += (long)index * p.tokens * VALUES + column;
    const int width = min(V, VALUES - column);
    const long key_index = batch * (p.heads / p.group) + key_head, row_of_sums = VALUES + 1;
    scales_before += key_index * FEATURES;
    scales_after += key_index * FEATURES;
    sums_before += key_index * FEATURES * row_of_sums;
    sums_after += key_index * FEATURES * row_of_sums;

    Matrix sums[F / 8];
    UNROLL for (int f = 0; f < F / 8; f++) {
        sums[f] = zero();
        if (p.resumes) {
            resume(sums[f], sums_before + 8 * f * row_of_sums + column + 8 * simd_index, FEATURES - 8 * f, width - 8 * simd_index,
                   s.tiles[simd_index], lane);
        }
    }
    for (int r = thread_index; r < F; r += THREADS) {
        bool known = p.resumes && r < FEATURES;
        s.scale[r] = s.running[r] = known ? max(FLOOR, scales_before[r] * LOG2E + p.shift) : FLOOR;
        s.norm[r] = known ? sums_before[r * row_of_sums + VALUES] : 0.0f;
        s.factor[r] = 1;
    }

    for (int start = 0, n; start < p.tokens; start += n) {
        const int count = min(C, p.tokens - start);
        device const uchar* key_mask = p.masked ? visible + (long)batch * p.tokens + start : nullptr;
        load_rows(&s.x[0][0], D, k + start * p.k.token, p.k.token, count, DIM, key_mask, thread_index);
        load_rows(&s.y[0][0], V, v + start * p.v.token, p.v.token, count, width, key_mask, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        project(s, &s.keys[0][0], projection, simd_index);
        set_offsets(s, p.offset_scale, count, key_mask, simd_index, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        const int end = simd_min(begin_chunk(s, count, thread_index));
        if (lane == 0) s.ends[simd_index] = end;
        load_rows(&s.x[0][0], D, q + start * p.q.token, p.q.token, count, DIM, nullptr, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        n = count;
        for (int i = 0; i < SIMDGROUPS; i++) n = min(n, s.ends[i]);
        weigh_keys(s, n, thread_index);
        project(s, &s.queries[0][0], projection, simd_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        weigh_queries(s, simd_index, lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // Numerators from the sums before the chunk, then from the chunk itself, which is added to
        // the sums.
        Matrix rows[C / 8], left, right;
        UNROLL for (int m = 0; m < C / 8; m++) rows[m] = zero();
        UNROLL for (int f = 0; f < F / 8; f++) {
            rescale(sums[f], &s.factor[8 * f], s.tiles[simd_index], lane);
            UNROLL for (int m = 0; m < C / 8; m++) {
                load(left, &s.queries[8 * m][8 * f], F + PAD);
                add_product(rows[m], left, sums[f]);
            }
        }
        multiply_pairs(s, simd_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        set_pairs(s, thread_index);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int t = 0; t < C; t += 8) {
            load(right, &s.y[t][8 * simd_index], V + PAD);
            UNROLL for (int m = 0; m < C / 8; m++) {
                load(left, &s.pairs[8 * m][t], C + PAD);
                add_product(rows[m], left, right);
            }
            UNROLL for (int f = 0; f < F / 8; f++) {
                load_transposed(left, &s.keys[t][8 * f], F + PAD);
                add_product(sums[f], left, right);
            }
        }
        // No other simdgroup uses these columns of y, so a barrier of the simdgroup is enough.
        simdgroup_barrier(mem_flags::mem_threadgroup);
        UNROLL for (int m = 0; m < C / 8; m++) simdgroup_store(rows[m], &s.y[8 * m][8 * simd_index], V + PAD);

        for (int row = thread_index; row < C; row += THREADS) {
            float sum = s.past[row];
            for (int key = 0; key < C; key++) sum += s.pairs[row][key];
            s.inverse[row] = sum > 0 ? 1 / sum : 0.0f;
        }
        for (int r = thread_index; r < FEATURES; r += THREADS) {
            for (int row = 0; row < C; row++) s.norm[r] += s.keys[row][r];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int i = thread_index; i < n * V; i += THREADS) {
            int row = i / V, c = i % V;
            // A sum of underflown terms may be -0, which must not reveal how many terms it had.
            if (c < width) out[(long)(start + row) * VALUES + c] = narrowed(s.y[row][c] * s.inverse[row] + 0.0f);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (!p.leaves || head % p.group != 0) return;
    if (column == 0) {
        for (int r = thread_index; r < FEATURES; r += THREADS) {
            scales_after[r] = (s.running[r] - p.shift) / LOG2E;
            sums_after[r * row_of_sums + VALUES] = s.norm[r] * precise::exp2(s.scale[r] - s.running[r]);
        }
    }
    UNROLL for (int f = 0; f < F / 8; f++) {
        leave(sums[f], sums_after + 8 * f * row_of_sums + column + 8 * simd_index, FEATURES - 8 * f, width - 8 * simd_index,
              &s.scale[8 * f], &s.running[8 * f], s.tiles[simd_index], lane);
    }
}
