/* am_status.h -- how every fallible function of the extension reports.
 *
 * A function returns AM_OK or a code; the code's text is kept for the calling thread until its next failure.
 * The doorway (csrc/python/py_status.c) turns codes into Python exceptions.
 */
#ifndef AM_STATUS_H
#define AM_STATUS_H

typedef enum am_status {
    AM_OK = 0,
    AM_ERR_ARG,         /* a value              -> ValueError */
    AM_ERR_SHAPE,       /* a shape or a stride  -> ValueError */
    AM_ERR_DEVICE,      /* another device       -> ValueError */
    AM_ERR_DTYPE,       /* a dtype or a kind    -> TypeError */
    AM_ERR_UNSUPPORTED, /* no such kernel       -> NotImplementedError */
    AM_ERR_NOMEM,       /* out of memory        -> MemoryError */
    AM_ERR_CUDA,        /* the device said no   -> RuntimeError */
    AM_ERR_INTERNAL     /* our own invariant    -> SystemError */
} am_status;

/* Keeps the formatted text for this thread and returns `code`. */
am_status am_fail(am_status code, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* What an operator says of tensors on CUDA where no CUDA kernel was built: AM_ERR_UNSUPPORTED. */
am_status am_no_cuda(const char *fn);

/* The text of this thread's last failure; "" before the first one. */
const char *am_last_error(void);

#define AM_CHECK(cond, code, ...)                                                                                      \
    do {                                                                                                               \
        if (!(cond))                                                                                                   \
            return am_fail((code), __VA_ARGS__);                                                                       \
    } while (0)

#define AM_TRY(expr)                                                                                                   \
    do {                                                                                                               \
        const am_status am_try_st_ = (expr);                                                                           \
        if (am_try_st_ != AM_OK)                                                                                       \
            return am_try_st_;                                                                                         \
    } while (0)

#define AM_TRY_GOTO(expr, label)                                                                                       \
    do {                                                                                                               \
        st = (expr);                                                                                                   \
        if (st != AM_OK)                                                                                               \
            goto label;                                                                                                \
    } while (0)

#endif
