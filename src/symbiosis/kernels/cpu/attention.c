/* What single rows read from their sequences, whose keys and values lie in pages.

Plain reference: gather the pages, then transformers' own attention. Here pages
are read where they lie, once for all queries that share a key head; nothing
behind the end of a sequence is looked at. */
#include <float.h>
#include <math.h>

#include "numbers.h"

#define QUERIES 4
#define TOKENS 16              /* at a time */
#define TOGETHER (16 / LANES) /* keys, or vectors of values, that are held in registers */
#define MOST_WIDTH 256

typedef struct {
    int64_t spans, heads, key_heads, width, page_size, most_pages, window; /* no window: 0 */
    int64_t q_row, q_head;                                                /* strides */
    const int64_t *rows, *places, *pages;
    const void *q, *keys, *values; /* keys and values [slots, key heads, width] */
    void *out;                     /* [spans, heads, width] */
    float scale, cap;              /* no cap: 0 */
} Attention;

#define NUMBER float
#include "attention.h"
#undef NUMBER
#define NUMBER bfloat16
#include "attention.h"
