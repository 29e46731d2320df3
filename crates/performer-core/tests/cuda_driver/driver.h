// What the parts of the emulated driver share.

#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

// Kernels of Candle's: whether there is one of this name, and running it at once.
bool candle_knows(const std::string& name);
void candle_run(const std::string& name, void** arguments);

// Images that the emulated NVRTC hands out begin with this, followed by the path of a library.
constexpr char EMULATED[] = "emulated:";

[[noreturn]] inline void give_up(const std::string& what) {
    std::fprintf(stderr, "emulated CUDA device: %s\n", what.c_str());
    std::_Exit(3);
}

// A setting from the environment.
inline long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atol(value) : otherwise;
}

inline bool kernels_are_skipped() {
    static const bool skipped = setting("EMULATED_SKIP", 0);
    return skipped;
}
