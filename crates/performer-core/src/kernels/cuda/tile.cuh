// Tiles: how the attention kernels load, multiply and store matrices on tensor cores, 16 by 16
// numbers a step.
//
// STORAGE says what tensors hold: 0 f32, 1 f16, 2 bf16. Operands of products are f32 for f32 (each
// product is three of TF32, which brings back f32's precision) and bf16 for both half types, since
// f16 has no room for weights up to e^32; where weights are at most 1, they are f16 for f16
// (HALF_OPERANDS). Sums are always f32. All operands lie in shared memory, except constant ones,
// which come from global memory as the lanes need them (`Packed`).
//
// A matrix goes through a block like this:
//
//   rows of a tensor (ROWS, WIDTH), Stored   -> load_rows -> tile of Operands in shared memory
//   tiles (ROWS, depth) and (depth, COLUMNS) -> load      -> fragments Left, Right in the lanes
//   fragments                                -> multiply  -> `Sums` (ROWS, COLUMNS), in registers
//   `Sums`                                   -> store     -> tile of Operands, or a tensor

#ifndef PERFORMER_TILE
#define PERFORMER_TILE

#include "warp.cuh"

#if STORAGE == 0
typedef float Stored;
typedef float Operand;
#elif STORAGE == 1
typedef Half Stored;
#ifdef HALF_OPERANDS
typedef Half Operand;
#else
typedef Bfloat Operand;
#endif
#else
typedef Bfloat Stored;
typedef Bfloat Operand;
#endif

// The number of operands that hold one number of a tensor exactly.
#ifdef HALF_OPERANDS
constexpr int PARTS = 1;
#else
constexpr int PARTS = STORAGE == 1 ? 2 : 1;
#endif
// Rows in shared memory are this many operands longer, so that a column's numbers lie in different
// banks.
constexpr int PAD = sizeof(Operand) == 2 ? 8 : 4;

#ifndef BLOCK_WARPS
#define BLOCK_WARPS 8
#endif
constexpr int WARPS = BLOCK_WARPS;
constexpr int THREADS = 32 * WARPS;

__device__ constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
__device__ constexpr int divide_up(int n, int by) { return (n + by - 1) / by; }

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

// Rounds a number as an operand does: what is added up beside a product must be what the product
// adds up.
__device__ inline float rounded(float x) {
    Operand y;
    narrow(x, y);
    return widen(y);
}

// ---- Fragments: 16x16 of the left, the right factor, and of the sum.

#if STORAGE == 0

// Each number is held as the nearest TF32, and the TF32 nearest to the rest.
struct Left {
    unsigned high[2][4], low[2][4];
    __device__ void set(int step, int i, float x) {
        high[step][i] = tf32(x);
        low[step][i] = tf32(x - __uint_as_float(high[step][i]));
    }
};
struct Right {
    unsigned high[2][2][2], low[2][2][2];
    __device__ void set(int half, int step, int i, float x) {
        high[half][step][i] = tf32(x);
        low[half][step][i] = tf32(x - __uint_as_float(high[half][step][i]));
    }
};

// Loads the 16x16 fragment at (row, column) of a factor, which is stored by columns where
// `transposed`.
template <bool transposed>
__device__ void load(Left& to, const float* from, int stride, int row, int column) {
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 4; i++) {
            int r = row + lane() / 4 + 8 * (i % 2), c = column + 8 * step + lane() % 4 + 4 * (i / 2);
            to.set(step, i, transposed ? from[c * stride + r] : from[r * stride + c]);
        }
    }
}
template <bool transposed>
__device__ void load(Right& to, const float* from, int stride, int row, int column) {
    for (int half = 0; half < 2; half++) {
        for (int step = 0; step < 2; step++) {
            for (int i = 0; i < 2; i++) {
                int r = row + 8 * step + lane() % 4 + 4 * i, c = column + 8 * half + lane() / 4;
                to.set(half, step, i, transposed ? from[c * stride + r] : from[r * stride + c]);
            }
        }
    }
}

__device__ inline void multiply(float (&sum)[2][4], const Left& a, const Right& b) {
    for (int half = 0; half < 2; half++) {
        for (int step = 0; step < 2; step++) {
            multiply_tf32(sum[half], a.low[step], b.high[half][step]);
            multiply_tf32(sum[half], a.high[step], b.low[half][step]);
            multiply_tf32(sum[half], a.high[step], b.high[half][step]);
        }
    }
}

#else

// Fragments of half types: pairs of numbers, as `load_matrices` gives them.
struct Left { unsigned x[4]; };
struct Right { unsigned x[2][2]; };

template <bool transposed>
__device__ void load(Left& to, const Operand* from, int stride, int row, int column) {
    int i = lane() / 8, r = lane() % 8;
    const Operand* at = transposed ? from + (column + i / 2 * 8 + r) * stride + row + i % 2 * 8
                                  : from + (row + i % 2 * 8 + r) * stride + column + i / 2 * 8;
    load_matrices(to.x, at, transposed);
}
template <bool transposed>
__device__ void load(Right& to, const Operand* from, int stride, int row, int column) {
    int i = lane() / 8, r = lane() % 8;
    const Operand* at = transposed ? from + (column + i / 2 * 8 + r) * stride + row + i % 2 * 8
                                  : from + (row + i % 2 * 8 + r) * stride + column + i / 2 * 8;
    unsigned x[4];
    load_matrices(x, at, !transposed);
    to.x[0][0] = x[0], to.x[0][1] = x[1], to.x[1][0] = x[2], to.x[1][1] = x[3];
}

// Multiplies by the eight columns of one half of `b`.
__device__ inline void multiply_half(float (&sum)[4], const Left& a, const Right& b, int half = 0) {
#if STORAGE == 1 && defined(HALF_OPERANDS)
    multiply_f16(sum, a.x, b.x[half]);
#else
    multiply_bf16(sum, a.x, b.x[half]);
#endif
}
__device__ inline void multiply(float (&sum)[2][4], const Left& a, const Right& b) {
    multiply_half(sum[0], a, b, 0);
    multiply_half(sum[1], a, b, 1);
}

#endif

// Makes the fragment at (row, column) of the matrix that has ones up to the diagonal and zeros
// above it.
__device__ inline void lower_ones(Left& to, int row, int column) {
#if STORAGE == 0
    for (int step = 0; step < 2; step++) {
        for (int i = 0; i < 4; i++) {
            to.set(step, i, column + 8 * step + lane() % 4 + 4 * (i / 2) <= row + lane() / 4 + 8 * (i % 2) ? 1.0f : 0.0f);
        }
    }
#else
    for (int i = 0; i < 4; i++) {
        int r = row + lane() / 4 + 8 * (i % 2), c = column + 2 * (lane() % 4) + 8 * (i / 2);
        Operand one;
        narrow(1.0f, one);
        to.x[i] = (c <= r ? (unsigned)one.bits : 0u) | (c < r ? (unsigned)one.bits << 16 : 0u);
    }
#endif
}

// `Packed` is a constant right factor (R, C) in global memory, as `favor_pack` writes it: 16x16
// tiles, one column of tiles after the other. A tile is 64 pieces of 16 bytes: first one for each
// of the 32 lanes, then a second one for each. For f32, a lane's first piece holds its numbers of
// the tile's columns 0 to 7, and its second those of columns 8 to 15, as in `Right`. For half types
// both pieces are bf16: the first holds the lane's numbers rounded, and the second what rounding
// left over.
struct Packed {
    const uint4* tiles;
    // The tiles in a column of tiles, R/16.
    int depth;

    // Loads the tile at (row, column): for half types the rounded numbers, then the rest.
    __device__ void load(Right (&to)[STORAGE == 0 ? 1 : 2], int row, int column) const {
        const uint4* at = tiles + ((column / 16 * depth + row / 16) * 2) * 32 + lane();
        uint4 x = load_constant(at), y = load_constant(at + 32);
#if STORAGE == 0
        const float first[4] = {__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w)};
        const float second[4] = {__uint_as_float(y.x), __uint_as_float(y.y), __uint_as_float(y.z), __uint_as_float(y.w)};
        for (int i = 0; i < 4; i++) {
            to[0].set(0, i / 2, i % 2, first[i]);
            to[0].set(1, i / 2, i % 2, second[i]);
        }
#else
        to[0].x[0][0] = x.x, to[0].x[0][1] = x.y, to[0].x[1][0] = x.z, to[0].x[1][1] = x.w;
        to[1].x[0][0] = y.x, to[1].x[0][1] = y.y, to[1].x[1][0] = y.z, to[1].x[1][1] = y.w;
#endif
    }

#if STORAGE != 0
    // Loads the rounded numbers of the tile at (row, column) alone.
    __device__ void load_rounded(Right& to, int row, int column) const {
        uint4 x = load_constant(tiles + ((column / 16 * depth + row / 16) * 2) * 32 + lane());
        to.x[0][0] = x.x, to.x[0][1] = x.y, to.x[1][0] = x.z, to.x[1][1] = x.w;
    }

    // Loads the rest of the tile at (row, column) alone.
    __device__ void load_rest(Right& to, int row, int column) const {
        uint4 x = load_constant(tiles + ((column / 16 * depth + row / 16) * 2 + 1) * 32 + lane());
        to.x[0][0] = x.x, to.x[0][1] = x.y, to.x[1][0] = x.z, to.x[1][1] = x.w;
    }

    // Loads from the transposed factor (C, R), which follows the first in memory: its rows from
    // `column` on and columns from `row` on, as left factors; the rounded numbers alone, or
    // (`rest`) what rounding left over.
    __device__ void load_transposed(Left& to, bool rest, int row, int column, int columns) const {
        uint4 x = load_constant(tiles + ((columns / 16 + column / 16) * depth + row / 16) * 64 + 32 * rest + lane());
        to = {{x.x, x.y, x.z, x.w}};
    }

#endif
};

// ---- `Sums` is a matrix of sums (ROWS, COLUMNS) in the registers of a block. The warps of a block
// stand in ROW_GROUPS groups, each of which has some of the rows. Inside a group the columns are
// dealt out 16 at a time: `turn()` is a warp's number in its group, and the warp has the tiles
// turn(), turn() + TURNS, and so on. All warps work at the same time.

template <int ROWS, int COLUMNS, int ROW_GROUPS>
struct Sums {
    // The warps of a group, and the tiles that each warp has below and beside each other.
    static constexpr int TURNS = WARPS / ROW_GROUPS;
    static constexpr int TALL = divide_up(ROWS, 16 * ROW_GROUPS);
    static constexpr int WIDE = divide_up(COLUMNS, 16 * TURNS);

    float x[TALL][WIDE][2][4];

    __device__ static int group() { return warp() / TURNS; }
    __device__ static int turn() { return warp() % TURNS; }
    __device__ static int tile_row(int m) { return (group() * TALL + m) * 16; }
    __device__ static int tile_column(int n) { return (n * TURNS + turn()) * 16; }
    __device__ static bool has_row(int m) { return ROWS % (16 * ROW_GROUPS) == 0 || tile_row(m) < ROWS; }
    __device__ static bool has_column(int n) { return COLUMNS % (16 * TURNS) == 0 || tile_column(n) < COLUMNS; }

    __device__ void zero() {
#pragma unroll
        for (int i = 0; i < TALL * WIDE * 8; i++) (&x[0][0][0][0])[i] = 0;
    }

    // Computes += A B over `depth` terms, A (ROWS, depth) and B (depth, COLUMNS) in shared memory,
    // stored by columns where they are transposed.
    template <bool left_transposed, bool right_transposed>
    __device__ void add(const Operand* left, int left_stride, const Operand* right, int right_stride, int depth) {
#pragma unroll 2
        for (int k = 0; k < depth; k += 16) {
            Left a[TALL];
#pragma unroll
            for (int m = 0; m < TALL; m++) {
                if (has_row(m)) load<left_transposed>(a[m], left, left_stride, tile_row(m), k);
            }
#pragma unroll
            for (int n = 0; n < WIDE; n++) {
                if (!has_column(n)) continue;
                Right b;
                load<right_transposed>(b, right, right_stride, k, tile_column(n));
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    if (has_row(m)) multiply(x[m][n], a[m], b);
                }
            }
        }
    }

    // Computes what `add` does, but adds the product of this call to the sums in ordinary additions
    // of f32. Tensor cores truncate what they accumulate towards zero, so sums that stay in them
    // over many calls would shrink.
    template <bool left_transposed, bool right_transposed>
    __device__ void add_apart(const Operand* left, int left_stride, const Operand* right, int right_stride, int depth) {
#pragma unroll
        for (int n = 0; n < WIDE; n++) {
            if (!has_column(n)) continue;
            float sums[TALL][2][4];
#pragma unroll
            for (int i = 0; i < TALL * 8; i++) (&sums[0][0][0])[i] = 0;
#pragma unroll 2
            for (int k = 0; k < depth; k += 16) {
                Right b;
                load<right_transposed>(b, right, right_stride, k, tile_column(n));
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    if (!has_row(m)) continue;
                    Left a;
                    load<left_transposed>(a, left, left_stride, tile_row(m), k);
                    multiply(sums[m], a, b);
                }
            }
#pragma unroll
            for (int i = 0; i < TALL * 8; i++) (&x[i / 8][n][0][0])[i % 8] += (&sums[0][0][0])[i];
        }
    }

    // Adds to each row the sum of that row of B and all rows before it.
    __device__ void add_prefixes(const Operand* right, int right_stride) {
#pragma unroll 2
        for (int k = 0; k < ROWS; k += 16) {
            Left a[TALL];
#pragma unroll
            for (int m = 0; m < TALL; m++) lower_ones(a[m], tile_row(m), k);
#pragma unroll
            for (int n = 0; n < WIDE; n++) {
                if (!has_column(n)) continue;
                Right b;
                load<false>(b, right, right_stride, k, tile_column(n));
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    if (has_row(m)) multiply(x[m][n], a[m], b);
                }
            }
        }
    }

    // Computes += A B with B packed, and A the sum of `parts` matrices in shared memory, each
    // `part` operands after the one before.
    template <int parts>
    __device__ void add_packed(const Operand* left, int left_stride, int part, const Packed& right, int depth) {
#pragma unroll 2
        for (int k = 0; k < depth; k += 16) {
            Left a[parts][TALL];
#pragma unroll
            for (int p = 0; p < parts; p++) {
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    if (has_row(m)) load<false>(a[p][m], left + p * part, left_stride, tile_row(m), k);
                }
            }
#pragma unroll
            for (int n = 0; n < WIDE; n++) {
                if (!has_column(n)) continue;
                Right b[STORAGE == 0 ? 1 : 2];
                right.load(b, k, tile_column(n));
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    if (!has_row(m)) continue;
                    multiply(x[m][n], a[0][m], b[0]);
                    // The product of two remainders is too small to see.
                    if (STORAGE != 0) multiply(x[m][n], a[0][m], b[STORAGE == 0 ? 0 : 1]);
                    if (parts == 2) multiply(x[m][n], a[parts - 1][m], b[0]);
                }
            }
        }
    }

    // Calls `f(i, row, column, number)` for every number that the thread holds, in its i-th row of
    // 2 TALL.
    template <class F>
    __device__ void each_of_mine(F f) {
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            if (!has_row(m)) continue;
#pragma unroll
            for (int n = 0; n < WIDE; n++) {
                if (!has_column(n)) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    int half = i / 2 % 2, row = tile_row(m) + lane() / 4 + 8 * half;
                    int column = tile_column(n) + 8 * (i / 4) + 2 * (lane() % 4) + i % 2;
                    f(2 * m + half, row, column, x[m][n][i / 4][i % 4]);
                }
            }
        }
    }

    // Calls `f(row, column, number)` for every number that the thread holds.
    template <class F>
    __device__ void each(F f) {
        each_of_mine([&](int, int row, int column, float& x) { f(row, column, x); });
    }

    // Calls `f(row, column, number, number of the other matrix)` for every number that the thread
    // holds; the other matrix has the same shape.
    template <class F>
    __device__ void each_with(Sums& other, F f) {
#pragma unroll
        for (int m = 0; m < TALL; m++) {
            if (!has_row(m)) continue;
#pragma unroll
            for (int n = 0; n < WIDE; n++) {
                if (!has_column(n)) continue;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    int row = tile_row(m) + lane() / 4 + 8 * (i / 2 % 2);
                    int column = tile_column(n) + 8 * (i / 4) + 2 * (lane() % 4) + i % 2;
                    f(row, column, x[m][n][i / 4][i % 4], other.x[m][n][i / 4][i % 4]);
                }
            }
        }
    }

    // Stores the matrix in shared memory, rounded to operands.
    __device__ void store(Operand* to, int stride) {
        each([&](int row, int column, float& x) { narrow(x, to[row * stride + column]); });
    }

    // Reduces each row, by sum or maximum over columns of `f(row, column, number)`: `to[t][row]`
    // gets the part of the warps with number t in their groups. After __syncthreads, `together`
    // combines the parts.
    template <class Op, class F>
    __device__ void over_columns(float (*to)[ROWS], Op op, F f) {
        over_columns_with(*this, to, op, [&](int row, int column, float x, float) { return f(row, column, x); });
    }

    // Reduces each row as `over_columns` does, of
    // `f(row, column, number, number of another matrix)`.
    template <class Op, class F>
    __device__ void over_columns_with(const Sums& other, float (*to)[ROWS], Op op, F f) {
        float y[2 * TALL];
        over_my_columns(other, y, op, f);
#pragma unroll
        for (int i = 0; i < 2 * TALL; i++) {
            if (has_row(i / 2) && lane() % 4 == 0) to[turn()][tile_row(i / 2) + lane() / 4 + 8 * (i % 2)] = y[i];
        }
    }

    // Reduces each row over the columns of the warp alone; the four lanes that hold a row get the
    // result.
    template <class Op, class F>
    __device__ void over_my_columns(const Sums& other, float (&y)[2 * TALL], Op op, F f) {
#pragma unroll
        for (int i = 0; i < 2 * TALL; i++) {
            int m = i / 2, half = i % 2;
            if (!has_row(m)) continue;
            int row = tile_row(m) + lane() / 4 + 8 * half;
            y[i] = op.start();
#pragma unroll
            for (int n = 0; n < WIDE; n++) {
                if (!has_column(n)) continue;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    int column = tile_column(n) + 8 * (j / 2) + 2 * (lane() % 4) + j % 2, at = 2 * half + j % 2;
                    y[i] = op(y[i], f(row, column, x[m][n][j / 2][at], other.x[m][n][j / 2][at]));
                }
            }
            y[i] = op(y[i], from_lane_xor(y[i], 1));
            y[i] = op(y[i], from_lane_xor(y[i], 2));
        }
    }

    // Reduces each column over rows: `to[g][column]` gets the part of group g.
    template <class Op, class F>
    __device__ void over_rows(float (*to)[COLUMNS], Op op, F f) {
#pragma unroll
        for (int n = 0; n < WIDE; n++) {
            if (!has_column(n)) continue;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = tile_column(n) + 8 * (i / 2) + 2 * (lane() % 4) + i % 2;
                float y = op.start();
#pragma unroll
                for (int m = 0; m < TALL; m++) {
                    if (!has_row(m)) continue;
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int row = tile_row(m) + lane() / 4 + 8 * half;
                        y = op(y, f(row, column, x[m][n][i / 2][2 * half + i % 2]));
                    }
                }
                for (int mask = 4; mask < 32; mask *= 2) y = op(y, from_lane_xor(y, mask));
                if (lane() < 4) to[group()][column] = y;
            }
        }
    }
};

// Add and Largest are the operations of reductions.
struct Add {
    __device__ float start() const { return 0; }
    __device__ float operator()(float a, float b) const { return a + b; }
};
struct Largest {
    __device__ float start() const { return -infinity(); }
    __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Combines the parts of a reduction, from all turns or groups.
template <int PARTS_, int N, class Op>
__device__ float together(const float (&parts)[PARTS_][N], int i, Op op) {
    float y = parts[0][i];
    for (int p = 1; p < PARTS_; p++) y = op(y, parts[p][i]);
    return y;
}

// ---- Rows of tensors.

// `Rows` says where the rows of a head lie: row t begins at `first + t * stride`.
template <class T>
struct Rows {
    T* first;
    long long stride;
};

// Strides are the distances between batch entries, heads and tokens of a tensor, in numbers.
struct Strides { long long batch, head, token; };
static_assert(sizeof(Strides) == 24 && OFFSET(Strides, head) == 8 && OFFSET(Strides, token) == 16, "the host has another layout");

// Returns the rows of a head.
template <class T>
__device__ Rows<T> rows_of(T* first, const Strides& strides, int batch, int head) {
    return {first + batch * strides.batch + head * strides.head, strides.token};
}

// `Span` says which rows a tile takes: `count` from token `first` on, forwards or backwards by
// `step`.
struct Span {
    int first, count, step;
    __device__ long long token(int row) const { return first + (long long)step * row; }
};

// Loads rows of `width` numbers from column `column` on into a tile of ROWS by COLUMNS, with zeros
// around them, times `factor(row)`. Where one operand cannot hold a number, its parts go to `parts`
// tiles that lie `part` operands apart.
template <int ROWS, int COLUMNS, int parts, class F>
__device__ void load_rows(Operand* to, int stride, int part, Rows<const Stored> from, Span span, int column, int width, F factor) {
    // Loads take 16 bytes at once where all rows begin at a multiple of them, and each thread asks
    // for a few before it needs the first.
    constexpr int N = 16 / sizeof(Stored), PIECES = ROWS * (COLUMNS / N), EACH = divide_up(PIECES, THREADS), BATCH = EACH < 4 ? EACH : 4;
    const Stored* first = from.first + column;
    bool whole = ((unsigned long long)first | (unsigned long long)(from.stride * (long long)sizeof(Stored))) % 16 == 0;
    for (int start = threadIdx.x; start < PIECES; start += THREADS * BATCH) {
        union { uint4 all; Stored x[N]; } pieces[BATCH];
        float scales[BATCH];
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = start + b * THREADS, row = i / (COLUMNS / N), c = i % (COLUMNS / N) * N;
            scales[b] = i < PIECES && row < span.count ? factor(row) : 0.0f;
            const Stored* at = first + span.token(row) * from.stride + c;
            pieces[b].all = make_uint4(0, 0, 0, 0);
            if (scales[b] == 0.0f) continue;
            if (whole && c + N <= width) {
                pieces[b].all = load_once((const uint4*)at);
            } else {
                for (int j = 0; j < N; j++) {
                    if (c + j < width) pieces[b].x[j] = at[j];
                }
            }
        }
#pragma unroll
        for (int b = 0; b < BATCH; b++) {
            int i = start + b * THREADS, row = i / (COLUMNS / N), c = i % (COLUMNS / N) * N;
            if (i >= PIECES) continue;
            Operand* out = to + row * stride + c;
#pragma unroll
            for (int j = 0; j < N; j++) {
                float x = widen(pieces[b].x[j]) * scales[b];
                narrow(x, out[j]);
                if (parts == 2) narrow(x - widen(out[j]), out[part + j]);
            }
        }
    }
}

// Prefetches rows of `width` numbers, for the next chunk.
__device__ inline void ask_for_rows(Rows<const Stored> from, Span span, int width) {
    constexpr int LINE = 128 / sizeof(Stored);
    int lines = divide_up(width, LINE);
    for (int i = threadIdx.x; i < span.count * lines; i += THREADS) {
        ask_for(from.first + span.token(i / lines) * from.stride + i % lines * LINE);
    }
}

#endif
