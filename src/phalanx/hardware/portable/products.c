/* Products of matrices whose bits are a matter of definition (see matrix.h).

   The layout in memory (strips of rows and columns side by side, blocks that stay in a cache) follows Goto and van de Geijn,
   "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008. */

#include "kernels.h"
#include "matrix.h"

#include <stdlib.h>

#define WHOLE_ROWS 264     /* up to so many rows lie side by side at once: 264 KiB, for the second cache */
#define ROW_BLOCK 96       /* of more, so many: whole tiles of either height, beside the columns in the second cache */
#define COLUMN_BLOCK 4096  /* columns side by side: 4 MiB, for the third */

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
  void (*compute)(int64_t count, int64_t depth, const float *a, const float *b, int64_t between, float *c, int64_t step, int more);
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

/* Eight rows of eight 32-bit words, as eight vectors of one word of each row. Halves of vectors are loaded, so that only pairs and quarters
   remain to be exchanged. */
INLINE void load_8x8(const char *const rows[8], lanes to[8]) {
  UNROLL
  for (int half = 0; half < 2; half++) {
    lanes r[4], s[4];
    UNROLL
    for (int i = 0; i < 4; i++) r[i] = joined(rows[i] + 16 * half, rows[i + 4] + 16 * half);
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

/* Vectors of one element of each of eight rows: eight of fp32 rows, sixteen of bf16 rows, of which a word has two. */
enum { MOST_TERMS = 16 };
INLINE int load_terms(const char *const rows[8], const int narrow, lanes to[MOST_TERMS]) {
  if (!narrow) {
    load_8x8(rows, to);
    return 8;
  }
  lanes pairs[8];
  load_8x8(rows, pairs);
  UNROLL
  for (int i = 0; i < 8; i++) {
    to[2 * i] = (lanes)((words)pairs[i] << 16);
    to[2 * i + 1] = (lanes)((words)pairs[i] & (int32_t)0xffff0000);
  }
  return 16;
}

INLINE float number_at(const char *row, int64_t i, const int narrow) {
  return narrow ? widened(((const uint16_t *)row)[i]) : ((const float *)row)[i];
}

/* Lays `count` rows of m, from row 0 and from column k0 on, side by side: to[k * width + i], rows that are missing as zeros. */
/* Eight rows at a time, whose elements lie in one piece each. */
INLINE void pack_rows(matrix m, int64_t count, int64_t k0, int64_t depth, int64_t width, float *to, const int narrow) {
  const int64_t size = narrow ? 2 : 4, terms = narrow ? 16 : 8;
  const char *from = (const char *)m.at + k0 * size;
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    int64_t k = 0;
    for (; k + terms <= depth; k += terms) {
      const char *rows[8];
      lanes columns[MOST_TERMS];
      UNROLL
      for (int r = 0; r < 8; r++) {
        rows[r] = from + ((i + r) * m.row + k) * size;
        if (k % 16 == 0) __builtin_prefetch(rows[r] + 8 * m.row * size); /* of the next eight */
      }
      load_terms(rows, narrow, columns);
#pragma GCC unroll 16
      for (int c = 0; c < terms; c++) put(to + (k + c) * width + i, columns[c]);
    }
    for (; k < depth; k++)
      for (int r = 0; r < 8; r++) to[k * width + i + r] = number_at(from + (i + r) * m.row * size, k, narrow);
  }
  for (; i < count; i++)
    for (int64_t k = 0; k < depth; k++) to[k * width + i] = number_at(from + i * m.row * size, k, narrow);
}

FUSING static void pack(matrix m, int64_t count, int64_t k0, int64_t depth, int64_t width, float *to) {
  if (m.column == 1 && m.narrow) {
    pack_rows(m, count, k0, depth, width, to, 1);
  } else if (m.column == 1) {
    pack_rows(m, count, k0, depth, width, to, 0);
  } else if (m.narrow) {
    const uint16_t *from = (const uint16_t *)m.at + k0 * m.column;
    for (int64_t k = 0; k < depth; k++)
      for (int64_t i = 0; i < count; i++) to[k * width + i] = widened(from[i * m.row + k * m.column]);
  } else {
    const float *from = (const float *)m.at + k0 * m.column;
    for (int64_t i = 0; i < count; i++)
      for (int64_t k = 0; k < depth; k++) to[k * width + i] = from[i * m.row + k * m.column];
  }
  if (count < width)
    for (int64_t k = 0; k < depth; k++) memset(to + k * width + count, 0, (width - count) * sizeof(float));
}

/* Few rows times a matrix whose columns lie in one piece each: GROUPS or less of eight columns at a time, every element in the order that
   is stated above. A column is read once, and laid out nowhere.

   `a`: rows of k numbers, a_step apart. `b`: the first column, of bf16 numbers if `narrow`; columns are `step` bytes apart. With
   `count` < 8 columns, the last one stands for those that are missing. */
enum { FEW_ROWS = 4, GROUPS = 2 };
INLINE void few_rows_of_columns(const int high, const int groups, const int64_t count, const int narrow, int64_t k, const float *a,
                                int64_t a_step, const char *b, int64_t step, float *c, int64_t c_step, int more) {
#define COLUMN(i) (b + (count < 8 ? least(i, count - 1) : (i)) * step)
  const int64_t size = narrow ? 2 : 4, terms = narrow ? 16 : 8;
  lanes total[FEW_ROWS][GROUPS];
  UNROLL
  for (int r = 0; r < high; r++)
    UNROLL
    for (int g = 0; g < groups; g++) {
      float old[8] = {0};
      if (more) memcpy(old, c + r * c_step + 8 * g, least(8, count) * sizeof(float));
      total[r][g] = at(old);
    }
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    const int64_t end = least(k0 + DEPTH, k);
    int64_t t = k0;
    lanes s[FEW_ROWS][GROUPS];
    UNROLL
    for (int r = 0; r < high; r++)
      UNROLL
      for (int g = 0; g < groups; g++) s[r][g] = all(0);
#define TERMS(g, t)                                                                                  \
  {                                                                                                  \
    const char *rows[8];                                                                             \
    lanes column[MOST_TERMS];                                                                        \
    UNROLL                                                                                           \
    for (int i = 0; i < 8; i++) rows[i] = COLUMN(8 * g + i) + (t) * size;                            \
    load_terms(rows, narrow, column);                                                                \
    UNROLL                                                                                           \
    for (int r = 0; r < high; r++)                                                                   \
      _Pragma("GCC unroll 16") for (int i = 0; i < terms; i++) s[r][g] =                             \
          fused(all(a[r * a_step + (t) + i]), column[i], s[r][g]);                                   \
  }
    /* Both halves of a cache line at once: if columns are a power of two apart, the lines of all of them share a few places in the cache. */
    for (; t + 2 * terms <= end; t += 2 * terms) {
      UNROLL
      for (int g = 0; g < groups; g++) {
        TERMS(g, t)
        TERMS(g, t + terms)
      }
    }
    for (; t + terms <= end; t += terms)
      UNROLL
      for (int g = 0; g < groups; g++) TERMS(g, t)
    for (; t < end; t++)
      UNROLL
      for (int g = 0; g < groups; g++) {
        float column[8];
        for (int i = 0; i < 8; i++) column[i] = number_at(COLUMN(8 * g + i), t, narrow);
        UNROLL
        for (int r = 0; r < high; r++) s[r][g] = fused(all(a[r * a_step + t]), at(column), s[r][g]);
      }
    UNROLL
    for (int r = 0; r < high; r++)
      UNROLL
      for (int g = 0; g < groups; g++) total[r][g] = k0 == 0 && !more ? s[r][g] : total[r][g] + s[r][g];
  }
  UNROLL
  for (int r = 0; r < high; r++)
    UNROLL
    for (int g = 0; g < groups; g++) {
      float whole[8];
      put(whole, total[r][g]);
      memcpy(c + r * c_step + 8 * g, whole, least(8, count) * sizeof(float));
    }
#undef TERMS
#undef COLUMN
}

/* All columns of a matrix b (k, n) for a few rows. */
INLINE void few_rows(const int high, const int narrow, int64_t n, int64_t k, const float *a, int64_t a_step, matrix b, float *c,
                     int64_t c_step, int more) {
  const int64_t step = b.column * (narrow ? 2 : 4);
  const char *columns = b.at;
  int64_t j = 0;
  for (; j + 8 * GROUPS <= n; j += 8 * GROUPS)
    few_rows_of_columns(high, GROUPS, 8 * GROUPS, narrow, k, a, a_step, columns + j * step, step, c + j, c_step, more);
  for (; j + 8 <= n; j += 8) few_rows_of_columns(high, 1, 8, narrow, k, a, a_step, columns + j * step, step, c + j, c_step, more);
  if (j < n) few_rows_of_columns(high, 1, n - j, narrow, k, a, a_step, columns + j * step, step, c + j, c_step, more);
}

#if defined(AVX512)
#define AVX512_INLINE static inline __attribute__((always_inline)) AVX512
#define UNROLL_16 _Pragma("GCC unroll 16")

/* As load_8x8, for sixteen rows of sixteen words, `step` bytes apart. */
AVX512_INLINE void load_16x16(const char *rows, int64_t step, __m512 to[16]) {
  UNROLL
  for (int quarter = 0; quarter < 4; quarter++) {
    __m512 r[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
      const char *row = rows + i * step + 16 * quarter;
      r[i] = _mm512_castps128_ps512(_mm_loadu_ps((const float *)row));
      r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps((const float *)(row + 4 * step)), 1);
      r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps((const float *)(row + 8 * step)), 2);
      r[i] = _mm512_insertf32x4(r[i], _mm_loadu_ps((const float *)(row + 12 * step)), 3);
    }
    const __m512d s[4] = {(__m512d)_mm512_unpacklo_ps(r[0], r[1]), (__m512d)_mm512_unpacklo_ps(r[2], r[3]),
                          (__m512d)_mm512_unpackhi_ps(r[0], r[1]), (__m512d)_mm512_unpackhi_ps(r[2], r[3])};
    UNROLL
    for (int i = 0; i < 4; i += 2) {
      to[4 * quarter + i] = (__m512)_mm512_unpacklo_pd(s[i], s[i + 1]);
      to[4 * quarter + i + 1] = (__m512)_mm512_unpackhi_pd(s[i], s[i + 1]);
    }
  }
}

/* As few_rows_of_columns, for sixteen columns: half of the instructions. */
AVX512_INLINE void few_rows_of_16_columns(const int high, const int narrow, int64_t k, const float *a, int64_t a_step, const char *b, int64_t step,
                                          float *c, int64_t c_step, int more) {
  const int64_t size = narrow ? 2 : 4, terms = narrow ? 32 : 16;
  __m512 total[FEW_ROWS];
  UNROLL
  for (int r = 0; r < high; r++) total[r] = more ? _mm512_loadu_ps(c + r * c_step) : _mm512_setzero_ps();
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    const int64_t end = least(k0 + DEPTH, k);
    int64_t t = k0;
    __m512 s[FEW_ROWS];
    UNROLL
    for (int r = 0; r < high; r++) s[r] = _mm512_setzero_ps();
#define ADD_TERM(t, column)           \
  _Pragma("GCC unroll 8") for (int r = 0; r < high; r++) s[r] = _mm512_fmadd_ps(_mm512_set1_ps(a[r * a_step + (t)]), column, s[r]);
    for (; t + terms <= end; t += terms) {
      __m512 parts[16];
      load_16x16(b + t * size, step, parts);
      UNROLL_16
      for (int i = 0; i < 16; i++)
        if (narrow) {
          ADD_TERM(t + 2 * i, (__m512)_mm512_slli_epi32((__m512i)parts[i], 16))
          ADD_TERM(t + 2 * i + 1, (__m512)_mm512_and_si512((__m512i)parts[i], _mm512_set1_epi32((int32_t)0xffff0000)))
        } else {
          ADD_TERM(t + i, parts[i])
        }
    }
    for (; t < end; t++) {
      float column[16];
      for (int i = 0; i < 16; i++) column[i] = number_at(b + i * step, t, narrow);
      ADD_TERM(t, _mm512_loadu_ps(column))
    }
#undef ADD_TERM
    UNROLL
    for (int r = 0; r < high; r++) total[r] = k0 == 0 && !more ? s[r] : _mm512_add_ps(total[r], s[r]);
  }
  UNROLL
  for (int r = 0; r < high; r++) _mm512_storeu_ps(c + r * c_step, total[r]);
}

/* Sixteen columns of a matrix b (k, n) at a time, for a few rows. Returns the number of columns. */
AVX512 static int64_t sixteens(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_step, matrix b, float *c, int64_t c_step, int more) {
  const int64_t step = b.column * (b.narrow ? 2 : 4);
  int64_t j = 0;
#define SIXTEENS(HIGH)                                                                                                           \
  case HIGH:                                                                                                                     \
    for (; j + 16 <= n; j += 16)                                                                                                 \
      if (b.narrow)                                                                                                              \
        few_rows_of_16_columns(HIGH, 1, k, a, a_step, (const char *)b.at + j * step, step, c + j, c_step, more);                 \
      else                                                                                                                       \
        few_rows_of_16_columns(HIGH, 0, k, a, a_step, (const char *)b.at + j * step, step, c + j, c_step, more);                 \
    break;
  switch (m) {
    SIXTEENS(1)
    SIXTEENS(2)
    SIXTEENS(3)
    SIXTEENS(4)
  }
#undef SIXTEENS
  return j;
}
#endif

FUSING static void multiply_few(int64_t m, int64_t n, int64_t k, const float *a, int64_t a_step, matrix b, float *c, int64_t c_step, int more) {
#if defined(AVX512)
  const int64_t columns = __builtin_cpu_supports("avx512f") ? sixteens(m, n, k, a, a_step, b, c, c_step, more) : 0;
  b = transposed(below(transposed(b), columns));
  c += columns, n -= columns;
#endif
#define FEW(HIGH)                                                          \
  case HIGH:                                                               \
    if (b.narrow)                                                          \
      few_rows(HIGH, 1, n, k, a, a_step, b, c, c_step, more);              \
    else                                                                   \
      few_rows(HIGH, 0, n, k, a, a_step, b, c, c_step, more);              \
    break;
  switch (m) {
    FEW(1)
    FEW(2)
    FEW(3)
    FEW(4)
  }
#undef FEW
}

/* `terms` multiply-adds more of the chains of `count` columns, the first ones if `first`. */
INLINE void add_terms(const int terms, int first, int64_t count, const float *a, int64_t a_step, const float *b, int64_t b_step, float *chains) {
  lanes factors[8];
  int64_t j = 0;
  UNROLL
  for (int t = 0; t < terms; t++) factors[t] = all(a[t * a_step]);
  for (; j + 8 <= count; j += 8) {
    lanes s = first ? all(0) : at(chains + j);
    UNROLL
    for (int t = 0; t < terms; t++) s = fused(factors[t], at(b + t * b_step + j), s);
    put(chains + j, s);
  }
  for (; j < count; j++) {
    float s = first ? 0 : chains[j];
    for (int t = 0; t < terms; t++) s = __builtin_fmaf(a[t * a_step], b[t * b_step + j], s);
    chains[j] = s;
  }
}

/* One row times a matrix whose rows lie in one piece each: eight of them at a time, which are read once, in long pieces. */
FUSING static void multiply_one(int64_t n, int64_t k, const float *a, int64_t a_step, const float *b, int64_t b_step, float *c, int more) {
  enum { COLUMNS = 1024 };
  float chains[COLUMNS];
  for (int64_t j0 = 0; j0 < n; j0 += COLUMNS) {
    const int64_t count = least(COLUMNS, n - j0);
    for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
      const int64_t end = least(k0 + DEPTH, k);
      int64_t t = k0;
      for (; t + 8 <= end; t += 8) add_terms(8, t == k0, count, a + t * a_step, a_step, b + t * b_step + j0, b_step, chains);
      for (; t < end; t++) add_terms(1, t == k0, count, a + t * a_step, a_step, b + t * b_step + j0, b_step, chains);
      for (int64_t j = 0; j < count; j++) c[j0 + j] = k0 == 0 && !more ? chains[j] : c[j0 + j] + chains[j];
    }
  }
}

static float *aligned(int64_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

static int64_t multiple(int64_t size, int64_t of) { return (size + of - 1) / of * of; }

/* Rows that lie side by side at once use a strip of columns once: it is then laid out and used while it is in the first cache. */
static int64_t column_block(int64_t m, tiling t) { return m <= WHOLE_ROWS ? t.columns : COLUMN_BLOCK; }

workspace make_workspace(int64_t m, int64_t n, int64_t k) {
  int64_t depth = least(k, DEPTH) + 1, room = least(multiple(m, MOST_ROWS), WHOLE_ROWS) * depth;
  if (m <= FEW_ROWS && m * k > room) room = m * k;
  return (workspace){aligned(room), aligned(least(multiple(n, MOST_COLUMNS), column_block(m, tiling_here())) * depth), room};
}

void free_workspace(workspace w) {
  free(w.rows);
  free(w.columns);
}

/* Lays strips of `width` rows side by side where the rows of a column lie in one piece: all strips of a column at once. */
INLINE void lay_columns(const float *from, int64_t between, int64_t count, int64_t depth, const int64_t width, float *to) {
  enum { ROWS = 256 }; /* few enough strips to be written to at once */
  const int64_t most = ROWS / width * width;
  for (; count > 0; count -= most, from += most, to += most * depth) {
    const int64_t rows = least(count, most);
    for (int64_t k = 0; k < depth; k++) {
      const float *column = from + k * between;
      for (int64_t i = 0; i < rows; i += 16) __builtin_prefetch(column + 8 * between + i);
      float *row = to + k * width;
      int64_t i = 0;
      for (; i + width <= rows; i += width) memcpy(row + i * depth, column + i, width * sizeof(float));
      if (i < rows) {
        memcpy(row + i * depth, column + i, (rows - i) * sizeof(float));
        memset(row + i * depth + rows - i, 0, (width - rows + i) * sizeof(float));
      }
    }
  }
}

/* `count` rows of m from row `first` on, in strips of `width`. */
FUSING static void lay_rows(matrix m, int64_t first, int64_t count, int64_t k0, int64_t depth, int64_t width, float *to) {
  if (!m.narrow && m.row == 1) {
    const float *from = (const float *)m.at + first + k0 * m.column;
    switch (width) { /* that the compiler knows */
      case 6: return lay_columns(from, m.column, count, depth, 6, to);
      case 12: return lay_columns(from, m.column, count, depth, 12, to);
      case 16: return lay_columns(from, m.column, count, depth, 16, to);
      default: return lay_columns(from, m.column, count, depth, 32, to);
    }
  }
  for (int64_t i = 0; i < count; i += width) pack(below(m, first + i), least(width, count - i), k0, depth, width, to + i * depth);
}

/* The chains of a tile that has fewer columns, as the first of their elements or added to those before. */
FUSING static void take(const float *sums, int64_t width, int64_t rows, int64_t columns, float *c, int64_t step, int more) {
  for (int64_t r = 0; r < rows; r++, c += step, sums += width)
    if (more)
      for (int64_t s = 0; s < columns; s++) c[s] += sums[s];
    else
      for (int64_t s = 0; s < columns; s++) c[s] = sums[s];
}

FUSING void multiply(int64_t m, int64_t n, int64_t k, matrix a, matrix b, float *c, int64_t step, int more, workspace w) {
  const tiling t = tiling_here();
  const int64_t block = column_block(m, t), row_block = m <= WHOLE_ROWS ? WHOLE_ROWS : ROW_BLOCK;
  float sums[MOST_ROWS * MOST_COLUMNS];
  if (k == 0 && !more)
    for (int64_t i = 0; i < m; i++) memset(c + i * step, 0, n * sizeof(float));
  if (m <= FEW_ROWS && b.row == 1 && k > 0 && m * k <= w.room) {
    if (a.narrow || a.column != 1) {
      for (int64_t i = 0; i < m; i++) pack(below(a, i), 1, 0, k, 1, w.rows + i * k);
      a = (matrix){w.rows, k, 1, 0};
    }
    multiply_few(m, n, k, a.at, a.row, b, c, step, more);
    return;
  }
  if (m == 1 && b.column == 1 && !a.narrow && !b.narrow) {
    multiply_one(n, k, a.at, a.column, b.at, b.row, c, more);
    return;
  }
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    int64_t depth = least(DEPTH, k - k0);
    if (m <= row_block) lay_rows(a, 0, m, k0, depth, t.rows, w.rows);
    for (int64_t j0 = 0; j0 < n; j0 += block) {
      int64_t wide = least(block, n - j0);
      /* Rows of b that lie in one piece need not be laid out for a row that uses them once. */
      int in_place = m <= 2 && !b.narrow && b.column == 1 && wide == t.columns;
      if (!in_place) lay_rows(transposed(b), j0, wide, k0, depth, t.columns, w.columns);
      for (int64_t i0 = 0; i0 < m; i0 += row_block) {
        int64_t tall = least(row_block, m - i0);
        if (m > row_block) lay_rows(a, i0, tall, k0, depth, t.rows, w.rows);
        for (int64_t j = 0; j < wide; j += t.columns) {
          const float *columns = in_place ? (const float *)b.at + k0 * b.row + j0 : w.columns + j * depth;
          int64_t between = in_place ? b.row : t.columns, count = least(t.columns, wide - j);
          for (int64_t i = 0; i < tall; i += t.rows) {
            int64_t high = least(t.rows, tall - i);
            float *to = c + (i0 + i) * step + j0 + j;
            if (count == t.columns) {
              t.compute(high, depth, w.rows + i * depth, columns, between, to, step, k0 > 0 || more);
            } else { /* a tile beyond the last column */
              t.compute(high, depth, w.rows + i * depth, columns, between, sums, t.columns, 0);
              take(sums, t.columns, high, count, to, step, k0 > 0 || more);
            }
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
