// Tensors over memory that Rust owns, and the few ATen calls that tch lacks.
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include "shim.h"

extern "C" {
const char* anyroll_last_error() { return last_error.c_str(); }

// A tensor over `data`; `release(owner)` runs when libtorch drops its storage.
void* anyroll_tensor_from_blob(void* data, const int64_t* sizes, int n_sizes, int scalar_type, int device_type,
                               int device_index, void (*release)(void*), void* owner) {
  return guarded<void*>(nullptr, [&]() -> void* {
    c10::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(device_index));
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).device(device);
    return new at::Tensor(at::from_blob(
        data, at::IntArrayRef(sizes, n_sizes), [=](void*) { release(owner); }, options, device));
  });
}

// The same values in page-locked memory of libtorch's own, which it keeps until copies from it are done.
void* anyroll_tensor_pinned(void* tensor) {
  return guarded<void*>(nullptr,
                        [&]() -> void* { return new at::Tensor(static_cast<at::Tensor*>(tensor)->pin_memory()); });
}
}
