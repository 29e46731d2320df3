// Runs exact softmax attention forward and backward through the kernels of src/kernels/cuda on a
// CPU, as favor.cpp does with FAVOR.

#include "device.h"

#if TEAMS
#define SHARED_FORWARD sizeof(ForwardShared)
#define SHARED_BACKWARD sizeof(BackwardShared)
#include "softmax_half.cu"
#define BLOCK_THREADS TEAM_THREADS
#define KERNEL(name) softmax_half_##name
#else
#define SHARED sizeof(Shared)
#include "softmax.cu"
#define BLOCK_THREADS THREADS
#define KERNEL(name) softmax_##name
#endif
#include "softmax_delta.cu"
#include "softmax_gates.cu"

#include "problem.h"

int main() {
    Reader in;
    int batch = in.integer(), heads = in.integer(), key_heads = in.integer(), queries = in.integer(), keys = in.integer();
    int offset = in.integer(), window = in.integer(), sinks = in.integer(), width = in.integer(), masked = in.integer();
    int mode = in.integer();
    host::descending = mode & 1, host::truncating = mode & 2;
    std::vector<Stored> q = in.stored((size_t)batch * heads * queries * DIM), k = in.stored((size_t)batch * key_heads * keys * DIM);
    std::vector<Stored> v = in.stored((size_t)batch * key_heads * keys * VALUES), grad = in.stored((size_t)batch * heads * queries * width);
    std::vector<float> gates;
    if (GATED) gates = in.numbers((size_t)batch * key_heads * keys);
    std::vector<unsigned char> mask;
    if (masked) mask = in.bytes((size_t)batch * keys);
    const unsigned char* visible = masked ? mask.data() : nullptr;

    auto dense = [](int heads, int tokens, int width) { return Strides{(long long)heads * tokens * width, (long long)tokens * width, width}; };
    float slope = 1 / std::sqrt((float)DIM);
    Problem p = {heads, heads / key_heads, queries, keys, offset, window, sinks, width, slope * 1.4426950408889634f, slope, dense(heads, queries, DIM),
                 dense(key_heads, keys, DIM), dense(key_heads, keys, VALUES)};
    std::vector<GateSum> gate_sums(gates.size());
    if (GATED) {
        host::launch({(unsigned)(batch * key_heads), 1, 1}, THREADS, softmax_gate_sums, keys, gates.data(), gate_sums.data());
        p.gates = gate_sums.data();
    }
    size_t count = (size_t)batch * heads * queries;
    std::vector<Stored> out = poison<Stored>(count * width), dq = poison<Stored>(q.size()), dk = poison<Stored>(k.size()), dv = poison<Stored>(v.size());
    std::vector<float> logs = poison<float>(count), delta = poison<float>(count);
    std::vector<float> rows = poison<float>(count), columns = poison<float>(gates.size()), dgates = poison<float>(gates.size());
    auto grid = [&](int heads, int tokens) { return Dim{(unsigned)(batch * heads), (unsigned)divide_up(tokens, R), 1}; };
    host::launch(grid(heads, queries), BLOCK_THREADS, KERNEL(forward), p, q.data(), k.data(), v.data(), visible, out.data(), logs.data());
    host::launch({(unsigned)divide_up((int)count, WARPS), 1, 1}, THREADS, softmax_delta, (int)count, width, out.data(), grad.data(), delta.data());
    host::launch(grid(heads, queries), BLOCK_THREADS, KERNEL(query_gradients), p, q.data(), k.data(), v.data(), visible, grad.data(), logs.data(),
                 delta.data(), dq.data(), rows.data());
    host::launch(grid(key_heads, keys), BLOCK_THREADS, KERNEL(key_gradients), p, q.data(), k.data(), v.data(), visible, grad.data(), logs.data(),
                 delta.data(), dk.data(), dv.data(), columns.data());
    if (GATED) {
        host::launch({(unsigned)(batch * key_heads), 1, 1}, THREADS, softmax_gate_gradients, keys, queries, offset, heads / key_heads, rows.data(),
                     columns.data(), dgates.data());
    }
    write(out), write(dq), write(dk), write(dv), write(dgates);
}
