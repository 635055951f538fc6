/* A few rows through a layer, from its queries, keys and values to the next layer's, in one parallel region; or, where others attend, from its heads' results.

   What lies between the products are PyTorch's operations, each rounding as its kernels of eight lanes do: the root-mean-square norm with the
   order of its sum, the rotation, and SiLU by way of SLEEF's exponential (Shibata and Petrogalli, TPDS 31(6), 2020; expf with 1.0 ULP). Nothing promises that
   the bits are PyTorch's, so the caller tries. */
#include <string.h>

#include "attend.h"

typedef struct {
    const float *w, *bias; /* (outputs, inputs), (outputs) or none */
    int64_t outputs, inputs, block;
} Matrix;

typedef struct {
    Matrix query, key, value, output, gate, up, down;
    const float *attention_norm, *ffn_norm, *query_norm, *key_norm; /* the last two (width) or none */
    int64_t dim, heads, kept, width, inner, rotated;               /* kept: heads of keys and values; rotated: elements of a head */
    float eps;
} Layer;

typedef struct {
    const Layer *ended, *begun;        /* the layer whose attention is done or due, and the next; either may be missing */
    Attention *attention;              /* that of the ended layer, if it is due */
    float *states;                     /* (rows, dim): what enters a layer, and then the next */
    float *mixed;                      /* (rows, heads width) of the ended layer */
    const float *cos, *sin;            /* (rows, rotated) */
    float *query, *key, *value;        /* (rows, heads or kept, width) of the begun layer */
    float *normed, *inner, *gate, *up; /* (rows, dim), (rows, inner) three times */
    int64_t rows;
    int64_t next[4]; /* the next share of each product, zeros at first */
    void (*barrier)(void);
    int (*number)(void), (*members)(void); /* of the team, and its size, which may be smaller than asked for */
    int64_t threads;
} Step;

/* Which thread this is, of how many. */
typedef struct {
    int64_t number, threads;
} Member;

/* The sum of eight lanes' vectors in the order of PyTorch's cascade: four sums beside each other, and levels of them where there are many. */
INLINE lanes cascade(const float *x, int64_t vectors) {
    enum { SUMS = 4, LEVELS = 4 };
    lanes sum[LEVELS][SUMS];
    for (int level = 0; level < LEVELS; level++)
        for (int k = 0; k < SUMS; k++) sum[level][k] = all(0);
    const int64_t size = vectors / SUMS;
    int64_t log = 0;
    while (((int64_t)1 << log) < size) log++;
    const int64_t power = log / LEVELS > 4 ? log / LEVELS : 4, step = (int64_t)1 << power;
    int64_t i = 0;
#define ADD_FOUR(I)                                                                                                    \
    UNROLL for (int k = 0; k < SUMS; k++) {                                                                            \
        const lanes each = at(x + ((I) * SUMS + k) * LANES);                                                           \
        sum[0][k] += each * each;                                                                                      \
    }
    while (i + step <= size) {
        for (int64_t j = 0; j < step; j++, i++) ADD_FOUR(i)
        for (int level = 1; level < LEVELS; level++) {
            for (int k = 0; k < SUMS; k++) sum[level][k] += sum[level - 1][k], sum[level - 1][k] = all(0);
            if (i & ((step - 1) << (level * power))) break;
        }
    }
    for (; i < size; i++) ADD_FOUR(i)
    for (int level = 1; level < LEVELS; level++)
        for (int k = 0; k < SUMS; k++) sum[0][k] += sum[level][k];
    for (i = size * SUMS; i < vectors; i++) {
        const lanes each = at(x + i * LANES);
        sum[0][0] += each * each;
    }
    for (int k = 1; k < SUMS; k++) sum[0][0] += sum[0][k];
    return sum[0][0];
}

/* y = x / sqrt(mean(x^2) + eps) * gain of one row; whole vectors. */
INLINE void norm(const float *x, const float *gain, float eps, int64_t width, float *y) {
    const lanes sums = cascade(x, width / LANES);
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    const float inverse = 1.0f / __builtin_sqrtf(sum / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) put(y + i, at(x + i) * all(inverse) * at(gain + i));
}

/* e^x to a unit in the last place: SLEEF's expf. */
INLINE lanes exponential(lanes x) {
    const lanes scaled = x * all(1.442695040888963407359924681001892137426645954152985934135449406931f);
    words q;
    lanes whole;
#if defined(__x86_64__)
    q = (words)_mm256_cvtps_epi32((__m256)scaled);
    whole = (lanes)_mm256_cvtepi32_ps((__m256i)q);
#else
    for (int i = 0; i < LANES; i++) whole[i] = __builtin_rintf(scaled[i]), q[i] = (int32_t)whole[i];
#endif
    lanes s = fused(whole, all(-0.693145751953125f), x);
    s = fused(whole, all(-1.428606765330187045e-06f), s);
    lanes u = all(0.000198527617612853646278381f);
    u = fused(u, s, all(0.00139304355252534151077271f));
    u = fused(u, s, all(0.00833336077630519866943359f));
    u = fused(u, s, all(0.0416664853692054748535156f));
    u = fused(u, s, all(0.166666671633720397949219f));
    u = fused(u, s, all(0.5f));
    u = all(1.0f) + fused(s * s, u, s);
    const words half = q >> 1, rest = q - half;
    u = u * (lanes)((half + 127) << 23) * (lanes)((rest + 127) << 23);
    const words none = x < all(-104.0f), much = x > all(100.0f);
    u = (lanes)((words)u & ~none);
    return (lanes)(((words)u & ~much) | (much & (words)all(__builtin_inff())));
}

INLINE lanes silu(lanes x) { return x / (all(1.0f) + exponential(-x)); }

/* One head's row, turned by its position's angle. */
INLINE void rotate(float *x, const float *cos, const float *sin, int64_t rotated) {
    const int64_t half = rotated / 2;
    for (int64_t i = 0; i < half; i++) {
        const float first = x[i], second = x[i + half];
        x[i] = first * cos[i] + -second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

/* Shares of the outputs of matrices, one after the other, of the same rows. */
INLINE int64_t shares_of(const Matrix *m) { return (m->outputs + SHARE - 1) / SHARE; }

INLINE void share_of(const Matrix *m, const float *x, float *y, int64_t rows, int64_t share) {
    const Product p = {x, m->w, m->bias, y, rows, m->inputs, m->outputs, m->block};
    const int64_t begin = share * SHARE;
    outputs_between(&p, begin, end_of(begin, SHARE, m->outputs));
}


INLINE void meet(const Step *s, Member me) {
    if (me.threads > 1) s->barrier();
}

/* Rows of a norm, each by one thread. */
INLINE void norms(const Step *s, const float *gain, float eps, int64_t dim, Member me) {
    for (int64_t row = me.number; row < s->rows; row += me.threads)
        norm(s->states + row * dim, gain, eps, dim, s->normed + row * dim);
}

INLINE void end_layer(Step *s, Member me) {
    const Layer *l = s->ended;
    const int64_t rows = s->rows, dim = l->dim, inner = l->inner;
    float *added = s->inner; /* the heads' result; as wide as an inner row at least */
    for (int64_t share; (share = taken(&s->next[0], 1)) < shares_of(&l->output);)
        share_of(&l->output, s->mixed, added, rows, share);
    meet(s, me);
    for (int64_t row = me.number; row < rows; row += me.threads) {
        float *state = s->states + row * dim;
        for (int64_t i = 0; i < dim; i += LANES) put(state + i, at(state + i) + at(added + row * dim + i));
    }
    norms(s, l->ffn_norm, l->eps, dim, me);
    meet(s, me);
    for (int64_t share; (share = taken(&s->next[1], 1)) < shares_of(&l->up);) {
        share_of(&l->gate, s->normed, s->gate, rows, share);
        share_of(&l->up, s->normed, s->up, rows, share);
        const int64_t begin = share * SHARE, end = end_of(begin, SHARE, inner);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t i = row * inner + begin; i < row * inner + end; i += LANES)
                put(s->inner + i, silu(at(s->gate + i)) * at(s->up + i));
    }
    meet(s, me);
    added = s->normed;
    for (int64_t share; (share = taken(&s->next[2], 1)) < shares_of(&l->down);)
        share_of(&l->down, s->inner, added, rows, share);
    meet(s, me);
    for (int64_t row = me.number; row < rows; row += me.threads) {
        float *state = s->states + row * dim;
        for (int64_t i = 0; i < dim; i += LANES) put(state + i, at(state + i) + at(added + row * dim + i));
    }
}

INLINE void turn_heads(const Step *s, float *x, const float *gain, int64_t heads, Member me) {
    const Layer *l = s->begun;
    for (int64_t each = me.number; each < s->rows * heads; each += me.threads) {
        float *head = x + each * l->width;
        if (gain) norm(head, gain, l->eps, l->width, head);
        if (l->rotated) rotate(head, s->cos + each / heads * l->rotated, s->sin + each / heads * l->rotated, l->rotated);
    }
}

INLINE void begin_layer(Step *s, Member me) {
    const Layer *l = s->begun;
    norms(s, l->attention_norm, l->eps, l->dim, me); /* of rows that this thread has added to */
    meet(s, me);
    const int64_t queries = shares_of(&l->query), keys = shares_of(&l->key), values = shares_of(&l->value);
    for (int64_t share; (share = taken(&s->next[3], 1)) < queries + keys + values;) {
        if (share < queries)
            share_of(&l->query, s->normed, s->query, s->rows, share);
        else if (share < queries + keys)
            share_of(&l->key, s->normed, s->key, s->rows, share - queries);
        else
            share_of(&l->value, s->normed, s->value, s->rows, share - queries - keys);
    }
    meet(s, me);
    turn_heads(s, s->query, l->query_norm, l->heads, me);
    turn_heads(s, s->key, l->key_norm, l->kept, me);
}

INLINE void attend(Step *s, Member me) {
    Attention *a = s->attention;
    for (int64_t row = me.number; row < s->rows; row += me.threads) keep_row(a, s->key, s->value, row);
    meet(s, me);
    float *scores = a->scratch + me.number * a->scratch_stride;
    for (int64_t share; (share = taken(&a->next, 1)) < s->rows * a->kept;)
        attend_row(a, s->query, s->mixed, share / a->kept, share % a->kept, scores);
    meet(s, me);
}

FUSING static void work(void *data) {
    Step *s = data;
    const Member me = s->threads > 1 ? (Member){s->number(), s->members()} : (Member){0, 1};
    if (s->attention) attend(s, me);
    if (s->ended) end_layer(s, me);
    if (s->begun) begin_layer(s, me);
}

/* Takes rows from one attention to the next. */
void layer_step(Step *s, parallel_function parallel) {
    memset(s->next, 0, sizeof s->next);
    if (s->attention) s->attention->next = 0;
    in_team(work, s, parallel, s->threads);
}
