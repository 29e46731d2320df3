// Kernels with an error each, of the kinds that the emulated device is to catch: `planted KIND
// MODE` runs one and writes its results to stdout, where it comes that far. MODE is a sum: 1 lets
// fibers run in descending order, 2 lets products cut off what tensor cores cut off.

#include "device.h"

#include <string>

constexpr int THREADS = 128;

// Reads 16 bytes from an address that is a multiple of 4 only.
static void misaligned(const float* from, float* to) {
    uint4 x = *(const uint4*)(from + 1 + threadIdx.x);
    to[threadIdx.x] = __uint_as_float(x.x);
}

// One half of a warp exchanges numbers here, the other there.
static void diverging(const float* from, float* to) {
    float x = from[threadIdx.x];
    if (threadIdx.x % 32 < 16) {
        x = from_lane_xor(x, 1);
    } else {
        x = from_lane_xor(x, 1);
    }
    to[threadIdx.x] = x;
}

// One half of a warp waits here, the other there.
static void split_barrier(const float* from, float* to) {
    if (threadIdx.x % 32 < 16) {
        __syncthreads();
    } else {
        __syncthreads();
    }
    to[threadIdx.x] = from[threadIdx.x];
}

// Reads what another thread writes, without a barrier in between.
static void racing(const float* from, float* to) {
    float* shared = (float*)shared_memory;
    shared[threadIdx.x] = from[threadIdx.x];
    to[threadIdx.x] = shared[THREADS - 1 - threadIdx.x];
    __syncthreads();
}

// Reads what another lane of the warp wrote, without __syncwarp in between; in the emulation all
// lanes have written by then.
static void within_a_warp(const float* from, float* to) {
    float* shared = (float*)shared_memory;
    shared[threadIdx.x] = from_lane_xor(from[threadIdx.x], 1);
    float other = from_lane_xor(1.0f, 1);
    to[threadIdx.x] = other * shared[threadIdx.x ^ 1];
}

// Exchanges numbers between lanes and between warps with all the barriers that this needs, and then
// again in the same memory. It has no error.
static void ordered(const float* from, float* to) {
    float* shared = (float*)shared_memory;
    for (int turn = 0; turn < 4; turn++) {
        shared[threadIdx.x] = from[threadIdx.x];
        __syncwarp();
        float x = shared[threadIdx.x ^ 1];
        __syncthreads();
        shared[THREADS - 1 - threadIdx.x] = x;
        __syncthreads();
        to[threadIdx.x] = shared[threadIdx.x];
        __syncthreads();
    }
}

// Reads a copy that was not waited for.
static void too_early(const float* from, float* to) {
    float* shared = (float*)shared_memory;
    copy_on(shared + 4 * threadIdx.x, from + 4 * threadIdx.x, true);
    end_copies();
    to[threadIdx.x] = shared[4 * threadIdx.x];
    wait_for_copies<0>();
}

// Multiplies ones by ones, by all warps or by the first alone; the sums are read before they are
// waited for, or the registers are not made ready.
template <bool BEGINS, bool WAITS, bool ALL>
static void by_groups(const float*, float* to) {
    unsigned short* shared = (unsigned short*)shared_memory;
    for (int i = threadIdx.x; i < 64 * 64; i += THREADS) shared[i] = 0x3f80;
    share_with_products();
    __syncthreads();
    float sums[32] = {}, result = 0;
    const unsigned ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
    if (BEGINS) begin_products(sums);
    if (ALL || threadIdx.x < 32) multiply_group<false>(sums, ones, matrix_at(shared, 0));
    if (!WAITS) result = sums[0];
    wait_for_products(sums);
    __syncthreads();
    to[threadIdx.x] = WAITS ? sums[0] : result;
}

// Adds up 16,000 products in an accumulator; the result is divided by what is right.
static void long_sum(const float*, float* to) {
    float sum[4] = {};
    double right = 0;
    for (unsigned i = 0; i < 2000; i++) {
        unsigned x = tf32(1.0f + (i * 37 % 101) / 101.0f), y = tf32(1.1f), a[4] = {x, x, x, x}, b[2] = {y, y};
        multiply_tf32(sum, a, b);
        right += 8.0 * __uint_as_float(x) * __uint_as_float(y);
    }
    to[threadIdx.x] = (float)(sum[0] / right);
}

int main(int count, char** arguments) {
    if (count != 3) {
        std::fprintf(stderr, "usage: planted KIND MODE\n");
        return 2;
    }
    std::string kind = arguments[1];
    int mode = std::atoi(arguments[2]);
    host::descending = mode & 1, host::truncating = mode & 2;
    std::vector<float> from(8 * THREADS), to(THREADS, NAN);
    for (size_t i = 0; i < from.size(); i++) from[i] = (float)i;
    auto kernel = kind == "misaligned"      ? misaligned
                  : kind == "diverging"     ? diverging
                  : kind == "split_barrier" ? split_barrier
                  : kind == "racing"        ? racing
                  : kind == "within_a_warp" ? within_a_warp
                  : kind == "ordered"       ? ordered
                  : kind == "too_early"     ? too_early
                  : kind == "not_begun"     ? by_groups<false, true, true>
                  : kind == "not_all"       ? by_groups<true, true, false>
                  : kind == "not_waited"    ? by_groups<true, false, true>
                  : kind == "products"      ? by_groups<true, true, true>
                                            : long_sum;
    host::launch({1, 1, 1}, THREADS, kernel, (const float*)from.data(), to.data());
    return std::fwrite(to.data(), sizeof(float), to.size(), stdout) == to.size() ? 0 : 2;
}
