// libtorch's own support of NVIDIA's devices, which lies beside the libtorch that this process has loaded.
#pragma once
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <string>

inline void* load_libtorch_cuda() {
  Dl_info info{};
  char found[4096];
  // Any function that libtorch_cpu exports under a C name would do.
  void* exported = dlsym(RTLD_DEFAULT, "aoti_torch_device_type_cpu");
  std::string path = "libtorch_cuda.so";
  if (exported && dladdr(exported, &info) && realpath(info.dli_fname, found)) {
    path = found;
    path = path.substr(0, path.rfind('/') + 1) + "libtorch_cuda.so";
  }
  // For everybody, as libtorch's libraries are meant to be.
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (!library) fprintf(stderr, "SHIM: %s\n", dlerror());
  return library;
}
