/* y = x w^T with a packed weight, for any number of rows.

Plain reference: `F.linear`, which packs the weight again for each product. Here the outputs of a panel are stored as
[inputs, panel], and blocks of rows as [inputs, rows]: the inner loop reads both in order and keeps its sums in registers.
Sums are in float32, each one chain over the inputs in order, whatever else is in the batch.

packed_linear.h is the kernel of one kind of processor, included once for each. */
#include "numbers.h"

#define CHUNK 240 /* rows whose blocks stay in the cache: whole blocks of any kernel */
#define MAX_PANEL 48
#define MIN_PARALLEL 32768

typedef float Factors __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    int64_t rows, inputs, outputs, x_stride, panel, is_half;
    const float *x;
    const void *panels; /* bfloat16 if is_half */
    const float *bias;  /* or null */
    void *y;            /* contiguous, of the weight's type */
    float *blocks;      /* for x in blocks, with room for another 7 rows */
} PackedLinear;

/* Computes the panels `panel` to `end` with the rows `row` to `last`. `sums` has room for CHUNK rows of a panel. */
typedef void Span(const PackedLinear *args, int64_t row, int64_t last, int64_t panel, int64_t end, float *sums);

typedef struct {
    int64_t panel;      /* outputs */
    int64_t block_rows; /* the last block has 1, 2, 4 or so many rows, which may be more than there are left */
    int64_t group;      /* panels that one thread takes at a time */
    Span *of_float, *of_half;
} Kernel;

INLINE int64_t rows_of_block(int64_t left, int64_t most) { return left <= 2 ? left : left <= 4 ? 4 : most; }

#if defined(__aarch64__)
#define CPU neon
#define TARGET
#define BYTES 16
#define PARTS 3 /* vectors of a panel */
#define ROWS 8  /* of a block: 24 sums, in 32 registers */
#define FEW 4   /* panels at a time for one or two rows: more sums hide the latency of each */
#define DEPTH(blocks) INT64_MAX
#define AHEAD 16 /* inputs whose weights are fetched ahead */
#include "packed_linear.h"
static const Kernel kernels[] = {{PARTS * BYTES / 4, ROWS, 2 * FEW, span_float_neon, span_half_neon}};
static int is_supported(const Kernel *kernel) { return kernel != 0; }
#elif defined(__x86_64__)
#define FEW 1
/* Inputs of a panel that stay in the cache while all blocks of rows use them; the next ones are fetched meanwhile. */
#define DEPTH(blocks) ((blocks) > 8 ? 256 : 96)
#define AHEAD 0
#define CPU avx512
#define TARGET __attribute__((target("avx512f")))
#define BYTES 64
#define PARTS 3
#define ROWS 8
#include "packed_linear.h"
#undef CPU
#undef TARGET
#undef BYTES
#undef PARTS
#undef ROWS
#define CPU avx2
#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#define PARTS 2
#define ROWS 6 /* of a block: 12 sums, in 16 registers */
#include "packed_linear.h"
static const Kernel kernels[] = {{48, 8, 8, span_float_avx512, span_half_avx512}, {16, 6, 8, span_float_avx2, span_half_avx2}};
static int is_supported(const Kernel *kernel) {
    if (kernel == kernels) return __builtin_cpu_supports("avx512f");
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
#endif

#if defined(__aarch64__) || defined(__x86_64__)
#define KERNELS (int64_t)(sizeof kernels / sizeof kernels[0])

/* The panel of a kernel for this processor, the fastest first. 0 if there are fewer. */
int64_t symbiosis_panel_width(int64_t number) {
    for (int64_t i = 0; i < KERNELS; i++)
        if (is_supported(&kernels[i]) && number-- == 0) return kernels[i].panel;
    return 0;
}

static void pack_block(const PackedLinear *args, int64_t first, int64_t most) {
    const int64_t left = args->rows - first, rows = rows_of_block(left, most), inputs = args->inputs;
    float *to = args->blocks + first * inputs;
    for (int64_t row = 0; row < rows; row++) {
        const float *from = args->x + (first + row) * args->x_stride;
        for (int64_t k = 0; k < inputs; k++) to[k * rows + row] = row < left ? from[k] : 0.0f;
    }
}

void symbiosis_packed_linear(const PackedLinear *args, int threads) {
    const Kernel *kernel = kernels;
    while (kernel->panel != args->panel) kernel++;
    Span *const span = args->is_half ? kernel->of_half : kernel->of_float;
    const int64_t panels = (args->outputs + args->panel - 1) / args->panel, share = panels / (4 * threads);
    const int64_t size = share < 1 ? 1 : share < kernel->group ? share : kernel->group;
    const int64_t groups = (panels + size - 1) / size, chunks = (args->rows + CHUNK - 1) / CHUNK;
    const int64_t work = args->rows * args->inputs * args->outputs;
#pragma omp parallel num_threads(work > MIN_PARALLEL ? threads : 1)
    {
        float sums[CHUNK * MAX_PANEL];
#pragma omp for schedule(static)
        for (int64_t first = 0; first < args->rows; first += kernel->block_rows) pack_block(args, first, kernel->block_rows);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < chunks * groups; i++) {
            const int64_t row = i / groups * CHUNK, panel = i % groups * size;
            const int64_t last = row + CHUNK < args->rows ? row + CHUNK : args->rows;
            span(args, row, last, panel, panel + size < panels ? panel + size : panels, sums);
        }
    }
}
#else
typedef int not_empty;
#endif
