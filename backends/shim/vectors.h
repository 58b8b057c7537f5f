// What the CPU kernels share: vectors of floats, written once for every instruction set, and how work is cut.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define FOR_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define FOR_EACH_ISA
#endif
#define INLINE static inline __attribute__((always_inline))

// A [rows, heads, dim] view: a row is dense, rows lie `stride` floats apart.
struct Heads {
  float* data;
  int64_t stride;
};

// GCC's generic vectors, of the width that all sets of an architecture above its oldest hold in one register:
// GCC takes wider ones apart into lanes. The unaligned types are for memory.
#if defined(__x86_64__)
constexpr int64_t LANES = 8;
#else
constexpr int64_t LANES = 4;
#endif
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef float UnalignedVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));

constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Work below this many floats is not worth waking a thread.
constexpr int64_t GRAIN_FLOATS = 1 << 15;
// Rows that one partial sum covers.
constexpr int64_t CHUNK_ROWS = 256;

INLINE int64_t round_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
INLINE int64_t chunks_of(int64_t rows) { return (rows + CHUNK_ROWS - 1) / CHUNK_ROWS; }
INLINE int64_t grain(int64_t floats_a_row) {
  return std::max<int64_t>(1, GRAIN_FLOATS / std::max<int64_t>(1, floats_a_row));
}

INLINE Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }

// The first `count` lanes of a vector, the others 0; and the reverse. `count` may be more than a vector's.
INLINE Vec load(const float* from, int64_t count) {
  if (count >= LANES) return load(from);
  Vec value = {};
  for (int64_t lane = 0; lane < count; ++lane) value[lane] = from[lane];
  return value;
}
INLINE void store(float* to, Vec value, int64_t count) {
  if (count >= LANES) return store(to, value);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

// Selection works on masks of all ones and all zeros, made without comparing vectors: GCC takes a comparison
// of generic vectors apart into lanes when the instruction set comes from an attribute.
template <typename Floats, typename Ints>
INLINE Floats select(const Ints& mask, const Floats& chosen, const Floats& otherwise) {
  return (Floats)(((Ints)chosen & mask) | ((Ints)otherwise & ~mask));
}
// The lanes where a < b: the sign of the difference.
template <typename Ints = IntVec, typename Floats>
INLINE Ints less(const Floats& a, const Floats& b) {
  return (Ints)(a - b) >> 31;
}
template <typename Ints = IntVec, typename Floats>
INLINE Floats larger(const Floats& a, const Floats& b) {
  return select(less<Ints>(a, b), b, a);
}
// The first `count` lanes.
INLINE IntVec first_lanes(int64_t count) {
  static const int32_t ones_then_zeros[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
  IntVec mask;
  std::memcpy(&mask, ones_then_zeros + 8 - std::max<int64_t>(0, std::min(count, LANES)), sizeof mask);
  return mask;
}

// The first and the last four lanes; the same if there are no more.
INLINE void quads(const Vec& value, Quad* first, Quad* last) {
  std::memcpy(first, &value, sizeof *first);
  std::memcpy(last, reinterpret_cast<const char*>(&value) + sizeof value - sizeof *last, sizeof *last);
}
INLINE float sum_lanes(const Vec& value) {
  Quad first, last;
  quads(value, &first, &last);
  const Quad sum = LANES == 4 ? first : first + last;
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
INLINE float max_lanes(const Vec& value) {
  Quad first, last;
  quads(value, &first, &last);
  const Quad max = larger<IntQuad>(first, last);
  return std::max(std::max(max[0], max[2]), std::max(max[1], max[3]));
}

// e^x to about 2 units in the last place (Cephes' polynomial on [-ln 2 / 2, ln 2 / 2]); 0 below -87.3.
INLINE Vec exp(const Vec& x) {
  const Vec zero = {};
  const Vec upper = zero + 88.3f, lower = zero - 87.3f;
  const IntVec vanishes = less(x, lower);
  const Vec clamped = select(less(upper, x), upper, select(vanishes, lower, x));
  // Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
  const Vec shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const Vec n = shifted - 12582912.0f;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntVec exponent = ((IntVec)shifted - 0x4b400000 + 127) << 23;
  return select(vanishes, zero, Vec(p * (Vec)exponent));
}
