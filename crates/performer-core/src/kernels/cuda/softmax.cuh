// Exact softmax attention: what its kernels share. Logarithms are to base 2.

#ifndef PERFORMER_SOFTMAX
#define PERFORMER_SOFTMAX

// Weights are at most 1, so f16 can hold them.
#define HALF_OPERANDS
#include "tile.cuh"

constexpr int D = up(DIM, 16), V = up(VALUES, 16);

// FLOOR is low, but finite: -inf - FLOOR is -inf and not NaN.
constexpr float FLOOR = -1e37f;

// Strides are the distances between batch entries, heads and tokens of a tensor.
struct Strides { long long batch, head, token; };
static_assert(sizeof(Strides) == 24 && OFFSET(Strides, head) == 8 && OFFSET(Strides, token) == 16, "the host has another layout");

// Problem holds the sizes and strides of one call.
struct Problem {
    // Query heads, and how many of them read one key head.
    int heads, group;
    int queries, keys;
    // Query t sees keys up to t + offset; all keys if the offset is negative.
    int offset;
    // log2(e)/sqrt(D), and 1/sqrt(D).
    float scale, slope;
    Strides q, k, v;
};
static_assert(sizeof(Problem) == 104 && OFFSET(Problem, group) == 4 && OFFSET(Problem, queries) == 8 && OFFSET(Problem, keys) == 12 &&
                  OFFSET(Problem, offset) == 16 && OFFSET(Problem, scale) == 20 && OFFSET(Problem, slope) == 24 &&
                  OFFSET(Problem, q) == 32 && OFFSET(Problem, k) == 56 && OFFSET(Problem, v) == 80,
              "the host has another layout");

// Returns the rows of a head.
template <class T>
__device__ Rows<T> rows_of(T* first, const Strides& strides, int batch, int head) {
    return {first + batch * strides.batch + head * strides.head, strides.token};
}

#endif
