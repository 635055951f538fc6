/* Attention, forward and backward, whose bits are a matter of definition (see matrix.h). */

#include "functions/functions.h"
#include "matrix.h"

#include <stdlib.h>

#define QUERIES 64   /* rows of attention at a time; the number of terms of a chain in its gradients, so part of the definition */

/* One attention: a head's queries (q, e), keys (n, e), values (n, v); the bias (q, n) on scores has `at` NULL if there is none. */
typedef struct {
  int64_t queries, keys, width, value_width;
  matrix query, key, value, bias;
  float scale;
  int32_t causal;
} head;

static int64_t seen_keys(const head *h, int64_t row) { return h->causal ? least(h->keys, row + 1) : h->keys; }

/* row = e^(row - shift). */
FUSING static void exponentials(float *row, int64_t count, float shift) {
  int64_t j = 0;
  for (; j + LANES <= count; j += LANES) put(row + j, exp_lanes(at(row + j) - all(shift)));
  if (j < count) {
    float rest[LANES] = {0};
    memcpy(rest, row + j, (size_t)(count - j) * sizeof(float));
    put(rest, exp_lanes(at(rest) - all(shift)));
    memcpy(row + j, rest, (size_t)(count - j) * sizeof(float));
  }
}

FUSING static float logarithm(float x) { return log_lanes(all(x))[0]; }

/* The scores of `count` rows from `first` on, (count, keys), of which each row has those of the keys that it sees. */
FUSING static void score(const head *h, int64_t first, int64_t count, float *scores, workspace w) {
  int64_t keys = seen_keys(h, first + count - 1);
  multiply(count, keys, h->width, below(h->query, first), transposed(h->key), scores, h->keys, 0, w);
  for (int64_t i = 0; i < count; i++) {
    float *row = scores + i * h->keys;
    int64_t seen = seen_keys(h, first + i);
    for (int64_t j = 0; j < seen; j++) row[j] *= h->scale;
    if (h->bias.at)
      for (int64_t j = 0; j < seen; j++) {
        int64_t place = (first + i) * h->bias.row + j * h->bias.column;
        row[j] += h->bias.narrow ? widened(((const uint16_t *)h->bias.at)[place]) : ((const float *)h->bias.at)[place];
      }
  }
}

/* out (queries, value_width) = softmax(scale query key^T + bias) value, and the logarithm of each row's denominator. */
FUSING static void attend(const head *h, void *out, int64_t out_step, int32_t narrow, float *log_sums, int64_t log_step, float *scratch, workspace w) {
  float *scores = scratch, *block = scratch + least(QUERIES, h->queries) * h->keys;
  matrix weights = {scores, h->keys, 1, 0};
  for (int64_t first = 0; first < h->queries; first += QUERIES) {
    int64_t count = least(QUERIES, h->queries - first), keys = seen_keys(h, first + count - 1);
    float divisors[QUERIES];
    score(h, first, count, scores, w);
    for (int64_t i = 0; i < count; i++) {
      float *row = scores + i * h->keys, largest = -INFINITY, sums[16] = {0};
      int64_t seen = seen_keys(h, first + i);
      for (int64_t j = 0; j < seen; j++) largest = row[j] > largest ? row[j] : largest;
      float shift = largest == -INFINITY ? 0.0f : largest;
      exponentials(row, seen, shift);
      for (int64_t j = seen; j < keys; j++) row[j] = 0.0f;
      int64_t whole = seen / 16 * 16;
      for (int64_t j = 0; j < whole; j += 16)
        for (int i = 0; i < 16; i++) sums[i] += row[j + i];
      for (int64_t j = whole; j < seen; j++) sums[j - whole] += row[j];
      float sum = added(sums);
      divisors[i] = sum;
      log_sums[(first + i) * log_step] = sum > 0 ? shift + logarithm(sum) : (sum == 0 ? -INFINITY : sum);
    }
    multiply(count, h->value_width, keys, weights, h->value, block, h->value_width, 0, w);
    for (int64_t i = 0; i < count; i++) {
      float *row = block + i * h->value_width;
      for (int64_t j = 0; j < h->value_width; j++) row[j] = divisors[i] == 0 ? 0.0f : row[j] / divisors[i];
      store(row, h->value_width, (char *)out + (first + i) * out_step * (narrow ? 2 : 4), narrow);
    }
  }
}

/* Adds to the fp32 gradients of keys (n, e) and values (n, v), and sets that of the queries (q, e); the equations are those of
   FlashAttention (arXiv 2205.14135, appendix B.2), with rows `first` to `first + 64` at a time:
     P = exp(scores - log sums)   dV += P^T dOut   dP = dOut V^T   dS = P (dP - rowsum(dOut out))   dQ = scale dS K   dK += scale dS^T Q */
FUSING static void attend_backward(const head *h, matrix grad_out, matrix out, const float *log_sums, int64_t log_step, float *grad_query,
                                 float *grad_key, float *grad_value, float *scratch, workspace w) {
  float *weights = scratch, *slopes = scratch + QUERIES * h->keys;
  matrix of_weights = {weights, h->keys, 1, 0}, of_slopes = {slopes, h->keys, 1, 0};
  for (int64_t first = 0; first < h->queries; first += QUERIES) {
    int64_t count = least(QUERIES, h->queries - first), keys = seen_keys(h, first + count - 1);
    score(h, first, count, weights, w);
    multiply(count, keys, h->value_width, below(grad_out, first), transposed(h->value), slopes, h->keys, 0, w);
    for (int64_t i = 0; i < count; i++) {
      float *row = weights + i * h->keys, *slope = slopes + i * h->keys, sums[16] = {0};
      float log_sum = log_sums[(first + i) * log_step];
      int64_t seen = seen_keys(h, first + i);
      for (int64_t j = 0; j < h->value_width; j++) {
        int64_t left = (first + i) * grad_out.row + j * grad_out.column, right = (first + i) * out.row + j * out.column;
        float slope_of_out = grad_out.narrow ? widened(((const uint16_t *)grad_out.at)[left]) : ((const float *)grad_out.at)[left];
        float result = out.narrow ? widened(((const uint16_t *)out.at)[right]) : ((const float *)out.at)[right];
        sums[j & 15] += slope_of_out * result;
      }
      float common = added(sums);
      if (log_sum == -INFINITY) { /* a query that sees no key moves nothing */
        for (int64_t j = 0; j < keys; j++) row[j] = slope[j] = 0.0f;
        continue;
      }
      exponentials(row, seen, log_sum);
      for (int64_t j = 0; j < seen; j++) slope[j] = row[j] * (slope[j] - common) * h->scale;
      for (int64_t j = seen; j < keys; j++) row[j] = slope[j] = 0.0f;
    }
    multiply(count, h->width, keys, of_slopes, h->key, grad_query + first * h->width, h->width, 0, w);
    multiply(keys, h->width, count, transposed(of_slopes), below(h->query, first), grad_key, h->width, 1, w);
    multiply(keys, h->value_width, count, transposed(of_weights), below(grad_out, first), grad_value, h->value_width, 1, w);
  }
}

static matrix at_head(const matrix *m, const int64_t steps[2], int64_t sequence, int64_t number) {
  matrix here = *m;
  if (m->at) here.at = (const char *)m->at + (sequence * steps[0] + number * steps[1]) * (m->narrow ? 2 : 4);
  return here;
}

/* Heads `first` to `last`, those of all sequences counted one after the other.
   `shape`: sequences, query heads, key heads, queries, keys, width, width of a value. `steps`: from a sequence and from a head to the next, in
   elements, of query, key, value, bias. Results follow each other: out (sequences, queries, heads, v), log sums (sequences, heads, queries). */
int attention(const int64_t shape[7], const matrix inputs[4], const int64_t steps[8], float scale, int32_t causal, void *out, int32_t narrow,
              float *log_sums, int64_t first, int64_t last) {
  int64_t heads = shape[1], shared = heads / shape[2], queries = shape[3], keys = shape[4], v = shape[6];
  int64_t rows = least(QUERIES, queries);
  workspace w = make_workspace(rows, most(keys, v), most(keys, shape[5]));
  float *scratch = malloc((rows * keys + rows * v + 1) * sizeof(float));
  int failed = !w.rows || !w.columns || !scratch;
  for (int64_t at = first; at < last && !failed; at++) {
      int64_t b = at / heads, n = at % heads;
      head h = {queries, keys, shape[5], v, at_head(inputs, steps, b, n), at_head(inputs + 1, steps + 2, b, n / shared),
                at_head(inputs + 2, steps + 4, b, n / shared), at_head(inputs + 3, steps + 6, b, n), scale, causal};
      char *to = (char *)out + (b * queries * heads + n) * v * (narrow ? 2 : 4);
      attend(&h, to, heads * v, narrow, log_sums + (b * heads + n) * queries, 1, scratch, w);
    }
  free_workspace(w);
  free(scratch);
  return failed;
}

/* Heads of keys `first` to `last`, and of the queries that share them. `inputs` and `steps` go on with the gradient of out and out. Gradients follow each other, (sequences, heads, tokens, width). The query
   heads that share a key's head add to its gradient one after the other. */
int attention_backward(const int64_t shape[7], const matrix inputs[6], const int64_t steps[12], float scale, int32_t causal,
                       const float *log_sums, void *grad_query, void *grad_key, void *grad_value, int32_t narrow, int64_t first,
                       int64_t last) {
  int64_t heads = shape[1], shared = heads / shape[2], queries = shape[3], keys = shape[4], e = shape[5], v = shape[6];
  int64_t size = narrow ? 2 : 4;
  workspace w = make_workspace(most(QUERIES, keys), most(keys, most(e, v)), most(QUERIES, most(keys, most(e, v))));
  float *scratch = malloc((2 * QUERIES * keys + 1) * sizeof(float));
  float *sums = malloc((queries * e + keys * e + keys * v + 1) * sizeof(float));
  int failed = !w.rows || !w.columns || !scratch || !sums;
  for (int64_t at = first * shared; at < last * shared && !failed; at++) {
      int64_t b = at / heads, n = at % heads;
      head h = {queries, keys, e, v, at_head(inputs, steps, b, n), at_head(inputs + 1, steps + 2, b, n / shared),
                at_head(inputs + 2, steps + 4, b, n / shared), at_head(inputs + 3, steps + 6, b, n), scale, causal};
      float *of_query = sums, *of_key = sums + queries * e, *of_value = of_key + keys * e;
      if (n % shared == 0) memset(of_key, 0, (keys * e + keys * v) * sizeof(float));
      attend_backward(&h, at_head(inputs + 4, steps + 8, b, n), at_head(inputs + 5, steps + 10, b, n),
                      log_sums + (b * heads + n) * queries, 1, of_query, of_key, of_value, scratch, w);
      int64_t own = b * heads + n, common = b * shape[2] + n / shared;
      store(of_query, queries * e, (char *)grad_query + own * queries * e * size, narrow);
      if (n % shared == shared - 1) {
        store(of_key, keys * e, (char *)grad_key + common * keys * e * size, narrow);
        store(of_value, keys * v, (char *)grad_value + common * keys * v * size, narrow);
      }
    }
  free_workspace(w);
  free(scratch);
  free(sums);
  return failed;
}
