// Polynomial features of rows x (.., D), whose products are 1 + z + c z^2 with z = x.y, and their
// gradient:
//
//   forward:  x (rows, D) -> [1, x_i, w_ij x_i x_j for i <= j, zeros] (rows, W)
//   backward: g (rows, W), x -> dx (rows, D)
//
// with w_ii = sqrt(c) and w_ij = sqrt(2c). There are F = 1 + D + D(D+1)/2 features; W is F, or more
// where zeros follow. A warp has one row. All is f32.

#include "warp.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// The place of the product of x_i with itself.
__device__ inline int square_of(int i, int dim) { return 1 + dim + i * dim - i * (i - 1) / 2; }

extern "C" __global__ void __launch_bounds__(THREADS)
quadratic_features(long long rows, int dim, int width, float c, const float* x, float* out) {
    long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    int lane = threadIdx.x % 32;
    x += row * dim;
    out += row * width;
    float square = sqrtf(c), cross = sqrtf(2.0f * c);
    for (int i = lane; i <= dim; i += 32) out[i] = i == 0 ? 1.0f : x[i - 1];
    for (int i = 0; i < dim; i++) {
        float* to = out + square_of(i, dim) - i;
        for (int j = i + lane; j < dim; j += 32) to[j] = (i == j ? square : cross) * x[i] * x[j];
    }
    for (int i = square_of(dim, dim) + lane; i < width; i += 32) out[i] = 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
quadratic_gradient(long long rows, int dim, int width, float c, const float* x, const float* grad, float* dx) {
    long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * dim;
    grad += row * width;
    dx += row * dim;
    float square = sqrtf(c), cross = sqrtf(2.0f * c);
    for (int i = threadIdx.x % 32; i < dim; i += 32) {
        float sum = grad[1 + i];
        for (int j = 0; j < dim; j++) {
            int low = min(i, j), high = max(i, j);
            sum += (i == j ? 2.0f * square : cross) * grad[square_of(low, dim) + high - low] * x[j];
        }
        dx[i] = sum;
    }
}
