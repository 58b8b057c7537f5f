// What the shims of the vendors' runtimes have alike: streams of a device, and work that a fault ends. Each library has its
// own, since two of them may be in one process.
#pragma once
#include "device.h"

namespace {

template <typename T>
T& only() {
  static T* value = new T;  // outlives every thread
  return *value;
}
using StreamMap = shim::Handles<shim::Stream*>;
struct Ranges {
  std::mutex mutex;
  std::map<uintptr_t, size_t> all;
};

// The first failure of a device's work, in the vendor's code: every later call returns it, as after a fault on hardware.
std::atomic<int>& broken(int device) {
  static std::atomic<int> all[256];
  return all[device & 255];
}
void fault(int device, int code, const char* what) {
  fprintf(stderr, "SHIM: device %d is lost: %s is not memory that is live\n", device, what);
  broken(device) = code;
}

shim::Stream* default_stream(int device) {
  static std::mutex mutex;
  static auto* streams = new std::map<int, shim::Stream*>;
  std::lock_guard<std::mutex> lock(mutex);
  auto& stream = (*streams)[device];
  if (!stream) stream = new shim::Stream(device);
  return stream;
}

// Runs `work` on the stream if the ranges on its device are live by then; a fault with `code` ends the device. Returns
// whether they are live now.
bool enqueue_on(shim::Stream* stream, std::map<const void*, size_t> ranges, int code, std::function<void()> work) {
  const int device = stream->device;
  auto are_live = [=] {
    for (auto [at, len] : ranges)
      if (!shim::Memory::get().is_live(at, len, device)) return false;
    return true;
  };
  if (!are_live()) return false;
  stream->enqueue([=] {
    if (broken(device)) return;
    if (are_live())
      work();
    else
      fault(device, code, "a range of a copy or fill");
  });
  return true;
}

}  // namespace
