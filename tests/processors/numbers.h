/* Inputs by an integer formula, and digests of results, for the programs of this folder. */
#ifndef NUMBERS_H
#define NUMBERS_H
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Whole numbers between -511 and 511 by a linear congruence, times 2^-shift: the same on every processor. */
static inline float number(int64_t i, int seed, int shift) {
    const int64_t mixed = ((i + seed * 7919) * 1103515245 + 12345) % ((int64_t)1 << 31);
    return (float)(mixed / 256 % 1023 - 511) / (float)((int64_t)1 << shift);
}

static inline float *numbers(int64_t count, int seed, int shift) {
    float *to = malloc((size_t)count * sizeof *to);
    for (int64_t i = 0; i < count; i++) to[i] = number(i, seed, shift);
    return to;
}

/* Round to bf16; the numbers above are exact in it up to eight bits. */
static inline uint16_t *halves_of(int64_t count, int seed, int shift) {
    uint16_t *to = malloc((size_t)count * sizeof *to);
    for (int64_t i = 0; i < count; i++) {
        union {
            float number;
            uint32_t bits;
        } u = {number(i, seed, shift)};
        to[i] = (uint16_t)((u.bits + 0x7fff + (u.bits >> 16 & 1)) >> 16);
    }
    return to;
}

/* FNV-1a of 64 bits (Fowler, Noll, Vo), over bytes in memory: both architectures are little-endian. */
static inline uint64_t digested(uint64_t digest, const void *bytes, size_t count) {
    const unsigned char *byte = bytes;
    for (size_t i = 0; i < count; i++) digest = (digest ^ byte[i]) * 0x100000001b3u;
    return digest;
}

static inline void report(const char *name, const void *bytes, size_t count) {
    printf("%s %016llx\n", name, (unsigned long long)digested(0xcbf29ce484222325u, bytes, count));
}
#endif
