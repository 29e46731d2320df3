// A Metal device emulated on one CPU thread, for the kernel in src/kernels/metal: what Metal's
// language and library have beyond C++, on the threads, barriers and poisoned memory of
// cuda_host/device.h. A simdgroup matrix is two numbers in each lane, in an order of its own; lanes
// load and store theirs as they come, and wait for each other only where matrices are multiplied
// and at barriers.
//
// It shows that the logic is right, not that Apple's compiler takes it, and nothing about speed.

#pragma once
#include "../cuda_host/device.h"

#define kernel
#define device
#define constant
#define threadgroup
#define thread

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned uint;
typedef unsigned long ulong;
struct ulong2 { ulong x, y; ulong2(ulong x, ulong y) : x(x), y(y) {} };

struct half {
    Half stored;
    half() = default;
    explicit half(float x) { narrow(x, stored); }
    operator float() const { return widen(stored); }
};

template <class To, class From>
To as_type(From x) {
    static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
    To y;
    std::memcpy(&y, &x, sizeof(To));
    return y;
}

namespace precise {
inline float exp2(float x) { return power_of_two(x); }
}  // namespace precise

#define THREADGROUP_MEMORY(type, name) type& name = *(type*)shared_memory

enum class mem_flags { mem_threadgroup };
inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

namespace host {

// Gives every lane the reduction of all numbers by `op`.
template <class T, class Op>
T reduce(const char* doing, T x, Op op) {
    T slot = x;
    together(doing, 0, slot, [&](T** all) {
        T result = *all[0];
        for (int lane = 1; lane < 32; lane++) result = op(result, *all[lane]);
        for (int lane = 0; lane < 32; lane++) *all[lane] = result;
    });
    return slot;
}

}  // namespace host

inline float simd_sum(float x) { return host::reduce("simd_sum", x, [](float a, float b) { return a + b; }); }
inline float simd_max(float x) { return host::reduce("simd_max", x, [](float a, float b) { return max(a, b); }); }
inline int simd_min(int x) { return host::reduce("simd_min", x, [](int a, int b) { return min(a, b); }); }
inline bool simd_all(bool x) { return host::reduce("simd_all", (int)x, [](int a, int b) { return a & b; }); }

struct simdgroup_float8x8 { float x[2]; };

namespace host {

// The memory that a threadgroup may have on Apple's devices.
constexpr size_t THREADGROUP_BYTES = 32 << 10;

// The place in the matrix of a lane's i-th number. It is not Apple's order, on which nothing may
// depend.
inline int place(int lane, int i) { return (lane * 2 + i) * 29 % 64; }

// Calls `f(number, its row, its column)` for the two numbers of the lane.
template <class Matrix, class F>
void each(Matrix& matrix, F f) {
    for (int i = 0; i < 2; i++) f(matrix.x[i], place(running % 32, i) / 8, place(running % 32, i) % 8);
}

// Fails if a matrix lies beyond the memory of a threadgroup.
inline const float* within(const float* at) {
    const char* byte = (const char*)at;
    bool shared = byte >= (char*)shared_memory && byte < (char*)shared_memory + SHARED_BYTES;
    if (shared && byte + 4 > (char*)shared_memory + THREADGROUP_BYTES) fail("a matrix outside of threadgroup memory");
    return at;
}

}  // namespace host

template <class T, int Columns, int Rows>
simdgroup_float8x8 make_filled_simdgroup_matrix(T x) { return {{x, x}}; }

inline void simdgroup_load(simdgroup_float8x8& to, const float* from, ulong stride, ulong2 origin = ulong2(0, 0), bool transposed = false) {
    if (origin.x || origin.y) host::fail("an origin is not emulated");
    host::each(to, [&](float& x, int row, int column) {
        x = *host::within(from + (transposed ? column * stride + row : row * stride + column));
    });
}

inline void simdgroup_store(const simdgroup_float8x8& from, float* to, ulong stride) {
    host::each(from, [&](float x, int row, int column) {
        host::within(to + row * stride + column);
        to[row * stride + column] = x;
    });
}

inline void simdgroup_multiply_accumulate(simdgroup_float8x8& to, const simdgroup_float8x8& a, const simdgroup_float8x8& b,
                                          const simdgroup_float8x8& c) {
    struct { simdgroup_float8x8 *to, a, b, c; } slot = {&to, a, b, c};
    host::together("simdgroup_multiply_accumulate", 0, slot, [](auto** all) {
        float left[64], right[64];
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 2; i++) {
                left[host::place(lane, i)] = all[lane]->a.x[i];
                right[host::place(lane, i)] = all[lane]->b.x[i];
            }
        }
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 2; i++) {
                int row = host::place(lane, i) / 8, column = host::place(lane, i) % 8;
                float sum = all[lane]->c.x[i];
                for (int k = 0; k < 8; k++) sum += left[row * 8 + k] * right[k * 8 + column];
                all[lane]->to->x[i] = sum;
            }
        }
    });
}

inline void simdgroup_multiply(simdgroup_float8x8& to, const simdgroup_float8x8& a, const simdgroup_float8x8& b) {
    simdgroup_multiply_accumulate(to, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f));
}
