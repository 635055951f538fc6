/* Attention of a few rows, each to the keys and values of its own text, with the roundings of PyTorch's flash attention on a CPU.

   That walks through the keys in parts of 512, with a running maximum and a running sum of exponentials (FlashAttention, arXiv 2205.14135, algorithm 1); hidden keys
   weigh exactly nothing, so only those that a row sees are read. It computes in fp32 in every format; weights are rounded to the format before values are multiplied with
   them, and so is the result. As layer.h does, it asks for what is said of a format beforehand: also `exponential_of_negative`, `widened`, which makes numbers of a
   format fp32, for how many KEYS at a time, and how many vectors' sums of weights lie beside each other. */
#ifndef PHALANX_ATTEND_H
#define PHALANX_ATTEND_H
#include <math.h>
#include <string.h>

#include "rows.h"

enum { PART = 512 };

typedef struct {
    element *keys, *values; /* (heads, capacity, width) of the row's text */
    int64_t stride;       /* elements from one head to the next */
    int64_t position;     /* of the row in its text: it sees as many keys before it */
    int64_t last_block;   /* the block of the additions over the keys of the last, shorter, part of 512 keys; 0 where all are whole */
    int64_t keys_in_all;  /* with those that are hidden */
} Row;

typedef struct {
    const Row *rows;
    int64_t heads, kept, width;    /* kept: heads of keys and values */
    int64_t score_block, block;    /* blocks of the additions over a head's width, and over 512 keys */
    int64_t fuses_sum;             /* whether a sum over parts is rounded once */
    float scale;
    float *scratch;                /* for each thread: a result, a group's queries and scores, and 64 keys */
    int64_t scratch_stride;
    int64_t next;                  /* the next share, 0 at first */
} Attention;

/* Puts row `row` of key and value (rows, kept, width) where its text keeps them. */
INLINE void keep_row(const Attention *a, const element *key, const element *value, int64_t row) {
    const Row *r = a->rows + row;
    const size_t nbytes = (size_t)a->width * sizeof(element);
    for (int64_t head = 0; head < a->kept; head++) {
        const int64_t from = (row * a->kept + head) * a->width, to = head * r->stride + r->position * a->width;
        memcpy(r->keys + to, key + from, nbytes);
        memcpy(r->values + to, value + from, nbytes);
    }
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

/* Exponentials of scores less the largest, in their place, rounded, and their sum before that. */
INLINE float exponentials(float *scores, float largest, int64_t count) {
    lanes sums[SUMS_OF_WEIGHTS] = {{0}};
    for (int64_t i = 0; i < count; i += LANES) {
        const lanes e = exponential_of_negative(at(scores + i) - all(largest));
        put(scores + i, nearest(e));
        sums[i / LANES % SUMS_OF_WEIGHTS] += e;
    }
    lanes sum = sums[0];
    for (int i = 1; i < SUMS_OF_WEIGHTS; i++) sum += sums[i];
    sum += __builtin_shufflevector(sum, sum, 4, 5, 6, 7, 0, 1, 2, 3);
    sum += __builtin_shufflevector(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5);
    sum += __builtin_shufflevector(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6);
    return sum[0];
}

/* y + the sum of weighted values over `count` keys, `columns` vectors wide, in chains of `block`; the first time y counts for nothing. */
INLINE void weigh(const float *weights, const element *values, int64_t width, int64_t count, int64_t block, float *y,
                  int first, const int columns) {
    lanes total[LANES];
    UNROLL
    for (int c = 0; c < columns; c++) total[c] = all(0); /* the result of no keys */
    for (int64_t begin = 0; begin < count; begin += block) {
        const int64_t end = count - begin < block ? count : begin + block;
        lanes sum[LANES];
        UNROLL
        for (int c = 0; c < columns; c++) sum[c] = all(0);
        for (int64_t key = begin; key < end; key++) {
            const lanes weight = all(weights[key]);
            UNROLL
            for (int c = 0; c < columns; c++) sum[c] = fused(weight, load(values + key * width + c * LANES), sum[c]);
        }
        UNROLL
        for (int c = 0; c < columns; c++) total[c] = begin ? total[c] + sum[c] : first ? sum[c] : at(y + c * LANES) + sum[c];
    }
    UNROLL
    for (int c = 0; c < columns; c++) put(y + c * LANES, total[c]);
}

/* One head's result. */
FUSING static void mix(const Attention *a, const Row *r, float *scores, const element *values, float *y) {
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
        const element *from = values + begin * width;
        for (; c + LANES * LANES <= width; c += LANES * LANES) weigh(part, from + c, width, count, block, y + c, !begin, LANES);
        for (; c < width; c += LANES) weigh(part, from + c, width, count, block, y + c, !begin, 1);
    }
    const float share = most == -INFINITY ? 1.0f : 1.0f / sum;
    for (int64_t i = 0; i < width; i += LANES) put(y + i, at(y + i) * all(share));
}

/* The result (rows, heads width) of one row's queries (rows, heads, width) of the heads that read one head of keys. */
INLINE void attend_row(const Attention *a, const element *query, element *mixed, int64_t row, int64_t kept, float *scratch) {
    const Row *r = a->rows + row;
    const int64_t group = a->heads / a->kept, width = a->width, seen = r->position + 1;
    const int64_t first = (row * a->heads + kept * group) * width, stride = (seen + LANES - 1) / LANES * LANES;
    float *y = scratch, *queries = y + width, *scores = queries + group * width, *some_keys = scores + group * stride;
    const element *keys = r->keys + kept * r->stride;
    const float *asked = widened(query + first, group * width, queries);
    for (int64_t begin = 0; begin < seen; begin += KEYS) {
        const int64_t count = seen - begin < KEYS ? seen - begin : KEYS;
        const Product p = {asked, widened(keys + begin * width, count * width, some_keys), 0, scores + begin, group, width, stride, a->score_block};
        outputs_between(&p, 0, count);
    }
    for (int64_t head = 0; head < group; head++) {
        mix(a, r, scores + head * stride, r->values + kept * r->stride, y);
        for (int64_t i = 0; i < width; i += LANES) store(mixed + first + head * width + i, nearest(at(y + i)));
    }
}

/* All rows in one thread, whose keys and values are kept already. */
INLINE void attend_all(const Attention *a, const element *query, element *mixed, int64_t rows) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t kept = 0; kept < a->kept; kept++) attend_row(a, query, mixed, row, kept, a->scratch);
}
#endif
