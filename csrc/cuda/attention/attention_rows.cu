/* attention_rows.cu -- which kernels run. The first row that fits wins; add a row, add its file. */
#include "attention_rows.h"
#include "on_device.h"

namespace
{

bool always(const am_attention_args *) { return true; }

const AttentionRow forward_rows[] = {
    {"d256 bf16 sm90", attention_fits_d256_bf16, attention_fwd_d256_bf16},
    {"d256 f16 sm90", attention_fits_d256_f16, attention_fwd_d256_f16},
    {"d128 bf16 sm90", attention_fits_d128_bf16, attention_fwd_d128_bf16},
    {"d128 f16 sm90", attention_fits_d128_f16, attention_fwd_d128_f16},
    {"d72 bf16 sm90", attention_fits_d72_bf16, attention_fwd_d72_bf16},
    {"d80 bf16 sm90", attention_fits_d80_bf16, attention_fwd_d80_bf16},
    {"d64 bf16 sm90", attention_fits_d64_bf16, attention_fwd_d64_bf16},
    {"d80 f16 sm90", attention_fits_d80_f16, attention_fwd_d80_f16},
    {"d64 f16 sm90", attention_fits_d64_f16, attention_fwd_d64_f16},
    {"simple", always, attention_fwd_simple},
};

const AttentionRow backward_rows[] = {
    {"d256 bf16 sm90", attention_bwd_fits_d256_bf16, attention_bwd_d256_bf16},
    {"d256 f16 sm90", attention_bwd_fits_d256_f16, attention_bwd_d256_f16},
    {"d128 bf16 sm90", attention_bwd_fits_d128_bf16, attention_bwd_d128_bf16},
    {"d128 f16 sm90", attention_bwd_fits_d128_f16, attention_bwd_d128_f16},
    {"d80 bf16 sm90", attention_bwd_fits_d80_bf16, attention_bwd_d80_bf16},
    {"d64 bf16 sm90", attention_bwd_fits_d64_bf16, attention_bwd_d64_bf16},
    {"d80 f16 sm90", attention_bwd_fits_d80_f16, attention_bwd_d80_f16},
    {"d64 f16 sm90", attention_bwd_fits_d64_f16, attention_bwd_d64_f16},
    {"simple", always, attention_bwd_simple},
};

const AttentionRow *pick(const AttentionRow *row, const am_attention_args *a)
{
    while (!row->fits(a))
        row++;
    return row;
}

} // namespace

extern "C" am_status am_cuda_attention_plan(const am_attention_args *a, bool backward, const char **row, size_t *bytes)
{
    *row = pick(backward ? backward_rows : forward_rows, a)->name;
    *bytes = attention_scratch(a, backward).bytes;
    return AM_OK;
}

extern "C" am_status am_cuda_attention_forward(const am_attention_args *a, const am_exec *ex)
{
    return on_device(pick(forward_rows, a)->run, a, ex);
}

extern "C" am_status am_cuda_attention_backward(const am_attention_args *a, const am_exec *ex)
{
    return on_device(pick(backward_rows, a)->run, a, ex);
}
