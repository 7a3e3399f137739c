/* am_slots.h -- scratch of tasks that run at one time: each holds a slot while it runs.
 *
 * The workspace has room for so many slots; when the pool has grown since it was asked for, threads wait for one.
 */
#ifndef AM_SLOTS_H
#define AM_SLOTS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "am_tensor.h"

enum { AM_SLOT_LINE = 64 };

typedef struct am_slots {
    char *base;
    size_t bytes; /* of one slot */
    int64_t n;
    atomic_flag *busy; /* [AM_MAX_THREADS] */
} am_slots;

/* The next `bytes` after `*at` of what lies at base, on a line of its own; NULL when base is, to count only. */
static inline void *am_take(char *base, size_t *at, size_t bytes)
{
    void *const p = base ? base + *at : NULL;
    *at += (bytes + AM_SLOT_LINE - 1) / AM_SLOT_LINE * AM_SLOT_LINE;
    return p;
}

/* Lays `shared` bytes and as many slots as there is room for (at most AM_MAX_THREADS) out in the workspace: the shared
 * part begins at *start. `bytes` is set; a workspace is one line longer than what lies in it. */
am_status am_slots_lay(am_slots *slots, const char *name, const am_tensor *workspace, size_t shared, char **start);

void am_slots_reset(am_slots *slots); /* all free */

/* Waits for a slot; its memory is at *memory. */
int64_t am_slots_claim(am_slots *slots, char **memory);
void am_slots_release(am_slots *slots, int64_t slot);

#endif
