#include "flat.h"

#include <string.h>

#include "am_block.h"

void am_flat_begin(const am_tensor_list *list, int64_t *begin)
{
    begin[0] = 0;
    for (int64_t i = 0; i < list->n; i++)
        begin[i + 1] = begin[i] + am_numel(&list->items[i]);
}

int64_t am_flat_find(const int64_t *begin, int64_t n, int64_t at)
{
    int64_t low = 0, high = n - 1; /* the last tensor that starts at or before `at`: empty ones before it lose */
    while (low < high) {
        const int64_t middle = low + (high - low + 1) / 2;
        if (begin[middle] <= at)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

typedef struct span {
    uintptr_t start;
    uint32_t list, item;
} span;

static int64_t collect(const am_named_list *lists, int n_lists, span *out)
{
    int64_t count = 0;
    for (int l = 0; l < n_lists; l++)
        for (int64_t i = 0; i < lists[l].list->n; i++) {
            const am_tensor *t = &lists[l].list->items[i];
            if (am_numel(t) != 0)
                out[count++] = (span){(uintptr_t)t->data, (uint32_t)l, (uint32_t)i};
        }
    return count;
}

static void insertion_sort(span *s, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        const span x = s[i];
        int64_t j = i;
        for (; j > 0 && s[j - 1].start > x.start; j--)
            s[j] = s[j - 1];
        s[j] = x;
    }
}

enum { DIGIT_BITS = 11, DIGITS = 1 << DIGIT_BITS };

/* By the addresses above the lowest one, a digit at a time; `other` is as large as `s`. Returns the sorted one. */
static span *radix_sort(span *s, span *other, int64_t n)
{
    uintptr_t low = UINTPTR_MAX, high = 0;
    for (int64_t i = 0; i < n; i++) {
        low = s[i].start < low ? s[i].start : low;
        high = s[i].start > high ? s[i].start : high;
    }
    for (int shift = 0; shift < 64 && (high - low) >> shift != 0; shift += DIGIT_BITS) {
        int64_t at[DIGITS + 1] = {0};
        for (int64_t i = 0; i < n; i++)
            at[((s[i].start - low) >> shift & (DIGITS - 1)) + 1]++;
        for (int d = 1; d <= DIGITS; d++)
            at[d] += at[d - 1];
        for (int64_t i = 0; i < n; i++)
            other[at[(s[i].start - low) >> shift & (DIGITS - 1)]++] = s[i];
        span *const sorted = other;
        other = s;
        s = sorted;
    }
    return s;
}

/* One pass over the starts: a tensor shares memory with an earlier one when it starts before that one's end. */
static am_status sweep(const char *fname, const am_named_list *lists, const span *s, int64_t n)
{
    uintptr_t written_end = 0, read_end = 0;
    const span *written = NULL, *read = NULL;
    for (int64_t i = 0; i < n; i++) {
        const am_named_list *const of = &lists[s[i].list];
        const am_tensor *const t = &of->list->items[s[i].item];
        const span *const other = s[i].start < written_end               ? written
                                  : of->written && s[i].start < read_end ? read
                                                                         : NULL;
        AM_CHECK(other == NULL, AM_ERR_ARG, "%s: %s[%u] shares memory with %s[%u]", fname, of->name, s[i].item,
                 lists[other->list].name, other->item);
        const uintptr_t end = s[i].start + (uintptr_t)am_numel(t) * am_dtype_size(t->dtype);
        uintptr_t *const last = of->written ? &written_end : &read_end;
        if (end > *last) {
            *last = end;
            *(of->written ? &written : &read) = &s[i];
        }
    }
    return AM_OK;
}

am_status am_check_disjoint(const char *fname, const am_named_list *lists, int n_lists)
{
    enum { FEW = 32 };
    span few[FEW];
    int64_t most = 0;
    for (int l = 0; l < n_lists; l++)
        most += lists[l].list->n;
    if (most <= FEW) {
        const int64_t n = collect(lists, n_lists, few);
        insertion_sort(few, n);
        return sweep(fname, lists, few, n);
    }
    span *const s = am_block_take(2 * (size_t)most * sizeof *s);
    AM_CHECK(s != NULL, AM_ERR_NOMEM, "%s: no memory to check %lld tensors", fname, (long long)most);
    const int64_t n = collect(lists, n_lists, s);
    const am_status st = sweep(fname, lists, radix_sort(s, s + most, n), n);
    am_block_give(s);
    return st;
}
