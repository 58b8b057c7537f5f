// Goes in front of a kernel's source when the compiler's shim builds it for the host: the words of the language, and a
// grid as loops. Where a block waits for all of its threads, they are fibers that take turns.
#define __HIP_DEVICE_COMPILE__ 1
#define __HIPCC__ 1
#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include "kernel_code.h"

#define __device__
#define __global__
#define __launch_bounds__(n)
#define __shared__ static thread_local

struct Index {
  unsigned x, y, z;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }

// IEEE half as a storage type: GCC 12 has none in C++. Rounds to the nearest, ties to even.
struct ShimHalf {
  unsigned short bits;
  ShimHalf() = default;
  explicit ShimHalf(float x) {
    const unsigned all = __float_as_uint(x), sign = all >> 16 & 0x8000, size = all & 0x7fffffff;
    if (size >= 0x7f800000) bits = sign | 0x7c00 | (size > 0x7f800000 ? 0x200 : 0);
    else if (size >= 0x477ff000) bits = sign | 0x7c00;
    else if (size < 0x38800000) bits = sign | (unsigned short)std::nearbyint(std::ldexp(std::fabs(x), 24));
    else bits = sign | ((size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
  }
  explicit operator float() const {
    const unsigned exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                       : exponent ? std::ldexp(1024.f + fraction, (int)exponent - 25)
                                  : std::ldexp((float)fraction, -24);
    return bits & 0x8000 ? -size : size;
  }
};
#define _Float16 ShimHalf

namespace shim {

// The threads of a block that wait for one another.
struct Fibers {
  static constexpr size_t STACK = 64 << 10;
  ucontext_t scheduler;
  std::vector<ucontext_t> threads;
  std::vector<bool> ended;
  std::unique_ptr<char[]> stacks;
  std::function<void()> body;
  unsigned current = 0;
  bool met = false;  // whether any thread waited

  static thread_local Fibers* active;

  static void enter() {
    Fibers* self = active;
    self->body();
    self->ended[self->current] = true;
    swapcontext(&self->threads[self->current], &self->scheduler);
  }
  // Runs the body once for each thread of a block.
  void run(unsigned count) {
    threads.resize(count);
    ended.assign(count, false);
    if (!stacks) stacks.reset(new char[STACK * count]);
    for (unsigned i = 0; i < count; i++) {
      getcontext(&threads[i]);
      threads[i].uc_stack.ss_sp = stacks.get() + i * STACK;
      threads[i].uc_stack.ss_size = STACK;
      threads[i].uc_link = nullptr;
      makecontext(&threads[i], enter, 0);
    }
    active = this;
    for (bool left = true; left;) {
      left = false;
      for (current = 0; current < count; current++) {
        if (ended[current]) continue;
        threadIdx = {current, 0, 0};
        swapcontext(&scheduler, &threads[current]);
        left |= !ended[current];
      }
    }
    active = nullptr;
  }
};
inline thread_local Fibers* Fibers::active = nullptr;

// The first block decides whether the threads of this launch wait for one another; the others may not differ.
inline void run_grid(const Launch& launch, std::function<void()> body) {
  gridDim = {launch.grid, 1, 1};
  blockDim = {launch.block, 1, 1};
  Fibers fibers;
  fibers.body = body;
  for (unsigned block = 0; block < launch.grid; block++) {
    blockIdx = {block, 0, 0};
    if (block == 0 || fibers.met) {
      fibers.run(launch.block);
      continue;
    }
    for (unsigned thread = 0; thread < launch.block; thread++) {
      threadIdx = {thread, 0, 0};
      body();
    }
  }
}

template <typename T>
bool translate(T& value, const Launch& launch) {
  if constexpr (std::is_pointer_v<T>) {
    if (value && !launch.is_live((const void*)value)) return false;
    value = (T)((char*)value + launch.to_host);
  }
  return true;
}

template <typename... A, size_t... I>
Bound* bind_each(void (*kernel)(A...), void** parameters, std::index_sequence<I...>) {
  auto values = std::make_tuple(*(std::decay_t<A>*)parameters[I]...);
  return new Bound([kernel, values](const Launch& launch) mutable {
    const bool all_live = (translate(std::get<I>(values), launch) && ...);
    if (all_live) run_grid(launch, [&] { std::apply(kernel, values); });
    return all_live;
  });
}
template <typename... A>
Bound* bind_kernel(void (*kernel)(A...), void** parameters) {
  return bind_each(kernel, parameters, std::index_sequence_for<A...>{});
}

}  // namespace shim

inline void __syncthreads() {
  shim::Fibers* fibers = shim::Fibers::active;
  if (!fibers) {
    fputs("SHIM: a block waits for its threads, and the first block of the launch did not\n", stderr);
    abort();
  }
  fibers->met = true;
  swapcontext(&fibers->threads[fibers->current], &fibers->scheduler);
}
