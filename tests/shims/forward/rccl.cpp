// SHIM of librccl, for tests: NCCL, which has the same interface. Written from nccl.h (RCCL 2.27 and NCCL 2.28).
#include "nccl.h"

namespace {

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 8;
  }
}

}  // namespace

#define FORWARD(name, ...) \
  return nccl::library().found ? nccl::library().name(__VA_ARGS__) : ncclInternalError

extern "C" {

const int anyroll_shim = 1;  // so that nobody takes this for the vendor's library

ncclResult_t ncclGetVersion(int* version) { FORWARD(ncclGetVersion, version); }
const char* ncclGetErrorString(ncclResult_t code) {
  return nccl::library().found ? nccl::library().ncclGetErrorString(code) : "libnccl.so.2 is not there";
}
const char* ncclGetLastError(ncclComm_t comm) {
  return nccl::library().found ? nccl::library().ncclGetLastError(comm) : nullptr;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) { FORWARD(ncclGetUniqueId, id); }
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  FORWARD(ncclCommInitRankConfig, comm, size, id, rank, config);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  FORWARD(ncclCommSplit, comm, color, key, made, config);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) { FORWARD(ncclCommGetAsyncError, comm, state); }
ncclResult_t ncclCommDestroy(ncclComm_t comm) { FORWARD(ncclCommDestroy, comm); }
ncclResult_t ncclCommAbort(ncclComm_t comm) { FORWARD(ncclCommAbort, comm); }
ncclResult_t ncclGroupStart() { FORWARD(ncclGroupStart); }
ncclResult_t ncclGroupEnd() { FORWARD(ncclGroupEnd); }
ncclResult_t ncclSend(const void* at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, hipStream_t stream) {
  FORWARD(ncclSend, at, count, type, peer, comm, stream);
}
ncclResult_t ncclRecv(void* at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, hipStream_t stream) {
  FORWARD(ncclRecv, at, count, type, peer, comm, stream);
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           hipStream_t stream) {
  FORWARD(ncclBroadcast, from, to, count, type, root, comm, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           hipStream_t stream) {
  FORWARD(ncclAllGather, from, to, count, type, comm, stream);
}
// RCCL spells it with a capital T.
ncclResult_t ncclAllToAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t comm,
                          hipStream_t stream) {
  return nccl::all_to_all(from, to, count * size_of(type), comm, stream);
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                           hipStream_t stream) {
  FORWARD(ncclAllReduce, from, to, count, type, op, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, hipStream_t stream) {
  FORWARD(ncclReduceScatter, from, to, count, type, op, comm, stream);
}
}
