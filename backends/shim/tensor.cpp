// Tensors over memory that Rust owns, and the few ATen calls that tch lacks.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include "shim.h"

// Whether this libtorch has page-locked memory for a device, once it is open. A process has one kind of accelerator.
static bool can_pin(c10::DeviceType type) {
  static const bool can = [=] {
    try {
      return at::globalContext().getPinnedMemoryAllocator(type) != nullptr;
    } catch (const c10::Error&) {
      return false;  // the answer of a backend that has none
    }
  }();
  return can;
}

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

// The same values on a device, in the order of its stream. They go by page-locked memory of libtorch's own, which it
// keeps until the copy is done; where it has none the host waits for the copy.
void* anyroll_tensor_upload(void* tensor, int device_type, int device_index) {
  return guarded<void*>(nullptr, [&]() -> void* {
    const at::Tensor& host = *static_cast<at::Tensor*>(tensor);
    c10::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(device_index));
    const bool is_pinned = can_pin(device.type());
    return new at::Tensor((is_pinned ? host.pin_memory() : host).to(device, host.scalar_type(), is_pinned));
  });
}
}
