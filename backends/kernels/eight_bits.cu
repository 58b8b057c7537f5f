// Rows in 8 bits, and what follows a product of them, behind `elements.cuh`, `block.cuh` and `rows.cuh`: `ops::eight_bits` has
// the format, `ops::eight_bit_rows` the operations. Scales are powers of two, so that a product in bf16 times its scales is
// the scaled product in bf16.

// ---- rounding ----

// Values of a thread: 16 of 64 neighbouring columns, which lie together in 8 bits.
#define OF_THREAD 16

// The smallest power of two with which nothing exceeds 448, the largest value of e4m3.
__device__ inline float scale_of(float largest) {
  const float least = larger(largest / 448, __uint_as_float(27u << 23));  // 2^-100, for a row of zeros
  return __uint_as_float((__float_as_uint(least) + 0x7fffff) & 0x7f800000);
}

// Two values in e4m3, to the nearest, the first in the lower byte; what is no number stays none.
__device__ inline u16 to_eight_bits(float first, float second) {
  u16 both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(second), "f"(first));
  return both;
}

// Two neighbours.
struct Pair {
  float first, second;
  __device__ Pair(u32 bits) : first(__uint_as_float(bits << 16)), second(__uint_as_float(bits & 0xffff0000)) {}
};

// The block's row, of a multiple of 64 columns.
__device__ inline void round_row(const Bf16* x, u16* to, float* scales, u64 columns) {
  const u32* row = (const u32*)(x + blockIdx.x * columns);
  // A thread's pairs are every fourth one of 32.
  const auto pairs = [&](u64 i) { return row + i / 4 * 32 + i % 4; };
  const u64 count = columns / OF_THREAD;
  float largest = 0;
  for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
    for (int k = 0; k < OF_THREAD / 2; k++) {
      const Pair pair(pairs(i)[4 * k]);
      largest = larger(larger(fabsf(pair.first), fabsf(pair.second)), largest);
    }
  }
  const float scale = scale_of(over_block<larger>(largest)), inverse = 1 / scale;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  for (u64 i = threadIdx.x; i < count; i += blockDim.x) {
    Pack<u16> values;
    for (int k = 0; k < OF_THREAD / 2; k++) {
      const Pair pair(pairs(i)[4 * k]);
      values.lane[k] = to_eight_bits(pair.first * inverse, pair.second * inverse);
    }
    ((Pack<u16>*)(to + blockIdx.x * columns / 2))[i] = values;
  }
}

extern "C" __global__ void __launch_bounds__(1024) round_rows(const Bf16* x, u16* to, float* scales, u64 columns) {
  take_turn();
  round_row(x, to, scales, columns);
}

// ---- products ----

// A product in 8 bits, without its scales.
struct Scaled {
  const Bf16* product;
  const float *of_rows, *of_columns;

  // The pack at `column` of a row.
  __device__ Pack<Bf16> at(u64 row, u64 column, u64 columns) const {
    Pack<Bf16> pack = read(product + row * columns, column, columns);
    for (int k = 0; k < Pack<Bf16>::LANES; k++)
      narrow(widen(pack.lane[k]) * of_rows[row] * of_columns[column + k], pack.lane[k]);
    return pack;
  }
};

// y, which may be the product itself, with a bias unless that is null. Columns are a multiple of a pack, here and below.
extern "C" __global__ void __launch_bounds__(256)
    scale_product(Scaled scaled, const Bf16* bias, Bf16* y, u64 rows, u64 columns) {
  take_turn();
  constexpr int LANES = Pack<Bf16>::LANES;
  for (u64 i = thread_index(); i < rows * columns / LANES; i += thread_count()) {
    const Place place(i * LANES, columns);
    Pack<Bf16> pack = scaled.at(place.row, place.rest, columns);
    if (bias) {
      const Pack<Bf16> added = read(bias, place.rest, columns);
      for (int k = 0; k < LANES; k++) narrow(widen(pack.lane[k]) + widen(added.lane[k]), pack.lane[k]);
    }
    write(y + place.row * columns, place.rest, columns, pack);
  }
}

// y [rows, size] of a product [rows, 2 size].
extern "C" __global__ void __launch_bounds__(256) swiglu_product(Scaled scaled, Bf16* y, u64 rows, u64 size) {
  take_turn();
  constexpr int LANES = Pack<Bf16>::LANES;
  for (u64 i = thread_index(); i < rows * size / LANES; i += thread_count()) {
    const Place place(i * LANES, size);
    Pack<Bf16> gate = scaled.at(place.row, place.rest, 2 * size);
    const Pack<Bf16> up = scaled.at(place.row, size + place.rest, 2 * size);
    for (int k = 0; k < LANES; k++) narrow(gated(widen(gate.lane[k]), widen(up.lane[k])), gate.lane[k]);
    write(y + place.row * size, place.rest, size, gate);
  }
}

// Adds the product to y, and makes y's norm, which may lie in the memory of the product, and unless `to` is null the norm in 8
// bits, whose scales may replace those of the product's rows. A block has a row.
extern "C" __global__ void __launch_bounds__(1024)
    add_product_and_norm(Scaled scaled, Bf16* y, const Bf16* weight, float eps, Bf16* normed, u16* to, float* scales,
                         u64 dim) {
  take_turn();
  constexpr int LANES = Pack<Bf16>::LANES;
  const u64 row = blockIdx.x;
  float squares = 0;
  for (u64 i = threadIdx.x * LANES; i < dim; i += blockDim.x * LANES) {
    Pack<Bf16> pack = read(y + row * dim, i, dim);
    const Pack<Bf16> added = scaled.at(row, i, dim);
    for (int k = 0; k < LANES; k++) {
      narrow(widen(pack.lane[k]) + widen(added.lane[k]), pack.lane[k]);
      squares += widen(pack.lane[k]) * widen(pack.lane[k]);
    }
    write(y + row * dim, i, dim, pack);
  }
  const float scale = 1 / sqrtf(over_block<add>(squares) / dim + eps);
  for (u64 i = threadIdx.x * LANES; i < dim; i += blockDim.x * LANES) {
    Pack<Bf16> pack = read(y + row * dim, i, dim);
    const Pack<Bf16> w = read(weight, i, dim);
    for (int k = 0; k < LANES; k++) narrow(widen(pack.lane[k]) * scale * widen(w.lane[k]), pack.lane[k]);
    write(normed + row * dim, i, dim, pack);
  }
  if (!to) return;
  __syncthreads();  // a thread rounds what others have normed
  round_row(normed, to, scales, dim);
}
