// NVIDIA's driver as the forwarding shims reach it: what they call of cuda.h 13.0, found at run time, and the device that
// is current in a thread, which the vendors' runtimes tell by its number. Written from the CUDA driver API's reference.
#pragma once
#include <dlfcn.h>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace cuda {

using Address = unsigned long long;  // CUdeviceptr, CUmemGenericAllocationHandle
using Handle = void*;                // CUcontext, CUstream, CUevent, CUmemoryPool, CUmodule, CUfunction, CUgraph

enum : int { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_READY = 600 };
enum Attribute : int {
  WARP_SIZE = 10,
  MULTIPROCESSOR_COUNT = 16,
  COMPUTE_CAPABILITY_MAJOR = 75,
  COMPUTE_CAPABILITY_MINOR = 76,
  VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  MEMORY_POOLS_SUPPORTED = 115,
};
constexpr unsigned NON_BLOCKING = 1;     // CU_STREAM_NON_BLOCKING
constexpr unsigned WITHOUT_TIME = 2;     // CU_EVENT_DISABLE_TIMING
constexpr unsigned REGISTER_MAPPED = 2;  // CU_MEMHOSTREGISTER_DEVICEMAP

struct Location {  // CUmemLocation
  int type, id;    // 1: a device
};
struct AllocationProp {  // CUmemAllocationProp
  int type, handle_types;
  Location location;
  void* win32;
  unsigned char flags[8];
};
struct AccessDesc {  // CUmemAccessDesc
  Location location;
  int flags;  // 3: read and write
};
struct PoolProps {  // CUmemPoolProps
  int type, handle_types;
  Location location;
  void* win32;
  size_t max_size;
  unsigned short usage;
  unsigned char reserved[54];
};
static_assert(sizeof(AllocationProp) == 32 && sizeof(AccessDesc) == 12 && sizeof(PoolProps) == 88, "");

inline AllocationProp pinned_on(int device) { return {1, 0, {1, device}, nullptr, {}}; }
inline AccessDesc access_by(int device) { return {{1, device}, 3}; }

#define CUDA_CALLS(CALL)                                                                                              \
  CALL(cuInit, unsigned)                                                                                              \
  CALL(cuDeviceGetCount, int*)                                                                                        \
  CALL(cuDeviceGet, int*, int)                                                                                        \
  CALL(cuDeviceGetName, char*, int, int)                                                                              \
  CALL(cuDeviceTotalMem_v2, size_t*, int)                                                                             \
  CALL(cuDeviceGetAttribute, int*, int, int)                                                                          \
  CALL(cuDeviceGetPCIBusId, char*, int, int)                                                                          \
  CALL(cuDeviceCanAccessPeer, int*, int, int)                                                                         \
  CALL(cuDevicePrimaryCtxRetain, Handle*, int)                                                                        \
  CALL(cuDeviceGetDefaultMemPool, Handle*, int)                                                                       \
  CALL(cuCtxGetCurrent, Handle*)                                                                                      \
  CALL(cuCtxSetCurrent, Handle)                                                                                       \
  CALL(cuCtxGetDevice, int*)                                                                                          \
  CALL(cuCtxSynchronize, void)                                                                                        \
  CALL(cuMemGetInfo_v2, size_t*, size_t*)                                                                             \
  CALL(cuMemPoolCreate, Handle*, const PoolProps*)                                                                    \
  CALL(cuMemPoolDestroy, Handle)                                                                                      \
  CALL(cuMemPoolSetAttribute, Handle, int, void*)                                                                     \
  CALL(cuMemPoolTrimTo, Handle, size_t)                                                                               \
  CALL(cuMemAllocAsync, Address*, size_t, Handle)                                                                     \
  CALL(cuMemAllocFromPoolAsync, Address*, size_t, Handle, Handle)                                                     \
  CALL(cuMemFreeAsync, Address, Handle)                                                                               \
  CALL(cuMemGetAllocationGranularity, size_t*, const AllocationProp*, int)                                            \
  CALL(cuMemAddressReserve, Address*, size_t, size_t, Address, unsigned long long)                                    \
  CALL(cuMemAddressFree, Address, size_t)                                                                             \
  CALL(cuMemCreate, Address*, size_t, const AllocationProp*, unsigned long long)                                      \
  CALL(cuMemRelease, Address)                                                                                         \
  CALL(cuMemMap, Address, size_t, size_t, Address, unsigned long long)                                                \
  CALL(cuMemUnmap, Address, size_t)                                                                                   \
  CALL(cuMemSetAccess, Address, size_t, const AccessDesc*, size_t)                                                    \
  CALL(cuMemHostRegister_v2, void*, size_t, unsigned)                                                                 \
  CALL(cuMemHostUnregister, void*)                                                                                    \
  CALL(cuMemsetD8Async, Address, unsigned char, size_t, Handle)                                                       \
  CALL(cuMemcpyHtoDAsync_v2, Address, const void*, size_t, Handle)                                                    \
  CALL(cuMemcpyDtoHAsync_v2, void*, Address, size_t, Handle)                                                          \
  CALL(cuMemcpyDtoDAsync_v2, Address, Address, size_t, Handle)                                                        \
  CALL(cuStreamCreate, Handle*, unsigned)                                                                             \
  CALL(cuStreamCreateWithPriority, Handle*, unsigned, int)                                                            \
  CALL(cuStreamDestroy_v2, Handle)                                                                                    \
  CALL(cuStreamQuery, Handle)                                                                                         \
  CALL(cuStreamSynchronize, Handle)                                                                                   \
  CALL(cuStreamWaitEvent, Handle, Handle, unsigned)                                                                   \
  CALL(cuLaunchHostFunc, Handle, void (*)(void*), void*)                                                              \
  CALL(cuStreamWriteValue32_v2, Handle, Address, unsigned, unsigned)                                                  \
  CALL(cuStreamWaitValue32_v2, Handle, Address, unsigned, unsigned)                                                   \
  CALL(cuEventCreate, Handle*, unsigned)                                                                              \
  CALL(cuEventDestroy_v2, Handle)                                                                                     \
  CALL(cuEventRecord, Handle, Handle)                                                                                 \
  CALL(cuEventQuery, Handle)                                                                                          \
  CALL(cuEventElapsedTime, float*, Handle, Handle)                                                                    \
  CALL(cuModuleLoadData, Handle*, const void*)                                                                        \
  CALL(cuModuleUnload, Handle)                                                                                        \
  CALL(cuModuleGetFunction, Handle*, Handle, const char*)                                                             \
  CALL(cuFuncLoad, Handle)                                                                                            \
  CALL(cuLaunchKernel, Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**,  \
       void**)                                                                                                        \
  CALL(cuStreamBeginCapture_v2, Handle, int)                                                                          \
  CALL(cuStreamEndCapture, Handle, Handle*)                                                                           \
  CALL(cuGraphDestroy, Handle)                                                                                        \
  CALL(cuGraphInstantiateWithFlags, Handle*, Handle, unsigned long long)                                              \
  CALL(cuGraphLaunch, Handle, Handle)                                                                                 \
  CALL(cuGraphExecDestroy, Handle)

struct Driver {
#define CALL(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  CUDA_CALLS(CALL)
#undef CALL
  int devices = 0;
};

inline Driver open() {
  Driver driver;
  const auto nothing = [](const char* why) {
    fprintf(stderr, "SHIM: no device: %s\n", why);
    return Driver{};
  };
  const char* allowed = getenv("ANYROLL_SHIM");
  if (!allowed || atol(allowed) != 1) return nothing("ANYROLL_SHIM=1 is not set");
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return nothing(dlerror());
#define CALL(name, ...) \
  if (!(driver.name = (decltype(driver.name))dlsym(library, #name))) return nothing(dlerror());
  CUDA_CALLS(CALL)
#undef CALL
  if (driver.cuInit(0) || driver.cuDeviceGetCount(&driver.devices)) return nothing("NVIDIA's driver finds none");
  fprintf(stderr, "SHIM: %d devices are NVIDIA's\n", driver.devices);
  return driver;
}
// NVIDIA's driver, opened once. Where it or the variable is missing it has no device, and is not to be called.
inline const Driver& driver() {
  static const Driver* opened = new Driver(open());
  return *opened;
}

// ---- the current device ----

// The device that this thread has asked for, or -1. Its context becomes current when a call needs one, so that a process
// takes nothing of a device that it only names.
inline thread_local int wanted = -1;

struct Contexts {
  std::mutex mutex;
  std::map<int, Handle> retained;
};
inline Contexts& contexts() {
  static auto* all = new Contexts;
  return *all;
}

// Makes the primary context of a device current, in which libtorch and NCCL work too.
inline int enter(int device) {
  std::lock_guard<std::mutex> lock(contexts().mutex);
  Handle& context = contexts().retained[device];
  if (!context)
    if (int code = driver().cuDevicePrimaryCtxRetain(&context, device)) return code;
  return driver().cuCtxSetCurrent(context);
}
// Makes a device current, for the calls to come.
inline int set_device(int device) {
  if (device < 0 || device >= driver().devices) return INVALID_DEVICE;
  wanted = device;
  Handle context = nullptr;
  int current = -1;
  if (int code = driver().cuCtxGetCurrent(&context)) return code;
  if (context && !driver().cuCtxGetDevice(&current) && current == device) return SUCCESS;
  {
    std::lock_guard<std::mutex> lock(contexts().mutex);
    auto found = contexts().retained.find(device);
    context = found == contexts().retained.end() ? nullptr : found->second;
  }
  return driver().cuCtxSetCurrent(context);
}
// The device of this thread: libtorch may have made another current. -1 where nobody has asked for one.
inline int get_device() {
  Handle context = nullptr;
  int device = wanted;
  if (!driver().cuCtxGetCurrent(&context) && context) driver().cuCtxGetDevice(&device);
  return device;
}
// Lets this thread call the driver.
inline int make_current(int device) {
  Handle context = nullptr;
  if (int code = driver().cuCtxGetCurrent(&context)) return code;
  return context ? SUCCESS : enter(device);
}

}  // namespace cuda
