// The type that tensors hold, by the macro STORAGE: 0 f32, 1 f16, 2 bf16. For kernels without
// tensor cores; those with tensor cores include tile.cuh instead.

#ifndef PERFORMER_STORED
#define PERFORMER_STORED

#include "warp.cuh"

#if STORAGE == 0
typedef float Stored;
#elif STORAGE == 1
typedef Half Stored;
#else
typedef Bfloat Stored;
#endif

// The numbers of 16 bytes, the most that a thread loads or stores at once.
constexpr int WIDE = 16 / sizeof(Stored);

union Vector {
    uint4 bits;
    Stored numbers[WIDE];
};

// Loads or stores N numbers: WIDE of them at once, at a multiple of 16 bytes, or each on its own.
template <int N>
__device__ inline void load(const Stored* from, float (&x)[N]) {
    if (N == WIDE) {
        Vector all;
        all.bits = *(const uint4*)from;
        for (int i = 0; i < N; i++) x[i] = widen(all.numbers[i % WIDE]);
    } else {
        for (int i = 0; i < N; i++) x[i] = widen(from[i]);
    }
}
template <int N>
__device__ inline void store(const float (&x)[N], Stored* to) {
    if (N == WIDE) {
        Vector all;
        for (int i = 0; i < N; i++) narrow(x[i], all.numbers[i % WIDE]);
        *(uint4*)to = all.bits;
    } else {
        for (int i = 0; i < N; i++) narrow(x[i], to[i]);
    }
}

#endif
