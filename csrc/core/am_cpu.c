#include "am_cpu.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

static const char *const names[AM_ISA_COUNT] = {"scalar", "avx2", "avx512", "avx512_bf16"};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static am_isa best;
static atomic_int chosen;

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

static void init(void)
{
    best = detect();
    const char *env = getenv("AM_ISA");
    const int wanted = env ? isa_of_name(env) : -1;
    atomic_store(&chosen, wanted >= 0 && wanted < (int)best ? wanted : (int)best);
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

const char *am_isa_name(am_isa isa) { return names[isa]; }

am_status am_cpu_set_isa(const char *name)
{
    const int isa = isa_of_name(name);
    AM_CHECK(isa >= 0, AM_ERR_ARG, "set_isa: '%s' is not one of scalar, avx2, avx512, avx512_bf16", name);
    AM_CHECK(isa <= (int)am_cpu_best_isa(), AM_ERR_UNSUPPORTED, "set_isa: this CPU goes up to %s, not %s",
             names[am_cpu_best_isa()], name);
    atomic_store(&chosen, isa);
    return AM_OK;
}
