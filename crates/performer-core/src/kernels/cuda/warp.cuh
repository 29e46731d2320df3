// Hardware instructions as functions, one each: conversions, exponentials, matrix fragments and
// their products. Those of warpgroups are in warpgroup.cuh; the rest of the kernels is C++ without
// assembly. tests/cuda_host/device.h implements the same functions on a CPU, lane by lane.
//
// The source is compiled at run time, where no toolkit's headers exist: nothing is included.

// OFFSET is where a field lies in a struct, in bytes. The compiler at run time knows neither
// offsetof nor the header that defines it.
#ifdef __CUDACC_RTC__
#define OFFSET(type, field) ((unsigned long long)__INTADDR__(&((type*)0)->field))
#else
#define OFFSET(type, field) __builtin_offsetof(type, field)
#endif

#ifndef PERFORMER_WARP
#define PERFORMER_WARP

// Half and Bfloat hold the bits of an f16 and of a bf16 number.
struct Half { unsigned short bits; };
struct Bfloat { unsigned short bits; };

__device__ inline float infinity() { return __uint_as_float(0x7f800000u); }

// Converts a stored number to f32, exactly.
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }
__device__ inline float widen(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// Rounds an f32 number to a stored one.
__device__ inline void narrow(float x, float& to) { to = x; }
__device__ inline void narrow(float x, Half& to) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }
__device__ inline void narrow(float x, Bfloat& to) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x)); }

// Rounds to the nearest number with the 10 bits of a TF32 mantissa.
__device__ inline unsigned tf32(float x) {
    unsigned y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

// Computes 2^x; results below the normal numbers are 0.
__device__ inline float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Computes the logarithm to base 2.
__device__ inline float logarithm(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Rounds two numbers and packs them into one word, the first in the lower half.
__device__ inline unsigned pack_bf16(float x, float y) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ inline unsigned pack_f16(float x, float y) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(y), "f"(x));
    return pair;
}

__device__ inline float from_lane_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
__device__ inline float from_lane(float x, int lane) { return __shfl_sync(~0u, x, lane); }

// Returns a bit for each lane of the warp: whether the condition holds there.
__device__ inline unsigned lanes_where(bool condition) { return __ballot_sync(~0u, condition); }

// Loads numbers that no thread of the kernel writes. Those of `load_constant`, read again and
// again, stay in the first-level cache; those of `load_once` do not push others out, and may be
// asked for early.
__device__ inline uint4 load_constant(const uint4* at) {
    uint4 x;
    asm("ld.global.nc.L1::evict_last.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}
__device__ inline uint4 load_once(const uint4* at) {
    uint4 x;
    asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(at));
    return x;
}
// Starts to copy 16 bytes (or zeros) to shared memory while the thread goes on. They are there once
// `wait_for_copies` of their group has returned and a barrier has passed.
__device__ inline void copy_on(void* to, const void* from, bool has) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 : : "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "r"(has ? 16 : 0) : "memory");
}
// Ends a group of a thread's copies.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
// Waits for all groups of the thread's copies but the last `PENDING`.
template <int PENDING>
__device__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory"); }

// Prefetches a cache line into the second-level cache.
__device__ inline void ask_for(const void* at) { asm volatile("prefetch.global.L2 [%0];" : : "l"(at)); }

// Loads four 8x8 matrices of 16-bit numbers; lane 8i + r points to row r of matrix i. Lane l gets
// entries 2(l%4) and 2(l%4) + 1 of row l/4 of each, or of column l/4 where they are transposed.
__device__ inline void load_matrices(unsigned (&to)[4], const void* row, bool transposed) {
    unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (transposed) {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    } else {
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(at) : "memory");
    }
}

// Computes c += a b for a 16x16 and b 16x8, of bf16.
__device__ inline void multiply_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Computes c += a b for a 16x16 and b 16x8, of f16.
__device__ inline void multiply_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Computes c += a b for a 16x8 and b 8x8, of TF32.
__device__ inline void multiply_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#endif
