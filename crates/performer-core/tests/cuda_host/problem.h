// How the programs read problems from stdin and write results to stdout.

#pragma once

// Reader reads numbers from stdin.
struct Reader {
    template <class T>
    std::vector<T> all(size_t count) {
        std::vector<T> x(count);
        if (std::fread(x.data(), sizeof(T), count, stdin) != count) {
            std::fprintf(stderr, "the input is too short\n");
            std::_Exit(2);
        }
        return x;
    }
    int integer() { return all<int>(1)[0]; }
    std::vector<float> numbers(size_t count) { return all<float>(count); }
    std::vector<unsigned char> bytes(size_t count) { return all<unsigned char>(count); }
    std::vector<Stored> stored(size_t count) {
        std::vector<float> x = numbers(count);
        std::vector<Stored> y(count);
        for (size_t i = 0; i < count; i++) narrow(x[i], y[i]);
        return y;
    }
};

// Returns memory whose bits are all ones: NaN in every type.
template <class T>
std::vector<T> poison(size_t count) {
    std::vector<T> x(count);
    if (count) std::memset((void*)x.data(), 0xff, count * sizeof(T));
    return x;
}

// Writes numbers to stdout as f32.
template <class T>
void write(const std::vector<T>& x) {
    std::vector<float> y;
    for (T number : x) y.push_back(widen(number));
    if (std::fwrite(y.data(), sizeof(float), y.size(), stdout) != y.size()) std::_Exit(2);
}
