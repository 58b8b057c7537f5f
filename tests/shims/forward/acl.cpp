// SHIM of libascendcl, for tests: Huawei's ACL runtime over NVIDIA's driver. Written from acl_rt.h 1.17, the documentation
// of CANN 8.5 and that of the CUDA driver API.
#include <atomic>
#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <set>
#include <string>
#include <thread>
#ifdef SHIM_VENDOR_HEADERS
#include <acl/acl.h>
#include <acl/error_codes/rt_error_codes.h>
#else
#include "../acl_abi.h"
#endif
#include "cuda.h"

namespace {

thread_local std::string message;
aclError refuse(aclError code, const std::string& why) {
  message = why;
  return code;
}

// The error that a code of CUDA's becomes.
aclError acl(int code, const char* call) {
  if (code == cuda::SUCCESS) return ACL_SUCCESS;
  const std::string why = std::string(call) + " returned " + std::to_string(code);
  switch (code) {
    case cuda::INVALID_VALUE: return refuse(ACL_ERROR_RT_PARAM_INVALID, why);
    case cuda::OUT_OF_MEMORY: return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, why);
    case cuda::NO_DEVICE: case cuda::INVALID_DEVICE: return refuse(ACL_ERROR_RT_INVALID_DEVICEID, why);
    case cuda::NOT_READY: return refuse(ACL_ERROR_RT_EVENT_NOT_COMPLETE, why);
    default: return refuse(ACL_ERROR_RT_INTERNAL_ERROR, why);
  }
}

bool initialized = false;
aclError started() { return initialized ? ACL_SUCCESS : refuse(ACL_ERROR_UNINITIALIZE, "aclInit comes first"); }
// For calls that need a context: a thread that has asked for no device has none.
aclError usable() {
  if (aclError error = started()) return error;
  const int device = cuda::driver().devices ? cuda::get_device() : -1;
  if (device < 0) return refuse(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no context");
  return acl(cuda::make_current(device), "cuCtxSetCurrent");
}
#define STARTED() \
  if (aclError error = started()) return error
#define USABLE() \
  if (aclError error = usable()) return error
// Forwards a call that needs a context.
#define FORWARD(name, ...)                                  \
  do {                                                      \
    USABLE();                                               \
    return acl(cuda::driver().name(__VA_ARGS__), #name);    \
  } while (0)
// Goes on if a call has succeeded.
#define TRY(name, ...) \
  if (aclError error = acl(cuda::driver().name(__VA_ARGS__), #name)) return error

constexpr size_t PAGE = 4096;

cuda::Address address(const void* at) { return (cuda::Address)at; }

// What the library has for itself on a device.
struct Own {
  cuda::Handle stream = nullptr, copy = nullptr;
};
// Host work in the order of a stream. CUDA has a call for it, and one thread for all streams, for which its driver waits with
// locks held: a copy by another thread, which that work waits for, then waits for the driver. Here a stream says in memory of
// the host's how far it has come, and waits there until a thread of its own says that the work is done.
class HostWork {
 public:
  // `turns` are two words of page-locked memory, zeroed.
  explicit HostWork(std::atomic<uint32_t>* turns) : turns(turns), thread([this] { run(); }) {}
  // Once nothing is pending.
  ~HostWork() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      ended = true;
    }
    changed.notify_all();
    thread.join();
  }
  // A driver whose queue is full keeps everybody out until there is room, also whom the work waits for. So there is an end to
  // how much is pending, and whoever comes then waits here.
  aclError enqueue(cuda::Handle stream, aclrtHostFunc work, void* data) {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [this] { return last - turns[DONE] < MOST; });
    const uint32_t turn = last + 1;
    TRY(cuStreamWriteValue32_v2, stream, address(&turns[REACHED]), turn, 0);
    pending.push_back({work, data, turn});
    last = turn;
    changed.notify_all();
    TRY(cuStreamWaitValue32_v2, stream, address(&turns[DONE]), turn, 0);  // 0: as much, or more
    return ACL_SUCCESS;
  }
  std::atomic<uint32_t>* const turns;

 private:
  enum { REACHED, DONE };
  static constexpr uint32_t MOST = 64;
  struct Work {
    aclrtHostFunc work;
    void* data;
    uint32_t turn;
  };
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return ended || !pending.empty(); });
      if (pending.empty()) return;
      const Work next = pending.front();
      pending.pop_front();
      lock.unlock();
      while (turns[REACHED] < next.turn) std::this_thread::sleep_for(std::chrono::microseconds(10));
      next.work(next.data);
      lock.lock();
      turns[DONE] = next.turn;
      changed.notify_all();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> pending;
  uint32_t last = 0;
  bool ended = false;
  std::thread thread;
};

// What the library knows by itself and CUDA wants to be told, or the other way round.
struct Known {
  std::mutex mutex;
  std::map<const void*, size_t> reserved, mapped;  // lengths
  std::map<const void*, size_t> pinned;            // lengths of host memory
  std::multimap<size_t, void*> free;               // host memory that nobody has, by its length
  std::map<int, std::set<void*>> streams;          // of a device
  std::map<int, Own> own;                          // of a device
  std::map<std::pair<int, void*>, HostWork*> host_work;  // of a device's stream
};
Known& known() {
  static auto* all = new Known;
  return *all;
}
size_t take(std::map<const void*, size_t>& lengths, const void* at) {
  std::lock_guard<std::mutex> lock(known().mutex);
  auto found = lengths.find(at);
  if (found == lengths.end()) return 0;
  const size_t len = found->second;
  lengths.erase(found);
  return len;
}
void put(std::map<const void*, size_t>& lengths, const void* at, size_t len) {
  std::lock_guard<std::mutex> lock(known().mutex);
  lengths[at] = len;
}
// As NVRTC compiles `to[i] = from[i]` for each i below len, in 128 blocks of 256 threads.
const char COPY_BYTES[] = R"(
.version 7.0
.target sm_70
.address_size 64
.visible .entry copy_bytes(.param .u64 to, .param .u64 from, .param .u64 len) {
  .reg .pred %p;
  .reg .b16 %byte;
  .reg .b32 %r<3>;
  .reg .b64 %to, %from, %len, %i, %at, %thread;
  ld.param.u64 %to, [to];
  ld.param.u64 %from, [from];
  ld.param.u64 %len, [len];
  cvta.to.global.u64 %to, %to;
  cvta.to.global.u64 %from, %from;
  mov.u32 %r1, %ctaid.x;
  mul.wide.u32 %i, %r1, 256;
  mov.u32 %r2, %tid.x;
  cvt.u64.u32 %thread, %r2;
  add.s64 %i, %i, %thread;
NEXT:
  setp.ge.u64 %p, %i, %len;
  @%p bra DONE;
  add.s64 %at, %from, %i;
  ld.global.u8 %byte, [%at];
  add.s64 %at, %to, %i;
  st.global.u8 [%at], %byte;
  add.s64 %i, %i, 32768;
  bra NEXT;
DONE:
  ret;
})";

// A stream for what is in no other's order: memory that comes and goes, and copies that the caller waits for. CUDA lets
// streams share the queues of its copy engines, and those of one priority a queue for kernels, in which one that waits for a
// callback holds up the others. So this has the highest priority, and copies by a kernel.
aclError own(Own* found) {
  std::lock_guard<std::mutex> lock(known().mutex);
  Own& own = known().own[cuda::get_device()];
  if (!own.stream) {
    cuda::Handle module = nullptr;
    TRY(cuModuleLoadData, &module, COPY_BYTES);
    TRY(cuModuleGetFunction, &own.copy, module, "copy_bytes");
    TRY(cuFuncLoad, own.copy);
    TRY(cuStreamCreateWithPriority, &own.stream, cuda::NON_BLOCKING, INT_MIN);
  }
  *found = own;
  return ACL_SUCCESS;
}
// CUDA has several answers to more than a device has.
aclError fits(size_t len) {
  size_t total = 0;
  TRY(cuDeviceTotalMem_v2, &total, cuda::get_device());
  return len > total ? refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "more than the device has") : ACL_SUCCESS;
}

}  // namespace

extern "C" {

const int anyroll_shim = 1;  // so that nobody takes this for the vendor's library

// ---- devices and contexts ----

aclError aclInit(const char*) {
  if (initialized) return refuse(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before");
  initialized = true;
  return ACL_SUCCESS;
}
const char* aclGetRecentErrMsg() { return message.empty() ? nullptr : message.c_str(); }
aclError aclrtGetVersion(int32_t* major, int32_t* minor, int32_t* patch) {
  *major = 1, *minor = 17, *patch = 0;
  return ACL_SUCCESS;
}
const char* aclrtGetSocName() {
  static char name[160] = "no device";
  char theirs[128];
  if (cuda::driver().devices && !cuda::driver().cuDeviceGetName(theirs, sizeof theirs, 0))
    snprintf(name, sizeof name, "%s behind a shim of ACL", theirs);
  return name;
}
aclError aclrtGetDeviceCount(uint32_t* count) {
  STARTED();
  *count = cuda::driver().devices;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  STARTED();
  if ((int)device >= cuda::driver().devices) return refuse(ACL_ERROR_RT_INVALID_DEVICEID, "no such device");
  int count = 0;
  size_t bytes = 0;
  switch (attribute) {
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
      TRY(cuDeviceGetAttribute, &count, cuda::MULTIPROCESSOR_COUNT, device);
      *value = count;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE:
      TRY(cuDeviceTotalMem_v2, &bytes, device);
      *value = (int64_t)bytes;
      return ACL_SUCCESS;
    default: return refuse(ACL_ERROR_RT_PARAM_INVALID, "no such attribute");
  }
}
aclError aclrtSetDevice(int32_t device) {
  STARTED();
  return acl(cuda::set_device(device), "cuCtxSetCurrent");
}
aclError aclrtGetDevice(int32_t* device) {
  STARTED();
  *device = cuda::driver().devices ? cuda::get_device() : -1;
  return *device < 0 ? refuse(ACL_ERROR_RT_CONTEXT_NULL, "this thread has no context") : ACL_SUCCESS;
}
aclError aclrtGetCurrentContext(aclrtContext* context) { FORWARD(cuCtxGetCurrent, context); }
aclError aclrtSetCurrentContext(aclrtContext context) {
  STARTED();
  if (!context || !cuda::driver().devices) return refuse(ACL_ERROR_RT_PARAM_INVALID, "no context");
  TRY(cuCtxSetCurrent, context);
  TRY(cuCtxGetDevice, &cuda::wanted);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t timeout_ms) {
  USABLE();
  std::set<void*> streams{nullptr};
  {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto& of_device = known().streams[cuda::get_device()];
    streams.insert(of_device.begin(), of_device.end());
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  for (void* stream : streams)
    for (;;) {
      const int code = cuda::driver().cuStreamQuery(stream);
      if (code == cuda::SUCCESS) break;
      if (code != cuda::NOT_READY) return acl(code, "cuStreamQuery");
      if (timeout_ms >= 0 && std::chrono::steady_clock::now() > end)
        return refuse(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "not done in time");
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  return ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t* free, size_t* total) {
  USABLE();
  if (attribute != ACL_HBM_MEM) return refuse(ACL_ERROR_RT_PARAM_INVALID, "this device has HBM only");
  cuda::Handle pool = nullptr;
  TRY(cuDeviceGetDefaultMemPool, &pool, cuda::get_device());
  TRY(cuMemPoolTrimTo, pool, 0);
  TRY(cuMemGetInfo_v2, free, total);
  return ACL_SUCCESS;
}

// ---- memory ----

aclError aclrtMalloc(void** at, size_t len, aclrtMemMallocPolicy) {
  USABLE();
  Own library;
  if (!at || !len) return refuse(ACL_ERROR_RT_PARAM_INVALID, "memory of no bytes");
  if (aclError error = fits(len)) return error;
  if (aclError error = own(&library)) return error;
  TRY(cuMemAllocAsync, (cuda::Address*)at, len, library.stream);
  TRY(cuStreamSynchronize, library.stream);
  return ACL_SUCCESS;
}
// Without regard to streams: whoever still uses the memory is not waited for.
aclError aclrtFree(void* at) {
  USABLE();
  Own library;
  if (aclError error = own(&library)) return error;
  TRY(cuMemFreeAsync, address(at), library.stream);
  return ACL_SUCCESS;
}
// CUDA gives no host memory back before its device has done all work, and lets nobody else in meanwhile, of whom that work
// may be waiting. So none is given back.
aclError aclrtMallocHost(void** at, size_t len) {
  USABLE();
  len = (len + PAGE - 1) / PAGE * PAGE;
  {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto found = known().free.find(len);
    if (found != known().free.end()) {
      *at = found->second;
      known().free.erase(found);
      known().pinned[*at] = len;
      return ACL_SUCCESS;
    }
  }
  if (!len || posix_memalign(at, PAGE, len)) return refuse(ACL_ERROR_RT_MEMORY_ALLOCATION, "no host memory");
  TRY(cuMemHostRegister_v2, *at, len, cuda::REGISTER_MAPPED);
  put(known().pinned, *at, len);
  return ACL_SUCCESS;
}
aclError aclrtFreeHost(void* at) {
  USABLE();
  const size_t len = take(known().pinned, at);
  if (!len) return refuse(ACL_ERROR_RT_PARAM_INVALID, "not host memory of the library's");
  std::lock_guard<std::mutex> lock(known().mutex);
  known().free.emplace(len, at);
  return ACL_SUCCESS;
}

// ---- virtual memory ----

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp* properties, aclrtMemGranularityOptions option,
                                          size_t* bytes) {
  const auto theirs = cuda::pinned_on((int)properties->location.id);
  FORWARD(cuMemGetAllocationGranularity, bytes, &theirs, option);
}
aclError aclrtReserveMemAddress(void** at, size_t len, size_t alignment, void* wish, uint64_t flags) {
  USABLE();
  if (alignment || wish || flags > 1) return refuse(ACL_ERROR_RT_PARAM_INVALID, "a reservation as it must not be");
  TRY(cuMemAddressReserve, (cuda::Address*)at, len, 0, 0, 0);
  put(known().reserved, *at, len);
  return ACL_SUCCESS;
}
aclError aclrtReleaseMemAddress(void* at) {
  USABLE();
  const size_t len = take(known().reserved, at);
  TRY(cuMemAddressFree, address(at), len);
  return ACL_SUCCESS;
}
aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t len, const aclrtPhysicalMemProp* p, uint64_t flags) {
  USABLE();
  const bool is_plain = p->handleType == ACL_MEM_HANDLE_TYPE_NONE && p->allocationType == ACL_MEM_ALLOCATION_TYPE_PINNED &&
                        p->location.type == ACL_MEM_LOCATION_TYPE_DEVICE && !p->reserve && !flags;
  if (!is_plain) return refuse(ACL_ERROR_RT_PARAM_INVALID, "memory as it must not be");
  if (aclError error = fits(len)) return error;
  const auto theirs = cuda::pinned_on((int)p->location.id);
  TRY(cuMemCreate, (cuda::Address*)handle, len, &theirs, 0);
  return ACL_SUCCESS;
}
aclError aclrtFreePhysical(aclrtDrvMemHandle handle) { FORWARD(cuMemRelease, address(handle)); }
aclError aclrtMapMem(void* at, size_t len, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
  USABLE();
  TRY(cuMemMap, address(at), len, offset, address(handle), flags);
  const auto access = cuda::access_by(cuda::get_device());
  const int code = cuda::driver().cuMemSetAccess(address(at), len, &access, 1);
  if (code) cuda::driver().cuMemUnmap(address(at), len);
  else put(known().mapped, at, len);
  return acl(code, "cuMemSetAccess");
}
aclError aclrtUnmapMem(void* at) {
  USABLE();
  const size_t len = take(known().mapped, at);
  TRY(cuMemUnmap, address(at), len);
  return ACL_SUCCESS;
}

// ---- copies ----

aclError aclrtMemsetAsync(void* to, size_t most, int32_t value, size_t count, aclrtStream stream) {
  if (count > most) return refuse(ACL_ERROR_RT_PARAM_INVALID, "more than there is room for");
  FORWARD(cuMemsetD8Async, address(to), (unsigned char)value, count, stream);
}
aclError aclrtMemcpyAsync(void* to, size_t most, const void* from, size_t len, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  USABLE();
  if (len > most) return refuse(ACL_ERROR_RT_PARAM_INVALID, "more than there is room for");
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_DEVICE: FORWARD(cuMemcpyHtoDAsync_v2, address(to), from, len, stream);
    case ACL_MEMCPY_DEVICE_TO_HOST: FORWARD(cuMemcpyDtoHAsync_v2, to, address(from), len, stream);
    case ACL_MEMCPY_DEVICE_TO_DEVICE: FORWARD(cuMemcpyDtoDAsync_v2, address(to), address(from), len, stream);
    default: return refuse(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "no copies within the host");
  }
}
// In no stream's order: what a stream waits for may be waiting for this copy. The addresses on the host are the device's,
// too, as the memory is registered.
aclError aclrtMemcpy(void* to, size_t most, const void* from, size_t len, aclrtMemcpyKind kind) {
  USABLE();
  Own library;
  if (len > most || kind < ACL_MEMCPY_HOST_TO_DEVICE || kind > ACL_MEMCPY_DEVICE_TO_DEVICE)
    return refuse(ACL_ERROR_RT_PARAM_INVALID, "a copy as it must not be");
  if (aclError error = own(&library)) return error;
  void* arguments[] = {&to, &from, &len};
  TRY(cuLaunchKernel, library.copy, 128, 1, 1, 256, 1, 1, 0, library.stream, arguments, nullptr);
  TRY(cuStreamSynchronize, library.stream);
  return ACL_SUCCESS;
}

// ---- streams ----

aclError aclrtCreateStream(aclrtStream* stream) {
  USABLE();
  TRY(cuStreamCreate, stream, cuda::NON_BLOCKING);
  std::lock_guard<std::mutex> lock(known().mutex);
  known().streams[cuda::get_device()].insert(*stream);
  return ACL_SUCCESS;
}
// Waits for what is pending.
aclError aclrtDestroyStream(aclrtStream stream) {
  USABLE();
  TRY(cuStreamSynchronize, stream);
  HostWork* work = nullptr;
  {
    std::lock_guard<std::mutex> lock(known().mutex);
    known().streams[cuda::get_device()].erase(stream);
    auto found = known().host_work.find({cuda::get_device(), stream});
    if (found != known().host_work.end()) {
      work = found->second;
      known().host_work.erase(found);
    }
  }
  if (work) {
    void* turns = work->turns;
    delete work;
    if (aclError error = aclrtFreeHost(turns)) return error;
  }
  TRY(cuStreamDestroy_v2, stream);
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream stream) { FORWARD(cuStreamSynchronize, stream); }
}
// What runs the host work of a stream, from its first on.
static aclError host_work(aclrtStream stream, HostWork** found) {
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> alone(one_at_a_time);
  const auto key = std::make_pair(cuda::get_device(), stream);
  {
    std::lock_guard<std::mutex> lock(known().mutex);
    auto it = known().host_work.find(key);
    if (it != known().host_work.end()) return *found = it->second, ACL_SUCCESS;
  }
  void* turns = nullptr;
  if (aclError error = aclrtMallocHost(&turns, PAGE)) return error;
  memset(turns, 0, PAGE);
  *found = new HostWork((std::atomic<uint32_t>*)turns);
  std::lock_guard<std::mutex> lock(known().mutex);
  known().host_work[key] = *found;
  return ACL_SUCCESS;
}
extern "C" {
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc work, void* data) {
  USABLE();
  HostWork* of_stream = nullptr;
  if (aclError error = host_work(stream, &of_stream)) return error;
  return of_stream->enqueue(stream, work, data);
}

// ---- events ----

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t flags) {
  FORWARD(cuEventCreate, event, flags & ACL_EVENT_TIME_LINE ? 0u : cuda::WITHOUT_TIME);
}
aclError aclrtDestroyEvent(aclrtEvent event) { FORWARD(cuEventDestroy_v2, event); }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) { FORWARD(cuEventRecord, event, stream); }
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) { FORWARD(cuStreamWaitEvent, stream, event, 0); }
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  USABLE();
  const int code = cuda::driver().cuEventQuery(event);
  if (code && code != cuda::NOT_READY) return acl(code, "cuEventQuery");
  *status = code ? ACL_EVENT_RECORDED_STATUS_NOT_READY : ACL_EVENT_RECORDED_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* elapsed_ms, aclrtEvent from, aclrtEvent to) {
  FORWARD(cuEventElapsedTime, elapsed_ms, from, to);
}
}
