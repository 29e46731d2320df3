// The gradients of forget gates. A gate multiplies what all later queries see of all earlier keys,
// so its gradient is what flows across its border. With `before` and `later`, the sums over the
// keys before the border and over the queries from it on,
//
//   d gate_t = sum_r (before_r . later_r + the product of both norms)
//   d gate_t = d gate_(t+1) - factor_t
//
// where factors are those of favor_backward.cu. The first needs sums that are at hand at the
// borders of segments only, and is computed there. The second is computed inside each segment, from
// its end to its beginning. Alone it would gather errors over a long sequence, since almost all of
// it cancels. At the beginning of a segment the two differ by rounding, and each token of the
// segment gets an equal share of that difference as a correction.
//
//   before (segments, B, Hkv, RECORD), later (segments, B, H, RECORD) -> borders (segments, B, H)
//   factors (SPLITS, B, H, T), borders -> d gates (B, Hkv, T)

#include "favor.cuh"

// Computes the gradient at the first token of every segment but the first. No key comes before the
// sequence's first token, so its gate has the gradient zero, which is not written. A block has a
// query head and a segment; shared memory holds WARPS numbers.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_gate_borders(Problem p, float* before, float* later, float* borders) {
    extern __shared__ uint4 shared_memory[];
    float* parts = (float*)shared_memory;
    constexpr int WIDTH = SPLITS * V;
    int index = blockIdx.x, key_index = index / p.group, segment = blockIdx.y + 1, heads = gridDim.x;
    // Record s of `before` holds the keys before segment s as of the last of them, and record s - 1
    // of `later` the queries from segment s on as of the first of them. So the gate of the border's
    // own token alone stands between the two.
    float* keys = before + ((long long)segment * (heads / p.group) + key_index) * RECORD;
    float* queries = later + ((long long)(segment - 1) * heads + index) * RECORD;
    float gate = gates_of(p, key_index)[segment * p.segment] * LOG2E, sum = 0;
    for (int r = warp(); r < F; r += WARPS) {
        float product = lane() == 0 ? norms_of(keys)[r] * norms_of(queries)[r] : 0.0f;
        for (int c = lane(); c < WIDTH; c += 32) product += sums_of(keys, 0)[r * WIDTH + c] * sums_of(queries, 0)[r * WIDTH + c];
        sum += product * power_of_two(scales_of(keys)[r] + scales_of(queries)[r] + gate);
    }
    for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
    if (lane() == 0) parts[warp()] = sum;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < WARPS; i++) sum += parts[i];
    borders[(long long)segment * heads + index] = sum;
}

// The tokens that a thread adds up; a segment has at most THREADS times as many.
constexpr int EACH = 4;

// Computes the gradients of a key head's gates in one segment, by a block. `heads` counts the query
// heads of the batch, and `parts` the slices of the values, of which `factors` has one part each;
// shared memory holds THREADS numbers.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_gate_gradients(Problem p, int heads, int parts, const float* factors, const float* borders, float* gradients) {
    extern __shared__ uint4 shared_memory[];
    float* sums = (float*)shared_memory;
    int key_index = blockIdx.x, first = key_index * p.group, segment = blockIdx.y;
    int begins = segment * p.segment, ends = min(p.keys, begins + p.segment);
    auto border = [&](int segment) {
        float sum = 0;
        for (int g = 0; g < p.group && segment > 0 && segment < p.segments; g++) sum += borders[(long long)segment * heads + first + g];
        return sum;
    };
    // Threads go from the segment's last token to the first, and so does each.
    int last = ends - 1 - (int)threadIdx.x * EACH;
    float mine[EACH], sum = 0;
    for (int i = 0; i < EACH; i++) {
        for (int part = 0; part < parts && last - i >= begins; part++) {
            for (int g = 0; g < p.group; g++) sum += factors[((long long)part * heads + first + g) * p.keys + last - i];
        }
        mine[i] = sum;
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    // Each thread's sum becomes the sum over all threads up to it.
    for (int reach = 1; reach < THREADS; reach *= 2) {
        float other = (int)threadIdx.x >= reach ? sums[threadIdx.x - reach] : 0.0f;
        __syncthreads();
        sums[threadIdx.x] += other;
        __syncthreads();
    }
    float later = threadIdx.x ? sums[threadIdx.x - 1] : 0.0f, start = border(segment + 1);
    float missed = (start - sums[THREADS - 1] - border(segment)) / (ends - begins);
    for (int i = 0; i < EACH && last - i >= begins; i++) {
        float passed = threadIdx.x * EACH + i + 1;
        gradients[(long long)key_index * p.keys + last - i] = start - (later + mine[i]) - missed * passed;
    }
}
