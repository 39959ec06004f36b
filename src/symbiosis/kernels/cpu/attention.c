/* Decode attention over the blocks of the KV cache.

Plain reference: gather the blocks, then transformers' own attention. Here blocks are read in position, once for all queries
of a key head, and the heads of a token, which are adjacent, soon after each other: the kernel is bound by memory. Nothing
beyond the end of a sequence contributes. */
#include <float.h>
#include <math.h>

#include "numbers.h"

#define QUERIES 4
#define TOKENS 16            /* at a time */
#define KEYS 8               /* whose scores are summed at once */
#define VECTORS (16 / LANES) /* of values in registers */
#define MAX_WIDTH 256
#define LINE 64 /* bytes */
#define UNROLL _Pragma("GCC unroll 16") /* constant counts: sums stay in registers */

typedef struct {
    int64_t sequences, heads, key_heads, width, block_size, max_blocks, window; /* no window: 0 */
    int64_t q_row, q_head;                                                /* strides */
    const int64_t *rows, *positions, *blocks;
    const void *q, *keys, *values; /* keys and values [slots, key heads, width] */
    void *out;                     /* [sequences, heads, width] */
    float scale, cap;              /* no cap: 0 */
} Attention;

/* Queries of some key heads over one sequence, and what they have found so far. */
typedef struct {
    float *q, *out;      /* [queries, width] */
    float *best, *total; /* greatest score and sum of weights, [queries] */
} State;

/* Scores of a query with TOKENS keys. */
INLINE void score(const float *q, const float *const *keys, int64_t width, float *scores) {
    for (int token = 0; token < TOKENS; token += KEYS) {
        Vec sums[KEYS];
        UNROLL for (int i = 0; i < KEYS; i++) sums[i] = (Vec){0};
        for (int64_t d = 0; d < width; d += LANES) {
            const Vec query = load_float(q + d);
            UNROLL for (int i = 0; i < KEYS; i++) sums[i] += query * load_float(keys[token + i] + d);
        }
        UNROLL for (int i = 0; i < KEYS; i += LANES) store_float(scores + token + i, sums_of(sums + i));
    }
}

/* Weighted sums of values for up to four queries: out = out * rescale + weights * values, of some columns. */
INLINE void accumulate(const float (*weights)[TOKENS], const float *const *values, int64_t tokens, int64_t width, int64_t d,
                       const int queries, const int vectors, const float *rescale, float *out) {
    Vec sums[QUERIES][VECTORS];
    for (int g = 0; g < queries; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = load_float(out + g * width + d + v * LANES) * rescale[g];
    for (int64_t token = 0; token < tokens; token++) {
        Vec value[VECTORS];
        for (int v = 0; v < vectors; v++) value[v] = load_float(values[token] + d + v * LANES);
        for (int g = 0; g < queries; g++)
            for (int v = 0; v < vectors; v++) sums[g][v] += value[v] * weights[g][token];
    }
    for (int g = 0; g < queries; g++)
        for (int v = 0; v < vectors; v++) store_float(out + g * width + d + v * LANES, sums[g][v]);
}

/* A step of online softmax: the queries from `query` on, four at most, over `count` tokens. */
INLINE void attend(const Attention *args, const State *state, int64_t query, const int queries, const float **keys,
                   const float *const *values, int64_t count) {
    const int64_t width = args->width;
    float scores[QUERIES][TOKENS], rescale[QUERIES];
    for (int64_t i = count; i < TOKENS; i++) keys[i] = keys[0]; /* loaded, but masked below */
    for (int g = 0; g < queries; g++) {
        score(state->q + (query + g) * width, keys, width, scores[g]);
        if (args->cap)
            for (int64_t i = 0; i < count; i++) scores[g][i] = args->cap * tanhf(scores[g][i] * args->scale / args->cap);
        for (int64_t i = count; i < TOKENS; i++) scores[g][i] = -INFINITY;
        float highest = state->best[query + g];
        for (int i = 0; i < TOKENS; i++) highest = scores[g][i] > highest ? scores[g][i] : highest;
        rescale[g] = expf(state->best[query + g] - highest);
        state->best[query + g] = highest;
        Vec sum = {0};
        for (int i = 0; i < TOKENS; i += LANES) {
            const Vec weight = exp_of(load_float(scores[g] + i) - highest);
            store_float(scores[g] + i, weight);
            sum += weight;
        }
        state->total[query + g] = state->total[query + g] * rescale[g] + sum_of(sum);
    }
    float *out = state->out + query * width;
    int64_t d = 0;
    for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
        accumulate(scores, values, count, width, d, queries, VECTORS, rescale, out);
    for (; d < width; d += LANES) accumulate(scores, values, count, width, d, queries, 1, rescale, out);
}

/* The numbers of the next TOKENS tokens' slots at most, up to `last`. Returns how many there are. */
INLINE int64_t find_slots(const Attention *args, int64_t sequence, int64_t token, int64_t last, int64_t *slots) {
    const int64_t size = args->block_size, *blocks = args->blocks + sequence * args->max_blocks;
    int64_t block = token / size, at = token % size, count = 0;
    for (; count < TOKENS && token + count <= last; count++) {
        slots[count] = blocks[block] * size + at;
        if (++at == size) at = 0, block++;
    }
    return count;
}

#define NUMBER float
#include "attention.h"
#undef NUMBER
#define NUMBER bfloat16
#include "attention.h"
