/* A few rows through a layer, from its queries, keys and values to the next layer's, in one parallel region; or, where others attend, from its heads' results.

   What lies between the products are PyTorch's operations, each rounding as its kernels of eight lanes do: the root-mean-square norm with the
   order of its sum, the rotation, and SiLU by way of SLEEF's exponential (Shibata and Petrogalli, TPDS 31(6), 2020; expf with 1.0 ULP). All of them compute in fp32, and
   what each gives is rounded to the model's format. Nothing promises that the bits are PyTorch's, so the caller tries.

   It is compiled for each format by a file that says beforehand what an `element` in memory is, how eight of them, `load`, or one, `load_one`, become fp32, how fp32 is
   rounded to them, `nearest`, and kept, `store` and `store_one`, how sixteen neighbors become what a product reads, `spread`, and how a share of its outputs is
   computed, `share_of`, of GRAIN outputs; and calls `layer_work`. */
#include "attend.h"

typedef struct {
    const element *w, *bias; /* (outputs, inputs), (outputs) or none */
    int64_t outputs, inputs, block;
} Matrix;

typedef struct {
    Matrix query, key, value, output, gate, up, down;
    const element *attention_norm, *ffn_norm, *query_norm, *key_norm; /* the last two (width) or none */
    int64_t dim, heads, kept, width, inner, rotated;                 /* kept: heads of keys and values; rotated: elements of a head */
    float eps;
} Layer;

typedef struct {
    const Layer *ended, *begun;   /* the layer whose attention is done or due, and the next; either may be missing */
    Attention *attention;         /* that of the ended layer, if it is due */
    element *states;              /* (rows, dim): what enters a layer, and then the next */
    element *mixed;               /* (rows, heads width) of the ended layer */
    const element *cos, *sin;     /* (rows, rotated) */
    element *query, *key, *value; /* (rows, heads or kept, width) of the begun layer */
    float *normed, *inner;        /* (rows, dim), (rows, inner or heads width): what products read */
    element *added, *gate, *up;   /* (rows, dim), (rows, inner) twice */
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
INLINE lanes cascade(const element *x, int64_t vectors) {
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
        const lanes each = load(x + ((I) * SUMS + k) * LANES);                                                         \
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
        const lanes each = load(x + i * LANES);
        sum[0][0] += each * each;
    }
    for (int k = 1; k < SUMS; k++) sum[0][0] += sum[0][k];
    return sum[0][0];
}

/* 1 / sqrt(mean(x^2) + eps) of one row; whole vectors. */
INLINE lanes inverse_length(const element *x, float eps, int64_t width) {
    const lanes sums = cascade(x, width / LANES);
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return all(1.0f / __builtin_sqrtf(sum / (float)width + eps));
}

/* The row times the inverse of its length and a gain, where a product reads it. */
INLINE void norm_row(const element *x, const element *gain, float eps, int64_t width, float *y) {
    const lanes inverse = inverse_length(x, eps, width);
#define NORMED(I) nearest(load(x + (I)) * inverse * load(gain + (I)))
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) spread(y, width, i, NORMED(i), NORMED(i + LANES));
    if (i < width) put(y + i, NORMED(i));
}

INLINE void norm_head(element *x, const element *gain, float eps, int64_t width) {
    const lanes inverse = inverse_length(x, eps, width);
    for (int64_t i = 0; i < width; i += LANES) store(x + i, NORMED(i));
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
INLINE void rotate(element *x, const element *cos, const element *sin, int64_t rotated) {
    const int64_t apart = rotated / 2;
    for (int64_t i = 0; i < apart; i++) {
        const int64_t j = i + apart;
        const float first = load_one(x[i]), second = load_one(x[j]);
        x[i] = store_one(load_one(store_one(first * load_one(cos[i]))) + load_one(store_one(-second * load_one(sin[i]))));
        x[j] = store_one(load_one(store_one(second * load_one(cos[j]))) + load_one(store_one(first * load_one(sin[j]))));
    }
}

/* Shares of the outputs of matrices, one after the other, of the same rows. */
INLINE int64_t shares_of(const Matrix *m) { return (m->outputs + GRAIN - 1) / GRAIN; }

INLINE void take_share(const Matrix *m, const float *x, element *y, int64_t rows, int64_t share) {
    const int64_t begin = share * GRAIN;
    share_of(m->w, m->bias, x, y, rows, m->inputs, m->outputs, m->block, begin, end_of(begin, GRAIN, m->outputs));
}

INLINE void meet(const Step *s, Member me) {
    if (me.threads > 1) s->barrier();
}

/* Rows of a norm, each by one thread. */
INLINE void norms(const Step *s, const element *gain, float eps, int64_t dim, Member me) {
    for (int64_t row = me.number; row < s->rows; row += me.threads)
        norm_row(s->states + row * dim, gain, eps, dim, s->normed + row * dim);
}

/* The states of rows, each by one thread, and what is added to them. */
INLINE void add(const Step *s, int64_t dim, Member me) {
    for (int64_t row = me.number; row < s->rows; row += me.threads) {
        element *state = s->states + row * dim, *more = s->added + row * dim;
        for (int64_t i = 0; i < dim; i += LANES) store(state + i, nearest(load(state + i) + load(more + i)));
    }
}

/* Inner elements from begin on and before end of a row of them. */
INLINE void activate(const element *gate, const element *up, float *y, int64_t begin, int64_t end, int64_t inner) {
#define INNER(I) nearest(nearest(silu(load(gate + (I)))) * load(up + (I)))
    int64_t i = begin;
    for (; i + 2 * LANES <= end; i += 2 * LANES) spread(y, inner, i, INNER(i), INNER(i + LANES));
    if (i < end) put(y + i, INNER(i));
}

INLINE void end_layer(Step *s, Member me) {
    const Layer *l = s->ended;
    const int64_t rows = s->rows, dim = l->dim, inner = l->inner;
    const float *mixed = read_rows(s->mixed, s->inner, rows, l->output.inputs, me.number, me.threads);
    if (mixed == s->inner) meet(s, me);
    for (int64_t share; (share = taken(&s->next[0], 1)) < shares_of(&l->output);)
        take_share(&l->output, mixed, s->added, rows, share);
    meet(s, me);
    add(s, dim, me);
    norms(s, l->ffn_norm, l->eps, dim, me);
    meet(s, me);
    for (int64_t share; (share = taken(&s->next[1], 1)) < shares_of(&l->up);) {
        take_share(&l->gate, s->normed, s->gate, rows, share);
        take_share(&l->up, s->normed, s->up, rows, share);
        const int64_t begin = share * GRAIN, end = end_of(begin, GRAIN, inner);
        for (int64_t row = 0; row < rows; row++)
            activate(s->gate + row * inner, s->up + row * inner, s->inner + row * inner, begin, end, inner);
    }
    meet(s, me);
    for (int64_t share; (share = taken(&s->next[2], 1)) < shares_of(&l->down);)
        take_share(&l->down, s->inner, s->added, rows, share);
    meet(s, me);
    add(s, dim, me);
}

INLINE void turn_heads(const Step *s, element *x, const element *gain, int64_t heads, Member me) {
    const Layer *l = s->begun;
    for (int64_t each = me.number; each < s->rows * heads; each += me.threads) {
        element *head = x + each * l->width;
        if (gain) norm_head(head, gain, l->eps, l->width);
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
            take_share(&l->query, s->normed, s->query, s->rows, share);
        else if (share < queries + keys)
            take_share(&l->key, s->normed, s->key, s->rows, share - queries);
        else
            take_share(&l->value, s->normed, s->value, s->rows, share - queries - keys);
    }
    meet(s, me);
    turn_heads(s, s->query, l->query_norm, l->heads, me);
    turn_heads(s, s->key, l->key_norm, l->kept, me);
}

INLINE void attend(Step *s, Member me) {
    Attention *a = s->attention;
    for (int64_t row = me.number; row < s->rows; row += me.threads) keep_row(a, s->key, s->value, row);
    meet(s, me);
    float *scratch = a->scratch + me.number * a->scratch_stride;
    for (int64_t share; (share = taken(&a->next, 1)) < s->rows * a->kept;)
        attend_row(a, s->query, s->mixed, share / a->kept, share % a->kept, scratch);
    meet(s, me);
}

/* What one thread of a team does. */
INLINE void layer_work(Step *s) {
    const Member me = s->threads > 1 ? (Member){s->number(), s->members()} : (Member){0, 1};
    if (s->attention) attend(s, me);
    if (s->ended) end_layer(s, me);
    if (s->begun) begin_layer(s, me);
}

static inline void begin_shares(Step *s) {
    memset(s->next, 0, sizeof s->next);
    if (s->attention) s->attention->next = 0;
}
