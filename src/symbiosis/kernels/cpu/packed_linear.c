/* y = x w^T with a packed weight, for any number of rows.

Plain reference: `F.linear`, which packs the weight again for each product. Here PANEL outputs at a time are stored as
[inputs, PANEL], and blocks of rows as [inputs, rows]: the inner loop reads both in order and keeps its sums in registers.
Sums are in float32, each one chain over the inputs in order, whatever else is in the batch. */
#if defined(__aarch64__) /* elsewhere oneDNN does this: see packed_linear.py */
#include "numbers.h"

#define PARTS 3 /* vectors of a panel */
#define PANEL (PARTS * LANES)
#define ROWS 8       /* of a block: 24 sums, in 32 registers */
#define FEW_PANELS 4 /* at a time for one or two rows: more sums hide the latency of each */
#define CHUNK 256    /* rows whose blocks stay in the cache */
#define AHEAD 16     /* inputs whose weights are fetched ahead */
#define MIN_PARALLEL 32768

typedef float Factors __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    int64_t rows, inputs, outputs, x_stride;
    const float *x;
    const void *panels;
    const float *bias; /* or null */
    void *y;           /* contiguous */
    float *blocks;     /* for x in blocks, with as many numbers as whole blocks have */
} PackedLinear;

/* The last block has 1, 2, 4 or 8 rows, which may be more than there are left. */
static int64_t rows_of_block(int64_t left) { return left <= 2 ? left : left <= 4 ? 4 : ROWS; }

static void pack_block(const PackedLinear *args, int64_t first) {
    const int64_t left = args->rows - first, rows = rows_of_block(left), inputs = args->inputs;
    float *to = args->blocks + first * inputs;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = args->x + (first + row) * args->x_stride;
        for (int64_t k = 0; k < inputs; k++) to[k * rows + row] = row < left ? from[k] : 0.0f;
    }
}

#define NUMBER float
#include "packed_linear.h"
#undef NUMBER
#define NUMBER bfloat16
#include "packed_linear.h"
#undef NUMBER

int64_t symbiosis_panel_width(void) { return PANEL; }
#else
typedef int not_empty;
#endif
