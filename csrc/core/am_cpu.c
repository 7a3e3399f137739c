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

static const char *const names[AM_ISA_COUNT] = {"scalar", "avx2", "avx512", "avx512_bf16"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static am_isa best;
static bool has_amx;
static atomic_int chosen;
static atomic_bool amx;

static const char *const amx_name = "amx_bf16";

static int isa_of_name(const char *name)
{
    for (int i = 0; i < AM_ISA_COUNT; i++)
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

/* Tile registers need the kernel's leave, asked for once a process. */
static bool detect_amx(void)
{
#if defined(__x86_64__)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (best != AM_ISA_AVX512_BF16 || !__get_cpuid_count(7, 0, &a, &b, &c, &d))
        return false;
    const bool tiles = d >> 24 & 1, bf16 = d >> 22 & 1;
    return tiles && bf16 && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

static void init(void)
{
    best = detect();
    has_amx = detect_amx();
    const char *env = getenv("AM_ISA");
    const int wanted = env ? isa_of_name(env) : -1;
    atomic_store(&chosen, wanted >= 0 && wanted < (int)best ? wanted : (int)best);
    atomic_store(&amx, has_amx && wanted < 0);
}

am_isa am_cpu_best_isa(void)
{
    pthread_once(&once, init);
    return best;
}

am_isa am_cpu_isa(void)
{
    pthread_once(&once, init);
    return (am_isa)atomic_load_explicit(&chosen, memory_order_relaxed);
}

bool am_cpu_amx(void)
{
    pthread_once(&once, init);
    return atomic_load_explicit(&amx, memory_order_relaxed);
}

const char *am_cpu_name(void) { return am_cpu_amx() ? amx_name : names[am_cpu_isa()]; }

const char *am_isa_name(am_isa isa) { return names[isa]; }

am_status am_cpu_set_isa(const char *name)
{
    const bool tiles = strcmp(name, amx_name) == 0;
    const int isa = tiles ? AM_ISA_AVX512_BF16 : isa_of_name(name);
    AM_CHECK(isa >= 0, AM_ERR_ARG, "set_isa: '%s' is not one of scalar, avx2, avx512, avx512_bf16, amx_bf16", name);
    AM_CHECK(isa <= (int)am_cpu_best_isa(), AM_ERR_UNSUPPORTED, "set_isa: this CPU goes up to %s, not %s",
             names[am_cpu_best_isa()], name);
    AM_CHECK(!tiles || has_amx, AM_ERR_UNSUPPORTED, "set_isa: this CPU or kernel gives no bf16 tile registers");
    atomic_store(&chosen, isa);
    atomic_store(&amx, tiles);
    return AM_OK;
}
