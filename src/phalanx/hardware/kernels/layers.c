/* One pass over memory for what surrounds a layer's products on a CPU: rotary embeddings, and what RMSNorm multiplies.

   Compiled with -ffp-contract=off: each operation below is rounded by itself, as in the chains of PyTorch's operations that it
   stands for, so the bits are the same with any vector width. Nothing is added up over elements here. */
#include <stdint.h>

#include "processors.h"
#include "team.h"

/* A call: some rows of each task are done by each thread, which takes as many at a time as are worth it. */
typedef struct Task {
    void (*rows)(const struct Task *task, int64_t begin, int64_t end);
    int64_t count, at_once, next;
    const float *x, *y, *factors, *weights, *along;
    float *out;
    int64_t width, heads, length;
    int64_t x_batch, x_token, x_head, out_batch, out_token, out_head;
    int back;
} Task;

static void take(void *data) {
    Task *task = data;
    for (int64_t begin; (begin = taken(&task->next, task->at_once)) < task->count;)
        task->rows(task, begin, end_of(begin, task->at_once, task->count));
}

static void run(Task *task, parallel_function parallel, int64_t threads) {
    if (threads <= 1 || !parallel) task->at_once = task->count; /* nobody waits for a share */
    in_team(take, task, parallel, threads);
}

/* Rows are tokens. Forward x cos + (-second, first) sin of a head's halves; backward the gradient of that. */
EACH_PROCESSOR static void turn_rows(const Task *task, int64_t begin, int64_t end) {
    const int64_t half = task->width / 2;
    for (int64_t row = begin; row < end; row++) {
        const int64_t batch = row / task->length, token = row % task->length;
        const float *cos = task->factors + token * task->width, *sin = task->weights + token * task->width;
        const float *x = task->x + batch * task->x_batch + token * task->x_token;
        float *out = task->out + batch * task->out_batch + token * task->out_token;
        for (int64_t head = 0; head < task->heads; head++, x += task->x_head, out += task->out_head) {
            const float *restrict first = x, *restrict second = x + half;
            float *restrict to_first = out, *restrict to_second = out + half;
            if (task->back)
                for (int64_t i = 0; i < half; i++) {
                    to_first[i] = first[i] * cos[i] + second[i] * sin[half + i];
                    to_second[i] = second[i] * cos[half + i] + -(first[i] * sin[i]);
                }
            else
                for (int64_t i = 0; i < half; i++) {
                    to_first[i] = first[i] * cos[i] + -second[i] * sin[i];
                    to_second[i] = second[i] * cos[half + i] + first[i] * sin[half + i];
                }
        }
    }
}

/* cos, sin: (length, width), contiguous. x, out: (batch, heads, length, width), of any strides but the last one's, 1. */
void turn(const float *x, const float *cos, const float *sin, float *out, int64_t batch, int64_t heads, int64_t length,
          int64_t width, const int64_t *strides, int back, int64_t at_once, parallel_function parallel,
          int64_t threads) {
    Task task = {turn_rows, batch * length, at_once, 0, x, 0, cos, sin, 0, out, width, heads, length,
                 strides[0], strides[2], strides[1], strides[3], strides[5], strides[4], back};
    run(&task, parallel, threads);
}

/* (x inverse) weight */
EACH_PROCESSOR static void scale_rows(const Task *task, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *restrict x = task->x + row * task->width, *restrict weights = task->weights;
        float *restrict out = task->out + row * task->width;
        const float inverse = task->factors[row];
        for (int64_t i = 0; i < task->width; i++) out[i] = x[i] * inverse * weights[i];
    }
}

/* gradient (x inverse) */
EACH_PROCESSOR static void multiply_rows(const Task *task, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *restrict x = task->x + row * task->width, *restrict y = task->y + row * task->width;
        float *restrict out = task->out + row * task->width;
        const float inverse = task->factors[row];
        for (int64_t i = 0; i < task->width; i++) out[i] = y[i] * (x[i] * inverse);
    }
}

/* (gradient weight - (x inverse) along) inverse */
EACH_PROCESSOR static void straighten_rows(const Task *task, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
        const float *restrict x = task->x + row * task->width, *restrict y = task->y + row * task->width;
        const float *restrict weights = task->weights;
        float *restrict out = task->out + row * task->width;
        const float inverse = task->factors[row], along = task->along[row];
        for (int64_t i = 0; i < task->width; i++)
            out[i] = (y[i] * weights[i] - x[i] * inverse * along) * inverse;
    }
}

/* x, y, out: (rows, width), contiguous; inverse, along: (rows,); weights: (width,). kind: which of the three. */
void norm(int kind, const float *x, const float *y, const float *inverse, const float *weights, const float *along,
          float *out, int64_t rows, int64_t width, int64_t at_once, parallel_function parallel, int64_t threads) {
    void (*const kinds[])(const Task *, int64_t, int64_t) = {scale_rows, multiply_rows, straighten_rows};
    Task task = {kinds[kind], rows, at_once, 0, x, y, inverse, weights, along, out, width, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    run(&task, parallel, threads);
}
