// Rotary positions: pairs (i, i + D/2) of each row turn by the angle of their token, or back for the gradient.
//
// Macro: STORAGE as in stored.cuh.

#include "stored.cuh"

constexpr int THREADS = 256;

// x is (batch, heads, tokens, 2 half) with the strides given and contiguous rows; out is contiguous; cos and sin are (tokens, half).
extern "C" __global__ void __launch_bounds__(THREADS)
rotary(long long pairs, int heads, int tokens, int half, long long batch_stride, long long head_stride, long long token_stride,
       float direction, const Stored* x, const float* cos, const float* sin, Stored* out) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= pairs) return;
    int d = (int)(i % half);
    long long row = i / half;
    int token = (int)(row % tokens), head = (int)(row / tokens % heads);
    x += row / tokens / heads * batch_stride + head * head_stride + token * token_stride + d;
    out += row * 2 * half + d;
    float c = cos[(long long)token * half + d], s = direction * sin[(long long)token * half + d];
    float a = widen(x[0]), b = widen(x[half]);
    narrow(a * c - b * s, out[0]);
    narrow(a * s + b * c, out[half]);
}
