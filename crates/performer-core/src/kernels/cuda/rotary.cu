// Rotary positions: each pair (i, i + D/2) of a row turns by the angle of its token, or back for
// the gradient. x (B, H, T, D), cos and sin (T, D/2) -> out (B, H, T, D).

#include "stored.cuh"

constexpr int THREADS = 256;

// Turns x, (batch, heads, tokens, 2 half) with the strides given and contiguous rows; a thread has
// one pair. out is contiguous; cos and sin are (tokens, half). `direction` is 1, or -1 for the
// gradient.
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
