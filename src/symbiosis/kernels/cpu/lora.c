/* y += (x a) b for a few rows of each of many adapters, a tile of up to four rows after the other.

Plain reference: two products for each adapter (`low_rank.reference`). Those pack
weights that are used for a few rows only, and a pass of 32 rows over eight
adapters is thousands of them. Here weights are read once, in place, by every
core there is. Sums are in float32 and in one order, whoever else is in the pass. */
#include "numbers.h"

#define ROWS 4
#define MOST_RANK 512
#define COLUMNS 512 /* sums of so many columns are kept close at a time */

typedef struct {
    int64_t row, rows, column, width, rank;
    const void *a, *b; /* [inputs, rank] and [rank, width], contiguous */
} Tile;

#define NUMBER float
#include "lora.h"
#undef NUMBER
#define NUMBER bfloat16
#include "lora.h"
