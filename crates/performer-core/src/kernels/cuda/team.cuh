// Teams: blocks of four warps that keep in registers what no other warp needs. Sums are tiles of 16
// by 16, and a rounded tile is at once the left factor of the next product; rows are copied to
// shared memory while the team computes.
//
// This is for half types only, whose tensors hold operands as they are.

#ifndef PERFORMER_TEAM
#define PERFORMER_TEAM

#include "tile.cuh"

static_assert(sizeof(Stored) == 2 && PARTS == 1, "tensors hold operands");

// The warps of a team, and its threads.
constexpr int TEAM = 4, TEAM_THREADS = 32 * TEAM;

// Rounds two numbers to operands, the first in the lower half of the word.
__device__ inline unsigned pack(float x, float y) {
#if STORAGE == 1
    return pack_f16(x, y);
#else
    return pack_bf16(x, y);
#endif
}

// ---- Tiles of 16 by 16 sums, as `multiply` leaves them.

typedef float Tile[2][4];

// The number x[half][i] of a tile is in row `row_in_tile(i)` and in column
// `column_in_tile(half) + i % 2`.
__device__ inline int row_in_tile(int i) { return lane() / 4 + 8 * (i / 2); }
__device__ inline int column_in_tile(int half) { return 8 * half + 2 * (lane() % 4); }
// The first of the four lanes that hold a row.
__device__ inline int first_of_row() { return lane() & 28; }

// Rounds a tile to operands: it is then a left factor.
__device__ inline Left as_left(const Tile& x) {
    return {{pack(x[0][0], x[0][1]), pack(x[0][2], x[0][3]), pack(x[1][0], x[1][1]), pack(x[1][2], x[1][3])}};
}

// Padded says where the numbers of a matrix in shared memory are: rows are `stride` operands apart.
struct Padded {
    Operand* first;
    int stride;
    __device__ Operand* operator()(int row, int column) const { return first + row * stride + column; }
};

// Stores a left factor as 16 rows and columns of a matrix in shared memory; `at(row, column)` is
// the place of a number.
template <class At>
__device__ void store(At at, int row, int column, const Left& x) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        *(unsigned*)at(row + lane() / 4 + 8 * (i % 2), column + 8 * (i / 2) + 2 * (lane() % 4)) = x.x[i];
    }
}

__device__ inline void zero_tile(Tile& x) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] = 0;
}
template <int N>
__device__ void zero(Tile (&x)[N]) {
#pragma unroll
    for (int i = 0; i < 8 * N; i++) (&x[0][0][0])[i] = 0;
}

// Calls `f(row, column, number)` for each number of the lane; `row` is 0 or 1 for which of the
// lane's two rows it is in, `column` the column of the matrix.
template <int N, class F_>
__device__ void each(Tile (&x)[N], F_ f) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 8; i++) f(i / 2 % 2, 16 * n + column_in_tile(i / 4) + i % 2, x[n][i / 4][i % 4]);
    }
}

__device__ inline void add_each(Tile& x, const Tile& y) {
#pragma unroll
    for (int i = 0; i < 8; i++) x[i / 4][i % 4] += y[i / 4][i % 4];
}

// Computes x *= y, number by number.
template <int N>
__device__ void multiply_each(Tile (&x)[N], const Tile (&y)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int i = 0; i < 8; i++) x[n][i / 4][i % 4] *= y[n][i / 4][i % 4];
    }
}

// Reduces over the four lanes that hold a row.
template <class Op>
__device__ float over_row(float x, Op op) {
    x = op(x, from_lane_xor(x, 1));
    return op(x, from_lane_xor(x, 2));
}

// ---- Rows.

// Starts to copy ROWS rows of a tile of COLUMNS columns to a matrix in shared memory, by N threads.
// Rows that `keep` refuses or that lie beyond the span, and numbers beyond WIDTH, become zero.
// `at(row, column)` is the place of a number; the eight numbers from a column that is a multiple of
// eight on must lie side by side.
template <int ROWS, int COLUMNS, int WIDTH, int N, class At, class F_>
__device__ void copy_rows(At at, Rows<const Stored> from, Span span, int first_row, F_ keep) {
    constexpr int LENGTH = 16 / sizeof(Stored), PIECES = COLUMNS / LENGTH, ALL = ROWS * PIECES;
    bool whole = ((unsigned long long)from.first | (unsigned long long)(from.stride * (long long)sizeof(Stored))) % 16 == 0;
    if (whole && WIDTH % LENGTH == 0) {
#pragma unroll
        for (unsigned i = threadIdx.x % N, e = 0; e < divide_up(ALL, N); e++, i += N) {
            if (ALL % N && i >= ALL) continue;
            int row = first_row + i / PIECES, c = i % PIECES * LENGTH;
            bool has = row < span.count && (WIDTH == COLUMNS || c < WIDTH) && keep(span.token(row));
            copy_on(at(row, c), from.first + span.token(row) * from.stride + c, has);
        }
        return;
    }
#pragma unroll 1
    for (int i = threadIdx.x % N; i < ROWS * COLUMNS; i += N) {
        int row = first_row + i / COLUMNS, c = i % COLUMNS;
        bool has = row < span.count && c < WIDTH && keep(span.token(row));
        *at(row, c) = has ? from.first[span.token(row) * from.stride + c] : Stored{0};
    }
}

template <int ROWS, int COLUMNS, int WIDTH, int N, class F_>
__device__ void copy_rows(Operand* to, int stride, Rows<const Stored> from, Span span, int first_row, F_ keep) {
    copy_rows<ROWS, COLUMNS, WIDTH, N>(Padded{to, stride}, from, span, first_row, keep);
}

// Writes two neighbouring numbers, from column `column` on, of a row of WIDTH numbers.
template <int WIDTH, class T>
__device__ void put(T* row, int column, float x, float y) {
    T* at = row + column;
    if (sizeof(T) == 2 && WIDTH % 2 == 0) {
        if (column < WIDTH) *(unsigned*)at = pack(x, y);
        return;
    }
    if (column < WIDTH) narrow(x, at[0]);
    if (column + 1 < WIDTH) narrow(y, at[1]);
}

// Writes those of 16 rows from `first_row` on that come before row `count`, to rows of WIDTH
// numbers.
template <int WIDTH, int N, class T>
__device__ void put_rows(T* to, const Tile (&x)[N], Span span, int first_row, int count) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        int row = first_row + lane() / 4 + 8 * h;
        T* at = to + span.token(row) * WIDTH;
        if (sizeof(T) == 4 || WIDTH % 16) {
            if (row >= count) continue;
#pragma unroll
            for (int i = 0; i < 2 * N; i++) put<WIDTH>(at, 16 * (i / 2) + column_in_tile(i % 2), x[i / 2][i % 2][2 * h], x[i / 2][i % 2][2 * h + 1]);
            continue;
        }
        // Pairs of lanes exchange numbers so that each has four neighbouring ones, and a row gets
        // 32 bytes at once.
        bool odd = lane() % 2;
#pragma unroll
        for (int i = 0; i < N; i++) {
            unsigned first = pack(x[i][0][2 * h], x[i][0][2 * h + 1]), second = pack(x[i][1][2 * h], x[i][1][2 * h + 1]);
            unsigned other = __float_as_uint(from_lane_xor(__uint_as_float(odd ? first : second), 1));
            uint2 both = make_uint2(odd ? other : first, odd ? second : other);
            if (row < count) *(uint2*)(at + 16 * i + 8 * odd + lane() % 4 / 2 * 4) = both;
        }
    }
}

#endif
