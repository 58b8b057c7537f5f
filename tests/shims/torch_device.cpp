// SHIM of libtorch_hip and libtorch_npu, for tests: a libtorch device over the vendor's shim. Its memory is the
// shim's, so that tensors have addresses that no host code may touch. Each operation waits for the stream, and runs
// on the CPU over the shim's own mapping of the same bytes. Compiled with -DSHIM_ASCEND it is PrivateUse1, else CUDA,
// as which libtorch's build for ROCm presents itself. With -DSHIM_FORWARD, too, memory and operations are those of
// libtorch's own support of NVIDIA's devices, and nothing waits.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#ifdef SHIM_ASCEND
#include <ATen/detail/PrivateUse1HooksInterface.h>
#define KEY PrivateUse1
extern "C" {
int aclrtSetDevice(int), aclrtGetDevice(int*), aclrtGetDeviceCount(unsigned*), aclrtSynchronizeStream(void*);
}
static int count() {
  unsigned count = 0;
  return aclrtGetDeviceCount(&count) ? 0 : (int)count;
}
static int set_device(int device) { return aclrtSetDevice(device); }
static int get_device(int* device) { return aclrtGetDevice(device) ? set_device(*device = 0) : 0; }
static int synchronize() { return aclrtSynchronizeStream(nullptr); }
#else
#include <ATen/detail/CUDAHooksInterface.h>
#define KEY CUDA
extern "C" {
int hipSetDevice(int), hipGetDevice(int*), hipGetDeviceCount(int*), hipStreamSynchronize(void*);
}
static int count() {
  int count = 0;
  return hipGetDeviceCount(&count) ? 0 : count;
}
static int set_device(int device) { return hipSetDevice(device); }
static int get_device(int* device) { return hipGetDevice(device); }
static int synchronize() { return hipStreamSynchronize(nullptr); }
#endif

// ---- the device below, on which operations run ----

#ifdef SHIM_FORWARD
#include <ATen/Context.h>
#include "forward/torch_cuda.h"
static constexpr auto BELOW = c10::DeviceType::CUDA;
static constexpr auto KEY_BELOW = c10::DispatchKey::CUDA;
static void* below(void* at) { return at; }
static void* take(c10::DeviceIndex device, size_t len) {
  c10::DeviceGuard guard(c10::Device(BELOW, device));
  return c10::GetAllocator(BELOW)->raw_allocate(len);
}
static void give(void* at) { c10::GetAllocator(BELOW)->raw_deallocate(at); }
static void start() {
  TORCH_CHECK(load_libtorch_cuda(), "SHIM: this libtorch is built without CUDA");
  at::globalContext().lazyInitDevice(BELOW);
  // The same bits each time, where there is a choice.
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}
#else
extern "C" {
void *anyroll_shim_host(void*), *anyroll_shim_alloc(int device, size_t len);
void anyroll_shim_free(void*);
}
static constexpr auto BELOW = c10::DeviceType::CPU;
static constexpr auto KEY_BELOW = c10::DispatchKey::CPU;
static void* below(void* at) { return anyroll_shim_host(at); }
static void* take(c10::DeviceIndex device, size_t len) { return anyroll_shim_alloc(device, len); }
static void give(void* at) { anyroll_shim_free(at); }
static void start() {}
#endif

using at::Tensor;
static constexpr auto TYPE = c10::DeviceType::KEY;
static const c10::DispatchKeySet KEYS(c10::DispatchKey::KEY);

static void check(int code, const char* call) { TORCH_CHECK(code == 0, "SHIM: ", call, " returned ", code); }
static c10::DeviceIndex current() {
  int device = 0;
  check(get_device(&device), "getDevice");
  return (c10::DeviceIndex)device;
}
static c10::Device below(c10::Device device) {
  if (BELOW == c10::DeviceType::CPU) return {BELOW};
  return {BELOW, device.has_index() ? device.index() : current()};
}
// A tensor of the device below over our memory.
static Tensor tensor_at(const void* at, at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType type,
                        c10::Device device) {
  const auto options = at::TensorOptions().dtype(type).device(below(device));
  // An empty tensor is the library's own, which it may resize.
  if (c10::multiply_integers(size) == 0) return at::empty_strided(size, stride, options);
  auto blob = at::for_blob(below(const_cast<void*>(at)), size);
  return blob.strides(stride).options(options).target_device(below(device)).make_tensor();
}

// ---- devices, streams and memory ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return {TYPE, current()}; }
  void setDevice(c10::Device device) const override { check(set_device(device.index()), "setDevice"); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_device(device.index()); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device previous = getDevice();
    setDevice(device);
    return previous;
  }
  // Everything runs on the default stream of its device.
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  void* getStreamNativeHandle(const c10::Stream) const override { return nullptr; }
  c10::DeviceIndex deviceCount() const noexcept override { return (c10::DeviceIndex)count(); }
};
C10_REGISTER_GUARD_IMPL(KEY, Guard);

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t len) override {
    const c10::DeviceIndex device = current();
    void* at = len ? take(device, len) : nullptr;
    TORCH_CHECK(at || !len, "SHIM: out of memory: ", len, " bytes on device ", (int)device);
    return {at, at, &release, {TYPE, device}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t len) const override {
    const c10::Device device{TYPE, current()};
    const auto bytes = [&](const void* at) { return tensor_at(at, {(int64_t)len}, {1}, at::kByte, device); };
    bytes(to).copy_(bytes(from));
  }
  static void release(void* at) {
    if (at) give(at);
  }
};
static Allocator allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

// Waits for what libtorch's stream of this device waits for.
static void wait(c10::Device device) {
  c10::DeviceGuard guard(device);
  check(synchronize(), "synchronize");
}
// The same where the device below does not.
static void settle(c10::Device device) {
  if (BELOW == c10::DeviceType::CPU) wait(device);
}

// ---- the same bytes for the device below ----

static bool is_ours(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

static Tensor below(const Tensor& tensor) {
  if (!is_ours(tensor)) return tensor;
  const void* at = tensor.numel() ? tensor.const_data_ptr() : nullptr;
  return tensor_at(at, tensor.sizes(), tensor.strides(), tensor.scalar_type(), tensor.device());
}

static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(TYPE, current()));
  return at::detail::empty_generic(size, &allocator, KEYS, dtype.value_or(at::kFloat), format);
}
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device && device->has_index() ? *device : c10::Device(TYPE, current()));
  return at::detail::empty_strided_generic(size, stride, &allocator, KEYS, dtype.value_or(at::kFloat));
}
// NVIDIA's driver waits for the stream before it copies to or from memory of the host that it does not know, and keeps others
// out meanwhile, of whom work in the stream may be waiting. Waiting first keeps nobody out.
static Tensor& copy(Tensor& to, const Tensor& from, bool) {
  for (const Tensor& tensor : {to, from})
    if (is_ours(tensor)) {
      if (is_ours(to) && is_ours(from)) settle(tensor.device());
      else wait(tensor.device());
    }
  below(to).copy_(below(from));
  return to;
}
static const Tensor& resize_to(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const size_t len = at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), tensor.storage_offset());
  auto storage = impl->unsafe_storage();
  if (len > storage.nbytes()) {
    c10::DeviceGuard guard(tensor.device());
    auto grown = allocator.allocate(len);
    if (storage.nbytes()) allocator.copy_data(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(len);
  }
  return tensor;
}
static Tensor to_device(const Tensor& lower, c10::Device device) {
  c10::DeviceGuard guard(device);
  Tensor made = at::detail::empty_strided_generic(lower.sizes(), lower.strides(), &allocator, KEYS, lower.scalar_type());
  below(made).copy_(lower);
  return made;
}

// ---- every other operation ----

// What an operation was given, beside what the device below gets instead.
struct Exchange {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // ours, lower
  c10::Device device{TYPE, 0};

  Tensor lower(const Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    device = tensor.device();
    pairs.emplace_back(tensor, below(tensor));
    return pairs.back().second;
  }
  c10::IValue lower(const c10::IValue& value) {
    if (value.isTensor()) return lower(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor tensor : value.toTensorVector()) list.push_back(lower(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor> tensor : value.toOptionalTensorList().vec())
        list.push_back(tensor ? std::optional<Tensor>(lower(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == TYPE) {
      device = value.toDevice();
      return below(device);
    }
    return value;
  }
  // What was written and has grown goes back; what is new becomes ours.
  void write_back() {
    for (auto& [ours, lower] : pairs) {
      if (ours.sizes() == lower.sizes() && ours.numel() == 0) continue;
      if (ours.sizes() != lower.sizes()) {
        resize_to(ours, lower.sizes(), std::nullopt);
        below(ours).copy_(lower);
      }
    }
  }
  Tensor ours(const Tensor& lower) {
    if (!lower.defined() || lower.device().type() != BELOW) return lower;
    for (auto& [ours, given] : pairs)
      if (given.is_same(lower)) return ours;
    return to_device(lower, device);
  }
  c10::IValue ours(const c10::IValue& value) {
    if (value.isTensor()) return ours(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor tensor : value.toTensorVector()) list.push_back(ours(tensor));
    return list;
  }
};

static void run_below(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  Exchange exchange;
  const size_t count = operation.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); i++) (*stack)[i] = exchange.lower((*stack)[i]);
  settle(exchange.device);
  c10::DeviceGuard guard(below(exchange.device));
  operation.redispatchBoxed(c10::DispatchKeySet(KEY_BELOW), stack);
  exchange.write_back();
  const size_t returns = operation.schema().returns().size();
  for (size_t i = stack->size() - returns; i < stack->size(); i++) (*stack)[i] = exchange.ours((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, KEY, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_below>()); }
TORCH_LIBRARY_IMPL(aten, KEY, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy);
  m.impl("resize_", resize_to);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<Tensor (*)(const Tensor&, at::IntArrayRef)>(at::native::view));
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
}

// ---- hooks ----

#ifdef SHIM_ASCEND
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  void init() const override { start(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)count(); }
};
static const bool registered = [] {
  c10::register_privateuse1_backend("npu");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
#else
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override { start(); }
  bool hasCUDA() const override { return count() > 0; }
  bool hasROCM() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return (c10::DeviceIndex)count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);
#endif
