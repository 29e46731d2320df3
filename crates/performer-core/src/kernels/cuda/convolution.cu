// Short convolutions along tokens: each channel has a filter of four taps, whose last is the
// token's own, and rows before the first and gradients after the last are zeros.
//
//   x (B, T, C), w (C, 4) -> y_t = sum_j w_j x_(t-3+j) (B, T, C)
//   x, w, g (B, T, C)     -> dx_s = sum_j w_j g_(s+3-j) (B, T, C)
//                            dw_j = sum_s x_s g_(s+3-j), of each run of tokens,
//                            (B ceil(T/RUN_LENGTH), C, 4)
//
// A thread has some channels of a run of RUN_LENGTH tokens, and keeps the rows that the next ones
// need, so that each number is read once. A thread of the kernels `_wide` has 16 bytes of a row,
// and all addresses are multiples of 16 bytes; a thread of the others has one number. Sums are f32.
//
// Macros: STORAGE as in stored.cuh; RUN_LENGTH.

#include "stored.cuh"

constexpr int THREADS = 256, TAPS = 4;

// Place says which channels of which tokens a thread has, if it has any.
struct Place {
    bool has;
    int channel, first, last;
    // The first number of its sequence, at its channel; and its run, counted through the batch.
    long long sequence, run;
};
template <int N>
__device__ inline Place place(int batch, int tokens, int channels) {
    int runs = (tokens + RUN_LENGTH - 1) / RUN_LENGTH, parts = channels / N;
    long long i = (long long)blockIdx.x * THREADS + threadIdx.x;
    Place at;
    at.run = i / parts;
    at.has = at.run < (long long)batch * runs;
    at.channel = (int)(i % parts) * N;
    at.first = (int)(at.run % runs) * RUN_LENGTH;
    at.last = min(tokens, at.first + RUN_LENGTH) - 1;
    at.sequence = at.run / runs * tokens * channels + at.channel;
    return at;
}

// Loads N numbers of a token's row; zeros where the sequence has no such token.
template <int N>
__device__ inline void load_row(const Stored* x, int token, int tokens, int channels, float (&row)[N]) {
    if (token >= 0 && token < tokens) return load<N>(x + (long long)token * channels, row);
    for (int i = 0; i < N; i++) row[i] = 0;
}

// Moves the rows on by one; the first is lost and the last is free.
template <int N>
__device__ inline void move_on(float (&rows)[TAPS][N]) {
#pragma unroll
    for (int j = 0; j + 1 < TAPS; j++) {
#pragma unroll
        for (int i = 0; i < N; i++) rows[j][i] = rows[j + 1][i];
    }
}

// Loads the filters of a thread's N channels from `channel` on.
template <int N>
__device__ inline void load_filters(const float* weight, int channel, float (&taps)[TAPS][N]) {
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < TAPS; j++) taps[j][i] = weight[(channel + i) * TAPS + j];
    }
}

// Computes y of a run of tokens, from the first to the last.
template <int N>
__device__ inline void forward(int batch, int tokens, int channels, const Stored* x, const float* weight, Stored* y) {
    Place at = place<N>(batch, tokens, channels);
    if (!at.has) return;
    float taps[TAPS][N], rows[TAPS][N];
    load_filters(weight, at.channel, taps);
    x += at.sequence, y += at.sequence;
#pragma unroll
    for (int j = 1; j < TAPS; j++) load_row(x, at.first - TAPS + j, tokens, channels, rows[j]);
#pragma unroll 4
    for (int token = at.first; token <= at.last; token++) {
        move_on(rows);
        load_row(x, token, tokens, channels, rows[TAPS - 1]);
        float out[N];
#pragma unroll
        for (int i = 0; i < N; i++) out[i] = taps[0][i] * rows[0][i] + taps[1][i] * rows[1][i] + taps[2][i] * rows[2][i] + taps[3][i] * rows[3][i];
        store(out, y + (long long)token * channels);
    }
}

// Computes dx, and a run's sums for dw (C, 4). Tokens go from the last to the first, so that the
// gradients of the three tokens after each are at hand.
template <int N>
__device__ inline void backward(int batch, int tokens, int channels, const Stored* x, const float* weight, const Stored* grad, Stored* dx, float* sums) {
    Place at = place<N>(batch, tokens, channels);
    if (!at.has) return;
    float taps[TAPS][N], of_taps[TAPS][N], rows[TAPS][N];
    load_filters(weight, at.channel, taps);
    x += at.sequence, grad += at.sequence, dx += at.sequence;
#pragma unroll
    for (int j = 1; j < TAPS; j++) load_row(grad, at.last + TAPS - j, tokens, channels, rows[j]);
#pragma unroll
    for (int i = 0; i < TAPS * N; i++) (&of_taps[0][0])[i] = 0;
#pragma unroll 4
    for (int token = at.last; token >= at.first; token--) {
        float row[N], out[N];
        move_on(rows);
        load_row(grad, token, tokens, channels, rows[TAPS - 1]);
        load_row(x, token, tokens, channels, row);
#pragma unroll
        for (int i = 0; i < N; i++) {
            out[i] = taps[0][i] * rows[0][i] + taps[1][i] * rows[1][i] + taps[2][i] * rows[2][i] + taps[3][i] * rows[3][i];
#pragma unroll
            for (int j = 0; j < TAPS; j++) of_taps[j][i] += row[i] * rows[j][i];
        }
        store(out, dx + (long long)token * channels);
    }
    for (int i = 0; i < N; i++) {
        for (int j = 0; j < TAPS; j++) sums[(at.run * channels + at.channel + i) * TAPS + j] = of_taps[j][i];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
convolve(int batch, int tokens, int channels, const Stored* x, const float* weight, Stored* y) {
    forward<1>(batch, tokens, channels, x, weight, y);
}

extern "C" __global__ void __launch_bounds__(THREADS)
convolve_wide(int batch, int tokens, int channels, const Stored* x, const float* weight, Stored* y) {
    forward<WIDE>(batch, tokens, channels, x, weight, y);
}

extern "C" __global__ void __launch_bounds__(THREADS)
convolution_gradients(int batch, int tokens, int channels, const Stored* x, const float* weight, const Stored* grad, Stored* dx, float* sums) {
    backward<1>(batch, tokens, channels, x, weight, grad, dx, sums);
}

extern "C" __global__ void __launch_bounds__(THREADS)
convolution_gradients_wide(int batch, int tokens, int channels, const Stored* x, const float* weight, const Stored* grad, Stored* dx, float* sums) {
    backward<WIDE>(batch, tokens, channels, x, weight, grad, dx, sums);
}
