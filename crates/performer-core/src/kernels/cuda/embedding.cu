// The gradient of an embedding table: row v of `out` is the sum of the rows of `grad` at all
// positions that hold token v. The order of the additions depends on `ids` alone, so the bits of a
// result are always the same.
//
// A block computes the rows of TOKENS neighbouring tokens of the vocabulary, TILE columns at a
// time. For each tile it reads all ids, which the caches hold, lists the positions of its tokens,
// and adds up their rows of `grad`. A few tokens hold a large part of all positions, so all warps
// of a block share the positions of every token.
//
//   ids (count), u32; grad (count, width), of type Stored -> out (vocabulary, width), f32
//
// Launch: ceil(vocabulary/TOKENS) blocks of THREADS threads.

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
    // The positions that each warp found for each token, counted from `start`, and how many they
    // are.
    __shared__ unsigned short found[TOKENS][WARPS][RUN];
    __shared__ int counts[TOKENS][WARPS];
    __shared__ float parts[WARPS][TILE];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned first = blockIdx.x * TOKENS;
    int tokens = min(TOKENS, vocabulary - (int)first);
    out += (long long)first * width;
    for (int base = 0; base < width; base += TILE) {
        float sums[TOKENS][COLUMNS];
#pragma unroll
        for (int token = 0; token < TOKENS; token++) {
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) sums[token][k] = 0.0f;
        }
        for (int start = 0; start < count; start += ROUND) {
            int n[TOKENS];
#pragma unroll
            for (int token = 0; token < TOKENS; token++) n[token] = 0;
            // All loads are begun before the first token is looked at.
            unsigned own[RUN / 32];
#pragma unroll
            for (int i = 0; i < RUN / 32; i++) {
                int position = start + warp * RUN + 32 * i + lane;
                // Tokens below the first one wrap around to large numbers.
                own[i] = position < count ? ids[position] - first : ~0u;
            }
#pragma unroll
            for (int i = 0; i < RUN / 32; i++) {
                if (!lanes_where(own[i] < (unsigned)TOKENS)) continue;
#pragma unroll
                for (int token = 0; token < TOKENS; token++) {
                    bool here = own[i] == (unsigned)token;
                    unsigned lanes = lanes_where(here);
                    unsigned short position = (unsigned short)(warp * RUN + 32 * i + lane);
                    if (here) found[token][warp][n[token] + __popc(lanes & ((1u << lane) - 1))] = position;
                    n[token] += __popc(lanes);
                }
            }
            if (lane == 0) {
#pragma unroll
                for (int token = 0; token < TOKENS; token++) counts[token][warp] = n[token];
            }
            __syncthreads();
#pragma unroll
            for (int token = 0; token < TOKENS; token++) {
                // The warps take the token's positions in turn. `turn` is the place of this warp's
                // next one in a list.
                int turn = warp;
                for (int list = 0; list < WARPS; list++) {
                    int all = counts[token][list];
#pragma unroll 4
                    for (; turn < all; turn += WARPS) {
                        const Stored* row = grad + (long long)(start + found[token][list][turn]) * width;
#pragma unroll
                        for (int k = 0; k < COLUMNS; k++) {
                            int column = base + 32 * k + lane;
                            if (column < width) sums[token][k] += widen(row[column]);
                        }
                    }
                    turn -= all;
                }
            }
            __syncthreads();
        }
#pragma unroll
        for (int token = 0; token < TOKENS; token++) {
#pragma unroll
            for (int k = 0; k < COLUMNS; k++) parts[warp][32 * k + lane] = sums[token][k];
            __syncthreads();
            for (int i = threadIdx.x; token < tokens && i < TILE && base + i < width; i += THREADS) {
                float sum = 0.0f;
                for (int part = 0; part < WARPS; part++) sum += parts[part][i];
                out[(long long)token * width + base + i] = sum;
            }
            __syncthreads();
        }
    }
}
