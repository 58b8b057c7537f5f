// SHIM of libhiprtc, for tests: compiles by NVRTC, and takes what a source has for AMD. Written from hiprtc.h, nvrtc.h
// and their documentation. A program is NVRTC's own, and the results have the same numbers.
#include <dlfcn.h>
#include <cstdio>
#include <string>
#include <vector>
#include "../hiprtc_abi.h"

namespace {

#define NVRTC_CALLS(CALL)                                                                                  \
  CALL(nvrtcCreateProgram, hiprtcProgram*, const char*, const char*, int, const char* const*, const char* const*) \
  CALL(nvrtcCompileProgram, hiprtcProgram, int, const char* const*)                                        \
  CALL(nvrtcGetProgramLogSize, hiprtcProgram, size_t*)                                                     \
  CALL(nvrtcGetProgramLog, hiprtcProgram, char*)                                                           \
  CALL(nvrtcGetCUBINSize, hiprtcProgram, size_t*)                                                          \
  CALL(nvrtcGetCUBIN, hiprtcProgram, char*)                                                                \
  CALL(nvrtcDestroyProgram, hiprtcProgram*)

struct Compiler {
#define CALL(name, ...) int (*name)(__VA_ARGS__) = nullptr;
  NVRTC_CALLS(CALL)
#undef CALL
  bool found = false;
};

Compiler open() {
  Compiler compiler;
  const auto nothing = [](const char* why) {
    fprintf(stderr, "SHIM: no compiler: %s\n", why);
    return Compiler{};
  };
  void* library = nullptr;
  for (const char* name : {"libnvrtc.so.13", "libnvrtc.so.12"})
    if (!library) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (!library) return nothing(dlerror());
#define CALL(name, ...) \
  if (!(compiler.name = (decltype(compiler.name))dlsym(library, #name))) return nothing(dlerror());
  NVRTC_CALLS(CALL)
#undef CALL
  compiler.found = true;
  return compiler;
}
const Compiler& compiler() {
  static const Compiler* opened = new Compiler(open());
  return *opened;
}

// What AMD's compiler has and NVIDIA's has not, in front of every source. Without the architecture's macro a source does
// not take what it has for NVIDIA.
const char* const PRELUDE_NAME = "shim_hip.h";
const char* const PRELUDE = R"(
#undef __CUDA_ARCH__
#define __HIP_DEVICE_COMPILE__ 1
#define __HIPCC__ 1
struct shim_half {
  unsigned short bits;
  shim_half() = default;
  __device__ explicit shim_half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(bits));
    return wide;
  }
};
#define _Float16 shim_half
#define __shfl_xor(x, mask, width) __shfl_xor_sync(0xffffffff, x, mask, width)
#define __builtin_trap() __trap()
)";

#define COMPILER() \
  if (!compiler().found) return HIPRTC_ERROR_INTERNAL_ERROR
#define FORWARD(name, ...) \
  do {                     \
    COMPILER();            \
    return (hiprtcResult)compiler().name(__VA_ARGS__); \
  } while (0)

}  // namespace

extern "C" {
hiprtcResult hiprtcCreateProgram(hiprtcProgram* program, const char* source, const char* name, int headers,
                                 const char* const*, const char* const*) {
  if (headers) return HIPRTC_ERROR_INVALID_INPUT;
  FORWARD(nvrtcCreateProgram, program, source, name, 1, &PRELUDE, &PRELUDE_NAME);
}
hiprtcResult hiprtcCompileProgram(hiprtcProgram program, int count, const char* const* options) {
  const std::string target = "--offload-arch=";
  std::vector<std::string> theirs{std::string("--pre-include=") + PRELUDE_NAME};
  for (int i = 0; i < count; i++) {
    const std::string option = options[i];
    // As the shim of the runtime names an architecture.
    if (option.rfind(target + "sm_", 0) == 0) theirs.push_back("--gpu-architecture=" + option.substr(target.size()));
    else if (option == "-ffp-contract=off") theirs.push_back("--fmad=false");
    else if (option == "-std=c++17") theirs.push_back("--std=c++17");
    else return HIPRTC_ERROR_INVALID_OPTION;
  }
  std::vector<const char*> texts;
  for (auto& option : theirs) texts.push_back(option.c_str());
  FORWARD(nvrtcCompileProgram, program, (int)texts.size(), texts.data());
}
hiprtcResult hiprtcGetProgramLogSize(hiprtcProgram program, size_t* len) { FORWARD(nvrtcGetProgramLogSize, program, len); }
hiprtcResult hiprtcGetProgramLog(hiprtcProgram program, char* text) { FORWARD(nvrtcGetProgramLog, program, text); }
hiprtcResult hiprtcGetCodeSize(hiprtcProgram program, size_t* len) { FORWARD(nvrtcGetCUBINSize, program, len); }
hiprtcResult hiprtcGetCode(hiprtcProgram program, char* code) { FORWARD(nvrtcGetCUBIN, program, code); }
hiprtcResult hiprtcDestroyProgram(hiprtcProgram* program) { FORWARD(nvrtcDestroyProgram, program); }
}
