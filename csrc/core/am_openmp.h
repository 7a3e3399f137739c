/* am_openmp.h -- the OpenMP team of the calling thread, where another library has brought OpenMP into the process.
 *
 * torch's own loops run on that team, whose idle threads spin for a while before they sleep: threads of ours beside
 * them would wait for a core and be woken by the kernel. One team for both is there at once.
 */
#ifndef AM_OPENMP_H
#define AM_OPENMP_H

#include <stdbool.h>

/* Calls fn(ctx) on every thread of the team and returns true once all are back. False, and no call, where there is no
 * OpenMP or its team is not of `threads`: a team that changes its size makes threads anew. Not for the child of a
 * fork that had a team: its threads are gone and would be waited for (the pool knows of forks since it was loaded). */
bool am_openmp_run(int threads, void (*fn)(void *ctx), void *ctx);

#endif
