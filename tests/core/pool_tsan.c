/* pool_tsan.c -- drives the thread pool alone, to be run under ThreadSanitizer as well as plain.
 *
 *     cc -pthread -Icsrc/core tests/core/pool_tsan.c csrc/core/am_pool.c csrc/core/am_openmp.c -o pool && ./pool ROUNDS
 *
 * Every element of a job must be visited exactly once: with any grain and thread count, from several submitters at
 * once, from inside a job, while another thread changes the thread count, and in the child of a fork.
 */
#include "am_pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

enum { LARGEST = 3000, SUBMITTERS = 4 };

typedef struct visits {
    int seen[LARGEST]; /* plain memory: a race is TSan's to find */
    int nested;
} visits;

static void visit(int64_t begin, int64_t end, void *ctx)
{
    visits *const v = ctx;
    for (int64_t i = begin; i < end; i++)
        v->seen[i]++;
}

static void visit_nested(int64_t begin, int64_t end, void *ctx)
{
    visits inner = {{0}, 0};
    am_parallel_for(10, 3, visit, &inner);
    for (int i = 0; i < 10; i++)
        if (inner.seen[i] != 1)
            return; /* leaves this chunk unvisited, which the caller sees */
    visit(begin, end, ctx);
}

static void expect_once(const visits *v, int64_t n, const char *what)
{
    for (int64_t i = 0; i < n; i++)
        if (v->seen[i] != 1) {
            fprintf(stderr, "%s: element %lld of %lld was visited %d times\n", what, (long long)i, (long long)n,
                    v->seen[i]);
            _exit(1);
        }
}

static void run_once(int64_t n, int64_t grain, am_range_fn fn, const char *what)
{
    visits *v = calloc(1, sizeof *v);
    am_parallel_for(n, grain, fn, v);
    expect_once(v, n, what);
    free(v);
}

static void *submit(void *rounds)
{
    for (int r = 0; r < *(const int *)rounds; r++)
        run_once(r % LARGEST, 1 + r % 37, r % 5 ? visit : visit_nested, "submitter");
    return NULL;
}

static void *change_threads(void *rounds)
{
    for (int r = 0; r < *(const int *)rounds; r++)
        am_set_num_threads(1 + r % 6);
    return NULL;
}

static void fork_and_compute(void)
{
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
#ifdef __SANITIZE_THREAD__
        am_set_num_threads(1); /* TSan cannot start threads in the child of a threaded process */
#endif
        run_once(LARGEST, 7, visit, "child");
        run_once(LARGEST, 7, visit_nested, "child, nested");
        _exit(0);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
        fprintf(stderr, "child ended with status %d\n", status);
        exit(1);
    }
}

static void edges(void)
{
    static const int64_t grains[] = {-1, 0, 1, 3, 1000, INT64_MAX};
    for (size_t g = 0; g < sizeof grains / sizeof *grains; g++)
        for (int64_t n = 0; n < 12; n++)
            run_once(n, grains[g], visit, "edges");
    am_parallel_for(-5, 1, visit, NULL);
    am_set_num_threads(-3);
    if (am_num_threads() != 1)
        exit(1);
    am_set_num_threads(1 << 20);
    if (am_num_threads() != AM_MAX_THREADS)
        exit(1);
}

int main(int argc, char **argv)
{
    int rounds = argc > 1 ? atoi(argv[1]) : 300;
    edges();
    am_set_num_threads(4);
    fork_and_compute();
    run_once(LARGEST, 7, visit, "parent after fork");
    pthread_t threads[SUBMITTERS + 1];
    for (int i = 0; i < SUBMITTERS; i++)
        pthread_create(&threads[i], NULL, submit, &rounds);
    pthread_create(&threads[SUBMITTERS], NULL, change_threads, &rounds);
    for (int i = 0; i < 5; i++)
        fork_and_compute(); /* while the others submit */
    for (int i = 0; i <= SUBMITTERS; i++)
        pthread_join(threads[i], NULL);
    fork_and_compute();
    puts("pool: fine");
    return 0;
}
