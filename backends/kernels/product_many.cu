// Products of any number of rows with a matrix of weights, behind `elements.cuh`, `warpgroup.cuh` and `product.cuh`: for
// compute capability 9.0a alone.

// Rows of x and of weights of a block, whose two groups of four warps share the weights.
constexpr int MANY_ROWS = 128, MANY_TILE = 128, MANY_THREADS = 256, MANY_STAGES = 6;
// Chunks that are on their way: of the stages one is multiplied, and one may still be.
constexpr int AHEAD = MANY_STAGES - 2;
// Blocks of rows that go through the weights side by side, so that both come from the cache.
constexpr int SIDE_BY_SIDE = 8;

// y = x w^T + bias for any number of rows, whose sums are made in the order in which `parts` blocks of a cluster make
// them in `product.cu`, so that a row has the same bits.
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
  const Narrow *x[COPIES], *weights[COPIES];
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
    Pack<Narrow, 2> out;
    for (int j = 0; j < 2; j++) {
      const float bias = of.bias && column + j < of.n ? widen(of.bias[column + j]) : 0;
      narrow(all[i + j] + bias, out.lane[j]);
    }
    *(Pack<Narrow, 2>*)((Narrow*)shared + row * PITCH + at) = out;
  }
  __syncthreads();
  constexpr int PACKS = MANY_TILE / 8;
  for (int i = threadIdx.x; i < MANY_ROWS * PACKS; i += MANY_THREADS) {
    const int row = i / PACKS, at = i % PACKS * 8;
    if (first_row + row >= of.rows || first_column + at >= of.n) continue;
    *(Pack<Narrow>*)(of.y + (i64)(first_row + row) * of.n + first_column + at) =
        *(const Pack<Narrow>*)((const Narrow*)shared + row * PITCH + at);
  }
}

extern "C" __global__ void __launch_bounds__(MANY_THREADS) NAMED(product_many)(Product of, int parts) {
  multiply_many(of, parts);
}
