// SHIM of libhccl, for tests: collectives between processes of one host. Written from hccl.h (torch_npu 2.11) and its
// documentation (CANN 8.5). A rank that died is not reported: HcclCommDestroy and the communicator's own time-out end
// the wait for it. It moves bytes and reduces nothing, since nothing here asks for that.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#ifdef SHIM_VENDOR_HEADERS
#include <hccl/hccl.h>
#else
#include "hccl_abi.h"
#endif
#include "mesh.h"

extern "C" {
aclError aclrtGetDevice(int32_t*), aclrtLaunchHostFunc(aclrtStream, aclrtHostFunc, void*);
void* anyroll_shim_host(void*);
int anyroll_shim_is_live(const void*, size_t);
}

namespace {

struct Comm {
  shim::Mesh mesh;
  int device = 0;
  std::atomic<int> state{HCCL_SUCCESS};
  std::atomic<int> inside{0};  // threads in a call
};
using Handle = std::shared_ptr<Comm>;

std::mutex table_mutex;
std::map<void*, Handle>& table() {
  static auto* all = new std::map<void*, Handle>;
  return *all;
}
Handle find(HcclComm handle) {
  std::lock_guard<std::mutex> lock(table_mutex);
  auto found = table().find(handle);
  return found == table().end() ? nullptr : found->second;
}

HcclResult refuse(HcclResult code, const char* why) {
  fprintf(stderr, "SHIM: HCCL refuses: %s\n", why);
  return code;
}

struct Part {
  uint32_t peer;
  void* at;  // on the device
  size_t len;
  bool is_send;
};
struct Operation {
  Handle comm;
  std::vector<Part> parts;
};

void run(void* data) {
  std::unique_ptr<Operation> operation((Operation*)data);
  Comm& comm = *operation->comm;
  if (comm.state != HCCL_SUCCESS || comm.mesh.ended) return;
  std::vector<shim::Transfer> transfers;
  const Part *own_send = nullptr, *own_recv = nullptr;
  for (auto& part : operation->parts) {
    if (!anyroll_shim_is_live(part.at, part.len)) {
      comm.state = HCCL_E_RUNTIME;
      return;
    }
    if ((int)part.peer == comm.mesh.rank) (part.is_send ? own_send : own_recv) = &part;
    transfers.push_back({(int)part.peer, anyroll_shim_host(part.at), part.len, part.is_send});
  }
  if (own_send && own_recv) memmove(anyroll_shim_host(own_recv->at), anyroll_shim_host(own_send->at), own_send->len);
  switch (comm.mesh.exchange(transfers)) {
    case shim::Mesh::DONE: break;
    case shim::Mesh::LATE: comm.state = HCCL_E_TIMEOUT; break;
    default: comm.state = HCCL_E_INTERNAL;
  }
}

HcclResult enqueue(const Handle& comm, std::vector<Part> parts, aclrtStream stream) {
  if (!comm) return refuse(HCCL_E_PARA, "no such communicator");
  if (comm->state != HCCL_SUCCESS) return (HcclResult)comm->state.load();
  int32_t device = -1;
  if (aclrtGetDevice(&device) || device != comm->device) return refuse(HCCL_E_RUNTIME, "the current device is not the communicator's");
  for (auto& part : parts) {
    if ((int)part.peer >= comm->mesh.size) return refuse(HCCL_E_PARA, "no such rank");
    if (!part.len || !anyroll_shim_is_live(part.at, part.len)) return refuse(HCCL_E_PARA, "not memory of a device");
  }
  auto* operation = new Operation{comm, std::move(parts)};
  return aclrtLaunchHostFunc(stream, run, operation) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

// Not promised: a buffer that is its own source, or that starts at any byte.
bool may_be_used(const void* to, size_t to_len, const void* from, size_t from_len) {
  const auto t = (uintptr_t)to, f = (uintptr_t)from;
  return t % 64 == 0 && f % 64 == 0 && (t + to_len <= f || f + from_len <= t);
}
bool is_bytes(HcclDataType type) { return type == HCCL_DATA_TYPE_INT8 || type == HCCL_DATA_TYPE_UINT8; }

struct Inside {
  Handle comm;
  explicit Inside(HcclComm handle) : comm(find(handle)) { if (comm) comm->inside++; }
  ~Inside() { if (comm) comm->inside--; }
};

}  // namespace

extern "C" {

const char* HcclGetErrorString(HcclResult code) {
  switch (code) {
    case HCCL_SUCCESS: return "no error";
    case HCCL_E_PARA: return "parameter error";
    case HCCL_E_TIMEOUT: return "timeout";
    case HCCL_E_RUNTIME: return "call runtime api fail";
    default: return "error";
  }
}
HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  int32_t device = 0;
  if (!info) return HCCL_E_PTR;
  if (aclrtGetDevice(&device)) return refuse(HCCL_E_RUNTIME, "this thread has no device");
  memset(info, 0, sizeof *info);
  const std::string name = shim::random_name();
  memcpy(info->internal, name.data(), name.size());
  // All of it has to arrive.
  memset(info->internal + sizeof info->internal - 4, 0x5a, 4);
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig* config, HcclComm* made) {
  if (!info || !config || !made) return HCCL_E_PTR;
  if (rank >= size) return refuse(HCCL_E_PARA, "a rank outside of its world");
  if (info->internal[sizeof info->internal - 1] != 0x5a) return refuse(HCCL_E_PARA, "not a whole root info");
  if (!was_initialized(*config)) return refuse(HCCL_E_PARA, "a config that HcclCommConfigInit has not made");
  if (config->hcclDeterministic > 1 && config->hcclDeterministic != HCCL_COMM_DETERMINISTIC_CONFIG_NOT_SET) return refuse(HCCL_E_PARA, "a config with a number that is none");
  auto comm = std::make_shared<Comm>();
  if (aclrtGetDevice(&comm->device)) return refuse(HCCL_E_RUNTIME, "this thread has no device");
  if (config->hcclExecTimeOut > 0) comm->mesh.limit = std::chrono::seconds(config->hcclExecTimeOut);
  if (comm->mesh.connect(info->internal, rank, size) != shim::Mesh::DONE) return refuse(HCCL_E_PARA, "two ranks with one number");
  // One device a rank.
  std::vector<int32_t> devices(size, comm->device);
  std::vector<shim::Transfer> all;
  int32_t own = comm->device;
  for (uint32_t peer = 0; peer < size; peer++) {
    all.push_back({(int)peer, &own, sizeof own, true});
    all.push_back({(int)peer, &devices[peer], sizeof own, false});
  }
  if (comm->mesh.exchange(all) != shim::Mesh::DONE) return HCCL_E_INTERNAL;
  for (uint32_t peer = 0; peer < size; peer++)
    if (peer != rank && devices[peer] == own) return refuse(HCCL_E_PARA, "two ranks on one device");
  std::lock_guard<std::mutex> lock(table_mutex);
  table()[comm.get()] = comm;
  *made = comm.get();
  return HCCL_SUCCESS;
}
HcclResult HcclCommDestroy(HcclComm handle) {
  Handle comm = find(handle);
  if (!comm) return refuse(HCCL_E_PARA, "no such communicator");
  if (comm->inside) return HCCL_E_AGAIN;
  comm->mesh.ended = true;
  std::lock_guard<std::mutex> lock(table_mutex);
  table().erase(handle);
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* state) {
  Inside call(handle);
  if (!call.comm) return refuse(HCCL_E_PARA, "no such communicator");
  *state = (HcclResult)call.comm->state.load();
  return HCCL_SUCCESS;
}

HcclResult HcclBroadcast(void* at, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle, aclrtStream stream) {
  Inside call(handle);
  if (!call.comm || !is_bytes(type) || (uintptr_t)at % 64 || (int)root >= call.comm->mesh.size) return refuse(HCCL_E_PARA, "a broadcast as it must not be");
  std::vector<Part> parts;
  if (call.comm->mesh.rank != (int)root) parts.push_back({root, at, count, false});
  for (int peer = 0; call.comm->mesh.rank == (int)root && peer < call.comm->mesh.size; peer++)
    if (peer != (int)root) parts.push_back({(uint32_t)peer, at, count, true});
  return enqueue(call.comm, parts, stream);
}
HcclResult HcclAllGather(void* from, void* to, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream stream) {
  Inside call(handle);
  if (!call.comm || !is_bytes(type) || !may_be_used(to, count * call.comm->mesh.size, from, count)) return refuse(HCCL_E_PARA, "an all-gather as it must not be");
  std::vector<Part> parts;
  for (int peer = 0; peer < call.comm->mesh.size; peer++) {
    parts.push_back({(uint32_t)peer, from, count, true});
    parts.push_back({(uint32_t)peer, (char*)to + peer * count, count, false});
  }
  return enqueue(call.comm, parts, stream);
}
HcclResult HcclAlltoAll(const void* from, uint64_t send_count, HcclDataType send_type, const void* to, uint64_t count, HcclDataType type, HcclComm handle, aclrtStream stream) {
  Inside call(handle);
  const bool fits = call.comm && is_bytes(type) && is_bytes(send_type) && count == send_count;
  if (!fits || !may_be_used(to, count * call.comm->mesh.size, from, count * call.comm->mesh.size)) return refuse(HCCL_E_PARA, "an all-to-all as it must not be");
  std::vector<Part> parts;
  for (int peer = 0; peer < call.comm->mesh.size; peer++) {
    parts.push_back({(uint32_t)peer, (char*)from + peer * count, count, true});
    parts.push_back({(uint32_t)peer, (char*)to + peer * count, count, false});
  }
  return enqueue(call.comm, parts, stream);
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm handle, aclrtStream stream) {
  Inside call(handle);
  if (!call.comm || !count) return refuse(HCCL_E_PARA, "a batch of nothing");
  std::set<std::pair<uint32_t, int>> seen;
  std::vector<Part> parts;
  for (uint32_t i = 0; i < count; i++) {
    const auto& item = items[i];
    if (!is_bytes(item.dataType) || (uintptr_t)item.buf % 64 || (int)item.remoteRank == call.comm->mesh.rank) return refuse(HCCL_E_PARA, "a transfer as it must not be");
    if (!seen.insert({item.remoteRank, item.sendRecvType}).second) return refuse(HCCL_E_PARA, "two transfers of one direction between two ranks");
    parts.push_back({item.remoteRank, item.buf, item.count, item.sendRecvType == HCCL_SEND});
  }
  return enqueue(call.comm, parts, stream);
}
}
