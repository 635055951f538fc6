/* A few rows through a layer of a transformer in one parallel region: grouped-query attention and a SwiGLU, both normalized before.

   Decoding one text does little in each operation, so calling them one by one costs as much as they do. Here a region takes rows from one layer's queries,
   keys and values to the next layer's. Products, sums, functions and attention are the library's, and what lies between them is rounded as PyTorch's
   operations are, so that the bits are those of the modules, whatever the number of rows and threads.

   Numbers between operations are fp32. If the model is bf16 (`narrow`), each was rounded to bf16, and weights, keys and values are bf16 in memory. */

#include "layer_step.h"

#include "kernels.h"
#include "matrix.h"

#include <stdlib.h>

enum { SHARE = 64 }; /* outputs that a thread takes at a time */

/* A thread of a team. */
typedef struct {
  int64_t number, threads;
  workspace room;
  float *numbers; /* as many as the longest row has */
} member;

FUSING static float rounded(float x, int32_t narrow) { return narrow ? widened(narrowed(x)) : x; }

static void meet(const step *s, const member *me) {
  if (me->threads > 1) s->barrier();
}

/* y = x weight^T + bias for outputs `begin` to `end`; a product is rounded before its bias is added. */
FUSING static void project(const step *s, const linear *l, const float *x, float *y, int64_t begin, int64_t end, const member *me) {
  const matrix input = {x, l->inputs, 1, 0}, weight = {(const char *)l->weight + begin * l->inputs * (s->narrow ? 2 : 4), 1, l->inputs, s->narrow};
  multiply(s->rows, end - begin, l->inputs, input, weight, y + begin, l->outputs, 0, me->room);
  for (int64_t i = 0; i < s->rows && (l->bias || s->narrow); i++)
    for (int64_t j = begin; j < end; j++) {
      const float product = rounded(y[i * l->outputs + j], s->narrow);
      y[i * l->outputs + j] = l->bias ? rounded(product + l->bias[j], s->narrow) : product;
    }
}

static int64_t shares_of(const linear *l) { return (l->outputs + SHARE - 1) / SHARE; }

static void project_share(const step *s, const linear *l, const float *x, float *y, int64_t share, const member *me) {
  project(s, l, x, y, share * SHARE, end_of(share * SHARE, SHARE, l->outputs), me);
}

/* y = x / sqrt(mean(x^2) + eps) gain; y may be x. */
FUSING static void normalize(const float *x, const float *gain, float eps, int64_t width, float *y, int32_t narrow, const member *me) {
  float sum, inverse;
  for (int64_t i = 0; i < width; i++) me->numbers[i] = x[i] * x[i];
  row_sums(FP32, me->numbers, &sum, 1, width);
  inverse = sum / (float)width + eps;
  function_fp32(FUNCTION_RSQRT, &inverse, &inverse, 1);
  for (int64_t i = 0; i < width; i++) y[i] = x[i] * inverse * gain[i];
  for (int64_t i = 0; i < width && narrow; i++) y[i] = rounded(y[i], narrow);
}

/* Every threads-th row, the same ones that this thread adds to. */
static void normalize_rows(const step *s, const float *gain, float eps, int64_t dim, const member *me) {
  for (int64_t i = me->number; i < s->rows; i += me->threads)
    normalize(s->states + i * dim, gain, eps, dim, s->normed + i * dim, s->narrow, me);
}

FUSING static void add_rows(const step *s, int64_t dim, const member *me) {
  for (int64_t i = me->number; i < s->rows; i += me->threads)
    for (int64_t j = i * dim; j < (i + 1) * dim; j++) s->states[j] = rounded(s->states[j] + s->added[j], s->narrow);
}

/* gate = silu(gate) up, for inner elements `begin` to `end` of a row. */
FUSING static void activate(float *gate, const float *up, int64_t begin, int64_t end, int32_t narrow) {
  function_fp32(FUNCTION_SILU, gate + begin, gate + begin, end - begin);
  for (int64_t i = begin; i < end; i++) gate[i] = rounded(rounded(gate[i], narrow) * up[i], narrow);
}

/* The rotary embedding of one head: halves of its first `rotated` elements are pairs. */
FUSING static void rotate(float *x, const float *cos, const float *sin, int64_t rotated, int32_t narrow) {
  const int64_t half = rotated / 2;
  for (int64_t i = 0, j = half; i < half; i++, j++) {
    const float first = x[i], second = x[j];
    x[i] = rounded(rounded(first * cos[i], narrow) + rounded(-second * sin[i], narrow), narrow);
    x[j] = rounded(rounded(second * cos[j], narrow) + rounded(first * sin[j], narrow), narrow);
  }
}

/* Stores a row's keys and values (kv_heads, width) in its text's. */
static void cache_row(const step *s, int64_t row) {
  const layer *l = s->previous;
  const cached_row *c = s->cached + row;
  for (int64_t head = 0; head < l->kv_heads; head++) {
    const int64_t from = (row * l->kv_heads + head) * l->width, to = head * c->stride + c->position * l->width, size = s->narrow ? 2 : 4;
    store(s->key + from, l->width, (char *)c->keys + to * size, s->narrow);
    store(s->value + from, l->width, (char *)c->values + to * size, s->narrow);
  }
}

/* Attention of the query heads of one row that share a head of keys: they are the rows of one attention. */
static int attend_group(const step *s, int64_t row, int64_t head, const member *me) {
  const layer *l = s->previous;
  const cached_row *c = s->cached + row;
  const int64_t group = l->heads / l->kv_heads, width = l->width, seen = c->position + 1, size = s->narrow ? 2 : 4;
  const int64_t first = (row * l->heads + head * group) * width, shape[7] = {1, 1, 1, group, seen, width, width}, steps[8] = {0};
  const matrix inputs[4] = {{s->query + first, width, 1, 0},
                            {(const char *)c->keys + head * c->stride * size, width, 1, s->narrow},
                            {(const char *)c->values + head * c->stride * size, width, 1, s->narrow},
                            {NULL, 0, 0, 0}};
  float *log_sums = me->numbers; /* of each head, used by the gradient alone */
  if (attention(shape, inputs, steps, s->scale, 0, s->mixed + first, 0, log_sums, 0, 1)) return 1;
  for (int64_t i = 0; i < group * width && s->narrow; i++) s->mixed[first + i] = rounded(s->mixed[first + i], 1);
  return 0;
}

static void attend(step *s, const member *me) {
  for (int64_t row = me->number; row < s->rows; row += me->threads) cache_row(s, row);
  meet(s, me);
  for (int64_t share; (share = taken(&s->taken[4], 1)) < s->rows * s->previous->kv_heads;)
    if (attend_group(s, share / s->previous->kv_heads, share % s->previous->kv_heads, me)) s->failed = 1;
  meet(s, me);
}

static void end_layer(step *s, const member *me) {
  const layer *l = s->previous;
  for (int64_t share; (share = taken(&s->taken[0], 1)) < shares_of(&l->output);) project_share(s, &l->output, s->mixed, s->added, share, me);
  meet(s, me);
  add_rows(s, l->dim, me);
  normalize_rows(s, l->ffn_norm, l->eps, l->dim, me);
  meet(s, me);
  for (int64_t share; (share = taken(&s->taken[1], 1)) < shares_of(&l->up);) {
    project_share(s, &l->gate, s->normed, s->gate, share, me);
    project_share(s, &l->up, s->normed, s->up, share, me);
    for (int64_t i = 0; i < s->rows; i++)
      activate(s->gate + i * l->inner, s->up + i * l->inner, share * SHARE, end_of(share * SHARE, SHARE, l->inner), s->narrow);
  }
  meet(s, me);
  for (int64_t share; (share = taken(&s->taken[2], 1)) < shares_of(&l->down);) project_share(s, &l->down, s->gate, s->added, share, me);
  meet(s, me);
  add_rows(s, l->dim, me);
}

/* Normalizes and rotates the heads (rows, heads, width) of queries or keys. */
static void finish_heads(const step *s, float *x, const float *gain, int64_t heads, const member *me) {
  const layer *l = s->next;
  for (int64_t i = me->number; i < s->rows * heads; i += me->threads) {
    float *head = x + i * l->width;
    if (gain) normalize(head, gain, l->eps, l->width, head, s->narrow, me);
    if (l->rotated) rotate(head, s->cos + i / heads * l->rotated, s->sin + i / heads * l->rotated, l->rotated, s->narrow);
  }
}

static void begin_layer(step *s, const member *me) {
  const layer *l = s->next;
  normalize_rows(s, l->attention_norm, l->eps, l->dim, me);
  meet(s, me);
  const int64_t queries = shares_of(&l->query), keys = shares_of(&l->key), values = shares_of(&l->value);
  for (int64_t share; (share = taken(&s->taken[3], 1)) < queries + keys + values;) {
    if (share < queries)
      project_share(s, &l->query, s->normed, s->query, share, me);
    else if (share < queries + keys)
      project_share(s, &l->key, s->normed, s->key, share - queries, me);
    else
      project_share(s, &l->value, s->normed, s->value, share - queries - keys, me);
  }
  meet(s, me);
  finish_heads(s, s->query, l->query_norm, l->heads, me);
  finish_heads(s, s->key, l->key_norm, l->kv_heads, me);
}

static int64_t longest_row(const layer *l) { return most(most(l->dim, l->inner), most(l->heads * l->width, l->width)); }

static void work(void *data) {
  step *s = data;
  const layer *some = s->previous ? s->previous : s->next;
  const int alone = s->number == NULL;
  member me = {alone ? 0 : s->number(), alone ? 1 : s->members(), make_workspace(s->rows, SHARE, longest_row(some)),
               malloc(longest_row(some) * sizeof(float))};
  if (!me.room.rows || !me.room.columns || !me.numbers) s->failed = 1;
  meet(s, &me); /* all go on, or none */
  if (!s->failed) {
    if (s->cached) attend(s, &me);
    if (s->previous) end_layer(s, &me);
    if (s->next) begin_layer(s, &me);
  }
  free_workspace(me.room);
  free(me.numbers);
}

int layer_step(step *s, parallel_function parallel, int64_t threads) {
  memset(s->taken, 0, sizeof s->taken);
  s->failed = 0;
  in_team(work, s, parallel, threads);
  return s->failed;
}
