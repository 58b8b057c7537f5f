// The products of `product.cu` with weights of 8 bits, behind it: e4m3 (4 bits of exponent, 3 of mantissa) with a scale for
// each row of weights, a power of two. What is read from memory is half as much. So that shared memory is no limit, weights
// are what matrix units take from registers: a thread copies those of its own, and widens them to 16 bits, which hold each of
// them exactly. What a product makes is turned once, at its end.

// ---- weights ----

// 4 of e4m3 as 2 words of 16-bit floats, exactly: exponents and mantissas move to their places, and a power of two makes up
// for the difference of the exponents' biases. A NaN of e4m3 is none here: the scale of its row is.
__device__ inline void widen_four(u32 four, u32& first, u32& second) {
  constexpr u32 SHIFT = HAS_RANGE_OF_FP32 ? 4 : 1;
  constexpr u32 BIASES = HAS_RANGE_OF_FP32 ? 0x7b807b80 : 0x5c005c00;  // 2 ^ (127 - 7), 2 ^ (15 - 7)
  const auto widen_two = [&](u32 high, u32& two) {
    const u32 placed = (high & 0x7f007f00) >> SHIFT | (high & 0x80008000);
    asm("mul.rn." NARROW "x2 %0, %1, %2;" : "=r"(two) : "r"(placed), "r"(BIASES));
  };
  widen_two(__byte_perm(four, 0, 0x1404), first);
  widen_two(__byte_perm(four, 0, 0x3424), second);
}

// 16 bytes into shared memory, of which the next 112 are read soon.
__device__ inline void copy_weights_of(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ inline Pack<u32> in_shared(u32 at) {
  Pack<u32> out;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out.lane[0]), "=r"(out.lane[1]), "=r"(out.lane[2]), "=r"(out.lane[3])
               : "r"(at)
               : "memory");
  return out;
}

// ---- products ----

// c += a b^T for 64 x 16 and 64 x 16 values: a thread's of a, two to a register, are of row lane / 4 of its warp's 16 and the
// row 8 below, columns 2 (lane % 4) and the next, then the same 8 columns on.
__device__ inline void multiply_own(float* c, const u32 (&a)[4], u64 b) {
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." NARROW "." NARROW " {" NAMES_32
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
               : SUMS_32(0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// The product of the rows of x from one on.
__device__ inline Product rows_from(Product of, int row) {
  of.x += (i64)row * of.k, of.y += (i64)row * of.n, of.rows -= row;
  if (of.normed) of.normed += (i64)row * of.n;
  if (of.before.of_tiles) of.before.of_tiles += row;
  if (of.after.of_tiles) of.after.of_tiles += row;
  return of;
}

// `multiply_tile` for 64 rows of x and 64 rows of weights for each four warps. Of each 64 columns of weights a thread has 16
// bytes in a row, those that it multiplies (`ops::in_eight_bits` puts them so).
template <int GROUPS, int STAGES>
__device__ inline void multiply_eight(const Product& of, const float* of_rows, const Cluster& cluster, int tile) {
  constexpr int TILE = GROUPS * GROUP_ROWS, THREADS = GROUPS * GROUP_THREADS;
  constexpr int X_BYTES = GROUP_ROWS * ROW_BYTES, WEIGHT_BYTES = TILE * CHUNK;
  // Rows of x that the threads of a block copy at once, 16 bytes each.
  constexpr int AT_ONCE = THREADS / 8;
  // A row of sums, with space so that threads meet at no bank.
  constexpr int PITCH = TILE + 4;
  extern __shared__ __align__(1024) char stages[];
  __shared__ float scales[GROUP_ROWS];
  __shared__ Arrivals arrivals;
  const u32 base = (u32)__cvta_generic_to_shared(stages), of_weights = base + STAGES * X_BYTES;
  const int chunks = of.k / CHUNK;
  const int begin = cluster.begin(chunks), count = cluster.end(chunks) - begin;
  const bool is_shared = TILE == SHARED_TILE && cluster.size > 1;
  Shared<1> shared(cluster, tile, stages + STAGES * (X_BYTES + WEIGHT_BYTES), stages);
  if (is_shared) {
    if (threadIdx.x == 0) arrivals.expect(shared.bytes());
    Cluster::arrive();
  }

  // The thread's two rows of weights.
  const int group = threadIdx.x / GROUP_THREADS, lane = threadIdx.x % 32;
  const int own_row = threadIdx.x / 32 * 16 + lane / 4;
  const unsigned char* weights[2];
  float of_own[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const i64 row = of.weight_row<TILE>(tile, own_row + i * 8);
    weights[i] = (const unsigned char*)of.w + row * of.k + (i64)begin * CHUNK + lane % 4 * 16;
    of_own[i] = of_rows[row];
  }
  const auto place = [&](int c, int i) { return of_weights + c % STAGES * WEIGHT_BYTES + (i * THREADS + threadIdx.x) * 16; };
  const auto copy_weights = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i < 2; i++) copy_weights_of(place(c, i), weights[i] + c * CHUNK);
  };

  const int pack = threadIdx.x % 8, first = threadIdx.x / 8;
  const auto stage = [&](int c) { return base + c % STAGES * X_BYTES; };
  const auto copy_x = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i * AT_ONCE < GROUP_ROWS; i++) {
      const int row = first + i * AT_ONCE;
      if (GROUP_ROWS % AT_ONCE != 0 && row >= GROUP_ROWS) continue;
      const Narrow* x = of.x + (i64)(row < of.rows ? row : 0) * of.k + (i64)(begin + c) * CHUNK + pack * 8;
      copy(stage(c) + row * ROW_BYTES + ((pack ^ row % 8) << 4), x, row < of.rows ? 16 : 0);
    }
  };

#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) copy_weights(c);
  const Weights of_norm(of);
  take_turn();
#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) copy_x(c), end_copies();
  const float unit = TILE == SHARED_TILE ? of_norm.unit() : 1;
  const int half_row = threadIdx.x / 2, half = threadIdx.x % 2;
  // With many rows of weights there are no registers to ask for them early.
  Squares::Half squares;
  if (TILE == SHARED_TILE) squares = of.before.half(half_row, half);
  if (is_shared) shared.ask(of);

  float sums[GROUP_ROWS / 2] = {};
#pragma unroll 2
  for (int c = 0; c < count; c++) {
    await_copies<STAGES - 2>();
    u32 wide[4][4];
    const Pack<u32> above = in_shared(place(c, 0)), below = in_shared(place(c, 1));
#pragma unroll
    for (int part = 0; part < 4; part++) {
      widen_four(above.lane[part], wide[part][0], wide[part][2]);
      widen_four(below.lane[part], wide[part][1], wide[part][3]);
    }
    // Copies are seen by the matrix units, which are done with the stage that is copied to next.
    show_copies();
    await_products<0>();
    __syncthreads();
    begin_products();
#pragma unroll
    for (int part = 0; part < 4; part++) multiply_own(sums, wide[part], matrix(stage(c) + part * 32));
    end_products();
    copy_weights(c + STAGES - 1), copy_x(c + STAGES - 1), end_copies();
  }
  if (half_row < GROUP_ROWS) {
    if (TILE != SHARED_TILE) squares = of.before.half(half_row, half);
    const float scale = of.before.of_tiles ? of.before.scale(squares, half_row, half, of.k) : 1;
    if (half == 0) scales[half_row] = scale;
  }
  await_products<0>(sums);
  await_copies<0>();
  __syncthreads();  // the stages' memory is free

  // Sums by rows of x, behind what blocks that share them send.
  float* turned = (float*)(stages + (TILE == SHARED_TILE ? GROUP_ROWS / 2 * PAIR_BYTES : 0));
#pragma unroll
  for (int i = 0; i < GROUP_ROWS / 2; i++) {
    const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, below = i / 2 % 2;
    turned[row * PITCH + own_row + below * 8] = sums[i] * of_own[below];
  }
  __syncthreads();
  const int pair = threadIdx.x % GROUP_THREADS / 4, within = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < SHARED_TILE / 2; i += 4) {
    // Of a gated product a group has as many gates as gated values.
    const int column = of.is_gated ? i / 16 * (TILE / 2) + group * 32 + i % 16 * 2 : group * SHARED_TILE + i * 2;
    const float* from = turned + row_of(pair) * PITCH + column + within;
    sums[i] = from[0], sums[i + 1] = from[1], sums[i + 2] = from[8 * PITCH], sums[i + 3] = from[8 * PITCH + 1];
  }

  if (is_shared) {
    Cluster::await();  // all expect what is sent
    shared.send(sums, arrivals);
    arrivals.await();
    Cluster::arrive();
    shared.put(of, tile, scales, unit);
    Cluster::await();  // nobody reads a block's memory that has ended
    return;
  }
  put_own<SHARED_TILE>(of, tile * GROUPS + group, sums, scales, unit, pair);
}

// ---- entries ----

// Blocks with the same weights lie side by side, so that these come from memory once.
#define EIGHT(NAME, GROUPS, STAGES, BLOCKS)                                                             \
  extern "C" __global__ void __launch_bounds__(GROUPS * GROUP_THREADS, BLOCKS)                          \
      NAMED(NAME)(Product all, const float* of_rows, int lots) {                                        \
    const Cluster cluster;                                                                              \
    const int index = blockIdx.x / cluster.size;                                                        \
    const Product of = rows_from(all, index % lots * GROUP_ROWS);                                       \
    multiply_eight<GROUPS, STAGES>(of, of_rows, cluster, index / lots);                                 \
  }
