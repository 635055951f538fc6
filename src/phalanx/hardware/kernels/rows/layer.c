/* Layers of fp32 numbers; see layer.h. */
#include "rows.h"

typedef float element;
enum { GRAIN = SHARE };

INLINE lanes load(const float *from) { return at(from); }
INLINE void store(float *to, lanes x) { put(to, x); }
INLINE float load_one(float x) { return x; }
INLINE float store_one(float x) { return x; }
INLINE lanes nearest(lanes x) { return x; }

INLINE void spread(float *row, int64_t width, int64_t i, lanes low, lanes high) {
    (void)width;
    put(row + i, low);
    put(row + i + LANES, high);
}

/* Products read rows as they are. */
INLINE const float *read_rows(const float *x, float *to, int64_t rows, int64_t width, int64_t first, int64_t step) {
    (void)to, (void)rows, (void)width, (void)first, (void)step;
    return x;
}

INLINE void share_of(const float *w, const float *bias, const float *x, float *y, int64_t rows, int64_t inputs, int64_t outputs,
                     int64_t block, int64_t begin, int64_t end) {
    const Product p = {x, w, bias, y, rows, inputs, outputs, block};
    outputs_between(&p, begin, end);
}

#include "layer.h"

INLINE void attend(Step *s, Member me) {
    Attention *a = s->attention;
    for (int64_t row = me.number; row < s->rows; row += me.threads) keep_row(a, s->key, s->value, row);
    meet(s, me);
    float *scores = a->scratch + me.number * a->scratch_stride;
    for (int64_t share; (share = taken(&a->next, 1)) < s->rows * a->kept;)
        attend_row(a, s->query, s->mixed, share / a->kept, share % a->kept, scores);
    meet(s, me);
}

FUSING static void work(void *data) { layer_work(data, attend); }

/* Takes rows from one attention to the next. */
void layer_step(Step *s, parallel_function parallel) {
    begin_shares(s);
    in_team(work, s, parallel, s->threads);
}
