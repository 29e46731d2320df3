// Cross-entropy over rows of logits; a block has one row.
//
//   forward:  logits (rows, V), targets (rows) -> losses (rows), logs (rows)
//   backward: logits, targets, logs, grads (rows) -> gradients in place of the logits (rows, V)
//
// The kernels `_wide` read and write 16 bytes at a time, WIDE numbers: V is a multiple of WIDE, and
// the logits begin at a multiple of 16 bytes. Launch: one block of THREADS threads for each row.

#include "stored.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr float LOG2E = 1.4426950408889634f;

// FLOOR is below every finite logit that occurs, and finite: -inf - FLOOR is -inf and not NaN.
constexpr float FLOOR = -3e38f;

// Adds the sum of exponentials s2, relative to m2, to s, relative to m; the result is relative to
// the larger of the two.
__device__ inline void merge(float& m, float& s, float m2, float s2) {
    float larger = fmaxf(m, m2);
    s = s * power_of_two((m - larger) * LOG2E) + s2 * power_of_two((m2 - larger) * LOG2E);
    m = larger;
}

// Computes logs, the logarithms of the sums of e^logit, and losses = logs - the target's logit.
template <int N>
__device__ inline void forward(int vocabulary, const Stored* logits, const unsigned* targets, float* losses, float* logs) {
    __shared__ float maxima[WARPS], sums[WARPS];
    logits += (long long)blockIdx.x * vocabulary;
    float m = FLOOR, s = 0.0f;
    for (int i = threadIdx.x * N; i < vocabulary; i += THREADS * N) {
        float x[N], larger = m;
        load<N>(logits + i, x);
        for (int k = 0; k < N; k++) larger = fmaxf(larger, x[k]);
        s *= power_of_two((m - larger) * LOG2E);
        for (int k = 0; k < N; k++) s += power_of_two((x[k] - larger) * LOG2E);
        m = larger;
    }
    for (int mask = 16; mask > 0; mask /= 2) {
        float m2 = from_lane_xor(m, mask), s2 = from_lane_xor(s, mask);
        merge(m, s, m2, s2);
    }
    if (threadIdx.x % 32 == 0) {
        maxima[threadIdx.x / 32] = m;
        sums[threadIdx.x / 32] = s;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < WARPS; i++) merge(m, s, maxima[i], sums[i]);
        float log = m + logf(s);
        logs[blockIdx.x] = log;
        losses[blockIdx.x] = log - widen(logits[targets[blockIdx.x]]);
    }
}

// Replaces logits by their gradients, grad (softmax - onehot).
template <int N>
__device__ inline void backward(int vocabulary, Stored* logits, const unsigned* targets, const float* logs, const float* grads) {
    logits += (long long)blockIdx.x * vocabulary;
    float log = logs[blockIdx.x], grad = grads[blockIdx.x];
    int target = (int)targets[blockIdx.x];
    for (int i = threadIdx.x * N; i < vocabulary; i += THREADS * N) {
        float x[N];
        load<N>(logits + i, x);
        for (int k = 0; k < N; k++) {
            float p = power_of_two((x[k] - log) * LOG2E);
            x[k] = grad * (i + k == target ? p - 1.0f : p);
        }
        store<N>(x, logits + i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_forward(int vocabulary, const Stored* logits, const unsigned* targets, float* losses, float* logs) {
    forward<1>(vocabulary, logits, targets, losses, logs);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_forward_wide(int vocabulary, const Stored* logits, const unsigned* targets, float* losses, float* logs) {
    forward<WIDE>(vocabulary, logits, targets, losses, logs);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_backward(int vocabulary, Stored* logits, const unsigned* targets, const float* logs, const float* grads) {
    backward<1>(vocabulary, logits, targets, logs, grads);
}

extern "C" __global__ void __launch_bounds__(THREADS)
cross_entropy_backward_wide(int vocabulary, Stored* logits, const unsigned* targets, const float* logs, const float* grads) {
    backward<WIDE>(vocabulary, logits, targets, logs, grads);
}
