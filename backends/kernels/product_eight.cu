// The products of `product.cu` with weights of 8 bits, behind it: e4m3 (4 bits of exponent, 3 of mantissa) with a scale for
// each row of weights, a power of two. What is read from memory is half as much. A thread reads weights into its registers,
// some chunks ahead, and leaves them in shared memory as 16-bit values, which hold each of them exactly.

// ---- weights ----

// 4 of e4m3 as 2 words of 16-bit floats, exactly: exponents and mantissas move to their places, and a power of two makes up
// for the difference of the exponents' biases. A NaN of e4m3 is none here: the scale of its row is.
__device__ inline void widen_four(u32 four, u32* two) {
  constexpr u32 SHIFT = HAS_RANGE_OF_FP32 ? 4 : 1;
  constexpr u32 BIASES = HAS_RANGE_OF_FP32 ? 0x7b807b80 : 0x5c005c00;  // 2 ^ (127 - 7), 2 ^ (15 - 7)
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 high = __byte_perm(four, 0, i == 0 ? 0x1404 : 0x3424);
    const u32 placed = (high & 0x7f007f00) >> SHIFT | (high & 0x80008000);
    asm("mul.rn." NARROW "x2 %0, %1, %2;" : "=r"(two[i]) : "r"(placed), "r"(BIASES));
  }
}

// 16 bytes that nobody reads twice.
__device__ inline Pack<u32> read_once(const unsigned char* from) {
  Pack<u32> out;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.lane[0]), "=r"(out.lane[1]), "=r"(out.lane[2]), "=r"(out.lane[3])
               : "l"(from));
  return out;
}

// ---- products ----

#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_40 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define NAMES_48 NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_56 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"

// c += a b^T in one instruction, which reads a once.
template <int N>
__device__ inline void multiply_once(float* c, u64 a, u64 b) {
  if constexpr (N == 48) {
    asm volatile(MULTIPLY(48, NAMES_24, "%24", "%25", "%26") : SUMS_16(0), SUMS_8(16) : "l"(a), "l"(b), "r"(1));
  } else if constexpr (N == 80) {
    asm volatile(MULTIPLY(80, NAMES_40, "%40", "%41", "%42") : SUMS_32(0), SUMS_8(32) : "l"(a), "l"(b), "r"(1));
  } else if constexpr (N == 96) {
    asm volatile(MULTIPLY(96, NAMES_48, "%48", "%49", "%50") : SUMS_32(0), SUMS_16(32) : "l"(a), "l"(b), "r"(1));
  } else if constexpr (N == 112) {
    asm volatile(MULTIPLY(112, NAMES_56, "%56", "%57", "%58")
                 : SUMS_32(0), SUMS_16(32), SUMS_8(48)
                 : "l"(a), "l"(b), "r"(1));
  } else if constexpr (N == 144) {
    asm volatile(MULTIPLY(144, NAMES_72, "%72", "%73", "%74")
                 : SUMS_32(0), SUMS_32(32), SUMS_8(64)
                 : "l"(a), "l"(b), "r"(1));
  } else {
    multiply<N>(c, a, b);
  }
}

// `multiply_tile` for such weights, of which each thread reads some `AHEAD` chunks early.
template <int GROUPS, int TILE, int STAGES, int AHEAD>
__device__ inline void multiply_eight(const Product& of, const float* of_rows, const Cluster& cluster, int tile) {
  constexpr int ROWS = GROUPS * GROUP_ROWS, X_BYTES = ROWS * ROW_BYTES, TILE_BYTES = TILE * ROW_BYTES;
  // Rows of x that the threads of a block copy at once, and rows of weights that they read at once, 16 bytes each.
  constexpr int AT_ONCE = GROUPS * GROUP_THREADS / 8, READ_AT_ONCE = GROUPS * GROUP_THREADS / 4;
  constexpr int READS = (TILE + READ_AT_ONCE - 1) / READ_AT_ONCE;
  extern __shared__ __align__(1024) char stages[];
  __shared__ float scales[ROWS], scales_of_weights[TILE];
  __shared__ Arrivals arrivals;
  const u32 base = (u32)__cvta_generic_to_shared(stages), tiles = base + STAGES * X_BYTES;
  const int chunks = of.k / CHUNK;
  const int begin = cluster.begin(chunks), count = cluster.end(chunks) - begin;
  const bool is_shared = TILE == SHARED_TILE && cluster.size > 1;
  Shared<GROUPS> shared(cluster, tile, stages + STAGES * X_BYTES + 2 * TILE_BYTES, stages);
  if (is_shared) {
    if (threadIdx.x == 0) arrivals.expect(shared.bytes());
    Cluster::arrive();
  }

  const int quarter = threadIdx.x % 4, row_of_reads = threadIdx.x / 4;
  const unsigned char* weights[READS];
#pragma unroll
  for (int i = 0; i < READS; i++)
    weights[i] = (const unsigned char*)of.w +
                 of.weight_row<TILE>(tile, (row_of_reads + i * READ_AT_ONCE) % TILE) * of.k + (i64)begin * CHUNK +
                 quarter * 16;
  const auto has = [&](int i) { return TILE % READ_AT_ONCE == 0 || row_of_reads + i * READ_AT_ONCE < TILE; };
  const auto read_weights = [&](int c, Pack<u32>(&to)[READS]) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i < READS; i++)
      if (has(i)) to[i] = read_once(weights[i] + c * CHUNK);
  };
  // Leaves them where the matrix units read them: 16 values are two packs of a swizzled row.
  const auto widen_weights = [&](u32 to, const Pack<u32>(&from)[READS]) {
    const int swizzle = row_of_reads % 8;
#pragma unroll
    for (int i = 0; i < READS; i++) {
      if (!has(i)) continue;
      const u32 row = to + (row_of_reads + i * READ_AT_ONCE) * ROW_BYTES;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 wide[4];
        widen_four(from[i].lane[half * 2], wide), widen_four(from[i].lane[half * 2 + 1], wide + 2);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(row + ((quarter * 2 + half ^ swizzle) << 4)),
                     "r"(wide[0]), "r"(wide[1]), "r"(wide[2]), "r"(wide[3])
                     : "memory");
      }
    }
  };

  const int pack = threadIdx.x % 8, first = threadIdx.x / 8;
  const u32 swizzled = first * ROW_BYTES + ((pack ^ first % 8) << 4);
  const Narrow* x[ROWS / AT_ONCE];
#pragma unroll
  for (int i = 0; i * AT_ONCE < ROWS; i++) {
    const int row = first + i * AT_ONCE;
    x[i] = of.x + (i64)(row < of.rows ? row : 0) * of.k + (i64)begin * CHUNK + pack * 8;
  }
  const auto stage = [&](int c) { return base + c % STAGES * X_BYTES; };
  const auto copy_x = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i * AT_ONCE < ROWS; i++)
      copy(stage(c) + i * AT_ONCE * ROW_BYTES + swizzled, x[i] + c * CHUNK, first + i * AT_ONCE < of.rows ? 16 : 0);
  };

  Pack<u32> read[AHEAD][READS];
#pragma unroll
  for (int c = 0; c < AHEAD; c++) read_weights(c, read[c]);
  if (threadIdx.x < TILE) scales_of_weights[threadIdx.x] = of_rows[of.weight_row<TILE>(tile, threadIdx.x)];
  const Weights of_norm(of);
  take_turn();
#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) copy_x(c), end_copies();
  const float unit = TILE == SHARED_TILE ? of_norm.unit() : 1;
  const int half_row = threadIdx.x / 2, half = threadIdx.x % 2;
  const Squares::Half squares = of.before.half(half_row, half);
  if (is_shared) shared.ask(of);

  float sums[TILE / 2] = {};
  const int group_rows = threadIdx.x / GROUP_THREADS * GROUP_ROWS * ROW_BYTES;
  for (int from = 0; from < count; from += AHEAD) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int c = from + i;
      if (c >= count) break;
      // The matrix units are done with the tile before the last one since the barrier of the last chunk.
      const u32 wide = tiles + c % 2 * TILE_BYTES;
      widen_weights(wide, read[i]);
      read_weights(c + AHEAD, read[i]);
      await_copies<STAGES - 2>();
      show_copies();
      await_products<0>();
      __syncthreads();
      begin_products();
#pragma unroll
      for (int part = 0; part < ROW_BYTES; part += 32)
        multiply_once<TILE>(sums, matrix(stage(c) + group_rows + part), matrix(wide + part));
      end_products();
      copy_x(c + STAGES - 1), end_copies();
    }
  }
  const float scale = of.before.of_tiles ? of.before.scale(squares, half_row, half, of.k) : 1;
  if (half == 0) scales[half_row] = scale;
  await_products<0>(sums);
  await_copies<0>();
#pragma unroll
  for (int i = 0; i < TILE / 2; i++) sums[i] *= scales_of_weights[i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2];
  __syncthreads();  // the stages' memory is free

  if constexpr (TILE == SHARED_TILE) {
    if (is_shared) {
      Cluster::await();  // all expect what is sent
      shared.send(sums, arrivals);
      arrivals.await();
      Cluster::arrive();
      shared.put(of, tile, scales, unit);
      Cluster::await();  // nobody reads a block's memory that has ended
      return;
    }
  }
  put_own<TILE>(of, tile, sums, scales, unit);
}

// ---- entries ----

#define EIGHT(NAME, GROUPS, TILE, STAGES, AHEAD, BLOCKS)                                                     \
  extern "C" __global__ void __launch_bounds__(GROUPS * GROUP_THREADS, BLOCKS)                               \
      NAMED(NAME)(Product of, const float* of_rows) {                                                        \
    const Cluster cluster;                                                                                   \
    multiply_eight<GROUPS, TILE, STAGES, AHEAD>(of, of_rows, cluster, blockIdx.x / cluster.size);            \
  }
