// Accelerators through c10's own interfaces, so that no vendor's header is needed.
#include <ATen/Context.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include "shim.h"

static c10::impl::VirtualGuardImpl guard_of(int device_type) {
  return c10::impl::VirtualGuardImpl(static_cast<c10::DeviceType>(device_type));
}

extern "C" {
// Starts libtorch's support of a device type; its library is loaded.
int anyroll_torch_start(int device_type) {
  return guarded<int>(-1, [&] {
    at::globalContext().lazyInitDevice(static_cast<c10::DeviceType>(device_type));
    return 0;
  });
}
// The vendor's handle of the stream on which libtorch computes in this thread.
int anyroll_torch_stream(int device_type, int index, void** handle) {
  return guarded<int>(-1, [&] {
    c10::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(index));
    *handle = guard_of(device_type).getStream(device).native_handle();
    return 0;
  });
}
// Makes libtorch compute on the stream `id` in this thread, and tells the one that it did before. The id of a stream that
// is not libtorch's own is the vendor's handle.
int anyroll_exchange_stream(int device_type, int index, int64_t id, int64_t* before) {
  return guarded<int>(-1, [&] {
    auto type = static_cast<c10::DeviceType>(device_type);
    auto stream = c10::Stream::unpack3(id, static_cast<c10::DeviceIndex>(index), type);
    *before = guard_of(device_type).exchangeStream(stream).id();
    return 0;
  });
}
// Gives back to devices of a type the memory that libtorch keeps for its next tensors, if it keeps any.
int anyroll_empty_cache(int device_type) {
  return guarded<int>(-1, [&] {
    auto* allocator = c10::GetAllocator(static_cast<c10::DeviceType>(device_type));
    if (auto* caching = dynamic_cast<c10::DeviceAllocator*>(allocator)) caching->emptyCache();
    return 0;
  });
}
// Makes a device current in this thread, and returns the index of the one that was, or -1.
int anyroll_exchange_device(int device_type, int index) {
  return guarded<int>(-1, [&]() -> int {
    c10::Device device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(index));
    return guard_of(device_type).exchangeDevice(device).index();
  });
}
// Makes the device current again that was; one that this process has not used is not started for it.
void anyroll_restore_device(int device_type, int index) {
  guard_of(device_type).uncheckedSetDevice(
      c10::Device(static_cast<c10::DeviceType>(device_type), static_cast<c10::DeviceIndex>(index)));
}
}
