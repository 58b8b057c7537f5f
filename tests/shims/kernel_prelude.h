// Goes in front of a kernel's source when the compiler's shim builds it for the host: the words of the language, and a
// grid as loops. Where a block waits for all of its threads, they are fibers that take turns.
#define __HIP_DEVICE_COMPILE__ 1
#define __HIPCC__ 1
#include <ucontext.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include "kernel_code.h"

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __shared__ static thread_local

struct Index {
  unsigned x, y, z;
};
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }

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
namespace {  // a library of kernels has a `threadIdx` of its own, and so fibers too

// The threads of a block that wait for one another: each runs on a stack of its own until it waits, and then the next.
// They change places by the compiler's own setjmp, which keeps no more than a stack and where to go on. Nothing may be
// concluded of what does so: all other threads run before it returns.
struct Fibers {
  // A multiple of 16 and not of a page: else the tops of all stacks would share few lines of the processor's caches.
  static constexpr size_t STACK = (64 << 10) + 192;
  using Place = void* [5];
  struct Thread {
    Place at;
    bool has_started = false, has_ended = false;
    unsigned exchanges = 0;
    float given[2];  // to an exchange; two, since the first to get on may be at the next one already
  };
  const unsigned count;
  std::vector<Thread> threads;
  std::unique_ptr<char[]> stacks{new char[STACK * count]};
  std::function<void()> body;
  Place caller;
  unsigned current = 0, left = 0;
  bool met = false;  // whether any thread waited

  static thread_local Fibers* active;

  explicit Fibers(unsigned count) : count(count), threads(count) {}

  // Runs the body once for each thread of a block.
  [[gnu::noipa]] void run() {
    active = this;
    for (Thread& thread : threads) thread.has_ended = false, thread.exchanges = 0;
    current = count - 1, left = count;
    if (__builtin_setjmp(caller) == 0) go_on();
    active = nullptr;
  }
  // Lets the others run up to where this thread is.
  static Fibers& meet() {
    if (!active) {
      fputs("SHIM: a block waits for its threads, and the first block of the launch did not\n", stderr);
      abort();
    }
    active->met = true;
    active->yield();
    return *active;
  }

 private:
  [[gnu::noipa]] void yield() {
    if (__builtin_setjmp(threads[current].at) == 0) go_on();
  }
  // With the next thread that has not ended, in turns, or else with the caller.
  [[gnu::noipa]] void go_on() {
    if (left == 0) __builtin_longjmp(caller, 1);
    do current = current + 1 < count ? current + 1 : 0;
    while (threads[current].has_ended);
    threadIdx = {current, 0, 0};
    Thread& thread = threads[current];
    if (thread.has_started) __builtin_longjmp(thread.at, 1);
    thread.has_started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = stacks.get() + current * STACK;
    start.uc_stack.ss_size = STACK;
    start.uc_link = nullptr;
    makecontext(&start, enter, 0);
    setcontext(&start);
  }
  // One block after another.
  static void enter() {
    for (;;) {
      active->body();
      active->threads[active->current].has_ended = true;
      active->left--;
      active->yield();
    }
  }
};
inline thread_local Fibers* Fibers::active = nullptr;

// The first block decides whether the threads of this launch wait for one another; the others may not differ.
inline void run_grid(const Launch& launch, std::function<void()> body) {
  gridDim = {launch.grid, 1, 1};
  blockDim = {launch.block, 1, 1};
  static thread_local std::map<unsigned, Fibers> kept;  // stacks are dear
  Fibers& fibers = kept.try_emplace(launch.block, launch.block).first->second;
  fibers.body = body;
  fibers.met = false;
  for (unsigned block = 0; block < launch.grid; block++) {
    blockIdx = {block, 0, 0};
    if (block == 0 || fibers.met) {
      fibers.run();
      continue;
    }
    for (unsigned thread = 0; thread < launch.block; thread++) {
      threadIdx = {thread, 0, 0};
      body();
    }
  }
}

}  // namespace

// An address becomes the host's, by itself or among the words of a struct, which may have other numbers in them: an address
// there that is not live stays one that faults.
template <typename T>
bool translate(T& value, const Launch& launch) {
  if constexpr (std::is_pointer_v<T>) {
    if (!value) return true;  // an argument that is left out
    if (!launch.is_live((const void*)value)) return false;
    value = (T)((char*)value + launch.to_host);
  } else if constexpr (std::is_class_v<T> && alignof(T) == alignof(void*)) {
    for (size_t at = 0; at < sizeof(T); at += sizeof(void*)) {
      char* word;
      memcpy(&word, (char*)&value + at, sizeof word);
      if (launch.is_live(word)) word += launch.to_host;
      memcpy((char*)&value + at, &word, sizeof word);
    }
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

inline void __syncthreads() { shim::Fibers::meet(); }

// All threads of the block call.
inline float __shfl_xor(float x, int mask, int) {
  shim::Fibers* fibers = shim::Fibers::active;
  unsigned slot = 0;
  if (fibers) {
    auto& own = fibers->threads[fibers->current];
    slot = own.exchanges++ % 2;
    own.given[slot] = x;
  }
  shim::Fibers& met = shim::Fibers::meet();
  return met.threads[met.current ^ mask].given[slot];
}
