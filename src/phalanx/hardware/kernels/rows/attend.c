/* Attention of a few rows, each to the keys of its own text, with the roundings of PyTorch's flash attention on a CPU.

   That walks through the keys in parts of 512, with a running maximum and a running sum of exponentials (FlashAttention, arXiv 2205.14135, algorithm 1); hidden keys
   weigh exactly nothing, so only those that a row sees are read. The exponential is PyTorch's polynomial of degree five, good to twenty units in the last place. */
#include "attend.h"

#include <math.h>
#include <string.h>

enum { PART = 512 };

void keep_row(const Attention *a, const float *key, const float *value, int64_t row) {
    const Row *r = a->rows + row;
    const size_t nbytes = (size_t)a->width * sizeof(float);
    for (int64_t head = 0; head < a->kept; head++) {
        const int64_t from = (row * a->kept + head) * a->width, to = head * r->stride + r->position * a->width;
        memcpy(r->keys + to, key + from, nbytes);
        memcpy(r->values + to, value + from, nbytes);
    }
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

/* Scores of keys 0 to count, scaled; the largest, or NaN if one is. Behind the last, up to a whole vector, minus infinity. */
INLINE float scaled(float *scores, float scale, int64_t count) {
    const int64_t whole = (count + LANES - 1) / LANES * LANES;
    for (int64_t i = count; i < whole; i++) scores[i] = -INFINITY;
    lanes most = all(-INFINITY);
    words odd = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const lanes x = at(scores + i) * all(scale);
        put(scores + i, x);
        odd |= x != x;
        const words more = x > most;
        most = (lanes)(((words)x & more) | ((words)most & ~more));
    }
    float largest = -INFINITY;
    for (int i = 0; i < LANES; i++) {
        if (odd[i]) return NAN;
        largest = most[i] > largest ? most[i] : largest;
    }
    return largest;
}

/* Exponentials of scores less the largest, in their place, and their sum. */
INLINE float exponentials(float *scores, float largest, int64_t count) {
    lanes sum = all(0);
    for (int64_t i = 0; i < count; i += LANES) {
        const lanes e = exponential_of_negative(at(scores + i) - all(largest));
        put(scores + i, e);
        sum += e;
    }
    sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
    sum += __builtin_shufflevector(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6);
    return sum[0];
}

/* y + the sum of weighted values over `count` keys, `columns` vectors wide, in chains of `block`; the first time y counts for nothing. */
INLINE void weigh(const float *weights, const float *values, int64_t width, int64_t count, int64_t block, float *y,
                  int first, const int columns) {
    lanes total[LANES];
    for (int64_t begin = 0; begin < count; begin += block) {
        const int64_t end = count - begin < block ? count : begin + block;
        lanes sum[LANES];
        UNROLL
        for (int c = 0; c < columns; c++) sum[c] = all(0);
        for (int64_t key = begin; key < end; key++) {
            const lanes weight = all(weights[key]);
            UNROLL
            for (int c = 0; c < columns; c++) sum[c] = fused(weight, at(values + key * width + c * LANES), sum[c]);
        }
        UNROLL
        for (int c = 0; c < columns; c++) total[c] = begin ? total[c] + sum[c] : first ? sum[c] : at(y + c * LANES) + sum[c];
    }
    UNROLL
    for (int c = 0; c < columns; c++) put(y + c * LANES, total[c]);
}

/* One head's result. */
FUSING static void mix(const Attention *a, const Row *r, float *scores, const float *values, float *y) {
    const int64_t width = a->width, seen = r->position + 1;
    float most = -INFINITY, sum = 0;
    for (int64_t begin = 0; begin < seen; begin += PART) {
        const int64_t count = seen - begin < PART ? seen - begin : PART;
        const int64_t block = r->keys_in_all - begin < PART ? r->last_block : a->block;
        float *part = scores + begin;
        const float found = scaled(part, a->scale, count);
        if (found != found) {
            for (int64_t i = 0; i < width; i++) y[i] = NAN;
            return;
        }
        const float largest = most > found ? most : found;
        if (largest == -INFINITY) /* of all keys so far: they weigh nothing, and the result is zero */
            memset(part, 0, (size_t)count * sizeof(float));
        else {
            const float part_sum = exponentials(part, largest, count);
            if (begin) {
                const float faded = expf(most - largest);
                sum = a->fuses_sum ? __builtin_fmaf(faded, sum, part_sum) : part_sum + faded * sum;
                for (int64_t i = 0; i < width; i += LANES) put(y + i, at(y + i) * all(faded));
            } else
                sum = part_sum;
        }
        most = largest;
        int64_t c = 0;
        const float *from = values + begin * width;
        for (; c + LANES * LANES <= width; c += LANES * LANES) weigh(part, from + c, width, count, block, y + c, !begin, LANES);
        for (; c < width; c += LANES) weigh(part, from + c, width, count, block, y + c, !begin, 1);
    }
    const float share = most == -INFINITY ? 1.0f : 1.0f / sum;
    for (int64_t i = 0; i < width; i += LANES) put(y + i, at(y + i) * all(share));
}

void attend_row(const Attention *a, const float *query, float *mixed, int64_t row, int64_t kept, float *scores) {
    const Row *r = a->rows + row;
    const int64_t group = a->heads / a->kept, width = a->width, seen = r->position + 1;
    const int64_t first = (row * a->heads + kept * group) * width, stride = (seen + LANES - 1) / LANES * LANES;
    const Product p = {query + first, r->keys + kept * r->stride, 0, scores, group, width, stride, a->score_block};
    outputs_between(&p, 0, seen);
    for (int64_t head = 0; head < group; head++)
        mix(a, r, scores + head * stride, r->values + kept * r->stride, mixed + first + head * width);
}

/* All rows in one thread, whose keys and values are kept already. */
void attend_rows(const Attention *a, const float *query, float *mixed, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t kept = 0; kept < a->kept; kept++) attend_row(a, query, mixed, row, kept, a->scratch);
}
