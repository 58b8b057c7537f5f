// Devices that tch has no name for: PrivateUse1, and libtorch's meta device. Where tch asks what device such a tensor is
// on, it says MPS, which this build of libtorch does not have. So what is made on MPS is made on one of them instead: on
// the meta device in a thread that measures memory, else on the one PrivateUse1 that this process has open. Every other
// operation goes by its tensors.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <atomic>
#include "shim.h"

static std::atomic<int> opened{0};

static c10::TensorOptions there(std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                                std::optional<bool> pin_memory) {
  auto options = c10::TensorOptions().dtype(dtype).layout(layout).pinned_memory(pin_memory);
  if (is_measuring()) return options.device(c10::kMeta);
  return options.device(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(opened.load())));
}
static at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                        std::optional<at::Device>, std::optional<bool> pin_memory,
                        std::optional<at::MemoryFormat> format) {
  return at::empty(size, there(dtype, layout, pin_memory), format);
}
static at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout> layout, std::optional<at::Device>,
                                std::optional<bool> pin_memory) {
  return at::empty_strided(size, stride, there(dtype, layout, pin_memory));
}

namespace {

// What libtorch asks of a device before it makes a tensor there: one device, always current.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr auto TYPE = c10::DeviceType::MPS;
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return {TYPE, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {TYPE, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

}  // namespace

// Makes what is made on MPS elsewhere, from the first call on.
static void take_name() {
  static const c10::impl::DeviceGuardImplRegistrar guard(Guard::TYPE, new Guard);
  static const auto library = [] {
    torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::MPS, __FILE__, __LINE__);
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    return library;
  }();
}

extern "C" {
int anyroll_npu_start(int index) {
  return guarded<int>(-1, [&] {
    opened = index;
    take_name();
    return 0;
  });
}
}
