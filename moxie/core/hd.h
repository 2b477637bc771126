// MOXIE_HD marks functions that run on host and device alike. Everything in pipeline/ carries it,
// so the CPU workers, the CUDA CTAs and the simulator execute the same lines. A host compiler sees
// nothing.
#pragma once

#if defined(__CUDACC__)
#define MOXIE_HD __host__ __device__
#else
#define MOXIE_HD
#endif
