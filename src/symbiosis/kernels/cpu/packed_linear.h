/* Included once for each NUMBER type: see packed_linear.c. */
/* A block of rows with some panels. */
INLINE void OF(tile)(const PackedLinear *args, int64_t first, int64_t panel, const int rows, const int panels) {
    const int64_t inputs = args->inputs;
    const float *x = args->blocks + first * inputs;
    const NUMBER *from = (const NUMBER *)args->panels + panel * inputs * PANEL;
    Vec sums[ROWS][FEW_PANELS][PARTS];
    for (int row = 0; row < rows; row++)
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < PARTS; v++) sums[row][p][v] = (Vec){0};
    for (int64_t k = 0; k < inputs; k++) {
        Vec weights[FEW_PANELS][PARTS];
        __builtin_prefetch(from + (k + AHEAD) * PANEL);
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < PARTS; v++) weights[p][v] = OF(load)(from + (p * inputs + k) * PANEL + v * LANES);
        Factors factors[ROWS / 4];
        for (int i = 0; i < rows / 4; i++) factors[i] = *(const Factors *)(x + k * rows + 4 * i);
        for (int row = 0; row < rows; row++) {
            const float factor = rows >= 4 ? factors[row / 4][row % 4] : x[k * rows + row];
            for (int p = 0; p < panels; p++)
                for (int v = 0; v < PARTS; v++) sums[row][p][v] += weights[p][v] * factor;
        }
    }
    const int64_t left = args->rows - first;
    for (int row = 0; row < rows && row < left; row++)
        for (int p = 0; p < panels; p++) {
            const int64_t column = (panel + p) * PANEL, rest = args->outputs - column, columns = rest < PANEL ? rest : PANEL;
            NUMBER *to = (NUMBER *)args->y + (first + row) * args->outputs + column;
            float found[PANEL];
            memcpy(found, sums[row][p], sizeof found);
            for (int64_t i = 0; i < columns; i++)
                OF(put)(to + i, args->bias ? found[i] + args->bias[column + i] : found[i]);
        }
}

/* Panels `panel` to `end` with the rows `row` to `last`. */
static void OF(span)(const PackedLinear *args, int64_t row, int64_t last, int64_t panel, int64_t end) {
    for (; args->rows == 1 && panel + FEW_PANELS <= end; panel += FEW_PANELS) OF(tile)(args, 0, panel, 1, FEW_PANELS);
    for (; args->rows == 2 && panel + FEW_PANELS <= end; panel += FEW_PANELS) OF(tile)(args, 0, panel, 2, FEW_PANELS);
    for (; panel < end; panel++)
        for (int64_t first = row; first < last; first += ROWS)
            switch (rows_of_block(args->rows - first)) { /* constant counts: sums stay in registers */
            case 1: OF(tile)(args, first, panel, 1, 1); break;
            case 2: OF(tile)(args, first, panel, 2, 1); break;
            case 4: OF(tile)(args, first, panel, 4, 1); break;
            default: OF(tile)(args, first, panel, ROWS, 1);
            }
}

void OF(symbiosis_packed_linear)(const PackedLinear *args, int threads) {
    const int64_t panels = (args->outputs + PANEL - 1) / PANEL, size = panels >= 16 * threads ? 8 : 4;
    const int64_t groups = (panels + size - 1) / size, chunks = (args->rows + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (args->rows * args->inputs > MIN_PARALLEL)
    for (int64_t first = 0; first < args->rows; first += ROWS) pack_block(args, first);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < chunks * groups; i++) {
        const int64_t row = i / groups * CHUNK, panel = i % groups * size;
        const int64_t last = row + CHUNK < args->rows ? row + CHUNK : args->rows;
        OF(span)(args, row, last, panel, panel + size < panels ? panel + size : panels);
    }
}
