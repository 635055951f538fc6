/* Elementary functions and sums of a row, whose every operation is written down (see matrix.h). */

#ifndef PORTABLE_FUNCTIONS_H
#define PORTABLE_FUNCTIONS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (relative error below 2^-25); below
   -87 the result is 0. Infinity and NaN follow from the last line's comparisons. */
static inline float exponential(float x) {
  float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which its last bits then are */
  float shifted = __builtin_fmaf(clamped, 1.44269504088896341f, round);
  float n = shifted - round;
  float r = __builtin_fmaf(n, -0.693145751953125f, clamped); /* ln 2 in two parts, the first of sixteen bits */
  r = __builtin_fmaf(n, -1.42860682030941723212e-6f, r);
  float p = 1.0f / 5040;
  p = __builtin_fmaf(p, r, 1.0f / 720);
  p = __builtin_fmaf(p, r, 1.0f / 120);
  p = __builtin_fmaf(p, r, 1.0f / 24);
  p = __builtin_fmaf(p, r, 1.0f / 6);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  int32_t power;
  memcpy(&power, &shifted, sizeof power);
  uint32_t scale = (uint32_t)(power - 0x4b400000 + 127) << 23;
  float two_to_n;
  memcpy(&two_to_n, &scale, sizeof two_to_n);
  float result = p * two_to_n;
  result = x < -87.0f ? 0.0f : result;
  result = x > 88.0f ? INFINITY : result;
  return x != x ? x : result;
}

/* ln x for a positive normal x, in double: x = 2^n m, m in [1/sqrt 2, sqrt 2), ln m = 2 artanh((m - 1) / (m + 1)) by its series. */
static inline double logarithm(float x) {
  int n;
  double m = frexp(x, &n);
  if (m < 0.70710678118654752) m *= 2, n--;
  double t = (m - 1) / (m + 1), square = t * t, sum = 0;
  for (int term = 21; term >= 1; term -= 2) sum = sum * square + 1.0 / term;
  return n * 0.69314718055994531 + 2 * t * sum;
}

/* The sum of sixteen sums: in pairs. */
static inline float added(const float sums[16]) {
  float eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = sums[i] + sums[i + 8];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

#endif
