/* Vectors of bf16 numbers, and products of rows of them; see bf16.c. */
#ifndef PHALANX_BF16_H
#define PHALANX_BF16_H
#include "rows.h"

/* A bf16 number: the upper half of an fp32's bits. */
typedef uint16_t half;
typedef half half_lanes __attribute__((vector_size(LANES * sizeof(half))));
typedef half_lanes halves_anywhere __attribute__((aligned(sizeof(half))));
typedef words words_anywhere __attribute__((aligned(sizeof(half))));

enum {
    PAIR = 2 * LANES,        /* neighbors whose even and whose odd ones are a vector each */
    CHAINS = 8,              /* vectors of chains beside each other: even and odd ones of four pairs */
    TURN = CHAINS * LANES,   /* elements that go around them once */
    HALF_SHARE = 48          /* outputs that a thread takes at a time, in whole tiles and pairs */
};

INLINE lanes wide_at(const half *from) {
    return (lanes)(__builtin_convertvector(*(const halves_anywhere *)from, words) << 16);
}

INLINE float wide(half x) {
    union {
        uint32_t bits;
        float number;
    } u = {(uint32_t)x << 16};
    return u.number;
}

/* The nearest bf16, of two the even one; NaN is PyTorch's. */
INLINE half narrow(float x) {
    union {
        float number;
        uint32_t bits;
    } u = {x};
    return x != x ? 0x7fc0 : (half)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
}

/* The same, widened again. */
INLINE lanes rounded(lanes x) {
    const words bits = (words)x, odd = x != x;
    const words near = (bits + 0x7fff + (bits >> 16 & 1)) & (int32_t)0xffff0000;
    return (lanes)((near & ~odd) | (odd & 0x7fc00000));
}

/* Numbers that are bf16 already. */
INLINE void put_rounded(half *to, lanes x) {
    const words bits = (words)x >> 16 & 0xffff;
    *(halves_anywhere *)to = __builtin_convertvector(bits, half_lanes);
}

/* Even and odd ones of sixteen neighbors. */
INLINE lanes evens(const half *from) { return (lanes)(*(const words_anywhere *)from << 16); }
INLINE lanes odds(const half *from) { return (lanes)(*(const words_anywhere *)from & (int32_t)0xffff0000); }

typedef struct {
    const float *x;       /* (rows, inputs), each row as `arrange` lays it */
    const half *w, *bias; /* (outputs, inputs), (outputs) or none */
    half *y;              /* (rows, outputs) */
    int64_t rows, inputs, outputs;
} HalfProduct;

/* Sixteen neighbors of a row of `width`, the number-th sixteen, put where a product reads them. */
INLINE void arrange_pair(float *row, int64_t width, int64_t number, lanes low, lanes high) {
    const int64_t turns = width / TURN, turn = number / (CHAINS / 2), chain = number % (CHAINS / 2) * 2;
    if (turn < turns) {
        put(row + (chain * turns + turn) * LANES, __builtin_shufflevector(low, high, 0, 2, 4, 6, 8, 10, 12, 14));
        put(row + ((chain + 1) * turns + turn) * LANES, __builtin_shufflevector(low, high, 1, 3, 5, 7, 9, 11, 13, 15));
    } else {
        put(row + number * PAIR, low);
        put(row + number * PAIR + LANES, high);
    }
}

/* A row of `width`, chain after chain; what is left over behind whole turns as it is. */
INLINE void arrange(const half *from, int64_t width, float *row) {
    int64_t number = 0;
    for (; (number + 1) * PAIR <= width; number++)
        arrange_pair(row, width, number, wide_at(from + number * PAIR), wide_at(from + number * PAIR + LANES));
    for (int64_t i = number * PAIR; i < width; i++) row[i] = wide(from[i]);
}

/* The outputs from begin on and before end, of all rows. */
void half_outputs_between(const HalfProduct *p, int64_t begin, int64_t end);
#endif
