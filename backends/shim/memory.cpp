// What libtorch's tensors take on the host, as its own profiler is told of it.
#include <algorithm>
#include <memory>

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "shim.h"

namespace {

constexpr auto KIND = c10::DebugInfoKind::PROFILER_STATE;

struct Meter : c10::MemoryReportingInfoBase {
  int64_t now = 0;
  int64_t peak = 0;

  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device device) override {
    if (device.is_cpu()) {
      now += bytes;
      peak = std::max(peak, now);
    }
  }

  bool memoryProfilingEnabled() const override { return true; }
};

}  // namespace

extern "C" {

// Begins to meter what this thread allocates.
int anyroll_meter_begin() {
  return guarded(-1, [] {
    c10::ThreadLocalDebugInfo::_push(KIND, std::make_shared<Meter>());
    return 0;
  });
}

// Ends the last meter that this thread began: the most bytes that were live at a time, or -1.
int64_t anyroll_meter_end() {
  return guarded<int64_t>(-1, [] {
    auto info = c10::ThreadLocalDebugInfo::_pop(KIND);
    return static_cast<Meter&>(*info).peak;
  });
}

}  // extern "C"
