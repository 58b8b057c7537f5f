// SHIM of libamdhip64, for tests: the HIP runtime over NVIDIA's driver. Written from hip_runtime_api.h 7.2, its
// documentation and that of the CUDA driver API.
#include <cstdint>
#include <cstring>
#include <iterator>
#ifdef SHIM_VENDOR_HEADERS
#include <hip/hip_runtime_api.h>
#else
#include "../hip_abi.h"
#endif
#include "cuda.h"

#ifndef SHIM_VENDOR_HEADERS
typedef struct ihipGraph* hipGraph_t;
typedef struct hipGraphExec* hipGraphExec_t;
enum hipStreamCaptureMode : int { hipStreamCaptureModeRelaxed = 2 };
#endif

namespace {

// What HIP and CUDA have in common, by HIP's names and words. The numbers are the same.
const struct {
  int code;
  const char *name, *words;
} ERRORS[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {3, "hipErrorNotInitialized", "initialization error"},
    {4, "hipErrorDeinitialized", "driver shutting down"},
    {100, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {200, "hipErrorInvalidImage", "device kernel image is invalid"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {205, "hipErrorMapFailed", "mapping of buffer object failed"},
    {206, "hipErrorUnmapFailed", "unmapping of buffer object failed"},
    {209, "hipErrorNoBinaryForGpu", "no kernel image is available for execution on the device"},
    {217, "hipErrorPeerAccessUnsupported", "peer access is not supported between these two devices"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {401, "hipErrorIllegalState", "the operation cannot be performed in the present state"},
    {500, "hipErrorNotFound", "named symbol not found"},
    {600, "hipErrorNotReady", "device not ready"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "hipErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "hipErrorLaunchTimeOut", "the launch timed out and was terminated"},
    {710, "hipErrorAssert", "device-side assert triggered"},
    {712, "hipErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "hipErrorLaunchFailure", "unspecified launch failure"},
    {801, "hipErrorNotSupported", "operation not supported"},
    {900, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "hipErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {904, "hipErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {905, "hipErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {906, "hipErrorStreamCaptureImplicit", "operation would make the legacy stream depend on a capturing blocking stream"},
    {999, "hipErrorUnknown", "unknown error"},
};
const auto& entry(int code) {
  for (auto& error : ERRORS)
    if (error.code == code) return error;
  return *(std::end(ERRORS) - 1);
}
hipError_t hip(int code) { return (hipError_t)entry(code).code; }

hipError_t usable() {
  if (!cuda::driver().devices) return hipErrorNoDevice;
  return hip(cuda::make_current(cuda::wanted < 0 ? 0 : cuda::wanted));
}
#define USABLE() \
  if (hipError_t error = usable()) return error
// For what is asked of a device by its number, before any is current.
#define DEVICES() \
  if (!cuda::driver().devices) return hipErrorNoDevice
// Forwards a call that needs a current device.
#define FORWARD(name, ...)                        \
  do {                                            \
    USABLE();                                     \
    return hip(cuda::driver().name(__VA_ARGS__)); \
  } while (0)

bool is_pinned_on_device(const hipMemLocation& location, int type) {
  return type == hipMemAllocationTypePinned && location.type == hipMemLocationTypeDevice &&
         location.id < cuda::driver().devices;
}
cuda::Address address(const void* at) { return (cuda::Address)at; }

}  // namespace

extern "C" {

const int anyroll_shim = 1;  // so that nobody takes this for the vendor's library

// ---- devices ----

hipError_t hipInit(unsigned flags) {
  DEVICES();
  return flags ? hipErrorInvalidValue : hipSuccess;
}
hipError_t hipRuntimeGetVersion(int* version) {
  const char* told = getenv("ANYROLL_SHIM_VERSION");
  *version = told ? atoi(told) : 70253211;
  return hipSuccess;
}
hipError_t hipDrvGetErrorName(hipError_t error, const char** text) {
  *text = entry(error).name;
  return hipSuccess;
}
hipError_t hipDrvGetErrorString(hipError_t error, const char** text) {
  *text = entry(error).words;
  return hipSuccess;
}
hipError_t hipGetDeviceCount(int* count) {
  *count = cuda::driver().devices;
  return *count ? hipSuccess : hipErrorNoDevice;
}
hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
  DEVICES();
  return hip(cuda::driver().cuDeviceGet(device, ordinal));
}
hipError_t hipSetDevice(int device) {
  DEVICES();
  return hip(cuda::set_device(device));
}
hipError_t hipGetDevice(int* device) {
  DEVICES();
  *device = cuda::get_device();
  if (*device < 0) *device = 0;
  return hipSuccess;
}
hipError_t hipDeviceGetName(char* name, int len, hipDevice_t device) {
  DEVICES();
  char theirs[128];
  if (int code = cuda::driver().cuDeviceGetName(theirs, sizeof theirs, device)) return hip(code);
  snprintf(name, len, "%s behind a shim of HIP", theirs);
  return hipSuccess;
}
hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t device) {
  DEVICES();
  return hip(cuda::driver().cuDeviceTotalMem_v2(bytes, device));
}
hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  DEVICES();
  cuda::Attribute theirs;
  switch ((int)attribute) {
    case hipDeviceAttributeMultiprocessorCount: theirs = cuda::MULTIPROCESSOR_COUNT; break;
    case hipDeviceAttributeWarpSize: theirs = cuda::WARP_SIZE; break;
    case hipDeviceAttributeMemoryPoolsSupported: theirs = cuda::MEMORY_POOLS_SUPPORTED; break;
    case hipDeviceAttributeVirtualMemoryManagementSupported:
      theirs = cuda::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
      break;
    default: return hipErrorInvalidValue;
  }
  return hip(cuda::driver().cuDeviceGetAttribute(value, theirs, device));
}
hipError_t hipDeviceGetPCIBusId(char* id, int len, int device) {
  DEVICES();
  return hip(cuda::driver().cuDeviceGetPCIBusId(id, len, device));
}
hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  DEVICES();
  return hip(cuda::driver().cuDeviceCanAccessPeer(can, device, peer));
}
// The architecture is the one that the shim of hiprtc compiles for.
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600* properties, int device) {
  DEVICES();
  int major = 0, minor = 0;
  memset(properties, 0, sizeof *properties);
  if (hipError_t error = hipDeviceGetName(properties->name, sizeof properties->name, device)) return error;
  if (hipError_t error = hipDeviceTotalMem(&properties->totalGlobalMem, device)) return error;
  int code = cuda::driver().cuDeviceGetAttribute(&major, cuda::COMPUTE_CAPABILITY_MAJOR, device);
  if (!code) code = cuda::driver().cuDeviceGetAttribute(&minor, cuda::COMPUTE_CAPABILITY_MINOR, device);
  snprintf(properties->gcnArchName, sizeof properties->gcnArchName, "sm_%d%d", major, minor);
  return hip(code);
}
hipError_t hipDeviceSynchronize() { FORWARD(cuCtxSynchronize); }
hipError_t hipMemGetInfo(size_t* free, size_t* total) { FORWARD(cuMemGetInfo_v2, free, total); }

// ---- memory ----

hipError_t hipMemPoolCreate(hipMemPool_t* pool, const hipMemPoolProps* properties) {
  if (!is_pinned_on_device(properties->location, properties->allocType) || properties->handleTypes != hipMemHandleTypeNone)
    return hipErrorInvalidValue;
  const cuda::PoolProps theirs{1, 0, {1, properties->location.id}, nullptr, properties->maxSize, 0, {}};
  FORWARD(cuMemPoolCreate, (cuda::Handle*)pool, &theirs);
}
hipError_t hipMemPoolDestroy(hipMemPool_t pool) { FORWARD(cuMemPoolDestroy, pool); }
// The attributes have the same numbers.
hipError_t hipMemPoolSetAttribute(hipMemPool_t pool, hipMemPoolAttr attribute, void* value) {
  FORWARD(cuMemPoolSetAttribute, pool, attribute, value);
}
hipError_t hipMemPoolTrimTo(hipMemPool_t pool, size_t keep) { FORWARD(cuMemPoolTrimTo, pool, keep); }
hipError_t hipMallocFromPoolAsync(void** at, size_t len, hipMemPool_t pool, hipStream_t stream) {
  FORWARD(cuMemAllocFromPoolAsync, (cuda::Address*)at, len, pool, stream);
}
hipError_t hipFreeAsync(void* at, hipStream_t stream) { FORWARD(cuMemFreeAsync, address(at), stream); }

// ---- virtual memory ----

hipError_t hipMemGetAllocationGranularity(size_t* bytes, const hipMemAllocationProp* properties,
                                          hipMemAllocationGranularity_flags option) {
  if (!is_pinned_on_device(properties->location, properties->type)) return hipErrorInvalidValue;
  const auto theirs = cuda::pinned_on(properties->location.id);
  FORWARD(cuMemGetAllocationGranularity, bytes, &theirs, option);
}
hipError_t hipMemAddressReserve(void** at, size_t len, size_t alignment, void* wish, unsigned long long flags) {
  FORWARD(cuMemAddressReserve, (cuda::Address*)at, len, alignment, address(wish), flags);
}
hipError_t hipMemAddressFree(void* at, size_t len) { FORWARD(cuMemAddressFree, address(at), len); }
hipError_t hipMemCreate(hipMemGenericAllocationHandle_t* handle, size_t len, const hipMemAllocationProp* properties,
                        unsigned long long flags) {
  const bool fits = properties->requestedHandleTypes == hipMemHandleTypeNone;
  if (!fits || !is_pinned_on_device(properties->location, properties->type)) return hipErrorInvalidValue;
  const auto theirs = cuda::pinned_on(properties->location.id);
  FORWARD(cuMemCreate, (cuda::Address*)handle, len, &theirs, flags);
}
hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) { FORWARD(cuMemRelease, address(handle)); }
hipError_t hipMemMap(void* at, size_t len, size_t offset, hipMemGenericAllocationHandle_t handle,
                     unsigned long long flags) {
  FORWARD(cuMemMap, address(at), len, offset, address(handle), flags);
}
hipError_t hipMemSetAccess(void* at, size_t len, const hipMemAccessDesc* access, size_t count) {
  if (count != 1 || access->location.type != hipMemLocationTypeDevice || access->flags != hipMemAccessFlagsProtReadWrite)
    return hipErrorInvalidValue;
  const auto theirs = cuda::access_by(access->location.id);
  FORWARD(cuMemSetAccess, address(at), len, &theirs, count);
}
hipError_t hipMemUnmap(void* at, size_t len) { FORWARD(cuMemUnmap, address(at), len); }

// ---- host memory and copies ----

// The flags have the same numbers.
hipError_t hipHostRegister(void* at, size_t len, unsigned flags) { FORWARD(cuMemHostRegister_v2, at, len, flags); }
hipError_t hipHostUnregister(void* at) { FORWARD(cuMemHostUnregister, at); }
hipError_t hipMemsetD8Async(hipDeviceptr_t to, unsigned char byte, size_t count, hipStream_t stream) {
  FORWARD(cuMemsetD8Async, address(to), byte, count, stream);
}
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, const void* from, size_t len, hipStream_t stream) {
  FORWARD(cuMemcpyHtoDAsync_v2, address(to), from, len, stream);
}
hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t len, hipStream_t stream) {
  FORWARD(cuMemcpyDtoHAsync_v2, to, address(from), len, stream);
}
hipError_t hipMemcpyDtoDAsync(hipDeviceptr_t to, hipDeviceptr_t from, size_t len, hipStream_t stream) {
  FORWARD(cuMemcpyDtoDAsync_v2, address(to), address(from), len, stream);
}

// ---- streams and events ----

// A handle is CUDA's own, so that libtorch takes it; the flags that are let through have the same numbers.
hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  if (flags > hipStreamNonBlocking) return hipErrorInvalidValue;
  FORWARD(cuStreamCreate, (cuda::Handle*)stream, flags);
}
hipError_t hipStreamDestroy(hipStream_t stream) { FORWARD(cuStreamDestroy_v2, stream); }
hipError_t hipStreamSynchronize(hipStream_t stream) { FORWARD(cuStreamSynchronize, stream); }
hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  FORWARD(cuStreamWaitEvent, stream, event, flags);
}
hipError_t hipLaunchHostFunc(hipStream_t stream, hipHostFn_t work, void* data) {
  FORWARD(cuLaunchHostFunc, stream, work, data);
}
hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  if (flags & ~hipEventDisableTiming) return hipErrorInvalidValue;
  FORWARD(cuEventCreate, (cuda::Handle*)event, flags);
}
hipError_t hipEventDestroy(hipEvent_t event) { FORWARD(cuEventDestroy_v2, event); }
hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) { FORWARD(cuEventRecord, event, stream); }
hipError_t hipEventQuery(hipEvent_t event) { FORWARD(cuEventQuery, event); }
hipError_t hipEventElapsedTime(float* elapsed_ms, hipEvent_t from, hipEvent_t to) {
  FORWARD(cuEventElapsedTime, elapsed_ms, from, to);
}

// ---- kernels ----

hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  FORWARD(cuModuleLoadData, (cuda::Handle*)module, image);
}
hipError_t hipModuleUnload(hipModule_t module) { FORWARD(cuModuleUnload, module); }
// A module of HIP is loaded whole; CUDA would put a kernel on the device at its first launch.
hipError_t hipModuleGetFunction(hipFunction_t* function, hipModule_t module, const char* name) {
  USABLE();
  if (int code = cuda::driver().cuModuleGetFunction((cuda::Handle*)function, module, name)) return hip(code);
  return hip(cuda::driver().cuFuncLoad(*function));
}
hipError_t hipModuleLaunchKernel(hipFunction_t function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                 unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                                 hipStream_t stream, void** parameters, void** extra) {
  // AMD counts the threads of a launch in 32 bits.
  if ((uint64_t)grid_x * block_x > UINT32_MAX) return hipErrorInvalidValue;
  FORWARD(cuLaunchKernel, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters,
          extra);
}

// ---- recorded work ----

// The modes have the same numbers.
hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  FORWARD(cuStreamBeginCapture_v2, stream, mode);
}
hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  FORWARD(cuStreamEndCapture, stream, (cuda::Handle*)graph);
}
hipError_t hipGraphDestroy(hipGraph_t graph) { FORWARD(cuGraphDestroy, graph); }
hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* executable, hipGraph_t graph, unsigned long long flags) {
  FORWARD(cuGraphInstantiateWithFlags, (cuda::Handle*)executable, graph, flags);
}
hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t stream) { FORWARD(cuGraphLaunch, executable, stream); }
hipError_t hipGraphExecDestroy(hipGraphExec_t executable) { FORWARD(cuGraphExecDestroy, executable); }
}
