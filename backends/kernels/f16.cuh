// The 16-bit float of the kernels behind this: fp16, behind `elements.cuh`. `bf16.cuh` has the same names.
using Narrow = F16;
// Its name in those of kernels and of instructions.
#define NAMED(name) name##_f16
#define NARROW "f16"
[[maybe_unused]] constexpr bool HAS_RANGE_OF_FP32 = false;
