/* Softmax and its logarithm for one type of numbers, forward and backward: included once for each, as sums_of_type.h. */

FUSING static REAL NAME(row_sum)(const REAL *from, int64_t width) {
  REAL total = 0;
  NAME(rows)(from, &total, 1, width, 0);
  return total;
}

/* The largest number, -infinity if there is none; NaN is passed over. */
FUSING static REAL NAME(largest)(const REAL *from, int64_t width) {
  typedef __typeof__((NAME(part)){0} > (NAME(part)){0}) mask;
  REAL largest = -INFINITY, candidates[16];
  int64_t j = 0;
  NAME(part) most[NAME(PARTS)];
  UNROLL
  for (int p = 0; p < NAME(PARTS); p++) most[p] = (NAME(part)){0} - INFINITY;
  for (; j + 16 <= width; j += 16)
    UNROLL
    for (int p = 0; p < NAME(PARTS); p++) {
      const NAME(part) x = PART_AT(from + j, p);
      const mask is_larger = x > most[p];
      most[p] = (NAME(part))(((mask)x & is_larger) | ((mask)most[p] & ~is_larger));
    }
  memcpy(candidates, most, sizeof candidates);
  for (int i = 0; i < 16; i++) largest = candidates[i] > largest ? candidates[i] : largest;
  for (; j < width; j++) largest = from[j] > largest ? from[j] : largest;
  return largest;
}

/* softmax(x) = e / sum(e), e = exp(x - max x), or its logarithm (x - max x) - log sum(e); `room` holds two rows. */
FUSING static void NAME(softmax)(int logarithm, const void *from, void *to, int64_t rows, int64_t width, int narrow, REAL *room) {
  REAL *shifted = room, *powers = room + width;
  for (int64_t i = 0; i < rows; i++) {
    const REAL *x = NAME(numbers)(from, i * width, width, narrow, shifted);
    const REAL largest = NAME(largest)(x, width);
    REAL *result = narrow ? powers : (REAL *)to + i * width;
    for (int64_t j = 0; j < width; j++) shifted[j] = x[j] - largest;
    NAME(function)(FUNCTION_EXP, shifted, powers, width);
    REAL sum = NAME(row_sum)(powers, width);
    if (logarithm) {
      NAME(function)(FUNCTION_LOG, &sum, &sum, 1);
      for (int64_t j = 0; j < width; j++) result[j] = shifted[j] - sum;
    } else {
      for (int64_t j = 0; j < width; j++) result[j] = powers[j] / sum;
    }
    NAME(put)(result, width, to, i * width, narrow);
  }
}

/* The slope of the softmax's input, y (g - sum(g y)), or of its logarithm's, g - exp(y) sum(g), for slopes g of results y; `room`
   holds three rows. */
FUSING static void NAME(softmax_slope)(int logarithm, const void *slopes, const void *results, void *to, int64_t rows, int64_t width,
                                       int narrow, REAL *room) {
  REAL *terms = room;
  for (int64_t i = 0; i < rows; i++) {
    REAL *result = narrow ? terms : (REAL *)to + i * width;
    const REAL *g = NAME(numbers)(slopes, i * width, width, narrow, room + width);
    const REAL *y = NAME(numbers)(results, i * width, width, narrow, room + 2 * width);
    if (logarithm) {
      REAL sum = NAME(row_sum)(g, width);
      NAME(function)(FUNCTION_EXP, y, terms, width);
      for (int64_t j = 0; j < width; j++) result[j] = g[j] - terms[j] * sum;
    } else {
      for (int64_t j = 0; j < width; j++) terms[j] = g[j] * y[j];
      REAL sum = NAME(row_sum)(terms, width);
      for (int64_t j = 0; j < width; j++) result[j] = y[j] * (g[j] - sum);
    }
    NAME(put)(result, width, to, i * width, narrow);
  }
}
