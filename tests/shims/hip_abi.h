// The part of HIP's ABI that the shim has, as hip_runtime_api.h 7.2 declares it. With -DSHIM_VENDOR_HEADERS the shim is
// compiled against that header itself, which proves these declarations.
#pragma once
#include <cstddef>

enum hipError_t : int {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNotInitialized = 3,
  hipErrorNoDevice = 100,
  hipErrorInvalidDevice = 101,
  hipErrorInvalidImage = 200,
  hipErrorNoBinaryForGpu = 209,
  hipErrorInvalidHandle = 400,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorIllegalAddress = 700,
  hipErrorHostMemoryAlreadyRegistered = 712,
  hipErrorHostMemoryNotRegistered = 713,
  hipErrorNotSupported = 801,
};
enum hipDeviceAttribute_t : int {
  hipDeviceAttributeMultiprocessorCount = 63,
  hipDeviceAttributeWarpSize = 87,
  hipDeviceAttributeMemoryPoolsSupported = 88,
  hipDeviceAttributeVirtualMemoryManagementSupported = 89,
};
enum hipMemAllocationType : int { hipMemAllocationTypePinned = 1 };
enum hipMemAllocationHandleType : int { hipMemHandleTypeNone = 0 };
enum hipMemLocationType : int { hipMemLocationTypeDevice = 1 };
enum hipMemAllocationGranularity_flags : int { hipMemAllocationGranularityMinimum = 0 };
enum hipMemAccessFlags : int { hipMemAccessFlagsProtReadWrite = 3 };
enum hipMemPoolAttr : int { hipMemPoolReuseAllowInternalDependencies = 3 };

typedef int hipDevice_t;
typedef void* hipDeviceptr_t;
typedef struct ihipStream_t* hipStream_t;
typedef struct ihipEvent_t* hipEvent_t;
typedef struct ihipModule_t* hipModule_t;
typedef struct ihipModuleSymbol_t* hipFunction_t;
typedef struct ihipMemPoolHandle_t* hipMemPool_t;
typedef struct ihipMemGenericAllocationHandle* hipMemGenericAllocationHandle_t;
typedef void (*hipHostFn_t)(void*);

struct hipMemLocation {
  hipMemLocationType type;
  int id;
};
struct hipMemPoolProps {
  hipMemAllocationType allocType;
  hipMemAllocationHandleType handleTypes;
  hipMemLocation location;
  void* win32SecurityAttributes;
  size_t maxSize;
  unsigned char reserved[56];
};
struct hipMemAllocationProp {
  hipMemAllocationType type;
  hipMemAllocationHandleType requestedHandleTypes;
  hipMemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType, gpuDirectRDMACapable;
    unsigned short usage;
  } allocFlags;
};
struct hipMemAccessDesc {
  hipMemLocation location;
  hipMemAccessFlags flags;
};
// The fields that the shim writes, where the header has them.
struct hipDeviceProp_tR0600 {
  char name[256], unused0[32];
  size_t totalGlobalMem;
  char unused1[864], gcnArchName[256], unused2[56];
};
static_assert(sizeof(hipDeviceProp_tR0600) == 1472 && offsetof(hipDeviceProp_tR0600, gcnArchName) == 1160, "");

const unsigned hipStreamNonBlocking = 1, hipEventDisableTiming = 2, hipHostRegisterPortable = 1;
