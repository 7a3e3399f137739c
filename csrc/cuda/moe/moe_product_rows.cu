/* moe_product_rows.cu -- which kernels make a product. The first row that fits wins; add a row, add its file. */
#include "moe_job.h"

namespace
{

bool always(const MoeProduct *) { return true; }

/* Only who knows the rows of every group can ask for it. */
bool has_counts(const MoeProduct *p) { return p->counts != nullptr; }

/* What the copy engine and 16-byte stores take; row numbers and columns are 32 bits wide. */
bool fits_sm90(const MoeProduct *p)
{
    constexpr int64_t kMost = (1ll << 31) - 1024, kGroups = 1024;
    const void *const tensors[] = {p->a, p->b, p->c, p->act};
    const int64_t strides[] = {p->lda, p->ldb, p->ldc};
    const int64_t sizes[] = {p->rows, p->n, p->kind == MOE_TN ? p->m : p->k};
    bool fits = p->dtype == AM_BF16 && (p->to == AM_BF16 || p->kind == MOE_TN) && p->groups <= kGroups &&
                p->b_group % 8 == 0 && p->b_group >= 0 && (p->b_group > 0 || p->groups == 1 || p->kind == MOE_TN) &&
                (!p->gate || p->n % 16 == 0);
    for (const void *tensor : tensors)
        fits = fits && reinterpret_cast<uintptr_t>(tensor) % 16 == 0;
    for (const int64_t stride : strides)
        fits = fits && stride > 0 && stride % 8 == 0;
    for (const int64_t size : sizes)
        fits = fits && size > 0 && size < kMost;
    return fits && p->n % 8 == 0 && sizes[2] % 8 == 0;
}

am_status run_sm90(const MoeProduct *p, cudaStream_t stream)
{
    switch (p->kind) {
    case MOE_NT: return p->gate ? moe_product_gate_sm90(p, stream) : moe_product_nt_sm90(p, stream);
    case MOE_NN: return moe_product_nn_sm90(p, stream);
    default: return p->to == AM_F32 ? moe_product_tn_f32_sm90(p, stream) : moe_product_tn_sm90(p, stream);
    }
}

const MoeProductRow rows[] = {
    {"cublasLt", false, has_counts, moe_product_lt},
    {"bf16 sm90", true, fits_sm90, run_sm90},
    {"simple", false, always, moe_product_simple},
};

} // namespace

const MoeProductRow *moe_pick(const MoeProduct *p)
{
    const MoeProductRow *row = rows;
    while (!row->fits(p))
        row++;
    return row;
}

am_status moe_product(const MoeProduct *p, cudaStream_t stream) { return moe_pick(p)->run(p, stream); }
