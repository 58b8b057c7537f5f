// A timeline of libtorch's operations on this thread and of what devices ran, by libtorch's own profiler.
#include <memory>
#include <set>
#include <string>

#include <ATen/record_function.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "shim.h"

namespace {

using torch::profiler::impl::ActivityType;

std::set<ActivityType> activities_of(int device_type) {
  std::set<ActivityType> found{ActivityType::CPU};
  if (device_type == static_cast<int>(c10::DeviceType::CUDA)) {
    found.insert(ActivityType::CUDA);
  } else if (device_type == static_cast<int>(c10::DeviceType::PrivateUse1)) {
    found.insert(ActivityType::PrivateUse1);
  }
  return found;
}

struct Span {
  std::string name;  // the recording refers to it
  at::RecordFunction recording{at::RecordScope::USER_SCOPE};
};

}  // namespace

extern "C" {

// Begins to record this thread's operations and spans, and all that devices of the type run.
int anyroll_profile_begin(int device_type) {
  return guarded(-1, [=] {
    const torch::profiler::impl::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
    const auto activities = activities_of(device_type);
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
    return 0;
  });
}

// Ends the recording, and writes it as a Chrome trace.
int anyroll_profile_end(const char* path) {
  return guarded(-1, [=] {
    torch::autograd::profiler::disableProfiler()->save(path);
    return 0;
  });
}

// Opens a span of this thread; null with the reason in anyroll_last_error.
void* anyroll_span_begin(const char* name) {
  return guarded<void*>(nullptr, [=]() -> void* {
    auto span = std::make_unique<Span>();
    if (span->recording.isActive()) {
      span->name = name;
      span->recording.before(span->name);
    }
    return span.release();
  });
}

void anyroll_span_end(void* span) { delete static_cast<Span*>(span); }

}  // extern "C"
