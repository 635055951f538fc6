/* Rows of bf16 numbers times the transpose of a matrix, each element by the chains of additions that PyTorch's product has without AVX-512.

   That adds in fp32: sixty-four chains of fused multiply-adds beside each other, the i-th of every sixty-fourth element, as eight vectors of eight. They are added vector to
   vector in a tree, and then lane to lane. Elements behind the last sixty-four have a vector of chains of their own, those behind its last sixteen are added one by one, and
   the bias at last. A product of two bf16 numbers is exact in fp32.

   So nothing has to be turned. A register has eight of the chains of one element, even ones or odd ones of sixteen neighbors, which are a shift or a mask away in the
   matrix's memory; an addition of two vectors asks only that both have the same order. Rows of x are widened once, chain after chain. A tile of four rows and three
   outputs goes through one vector of chains after the other. */
#include <string.h>

#include "bf16.h"

enum { TALL = 4, BROAD = 3, HALF_BATCH = 48, FURTHER = 512 };

/* The vector of one element's sixty-four chains, in even ones and odd ones, added up to four of each: those of even lanes, and of odd ones. */
INLINE lanes four_and_four(const lanes chain[CHAINS]) {
    const lanes even = (chain[0] + chain[4]) + (chain[2] + chain[6]), odd = (chain[1] + chain[5]) + (chain[3] + chain[7]);
    /* A pair's first four are of one vector of chains, and its last four of the next. */
    return __builtin_shufflevector(even, odd, 0, 1, 2, 3, 8, 9, 10, 11) + __builtin_shufflevector(even, odd, 4, 5, 6, 7, 12, 13, 14, 15);
}

INLINE float sum_of(lanes x) { /* lanes in their order */
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
    x += __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5);
    return x[0] + x[1];
}

/* One element from its chains. */
INLINE half element(const HalfProduct *p, const float *x, const half *w, int64_t j, const lanes chain[CHAINS]) {
    lanes four = four_and_four(chain);
    four += __builtin_shufflevector(four, four, 2, 3, 0, 1, 6, 7, 4, 5);
    float sum = (four[0] + four[1]) + (four[4] + four[5]);
    int64_t t = p->inputs / TURN * TURN;
    lanes rest = all(0);
    for (; t + PAIR <= p->inputs; t += PAIR) {
        rest = fused(at(x + t), wide_at(w + t), rest);
        rest = fused(at(x + t + LANES), wide_at(w + t + LANES), rest);
    }
    sum += sum_of(rest);
    for (; t < p->inputs; t++) sum += x[t] * wide(w[t]);
    return narrow(p->bias ? wide(p->bias[j]) + sum : sum);
}

/* Read once for all outputs, and not anew for each. */
INLINE void in_register(lanes *x) {
#if defined(__x86_64__)
    __asm__("" : "+x"(*x));
#else
    (void)x;
#endif
}

/* `rows` rows from x on, and `outputs` outputs from j on; meanwhile the lines from `next` on come into the cache. */
INLINE void half_tile(const HalfProduct *p, const float *x, half *y, int64_t j, const int rows, const int outputs, const half *next) {
    const int64_t inputs = p->inputs, turns = inputs / TURN;
    const half *w = p->w + j * inputs;
    lanes chain[TALL][BROAD][CHAINS];
    for (int c = 0; c < CHAINS; c++) {
        const half *from = w + c / 2 * PAIR;
        const float *of = x + c * turns * LANES;
        lanes sum[TALL][BROAD];
        UNROLL
        for (int row = 0; row < rows; row++)
            UNROLL
            for (int o = 0; o < outputs; o++) sum[row][o] = all(0);
        for (int64_t turn = 0; turn < turns; turn++, from += TURN, of += LANES) {
            lanes column[BROAD];
            if (next) __builtin_prefetch(next), next += 64 / sizeof(half);
            UNROLL
            for (int o = 0; o < outputs; o++) column[o] = c % 2 ? odds(from + o * inputs) : evens(from + o * inputs);
            UNROLL
            for (int row = 0; row < rows; row++) {
                lanes each = at(of + row * inputs);
                in_register(&each);
                UNROLL
                for (int o = 0; o < outputs; o++) sum[row][o] = fused(each, column[o], sum[row][o]);
            }
        }
        UNROLL
        for (int row = 0; row < rows; row++)
            UNROLL
            for (int o = 0; o < outputs; o++) chain[row][o][c] = sum[row][o];
    }
    for (int row = 0; row < rows; row++)
        for (int o = 0; o < outputs; o++)
            y[row * p->outputs + j + o] = element(p, x + row * inputs, w + o * inputs, j + o, chain[row][o]);
}

/* One output of one row: its matrix's row is read once from the first element to the last. */
INLINE void half_single(const HalfProduct *p, const float *x, half *y, int64_t j) {
    const int64_t turns = p->inputs / TURN;
    const half *from = p->w + j * p->inputs;
    lanes chain[CHAINS];
    UNROLL
    for (int c = 0; c < CHAINS; c++) chain[c] = all(0);
    for (int64_t turn = 0; turn < turns; turn++, from += TURN) {
        __builtin_prefetch(from + FURTHER);
        __builtin_prefetch(from + FURTHER + 64 / sizeof(half));
        UNROLL
        for (int c = 0; c < CHAINS; c += 2) {
            chain[c] = fused(at(x + (c * turns + turn) * LANES), evens(from + c / 2 * PAIR), chain[c]);
            chain[c + 1] = fused(at(x + ((c + 1) * turns + turn) * LANES), odds(from + c / 2 * PAIR), chain[c + 1]);
        }
    }
    y[j] = element(p, x, p->w + j * p->inputs, j, chain);
}

/* Up to four rows, and three outputs or one. */
FUSING static void half_few(const HalfProduct *p, const float *x, half *y, int64_t j, int64_t rows, int64_t outputs, const half *next) {
#define HALF_TILES(ROWS_)                                                                                              \
    case ROWS_:                                                                                                        \
        if (outputs == BROAD)                                                                                          \
            half_tile(p, x, y, j, ROWS_, BROAD, next);                                                                 \
        else                                                                                                           \
            half_tile(p, x, y, j, ROWS_, 1, next);                                                                     \
        break;
    switch (rows) {
        HALF_TILES(1)
        HALF_TILES(2)
        HALF_TILES(3)
        HALF_TILES(4)
    }
}

FUSING void half_outputs_between(const HalfProduct *p, int64_t begin, int64_t end) {
    if (p->rows == 1) {
        for (int64_t j = begin; j < end; j++) half_single(p, p->x, p->y, j);
        return;
    }
    for (int64_t first = 0; first < p->rows; first += HALF_BATCH) {
        const int64_t count = p->rows - first < HALF_BATCH ? p->rows - first : HALF_BATCH, tiles = (count + TALL - 1) / TALL;
        for (int64_t j = begin, broad; j < end; j += broad) {
            broad = end - j < BROAD ? 1 : BROAD;
            /* Of the matrix, what is behind this tile: as many lines as the first rows' tile makes turns. */
            const half *next = j + 3 * BROAD <= p->outputs ? p->w + (j + broad) * p->inputs : 0;
            for (int64_t tile = 0; tile < tiles; tile++, next = 0) {
                const int64_t row = first + count * tile / tiles, rows = first + count * (tile + 1) / tiles - row;
                half_few(p, p->x + row * p->inputs, p->y + row * p->outputs, j, rows, broad, next);
            }
        }
    }
}

typedef struct {
    HalfProduct product;
    const half *rows;
    float *arranged;
    int64_t next_row, next;
} HalfShared;

static FUSING void arrange_rows(void *data) {
    HalfShared *s = data;
    const int64_t inputs = s->product.inputs;
    for (int64_t row; (row = taken(&s->next_row, 1)) < s->product.rows;)
        arrange(s->rows + row * inputs, inputs, s->arranged + row * inputs);
}

static void take_half_shares(void *data) {
    HalfShared *s = data;
    const int64_t outputs = s->product.outputs;
    for (int64_t begin; (begin = taken(&s->next, HALF_SHARE)) < outputs;)
        half_outputs_between(&s->product, begin, end_of(begin, HALF_SHARE, outputs));
}

/* `arranged` has room for (rows, inputs). Returns 0 where the processor has no fused multiply-add of eight elements. */
int half_row_product(const half *x, const half *w, const half *bias, half *y, float *arranged, int64_t rows, int64_t inputs, int64_t outputs,
                     parallel_function parallel, int64_t threads) {
    if (!fuses()) return 0;
    HalfShared s = {{arranged, w, bias, y, rows, inputs, outputs}, x, arranged, 0, 0};
    in_team(arrange_rows, &s, rows * inputs >> 16 ? parallel : 0, threads);
    in_team(take_half_shares, &s, parallel, threads);
    return 1;
}
