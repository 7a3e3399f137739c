/* am_pool.h -- one process-wide set of worker threads.
 *
 * am_parallel_for cuts [0, n) into chunks of `grain` and calls fn on each. Where the cuts fall depends on `grain`
 * alone, so a result that is written per chunk has no thread count in it. fn must not fail and must not touch
 * Python. A second call from another thread, while one is running, runs on its own thread. After fork the child
 * starts without workers and makes its own at its first call. Jobs run on the OpenMP team of the caller where that has
 * as many threads as are wanted and comes in time (am_openmp.h), else on workers of the pool.
 */
#ifndef AM_POOL_H
#define AM_POOL_H

#include <stdint.h>

typedef void (*am_range_fn)(int64_t begin, int64_t end, void *ctx);

void am_parallel_for(int64_t n, int64_t grain, am_range_fn fn, void *ctx);

int am_num_threads(void);
void am_set_num_threads(int n); /* at least 1; at most AM_MAX_THREADS */

enum { AM_MAX_THREADS = 256 };

#endif
