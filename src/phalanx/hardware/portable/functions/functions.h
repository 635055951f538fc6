/* Elementary functions of fp32 vectors in stated operations: exp, exp2, log, sigmoid, silu, tanh.

   Libraries of mathematics differ in the last bits of these functions, by release and by processor. Here each is a range reduction and a
   polynomial with stated coefficients (coefficients.h), evaluated by Horner's rule with fused multiply-adds, so its bits are the same
   wherever IEEE 754 holds. A lane's result depends on that lane's argument only. Results below 2^-126 are rounded as subnormal numbers.
   Largest errors in ulp over all 2^32 arguments (validation/functions/exhaustive.c):

     exp 0.996   exp2 0.786   log 0.913   sigmoid 0.765   silu 0.814   tanh 0.946   sqrt, rsqrt 0.500

   Methods:
     exp      x = n ln 2 + r, |r| <= ln 2 / 2, with ln 2 in two parts (Cody and Waite, "Software Manual for the Elementary Functions",
              1980), then 2^n (1 + r + r^2 P(r))
     log      x = 2^n (1 + f), sqrt(1/2) <= 1 + f < sqrt 2, then n ln 2 + f + f^2 P(f), the leading sum as an exact pair
     sigmoid  1 / (1 + e^-x), the sum and the quotient with the parts that rounding loses
     tanh     x + x^3 P(x^2) below 15/16, else 1 - 2 / (1 + e^(2 |x|))
   Vectors with an argument outside of a range that hardly occurs (or NaN) take a longer way, on which the other lanes have the same bits.
   Pairs of numbers follow Dekker, "A Floating-Point Technique for Extending the Available Precision", Numerische Mathematik 18, 1971;
   see also Muller, "Elementary Functions", 3rd edition, 2016.

   Compile without contraction (-ffp-contract=off). A NaN is always the positive quiet one without payload. */

#ifndef PORTABLE_FUNCTIONS_H
#define PORTABLE_FUNCTIONS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../../kernels/vectors.h"
#include "coefficients.h"

#define ROUND_FP32 0x1.8p23f /* added to a number below 2^22 and subtracted again it rounds to an integer */

/* The sum of two vectors, |low| much smaller than |high|. */
typedef struct {
  lanes high, low;
} lanes_pair;

/* Comparisons of lanes. With AVX-512 a mask has one bit for each lane, else all bits of a lane are set or none. */
#if defined(PHALANX_AVX512)
typedef __mmask16 mask;
INLINE mask is_less(lanes x, lanes y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_LT_OQ); }
INLINE mask is_equal(lanes x, lanes y) { return _mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_EQ_OQ); }
INLINE int any(mask m) { return m != 0; }
/* x where the mask is set, else y. */
INLINE lanes chosen(mask m, lanes x, lanes y) { return (lanes)_mm512_mask_blend_ps(m, (__m512)y, (__m512)x); }
#else
typedef words mask;
INLINE mask is_less(lanes x, lanes y) { return x < y; }
INLINE mask is_equal(lanes x, lanes y) { return x == y; }
#if defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
INLINE int any(mask m) { return _mm256_movemask_ps((__m256)m) != 0; }
INLINE lanes chosen(mask m, lanes x, lanes y) { return (lanes)_mm256_blendv_ps((__m256)y, (__m256)x, (__m256)m); }
#else
INLINE int any(mask m) {
  int32_t set = 0;
  for (int i = 0; i < LANES; i++) set |= m[i];
  return set != 0;
}
INLINE lanes chosen(mask m, lanes x, lanes y) {
#if defined(PHALANX_NO_VECTORS)
  for (int i = 0; i < LANES; i++) y[i] = m[i] ? x[i] : y[i];
  return y;
#else
  return (lanes)(((words)x & m) | ((words)y & ~m));
#endif
}
#endif
#endif

INLINE lanes magnitude(lanes x) { return (lanes)((words)x & 0x7fffffff); }
INLINE lanes with_sign(lanes x, lanes sign) { return (lanes)((words)x | ((words)sign & INT32_MIN)); }

/* Horner's rule, from the highest power down. */
INLINE lanes polynomial(const float *coefficients, int count, lanes x) {
  lanes sum = all(coefficients[count - 1]);
  UNROLL
  for (int i = count - 2; i >= 0; i--) sum = fused(sum, x, all(coefficients[i]));
  return sum;
}
#define POLYNOMIAL(table, x) polynomial(table, sizeof table / sizeof *table, x)

/* x 2^n for an integer |n| < 250 and x of moderate size, rounded once: of two factors the first product is exact. */
INLINE lanes scaled(lanes x, lanes n) {
#if defined(PHALANX_AVX512)
  return (lanes)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  const words whole = __builtin_convertvector(n, words), half = whole >> 1;
  return x * (lanes)((half + 127) << 23) * (lanes)((whole - half + 127) << 23);
#endif
}

/* Limit x from below and above; NaN stays: the processor's minimum is its second operand if one is NaN. */
INLINE lanes clamped(lanes x, float low, float high) {
#if defined(PHALANX_AVX512)
  return (lanes)_mm512_min_ps((__m512)all(high), _mm512_max_ps((__m512)all(low), (__m512)x));
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
  return (lanes)_mm256_min_ps((__m256)all(high), _mm256_max_ps((__m256)all(low), (__m256)x));
#else
  x = chosen(is_less(x, all(low)), all(low), x);
  return chosen(is_less(all(high), x), all(high), x);
#endif
}

/* The integer nearest to x y. */
INLINE lanes nearest_product(lanes x, lanes y) { return fused(x, y, all(ROUND_FP32)) - all(ROUND_FP32); }

INLINE lanes one_nan(lanes x) { return chosen(is_equal(x, x), x, all(NAN)); }

/* True if e^x and e^-x are normal numbers with room to spare, for all lanes. */
INLINE int is_moderate(lanes x) { return !any(~is_less(magnitude(x), all(86))); }

/* 2^n for an integer |n| <= 126. */
INLINE lanes power_of_two(lanes n) {
#if defined(PHALANX_AVX512)
  return (lanes)_mm512_scalef_ps((__m512)all(1), (__m512)n);
#else
  return (lanes)((__builtin_convertvector(n, words) + 127) << 23);
#endif
}

/* e^r for x = n ln 2 + r. */
INLINE lanes exp_rounded(lanes x, lanes *n) {
  *n = nearest_product(x, all(LOG2_E_FP32));
  lanes r = fused(*n, all(-LN2_FP32_0), x); /* exact: LN2_FP32_0 has 16 bits */
  r = fused(*n, all(-LN2_FP32_1), r);
  return fused(r * r, POLYNOMIAL(EXP_FP32, r), r) + all(1);
}

/* e^x. Above 89 the factors of 2^n overflow to infinity, below -104 they underflow to zero. */
INLINE lanes exp_lanes(lanes x) {
  lanes n;
  if (is_moderate(x)) {
    const lanes result = exp_rounded(x, &n);
    return result * power_of_two(n);
  }
  const lanes result = exp_rounded(clamped(x, -104, 89), &n);
  return one_nan(scaled(result, n));
}

/* e^(high + low) for |high| <= ln 2 / 2, as a pair with a relative error of about 2^-29. */
INLINE lanes_pair exp_reduced(lanes high, lanes low) {
  const lanes rest = fused(high * high, POLYNOMIAL(EXP_FP32, high), low);
  const lanes sum = high + all(1);
  const lanes small = (high - (sum - all(1))) + rest;
  const lanes result = sum + small;
  return (lanes_pair){result, small - (result - sum)};
}

/* e^x = 2^n times the pair. */
INLINE lanes_pair exp_pair(lanes x, lanes *n) {
  *n = nearest_product(x, all(LOG2_E_FP32));
  const lanes exact = fused(*n, all(-LN2_FP32_0), x);
  const lanes high = fused(*n, all(-LN2_FP32_1), exact);
  return exp_reduced(high, fused(*n, all(-LN2_FP32_1), exact - high));
}

/* 2^x. */
INLINE lanes exp2_lanes(lanes x) {
  x = clamped(x, -151.0f, 129.0f);
  const lanes n = x + all(ROUND_FP32) - all(ROUND_FP32), r = x - n;
  const lanes high = r * all(LN2_PAIR_FP32_HIGH);
  const lanes low = fused(r, all(LN2_PAIR_FP32_HIGH), -high);
  const lanes_pair power = exp_reduced(high, fused(r, all(LN2_PAIR_FP32_LOW), low));
  return one_nan(scaled(power.high, n)); /* the pair's low part is below half an ulp */
}

/* log(x 2^-shift) for normal positive x. */
INLINE lanes log_normal(lanes x, lanes shift) {
  const words n = ((words)x - 0x3f3504f3) >> 23; /* the bits of sqrt(1/2) */
  const lanes f = (lanes)((words)x - (n << 23)) - all(1);
  const lanes exponent = __builtin_convertvector(n, lanes) - shift;
  const lanes first = exponent * all(LN2_FP32_0); /* exact */
  const lanes sum = first + f;
  const lanes lost = fused(exponent, all(LN2_FP32_1), f - (sum - first));
  return sum + fused(f * f, POLYNOMIAL(LOG_FP32, f), lost);
}

/* Natural logarithm. A vector with a number that is not normal and positive takes the longer way, on which the others have the same bits. */
INLINE lanes log_lanes(lanes x) {
  if (!any(is_less(x, all(0x1p-126f)) | ~is_less(x, all(INFINITY)))) return log_normal(x, all(0));
  const mask subnormal = is_less(x, all(0x1p-126f));
  lanes result = log_normal(chosen(subnormal, x * all(0x1p23f), x), chosen(subnormal, all(23), all(0)));
  result = chosen(is_equal(x, all(0)), all(-INFINITY), result);
  result = chosen(is_less(x, all(0)), all(NAN), result);
  return one_nan(chosen(is_less(x, all(INFINITY)), result, x));
}

/* factor * sigmoid(x) = factor 2^-k / (2^-k + 2^(n - k) e^r) for |x| < 86, -x = n ln 2 + r and k = max(n, 0). */
INLINE lanes times_sigmoid(lanes factor, lanes x) {
  const lanes n = nearest_product(x, all(-LOG2_E_FP32));
  const lanes exact = fused(n, all(-LN2_FP32_0), -x), r = fused(n, all(-LN2_FP32_1), exact);
  const lanes r_low = fused(n, all(-LN2_FP32_1), exact - r);
  const lanes rest = fused(r * r, POLYNOMIAL(EXP_FP32, r), r_low); /* e^r = 1 + r + rest */
  const lanes small = power_of_two((lanes)((words)n | INT32_MIN)); /* 2^-|n| */
  const mask negative = is_less(all(0), n);
  const lanes one_scale = chosen(negative, small, all(1)), power_scale = chosen(negative, all(1), small);
  /* The denominator: 1 + small, then r, then what is small or was lost, as high + low. */
  const lanes ones = small + all(1), lost_of_ones = small - (ones - all(1));
  const lanes sum = fused(power_scale, r, ones), lost = fused(power_scale, r, ones - sum);
  const lanes tail = fused(power_scale, rest, lost + lost_of_ones);
  const lanes high = sum + tail, low = tail - (high - sum);
  const lanes inverse = all(1) / high;
  const lanes residual = fused(-inverse, low, fused(-inverse, high, all(1)));
  const lanes product = factor * inverse;
  const lanes correction = fused(factor, residual * inverse, fused(factor, inverse, -product));
  return (product + correction) * one_scale;
}

/* factor * e^x for x <= -86, which factor * sigmoid(x) is there. */
INLINE lanes times_exp(lanes factor, lanes x) {
  lanes n;
  const lanes_pair power = exp_pair(clamped(x, -140, -86), &n);
  const lanes product = factor * power.high;
  return scaled(product + fused(factor, power.low, fused(factor, power.high, -product)), n);
}

INLINE lanes sigmoid_lanes(lanes x) {
  if (is_moderate(x)) return times_sigmoid(all(1), x);
  const mask above = is_less(all(-86), x);
  return one_nan(chosen(above, times_sigmoid(all(1), clamped(x, -86, 86)), times_exp(all(1), x)));
}

/* x sigmoid(x). At -infinity the limit -0, where x / (1 + exp(-x)) would be NaN. */
INLINE lanes silu_lanes(lanes x) {
  if (is_moderate(x)) return with_sign(times_sigmoid(x, x), x);
  const lanes limited = clamped(x, -140, 86), inside = clamped(x, -86, 86);
  const mask above = is_less(all(-86), x);
  const lanes result = chosen(above, with_sign(times_sigmoid(inside, inside), x), times_exp(limited, limited));
  return one_nan(chosen(is_less(x, all(86)), result, x));
}

INLINE lanes tanh_lanes(lanes x) {
  const lanes size = clamped(magnitude(x), -1, 10); /* 1 - tanh(10) is below 2^-27 */
  const lanes square = size * size, twice = size + size;
  const lanes near = fused(size * square, POLYNOMIAL(TANH_FP32, square), size);
  /* 2 / (1 + e^(2 |x|)) = 2^(1 - n) / (2^-n + e^r). */
  const lanes n = nearest_product(twice, all(LOG2_E_FP32));
  lanes r = fused(n, all(-LN2_FP32_0), twice);
  r = fused(n, all(-LN2_FP32_1), r);
  const lanes scale = power_of_two(-n);
  const lanes sum = fused(r * r, POLYNOMIAL(EXP_FP32, r), r) + (scale + all(1));
  const lanes far = fused(all(1) / sum, all(-2) * scale, all(1));
  return one_nan(with_sign(chosen(is_less(size, all(0.9375f)), near, far), x));
}

/* Square root, which every processor rounds correctly. */
INLINE lanes root(lanes x) {
#if defined(PHALANX_AVX512)
  return (lanes)_mm512_sqrt_ps((__m512)x);
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
  return (lanes)_mm256_sqrt_ps((__m256)x);
#else
  UNROLL
  for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

INLINE lanes sqrt_lanes(lanes x) { return one_nan(root(x)); }

/* 1 / sqrt(x), y = 1 / sqrt(x) rounded twice corrected by half its residual 1 - x y^2. */
INLINE lanes rsqrt_lanes(lanes x) {
  const lanes y = all(1) / root(x), product = x * y;
  const lanes residual = fused(-product, y, all(1)) - fused(x, y, -product) * y;
  const lanes result = fused(all(0.5f) * y, residual, y);
  return one_nan(chosen(is_less(all(0), x) & is_less(x, all(INFINITY)), result, y));
}

/* Sum of sixteen partial sums: in pairs. */
static inline float added(const float sums[16]) {
  float eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = sums[i] + sums[i + 8];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

#endif
