/* Elementary functions of fp32 and bf16 arrays (see functions.h and functions_wide.h). */

#include "functions_loops.h"
#include "../matrix.h"

static const function_table table = TABLE;

static const function_table *fastest(void) {
  const function_table *const wider = table_avx512();
  return wider ? wider : &table;
}

void function_fp32(int32_t function, const float *from, float *to, int64_t count) { fastest()->functions[function](from, to, count); }

void power_fp32(const float *base, const float *exponent, float *to, int64_t count) { fastest()->power(base, exponent, to, count); }

void function_bf16(int32_t function, const uint16_t *from, uint16_t *to, int64_t count) {
  enum { BLOCK = 512 };
  float block[BLOCK];
  unary_loop *const compute = fastest()->functions[function];
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t size = least(BLOCK, count - first);
    for (int64_t i = 0; i < size; i++) block[i] = widened(from[first + i]);
    compute(block, block, size);
    for (int64_t i = 0; i < size; i++) to[first + i] = narrowed(block[i]);
  }
}
