/* Loops of the fp32 functions over arrays, for one width of vectors: functions.c and functions_avx512.c include this.

   What remains after whole vectors is padded to one. */

#ifndef PORTABLE_FUNCTIONS_LOOPS_H
#define PORTABLE_FUNCTIONS_LOOPS_H

#include "functions.h"
#include "functions_table.h"
#include "functions_wide.h"
#include "../kernels.h"
#include "power.h"

/* NaN has the same bits on every processor. */
INLINE wides one_wide_nan(wides x) { return wide_chosen(is_equal_wide(x, x), x, wide_all(NAN)); }

#define LOOP(name, width, step)                                                   \
  FUSING static void name##_loop(const float *from, float *to, int64_t count) {   \
    int64_t i = 0;                                                                \
    for (; i + width <= count; i += width) step(name, from + i, to + i);          \
    if (i < count) {                                                              \
      float rest[width] = {0};                                                    \
      memcpy(rest, from + i, (size_t)(count - i) * sizeof(float));                \
      step(name, rest, rest);                                                     \
      memcpy(to + i, rest, (size_t)(count - i) * sizeof(float));                  \
    }                                                                             \
  }
#define LANES_STEP(name, from, to) put(to, name##_lanes(at(from)))
#define WIDE_STEP(name, from, to) put_narrowed(to, one_wide_nan(name##_wide(widened_at(from))))
#define LANES_LOOP(name) LOOP(name, LANES, LANES_STEP)
#define WIDE_LOOP(name) LOOP(name, WIDES, WIDE_STEP)

LANES_LOOP(exp)
LANES_LOOP(exp2)
LANES_LOOP(log)
LANES_LOOP(sigmoid)
LANES_LOOP(silu)
LANES_LOOP(tanh)
LANES_LOOP(sqrt)
LANES_LOOP(rsqrt)
WIDE_LOOP(expm1)
WIDE_LOOP(log1p)
WIDE_LOOP(log2)
WIDE_LOOP(log10)
WIDE_LOOP(erf)
WIDE_LOOP(gelu)
WIDE_LOOP(gelu_tanh)
WIDE_LOOP(sin)
WIDE_LOOP(cos)
WIDE_LOOP(softplus)
WIDE_LOOP(logsigmoid)
WIDE_LOOP(gelu_slope)
WIDE_LOOP(gelu_tanh_slope)
WIDE_LOOP(silu_slope)

/* base^exponent of one vector. Lanes that are not a positive finite number to a finite power are corrected one by one. */
FUSING static inline void power_step(const float *base, const float *exponent, float *to) {
  const wides x = widened_at(base), y = widened_at(exponent), size = wide_magnitude(x);
  wides power = power_positive(size, y);
  const wide_mask ordinary =
      is_less_wide(wide_all(0), x) & is_less_wide(x, wide_all(INFINITY)) & is_less_wide(wide_magnitude(y), wide_all(INFINITY));
  if (any_wide(~ordinary))
    for (int i = 0; i < WIDES; i++)
      if (!is_set(ordinary, i)) power[i] = power_limits(x[i], y[i], power[i]);
  put_narrowed(to, one_wide_nan(power));
}
FUSING static void power_loop(const float *base, const float *exponent, float *to, int64_t count) {
  int64_t i = 0;
  for (; i + WIDES <= count; i += WIDES) power_step(base + i, exponent + i, to + i);
  if (i < count) {
    const size_t size = (size_t)(count - i) * sizeof(float);
    float bases[WIDES] = {0}, exponents[WIDES] = {0};
    memcpy(bases, base + i, size), memcpy(exponents, exponent + i, size);
    power_step(bases, exponents, bases);
    memcpy(to + i, bases, size);
  }
}

#define TABLE                                   \
  {                                             \
    {                                           \
        [FUNCTION_EXP] = exp_loop,              \
        [FUNCTION_EXPM1] = expm1_loop,          \
        [FUNCTION_EXP2] = exp2_loop,            \
        [FUNCTION_LOG] = log_loop,              \
        [FUNCTION_LOG1P] = log1p_loop,          \
        [FUNCTION_LOG2] = log2_loop,            \
        [FUNCTION_SIGMOID] = sigmoid_loop,      \
        [FUNCTION_SILU] = silu_loop,            \
        [FUNCTION_TANH] = tanh_loop,            \
        [FUNCTION_ERF] = erf_loop,              \
        [FUNCTION_GELU] = gelu_loop,            \
        [FUNCTION_GELU_TANH] = gelu_tanh_loop,  \
        [FUNCTION_SIN] = sin_loop,              \
        [FUNCTION_COS] = cos_loop,              \
        [FUNCTION_SQRT] = sqrt_loop,            \
        [FUNCTION_RSQRT] = rsqrt_loop,          \
        [FUNCTION_LOG10] = log10_loop,          \
        [FUNCTION_SOFTPLUS] = softplus_loop,    \
        [FUNCTION_LOGSIGMOID] = logsigmoid_loop, \
        [FUNCTION_GELU_SLOPE] = gelu_slope_loop, \
        [FUNCTION_GELU_TANH_SLOPE] = gelu_tanh_slope_loop, \
        [FUNCTION_SILU_SLOPE] = silu_slope_loop, \
    },                                          \
        power_loop,                             \
  }

#endif
