// LayerNorm and RMSNorm of rows and their gradients; a warp has one row. It reads the row two to
// four times, all but the first from the cache.
//
//   forward:  x (rows, width), weight (width), bias (width) -> mean, scale -> out (rows, width)
//   backward: x, weight, grad (rows, width) -> dx (rows, width), kept (rows, 2) = mean and scale
//             x, grad, kept -> sums (blocks, 2, width) of the gradients of weight and bias
//
// Macros: STORAGE as in stored.cuh; CENTER: 1 subtracts the mean of a row, 0 does not. `bias` is
// null where there is none, with either. Weights, biases and statistics are f32.

#include "stored.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Adds up a number of each lane; every lane gets the sum.
__device__ inline float over_warp(float x) {
    for (int mask = 16; mask > 0; mask /= 2) x += from_lane_xor(x, mask);
    return x;
}

// Computes the mean and 1/sqrt(variance + eps) of a row, in every lane.
__device__ inline void statistics(const Stored* x, int width, float eps, float& mean, float& scale) {
    int lane = threadIdx.x % 32;
    mean = 0.0f;
    if (CENTER) {
        for (int i = lane; i < width; i += 32) mean += widen(x[i]);
        mean = over_warp(mean) / width;
    }
    float squares = 0.0f;
    for (int i = lane; i < width; i += 32) {
        float c = widen(x[i]) - mean;
        squares += c * c;
    }
    scale = 1.0f / sqrtf(over_warp(squares) / width + eps);
}

// Normalises rows and applies weight and bias.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_forward(long long rows, int width, float eps, const Stored* x, const float* weight, const float* bias, Stored* out) {
    long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * width;
    out += row * width;
    float mean, scale;
    statistics(x, width, eps, mean, scale);
    for (int i = threadIdx.x % 32; i < width; i += 32) {
        float y = (widen(x[i]) - mean) * scale * weight[i];
        narrow(bias ? y + bias[i] : y, out[i]);
    }
}

// Computes the gradient of rows. With u the normalised row and h = g w: dx = (h - mean h - u mean(h
// u)) scale, without the first mean where none is subtracted. Keeps each row's mean and scale for
// norm_weight_gradients.
extern "C" __global__ void __launch_bounds__(THREADS) norm_backward(
    long long rows, int width, float eps, const Stored* x, const float* weight, const Stored* grad, Stored* dx, float* kept) {
    long long row = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    int lane = threadIdx.x % 32;
    x += row * width;
    grad += row * width;
    dx += row * width;
    float mean, scale;
    statistics(x, width, eps, mean, scale);
    float along = 0.0f, level = 0.0f;
    for (int i = lane; i < width; i += 32) {
        float h = widen(grad[i]) * weight[i];
        along += h * (widen(x[i]) - mean) * scale;
        level += h;
    }
    along = over_warp(along) / width;
    level = CENTER ? over_warp(level) / width : 0.0f;
    for (int i = lane; i < width; i += 32) {
        float h = widen(grad[i]) * weight[i], u = (widen(x[i]) - mean) * scale;
        narrow((h - level - u * along) * scale, dx[i]);
    }
    if (lane == 0) {
        kept[2 * row] = mean;
        kept[2 * row + 1] = scale;
    }
}

// Computes parts of the gradients of weight and bias, the sums over rows of g u and of g: a block
// takes 32 columns of every gridDim.y-th run of WARPS rows; `sums` is (gridDim.y, 2, width).
extern "C" __global__ void __launch_bounds__(THREADS)
norm_weight_gradients(long long rows, int width, const Stored* x, const Stored* grad, const float* kept, float* sums) {
    __shared__ float parts[2][WARPS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int column = blockIdx.x * 32 + lane;
    float dw = 0.0f, db = 0.0f;
    if (column < width) {
        for (long long row = (long long)blockIdx.y * WARPS + warp; row < rows; row += (long long)gridDim.y * WARPS) {
            float g = widen(grad[row * width + column]);
            dw += g * (widen(x[row * width + column]) - kept[2 * row]) * kept[2 * row + 1];
            db += g;
        }
    }
    parts[0][warp][lane] = dw;
    parts[1][warp][lane] = db;
    __syncthreads();
    if (warp < 2 && column < width) {
        float sum = 0.0f;
        for (int i = 0; i < WARPS; i++) sum += parts[warp][i][lane];
        sums[((long long)blockIdx.y * 2 + warp) * width + column] = sum;
    }
}
