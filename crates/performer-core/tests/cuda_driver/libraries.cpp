// The functions of cuBLAS and cuRAND that Candle calls, on the CPU.

#include "driver.h"

#include "device.h"

#include <cstdint>
#include <random>

#define API extern "C" __attribute__((visibility("default"))) int

static int handle;

API cublasCreate_v2(void** blas) { return *blas = &handle, 0; }
API cublasDestroy_v2(void*) { return 0; }
API cublasSetStream_v2(void*, void*) { return 0; }

enum { R_32F = 0, R_64F = 1, R_16F = 2, R_16BF = 14 };

static size_t size_of(int type) { return type == R_64F ? 8 : type == R_32F ? 4 : 2; }

static double load(int type, const void* at) {
    if (type == R_32F) return *(const float*)at;
    if (type == R_64F) return *(const double*)at;
    return type == R_16F ? widen(*(const Half*)at) : widen(*(const Bfloat*)at);
}

static void store(int type, void* at, double x) {
    if (type == R_32F) *(float*)at = (float)x;
    else if (type == R_64F) *(double*)at = x;
    else if (type == R_16F) narrow((float)x, *(Half*)at);
    else narrow((float)x, *(Bfloat*)at);
}

// Matrices lie column by column, as in Fortran: op(a) (m, k), op(b) (k, n), c (m, n).
API cublasGemmStridedBatchedEx(void*, int transposed_a, int transposed_b, int m, int n, int k, const void* alpha, const char* a, int type_a, int lda, long long stride_a, const char* b, int type_b, int ldb, long long stride_b, const void* beta, char* c, int type_c, int ldc, long long stride_c, int batch, int compute, int) {
    if (kernels_are_skipped()) return 0;
    int scalar = compute == 64 ? R_16F : compute == 70 ? R_64F : R_32F;
    double factor = load(scalar, alpha), old = load(scalar, beta);
    auto wide = [](const char* from, int type, int transposed, long rows, long columns, long ld) {
        std::vector<double> x(rows * columns);
        for (long i = 0; i < rows; i++) {
            for (long j = 0; j < columns; j++) x[j * rows + i] = load(type, from + size_of(type) * (transposed ? i * ld + j : j * ld + i));
        }
        return x;
    };
    for (int i = 0; i < batch; i++) {
        std::vector<double> left = wide(a + size_of(type_a) * stride_a * i, type_a, transposed_a, m, k, lda);
        std::vector<double> right = wide(b + size_of(type_b) * stride_b * i, type_b, transposed_b, k, n, ldb), sum(m);
        for (long column = 0; column < n; column++) {
            std::fill(sum.begin(), sum.end(), 0.0);
            for (long inner = 0; inner < k; inner++) {
                double x = right[column * k + inner];
                for (long row = 0; row < m; row++) sum[row] += left[inner * m + row] * x;
            }
            for (long row = 0; row < m; row++) {
                char* at = c + size_of(type_c) * (stride_c * i + column * ldc + row);
                // With a factor of 0, what c holds may be anything.
                store(type_c, at, factor * sum[row] + (old == 0 ? 0 : old * load(type_c, at)));
            }
        }
    }
    return 0;
}

API cublasDgemmStridedBatched(void* blas, int transposed_a, int transposed_b, int m, int n, int k, const double* alpha, const char* a, int lda, long long stride_a, const char* b, int ldb, long long stride_b, const double* beta, char* c, int ldc, long long stride_c, int batch) {
    return cublasGemmStridedBatchedEx(blas, transposed_a, transposed_b, m, n, k, alpha, a, R_64F, lda, stride_a, b, R_64F, ldb, stride_b, beta, c, R_64F, ldc, stride_c, batch, 70, 0);
}

typedef std::mt19937_64 Generator;
API curandCreateGenerator(Generator** generator, int) { return *generator = new Generator, 0; }
API curandDestroyGenerator(Generator* generator) { return delete generator, 0; }
API curandSetStream(Generator*, void*) { return 0; }
API curandSetPseudoRandomGeneratorSeed(Generator* generator, unsigned long long seed) { return generator->seed(seed), 0; }

template <class T, class Distribution>
static int draw(Generator* generator, T* to, size_t count, Distribution distribution) {
    for (size_t i = 0; i < count && !kernels_are_skipped(); i++) to[i] = distribution(*generator);
    return 0;
}
// cuRAND draws normal numbers in pairs.
API curandGenerateNormal(Generator* g, float* to, size_t count, float mean, float deviation) { return count % 2 ? 105 : draw(g, to, count, std::normal_distribution<float>(mean, deviation)); }
API curandGenerateNormalDouble(Generator* g, double* to, size_t count, double mean, double deviation) { return count % 2 ? 105 : draw(g, to, count, std::normal_distribution<double>(mean, deviation)); }
API curandGenerateUniform(Generator* g, float* to, size_t count) { return draw(g, to, count, std::uniform_real_distribution<float>()); }
API curandGenerateUniformDouble(Generator* g, double* to, size_t count) { return draw(g, to, count, std::uniform_real_distribution<double>()); }
