// The products g.out of softmax attention's backward pass, one for each query: out (B, H, Tq,
// VALUES), grad (B, H, Tq, VALUES) -> delta (B, H, Tq).

#include "softmax.cuh"

// Computes g.out; a warp has one row.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_delta(int rows, const Stored* out, const Stored* grad, float* delta) {
    int row = blockIdx.x * WARPS + warp();
    if (row >= rows) return;
    float sum = 0;
    for (int i = lane(); i < VALUES; i += 32) {
        sum += widen(out[(long long)row * VALUES + i]) * widen(grad[(long long)row * VALUES + i]);
    }
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane() == 0) delta[row] = sum;
}
