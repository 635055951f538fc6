/* Arguments of layer_step.c. */

#ifndef PORTABLE_LAYER_STEP_H
#define PORTABLE_LAYER_STEP_H

#include <stdint.h>

#include "../kernels/team.h"

typedef struct {
  const void *weight; /* (outputs, inputs) */
  const float *bias;  /* (outputs) or NULL */
  int64_t outputs, inputs;
} linear;

typedef struct {
  linear query, key, value, output, gate, up, down;
  const float *attention_norm, *ffn_norm, *query_norm, *key_norm; /* gains (dim) twice, (width) twice; the last two may be NULL */
  int64_t dim, heads, kv_heads, width, inner, rotated;            /* rotated: elements of a head */
  float eps;
} layer;

/* Where the keys and values of a row's text are. */
typedef struct {
  void *keys, *values; /* (kv_heads, capacity, width) */
  int64_t stride;      /* elements from one head to the next */
  int64_t position;    /* of the row; it sees itself and as many before it */
} cached_row;

typedef struct {
  const layer *previous, *next; /* the layer to end, and the one to begin; either may be NULL */
  const cached_row *cached;     /* of each row in the layer to end, if its attention is computed here; else NULL */
  float scale;                  /* of that attention's scores */
  int32_t narrow;
  float *states;              /* (rows, dim): the input of a layer, which becomes its output */
  float *mixed;               /* (rows, heads width): results of attention */
  const float *cos, *sin;     /* (rows, rotated) of the layer to begin */
  float *query, *key, *value; /* (rows, heads or kv_heads, width) of the layer that was begun */
  float *normed, *added;      /* (rows, dim) */
  float *gate, *up;           /* (rows, inner) */
  int64_t rows;
  int64_t taken[5]; /* shares that threads have taken, of each product and of attention; zeros at first */
  int32_t failed;   /* set if there was no memory */
  void (*barrier)(void);
  int (*number)(void), (*members)(void); /* of this thread in its team, and the team's size, which may be less than asked for */
} step;

/* Takes rows from one layer's projections to the next layer's, or from its attention's results where `cached` is NULL. Returns 1 if there is no memory. */
int layer_step(step *s, parallel_function parallel, int64_t threads);

#endif
