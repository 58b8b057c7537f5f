// What every file of kernels begins with, in the CUDA C++ that HIP compiles too: no headers, nothing that depends on
// the width of a warp. Kernels are compiled at run time for the device that is there, without fused multiply-add, so
// that elementwise results have the bits of the same formula on a CPU.

typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

// What one access to memory moves: 16 bytes, unless said otherwise.
template <typename T, int N = 16 / sizeof(T)>
struct alignas(N * sizeof(T)) Pack {
  static constexpr int LANES = N;
  T lane[N];
};

template <typename P = Pack<float>>
__device__ inline bool aligned(const void* pointer) {
  return (u64)pointer % sizeof(P) == 0;
}
__device__ inline u64 thread_index() { return blockIdx.x * (u64)blockDim.x + threadIdx.x; }
__device__ inline u64 thread_count() { return gridDim.x * (u64)blockDim.x; }

#define INFINITE __uint_as_float(0x7f800000)

// ---- element types ----

struct Bf16 {
  u16 bits;
};
struct F16 {
  u16 bits;
};

// Floats are computed with in fp32, integers as they are.
__device__ inline int widen(int x) { return x; }
__device__ inline i64 widen(i64 x) { return x; }
__device__ inline unsigned char widen(unsigned char x) { return x; }
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(Bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ inline float widen(F16 x) {
#ifdef __HIP_DEVICE_COMPILE__
  return (float)__builtin_bit_cast(_Float16, x.bits);
#else
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#endif
}

template <typename T>
__device__ inline void narrow(T x, T& to) {
  to = x;
}
// To the nearest, ties to even; a NaN stays one.
__device__ inline void narrow(float x, Bf16& to) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  const u32 bits = __float_as_uint(x);
  to.bits = x != x ? 0x7fc0 : (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#endif
}
__device__ inline void narrow(float x, F16& to) {
  if (x != x) {
    to.bits = (u16)((__float_as_uint(x) >> 16) & 0x8000) | 0x7e00;
    return;
  }
#ifdef __HIP_DEVICE_COMPILE__
  to.bits = __builtin_bit_cast(u16, (_Float16)x);
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#endif
}

// ---- formulas of more than one file ----

__device__ inline float sigmoid(float x) { return __fdividef(1, 1 + __expf(-x)); }
__device__ inline float gated(float gate, float up) { return gate * sigmoid(gate) * up; }

// ---- turns ----

// For kernels that may be started before the one in front has ended: waits for its end, and lets the blocks of the next
// one start. What a kernel reads or writes that others write comes behind.
__device__ inline void take_turn() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
