/* y += (x a) b for a few rows of each of many adapters, in tiles of up to four rows.

Plain reference: two products for each adapter (`lora.reference`). Those repack weights that serve a few rows only, and a
batch of 32 rows over eight adapters makes thousands of products. Here weights are read once, in place, by all cores.
Sums are in float32 and in one order, whatever else is in the batch. */
#include "numbers.h"

#define ROWS 4
#define MAX_RANK 512
#define COLUMNS 512 /* whose sums fit into the cache */

typedef struct {
    int64_t row, rows, column, width, rank;
    const void *a, *b; /* [inputs, rank] and [rank, width], contiguous */
} Tile;

#define NUMBER float
#include "lora.h"
#undef NUMBER
#define NUMBER bfloat16
#include "lora.h"
