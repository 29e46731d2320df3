// NVRTC, emulated by this machine's C++ compiler and `device.h`: "machine code" is the path of a
// library, kept in EMULATED_CACHE.

#include "driver.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <regex>
#include <sstream>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#define API extern "C" __attribute__((visibility("default"))) int

struct Program {
    std::string text, name, image, log;
    std::vector<std::pair<std::string, std::string>> headers;
};

API nvrtcVersion(int* major, int* minor) { return *major = 0, *minor = 0, 0; }
static const std::vector<int> ARCHS = {80, 89, 90, 100, 120};
API nvrtcGetNumSupportedArchs(int* count) { return *count = (int)ARCHS.size(), 0; }
API nvrtcGetSupportedArchs(int* archs) { return std::copy(ARCHS.begin(), ARCHS.end(), archs), 0; }
extern "C" __attribute__((visibility("default"))) const char* nvrtcGetErrorString(int error) {
    return error == 6 ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR unknown";
}
API nvrtcCreateProgram(Program** program, const char* text, const char* name, int count, const char* const* headers, const char* const* names) {
    *program = new Program{text, name, "", "", {}};
    for (int i = 0; i < count; i++) (*program)->headers.emplace_back(names[i], headers[i]);
    return 0;
}
API nvrtcDestroyProgram(Program** program) { return delete *program, *program = nullptr, 0; }

static std::string read(const std::string& path) {
    std::ifstream file(path);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// Puts what stands in for the device before a source, and launches of its kernels behind it.
static std::string emulated(const Program& program) {
    // Fibers share static variables as threads of a block share these; kernels with dynamic shared
    // memory have a global one.
    bool dynamic = program.text.find("extern __shared__") != std::string::npos;
    std::string source = "#include \"device.h\"\n#undef __shared__\n#define __shared__ " + std::string(dynamic ? "" : "static") +
                         "\n#line 1 \"" + program.name + "\"\n" + program.text + "\n#include \"module.h\"\n";
    std::string plain = std::regex_replace(program.text, std::regex("__launch_bounds__\\([^()]*\\)"), "");
    std::regex kernel("__global__\\s+void\\s+(\\w+)\\s*\\(");
    for (std::sregex_iterator i(plain.begin(), plain.end(), kernel), end; i != end; i++) source += "LAUNCH(" + (*i)[1].str() + ")\n";
    return source;
}

API nvrtcCompileProgram(Program* program, int count, const char* const* options) {
    std::string defines;
    for (int i = 0; i < count; i++) {
        std::string option = options[i];
        if (option.rfind("--define-macro=", 0) == 0) defines += " '-D" + option.substr(15) + "'";
    }
    if (setting("EMULATED_TRACE", 0)) std::fprintf(stderr, "compiles %s%s\n", program->name.c_str(), defines.c_str());
    const char* compiler = std::getenv("CXX");
    std::string start = std::string(compiler ? compiler : "c++") +
                        " -std=c++17 -O2 -fno-strict-aliasing -fsanitize=alignment -fsanitize-undefined-trap-on-error -shared -fPIC -fvisibility=hidden -fno-gnu-unique -U_FORTIFY_SOURCE"
                        " -Wno-unknown-pragmas -Wno-attributes";
    // All that the machine code depends on.
    std::string source = emulated(*program), everything = start + source + defines;
    for (const char* file : {HOST "/device.h", HOST "/races.h", HERE "/module.h"}) everything += read(file);
    for (auto& [name, text] : program->headers) everything += name + text;
    const char* named = std::getenv("EMULATED_CACHE");
    if (!named) give_up("EMULATED_CACHE names no folder for compiled kernels");
    std::string cache = named, folder = cache + "/" + std::to_string(std::hash<std::string>()(everything));
    std::string library = folder + "/kernels.so";
    if (access(library.c_str(), R_OK) != 0) {
        mkdir(cache.c_str(), 0777);
        mkdir(folder.c_str(), 0777);
        // Another process may compile the same now, from files of its own.
        std::string sources = folder + "/" + std::to_string(getpid()), unfinished = sources + "/kernels.so";
        mkdir(sources.c_str(), 0777);
        std::ofstream(sources + "/kernels.cpp") << source;
        for (auto& [name, text] : program->headers) std::ofstream(sources + "/" + name) << text;
        if (access(sources.c_str(), W_OK) != 0) give_up("cannot write to " + sources);
        std::string command = start + " -I '" + sources + "' -I '" HOST "' -I '" HERE "'" + defines + " -o '" + unfinished + "' '" + sources +
                              "/kernels.cpp' 2>'" + sources + "/log'";
        if (std::system(command.c_str()) != 0) {
            program->log = read(sources + "/log");
            return 6;
        }
        std::rename(unfinished.c_str(), library.c_str());
    }
    program->image = EMULATED + library;
    return 0;
}

API nvrtcGetProgramLogSize(Program* program, size_t* size) { return *size = program->log.size() + 1, 0; }
API nvrtcGetProgramLog(Program* program, char* log) { return std::strcpy(log, program->log.c_str()), 0; }
API nvrtcGetCUBINSize(Program* program, size_t* size) { return *size = program->image.size() + 1, 0; }
API nvrtcGetCUBIN(Program* program, char* image) { return std::strcpy(image, program->image.c_str()), 0; }
API nvrtcGetPTXSize(Program* program, size_t* size) { return nvrtcGetCUBINSize(program, size); }
API nvrtcGetPTX(Program* program, char* image) { return nvrtcGetCUBIN(program, image); }
