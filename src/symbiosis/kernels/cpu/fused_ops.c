/* What a decoder layer does between its products, in float32: norms, rotary positions and the gate of its MLP.

Plain references: in between.py. A pass of a few dozen rows has so little of each
that their steps, one by one, take longer to begin than to do. */
#include <math.h>

#include "numbers.h"

#define ENOUGH 8192 /* numbers that a second thread is worth its waking for */

EVERY_PROCESSOR
static void normed(const float *x, const float *weight, float epsilon, int64_t width, float *to) {
    Vec squares = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load_float(x + i) * load_float(x + i);
    for (int64_t j = i; j < width; j++) sum += x[j] * x[j];
    const float factor = 1.0f / sqrtf((sum + sum_of(squares)) / (float)width + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store_float(to + i, load_float(x + i) * factor * load_float(weight + i));
    for (; i < width; i++) to[i] = x[i] * factor * weight[i];
}

void symbiosis_rms_norm_float(const float *x, int64_t rows, int64_t stride, int64_t width, const float *weight, float epsilon,
                              float *to, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > ENOUGH)
    for (int64_t row = 0; row < rows; row++) normed(x + row * stride, weight, epsilon, width, to + row * width);
}

EVERY_PROCESSOR
static void turned(const float *x, int64_t heads, int64_t width, const float *cos, const float *sin, float *restrict to) {
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++, x += width, to += width) {
        for (int64_t i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            to[i] = first * cos[i] - second * sin[i];
            to[i + half] = second * cos[i + half] + first * sin[i + half];
        }
    }
}

void symbiosis_rotary_float(const float *x, int64_t rows, int64_t stride, int64_t heads, int64_t width, const float *cos,
                            const float *sin, float *to, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * width > ENOUGH)
    for (int64_t row = 0; row < rows; row++)
        turned(x + row * stride, heads, width, cos + row * width, sin + row * width, to + row * heads * width);
}

EVERY_PROCESSOR
static void gated(const float *x, int64_t width, float *to) {
    const float *up = x + width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Vec gate = load_float(x + i);
        const Vec power = exp_of((Vec)((IVec)gate | INT32_MIN)); /* of minus its absolute value: never too large */
        const IVec negative = gate < 0.0f;
        const Vec share = (Vec)((negative & (IVec)power) | (~negative & (IVec)((Vec){0} + 1.0f))) / (power + 1.0f);
        store_float(to + i, gate * share * load_float(up + i));
    }
    for (; i < width; i++) to[i] = x[i] / (1.0f + expf(-x[i])) * up[i];
}

void symbiosis_gated_float(const float *x, int64_t rows, int64_t stride, int64_t width, float *to, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > ENOUGH)
    for (int64_t row = 0; row < rows; row++) gated(x + row * stride, width, to + row * width);
}
