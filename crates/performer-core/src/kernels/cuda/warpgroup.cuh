// What a group of four warps does together on Hopper, as functions, one instruction each: products
// of 64 rows, whose right factor the tensor cores read from shared memory by themselves, while the
// warps go on. tests/cuda_host/device.h implements the same functions on a CPU.
//
// Products are started after `begin_products`, and their sums are there after `wait_for_products`;
// until then neither they nor a left factor in registers may be touched. Products see what threads
// wrote to shared memory once the writers have called `share_with_products` and passed a barrier.

#ifndef PERFORMER_WARPGROUP
#define PERFORMER_WARPGROUP

#include "warp.cuh"

// SharedMatrix describes 16-bit numbers in shared memory to the tensor cores: where they begin, and
// how they lie. Rows have 64 numbers, 128 bytes, and follow each other; the pieces of 16 bytes of a
// row are permuted by the row's number, see `Swizzled`. Eight rows are 1,024 bytes, and the first
// of eight must begin at a multiple of that.
typedef unsigned long long SharedMatrix;

// Describes the rows that begin `bytes` after `first`, both multiples of 16 bytes. The fields are
// the place, in units of 16 bytes; the distance between columns of pieces, which this layout does
// not use; the distance between eight rows and the next; and the kind of permutation, 1 for 128
// bytes. Where `bytes` is a constant, this is one addition.
__device__ inline SharedMatrix matrix_at(const void* first, unsigned bytes) {
    unsigned low = ((unsigned)__cvta_generic_to_shared(first) / 16 | 1u << 16) + bytes / 16;
    return (unsigned long long)(1024u / 16 | 1u << 30) << 32 | low;
}

// Makes what the thread wrote to shared memory visible to products, whose reads go another way.
__device__ inline void share_with_products() {
    asm volatile("fence.proxy.async.shared::cta;" : : : "memory");
}
// Keeps the compiler from moving what is done with sums past this.
template <int N>
__device__ void pin(float (&c)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(c[i]) : : "memory");
}
// Makes what the threads wrote to registers visible to products that add to `c`.
template <int N>
__device__ void begin_products(float (&c)[N]) {
    pin(c);
    asm volatile("wgmma.fence.sync.aligned;" : : : "memory");
}
// Waits for all products that the warp has started, which add to `c`.
template <int N>
__device__ void wait_for_products(float (&c)[N]) {
    asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" : : : "memory");
    pin(c);
}

// The sums of a lane as operands of an instruction: their numbers, and the registers.
#define FIRST_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NEXT_32 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SUMS_4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SUMS_32(i) \
    SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12), SUMS_4(i + 16), SUMS_4(i + 20), \
    SUMS_4(i + 24), SUMS_4(i + 28)
// Adds to the sums, instead of beginning them.
#define ADD "{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\n"

// Start c += a b, of bf16, for 16 terms. Each warp has 16 rows of `c` and of a left factor in
// registers, as in `multiply_bf16`; the columns of `c` are in tiles of eight. A left factor in
// shared memory has a row for each row of `c`. The right one has a row for each column, or, where
// it is TRANSPOSED, a row for each term.
template <bool TRANSPOSED>
__device__ void multiply_group(float (&c)[32], const unsigned (&a)[4], SharedMatrix b) {
    asm volatile(ADD "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32 "}, "
                     "{%32, %33, %34, %35}, %36, add, 1, 1, %37;\n}"
                 : SUMS_32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)TRANSPOSED));
}
template <bool TRANSPOSED>
__device__ void multiply_group(float (&c)[64], const unsigned (&a)[4], SharedMatrix b) {
    asm volatile(ADD "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FIRST_32 ", " NEXT_32
                     "}, {%64, %65, %66, %67}, %68, add, 1, 1, %69;\n}"
                 : SUMS_32(0), SUMS_32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)TRANSPOSED));
}
__device__ inline void multiply_group(float (&c)[32], SharedMatrix a, SharedMatrix b) {
    asm volatile(ADD "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32 "}, "
                     "%32, %33, add, 1, 1, 0, 0;\n}"
                 : SUMS_32(0)
                 : "l"(a), "l"(b));
}

#endif
