// These kernels copy rows of heads to contiguous memory in another order, such as (batch, heads,
// tokens, width) to (batch, tokens, heads, width). `turn_heads` also applies rotary position
// embeddings (Su et al. 2021): of each row, it replaces the pair (a, b) with the angle t by
// (a cos t - b sin t, a sin t + b cos t). The gradient does so with -t (`direction`).
//
// Launch: `count` threads in blocks of THREADS threads. In the kernels `_wide`, a thread has 16
// bytes of a row, or twice 16 bytes where pairs lie half a row apart; then all addresses are
// multiples of 16 bytes. In the others, a thread has one number or one pair.
//
// Macro: STORAGE as in stored.cuh.

#include "stored.cuh"

constexpr int THREADS = 256;

// Rows describes the input by the result. The result is contiguous, (batch, outer, inner, width).
// In the input, the next batch entry, outer index or inner index is `batch_stride`, `outer_stride`
// or `inner_stride` numbers further on, and the numbers of a row follow each other.
struct Rows {
    int outer, inner, width;
    long long batch_stride, outer_stride, inner_stride;
};
static_assert(sizeof(Rows) == 40 && OFFSET(Rows, inner) == 4 && OFFSET(Rows, width) == 8 && OFFSET(Rows, batch_stride) == 16,
              "the host has another layout");

// Turn says which numbers of a row are pairs, and where their angles are. The d-th pair is the
// numbers `next` d and `next` d + `second`. The tables `cos` and `sin` are f32, (sequences, tokens,
// width/2); `table_stride` is the distance between sequences, or 0 where all share one table. A
// row's token is its inner index or its outer one. `direction` is 1, or -1 for the gradient.
struct Turn {
    int token_is_inner, next, second;
    float direction;
    long long table_stride;
};
static_assert(sizeof(Turn) == 24 && OFFSET(Turn, next) == 4 && OFFSET(Turn, second) == 8 && OFFSET(Turn, direction) == 12 &&
                  OFFSET(Turn, table_stride) == 16,
              "the host has another layout");

// Place says which row a thread has, if it has one, and which of the row's parts: `parts` threads
// share a row. The row begins at `from` in the input and at `to` in the result.
struct Place {
    bool has;
    int batch, outer, inner, part;
    long long from, to;
};
__device__ inline Place place(unsigned count, int parts, Rows rows) {
    Place at;
    unsigned i = blockIdx.x * THREADS + threadIdx.x;
    at.has = i < count;
    unsigned row = i / parts, line = row / rows.inner;
    at.part = (int)(i % parts);
    at.inner = (int)(row % rows.inner);
    at.outer = (int)(line % rows.outer);
    at.batch = (int)(line / rows.outer);
    at.from = at.batch * rows.batch_stride + at.outer * rows.outer_stride + at.inner * rows.inner_stride;
    at.to = (long long)row * rows.width;
    return at;
}

// Copies the thread's N numbers to their place in the result.
template <int N>
__device__ inline void copy(unsigned count, Rows rows, const Stored* x, Stored* out) {
    Place at = place(count, rows.width / N, rows);
    if (!at.has) return;
    if (N == WIDE) {
        *(uint4*)(out + at.to + at.part * N) = *(const uint4*)(x + at.from + at.part * N);
    } else {
        out[at.to + at.part] = x[at.from + at.part];
    }
}

// Copies the thread's pairs to their place in the result, turned by the angles of their token: N
// pairs, or N/2 where neighbours are turned 16 bytes at a time.
template <int N>
__device__ inline void turn(unsigned count, Rows rows, Turn turn, const float* cos, const float* sin, const Stored* x, Stored* out) {
    int half = rows.width / 2;
    bool neighbours = turn.next == 2;
    int pairs = N > 1 && neighbours ? N / 2 : N;
    Place at = place(count, half / pairs, rows);
    if (!at.has) return;
    int first = at.part * pairs;
    long long angle = at.batch * turn.table_stride + (long long)(turn.token_is_inner ? at.inner : at.outer) * half + first;
    x += at.from + turn.next * first;
    out += at.to + turn.next * first;
    if (N > 1 && neighbours) {
        float both[N], turned[N];
        load<N>(x, both);
        for (int i = 0; i + 1 < N; i += 2) {
            float c = cos[angle + i / 2], s = turn.direction * sin[angle + i / 2];
            turned[i] = both[i] * c - both[i + 1] * s;
            turned[i + 1] = both[i] * s + both[i + 1] * c;
        }
        store<N>(turned, out);
        return;
    }
    float a[N], b[N], first_turned[N], second_turned[N];
    load<N>(x, a);
    load<N>(x + turn.second, b);
    for (int i = 0; i < N; i++) {
        float c = cos[angle + i], s = turn.direction * sin[angle + i];
        first_turned[i] = a[i] * c - b[i] * s;
        second_turned[i] = a[i] * s + b[i] * c;
    }
    store<N>(first_turned, out);
    store<N>(second_turned, out + turn.second);
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_heads(unsigned count, Rows rows, const Stored* x, Stored* out) {
    copy<1>(count, rows, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS) copy_heads_wide(unsigned count, Rows rows, const Stored* x, Stored* out) {
    copy<WIDE>(count, rows, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
turn_heads(unsigned count, Rows rows, Turn how, const float* cos, const float* sin, const Stored* x, Stored* out) {
    turn<1>(count, rows, how, cos, sin, x, out);
}

extern "C" __global__ void __launch_bounds__(THREADS)
turn_heads_wide(unsigned count, Rows rows, Turn how, const float* cos, const float* sin, const Stored* x, Stored* out) {
    turn<WIDE>(count, rows, how, cos, sin, x, out);
}
