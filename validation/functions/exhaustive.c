/* Largest error of the fp32 functions over all 2^32 arguments, in units in the last place of the exact result.

     cd src/phalanx/hardware/portable/functions
     gcc -O3 -std=gnu11 -ffp-contract=off -fno-math-errno -I.. ../../../../../validation/functions/exhaustive.c functions.c functions_avx512.c \
         functions_fp64.c -o /tmp/exhaustive -lm
     /tmp/exhaustive               all functions, about an hour on one core
     /tmp/exhaustive 256 exp log   every 256th argument of these

   The reference is the C library's, in fp64, or in long double where fp64 loses digits: with x86-64's 64-bit significand it is good to
   2^-30 of the result or better. An infinite result counts as 2^128. Exits with 1 if a function's error is above 1 ulp, but for the
   derivatives: where they cross zero, an error of about 10^-12 is many units of a result that is almost zero. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

typedef long double wide;

static double normal(double x) { return 0.5 * erfc(-x * M_SQRT1_2); }
static double sigmoid(double x) { return 1 / (1 + exp(-x)); }
static double silu(double x) { return x < -200 ? -0.0 : x * sigmoid(x); }
static double gelu(double x) { return x < -30 ? -0.0 : x * normal(x); }
static wide gelu_scale(void) { return 2 * sqrtl(2 / acosl(-1)); }
static double gelu_tanh(double x) {
  if (fabs(x) > 30) return x > 0 ? x : -0.0;
  return (double)(x / (1 + expl(-gelu_scale() * (x + 0.044715L * x * x * x))));
}
static double rsqrt(double x) { return 1 / sqrt(x); }
static double softplus(double x) { return x > 200 ? x : log1p(exp(x)); }
static double logsigmoid(double x) { return -softplus(-x); }

static double gelu_slope(double x) {
  if (fabs(x) > 30) return x > 0;
  return (double)(0.5L * erfcl(-x * sqrtl(0.5L)) + x * expl(-0.5L * x * x) / sqrtl(2 * acosl(-1)));
}
static double silu_slope(double x) {
  if (fabs(x) > 200) return x > 0;
  const wide e = expl(-fabsl((wide)x)), top = x < 0 ? e : 1, other = x < 0 ? 1 : e;
  return (double)(top / (1 + e) * (1 + x * (other / (1 + e))));
}
static double gelu_tanh_slope(double x) {
  if (fabs(x) > 30) return x > 0;
  const wide argument = gelu_scale() * (x + 0.044715L * x * x * x), slope = gelu_scale() * (1 + 3 * 0.044715L * x * x);
  const wide e = expl(-fabsl(argument)), top = x < 0 ? e : 1, other = x < 0 ? 1 : e;
  return (double)(top / (1 + e) * (1 + x * slope * (other / (1 + e))));
}

static const struct {
  const char *name;
  double (*exact)(double);
} functions[FUNCTIONS] = {
    [FUNCTION_EXP] = {"exp", exp},
    [FUNCTION_EXPM1] = {"expm1", expm1},
    [FUNCTION_EXP2] = {"exp2", exp2},
    [FUNCTION_LOG] = {"log", log},
    [FUNCTION_LOG1P] = {"log1p", log1p},
    [FUNCTION_LOG2] = {"log2", log2},
    [FUNCTION_SIGMOID] = {"sigmoid", sigmoid},
    [FUNCTION_SILU] = {"silu", silu},
    [FUNCTION_TANH] = {"tanh", tanh},
    [FUNCTION_ERF] = {"erf", erf},
    [FUNCTION_GELU] = {"gelu", gelu},
    [FUNCTION_GELU_TANH] = {"gelu_tanh", gelu_tanh},
    [FUNCTION_SIN] = {"sin", sin},
    [FUNCTION_COS] = {"cos", cos},
    [FUNCTION_SQRT] = {"sqrt", sqrt},
    [FUNCTION_RSQRT] = {"rsqrt", rsqrt},
    [FUNCTION_LOG10] = {"log10", log10},
    [FUNCTION_SOFTPLUS] = {"softplus", softplus},
    [FUNCTION_LOGSIGMOID] = {"logsigmoid", logsigmoid},
    [FUNCTION_GELU_SLOPE] = {"gelu_slope", gelu_slope},
    [FUNCTION_GELU_TANH_SLOPE] = {"gelu_tanh_slope", gelu_tanh_slope},
    [FUNCTION_SILU_SLOPE] = {"silu_slope", silu_slope},
};

/* The error of `result` in units in the last place of `exact`, infinite if only one of them is NaN. */
static double error_in_ulp(float result, double exact) {
  if (exact != exact || result != result) return (exact != exact) == (result != result) ? 0 : INFINITY;
  const double number = isinf(result) ? copysign(0x1p128, result) : result;
  if (isinf(result) && fabs(exact) >= 0x1p128) return (exact > 0) == (result > 0) ? 0 : INFINITY;
  uint64_t bits;
  memcpy(&bits, &exact, sizeof bits);
  const int exponent = (int)(bits >> 52 & 0x7ff) - 1023, least = exponent < -126 ? -126 : exponent;
  bits = (uint64_t)(1023 - (least - 23)) << 52;
  double units;
  memcpy(&units, &bits, sizeof units);
  return fabs(number - exact) * units;
}

static int check(int32_t function, uint64_t stride) {
  enum { BLOCK = 4096 };
  float from[BLOCK], to[BLOCK];
  double worst = 0, absolute = 0;
  float where = 0;
  uint64_t inexact = 0, total = 0;
  for (uint64_t next = 0; next < (uint64_t)1 << 32;) {
    int64_t count = 0;
    for (; count < BLOCK && next < (uint64_t)1 << 32; count++, next += stride) {
      const uint32_t bits = (uint32_t)next;
      memcpy(from + count, &bits, sizeof bits);
    }
    function_fp32(function, from, to, count);
    for (int64_t i = 0; i < count; i++) {
      const double exact = functions[function].exact(from[i]), error = error_in_ulp(to[i], exact);
      if (error > worst) worst = error, where = from[i];
      if (error > 1) absolute = fmax(absolute, fabs(to[i] - exact));
      inexact += error > 0.5;
    }
    total += (uint64_t)count;
  }
  printf("%-16s %.4f ulp at %a, not the nearest number in %.2g of cases", functions[function].name, worst, where,
         (double)inexact / (double)total);
  if (worst > 1) printf(", absolute error where above 1 ulp %.2g", absolute);
  printf("\n");
  fflush(stdout);
  return worst > 1 && !strstr(functions[function].name, "slope");
}

int main(int count, char **names) {
  int failed = 0, first = 1;
  uint64_t stride = 1;
  if (count > 1 && atoi(names[1]) > 0) stride = (uint64_t)atoi(names[1]), first = 2;
  for (int function = 0; function < FUNCTIONS; function++) {
    int is_chosen = first >= count;
    for (int i = first; i < count; i++) is_chosen |= !strcmp(names[i], functions[function].name);
    if (is_chosen) failed |= check(function, stride);
  }
  return failed;
}
