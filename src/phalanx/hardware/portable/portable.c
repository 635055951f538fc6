/* Products and attention of matrices whose bits are a matter of definition, on x86-64 processors with AVX2.

   A library's product adds in whatever order suits the processor, the shapes and the number of rows. Here the order is stated, and
   fused multiply-adds and additions are rounded as IEEE 754 says, so every processor gets the same bits:

     product:   c[i][j] = ((s_0 + s_1) + s_2) + ...,   s_p the chain s = fma(a[i][k], b[k][j], s) from 0 over k = 256 p, 256 p + 1, ...
     row sums:  sixteen sums of every sixteenth number, then added in pairs: 8 + 8, 4 + 4, 2 + 2, 1 + 1
     exponents: a polynomial of stated coefficients, below

   Which elements are computed together does not enter: a row of a product does not depend on the other rows, nor a column on other
   columns. The layout in memory (strips of rows and columns side by side, blocks that stay in a cache) follows Goto and van de Geijn,
   "Anatomy of High-Performance Matrix Multiplication", ACM TOMS 34(3), 2008.

   To be compiled without contraction (-ffp-contract=off): where a multiply-add is fused, it is written. */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define ROWS 6       /* of a tile: 6 x 16 sums are twelve of the sixteen vector registers */
#define COLUMNS 16   /* of a tile */
#define DEPTH 256    /* terms of a chain: part of the definition */
#define ROW_STRIPS 16      /* side by side: 16 x 6 x 256 numbers, 96 KiB, for the second cache */
#define COLUMN_BLOCK 1024  /* columns side by side: 1 MiB, for the third */
#define QUERIES 64   /* rows of attention at a time; the number of terms of a chain in its gradients, so part of the definition */

/* A matrix in memory: element (i, j) lies i * row + j * column elements behind `at`, fp32 or, if narrow, bf16. */
typedef struct {
  const void *at;
  int64_t row, column;
  int32_t narrow;
} matrix;

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

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

/* Numbers k to k + 7 of eight rows, as eight vectors of one number of each row. */
AVX2 static inline __attribute__((always_inline)) void load_8x8(const float *const rows[8], int64_t k, __m256 to[8]) {
  __m256 a[8], b[8], c[8];
  for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(rows[i] + k);
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    c[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    c[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    c[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    c[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    to[i] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x20);
    to[i + 4] = _mm256_permute2f128_ps(c[i], c[i + 4], 0x31);
  }
}

/* Eight rows of eight numbers become eight columns, `width` apart. */
AVX2 static inline void transpose_8x8(const float *const rows[8], int64_t k, float *to, int64_t width) {
  __m256 columns[8];
  load_8x8(rows, k, columns);
  for (int i = 0; i < 8; i++) _mm256_storeu_ps(to + i * width, columns[i]);
}

/* Lays `count` rows of m, from row 0 and from column k0 on, side by side: to[k * width + i], rows that are missing as zeros. */
AVX2 static void pack(matrix m, int64_t count, int64_t k0, int64_t depth, int64_t width, float *to) {
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
AVX2 static void tile(int64_t depth, const float *a, const float *b, int64_t step, float sums[ROWS * COLUMNS]) {
  __m256 s[ROWS][2]; /* in registers, if every loop over them is unrolled */
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) s[i][0] = s[i][1] = _mm256_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    __m256 left = _mm256_loadu_ps(b + k * step), right = _mm256_loadu_ps(b + k * step + 8);
#pragma GCC unroll 6
    for (int i = 0; i < ROWS; i++) {
      __m256 factor = _mm256_broadcast_ss(a + k * ROWS + i);
      s[i][0] = _mm256_fmadd_ps(factor, left, s[i][0]);
      s[i][1] = _mm256_fmadd_ps(factor, right, s[i][1]);
    }
  }
#pragma GCC unroll 6
  for (int i = 0; i < ROWS; i++) {
    _mm256_storeu_ps(sums + i * COLUMNS, s[i][0]);
    _mm256_storeu_ps(sums + i * COLUMNS + 8, s[i][1]);
  }
}

/* The same for a single row. */
AVX2 static void row_tile(int64_t depth, const float *a, const float *b, int64_t step, float sums[COLUMNS]) {
  __m256 left = _mm256_setzero_ps(), right = _mm256_setzero_ps();
  for (int64_t k = 0; k < depth; k++) {
    __m256 factor = _mm256_broadcast_ss(a + k * ROWS);
    left = _mm256_fmadd_ps(factor, _mm256_loadu_ps(b + k * step), left);
    right = _mm256_fmadd_ps(factor, _mm256_loadu_ps(b + k * step + 8), right);
  }
  _mm256_storeu_ps(sums, left);
  _mm256_storeu_ps(sums + 8, right);
}

/* One row a of k numbers times a matrix whose columns, `step` apart, lie in one piece each: GROUPS of eight columns at a time, every
   element in the order that is stated above. A column is read once, and laid out nowhere. */
#define GROUPS 4
AVX2 static inline __attribute__((always_inline)) void row_by_columns(int groups, int64_t count, int64_t k, const float *a,
                                                                       const float *b, int64_t step, float *c, int more) {
  const float *rows[GROUPS][8];
  __m256 total[GROUPS];
  float old[8 * GROUPS] = {0};
  for (int i = 0; i < 8 * groups; i++) rows[i / 8][i % 8] = b + least(i, count - 1) * step; /* the last one for those that are missing */
  if (more) memcpy(old, c, count * sizeof(float));
  for (int g = 0; g < groups; g++) total[g] = _mm256_loadu_ps(old + 8 * g);
  for (int64_t k0 = 0; k0 < k; k0 += DEPTH) {
    int64_t end = least(k0 + DEPTH, k), at = k0;
    __m256 s[GROUPS];
    for (int g = 0; g < groups; g++) s[g] = _mm256_setzero_ps();
    for (; at + 8 <= end; at += 8)
#pragma GCC unroll 4
      for (int g = 0; g < groups; g++) {
        __m256 terms[8];
        load_8x8(rows[g], at, terms);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) s[g] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + at + i), terms[i], s[g]);
      }
    for (; at < end; at++)
      for (int g = 0; g < groups; g++) {
        float terms[8];
        for (int i = 0; i < 8; i++) terms[i] = rows[g][i][at];
        s[g] = _mm256_fmadd_ps(_mm256_broadcast_ss(a + at), _mm256_loadu_ps(terms), s[g]);
      }
    for (int g = 0; g < groups; g++) total[g] = k0 == 0 && !more ? s[g] : _mm256_add_ps(total[g], s[g]);
  }
  for (int g = 0; g < groups; g++) _mm256_storeu_ps(old + 8 * g, total[g]);
  memcpy(c, old, count * sizeof(float));
}

typedef struct {
  float *rows, *columns;
} workspace;

static float *aligned(int64_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

static int64_t multiple(int64_t size, int64_t of) { return (size + of - 1) / of * of; }

/* Room for products of m rows, n columns and k terms: a small one's comes from memory that the process has in use already. */
static workspace make_workspace(int64_t m, int64_t n, int64_t k) {
  int64_t depth = least(k, DEPTH) + 1;
  return (workspace){aligned(least(multiple(m, ROWS), ROW_STRIPS * ROWS) * depth),
                     aligned(least(multiple(n, COLUMNS), COLUMN_BLOCK) * depth)};
}

static void free_workspace(workspace w) {
  free(w.rows);
  free(w.columns);
}

/* c (m, n), rows `step` apart, becomes a (m, k) times b (k, n); `more`: has the product's chains added to it, one after the other. */
AVX2 static void multiply(int64_t m, int64_t n, int64_t k, matrix a, matrix b, float *c, int64_t step, int more, workspace w) {
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

static void store(const float *from, int64_t count, void *to, int32_t narrow) {
  if (narrow)
    for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[i] = narrowed(from[i]);
  else
    memcpy(to, from, count * sizeof(float));
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

/* e^x = 2^n e^r, n = round(x / ln 2), |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (relative error below 2^-25); below
   -87 the result is 0. Infinity and NaN follow from the last line's comparisons. */
static inline float exponential(float x) {
  float clamped = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
  const float round = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which its last bits then are */
  float shifted = __builtin_fmaf(clamped, 1.44269504088896341f, round);
  float n = shifted - round;
  float r = __builtin_fmaf(n, -0.693145751953125f, clamped); /* ln 2 in two parts, the first of sixteen bits */
  r = __builtin_fmaf(n, -1.42860682030941723212e-6f, r);
  float p = 1.0f / 5040;
  p = __builtin_fmaf(p, r, 1.0f / 720);
  p = __builtin_fmaf(p, r, 1.0f / 120);
  p = __builtin_fmaf(p, r, 1.0f / 24);
  p = __builtin_fmaf(p, r, 1.0f / 6);
  p = __builtin_fmaf(p, r, 0.5f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  int32_t power;
  memcpy(&power, &shifted, sizeof power);
  uint32_t scale = (uint32_t)(power - 0x4b400000 + 127) << 23;
  float two_to_n;
  memcpy(&two_to_n, &scale, sizeof two_to_n);
  float result = p * two_to_n;
  result = x < -87.0f ? 0.0f : result;
  result = x > 88.0f ? INFINITY : result;
  return x != x ? x : result;
}

/* ln x for a positive normal x, in double: x = 2^n m, m in [1/sqrt 2, sqrt 2), ln m = 2 artanh((m - 1) / (m + 1)) by its series. */
static double logarithm(float x) {
  int n;
  double m = frexp(x, &n);
  if (m < 0.70710678118654752) m *= 2, n--;
  double t = (m - 1) / (m + 1), square = t * t, sum = 0;
  for (int term = 21; term >= 1; term -= 2) sum = sum * square + 1.0 / term;
  return n * 0.69314718055994531 + 2 * t * sum;
}

static inline float added(const float lanes[16]) {
  float eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/* One attention: a head's queries (q, e), keys (n, e), values (n, v); the bias (q, n) on scores has `at` NULL if there is none. */
typedef struct {
  int64_t queries, keys, width, value_width;
  matrix query, key, value, bias;
  float scale;
  int32_t causal;
} head;

static int64_t seen_keys(const head *h, int64_t row) { return h->causal ? least(h->keys, row + 1) : h->keys; }

/* The scores of `count` rows from `first` on, (count, keys), of which each row has those of the keys that it sees. */
AVX2 static void score(const head *h, int64_t first, int64_t count, float *scores, workspace w) {
  int64_t keys = seen_keys(h, first + count - 1);
  multiply(count, keys, h->width, below(h->query, first), transposed(h->key), scores, h->keys, 0, w);
  for (int64_t i = 0; i < count; i++) {
    float *row = scores + i * h->keys;
    int64_t seen = seen_keys(h, first + i);
    for (int64_t j = 0; j < seen; j++) row[j] *= h->scale;
    if (h->bias.at)
      for (int64_t j = 0; j < seen; j++) {
        int64_t place = (first + i) * h->bias.row + j * h->bias.column;
        row[j] += h->bias.narrow ? widened(((const uint16_t *)h->bias.at)[place]) : ((const float *)h->bias.at)[place];
      }
  }
}

/* out (queries, value_width) = softmax(scale query key^T + bias) value, and the logarithm of each row's denominator. */
AVX2 static void attend(const head *h, void *out, int64_t out_step, int32_t narrow, float *log_sums, int64_t log_step, float *scratch, workspace w) {
  float *scores = scratch, *block = scratch + QUERIES * h->keys;
  matrix weights = {scores, h->keys, 1, 0};
  for (int64_t first = 0; first < h->queries; first += QUERIES) {
    int64_t count = least(QUERIES, h->queries - first), keys = seen_keys(h, first + count - 1);
    float divisors[QUERIES];
    score(h, first, count, scores, w);
    for (int64_t i = 0; i < count; i++) {
      float *row = scores + i * h->keys, largest = -INFINITY, lanes[16] = {0};
      int64_t seen = seen_keys(h, first + i);
      for (int64_t j = 0; j < seen; j++) largest = row[j] > largest ? row[j] : largest;
      float shift = largest == -INFINITY ? 0.0f : largest;
      for (int64_t j = 0; j < seen; j++) row[j] = exponential(row[j] - shift);
      for (int64_t j = seen; j < keys; j++) row[j] = 0.0f;
      int64_t whole = seen / 16 * 16;
      for (int64_t j = 0; j < whole; j += 16)
        for (int lane = 0; lane < 16; lane++) lanes[lane] += row[j + lane];
      for (int64_t j = whole; j < seen; j++) lanes[j - whole] += row[j];
      float sum = added(lanes);
      divisors[i] = sum;
      log_sums[(first + i) * log_step] = sum > 0 ? (float)((double)shift + logarithm(sum)) : (sum == 0 ? -INFINITY : sum);
    }
    multiply(count, h->value_width, keys, weights, h->value, block, h->value_width, 0, w);
    for (int64_t i = 0; i < count; i++) {
      float *row = block + i * h->value_width;
      for (int64_t j = 0; j < h->value_width; j++) row[j] = divisors[i] == 0 ? 0.0f : row[j] / divisors[i];
      store(row, h->value_width, (char *)out + (first + i) * out_step * (narrow ? 2 : 4), narrow);
    }
  }
}

/* Adds to the fp32 gradients of keys (n, e) and values (n, v), and sets that of the queries (q, e); the equations are those of
   FlashAttention (arXiv 2205.14135, appendix B.2), with rows `first` to `first + 64` at a time:
     P = exp(scores - log sums)   dV += P^T dOut   dP = dOut V^T   dS = P (dP - rowsum(dOut out))   dQ = scale dS K   dK += scale dS^T Q */
AVX2 static void attend_backward(const head *h, matrix grad_out, matrix out, const float *log_sums, int64_t log_step, float *grad_query,
                                 float *grad_key, float *grad_value, float *scratch, workspace w) {
  float *weights = scratch, *slopes = scratch + QUERIES * h->keys;
  matrix of_weights = {weights, h->keys, 1, 0}, of_slopes = {slopes, h->keys, 1, 0};
  for (int64_t first = 0; first < h->queries; first += QUERIES) {
    int64_t count = least(QUERIES, h->queries - first), keys = seen_keys(h, first + count - 1);
    score(h, first, count, weights, w);
    multiply(count, keys, h->value_width, below(grad_out, first), transposed(h->value), slopes, h->keys, 0, w);
    for (int64_t i = 0; i < count; i++) {
      float *row = weights + i * h->keys, *slope = slopes + i * h->keys, lanes[16] = {0};
      float log_sum = log_sums[(first + i) * log_step];
      int64_t seen = seen_keys(h, first + i);
      for (int64_t j = 0; j < h->value_width; j++) {
        int64_t left = (first + i) * grad_out.row + j * grad_out.column, right = (first + i) * out.row + j * out.column;
        float slope_of_out = grad_out.narrow ? widened(((const uint16_t *)grad_out.at)[left]) : ((const float *)grad_out.at)[left];
        float result = out.narrow ? widened(((const uint16_t *)out.at)[right]) : ((const float *)out.at)[right];
        lanes[j & 15] += slope_of_out * result;
      }
      float common = added(lanes);
      for (int64_t j = 0; j < seen; j++) row[j] = exponential(row[j] - log_sum);
      for (int64_t j = 0; j < seen; j++) slope[j] = row[j] * (slope[j] - common) * h->scale;
      for (int64_t j = seen; j < keys; j++) row[j] = slope[j] = 0.0f;
    }
    multiply(count, h->width, keys, of_slopes, h->key, grad_query + first * h->width, h->width, 0, w);
    multiply(keys, h->width, count, transposed(of_slopes), below(h->query, first), grad_key, h->width, 1, w);
    multiply(keys, h->value_width, count, transposed(of_weights), below(grad_out, first), grad_value, h->value_width, 1, w);
  }
}

static matrix at_head(const matrix *m, const int64_t steps[2], int64_t sequence, int64_t number) {
  matrix here = *m;
  if (m->at) here.at = (const char *)m->at + (sequence * steps[0] + number * steps[1]) * (m->narrow ? 2 : 4);
  return here;
}

/* `shape`: sequences, query heads, key heads, queries, keys, width, width of a value. `steps`: from a sequence and from a head to the next, in
   elements, of query, key, value, bias. Results follow each other: out (sequences, queries, heads, v), log sums (sequences, heads, queries). */
int attention(const int64_t shape[7], const matrix inputs[4], const int64_t steps[8], float scale, int32_t causal, void *out, int32_t narrow,
              float *log_sums) {
  int64_t heads = shape[1], shared = heads / shape[2], queries = shape[3], keys = shape[4], v = shape[6];
  workspace w = make_workspace(ROW_STRIPS * ROWS, COLUMN_BLOCK, DEPTH);
  float *scratch = malloc((QUERIES * keys + QUERIES * v + 1) * sizeof(float));
  int failed = !w.rows || !w.columns || !scratch;
  for (int64_t b = 0; b < shape[0] && !failed; b++)
    for (int64_t n = 0; n < heads; n++) {
      head h = {queries, keys, shape[5], v, at_head(inputs, steps, b, n), at_head(inputs + 1, steps + 2, b, n / shared),
                at_head(inputs + 2, steps + 4, b, n / shared), at_head(inputs + 3, steps + 6, b, n), scale, causal};
      char *to = (char *)out + (b * queries * heads + n) * v * (narrow ? 2 : 4);
      attend(&h, to, heads * v, narrow, log_sums + (b * heads + n) * queries, 1, scratch, w);
    }
  free_workspace(w);
  free(scratch);
  return failed;
}

/* `inputs` and `steps` go on with the gradient of out and out. Gradients follow each other, (sequences, heads, tokens, width). The query
   heads that share a key's head add to its gradient one after the other. */
int attention_backward(const int64_t shape[7], const matrix inputs[6], const int64_t steps[12], float scale, int32_t causal,
                       const float *log_sums, void *grad_query, void *grad_key, void *grad_value, int32_t narrow) {
  int64_t heads = shape[1], shared = heads / shape[2], queries = shape[3], keys = shape[4], e = shape[5], v = shape[6];
  int64_t size = narrow ? 2 : 4;
  workspace w = make_workspace(ROW_STRIPS * ROWS, COLUMN_BLOCK, DEPTH);
  float *scratch = malloc((2 * QUERIES * keys + 1) * sizeof(float));
  float *sums = malloc((queries * e + keys * e + keys * v + 1) * sizeof(float));
  int failed = !w.rows || !w.columns || !scratch || !sums;
  for (int64_t b = 0; b < shape[0] && !failed; b++)
    for (int64_t n = 0; n < heads; n++) {
      head h = {queries, keys, e, v, at_head(inputs, steps, b, n), at_head(inputs + 1, steps + 2, b, n / shared),
                at_head(inputs + 2, steps + 4, b, n / shared), at_head(inputs + 3, steps + 6, b, n), scale, causal};
      float *of_query = sums, *of_key = sums + queries * e, *of_value = of_key + keys * e;
      if (n % shared == 0) memset(of_key, 0, (keys * e + keys * v) * sizeof(float));
      attend_backward(&h, at_head(inputs + 4, steps + 8, b, n), at_head(inputs + 5, steps + 10, b, n),
                      log_sums + (b * heads + n) * queries, 1, of_query, of_key, of_value, scratch, w);
      int64_t own = b * heads + n, common = b * shape[2] + n / shared;
      store(of_query, queries * e, (char *)grad_query + own * queries * e * size, narrow);
      if (n % shared == shared - 1) {
        store(of_key, keys * e, (char *)grad_key + common * keys * e * size, narrow);
        store(of_value, keys * v, (char *)grad_value + common * keys * v * size, narrow);
      }
    }
  free_workspace(w);
  free(scratch);
  free(sums);
  return failed;
}
