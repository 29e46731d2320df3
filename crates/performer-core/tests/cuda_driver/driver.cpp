// CUDA's driver, emulated on the memory and the processor of this machine, for running the launches
// of the program and not only the kernels: arguments reach kernels as bytes, buffers have exactly
// their size (what is beyond the end faults), new memory holds NaN, freed memory is gone. All work
// is done when it is asked for, so nothing about the order between streams is shown.
//
// EMULATED_CARD (90: the architecture, from which follows how much shared memory a block may have),
// EMULATED_MEMORY (MiB, 16384), EMULATED_ORDER (1: threads in the other order), EMULATED_TRUNCATE
// (1: matrix products cut off what tensor cores cut off), EMULATED_TRACE (1: prints launches,
// events that are made, and compilations), EMULATED_SKIP (1: kernels do nothing, so that what is
// left is the time of the host), EMULATED_FAULT (the name of a kernel that makes the device fail,
// as one does that touches memory which is not its own: the process gets nothing but errors from
// then on).

#include "driver.h"

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <mutex>
#include <set>
#include <sys/mman.h>
#include <unistd.h>

#define API extern "C" __attribute__((visibility("default"))) int

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

// Whether a kernel made the device fail (EMULATED_FAULT). Like a device, this one says so when it
// is next waited for or given something to do.
static bool failed = false;

static std::recursive_mutex everything;
typedef std::lock_guard<std::recursive_mutex> Lock;

// ---- Memory ----

// Block is an allocation: its mapping with a guard page on either side, and the bytes asked for.
struct Block {
    char* mapped;
    size_t mapped_bytes, bytes;
};
static std::map<char*, Block> blocks;
static size_t in_use = 0;
static const size_t PAGE = 4096;

static size_t memory() { return (size_t)setting("EMULATED_MEMORY", 16 << 10) << 20; }

// Allocates memory that ends where its last page does: a byte beyond it does not exist.
static void* device_allocate(size_t bytes) {
    Lock lock(everything);
    if (in_use + bytes > memory()) return nullptr;
    if (kernels_are_skipped()) {
        // Skipped kernels get zeros, with which training goes on and which cost nothing before
        // something reads them.
        bool large = bytes > 64 << 10;
        char* at = (char*)(large ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : std::calloc(bytes, 1));
        blocks[at] = {at, large ? bytes : 0, bytes};
        return at;
    }
    size_t room = (bytes + 15) / 16 * 16, pages = (room + PAGE - 1) / PAGE * PAGE;
    char* mapped = (char*)mmap(nullptr, pages + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED || mprotect(mapped + PAGE, pages, PROT_READ | PROT_WRITE) != 0) give_up("this machine's memory ran out");
    char* at = mapped + PAGE + pages - room;
    std::memset(mapped + PAGE, 0xff, pages);
    blocks[at] = {mapped, pages + 2 * PAGE, bytes};
    in_use += bytes;
    return at;
}

static void device_free(void* at) {
    Lock lock(everything);
    auto found = blocks.find((char*)at);
    if (found == blocks.end()) give_up("memory is freed that was not allocated, or twice");
    const Block& block = found->second;
    if (kernels_are_skipped()) {
        block.mapped_bytes ? (void)munmap(at, block.bytes) : std::free(at);
        return (void)blocks.erase(found);
    }
    for (const char* slack = found->first + block.bytes; slack < block.mapped + block.mapped_bytes - PAGE; slack++) {
        if (*slack != (char)0xff) give_up("something wrote past the end of " + std::to_string(block.bytes) + " bytes");
    }
    in_use -= block.bytes;
    munmap(block.mapped, block.mapped_bytes);
    blocks.erase(found);
}

// Ends the program unless `bytes` from an address belong to one block.
static void check(const void* at, size_t bytes, const char* what) {
    Lock lock(everything);
    auto after = blocks.upper_bound((char*)at);
    if (bytes == 0) return;
    if (after != blocks.begin()) {
        auto& [start, block] = *std::prev(after);
        if ((char*)at + bytes <= start + block.bytes) return;
    }
    give_up(std::string(what) + " of " + std::to_string(bytes) + " bytes goes beyond its buffer");
}

API cuMemAlloc_v2(void** at, size_t bytes) {
    if (failed) return ILLEGAL_ADDRESS;
    if (bytes == 0) return INVALID_VALUE;
    *at = device_allocate(bytes);
    return *at ? SUCCESS : OUT_OF_MEMORY;
}
API cuMemAllocAsync(void** at, size_t bytes, void*) { return cuMemAlloc_v2(at, bytes); }
API cuMemFree_v2(void* at) { return device_free(at), failed ? ILLEGAL_ADDRESS : SUCCESS; }
API cuMemFreeAsync(void* at, void*) { return cuMemFree_v2(at); }
API cuMemGetInfo_v2(size_t* free, size_t* total) {
    Lock lock(everything);
    *total = memory();
    *free = *total - in_use;
    return SUCCESS;
}
API cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t bytes, void*) {
    if (failed) return ILLEGAL_ADDRESS;
    check(to, bytes, "a copy to the device");
    return std::memcpy(to, from, bytes), SUCCESS;
}
API cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t bytes, void*) {
    if (failed) return ILLEGAL_ADDRESS;
    check(from, bytes, "a copy from the device");
    return std::memcpy(to, from, bytes), SUCCESS;
}
API cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t bytes, void*) {
    if (failed) return ILLEGAL_ADDRESS;
    check(to, bytes, "a copy's target");
    check(from, bytes, "a copy's source");
    return std::memmove(to, from, bytes), SUCCESS;
}
API cuMemcpyPeerAsync(void* to, void*, const void* from, void*, size_t bytes, void*) { return cuMemcpyDtoDAsync_v2(to, from, bytes, nullptr); }
API cuMemsetD8Async(void* at, unsigned char value, size_t bytes, void*) {
    if (failed) return ILLEGAL_ADDRESS;
    check(at, bytes, "a memset");
    if (kernels_are_skipped()) return SUCCESS;
    return std::memset(at, value, bytes), SUCCESS;
}
API cuDeviceGetDefaultMemPool(void** pool, int) { return *pool = (void*)1, SUCCESS; }
API cuMemPoolSetAttribute(void*, int, void*) { return SUCCESS; }

// ---- Kernels ----

// The architecture, and the most shared memory of a block on cards that have it.
static int card() { return (int)setting("EMULATED_CARD", 90); }
static int shared_memory() {
    int kib = card() == 80 || card() == 87 ? 163 : card() / 10 == 8 || card() / 10 == 12 ? 99 : 227;
    return kib << 10;
}

typedef void (*Launcher)(unsigned, unsigned, int, size_t, int, void**);

struct Function {
    std::string name;
    // Null for Candle's kernels.
    Launcher launcher;
    size_t shared_allowed = 48 << 10;
};

struct Module {
    // Either a library of emulated kernels, or the names of the kernels in PTX, which a stand-in
    // for nvcc leaves empty.
    void* library = nullptr;
    bool is_code = false;
    std::set<std::string> entries;
    std::map<std::string, Function*> functions;
};

static std::string running = "no kernel";

static void on_fault(int signal, siginfo_t* info, void*) {
    char line[512];
    if (signal == SIGILL) {
        // Kernels are compiled so that they trap here.
        int count = std::snprintf(line, sizeof(line), "emulated CUDA device: %s reads or writes several bytes at an address that is not aligned for them\n", running.c_str());
        if (write(2, line, count) < 0) std::_Exit(4);
        std::_Exit(3);
    }
    const char* where = (const char*)info->si_addr;
    long distance = 0;
    size_t size = 0;
    for (auto& [start, block] : blocks) {
        if (where >= block.mapped && where < block.mapped + block.mapped_bytes) distance = where - start, size = block.bytes;
    }
    int count = std::snprintf(line, sizeof(line), "emulated CUDA device: %s touches memory that is not there: byte %ld of a buffer of %zu\n", running.c_str(), distance, size);
    if (write(2, line, count) < 0) std::_Exit(4);
    std::_Exit(3);
}

API cuModuleLoadData(Module** module, const char* image) {
    *module = new Module;
    if (setting("EMULATED_TRACE", 0)) std::fprintf(stderr, "loads a module\n");
    if (std::strncmp(image, EMULATED, sizeof(EMULATED) - 1) != 0) {
        // Real machine code, which kernels that do nothing may have, or PTX.
        if (std::strncmp(image, "\177ELF", 4) == 0) {
            if (!kernels_are_skipped()) give_up("this is machine code of a card, which the emulated device cannot run");
            (*module)->is_code = true;
            return SUCCESS;
        }
        for (const char* at = image; (at = std::strstr(at, ".entry ")); at++) {
            (*module)->entries.insert(std::string(at + 7, std::strcspn(at + 7, "( \n")));
        }
        return SUCCESS;
    }
    (*module)->library = dlopen(image + sizeof(EMULATED) - 1, RTLD_NOW | RTLD_LOCAL);
    if (!(*module)->library) give_up(dlerror());
    return SUCCESS;
}
API cuModuleLoad(Module**, const char*) { give_up("modules in files are not emulated"); }
API cuModuleUnload(Module* module) {
    for (auto& [name, function] : module->functions) delete function;
    if (module->library) dlclose(module->library);
    return delete module, SUCCESS;
}
API cuModuleGetFunction(Function** function, Module* module, const char* name) {
    Lock lock(everything);
    Function*& kept = module->functions[name];
    if (!kept) {
        Launcher launcher = module->library ? (Launcher)dlsym(module->library, (std::string("launch_") + name).c_str()) : nullptr;
        bool there = module->library ? launcher != nullptr : module->entries.empty() || module->entries.count(name);
        if (!there) return NOT_FOUND;
        if (!launcher && !module->is_code && !candle_knows(name)) give_up(std::string("Candle's kernel ") + name + " is not emulated");
        kept = new Function{name, launcher};
    }
    return *function = kept, SUCCESS;
}
API cuFuncSetAttribute(Function* function, int attribute, int value) {
    // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    if (attribute != 8 || value > shared_memory()) return INVALID_VALUE;
    function->shared_allowed = value;
    return SUCCESS;
}
API cuLaunchKernel(Function* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z, unsigned shared, void*, void** arguments, void**) {
    Lock lock(everything);
    if (failed) return ILLEGAL_ADDRESS;
    static const char* const faulty = std::getenv("EMULATED_FAULT");
    if (faulty && function->name == faulty) return failed = true, SUCCESS;
    bool sizes = x && y && z && threads && threads * threads_y * threads_z <= 1024 && y <= 65535 && z <= 65535;
    if (!sizes || shared > function->shared_allowed) return INVALID_VALUE;
    static const bool trace = setting("EMULATED_TRACE", 0);
    if (kernels_are_skipped() && !trace) return SUCCESS;
    running = function->name + " in (" + std::to_string(x) + ", " + std::to_string(y) + ", " + std::to_string(z) + ") blocks of " + std::to_string(threads);
    if (trace) std::fprintf(stderr, "%s, %u bytes shared\n", running.c_str(), shared);
    if (kernels_are_skipped()) return SUCCESS;
    if (!function->launcher) {
        candle_run(function->name, arguments);
    } else {
        if (z != 1 || threads_y != 1 || threads_z != 1) give_up(running + ": blocks of more than one dimension, or grids of three");
        long mode = setting("EMULATED_ORDER", 0) + 2 * setting("EMULATED_TRUNCATE", 0);
        function->launcher(x, y, (int)threads, shared, (int)mode, arguments);
    }
    running = "no kernel";
    return SUCCESS;
}

// ---- Device, context, streams, events ----

static int one;

API cuInit(unsigned) {
    static char stack[64 << 10];
    stack_t alternate = {};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof(stack);
    sigaltstack(&alternate, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
    sigaction(SIGILL, &action, nullptr);
    return SUCCESS;
}
API cuDriverGetVersion(int* version) { return *version = 13000, SUCCESS; }
API cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
API cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal == 0 ? SUCCESS : 101; }
API cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "emulated on the CPU"), SUCCESS; }
API cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 75: *value = card() / 10; break;  // compute capability
        case 76: *value = card() % 10; break;
        case 97: *value = shared_memory(); break;  // what a block may ask for
        case 115: *value = 1; break;           // memory pools
        default: give_up("attribute " + std::to_string(attribute) + " of a device is not emulated");
    }
    return SUCCESS;
}
API cuDevicePrimaryCtxRetain(void** context, int) { return *context = &one, SUCCESS; }
API cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
API cuCtxGetCurrent(void** context) { return *context = &one, SUCCESS; }
API cuCtxSetCurrent(void*) { return SUCCESS; }
API cuCtxDestroy_v2(void*) { return SUCCESS; }
API cuStreamDestroy_v2(void*) { return SUCCESS; }
API cuStreamSynchronize(void*) { return failed ? ILLEGAL_ADDRESS : SUCCESS; }
API cuStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
API cuStreamIsCapturing(void*, int* status) { return *status = 0, SUCCESS; }

typedef std::chrono::steady_clock Clock;
API cuEventCreate(Clock::time_point** event, unsigned) {
    static const bool trace = setting("EMULATED_TRACE", 0);
    if (trace) std::fprintf(stderr, "makes an event\n");
    return *event = new Clock::time_point, SUCCESS;
}
API cuEventDestroy_v2(Clock::time_point* event) { return delete event, SUCCESS; }
API cuEventRecord(Clock::time_point* event, void*) { return *event = Clock::now(), SUCCESS; }
API cuEventSynchronize(void*) { return failed ? ILLEGAL_ADDRESS : SUCCESS; }
API cuEventElapsedTime_v2(float* milliseconds, Clock::time_point* start, Clock::time_point* end) {
    return *milliseconds = std::chrono::duration<float, std::milli>(*end - *start).count(), SUCCESS;
}

API cuGetErrorString(int error, const char** text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : error == INVALID_VALUE ? "invalid argument" : error == NOT_FOUND ? "named symbol not found" : error == ILLEGAL_ADDRESS ? "an illegal memory access was encountered" : "unknown error";
    return SUCCESS;
}
