// SHIM of libamdhip64, for tests: the HIP runtime over host memory. Written from hip_runtime_api.h 7.2 and its
// documentation. It refuses what the documentation forbids, and some of what the runtime only discourages: copies of
// pageable memory, a launch on a stream of another device.
#include <dlfcn.h>
#include <vector>
#ifdef SHIM_VENDOR_HEADERS
#include <hip/hip_runtime_api.h>
#else
#include "hip_abi.h"
#endif
#include "runtime.h"
#include "kernel_code.h"

using shim::Memory;

namespace {

constexpr const char* ARCHITECTURE = "gfx942:sramecc+:xnack-";
constexpr size_t GRANULARITY = Memory::PAGE;

using EventMap = shim::Handles<std::shared_ptr<shim::Event>>;
struct Pool {
  int device;
};
struct PoolMap : shim::Handles<std::shared_ptr<Pool>> {};
struct Physical {
  size_t len;
  int device;
};
struct PhysicalMap : shim::Handles<std::shared_ptr<Physical>> {};
struct Module {
  void* library;
};
struct ModuleMap : shim::Handles<std::shared_ptr<Module>> {};
struct FunctionMap : shim::Handles<shim::Bind> {};
// Reservations by address, and the mappings in them.
struct Reserved : Ranges {};
struct Mapped : Ranges {};

thread_local int current = 0;

hipError_t usable() {
  if (!shim::devices()) return hipErrorNoDevice;
  return (hipError_t)broken(current).load();
}
#define USABLE() \
  if (hipError_t error = usable()) return error

shim::Stream* stream_of(hipStream_t stream) {
  return stream ? only<StreamMap>().find(stream) : default_stream(current);
}

// Runs `work` on the stream if the ranges on the device are live by then; a fault ends the device.
hipError_t enqueue(hipStream_t handle, std::map<const void*, size_t> ranges, std::function<void()> work) {
  USABLE();
  shim::Stream* stream = stream_of(handle);
  if (!stream || stream->device != current) return hipErrorInvalidHandle;
  const bool is_live = enqueue_on(stream, std::move(ranges), hipErrorIllegalAddress, std::move(work));
  return is_live ? hipSuccess : hipErrorInvalidValue;
}

}  // namespace

extern "C" {

const int anyroll_shim = 1;  // so that nobody takes this for the vendor's library

// For the shim of libtorch: the byte behind a device address, and memory without the wait that hipFree implies.
void* anyroll_shim_host(void* at) { return Memory::get().host((char*)at); }
void* anyroll_shim_alloc(int device, size_t len) {
  void* at = Memory::get().reserve(len, Memory::ALIGN);
  if (!at || Memory::get().commit(device, at, len)) return at;
  Memory::get().unreserve(at, len);
  return nullptr;
}
int anyroll_shim_is_live(const void* at, size_t len) { return Memory::get().is_live(at, len, -1); }
// In order with libtorch's stream, as its own allocator hands memory out again.
void anyroll_shim_free(void* at) {
  const int device = Memory::get().owner(at);
  if (device >= 0) default_stream(device)->enqueue([=] { Memory::get().release(at); });
}

// ---- devices ----

hipError_t hipInit(unsigned flags) { return flags ? hipErrorInvalidValue : shim::devices() ? hipSuccess : hipErrorNoDevice; }
hipError_t hipRuntimeGetVersion(int* version) {
  *version = (int)shim::setting("ANYROLL_SHIM_VERSION", 70253211);
  return hipSuccess;
}
hipError_t hipDrvGetErrorName(hipError_t error, const char** text) {
  *text = error == hipErrorNoDevice ? "hipErrorNoDevice" : error == hipErrorOutOfMemory ? "hipErrorOutOfMemory" : "hipError";
  return hipSuccess;
}
hipError_t hipDrvGetErrorString(hipError_t error, const char** text) {
  *text = error == hipErrorNoDevice ? "no ROCm-capable device is detected" : "an error of the shim";
  return hipSuccess;
}
hipError_t hipGetDeviceCount(int* count) {
  *count = shim::devices();
  return *count ? hipSuccess : hipErrorNoDevice;
}
hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
  if (ordinal < 0 || ordinal >= shim::devices()) return hipErrorInvalidDevice;
  *device = ordinal;
  return hipSuccess;
}
hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= shim::devices()) return hipErrorInvalidDevice;
  current = device;
  return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
  USABLE();
  *device = current;
  return hipSuccess;
}
hipError_t hipDeviceGetName(char* name, int len, hipDevice_t device) {
  snprintf(name, len, "Shim of an AMD GPU %d", device);
  return hipSuccess;
}
hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t) {
  *bytes = shim::capacity();
  return hipSuccess;
}
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int) {
  switch ((int)attribute) {
    case hipDeviceAttributeMultiprocessorCount: *value = 304; return hipSuccess;
    case hipDeviceAttributeWarpSize: *value = 64; return hipSuccess;
    case hipDeviceAttributeMemoryPoolsSupported:
    case hipDeviceAttributeVirtualMemoryManagementSupported: *value = 1; return hipSuccess;
    default: return hipErrorInvalidValue;
  }
}
hipError_t hipDeviceGetPCIBusId(char* id, int len, int device) {
  snprintf(id, len, "0000:%02X:00.0", device + 1);
  return hipSuccess;
}
hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return hipSuccess;
}
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  if (device < 0 || device >= shim::devices()) return hipErrorInvalidDevice;
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "Shim of an AMD GPU %d", device);
  properties->totalGlobalMem = shim::capacity();
  strcpy(properties->gcnArchName, ARCHITECTURE);
  return hipSuccess;
}
hipError_t hipDeviceSynchronize() {
  USABLE();
  std::vector<shim::Stream*> streams{default_stream(current)};
  only<StreamMap>().each([&](shim::Stream* stream) { if (stream->device == current) streams.push_back(stream); });
  for (auto* stream : streams) stream->synchronize();
  return usable();
}
hipError_t hipMemGetInfo(size_t* free, size_t* total) {
  USABLE();
  *total = shim::capacity();
  *free = *total - Memory::get().used(current);
  return hipSuccess;
}

// ---- memory ----

hipError_t hipMemPoolCreate(hipMemPool_t* pool, const hipMemPoolProps* properties) {
  USABLE();
  static const unsigned char none[sizeof properties->reserved] = {};
  const auto& p = *properties;
  const bool fits = p.allocType == hipMemAllocationTypePinned && p.location.type == hipMemLocationTypeDevice &&
                    p.location.id < shim::devices() && !memcmp(p.reserved, none, sizeof none);
  if (!fits) return hipErrorInvalidValue;
  *pool = (hipMemPool_t)only<PoolMap>().add(std::make_shared<Pool>(Pool{p.location.id}));
  return hipSuccess;
}
hipError_t hipMemPoolDestroy(hipMemPool_t pool) {
  return only<PoolMap>().remove(pool) ? hipSuccess : hipErrorInvalidValue;
}
hipError_t hipMemPoolSetAttribute(hipMemPool_t pool, hipMemPoolAttr, void* value) {
  return only<PoolMap>().find(pool) && value ? hipSuccess : hipErrorInvalidValue;
}
hipError_t hipMemPoolTrimTo(hipMemPool_t pool, size_t) {
  USABLE();
  return only<PoolMap>().find(pool) ? hipSuccess : hipErrorInvalidValue;
}
hipError_t hipMallocFromPoolAsync(void** at, size_t len, hipMemPool_t handle, hipStream_t stream) {
  USABLE();
  auto pool = only<PoolMap>().find(handle);
  if (!at || !len || !pool || !stream_of(stream)) return hipErrorInvalidValue;
  *at = anyroll_shim_alloc(pool->device, len);
  return *at ? hipSuccess : hipErrorOutOfMemory;
}
hipError_t hipFreeAsync(void* at, hipStream_t stream) {
  USABLE();
  if (!Memory::get().block(at)) return hipErrorInvalidValue;
  return enqueue(stream, {}, [=] { Memory::get().release(at); });
}

// ---- virtual memory ----

hipError_t hipMemGetAllocationGranularity(size_t* bytes, const hipMemAllocationProp* properties, hipMemAllocationGranularity_flags) {
  if (properties->type != hipMemAllocationTypePinned) return hipErrorInvalidValue;
  *bytes = GRANULARITY;
  return hipSuccess;
}
hipError_t hipMemAddressReserve(void** at, size_t len, size_t alignment, void*, unsigned long long flags) {
  USABLE();
  if (!len || len % GRANULARITY || flags) return hipErrorInvalidValue;
  *at = Memory::get().reserve(len, std::max(alignment, GRANULARITY));
  if (!*at) return hipErrorOutOfMemory;
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  only<Reserved>().all[(uintptr_t)*at] = len;
  return hipSuccess;
}
hipError_t hipMemAddressFree(void* at, size_t len) {
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  auto found = only<Reserved>().all.find((uintptr_t)at);
  if (found == only<Reserved>().all.end() || found->second != len) return hipErrorInvalidValue;
  for (auto [mapped, bytes] : only<Mapped>().all)
    if (mapped >= (uintptr_t)at && mapped < (uintptr_t)at + len) return hipErrorInvalidValue;
  only<Reserved>().all.erase(found);
  Memory::get().unreserve(at, len);
  return hipSuccess;
}
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t* handle, size_t len, const hipMemAllocationProp* properties, unsigned long long flags) {
  USABLE();
  const bool fits = properties->type == hipMemAllocationTypePinned && properties->location.type == hipMemLocationTypeDevice;
  if (!len || len % GRANULARITY || flags || !fits) return hipErrorInvalidValue;
  const int device = properties->location.id;
  if (Memory::get().used(device) + len > shim::capacity()) return hipErrorOutOfMemory;
  *handle = (hipMemGenericAllocationHandle_t)only<PhysicalMap>().add(std::make_shared<Physical>(Physical{len, device}));
  return hipSuccess;
}
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) {
  return only<PhysicalMap>().remove(handle) ? hipSuccess : hipErrorInvalidValue;
}
// The memory is not to be used before hipMemSetAccess.
hipError_t hipMemMap(void* at, size_t len, size_t offset, hipMemGenericAllocationHandle_t handle, unsigned long long flags) {
  USABLE();
  auto physical = only<PhysicalMap>().find(handle);
  if (!physical || offset || flags || len != physical->len) return hipErrorInvalidValue;
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  auto next = only<Reserved>().all.upper_bound((uintptr_t)at);
  if (next == only<Reserved>().all.begin()) return hipErrorInvalidValue;
  auto [start, size] = *std::prev(next);
  if ((uintptr_t)at + len > start + size || only<Mapped>().all.count((uintptr_t)at)) return hipErrorInvalidValue;
  only<Mapped>().all[(uintptr_t)at] = len;
  return hipSuccess;
}
hipError_t hipMemSetAccess(void* at, size_t len, const hipMemAccessDesc* access, size_t count) {
  USABLE();
  if (count != 1 || access->flags != hipMemAccessFlagsProtReadWrite) return hipErrorInvalidValue;
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  for (uintptr_t from = (uintptr_t)at; from < (uintptr_t)at + len;) {
    auto found = only<Mapped>().all.find(from);
    if (found == only<Mapped>().all.end()) return hipErrorInvalidValue;
    if (!Memory::get().commit(access->location.id, (void*)from, found->second)) return hipErrorOutOfMemory;
    from += found->second;
  }
  return hipSuccess;
}
hipError_t hipMemUnmap(void* at, size_t len) {
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  auto found = only<Mapped>().all.find((uintptr_t)at);
  if (found == only<Mapped>().all.end() || found->second != len) return hipErrorInvalidValue;
  only<Mapped>().all.erase(found);
  Memory::get().uncommit(at);
  return hipSuccess;
}

// ---- host memory and copies ----

hipError_t hipHostRegister(void* at, size_t len, unsigned) {
  USABLE();
  if (!at || !len) return hipErrorInvalidValue;
  return only<shim::Pinned>().add(at, len) ? hipSuccess : hipErrorHostMemoryAlreadyRegistered;
}
hipError_t hipHostUnregister(void* at) {
  return only<shim::Pinned>().remove(at) ? hipSuccess : hipErrorHostMemoryNotRegistered;
}
hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char byte, size_t count, hipStream_t stream) {
  return enqueue(stream, {{to, count}}, [=] { memset(Memory::get().host((char*)to), byte, count); });
}
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, const void* from, size_t len, hipStream_t stream) {
  if (!only<shim::Pinned>().holds(from, len)) return hipErrorInvalidValue;
  return enqueue(stream, {{to, len}}, [=] { memcpy(Memory::get().host((char*)to), from, len); });
}
hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t len, hipStream_t stream) {
  if (!only<shim::Pinned>().holds(to, len)) return hipErrorInvalidValue;
  return enqueue(stream, {{from, len}}, [=] { memcpy(to, Memory::get().host((char*)from), len); });
}
hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t to, hipDeviceptr_t from, size_t len, hipStream_t stream) {
  return enqueue(stream, {{to, len}, {from, len}}, [=] {
    memcpy(Memory::get().host((char*)to), Memory::get().host((char*)from), len);
  });
}

// ---- streams and events ----

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  USABLE();
  if (flags > hipStreamNonBlocking) return hipErrorInvalidValue;
  *stream = (hipStream_t)only<StreamMap>().add(new shim::Stream(current));
  return hipSuccess;
}
hipError_t hipStreamDestroy(hipStream_t handle) {
  shim::Stream* stream = only<StreamMap>().remove(handle);
  if (!stream) return hipErrorInvalidHandle;
  stream->end();
  return hipSuccess;
}
hipError_t hipStreamSynchronize(hipStream_t handle) {
  USABLE();
  shim::Stream* stream = stream_of(handle);
  if (!stream) return hipErrorInvalidHandle;
  stream->synchronize();
  return (hipError_t)broken(stream->device).load();
}
hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t work, void* data) {
  return enqueue(stream, {}, [=] { work(data); });
}
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned) {
  USABLE();
  *event = (hipEvent_t)only<EventMap>().add(std::make_shared<shim::Event>());
  return hipSuccess;
}
hipError_t hipEventDestroy(hipEvent_t event) { return only<EventMap>().remove(event) ? hipSuccess : hipErrorInvalidHandle; }
hipError_t hipEventRecord(hipEvent_t handle, hipStream_t stream) {
  auto event = only<EventMap>().find(handle);
  if (!event) return hipErrorInvalidHandle;
  const uint64_t version = event->record();
  return enqueue(stream, {}, [=] { event->finish(version); });
}
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t handle, unsigned flags) {
  auto event = only<EventMap>().find(handle);
  if (!event || flags) return hipErrorInvalidHandle;
  const uint64_t version = event->last();
  return enqueue(stream, {}, [=] { event->wait(version); });
}
hipError_t hipEventQuery(hipEvent_t handle) {
  USABLE();
  auto event = only<EventMap>().find(handle);
  if (!event) return hipErrorInvalidHandle;
  return event->is_done(event->last()) ? hipSuccess : hipErrorNotReady;
}
hipError_t hipEventElapsedTime(float* elapsed_ms, hipEvent_t from, hipEvent_t to) {
  auto start = only<EventMap>().find(from), end = only<EventMap>().find(to);
  if (!start || !end || !start->last() || !end->last()) return hipErrorInvalidHandle;
  if (!start->is_done(start->last()) || !end->is_done(end->last())) return hipErrorNotReady;
  *elapsed_ms = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return hipSuccess;
}

// ---- kernels ----

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  USABLE();
  shim::CodeHeader header;
  memcpy(&header, image, sizeof header);
  if (memcmp(header.magic, "SHIMCODE", 8)) return hipErrorInvalidImage;
  if (strcmp(header.architecture, ARCHITECTURE)) return hipErrorNoBinaryForGpu;
  const int file = memfd_create("shim kernels", 0);
  if (write(file, (const char*)image + sizeof header, header.len) != (ssize_t)header.len) return hipErrorInvalidImage;
  // The file stays open: dlopen takes a path that it knows for the library that it has opened there.
  void* library = dlopen(("/proc/self/fd/" + std::to_string(file)).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) return hipErrorInvalidImage;
  *module = (hipModule_t)only<ModuleMap>().add(std::make_shared<Module>(Module{library}));
  return hipSuccess;
}
hipError_t hipModuleUnload(hipModule_t module) { return only<ModuleMap>().remove(module) ? hipSuccess : hipErrorInvalidHandle; }
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t handle, const char* name) {
  auto module = only<ModuleMap>().find(handle);
  if (!module) return hipErrorInvalidHandle;
  auto bind = (shim::Bind)dlsym(module->library, (std::string("shim_bind_") + name).c_str());
  if (!bind) return hipErrorNotFound;
  *function = (hipFunction_t)only<FunctionMap>().add(bind);
  return hipSuccess;
}
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                 unsigned block_y, unsigned block_z, unsigned, hipStream_t stream, void** parameters, void** extra) {
  USABLE();
  shim::Bind bind = only<FunctionMap>().find(function);
  if (!bind) return hipErrorInvalidHandle;
  const bool fits = grid_x && grid_y == 1 && grid_z == 1 && block_x && block_x <= 1024 && block_y == 1 && block_z == 1;
  // AMD counts the threads of a launch in 32 bits.
  if (!fits || (uint64_t)grid_x * block_x > UINT32_MAX || !parameters || extra) return hipErrorInvalidValue;
  std::shared_ptr<shim::Bound> kernel(bind(parameters));
  shim::Launch launch{grid_x, block_x, Memory::get().host((char*)nullptr) - (char*)nullptr,
                      [](const void* at) { return Memory::get().is_live(at, 1, -1); }};
  const int device = current;
  return enqueue(stream, {}, [=] {
    if (!(*kernel)(launch)) fault(device, hipErrorIllegalAddress, "an argument of a kernel");
  });
}
}
