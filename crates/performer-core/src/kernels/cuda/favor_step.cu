// A decoding step: the key of one more token enters the sums and its queries read them, in one pass
// over the sums. GROUP is the number of query heads of a key head.
//
//   k, v (B, Hkv, 1, .) -> features f (F) and the factor decay (F) of older sums, gate included
//                       -> S (F, V) = decay S + f v, norm (F) = decay norm + f
//   q (B, H, 1, DIM)    -> weights w (GROUP, F) -> out (B, H, 1, VALUES) = w S / w norm
//
// With LOGS, a row of `out` has OUT_WIDTH numbers: after its values stands the logarithm of its
// denominator in base e, as `favor_forward` writes it.

#include "favor.cuh"

// Shared is the shared memory of a block.
struct Shared {
    // The key's features, the factor by which older sums shrink, the new sums of features, and the
    // queries' weights.
    float key[F], decay[F], norm[F], weights[GROUP][F];
    float denominator[GROUP];
    // Numerators, a part from each run of V threads, which treats every (THREADS / V)-th row of the
    // sums.
    float parts[THREADS / V][GROUP][V];
};
static_assert(sizeof(Shared) == SHARED_STEP, "the host asks for another size of shared memory");

// Computes the step. Launch: B Hkv SPLITS blocks, where the slice varies fastest, of THREADS
// threads, with SHARED_STEP bytes of dynamic shared memory. `projection` is not packed: it is
// (FEATURES, DIM); (FEATURES/2, DIM) if `hyperbolic`, where each row also stands for its negative;
// (form.tables, FEATURES, DIM) with MAP 3; null for ready features. `scale` is DIM^(-1/4). `before`
// and `after` are (B, Hkv, RECORD), and may not share memory: all slices of a head read the scales
// in `before`, and one of them writes the new ones.
extern "C" __global__ void __launch_bounds__(THREADS)
favor_step(Problem p, const Stored* q, const Stored* k, const Stored* v, const float* projection, int hyperbolic, float scale,
           float* before, float* after, Stored* out) {
    extern __shared__ uint4 shared_memory[];
    Shared& s = *(Shared*)shared_memory;
    int index = blockIdx.x / SPLITS, split = blockIdx.x % SPLITS, key_heads = p.heads / p.group;
    int batch = index / key_heads, key_head = index % key_heads;
    const Stored* key = rows_of(k, p.k, batch, key_head).first;
    const Stored* value = rows_of(v, p.v, batch, key_head).first + split * V;
    float* old = before + (long long)index * RECORD;
    float* next = after + (long long)index * RECORD;
    long long table = table_of(p, key_head);
    // The rows whose products are the logarithms of features, of queries and of keys.
    const float* of_queries = projection + table * FEATURES * DIM;
    const float* of_keys = OWN_KEYS ? (const float*)p.form.projection + table * FEATURES * DIM : projection;

    // |P key|^2, a part from each warp, which takes every WARPS-th row of P.
    float* squares = &s.parts[0][0][0];
    if (METRIC) {
        const float* metric = (const float*)p.form.metric + table * DIM * DIM;
        float squared = 0;
        for (int i = warp(); i < DIM; i += WARPS) {
            float turned = 0;
            for (int d = lane(); d < DIM; d += 32) turned += widen(key[d]) * metric[i * DIM + d];
            for (int mask = 16; mask; mask /= 2) turned += from_lane_xor(turned, mask);
            squared += turned * turned;
        }
        if (lane() == 0) squares[warp()] = squared;
        __syncthreads();
    }
    // Logarithms of features: a warp has one feature; row 0 is the key, the others are queries.
    for (int r = warp(); r < F; r += WARPS) {
        int half = hyperbolic ? FEATURES / 2 : FEATURES;
        for (int row = 0; row <= GROUP; row++) {
            const Stored* x = row == 0 ? key : rows_of(q, p.q, batch, key_head * p.group + row - 1).first;
            float sum = 0, square = 0;
            if (READY) {
                if (r < FEATURES) sum = widen(x[r]) * (SIGNED ? 1.0f : LOG2E);
            } else {
                for (int d = lane(); d < DIM; d += 32) {
                    float number = widen(x[d]);
                    if (r < FEATURES) sum += number * (row == 0 ? of_keys : of_queries)[(r % half) * DIM + d];
                    square += number * number;
                }
                for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
                for (int mask = 16; mask; mask /= 2) square += from_lane_xor(square, mask);
                if (METRIC) {
                    square = 0;
                    for (int w = 0; w < WARPS; w++) square += squares[w];
                }
                sum *= (r < half ? scale : -scale) * LOG2E;
                if (row == 0) sum -= p.offset_scale * square;
                if (OWN_KEYS && row == 0 && r < FEATURES) sum += p.form.weights[table * FEATURES + r] * LOG2E;
            }
            if (!SIGNED && r >= FEATURES) sum = -infinity();
            if (lane() == 0) (row == 0 ? s.key[r] : s.weights[row - 1][r]) = sum;
        }
    }
    __syncthreads();
    for (int r = threadIdx.x; r < F; r += THREADS) {
        float c = scales_of(old)[r] + (GATED ? *gates_of(p, index) * LOG2E : 0.0f), log = SIGNED ? widen(key[FEATURES]) * LOG2E : s.key[r];
        float largest = fmaxf(c, log);
        float weight = power_of_two(log - largest);
        s.key[r] = SIGNED ? s.key[r] * weight : weight;
        s.decay[r] = power_of_two(c - largest);
        s.norm[r] = norms_of(old)[r] * s.decay[r] + s.key[r];
        if (!SIGNED) {
            for (int g = 0; g < GROUP; g++) s.weights[g][r] += largest;
        }
        if (split == 0) {
            scales_of(next)[r] = largest;
            norms_of(next)[r] = s.norm[r];
        }
    }
    __syncthreads();
    for (int g = warp(); g < GROUP; g += WARPS) {
        float largest = -infinity(), sum = 0;
        for (int r = lane(); r < F; r += 32) largest = fmaxf(largest, s.weights[g][r]);
        // Every lane takes part, even where there are fewer features than lanes.
        for (int mask = 16; mask; mask /= 2) largest = fmaxf(largest, from_lane_xor(largest, mask));
        for (int r = lane(); r < F; r += 32) {
            float weight = SIGNED ? s.weights[g][r] : power_of_two(s.weights[g][r] - largest);
            s.weights[g][r] = weight;
            sum += weight * s.norm[r];
        }
        for (int mask = 16; mask; mask /= 2) sum += from_lane_xor(sum, mask);
        if (lane() == 0) s.denominator[g] = sum;
        if (LOGS && split == 0 && lane() == 0) {
            float log = sum == 0.0f ? FLOOR : (largest + logarithm(sum)) / LOG2E;
            narrow(log, out[((long long)index * p.group + g) * OUT_WIDTH + VALUES]);
        }
    }
    __syncthreads();
    constexpr int ROWS_AT_ONCE = THREADS / V;
    int column = threadIdx.x % V, first = threadIdx.x / V;
    if (first < ROWS_AT_ONCE) {
        float x = split * V + column < VALUES ? widen(value[column]) : 0.0f, sums[GROUP];
        for (int g = 0; g < GROUP; g++) sums[g] = 0;
        for (int r = first; r < F; r += ROWS_AT_ONCE) {
            int at = r * SPLITS * V + column;
            float sum = sums_of(old, split)[at] * s.decay[r] + s.key[r] * x;
            sums_of(next, split)[at] = sum;
            for (int g = 0; g < GROUP; g++) sums[g] += s.weights[g][r] * sum;
        }
        for (int g = 0; g < GROUP; g++) s.parts[first][g][column] = sums[g];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < GROUP * V; i += THREADS) {
        int g = i / V, c = i % V;
        if (split * V + c >= VALUES) continue;
        float sum = 0, denominator = s.denominator[g];
        for (int part = 0; part < ROWS_AT_ONCE; part++) sum += s.parts[part][g][c];
        narrow(denominator == 0.0f ? 0.0f : sum / denominator, out[((long long)index * p.group + g) * OUT_WIDTH + split * V + c]);
    }
}
