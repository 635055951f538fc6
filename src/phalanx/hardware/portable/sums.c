/* Sums, softmax and its logarithm, forward and backward, whose bits are a matter of definition:

     a row:    pieces of 4,096 numbers; of each piece sixteen sums of every sixteenth number, added in pairs (8 + 8, 4 + 4, 2 + 2,
               1 + 1); the sums of pieces one after the other. Which sum a number goes to depends on its place in the row alone, so
               zeros behind a row and rows beside it change nothing.
     columns:  chains of 256 rows, the sums of chains one after the other.

   bf16 numbers are widened, added in fp32, and rounded once, at the end. Integers are added as 64-bit ones. */

#include "kernels.h"
#include "matrix.h"

#include <math.h>
#include <stdlib.h>

/* Part p of sixteen numbers, in vectors of NAME(WIDTH). */
#define PART_AT(from, p) (*(const NAME(part_anywhere) *)((from) + (p) * NAME(WIDTH)))

#define REAL float
#define NAME(f) f##_fp32
#include "sums_of_type.h"
#include "softmax_of_type.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(f) f##_fp64
#include "sums_of_type.h"
#include "softmax_of_type.h"
#undef REAL
#undef NAME

#define REAL int64_t
#define NAME(f) f##_int64
#include "sums_of_type.h"
#undef REAL
#undef NAME

/* `f` of the type that numbers of `format` are added in, without a result. */
#define OF_FORMAT(f, ...)                         \
  switch (format) {                               \
    case FP64: f##_fp64(__VA_ARGS__); break;      \
    case INT64: f##_int64(__VA_ARGS__); break;    \
    default: f##_fp32(__VA_ARGS__);               \
  }
#define NARROW (format == BF16)

void row_sums(int32_t format, const void *from, void *to, int64_t rows, int64_t width) {
  OF_FORMAT(rows, from, to, rows, width, NARROW)
}

void column_sums(int32_t format, const void *from, void *to, int64_t rows, int64_t columns, int64_t first, int64_t last) {
  OF_FORMAT(columns, from, to, rows, columns, first, last, NARROW)
}

void piece_sums(int32_t format, const void *from, int64_t count, void *sums, int64_t first, int64_t last) {
  OF_FORMAT(pieces, from, count, NARROW, sums, first, last)
}

#define ADD_PIECES(REAL)                                                                     \
  {                                                                                          \
    const REAL *numbers = sums;                                                              \
    REAL total = numbers[0];                                                                 \
    for (int64_t i = 1; i < count; i++) total += numbers[i];                                 \
    if (NARROW) *(uint16_t *)to = narrowed((float)total); else *(REAL *)to = total;          \
  }

void added_pieces(int32_t format, const void *sums, int64_t count, void *to) {
  if (format == FP64) ADD_PIECES(double)
  else if (format == INT64) ADD_PIECES(int64_t)
  else ADD_PIECES(float)
}

int softmax_rows(int32_t format, int32_t logarithm, const void *from, void *to, int64_t rows, int64_t width) {
  void *room = malloc(2 * width * sizeof(double));
  if (!room) return 1;
  if (format == FP64)
    softmax_fp64(logarithm, from, to, rows, width, 0, room);
  else
    softmax_fp32(logarithm, from, to, rows, width, NARROW, room);
  free(room);
  return 0;
}

int softmax_slopes(int32_t format, int32_t logarithm, const void *slopes, const void *results, void *to, int64_t rows, int64_t width) {
  void *room = malloc(3 * width * sizeof(double));
  if (!room) return 1;
  if (format == FP64)
    softmax_slope_fp64(logarithm, slopes, results, to, rows, width, 0, room);
  else
    softmax_slope_fp32(logarithm, slopes, results, to, rows, width, NARROW, room);
  free(room);
  return 0;
}
