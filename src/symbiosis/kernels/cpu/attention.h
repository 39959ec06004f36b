/* Included once for each NUMBER type: see attention.c. */
/* Rows of keys or values of a head as floats. bfloat16 is converted once for all queries. */
INLINE void OF(read)(const NUMBER *from, const int64_t *slots, int64_t count, int64_t stride, int64_t width, float *converted,
                     const float **rows) {
    for (int64_t i = 0; i < count; i++) {
        const NUMBER *row = from + slots[i] * stride;
        rows[i] = (const float *)row;
        if (sizeof(NUMBER) == sizeof(float)) continue;
        rows[i] = converted + i * width;
        for (int64_t d = 0; d < width; d += LANES) store_float(converted + i * width + d, OF(load)(row + d));
    }
}

INLINE void OF(fetch)(const NUMBER *from, const int64_t *slots, int64_t count, int64_t stride, int64_t width) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < width; d += LINE / (int64_t)sizeof(NUMBER)) __builtin_prefetch(from + slots[i] * stride + d);
}

/* Attention of the queries of the key heads `first` to `last` over one sequence. */
EVERY_CPU
static void OF(heads)(const Attention *args, int64_t sequence, int64_t first, int64_t last) {
    const int64_t width = args->width, stride = args->key_heads * width, position = args->positions[sequence];
    const int64_t group = args->heads / args->key_heads, queries = (last - first) * group;
    float q[queries * width], out[queries * width], best[queries], total[queries];
    const State state = {q, out, best, total};
    for (int64_t g = 0; g < queries; g++) {
        const NUMBER *from = (const NUMBER *)args->q + args->rows[sequence] * args->q_row + (first * group + g) * args->q_head;
        for (int64_t d = 0; d < width; d++) {
            q[g * width + d] = OF(one)(from + d) * (args->cap ? 1.0f : args->scale);
            out[g * width + d] = 0.0f;
        }
        best[g] = -FLT_MAX; /* not infinite: inf - inf is NaN */
        total[g] = 0.0f;
    }
    float converted[2][TOKENS * MAX_WIDTH];
    int64_t slots[2][TOKENS], *now = slots[0], *next = slots[1];
    int64_t token = args->window && position + 1 > args->window ? position + 1 - args->window : 0;
    int64_t count = find_slots(args, sequence, token, position, now);
    while (count) {
        token += count;
        const int64_t next_count = find_slots(args, sequence, token, position, next);
        for (int64_t head = first; head < last; head++) {
            const NUMBER *from_keys = (const NUMBER *)args->keys + head * width;
            const NUMBER *from_values = (const NUMBER *)args->values + head * width;
            const float *keys[TOKENS], *values[TOKENS];
            OF(fetch)(from_keys, next, next_count, stride, width);
            OF(read)(from_keys, now, count, stride, width, converted[0], keys);
            OF(fetch)(from_values, next, next_count, stride, width);
            OF(read)(from_values, now, count, stride, width, converted[1], values);
            const int64_t end = (head - first + 1) * group;
            for (int64_t query = end - group; query < end; query += QUERIES) {
                switch (end - query) { /* constant counts: sums stay in registers */
                case 1: attend(args, &state, query, 1, keys, values, count); break;
                case 2: attend(args, &state, query, 2, keys, values, count); break;
                case 3: attend(args, &state, query, 3, keys, values, count); break;
                default: attend(args, &state, query, QUERIES, keys, values, count);
                }
            }
        }
        int64_t *const done = now;
        now = next, next = done, count = next_count;
    }
    for (int64_t g = 0; g < queries; g++) {
        NUMBER *to = (NUMBER *)args->out + (sequence * args->heads + first * group + g) * width;
        for (int64_t d = 0; d < width; d++) OF(put)(to + d, out[g * width + d] / total[g]);
    }
}

void OF(symbiosis_attention)(const Attention *args, int threads) {
    /* all heads of a sequence are a task if that gives every thread several */
    const int64_t wanted = (4 * threads + args->sequences - 1) / args->sequences;
    const int64_t parts = threads == 1 ? 1 : wanted < args->key_heads ? wanted : args->key_heads;
    const int64_t count = args->sequences * parts;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) {
        const int64_t part = i % parts;
        OF(heads)(args, i / parts, part * args->key_heads / parts, (part + 1) * args->key_heads / parts);
    }
}
