// NCCL as the forwarding shims reach it. Its declarations are RCCL's; the library is the one that libtorch has loaded.
#pragma once
#include <dlfcn.h>
#include <cstdio>
#include "../rccl_abi.h"

namespace nccl {

#define NCCL_CALLS(CALL)                                                                                               \
  CALL(ncclResult_t, ncclGetVersion, int*)                                                                             \
  CALL(const char*, ncclGetErrorString, ncclResult_t)                                                                  \
  CALL(const char*, ncclGetLastError, ncclComm_t)                                                                      \
  CALL(ncclResult_t, ncclGetUniqueId, ncclUniqueId*)                                                                   \
  CALL(ncclResult_t, ncclCommInitRankConfig, ncclComm_t*, int, ncclUniqueId, int, ncclConfig_t*)                       \
  CALL(ncclResult_t, ncclCommSplit, ncclComm_t, int, int, ncclComm_t*, ncclConfig_t*)                                  \
  CALL(ncclResult_t, ncclCommGetAsyncError, ncclComm_t, ncclResult_t*)                                                 \
  CALL(ncclResult_t, ncclCommDestroy, ncclComm_t)                                                                      \
  CALL(ncclResult_t, ncclCommAbort, ncclComm_t)                                                                        \
  CALL(ncclResult_t, ncclCommCount, ncclComm_t, int*)                                                                  \
  CALL(ncclResult_t, ncclGroupStart, void)                                                                             \
  CALL(ncclResult_t, ncclGroupEnd, void)                                                                               \
  CALL(ncclResult_t, ncclSend, const void*, size_t, ncclDataType_t, int, ncclComm_t, hipStream_t)                      \
  CALL(ncclResult_t, ncclRecv, void*, size_t, ncclDataType_t, int, ncclComm_t, hipStream_t)                            \
  CALL(ncclResult_t, ncclBroadcast, const void*, void*, size_t, ncclDataType_t, int, ncclComm_t, hipStream_t)          \
  CALL(ncclResult_t, ncclAllGather, const void*, void*, size_t, ncclDataType_t, ncclComm_t, hipStream_t)               \
  CALL(ncclResult_t, ncclAllReduce, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, hipStream_t)  \
  CALL(ncclResult_t, ncclReduceScatter, const void*, void*, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, hipStream_t)

struct Library {
#define CALL(result, name, ...) result (*name)(__VA_ARGS__) = nullptr;
  NCCL_CALLS(CALL)
#undef CALL
  bool found = false;
};

inline Library open() {
  Library library;
  const auto nothing = [](const char* why) {
    fprintf(stderr, "SHIM: no collectives: %s\n", why);
    return Library{};
  };
  void* file = dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL);
  if (!file) return nothing(dlerror());
#define CALL(result, name, ...) \
  if (!(library.name = (decltype(library.name))dlsym(file, #name))) return nothing(dlerror());
  NCCL_CALLS(CALL)
#undef CALL
  library.found = true;
  return library;
}
inline const Library& library() {
  static const Library* opened = new Library(open());
  return *opened;
}

// Bytes from every rank to every other. Both vendors have it under a name of their own, NCCL from 2.28 on.
inline ncclResult_t all_to_all(const void* from, void* to, size_t bytes, ncclComm_t comm, hipStream_t stream) {
  const Library& nccl = library();
  int ranks = 0;
  if (!nccl.found) return ncclInternalError;
  if (ncclResult_t result = nccl.ncclCommCount(comm, &ranks)) return result;
  if (ncclResult_t result = nccl.ncclGroupStart()) return result;
  ncclResult_t result = ncclSuccess;
  for (int peer = 0; !result && peer < ranks; peer++) {
    result = nccl.ncclSend((const char*)from + peer * bytes, bytes, ncclUint8, peer, comm, stream);
    if (!result) result = nccl.ncclRecv((char*)to + peer * bytes, bytes, ncclUint8, peer, comm, stream);
  }
  const ncclResult_t ended = nccl.ncclGroupEnd();
  return result ? result : ended;
}

}  // namespace nccl
