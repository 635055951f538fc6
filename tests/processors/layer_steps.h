/* One call of the kernel of few rows: attention, the end of a layer, and the beginning of the next. Included behind layer.c or layer_bf16.c. */
#include "numbers.h"

enum { DIM = 64, HEADS = 4, KEPT = 2, HEAD = 16, INNER_WIDTH = 96, STEP_ROWS = 3, CAPACITY = 48 };

FUSING static element *elements(int64_t count, int seed, int shift) {
    element *to = malloc((size_t)count * sizeof *to);
    for (int64_t i = 0; i < count; i++) to[i] = store_one(number(i, seed, shift));
    return to;
}

static Matrix matrix_of(int64_t outputs, int64_t inputs, int seed) {
    return (Matrix){elements(outputs * inputs, seed, 12), elements(outputs, seed + 1, 9), outputs, inputs, 40};
}

static void report_layer(const char *name, void (*step)(Step *, parallel_function, int64_t)) {
    Layer layer = {matrix_of(HEADS * HEAD, DIM, 1), matrix_of(KEPT * HEAD, DIM, 3), matrix_of(KEPT * HEAD, DIM, 5),
                   matrix_of(DIM, HEADS * HEAD, 7), matrix_of(INNER_WIDTH, DIM, 9), matrix_of(INNER_WIDTH, DIM, 11),
                   matrix_of(DIM, INNER_WIDTH, 13), elements(DIM, 15, 8), elements(DIM, 16, 8), elements(HEAD, 17, 8),
                   elements(HEAD, 18, 8), DIM, HEADS, KEPT, HEAD, INNER_WIDTH, HEAD, 1e-5f};
    Row rows[STEP_ROWS];
    for (int i = 0; i < STEP_ROWS; i++)
        rows[i] = (Row){elements(KEPT * CAPACITY * HEAD, 20 + i, 8), elements(KEPT * CAPACITY * HEAD, 30 + i, 8), CAPACITY * HEAD,
                        5 + 13 * i, CAPACITY, CAPACITY};
    const int64_t stride = (1 + HEADS / KEPT + 64) * HEAD + HEADS / KEPT * 64;
    Attention attention = {rows, HEADS, KEPT, HEAD, HEAD, 512, 1, 0.25f, calloc((size_t)stride, sizeof(float)), stride, 0};
    Step s = {&layer, &layer, &attention, elements(STEP_ROWS * DIM, 40, 6), elements(STEP_ROWS * HEADS * HEAD, 41, 6),
              elements(STEP_ROWS * HEAD, 42, 9), elements(STEP_ROWS * HEAD, 43, 9), elements(STEP_ROWS * HEADS * HEAD, 44, 8),
              elements(STEP_ROWS * KEPT * HEAD, 45, 8), elements(STEP_ROWS * KEPT * HEAD, 46, 8),
              numbers(STEP_ROWS * DIM, 0, 9), numbers(STEP_ROWS * INNER_WIDTH, 0, 9), elements(STEP_ROWS * DIM, 47, 9),
              elements(STEP_ROWS * INNER_WIDTH, 48, 9), elements(STEP_ROWS * INNER_WIDTH, 49, 9), STEP_ROWS, {0}, 0, 0, 0, 1};
    step(&s, 0, 1);
    element results[STEP_ROWS * (DIM + HEADS * HEAD + 2 * KEPT * HEAD)], *to = results;
    memcpy(to, s.states, STEP_ROWS * DIM * sizeof *to), to += STEP_ROWS * DIM;
    memcpy(to, s.query, STEP_ROWS * HEADS * HEAD * sizeof *to), to += STEP_ROWS * HEADS * HEAD;
    memcpy(to, s.key, STEP_ROWS * KEPT * HEAD * sizeof *to), to += STEP_ROWS * KEPT * HEAD;
    memcpy(to, s.value, STEP_ROWS * KEPT * HEAD * sizeof *to);
    report(name, results, sizeof results);
}
