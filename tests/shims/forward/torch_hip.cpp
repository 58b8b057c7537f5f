// SHIM of libtorch_hip, for tests: libtorch's build for NVIDIA, as which its build for ROCm presents itself.
#include "torch_cuda.h"

__attribute__((constructor)) static void start() { load_libtorch_cuda(); }
