/* One pass over memory for AdamW's update and for the pieces of an exact sum of squares, on a CPU.

   Compiled with -ffp-contract=off: each operation below is rounded by itself, as in reference.py, so the bits are the same
   with any vector width. Sums of pieces are exact, so the order in which lanes add them does not matter. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "processors.h"

enum { LANES = 8, ROWS = 4 };
typedef float narrow_lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef double wide_lanes __attribute__((vector_size(LANES * sizeof(double))));

/* Square roots of count numbers, as MKL's vmsSqrt takes them. */
typedef void (*roots_function)(int64_t count, const float *values, float *roots, int64_t mode);
enum { BLOCK = 1024 };
enum { MKL_MODE = 0x2 | 0x140000 | 0x100 }; /* as PyTorch calls it: high accuracy, no flushing to zero, errors ignored */

/* factors: as in UpdateFactors of reference.py, in its order. roots: NULL for C's own. */
EACH_PROCESSOR void adamw(float *restrict weights, const float *restrict grads, float *restrict means,
                          float *restrict squares, int64_t count, const float *restrict factors,
                          roots_function roots) {
    const float scale = factors[0], keep_mean = factors[1], new_mean = factors[2], keep_square = factors[3],
                new_square = factors[4], divisor = factors[5], eps = factors[6], rate = factors[7], decay = factors[8];
    float rooted[BLOCK];
    for (int64_t begin = 0; begin < count; begin += BLOCK) {
        const int64_t end = count - begin < BLOCK ? count : begin + BLOCK;
        for (int64_t i = begin; i < end; i++) {
            const float grad = grads[i] * scale;
            means[i] = means[i] * keep_mean + grad * new_mean;
            squares[i] = squares[i] * keep_square + grad * grad * new_square;
        }
        if (roots)
            roots(end - begin, squares + begin, rooted, MKL_MODE);
        else
            for (int64_t i = begin; i < end; i++) rooted[i - begin] = sqrtf(squares[i]);
        for (int64_t i = begin; i < end; i++)
            weights[i] = weights[i] * decay - means[i] / (rooted[i - begin] / divisor + eps) * rate;
    }
}

/* The largest magnitude, as the bits of an fp32 number; what is not a number is larger than infinity. */
EACH_PROCESSOR uint32_t peak_bits(const float *restrict values, int64_t count) {
    uint32_t peak = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffffu;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

/* Adds to sums[2] both pieces of each value's square: constants[2] are extraction_constants of exact_sum.py. */
EACH_PROCESSOR void extract(const float *restrict values, int64_t count, const double *restrict constants,
                            double *restrict sums) {
    const double first = constants[0], second = constants[1];
    wide_lanes firsts[ROWS] = {0}, seconds[ROWS] = {0};
    for (int64_t i = 0; i < count; i += ROWS * LANES) {
        narrow_lanes rows[ROWS] = {0};
        if (count - i >= ROWS * LANES)
            memcpy(rows, values + i, sizeof rows); /* of a known size: loads, not a call */
        else
            memcpy(rows, values + i, (size_t)(count - i) * sizeof *values);
        for (int row = 0; row < ROWS; row++) {
            const wide_lanes wide = __builtin_convertvector(rows[row], wide_lanes), square = wide * wide;
            const wide_lanes piece = (square + first) - first;
            firsts[row] += piece;
            seconds[row] += ((square - piece) + second) - second;
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int lane = 0; lane < LANES; lane++) {
            sums[0] += firsts[row][lane];
            sums[1] += seconds[row][lane];
        }
}
