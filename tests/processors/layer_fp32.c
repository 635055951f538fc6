/* The kernel of few rows in fp32, on stored inputs. */
#include "kernels/rows/layer.c"

#include "layer_steps.h"

static void one_thread(Step *s, parallel_function parallel, int64_t threads) {
    s->threads = threads;
    layer_step(s, parallel);
}

void report_layer_fp32(void) { report_layer("layer-fp32", one_thread); }
