/* am_stream.h -- copies past the caches, for outputs of AM_STREAM_BYTES and more, which with what they are made from do
 * not stay in them: a line that is written whole need not be read first. am_stream_end() before another thread reads.
 * The bound is a constant, as what the kernel says of a virtual machine's caches is often wrong. */
#ifndef AM_STREAM_H
#define AM_STREAM_H

#include <stdint.h>
#include <string.h>

enum { AM_STREAM_BYTES = 1 << 24 };

#if defined(__x86_64__)
#include <emmintrin.h>

enum { AM_LINE = 64 };

static inline void am_stream_copy(void *to, const void *from, size_t bytes)
{
    char *out = to;
    const char *in = from;
    const size_t before = (size_t)(-(uintptr_t)out % AM_LINE);
    if (bytes < before + AM_LINE) {
        memcpy(out, in, bytes);
        return;
    }
    if (before > 0)
        memcpy(out, in, before);
    size_t i = before;
    for (; i + AM_LINE <= bytes; i += AM_LINE) {
        __m128i quarter[4];
        memcpy(quarter, in + i, AM_LINE);
        for (int k = 0; k < 4; k++)
            _mm_stream_si128((__m128i *)(void *)(out + i) + k, quarter[k]);
    }
    if (i < bytes)
        memcpy(out + i, in + i, bytes - i);
}

static inline void am_stream_end(void) { _mm_sfence(); }

#else

static inline void am_stream_copy(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static inline void am_stream_end(void) {}

#endif
#endif
