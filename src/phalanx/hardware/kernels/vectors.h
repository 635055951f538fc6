/* Vectors of eight fp32 numbers for x86-64 with AVX2 and FMA, and for 64-bit Arm: the same bits on both.

   The type is GCC's and Clang's vector extension, which compiles to one register of AVX2 or to two of NEON. Only the fused multiply-add
   needs an intrinsic: both compilers leave a loop of fmaf scalar. With PHALANX_NO_VECTORS it is that loop, and nothing depends on the
   processor: tests compare the two builds. With PHALANX_AVX512 a vector has sixteen numbers; what a lane computes is the same. */
#ifndef PHALANX_VECTORS_H
#define PHALANX_VECTORS_H
#include <stdint.h>

#if defined(PHALANX_NO_VECTORS)
#define FUSING
#elif defined(PHALANX_AVX512)
#include <immintrin.h>
#define FUSING __attribute__((target("avx512f,avx512dq,avx512vl,avx512bw,avx2,fma")))
#elif defined(__x86_64__)
#include <immintrin.h>
#define FUSING __attribute__((target("avx2,fma")))
#else
#if defined(__aarch64__)
#include <arm_neon.h>
#endif
#define FUSING
#endif
#define INLINE static inline __attribute__((always_inline)) FUSING
#define UNROLL _Pragma("GCC unroll 8")

#if defined(PHALANX_AVX512)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif
typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t words __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef lanes lanes_anywhere __attribute__((aligned(sizeof(float))));

/* Elements of x (0 to 7) and y (8 to 15) by their numbers. GCC before 12 has only the second form. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLED(x, y, ...) __builtin_shuffle(x, y, (words){__VA_ARGS__})
#endif

#if defined(PHALANX_AVX512)
INLINE lanes all(float x) { return (lanes)_mm512_set1_ps(x); }
#else
INLINE lanes all(float x) { return (lanes){x, x, x, x, x, x, x, x}; }
#endif
INLINE lanes at(const float *from) { return *(const lanes_anywhere *)from; }
INLINE void put(float *to, lanes x) { *(lanes_anywhere *)to = x; }

#if !defined(PHALANX_AVX512)
/* Four words and four others, of memory of any type. */
INLINE lanes joined(const void *low, const void *high) {
#if defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
    return (lanes)_mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(low)), _mm_loadu_ps(high), 1);
#else
    lanes both;
    __builtin_memcpy(&both, low, 16);
    __builtin_memcpy((char *)&both + 16, high, 16);
    return both;
#endif
}
#endif

/* x y + z, rounded once. */
INLINE lanes fused(lanes x, lanes y, lanes z) {
#if defined(PHALANX_AVX512)
    return (lanes)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z);
#elif defined(__x86_64__) && !defined(PHALANX_NO_VECTORS)
    return (lanes)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z);
#elif defined(__aarch64__) && !defined(PHALANX_NO_VECTORS)
    typedef union {
        lanes whole;
        float32x4_t half[2];
    } pair;
    const pair a = {x}, b = {y};
    pair c = {z};
    c.half[0] = vfmaq_f32(c.half[0], a.half[0], b.half[0]);
    c.half[1] = vfmaq_f32(c.half[1], a.half[1], b.half[1]);
    return c.whole;
#else
    UNROLL
    for (int i = 0; i < LANES; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
#endif
}

#if !defined(PHALANX_AVX512)
/* Transpose eight vectors of eight. */
INLINE void transpose(const lanes from[LANES], lanes to[LANES]) {
    lanes r[LANES], s[LANES];
    UNROLL
    for (int i = 0; i < LANES; i += 2) {
        s[i] = SHUFFLED(from[i], from[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        s[i + 1] = SHUFFLED(from[i], from[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLL
    for (int i = 0; i < LANES; i += 4) {
        r[i] = SHUFFLED(s[i], s[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 1] = SHUFFLED(s[i], s[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        r[i + 2] = SHUFFLED(s[i + 1], s[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        r[i + 3] = SHUFFLED(s[i + 1], s[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        to[i] = SHUFFLED(r[i], r[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        to[i + 4] = SHUFFLED(r[i], r[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}
#endif

#endif
