/* A few rows times the transpose of a matrix, each element by the chain of roundings that a blocked product of many rows has.

   Libraries walk through the inner dimension in blocks: within one, an element is a chain of fused multiply-adds from zero; a block's
   result is added to those before. Here are the same chains, for so few rows that reading the matrix is what takes time. The
   matrix lies by outputs, so eight outputs' next eight elements are turned in registers: for up to four rows just before they are used, for more
   into a panel that stays in the first cache while all rows pass. Whether a library's order is this one, and for which block, the caller tries. */
#include "rows.h"

enum { GROUPS = 4, MOST = 4, AHEAD = 64 };

/* Eight rows of eight elements, turned into eight columns. */
INLINE void turned(const float *from, int64_t stride, lanes *to) {
    lanes rows[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) rows[i] = at(from + i * stride);
    transpose(rows, to);
}

/* Eight links of the chains of eight outputs, the g-th eight from w on. */
INLINE void eight(const Product *p, const float *x, const float *w, int64_t t, int64_t ahead, const int rows, int g,
                  lanes sum[MOST][GROUPS]) {
    const float *from = w + g * LANES * p->inputs + t;
    lanes column[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) __builtin_prefetch(from + i * p->inputs + ahead);
    turned(from, p->inputs, column);
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int i = 0; i < LANES; i++) sum[row][g] = fused(all(x[row * p->inputs + t + i]), column[i], sum[row][g]);
}

/* 8 x groups outputs from j on, of `rows` rows from x on. */
INLINE void tile(const Product *p, const float *x, float *y, int64_t j, const int rows, const int groups) {
    const int64_t inputs = p->inputs;
    const float *w = p->w + j * inputs;
    lanes total[MOST][GROUPS], sum[MOST][GROUPS];
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int g = 0; g < groups; g++) total[row][g] = all(0); /* the result of no inputs */
    /* Near the end of its rows, a tile fetches the beginnings of the next one's. */
    const int64_t further = (LANES * groups - 1) * inputs + AHEAD;
    for (int64_t begin = 0; begin < inputs; begin += p->block) {
        const int64_t end = inputs - begin < p->block ? inputs : begin + p->block;
        UNROLL
        for (int row = 0; row < rows; row++)
            UNROLL
            for (int g = 0; g < groups; g++) sum[row][g] = all(0);
        int64_t t = begin;
        /* Both halves of a cache line at once: where rows lie a power of two apart, all lines of a tile share a few places in the cache. */
        for (; t + 2 * LANES <= end; t += 2 * LANES) {
            const int64_t ahead = t + AHEAD < inputs ? AHEAD : further;
            UNROLL
            for (int g = 0; g < groups; g++) {
                eight(p, x, w, t, ahead, rows, g, sum);
                eight(p, x, w, t + LANES, ahead, rows, g, sum);
            }
        }
        for (; t + LANES <= end; t += LANES)
            UNROLL
            for (int g = 0; g < groups; g++) eight(p, x, w, t, further, rows, g, sum);
        for (; t < end; t++)
            UNROLL
            for (int g = 0; g < groups; g++) {
                lanes column;
                UNROLL
                for (int i = 0; i < LANES; i++) column[i] = w[(g * LANES + i) * inputs + t];
                UNROLL
                for (int row = 0; row < rows; row++)
                    sum[row][g] = fused(all(x[row * inputs + t]), column, sum[row][g]);
            }
        UNROLL
        for (int row = 0; row < rows; row++)
            UNROLL
            for (int g = 0; g < groups; g++) {
                if (begin)
                    total[row][g] = total[row][g] + sum[row][g];
                else if (p->bias)
                    total[row][g] = at(p->bias + j + g * LANES) + sum[row][g];
                else
                    total[row][g] = sum[row][g];
            }
    }
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int g = 0; g < groups; g++) put(y + row * p->outputs + j + g * LANES, total[row][g]);
}

/* One output, where fewer than eight are left. */
INLINE void single(const Product *p, const float *x, float *y, int64_t j) {
    const float *w = p->w + j * p->inputs;
    float total = 0;
    for (int64_t begin = 0; begin < p->inputs; begin += p->block) {
        const int64_t end = p->inputs - begin < p->block ? p->inputs : begin + p->block;
        float sum = 0;
        for (int64_t t = begin; t < end; t++) sum = __builtin_fmaf(x[t], w[t], sum);
        total = begin ? total + sum : p->bias ? p->bias[j] + sum : sum;
    }
    y[j] = total;
}

/* More rows: sixteen outputs' matrix is turned into a panel, and six rows at a time pass over it. */
enum { WIDE = 2 * LANES, DEPTH = 256, ROWS = 6, BATCH = 48 };

typedef struct {
    lanes panel[DEPTH][2];
    lanes sum[BATCH][2], total[BATCH][2];
} Panel;

INLINE void turn_panel(const Product *p, const float *w, int64_t depth, Panel *held) {
    int64_t t = 0;
    for (; t + LANES <= depth; t += LANES)
        UNROLL
        for (int g = 0; g < 2; g++) {
            lanes column[LANES];
            turned(w + g * LANES * p->inputs + t, p->inputs, column);
            UNROLL
            for (int i = 0; i < LANES; i++) held->panel[t + i][g] = column[i];
        }
    for (; t < depth; t++)
        for (int i = 0; i < WIDE; i++) held->panel[t][i / LANES][i % LANES] = w[i * p->inputs + t];
}

/* `rows` rows from x on pass over the panel; meanwhile the next panel's lines come into the cache. */
INLINE void pass(const Product *p, const float *x, int64_t depth, const Panel *held, lanes (*sum)[2], const int rows,
                 const float *next) {
    const int64_t inputs = p->inputs;
    lanes acc[ROWS][2];
    UNROLL
    for (int row = 0; row < rows; row++) acc[row][0] = sum[row][0], acc[row][1] = sum[row][1];
    for (int64_t t = 0; t < depth; t++) {
        const lanes left = held->panel[t][0], right = held->panel[t][1];
        if (next) __builtin_prefetch(next + (t & (WIDE - 1)) * inputs + (t & -(int64_t)WIDE));
        UNROLL
        for (int row = 0; row < rows; row++) {
            const lanes each = all(x[row * inputs + t]);
            acc[row][0] = fused(each, left, acc[row][0]);
            acc[row][1] = fused(each, right, acc[row][1]);
        }
    }
    UNROLL
    for (int row = 0; row < rows; row++) sum[row][0] = acc[row][0], sum[row][1] = acc[row][1];
}

FUSING static void passes(const Product *p, const float *x, int64_t depth, Panel *held, int64_t count, const float *next) {
    for (int64_t row = 0; row < count; row += ROWS, x += ROWS * p->inputs, next = 0) {
        lanes(*sum)[2] = held->sum + row;
        switch (count - row) {
        case 1: pass(p, x, depth, held, sum, 1, next); break;
        case 2: pass(p, x, depth, held, sum, 2, next); break;
        case 3: pass(p, x, depth, held, sum, 3, next); break;
        case 4: pass(p, x, depth, held, sum, 4, next); break;
        case 5: pass(p, x, depth, held, sum, 5, next); break;
        default: pass(p, x, depth, held, sum, ROWS, next);
        }
    }
}

/* Sixteen outputs from j on, of up to BATCH rows from x on. */
FUSING static void wide_tile(const Product *p, const float *x, float *y, int64_t j, int64_t count, Panel *held) {
    const int64_t inputs = p->inputs;
    const float *w = p->w + j * inputs;
    for (int64_t begin = 0; begin < inputs; begin += p->block) {
        const int64_t end = inputs - begin < p->block ? inputs : begin + p->block;
        for (int64_t row = 0; row < count; row++) held->sum[row][0] = held->sum[row][1] = all(0);
        for (int64_t t = begin; t < end; t += DEPTH) {
            const int64_t depth = end - t < DEPTH ? end - t : DEPTH;
            turn_panel(p, w + t, depth, held);
            const float *next = t + depth < inputs ? w + t + depth : j + 2 * WIDE <= p->outputs ? w + WIDE * inputs : 0;
            passes(p, x + t, depth, held, count, next);
        }
        for (int64_t row = 0; row < count; row++)
            for (int g = 0; g < 2; g++) {
                const lanes sum = held->sum[row][g];
                held->total[row][g] = begin ? held->total[row][g] + sum : p->bias ? at(p->bias + j + g * LANES) + sum : sum;
            }
    }
    for (int64_t row = 0; row < count; row++)
        for (int g = 0; g < 2; g++) put(y + row * p->outputs + j + g * LANES, held->total[row][g]);
}

/* Up to four rows from x on, from output `begin` on. */
INLINE void few(const Product *p, const float *x, float *y, int64_t count, int64_t begin, int64_t end) {
    int64_t j = begin;
#define TILES(ROWS_, GROUPS_)                                                                                          \
    for (; j + LANES * GROUPS_ <= end; j += LANES * GROUPS_) tile(p, x, y, j, ROWS_, GROUPS_);
    if (count == 1) {
        TILES(1, 4) TILES(1, 1)
    } else if (count == 2) {
        TILES(2, 2) TILES(2, 1)
    } else if (count == 3) {
        TILES(3, 2) TILES(3, 1)
    } else {
        TILES(4, 2) TILES(4, 1)
    }
    for (; j < end; j++)
        for (int64_t i = 0; i < count; i++) single(p, x + i * p->inputs, y + i * p->outputs, j);
}

FUSING void outputs_between(const Product *p, int64_t begin, int64_t end) {
    int64_t done = 0;
    if (p->rows > MOST) {
        Panel held;
        const int64_t wide = begin + (end - begin) / WIDE * WIDE;
        for (int64_t row = 0; row < p->rows; row += BATCH) {
            const int64_t count = p->rows - row < BATCH ? p->rows - row : BATCH;
            for (int64_t j = begin; j < wide; j += WIDE)
                wide_tile(p, p->x + row * p->inputs, p->y + row * p->outputs, j, count, &held);
        }
        begin = wide;
    }
    for (; done < p->rows && begin < end; done += MOST)
        few(p, p->x + done * p->inputs, p->y + done * p->outputs, p->rows - done < MOST ? p->rows - done : MOST, begin, end);
}

int fuses(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

typedef struct {
    Product product;
    int64_t next;
} Shared;

static void take_shares(void *data) {
    Shared *s = data;
    const int64_t outputs = s->product.outputs;
    for (int64_t begin; (begin = taken(&s->next, SHARE)) < outputs;)
        outputs_between(&s->product, begin, end_of(begin, SHARE, outputs));
}

/* Returns 0 where the processor has no fused multiply-add of eight elements. */
int row_product(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t inputs,
                int64_t outputs, int64_t block, parallel_function parallel, int64_t threads) {
    if (!fuses()) return 0;
    Shared s = {{x, w, bias, y, rows, inputs, outputs, block}, 0};
    in_team(take_shares, &s, parallel, threads);
    return 1;
}
