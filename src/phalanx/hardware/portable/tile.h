/* The innermost loop of a product: one chain of each element of a tile. Included once for each width of vectors, with

     VECTOR     a vector
     WIDTH      its numbers
     HEIGHT     the most rows of a tile, a multiple of two: 2 HEIGHT vectors of sums stay in registers
     MULTIPLY_ADD(x, y, z), FILLED(x), TARGET, NAME(f) */

typedef VECTOR NAME(anywhere) __attribute__((aligned(sizeof(float))));

/* `height` rows of a, laid out HEIGHT at a time, by 2 WIDTH columns of b, whose steps over k are `step` apart. */
static inline __attribute__((always_inline)) TARGET void NAME(rows)(const int height, int64_t depth, const float *a, const float *b,
                                                                    int64_t step, float *sums) {
  VECTOR s[HEIGHT][2]; /* in registers, if every loop over them is unrolled */
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) s[i][0] = s[i][1] = FILLED(0);
  for (int64_t k = 0; k < depth; k++) {
    VECTOR left = *(const NAME(anywhere) *)(b + k * step), right = *(const NAME(anywhere) *)(b + k * step + WIDTH);
#pragma GCC unroll 16
    for (int i = 0; i < height; i++) {
      VECTOR factor = FILLED(a[k * HEIGHT + i]);
      s[i][0] = MULTIPLY_ADD(factor, left, s[i][0]);
      s[i][1] = MULTIPLY_ADD(factor, right, s[i][1]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < height; i++) {
    *(NAME(anywhere) *)(sums + i * 2 * WIDTH) = s[i][0];
    *(NAME(anywhere) *)(sums + i * 2 * WIDTH + WIDTH) = s[i][1];
  }
}

/* The same for a number of rows that is known late. */
TARGET static void NAME(tile)(int64_t height, int64_t depth, const float *a, const float *b, int64_t step, float *sums) {
  if (height == 1)
    NAME(rows)(1, depth, a, b, step, sums);
  else if (height == 2)
    NAME(rows)(2, depth, a, b, step, sums);
  else if (height <= 4)
    NAME(rows)(4, depth, a, b, step, sums);
  else if (height <= HEIGHT / 2)
    NAME(rows)(HEIGHT / 2, depth, a, b, step, sums);
  else if (height <= HEIGHT * 3 / 4)
    NAME(rows)(HEIGHT * 3 / 4, depth, a, b, step, sums);
  else
    NAME(rows)(HEIGHT, depth, a, b, step, sums);
}

#undef VECTOR
#undef WIDTH
#undef HEIGHT
#undef MULTIPLY_ADD
#undef FILLED
#undef TARGET
#undef NAME
