/* Decode attention over a long KV cache in host memory: one query token a sequence, the context split among all cores.

Plain reference: flash_decoding.py. The kernel is bound by memory: it reads each key and each value once, for all queries of
its head, in the order in which they lie. A task is a range of tokens of one key head. It leaves a partial result: the
greatest score, the sum of the weights, and the weighted sum of the values. The partial results of a head are combined at
the end. Tokens outside of a sequence's range are not read, so NaN there is harmless.

Numbers of the cache are float32, bfloat16, or int8 with a scale for each token and head. Sums are float32. */
#include <float.h>
#include <math.h>

#include "numbers.h"

#define QUERIES 4 /* at a time */
#define TOKENS 32 /* of a tile: its keys and values stay in the first cache */
#define COLUMNS 16
#define PARTS (COLUMNS / LANES)
#define CHAINS 8 /* independent sums, which hide the latency of a product */
#define LINE 64  /* bytes */
#define UNROLL _Pragma("GCC unroll 16") /* constant counts: sums stay in registers */

enum { FLOAT, BFLOAT16, INT8 };

typedef struct {
    int64_t sequences, key_heads, group, width, split;
    int64_t q_sequence, q_head; /* strides, in numbers */
    int64_t k_sequence, k_head, k_token, v_sequence, v_head, v_token;
    int64_t scale_sequence, scale_head;
    int64_t q_kind, kv_kind;
    const int64_t *starts, *ends;  /* tokens of each sequence */
    const int64_t *first_tasks;    /* of each sequence, and the number of all */
    const void *q, *keys, *values; /* the numbers of a token are contiguous */
    const float *key_scales, *value_scales;
    void *out;      /* [sequences, key heads * group, width], contiguous, of the queries' kind */
    float *partial; /* [tasks, PARTIAL] */
    float scale, cap; /* no cap: 0 */
} FlashDecoding;

/* Floats of a task: sums [group, width], queries [group, width], greatest score [group], sum of weights [group]. */
#define PARTIAL(args) ((args)->group * (2 * (args)->width + 2))

/* COLUMNS numbers as vectors, in the order of `place_of`. */
INLINE void load_columns(const void *from, int64_t at, const int kind, Vec *to) {
    if (kind == FLOAT) {
        UNROLL for (int p = 0; p < PARTS; p++) to[p] = load_float((const float *)from + at + p * LANES);
    } else if (kind == BFLOAT16) {
#if defined(__aarch64__)
        const uint16x8_t zero = vdupq_n_u16(0); /* interleaved with zeros: shifts have one pipe, permutations two */
        UNROLL for (int half = 0; half < 2; half++) {
            const uint16x8_t bits = vld1q_u16((const bfloat16 *)from + at + 8 * half);
            to[2 * half] = (Vec)vzip1q_u16(zero, bits), to[2 * half + 1] = (Vec)vzip2q_u16(zero, bits);
        }
#else
        UNROLL for (int p = 0; p < PARTS; p++) to[p] = load_bfloat16((const bfloat16 *)from + at + p * LANES);
#endif
    } else {
#if defined(__aarch64__)
        const int8x16_t bytes = vld1q_s8((const int8_t *)from + at);
        const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
        to[0] = (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), to[1] = (Vec)vcvtq_f32_s32(vmovl_high_s16(low));
        to[2] = (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), to[3] = (Vec)vcvtq_f32_s32(vmovl_high_s16(high));
#elif defined(__x86_64__)
        typedef uint32_t Quarters __attribute__((vector_size(COLUMNS)));
        Quarters found; /* four numbers in each: shifts select, since GCC widens vectors by many permutations */
        memcpy(&found, (const int8_t *)from + at, sizeof found);
        const UVec bytes = {found[0], found[1], found[2], found[3], found[0], found[1], found[2], found[3]};
        const UVec low = {24, 24, 24, 24, 16, 16, 16, 16}, high = {8, 8, 8, 8, 0, 0, 0, 0};
        to[0] = __builtin_convertvector((IVec)(bytes << low) >> 24, Vec);
        to[1] = __builtin_convertvector((IVec)(bytes << high) >> 24, Vec);
#else
        UNROLL for (int c = 0; c < COLUMNS; c++) to[c / LANES][c % LANES] = ((const int8_t *)from)[at + c];
#endif
    }
}

/* Where `load_columns` puts a column: queries and sums have the same order. */
INLINE int64_t place_of(int64_t column, const int64_t kind) {
#if defined(__x86_64__)
    const int64_t at = column % COLUMNS;
    if (kind == INT8) return column - at + at % 4 * 4 + at / 4;
#endif
    return column;
}

INLINE int64_t size_of(const int kind) { return kind == FLOAT ? 4 : kind == BFLOAT16 ? 2 : 1; }

INLINE void prefetch(const char *from, int64_t bytes) {
    int64_t at = 0;
    for (; at + 4 * LINE <= bytes; at += 4 * LINE)
        UNROLL for (int i = 0; i < 4; i++) __builtin_prefetch(from + at + i * LINE);
    for (; at < bytes; at += LINE) __builtin_prefetch(from + at);
}

/* Scores of `queries` queries with CHAINS / queries keys. */
INLINE void score(const float *q, const char *keys, int64_t stride, int64_t width, const int kind, const int queries,
                  float *scores) {
    enum { MOST = CHAINS };
    const int count = queries == 1 ? CHAINS : queries == 2 ? CHAINS / 2 : CHAINS / 4;
    Vec sums[QUERIES][MOST];
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int i = 0; i < count; i++) sums[g][i] = (Vec){0};
    for (int64_t d = 0; d < width; d += COLUMNS)
        UNROLL for (int i = 0; i < count; i++) {
            Vec key[PARTS];
            load_columns(keys + i * stride, d, kind, key);
            UNROLL for (int g = 0; g < queries; g++)
                UNROLL for (int p = 0; p < PARTS; p++) sums[g][i] += load_float(q + g * width + d + p * LANES) * key[p];
        }
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int i = 0; i < count; i++) scores[g * TOKENS + i] = sum_of(sums[g][i]);
}

/* out = out * rescale + weights * values, for `blocks` times COLUMNS columns from `d` on. */
INLINE void accumulate(const float *weights, const char *values, int64_t stride, int64_t tokens, int64_t width, int64_t d,
                       const int kind, const int queries, const int blocks, const float *rescale, float *out,
                       const char *ahead, int64_t ahead_stride, int64_t ahead_bytes) {
    Vec sums[QUERIES][4 * PARTS];
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int v = 0; v < blocks * PARTS; v++) sums[g][v] = load_float(out + g * width + d + v * LANES) * rescale[g];
    for (int64_t token = 0; token < tokens; token++) {
        prefetch(ahead + token * ahead_stride, ahead_bytes);
        UNROLL for (int b = 0; b < blocks; b++) {
            Vec value[PARTS];
            load_columns(values + token * stride, d + b * COLUMNS, kind, value);
            UNROLL for (int g = 0; g < queries; g++)
                UNROLL for (int p = 0; p < PARTS; p++) sums[g][b * PARTS + p] += value[p] * weights[g * TOKENS + token];
        }
    }
    UNROLL for (int g = 0; g < queries; g++)
        UNROLL for (int v = 0; v < blocks * PARTS; v++) store_float(out + g * width + d + v * LANES, sums[g][v]);
}

/* The greatest score of a tile, or `least` if none is greater. NaN counts as none: it stays in the weights. */
INLINE float max_of(const float *scores, float least) {
    Vec most = (Vec){0} + least;
    for (int i = 0; i < TOKENS; i += LANES) {
        const Vec these = load_float(scores + i);
        const IVec greater = these > most;
        most = (Vec)((greater & (IVec)these) | (~greater & (IVec)most));
    }
    for (int i = 0; i < LANES; i++) least = most[i] > least ? most[i] : least;
    return least;
}

typedef struct {
    const char *keys, *values;               /* of the tile's first token */
    const float *key_scales, *value_scales; /* the same; null without scales */
    int64_t tokens, left;                    /* of the tile, and in the task after it */
} Tile;

/* One tile for some queries of its head, by online softmax. */
INLINE void tile_queries(const FlashDecoding *args, const Tile *tile, const int kind, const int queries, const int is_first,
                         const float *q, float *out, float *best, float *total) {
    const int64_t width = args->width, bytes = width * size_of(kind);
    const int64_t k_stride = args->k_token * size_of(kind), v_stride = args->v_token * size_of(kind);
    const int step = queries == 1 ? CHAINS : queries == 2 ? CHAINS / 2 : CHAINS / 4;
    float scores[QUERIES * TOKENS], rescale[QUERIES];
    int64_t i = 0;
    for (; i + step <= tile->tokens; i += step) {
        if (is_first)
            for (int ahead = 0; ahead < step; ahead++) prefetch(tile->values + (i + ahead) * v_stride, bytes);
        score(q, tile->keys + i * k_stride, k_stride, width, kind, queries, scores + i);
    }
    for (; i < tile->tokens; i++) { /* the rest of the last tile, key by key: keys after the end are not read */
        float alone[QUERIES * TOKENS];
        score(q, tile->keys + i * k_stride, 0, width, kind, queries, alone);
        for (int g = 0; g < queries; g++) scores[g * TOKENS + i] = alone[g * TOKENS];
    }
    for (int g = 0; g < queries; g++) {
        float *row = scores + g * TOKENS, highest = best[g];
        if (tile->key_scales)
            for (i = 0; i < tile->tokens; i++) row[i] *= tile->key_scales[i];
        if (args->cap)
            for (i = 0; i < tile->tokens; i++) row[i] = args->cap * tanhf(row[i] * args->scale / args->cap);
        for (i = tile->tokens; i < TOKENS; i++) row[i] = -INFINITY;
        highest = max_of(row, highest);
        rescale[g] = expf(best[g] - highest);
        best[g] = highest;
        Vec sum = {0};
        for (i = 0; i < TOKENS; i += LANES) {
            const Vec weight = exp_of(load_float(row + i) - highest);
            store_float(row + i, weight);
            sum += weight;
        }
        total[g] = total[g] * rescale[g] + sum_of(sum);
        if (tile->value_scales)
            for (i = 0; i < tile->tokens; i++) row[i] *= tile->value_scales[i];
    }
    /* the keys of the next tile come while the first columns of these values are summed */
    const char *ahead = tile->keys + TOKENS * k_stride;
    int64_t ahead_bytes = is_first && tile->left >= TOKENS ? bytes : 0;
    const int blocks = queries == 1 ? 4 : queries == 2 ? 2 : 1;
    int64_t d = 0;
    for (; d + blocks * COLUMNS <= width; d += blocks * COLUMNS, ahead_bytes = 0)
        accumulate(scores, tile->values, v_stride, tile->tokens, width, d, kind, queries, blocks, rescale, out, ahead,
                   k_stride, ahead_bytes);
    for (; d < width; d += COLUMNS, ahead_bytes = 0)
        accumulate(scores, tile->values, v_stride, tile->tokens, width, d, kind, queries, 1, rescale, out, ahead, k_stride,
                   ahead_bytes);
}

INLINE void tokens_of(const FlashDecoding *args, int64_t sequence, int64_t head, int64_t start, int64_t end, const int kind,
                      float *partial) {
    const int64_t width = args->width, group = args->group, size = size_of(kind);
    float *out = partial, *q = out + group * width, *best = q + group * width, *total = best + group;
    const char *keys = (const char *)args->keys + (sequence * args->k_sequence + head * args->k_head) * size;
    const char *values = (const char *)args->values + (sequence * args->v_sequence + head * args->v_head) * size;
    const int64_t scales = sequence * args->scale_sequence + head * args->scale_head;
    for (int64_t token = start; token < end; token += TOKENS) {
        const int64_t count = end - token < TOKENS ? end - token : TOKENS;
        const Tile tile = {
            keys + token * args->k_token * size,
            values + token * args->v_token * size,
            args->key_scales ? args->key_scales + scales + token : 0,
            args->value_scales ? args->value_scales + scales + token : 0,
            count,
            end - token - count,
        };
        for (int64_t g = 0; g < group; g += QUERIES) { /* constant counts: sums stay in registers */
            float *const o = out + g * width, *const b = best + g, *const t = total + g;
            const float *const x = q + g * width;
            switch (group - g) {
            case 1: tile_queries(args, &tile, kind, 1, g == 0, x, o, b, t); break;
            case 2: tile_queries(args, &tile, kind, 2, g == 0, x, o, b, t); break;
            case 3: /* two and one: three sums for each key would not divide CHAINS */
                tile_queries(args, &tile, kind, 2, g == 0, x, o, b, t);
                tile_queries(args, &tile, kind, 1, 0, x + 2 * width, o + 2 * width, b + 2, t + 2);
                break;
            default: tile_queries(args, &tile, kind, QUERIES, g == 0, x, o, b, t);
            }
        }
    }
}

INLINE float one_of(const void *from, int64_t at, const int64_t kind) {
    return kind == FLOAT ? ((const float *)from)[at] : one_bfloat16((const bfloat16 *)from + at);
}

EVERY_CPU
static void run_task(const FlashDecoding *args, int64_t task) {
    int64_t sequence = 0;
    while (task >= args->first_tasks[sequence + 1]) sequence++;
    const int64_t width = args->width, group = args->group, index = task - args->first_tasks[sequence];
    const int64_t splits = (args->first_tasks[sequence + 1] - args->first_tasks[sequence]) / args->key_heads;
    const int64_t head = index / splits, start = args->starts[sequence] + index % splits * args->split;
    const int64_t last = args->ends[sequence], end = start + args->split < last ? start + args->split : last;
    float *partial = args->partial + task * PARTIAL(args), *q = partial + group * width;
    memset(partial, 0, sizeof(float) * PARTIAL(args));
    for (int64_t g = 0; g < group; g++) {
        const int64_t from = sequence * args->q_sequence + (head * group + g) * args->q_head;
        const float factor = args->cap ? 1.0f : args->scale;
        for (int64_t d = 0; d < width; d++)
            q[g * width + place_of(d, args->kv_kind)] = one_of(args->q, from + d, args->q_kind) * factor;
        partial[2 * group * width + g] = -FLT_MAX; /* not infinite: inf - inf is NaN */
    }
    switch (args->kv_kind) {
    case FLOAT: tokens_of(args, sequence, head, start, end, FLOAT, partial); break;
    case BFLOAT16: tokens_of(args, sequence, head, start, end, BFLOAT16, partial); break;
    default: tokens_of(args, sequence, head, start, end, INT8, partial);
    }
}

/* The result of one query head, from the partial results of its splits. */
static void combine(const FlashDecoding *args, int64_t sequence, int64_t query) {
    const int64_t width = args->width, group = args->group, head = query / group, g = query % group, size = PARTIAL(args);
    const int64_t splits = (args->first_tasks[sequence + 1] - args->first_tasks[sequence]) / args->key_heads;
    const float *first = args->partial + (args->first_tasks[sequence] + head * splits) * size;
    const int64_t at_best = 2 * group * width + g, at_total = at_best + group;
    const int64_t to = (sequence * args->key_heads * group + query) * width;
    float best = -FLT_MAX, total = 0;
    for (int64_t i = 0; i < splits; i++) best = first[i * size + at_best] > best ? first[i * size + at_best] : best;
    for (int64_t i = 0; i < splits; i++) total += first[i * size + at_total] * expf(first[i * size + at_best] - best);
    for (int64_t d = 0; d < width; d += COLUMNS) {
        float sums[COLUMNS] = {0};
        for (int64_t i = 0; i < splits; i++) {
            const float weight = expf(first[i * size + at_best] - best);
            for (int c = 0; c < COLUMNS; c++) sums[c] += weight * first[i * size + g * width + place_of(d + c, args->kv_kind)];
        }
        for (int c = 0; c < COLUMNS; c++) {
            if (args->q_kind == FLOAT) ((float *)args->out)[to + d + c] = sums[c] / total;
            else put_bfloat16((bfloat16 *)args->out + to + d + c, sums[c] / total);
        }
    }
}

void symbiosis_flash_decoding(const FlashDecoding *args, int threads) {
    const int64_t tasks = args->first_tasks[args->sequences], heads = args->key_heads * args->group;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; i++) run_task(args, i);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < args->sequences * heads; i++) combine(args, i / heads, i % heads);
    }
}

EVERY_CPU
static uint64_t sum_words(const char *from, int64_t words) {
    typedef uint64_t Words __attribute__((vector_size(64)));
    Words sums[4] = {0};
    for (int64_t i = 0; i + 32 <= words; i += 32)
        for (int k = 0; k < 4; k++) {
            Words loaded;
            memcpy(&loaded, from + 8 * (i + 8 * k), sizeof loaded);
            sums[k] += loaded;
        }
    sums[0] += sums[1] + sums[2] + sums[3];
    uint64_t sum = 0;
    for (int k = 0; k < 8; k++) sum += sums[0][k];
    return sum;
}

/* The sum of all words, for the benchmark: what reading this memory costs at least. */
uint64_t symbiosis_read_memory(const char *from, int64_t bytes, int threads) {
    const int64_t piece = 1 << 20, pieces = bytes / piece;
    uint64_t sum = 0;
#pragma omp parallel for schedule(dynamic) num_threads(threads) reduction(+ : sum)
    for (int64_t i = 0; i < pieces; i++) sum += sum_words(from + i * piece, piece / 8);
    return sum;
}
