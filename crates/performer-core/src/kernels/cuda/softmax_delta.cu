// The products g.out of softmax attention's backward pass, one for each query: out (B, H, Tq,
// width), grad (B, H, Tq, width) -> delta (B, H, Tq). Where rows have more than VALUES numbers, the
// next is the logarithm of the denominator, and its gradient is subtracted.

#include "softmax.cuh"

// Computes g.out; a warp has one row.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_delta(long long rows, int width, const Stored* out, const Stored* grad, float* delta) {
    long long row = (long long)blockIdx.x * WARPS + warp();
    if (row >= rows) return;
    float sum = 0;
    out += row * width;
    grad += row * width;
    for (int i = lane(); i < VALUES; i += 32) sum += widen(out[i]) * widen(grad[i]);
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane() == 0) delta[row] = width > VALUES ? sum - widen(grad[VALUES]) : sum;
}
