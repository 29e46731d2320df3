// GELU (tanh form) and SwiGLU, element by element, and their gradients. All tensors of a kernel
// have one shape; a thread has one element.

#include "stored.cuh"

constexpr int THREADS = 256;

// Computes 1/(1 + e^-x), with an exponent of at most 0.
__device__ inline float sigmoid(float x) {
    float e = power_of_two(-1.4426950408889634f * fabsf(x));
    float below = e / (1.0f + e);
    return x < 0.0f ? below : 1.0f - below;
}

constexpr float TWICE_SQRT_2_OVER_PI = 1.5957691216057308f, CUBIC = 0.044715f;

// Computes out = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)).
extern "C" __global__ void __launch_bounds__(THREADS) gelu_forward(long long count, const Stored* x, Stored* out) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float a = widen(x[i]);
    narrow(a * sigmoid(TWICE_SQRT_2_OVER_PI * (a + CUBIC * a * a * a)), out[i]);
}

// Computes dx, the gradient of GELU.
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward(long long count, const Stored* x, const Stored* grad, Stored* dx) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float a = widen(x[i]);
    float s = sigmoid(TWICE_SQRT_2_OVER_PI * (a + CUBIC * a * a * a));
    float slope = s + a * s * (1.0f - s) * TWICE_SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * a * a);
    narrow(widen(grad[i]) * slope, dx[i]);
}

// Computes out = gate sigmoid(gate) up.
extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward(long long count, const Stored* gate, const Stored* up, Stored* out) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float a = widen(gate[i]);
    narrow(a * sigmoid(a) * widen(up[i]), out[i]);
}

// Computes the gradients of SwiGLU's gate and up.
extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_backward(long long count, const Stored* gate, const Stored* up, const Stored* grad, Stored* dgate, Stored* dup) {
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (i >= count) return;
    float a = widen(gate[i]), s = sigmoid(a), g = widen(grad[i]);
    narrow(g * a * s, dup[i]);
    narrow(g * widen(up[i]) * (s + a * s * (1.0f - s)), dgate[i]);
}
