// The matrices of a feature map as the kernels read them (`Packed` in tile.cuh), as right factors
// in fragments: the projection once for features and once for gradients, and P and P^T P of
// `KeyForm`, which are packed like a projection with DIM features.

#include "tile.cuh"

// Packs `projection`, (features, dim) or, if `hyperbolic`, (features/2, dim), whose rows w give
// features for w and then for -w, times `scale` into `to`, with zeros up to whole tiles. The factor
// is (dim, features), or (features, dim) if `back`, for gradients. The host puts into `scale` what
// the factor needs: dim^(-1/4), and log2(e) for logarithms to base 2. `pieces` counts the 16-byte
// pieces of one packed projection; for half types it may be twice those of the factor, whose
// transpose then follows as a left factor. Launch: grid (ceil(pieces/THREADS), projections), where
// each thread writes one piece.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_pack(const float* projection, int features, int dim, int hyperbolic, float scale, int back, int pieces, uint4* to) {
    int rows = back ? features : dim, columns = back ? dim : features;
    int depth = divide_up(rows, 16), count = depth * divide_up(columns, 16) * 64;
    int index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= pieces) return;
    bool left = index >= count;
    int lane = index % 32, half = index / 32 % 2, row = index / 64 % depth * 16, column = index % count / 64 / depth * 16;
    int half_way = hyperbolic ? features / 2 : features;
    projection += (long long)blockIdx.y * half_way * dim;
    to += (long long)blockIdx.y * pieces;
    auto at = [&](int r, int c) {
        if (r >= rows || c >= columns) return 0.0f;
        int feature = back ? r : c, d = back ? c : r;
        float x = projection[(feature % half_way) * dim + d] * scale;
        return feature < half_way ? x : -x;
    };
    unsigned words[4];
    for (int i = 0; i < 4; i++) {
#if STORAGE == 0
        words[i] = __float_as_uint(at(row + 8 * (i / 2) + lane % 4 + 4 * (i % 2), column + 8 * half + lane / 4));
#else
        words[i] = 0;
        for (int j = 0; j < 2; j++) {
            float x = at(row + 8 * (left ? i / 2 : i % 2) + lane % 4 * 2 + j, column + 8 * (left ? i % 2 : i / 2) + lane / 4);
            Bfloat high, low;
            narrow(x, high);
            narrow(x - widen(high), low);
            words[i] |= (unsigned)(half ? low : high).bits << 16 * j;
        }
#endif
    }
    to[index] = make_uint4(words[0], words[1], words[2], words[3]);
}
