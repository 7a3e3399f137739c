#include "am_openmp.h"

#include <dlfcn.h>
#include <stdatomic.h>

typedef void (*parallel_fn)(void (*fn)(void *), void *ctx, unsigned threads, unsigned flags);
typedef int (*count_fn)(void);

/* The entry points that compilers call for `omp parallel`: libgomp's, which libomp and libiomp5 have as well. Looked
 * for until they are found, because torch may be imported later. */
static _Atomic(parallel_fn) parallel;
static _Atomic(count_fn) team_size;

static bool find(void)
{
    if (atomic_load_explicit(&parallel, memory_order_acquire))
        return true;
    const parallel_fn run = (parallel_fn)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    const count_fn count = (count_fn)dlsym(RTLD_DEFAULT, "omp_get_max_threads");
    if (!run || !count)
        return false;
    atomic_store(&team_size, count);
    atomic_store_explicit(&parallel, run, memory_order_release);
    return true;
}

bool am_openmp_run(int threads, void (*fn)(void *ctx), void *ctx)
{
    if (!find() || atomic_load(&team_size)() != threads)
        return false;
    const parallel_fn run = atomic_load(&parallel);
    run(fn, ctx, (unsigned)threads, 0);
    return true;
}
