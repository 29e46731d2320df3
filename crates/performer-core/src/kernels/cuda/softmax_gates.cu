// The forget gates of exact softmax attention: their sums, by which scores are shifted, and their
// gradients. Between a query and a key of an earlier token stands the factor e^(sum of the gates
// after the key's token, up to the query's own), which is a difference of two sums from the first
// token on.
//
//   gates (B, Hkv, Tk)                              -> sums (B, Hkv, Tk), to base 2
//   rows (B, H, Tq), columns (B, Hkv, Tk)           -> d gates (B, Hkv, Tk)
//
// where rows and columns are the sums of ds, the gradients of scores, over the keys of each query
// and over the queries of each key. The gate of token t stands between the keys before t and the
// queries from t on:
//
//   d gate_t = sum_{i >= t} sum_{j < t} ds_ij = sum_{i >= t} (row_i - column_i)
//
// Both sums run over a whole sequence, where most cancels, so they are of doubles.

#include "softmax.cuh"

// Adds up numbers of the block's threads: each gets the sum of its own and those of the threads
// before it. `shared` has room for THREADS numbers.
__device__ inline double add_up(double* shared, double x) {
    shared[threadIdx.x] = x;
    __syncthreads();
    for (int reach = 1; reach < THREADS; reach *= 2) {
        double other = (int)threadIdx.x >= reach ? shared[threadIdx.x - reach] : 0.0;
        __syncthreads();
        shared[threadIdx.x] += other;
        __syncthreads();
    }
    return shared[threadIdx.x];
}

// A gate below this counts as this, which forgets everything too, since e^-10000 is 0 in f32. A
// much larger number in the sums would leave no digits for the gates after it.
constexpr float FORGETS_ALL = -1e4f;

// Computes the sums of gates from the first token on; a block has one key head.
extern "C" __global__ void __launch_bounds__(THREADS) softmax_gate_sums(int keys, const float* gates, GateSum* sums) {
    extern __shared__ uint4 shared_memory[];
    double* shared = (double*)shared_memory;
    double before = 0;
    gates += (long long)blockIdx.x * keys;
    sums += (long long)blockIdx.x * keys;
    for (int first = 0; first < keys; first += THREADS) {
        int token = first + threadIdx.x;
        float gate = token < keys ? gates[token] : 0.0f;
        // No maximum, which would take a gate that is not a number for one that forgets everything.
        double sum = before + add_up(shared, (double)(gate < FORGETS_ALL ? FORGETS_ALL : gate) * 1.4426950408889634);
        if (token < keys) {
            float high = (float)sum;
            sums[token] = {high, (float)(sum - high)};
        }
        // The last thread has the sum of this run, which is added to those of the runs before.
        __syncthreads();
        before += shared[THREADS - 1];
        __syncthreads();
    }
}

// Computes the gradients of gates; a block has one key head, and goes from the last token to the
// first. Query t of each of the group's heads stands at token t + offset.
extern "C" __global__ void __launch_bounds__(THREADS)
softmax_gate_gradients(int keys, int queries, int offset, int group, const float* rows, const float* columns, float* gradients) {
    extern __shared__ uint4 shared_memory[];
    double* shared = (double*)shared_memory;
    double later = 0;
    rows += (long long)blockIdx.x * group * queries;
    columns += (long long)blockIdx.x * keys;
    gradients += (long long)blockIdx.x * keys;
    for (int done = 0; done < keys; done += THREADS) {
        int token = keys - 1 - done - (int)threadIdx.x, query = token - offset;
        double x = 0;
        if (token >= 0) x = -columns[token];
        if (query >= 0 && query < queries) {
            for (int head = 0; head < group; head++) x += rows[(long long)head * queries + query];
        }
        double sum = later + add_up(shared, x);
        if (token >= 0) gradients[token] = (float)sum;
        __syncthreads();
        later += shared[THREADS - 1];
        __syncthreads();
    }
}
