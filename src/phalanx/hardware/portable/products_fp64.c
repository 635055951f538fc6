/* Products of fp64 matrices by the definition of matrix.h: checks of machines and tests have them, training has none. They are kept simple. */

#include "kernels.h"
#include "matrix.h"

enum { BLOCK = 64 };

/* One chain of each of `count` elements of a row, over `depth` terms. */
FUSING static void chains(int64_t depth, const double *a, int64_t a_column, const double *b, int64_t b_row, int64_t b_column, int64_t count,
                          double sums[BLOCK]) {
  for (int64_t j = 0; j < count; j++) sums[j] = 0;
  for (int64_t k = 0; k < depth; k++) {
    const double factor = a[k * a_column], *row = b + k * b_row;
    for (int64_t j = 0; j < count; j++) sums[j] = __builtin_fma(factor, row[j * b_column], sums[j]);
  }
}

/* `batch` products, as in products.c, of matrices of fp64 numbers. */
void products_fp64(int64_t batch, int64_t m, int64_t n, int64_t k, const matrix *a, int64_t a_step, const matrix *b, int64_t b_step,
                   double *c, int64_t c_row, int64_t c_step) {
  double sums[BLOCK];
  for (int64_t i = 0; i < batch; i++) {
    const double *left = (const double *)a->at + i * a_step, *right = (const double *)b->at + i * b_step;
    for (int64_t row = 0; row < m; row++)
      for (int64_t j0 = 0; j0 < n; j0 += BLOCK) {
        const int64_t count = least(BLOCK, n - j0);
        double *to = c + i * c_step + row * c_row + j0;
        for (int64_t j = 0; j < count; j++) to[j] = 0;
        for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
          chains(least(DEPTH, k - k0), left + row * a->row + k0 * a->column, a->column, right + k0 * b->row + j0 * b->column, b->row, b->column,
                 count, sums);
          for (int64_t j = 0; j < count; j++) to[j] = k0 == 0 ? sums[j] : to[j] + sums[j];
        }
      }
  }
}
