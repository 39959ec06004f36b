/* Included once for each NUMBER type: see lora.c. */
/* Columns `column` to `column + vectors * LANES` of x a, into low. */
INLINE void OF(shrink)(const NUMBER *const *x, const NUMBER *a, int64_t width, int64_t rank, int64_t column,
                       const int rows, const int vectors, float (*low)[MAX_RANK]) {
    Vec sums[ROWS][4] = {0};
    a += column;
    for (int64_t i = 0; i < width; i++, a += rank) {
        Vec weights[4];
        for (int v = 0; v < vectors; v++) weights[v] = OF(load)(a + v * LANES);
        for (int row = 0; row < rows; row++) {
            const float factor = OF(one)(x[row] + i);
            for (int v = 0; v < vectors; v++) sums[row][v] += weights[v] * factor;
        }
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) store_float(low[row] + column + v * LANES, sums[row][v]);
}

INLINE void OF(shrink_one)(const NUMBER *const *x, const NUMBER *a, int64_t width, int64_t rank, int64_t column,
                           const int rows, float (*low)[MAX_RANK]) {
    float sums[ROWS] = {0};
    for (int64_t i = 0; i < width; i++)
        for (int row = 0; row < rows; row++) sums[row] += OF(one)(x[row] + i) * OF(one)(a + i * rank + column);
    for (int row = 0; row < rows; row++) low[row][column] = sums[row];
}

/* sums += low[first to first + ranks] b, for `columns` of its columns. */
INLINE void OF(expand)(const float (*low)[MAX_RANK], const NUMBER *b, int64_t width, int64_t columns, int64_t first,
                       const int rows, const int ranks, float (*sums)[COLUMNS]) {
    int64_t column = 0;
    b += first * width;
    for (; column + LANES <= columns; column += LANES) {
        Vec weights[4];
        for (int k = 0; k < ranks; k++) weights[k] = OF(load)(b + k * width + column);
        for (int row = 0; row < rows; row++) {
            Vec sum = load_float(sums[row] + column);
            for (int k = 0; k < ranks; k++) sum += weights[k] * low[row][first + k];
            store_float(sums[row] + column, sum);
        }
    }
    for (; column < columns; column++)
        for (int row = 0; row < rows; row++)
            for (int k = 0; k < ranks; k++) sums[row][column] += OF(one)(b + k * width + column) * low[row][first + k];
}

INLINE void OF(rows)(const Tile *tile, const NUMBER *x, int64_t x_stride, int64_t width, NUMBER *y, int64_t y_stride,
                     const int rows) {
    float low[ROWS][MAX_RANK], sums[ROWS][COLUMNS];
    const NUMBER *x_rows[ROWS], *a = tile->a, *b = tile->b;
    const int64_t rank = tile->rank;
    for (int row = 0; row < rows; row++) x_rows[row] = x + (tile->row + row) * x_stride;
    int64_t column = 0;
    for (; column + 16 <= rank; column += 16) OF(shrink)(x_rows, a, width, rank, column, rows, 16 / LANES, low);
    for (; column + LANES <= rank; column += LANES) OF(shrink)(x_rows, a, width, rank, column, rows, 1, low);
    for (; column < rank; column++) OF(shrink_one)(x_rows, a, width, rank, column, rows, low);
    for (int64_t start = 0; start < tile->width; start += COLUMNS) {
        const int64_t columns = tile->width - start < COLUMNS ? tile->width - start : COLUMNS;
        memset(sums, 0, sizeof sums);
        int64_t first = 0;
        for (; first + 4 <= rank; first += 4) OF(expand)(low, b + start, tile->width, columns, first, rows, 4, sums);
        for (; first < rank; first++) OF(expand)(low, b + start, tile->width, columns, first, rows, 1, sums);
        for (int row = 0; row < rows; row++) {
            NUMBER *to = y + (tile->row + row) * y_stride + tile->column + start;
            for (column = 0; column + LANES <= columns; column += LANES)
                OF(store)(to + column, OF(load)(to + column) + load_float(sums[row] + column));
            for (; column < columns; column++) OF(put)(to + column, OF(one)(to + column) + sums[row][column]);
        }
    }
}

EVERY_CPU
static void OF(tile)(const Tile *tile, const NUMBER *x, int64_t x_stride, int64_t width, NUMBER *y, int64_t y_stride) {
    switch (tile->rows) { /* constant counts: sums stay in registers */
    case 1: OF(rows)(tile, x, x_stride, width, y, y_stride, 1); break;
    case 2: OF(rows)(tile, x, x_stride, width, y, y_stride, 2); break;
    case 3: OF(rows)(tile, x, x_stride, width, y, y_stride, 3); break;
    default: OF(rows)(tile, x, x_stride, width, y, y_stride, 4);
    }
}

void OF(symbiosis_lora)(const Tile *tiles, int64_t count, const NUMBER *x, int64_t x_stride, int64_t width, NUMBER *y,
                            int64_t y_stride, int threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (count > 1)
    for (int64_t i = 0; i < count; i++) OF(tile)(tiles + i, x, x_stride, width, y, y_stride);
}
