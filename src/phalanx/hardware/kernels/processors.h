/* Kernels whose operations are each rounded by themselves, in as wide vectors as the processor has. */
#ifndef PHALANX_PROCESSORS_H
#define PHALANX_PROCESSORS_H
#include <float.h>

#if FLT_EVAL_METHOD != 0
#error "operations would be rounded in a wider format"
#endif

/* One library for every machine that shares the folder it lies in: the loader picks what this processor has. What a kernel calls must
   become a part of it, or it is compiled for the least of processors. PHALANX_NO_AVX512 and PHALANX_NO_VECTORS are builds for tests. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(PHALANX_NO_VECTORS)
#if defined(PHALANX_NO_AVX512)
#define EACH_PROCESSOR __attribute__((target_clones("avx2", "default")))
#else
#define EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#define WITHIN static inline __attribute__((always_inline))
#else
#define EACH_PROCESSOR
#define WITHIN static inline
#endif

#endif
