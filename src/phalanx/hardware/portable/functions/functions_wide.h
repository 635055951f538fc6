/* Elementary functions of fp32 numbers that are computed in fp64 and rounded once: expm1, log1p, log2, log10, erf, gelu, softplus, sin,
   cos, power, and derivatives.

   Where fp32 arithmetic loses digits (a difference, a product of two errors), fp64 arithmetic with a relative error of about 2^-38 gives
   the fp32 number nearest to the exact result for all but a few arguments in a million: the error is below 0.501 ulp. Where a derivative
   crosses zero its absolute error is below 1e-11. As in functions.h every operation is stated, and a lane depends on its own argument.

   Methods:
     exp    as in functions.h
     log    x = 2^n m, log m = 2 artanh(s), s = (m - 1) / (m + 1), by a polynomial in s^2
     erfc   e^-z^2 Q(t) / (1 + 2 z), t = (z - 15/4) / (z + 15/4), for z >= 0 (Shepherd and Laframboise, "Chebyshev approximation of
            (1 + 2 x) exp(x^2) erfc x", Mathematics of Computation 36, 1981); below 1 erf is x P(x^2)
     sin    x = n pi / 2 + r with pi / 2 in three parts (Cody and Waite) up to 2^28, beyond by reduce_quadrant (functions_fp64.h) */

#ifndef PORTABLE_FUNCTIONS_WIDE_H
#define PORTABLE_FUNCTIONS_WIDE_H

#include "functions.h"
#include "functions_fp64.h"

/* One register: a vector of lanes is converted in parts. */
#if defined(PHALANX_AVX512)
enum { WIDES = 8 };
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
enum { WIDES = 4 };
#else
enum { WIDES = 2 };
#endif
typedef double wides __attribute__((vector_size(WIDES * sizeof(double))));
typedef int64_t wide_words __attribute__((vector_size(WIDES * sizeof(int64_t))));
typedef uint64_t wide_bits __attribute__((vector_size(WIDES * sizeof(uint64_t))));
typedef float narrows __attribute__((vector_size(WIDES * sizeof(float))));
typedef narrows narrows_anywhere __attribute__((aligned(sizeof(float))));

#define ROUND_FP64 0x1.8p52
#define WIDE_POLYNOMIAL(table, x) wide_polynomial(table, sizeof table / sizeof *table, x)
#define UNROLL_WIDE _Pragma("GCC unroll 16")

#if defined(PHALANX_AVX512)
INLINE wides wide_all(double x) { return (wides)_mm512_set1_pd(x); }
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
INLINE wides wide_all(double x) { return (wides){x, x, x, x}; }
#else
INLINE wides wide_all(double x) { return (wides){x, x}; }
#endif
INLINE wides widened_at(const float *from) { return __builtin_convertvector(*(const narrows_anywhere *)from, wides); }
INLINE void put_narrowed(float *to, wides x) { *(narrows_anywhere *)to = __builtin_convertvector(x, narrows); }

/* x y + z, rounded once. */
INLINE wides wide_fused(wides x, wides y, wides z) {
#if defined(PHALANX_AVX512)
  return (wides)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)z);
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
  return (wides)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)z);
#elif defined(__aarch64__) && !defined(PHALANX_NO_VECTORS)
  return (wides)vfmaq_f64((float64x2_t)z, (float64x2_t)x, (float64x2_t)y);
#else
  UNROLL
  for (int i = 0; i < WIDES; i++) z[i] = __builtin_fma(x[i], y[i], z[i]);
  return z;
#endif
}

/* Comparisons, as in functions.h. */
#if defined(PHALANX_AVX512)
typedef __mmask8 wide_mask;
INLINE wide_mask is_less_wide(wides x, wides y) { return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_LT_OQ); }
INLINE wide_mask is_equal_wide(wides x, wides y) { return _mm512_cmp_pd_mask((__m512d)x, (__m512d)y, _CMP_EQ_OQ); }
INLINE wide_mask has_bit(wide_words x, int64_t bit) { return _mm512_test_epi64_mask((__m512i)x, _mm512_set1_epi64(bit)); }
INLINE wides wide_chosen(wide_mask m, wides x, wides y) { return (wides)_mm512_mask_blend_pd(m, (__m512d)y, (__m512d)x); }
INLINE int is_set(wide_mask m, int lane) { return m >> lane & 1; }
INLINE int any_wide(wide_mask m) { return m != 0; }
#else
typedef wide_words wide_mask;
INLINE wide_mask is_less_wide(wides x, wides y) { return x < y; }
INLINE wide_mask is_equal_wide(wides x, wides y) { return x == y; }
INLINE wide_mask has_bit(wide_words x, int64_t bit) { return (x & bit) != 0; }
INLINE int is_set(wide_mask m, int lane) { return m[lane] != 0; }
#if defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
INLINE int any_wide(wide_mask m) { return _mm256_movemask_pd((__m256d)m) != 0; }
INLINE wides wide_chosen(wide_mask m, wides x, wides y) { return (wides)_mm256_blendv_pd((__m256d)y, (__m256d)x, (__m256d)m); }
#else
INLINE int any_wide(wide_mask m) { return (m[0] | m[1]) != 0; }
INLINE wides wide_chosen(wide_mask m, wides x, wides y) {
#if defined(PHALANX_NO_VECTORS)
  for (int i = 0; i < WIDES; i++) y[i] = m[i] ? x[i] : y[i];
  return y;
#else
  return (wides)(((wide_words)x & m) | ((wide_words)y & ~m));
#endif
}
#endif
#endif

INLINE wides wide_magnitude(wides x) { return (wides)((wide_words)x & INT64_MAX); }
INLINE wides wide_with_sign(wides x, wides sign) { return (wides)(((wide_words)x & INT64_MAX) | ((wide_words)sign & INT64_MIN)); }

/* Limit x from below and above; NaN stays. */
INLINE wides wide_clamped(wides x, double low, double high) {
#if defined(PHALANX_AVX512)
  return (wides)_mm512_min_pd((__m512d)wide_all(high), _mm512_max_pd((__m512d)wide_all(low), (__m512d)x));
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
  return (wides)_mm256_min_pd((__m256d)wide_all(high), _mm256_max_pd((__m256d)wide_all(low), (__m256d)x));
#else
  x = wide_chosen(is_less_wide(x, wide_all(low)), wide_all(low), x);
  return wide_chosen(is_less_wide(wide_all(high), x), wide_all(high), x);
#endif
}

INLINE wides wide_polynomial(const double *coefficients, int count, wides x) {
  wides sum = wide_all(coefficients[count - 1]);
  UNROLL_WIDE
  for (int i = count - 2; i >= 0; i--) sum = wide_fused(sum, x, wide_all(coefficients[i]));
  return sum;
}

/* e^r - 1 for x = n ln 2 + r, |r| <= ln 2 / 2; `*power` is 2^n. For |x| <= 700. */
INLINE wides exp_parts(wides x, wides *power) {
  const wides shifted = wide_fused(x, wide_all(LOG2_E_HIGH), wide_all(ROUND_FP64));
  const wides whole = shifted - wide_all(ROUND_FP64);
  wides r = wide_fused(whole, wide_all(-LN2_WIDE_0), x);
  r = wide_fused(whole, wide_all(-LN2_WIDE_1), r);
  *power = (wides)(((wide_bits)shifted + 1023) << 52); /* the upper bits of 1.5 * 2^52 leave the word */
  return wide_fused(r * r, WIDE_POLYNOMIAL(EXP_WIDE, r), r);
}

/* e^x, of which fp32 sees e^-200 as 0 and e^200 as infinity. */
INLINE wides exp_wide(wides x) {
  wides power;
  const wides rest = exp_parts(wide_clamped(x, -200, 200), &power);
  return wide_fused(power, rest, power);
}

INLINE wides expm1_wide(wides x) {
  wides power;
  const wides rest = exp_parts(wide_clamped(x, -200, 200), &power);
  return wide_with_sign(wide_fused(power, rest, power - wide_all(1)), x);
}

/* log x = n ln 2 + result, for normal positive x. */
INLINE wides log_parts(wides x, wides *whole) {
  const wide_bits biased = (wide_bits)x - (wide_bits)wide_all(ROOT_HALF_HIGH) + ((uint64_t)1023 << 52);
  const wide_bits magic = (wide_bits)wide_all(0x1p52);
  *whole = (wides)((biased >> 52) | magic) - wide_all(0x1p52 + 1023);
  const wides m = (wides)((wide_bits)x - (biased & ((uint64_t)0xfff << 52)) + ((uint64_t)1023 << 52));
  const wides s = (m - wide_all(1)) / (m + wide_all(1)), square = s * s;
  return wide_fused(s * square, WIDE_POLYNOMIAL(LOG_WIDE, square), s + s);
}

INLINE wides log_positive(wides x) {
  wides whole;
  const wides rest = log_parts(x, &whole);
  return wide_fused(whole, wide_all(LN2_WIDE_0), wide_fused(whole, wide_all(LN2_WIDE_1), rest));
}

/* `result`, the logarithm of x > 0, with the values that it has elsewhere. */
INLINE wides log_limits(wides x, wides result) {
  result = wide_chosen(is_equal_wide(x, wide_all(0)), wide_all(-INFINITY), result);
  result = wide_chosen(is_less_wide(x, wide_all(0)), wide_all(NAN), result);
  return wide_chosen(is_less_wide(x, wide_all(INFINITY)), result, x);
}

INLINE wides log_wide(wides x) { return log_limits(x, log_positive(x)); }

INLINE wides log2_wide(wides x) {
  wides whole;
  const wides rest = log_parts(x, &whole);
  return log_limits(x, wide_fused(rest, wide_all(LOG2_E_HIGH), whole));
}

INLINE wides log10_wide(wides x) {
  wides whole;
  const wides rest = log_parts(x, &whole) * wide_all(LOG10_E_HIGH);
  return log_limits(x, wide_fused(whole, wide_all(LOG10_2_HIGH), rest));
}

/* log(1 + x) for finite x > -1. What 1 + x rounds away is added where it matters, which is where the sum is near 1. */
INLINE wides log1p_positive(wides x) {
  const wides sum = x + wide_all(1), lost = x - (sum - wide_all(1));
  return log_positive(sum) + wide_chosen(is_less_wide(wide_all(1), x), wide_all(0), lost);
}

INLINE wides log1p_wide(wides x) {
  const wides result = log_limits(x + wide_all(1), log1p_positive(x));
  return wide_chosen(is_equal_wide(x, wide_all(0)), x, result);
}

INLINE wides softplus_wide(wides x) {
  const wides positive = wide_chosen(is_less_wide(x, wide_all(0)), wide_all(0), x);
  return positive + log1p_positive(exp_wide(-wide_magnitude(x)));
}

INLINE wides logsigmoid_wide(wides x) { return -softplus_wide(-x); }

/* e^z^2 erfc(z) for 0 <= z <= 12. */
INLINE wides erfcx_wide(wides z) {
  const wides sum = z + wide_all(3.75), divisor = wide_fused(z, wide_all(2), wide_all(1)); /* of t and of Q */
  const wides inverse = wide_all(1) / (sum * divisor);
  const wides t = (z - wide_all(3.75)) * divisor * inverse;
  return WIDE_POLYNOMIAL(ERFCX_WIDE, t) * (sum * inverse);
}

INLINE wides erf_wide(wides x) {
  const wides z = wide_clamped(wide_magnitude(x), 0, 6), square = z * z;
  const wides small = z * WIDE_POLYNOMIAL(ERF_WIDE, square);
  const wide_mask is_small = is_less_wide(z, wide_all(1));
  if (!any_wide(~is_small)) return wide_with_sign(small, x);
  const wides large = wide_all(1) - exp_wide(-square) * erfcx_wide(z);
  return wide_with_sign(wide_chosen(is_small, small, large), x);
}

/* Phi(-|x|) of the normal distribution; `*bell` is e^(-x^2 / 2). For |x| <= 16. */
INLINE wides normal_tail(wides x, wides *bell) {
  *bell = exp_wide(x * x * wide_all(-0.5)); /* the square of an fp32 number is exact */
  return wide_all(0.5) * *bell * erfcx_wide(wide_magnitude(x) * wide_all(ROOT_HALF_HIGH));
}

/* x Phi(x), -0 at -infinity. Below -16 the result is -0 in fp32, above 16 it is x. */
INLINE wides gelu_wide(wides x) {
  wides bell;
  const wides limited = wide_clamped(x, -16, 16), tail = normal_tail(limited, &bell);
  return wide_chosen(is_less_wide(x, wide_all(0)), limited * tail, x * (wide_all(1) - tail));
}

/* Phi(x) + x phi(x). */
INLINE wides gelu_slope_wide(wides x) {
  wides bell;
  x = wide_clamped(x, -16, 16);
  const wides tail = normal_tail(x, &bell);
  const wides distribution = wide_chosen(is_less_wide(x, wide_all(0)), tail, wide_all(1) - tail);
  return wide_fused(x * bell, wide_all(ROOT_1_2PI_HIGH), distribution);
}

/* e / (1 + e) or 1 / (1 + e) for e = exp(-|x|). `*other` is sigmoid(-x). */
INLINE wides sigmoid_wide(wides x, wides *other) {
  const wides e = exp_wide(-wide_magnitude(x)), inverse = wide_all(1) / (e + wide_all(1));
  const wide_mask negative = is_less_wide(x, wide_all(0));
  *other = wide_chosen(negative, inverse, e * inverse);
  return wide_chosen(negative, e * inverse, inverse);
}

/* sigmoid(x) + x sigmoid(x) sigmoid(-x). */
INLINE wides silu_slope_wide(wides x) {
  wides other;
  x = wide_clamped(x, -200, 200);
  const wides result = sigmoid_wide(x, &other);
  return wide_fused(x * other, result, result);
}

/* 1 + tanh(u) = 2 sigmoid(2 u). Below -20 the result is -0 in fp32, above 20 it is x. */
INLINE wides gelu_tanh_wide(wides x) {
  wides other;
  const wides limited = wide_clamped(x, -20, 20);
  const wides slope = wide_fused(limited * limited, wide_all(GELU_CUBE_HIGH), wide_all(GELU_SCALE_HIGH));
  return wide_chosen(is_less_wide(x, wide_all(0)), limited, x) * sigmoid_wide(limited * slope, &other);
}

INLINE wides gelu_tanh_slope_wide(wides x) {
  wides other;
  x = wide_clamped(x, -20, 20);
  const wides square = x * x;
  const wides argument = x * wide_fused(square, wide_all(GELU_CUBE_HIGH), wide_all(GELU_SCALE_HIGH));
  const wides slope = wide_fused(square, wide_all(3 * GELU_CUBE_HIGH), wide_all(GELU_SCALE_HIGH));
  const wides result = sigmoid_wide(argument, &other);
  return wide_fused(x * slope * other, result, result);
}

/* x - n pi / 2; the last two bits of `*quadrant` are those of n. */
INLINE wides quarter_turns(wides x, wide_words *quadrant) {
  const wides shifted = wide_fused(x, wide_all(0x1.45f306dc9c883p-1), wide_all(ROUND_FP64));
  const wides whole = shifted - wide_all(ROUND_FP64);
  wides r = wide_fused(whole, wide_all(-PI_2_WIDE_0), x); /* exact, and so is the next */
  r = wide_fused(whole, wide_all(-PI_2_WIDE_1), r);
  r = wide_fused(whole, wide_all(-PI_2_WIDE_2), r);
  *quadrant = (wide_words)shifted;
  const wide_mask is_small = is_less_wide(wide_magnitude(x), wide_all(0x1p28));
  if (any_wide(~is_small))
    for (int i = 0; i < WIDES; i++)
      if (!is_set(is_small, i)) {
        int64_t number;
        r[i] = reduce_quadrant(x[i], &number).high;
        (*quadrant)[i] = number;
      }
  return r;
}

/* sin(x + turns pi / 2). */
INLINE wides sine_wide(wides x, int turns) {
  wide_words quadrant;
  const wides r = quarter_turns(x, &quadrant), square = r * r;
  quadrant += turns;
  const wides sine = wide_fused(r * square, WIDE_POLYNOMIAL(SIN_WIDE, square), r);
  const wides cosine = wide_fused(square * square, WIDE_POLYNOMIAL(COS_WIDE, square), wide_fused(square, wide_all(-0.5), wide_all(1)));
  const wides result = wide_chosen(has_bit(quadrant, 1), cosine, sine);
  return (wides)((wide_words)result ^ (wide_words)((wide_bits)(quadrant & 2) << 62));
}

INLINE wides sin_wide(wides x) { return wide_chosen(is_equal_wide(x, wide_all(0)), x, sine_wide(x, 0)); }
INLINE wides cos_wide(wides x) { return sine_wide(x, 1); }

/* base^exponent for a positive finite base and a finite exponent. */
INLINE wides power_positive(wides base, wides exponent) { return exp_wide(exponent * log_positive(base)); }

#endif
