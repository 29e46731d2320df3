// A CUDA device emulated on one CPU thread, for the kernels in src/kernels/cuda: blocks run one
// after the other, the threads of a block as fibers that take turns at barriers. What a warp does
// together is emulated lane by lane as the PTX ISA documents it (fragments of mma.m16n8k16 and
// m16n8k8, ldmatrix, wgmma and its descriptors), so a wrong index is a wrong number here too.
// Barriers that some threads miss end the program; fibers may run in either of two orders
// (`descending`), so that a missing barrier shows as two different results. Lanes of a warp that
// come to an instruction for all of them from different lines of the source end it too: a card
// would hang or compute nonsense. Products may cut off what tensor cores cut off (`truncating`).
// Accesses of 8 and 16 bytes that are not aligned are left to the compiler: -fsanitize=alignment.
// races.h has a mode that reports races. planted.cpp has an error of each kind. Whether writers
// call `share_with_products` before products read what they wrote is not checked: a card alone
// shows it.
//
// It stands in for warp.cuh and warpgroup.cuh. It shows that the logic is right, not that a card
// runs it, and nothing about speed.

#pragma once
#define PERFORMER_WARP
#define PERFORMER_WARPGROUP

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

#ifndef RACES
#define RACES 0
#endif
#include "races.h"

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __align__(...)

struct alignas(16) uint4 { unsigned x, y, z, w; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct alignas(8) uint2 { unsigned x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
struct Dim { unsigned x, y, z; };

template <class T>
T max(T a, T b) { return a < b ? b : a; }
template <class T>
T min(T a, T b) { return b < a ? b : a; }

inline Dim threadIdx, blockIdx, gridDim;
// The shared memory that a block may have on an H100.
constexpr size_t SHARED_BYTES = 227 << 10;
alignas(1024) inline uint4 shared_memory[SHARED_BYTES / 16];

namespace host {

// The part of it that a launch asks for.
inline size_t shared_bytes = SHARED_BYTES;

constexpr int MOST_THREADS = 256;
constexpr size_t STACK = 256 << 10;

enum State { READY_TO_RUN, WAITS_FOR_WARP, WAITS_FOR_BLOCK, FINISHED };

// Fiber is a thread of a block: where it stopped, and why.
struct Fiber {
    jmp_buf at;
    State state = FINISHED;
    bool started = false;
    // Never freed, so that the next launch has it; memory that no thread touches costs nothing.
    char* stack = nullptr;
    // In the race mode: where it stopped, and the sanitizer's name for it.
    ucontext_t context;
    void* of_sanitizer = nullptr;
    // The barriers that it has come to: of the block, and of the warp.
    int turn = 0, warp_turn = 0;
};

inline Fiber fibers[MOST_THREADS];
inline jmp_buf scheduler;
inline ucontext_t home;
inline int threads = 0, running = 0;
inline bool descending = false;
// Whether matrix products truncate as tensor cores do.
inline bool truncating = false;
// The kernel with its arguments, and what calls it.
inline const void* body = nullptr;
inline void (*run_body)(const void*) = nullptr;

// Warp holds what the lanes of a warp bring to an operation that they do together.
struct Warp {
    const char* doing = nullptr;
    int line = 0, arrived = 0;
    void* slots[32];
};
inline Warp warps[MOST_THREADS / 32];
inline int at_barrier = 0;
// The lines of the source where threads wait at a barrier.
inline int barrier_lines[MOST_THREADS];
inline Order order_of_block, order_of_warps[MOST_THREADS / 32], order_of_launches;
// What the threads at a barrier say, and what those at the last one said: for __syncthreads_or.
inline int said = 0, heard = 0;

// The copies that a thread has asked for, in groups; the last group is open.
struct Copy { void* to; const void* from; bool has; };
inline std::vector<std::vector<Copy>> copies[MOST_THREADS];
inline void copy(const Copy& c) { c.has ? std::memcpy(c.to, c.from, 16) : std::memset(c.to, 0, 16); }

// GroupProduct is a thread's part of a product of four warps that is under way: its sums, in N
// tiles of eight columns, its two rows of the left factor or where that is, and where the right one
// is.
struct GroupProduct {
    float* c;
    int tiles;
    float left[2][16];
    bool left_is_shared, transposed;
    unsigned long long left_at, right_at;
};
// Group is what a thread has started: the products under way, how many in all, and whether its
// registers are ready for the next.
struct Group {
    std::vector<GroupProduct> products;
    int started = 0;
    bool begun = false;
};
inline Group groups[MOST_THREADS];

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "block (%u, %u), thread %d: %s\n", blockIdx.x, blockIdx.y, running, what);
    std::_Exit(3);
}

#if RACES
inline void* sanitizer_home = nullptr;
#endif

// Runs the kernel in a new fiber.
inline void trampoline() {
    run_body(body);
    order_of_launches.arrive(0);
    const Quiet quiet;
    for (const auto& group : copies[running]) {
        if (!group.empty()) fail("ends while copies are under way");
    }
    if (!groups[running].products.empty()) fail("ends while products are under way");
    fibers[running].state = FINISHED;
#if RACES
    quiet.~Quiet();
    go_to_fiber(sanitizer_home);
    setcontext(&home);
    std::abort();
#else
    _longjmp(scheduler, 1);
#endif
}

// Starts a thread's fiber, or goes on where it stopped. `from` is what stops here, for the race
// mode.
inline void resume(int thread, ucontext_t& from) {
    running = thread;
    threadIdx = {(unsigned)thread, 0, 0};
    Fiber& fiber = fibers[thread];
    if (!RACES && fiber.started) _longjmp(fiber.at, 1);
    bool starts = !fiber.started;
    fiber.started = true;
    if (starts) {
        getcontext(&fiber.context);
        if (!fiber.stack && !(fiber.stack = (char*)std::malloc(STACK))) fail("there is no memory for its stack");
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, trampoline, 0);
    }
#if RACES
    go_to_fiber(fiber.of_sanitizer);
    swapcontext(&from, &fiber.context);
#else
    (void)from;
    setcontext(&fiber.context);
    std::abort();
#endif
}

// Returns the next thread that can run, -1 if none can: in turn after the running one; or, if
// `descending`, one of its warp as long as one can, so that a warp is as far ahead of the others as
// barriers let it.
inline int next() {
    for (int i = 1; i <= 32 && descending; i++) {
        int thread = running / 32 * 32 + (running % 32 + 32 - i % 32) % 32;
        if (thread < threads && fibers[thread].state == READY_TO_RUN) return thread;
    }
    for (int i = 1; i <= threads; i++) {
        int thread = (running + (descending ? threads - i : i)) % threads;
        if (fibers[thread].state == READY_TO_RUN) return thread;
    }
    return -1;
}

// Stops the running thread and lets another run.
inline void wait(State why) {
    Fiber& mine = fibers[running];
    mine.state = why;
    int thread = next();
    if (thread < 0) fail("waits for threads that never come");
    if (RACES || _setjmp(mine.at) == 0) resume(thread, mine.context);
}

// All lanes of a warp come here with something of their own, from one line of the source; the last
// one does the work for all.
template <class T, class Work>
void together(const char* doing, int line, T& mine, Work work) {
    const Quiet quiet;
    Warp& warp = warps[running / 32];
    if (warp.arrived == 0) warp.doing = doing, warp.line = line;
    if (warp.doing != doing) fail("lanes of a warp do different things");
    if (warp.line != line) fail("lanes of a warp do the same in different places");
    warp.slots[running % 32] = &mine;
    if (++warp.arrived < 32) return wait(WAITS_FOR_WARP);
    warp.arrived = 0;
    T* all[32];
    for (int lane = 0; lane < 32; lane++) {
        all[lane] = (T*)warp.slots[lane];
        fibers[running / 32 * 32 + lane].state = READY_TO_RUN;
    }
    work(all);
}

// Runs a kernel: `kernel(arguments...)` in every thread of every block.
template <class... Parameters, class... Arguments>
void launch(Dim grid, int block_threads, void (*kernel)(Parameters...), Arguments... arguments) {
    const auto call = [&] { kernel(arguments...); };
    const Quiet quiet;
    body = &call;
    run_body = [](const void* body) { (*(decltype(call)*)body)(); };
    threads = block_threads;
    gridDim = grid;
    for (unsigned y = 0; y < grid.y; y++) {
        for (unsigned x = 0; x < grid.x; x++) {
            blockIdx = {x, y, 0};
            // What a block leaves in shared memory must not help the next.
            std::memset(shared_memory, 0xff, sizeof(shared_memory));
            for (int i = 0; i < threads; i++) {
                fibers[i].state = READY_TO_RUN;
                fibers[i].started = false;
                copies[i].assign(1, {});
                groups[i] = {};
#if RACES
                fibers[i].of_sanitizer = new_fiber();
#endif
            }
#if RACES
            sanitizer_home = this_fiber();
#endif
            at_barrier = 0;
            // So the first thread begins, or the last lane of the last warp.
            running = descending ? threads - 32 : threads - 1;
            volatile int left = threads;
            // Comes back here when a thread has finished.
            if (!RACES && _setjmp(scheduler) != 0) left = left - 1;
            while (left > 0) {
                int thread = next();
                if (thread < 0) fail("threads wait for one that has finished");
                resume(thread, home);
                left = left - 1;
            }
            order_of_launches.leave(0);
#if RACES
            for (int i = 0; i < threads; i++) delete_fiber(fibers[i].of_sanitizer);
#endif
            for (size_t i = shared_bytes; i < SHARED_BYTES; i++) {
                if (((unsigned char*)shared_memory)[i] != 0xff) fail("wrote beyond its shared memory");
            }
        }
    }
    body = nullptr;
}

// Waits for all threads of the block; the last one lets all go on.
inline void block_barrier(int line) {
    barrier_lines[running] = line;
    if (++at_barrier < threads) return wait(WAITS_FOR_BLOCK);
    at_barrier = 0;
    heard = said;
    said = 0;
    for (int i = 0; i < threads; i++) {
        if (fibers[i].state != WAITS_FOR_BLOCK && i != running) fail("a thread missed the barrier");
        if (barrier_lines[i] != barrier_lines[i / 32 * 32]) fail("lanes of a warp wait at different barriers");
        if (groups[i].started != groups[i / 128 * 128].started) fail("warps of a group started different products");
        fibers[i].state = READY_TO_RUN;
    }
}

}  // namespace host

inline void __syncthreads(int line = __builtin_LINE()) {
    const host::Quiet quiet;
    int turn = host::fibers[host::running].turn++;
    host::order_of_block.arrive(turn);
    host::block_barrier(line);
    host::order_of_block.leave(turn);
}

inline int __syncthreads_or(int condition, int line = __builtin_LINE()) {
    const host::Quiet quiet;
    host::said |= condition;
    __syncthreads(line);
    return host::heard;
}

inline void __syncwarp(int line = __builtin_LINE()) {
    const host::Quiet quiet;
    int none = 0, turn = host::fibers[host::running].warp_turn++, warp = host::running / 32;
    host::order_of_warps[warp].arrive(turn);
    host::together("__syncwarp", line, none, [](int**) {});
    host::order_of_warps[warp].leave(turn);
}

inline int __ffs(unsigned x) { return __builtin_ffs((int)x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline float __uint_as_float(unsigned bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline unsigned __float_as_uint(float x) {
    unsigned bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float infinity() { return INFINITY; }

struct Half { unsigned short bits; };
struct Bfloat { unsigned short bits; };

inline float widen(float x) { return x; }
inline float widen(Bfloat x) { return __uint_as_float((unsigned)x.bits << 16); }
inline float widen(Half x) {
    unsigned sign = x.bits & 0x8000, exponent = x.bits >> 10 & 31, mantissa = x.bits & 1023;
    float y = exponent == 31 ? (mantissa ? NAN : INFINITY)
              : exponent     ? std::ldexp((float)(mantissa + 1024), (int)exponent - 25)
                             : std::ldexp((float)mantissa, -24);
    return sign ? -y : y;
}

inline void narrow(float x, float& to) { to = x; }
inline void narrow(float x, Bfloat& to) {
    unsigned bits = __float_as_uint(x);
    to.bits = std::isnan(x) ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void narrow(float x, Half& to) {
    unsigned short sign = std::signbit(x) ? 0x8000 : 0;
    float size = std::fabs(x);
    if (std::isnan(x)) {
        to.bits = 0x7fff;
    } else if (size >= 65520.0f) {
        to.bits = sign | 0x7c00;
    } else {
        // This rounds in units of the last place; nearbyint rounds to even.
        int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
        int units = (int)std::nearbyint(std::ldexp(size, 10 - exponent));
        to.bits = sign | (units >= 1024 ? ((exponent + 15) << 10) + (units - 1024) : units);
    }
}

inline unsigned pack_bf16(float x, float y) {
    Bfloat low, high;
    narrow(x, low);
    narrow(y, high);
    return low.bits | (unsigned)high.bits << 16;
}

inline unsigned pack_f16(float x, float y) {
    Half low, high;
    narrow(x, low);
    narrow(y, high);
    return low.bits | (unsigned)high.bits << 16;
}

// Rounds ties away from zero.
inline unsigned tf32(float x) { return (__float_as_uint(x) + 0x1000) & ~0x1fffu; }

// Results below the normal numbers are zero, as in ex2.approx.ftz.
inline float power_of_two(float x) {
    float y = std::exp2(x);
    return y < 0x1p-126f ? 0.0f : y;
}
inline float logarithm(float x) { return std::log2(x); }

inline uint4 load_constant(const uint4* at) { return *at; }
inline uint4 load_once(const uint4* at) { return *at; }

// Copies happen as late as they may; where threads run in the other order, as early as they may.
inline void copy_on(void* to, const void* from, bool has) {
    if ((size_t)to % 16 || (has && (size_t)from % 16)) host::fail("a copy of 16 bytes that are not aligned");
    if ((char*)to < (char*)shared_memory || (char*)to + 16 > (char*)shared_memory + SHARED_BYTES) host::fail("a copy to elsewhere than shared memory");
    host::Copy copy = {to, from, has};
    if (host::descending) return host::copy(copy);
    const host::Quiet quiet;
    host::copies[host::running].back().push_back(copy);
}
inline void end_copies() {
    const host::Quiet quiet;
    host::copies[host::running].push_back({});
}
template <int PENDING>
void wait_for_copies() {
    std::vector<host::Copy> all;
    {
        const host::Quiet quiet;
        auto& groups = host::copies[host::running];
        while ((int)groups.size() > PENDING + 1) {
            all.insert(all.end(), groups.front().begin(), groups.front().end());
            groups.erase(groups.begin());
        }
    }
    for (const host::Copy& copy : all) host::copy(copy);
}
// Reads one byte, so that a memory checker sees addresses that do not exist.
inline void ask_for(const void* at) { *(const volatile char*)at; }

inline float from_lane_xor(float x, int mask, int line = __builtin_LINE()) {
    struct { float x, got; int mask; } slot = {x, 0, mask};
    host::together("shfl", line, slot, [](auto** all) {
        for (int lane = 0; lane < 32; lane++) all[lane]->got = all[lane ^ all[lane]->mask]->x;
    });
    return slot.got;
}

inline float from_lane(float x, int lane, int line = __builtin_LINE()) {
    struct { float x, got; int lane; } slot = {x, 0, lane};
    host::together("shfl.idx", line, slot, [](auto** all) {
        for (int lane = 0; lane < 32; lane++) all[lane]->got = all[all[lane]->lane]->x;
    });
    return slot.got;
}

inline unsigned lanes_where(bool condition, int line = __builtin_LINE()) {
    struct { bool condition; unsigned got; } slot = {condition, 0};
    host::together("ballot", line, slot, [](auto** all) {
        unsigned bits = 0;
        for (int lane = 0; lane < 32; lane++) bits |= (unsigned)all[lane]->condition << lane;
        for (int lane = 0; lane < 32; lane++) all[lane]->got = bits;
    });
    return slot.got;
}

inline void load_matrices(unsigned (&to)[4], const void* row, bool transposed, int line = __builtin_LINE()) {
    struct { unsigned* to; const unsigned short* row; bool transposed; } slot = {to, (const unsigned short*)row, transposed};
    if ((size_t)row % 16) host::fail("ldmatrix of a row that is not aligned to 16 bytes");
    const char* at = (const char*)row;
    if (at < (char*)shared_memory || at + 16 > (char*)shared_memory + SHARED_BYTES) host::fail("ldmatrix outside of shared memory");
    host::look_at(row);
    host::together(transposed ? "ldmatrix.trans" : "ldmatrix", line, slot, [](auto** all) {
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 4; i++) {
                int major = lane / 4, minor = lane % 4 * 2;
                unsigned low, high;
                if (all[0]->transposed) {
                    low = all[8 * i + minor]->row[major];
                    high = all[8 * i + minor + 1]->row[major];
                } else {
                    low = all[8 * i + major]->row[minor];
                    high = all[8 * i + major]->row[minor + 1];
                }
                all[lane]->to[i] = low | high << 16;
            }
        }
    });
}

namespace host {

// Without a check of the alignment of each access, which would keep the compiler from computing
// several numbers at once. Only for functions that touch no memory of the kernels.
#define UNCHECKED __attribute__((no_sanitize("alignment")))

struct Fragments {
    float* c;
    const unsigned *a, *b;
};

// Rounds to f32 towards zero.
inline float towards_zero(double x) {
    float y = (float)x;
    return std::fabs((double)y) > std::fabs(x) ? std::nextafter(y, 0.0f) : y;
}

// Adds products to a sum as tensor cores do (Fasi et al. 2021,
// https://doi.org/10.7717/peerj-cs.330): all are exact, aligned to the largest and cut off below
// the last bit that it has in f32; what they add up to is cut off as well. The cores of an A100
// keep a bit or two more.
template <int N>
float truncated_sum(float sum, const double (&products)[N]) {
    double largest = std::fabs(sum);
    for (double x : products) largest = max(largest, std::fabs(x));
    if (largest == 0 || !std::isfinite(largest)) {
        for (double x : products) sum += (float)x;
        return sum;
    }
    double unit = std::ldexp(1.0, std::ilogb(largest) - 23), total = std::trunc(sum / unit);
    for (double x : products) total += std::trunc(x / unit);
    return towards_zero(total * unit);
}

// Computes c (16, 8) += a (16, K) b (K, 8): the products of a row are added to the sum one after
// the other; or, if truncating, as many at a time as an A100 does.
template <int K>
UNCHECKED void product(Fragments** all, const float (&a)[16][K], const float (&b)[K][8]) {
    float sums[16][8];
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2] = all[lane]->c[i];
    }
    if (truncating) {
        constexpr int AT_A_TIME = K / 2;
        for (int row = 0; row < 16; row++) {
            for (int column = 0; column < 8; column++) {
                for (int k = 0; k < K; k += AT_A_TIME) {
                    double products[AT_A_TIME];
                    for (int j = 0; j < AT_A_TIME; j++) products[j] = (double)a[row][k + j] * b[k + j][column];
                    sums[row][column] = truncated_sum(sums[row][column], products);
                }
            }
        }
    } else {
        // Columns are the innermost loop, so that the compiler computes several at once.
        for (int row = 0; row < 16; row++) {
            for (int k = 0; k < K; k++) {
                for (int column = 0; column < 8; column++) sums[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (int lane = 0; lane < 32; lane++) {
        for (int i = 0; i < 4; i++) all[lane]->c[i] = sums[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2];
    }
}

}  // namespace host

// Emulates m16n8k16 on numbers that `half(word, i)` unpacks.
template <class Unpack>
void multiply_16(const char* doing, int line, float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], Unpack half) {
    host::Fragments mine = {c, a, b};
    host::together(doing, line, mine, [&](host::Fragments** all) UNCHECKED {
        float left[16][16], right[16][8];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, in_group = lane % 4;
            for (int i = 0; i < 8; i++) {
                // Of the eight numbers, 0, 1, 4 and 5 are in row `group`, the others in row `group`
                // + 8; the column is 2 `in_group` + (i & 1), and 8 more from number 4 on.
                int row = i < 2 || (i >= 4 && i < 6) ? group : group + 8;
                int column = in_group * 2 + (i & 1) + (i >= 4 ? 8 : 0);
                left[row][column] = half(all[lane]->a[i / 2], i % 2);
            }
            for (int i = 0; i < 4; i++) {
                int row = in_group * 2 + (i & 1) + (i >= 2 ? 8 : 0);
                right[row][group] = half(all[lane]->b[i / 2], i % 2);
            }
        }
        host::product(all, left, right);
    });
}

inline void multiply_bf16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE()) {
    multiply_16("mma.bf16", line, c, a, b, [](unsigned pair, int i) { return __uint_as_float(i ? pair & 0xffff0000u : pair << 16); });
}
inline void multiply_f16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE()) {
    multiply_16("mma.f16", line, c, a, b, [](unsigned pair, int i) { return widen(Half{(unsigned short)(i ? pair >> 16 : pair)}); });
}

inline void multiply_tf32(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], int line = __builtin_LINE()) {
    host::Fragments mine = {c, a, b};
    host::together("mma.tf32", line, mine, [](host::Fragments** all) UNCHECKED {
        float left[16][8], right[8][8];
        for (int lane = 0; lane < 32; lane++) {
            int group = lane / 4, in_group = lane % 4;
            for (int i = 0; i < 4; i++) {
                int row = i == 0 || i == 2 ? group : group + 8, column = i < 2 ? in_group : in_group + 4;
                left[row][column] = __uint_as_float(all[lane]->a[i] & ~0x1fffu);
            }
            for (int i = 0; i < 2; i++) right[in_group + 4 * i][group] = __uint_as_float(all[lane]->b[i] & ~0x1fffu);
        }
        host::product(all, left, right);
    });
}

// ---- Products of four warps; see warpgroup.cuh.

typedef unsigned long long SharedMatrix;

// As on a card: the place in units of 16 bytes, the distances between columns of pieces and between
// eight rows, and the permutation for rows of 128 bytes.
inline SharedMatrix matrix_at(const void* first, unsigned bytes) {
    size_t place = (const char*)first + bytes - (const char*)shared_memory;
    if (place % 16 || place >= SHARED_BYTES) host::fail("a matrix at a place that cannot be described");
    return place >> 4 | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

namespace host {

// The number at (row, column) of a matrix, whose rows are 128 bytes; a piece of 16 bytes lies where
// bits 4 to 6 of its address are combined with bits 7 to 9.
inline float number_at(unsigned long long matrix, int row, int column) {
    if (matrix >> 62 != 1 || (matrix >> 49 & 7) != 0) fail("a matrix of another layout");
    size_t rows_of_eight = (matrix >> 32 & 0x3fff) << 4;
    size_t place = ((matrix & 0x3fff) << 4) + row / 8 * rows_of_eight + row % 8 * 128 + column * 2;
    place ^= place >> 3 & 0x70;
    if (place + 2 > SHARED_BYTES) fail("a product of numbers outside of shared memory");
    const Bfloat* at = (const Bfloat*)((const char*)shared_memory + place);
    return widen(*at);
}

inline void compute(const GroupProduct& p) {
    int lane = running % 32, warp = running / 32 % 4;
    for (int i = 0; i < 4 * p.tiles; i++) {
        int half = i / 2 % 2, row = 16 * warp + lane / 4 + 8 * half, column = 8 * (i / 4) + lane % 4 * 2 + i % 2;
        double products[2][8];
        for (int k = 0; k < 16; k++) {
            float left = p.left_is_shared ? number_at(p.left_at, row, k) : p.left[half][k];
            float right = p.transposed ? number_at(p.right_at, k, column) : number_at(p.right_at, column, k);
            products[k / 8][k % 8] = (double)left * right;
        }
        for (int k = 0; k < 16 && !truncating; k++) p.c[i] += (float)products[k / 8][k % 8];
        for (int k = 0; k < 2 && truncating; k++) p.c[i] = truncated_sum(p.c[i], products[k]);
    }
}

// Products are computed as late as they may be; where threads run in the other order, as early.
inline void start(const GroupProduct& product) {
    Group& mine = groups[running];
    if (!mine.begun) fail("a product is started before its registers are ready");
    mine.started++;
    if (descending) return compute(product);
    const Quiet quiet;
    mine.products.push_back(product);
}

}  // namespace host

inline void share_with_products() {}
template <int N>
void begin_products(float (&)[N]) { host::groups[host::running].begun = true; }
template <int N>
void wait_for_products(float (&)[N]) {
    host::Group& mine = host::groups[host::running];
    for (const host::GroupProduct& product : mine.products) host::compute(product);
    const host::Quiet quiet;
    mine.products.clear();
    mine.begun = false;
}

template <bool TRANSPOSED, int N>
void multiply_group(float (&c)[N], const unsigned (&a)[4], SharedMatrix b, int line = __builtin_LINE()) {
    struct { const unsigned* a; float left[2][16]; } slot = {a, {}};
    host::together("wgmma", line, slot, [](auto** all) {
        for (int lane = 0; lane < 32; lane++) {
            for (int i = 0; i < 8; i++) {
                // Registers 0 and 2 are of the lane's first row, 1 and 3 of its second.
                unsigned pair = all[lane]->a[i / 2];
                int column = lane % 4 * 2 + i % 2 + 8 * (i / 4);
                for (int other = lane / 4 * 4; other < lane / 4 * 4 + 4; other++) {
                    all[other]->left[i / 2 % 2][column] = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
                }
            }
        }
    });
    host::GroupProduct product = {c, N / 4, {}, false, TRANSPOSED, 0, b};
    std::memcpy(product.left, slot.left, sizeof(slot.left));
    host::start(product);
}
inline void multiply_group(float (&c)[32], SharedMatrix a, SharedMatrix b, int line = __builtin_LINE()) {
    int none = 0;
    host::together("wgmma", line, none, [](int**) {});
    host::start({c, 8, {}, true, false, a, b});
}
