/* The innermost loop of a product: one chain of each element of a tile, stored or added to the chains before. Included once for each width of vectors, with

     VECTOR     a vector
     WIDTH      its numbers
     HEIGHT     the most rows of a tile, a multiple of two: 2 HEIGHT vectors of sums stay in registers
     MULTIPLY_ADD(x, y, z), FILLED(x), TARGET, NAME(f) */

typedef VECTOR NAME(anywhere) __attribute__((aligned(sizeof(float))));

/* `count` rows of a, laid out HEIGHT at a time, by 2 WIDTH columns of b, whose steps over k are `between` apart. `height` >= count rows are computed. */
static inline __attribute__((always_inline)) TARGET void NAME(rows)(const int height, int64_t count, int64_t depth, const float *a, const float *b,
                                                                    int64_t between, float *c, int64_t step, int more) {
  VECTOR s[HEIGHT][2]; /* in registers, if every loop over them is unrolled */
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) {
    s[i][0] = s[i][1] = FILLED(0);
    if (i < count) __builtin_prefetch(c + i * step, 1), __builtin_prefetch(c + i * step + WIDTH, 1);
  }
  for (int64_t k = 0; k < depth; k++) {
    VECTOR left = *(const NAME(anywhere) *)(b + k * between), right = *(const NAME(anywhere) *)(b + k * between + WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < height; i++) {
      VECTOR factor = FILLED(a[k * HEIGHT + i]);
      s[i][0] = MULTIPLY_ADD(factor, left, s[i][0]);
      s[i][1] = MULTIPLY_ADD(factor, right, s[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) {
    if (i >= count) break;
    NAME(anywhere) *to = (NAME(anywhere) *)(c + i * step), *further = (NAME(anywhere) *)(c + i * step + WIDTH);
    if (more) s[i][0] = *to + s[i][0], s[i][1] = *further + s[i][1];
    *to = s[i][0];
    *further = s[i][1];
  }
}

/* The same for a number of rows that is known late. */
TARGET static void NAME(tile)(int64_t count, int64_t depth, const float *a, const float *b, int64_t between, float *c, int64_t step, int more) {
#define ROWS(height) NAME(rows)(height, count, depth, a, b, between, c, step, more)
  if (count == 1)
    ROWS(1);
  else if (count == 2)
    ROWS(2);
  else if (count <= 4)
    ROWS(4);
  else if (count <= HEIGHT / 2)
    ROWS(HEIGHT / 2);
  else if (count <= HEIGHT * 3 / 4)
    ROWS(HEIGHT * 3 / 4);
  else
    ROWS(HEIGHT);
#undef ROWS
}

#undef VECTOR
#undef WIDTH
#undef HEIGHT
#undef MULTIPLY_ADD
#undef FILLED
#undef TARGET
#undef NAME
