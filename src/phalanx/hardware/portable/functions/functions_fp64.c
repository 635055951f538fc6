/* Elementary functions of fp64 arrays: special values as in C's Annex F, everything else by functions_fp64.h. */

#include "functions_fp64.h"
#include "../kernels.h"
#include "power.h"

FUSING static double exp_fp64(double x) {
  int n;
  const double_double power = exp_scaled((double_double){x, 0}, &n);
  return scaled_fp64(power.high, n);
}

FUSING static double exp2_fp64(double x) {
  int n;
  if (x > 1100 || x < -1100) x = x > 0 ? 1100 : -1100;
  const double whole = x + 0x1.8p52 - 0x1.8p52;
  const double_double r = times_double((double_double){LN2_HIGH, LN2_LOW}, x - whole);
  const double_double power = exp_scaled(r, &n); /* n is 0, or at the end of the range 1 or -1 */
  return scaled_fp64(power.high, n + (int)whole);
}

FUSING static double expm1_fp64(double x) {
  if (x > 100) return exp_fp64(x);
  return copysign(expm1_pair((double_double){x, 0}).high, x);
}

/* `result` where the logarithm of x is finite. */
#define LOG_LIMITS(x, result) ((x) == 0 ? -INFINITY : (x) < 0 ? NAN : (x) == INFINITY ? (x) : (result))

FUSING static double log_fp64(double x) { return LOG_LIMITS(x, log_pair(x).high); }
FUSING static double log1p_fp64(double x) { return x == 0 ? x : LOG_LIMITS(1 + x, log_of_pair(two_sum(1, x)).high); }

FUSING static double log2_positive(double x) {
  int n;
  const double_double rest = log_parts_fp64(x, &n);
  return plus_double(times(rest, (double_double){LOG2_E_HIGH, LOG2_E_LOW}), n).high;
}
FUSING static double log10_positive(double x) {
  int n;
  const double_double rest = times(log_parts_fp64(x, &n), (double_double){LOG10_E_HIGH, LOG10_E_LOW});
  return plus(rest, times_double((double_double){LOG10_2_HIGH, LOG10_2_LOW}, n)).high;
}
FUSING static double log2_fp64(double x) { return LOG_LIMITS(x, log2_positive(x)); }
FUSING static double log10_fp64(double x) { return LOG_LIMITS(x, log10_positive(x)); }

FUSING static double softplus_fp64(double x) { return x > 700 ? x : softplus_pair(x < -1000 ? -1000 : x).high; }
FUSING static double logsigmoid_fp64(double x) { return -softplus_fp64(-x); }

FUSING static double sigmoid_fp64(double x) {
  int n;
  const double_double result = sigmoid_scaled((double_double){x, 0}, &n);
  return scaled_fp64(result.high, n);
}
FUSING static double silu_fp64(double x) {
  int n;
  if (x == 0 || x > 1000) return x;
  if (x < -1000) return -0.0;
  const double_double result = sigmoid_scaled((double_double){x, 0}, &n);
  return scaled_fp64(times_double(result, x).high, n);
}
FUSING static double silu_slope_fp64(double x) {
  int n, m;
  if (x > 1000 || x < -1000) x = x > 0 ? 1000 : -1000;
  const double_double other = sigmoid_scaled((double_double){-x, 0}, &m);
  const double_double result = sigmoid_scaled((double_double){x, 0}, &n);
  const double_double factor = plus_double(times_double(scaled_pair(other, m), x), 1);
  return scaled_fp64(times(result, factor).high, n);
}

FUSING static double tanh_fp64(double x) { return copysign(tanh_pair(fabs(x) > 30 ? 30 : fabs(x)).high, x); }
FUSING static double erf_fp64(double x) { return x == 0 ? x : erf_pair(x).high; }

FUSING static double gelu_fp64(double x) {
  int n;
  double_double bell;
  if (x == 0 || x > 40) return x;
  if (x < -40) return -0.0;
  const double_double tail = normal_tail_scaled(x, &bell, &n);
  if (x < 0) return scaled_fp64(times_double(tail, x).high, n);
  return times_double(plus_double(negative(scaled_pair(tail, n)), 1), x).high;
}
FUSING static double gelu_slope_fp64(double x) {
  int n;
  double_double bell;
  if (x > 40 || x < -40) x = x > 0 ? 40 : -40;
  double_double tail = normal_tail_scaled(x, &bell, &n);
  double_double rest = times(times_double(bell, x), (double_double){ROOT_1_2PI_HIGH, ROOT_1_2PI_LOW});
  if (x < 0) return scaled_fp64(plus(tail, rest).high, n);
  tail = plus_double(negative(scaled_pair(tail, n)), 1);
  return plus(tail, scaled_pair(rest, n)).high;
}

FUSING static double gelu_tanh_fp64(double x) {
  int n;
  if (x == 0 || x > 40) return x;
  if (x < -40) return -0.0;
  const double_double result = sigmoid_scaled(gelu_argument(x, 1), &n);
  return scaled_fp64(times_double(result, x).high, n);
}
FUSING static double gelu_tanh_slope_fp64(double x) {
  int n, m;
  if (x > 40 || x < -40) x = x > 0 ? 40 : -40;
  const double_double argument = gelu_argument(x, 1), result = sigmoid_scaled(argument, &n), other = sigmoid_scaled(negative(argument), &m);
  const double_double factor = times(scaled_pair(other, m), times_double(gelu_argument(x, 3), 1));
  return scaled_fp64(times(result, plus_double(factor, 1)).high, n);
}

FUSING static double sin_fp64(double x) { return x == 0 ? x : sine_fp64(x, 0); }
FUSING static double cos_fp64(double x) { return sine_fp64(x, 1); }
FUSING static double sqrt_fp64(double x) { return __builtin_sqrt(x); }

/* One step of Newton's on the quotient, with the residual 1 - x y^2 exact but for its rounding. */
FUSING static double rsqrt_fp64(double x) {
  const double y = 1 / __builtin_sqrt(x);
  if (!(y > 0 && y < INFINITY)) return y;
  const double_double product = two_product(x, y);
  const double residual = __builtin_fma(-product.high, y, 1) - product.low * y;
  return __builtin_fma(0.5 * y, residual, y);
}

typedef double scalar_function(double);
static scalar_function *const scalar_functions[FUNCTIONS] = {
    [FUNCTION_EXP] = exp_fp64,
    [FUNCTION_EXPM1] = expm1_fp64,
    [FUNCTION_EXP2] = exp2_fp64,
    [FUNCTION_LOG] = log_fp64,
    [FUNCTION_LOG1P] = log1p_fp64,
    [FUNCTION_LOG2] = log2_fp64,
    [FUNCTION_SIGMOID] = sigmoid_fp64,
    [FUNCTION_SILU] = silu_fp64,
    [FUNCTION_TANH] = tanh_fp64,
    [FUNCTION_ERF] = erf_fp64,
    [FUNCTION_GELU] = gelu_fp64,
    [FUNCTION_GELU_TANH] = gelu_tanh_fp64,
    [FUNCTION_SIN] = sin_fp64,
    [FUNCTION_COS] = cos_fp64,
    [FUNCTION_SQRT] = sqrt_fp64,
    [FUNCTION_RSQRT] = rsqrt_fp64,
    [FUNCTION_LOG10] = log10_fp64,
    [FUNCTION_SOFTPLUS] = softplus_fp64,
    [FUNCTION_LOGSIGMOID] = logsigmoid_fp64,
    [FUNCTION_GELU_SLOPE] = gelu_slope_fp64,
    [FUNCTION_GELU_TANH_SLOPE] = gelu_tanh_slope_fp64,
    [FUNCTION_SILU_SLOPE] = silu_slope_fp64,
};

/* A NaN of the same bits on every processor. */
static double one_nan(double x) { return x == x ? x : NAN; }

void function_fp64(int32_t function, const double *from, double *to, int64_t count) {
  scalar_function *const compute = scalar_functions[function];
  for (int64_t i = 0; i < count; i++) to[i] = from[i] == from[i] ? one_nan(compute(from[i])) : NAN;
}

FUSING static double power_of_size(double base, double exponent) {
  int n;
  const double_double log = log_pair(base);
  const double product = log.high * exponent;
  const double_double argument = fabs(product) < 1000 ? times_double(log, exponent) : (double_double){product > 0 ? 1000 : -1000, 0};
  const double_double power = exp_scaled(argument, &n);
  return scaled_fp64(power.high, n);
}

void power_fp64(const double *base, const double *exponent, double *to, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const double size = fabs(base[i]), x = exponent[i];
    const double power = size > 0 && size < INFINITY && fabs(x) < INFINITY ? power_of_size(size, x) : 0;
    to[i] = one_nan(power_limits(base[i], x, power));
  }
}
