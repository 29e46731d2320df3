// The type that tensors hold, by the macro STORAGE: 0 f32, 1 f16, 2 bf16. For kernels without
// tensor cores; those with tensor cores include tile.cuh instead.

#ifndef PERFORMER_STORED
#define PERFORMER_STORED

#include "warp.cuh"

#if STORAGE == 0
typedef float Stored;
#elif STORAGE == 1
typedef Half Stored;
#else
typedef Bfloat Stored;
#endif

#endif
