/* Prints a digest of what each of the project's C kernels computes from stored inputs, for comparison between processors. */
#include "numbers.h"
#include "kernels/team.h"
#include "portable/kernels.h"
#include "portable/layer_step.h"
#include "portable/matrix.h"

void adamw(float *weights, const float *grads, float *means, float *squares, int64_t count, const float *factors, void *roots);
uint32_t peak_bits(const float *values, int64_t count);
void extract(const float *values, int64_t count, const double *constants, double *sums);
void add_to_int32(const float *gradient, int32_t *high, int32_t *low, int8_t *tops, int64_t spans, int64_t size, int32_t width);
void add_to_int64(const float *gradient, int64_t *high, int64_t *low, int8_t *tops, int64_t spans, int64_t size, int32_t width);
void turn(const float *x, const float *cos, const float *sin, float *out, int64_t batch, int64_t heads, int64_t length, int64_t width,
          const int64_t *strides, int back, int64_t at_once, parallel_function parallel, int64_t threads);
void norm(int kind, const float *x, const float *y, const float *inverse, const float *weights, const float *along, float *out,
          int64_t rows, int64_t width, int64_t at_once, parallel_function parallel, int64_t threads);

/* Shapes that fill whole tiles and shapes that leave rows, columns and terms over. */
static void report_products(void) {
    const int64_t shapes[][3] = {{1, 40, 300}, {7, 17, 600}, {96, 64, 256}, {13, 33, 37}, {2, 16, 8}, {3, 21, 37}, {4, 64, 64}, {50, 17, 130}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const int64_t m = shapes[i][0], n = shapes[i][1], k = shapes[i][2];
        for (int narrow = 0; narrow < 2; narrow++)
            for (int across = 0; across < 2; across++) {
                const void *left = narrow ? (void *)halves_of(m * k, 0, 6) : numbers(m * k, 0, 6);
                const void *right = narrow ? (void *)halves_of(k * n, 1, 7) : numbers(k * n, 1, 7);
                const matrix a = {left, k, 1, narrow}, b = {right, across ? 1 : n, across ? k : 1, narrow};
                char name[64];
                void *c = calloc((size_t)(m * n), sizeof(float));
                if (products(1, m, n, k, &a, 0, &b, 0, c, n, m * n, narrow)) exit(1);
                snprintf(name, sizeof name, "product-%dx%dx%d-%s-%s", (int)m, (int)n, (int)k, narrow ? "bf16" : "fp32", across ? "columns" : "rows");
                report(name, c, (size_t)(m * n) * (narrow ? 2 : 4));
            }
    }
}

static void report_attention(void) {
    enum { B = 2, H = 4, K = 2, T = 70, E = 24, V = 16 };
    const int64_t shape[7] = {B, H, K, T, T, E, V};
    for (int narrow = 0; narrow < 2; narrow++)
        for (int causal = 0; causal < 2; causal++) {
            const int64_t sizes[] = {B * H * T * E, B * K * T * E, B * K * T * V, 0, B * H * T * V, B * H * T * V};
            const int64_t widths[] = {E, E, V, 0, V, V}, heads[] = {H, K, K, 0, H, H};
            matrix inputs[6] = {{0}};
            int64_t steps[12] = {0};
            for (int i = 0; i < 6; i++) {
                if (i == 3) continue; /* no bias */
                const void *at = narrow ? (void *)halves_of(sizes[i], i, 7) : numbers(sizes[i], i, 7);
                inputs[i] = (matrix){at, widths[i], 1, narrow};
                steps[2 * i] = heads[i] * T * widths[i], steps[2 * i + 1] = T * widths[i];
            }
            const size_t size = narrow ? 2 : 4;
            char *results = calloc(B * T * (2 * H * E + 2 * H * V + K * E + K * V), 4), *out = results;
            char *query = out + B * H * T * V * size, *key = query + B * H * T * E * size, *value = key + B * K * T * E * size;
            float log_sums[B * H * T];
            if (attention(shape, inputs, steps, 0.2f, causal, out, narrow, log_sums, 0, B * H)) exit(1);
            if (attention_backward(shape, inputs, steps, 0.2f, causal, log_sums, query, key, value, narrow, 0, B * K)) exit(1);
            char name[64];
            snprintf(name, sizeof name, "attention-%s-%s", narrow ? "bf16" : "fp32", causal ? "causal" : "all");
            report(name, results, (size_t)(value - results) + B * K * T * V * size);
            snprintf(name, sizeof name, "log-sums-%s-%s", narrow ? "bf16" : "fp32", causal ? "causal" : "all");
            report(name, log_sums, sizeof log_sums);
        }
}

/* Attention of three rows, the end of a layer, and the beginning of the next. */
static void report_layer_step(int32_t narrow) {
    enum { DIM = 60, HEADS = 4, KV_HEADS = 2, WIDTH = 16, INNER = 90, ROWS_ = 3, CAPACITY = 48, QUERIES_ = ROWS_ * HEADS * WIDTH };
#define WEIGHTS(count, seed) (narrow ? (void *)halves_of(count, seed, 12) : (void *)numbers(count, seed, 12))
#define LINEAR(outputs, inputs, seed) {WEIGHTS((outputs) * (inputs), seed), numbers(outputs, seed + 1, 9), outputs, inputs}
    const layer l = {LINEAR(HEADS * WIDTH, DIM, 1), LINEAR(KV_HEADS * WIDTH, DIM, 3), LINEAR(KV_HEADS * WIDTH, DIM, 5), LINEAR(DIM, HEADS * WIDTH, 7),
                     LINEAR(INNER, DIM, 9), LINEAR(INNER, DIM, 11), LINEAR(DIM, INNER, 13), numbers(DIM, 15, 8), numbers(DIM, 16, 8),
                     numbers(WIDTH, 17, 8), numbers(WIDTH, 18, 8), DIM, HEADS, KV_HEADS, WIDTH, INNER, WIDTH, 1e-5f};
    cached_row rows[ROWS_];
    for (int i = 0; i < ROWS_; i++)
        rows[i] = (cached_row){WEIGHTS(KV_HEADS * CAPACITY * WIDTH, 20 + i), WEIGHTS(KV_HEADS * CAPACITY * WIDTH, 30 + i), CAPACITY * WIDTH, 5 + 13 * i};
    step s = {.previous = &l, .next = &l, .cached = rows, .scale = 0.25f, .narrow = narrow, .rows = ROWS_};
    s.states = numbers(ROWS_ * DIM, 40, 6), s.mixed = numbers(QUERIES_, 0, 9);
    s.cos = numbers(ROWS_ * WIDTH, 42, 9), s.sin = numbers(ROWS_ * WIDTH, 43, 9);
    s.query = numbers(QUERIES_, 44, 8), s.key = numbers(QUERIES_, 45, 8), s.value = numbers(QUERIES_, 46, 8);
    s.normed = numbers(ROWS_ * DIM, 0, 9), s.added = numbers(ROWS_ * DIM, 0, 9);
    s.gate = numbers(ROWS_ * INNER, 0, 9), s.up = numbers(ROWS_ * INNER, 0, 9);
    if (layer_step(&s, 0, 1)) exit(1);
    const char *names[] = {"states", "query", "key", "value"};
    const float *results[] = {s.states, s.query, s.key, s.value};
    const int64_t counts[] = {ROWS_ * DIM, QUERIES_, QUERIES_ / HEADS * KV_HEADS, QUERIES_ / HEADS * KV_HEADS};
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "layer-%s-%s", narrow ? "bf16" : "fp32", names[i]);
        report(name, results[i], (size_t)counts[i] * sizeof(float));
    }
}

static void report_passes_over_memory(void) {
    enum { COUNT = 4099, SPANS = 4, SIZE = 512, WIDTH = 38, ROWS_ = 7 };
    const float factors[9] = {0.37f, 0.9f, 0.1f, 0.95f, 0.05f, 0.377673f, 1e-8f, 1e-3f, 0.9999f};
    float *state[4];
    for (int i = 0; i < 4; i++) state[i] = numbers(COUNT, i, 9);
    for (int i = 0; i < COUNT; i++) state[3][i] *= state[3][i];
    adamw(state[0], state[1], state[2], state[3], COUNT, factors, 0);
    report("adamw-weights", state[0], COUNT * sizeof(float));
    report("adamw-means", state[2], COUNT * sizeof(float));
    report("adamw-squares", state[3], COUNT * sizeof(float));
    const double constants[2] = {1.5 * 17179869184.0, 1.5 / 16};
    double sums[2] = {0, 0};
    extract(state[1], COUNT, constants, sums);
    report("exact-sums", sums, sizeof sums);
    const uint32_t peak = peak_bits(state[1], COUNT);
    report("peak", &peak, sizeof peak);

    int32_t *words = calloc(2 * SPANS * SIZE, sizeof *words);
    int64_t *wide = calloc(2 * SPANS * SIZE, sizeof *wide);
    int8_t tops[SPANS], wide_tops[SPANS];
    memset(tops, -128, sizeof tops), memset(wide_tops, -128, sizeof wide_tops);
    for (int i = 0; i < 3; i++) {
        add_to_int32(numbers(SPANS * SIZE, i, 20 - 6 * i), words, words + SPANS * SIZE, tops, SPANS, SIZE, 20);
        add_to_int64(numbers(SPANS * SIZE, i, 20 - 6 * i), wide, wide + SPANS * SIZE, wide_tops, SPANS, SIZE, 20);
    }
    report("bins-int32", words, 2 * SPANS * SIZE * sizeof *words);
    report("bins-int64", wide, 2 * SPANS * SIZE * sizeof *wide);

    const int64_t strides[6] = {ROWS_ * 2 * WIDTH, WIDTH, 2 * WIDTH, ROWS_ * 2 * WIDTH, WIDTH, 2 * WIDTH};
    float *out = calloc(ROWS_ * 2 * WIDTH, sizeof *out);
    for (int back = 0; back < 2; back++) {
        turn(numbers(ROWS_ * 2 * WIDTH, 0, 6), numbers(ROWS_ * WIDTH, 1, 9), numbers(ROWS_ * WIDTH, 2, 9), out, 1, 2, ROWS_, WIDTH, strides, back,
             100, 0, 1);
        report(back ? "rotation-backward" : "rotation", out, ROWS_ * 2 * WIDTH * sizeof *out);
    }
    const char *names[] = {"norm-scaled", "norm-multiplied", "norm-straightened"};
    for (int kind = 0; kind < 3; kind++) {
        norm(kind, numbers(ROWS_ * WIDTH, 0, 6), numbers(ROWS_ * WIDTH, 1, 6), numbers(ROWS_, 2, 8), numbers(WIDTH, 3, 8), numbers(ROWS_, 4, 8), out,
             ROWS_, WIDTH, 100, 0, 1);
        report(names[kind], out, ROWS_ * WIDTH * sizeof *out);
    }
}

/* Arguments: bit patterns spread over the whole format, and moderate numbers of both signs. */
static void report_functions(void) {
    enum { COUNT = 1 << 17, WIDE = 1 << 14 };
    static float narrow[COUNT], exponents[COUNT], to[COUNT];
    static double wide[WIDE], wide_exponents[WIDE], wide_to[WIDE];
    for (int i = 0; i < COUNT; i++) {
        const uint32_t bits = (uint32_t)i * 2654435769u;
        memcpy(narrow + i, &bits, sizeof bits);
        if (i >= COUNT / 2) narrow[i] = number(i, 0, 4) + number(i, 1, 15);
        exponents[i] = number(i, 2, 7);
    }
    for (int i = 0; i < WIDE; i++) {
        const uint64_t bits = (uint64_t)i * 0x9e3779b97f4a7c15u;
        memcpy(wide + i, &bits, sizeof bits);
        if (i >= WIDE / 2) wide[i] = number(i, 0, 4) + number(i, 1, 15) + number(i, 3, 30) / 1048576;
        wide_exponents[i] = number(i, 2, 7);
    }
    char name[64];
    for (int function = 0; function < FUNCTIONS; function++) {
        function_fp32(function, narrow, to, COUNT);
        snprintf(name, sizeof name, "function-%d-fp32", function);
        report(name, to, sizeof to);
        function_fp64(function, wide, wide_to, WIDE);
        snprintf(name, sizeof name, "function-%d-fp64", function);
        report(name, wide_to, sizeof wide_to);
    }
    power_fp32(narrow, exponents, to, COUNT);
    report("power-fp32", to, sizeof to);
    power_fp64(wide, wide_exponents, wide_to, WIDE);
    report("power-fp64", wide_to, sizeof wide_to);
}

/* Rows of a piece and more, with numbers left over; columns of a chain and more. */
static void report_sums(void) {
    enum { ROWS_ = 3, WIDTH = 5003, COUNT = ROWS_ * WIDTH };
    static double wide[COUNT], wide_to[COUNT];
    static uint16_t narrow_to[COUNT];
    static float to[COUNT];
    const float *x = numbers(COUNT, 0, 6), *slope = numbers(COUNT, 1, 7);
    const uint16_t *narrow = halves_of(COUNT, 0, 6), *narrow_slope = halves_of(COUNT, 1, 7);
    for (int i = 0; i < COUNT; i++) wide[i] = number(i, 0, 6) + number(i, 2, 40);
    const void *operands[] = {x, narrow, wide}, *slopes_of[] = {slope, narrow_slope, wide};
    void *results[] = {to, narrow_to, wide_to};
    const size_t sizes[] = {sizeof(float), sizeof(uint16_t), sizeof(double)};
    char name[64];
    for (int format = FP32; format <= FP64; format++) {
        row_sums(format, operands[format], results[format], ROWS_, WIDTH);
        snprintf(name, sizeof name, "row-sums-%d", format);
        report(name, results[format], ROWS_ * sizes[format]);
        column_sums(format, operands[format], results[format], WIDTH, ROWS_, 0, ROWS_);
        snprintf(name, sizeof name, "column-sums-%d", format);
        report(name, results[format], ROWS_ * sizes[format]);
        for (int logarithm = 0; logarithm < 2; logarithm++) {
            if (softmax_rows(format, logarithm, operands[format], results[format], ROWS_, WIDTH)) exit(1);
            snprintf(name, sizeof name, "softmax-%d-%d", format, logarithm);
            report(name, results[format], COUNT * sizes[format]);
            if (softmax_slopes(format, logarithm, slopes_of[format], operands[format], results[format], ROWS_, WIDTH)) exit(1);
            snprintf(name, sizeof name, "softmax-slope-%d-%d", format, logarithm);
            report(name, results[format], COUNT * sizes[format]);
        }
        const int functions[] = {FUNCTION_SIGMOID, FUNCTION_TANH, FUNCTION_SILU_SLOPE, FUNCTION_GELU_SLOPE, FUNCTION_GELU_TANH_SLOPE};
        for (int i = 0; i < 5; i++) {
            slopes(format, functions[i], slopes_of[format], operands[format], results[format], COUNT);
            snprintf(name, sizeof name, "slope-%d-%d", format, functions[i]);
            report(name, results[format], COUNT * sizes[format]);
        }
    }
}

int main(void) {
    report_sums();
    report_products();
    report_attention();
    report_layer_step(0);
    report_layer_step(1);
    report_passes_over_memory();
    report_functions();
    return 0;
}
