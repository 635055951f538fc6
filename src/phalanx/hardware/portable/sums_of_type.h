/* Sums and softmax of one type: included once for each type REAL, whose functions are then called NAME(...). See sums.c. */

typedef REAL NAME(sixteen) __attribute__((vector_size(16 * sizeof(REAL)), aligned(sizeof(REAL))));

/* `count` numbers from number `first` on: in their place, or widened into `room` if they are bf16. */
INLINE const REAL *NAME(numbers)(const void *from, int64_t first, int64_t count, int narrow, REAL *room) {
  if (!narrow) return (const REAL *)from + first;
  for (int64_t i = 0; i < count; i++) room[i] = (REAL)widened(((const uint16_t *)from)[first + i]);
  return room;
}

INLINE void NAME(put)(const REAL *numbers, int64_t count, void *to, int64_t first, int narrow) {
  if (narrow)
    for (int64_t i = 0; i < count; i++) ((uint16_t *)to)[first + i] = narrowed((float)numbers[i]);
  else if (numbers != (REAL *)to + first)
    memcpy((REAL *)to + first, numbers, count * sizeof(REAL));
}

/* One piece: sixteen sums, added in pairs. */
FUSING static REAL NAME(piece_sum)(const REAL *from, int64_t count) {
  NAME(sixteen) sums = {0};
  int64_t whole = count / 16 * 16;
  for (int64_t j = 0; j < whole; j += 16) sums += *(const NAME(sixteen) *)(from + j);
  for (int64_t j = whole; j < count; j++) sums[j - whole] += from[j];
  REAL eight[8], four[4];
  for (int i = 0; i < 8; i++) eight[i] = sums[i] + sums[i + 8];
  for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

/* The sums of pieces `first` to `last` of a row of `count` numbers. */
FUSING static void NAME(pieces)(const void *from, int64_t count, int narrow, REAL *sums, int64_t first, int64_t last) {
  REAL room[PIECE];
  for (int64_t piece = first; piece < last; piece++) {
    int64_t start = piece * PIECE, size = least(PIECE, count - start);
    sums[piece] = NAME(piece_sum)(NAME(numbers)(from, start, size, narrow, room), size);
  }
}

FUSING static void NAME(rows)(const void *from, void *to, int64_t rows, int64_t width, int narrow) {
  REAL room[PIECE];
  for (int64_t i = 0; i < rows; i++) {
    REAL total = 0;
    for (int64_t first = 0; first < width; first += PIECE) {
      int64_t size = least(PIECE, width - first);
      REAL sum = NAME(piece_sum)(NAME(numbers)(from, i * width + first, size, narrow, room), size);
      total = first == 0 ? sum : total + sum;
    }
    NAME(put)(&total, 1, to, i, narrow);
  }
}

/* The sums of columns `start` to `end` of a matrix (rows, columns): chains of DEPTH rows, added one after the other. */
FUSING static void NAME(columns)(const void *from, void *to, int64_t rows, int64_t columns, int64_t start, int64_t end, int narrow) {
  enum { BLOCK = 512 };
  REAL total[BLOCK], chain[BLOCK], room[BLOCK];
  for (int64_t j0 = start; j0 < end; j0 += BLOCK) {
    int64_t count = least(BLOCK, end - j0);
    for (int64_t j = 0; j < count; j++) total[j] = 0;
    for (int64_t row = 0; row < rows; row += DEPTH) {
      for (int64_t j = 0; j < count; j++) chain[j] = 0;
      for (int64_t i = row; i < least(rows, row + DEPTH); i++) {
        const REAL *numbers = NAME(numbers)(from, i * columns + j0, count, narrow, room);
        for (int64_t j = 0; j < count; j++) chain[j] += numbers[j];
      }
      for (int64_t j = 0; j < count; j++) total[j] = row == 0 ? chain[j] : total[j] + chain[j];
    }
    NAME(put)(total, count, to, j0, narrow);
  }
}
