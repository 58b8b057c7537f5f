// The rendezvous: c10d's TCPStore, which libtorch_cpu carries on every machine.
#include <c10/util/Logging.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <cstring>
#include <string>
#include "shim.h"

using StorePtr = c10::intrusive_ptr<c10d::Store>;
using std::chrono::milliseconds;

extern "C" {
// ---- TCPStore ----
// The caller releases it with anyroll_store_free. Rank 0 passes server = 1 and holds the store for all: at the socket
// `listening`, which it then owns, or, if that is -1, at one that it binds.
void* anyroll_store_tcp(const char* host, uint16_t port, int server, int listening, int world_size,
                        int64_t timeout_ms) {
  return guarded<void*>(nullptr, [&]() -> void* {
    // Makes TORCH_CPP_LOG_LEVEL count; only libtorch's Python module does it by itself.
    static const bool logging = (c10::initLogging(), true);
    (void)logging;
    c10d::TCPStoreOptions options;
    options.port = port;
    options.isServer = server;
    if (listening >= 0) options.masterListenFd = listening;
    options.numWorkers = world_size;
    options.waitWorkers = true;
    options.timeout = milliseconds(timeout_ms);
    options.multiTenant = true;  // a process may connect again: its collectives and its caller each hold a store
    return new StorePtr(c10::make_intrusive<c10d::TCPStore>(host, options));
  });
}
// A view of `store` whose keys start with `prefix`.
void* anyroll_store_prefix(void* store, const char* prefix) {
  return guarded<void*>(nullptr, [&]() -> void* {
    return new StorePtr(c10::make_intrusive<c10d::PrefixStore>(prefix, *static_cast<StorePtr*>(store)));
  });
}
int anyroll_store_set(void* store, const char* key, const uint8_t* value, size_t len) {
  return guarded<int>(-1, [&] {
    (*static_cast<StorePtr*>(store))->set(key, std::vector<uint8_t>(value, value + len));
    return 0;
  });
}
// Adds to the number of a key, 0 at first, and returns what it is then; -1 if it cannot.
int64_t anyroll_store_add(void* store, const char* key, int64_t amount) {
  return guarded<int64_t>(-1, [&] { return (*static_cast<StorePtr*>(store))->add(key, amount); });
}
// 1 if some rank has set the key, 0 if none has, -1 if it cannot be asked.
int anyroll_store_is_set(void* store, const char* key) {
  return guarded<int>(-1, [&] { return (*static_cast<StorePtr*>(store))->check({key}) ? 1 : 0; });
}
// Waits up to timeout_ms for the key. Returns its length, and copies at most `capacity` bytes.
int64_t anyroll_store_get(void* store, const char* key, uint8_t* out, size_t capacity, int64_t timeout_ms) {
  return guarded<int64_t>(-1, [&]() -> int64_t {
    auto& s = *static_cast<StorePtr*>(store);
    s->wait({key}, milliseconds(timeout_ms));
    auto value = s->get(key);
    std::memcpy(out, value.data(), std::min(capacity, value.size()));
    return static_cast<int64_t>(value.size());
  });
}
void anyroll_store_free(void* store) { delete static_cast<StorePtr*>(store); }
}
