// The gradient of an embedding: row v is the sum of the gradients of all positions that hold token
// v, in their order, so that it is the same every time. A block has one token of the vocabulary; it
// looks through all positions, which lie in the second-level cache.
//
//   ids (count), grad (count, width) -> out (vocabulary, width)

#include "stored.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

// Computes one row of the gradient.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward(int count, int width, const unsigned* ids, const Stored* grad, float* out) {
    __shared__ int found[THREADS];
    __shared__ int counts[WARPS];
    unsigned token = blockIdx.x;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    out += (long long)token * width;
    for (int column = threadIdx.x; column < width; column += THREADS) out[column] = 0.0f;
    for (int start = 0; start < count; start += THREADS) {
        int position = start + threadIdx.x;
        bool here = position < count && ids[position] == token;
        unsigned lanes = lanes_where(here);
        if (lane == 0) counts[warp] = __popc(lanes);
        __syncthreads();
        int before = __popc(lanes & ((1u << lane) - 1)), all = 0;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) before += counts[i];
            all += counts[i];
        }
        if (here) found[before] = position;
        __syncthreads();
        for (int column = threadIdx.x; all > 0 && column < width; column += THREADS) {
            float sum = out[column];
            for (int i = 0; i < all; i++) sum += widen(grad[(long long)found[i] * width + column]);
            out[column] = sum;
        }
        __syncthreads();
    }
}
