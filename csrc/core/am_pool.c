#include "am_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "am_openmp.h"

/* A team is waited for to its last thread, and that one may have no core: where a thread came LATE_NS after the first
 * had finished, and found nothing to do, as many of the next jobs go to workers of ours, who are not waited for; twice
 * as many each time, at most MOST. */
enum { LATE_NS = 300 * 1000, FEWEST = 32, MOST = 1 << 13 };

typedef struct job {
    am_range_fn fn;
    void *ctx;
    int64_t n, grain;
    atomic_llong next; /* first index that nobody has taken */
    atomic_llong done; /* when a thread found that nothing was left, 0 until then */
    atomic_bool idle;  /* a thread found nothing to do at all */
} job;

/* `submit` is held by the one thread whose job is running; `lock` guards everything below it. */
static struct {
    pthread_mutex_t submit, lock;
    pthread_cond_t wake, idle;
    job *open;       /* the job that workers may still join, or NULL */
    int spawned;     /* workers that exist */
    int running;     /* workers inside the job */
    int helpers;     /* workers wanted for the open job */
    int avoid, last; /* jobs that the team is still not to be asked for, and how many they were; under `submit` */
    bool forked;     /* this process is the child of a fork: an OpenMP team that it knows of has no threads */
    uint64_t serial; /* counts jobs, so that a worker joins each at most once */
} pool = {.submit = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .idle = PTHREAD_COND_INITIALIZER};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_int wanted_threads;

static void before_fork(void)
{
    pthread_mutex_lock(&pool.submit);
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_parent(void)
{
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.submit);
}

static void after_fork_child(void)
{
    pool.open = NULL;
    pool.forked = true;
    pool.spawned = pool.running = pool.helpers = 0;
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.idle, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_mutex_init(&pool.submit, NULL);
}

static int default_threads(void)
{
    const char *env = getenv("OMP_NUM_THREADS");
    const long asked = env ? strtol(env, NULL, 10) : 0;
    if (asked > 0)
        return asked < AM_MAX_THREADS ? (int)asked : AM_MAX_THREADS;
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return CPU_COUNT(&set) < AM_MAX_THREADS ? CPU_COUNT(&set) : AM_MAX_THREADS;
    return 1;
}

static void init(void)
{
    atomic_store(&wanted_threads, default_threads());
    pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

int am_num_threads(void)
{
    pthread_once(&once, init);
    return atomic_load(&wanted_threads);
}

void am_set_num_threads(int n)
{
    pthread_once(&once, init);
    atomic_store(&wanted_threads, n < 1 ? 1 : n > AM_MAX_THREADS ? AM_MAX_THREADS : n);
}

static long long now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void run_chunks(job *j)
{
    for (;;) {
        const int64_t begin = atomic_fetch_add(&j->next, j->grain);
        if (begin >= j->n)
            return;
        const int64_t end = j->n - begin > j->grain ? begin + j->grain : j->n;
        j->fn(begin, end, j->ctx);
    }
}

static void *worker(void *unused)
{
    (void)unused;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.open == NULL || pool.serial == seen || pool.running >= pool.helpers)
            pthread_cond_wait(&pool.wake, &pool.lock);
        seen = pool.serial;
        job *const j = pool.open;
        pool.running++;
        pthread_mutex_unlock(&pool.lock);
        run_chunks(j);
        pthread_mutex_lock(&pool.lock);
        pool.helpers--; /* a place in the job is taken once */
        if (--pool.running == 0)
            pthread_cond_signal(&pool.idle);
    }
    return NULL;
}

/* Makes workers until `count` exist; with fewer, the job just has fewer hands. Signals stay with Python's threads. */
static void spawn_up_to(int count)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (pool.spawned < count) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, worker, NULL) != 0)
            break;
        pthread_detach(thread);
        pool.spawned++;
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* Runs the job on this thread and on `helpers` of ours. */
static void run_on_workers(job *j, int helpers)
{
    pthread_mutex_lock(&pool.lock);
    spawn_up_to(helpers);
    pool.open = j;
    pool.helpers = helpers;
    pool.serial++;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);

    run_chunks(j);

    pthread_mutex_lock(&pool.lock);
    pool.open = NULL;
    while (pool.running > 0)
        pthread_cond_wait(&pool.idle, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

static void run_and_note(void *ctx)
{
    job *const j = ctx;
    if (atomic_load(&j->next) >= j->n)
        atomic_store(&j->idle, true);
    run_chunks(j);
    long long none = 0;
    atomic_compare_exchange_strong(&j->done, &none, now_ns());
}

/* Runs the job on the OpenMP team of this thread, if there is one that may be asked. */
static bool run_on_team(job *j, int threads)
{
    if (pool.forked || pool.avoid > 0) {
        pool.avoid -= pool.avoid > 0;
        return false;
    }
    if (!am_openmp_run(threads, run_and_note, j))
        return false;
    if (atomic_load(&j->idle) && now_ns() - atomic_load(&j->done) > LATE_NS)
        pool.avoid = pool.last = pool.last == 0 ? FEWEST : pool.last < MOST ? 2 * pool.last : MOST;
    else
        pool.last = 0;
    return true;
}

void am_parallel_for(int64_t n, int64_t grain, am_range_fn fn, void *ctx)
{
    if (n <= 0)
        return;
    job j = {.fn = fn, .ctx = ctx, .n = n, .grain = grain < 1 ? 1 : grain > n ? n : grain};
    atomic_init(&j.next, 0);
    atomic_init(&j.done, 0);
    atomic_init(&j.idle, false);
    const int64_t chunks = n / j.grain + (n % j.grain != 0);
    const int threads = am_num_threads();
    const int helpers = chunks < threads ? (int)chunks - 1 : threads - 1;
    if (helpers == 0 || pthread_mutex_trylock(&pool.submit) != 0) {
        run_chunks(&j);
        return;
    }
    if (!run_on_team(&j, threads))
        run_on_workers(&j, helpers);
    pthread_mutex_unlock(&pool.submit);
}
