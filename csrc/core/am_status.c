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

const char *am_last_error(void) { return last_error; }
