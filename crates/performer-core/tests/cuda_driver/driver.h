// Declarations shared by the files of the emulated driver.

#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

// Candle's own kernels: whether one of this name is emulated, and running it at once.
bool candle_knows(const std::string& name);
void candle_run(const std::string& name, void** arguments);

// Images that the emulated NVRTC hands out begin with this, followed by the path of a library. They
// begin as machine code does, by which the program tells it from PTX where it reads what it kept.
constexpr char EMULATED[] = "\177ELF emulated:";

// Ends the program with a message.
[[noreturn]] inline void give_up(const std::string& what) {
    std::fprintf(stderr, "emulated CUDA device: %s\n", what.c_str());
    std::_Exit(3);
}

// Returns a setting from the environment.
inline long setting(const char* name, long otherwise) {
    const char* value = std::getenv(name);
    return value ? std::atol(value) : otherwise;
}

inline bool kernels_are_skipped() {
    static const bool skipped = setting("EMULATED_SKIP", 0);
    return skipped;
}
