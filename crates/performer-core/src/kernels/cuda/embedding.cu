// The gradient of an embedding: row v is the sum of the gradients of all positions that hold token
// v, in an order that depends on the tokens alone, so that it is the same every time. A block has a
// few neighbouring tokens of the vocabulary: it looks through all positions, which lie in the
// caches, once for all of them, and its warps share the positions that it finds.
//
//   ids (count), grad (count, width) -> out (vocabulary, width)

#include "stored.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
// The tokens of a block.
constexpr int TOKENS = 4;
// The positions that a warp, and the whole block, look through before what they found is added up.
constexpr int RUN = 512, ROUND = WARPS * RUN;
// The columns that a lane, and a warp, add up at a time.
constexpr int COLUMNS = 12, TILE = 32 * COLUMNS;

// Computes the rows of a block's tokens.
extern "C" __global__ void __launch_bounds__(THREADS)
embedding_backward(int count, int vocabulary, int width, const unsigned* ids, const Stored* grad, float* out) {
    // What each warp found: TOKENS times the position, counted from `start`, plus the number of its
    // token in the block.
    __shared__ int found[WARPS][RUN];
    __shared__ int counts[WARPS];
    __shared__ float parts[WARPS][TILE];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned first = blockIdx.x * TOKENS;
    int tokens = min(TOKENS, vocabulary - (int)first);
    out += (long long)first * width;
    for (int i = threadIdx.x; i < tokens * width; i += THREADS) out[i] = 0.0f;
    for (int start = 0; start < count; start += ROUND) {
        int n = 0;
        for (int i = 0; i < RUN; i += 32) {
            int position = start + warp * RUN + i + lane;
            // Tokens below the first one wrap around to large numbers.
            unsigned token = position < count ? ids[position] - first : ~0u;
            bool here = token < (unsigned)tokens;
            unsigned lanes = lanes_where(here);
            if (here) found[warp][n + __popc(lanes & ((1u << lane) - 1))] = (position - start) * TOKENS + (int)token;
            n += __popc(lanes);
        }
        if (lane == 0) counts[warp] = n;
        __syncthreads();
        int all = 0;
        for (int i = 0; i < WARPS; i++) all += counts[i];
        for (int token = 0; all > 0 && token < tokens; token++) {
            for (int base = 0; base < width; base += TILE) {
                float sums[COLUMNS];
                for (int k = 0; k < COLUMNS; k++) sums[k] = 0.0f;
                // The warps take the token's positions in turn.
                int seen = 0;
                for (int list = 0; list < WARPS; list++) {
                    for (int i = 0; i < counts[list]; i++) {
                        int entry = found[list][i];
                        if (entry % TOKENS != token || seen++ % WARPS != warp) continue;
                        const Stored* row = grad + (long long)(start + entry / TOKENS) * width;
                        for (int k = 0; k < COLUMNS; k++) {
                            int column = base + 32 * k + lane;
                            if (column < width) sums[k] += widen(row[column]);
                        }
                    }
                }
                if (seen == 0) break;
                for (int k = 0; k < COLUMNS; k++) parts[warp][32 * k + lane] = sums[k];
                __syncthreads();
                for (int i = threadIdx.x; i < TILE && base + i < width; i += THREADS) {
                    float sum = out[token * width + base + i];
                    for (int part = 0; part < WARPS; part++) sum += parts[part][i];
                    out[token * width + base + i] = sum;
                }
                __syncthreads();
            }
        }
        __syncthreads();
    }
}
