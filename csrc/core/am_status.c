#include "am_status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char last_error[512];

am_status am_fail(am_status code, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    (void)vsnprintf(last_error, sizeof last_error, fmt, ap);
    va_end(ap);
    return code;
}

am_status am_no_cuda(const char *fn)
{
    return am_fail(AM_ERR_UNSUPPORTED,
                   "%s: this build runs on the CPU only: install the CUDA Toolkit 13 and build again with AM_CUDA=1",
                   fn);
}

const char *am_last_error(void) { return last_error; }
