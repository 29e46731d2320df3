// LayerNorm and RMSNorm of rows and their gradients.
//
//   forward:  x (rows, width), weight (width), bias (width) -> mean, scale -> out (rows, width)
//   backward: x, weight, grad (rows, width) -> dx (rows, width), kept (rows, 2) = mean and scale
//             x, grad, kept -> sums (blocks, 2, width) of the gradients of weight and bias
//
// In the kernels `_wide`, LANES lanes of a warp share a row, which they read once, 16 bytes at a
// time, and keep in registers. `norm_backward_wide` computes dx and sums in one pass, without
// `kept`. `width` is a multiple of WIDE, and rows begin at multiples of 16 bytes. In the other
// kernels a warp has a row of any width, and reads it two to four times, all but the first from the
// cache.
//
// Macros: STORAGE as in stored.cuh; CENTER: 1 subtracts the mean of a row, 0 does not. LANES, for
// the kernels `_wide`: the lanes of a row, a power of two; PIECES: how many pieces of 16 bytes each
// of them has at most; 32 and 1 if they are not given. `bias` is null where there is none. Weights,
// biases and statistics are f32.

#ifndef LANES
#define LANES 32
#define PIECES 1
#endif

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
    // The means of h u and of h, as they are called in the formula above.
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

// The rows that a block treats at a time.
constexpr int GROUPS = THREADS / LANES;

// Adds up a number of each lane of a row; each of them gets the sum.
__device__ inline float over_row(float x) {
    for (int mask = LANES / 2; mask > 0; mask /= 2) x += from_lane_xor(x, mask);
    return x;
}

// Row holds the numbers of a row that belong to one lane; zeros stand where it has none.
struct Row {
    float x[PIECES][WIDE];

    // The first column of a piece.
    __device__ static int column(int piece) { return (piece * LANES + threadIdx.x % LANES) * WIDE; }

    // Loads the lane's numbers of a row, or zeros if there is no such row.
    __device__ void load_from(const Stored* from, int width, bool has) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) x[p][i] = 0.0f;
            if (has && column(p) < width) load<WIDE>(from + column(p), x[p]);
        }
    }

    // Loads the lane's numbers of a row of f32; zeros if there is none.
    __device__ void load_numbers(const float* from, int width) {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) x[p][i] = from && column(p) < width ? from[column(p) + i] : 0.0f;
        }
    }

    // Stores the lane's numbers of a row.
    __device__ void store_to(Stored* to, int width) const {
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
            if (column(p) < width) store<WIDE>(x[p], to + column(p));
        }
    }

    // Subtracts the mean, if CENTER, and multiplies by 1/sqrt(variance + eps), which is returned.
    // All lanes take part, since they add up together; those without a row (`has`) get zeros, also
    // where eps is 0.
    __device__ float normalise(int width, float eps, bool has) {
        float mean = 0.0f, squares = 0.0f;
        if (CENTER) {
#pragma unroll
            for (int p = 0; p < PIECES; p++) {
#pragma unroll
                for (int i = 0; i < WIDE; i++) mean += x[p][i];
            }
            mean = over_row(mean) / width;
        }
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                x[p][i] = column(p) < width ? x[p][i] - mean : 0.0f;
                squares += x[p][i] * x[p][i];
            }
        }
        float variance = over_row(squares) / width, scale = has ? 1.0f / sqrtf(variance + eps) : 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) x[p][i] *= scale;
        }
        return scale;
    }
};

// Normalises rows and applies weight and bias.
extern "C" __global__ void __launch_bounds__(THREADS)
norm_forward_wide(long long rows, int width, float eps, const Stored* x, const float* weight, const float* bias, Stored* out) {
    Row w, b;
    w.load_numbers(weight, width);
    b.load_numbers(bias, width);
    // All lanes of a warp go through as many rows, since they add up together.
    for (long long first = (long long)blockIdx.x * GROUPS; first < rows; first += (long long)gridDim.x * GROUPS) {
        long long row = first + threadIdx.x / LANES;
        Row u;
        u.load_from(x + row * width, width, row < rows);
        u.normalise(width, eps, row < rows);
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) u.x[p][i] = u.x[p][i] * w.x[p][i] + b.x[p][i];
        }
        if (row < rows) u.store_to(out + row * width, width);
    }
}

// Computes the gradient of rows, as norm_backward does, and a block's parts of the gradients of
// weight and bias; `sums` is (gridDim.x, 2, width).
extern "C" __global__ void __launch_bounds__(THREADS)
norm_backward_wide(long long rows, int width, float eps, const Stored* x, const float* weight, const Stored* grad, Stored* dx, float* sums) {
    __shared__ float parts[GROUPS][LANES * WIDE];
    Row w, dw, db;
    w.load_numbers(weight, width);
    dw.load_numbers(nullptr, width);
    db.load_numbers(nullptr, width);
    for (long long first = (long long)blockIdx.x * GROUPS; first < rows; first += (long long)gridDim.x * GROUPS) {
        long long row = first + threadIdx.x / LANES;
        Row u, g;
        u.load_from(x + row * width, width, row < rows);
        g.load_from(grad + row * width, width, row < rows);
        float scale = u.normalise(width, eps, row < rows), along = 0.0f, level = 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                dw.x[p][i] += g.x[p][i] * u.x[p][i];
                db.x[p][i] += g.x[p][i];
                g.x[p][i] *= w.x[p][i];
                along += g.x[p][i] * u.x[p][i];
                level += g.x[p][i];
            }
        }
        along = over_row(along) / width;
        level = CENTER ? over_row(level) / width : 0.0f;
#pragma unroll
        for (int p = 0; p < PIECES; p++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) g.x[p][i] = (g.x[p][i] - level - u.x[p][i] * along) * scale;
        }
        if (row < rows) g.store_to(dx + row * width, width);
    }
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
#pragma unroll
        for (int which = 0; which < 2; which++) {
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                parts[threadIdx.x / LANES][threadIdx.x % LANES * WIDE + i] = which == 0 ? dw.x[p][i] : db.x[p][i];
            }
            __syncthreads();
            for (int i = threadIdx.x; i < LANES * WIDE && p * LANES * WIDE + i < width; i += THREADS) {
                float sum = 0.0f;
                for (int group = 0; group < GROUPS; group++) sum += parts[group][i];
                sums[((long long)blockIdx.x * 2 + which) * width + p * LANES * WIDE + i] = sum;
            }
            __syncthreads();
        }
    }
}
