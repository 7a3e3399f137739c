#include "am_cpu.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LEVEL_AMX = AM_ISA_COUNT, LEVELS };

static const char *const names[LEVELS] = {"scalar", "avx2", "avx512", "avx512_bf16", "amx_bf16"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static int best; /* a level: a row, or LEVEL_AMX */
static atomic_int chosen;

static int level_of_name(const char *name)
{
    for (int i = 0; i < LEVELS; i++)
        if (strcmp(name, names[i]) == 0)
            return i;
    return -1;
}

static am_isa detect(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return AM_ISA_SCALAR;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return AM_ISA_AVX2;
    return __builtin_cpu_supports("avx512bf16") ? AM_ISA_AVX512_BF16 : AM_ISA_AVX512;
#else
    return AM_ISA_SCALAR;
#endif
}

/* Tile registers need the kernel's leave, once a process. */
static bool amx_granted(void)
{
#if defined(__x86_64__)
    enum { LEAF = 7, AMX_BF16 = 22, AMX_TILE = 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(LEAF, 0, &a, &b, &c, &d) && d >> AMX_BF16 & 1 && d >> AMX_TILE & 1 &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

static void init(void)
{
    const am_isa isa = detect();
    best = isa == AM_ISA_AVX512_BF16 && amx_granted() ? LEVEL_AMX : (int)isa;
    const char *env = getenv("AM_ISA");
    const int wanted = env ? level_of_name(env) : -1;
    atomic_store(&chosen, wanted >= 0 && wanted < best ? wanted : best);
}

static int level(void)
{
    pthread_once(&once, init);
    return atomic_load_explicit(&chosen, memory_order_relaxed);
}

am_isa am_cpu_isa(void) { return (am_isa)(level() < LEVEL_AMX ? level() : LEVEL_AMX - 1); }

bool am_cpu_amx(void) { return level() == LEVEL_AMX; }

const char *am_cpu_isa_name(void) { return names[level()]; }

const char *am_cpu_best_isa_name(void)
{
    pthread_once(&once, init);
    return names[best];
}

am_status am_cpu_set_isa(const char *name)
{
    pthread_once(&once, init);
    const int wanted = level_of_name(name);
    AM_CHECK(wanted >= 0, AM_ERR_ARG, "set_isa: '%s' is not one of scalar, avx2, avx512, avx512_bf16, amx_bf16", name);
    AM_CHECK(wanted <= best, AM_ERR_UNSUPPORTED, "set_isa: this CPU goes up to %s, not %s", names[best], names[wanted]);
    atomic_store(&chosen, wanted);
    return AM_OK;
}
