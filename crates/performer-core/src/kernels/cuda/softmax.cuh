// Exact softmax attention: what its kernels share. Logarithms are to base 2.

#ifndef PERFORMER_SOFTMAX
#define PERFORMER_SOFTMAX

// Weights are at most 1, so f16 holds them; the backward pass rounds their gradients ds to f16 too.
#define HALF_OPERANDS
#include "tile.cuh"

constexpr int D = round_up(DIM, 16), V = round_up(VALUES, 16);

// FLOOR is low, but finite: -inf - FLOOR is -inf and not NaN.
constexpr float FLOOR = -1e37f;
constexpr float LN2 = 0.6931471805599453f;

// Whether there are forget gates; only with an offset.
#ifndef GATED
#define GATED 0
#endif

// GateSum is the sum of the gates from the first token up to one, to base 2, in two parts: a
// difference of two sums keeps the digits of a short one at the end of a long text.
struct GateSum { float high, low; };

// Problem holds the sizes and strides of one call.
struct Problem {
    // Query heads, and how many of them read one key head.
    int heads, group;
    int queries, keys;
    // Query t sees keys up to t + offset; all keys if the offset is negative.
    int offset;
    // With an offset, it sees of those keys the last `window` and the first `sinks`. The window is
    // larger than any number of keys where there is none.
    int window, sinks;
    // The numbers of a row of outputs and of their gradients: VALUES, or more, and then the
    // logarithm of the row's denominator stands after its values.
    int width;
    // Products q.k times `scale`, log2(e)/sqrt(DIM), are scores to base 2; gradients of queries and
    // keys are multiplied by `slope`, 1/sqrt(DIM).
    float scale, slope;
    Strides q, k, v;
    // The sums of gates up to each key, (B, Hkv, Tk).
    const GateSum* gates;
};
static_assert(sizeof(Problem) == 120 && OFFSET(Problem, group) == 4 && OFFSET(Problem, queries) == 8 && OFFSET(Problem, keys) == 12 &&
                  OFFSET(Problem, offset) == 16 && OFFSET(Problem, window) == 20 && OFFSET(Problem, sinks) == 24 &&
                  OFFSET(Problem, width) == 28 && OFFSET(Problem, scale) == 32 && OFFSET(Problem, slope) == 36 &&
                  OFFSET(Problem, q) == 40 && OFFSET(Problem, k) == 64 && OFFSET(Problem, v) == 88 && OFFSET(Problem, gates) == 112,
              "the host has another layout");

// Returns the logarithm to base 2 of what is forgotten from a key's token to a query's own.
__device__ inline float between(GateSum own, GateSum key) { return (own.high - key.high) + (own.low - key.low); }

// Returns the sum of gates up to key `key` of a key head, which is counted through the batch; zero
// if the caller has no such key.
__device__ inline GateSum gate_sum(const Problem& p, int key_index, int key, bool has) {
    return has ? p.gates[(long long)key_index * p.keys + key] : GateSum{0, 0};
}

// Says whether a key lies before the window of a query, whose own key is `own`, and is no sink.
// This and is_unseen use & and |, not && and ||: to make every comparison costs less than a branch
// for each number of a tile.
__device__ inline bool is_before(const Problem& p, int own, int key) { return (key <= own - p.window) & (key >= p.sinks); }

// Says whether a query, whose own key is `own`, does not see a key: it is of a later token, or lies
// before the window.
__device__ inline bool is_unseen(const Problem& p, int own, int key) { return (p.offset >= 0) & ((key > own) | is_before(p, own, key)); }

// KeySteps are the keys that the queries of a block see, K at a time: those of the sinks, then
// those from the window of the block's first query on. Steps between them are left out.
template <int K>
struct KeySteps {
    // The number of sinks; where the first step of the window begins; where the last step ends.
    int sinks, near, reach;

    // For the `count` queries from `start` on.
    __device__ KeySteps(const Problem& p, int start, int count) : sinks(p.sinks), near(0), reach(p.keys) {
        if (p.offset < 0) return;
        near = max(0, p.offset + start - p.window + 1) / K * K;
        reach = min(p.keys, p.offset + start + count);
    }
    __device__ int begin() const { return sinks > 0 ? 0 : near; }
    __device__ int after(int first) const { return first + K < sinks ? first + K : max(first + K, near); }
};

// Returns the first query that sees none of the `count` keys from `start` on, nor does any later.
__device__ inline int end_of_queries(const Problem& p, int start, int count) {
    if (p.offset < 0 || start < p.sinks) return p.queries;
    long long end = (long long)start + count + p.window - 1 - p.offset;
    return end < p.queries ? max(0, (int)end) : p.queries;
}

#endif
