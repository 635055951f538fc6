/* The kernel of few rows in bf16, on stored inputs. */
#include "kernels/rows/layer_bf16.c"

#include "layer_steps.h"

static void one_thread(Step *s, parallel_function parallel, int64_t threads) {
    s->threads = threads;
    half_layer_step(s, parallel);
}

void report_layer_bf16(void) { report_layer("layer-bf16", one_thread); }
