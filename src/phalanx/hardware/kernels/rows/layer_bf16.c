/* Layers of bf16 numbers; see layer.h. */
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

enum { KEYS = 64, SUMS_OF_WEIGHTS = 2 };

INLINE const float *widened(const half *from, int64_t count, float *to) {
    for (int64_t i = 0; i < count; i += LANES) put(to + i, wide_at(from + i));
    return to;
}

/* e^x for x up to 0, in bf16's precision: Vectorized<float>::fexp_u20 of PyTorch's vec256_float.h. The exponent and the mantissa of 2^y are one integer, linear in y but
   for a polynomial in its fraction (Malossi and others, "Fast exponential computation on SIMD architectures", 2015). */
INLINE lanes exponential_of_negative(lanes x) {
    const words tiny = x < all(-0x1.5d58ap+6f); /* ln of the smallest normal number */
    const lanes y = x * all(0x1.715476p+0f);
    lanes whole;
#if defined(__x86_64__)
    whole = (lanes)_mm256_floor_ps((__m256)y);
#else
    for (int i = 0; i < LANES; i++) whole[i] = __builtin_floorf(y[i]);
#endif
    const lanes fraction = y - whole;
    lanes bent = fused(fraction, all(-0.079204240219773236f), all(-0.22433836478672356f));
    bent = fused(fraction, bent, all(0.30354260500649682f));
    bent = fused(fraction, bent, all(0.00010703434948458272f));
    const lanes bits = fused(all(0x1p23f), y - bent, all(127 * 0x1p23f));
    words found;
#if defined(__x86_64__)
    found = (words)_mm256_cvttps_epi32((__m256)bits);
#else
    for (int i = 0; i < LANES; i++) found[i] = tiny[i] ? 0 : (int32_t)bits[i];
#endif
    return (lanes)(found & ~tiny);
}

#include "layer.h"

FUSING static void work(void *data) { layer_work(data); }

FUSING void half_attend_rows(const Attention *a, const half *query, half *mixed, int64_t rows) { attend_all(a, query, mixed, rows); }

/* Takes rows from one attention to the next. */
void half_layer_step(Step *s, parallel_function parallel) {
    begin_shares(s);
    in_team(work, s, parallel, s->threads);
}
