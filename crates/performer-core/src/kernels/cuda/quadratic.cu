// Polynomial features of rows x (.., D) times a scale, whose products are 1 + z + c z^2 with
// z = scale^2 x.y, and their gradient:
//
//   forward:  x (rows, D) -> with s = scale x: [1, s_i, w_ij s_i s_j for i <= j, zeros] (rows, W)
//   backward: g (rows, W), x -> dx (rows, D)
//
// with w_ii = sqrt(c) and w_ij = sqrt(2c). There are F = 1 + D + D(D+1)/2 features; W is F, or more
// where zeros follow. All is computed in f32.
//
// Macros: STORAGE as in stored.cuh, for x, the features and both gradients.

#include "stored.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
// The rows of a warp of the forward kernel.
constexpr int ROWS = 8;

// The place of the product of x_i with itself.
__device__ inline int square_of(int i, int dim) { return 1 + dim + i * dim - i * (i - 1) / 2; }

// Returns i of the product x_i x_j that stands at `place`, which is above dim: the solution of
// square_of(i, dim) = place, rounded down. With up to hundreds of dimensions all numbers under the
// root are exact in f32, and where j = i the root is a whole number.
__device__ inline int first_factor(int place, int dim) {
    float b = 2 * dim + 1, behind = place - 1 - dim;
    return (int)((b - sqrtf(b * b - 8 * behind)) / 2);
}

// Computes features: a lane has some columns of ROWS rows, so that which numbers it multiplies is
// found once for all of them.
extern "C" __global__ void __launch_bounds__(THREADS)
quadratic_features(long long rows, int dim, int width, float c, float scale, const Stored* x, Stored* out) {
    long long first = ((long long)blockIdx.x * WARPS + threadIdx.x / 32) * ROWS;
    int count = (int)min((long long)ROWS, rows - first);
    if (count <= 0) return;
    x += first * dim;
    out += first * width;
    float square = sqrtf(c), cross = sqrtf(2.0f * c);
    int features = square_of(dim, dim);
    for (int column = threadIdx.x % 32; column < width; column += 32) {
        // A feature is 1, s_i, factor s_i s_j, or 0.
        bool linear = column <= dim, none = column == 0 || column >= features;
        int i = none ? 0 : linear ? column - 1 : first_factor(column, dim);
        int j = none || linear ? i : i + column - square_of(i, dim);
        float factor = i == j ? square : cross;
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
            if (row >= count) break;
            float a = scale * widen(x[row * dim + i]), b = scale * widen(x[row * dim + j]);
            float feature = column == 0 ? 1.0f : none ? 0.0f : linear ? a : factor * a * b;
            narrow(feature, out[(long long)row * width + column]);
        }
    }
}

// Computes dx; a thread has one number.
extern "C" __global__ void __launch_bounds__(THREADS)
quadratic_gradient(long long rows, int dim, int width, float c, float scale, const Stored* x, const Stored* grad, Stored* dx) {
    long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= rows * dim) return;
    long long row = index / dim;
    int i = (int)(index % dim);
    x += row * dim;
    grad += row * width;
    float square = sqrtf(c), cross = sqrtf(2.0f * c);
    float sum = widen(grad[1 + i]);
    for (int j = 0; j < dim; j++) {
        int low = min(i, j), high = max(i, j);
        float factor = i == j ? 2.0f * square : cross;
        sum += factor * widen(grad[square_of(low, dim) + high - low]) * (scale * widen(x[j]));
    }
    narrow(scale * sum, dx[index]);
}
