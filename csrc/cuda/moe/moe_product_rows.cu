/* moe_product_rows.cu -- which kernels make a product. The first row that fits wins; add a row, add its file. */
#include "moe_job.h"

namespace
{

bool always(const MoeProduct *) { return true; }

const MoeProductRow rows[] = {
    {"simple", always, moe_product_simple},
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
