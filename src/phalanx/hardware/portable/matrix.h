/* What the portable kernels have in common: the definition of their bits, matrices in memory, and the product that attention is made of.

   A library's product adds in whatever order suits the processor, the shapes and the number of rows. Here the order is stated, and
   fused multiply-adds and additions are rounded as IEEE 754 says, so x86-64 processors with AVX2 and FMA and 64-bit Arm processors get the same bits:

     product:   c[i][j] = ((s_0 + s_1) + s_2) + ...,   s_p the chain s = fma(a[i][k], b[k][j], s) from 0 over k = 256 p, 256 p + 1, ...
     row sums:  sixteen sums of every sixteenth number, then added in pairs: 8 + 8, 4 + 4, 2 + 2, 1 + 1
     functions: polynomials of stated coefficients, in functions/

   Which elements are computed together does not enter: a row of a product does not depend on the other rows, nor a column on other
   columns.

   To be compiled without contraction (-ffp-contract=off): where a multiply-add is fused, it is written. */

#ifndef PORTABLE_MATRIX_H
#define PORTABLE_MATRIX_H

#include <stdint.h>
#include <string.h>

#include "../kernels/vectors.h"
#include "kernels.h"

#define SHARED __attribute__((visibility("hidden"))) /* between the sources of this library, and with no other that is loaded */
#define DEPTH 256 /* terms of a chain: part of the definition */

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

static inline float widened(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

/* To nearest, ties to even, as PyTorch rounds. */
static inline uint16_t narrowed(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline matrix transposed(matrix m) { return (matrix){m.at, m.column, m.row, m.narrow}; }

static inline matrix below(matrix m, int64_t rows) {
  m.at = (const char *)m.at + rows * m.row * (m.narrow ? 2 : 4);
  return m;
}

/* `count` numbers, rounded to bf16 if `narrow`. */
static inline void store(const float *from, int64_t count, void *to, int32_t narrow) {
  if (narrow)
    for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = narrowed(from[i]);
  else
    memcpy(to, from, count * sizeof(float));
}

/* Room for the rows and columns that a product lays side by side. */
typedef struct {
  float *rows, *columns;
  int64_t room; /* numbers in `rows` */
} workspace;

/* Room for products of m rows, n columns and k terms, or of fewer columns and terms; what it points to is NULL if there is no memory. A small
   one's comes from memory that the process has in use already. */
SHARED workspace make_workspace(int64_t m, int64_t n, int64_t k);
SHARED void free_workspace(workspace w);

/* c (m, n), rows `step` apart, becomes a (m, k) times b (k, n); `more`: has the product's chains added to it, one after the other. */
SHARED void multiply(int64_t m, int64_t n, int64_t k, matrix a, matrix b, float *c, int64_t step, int more, workspace w);

#endif
