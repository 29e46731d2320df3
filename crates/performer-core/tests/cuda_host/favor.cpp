// Runs FAVOR forward, backward and step by step through the kernels of src/kernels/cuda on a CPU.
//
// It reads one problem from stdin and writes its results to stdout, in the layout of
// `tests/devices/cuda_host.rs`: numbers are f32, rounded to STORAGE here. It is compiled once for
// each set of macros.

#include "device.h"

#include <algorithm>

#define SHARED_FORWARD sizeof(Shared)
#define SHARED_SUMS sizeof(Builder)
#define SHARED_BACKWARD sizeof(Shared)

#include "favor_pack.cu"
#define Shared ForwardShared
#include "favor_forward.cu"
#undef Shared
#define QUERIES 0
#define favor_sums favor_key_sums
#include "favor_sums.cu"
#undef QUERIES
#undef favor_sums
#define QUERIES 1
#define favor_sums favor_query_sums
#include "favor_sums.cu"
#undef favor_sums
#include "favor_parts.cu"
#include "favor_gates.cu"
#define Shared BackwardShared
#include "favor_backward.cu"
#undef Shared
#define SHARED_STEP sizeof(Shared)
#define Shared StepShared
#include "favor_step.cu"
#undef Shared

#if TEAMS
#undef SHARED_FORWARD
#define SHARED_FORWARD sizeof(TeamForward)
#undef SHARED_BACKWARD
#define SHARED_BACKWARD sizeof(TeamBackward)
#include "favor_bf16_backward.cu"
#include "favor_bf16_forward.cu"
#undef SHARED_SUMS
#define SHARED_SUMS sizeof(TeamBuilder)
#define QUERIES 0
#define favor_bf16_sums favor_bf16_key_sums
#include "favor_bf16_sums.cu"
#undef QUERIES
#undef favor_bf16_sums
#define QUERIES 1
#define favor_bf16_sums favor_bf16_query_sums
#include "favor_bf16_sums.cu"
#define BLOCK_THREADS TEAM_THREADS
#define KERNEL(name) favor_bf16_##name
#else
#define BLOCK_THREADS THREADS
#define KERNEL(name) favor_##name
#endif

#include "problem.h"

int main() {
    Reader in;
    int batch = in.integer(), heads = in.integer(), key_heads = in.integer(), queries = in.integer(), keys = in.integer();
    int segments = in.integer(), masked = in.integer(), backward = in.integer(), split = in.integer();
    int mode = in.integer();
    host::descending = mode & 1, host::truncating = mode & 2;
    // Sets of numbers of the map, where keys have numbers of their own.
    int tables = OWN_KEYS ? in.integer() : 1;
    int width = READY ? FEATURES : DIM, key_width = width + SIGNED;
    std::vector<Stored> q = in.stored((size_t)batch * heads * queries * width), k = in.stored((size_t)batch * key_heads * keys * key_width);
    std::vector<Stored> v = in.stored((size_t)batch * key_heads * keys * VALUES), grad;
    if (backward) grad = in.stored((size_t)batch * heads * queries * VALUES);
    std::vector<float> projection = READY ? std::vector<float>() : in.numbers((size_t)tables * FEATURES / (1 + HYPERBOLIC) * DIM);
    std::vector<float> key_projection = in.numbers(OWN_KEYS ? projection.size() : 0), weights = in.numbers(OWN_KEYS ? (size_t)tables * FEATURES : 0);
    std::vector<float> metric = in.numbers(METRIC ? (size_t)tables * DIM * DIM : 0), square(metric.size());
    for (size_t i = 0; i < square.size(); i++) {
        const float* matrix = metric.data() + i / (DIM * DIM) * DIM * DIM;
        for (int row = 0; row < DIM; row++) square[i] += matrix[row * DIM + i / DIM % DIM] * matrix[row * DIM + i % DIM];
    }
    std::vector<float> gates = GATED ? in.numbers((size_t)batch * key_heads * keys) : std::vector<float>();
    std::vector<unsigned char> mask;
    if (masked) mask = in.bytes((size_t)batch * keys);
    const unsigned char* visible = masked ? mask.data() : nullptr;

    float factor = std::pow((float)DIM, -0.25f);
    // Packs all sets of numbers; where keys have none of their own, with what teams read besides.
    auto pack = [&](const std::vector<float>& of, int features, float scale, int back) {
        int pieces = D / 16 * (round_up(features, 16) / 16) * 64 * (STORAGE != 0 && !back && !OWN_KEYS ? 2 : 1);
        std::vector<uint4> to = poison<uint4>(of.empty() ? 0 : (size_t)tables * pieces);
        Dim grid = {(unsigned)divide_up(pieces, THREADS), (unsigned)tables, 1};
        if (!of.empty()) host::launch(grid, THREADS, favor_pack, of.data(), features, DIM, HYPERBOLIC, scale, back, pieces, to.data());
        return to;
    };
    float factor_back = EXACT ? factor * LOG2E : factor;
    std::vector<uint4> columns = pack(projection, FEATURES, factor * LOG2E, 0), rows = pack(projection, FEATURES, factor_back, 1);
    std::vector<uint4> key_columns = pack(key_projection, FEATURES, factor * LOG2E, 0), key_rows = pack(key_projection, FEATURES, factor_back, 1);
    std::vector<uint4> metrics = pack(metric, DIM, 1, 0), squares = pack(square, DIM, 1, 0);
    KeyForm form = {key_columns.data(), key_rows.data(), weights.data(), metrics.data(), squares.data(), tables};
    // Decoding steps read numbers as they are.
    KeyForm of_step = {(const uint4*)key_projection.data(), nullptr, weights.data(), (const uint4*)metric.data(), nullptr, tables};

    auto dense = [](int heads, int tokens, int width) { return Strides{(long long)heads * tokens * width, (long long)tokens * width, width}; };
    Problem p = {heads, heads / key_heads, queries, keys, divide_up(queries, segments), segments, dense(heads, queries, width),
                 dense(key_heads, keys, key_width), dense(key_heads, keys, VALUES), 0.5f * factor * factor * LOG2E, gates.data(), form};
    // `of_keys` and `of_queries` are problems for `favor_sums`, in which every head builds its own
    // sums; `key_readers` is the problem for the gradients of keys.
    Problem of_keys = p, of_queries = p, key_readers = p;
    of_keys.heads = key_heads, of_keys.group = 1, of_keys.queries = keys, of_keys.q = p.k, of_keys.segment = divide_up(keys, segments);
    of_queries.v = dense(heads, queries, VALUES);
    key_readers.segment = divide_up(keys, segments);
    unsigned blocks = batch * heads * SPLITS, key_blocks = batch * key_heads * SPLITS, parts = segments;

    size_t count = (size_t)batch * heads * queries;
    std::vector<Stored> out = poison<Stored>(count * VALUES);
    std::vector<float> exact = poison<float>(count * VALUES), logs = poison<float>(count), denominators = poison<float>(count);
    std::vector<float> sums = poison<float>((size_t)segments * batch * key_heads * RECORD), total = poison<float>((size_t)batch * key_heads * RECORD);
    auto combine_grid = [](int heads) { return Dim{(unsigned)divide_up(heads * F, WARPS), 1, 1}; };
    std::vector<float> decays = poison<float>((size_t)segments * batch * key_heads);
    auto key_sums = [&](std::vector<float>& sums, float* initial) {
        host::launch({key_blocks, parts - CAUSAL, 1}, BLOCK_THREADS, KERNEL(key_sums), of_keys, k.data(), v.data(), visible, columns.data(), (float*)nullptr,
                     (float*)nullptr, (float*)nullptr, sums.data(), decays.data());
        host::launch(combine_grid(batch * key_heads), THREADS, favor_combine, batch * key_heads, segments, sums.data(), decays.data(), initial,
                     CAUSAL ? nullptr : total.data(), CAUSAL, 0);
    };
    float* before = nullptr;
    if (!CAUSAL || segments > 1) {
        key_sums(sums, nullptr);
        before = CAUSAL ? sums.data() : total.data();
    }
    std::vector<float> state = poison<float>((size_t)batch * key_heads * RECORD);
    host::launch({blocks, parts, 1}, BLOCK_THREADS, KERNEL(forward), p, q.data(), k.data(), v.data(), visible, columns.data(), before, out.data(),
                 exact.data(), logs.data(), denominators.data(), state.data());
    write(out);

#if CAUSAL
    if (split) {
        // The first `split` tokens, then all others but two from the state that those leave, then
        // two decoding steps: in rows of the whole tensors.
        std::vector<Stored> again = poison<Stored>(count * VALUES);
        std::vector<float> carried;
        int starts[] = {0, split, queries - 2, queries - 1, queries};
        for (int part = 0; part < 4; part++) {
            Problem some = p;
            int first = starts[part];
            some.queries = some.keys = some.segment = starts[part + 1] - first;
            some.segments = 1;
            std::vector<float> of_part;
            for (int head = 0; GATED && head < batch * key_heads; head++) {
                of_part.insert(of_part.end(), gates.begin() + (size_t)head * keys + first, gates.begin() + (size_t)head * keys + starts[part + 1]);
            }
            some.gates = of_part.data();
            const Stored *at_q = q.data() + (size_t)first * width, *at_k = k.data() + (size_t)first * key_width, *at_v = v.data() + (size_t)first * VALUES;
            std::vector<Stored> piece = poison<Stored>((size_t)batch * heads * some.queries * VALUES);
            std::vector<float> next = poison<float>(state.size());
            if (part < 2) {
                host::launch({blocks, 1, 1}, BLOCK_THREADS, KERNEL(forward), some, at_q, at_k, at_v, (unsigned char*)nullptr, columns.data(),
                             part ? carried.data() : nullptr, piece.data(), (float*)nullptr, (float*)nullptr, (float*)nullptr,
                             next.data());
            } else {
                some.form = of_step;
                host::launch({key_blocks, 1, 1}, THREADS, favor_step, some, at_q, at_k, at_v, projection.data(), HYPERBOLIC, factor,
                             carried.data(), next.data(), piece.data());
            }
            carried = next;
            for (int head = 0; head < batch * heads; head++) {
                std::copy_n(piece.begin() + (size_t)head * some.queries * VALUES, (size_t)some.queries * VALUES,
                            again.begin() + ((size_t)head * queries + first) * VALUES);
            }
        }
        write(again);
        write(state);
        write(carried);
    }
#endif

    if (backward) {
        std::vector<float> delta = poison<float>(count);
        if (SPLITS > 1) host::launch({(unsigned)divide_up((int)count, WARPS), 1, 1}, THREADS, favor_delta, (int)count, exact.data(), grad.data(),
                     SIGNED ? denominators.data() : nullptr, delta.data());
        Tensors t = {q.data(), k.data(), v.data(), grad.data(), visible, columns.data(), rows.data(), logs.data(), delta.data(), denominators.data(), before, nullptr, nullptr};
        std::vector<float> of_queries_features = poison<float>(OWN_KEYS ? count * FEATURES * SPLITS : 0);
        t.of_features = of_queries_features.data();
        std::vector<Result> dq = poison<Result>(count * width * (PARTIAL ? SPLITS : 1));
        host::launch({blocks, parts, 1}, BLOCK_THREADS, KERNEL(query_gradients), p, t, dq.data());

        std::vector<float> later = poison<float>((size_t)segments * batch * heads * RECORD), all = poison<float>((size_t)batch * heads * RECORD);
        std::vector<float> later_decays = poison<float>((size_t)segments * batch * heads);
        t.before = nullptr;
        if (!CAUSAL || segments > 1) {
            host::launch({blocks, parts - CAUSAL, 1}, BLOCK_THREADS, KERNEL(query_sums), of_queries, q.data(), grad.data(), (unsigned char*)nullptr, columns.data(),
                         logs.data(), delta.data(), denominators.data(), later.data(), later_decays.data());
            host::launch(combine_grid(batch * heads), THREADS, favor_combine, batch * heads, segments, later.data(), later_decays.data(), (float*)nullptr,
                         CAUSAL ? nullptr : all.data(), CAUSAL, 1);
            t.before = CAUSAL ? later.data() : all.data();
        }
        size_t key_count = (size_t)batch * heads * keys;
        std::vector<Result> dk = poison<Result>(key_count * key_width * (PARTIAL ? SPLITS : 1)), dv = poison<Result>(key_count * VALUES);
        std::vector<float> factors = poison<float>(GATED ? key_count * SPLITS : 0), of_gates = poison<float>(gates.size());
        std::vector<float> of_keys_features = poison<float>(OWN_KEYS ? key_count * FEATURES * SPLITS : 0);
        t.factors = factors.data(), t.of_features = of_keys_features.data();
        host::launch({blocks, parts, 1}, BLOCK_THREADS, KERNEL(key_gradients), key_readers, t, dk.data(), dv.data());
#if PARTIAL
        auto reduce = [&](const std::vector<float>& from, int group, int parts, int tokens, int width) {
            std::vector<Stored> to = poison<Stored>((size_t)batch * heads / group * tokens * width);
            host::launch({3, 1, 1}, THREADS, favor_reduce, batch * heads, group, parts, (long long)tokens * width, from.data(), to.data());
            write(to);
        };
        reduce(dq, 1, SPLITS, queries, width);
        reduce(dk, p.group, SPLITS, keys, key_width);
        reduce(dv, p.group, 1, keys, VALUES);
#else
        write(dq), write(dk), write(dv);
#endif
#if GATED
        std::vector<float> borders = poison<float>((size_t)segments * batch * heads);
        if (segments > 1) {
            host::launch({(unsigned)(batch * heads), parts - 1, 1}, THREADS, favor_gate_borders, p, sums.data(), later.data(), borders.data());
        }
        host::launch({(unsigned)(batch * key_heads), parts, 1}, THREADS, favor_gate_gradients, p, batch * heads, SPLITS,
                     (const float*)factors.data(), (const float*)borders.data(), of_gates.data());
        write(of_gates);
#endif
        write(of_queries_features), write(of_keys_features);
    }
}
