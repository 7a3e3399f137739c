#include "am_block.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>

enum { SLOTS = 16, LEAST = 1 << 16 }; /* smaller ones malloc has at hand */

typedef struct header {
    _Alignas(16) size_t bytes; /* behind it */
} header;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static header *kept[SLOTS];
static size_t kept_bytes;

/* A child has the lock free, whatever another thread was at. */
static void before_fork(void) { pthread_mutex_lock(&lock); }

static void after_fork_parent(void) { pthread_mutex_unlock(&lock); }

static void after_fork_child(void) { pthread_mutex_init(&lock, NULL); }

static void init(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

static void take_lock(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, init);
    pthread_mutex_lock(&lock);
}

/* The smallest that fits without wasting more than it holds. */
static header *take_kept(size_t bytes)
{
    header *found = NULL;
    take_lock();
    int best = -1;
    for (int i = 0; i < SLOTS; i++)
        if (kept[i] && kept[i]->bytes >= bytes && kept[i]->bytes / 2 <= bytes &&
            (best < 0 || kept[i]->bytes < kept[best]->bytes))
            best = i;
    if (best >= 0) {
        found = kept[best];
        kept[best] = NULL;
        kept_bytes -= found->bytes;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void *am_block_take(size_t bytes)
{
    header *h = bytes < LEAST ? NULL : take_kept(bytes);
    if (h == NULL) {
        h = bytes > SIZE_MAX - sizeof *h ? NULL : malloc(sizeof *h + bytes);
        if (h == NULL)
            return NULL;
        h->bytes = bytes;
    }
    return h + 1;
}

void am_block_give(void *block)
{
    if (block == NULL)
        return;
    header *h = (header *)block - 1;
    if (h->bytes >= LEAST && h->bytes <= AM_BLOCK_KEPT) {
        take_lock();
        int at = -1, least = -1; /* a free slot, else the smallest's */
        for (int i = 0; i < SLOTS && at < 0; i++) {
            if (kept[i] == NULL)
                at = i;
            else if (least < 0 || kept[i]->bytes < kept[least]->bytes)
                least = i;
        }
        header *out = h;
        if (at >= 0 && kept_bytes + h->bytes <= AM_BLOCK_KEPT) {
            kept[at] = h;
            kept_bytes += h->bytes;
            out = NULL;
        } else if (least >= 0 && kept[least]->bytes < h->bytes &&
                   kept_bytes - kept[least]->bytes + h->bytes <= AM_BLOCK_KEPT) {
            out = kept[least];
            kept[least] = h;
            kept_bytes += h->bytes - out->bytes;
        }
        pthread_mutex_unlock(&lock);
        h = out;
    }
    free(h);
}
