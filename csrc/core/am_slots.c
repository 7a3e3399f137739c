#include "am_slots.h"

#include <sched.h>
#include <string.h>

#include "am_pool.h"
#include "am_status.h"

am_status am_slots_lay(am_slots *slots, const char *name, const am_tensor *workspace, size_t shared, char **start)
{
    const size_t given = (size_t)workspace->shape[0], least = shared + slots->bytes + AM_SLOT_LINE;
    AM_CHECK(given >= least, AM_ERR_SHAPE, "%s: workspace has %zu bytes, %zu are needed", name, given, least);
    *start = (char *)(((uintptr_t)workspace->data + AM_SLOT_LINE - 1) / AM_SLOT_LINE * AM_SLOT_LINE);
    const int64_t room = (int64_t)((given - shared - AM_SLOT_LINE) / slots->bytes);
    slots->base = *start + shared;
    slots->n = room < AM_MAX_THREADS ? room : AM_MAX_THREADS;
    return AM_OK;
}

void am_slots_reset(am_slots *slots) { memset(slots->busy, 0, AM_MAX_THREADS * sizeof *slots->busy); }

int64_t am_slots_claim(am_slots *slots, char **memory)
{
    for (;;) {
        for (int64_t i = 0; i < slots->n; i++)
            if (!atomic_flag_test_and_set_explicit(&slots->busy[i], memory_order_acquire)) {
                *memory = slots->base + (size_t)i * slots->bytes;
                return i;
            }
        sched_yield();
    }
}

void am_slots_release(am_slots *slots, int64_t slot)
{
    atomic_flag_clear_explicit(&slots->busy[slot], memory_order_release);
}
