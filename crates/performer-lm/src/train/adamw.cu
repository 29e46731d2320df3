// One step of AdamW for one parameter, and the sum of squares of a gradient; f32.

constexpr int THREADS = 256;

// p, m and v change in place.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw(long long count, float scale, float beta1, float rest1, float beta2, float rest2, float step_size, float correction, float eps,
      float decay, float* p, float* m, float* v, const float* gradient) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float g = gradient[i] * scale;
    float a = beta1 * m[i] + rest1 * g, b = beta2 * v[i] + rest2 * (g * g);
    m[i] = a;
    v[i] = b;
    p[i] -= decay * p[i] + step_size * a / (sqrtf(correction * b) + eps);
}

// Each block adds up the squares of its share of x and leaves the sum in `sums`, from `first` on:
// always the same blocks, always in the same order.
extern "C" __global__ void __launch_bounds__(THREADS)
sum_of_squares(long long count, long long first, const float* x, float* sums) {
    __shared__ float parts[THREADS];
    float sum = 0.0f;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < count; i += (long long)gridDim.x * THREADS) {
        sum += x[i] * x[i];
    }
    parts[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    if (threadIdx.x == 0) sums[first + blockIdx.x] = parts[0];
}
