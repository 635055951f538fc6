/* Products of a few rows of fp32 numbers; see rows.c. */
#ifndef PHALANX_ROWS_H
#define PHALANX_ROWS_H
#include <stdint.h>

#include "../team.h"
#include "../vectors.h"

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
