/* A few rows times the transpose of a matrix, each element by the chain of roundings that a blocked product of many rows has.

   Libraries walk through the inner dimension in blocks: within one, an element is a chain of fused multiply-adds from zero; a block's
   result is added to those before. Here are the same chains, for so few rows that reading the matrix is all that takes time. The
   matrix lies by outputs, so eight outputs' next eight elements are turned in registers. Whether a library's order is this one, and for
   which block, the caller tries. */
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 8")

enum { LANES = 8, GROUPS = 4, MOST = 4, AHEAD = 64 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef lanes lanes_anywhere __attribute__((aligned(sizeof(float))));

/* One instruction and one rounding where the compiler fuses it (-ffp-contract=fast); where it does not, the caller's trial fails. */
INLINE lanes chained(float x, lanes w, lanes sum) { return x * w + sum; }

/* Eight rows of eight elements, turned into eight columns. */
INLINE void turned(const float *from, int64_t stride, lanes *to) {
    lanes r[LANES], s[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) r[i] = *(const lanes_anywhere *)(from + i * stride);
    UNROLL
    for (int i = 0; i < LANES; i += 2) {
        s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL
    for (int i = 0; i < LANES; i += 4) {
        r[i] = __builtin_shufflevector(s[i], s[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 1] = __builtin_shufflevector(s[i], s[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        r[i + 2] = __builtin_shufflevector(s[i + 1], s[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 3] = __builtin_shufflevector(s[i + 1], s[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        to[i] = __builtin_shufflevector(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        to[i + 4] = __builtin_shufflevector(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

typedef struct {
    const float *x, *w, *bias; /* (rows, inputs), (outputs, inputs), (outputs) or none */
    float *y;                  /* (rows, outputs) */
    int64_t rows, inputs, outputs, block, next;
} Product;

/* Eight links of the chains of eight outputs, the g-th eight from w on. */
INLINE void eight(const Product *p, const float *x, const float *w, int64_t t, const int rows, int g,
                  lanes sum[MOST][GROUPS]) {
    const float *from = w + g * LANES * p->inputs + t;
    lanes column[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) __builtin_prefetch(from + i * p->inputs + AHEAD);
    turned(from, p->inputs, column);
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int i = 0; i < LANES; i++) sum[row][g] = chained(x[row * p->inputs + t + i], column[i], sum[row][g]);
}

/* 8 x groups outputs from j on, of `rows` rows from x on. */
INLINE void tile(const Product *p, const float *x, float *y, int64_t j, const int rows, const int groups) {
    const int64_t inputs = p->inputs;
    const float *w = p->w + j * inputs;
    lanes total[MOST][GROUPS], sum[MOST][GROUPS];
    for (int64_t begin = 0; begin < inputs; begin += p->block) {
        const int64_t end = inputs - begin < p->block ? inputs : begin + p->block;
        UNROLL
        for (int row = 0; row < rows; row++)
            UNROLL
            for (int g = 0; g < groups; g++) sum[row][g] = (lanes){0};
        int64_t t = begin;
        /* Both halves of a cache line at once: where rows lie a power of two apart, all lines of a tile share a few places in the cache. */
        for (; t + 2 * LANES <= end; t += 2 * LANES)
            UNROLL
            for (int g = 0; g < groups; g++) {
                eight(p, x, w, t, rows, g, sum);
                eight(p, x, w, t + LANES, rows, g, sum);
            }
        for (; t + LANES <= end; t += LANES)
            UNROLL
            for (int g = 0; g < groups; g++) eight(p, x, w, t, rows, g, sum);
        for (; t < end; t++)
            UNROLL
            for (int g = 0; g < groups; g++) {
                lanes column;
                UNROLL
                for (int i = 0; i < LANES; i++) column[i] = w[(g * LANES + i) * inputs + t];
                UNROLL
                for (int row = 0; row < rows; row++)
                    sum[row][g] = chained(x[row * inputs + t], column, sum[row][g]);
            }
        UNROLL
        for (int row = 0; row < rows; row++)
            UNROLL
            for (int g = 0; g < groups; g++) {
                if (begin)
                    total[row][g] = total[row][g] + sum[row][g];
                else if (p->bias)
                    total[row][g] = *(const lanes_anywhere *)(p->bias + j + g * LANES) + sum[row][g];
                else
                    total[row][g] = sum[row][g];
            }
    }
    UNROLL
    for (int row = 0; row < rows; row++)
        UNROLL
        for (int g = 0; g < groups; g++)
            *(lanes_anywhere *)(y + row * p->outputs + j + g * LANES) = total[row][g];
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

INLINE void outputs_between(const Product *p, int64_t begin, int64_t end) {
    for (int64_t row = 0; row < p->rows; row += MOST) {
        const float *x = p->x + row * p->inputs;
        float *y = p->y + row * p->outputs;
        const int64_t left = p->rows - row;
        int64_t j = begin;
#define TILES(ROWS, GROUPS_)                                                                                           \
    for (; j + LANES * GROUPS_ <= end; j += LANES * GROUPS_) tile(p, x, y, j, ROWS, GROUPS_);
        if (left == 1) {
            TILES(1, 4) TILES(1, 1)
        } else if (left == 2) {
            TILES(2, 2) TILES(2, 1)
        } else if (left == 3) {
            TILES(3, 2) TILES(3, 1)
        } else {
            TILES(4, 2) TILES(4, 1)
        }
        for (; j < end; j++)
            for (int64_t i = 0; i < left && i < MOST; i++) single(p, x + i * p->inputs, y + i * p->outputs, j);
    }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static void outputs_fused(const Product *p, int64_t begin, int64_t end) {
    outputs_between(p, begin, end);
}
static int fuses(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#else
static void outputs_fused(const Product *p, int64_t begin, int64_t end) { outputs_between(p, begin, end); }
static int fuses(void) { return 1; }
#endif

enum { SHARE = 64 }; /* outputs that a thread takes at a time */

static void take_shares(void *data) {
    Product *p = data;
    for (;;) {
        const int64_t begin = __atomic_fetch_add(&p->next, SHARE, __ATOMIC_RELAXED);
        if (begin >= p->outputs) return;
        outputs_fused(p, begin, p->outputs - begin < SHARE ? p->outputs : begin + SHARE);
    }
}

/* GOMP_parallel, of whichever OpenMP runtime the process has. */
typedef void (*parallel_function)(void (*work)(void *), void *data, unsigned threads, unsigned flags);

/* Returns 0 where the processor has no fused multiply-add of eight elements. */
int row_product(const float *x, const float *w, const float *bias, float *y, int64_t rows, int64_t inputs,
                 int64_t outputs, int64_t block, parallel_function parallel, int64_t threads) {
    if (!fuses()) return 0;
    Product p = {x, w, bias, y, rows, inputs, outputs, block, 0};
    if (parallel && threads > 1)
        parallel(take_shares, &p, (unsigned)threads, 0);
    else
        take_shares(&p);
    return 1;
}
