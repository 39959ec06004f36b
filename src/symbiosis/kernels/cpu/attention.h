/* Included once for each kind of NUMBER: see attention.c. */
/* Scores of up to four queries with some keys. */
INLINE void OF(score)(const float *q, const NUMBER *const *keys, int64_t width, const int queries, float *scores) {
    Vec sums[QUERIES][TOGETHER] = {0};
    for (int64_t d = 0; d < width; d += LANES) {
        Vec key[TOGETHER];
        for (int token = 0; token < TOGETHER; token++) key[token] = OF(load)(keys[token] + d);
        for (int g = 0; g < queries; g++) {
            const Vec query = load_float(q + g * width + d);
            for (int token = 0; token < TOGETHER; token++) sums[g][token] += query * key[token];
        }
    }
    for (int g = 0; g < queries; g++)
        for (int token = 0; token < TOGETHER; token++) scores[g * TOKENS + token] = sum_of(sums[g][token]);
}

/* What up to four queries read from some numbers of the values of some tokens, added to what they have read. */
INLINE void OF(read)(const float (*shares)[TOKENS], const NUMBER *const *values, int64_t tokens, int64_t width, int64_t d,
                     const int queries, const int vectors, const float *kept, float *read) {
    Vec sums[QUERIES][TOGETHER];
    for (int g = 0; g < queries; g++)
        for (int v = 0; v < vectors; v++) sums[g][v] = load_float(read + g * width + d + v * LANES) * kept[g];
    for (int64_t token = 0; token < tokens; token++) {
        Vec value[TOGETHER];
        for (int v = 0; v < vectors; v++) value[v] = OF(load)(values[token] + d + v * LANES);
        for (int g = 0; g < queries; g++)
            for (int v = 0; v < vectors; v++) sums[g][v] += value[v] * shares[g][token];
    }
    for (int g = 0; g < queries; g++)
        for (int v = 0; v < vectors; v++) store_float(read + g * width + d + v * LANES, sums[g][v]);
}

/* All that up to four queries of one key head read from one sequence. */
INLINE void OF(queries)(const Attention *now, int64_t span, int64_t head, int64_t query, const int queries) {
    const int64_t width = now->width, place = now->places[span], size = now->page_size;
    const int64_t *pages = now->pages + span * now->most_pages;
    const int64_t offset = head * width, stride = now->key_heads * width;
    const NUMBER *keys = (const NUMBER *)now->keys + offset, *values = (const NUMBER *)now->values + offset;
    float q[QUERIES * MOST_WIDTH], read[QUERIES * MOST_WIDTH] = {0}, best[QUERIES], total[QUERIES] = {0};
    for (int g = 0; g < queries; g++) {
        const NUMBER *from = (const NUMBER *)now->q + now->rows[span] * now->q_row + (query + g) * now->q_head;
        for (int64_t d = 0; d < width; d++) q[g * width + d] = OF(one)(from + d) * (now->cap ? 1.0f : now->scale);
        best[g] = -FLT_MAX; /* not infinite: its difference to itself is a number */
    }
    int64_t token = now->window && place + 1 > now->window ? place + 1 - now->window : 0;
    while (token <= place) {
        const NUMBER *value_of[TOKENS], *key_of[TOKENS];
        float scores[QUERIES][TOKENS], kept[QUERIES];
        int64_t count = 0;
        for (; count < TOKENS && token <= place; count++, token++) {
            const int64_t slot = pages[token / size] * size + token % size;
            key_of[count] = keys + slot * stride;
            value_of[count] = values + slot * stride;
        }
        for (int64_t i = count; i < TOKENS; i++) key_of[i] = key_of[0]; /* not looked at, but read */
        for (int64_t i = 0; i < count; i += TOGETHER)
            OF(score)(q, key_of + i, width, queries, &scores[0][i]);
        for (int g = 0; g < queries; g++) {
            if (now->cap)
                for (int64_t i = 0; i < count; i++) scores[g][i] = now->cap * tanhf(scores[g][i] * now->scale / now->cap);
            for (int64_t i = count; i < TOKENS; i++) scores[g][i] = -INFINITY;
            float highest = best[g];
            for (int i = 0; i < TOKENS; i++) highest = scores[g][i] > highest ? scores[g][i] : highest;
            kept[g] = expf(best[g] - highest);
            best[g] = highest;
            Vec sum = {0};
            for (int i = 0; i < TOKENS; i += LANES) {
                const Vec share = exp_of(load_float(scores[g] + i) - highest);
                store_float(scores[g] + i, share);
                sum += share;
            }
            total[g] = total[g] * kept[g] + sum_of(sum);
        }
        int64_t d = 0;
        for (; d + TOGETHER * LANES <= width; d += TOGETHER * LANES)
            OF(read)(scores, value_of, count, width, d, queries, TOGETHER, kept, read);
        for (; d < width; d += LANES) OF(read)(scores, value_of, count, width, d, queries, 1, kept, read);
    }
    for (int g = 0; g < queries; g++) {
        NUMBER *to = (NUMBER *)now->out + (span * now->heads + query + g) * width;
        for (int64_t d = 0; d < width; d++) OF(put)(to + d, read[g * width + d] / total[g]);
    }
}

EVERY_PROCESSOR
static void OF(head)(const Attention *now, int64_t span, int64_t head) {
    const int64_t group = now->heads / now->key_heads, last = (head + 1) * group;
    for (int64_t query = head * group; query < last; query += QUERIES) {
        switch (last - query) { /* each with its numbers in registers */
        case 1: OF(queries)(now, span, head, query, 1); break;
        case 2: OF(queries)(now, span, head, query, 2); break;
        case 3: OF(queries)(now, span, head, query, 3); break;
        default: OF(queries)(now, span, head, query, QUERIES);
        }
    }
}

void OF(symbiosis_attention)(const Attention *now, int threads) {
    const int64_t count = now->spans * now->key_heads;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) OF(head)(now, i / now->key_heads, i % now->key_heads);
}
