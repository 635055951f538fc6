/* Sums and softmax of one type: included once for each type REAL, whose functions are then called NAME(...). See sums.c. */

/* A register of AVX2; sixteen numbers are two or four of them. */
typedef REAL NAME(part) __attribute__((vector_size(32)));
typedef NAME(part) NAME(part_anywhere) __attribute__((aligned(sizeof(REAL))));
enum { NAME(WIDTH) = 32 / sizeof(REAL), NAME(PARTS) = 16 / NAME(WIDTH) };

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

/* The rows or pieces that are added at a time, so that no addition waits for the one before: their sums stay in registers. */
enum { NAME(ABREAST) = 16 / sizeof(REAL) };

/* Of `abreast` pieces, `step` numbers apart: sixteen sums each, added in pairs. A zero added to what is missing of the last sixteen changes
   no bit, since a sum that begins at zero is never a negative zero. */
INLINE void NAME(piece_sums)(const int abreast, const REAL *from, int64_t step, int64_t count, REAL *to) {
  NAME(part) sums[NAME(ABREAST)][NAME(PARTS)] = {0};
  int64_t j = 0;
  for (; j + 16 <= count; j += 16)
    UNROLL
    for (int r = 0; r < abreast; r++)
      UNROLL
      for (int p = 0; p < NAME(PARTS); p++) sums[r][p] += PART_AT(from + r * step + j, p);
  UNROLL
  for (int r = 0; r < abreast; r++) {
    REAL eight[8], four[4], sixteen[16] = {0};
    if (j < count) memcpy(sixteen, from + r * step + j, (size_t)(count - j) * sizeof(REAL));
    UNROLL
    for (int p = 0; p < NAME(PARTS); p++) *(NAME(part_anywhere) *)(sixteen + p * NAME(WIDTH)) = sums[r][p] + PART_AT(sixteen, p);
    for (int i = 0; i < 8; i++) eight[i] = sixteen[i] + sixteen[i + 8];
    for (int i = 0; i < 4; i++) four[i] = eight[i] + eight[i + 4];
    to[r] = (four[0] + four[2]) + (four[1] + four[3]);
  }
}

/* The sums of pieces `first` to `last` of a row of `count` numbers. */
FUSING static void NAME(pieces)(const void *from, int64_t count, int narrow, REAL *sums, int64_t first, int64_t last) {
  REAL room[PIECE];
  int64_t piece = first;
  for (; !narrow && piece + NAME(ABREAST) <= last && (piece + NAME(ABREAST)) * PIECE <= count; piece += NAME(ABREAST))
    NAME(piece_sums)(NAME(ABREAST), (const REAL *)from + piece * PIECE, PIECE, PIECE, sums + piece);
  for (; piece < last; piece++) {
    int64_t start = piece * PIECE, size = least(PIECE, count - start);
    NAME(piece_sums)(1, NAME(numbers)(from, start, size, narrow, room), 0, size, sums + piece);
  }
}

FUSING static void NAME(rows)(const void *from, void *to, int64_t rows, int64_t width, int narrow) {
  REAL room[PIECE];
  for (int64_t i = 0, count; i < rows; i += count) {
    REAL totals[NAME(ABREAST)] = {0}, sums[NAME(ABREAST)];
    count = narrow || i + NAME(ABREAST) > rows ? 1 : NAME(ABREAST);
    for (int64_t first = 0; first < width; first += PIECE) {
      int64_t size = least(PIECE, width - first);
      const REAL *numbers = NAME(numbers)(from, i * width + first, size, narrow, room);
      if (count == 1)
        NAME(piece_sums)(1, numbers, 0, size, sums);
      else
        NAME(piece_sums)(NAME(ABREAST), numbers, width, size, sums);
      for (int64_t r = 0; r < count; r++) totals[r] = first == 0 ? sums[r] : totals[r] + sums[r];
    }
    NAME(put)(totals, count, to, i, narrow);
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
