/* Elementary functions of one fp64 number, by double-double arithmetic.

   A double_double is the unevaluated sum of two fp64 numbers, with about 106 bits. Functions are computed to a relative error of about
   2^-58 and rounded to fp64. The error is below 0.52 ulp, below 0.8 ulp for sin, cos, softplus and results that are subnormal. Where a
   derivative crosses zero its absolute error is below 1e-17. The code is scalar, ten to a hundred times slower than in fp32: nothing
   computes much in fp64.

   Arithmetic: Dekker, "A Floating-Point Technique for Extending the Available Precision", Numerische Mathematik 18, 1971; Shewchuk,
   "Adaptive Precision Floating-Point Arithmetic", Discrete and Computational Geometry 18, 1997; Joldes, Muller and Popescu, "Tight and
   rigorous error bounds for basic building blocks of double-word arithmetic", ACM TOMS 44, 2017.
   Range reduction of angles: Payne and Hanek, "Radian Reduction for Trigonometric Functions", SIGNUM Newsletter 18, 1983. */

#ifndef PORTABLE_FUNCTIONS_FP64_H
#define PORTABLE_FUNCTIONS_FP64_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../kernels/vectors.h"
#include "coefficients.h"

#define SCALAR FUSING static inline

/* The sum of two numbers of any size, and of two of which the first is the larger. */
SCALAR double_double two_sum(double a, double b) {
  const double sum = a + b, part = sum - a;
  return (double_double){sum, (a - (sum - part)) + (b - part)};
}
SCALAR double_double fast_two_sum(double a, double b) {
  const double sum = a + b;
  return (double_double){sum, b - (sum - a)};
}
SCALAR double_double two_product(double a, double b) {
  const double product = a * b;
  return (double_double){product, __builtin_fma(a, b, -product)};
}

SCALAR double_double plus(double_double a, double_double b) {
  const double_double high = two_sum(a.high, b.high), low = two_sum(a.low, b.low);
  const double_double sum = fast_two_sum(high.high, high.low + low.high);
  return fast_two_sum(sum.high, sum.low + low.low);
}
SCALAR double_double plus_double(double_double a, double b) {
  const double_double sum = two_sum(a.high, b);
  return fast_two_sum(sum.high, sum.low + a.low);
}
SCALAR double_double times(double_double a, double_double b) {
  const double_double product = two_product(a.high, b.high);
  return fast_two_sum(product.high, product.low + __builtin_fma(a.high, b.low, a.low * b.high));
}
SCALAR double_double times_double(double_double a, double b) {
  const double_double product = two_product(a.high, b);
  return fast_two_sum(product.high, __builtin_fma(a.low, b, product.low));
}
SCALAR double_double over(double_double a, double_double b) {
  const double first = a.high / b.high;
  const double_double rest = plus(a, times_double(b, -first));
  return fast_two_sum(first, rest.high / b.high);
}
SCALAR double_double negative(double_double a) { return (double_double){-a.high, -a.low}; }

SCALAR double_double pairs_polynomial(const double_double *coefficients, int count, double_double x) {
  double_double sum = coefficients[count - 1];
  for (int i = count - 2; i >= 0; i--) sum = plus(times(sum, x), coefficients[i]);
  return sum;
}
SCALAR double horner(const double *coefficients, int count, double x) {
  double sum = coefficients[count - 1];
  for (int i = count - 2; i >= 0; i--) sum = __builtin_fma(sum, x, coefficients[i]);
  return sum;
}
#define COUNT(table) ((int)(sizeof table / sizeof *table))

SCALAR double from_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
SCALAR uint64_t to_bits(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

/* x 2^n for |n| < 2000 and x of moderate size; the first product is exact. */
SCALAR double scaled_fp64(double x, int n) {
  const int half = n / 2;
  return x * from_bits((uint64_t)(half + 1023) << 52) * from_bits((uint64_t)(n - half + 1023) << 52);
}

SCALAR double_double scaled_pair(double_double x, int n) { return (double_double){scaled_fp64(x.high, n), scaled_fp64(x.low, n)}; }

/* e^r - 1 for x = n ln 2 + r, |r| <= ln 2 / 2, |x| <= 1500. */
SCALAR double_double exp_parts_fp64(double_double x, int *n) {
  const double whole = __builtin_fma(x.high, LOG2_E_HIGH, 0x1.8p52) - 0x1.8p52;
  *n = (int)whole;
  double_double r = {__builtin_fma(whole, -LN2_FP64_HIGH, x.high), x.low}; /* exact: LN2_FP64_HIGH has 40 bits */
  r = plus(two_sum(r.high, r.low), times_double((double_double){LN2_FP64_REST_HIGH, LN2_FP64_REST_LOW}, -whole));
  const double_double square = times(r, r);
  const double cube = square.high * r.high;
  const double_double high = plus(r, (double_double){0.5 * square.high, 0.5 * square.low});
  return plus_double(high, cube * horner(EXP_FP64, COUNT(EXP_FP64), r.high));
}

/* e^x = 2^n times the result, which is near 1. */
SCALAR double_double exp_scaled(double_double x, int *n) {
  if (x.high > 1000) x = (double_double){1000, 0};
  if (x.high < -1000) x = (double_double){-1000, 0};
  return plus_double(exp_parts_fp64(x, n), 1);
}

/* e^x for x <= 700. */
SCALAR double_double exp_pair_fp64(double_double x) {
  int n;
  const double_double power = exp_scaled(x, &n);
  return scaled_pair(power, n);
}

/* e^x - 1 for x <= 700. */
SCALAR double_double expm1_pair(double_double x) {
  int n;
  if (x.high < -100) return (double_double){-1, 0};
  const double_double rest = exp_parts_fp64(x, &n);
  if (n == 0) return rest;
  return plus(scaled_pair(rest, n), two_sum(scaled_fp64(1, n), -1));
}

/* log m = 2 artanh s, s = (m - 1) / (m + 1), for m = x 2^-n between sqrt(1/2) and sqrt 2; positive finite x. */
SCALAR double_double log_parts_fp64(double x, int *n) {
  const int subnormal = x < 0x1p-1022;
  const uint64_t bits = to_bits(subnormal ? x * 0x1p54 : x);
  const uint64_t biased = bits - to_bits(ROOT_HALF_HIGH) + ((uint64_t)1023 << 52);
  *n = (int)(biased >> 52) - 1023 - (subnormal ? 54 : 0);
  const double m = from_bits(bits - (biased & ((uint64_t)0xfff << 52)) + ((uint64_t)1023 << 52));
  const double_double s = over((double_double){m - 1, 0}, two_sum(m, 1)), square = times(s, s);
  const double_double rest = times(times(s, square), pairs_polynomial(LOG_FP64, COUNT(LOG_FP64), square));
  return plus((double_double){2 * s.high, 2 * s.low}, rest);
}

/* The relative error is about 2^-85: a power multiplies it by up to 745. */
SCALAR double_double log_pair(double x) {
  int n;
  const double_double rest = log_parts_fp64(x, &n);
  const double_double high = {n * LN2_FP64_HIGH, 0};
  return plus(plus(high, times_double((double_double){LN2_FP64_REST_HIGH, LN2_FP64_REST_LOW}, n)), rest);
}

/* log(high + low) for |low| < ulp(high): the second term of the series in low / high is of no weight. */
SCALAR double_double log_of_pair(double_double x) { return plus_double(log_pair(x.high), x.low / x.high); }

/* log(1 + e^x). */
SCALAR double_double softplus_pair(double x) {
  const double_double e = exp_pair_fp64((double_double){-fabs(x), 0});
  const double_double rest = log_of_pair(plus_double(e, 1));
  return x > 0 ? plus_double(rest, x) : rest;
}

/* 1 / (1 + e^-x) = 2^n times the result. */
SCALAR double_double sigmoid_scaled(double_double x, int *n) {
  const double_double size = x.high < 0 ? x : negative(x);
  const double_double e = exp_scaled(size, n);
  const double_double below = plus_double(scaled_pair(e, *n), 1);
  if (x.high < 0) return over(e, below);
  *n = 0;
  return over((double_double){1, 0}, below);
}

/* tanh x = -E / (2 + E), E = e^(-2 x) - 1, for x >= 0. */
SCALAR double_double tanh_pair(double x) {
  const double_double e = expm1_pair((double_double){-2 * x, 0});
  return over(negative(e), plus_double(e, 2));
}

/* e^z^2 erfc(z) for 0 <= z <= 28. */
SCALAR double_double erfcx_pair(double_double z) {
  const double_double t = over(plus_double(z, -3.75), plus_double(z, 3.75));
  const double_double twice = {2 * z.high, 2 * z.low};
  return over(pairs_polynomial(ERFCX_FP64, COUNT(ERFCX_FP64), t), plus_double(twice, 1));
}

SCALAR double_double erf_pair(double x) {
  const double z = fabs(x) > 6 ? 6 : fabs(x);
  const double_double square = two_product(z, z);
  double_double result;
  if (z < 1)
    result = times_double(pairs_polynomial(ERF_FP64, COUNT(ERF_FP64), square), z);
  else
    result = plus_double(negative(times(exp_pair_fp64(negative(square)), erfcx_pair((double_double){z, 0}))), 1);
  return x < 0 ? negative(result) : result;
}

/* Phi(-|x|) of the normal distribution = 2^n times the result, and e^(-x^2 / 2) = 2^n times `*bell`, for |x| <= 39. */
SCALAR double_double normal_tail_scaled(double x, double_double *bell, int *n) {
  const double_double square = two_product(x, x);
  *bell = exp_scaled((double_double){-0.5 * square.high, -0.5 * square.low}, n);
  const double_double z = times_double((double_double){ROOT_HALF_HIGH, ROOT_HALF_LOW}, fabs(x));
  const double_double product = times(*bell, erfcx_pair(z));
  return (double_double){0.5 * product.high, 0.5 * product.low};
}

/* sqrt(8 / pi) (x + c 0.044715 x^3), whose first factor has been multiplied into the coefficients. */
SCALAR double_double gelu_argument(double x, double factor) {
  const double_double square = two_product(x, x);
  const double_double cube = times_double(times((double_double){GELU_CUBE_HIGH, GELU_CUBE_LOW}, square), factor);
  return times_double(plus(cube, (double_double){GELU_SCALE_HIGH, GELU_SCALE_LOW}), x);
}

/* |x| - n pi / 2 for 1/2 < |x|, and n modulo 4, NaN for infinity: the product of x's 53-bit integer and 192 bits of 2 / pi, without those
   bits that add multiples of 2 pi. The last bit weighs 2^-190 quadrants; no fp64 number is nearer than 2^-62 to one. */
SCALAR double_double reduce_quadrant(double x, int64_t *quadrant) {
  const uint64_t bits = to_bits(x) & INT64_MAX;
  *quadrant = 0;
  if (bits >= (uint64_t)0x7ff << 52) return (double_double){NAN, 0};
  const int exponent = (int)(bits >> 52) - 1075, first = exponent + 62; /* of the table's bits, the first that matters */
  const uint64_t integer = (bits & (((uint64_t)1 << 52) - 1)) | ((uint64_t)1 << 52), *words = TWO_OVER_PI + first / 64;
  const int shift = first % 64;
  uint64_t product[3], carry = 0;
  for (int i = 2; i >= 0; i--) {
    const uint64_t word = shift ? words[i] << shift | words[i + 1] >> (64 - shift) : words[i];
    const unsigned __int128 full = (unsigned __int128)integer * word + carry;
    product[i] = (uint64_t)full, carry = (uint64_t)(full >> 64);
  }
  *quadrant = (int64_t)((product[0] + ((uint64_t)1 << 61)) >> 62); /* 4 counts as 0 */
  product[0] -= (uint64_t)*quadrant << 62;
  const int below = product[0] >> 63;
  if (below) { /* two's complement */
    product[2] = -product[2];
    product[1] = ~product[1] + (product[2] == 0);
    product[0] = ~product[0] + (product[2] == 0 && product[1] == 0);
  }
  double_double turns = {0, 0};
  for (int i = 0; i < 6; i++) {
    const double part = (double)(uint32_t)(product[i / 2] >> (i % 2 ? 0 : 32));
    turns = plus_double(turns, part * from_bits((uint64_t)(1023 - 30 - 32 * i) << 52));
  }
  if (below) turns = negative(turns);
  turns = times(turns, (double_double){PI_2_HIGH, PI_2_LOW});
  if (to_bits(x) >> 63) { /* of a negative number, n and the rest with the other sign */
    *quadrant = -*quadrant;
    turns = negative(turns);
  }
  return turns;
}

/* sin(x + turns pi / 2), by the formulas of fdlibm's k_sin and k_cos with the low part of the reduced argument. */
SCALAR double sine_fp64(double x, int turns) {
  int64_t quadrant = 0;
  const double_double r = fabs(x) < 0.7853981633974483 ? (double_double){x, 0} : reduce_quadrant(x, &quadrant);
  const double square = r.high * r.high;
  double result;
  quadrant += turns;
  if (quadrant & 1) {
    const double half = 0.5 * square, one = 1 - half;
    const double rest = __builtin_fma(square * square, horner(COS_FP64, COUNT(COS_FP64), square), -r.high * r.low);
    const double lost = __builtin_fma(r.high, r.high, -square); /* of the square */
    result = one + (((1 - one) - half) + __builtin_fma(-0.5, lost, rest));
  } else {
    const double cube = r.high * square;
    result = r.high + __builtin_fma(cube, horner(SIN_FP64, COUNT(SIN_FP64), square), __builtin_fma(-0.5 * square, r.low, r.low));
  }
  return quadrant & 2 ? -result : result;
}

#endif
