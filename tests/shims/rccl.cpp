// SHIM of librccl, for tests: collectives between processes of one host. Written from nccl.h (RCCL 2.27) and its
// documentation. A rank that died is not reported: only ncclCommAbort ends the wait for it, and lets the others take
// nonsense for a result.
#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#ifdef SHIM_VENDOR_HEADERS
#include <hip/hip_runtime_api.h>
#include <rccl/rccl.h>
#else
#include "rccl_abi.h"
#endif
#include "mesh.h"

extern "C" {
extern hipError_t hipLaunchHostFunc(hipStream_t, hipHostFn_t, void*);
extern hipError_t hipGetDevice(int*);
void* anyroll_shim_host(void*);
int anyroll_shim_is_live(const void*, size_t);
}

// The library's own structs behind its handles.
struct ncclComm {
  shim::Mesh data, control;
  std::string name;
  int device = 0, splits = 0;
  std::atomic<int> state{ncclInProgress};
  std::thread connecting;

  ~ncclComm() {
    data.ended = control.ended = true;
    if (connecting.joinable()) connecting.join();
  }
};
using Comm = std::shared_ptr<ncclComm>;

namespace {

std::mutex table_mutex;
std::vector<Comm>& table() {
  static auto* all = new std::vector<Comm>;
  return *all;
}
Comm find(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(table_mutex);
  for (auto& comm : table())
    if (comm.get() == handle) return comm;
  return nullptr;
}
ncclComm_t add(Comm comm) {
  std::lock_guard<std::mutex> lock(table_mutex);
  table().push_back(comm);
  return comm.get();
}
Comm remove(ncclComm_t handle) {
  std::lock_guard<std::mutex> lock(table_mutex);
  auto found = std::find_if(table().begin(), table().end(), [&](auto& comm) { return comm.get() == handle; });
  if (found == table().end()) return nullptr;
  Comm comm = *found;
  table().erase(found);
  return comm;
}

thread_local std::string last_error;
ncclResult_t refuse(ncclResult_t code, const char* why) {
  last_error = why;
  return code;
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return 0;
  }
}

// Connects in the background, as a communicator does that does not block.
void start(Comm comm, std::string name, int rank, int size) {
  comm->name = name;
  comm->data.rank = comm->control.rank = rank;
  comm->data.size = comm->control.size = size;
  comm->connecting = std::thread([self = comm.get(), name, rank, size] {
    bool good = self->data.connect(name + "d", rank, size) == shim::Mesh::DONE &&
                self->control.connect(name + "c", rank, size) == shim::Mesh::DONE;
    // Two ranks on one device is an error of the library's.
    std::vector<int32_t> devices(size, self->device);
    std::vector<shim::Transfer> all;
    int32_t own = self->device;
    for (int peer = 0; peer < size; peer++) {
      all.push_back({peer, &own, sizeof own, true});
      all.push_back({peer, &devices[peer], sizeof own, false});
    }
    good = good && self->control.exchange(all) == shim::Mesh::DONE;
    for (int peer = 0; good && peer < size; peer++) good = peer == rank || devices[peer] != own;
    self->state = good ? ncclSuccess : ncclInvalidUsage;
  });
}

// One call, or what is between ncclGroupStart and ncclGroupEnd.
struct Operation {
  struct Part {
    int peer;
    void* at;  // on the device
    size_t len;
    bool is_send;
  };
  Comm comm;
  hipStream_t stream = nullptr;
  std::vector<Part> parts;
  std::function<void()> after = [] {};
};
thread_local int depth = 0;
thread_local std::vector<Operation> group;

void run(void* data) {
  std::unique_ptr<Operation> operation((Operation*)data);
  ncclComm& comm = *operation->comm;
  if (comm.state != ncclSuccess || comm.data.ended) return;
  std::vector<shim::Transfer> transfers;
  const Operation::Part *own_send = nullptr, *own_recv = nullptr;
  for (auto& part : operation->parts) {
    if (!anyroll_shim_is_live(part.at, part.len)) {
      comm.state = ncclUnhandledCudaError;
      return;
    }
    if (part.peer == comm.data.rank) (part.is_send ? own_send : own_recv) = &part;
    transfers.push_back({part.peer, anyroll_shim_host(part.at), part.len, part.is_send});
  }
  if (own_send && own_recv) memmove(anyroll_shim_host(own_recv->at), anyroll_shim_host(own_send->at), own_send->len);
  const auto outcome = comm.data.exchange(transfers);
  if (outcome == shim::Mesh::DONE) operation->after();
  if (outcome == shim::Mesh::MISMATCH) {
    comm.state = ncclInvalidUsage;
    while (!comm.data.ended) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

ncclResult_t enqueue(Operation operation) {
  if (!operation.comm) return refuse(ncclInvalidArgument, "no such communicator");
  if (operation.comm->state != ncclSuccess) return (ncclResult_t)operation.comm->state.load();
  int device = -1;
  if (hipGetDevice(&device) != hipSuccess || device != operation.comm->device)
    return refuse(ncclInvalidUsage, "the current device is not the communicator's");
  for (auto& part : operation.parts)
    if (part.len && !anyroll_shim_is_live(part.at, part.len)) return refuse(ncclInvalidArgument, "not memory of a device");
  if (depth) {
    group.push_back(std::move(operation));
    return ncclSuccess;
  }
  const hipStream_t stream = operation.stream;
  return hipLaunchHostFunc(stream, run, new Operation(std::move(operation))) == hipSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

template <typename T>
void combine(T* to, const T* from, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; i++) {
    if (op == ncclSum) to[i] = (T)(std::make_unsigned_t<T>(to[i]) + std::make_unsigned_t<T>(from[i]));
    if (op == ncclMin) to[i] = std::min(to[i], from[i]);
    if (op == ncclMax) to[i] = std::max(to[i], from[i]);
  }
}
bool combine(void* to, const void* from, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclUint8: combine((uint8_t*)to, (const uint8_t*)from, count, op); return true;
    case ncclInt32: combine((int32_t*)to, (const int32_t*)from, count, op); return true;
    case ncclInt64: combine((int64_t*)to, (const int64_t*)from, count, op); return true;
    default: return false;
  }
}

// Slices that travel between host copies, then a sum in rank order: integers only, which have no rounding.
ncclResult_t reduce(const void* from, void* to, size_t count, bool is_scattered, ncclDataType_t type, ncclRedOp_t op, ncclComm_t handle, hipStream_t stream) {
  Comm comm = find(handle);
  if (!comm) return refuse(ncclInvalidArgument, "no such communicator");
  if (type != ncclUint8 && type != ncclInt32 && type != ncclInt64) return refuse(ncclInvalidArgument, "the shim reduces integers only");
  if (op != ncclSum && op != ncclMin && op != ncclMax) return refuse(ncclInvalidArgument, "the shim has no such reduction");
  if (depth) return refuse(ncclInvalidUsage, "the shim groups no reductions");
  const size_t bytes = count * size_of(type), size = comm->data.size;
  Operation operation{comm, stream, {}, {}};
  operation.after = [=] {
    std::vector<std::vector<char>> received(size, std::vector<char>(bytes));
    std::vector<shim::Transfer> transfers;
    char* source = (char*)anyroll_shim_host((void*)from);
    for (size_t peer = 0; peer < size; peer++) {
      char* slice = source + (is_scattered ? peer * bytes : 0);
      transfers.push_back({(int)peer, slice, bytes, true});
      transfers.push_back({(int)peer, received[peer].data(), bytes, false});
      if ((int)peer == comm->data.rank) memcpy(received[peer].data(), slice, bytes);
    }
    if (comm->data.exchange(transfers) != shim::Mesh::DONE) return;
    for (size_t peer = 1; peer < size; peer++) combine(received[0].data(), received[peer].data(), count, type, op);
    memcpy(anyroll_shim_host(to), received[0].data(), bytes);
  };
  return enqueue(std::move(operation));
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = 22707;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t code) {
  static const char* words[] = {"no error", "unhandled cuda error", "unhandled system error", "internal error", "invalid argument", "invalid usage", "remote process exited or there was a network error", "NCCL operation in progress"};
  return (unsigned)code < 8 ? words[code] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  const std::string name = shim::random_name();
  memcpy(id->internal, name.data(), name.size());
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (!made || rank < 0 || rank >= size) return refuse(ncclInvalidArgument, "a rank outside of its world");
  if (!config || config->magic != 0xcafebeef || config->size < 48 || config->version < 21700) return refuse(ncclInvalidArgument, "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER");
  auto comm = std::make_shared<ncclComm>();
  if (hipGetDevice(&comm->device) != hipSuccess) return ncclUnhandledCudaError;
  start(comm, id.internal, rank, size);
  *made = add(comm);
  if (config->blocking == 0) return ncclInProgress;
  comm->connecting.join();
  return (ncclResult_t)comm->state.load();
}
// The parts meet under a name of the parent, in the background.
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t* config) {
  Comm parent = find(handle);
  if (!parent || !made) return refuse(ncclInvalidArgument, "no such communicator");
  const int size = parent->data.size, rank = parent->data.rank;
  std::vector<std::pair<int32_t, int32_t>> all(size, {color, key});
  auto own = all[rank];
  std::vector<shim::Transfer> transfers;
  for (int peer = 0; peer < size; peer++) {
    transfers.push_back({peer, &own, sizeof own, true});
    transfers.push_back({peer, &all[peer], sizeof own, false});
  }
  if (parent->control.exchange(transfers) != shim::Mesh::DONE) return refuse(ncclInvalidUsage, "the communicator was ended");
  const int number = parent->splits++;
  *made = nullptr;
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::vector<std::pair<int, int>> members;
  for (int peer = 0; peer < size; peer++)
    if (all[peer].first == color) members.push_back({all[peer].second, peer});
  std::sort(members.begin(), members.end());
  const int place = std::find(members.begin(), members.end(), std::make_pair(key, rank)) - members.begin();
  auto comm = std::make_shared<ncclComm>();
  comm->device = parent->device;
  start(comm, parent->name + "s" + std::to_string(number) + "_" + std::to_string(color) + "_", place, members.size());
  *made = add(comm);
  if (!config || config->blocking == 0) return ncclSuccess;
  comm->connecting.join();
  return (ncclResult_t)comm->state.load();
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t* state) {
  Comm comm = find(handle);
  if (!comm) return refuse(ncclInvalidArgument, "no such communicator");
  *state = (ncclResult_t)comm->state.load();
  return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t handle) { return remove(handle) ? ncclSuccess : refuse(ncclInvalidArgument, "no such communicator"); }
ncclResult_t ncclCommAbort(ncclComm_t handle) {
  Comm comm = remove(handle);
  if (!comm) return refuse(ncclInvalidArgument, "no such communicator");
  comm->data.ended = comm->control.ended = true;
  // Kernels that are ended so run out, and the others take what that leaves for data: NCCL's do.
  comm->data.run_out();
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  depth++;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (!depth) return refuse(ncclInvalidUsage, "a group ends that has not started");
  if (--depth || group.empty()) return ncclSuccess;
  Operation merged = std::move(group.front());
  for (size_t i = 1; i < group.size(); i++) {
    if (group[i].comm != merged.comm || group[i].stream != merged.stream) return refuse(ncclInvalidUsage, "the shim groups one communicator on one stream");
    merged.parts.insert(merged.parts.end(), group[i].parts.begin(), group[i].parts.end());
  }
  group.clear();
  return enqueue(std::move(merged));
}

ncclResult_t ncclSend(const void* at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, hipStream_t stream) {
  return enqueue({find(comm), stream, {{peer, (void*)at, count * size_of(type), true}}});
}
ncclResult_t ncclRecv(void* at, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, hipStream_t stream) {
  return enqueue({find(comm), stream, {{peer, at, count * size_of(type), false}}});
}
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t handle, hipStream_t stream) {
  Operation operation{find(handle), stream, {}};
  if (!operation.comm) return refuse(ncclInvalidArgument, "no such communicator");
  const size_t len = count * size_of(type);
  if (operation.comm->data.rank == root) {
    for (int peer = 0; peer < operation.comm->data.size; peer++) operation.parts.push_back({peer, (void*)from, len, true});
    operation.parts.push_back({root, to, len, false});
  } else {
    operation.parts.push_back({root, to, len, false});
  }
  return enqueue(std::move(operation));
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, hipStream_t stream) {
  Operation operation{find(handle), stream, {}};
  if (!operation.comm) return refuse(ncclInvalidArgument, "no such communicator");
  const size_t len = count * size_of(type);
  for (int peer = 0; peer < operation.comm->data.size; peer++) {
    operation.parts.push_back({peer, (void*)from, len, true});
    operation.parts.push_back({peer, (char*)to + peer * len, len, false});
  }
  return enqueue(std::move(operation));
}
// RCCL spells it with a capital T.
ncclResult_t ncclAllToAll(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle, hipStream_t stream) {
  Operation operation{find(handle), stream, {}};
  if (!operation.comm) return refuse(ncclInvalidArgument, "no such communicator");
  const size_t len = count * size_of(type);
  for (int peer = 0; peer < operation.comm->data.size; peer++) {
    operation.parts.push_back({peer, (char*)from + peer * len, len, true});
    operation.parts.push_back({peer, (char*)to + peer * len, len, false});
  }
  return enqueue(std::move(operation));
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, hipStream_t stream) {
  return reduce(from, to, count, false, type, op, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, hipStream_t stream) {
  return reduce(from, to, count, true, type, op, comm, stream);
}
}
