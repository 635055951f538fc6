/* Softmax and its logarithm for one type of numbers, forward and backward: included once for each, as sums_of_type.h. */

static REAL NAME(row_sum)(const REAL *from, int64_t width) {
  REAL total = NAME(piece_sum)(from, least(PIECE, width));
  for (int64_t first = PIECE; first < width; first += PIECE) total += NAME(piece_sum)(from + first, least(PIECE, width - first));
  return total;
}

/* softmax(x) = e / sum(e), e = exp(x - max x), or its logarithm (x - max x) - log sum(e); `room` holds two rows. */
FUSING static void NAME(softmax)(int logarithm, const void *from, void *to, int64_t rows, int64_t width, int narrow, REAL *room) {
  REAL *shifted = room, *powers = room + width;
  for (int64_t i = 0; i < rows; i++) {
    const REAL *x = NAME(numbers)(from, i * width, width, narrow, shifted);
    REAL largest = -INFINITY;
    for (int64_t j = 0; j < width; j++) largest = x[j] > largest ? x[j] : largest;
    for (int64_t j = 0; j < width; j++) shifted[j] = x[j] - largest;
    NAME(function)(FUNCTION_EXP, shifted, powers, width);
    REAL sum = NAME(row_sum)(powers, width);
    if (logarithm) {
      NAME(function)(FUNCTION_LOG, &sum, &sum, 1);
      for (int64_t j = 0; j < width; j++) powers[j] = shifted[j] - sum;
    } else {
      for (int64_t j = 0; j < width; j++) powers[j] /= sum;
    }
    NAME(put)(powers, width, to, i * width, narrow);
  }
}

/* The slope of the softmax's input, y (g - sum(g y)), or of its logarithm's, g - exp(y) sum(g), for slopes g of results y; `room`
   holds three rows. */
FUSING static void NAME(softmax_slope)(int logarithm, const void *slopes, const void *results, void *to, int64_t rows, int64_t width,
                                       int narrow, REAL *room) {
  REAL *terms = room;
  for (int64_t i = 0; i < rows; i++) {
    const REAL *g = NAME(numbers)(slopes, i * width, width, narrow, room + width);
    const REAL *y = NAME(numbers)(results, i * width, width, narrow, room + 2 * width);
    if (logarithm) {
      REAL sum = NAME(row_sum)(g, width);
      NAME(function)(FUNCTION_EXP, y, terms, width);
      for (int64_t j = 0; j < width; j++) terms[j] *= sum;
      for (int64_t j = 0; j < width; j++) terms[j] = g[j] - terms[j];
    } else {
      for (int64_t j = 0; j < width; j++) terms[j] = g[j] * y[j];
      REAL sum = NAME(row_sum)(terms, width);
      for (int64_t j = 0; j < width; j++) terms[j] = y[j] * (g[j] - sum);
    }
    NAME(put)(terms, width, to, i * width, narrow);
  }
}
