/* The loops of functions_loops.h for one width of vectors. */
#ifndef PORTABLE_FUNCTIONS_TABLE_H
#define PORTABLE_FUNCTIONS_TABLE_H

#include "../kernels.h"

typedef void unary_loop(const float *from, float *to, int64_t count);
typedef void binary_loop(const float *left, const float *right, float *to, int64_t count);
typedef struct {
  unary_loop *functions[FUNCTIONS];
  binary_loop *power;
} function_table;

/* Vectors of sixteen fp32 numbers, NULL if the processor has none. */
__attribute__((visibility("hidden"))) const function_table *table_avx512(void);

#endif
