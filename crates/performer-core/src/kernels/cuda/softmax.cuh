// Exact softmax attention: what its kernels share. Logarithms are to base 2.
//
// Macros: STORAGE (tile.cuh); DIM and VALUES, sizes of a query and a value.

#ifndef PERFORMER_SOFTMAX
#define PERFORMER_SOFTMAX

// Weights are at most 1.
#define HALF_OPERANDS
#include "tile.cuh"

constexpr int D = up(DIM, 16), V = up(VALUES, 16);

// Low, but finite: -inf - FLOOR is -inf and not NaN.
constexpr float FLOOR = -1e37f;

struct Strides { long long batch, head, token; };

struct Problem {
    // Query heads, and how many of them read one key head.
    int heads, group;
    int queries, keys;
    // Query t sees keys up to t + offset; all if it is negative.
    int offset;
    // log2(e)/sqrt(D), and without the logarithm.
    float scale, slope;
    Strides q, k, v;
};

template <class T>
__device__ Rows<T> rows_of(T* first, const Strides& strides, int batch, int head) {
    return {first + batch * strides.batch + head * strides.head, strides.token};
}

#endif
