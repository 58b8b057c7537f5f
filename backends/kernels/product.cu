// Products of up to 64 rows with a matrix of weights, bf16 with sums in fp32, behind `elements.cuh` and
// `warpgroup.cuh`: for compute capability 9.0a alone, whose blocks see each other's shared memory. What such a product
// takes is the time to read its weights, so a block asks for its first ones before the kernel in front has ended.

// Rows of x that a block multiplies; those that are missing are zeros.
constexpr int ROWS = 64;
constexpr int THREADS = 128;
// Elements of k in a stage: a row of shared memory.
constexpr int CHUNK = ROW_BYTES / 2;
// Rows that the threads of a block copy at once, 16 bytes each.
constexpr int ROWS_AT_ONCE = THREADS / 8;

// c += a b^T for any multiple of 32 rows of b, from an address on.
template <int N>
__device__ inline void multiply_all(float* c, u64 a, u32 b) {
  constexpr int NOW = N >= 64 ? 64 : 32;
  multiply<NOW>(c, a, matrix(b));
  if constexpr (N > NOW) multiply_all<N - NOW>(c + NOW / 2, a, b + NOW * ROW_BYTES);
}

// The blocks of a cluster, which share a product's k.
struct Cluster {
  u32 size, rank;

  __device__ Cluster() {
    asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
    asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(rank));
  }
  // All have come here, and what they wrote is seen.
  __device__ void meet() const {
    if (size == 1) {
      __syncthreads();
    } else {
      asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  }
  __device__ i64 begin(i64 count) const { return count * rank / size; }
  __device__ i64 end(i64 count) const { return count * (rank + 1) / size; }
};

// ---- the product ----

// The norm of a vector is made in two parts: the product that makes the vector multiplies it by the norm's weights and
// leaves sums of squares, a tile each [tiles, ROWS], and the product that takes it multiplies what it makes by the
// reciprocal root of their mean.
struct Squares {
  float* of_tiles;  // null where there is no norm
  int tiles;
  float eps;

  // In the order of the tiles.
  __device__ float scale(int row, int dim) const {
    float sum = 0;
#pragma unroll 8
    for (int tile = 0; tile < tiles; tile++) sum += of_tiles[tile * ROWS + row];
    return 1 / sqrtf(sum / dim + eps);
  }
};

// What is multiplied, and what becomes of it: y [rows, n] = s (x w^T) + bias + y, where s is the scale of x's norm, or,
// gated, of two halves of w [2 n, k], silu(s x w_0^T) s x w_1^T, each rounded as it would be by itself. `bias` [n] may be
// missing. With `norm` [n], `normed` becomes y times it.
struct Product {
  const Bf16 *x, *w, *bias;
  Bf16* y;
  const Bf16* norm;
  Bf16* normed;
  Squares before, after;
  int rows, n, k, is_gated, is_added;

  // Elements of a row of y that so many rows of weights make.
  __device__ int width(int weights) const { return is_gated ? weights / 2 : weights; }
  // The row of weights that is row `r` of tile `tile`, or another one where there is none.
  template <int TILE>
  __device__ i64 weight_row(int tile, int r) const {
    const int half = width(TILE), row = tile * half + r % half;
    return (row < n ? row : n - 1) + (r < half ? 0 : n);
  }
};

template <int COUNT>
struct alignas(16) Floats {
  float value[COUNT];
};
using Quad = Pack<Bf16, 4>;

// Four neighbouring elements of the sum over the blocks of a cluster, in their order.
__device__ inline Floats<4> over_cluster(u32 at, u32 blocks) {
  constexpr int MOST = 8;
  Floats<4> part[MOST], sum = {};
#pragma unroll
  for (u32 i = 0; i < MOST; i++) {
    if (i >= blocks) break;
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(i));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(part[i].value[0]), "=f"(part[i].value[1]), "=f"(part[i].value[2]), "=f"(part[i].value[3])
                 : "r"(there)
                 : "memory");
  }
#pragma unroll
  for (u32 i = 0; i < MOST; i++) {
    if (i >= blocks) break;
    for (int j = 0; j < 4; j++) sum.value[j] += part[i].value[j];
  }
  return sum;
}

// A cluster multiplies with `TILE` rows of weights, each of its blocks a part of k, in `STAGES` that are copied while
// others are multiplied; the sums of its blocks are joined in their order.
template <int TILE, int STAGES>
__device__ inline void multiply_tile(const Product& of) {
  constexpr int STAGE_BYTES = (ROWS + TILE) * ROW_BYTES, PITCH = TILE + 8;
  extern __shared__ __align__(1024) char shared[];
  __shared__ float scales[ROWS];
  const Cluster cluster;
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  const int tile = blockIdx.x / cluster.size, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = of.k / CHUNK, begin = (int)cluster.begin(chunks), count = (int)cluster.end(chunks) - begin;

  // A thread copies 16 bytes of every 16th row.
  const int pack = threadIdx.x % 8, first = threadIdx.x / 8;
  const u32 swizzled = first * ROW_BYTES + ((pack ^ first % 8) << 4);
  const i64 column = (i64)begin * CHUNK + pack * 8;
  const Bf16* weights[TILE / ROWS_AT_ONCE];
#pragma unroll
  for (int i = 0; i < TILE / ROWS_AT_ONCE; i++)
    weights[i] = of.w + of.weight_row<TILE>(tile, first + i * ROWS_AT_ONCE) * of.k + column;
  const auto stage = [&](int c) { return base + c % STAGES * STAGE_BYTES; };
  const auto copy_weights = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i < TILE / ROWS_AT_ONCE; i++)
      copy(stage(c) + (ROWS + i * ROWS_AT_ONCE) * ROW_BYTES + swizzled, weights[i] + c * CHUNK);
  };
  const auto copy_x = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i < ROWS / ROWS_AT_ONCE; i++) {
      const int row = first + i * ROWS_AT_ONCE;
      const bool is_there = row < of.rows;
      const Bf16* from = of.x + (is_there ? (i64)row * of.k : 0) + column + c * CHUNK;
      copy(stage(c) + i * ROWS_AT_ONCE * ROW_BYTES + swizzled, from, is_there ? 16 : 0);
    }
  };

#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) copy_weights(c);
  take_turn();
#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) copy_x(c), end_copies();
  if (of.before.of_tiles && threadIdx.x < of.rows) scales[threadIdx.x] = of.before.scale(threadIdx.x, of.k);
  float sums[TILE / 2] = {};
  for (int c = 0; c < count; c++) {
    await_copies<STAGES - 2>();
    // Copies are seen by the matrix units, which are done with the stage that is copied to next.
    show_copies();
    await_products<0>();
    __syncthreads();
    begin_products();
#pragma unroll
    for (int part = 0; part < ROW_BYTES; part += 32)
      multiply_all<TILE>(sums, matrix(stage(c) + part), stage(c) + ROWS * ROW_BYTES + part);
    end_products();
    copy_weights(c + STAGES - 1), copy_x(c + STAGES - 1), end_copies();
  }
  await_products<0>(sums);
  await_copies<0>();
  __syncthreads();  // the stages' memory is free

  struct alignas(8) Pair {
    float low, high;
  };
#pragma unroll
  for (int i = 0; i < TILE / 2; i += 2) {
    const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, at = i / 4 * 8 + lane % 4 * 2;
    *(Pair*)((float*)shared + row * PITCH + at) = {sums[i], sums[i + 1]};
  }
  cluster.meet();
  // Every block joins some rows, four elements a thread.
  const int width = of.width(TILE), quads = width / 4, first_row = (int)cluster.begin(of.rows);
  const int all = ((int)cluster.end(of.rows) - first_row) * quads;
  for (int i = threadIdx.x; i < all; i += THREADS) {
    const int row = first_row + i / quads, at = i % quads * 4, element = tile * width + at;
    const u32 from = base + (row * PITCH + at) * sizeof(float);
    const float scale = of.before.of_tiles ? scales[row] : 1;
    const i64 place = (i64)row * of.n + element;
    float squares = 0;
    if (element < of.n) {
      const Floats<4> sum = over_cluster(from, cluster.size);
      Quad out;
      if (of.is_gated) {
        const Floats<4> other = over_cluster(from + width * sizeof(float), cluster.size);
        for (int j = 0; j < 4; j++) {
          Bf16 gate, up;
          narrow(sum.value[j] * scale, gate), narrow(other.value[j] * scale, up);
          narrow(gated(widen(gate), widen(up)), out.lane[j]);
        }
      } else {
        const Quad before = of.is_added ? *(const Quad*)(of.y + place) : Quad{};
        for (int j = 0; j < 4; j++) {
          const float bias = of.bias ? widen(of.bias[element + j]) : 0;
          narrow(sum.value[j] * scale + bias + widen(before.lane[j]), out.lane[j]);
        }
      }
      *(Quad*)(of.y + place) = out;
      if (of.norm) {
        for (int j = 0; j < 4; j++) {
          const float value = widen(out.lane[j]);
          squares += value * value;
          narrow(value * widen(of.norm[element + j]), out.lane[j]);
        }
        *(Quad*)(of.normed + place) = out;
      }
    }
    if (TILE == 64 && of.norm) {
      // Of the 16 threads that have this row.
      const u32 those = 0xffff << (lane & 16);
      for (int mask = 8; mask > 0; mask /= 2) squares += __shfl_xor_sync(those, squares, mask);
      if (at == 0) of.after.of_tiles[tile * ROWS + row] = squares;
    }
  }
  cluster.meet();  // nobody reads a block's memory that has ended
}

// ---- more rows ----

// Rows of x and of weights of a block, whose two groups of four warps share the weights.
constexpr int MANY_ROWS = 128, MANY_TILE = 128, MANY_THREADS = 256, MANY_STAGES = 6;
// Chunks that are on their way: of the stages one is multiplied, and one may still be.
constexpr int AHEAD = MANY_STAGES - 2;
// Blocks of rows that go through the weights side by side, so that both come from the cache.
constexpr int SIDE_BY_SIDE = 8;

// y = x w^T + bias for any number of rows, whose sums are made in the order in which `parts` blocks of a cluster make
// them above, so that a row has the same bits.
__device__ inline void multiply_many(const Product& of, int parts) {
  constexpr int STAGE_BYTES = (MANY_ROWS + MANY_TILE) * ROW_BYTES, PITCH = MANY_TILE + 8;
  constexpr int AT_ONCE = MANY_THREADS / 8, COPIES = MANY_ROWS / AT_ONCE, SUMS = MANY_TILE / 2;
  static_assert(MANY_ROWS == MANY_TILE, "they are copied alike");
  extern __shared__ __align__(1024) char shared[];
  const u32 base = (u32)__cvta_generic_to_shared(shared);
  const int tiles = (of.n + MANY_TILE - 1) / MANY_TILE, row_blocks = (of.rows + MANY_ROWS - 1) / MANY_ROWS;
  const int band = blockIdx.x / (SIDE_BY_SIDE * tiles), in_band = blockIdx.x % (SIDE_BY_SIDE * tiles);
  const int left = row_blocks - band * SIDE_BY_SIDE, blocks = left < SIDE_BY_SIDE ? left : SIDE_BY_SIDE;
  const int first_row = (band * SIDE_BY_SIDE + in_band % blocks) * MANY_ROWS;
  const int first_column = in_band / blocks * MANY_TILE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunks = of.k / CHUNK;

  const int pack = threadIdx.x % 8, first = threadIdx.x / 8;
  const u32 swizzled = first * ROW_BYTES + ((pack ^ first % 8) << 4);
  const Bf16 *x[COPIES], *weights[COPIES];
  int x_bytes[COPIES];
#pragma unroll
  for (int i = 0; i < COPIES; i++) {
    const int row = first_row + first + i * AT_ONCE, column = first_column + first + i * AT_ONCE;
    x_bytes[i] = row < of.rows ? 16 : 0;
    x[i] = of.x + (row < of.rows ? (i64)row * of.k : 0) + pack * 8;
    weights[i] = of.w + (i64)(column < of.n ? column : of.n - 1) * of.k + pack * 8;
  }
  const auto stage = [&](int c) { return base + c % MANY_STAGES * STAGE_BYTES; };
  const auto copy_chunk = [&](int c) {
    if (c < chunks) {
#pragma unroll
      for (int i = 0; i < COPIES; i++) {
        const u32 to = stage(c) + i * AT_ONCE * ROW_BYTES + swizzled;
        copy(to, x[i] + c * CHUNK, x_bytes[i]);
        copy(to + MANY_ROWS * ROW_BYTES, weights[i] + c * CHUNK);
      }
    }
    end_copies();
  };

  take_turn();
  for (int c = 0; c < AHEAD; c++) copy_chunk(c);
  float sums[SUMS] = {}, all[SUMS] = {};
  const u32 rows = warp / 4 * 64 * ROW_BYTES;
  for (int part = 0, c = 0; part < parts; part++) {
    for (const int end = (int)((i64)chunks * (part + 1) / parts); c < end; c++) {
      await_copies<AHEAD - 1>();
      show_copies();
      // All have multiplied the chunk before the last one, whose stage is copied to next.
      await_products<1>();
      __syncthreads();
      begin_products();
#pragma unroll
      for (int k = 0; k < ROW_BYTES; k += 32)
        multiply<MANY_TILE>(sums, matrix(stage(c) + rows + k), matrix(stage(c) + MANY_ROWS * ROW_BYTES + k));
      end_products();
      copy_chunk(c + AHEAD);
    }
    await_products<0>(sums);
#pragma unroll
    for (int i = 0; i < SUMS; i++) all[i] += sums[i], sums[i] = 0;
  }
  await_copies<0>();
  __syncthreads();  // the stages' memory is free

#pragma unroll
  for (int i = 0; i < SUMS; i += 2) {
    const int row = warp * 16 + i / 2 % 2 * 8 + lane / 4, at = i / 4 * 8 + lane % 4 * 2, column = first_column + at;
    Pack<Bf16, 2> out;
    for (int j = 0; j < 2; j++) {
      const float bias = of.bias && column + j < of.n ? widen(of.bias[column + j]) : 0;
      narrow(all[i + j] + bias, out.lane[j]);
    }
    *(Pack<Bf16, 2>*)((Bf16*)shared + row * PITCH + at) = out;
  }
  __syncthreads();
  constexpr int PACKS = MANY_TILE / 8;
  for (int i = threadIdx.x; i < MANY_ROWS * PACKS; i += MANY_THREADS) {
    const int row = i / PACKS, at = i % PACKS * 8;
    if (first_row + row >= of.rows || first_column + at >= of.n) continue;
    *(Pack<Bf16>*)(of.y + (i64)(first_row + row) * of.n + first_column + at) =
        *(const Pack<Bf16>*)((const Bf16*)shared + row * PITCH + at);
  }
}

// ---- entries ----

#define PRODUCT(TILE, STAGES)                                                                                        \
  extern "C" __global__ void __launch_bounds__(THREADS) product_##TILE##_##STAGES(Product of) {                      \
    multiply_tile<TILE, STAGES>(of);                                                                                 \
  }
PRODUCT(64, 6)
PRODUCT(64, 4)
PRODUCT(96, 3)

extern "C" __global__ void __launch_bounds__(MANY_THREADS) product_many(Product of, int parts) {
  multiply_many(of, parts);
}
