/* Layers of bf16 numbers; see layer.h. Others attend. */
#include "bf16.h"

typedef half element;
enum { GRAIN = HALF_SHARE };

INLINE lanes load(const half *from) { return wide_at(from); }
INLINE void store(half *to, lanes x) { put_rounded(to, x); }
INLINE float load_one(half x) { return wide(x); }
INLINE half store_one(float x) { return narrow(x); }
INLINE lanes nearest(lanes x) { return rounded(x); }

INLINE void spread(float *row, int64_t width, int64_t i, lanes low, lanes high) {
    arrange_pair(row, width, i / PAIR, low, high);
}

/* Rows widened, chain after chain, every step-th by this thread. */
INLINE const float *read_rows(const half *x, float *to, int64_t rows, int64_t width, int64_t first, int64_t step) {
    for (int64_t row = first; row < rows; row += step) arrange(x + row * width, width, to + row * width);
    return to;
}

INLINE void share_of(const half *w, const half *bias, const float *x, half *y, int64_t rows, int64_t inputs, int64_t outputs,
                     int64_t block, int64_t begin, int64_t end) {
    (void)block;
    const HalfProduct p = {x, w, bias, y, rows, inputs, outputs};
    half_outputs_between(&p, begin, end);
}

#include "layer.h"

FUSING static void work(void *data) { layer_work(data, 0); }

/* Takes rows from one attention to the next. */
void half_layer_step(Step *s, parallel_function parallel) {
    begin_shares(s);
    in_team(work, s, parallel, s->threads);
}
