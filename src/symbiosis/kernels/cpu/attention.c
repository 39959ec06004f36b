/* Decode attention over the blocks of the KV cache.

Plain reference: gather the blocks, then transformers' own attention. Here blocks are read in position, once for all queries
of a key head. Nothing beyond the end of a sequence contributes. */
#include <float.h>
#include <math.h>

#include "numbers.h"

#define QUERIES 4
#define TOKENS 16             /* at a time */
#define VECTORS (16 / LANES) /* keys, or vectors of values, in registers */
#define MAX_WIDTH 256

typedef struct {
    int64_t sequences, heads, key_heads, width, block_size, max_blocks, window; /* no window: 0 */
    int64_t q_row, q_head;                                                /* strides */
    const int64_t *rows, *positions, *blocks;
    const void *q, *keys, *values; /* keys and values [slots, key heads, width] */
    void *out;                     /* [sequences, heads, width] */
    float scale, cap;              /* no cap: 0 */
} Attention;

#define NUMBER float
#include "attention.h"
#undef NUMBER
#define NUMBER bfloat16
#include "attention.h"
