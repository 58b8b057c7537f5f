// SHIM of libascendcl, for tests: Huawei's ACL runtime over host memory. Written from acl_rt.h 1.17 and the
// documentation of CANN 8.5. It refuses what that forbids, also where the library only behaves badly: copies that are
// not aligned, host memory that it has not made, calls from its own callbacks, a stream of another context.
#include <dlfcn.h>
#include <vector>
#ifdef SHIM_VENDOR_HEADERS
#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>
#else
#include "acl_abi.h"
#endif
#include "runtime.h"

using shim::Memory;

namespace {

constexpr size_t GRANULARITY = Memory::PAGE, ALIGNMENT = 64, MOST_STREAMS = 1984;

struct TimedEvent {
  shim::Event event;
  uint32_t flags;
};
struct EventMap : shim::Handles<std::shared_ptr<TimedEvent>> {};
struct Physical {
  size_t len;
  int device;
  bool is_mapped;
};
struct PhysicalMap : shim::Handles<std::shared_ptr<Physical>> {};
struct Reserved : Ranges {};
struct Mapping {
  std::mutex mutex;
  std::map<uintptr_t, std::shared_ptr<Physical>> all;
};
struct HostMemory : Ranges {};

std::atomic<bool> initialized{false};
// A context is its device's number plus one, behind an address that is nothing else.
constexpr uintptr_t CONTEXTS = 0x5ca1ab1e000;
thread_local int current = -1;
thread_local bool in_callback = false;
thread_local std::string message;
aclError refuse(aclError code, const char* why) {
  message = why;
  return code;
}

aclError started() {
  if (in_callback) {
    fprintf(stderr, "SHIM: a callback called the library\n");
    abort();
  }
  return initialized ? ACL_SUCCESS : refuse(ACL_ERROR_UNINITIALIZE, "aclInit comes first");
}
// For calls that need a context.
aclError usable() {
  if (aclError error = started()) return error;
  if (current < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no context");
  return broken(current);
}
#define STARTED() \
  if (aclError error = started()) return error
#define USABLE() \
  if (aclError error = usable()) return error

shim::Stream* stream_of(aclrtStream stream) {
  return stream ? only<StreamMap>().find(stream) : default_stream(current);
}

// Runs `work` on the stream if the ranges on the device are live by then; a fault ends the device.
aclError enqueue(aclrtStream handle, std::map<const void*, size_t> ranges, std::function<void()> work) {
  USABLE();
  shim::Stream* stream = stream_of(handle);
  if (!stream) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such stream");
  if (stream->device != current) return refuse(ACL_ERROR_RT_STREAM_CONTEXT, "a stream of another context");
  const bool is_live = enqueue_on(stream, std::move(ranges), ACL_ERROR_RT_INTERNAL_ERROR, std::move(work));
  return is_live ? ACL_SUCCESS : refuse(ACL_ERROR_RT_PARAM_INVALID, "not memory of the device");
}

bool is_host_memory(const void* at, size_t len) {
  std::lock_guard<std::mutex> lock(only<HostMemory>().mutex);
  auto next = only<HostMemory>().all.upper_bound((uintptr_t)at);
  if (next == only<HostMemory>().all.begin()) return false;
  auto [start, size] = *std::prev(next);
  return (uintptr_t)at + len <= start + size;
}
bool is_aligned(const void* at) { return (uintptr_t)at % ALIGNMENT == 0; }

}  // namespace

extern "C" {

const int anyroll_shim = 1;  // so that nobody takes this for the vendor's library

// For the shims of libtorch and HCCL: the byte behind a device address, and memory in the order of libtorch's stream.
void* anyroll_shim_host(void* at) { return Memory::get().host((char*)at); }
void* anyroll_shim_alloc(int device, size_t len) {
  void* at = Memory::get().reserve(len, Memory::ALIGN);
  if (!at || Memory::get().commit(device, at, len)) return at;
  Memory::get().unreserve(at, len);
  return nullptr;
}
int anyroll_shim_is_live(const void* at, size_t len) { return Memory::get().is_live(at, len, -1); }
void anyroll_shim_free(void* at) {
  const int device = Memory::get().owner(at);
  if (device >= 0) default_stream(device)->enqueue([=] { Memory::get().release(at); });
}

// ---- devices and contexts ----

aclError aclInit(const char*) {
  return initialized.exchange(true) ? refuse(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before") : ACL_SUCCESS;
}
const char* aclGetRecentErrMsg() { return message.empty() ? nullptr : message.c_str(); }
aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  *major = 1, *minor = 17, *patch = 0;
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() { return "Shim of an Ascend NPU"; }
aclError aclrtGetDeviceCount(uint32_t* count) {
  STARTED();
  *count = shim::devices();
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  STARTED();
  if ((int)device >= shim::devices()) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "no such device");
  if (attribute != ACL_DEV_ATTR_AICORE_CORE_NUM && attribute != ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE)
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "no such attribute");
  *value = attribute == ACL_DEV_ATTR_AICORE_CORE_NUM ? 20 : (int64_t)shim::capacity();
  return ACL_SUCCESS;
}
aclError aclrtSetDevice(int32_t device) {
  STARTED();
  if (device < 0 || device >= shim::devices()) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "no such device");
  current = device;
  return ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* device) {
  USABLE();
  *device = current;
  return ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) {
  USABLE();
  *context = (aclrtContext)(CONTEXTS + current + 1);
  return ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
  STARTED();
  const uintptr_t device = (uintptr_t)context - CONTEXTS - 1;
  if (device >= (uintptr_t)shim::devices()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "no such context");
  current = (int)device;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  USABLE();
  std::vector<shim::Stream*> streams{default_stream(current)};
  only<StreamMap>().each([&](shim::Stream* stream) { if (stream->device == current) streams.push_back(stream); });
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (auto* stream : streams)
    while (!stream->is_idle()) {
      if (timeout_ms >= 0 && std::chrono::steady_clock::now() > end) return refuse(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "not done in time");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  return broken(current);
}
aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t* free, size_t* total) {
  USABLE();
  if (attribute != ACL_HBM_MEM) return refuse(ACL_ERROR_RT_PARAM_INVALID, "this device has HBM only");
  *total = shim::capacity();
  *free = *total - Memory::get().used(current);
  return ACL_SUCCESS;
}

// ---- memory ----

aclError aclrtMalloc(void** at, size_t len, aclrtMemMallocPolicy) {
  USABLE();
  if (!at || !len) return refuse(ACL_ERROR_RT_PARAM_INVALID, "memory of no bytes");
  *at = anyroll_shim_alloc(current, len);
  return *at ? ACL_SUCCESS : refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device is full");
}
aclError aclrtFree(void* at) {
  USABLE();
  if (Memory::get().owner(at) != current) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not memory of the device");
  Memory::get().release(at);
  return ACL_SUCCESS;
}
aclError aclrtMallocHost(void** at, size_t len) {
  USABLE();
  if (!at || !len || posix_memalign(at, 4096, len)) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "no host memory");
  memset(*at, 0xff, len);
  std::lock_guard<std::mutex> lock(only<HostMemory>().mutex);
  only<HostMemory>().all[(uintptr_t)*at] = len;
  return ACL_SUCCESS;
}
aclError aclrtFreeHost(void* at) {
  USABLE();
  std::lock_guard<std::mutex> lock(only<HostMemory>().mutex);
  if (!only<HostMemory>().all.erase((uintptr_t)at)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not host memory of the library's");
  free(at);
  return ACL_SUCCESS;
}

// ---- virtual memory ----

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp* properties, aclrtMemGranularityOptions, size_t* bytes) {
  USABLE();
  if (properties->memAttr != ACL_HBM_MEM_HUGE) return refuse(ACL_ERROR_RT_PARAM_INVALID, "no such memory");
  *bytes = GRANULARITY;
  return ACL_SUCCESS;
}
aclError aclrtReserveMemAddress(void** at, size_t len, size_t alignment, void* wish, uint64_t flags) {
  USABLE();
  if (!len || len % GRANULARITY || alignment || wish || flags > 1) return refuse(ACL_ERROR_RT_PARAM_INVALID, "a reservation as it must not be");
  *at = Memory::get().reserve(len, GRANULARITY);
  if (!*at) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "no addresses are left");
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  only<Reserved>().all[(uintptr_t)*at] = len;
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* at) {
  USABLE();
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  auto found = only<Reserved>().all.find((uintptr_t)at);
  if (found == only<Reserved>().all.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not a reservation");
  if (only<Mapping>().all.count((uintptr_t)at)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "memory is mapped there");
  Memory::get().unreserve(at, found->second);
  only<Reserved>().all.erase(found);
  return ACL_SUCCESS;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t len, const aclrtPhysicalMemProp* p, uint64_t flags) {
  USABLE();
  const bool fits = p->handleType == ACL_MEM_HANDLE_TYPE_NONE && p->allocationType == ACL_MEM_ALLOCATION_TYPE_PINNED &&
                    p->memAttr == ACL_HBM_MEM_HUGE && p->location.type == ACL_MEM_LOCATION_TYPE_DEVICE && !p->reserve;
  if (!len || len % GRANULARITY || flags || !fits || (int)p->location.id != current) return refuse(ACL_ERROR_RT_PARAM_INVALID, "memory as it must not be");
  if (Memory::get().used(current) + len > shim::capacity()) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device is full");
  *handle = only<PhysicalMap>().add(std::make_shared<Physical>(Physical{len, current, false}));
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  USABLE();
  auto physical = only<PhysicalMap>().find(handle);
  if (!physical || physical->is_mapped) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not memory that is unmapped");
  only<PhysicalMap>().remove(handle);
  return ACL_SUCCESS;
}
aclError aclrtMapMem(void* at, size_t len, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
  USABLE();
  auto physical = only<PhysicalMap>().find(handle);
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  auto found = only<Reserved>().all.find((uintptr_t)at);
  const bool fits = physical && !physical->is_mapped && !offset && !flags && len == physical->len &&
                    found != only<Reserved>().all.end() && len <= found->second;
  if (!fits) return refuse(ACL_ERROR_RT_PARAM_INVALID, "a mapping as it must not be");
  if (!Memory::get().commit(physical->device, at, len)) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "the device is full");
  physical->is_mapped = true;
  only<Mapping>().all[(uintptr_t)at] = physical;
  return ACL_SUCCESS;
}
aclError aclrtUnmapMem(void* at) {
  USABLE();
  std::lock_guard<std::mutex> lock(only<Reserved>().mutex);
  auto found = only<Mapping>().all.find((uintptr_t)at);
  if (found == only<Mapping>().all.end()) return refuse(ACL_ERROR_RT_PARAM_INVALID, "nothing is mapped there");
  Memory::get().uncommit(at);
  found->second->is_mapped = false;
  only<Mapping>().all.erase(found);
  return ACL_SUCCESS;
}

// ---- copies ----

aclError aclrtMemsetAsync(void* to, size_t most, int32_t value, size_t count, aclrtStream stream) {
  if (count > most) return refuse(ACL_ERROR_RT_PARAM_INVALID, "more than there is room for");
  return enqueue(stream, {{to, count}}, [=] { memset(Memory::get().host((char*)to), value, count); });
}
// The ranges on the device, and a copy between the bytes behind both addresses; null for one that is not allowed.
static std::function<void()> copy_of(void* to, size_t most, const void* from, size_t len, aclrtMemcpyKind kind,
                                     std::map<const void*, size_t>& ranges) {
  if (len > most || kind < ACL_MEMCPY_HOST_TO_DEVICE || kind > ACL_MEMCPY_DEVICE_TO_DEVICE) return nullptr;
  const bool to_device = kind != ACL_MEMCPY_DEVICE_TO_HOST, from_device = kind != ACL_MEMCPY_HOST_TO_DEVICE;
  if (to_device) ranges[to] = len;
  if (from_device) ranges[from] = len;
  return [=] {
    memcpy(to_device ? Memory::get().host((char*)to) : to, from_device ? Memory::get().host((char*)from) : from, len);
  };
}
aclError aclrtMemcpyAsync(void* to, size_t most, const void* from, size_t len, aclrtMemcpyKind kind, aclrtStream stream) {
  USABLE();
  if (kind == ACL_MEMCPY_HOST_TO_HOST) return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "no copies within the host");
  if (!is_aligned(to) || !is_aligned(from)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "both ends have to be aligned to 64 bytes");
  if (kind == ACL_MEMCPY_HOST_TO_DEVICE && !is_host_memory(from, len)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "from memory that aclrtMallocHost has not made");
  if (kind == ACL_MEMCPY_DEVICE_TO_HOST && !is_host_memory(to, len)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "to memory that aclrtMallocHost has not made");
  std::map<const void*, size_t> ranges;
  auto copy = copy_of(to, most, from, len, kind, ranges);
  return copy ? enqueue(stream, ranges, copy) : refuse(ACL_ERROR_RT_PARAM_INVALID, "a copy as it must not be");
}
aclError aclrtMemcpy(void* to, size_t most, const void* from, size_t len, aclrtMemcpyKind kind) {
  USABLE();
  std::map<const void*, size_t> ranges;
  auto copy = copy_of(to, most, from, len, kind, ranges);
  if (!copy) return refuse(ACL_ERROR_RT_PARAM_INVALID, "a copy as it must not be");
  for (auto [at, size] : ranges)
    if (!Memory::get().is_live(at, size, current)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not memory of the device");
  copy();
  return ACL_SUCCESS;
}

// ---- streams ----

aclError aclrtCreateStream(aclrtStream* stream) {
  USABLE();
  if (only<StreamMap>().count() >= MOST_STREAMS) return refuse(ACL_ERROR_RT_INTERNAL_ERROR, "the device has no more streams");
  *stream = only<StreamMap>().add(new shim::Stream(current));
  return ACL_SUCCESS;
}
// Waits for what is pending.
aclError aclrtDestroyStream(aclrtStream handle) {
  USABLE();
  shim::Stream* stream = only<StreamMap>().find(handle);
  if (!stream) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such stream");
  if (stream->device != current) return refuse(ACL_ERROR_RT_STREAM_CONTEXT, "a stream of another context");
  stream->synchronize();
  only<StreamMap>().remove(handle);
  stream->end();
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream handle) {
  USABLE();
  shim::Stream* stream = stream_of(handle);
  if (!stream) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such stream");
  if (stream->device != current) return refuse(ACL_ERROR_RT_STREAM_CONTEXT, "a stream of another context");
  stream->synchronize();
  return broken(stream->device);
}
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc work, void* data) {
  return enqueue(stream, {}, [=] {
    in_callback = true;
    work(data);
    in_callback = false;
  });
}

// ---- events ----

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  USABLE();
  auto made = std::make_shared<TimedEvent>();
  made->flags = flags;
  *event = only<EventMap>().add(made);
  return ACL_SUCCESS;
}
aclError aclrtDestroyEvent(aclrtEvent event) {
  USABLE();
  return only<EventMap>().remove(event) ? ACL_SUCCESS : refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such event");
}
aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream) {
  auto event = only<EventMap>().find(handle);
  if (!event) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such event");
  const uint64_t version = event->event.record();
  return enqueue(stream, {}, [=] { event->event.finish(version); });
}
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent handle) {
  auto event = only<EventMap>().find(handle);
  if (!event) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such event");
  if (!(event->flags & ACL_EVENT_SYNC)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not an event to wait for");
  const uint64_t version = event->event.last();
  return enqueue(stream, {}, [=] { event->event.wait(version); });
}
aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus* status) {
  USABLE();
  auto event = only<EventMap>().find(handle);
  if (!event) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such event");
  const bool is_done = event->event.is_done(event->event.last());
  *status = is_done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* elapsed_ms, aclrtEvent from, aclrtEvent to) {
  USABLE();
  auto start = only<EventMap>().find(from), end = only<EventMap>().find(to);
  if (!start || !end) return refuse(ACL_ERROR_RT_INVALID_HANDLE, "no such event");
  if (!(start->flags & end->flags & ACL_EVENT_TIME_LINE)) return refuse(ACL_ERROR_RT_PARAM_INVALID, "events without time");
  for (auto& event : {start, end})
    if (!event->event.last() || !event->event.is_done(event->event.last())) return refuse(ACL_ERROR_RT_EVENT_NOT_COMPLETE, "an event is not reached");
  *elapsed_ms = std::chrono::duration<float, std::milli>(end->event.at - start->event.at).count();
  return ACL_SUCCESS;
}
}
