// Results that blocks compute in parts, added up: the sums of segments, and gradients to which
// several heads or slices of the values contribute.

#include "favor.cuh"

// Adds up the sums of `segments` segments of `heads` heads, `records` (segments, heads, RECORD),
// from `initial` (heads, RECORD) on, if given. If `exclusive`, each record becomes the sum of those
// before it (after it if `reverse`), and the last (the first) is not read, since `favor_sums` has
// left it out; `total`, if given, gets the sum of all. A warp has one head and feature, so that it
// has read a scale before it overwrites it. With gates, `decays` (segments, heads) is what a
// segment makes the sums before it forget.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_combine(int heads, int segments, float* records, const float* decays, const float* initial, float* total, int exclusive,
              int reverse) {
    constexpr int WIDTH = SPLITS * V;
    long long index = (long long)blockIdx.x * WARPS + warp();
    if (index >= (long long)heads * F) return;
    int head = index / F, r = index % F;
    float* start = initial ? (float*)initial + (long long)head * RECORD : nullptr;
    float scale = start ? scales_of(start)[r] : FLOOR;
    float norm = start ? norms_of(start)[r] : 0.0f;
    float sums[divide_up(WIDTH, 32)];
    for (int i = 0; i < divide_up(WIDTH, 32); i++) {
        int c = lane() + 32 * i;
        sums[i] = start && c < WIDTH ? sums_of(start, 0)[r * WIDTH + c] : 0.0f;
    }
    // Records are read some at a time, before any of them is written: reads that follow each other
    // do not wait for each other.
    constexpr int AT_A_TIME = divide_up(WIDTH, 32) <= 2 ? 4 : 2;
    for (int step = 0; step < segments; step += AT_A_TIME) {
        float next_scale[AT_A_TIME], next_norm[AT_A_TIME], next[AT_A_TIME][divide_up(WIDTH, 32)], decay[AT_A_TIME];
        auto index_of = [&](int s) { return (long long)(reverse ? segments - 1 - s : s) * heads + head; };
        auto record_of = [&](int s) { return records + index_of(s) * RECORD; };
#pragma unroll
        for (int s = 0; s < AT_A_TIME; s++) {
            bool has = step + s < segments - exclusive;
            float* record = record_of(has ? step + s : step);
            next_scale[s] = has ? scales_of(record)[r] : FLOOR;
            next_norm[s] = has ? norms_of(record)[r] : 0.0f;
            decay[s] = GATED && has ? decays[index_of(step + s)] : 0.0f;
#pragma unroll
            for (int i = 0; i < divide_up(WIDTH, 32); i++) {
                int c = lane() + 32 * i;
                next[s][i] = has && c < WIDTH ? sums_of(record, 0)[r * WIDTH + c] : 0.0f;
            }
        }
        __syncwarp();
#pragma unroll
        for (int s = 0; s < AT_A_TIME; s++) {
            if (step + s >= segments) break;
            float* record = record_of(step + s);
            float old = GATED ? scale + decay[s] : scale, largest = fmaxf(old, next_scale[s]);
            float keep = power_of_two(old - largest), add = power_of_two(next_scale[s] - largest);
            if (exclusive && lane() == 0) {
                scales_of(record)[r] = scale;
                norms_of(record)[r] = norm;
            }
#pragma unroll
            for (int i = 0; i < divide_up(WIDTH, 32); i++) {
                int c = lane() + 32 * i;
                if (exclusive && c < WIDTH) sums_of(record, 0)[r * WIDTH + c] = sums[i];
                sums[i] = sums[i] * keep + next[s][i] * add;
            }
            norm = norm * keep + next_norm[s] * add;
            scale = largest;
        }
    }
    if (total) {
        float* record = total + (long long)head * RECORD;
        if (lane() == 0) {
            scales_of(record)[r] = scale;
            norms_of(record)[r] = norm;
        }
        for (int i = 0; i < divide_up(WIDTH, 32); i++) {
            int c = lane() + 32 * i;
            if (c < WIDTH) sums_of(record, 0)[r * WIDTH + c] = sums[i];
        }
    }
}

// Computes `to` (heads / group, count), the sums of `from` (parts, heads, count) over parts and
// over the heads of each group. Here `heads` counts the heads of the whole batch.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_reduce(int heads, int group, int parts, long long count, const float* from, Stored* to) {
    long long all = (long long)heads / group * count;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < all; i += (long long)gridDim.x * THREADS) {
        long long head = i / count * group, at = i % count;
        float sum = 0;
        for (int part = 0; part < parts; part++) {
            for (int g = 0; g < group; g++) sum += from[((long long)part * heads + head + g) * count + at];
        }
        narrow(sum, to[i]);
    }
}
