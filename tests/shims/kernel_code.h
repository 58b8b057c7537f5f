// What the run-time compiler's shim makes of a source, and the runtime's shim loads: a host library behind a header.
#pragma once
#include <cstdint>
#include <functional>

namespace shim {

struct CodeHeader {
  char magic[8];  // "SHIMCODE"
  char architecture[56];
  uint64_t len;  // of the library that follows
};

// What a bound kernel needs to run: the grid, and how it reaches device memory.
struct Launch {
  unsigned grid, block;
  long to_host;                     // from an address on the device to the byte that may be touched
  bool (*is_live)(const void* at);  // whether it is an address on the device
};
// Takes the parameters' values at once, and is called when the stream gets there; false for a bad address.
using Bound = std::function<bool(const Launch&)>;
// For each kernel NAME the library has `shim_bind_NAME` of this type.
using Bind = Bound* (*)(void** parameters);

}  // namespace shim
