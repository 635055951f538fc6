/* Special values and signs of the power function, by C's Annex F.10.4.4. */

#ifndef PORTABLE_POWER_H
#define PORTABLE_POWER_H

#include <math.h>
#include <stdint.h>

/* base^exponent. `power` is |base|^exponent, used where both are finite and the base is not 0. fp32 arguments are widened. */
static inline double power_limits(double base, double exponent, double power) {
  const double size = fabs(base);
  if (exponent == 0 || base == 1) return 1;
  if (base != base || exponent != exponent) return NAN;
  if (fabs(exponent) == INFINITY) return size == 1 ? 1 : (size > 1) == (exponent > 0) ? INFINITY : 0;
  const int is_large = fabs(exponent) >= 0x1p53; /* even */
  const int64_t integer = is_large ? 0 : (int64_t)exponent;
  const int is_integer = is_large || (double)integer == exponent, is_odd = is_integer && (integer & 1);
  if (size == 0 || size == INFINITY) power = (size == 0) == (exponent < 0) ? INFINITY : 0;
  else if (base < 0 && !is_integer) return NAN;
  return is_odd && signbit(base) ? -power : power;
}

#endif
