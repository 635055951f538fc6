/* The fp32 functions in vectors of sixteen, for x86-64 processors with AVX-512: the bits of functions.c in less time. */

#if defined(__x86_64__) && !defined(PHALANX_NO_VECTORS) && !defined(PHALANX_NO_AVX512)
#define PHALANX_AVX512
#include "functions_loops.h"

static const function_table table = TABLE;

const function_table *table_avx512(void) {
  const int supported = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl");
  return supported ? &table : NULL;
}
#else
#include "functions_table.h"

const function_table *table_avx512(void) { return 0; }
#endif
