// The 16-bit float of the kernels behind this: bf16, behind `elements.cuh`. `f16.cuh` has the same names.
using Narrow = Bf16;
// Its name in those of kernels and of instructions.
#define NAMED(name) name##_bf16
#define NARROW "bf16"
[[maybe_unused]] constexpr bool HAS_RANGE_OF_FP32 = true;
