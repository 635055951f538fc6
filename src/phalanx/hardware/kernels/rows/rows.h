/* Vectors of eight fp32 numbers, and products of a few rows in them; see rows.c. */
#ifndef PHALANX_ROWS_H
#define PHALANX_ROWS_H
#include <stdint.h>

#include "../team.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define FUSING __attribute__((target("avx2,fma")))
#else
#define FUSING
#endif
#define INLINE static inline __attribute__((always_inline)) FUSING
#define UNROLL _Pragma("GCC unroll 8")

enum { LANES = 8 };
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t words __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef lanes lanes_anywhere __attribute__((aligned(sizeof(float))));

INLINE lanes all(float x) { return (lanes){x, x, x, x, x, x, x, x}; }
INLINE lanes at(const float *from) { return *(const lanes_anywhere *)from; }
INLINE void put(float *to, lanes x) { *(lanes_anywhere *)to = x; }

/* x y + z, rounded once. */
INLINE lanes fused(lanes x, lanes y, lanes z) {
#if defined(__x86_64__)
    return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#else
    UNROLL
    for (int i = 0; i < LANES; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
#endif
}

typedef struct {
    const float *x, *w, *bias; /* (rows, inputs), (outputs, inputs), (outputs) or none */
    float *y;                  /* (rows, outputs) */
    int64_t rows, inputs, outputs, block;
} Product;

enum { SHARE = 64 }; /* outputs that a thread takes at a time */

/* The outputs from begin on and before end, of all rows. */
void outputs_between(const Product *p, int64_t begin, int64_t end);

int fuses(void);
#endif
