/* Included once for each NUMBER type: see attention.c. */
/* Scores of up to four queries with VECTORS keys. */
INLINE void OF(score)(const float *q, const NUMBER *const *keys, int64_t width, const int queries, float *scores) {
    Vec sums[QUERIES][VECTORS] = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        Vec key[VECTORS];
        for (int token = 0; token < VECTORS; token++) key[token] = OF(load)(keys[token] + d);
        for (int g = 0; g < queries; g++) {
            const Vec query = load_float(q + g * width + d);
            for (int token = 0; token < VECTORS; token++) sums[g][token] += query * key[token];
        }
    }
    for (int g = 0; g < queries; g++)
        for (int token = 0; token < VECTORS; token++) scores[g * TOKENS + token] = sum_of(sums[g][token]);
}

/* Weighted sums of values for up to four queries: out = out * rescale + weights * values, of some columns. */
INLINE void OF(accumulate)(const float (*weights)[TOKENS], const NUMBER *const *values, int64_t tokens, int64_t width, int64_t d,
                           const int queries, const int vectors, const float *rescale, float *out) {
    Vec sums[QUERIES][VECTORS];
    for (int g = 0; g < queries; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = load_float(out + g * width + d + v * LANES) * rescale[g];
    for (int64_t token = 0; token < tokens; token++) {
        Vec value[VECTORS];
        for (int v = 0; v < vectors; v++) value[v] = OF(load)(values[token] + d + v * LANES);
        for (int g = 0; g < queries; g++)
            for (int v = 0; v < vectors; v++) sums[g][v] += value[v] * weights[g][token];
    }
    for (int g = 0; g < queries; g++)
        for (int v = 0; v < vectors; v++) store_float(out + g * width + d + v * LANES, sums[g][v]);
}

/* Attention of up to four queries of one key head over one sequence, by online softmax. */
INLINE void OF(queries)(const Attention *args, int64_t sequence, int64_t head, int64_t query, const int queries) {
    const int64_t width = args->width, position = args->positions[sequence], size = args->block_size;
    const int64_t *blocks = args->blocks + sequence * args->max_blocks;
    const int64_t offset = head * width, stride = args->key_heads * width;
    const NUMBER *keys = (const NUMBER *)args->keys + offset, *values = (const NUMBER *)args->values + offset;
    float q[QUERIES * MAX_WIDTH], out[QUERIES * MAX_WIDTH] = {0}, best[QUERIES], total[QUERIES] = {0};
    for (int g = 0; g < queries; g++) {
        const NUMBER *from = (const NUMBER *)args->q + args->rows[sequence] * args->q_row + (query + g) * args->q_head;
        for (int64_t d = 0; d < width; d++) q[g * width + d] = OF(one)(from + d) * (args->cap ? 1.0f : args->scale);
        best[g] = -FLT_MAX; /* not infinite: inf - inf is NaN */
    }
    int64_t token = args->window && position + 1 > args->window ? position + 1 - args->window : 0;
    while (token <= position) {
        const NUMBER *value_of[TOKENS], *key_of[TOKENS];
        float scores[QUERIES][TOKENS], rescale[QUERIES];
        int64_t count = 0;
        for (; count < TOKENS && token <= position; count++, token++) {
            const int64_t slot = blocks[token / size] * size + token % size;
            key_of[count] = keys + slot * stride;
            value_of[count] = values + slot * stride;
        }
        for (int64_t i = count; i < TOKENS; i++) key_of[i] = key_of[0]; /* loaded, but masked below */
        for (int64_t i = 0; i < count; i += VECTORS)
            OF(score)(q, key_of + i, width, queries, &scores[0][i]);
        for (int g = 0; g < queries; g++) {
            if (args->cap)
                for (int64_t i = 0; i < count; i++) scores[g][i] = args->cap * tanhf(scores[g][i] * args->scale / args->cap);
            for (int64_t i = count; i < TOKENS; i++) scores[g][i] = -INFINITY;
            float highest = best[g];
            for (int i = 0; i < TOKENS; i++) highest = scores[g][i] > highest ? scores[g][i] : highest;
            rescale[g] = expf(best[g] - highest);
            best[g] = highest;
            Vec sum = {0};
            for (int i = 0; i < TOKENS; i += LANES) {
                const Vec weight = exp_of(load_float(scores[g] + i) - highest);
                store_float(scores[g] + i, weight);
                sum += weight;
            }
            total[g] = total[g] * rescale[g] + sum_of(sum);
        }
        int64_t d = 0;
        for (; d + VECTORS * LANES <= width; d += VECTORS * LANES)
            OF(accumulate)(scores, value_of, count, width, d, queries, VECTORS, rescale, out);
        for (; d < width; d += LANES) OF(accumulate)(scores, value_of, count, width, d, queries, 1, rescale, out);
    }
    for (int g = 0; g < queries; g++) {
        NUMBER *to = (NUMBER *)args->out + (sequence * args->heads + query + g) * width;
        for (int64_t d = 0; d < width; d++) OF(put)(to + d, out[g * width + d] / total[g]);
    }
}

EVERY_CPU
static void OF(head)(const Attention *args, int64_t sequence, int64_t head) {
    const int64_t group = args->heads / args->key_heads, last = (head + 1) * group;
    for (int64_t query = head * group; query < last; query += QUERIES) {
        switch (last - query) { /* constant counts: sums stay in registers */
        case 1: OF(queries)(args, sequence, head, query, 1); break;
        case 2: OF(queries)(args, sequence, head, query, 2); break;
        case 3: OF(queries)(args, sequence, head, query, 3); break;
        default: OF(queries)(args, sequence, head, query, QUERIES);
        }
    }
}

void OF(symbiosis_attention)(const Attention *args, int threads) {
    const int64_t count = args->sequences * args->key_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) OF(head)(args, i / args->key_heads, i % args->key_heads);
}
