// The products of favor_bf16.cuh by the tensor cores of Hopper's warpgroups, for a projection that
// is exact (EXACT) and heads of 64 numbers.
//
// A team is a group of four warps, and each warp has the same rows of every matrix as in
// favor_bf16.cuh. But the right factor of a product is not loaded by each warp, tile by tile: the
// tensor cores read it from shared memory, once for all four. So matrices there lie as these cores
// read them, and the projection is there, too:
//
//   product                     left factor              right factor
//   logarithms of the builder   projection (P, 64)       its rows x (64, 64)
//   what is added to the sums   features (P, 64)         y (64, 64), transposed
//   logarithms of the reader    its rows (64, 64)        projection (P, 64)
//   pairs                       weights (64, P)          features (P, 64), transposed
//   rows                        weights, pairs           sums (P, 64), y (64, 64), transposed
//
// Products with units are a column each, and stay those of single warps.

#ifndef PERFORMER_FAVOR_WGMMA
#define PERFORMER_FAVOR_WGMMA

#include "favor_bf16.cuh"
#include "warpgroup.cuh"

static_assert(EXACT && D == 64 && V == 64, "for other kernels");

// The length of a row in shared memory.
constexpr int ROW = 64;

// Swizzled says where the numbers of a matrix in shared memory are that tensor cores read: of the
// eight pieces of a row, piece p of row r is where p XOR r (mod 8) would be, so that a column of
// pieces lies in all banks.
struct Swizzled {
    Operand* first;
    __device__ Operand* operator()(int row, int column) const {
        return first + ROW * row + (column / 8 ^ row % 8) * 8 + column % 8;
    }
};

// GroupBuilder is the shared memory of a team's builder, and the projection.
struct GroupBuilder : Gates {
    alignas(1024) Operand x[C][ROW];
    Operand y[C][ROW];
    Operand features[P][ROW], sums[P][ROW], projection[P][ROW];
    // Units in two halves; the rest of a row is not looked at.
    Operand of_y[C][8], of_sums[P][8];
    float offset[C], unit[C], scale[P], norm[P];
    int breaks[TEAM];

    __device__ Swizzled at_x() { return {&x[0][0]}; }
    __device__ Swizzled at_y() { return {&y[0][0]}; }
    __device__ Swizzled at_features() { return {&features[0][0]}; }
    __device__ Swizzled at_sums() { return {&sums[0][0]}; }
    __device__ Swizzled at_projection() { return {&projection[0][0]}; }
    __device__ Padded units_of_y() { return {&of_y[0][0], 8}; }
    __device__ Padded units_of_sums() { return {&of_sums[0][0], 8}; }
    __device__ void share() { share_with_products(); }
    // Describes the rows of a matrix from this number on to the tensor cores.
    __device__ SharedMatrix from(const Operand& number) const {
        return matrix_at(this, (unsigned)((const char*)&number - (const char*)this));
    }
};

// The sums of a row of tiles, as products take them.
template <int N>
__device__ float (&flat(Tile (&x)[N]))[8 * N] { return *(float(*)[8 * N])&x[0][0][0]; }
template <int M, int N>
__device__ float (&flat(Tile (&x)[M][N]))[8 * M * N] { return *(float(*)[8 * M * N])&x[0][0][0][0]; }

// Copies the projection to shared memory: its rounded numbers, which are all of it.
__device__ inline void prepare(GroupBuilder& b, const Packed& projection) {
    unsigned* pairs = (unsigned*)&b.projection[0][0];
    for (int i = threadIdx.x; i < P * ROW / 2; i += TEAM_THREADS) pairs[i] = 0;
    __syncthreads();
    for (int i = warp(); i < F / 16 * (D / 16); i += TEAM) {
        int row = i / (D / 16) * 16, column = i % (D / 16) * 16;
        Right tile;
        projection.load_rounded(tile, column, row);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int r = row + j / 2 * 8 + lane() / 4, c = column + j % 2 * 8 + 2 * (lane() % 4);
            *(unsigned*)b.at_projection()(r, c) = tile.x[j / 2][j % 2];
        }
    }
    b.share();
}

// ---- The builder.

__device__ inline void add_products(Tile (&x)[MINE][C / 16], GroupBuilder& b, const Own<false>&,
                                    const Packed&) {
    begin_products(flat(x));
#pragma unroll
    for (int k = 0; k < D; k += 16) {
#pragma unroll
        for (int m = 0; m < MINE; m++) {
            multiply_group(flat(x[m]), b.from(b.projection[16 * TEAM * m][k]), b.from(b.x[0][k]));
        }
    }
    wait_for_products(flat(x));
}

__device__ inline void absorb(GroupBuilder& b, Own<false>& own) {
#pragma unroll
    for (int m = 0; m < MINE; m++) {
        Tile chunk[V / 16];
        zero(chunk);
        begin_products(flat(chunk));
#pragma unroll
        for (int k = 0; k < C / 16; k++) {
            multiply_group<true>(flat(chunk), own.features[m][k].x, b.from(b.y[16 * k][0]));
        }
        wait_for_products(flat(chunk));
#pragma unroll
        for (int n = 0; n < V / 16; n++) add_each(own.sums[m][n], chunk[n]);
    }
    absorb_units(b, own);
}

// ---- The reader.

__device__ inline void add_logarithms(Tile (&x)[P / 16], GroupBuilder& b, const Operand* rows,
                                      const Packed&) {
    Left left[D / 16];
#pragma unroll
    for (int k = 0; k < D / 16; k++) load<false>(left[k], rows, D + PAD, 16 * warp(), 16 * k);
    begin_products(flat(x));
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        multiply_group<false>(flat(x), left[k].x, b.from(b.projection[0][16 * k]));
    }
    wait_for_products(flat(x));
}

__device__ inline void read_sums(Tile (&x)[V / 16], float (&units)[4], const Left (&weights)[P / 16],
                                 GroupBuilder& b) {
    Tile pairs[C / 16];
    zero(pairs);
    begin_products(flat(pairs));
#pragma unroll
    for (int k = 0; k < P / 16; k++) {
        multiply_group<true>(flat(pairs), weights[k].x, b.from(b.features[16 * k][0]));
    }
    wait_for_products(flat(pairs));
    Left counted[C / 16];
#pragma unroll
    for (int j = 0; j < C / 16; j++) {
        if (j > warp()) zero_tile(pairs[j]);
        hide_later(pairs[j], j);
        counted[j] = as_left(pairs[j]);
    }
    zero(x);
    begin_products(flat(x));
#pragma unroll
    for (int k = 0; k < P / 16; k++) {
        multiply_group<true>(flat(x), weights[k].x, b.from(b.sums[16 * k][0]));
    }
#pragma unroll
    for (int k = 0; k < C / 16; k++) {
        multiply_group<true>(flat(x), counted[k].x, b.from(b.y[16 * k][0]));
    }
    wait_for_products(flat(x));
#pragma unroll
    for (int i = 0; i < 4; i++) units[i] = 0;
#pragma unroll
    for (int k = 0; k < P / 16; k += 2) {
        multiply_units(units, weights[k], weights[k + 1], b.units_of_sums(), 16 * k);
    }
#pragma unroll
    for (int k = 0; k < C / 16; k += 2) {
        multiply_units(units, counted[k], counted[k + 1], b.units_of_y(), 16 * k);
    }
}

#endif
