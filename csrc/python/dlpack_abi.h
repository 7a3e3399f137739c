/* dlpack_abi.h -- the binary layout of DLPack 1.3 that this extension reads, written from the standard
 * (https://dmlc.github.io/dlpack/latest/c_api.html). Structures only; field order is the ABI. */
#ifndef AM_DLPACK_ABI_H
#define AM_DLPACK_ABI_H

#include <stdint.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_CUDA_HOST = 3 };
enum { DL_INT = 0, DL_UINT = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_BOOL = 6 };
enum { DL_MAJOR = 1, DL_MINOR = 3 };

#define DL_FLAG_READ_ONLY ((uint64_t)1)

typedef struct DLDevice {
    int32_t device_type, device_id;
} DLDevice;

typedef struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
} DLDataType;

typedef struct DLTensor {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL means compact row-major */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor { /* capsule "dltensor" */
    DLTensor dl_tensor;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;

typedef struct DLVersion {
    uint32_t major, minor;
} DLVersion;

typedef struct DLManagedTensorVersioned { /* capsule "dltensor_versioned" */
    DLVersion version;
    void *manager_ctx;
    void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags;
    DLTensor dl_tensor;
} DLManagedTensorVersioned;

typedef struct DLExchangeHeader {
    DLVersion version;
    struct DLExchangeHeader *prev_api;
} DLExchangeHeader;

typedef struct DLExchangeAPI { /* capsule "dlpack_exchange_api" on the tensor type */
    DLExchangeHeader header;
    int (*managed_tensor_allocator)(DLTensor *, DLManagedTensorVersioned **, void *,
                                    void (*)(void *, const char *, const char *));
    int (*managed_tensor_from_py_object_no_sync)(void *, DLManagedTensorVersioned **);
    int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned *, void **);
    int (*dltensor_from_py_object_no_sync)(void *, DLTensor *);
    int (*current_work_stream)(int32_t device_type, int32_t device_id, void **stream);
} DLExchangeAPI;

#endif
