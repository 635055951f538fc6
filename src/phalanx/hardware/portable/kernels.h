/* What the library of portable kernels exports, in C: it computes on addresses, and knows nothing of PyTorch. */

#ifndef PORTABLE_KERNELS_H
#define PORTABLE_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A matrix in memory: element (i, j) lies i * row + j * column elements behind `at`, fp32 or, if narrow, bf16. */
typedef struct {
  const void *at;
  int64_t row, column;
  int32_t narrow;
} matrix;

/* products.c: those that allocate return 1 if there is no memory. */
int products(int64_t batch, int64_t m, int64_t n, int64_t k, const matrix *a, int64_t a_step, const matrix *b, int64_t b_step,
             void *c, int64_t c_row, int64_t c_step, int32_t narrow);

/* products_fp64.c */
void products_fp64(int64_t batch, int64_t m, int64_t n, int64_t k, const matrix *a, int64_t a_step, const matrix *b, int64_t b_step,
                   double *c, int64_t c_row, int64_t c_step);

/* attention.c: heads `first` to `last` of all sequences (of the keys' heads in the backward pass). */
int attention(const int64_t shape[7], const matrix inputs[4], const int64_t steps[8], float scale, int32_t causal, void *out,
              int32_t narrow, float *log_sums, int64_t first, int64_t last);
int attention_backward(const int64_t shape[7], const matrix inputs[6], const int64_t steps[12], float scale, int32_t causal,
                       const float *log_sums, void *grad_query, void *grad_key, void *grad_value, int32_t narrow, int64_t first,
                       int64_t last);

/* The format of numbers in memory. */
enum format { FP32, BF16, FP64, INT64 };

/* Elementary functions, elementwise (functions/functions.c). A slope is the derivative. */
enum function {
  FUNCTION_EXP,
  FUNCTION_EXPM1,
  FUNCTION_EXP2,
  FUNCTION_LOG,
  FUNCTION_LOG1P,
  FUNCTION_LOG2,
  FUNCTION_SIGMOID,
  FUNCTION_SILU,
  FUNCTION_TANH,
  FUNCTION_ERF,
  FUNCTION_GELU,      /* x Phi(x), Phi the normal distribution */
  FUNCTION_GELU_TANH, /* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 */
  FUNCTION_SIN,
  FUNCTION_COS,
  FUNCTION_SQRT,
  FUNCTION_RSQRT,
  FUNCTION_LOG10,
  FUNCTION_SOFTPLUS,   /* log(1 + e^x) */
  FUNCTION_LOGSIGMOID, /* -log(1 + e^-x) */
  FUNCTION_GELU_SLOPE,
  FUNCTION_GELU_TANH_SLOPE,
  FUNCTION_SILU_SLOPE,
  FUNCTIONS,
};

/* `to` may be `from`; other overlaps are not allowed. */
void function_fp32(int32_t function, const float *from, float *to, int64_t count);
void function_fp64(int32_t function, const double *from, double *to, int64_t count);
/* Widened, computed in fp32, rounded once. */
void function_bf16(int32_t function, const uint16_t *from, uint16_t *to, int64_t count);
void power_fp32(const float *base, const float *exponent, float *to, int64_t count);
void power_fp64(const double *base, const double *exponent, double *to, int64_t count);

/* functions/slopes.c: the slope of a function's input. Sigmoid and tanh take their result for it, the others their input. */
void slopes(int32_t format, int32_t function, const void *slope, const void *at, void *to, int64_t count);

/* sums.c */
enum { PIECE = 4096 }; /* numbers of a row that are added before the sums of pieces are */

void row_sums(int32_t format, const void *from, void *to, int64_t rows, int64_t width);
void column_sums(int32_t format, const void *from, void *to, int64_t rows, int64_t columns, int64_t first, int64_t last);
/* A row that several threads add: the sums of its pieces `first` to `last`, and then of the pieces' sums. */
void piece_sums(int32_t format, const void *from, int64_t count, void *sums, int64_t first, int64_t last);
void added_pieces(int32_t format, const void *sums, int64_t count, void *to);
int softmax_rows(int32_t format, int32_t logarithm, const void *from, void *to, int64_t rows, int64_t width);
int softmax_slopes(int32_t format, int32_t logarithm, const void *slopes, const void *results, void *to, int64_t rows, int64_t width);

#ifdef __cplusplus
}
#endif

#endif
