// The part of ACL's ABI that the shim has, as acl_rt.h 1.17 declares it: see hip_abi.h.
#pragma once
#include <cstddef>
#include <cstdint>

typedef int aclError;
typedef void *aclrtContext, *aclrtStream, *aclrtEvent, *aclrtDrvMemHandle;
typedef void (*aclrtHostFunc)(void* args);

const int ACL_SUCCESS = 0, ACL_ERROR_UNINITIALIZE = 100001, ACL_ERROR_REPEAT_INITIALIZE = 100002,
          ACL_ERROR_RT_PARAM_INVALID = 107000, ACL_ERROR_RT_INVALID_DEVICEID = 107001,
          ACL_ERROR_RT_CONTEXT_NULL = 107002, ACL_ERROR_RT_STREAM_CONTEXT = 107003,
          ACL_ERROR_RT_INVALID_HANDLE = 107017, ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000,
          ACL_ERROR_RT_MEMORY_ALLOCATION = 207001, ACL_ERROR_RT_INTERNAL_ERROR = 507000,
          ACL_ERROR_RT_EVENT_NOT_COMPLETE = 507006, ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046;

enum aclrtMemMallocPolicy : int { ACL_MEM_MALLOC_HUGE_FIRST = 0 };
enum aclrtMemcpyKind : int {
  ACL_MEMCPY_HOST_TO_HOST = 0,
  ACL_MEMCPY_HOST_TO_DEVICE = 1,
  ACL_MEMCPY_DEVICE_TO_HOST = 2,
  ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
};
enum aclrtMemAttr : int { ACL_HBM_MEM = 1, ACL_HBM_MEM_HUGE = 4 };
enum aclrtDevAttr : int { ACL_DEV_ATTR_AICORE_CORE_NUM = 101, ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301 };
enum aclrtEventRecordedStatus : int { ACL_EVENT_RECORDED_STATUS_NOT_READY = 0, ACL_EVENT_RECORDED_STATUS_COMPLETE = 1 };
enum aclrtMemGranularityOptions : int { ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };
enum aclrtMemHandleType : int { ACL_MEM_HANDLE_TYPE_NONE = 0 };
enum aclrtMemAllocationType : int { ACL_MEM_ALLOCATION_TYPE_PINNED = 0 };
enum aclrtMemLocationType : int { ACL_MEM_LOCATION_TYPE_DEVICE = 1 };

struct aclrtMemLocation {
  uint32_t id;
  aclrtMemLocationType type;
};
struct aclrtPhysicalMemProp {
  aclrtMemHandleType handleType;
  aclrtMemAllocationType allocationType;
  aclrtMemAttr memAttr;
  aclrtMemLocation location;
  uint64_t reserve;
};
const uint32_t ACL_EVENT_SYNC = 1, ACL_EVENT_TIME_LINE = 8;
