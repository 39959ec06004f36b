/* Ops of a decoder layer between its products, in float32: RMS norm with and without a residual, rotary positions, SiLU of its MLP.

Plain references: in fused_ops.py. For a batch of a few dozen rows, dispatching torch's ops takes longer than computing
them. */
#include <math.h>

#include "numbers.h"

#define MIN_PARALLEL 8192 /* numbers, from which on a second thread pays off */

EVERY_CPU
static void rms_norm(const float *x, const float *weight, float epsilon, int64_t width, float *out) {
    Vec squares = {0};
    float sum = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load_float(x + i) * load_float(x + i);
    for (int64_t j = i; j < width; j++) sum += x[j] * x[j];
    const float factor = 1.0f / sqrtf((sum + sum_of(squares)) / (float)width + epsilon);
    for (i = 0; i + LANES <= width; i += LANES) store_float(out + i, load_float(x + i) * factor * load_float(weight + i));
    for (; i < width; i++) out[i] = x[i] * factor * weight[i];
}

void symbiosis_rms_norm_float(const float *x, int64_t rows, int64_t stride, int64_t width, const float *weight, float epsilon,
                              float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) rms_norm(x + row * stride, weight, epsilon, width, out + row * width);
}

EVERY_CPU
static void residual_norm(float *x, const float *delta, const float *weight, float epsilon, int64_t width, float *out) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store_float(x + i, load_float(x + i) + load_float(delta + i));
    for (; i < width; i++) x[i] += delta[i];
    rms_norm(x, weight, epsilon, width, out);
}

/* x += delta, and the norm of the sum. */
void symbiosis_residual_norm_float(float *x, int64_t rows, int64_t stride, int64_t width, const float *delta,
                                   const float *weight, float epsilon, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++)
        residual_norm(x + row * stride, delta + row * width, weight, epsilon, width, out + row * width);
}

EVERY_CPU
static void rotary(const float *x, int64_t heads, int64_t width, const float *cos, const float *sin, float *restrict out) {
    const int64_t half = width / 2;
    for (int64_t head = 0; head < heads; head++, x += width, out += width) {
        for (int64_t i = 0; i < half; i++) {
            const float first = x[i], second = x[i + half];
            out[i] = first * cos[i] - second * sin[i];
            out[i + half] = second * cos[i + half] + first * sin[i + half];
        }
    }
}

/* Queries are rotated, keys rotated into their slots of the KV cache, values copied there. */
void symbiosis_rope_and_store_float(const float *qkv, int64_t rows, int64_t stride, int64_t heads, int64_t key_heads,
                                    int64_t width, const float *cos, const float *sin, const int64_t *slots, float *keys,
                                    float *values, float *q_out, int threads) {
    const int64_t kept = key_heads * width;
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * stride > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) {
        const float *x = qkv + row * stride, *row_cos = cos + row * width, *row_sin = sin + row * width;
        rotary(x, heads, width, row_cos, row_sin, q_out + row * heads * width);
        rotary(x + heads * width, key_heads, width, row_cos, row_sin, keys + slots[row] * kept);
        memcpy(values + slots[row] * kept, x + (heads + key_heads) * width, kept * sizeof(float));
    }
}

EVERY_CPU
static void silu_mul(const float *x, int64_t width, float *out) {
    const float *up = x + width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Vec gate = load_float(x + i);
        const Vec power = exp_of((Vec)((IVec)gate | INT32_MIN)); /* of minus its absolute value: cannot overflow */
        const IVec negative = gate < 0.0f;
        const Vec sigmoid = (Vec)((negative & (IVec)power) | (~negative & (IVec)((Vec){0} + 1.0f))) / (power + 1.0f);
        store_float(out + i, gate * sigmoid * load_float(up + i));
    }
    for (; i < width; i++) out[i] = x[i] / (1.0f + expf(-x[i])) * up[i];
}

void symbiosis_silu_mul_float(const float *x, int64_t rows, int64_t stride, int64_t width, float *out, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > MIN_PARALLEL)
    for (int64_t row = 0; row < rows; row++) silu_mul(x + row * stride, width, out + row * width);
}
