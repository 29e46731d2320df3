// Forget gates of a layer, the logarithms of what each key head keeps of the past at each token,
// from the layer's input, and their gradients. B sequences of T tokens are rows = B T rows of x.
//
//   forward:  x (rows, E), w (H, E), bias (H) -> z = x w^T + bias -> g = log sigmoid(z) (B, H, T)
//   backward: g, dg (B, H, T) -> dz (rows, H) = dg (1 - e^g)
//             dz, w -> dx (rows, E) = dz w
//             x, dz -> sums (splits, H, E + 1) = parts of dz^T x, and of the sums of dz behind them
//
// H is small, so tensor cores would save nothing: a warp reads a number of x once for four heads,
// and a number of w once for four rows. Sums are f32, since gates near 0 remember for long and bf16
// has too few digits for them.
//
// Macros: STORAGE as in stored.cuh, for x and dx; all else is f32.

#include "stored.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
// The rows and the heads whose sums a warp has in registers.
constexpr int ROWS = 4, HEADS = 4;

// The place of a row's gate of head 0 in (B, H, T).
__device__ inline long long gate_of(long long row, int tokens, int heads) { return row / tokens * heads * tokens + row % tokens; }

// Computes gates: a warp has ROWS rows, and its lanes share their columns.
extern "C" __global__ void __launch_bounds__(THREADS)
forget_gates(long long rows, int tokens, int width, int heads, const Stored* x, const float* weight, const float* bias, float* gates) {
    int lane = threadIdx.x % 32;
    long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    if (first >= rows) return;
    for (int head = 0; head < heads; head += HEADS) {
        float sums[ROWS][HEADS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) sums[r][h] = 0;
        }
        for (int i = lane; i < width; i += 32) {
            float row[ROWS];
#pragma unroll
            for (int r = 0; r < ROWS; r++) row[r] = first + r < rows ? widen(x[(first + r) * width + i]) : 0.0f;
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float w = head + h < heads ? weight[(long long)(head + h) * width + i] : 0.0f;
#pragma unroll
                for (int r = 0; r < ROWS; r++) sums[r][h] += w * row[r];
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float z = sums[r][h];
                for (int mask = 16; mask > 0; mask /= 2) z += from_lane_xor(z, mask);
                if (lane != r * HEADS + h || first + r >= rows || head + h >= heads) continue;
                z += bias[head + h];
                // In this form nothing overflows, and near 0 no digits are lost.
                gates[gate_of(first + r, tokens, heads) + (long long)(head + h) * tokens] = fminf(z, 0.0f) - log1pf(expf(-fabsf(z)));
            }
        }
    }
}

// Computes dz; a thread has one number. 1 - e^g is sigmoid(-z), with all its digits near g = 0.
extern "C" __global__ void __launch_bounds__(THREADS)
forget_gate_slopes(long long rows, int tokens, int heads, const float* gates, const float* grad, float* slopes) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= rows * heads) return;
    long long at = gate_of(i / heads, tokens, heads) + i % heads * tokens;
    slopes[i] = -grad[at] * expm1f(gates[at]);
}

// Computes dx: a warp has ROWS rows, and its lanes share their columns.
extern "C" __global__ void __launch_bounds__(THREADS)
forget_gate_rows(long long rows, int width, int heads, const float* weight, const float* slopes, Stored* dx) {
    long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    if (first >= rows) return;
    for (int i = threadIdx.x % 32; i < width; i += 32) {
        float sums[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) sums[r] = 0;
        for (int h = 0; h < heads; h++) {
            float w = weight[(long long)h * width + i];
#pragma unroll
            for (int r = 0; r < ROWS; r++) sums[r] += first + r < rows ? w * slopes[(first + r) * heads + h] : 0.0f;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (first + r < rows) narrow(sums[r], dx[(first + r) * width + i]);
        }
    }
}

// Computes parts of the gradients of the weight and, as column `width`, of the bias: a block has 32
// columns and HEADS heads of every gridDim.y-th run of WARPS rows; `sums` is (gridDim.y, H, E + 1).
extern "C" __global__ void __launch_bounds__(THREADS)
forget_gate_weights(long long rows, int width, int heads, const Stored* x, const float* slopes, float* sums) {
    __shared__ float parts[WARPS][HEADS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int groups = (heads + HEADS - 1) / HEADS, head = blockIdx.x % groups * HEADS;
    int column = blockIdx.x / groups * 32 + lane;
    float own[HEADS];
#pragma unroll
    for (int h = 0; h < HEADS; h++) own[h] = 0;
#pragma unroll 4
    for (long long row = (long long)blockIdx.y * WARPS + warp; row < rows; row += (long long)gridDim.y * WARPS) {
        float number = column < width ? widen(x[row * width + column]) : 1.0f;
#pragma unroll
        for (int h = 0; h < HEADS; h++) own[h] += head + h < heads ? number * slopes[row * heads + head + h] : 0.0f;
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) parts[warp][h][lane] = own[h];
    __syncthreads();
    if (warp >= HEADS || head + warp >= heads || column > width) return;
    float sum = 0.0f;
    for (int i = 0; i < WARPS; i++) sum += parts[i][warp][lane];
    sums[((long long)blockIdx.y * heads + head + warp) * (width + 1) + column] = sum;
}
