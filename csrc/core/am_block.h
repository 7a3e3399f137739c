/* am_block.h -- memory for long tables of a call, kept for the next one.
 *
 * malloc maps a table of 128 KiB and more afresh, and every page of it is a fault when first written: of 20,000 tensors
 * that is most of a step. A few blocks that were given back wait here instead, at most AM_BLOCK_KEPT bytes in all.
 */
#ifndef AM_BLOCK_H
#define AM_BLOCK_H

#include <stddef.h>

enum { AM_BLOCK_KEPT = 64 << 20 };

void *am_block_take(size_t bytes); /* of undefined contents, for any type; NULL: no memory */
void am_block_give(void *block);   /* NULL is nothing */

#endif
