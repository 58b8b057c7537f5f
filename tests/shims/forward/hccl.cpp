// SHIM of libhccl, for tests: HCCL over NCCL. Written from hccl.h (torch_npu 2.11), its documentation (CANN 8.5) and
// nccl.h 2.28. It moves bytes and reduces nothing, since nothing here asks for that.
#include <climits>
#include <cstring>
#ifdef SHIM_VENDOR_HEADERS
#include <hccl/hccl.h>
#else
#include "../hccl_abi.h"
#endif
#include "nccl.h"

extern "C" aclError aclrtGetCurrentContext(aclrtContext*);

namespace {

HcclResult refuse(HcclResult code, const char* why) {
  fprintf(stderr, "SHIM: HCCL refuses: %s\n", why);
  return code;
}
HcclResult hccl(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: case ncclInProgress: return HCCL_SUCCESS;
    case ncclInvalidArgument: case ncclInvalidUsage: return refuse(HCCL_E_PARA, nccl::library().ncclGetLastError(nullptr));
    case ncclUnhandledCudaError: return refuse(HCCL_E_RUNTIME, nccl::library().ncclGetLastError(nullptr));
    default: return HCCL_E_INTERNAL;
  }
}
bool is_bytes(HcclDataType type) { return type == HCCL_DATA_TYPE_INT8 || type == HCCL_DATA_TYPE_UINT8; }
ncclComm_t comm_of(HcclComm comm) { return (ncclComm_t)comm; }
hipStream_t stream_of(aclrtStream stream) { return (hipStream_t)stream; }

#define LIBRARY() \
  if (!nccl::library().found) return HCCL_E_INTERNAL

}  // namespace

extern "C" {

const int anyroll_shim = 1;  // so that nobody takes this for the vendor's library

const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_RUNTIME: return "call runtime api fail";
    default: return "error";
  }
}
// The first bytes are NCCL's id, and the last show that all of it has arrived.
HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  LIBRARY();
  ncclUniqueId id;
  const HcclResult result = hccl(nccl::library().ncclGetUniqueId(&id));
  memset(info, 0x5a, sizeof *info);
  memcpy(info->internal, id.internal, sizeof id.internal);
  return result;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config,
                                      HcclComm* made) {
  LIBRARY();
  if (!info || !config || !made) return HCCL_E_PTR;
  if (info->internal[sizeof info->internal - 1] != 0x5a) return refuse(HCCL_E_PARA, "not a whole root info");
  if (!was_initialized(*config)) return refuse(HCCL_E_PARA, "a config that HcclCommConfigInit has not made");
  aclrtContext context;
  if (aclrtGetCurrentContext(&context)) return refuse(HCCL_E_RUNTIME, "this thread has no device");
  ncclUniqueId id;
  memcpy(id.internal, info->internal, sizeof id.internal);
  ncclConfig_t theirs{sizeof theirs, 0xcafebeef, 21700, 1, INT_MIN, INT_MIN, INT_MIN, nullptr, INT_MIN};
  return hccl(nccl::library().ncclCommInitRankConfig((ncclComm_t*)made, (int)size, id, (int)rank, &theirs));
}
// Ends what runs, as the documentation has it.
HcclResult HcclCommDestroy(HcclComm comm) {
  LIBRARY();
  return hccl(nccl::library().ncclCommAbort(comm_of(comm)));
}
HcclResult HcclGetCommAsyncError(HcclComm comm, HcclResult* state) {
  LIBRARY();
  ncclResult_t theirs = ncclSuccess;
  const HcclResult result = hccl(nccl::library().ncclCommGetAsyncError(comm_of(comm), &theirs));
  *state = hccl(theirs);
  return result;
}

HcclResult HcclBroadcast(void* at, uint64_t count, HcclDataType type, uint32_t root, HcclComm comm, aclrtStream stream) {
  LIBRARY();
  if (!is_bytes(type)) return refuse(HCCL_E_NOT_SUPPORT, "the shim moves bytes");
  const auto& nccl = nccl::library();
  return hccl(nccl.ncclBroadcast(at, at, count, ncclUint8, (int)root, comm_of(comm), stream_of(stream)));
}
HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm comm, aclrtStream stream) {
  LIBRARY();
  if (!is_bytes(type)) return refuse(HCCL_E_NOT_SUPPORT, "the shim moves bytes");
  return hccl(nccl::library().ncclAllGather(from, to, count, ncclUint8, comm_of(comm), stream_of(stream)));
}
HcclResult HcclAlltoAll(const void* from, uint64_t send_count, HcclDataType send_type, const void* to, uint64_t count,
                        HcclDataType type, HcclComm comm, aclrtStream stream) {
  LIBRARY();
  if (!is_bytes(type) || !is_bytes(send_type) || send_count != count)
    return refuse(HCCL_E_NOT_SUPPORT, "the shim moves bytes, as many to every rank");
  return hccl(nccl::all_to_all(from, (void*)to, count, comm_of(comm), stream_of(stream)));
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm comm, aclrtStream stream) {
  LIBRARY();
  const auto& nccl = nccl::library();
  if (ncclResult_t result = nccl.ncclGroupStart()) return hccl(result);
  ncclResult_t result = ncclSuccess;
  for (uint32_t i = 0; !result && i < count; i++) {
    const auto& item = items[i];
    if (!is_bytes(item.dataType)) result = ncclInvalidArgument;
    else if (item.sendRecvType == HCCL_SEND)
      result = nccl.ncclSend(item.buf, item.count, ncclUint8, (int)item.remoteRank, comm_of(comm), stream_of(stream));
    else
      result = nccl.ncclRecv(item.buf, item.count, ncclUint8, (int)item.remoteRank, comm_of(comm), stream_of(stream));
  }
  const ncclResult_t ended = nccl.ncclGroupEnd();
  return hccl(result ? result : ended);
}
}
