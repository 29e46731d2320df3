// The race mode of the emulated device: compiled with -fsanitize=thread and RACES=1, every thread
// of a block is a fiber of ThreadSanitizer, which reports two accesses of one number that no
// barrier orders. Only __syncthreads and __syncwarp order accesses; what threads exchange by other
// instructions does not. What the emulation itself reads and writes is not looked at (`Quiet`).
//
// Two orders of threads cannot show all that: they show a race only if it changes a result.

#pragma once

#if RACES
#include <sanitizer/tsan_interface.h>

extern "C" void AnnotateIgnoreReadsBegin(const char*, int);
extern "C" void AnnotateIgnoreReadsEnd(const char*, int);
extern "C" void AnnotateIgnoreWritesBegin(const char*, int);
extern "C" void AnnotateIgnoreWritesEnd(const char*, int);
#endif

namespace host {

#if RACES
// Quiet hides accesses of the running thread as long as it lives.
struct Quiet {
    Quiet() { AnnotateIgnoreReadsBegin(__FILE__, __LINE__), AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
    ~Quiet() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__), AnnotateIgnoreReadsEnd(__FILE__, __LINE__); }
};

// Order is a barrier's: what comes before it in any of its threads is before what comes after it in
// all. A thread may be at the next barrier before another has left this one, so barriers take
// turns.
struct Order {
    char objects[2];
    void arrive(int turn) { __tsan_release(&objects[turn % 2]); }
    void leave(int turn) { __tsan_acquire(&objects[turn % 2]); }
};

inline void* new_fiber() { return __tsan_create_fiber(0); }
inline void* this_fiber() { return __tsan_get_current_fiber(); }
inline void delete_fiber(void* fiber) { __tsan_destroy_fiber(fiber); }
inline void go_to_fiber(void* fiber) { __tsan_switch_to_fiber(fiber, __tsan_switch_to_fiber_no_sync); }
// Reads 16 bytes as the running thread's own.
inline void look_at(const void* from) {
    for (int i = 0; i < 8; i++) (void)((const volatile unsigned short*)from)[i];
}
#else
struct Quiet {
    Quiet() {}
};
struct Order {
    void arrive(int) {}
    void leave(int) {}
};
inline void look_at(const void*) {}
#endif

}  // namespace host
