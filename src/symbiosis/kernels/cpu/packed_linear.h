/* The kernel of one kind of processor: see packed_linear.c, which defines CPU, TARGET, BYTES, PARTS, ROWS, FEW, DEPTH, AHEAD. */
#define HERE(name) PASTE(name, CPU)
#define WIDTH (BYTES / 4)
#define PANEL (PARTS * WIDTH)

typedef float HERE(Numbers) __attribute__((vector_size(BYTES)));
typedef uint32_t HERE(Bits) __attribute__((vector_size(BYTES)));
typedef uint16_t HERE(HalfBits) __attribute__((vector_size(BYTES / 2)));

INLINE HERE(Numbers) HERE(load)(const char *from, const int is_half) {
    HERE(Numbers) found;
#if defined(__aarch64__)
    if (is_half) return load_bfloat16((const bfloat16 *)from);
#else
    if (is_half) {
        HERE(HalfBits) bits;
        memcpy(&bits, from, sizeof bits);
        return (HERE(Numbers))(__builtin_convertvector(bits, HERE(Bits)) << 16);
    }
#endif
    memcpy(&found, from, sizeof found);
    return found;
}

/* Write a row of finished sums. */
INLINE void HERE(finish)(const PackedLinear *args, int64_t row, int64_t column, const float *sums, const int is_half) {
    const int64_t rest = args->outputs - column, columns = rest < PANEL ? rest : PANEL;
    for (int64_t i = 0; i < columns; i++) {
        const float found = args->bias ? sums[i] + args->bias[column + i] : sums[i];
        if (is_half)
            put_bfloat16((bfloat16 *)args->y + row * args->outputs + column + i, found);
        else
            put_float((float *)args->y + row * args->outputs + column + i, found);
    }
}

/* A block of rows with some panels, over `depth` inputs from `k` on. Meanwhile a line is fetched every `step` bytes from
   `fetched` on. */
INLINE void HERE(tile)(const PackedLinear *args, int64_t first, int64_t panel, int64_t k, int64_t depth, float *chunk_sums,
                       const char *fetched, int64_t step, const int rows, const int panels, const int is_half) {
    const int64_t inputs = args->inputs, size = is_half ? 2 : 4;
    const float *x = args->blocks + first * inputs + k * rows;
    const char *from = (const char *)args->panels + (panel * inputs + k) * PANEL * size;
    HERE(Numbers) sums[ROWS][FEW][PARTS];
    for (int row = 0; row < rows; row++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < PARTS; v++) {
                sums[row][p][v] = (HERE(Numbers)){0};
                if (k) memcpy(&sums[row][p][v], chunk_sums + row * PANEL + v * WIDTH, BYTES);
            }
    for (int64_t i = 0; i < depth; i++) {
        HERE(Numbers) weights[FEW][PARTS];
        __builtin_prefetch(fetched + i * step, 0, AHEAD ? 3 : 2);
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < PARTS; v++)
                weights[p][v] = HERE(load)(from + ((p * inputs + i) * PANEL + v * WIDTH) * size, is_half);
#if defined(__aarch64__) /* products with an element of a vector */
        Factors factors[ROWS / 4];
        for (int j = 0; j < rows / 4; j++) factors[j] = *(const Factors *)(x + i * rows + 4 * j);
#endif
        for (int row = 0; row < rows; row++) {
#if defined(__aarch64__)
            const float factor = rows >= 4 ? factors[row / 4][row % 4] : x[i * rows + row];
#else
            const float factor = x[i * rows + row];
#endif
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < PARTS; v++) sums[row][p][v] += weights[p][v] * factor;
        }
    }
    const int is_last = k + depth == inputs;
    for (int row = 0; row < rows && row < args->rows - first; row++)
        for (int p = 0; p < panels; p++)
            if (is_last) {
                float found[PANEL];
                memcpy(found, sums[row][p], sizeof found);
                HERE(finish)(args, first + row, (panel + p) * PANEL, found, is_half);
            } else
                memcpy(chunk_sums + row * PANEL, sums[row][p], PANEL * sizeof(float));
}

INLINE void HERE(span)(const PackedLinear *args, int64_t row, int64_t last, int64_t panel, int64_t end, float *sums,
                       const int is_half) {
    const int64_t inputs = args->inputs, size = is_half ? 2 : 4, blocks = (last - row + ROWS - 1) / ROWS;
    const int64_t step = AHEAD ? PANEL * size : PANEL * size / blocks;
    const char *from = (const char *)args->panels + panel * inputs * PANEL * size;
#if FEW > 1
    for (; args->rows <= 2 && panel + FEW <= end; panel += FEW, from += FEW * inputs * PANEL * size)
        if (args->rows == 1)
            HERE(tile)(args, 0, panel, 0, inputs, sums, from + AHEAD * step, step, 1, FEW, is_half);
        else
            HERE(tile)(args, 0, panel, 0, inputs, sums, from + AHEAD * step, step, 2, FEW, is_half);
#endif
    for (; panel < end; panel++)
        for (int64_t k = 0, depth; k < inputs; k += depth) {
            depth = inputs - k < DEPTH(blocks) ? inputs - k : DEPTH(blocks);
            const char *next = from + depth * PANEL * size;
            for (int64_t i = 0; i < blocks; i++) {
                const int64_t first = row + i * ROWS;
                /* weights soon to be used, or this block's share of those that all blocks use next */
                const char *fetched = AHEAD ? from + AHEAD * step : next + i * depth * step;
                float *to = sums + i * ROWS * PANEL;
                switch (rows_of_block(args->rows - first, ROWS)) { /* constant counts: sums stay in registers */
                case 1: HERE(tile)(args, first, panel, k, depth, to, fetched, step, 1, 1, is_half); break;
                case 2: HERE(tile)(args, first, panel, k, depth, to, fetched, step, 2, 1, is_half); break;
                case 4: HERE(tile)(args, first, panel, k, depth, to, fetched, step, 4, 1, is_half); break;
                default: HERE(tile)(args, first, panel, k, depth, to, fetched, step, ROWS, 1, is_half);
                }
            }
            from = next;
        }
}

TARGET static void HERE(span_float)(const PackedLinear *args, int64_t row, int64_t last, int64_t panel, int64_t end,
                                    float *sums) {
    HERE(span)(args, row, last, panel, end, sums, 0);
}

TARGET static void HERE(span_half)(const PackedLinear *args, int64_t row, int64_t last, int64_t panel, int64_t end,
                                   float *sums) {
    HERE(span)(args, row, last, panel, end, sums, 1);
}

#undef HERE
#undef WIDTH
#undef PANEL
