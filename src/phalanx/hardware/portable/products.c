/* Products of matrices whose bits are a matter of definition (see matrix.h).

   The layout in memory (strips of rows and columns side by side, blocks that stay in a cache) follows Goto and van de Geijn,
   "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008. */

#include "matrix.h"

#include <stdlib.h>

#define ROWS 6       /* of a tile: 6 x 16 sums are twelve of the sixteen vector registers */
#define COLUMNS 16   /* of a tile */
#define ROW_STRIPS 16      /* side by side: 16 x 6 x 256 numbers, 96 KiB, for the second cache */
#define COLUMN_BLOCK 1024  /* columns side by side: 1 MiB, for the third */

/* Elements k to k + 7 of eight rows, as eight vectors of one element of each row. */
INLINE void load_8x8(const float *const rows[8], int64_t k, lanes to[8]) {
  lanes loaded[8];
  UNROLL
  for (int i = 0; i < 8; i++) loaded[i] = at(rows[i] + k);
  transpose(loaded, to);
}

/* Eight rows of eight numbers become eight columns, `width` apart. */
FUSING static inline void transpose_8x8(const float *const rows[8], int64_t k, float *to, int64_t width) {
  lanes columns[8];
  load_8x8(rows, k, columns);
  UNROLL
  for (int i = 0; i < 8; i++) put(to + i * width, columns[i]);
}

/* Lays `count` rows of m, from row 0 and from column k0 on, side by side: to[k * width + i], rows that are missing as zeros. */
FUSING static void pack(matrix m, int64_t count, int64_t k0, int64_t depth, int64_t width, float *to) {
  int64_t i = 0;
  if (!m.narrow && m.column == 1) {
    const float *from = (const float *)m.at + k0;
    for (; i + 8 <= count; i += 8) {
      const float *rows[8];
      for (int r = 0; r < 8; r++) rows[r] = from + (i + r) * m.row;
      int64_t k = 0;
      for (; k + 8 <= depth; k += 8) transpose_8x8(rows, k, to + k * width + i, width);
      for (; k < depth; k++)
        for (int r = 0; r < 8; r++) to[k * width + i + r] = rows[r][k];
    }
    for (; i < count; i++)
      for (int64_t k = 0; k < depth; k++) to[k * width + i] = from[i * m.row + k];
  } else if (!m.narrow && m.row == 1) {
    const float *from = (const float *)m.at + k0 * m.column;
    if (count == COLUMNS && width == COLUMNS) /* lengths that the compiler knows */
      for (int64_t k = 0; k < depth; k++) memcpy(to + k * COLUMNS, from + k * m.column, COLUMNS * sizeof(float));
    else
      for (int64_t k = 0; k < depth; k++) memcpy(to + k * width, from + k * m.column, count * sizeof(float));
  } else if (m.narrow) {
    const uint16_t *from = (const uint16_t *)m.at + k0 * m.column;
    for (; i < count; i++)
      for (int64_t k = 0; k < depth; k++) to[k * width + i] = widened(from[i * m.row + k * m.column]);
  } else {
    const float *from = (const float *)m.at + k0 * m.column;
    for (; i < count; i++)
      for (int64_t k = 0; k < depth; k++) to[k * width + i] = from[i * m.row + k * m.column];
  }
  if (count < width)
    for (int64_t k = 0; k < depth; k++) memset(to + k * width + count, 0, (width - count) * sizeof(float));
}

/* One chain of each of 6 x 16 elements. Steps of b are `step` apart. */
FUSING static void tile(int64_t depth, const float *a, const float *b, int64_t step, float sums[ROWS * COLUMNS]) {
  lanes s[ROWS][2]; /* in registers, if every loop over them is unrolled */
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) s[i][0] = s[i][1] = all(0);
  for (int64_t k = 0; k < depth; k++) {
    lanes left = at(b + k * step), right = at(b + k * step + 8);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      lanes factor = all(a[k * ROWS + i]);
      s[i][0] = fused(factor, left, s[i][0]);
      s[i][1] = fused(factor, right, s[i][1]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) {
    put(sums + i * COLUMNS, s[i][0]);
    put(sums + i * COLUMNS + 8, s[i][1]);
  }
}

/* The same for a single row. */
FUSING static void row_tile(int64_t depth, const float *a, const float *b, int64_t step, float sums[COLUMNS]) {
  lanes left = all(0), right = all(0);
  for (int64_t k = 0; k < depth; k++) {
    lanes factor = all(a[k * ROWS]);
    left = fused(factor, at(b + k * step), left);
    right = fused(factor, at(b + k * step + 8), right);
  }
  put(sums, left);
  put(sums + 8, right);
}

/* One row a of k numbers times a matrix whose columns, `step` apart, lie in one piece each: GROUPS of eight columns at a time, every
   element in the order that is stated above. A column is read once, and laid out nowhere. */
#define GROUPS 4
INLINE void row_by_columns(int groups, int64_t count, int64_t k, const float *a,
                                                                       const float *b, int64_t step, float *c, int more) {
  const float *rows[GROUPS][8];
  lanes total[GROUPS];
  float old[8 * GROUPS] = {0};
  for (int i = 0; i < 8 * groups; i++) rows[i / 8][i % 8] = b + least(i, count - 1) * step; /* the last one for those that are missing */
  if (more) memcpy(old, c, count * sizeof(float));
  for (int g = 0; g < groups; g++) total[g] = at(old + 8 * g);
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    int64_t end = least(k0 + DEPTH, k), t = k0;
    lanes s[GROUPS];
    for (int g = 0; g < groups; g++) s[g] = all(0);
    for (; t + 8 <= end; t += 8)
#pragma GCC unroll 4
      for (int g = 0; g < groups; g++) {
        lanes terms[8];
        load_8x8(rows[g], t, terms);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) s[g] = fused(all(a[t + i]), terms[i], s[g]);
      }
    for (; t < end; t++)
      for (int g = 0; g < groups; g++) {
        float terms[8];
        for (int i = 0; i < 8; i++) terms[i] = rows[g][i][t];
        s[g] = fused(all(a[t]), at(terms), s[g]);
      }
    for (int g = 0; g < groups; g++) total[g] = k0 == 0 && !more ? s[g] : total[g] + s[g];
  }
  for (int g = 0; g < groups; g++) put(old + 8 * g, total[g]);
  memcpy(c, old, count * sizeof(float));
}

static float *aligned(int64_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

static int64_t multiple(int64_t size, int64_t of) { return (size + of - 1) / of * of; }

/* Room for products of m rows, n columns and k terms: a small one's comes from memory that the process has in use already. */
static workspace make_workspace(int64_t m, int64_t n, int64_t k) {
  int64_t depth = least(k, DEPTH) + 1;
  return (workspace){aligned(least(multiple(m, ROWS), ROW_STRIPS * ROWS) * depth),
                     aligned(least(multiple(n, COLUMNS), COLUMN_BLOCK) * depth)};
}

workspace whole_workspace(void) { return make_workspace(ROW_STRIPS * ROWS, COLUMN_BLOCK, DEPTH); }

void free_workspace(workspace w) {
  free(w.rows);
  free(w.columns);
}

FUSING void multiply(int64_t m, int64_t n, int64_t k, matrix a, matrix b, float *c, int64_t step, int more, workspace w) {
  matrix across = transposed(b);
  /* Few rows use a strip of columns once: it is then laid out and used while it is in the first cache. */
  int64_t block = m <= 2 * ROWS ? COLUMNS : COLUMN_BLOCK;
  float sums[ROWS * COLUMNS];
  if (k == 0 && !more)
    for (int64_t i = 0; i < m; i++) memset(c + i * step, 0, n * sizeof(float));
  if (m == 1 && a.column == 1 && b.row == 1 && !a.narrow && !b.narrow && k > 0) {
    for (int64_t j = 0; j < n; j += 8 * GROUPS) {
      const float *columns = (const float *)b.at + j * b.column;
      if (n - j >= 8 * GROUPS)
        row_by_columns(GROUPS, 8 * GROUPS, k, a.at, columns, b.column, c + j, more);
      else
        for (int64_t i = j; i < n; i += 8)
          row_by_columns(1, least(8, n - i), k, a.at, columns + (i - j) * b.column, b.column, c + i, more);
    }
    return;
  }
  for (int64_t j0 = 0; j0 < n; j0 += block) {
    int64_t wide = least(block, n - j0);
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
      int64_t depth = least(DEPTH, k - k0);
      /* Rows of b that lie in one piece need not be laid out for a row that uses them once. */
      int in_place = m <= 2 && !b.narrow && b.column == 1 && wide == COLUMNS;
      if (!in_place)
        for (int64_t j = 0; j < wide; j += COLUMNS)
          pack(below(across, j0 + j), least(COLUMNS, wide - j), k0, depth, COLUMNS, w.columns + j * depth);
      for (int64_t i0 = 0; i0 < m; i0 += ROW_STRIPS * ROWS) {
        int64_t tall = least(ROW_STRIPS * ROWS, m - i0);
        for (int64_t i = 0; i < tall; i += ROWS) pack(below(a, i0 + i), least(ROWS, tall - i), k0, depth, ROWS, w.rows + i * depth);
        for (int64_t j = 0; j < wide; j += COLUMNS) {
          const float *columns = in_place ? (const float *)b.at + k0 * b.row + j0 : w.columns + j * depth;
          int64_t between = in_place ? b.row : COLUMNS, count = least(COLUMNS, wide - j);
          for (int64_t i = 0; i < tall; i += ROWS) {
            int64_t high = least(ROWS, tall - i);
            (high == 1 ? row_tile : tile)(depth, w.rows + i * depth, columns, between, sums);
            for (int64_t r = 0; r < high; r++) {
              float *to = c + (i0 + i + r) * step + j0 + j;
              const float *from = sums + r * COLUMNS;
              if (k0 == 0 && !more)
                for (int64_t s = 0; s < count; s++) to[s] = from[s];
              else
                for (int64_t s = 0; s < count; s++) to[s] += from[s];
            }
          }
        }
      }
    }
  }
}

/* `batch` products: c (m, n) of rows that follow each other, fp32 or bf16, from a (m, k) and b (k, n). Steps are elements from one
   product of the batch to the next. Returns 1 if there is no memory. */
int products(int64_t batch, int64_t m, int64_t n, int64_t k, const matrix *a, int64_t a_step, const matrix *b, int64_t b_step,
             void *c, int32_t narrow) {
  workspace w = make_workspace(m, n, k);
  float *whole = narrow ? malloc((m * n + 1) * sizeof(float)) : NULL;
  int failed = !w.rows || !w.columns || (narrow && !whole);
  for (int64_t i = 0; i < batch && !failed; i++) {
    matrix one = *a, other = *b;
    one.at = (const char *)a->at + i * a_step * (a->narrow ? 2 : 4);
    other.at = (const char *)b->at + i * b_step * (b->narrow ? 2 : 4);
    float *to = narrow ? whole : (float *)c + i * m * n;
    multiply(m, n, k, one, other, to, n, 0, w);
    if (narrow) store(whole, m * n, (uint16_t *)c + i * m * n, 1);
  }
  free_workspace(w);
  free(whole);
  return failed;
}
