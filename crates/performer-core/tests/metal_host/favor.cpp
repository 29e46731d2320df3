// Runs causal FAVOR through the kernel of src/kernels/metal on a CPU.
//
// It reads one problem from stdin and writes its outputs to stdout, in the layout of
// `tests/metal_host.rs`: numbers are f32, rounded to STORAGE here. It is compiled once for each set
// of macros.

#include "device.h"

#include <algorithm>

#include "favor.metal"

inline float widen(ushort x) { return as_type<float>((uint)x << 16); }
inline float widen(half x) { return float(x); }
inline void narrow(float x, half& to) { to = half(x); }
inline void narrow(float x, ushort& to) {
    Bfloat y;
    narrow(x, y);
    to = y.bits;
}

#include "../cuda_host/problem.h"

// Sums holds the sums before or after some tokens.
struct Sums {
    std::vector<float> scales, sums;
    explicit Sums(size_t heads) : scales(poison<float>(heads * FEATURES)), sums(poison<float>(heads * FEATURES * (VALUES + 1))) {}
};

// Calls the kernel with the position of the running thread.
static void run(Problem* p, const Stored* q, const Stored* k, const Stored* v, const uchar* visible, const float* projection, Stored* out,
                Sums* before, Sums* after) {
    uint index = threadIdx.x;
    favor_forward(*p, q, k, v, visible, projection, out, before ? before->scales.data() : nullptr, before ? before->sums.data() : nullptr,
                  after ? after->scales.data() : nullptr, after ? after->sums.data() : nullptr, blockIdx.x, index, index / 32, index % 32);
}

// Copies rows of (batch, heads, tokens, width) to (batch, tokens, heads, width) with a gap after
// each, and says where they lie.
static std::vector<Stored> spread(const std::vector<Stored>& x, int batch, int heads, int tokens, int width, Strides& strides) {
    const long gap = 3, row = width + gap;
    strides = {row * heads * tokens, row, row * heads};
    std::vector<Stored> y = poison<Stored>((size_t)batch * strides.batch);
    for (long b = 0, from = 0; b < batch; b++) {
        for (long h = 0; h < heads; h++) {
            for (long t = 0; t < tokens; t++, from += width) {
                std::copy_n(x.begin() + from, width, y.begin() + b * strides.batch + h * strides.head + t * strides.token);
            }
        }
    }
    return y;
}

int main() {
    Reader in;
    int batch = in.integer(), heads = in.integer(), key_heads = in.integer(), tokens = in.integer(), masked = in.integer();
    int transposed = in.integer(), split = in.integer();
    host::descending = in.integer();
    std::vector<Stored> q = in.stored((size_t)batch * heads * tokens * DIM), k = in.stored((size_t)batch * key_heads * tokens * DIM);
    std::vector<Stored> v = in.stored((size_t)batch * key_heads * tokens * VALUES);
    std::vector<float> omega = in.numbers((size_t)FEATURES / (1 + HYPERBOLIC) * DIM);
    std::vector<unsigned char> mask;
    if (masked) mask = in.bytes((size_t)batch * tokens);

    // The projection is packed as `projection.rs` does it.
    double factor = std::pow((double)DIM, -0.25), log2e = 1.4426950408889634;
    std::vector<float> projection((size_t)D * F);
    for (int r = 0; r < FEATURES; r++) {
        int rows = FEATURES / (1 + HYPERBOLIC);
        for (int d = 0; d < DIM; d++) {
            projection[(size_t)d * F + r] = (float)(factor * log2e) * omega[(size_t)(r % rows) * DIM + d] * (r < rows ? 1.0f : -1.0f);
        }
    }

    auto dense = [&](int heads, int width) { return Strides{(long)heads * tokens * width, (long)tokens * width, width}; };
    Problem p = {dense(heads, DIM), dense(key_heads, DIM), dense(key_heads, VALUES), heads, heads / key_heads, tokens, masked,
                 0, 0, (float)(0.5 * factor * factor * log2e), 0.5f * std::log2((float)FEATURES)};
    if (masked) {
        // The numbers of hidden keys must not be looked at.
        for (size_t row = 0; row < (size_t)batch * key_heads * tokens; row++) {
            if (mask[row / key_heads / tokens * tokens + row % tokens]) continue;
            std::memset((void*)&k[row * DIM], 0xff, DIM * sizeof(Stored));
            std::memset((void*)&v[row * VALUES], 0xff, VALUES * sizeof(Stored));
        }
    }
    if (transposed) {
        q = spread(q, batch, heads, tokens, DIM, p.q);
        k = spread(k, batch, key_heads, tokens, DIM, p.k);
        v = spread(v, batch, key_heads, tokens, VALUES, p.v);
    }
    // Computes some tokens, from the sums of those `before` them, if given.
    auto forward = [&](int first, int count, Sums* before, Sums* after) {
        Problem some = p;
        some.tokens = count, some.resumes = before != nullptr, some.leaves = after != nullptr;
        std::vector<Stored> out = poison<Stored>((size_t)batch * heads * count * VALUES);
        host::launch({(unsigned)(batch * heads * SPLITS), 1, 1}, THREADS, run, &some, q.data() + first * p.q.token,
                     k.data() + first * p.k.token, v.data() + first * p.v.token, masked ? mask.data() : nullptr, projection.data(),
                     out.data(), before, after);
        for (size_t i = host::THREADGROUP_BYTES; i < SHARED_BYTES; i++) {
            if (((unsigned char*)shared_memory)[i] != 0xff) host::fail("wrote outside of threadgroup memory");
        }
        return out;
    };
    if (split == 0) {
        write(forward(0, tokens, nullptr, nullptr));
        return 0;
    }
    Sums whole(batch * key_heads), half_way = whole, parts = whole;
    write(forward(0, tokens, nullptr, &whole));
    write(forward(0, split, nullptr, &half_way));
    write(forward(split, tokens - split, &half_way, &parts));
    for (Sums* sums : {&whole, &parts}) write(sums->scales), write(sums->sums);
}
