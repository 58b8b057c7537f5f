// The part of HCCL's ABI that the shim has, as hccl.h and hccl_types.h of torch_npu 2.11 declare it: see hip_abi.h.
#pragma once
#include <cstring>
#include "acl_abi.h"

enum HcclResult : int {
  HCCL_SUCCESS = 0,
  HCCL_E_PARA = 1,
  HCCL_E_PTR = 2,
  HCCL_E_INTERNAL = 4,
  HCCL_E_NOT_SUPPORT = 5,
  HCCL_E_TIMEOUT = 9,
  HCCL_E_RUNTIME = 15,
  HCCL_E_AGAIN = 20,
};
enum HcclDataType : int { HCCL_DATA_TYPE_INT8 = 0, HCCL_DATA_TYPE_UINT8 = 7 };
enum HcclSendRecvType : int { HCCL_SEND = 0, HCCL_RECV = 1 };
typedef void* HcclComm;
const uint32_t HCCL_ROOT_INFO_BYTES = 4108, HCCL_COMM_CONFIG_INFO_BYTES = 24, HCCL_COMM_CONFIG_MAGIC_WORD = 0xf0f0f0f0,
               HCCL_COMM_CONFIG_VERSION = 10, HCCL_COMM_DETERMINISTIC_CONFIG_NOT_SET = 0xffffffff;
struct HcclRootInfo {
  char internal[HCCL_ROOT_INFO_BYTES];
};
struct HcclCommConfig {
  char reserved[HCCL_COMM_CONFIG_INFO_BYTES];
  uint32_t hcclBufferSize, hcclDeterministic;
  char hcclCommName[128], hcclUdi[128];
  uint32_t hcclOpExpansionMode, hcclRdmaTrafficClass, hcclRdmaServiceLevel, hcclWorldRankID;
  uint64_t hcclJobID;
  uint8_t aclGraphZeroCopyEnable;
  int32_t hcclExecTimeOut;
  char hcclAlgo[1600], hcclRetryEnable[50], hcclRetryParams[128], hcclBufferName[128];
  uint32_t hcclQos;
};
// Whether HcclCommConfigInit has filled the reserved bytes, as hccl.h does inline.
inline bool was_initialized(const HcclCommConfig& config) {
  struct {
    size_t size;
    uint32_t magic, version;
    uint64_t reserved;
  } header;
  static_assert(sizeof header == sizeof config.reserved, "");
  memcpy(&header, config.reserved, sizeof header);
  return header.size == sizeof config && header.magic == HCCL_COMM_CONFIG_MAGIC_WORD &&
         header.version == HCCL_COMM_CONFIG_VERSION && !header.reserved;
}
static_assert(sizeof(HcclCommConfig) == 2232 && offsetof(HcclCommConfig, hcclExecTimeOut) == 316, "");
struct HcclSendRecvItem {
  HcclSendRecvType sendRecvType;
  void* buf;
  uint64_t count;
  HcclDataType dataType;
  uint32_t remoteRank;
};
