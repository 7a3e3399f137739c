/* gemm_lt.cu -- products by cuBLASLt, which is looked up at the first call.
 *
 * cuBLASLt thinks in columns: row-major out = left right is its out^T = right^T left^T. What its heuristics choose for
 * a shape is kept with the descriptors, so that equal calls run the same kernel and give the same bits. Alignment is
 * told to them as 16 bytes at most: one place in memory is like another.
 */
#include <pthread.h>
#include <string.h>

#include "cublaslt_abi.h"
#include "gemm.h"

extern "C" {
#include "am_dl.h"
}

#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#define SAME(ours, theirs) static_assert(static_cast<int>(ours) == static_cast<int>(theirs), #theirs)
SAME(LT_COMPUTE_F32, CUBLAS_COMPUTE_32F);
SAME(LT_TRANSPOSE, CUBLAS_OP_T);
SAME(LT_OPERATION_LEFT, CUBLASLT_MATMUL_DESC_TRANSA);
SAME(LT_OPERATION_RIGHT, CUBLASLT_MATMUL_DESC_TRANSB);
SAME(LT_ROOM_BYTES, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
SAME(LT_ALIGNMENT_LEFT, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
SAME(LT_ALIGNMENT_RIGHT, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
SAME(LT_ALIGNMENT_IN, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
SAME(LT_ALIGNMENT_OUT, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
SAME(sizeof(lt_algorithm), sizeof(cublasLtMatmulAlgo_t));
SAME(sizeof(lt_choice), sizeof(cublasLtMatmulHeuristicResult_t));
SAME(offsetof(lt_choice, status), offsetof(cublasLtMatmulHeuristicResult_t, state));
#endif

namespace
{

constexpr int kDevices = 64, kKept = 128;

/* Everything that the choice of a kernel depends on. */
struct Key {
    int64_t device, rows, columns, depth, left_stride, right_stride, out_stride, left_flipped, right_flipped, in, out,
        add, left_alignment, right_alignment, out_alignment, room;
};

struct Plan {
    Key key;
    lt_operation operation;
    lt_layout left, right, out;
    lt_algorithm algorithm;
    bool made;
};

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
lt_functions lt;
bool loaded;
lt_handle handles[kDevices];
Plan plans[kKept];
int next_plan;

am_status failed(const char *what, lt_status status)
{
    return am_fail(AM_ERR_CUDA, "%s: error %d: %s", what, status, lt.text(status));
}

#define LT(call)                                                                                                       \
    do {                                                                                                               \
        const lt_status lt_status_ = (call);                                                                           \
        if (lt_status_ != 0)                                                                                           \
            return failed(#call, lt_status_);                                                                          \
    } while (0)

am_status load()
{
    if (loaded)
        return AM_OK;
    void *library = nullptr;
    AM_TRY(am_dl_open(&library, LT_SONAME, LT_WHEEL, LT_PACKAGE));
    const struct {
        const char *name;
        void **at;
    } wanted[] = {{"cublasLtCreate", reinterpret_cast<void **>(&lt.create)},
                  {"cublasLtGetStatusString", reinterpret_cast<void **>(&lt.text)},
                  {"cublasLtMatmulDescCreate", reinterpret_cast<void **>(&lt.operation_create)},
                  {"cublasLtMatmulDescDestroy", reinterpret_cast<void **>(&lt.operation_destroy)},
                  {"cublasLtMatmulDescSetAttribute", reinterpret_cast<void **>(&lt.operation_set)},
                  {"cublasLtMatrixLayoutCreate", reinterpret_cast<void **>(&lt.layout_create)},
                  {"cublasLtMatrixLayoutDestroy", reinterpret_cast<void **>(&lt.layout_destroy)},
                  {"cublasLtMatmulPreferenceCreate", reinterpret_cast<void **>(&lt.preference_create)},
                  {"cublasLtMatmulPreferenceDestroy", reinterpret_cast<void **>(&lt.preference_destroy)},
                  {"cublasLtMatmulPreferenceSetAttribute", reinterpret_cast<void **>(&lt.preference_set)},
                  {"cublasLtMatmulAlgoGetHeuristic", reinterpret_cast<void **>(&lt.choose)},
                  {"cublasLtMatmul", reinterpret_cast<void **>(&lt.multiply)}};
    for (const auto &w : wanted)
        AM_TRY(am_dl_find(w.at, library, w.name));
    loaded = true;
    return AM_OK;
}

am_status handle_of(int device, lt_handle *out)
{
    AM_CHECK(device < kDevices, AM_ERR_UNSUPPORTED, "cuBLASLt: device %d, at most %d are served", device, kDevices);
    if (handles[device] == nullptr)
        LT(lt.create(&handles[device]));
    *out = handles[device];
    return AM_OK;
}

cudaDataType_t type_of(int64_t dtype) { return dtype == AM_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

/* A row-major matrix is cuBLASLt's transpose of it: `flipped` where its columns, not its rows, lie end to end. */
am_status layout_of(lt_layout *out, int64_t dtype, int64_t rows, int64_t columns, int64_t stride, bool flipped)
{
    LT(lt.layout_create(out, type_of(dtype), static_cast<uint64_t>(flipped ? rows : columns),
                        static_cast<uint64_t>(flipped ? columns : rows), stride));
    return AM_OK;
}

void drop(Plan *p)
{
    if (p->operation)
        (void)lt.operation_destroy(p->operation);
    for (const lt_layout layout : {p->left, p->right, p->out})
        if (layout)
            (void)lt.layout_destroy(layout);
    *p = {};
}

am_status choose(Plan *p, lt_handle handle, lt_preference preference)
{
    const Key &k = p->key;
    const uint64_t room = static_cast<uint64_t>(k.room);
    LT(lt.preference_set(preference, LT_ROOM_BYTES, &room, sizeof room));
    const struct {
        int attribute;
        int64_t bytes;
    } alignments[] = {{LT_ALIGNMENT_LEFT, k.right_alignment},
                      {LT_ALIGNMENT_RIGHT, k.left_alignment},
                      {LT_ALIGNMENT_IN, k.out_alignment},
                      {LT_ALIGNMENT_OUT, k.out_alignment}};
    for (const auto &a : alignments) {
        const uint32_t bytes = static_cast<uint32_t>(a.bytes);
        LT(lt.preference_set(preference, a.attribute, &bytes, sizeof bytes));
    }
    lt_choice choice = {};
    int found = 0;
    LT(lt.choose(handle, p->operation, p->right, p->left, p->out, p->out, preference, 1, &choice, &found));
    AM_CHECK(found > 0 && choice.status == 0, AM_ERR_CUDA,
             "cublasLtMatmulAlgoGetHeuristic: none for [%lld, %lld, %lld]", (long long)k.rows, (long long)k.depth,
             (long long)k.columns);
    p->algorithm = choice.algorithm;
    return AM_OK;
}

am_status fill(Plan *p, lt_handle handle)
{
    const Key &k = p->key;
    LT(lt.operation_create(&p->operation, LT_COMPUTE_F32, CUDA_R_32F));
    const int32_t transpose = LT_TRANSPOSE;
    if (k.right_flipped)
        LT(lt.operation_set(p->operation, LT_OPERATION_LEFT, &transpose, sizeof transpose));
    if (k.left_flipped)
        LT(lt.operation_set(p->operation, LT_OPERATION_RIGHT, &transpose, sizeof transpose));
    AM_TRY(layout_of(&p->left, k.in, k.rows, k.depth, k.left_stride, k.left_flipped));
    AM_TRY(layout_of(&p->right, k.in, k.depth, k.columns, k.right_stride, k.right_flipped));
    AM_TRY(layout_of(&p->out, k.out, k.rows, k.columns, k.out_stride, false));
    lt_preference preference = nullptr;
    LT(lt.preference_create(&preference));
    const am_status st = choose(p, handle, preference);
    (void)lt.preference_destroy(preference);
    return st;
}

am_status plan_of(const Key &key, lt_handle handle, Plan **out)
{
    for (Plan &p : plans)
        if (p.made && memcmp(&p.key, &key, sizeof key) == 0) {
            *out = &p;
            return AM_OK;
        }
    Plan *const p = &plans[next_plan];
    next_plan = (next_plan + 1) % kKept;
    drop(p);
    p->key = key;
    const am_status st = fill(p, handle);
    if (st != AM_OK)
        drop(p);
    p->made = st == AM_OK;
    *out = p;
    return st;
}

int64_t alignment_of(const am_tensor *t)
{
    const uintptr_t bits = reinterpret_cast<uintptr_t>(t->data) | 16;
    return static_cast<int64_t>(bits & (~bits + 1));
}

/* The line axis is the last where that has stride 1. */
am_status operand(const char *name, const am_tensor *t, int64_t *stride, int64_t *flipped)
{
    *flipped = !(t->stride[1] == 1 || t->shape[1] == 1);
    const int along = *flipped ? 0 : 1;
    *stride = t->shape[1 - along] == 1 ? t->shape[along] : t->stride[1 - along];
    AM_CHECK((t->stride[along] == 1 || t->shape[along] == 1) && *stride >= t->shape[along], AM_ERR_SHAPE,
             "%s: strides %lld and %lld, one must be 1 and the other no less than a line", name,
             (long long)t->stride[0], (long long)t->stride[1]);
    return AM_OK;
}

/* The workspace from its first aligned byte; its size does not depend on where that is. */
void *room_of(const gemm_call *c, int64_t *bytes)
{
    const uintptr_t start = reinterpret_cast<uintptr_t>(c->workspace);
    *bytes = c->workspace_bytes < GEMM_ALIGNMENT ? 0 : c->workspace_bytes - GEMM_ALIGNMENT;
    return *bytes ? reinterpret_cast<void *>((start + GEMM_ALIGNMENT - 1) / GEMM_ALIGNMENT * GEMM_ALIGNMENT) : nullptr;
}

am_status run_locked(const gemm_call *c, const Key &key, cudaStream_t stream)
{
    AM_TRY(load());
    lt_handle handle;
    Plan *p;
    AM_TRY(handle_of(static_cast<int>(key.device), &handle));
    AM_TRY(plan_of(key, handle, &p));
    int64_t bytes;
    void *const room = room_of(c, &bytes);
    const float one = 1.0f, beta = c->add ? 1.0f : 0.0f;
    const lt_status st =
        lt.multiply(handle, p->operation, &one, c->right->data, p->right, c->left->data, p->left, &beta, c->out->data,
                    p->out, c->out->data, p->out, &p->algorithm, room, static_cast<size_t>(bytes), stream);
    if (st != 0)
        return failed("cublasLtMatmul", st);
    return AM_OK;
}

} // namespace

extern "C" am_status gemm_run(const gemm_call *c, cudaStream_t stream)
{
    Key key = {};
    int device = 0;
    AM_CUDA(cudaGetDevice(&device));
    key.device = device;
    key.rows = c->left->shape[0];
    key.depth = c->left->shape[1];
    key.columns = c->right->shape[1];
    key.in = c->left->dtype;
    key.out = c->out->dtype;
    key.add = c->add;
    (void)room_of(c, &key.room);
    key.left_alignment = alignment_of(c->left);
    key.right_alignment = alignment_of(c->right);
    key.out_alignment = alignment_of(c->out);
    if (key.rows == 0 || key.columns == 0)
        return AM_OK;
    key.out_stride = key.rows == 1 ? key.columns : c->out->stride[0];
    if (key.depth == 0) {
        const size_t size = am_dtype_size(c->out->dtype);
        if (!c->add)
            AM_CUDA(cudaMemset2DAsync(c->out->data, static_cast<size_t>(key.out_stride) * size, 0,
                                      static_cast<size_t>(key.columns) * size, static_cast<size_t>(key.rows), stream));
        return AM_OK;
    }
    AM_TRY(operand("left", c->left, &key.left_stride, &key.left_flipped));
    AM_TRY(operand("right", c->right, &key.right_stride, &key.right_flipped));
    pthread_mutex_lock(&lock);
    const am_status st = run_locked(c, key, stream);
    pthread_mutex_unlock(&lock);
    return st;
}
