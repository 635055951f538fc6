/* Products of matrices whose bits are a matter of definition (see matrix.h).

   The layout in memory (strips of rows and columns side by side, blocks that stay in a cache) follows Goto and van de Geijn,
   "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008. */

#include "kernels.h"
#include "matrix.h"

#include <stdlib.h>

#define ROW_STRIPS 16      /* strips of rows side by side: 96 KiB and more, for the second cache */
#define COLUMN_BLOCK 1024  /* columns side by side: 1 MiB, for the third */

/* Tiles of 6 x 16 sums: twelve of the sixteen registers of AVX2, twenty-four of the thirty-two of NEON. */
#define VECTOR lanes
#define WIDTH 8
#define HEIGHT 6
#define MULTIPLY_ADD fused
#define FILLED all
#define TARGET FUSING
#define NAME(f) f##_of_8
#include "tile.h"

typedef struct {
  int64_t rows, columns; /* of a tile */
  void (*compute)(int64_t height, int64_t depth, const float *a, const float *b, int64_t step, float *sums);
} tiling;

#if defined(__x86_64__) && !defined(PHALANX_NO_VECTORS) && !defined(PHALANX_NO_AVX512)
/* Tiles of 12 x 32 sums: twenty-four of the thirty-two registers of AVX-512. */
#define AVX512 __attribute__((target("avx512f,avx2,fma")))
#define VECTOR __m512
#define WIDTH 16
#define HEIGHT 12
#define MULTIPLY_ADD _mm512_fmadd_ps
#define FILLED _mm512_set1_ps
#define TARGET AVX512
#define NAME(f) f##_of_16
#include "tile.h"

static tiling tiling_here(void) {
  return __builtin_cpu_supports("avx512f") ? (tiling){12, 32, tile_of_16} : (tiling){6, 16, tile_of_8};
}
#else
static tiling tiling_here(void) { return (tiling){6, 16, tile_of_8}; }
#endif

enum { MOST_ROWS = 12, MOST_COLUMNS = 32 };

/* Elements k to k + 7 of eight rows, as eight vectors of one element of each row. Halves of vectors are loaded, so that only pairs and
   quarters remain to be exchanged. */
INLINE void load_8x8(const float *const rows[8], int64_t k, lanes to[8]) {
  UNROLL
  for (int half = 0; half < 2; half++) {
    lanes r[4], s[4];
    UNROLL
    for (int i = 0; i < 4; i++) r[i] = joined(rows[i] + k + 4 * half, rows[i + 4] + k + 4 * half);
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      s[i] = SHUFFLED(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
      s[i + 1] = SHUFFLED(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL
    for (int i = 0; i < 2; i++) {
      to[4 * half + 2 * i] = SHUFFLED(s[i], s[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      to[4 * half + 2 * i + 1] = SHUFFLED(s[i], s[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
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
    if (count == width && width == 16) /* lengths that the compiler knows */
      for (int64_t k = 0; k < depth; k++) memcpy(to + k * 16, from + k * m.column, 16 * sizeof(float));
    else if (count == width && width == 32)
      for (int64_t k = 0; k < depth; k++) memcpy(to + k * 32, from + k * m.column, 32 * sizeof(float));
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
  return (workspace){aligned(least(multiple(m, MOST_ROWS), ROW_STRIPS * MOST_ROWS) * depth),
                     aligned(least(multiple(n, MOST_COLUMNS), COLUMN_BLOCK) * depth)};
}

workspace whole_workspace(void) { return make_workspace(ROW_STRIPS * MOST_ROWS, COLUMN_BLOCK, DEPTH); }

void free_workspace(workspace w) {
  free(w.rows);
  free(w.columns);
}

/* `count` rows of m from row `first` on, in strips of `width`. */
FUSING static void lay_rows(matrix m, int64_t first, int64_t count, int64_t k0, int64_t depth, int64_t width, float *to) {
  for (int64_t i = 0; i < count; i += width) pack(below(m, first + i), least(width, count - i), k0, depth, width, to + i * depth);
}

/* A tile's chains, as the first of their elements or added to those before. */
FUSING static void take(const float *sums, int64_t width, int64_t rows, int64_t columns, float *c, int64_t step, int more) {
  for (int64_t r = 0; r < rows; r++, c += step, sums += width)
    if (more)
      for (int64_t s = 0; s < columns; s++) c[s] += sums[s];
    else
      for (int64_t s = 0; s < columns; s++) c[s] = sums[s];
}

FUSING void multiply(int64_t m, int64_t n, int64_t k, matrix a, matrix b, float *c, int64_t step, int more, workspace w) {
  const tiling t = tiling_here();
  /* Few rows use a strip of columns once: it is then laid out and used while it is in the first cache. */
  int64_t block = m <= 4 * t.rows ? t.columns : COLUMN_BLOCK;
  float sums[MOST_ROWS * MOST_COLUMNS];
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
  int64_t rows_at_once = ROW_STRIPS * t.rows;
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    int64_t depth = least(DEPTH, k - k0);
    if (m <= rows_at_once) lay_rows(a, 0, m, k0, depth, t.rows, w.rows);
    for (int64_t j0 = 0; j0 < n; j0 += block) {
      int64_t wide = least(block, n - j0);
      /* Rows of b that lie in one piece need not be laid out for a row that uses them once. */
      int in_place = m <= 2 && !b.narrow && b.column == 1 && wide == t.columns;
      if (!in_place) lay_rows(transposed(b), j0, wide, k0, depth, t.columns, w.columns);
      for (int64_t i0 = 0; i0 < m; i0 += rows_at_once) {
        int64_t tall = least(rows_at_once, m - i0);
        if (m > rows_at_once) lay_rows(a, i0, tall, k0, depth, t.rows, w.rows);
        for (int64_t j = 0; j < wide; j += t.columns) {
          const float *columns = in_place ? (const float *)b.at + k0 * b.row + j0 : w.columns + j * depth;
          int64_t between = in_place ? b.row : t.columns, count = least(t.columns, wide - j);
          for (int64_t i = 0; i < tall; i += t.rows) {
            int64_t high = least(t.rows, tall - i);
            t.compute(high, depth, w.rows + i * depth, columns, between, sums);
            take(sums, t.columns, high, count, c + (i0 + i) * step + j0 + j, step, k0 > 0 || more);
          }
        }
      }
    }
  }
}

/* `batch` products: c (m, n), rows `c_row` apart, fp32 or bf16, from a (m, k) and b (k, n). Steps are elements from one product of the
   batch to the next. Returns 1 if there is no memory. */
int products(int64_t batch, int64_t m, int64_t n, int64_t k, const matrix *a, int64_t a_step, const matrix *b, int64_t b_step,
             void *c, int64_t c_row, int64_t c_step, int32_t narrow) {
  workspace w = make_workspace(m, n, k);
  float *whole = narrow ? malloc((m * n + 1) * sizeof(float)) : NULL;
  int failed = !w.rows || !w.columns || (narrow && !whole);
  for (int64_t i = 0; i < batch && !failed; i++) {
    matrix one = *a, other = *b;
    one.at = (const char *)a->at + i * a_step * (a->narrow ? 2 : 4);
    other.at = (const char *)b->at + i * b_step * (b->narrow ? 2 : 4);
    if (!narrow) {
      multiply(m, n, k, one, other, (float *)c + i * c_step, c_row, 0, w);
      continue;
    }
    multiply(m, n, k, one, other, whole, n, 0, w);
    for (int64_t row = 0; row < m; row++) store(whole + row * n, n, (uint16_t *)c + i * c_step + row * c_row, 1);
  }
  free_workspace(w);
  free(whole);
  return failed;
}
