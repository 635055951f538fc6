/* Adds one gradient to an integer sum in bins (parallel/reduction/reproducible_sums.py), in one pass over its numbers and the sum's words, on a CPU.

   Every operation on numbers is exact but two roundings to the nearest integer, which are written down, so the bits are those of
   any other way to do it. Compiled with -ffp-contract=off all the same. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "processors.h"

enum { EMPTY = -128, NOT_FINITE = 127, INFINITE = 0x7f800000, LEAST_NORMAL = 0x00800000 };

/* The largest magnitude of a span, as the bits of an fp32 number; what is not finite is at least INFINITE. */
WITHIN uint32_t peak_of(const float *restrict x, int64_t size) {
    uint32_t peak = 0;
    for (int64_t i = 0; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof bits);
        bits &= 0x7fffffffu;
        peak = bits > peak ? bits : peak;
    }
    return peak;
}

/* The top of a span with this peak: magnitudes are below 2^exponent, at most half a unit of the bin. */
WITHIN int top_of(uint32_t peak, int width) {
    if (peak == 0) return EMPTY;
    if (peak >= INFINITE) return NOT_FINITE;
    const int exponent = peak >= LEAST_NORMAL ? (int)(peak >> 23) - 126 : -149 + 32 - __builtin_clz(peak);
    const int shifted = exponent + width;
    return shifted >= 0 ? shifted / width : -((width - 1 - shifted) / width); /* rounded down */
}

WITHIN float power(int exponent) { /* all that are asked for are normal numbers */
    const uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Spans of `size` elements whose words are integers of the type WORD. `high` and `low` are this share's words, `tops` its spans'. */
#define ADDITION(NAME, WORD)                                                                                              \
    EACH_PROCESSOR void NAME(const float *restrict gradient, WORD *restrict high, WORD *restrict low, int8_t *restrict tops, \
                             int64_t spans, int64_t size, int32_t width) {                                                \
        const float unit = power(width);                                                                                  \
        for (int64_t span = 0; span < spans; span++, gradient += size, high += size, low += size) {                       \
            const int before = tops[span], own = top_of(peak_of(gradient, size), width);                                  \
            const int top = own > before ? own : before;                                                                  \
            if (top == EMPTY) continue; /* zeros, to zeros */                                                              \
            if (top != before && before != EMPTY) { /* whole bins move down, and out */                                    \
                if (top == before + 1)                                                                                    \
                    memcpy(low, high, (size_t)size * sizeof *low);                                                        \
                else                                                                                                      \
                    memset(low, 0, (size_t)size * sizeof *low);                                                           \
                memset(high, 0, (size_t)size * sizeof *high);                                                             \
            }                                                                                                             \
            tops[span] = (int8_t)top;                                                                                     \
            if (top == NOT_FINITE) { /* words count the slots in which an element was not finite */                        \
                for (int64_t i = 0; i < size; i++) high[i] += peak_of(gradient + i, 1) >= INFINITE;                       \
                continue;                                                                                                 \
            }                                                                                                             \
            /* The whole factor can lie outside of fp32. */                                                               \
            const int exponent = -width * (top - 1), half = exponent >> 1;                                                \
            const float first = power(half), second = power(exponent - half);                                             \
            for (int64_t i = 0; i < size; i++) {                                                                          \
                const float scaled = gradient[i] * first * second, digit = rintf(scaled);                                 \
                high[i] += (WORD)digit;                                                                                   \
                low[i] += (WORD)rintf((scaled - digit) * unit);                                                           \
            }                                                                                                             \
        }                                                                                                                 \
    }

ADDITION(add_to_int32, int32_t)
ADDITION(add_to_int64, int64_t)
