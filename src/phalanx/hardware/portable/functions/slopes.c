/* Backward passes of elementary functions: the slope of a result times the function's derivative, in fp32 or fp64, rounded once to bf16. */

#include "../kernels.h"
#include "../matrix.h"

enum { BLOCK = 1024 };

/* `derivatives`, which lie where the functions' inputs or results lay, times the slopes. */
#define MULTIPLIED(REAL, function_of_type)                                                             \
  {                                                                                                    \
    const REAL *g = slope, *x = at;                                                                    \
    REAL *result = to, derivatives[BLOCK];                                                             \
    for (int64_t first = 0; first < count; first += BLOCK) {                                           \
      int64_t size = least(BLOCK, count - first);                                                      \
      if (function == FUNCTION_SIGMOID)                                                                \
        for (int64_t i = 0; i < size; i++) derivatives[i] = (1 - x[first + i]) * x[first + i];         \
      else if (function == FUNCTION_TANH)                                                              \
        for (int64_t i = 0; i < size; i++) derivatives[i] = 1 - x[first + i] * x[first + i];           \
      else                                                                                             \
        function_of_type(function, x + first, derivatives, size);                                      \
      for (int64_t i = 0; i < size; i++) result[first + i] = g[first + i] * derivatives[i];            \
    }                                                                                                  \
  }

static void of_fp32(int32_t function, const float *slope, const float *at, float *to, int64_t count) MULTIPLIED(float, function_fp32)

static void of_fp64(int32_t function, const double *slope, const double *at, double *to, int64_t count)
    MULTIPLIED(double, function_fp64)

static void of_bf16(int32_t function, const uint16_t *slope, const uint16_t *at, uint16_t *to, int64_t count) {
  float g[BLOCK], x[BLOCK];
  for (int64_t first = 0; first < count; first += BLOCK) {
    int64_t size = least(BLOCK, count - first);
    for (int64_t i = 0; i < size; i++) g[i] = widened(slope[first + i]), x[i] = widened(at[first + i]);
    of_fp32(function, g, x, g, size);
    for (int64_t i = 0; i < size; i++) to[first + i] = narrowed(g[i]);
  }
}

void slopes(int32_t format, int32_t function, const void *slope, const void *at, void *to, int64_t count) {
  if (format == FP64)
    of_fp64(function, slope, at, to, count);
  else if (format == BF16)
    of_bf16(function, slope, at, to, count);
  else
    of_fp32(function, slope, at, to, count);
}
