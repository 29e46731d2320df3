// Rotary positions: the pairs of each row turn by the angles of their token, or back for the
// gradient.
//
// Macro: STORAGE as in stored.cuh.

#include "stored.cuh"

constexpr int THREADS = 256;

// x is (batch, heads, tokens, 2 half) with the strides given and contiguous rows; out is
// contiguous. The d-th pair of a row is the numbers next d and next d + second. cos and sin are
// (tokens, half) for each sequence, the next sequence's table_stride further on.
extern "C" __global__ void __launch_bounds__(THREADS)
rotary(long long pairs, int heads, int tokens, int half, int next, int second, long long batch_stride, long long head_stride,
       long long token_stride, long long table_stride, float direction, const Stored* x, const float* cos, const float* sin,
       Stored* out) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= pairs) return;
    int d = (int)(i % half);
    long long row = i / half, sequence = row / tokens / heads;
    int token = (int)(row % tokens), head = (int)(row / tokens % heads);
    x += sequence * batch_stride + head * head_stride + token * token_stride + next * d;
    out += row * 2 * half + next * d;
    long long angle = sequence * table_stride + (long long)token * half + d;
    float c = cos[angle], s = direction * sin[angle];
    float a = widen(x[0]), b = widen(x[second]);
    narrow(a * c - b * s, out[0]);
    narrow(a * s + b * c, out[second]);
}
