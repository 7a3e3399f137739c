#include "am_slots.h"

#include <sched.h>
#include <string.h>

#include "am_pool.h"

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
