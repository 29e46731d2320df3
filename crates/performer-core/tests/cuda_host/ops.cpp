// Compares the kernels of norms, activations, heads, convolutions, forget gates, polynomial
// features, embedding, cross-entropy and AdamW, on a CPU, with the formulas in f64. Ends with 1 and
// says what is wrong, if something is.

#include "device.h"

#include <algorithm>
#include <random>

// Fibers share static variables as the threads of a block share these.
#undef __shared__
#define __shared__ static

#include "stored.cuh"

#define LANES 8
#define PIECES 2
namespace norm {
#include "norm.cu"
}
#undef LANES
#undef PIECES
namespace activation {
#include "activation.cu"
}
namespace heads_of_rows {
#include "heads.cu"
}
#define RUN_LENGTH 8
namespace convolution {
#include "convolution.cu"
}
namespace forget_gate {
#include "forget_gate.cu"
}
namespace quadratic {
#include "quadratic.cu"
}
namespace cross_entropy {
#include "cross_entropy.cu"
}
namespace embedding {
#include "embedding.cu"
}
namespace optimizer {
#include "adamw.cu"
}

typedef std::vector<double> Numbers;

static const double TOLERANCE = STORAGE == 0 ? 1e-5 : 1e-2;
static int failures = 0;
static std::mt19937 generator(1);

// Draws numbers; with `round`, ones that `Stored` holds exactly.
static Numbers random_numbers(size_t count, bool round = true) {
    std::normal_distribution<float> normal;
    Numbers x(count);
    for (double& number : x) {
        Stored stored;
        float value = normal(generator);
        narrow(value, stored);
        number = round ? widen(stored) : value;
    }
    return x;
}

static std::vector<Stored> stored(const Numbers& x) {
    std::vector<Stored> y(x.size());
    for (size_t i = 0; i < x.size(); i++) narrow((float)x[i], y[i]);
    return y;
}

static std::vector<float> floats(const Numbers& x) { return std::vector<float>(x.begin(), x.end()); }

// Returns memory full of NaN.
template <class T>
static std::vector<T> room(size_t count) {
    std::vector<T> x(count);
    std::memset((void*)x.data(), 0xff, count * sizeof(T));
    return x;
}

// Compares results with what they should be, relative to the largest.
template <class T>
static void check(const char* what, const std::vector<T>& got, const Numbers& want) {
    double largest = 1e-30, error = 0;
    for (double x : want) largest = std::max(largest, std::fabs(x));
    for (size_t i = 0; i < want.size(); i++) {
        double difference = std::fabs(widen(got[i]) - want[i]) / largest;
        if (!(difference <= error)) error = std::isnan(difference) ? INFINITY : difference;
    }
    std::printf("%-32s %.1e\n", what, error);
    if (!(error <= TOLERANCE) || got.size() != want.size()) {
        std::printf("%s is off by %g\n", what, error);
        failures++;
    }
}

static unsigned blocks(long long count, int size) { return (unsigned)((count + size - 1) / size); }

static void check_norm(long long rows, int width, bool biased, bool wide, float eps = 1e-5f) {
    Numbers x = random_numbers(rows * width), w = random_numbers(width, false), b = random_numbers(width, false);
    Numbers g = random_numbers(rows * width), y = x, dx = x, dw(width), db(width);
    for (long long r = 0; r < rows; r++) {
        double mean = 0, variance = 0, level = 0, along = 0;
        for (int i = 0; i < width; i++) mean += CENTER ? x[r * width + i] / width : 0;
        for (int i = 0; i < width; i++) variance += std::pow(x[r * width + i] - mean, 2) / width;
        double scale = 1 / std::sqrt(variance + eps);
        for (int i = 0; i < width; i++) {
            double u = (x[r * width + i] - mean) * scale, grad = g[r * width + i], h = grad * w[i];
            y[r * width + i] = u * w[i] + (biased ? b[i] : 0);
            level += CENTER ? h / width : 0;
            along += h * u / width;
            dw[i] += grad * u;
            db[i] += grad;
        }
        for (int i = 0; i < width; i++) {
            double u = (x[r * width + i] - mean) * scale;
            dx[r * width + i] = (g[r * width + i] * w[i] - level - u * along) * scale;
        }
    }
    auto xs = stored(x), gs = stored(g), out = room<Stored>(x.size()), dxs = room<Stored>(x.size());
    auto ws = floats(w), bs = floats(b), kept = room<float>(2 * rows);
    unsigned grid = blocks(rows, norm::WARPS), splits = std::min(grid, 3u);
    auto sums = room<float>((size_t)splits * 2 * width);
    const float* bias_or_none = biased ? bs.data() : nullptr;
    if (wide) {
        Dim few = {splits, 1, 1};
        host::launch(few, norm::THREADS, norm::norm_forward_wide, rows, width, eps, xs.data(), ws.data(), bias_or_none, out.data());
        host::launch(few, norm::THREADS, norm::norm_backward_wide, rows, width, eps, xs.data(), ws.data(), gs.data(), dxs.data(), sums.data());
    } else {
        host::launch({grid, 1, 1}, norm::THREADS, norm::norm_forward, rows, width, eps, xs.data(), ws.data(), bias_or_none, out.data());
        host::launch({grid, 1, 1}, norm::THREADS, norm::norm_backward, rows, width, eps, xs.data(), ws.data(), gs.data(), dxs.data(),
                     kept.data());
        host::launch({blocks(width, 32), splits, 1}, norm::THREADS, norm::norm_weight_gradients, rows, width, xs.data(), gs.data(),
                     kept.data(), sums.data());
    }
    std::vector<float> weight(width, 0), bias(width, 0);
    for (unsigned s = 0; s < splits; s++) {
        for (int i = 0; i < width; i++) {
            weight[i] += sums[(size_t)s * 2 * width + i];
            bias[i] += sums[((size_t)s * 2 + 1) * width + i];
        }
    }
    check("norm", out, y);
    check("norm, gradient of rows", dxs, dx);
    check("norm, gradient of weight", weight, dw);
    check("norm, gradient of bias", bias, db);
}

static void check_activations(long long count, bool wide) {
    Numbers x = random_numbers(count), up = random_numbers(count), g = random_numbers(count);
    x[0] = 40, x[1] = -40, x[2] = 0;
    Numbers gelu(count), dgelu(count), swiglu(count), dgate(count), dup(count), gated(count), of_gate(count), of_up(count);
    for (long long i = 0; i < count; i++) {
        double a = x[i], c = std::sqrt(2 / M_PI), u = c * (a + 0.044715 * a * a * a), t = std::tanh(u);
        gelu[i] = 0.5 * a * (1 + t);
        dgelu[i] = g[i] * (0.5 * (1 + t) + 0.5 * a * (1 - t * t) * c * (1 + 3 * 0.044715 * a * a));
        double s = 1 / (1 + std::exp(-a));
        swiglu[i] = a * s * up[i];
        dgate[i] = g[i] * up[i] * (s + a * s * (1 - s));
        dup[i] = g[i] * a * s;
        gated[i] = 2 * s * up[i];
        of_gate[i] = 2 * g[i] * up[i] * s * (1 - s);
        of_up[i] = 2 * g[i] * s;
    }
    auto xs = stored(x), us = stored(up), gs = stored(g);
    auto a = room<Stored>(count), b = room<Stored>(count), c = room<Stored>(count), d = room<Stored>(count), e = room<Stored>(count);
    using namespace activation;
    Dim grid = {blocks(count / (wide ? WIDE : 1), activation::THREADS), 1, 1};
    int threads = activation::THREADS;
    host::launch(grid, threads, wide ? gelu_forward_wide : gelu_forward, count, xs.data(), a.data());
    host::launch(grid, threads, wide ? gelu_backward_wide : gelu_backward, count, xs.data(), gs.data(), b.data());
    host::launch(grid, threads, wide ? swiglu_forward_wide : swiglu_forward, count, xs.data(), us.data(), c.data());
    host::launch(grid, threads, wide ? swiglu_backward_wide : swiglu_backward, count, xs.data(), us.data(), gs.data(), d.data(), e.data());
    check("gelu", a, gelu);
    check("gelu, gradient", b, dgelu);
    host::launch(grid, threads, wide ? add_wide : add, count, xs.data(), us.data(), a.data());
    Numbers both = x;
    for (size_t i = 0; i < both.size(); i++) both[i] += up[i];
    check("sum of two tensors", a, both);
    host::launch(grid, threads, wide ? sigmoid_gate_forward_wide : sigmoid_gate_forward, count, xs.data(), us.data(), a.data());
    check("output gate", a, gated);
    check("swiglu", c, swiglu);
    check("swiglu, gradient of gate", d, dgate);
    check("swiglu, gradient of input", e, dup);
    host::launch(grid, threads, wide ? sigmoid_gate_backward_wide : sigmoid_gate_backward, count, xs.data(), us.data(), gs.data(), d.data(), e.data());
    check("output gate, gradient of gate", d, of_gate);
    check("output gate, of its input", e, of_up);
}

// x is (batch, tokens, heads, 2 half) in memory, as it comes out of a linear map. Pairs are halves
// apart or neighbours; angles are one table, or one for each sequence; `wide` threads have 16
// bytes.
static void check_heads(int batch, int heads, int tokens, int half, bool neighbours, bool tables, bool wide) {
    using namespace heads_of_rows;
    int width = 2 * half, next = neighbours ? 2 : 1, second = neighbours ? 1 : half;
    long long table = tables ? (long long)tokens * half : 0;
    Numbers x = random_numbers((size_t)batch * tokens * heads * width);
    Numbers angles = random_numbers((size_t)(tables ? batch : 1) * tokens * half, false);
    Numbers c(angles.size()), s(angles.size()), want(x.size()), split(x.size());
    for (size_t i = 0; i < angles.size(); i++) c[i] = std::cos(angles[i]), s[i] = std::sin(angles[i]);
    for (int b = 0; b < batch; b++) {
        for (int h = 0; h < heads; h++) {
            for (int t = 0; t < tokens; t++) {
                const double* from = &x[(((size_t)b * tokens + t) * heads + h) * width];
                size_t at = (((size_t)b * heads + h) * tokens + t) * width;
                for (int i = 0; i < width; i++) split[at + i] = from[i];
                double* to = &want[at];
                for (int i = 0; i < half; i++) {
                    double cosine = c[b * table + t * half + i], sine = s[b * table + t * half + i];
                    int one = neighbours ? 2 * i : i, other = neighbours ? 2 * i + 1 : i + half;
                    to[one] = from[one] * cosine - from[other] * sine;
                    to[other] = from[one] * sine + from[other] * cosine;
                }
            }
        }
    }
    auto xs = stored(x), out = room<Stored>(x.size()), back = room<Stored>(x.size());
    auto cs = floats(c), ss = floats(s);
    long long token = (long long)heads * width, head = (long long)tokens * width;
    Rows forth = {heads, tokens, width, tokens * token, width, token}, merge = {tokens, heads, width, heads * head, width, head};
    unsigned numbers = (unsigned)(x.size() / (wide ? WIDE : 1)), pairs = numbers / (wide && !neighbours ? 2 : 1) / (wide ? 1 : 2);
    Dim grid = {blocks(numbers, 256), 1, 1}, turning = {blocks(pairs, 256), 1, 1};
    host::launch(grid, 256, wide ? copy_heads_wide : copy_heads, numbers, forth, xs.data(), out.data());
    check("heads", out, split);
    host::launch(grid, 256, wide ? copy_heads_wide : copy_heads, numbers, merge, out.data(), back.data());
    check("heads, merged", back, x);
    Turn turn = {1, next, second, 1.0f, table};
    auto kernel = wide ? turn_heads_wide : turn_heads;
    host::launch(turning, 256, kernel, pairs, forth, turn, cs.data(), ss.data(), xs.data(), out.data());
    check("heads, turned", out, want);
    // Turned back, the numbers are those that it came from, in either order.
    turn = {0, next, second, -1.0f, table};
    host::launch(turning, 256, kernel, pairs, merge, turn, cs.data(), ss.data(), out.data(), back.data());
    check("heads, turned back and merged", back, x);
    turn.token_is_inner = 1;
    Rows same = {heads, tokens, width, heads * head, head, width};
    host::launch(turning, 256, kernel, pairs, same, turn, cs.data(), ss.data(), out.data(), back.data());
    check("heads, turned back", back, split);
}

// Runs have 8 tokens, so that sequences have whole ones, parts of one, and several.
static void check_convolution(int batch, int tokens, int channels, bool wide) {
    using namespace convolution;
    size_t count = (size_t)batch * tokens * channels;
    int runs = (tokens + RUN_LENGTH - 1) / RUN_LENGTH;
    Numbers x = random_numbers(count), g = random_numbers(count), w = random_numbers((size_t)channels * 4, false);
    Numbers y(count), dx(count), dw(w.size());
    for (size_t i = 0; i < count; i++) {
        int c = (int)(i % channels), t = (int)(i / channels % tokens);
        for (int j = 0; j < 4; j++) {
            int back = 3 - j;
            if (t < back) continue;
            size_t from = i - (size_t)back * channels;
            y[i] += w[c * 4 + j] * x[from];
            dx[from] += w[c * 4 + j] * g[i];
            dw[c * 4 + j] += x[from] * g[i];
        }
    }
    auto xs = stored(x), gs = stored(g), ys = room<Stored>(count), dxs = room<Stored>(count);
    auto ws = floats(w), sums = room<float>((size_t)batch * runs * channels * 4);
    Dim grid = {blocks(batch * runs * channels / (wide ? WIDE : 1), 256), 1, 1};
    host::launch(grid, 256, wide ? convolve_wide : convolve, batch, tokens, channels, xs.data(), ws.data(), ys.data());
    host::launch(grid, 256, wide ? convolution_gradients_wide : convolution_gradients, batch, tokens, channels, xs.data(), ws.data(), gs.data(),
                 dxs.data(), sums.data());
    std::vector<float> dws(w.size());
    for (size_t i = 0; i < sums.size(); i++) dws[i % w.size()] += sums[i];
    check("convolution", ys, y);
    check("convolution, gradient of rows", dxs, dx);
    check("convolution, gradient of filters", dws, dw);
}

// The bias of the first head; each next head has one more. With 6 all gates are near 0, and their
// digits are seen, which beside larger gates they would not be.
static void check_forget_gates(int batch, int tokens, int width, int heads, double bias) {
    using namespace forget_gate;
    long long rows = (long long)batch * tokens;
    Numbers x = random_numbers(rows * width), w = random_numbers((size_t)heads * width, false), b(heads);
    for (double& number : w) number = (float)(number / std::sqrt(width));
    for (int h = 0; h < heads; h++) b[h] = bias + h;
    Numbers g(rows * heads), dg = random_numbers(rows * heads, false), dx(x.size()), dw((size_t)heads * (width + 1));
    for (long long r = 0; r < rows; r++) {
        for (int h = 0; h < heads; h++) {
            double z = b[h];
            for (int i = 0; i < width; i++) z += x[r * width + i] * w[(size_t)h * width + i];
            size_t at = (size_t)((r / tokens * heads + h) * tokens + r % tokens);
            g[at] = std::min(z, 0.0) - std::log1p(std::exp(-std::fabs(z)));
            double dz = dg[at] / (1 + std::exp(z));
            for (int i = 0; i < width; i++) {
                dx[r * width + i] += dz * w[(size_t)h * width + i];
                dw[(size_t)h * (width + 1) + i] += dz * x[r * width + i];
            }
            dw[(size_t)h * (width + 1) + width] += dz;
        }
    }
    auto xs = stored(x), dxs = room<Stored>(x.size());
    auto ws = floats(w), bs = floats(b), dgs = floats(dg), gs = room<float>(g.size()), slopes = room<float>(g.size());
    unsigned splits = std::min(blocks(rows, WARPS), 3u);
    auto sums = room<float>(splits * dw.size());
    Dim grid = {blocks(rows, WARPS * ROWS), 1, 1};
    host::launch(grid, THREADS, forget_gates, rows, tokens, width, heads, xs.data(), ws.data(), bs.data(), gs.data());
    host::launch({blocks(rows * heads, THREADS), 1, 1}, THREADS, forget_gate_slopes, rows, tokens, heads, gs.data(), dgs.data(), slopes.data());
    host::launch(grid, THREADS, forget_gate_rows, rows, width, heads, ws.data(), slopes.data(), dxs.data());
    host::launch({blocks(width + 1, 32) * blocks(heads, HEADS), splits, 1}, THREADS, forget_gate_weights, rows, width, heads, xs.data(), slopes.data(),
                 sums.data());
    std::vector<float> dws(dw.size());
    for (size_t i = 0; i < sums.size(); i++) dws[i % dw.size()] += sums[i];
    check("forget gates", gs, g);
    check("forget gates, gradient of rows", dxs, dx);
    check("forget gates, of weights", dws, dw);
}

static void check_quadratic(long long rows, int dim, int zeros, double c, float scale) {
    using namespace quadratic;
    int width = 1 + dim + dim * (dim + 1) / 2 + zeros;
    Numbers x = random_numbers(rows * dim), g = random_numbers(rows * width), y(g.size()), dx(x.size());
    for (long long r = 0; r < rows; r++) {
        Numbers from(&x[r * dim], &x[r * dim] + dim);
        for (double& number : from) number *= scale;
        const double* grad = &g[r * width];
        double *to = &y[r * width], *back = &dx[r * dim];
        *to++ = 1, grad++;
        for (int i = 0; i < dim; i++) *to++ = from[i], back[i] += scale * *grad++;
        for (int i = 0; i < dim; i++) {
            for (int j = i; j < dim; j++, grad++) {
                double w = std::sqrt(i == j ? c : 2 * c);
                *to++ = w * from[i] * from[j];
                back[i] += scale * w * *grad * from[j];
                back[j] += scale * w * *grad * from[i];
            }
        }
    }
    auto xs = stored(x), gs = stored(g), ys = room<Stored>(y.size()), dxs = room<Stored>(x.size());
    host::launch({blocks(rows, WARPS * ROWS), 1, 1}, THREADS, quadratic_features, rows, dim, width, (float)c, scale, xs.data(), ys.data());
    host::launch({blocks(rows * dim, THREADS), 1, 1}, THREADS, quadratic_gradient, rows, dim, width, (float)c, scale, xs.data(), gs.data(),
                 dxs.data());
    check("polynomial features", ys, y);
    check("polynomial features, gradient", dxs, dx);
}

static void check_cross_entropy(int rows, int vocabulary, bool wide) {
    Numbers logits = random_numbers((size_t)rows * vocabulary), g = random_numbers(rows, false);
    for (int i = 0; i < vocabulary; i++) logits[i] *= 64;
    if (rows > 1) logits[vocabulary] = -INFINITY;
    std::vector<unsigned> targets(rows);
    Numbers losses(rows), gradients(logits.size());
    for (int r = 0; r < rows; r++) {
        const double* row = &logits[(size_t)r * vocabulary];
        targets[r] = (r * 31 + vocabulary - 1) % vocabulary;
        double largest = *std::max_element(row, row + vocabulary), sum = 0;
        for (int i = 0; i < vocabulary; i++) sum += std::exp(row[i] - largest);
        double log = largest + std::log(sum);
        losses[r] = log - row[targets[r]];
        for (int i = 0; i < vocabulary; i++) {
            gradients[(size_t)r * vocabulary + i] = g[r] * (std::exp(row[i] - log) - ((unsigned)i == targets[r]));
        }
    }
    auto ls = stored(logits);
    auto gs = floats(g), got = room<float>(rows), logs = room<float>(rows);
    Dim grid = {(unsigned)rows, 1, 1};
    using namespace cross_entropy;
    host::launch(grid, 256, wide ? cross_entropy_forward_wide : cross_entropy_forward, vocabulary, ls.data(), targets.data(), got.data(), logs.data());
    host::launch(grid, 256, wide ? cross_entropy_backward_wide : cross_entropy_backward, vocabulary, ls.data(), targets.data(), logs.data(), gs.data());
    check("cross-entropy", got, losses);
    check("cross-entropy, gradient", ls, gradients);
}

// With `same`, all positions hold one token.
static void check_embedding(int count, int width, int vocabulary, bool same = false) {
    Numbers g = random_numbers((size_t)count * width), want((size_t)vocabulary * width);
    std::vector<unsigned> ids(count);
    for (int i = 0; i < count; i++) {
        // Some tokens occur often, some never.
        ids[i] = i % 3 && !same ? i * 7 % (vocabulary - 1) : 0;
        for (int c = 0; c < width; c++) want[(size_t)ids[i] * width + c] += g[(size_t)i * width + c];
    }
    auto gs = stored(g);
    auto out = room<float>(want.size());
    host::launch({blocks(vocabulary, embedding::TOKENS), 1, 1}, 256, embedding::embedding_backward, count, vocabulary, width, ids.data(),
                 gs.data(), out.data());
    check("embedding, gradient", out, want);
}

static void check_adamw(long long count) {
    Numbers p = random_numbers(count, false), m = random_numbers(count, false), v = random_numbers(count, false), g = random_numbers(count, false);
    for (double& x : v) x *= x;
    auto ps = floats(p), ms = floats(m), vs = floats(v), gs = floats(g);
    double squares = 0;
    for (long long i = 0; i < count; i++) {
        squares += g[i] * g[i];
        double scaled = 0.5 * g[i];
        m[i] = 0.9 * m[i] + 0.1 * scaled;
        v[i] = 0.95 * v[i] + 0.05 * scaled * scaled;
        p[i] -= 0.01 * p[i] + 0.02 * m[i] / (std::sqrt(1.5 * v[i]) + 1e-8);
    }
    host::launch({blocks(count, 256), 1, 1}, 256, optimizer::adamw, count, 0.5f, 0.9f, 0.1f, 0.95f, 0.05f, 0.02f, 1.5f, 1e-8f, 0.01f,
                 ps.data(), ms.data(), vs.data(), gs.data());
    check("adamw", ps, p);
    check("adamw, first moment", ms, m);
    check("adamw, second moment", vs, v);
    auto sums = room<float>(10);
    host::launch({7, 1, 1}, 256, optimizer::sum_of_squares, count, 3ll, gs.data(), sums.data());
    double sum = 0;
    for (int i = 3; i < 10; i++) sum += sums[i];
    check("sum of squares", std::vector<float>{(float)sum}, {squares});
}

int main() {
    for (bool descending : {false, true}) {
        host::descending = descending;
        for (bool biased : {false, true}) {
            check_norm(1, 5, biased, false);
            check_norm(37, 72, biased, false);
            check_norm(70, 33, biased, false);
            check_norm(1, WIDE, biased, true);
            check_norm(150, 8 * WIDE, biased, true);
            check_norm(203, 14 * WIDE, biased, true);
            // Lanes without a row must not divide by zero.
            check_norm(5, 4 * WIDE, biased, true, 0.0f);
        }
        check_activations(777, false);
        check_activations(4200, true);
        for (bool neighbours : {false, true}) {
            for (bool tables : {false, true}) {
                check_heads(2, 3, 19, 7, neighbours, tables, false);
                check_heads(2, 3, 19, 16, neighbours, tables, true);
            }
        }
        for (int tokens : {1, 3, 8, 21}) {
            check_convolution(2, tokens, 5, false);
            check_convolution(3, tokens, 48, true);
        }
        check_forget_gates(1, 1, 1, 1, 0);
        check_forget_gates(2, 33, 40, 9, -3);
        check_forget_gates(3, 37, 70, 3, 6);
        check_quadratic(1, 1, 0, 0.5, 1);
        check_quadratic(75, 16, 1, 0.5, 0.5);
        check_quadratic(9, 40, 0, 0.25, 0.7f);
        check_quadratic(3, 301, 2, 0.5, 0.1f);
        check_cross_entropy(1, 1, false);
        check_cross_entropy(5, 700, false);
        check_cross_entropy(5, 2512, true);
        check_embedding(600, 40, 23);
        check_embedding(5000, 400, 7);
        check_embedding(1, 300, 2);
        check_embedding(4096, 20, 5, true);
        check_embedding(4097, 20, 5, true);
        check_adamw(5000);
    }
    return failures ? 1 : 0;
}
