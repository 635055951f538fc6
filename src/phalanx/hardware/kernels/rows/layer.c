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

enum { KEYS = 1 << 20, SUMS_OF_WEIGHTS = 1 }; /* all keys */

INLINE const float *widened(const float *from, int64_t count, float *to) {
    (void)count, (void)to;
    return from;
}

/* e^x for x up to 0: Vectorized<float>::exp_u20 of PyTorch's vec256_float.h. */
INLINE lanes exponential_of_negative(lanes x) {
    const words tiny = x < all(-0x1.5d58ap+6f); /* ln of the smallest normal number */
    x = (lanes)(((words)x & ~tiny) | (tiny & (words)all(-0x1.5d58ap+6f)));
    lanes fx = fused(x, all(0x1.715476p+0f), all(0.5f));
    words n;
#if defined(__x86_64__)
    fx = (lanes)_mm256_floor_ps((__m256)fx);
    n = (words)_mm256_cvtps_epi32((__m256)(fx - all(1.0f)));
#else
    for (int i = 0; i < LANES; i++) fx[i] = __builtin_floorf(fx[i]), n[i] = (int32_t)(fx[i] - 1.0f);
#endif
    const lanes r = fused(-fx, all(0x1.62e430p-1f), x);
    lanes y = fused(r, all(0.00828929059f), all(0.0418978221f));
    y = fused(r, y, all(0.166676521f));
    y = fused(r, y, all(0.499991506f));
    y = fused(r, y, all(0.999999701f));
    y = fused(r, y, all(1.0f));
    const lanes power = (lanes)(((n + 127) << 23) & ~tiny);
    return y * power * all(2.0f);
}

#include "layer.h"

FUSING static void work(void *data) { layer_work(data); }

FUSING void attend_rows(const Attention *a, const float *query, float *mixed, int64_t rows) { attend_all(a, query, mixed, rows); }

/* Takes rows from one attention to the next. */
void layer_step(Step *s, parallel_function parallel) {
    begin_shares(s);
    in_team(work, s, parallel, s->threads);
}
