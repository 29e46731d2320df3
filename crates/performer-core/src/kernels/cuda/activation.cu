// Operations number by number:
//
//   gelu_forward          x        -> out = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)), tanh GELU
//   swiglu_forward        gate, up -> out = gate sigmoid(gate) up
//   sigmoid_gate_forward  gate, x  -> out = 2 sigmoid(gate) x, a layer's output gate
//   add                   x, y     -> out = x + y
//
// The kernels `_backward` also get `grad`, the gradient of out, and compute those of the inputs.
//
// All tensors are contiguous and have `count` numbers of type Stored (see stored.cuh). Blocks have
// THREADS threads, and each thread has one number. In the kernels `_wide`, each thread has WIDE
// numbers, which are 16 bytes; `count` is then a multiple of WIDE, and all tensors begin at
// multiples of 16 bytes.

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
template <int N>
__device__ inline void gelu(long long count, const Stored* x, Stored* out) {
    long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    float a[N];
    load<N>(x + i, a);
    for (int k = 0; k < N; k++) a[k] *= sigmoid(TWICE_SQRT_2_OVER_PI * (a[k] + CUBIC * a[k] * a[k] * a[k]));
    store<N>(a, out + i);
}

// Computes dx, the gradient of GELU.
template <int N>
__device__ inline void gelu_gradient(long long count, const Stored* x, const Stored* grad, Stored* dx) {
    long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    float a[N], g[N];
    load<N>(x + i, a);
    load<N>(grad + i, g);
    for (int k = 0; k < N; k++) {
        float s = sigmoid(TWICE_SQRT_2_OVER_PI * (a[k] + CUBIC * a[k] * a[k] * a[k]));
        // Where the second term is 0 by far, its last factor must not be infinite.
        float x = fminf(fmaxf(a[k], -100.0f), 100.0f);
        g[k] *= s + x * s * (1.0f - s) * TWICE_SQRT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
    }
    store<N>(g, dx + i);
}

// Swiglu and OutputGate are the two kinds of gates. A gate multiplies x by `factor`, of the gate's
// input a and s = sigmoid(a); `slope` is the derivative of `factor` by a.
struct Swiglu {
    static __device__ float factor(float a, float s) { return a * s; }
    static __device__ float slope(float a, float s) { return s + a * s * (1.0f - s); }
};
struct OutputGate {
    static __device__ float factor(float, float s) { return 2.0f * s; }
    static __device__ float slope(float, float s) { return 2.0f * s * (1.0f - s); }
};

// Computes out = factor(gate) x.
template <class Gate, int N>
__device__ inline void gated(long long count, const Stored* gate, const Stored* x, Stored* out) {
    long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    float a[N], u[N];
    load<N>(gate + i, a);
    load<N>(x + i, u);
    for (int k = 0; k < N; k++) u[k] *= Gate::factor(a[k], sigmoid(a[k]));
    store<N>(u, out + i);
}

// Computes the gradients of a gate and of what it multiplies.
template <class Gate, int N>
__device__ inline void
gated_gradients(long long count, const Stored* gate, const Stored* x, const Stored* grad, Stored* dgate, Stored* dx) {
    long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    float a[N], u[N], g[N];
    load<N>(gate + i, a);
    load<N>(x + i, u);
    load<N>(grad + i, g);
    for (int k = 0; k < N; k++) {
        float s = sigmoid(a[k]);
        u[k] *= g[k] * Gate::slope(a[k], s);
        g[k] *= Gate::factor(a[k], s);
    }
    store<N>(u, dgate + i);
    store<N>(g, dx + i);
}

// Computes out = x + y.
template <int N>
__device__ inline void sum(long long count, const Stored* x, const Stored* y, Stored* out) {
    long long i = ((long long)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    float a[N], b[N];
    load<N>(x + i, a);
    load<N>(y + i, b);
    for (int k = 0; k < N; k++) a[k] += b[k];
    store<N>(a, out + i);
}

extern "C" __global__ void __launch_bounds__(THREADS) gelu_forward(long long count, const Stored* x, Stored* out) {
    gelu<1>(count, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS) gelu_forward_wide(long long count, const Stored* x, Stored* out) {
    gelu<WIDE>(count, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward(long long count, const Stored* x, const Stored* grad, Stored* dx) {
    gelu_gradient<1>(count, x, grad, dx);
}

extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward_wide(long long count, const Stored* x, const Stored* grad, Stored* dx) {
    gelu_gradient<WIDE>(count, x, grad, dx);
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward(long long count, const Stored* gate, const Stored* up, Stored* out) {
    gated<Swiglu, 1>(count, gate, up, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward_wide(long long count, const Stored* gate, const Stored* up, Stored* out) {
    gated<Swiglu, WIDE>(count, gate, up, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_backward(long long count, const Stored* gate, const Stored* up, const Stored* grad, Stored* dgate, Stored* dup) {
    gated_gradients<Swiglu, 1>(count, gate, up, grad, dgate, dup);
}

extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_backward_wide(long long count, const Stored* gate, const Stored* up, const Stored* grad, Stored* dgate, Stored* dup) {
    gated_gradients<Swiglu, WIDE>(count, gate, up, grad, dgate, dup);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sigmoid_gate_forward(long long count, const Stored* gate, const Stored* x, Stored* out) {
    gated<OutputGate, 1>(count, gate, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sigmoid_gate_forward_wide(long long count, const Stored* gate, const Stored* x, Stored* out) {
    gated<OutputGate, WIDE>(count, gate, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sigmoid_gate_backward(long long count, const Stored* gate, const Stored* x, const Stored* grad, Stored* dgate, Stored* dx) {
    gated_gradients<OutputGate, 1>(count, gate, x, grad, dgate, dx);
}

extern "C" __global__ void __launch_bounds__(THREADS)
sigmoid_gate_backward_wide(long long count, const Stored* gate, const Stored* x, const Stored* grad, Stored* dgate, Stored* dx) {
    gated_gradients<OutputGate, WIDE>(count, gate, x, grad, dgate, dx);
}

extern "C" __global__ void __launch_bounds__(THREADS)
add(long long count, const Stored* x, const Stored* y, Stored* out) {
    sum<1>(count, x, y, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
add_wide(long long count, const Stored* x, const Stored* y, Stored* out) {
    sum<WIDE>(count, x, y, out);
}
