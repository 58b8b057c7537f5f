// Products of up to 64 or 128 rows with a matrix of weights, behind `rows.cuh`, `warpgroup.cuh`, `cluster.cuh` and
// `product.cuh`: for compute capability 9.0a alone. What such a product takes is the time to read its weights, so a block
// asks for its first ones before the kernel in front has ended; and next to that what lies between its last weights and
// the next kernel's turn, where all that is waited for was asked for long before.

// Four warps multiply so many rows of x; those that are missing are zeros. A block has one or two such groups.
constexpr int GROUP_ROWS = 64, GROUP_THREADS = 128;
// Rows of weights of a tile whose sums several blocks share.
constexpr int SHARED_TILE = 64;

// c += a b^T for any multiple of 16 rows of b, from an address on.
template <int N>
__device__ inline void multiply_all(float* c, u64 a, u32 b) {
  constexpr int NOW = N >= 128 ? 128 : N >= 64 ? 64 : N >= 32 ? 32 : 16;
  multiply<NOW>(c, a, matrix(b));
  if constexpr (N > NOW) multiply_all<N - NOW>(c + NOW / 2, a, b + NOW * ROW_BYTES);
}

// Of each 8 columns a thread has two sums of a row and two of the row 8 below, one pair of rows among four threads.
__device__ inline int row_of(int pair) { return pair / 8 * 16 + pair % 8; }
__device__ inline int own_pair() { return threadIdx.x / 4; }

// The weights of a norm that a thread looks at for their unit, of which the first ones are asked for early. There are none
// in a vector of the range of fp32, nor without a norm.
struct Weights {
  static constexpr int EARLY = HAS_RANGE_OF_FP32 ? 0 : 4, LANES = Pack<Narrow>::LANES;
  const Narrow* of_norm;
  int count;
  Pack<Narrow> first[EARLY > 0 ? EARLY : 1];

  __device__ Weights(const Product& of) : of_norm(of.norm), count(of.norm ? of.n : 0) {
#pragma unroll
    for (int i = 0; i < EARLY; i++) first[i] = read(of_norm, at(i), count);
  }
  __device__ int at(int i) const { return (i * blockDim.x + threadIdx.x) * LANES; }

  // A power of two above all of them. All threads of a block call and get it.
  __device__ float unit() const {
    if (HAS_RANGE_OF_FP32 || count == 0) return 1;
    float largest = 0;
    const auto see = [&](const Pack<Narrow>& pack) {
      for (int k = 0; k < LANES; k++) largest = larger(largest, fabsf(widen(pack.lane[k])));
    };
#pragma unroll
    for (int i = 0; i < EARLY; i++) see(first[i]);
    for (int i = EARLY; at(i) < count; i++) see(read(of_norm, at(i), count));
    // Of an infinite weight the product is infinite in any unit.
    const u32 exponent = __float_as_uint(over_block<larger>(largest)) & 0x7f800000;
    return __uint_as_float(exponent < 0x7f000000 ? exponent + 0x00800000 : 0x7f000000);
  }
};

// Leaves the squares of a pair of rows, of which so many neighbouring threads have parts, and the norm's unit.
template <int COUNT>
__device__ inline void put_squares(const Product& of, int tile, int row, float squares, float below, float unit) {
#pragma unroll
  for (int mask = 1; mask < COUNT; mask *= 2) {
    squares += __shfl_xor_sync(0xffffffff, squares, mask);
    below += __shfl_xor_sync(0xffffffff, below, mask);
  }
  if (threadIdx.x % COUNT == 0) of.after.put(tile, row, squares, unit), of.after.put(tile, row + 8, below, unit);
}

// ---- sums that are whole ----

// Makes y of a tile's sums where the thread has them, of a pair of rows.
template <int TILE>
__device__ inline void put_own(const Product& of, int tile, const float (&sums)[TILE / 2], const float* scales,
                               float unit, int pair) {
  const int row = row_of(pair), within = threadIdx.x % 4 * 2;
  const float scale = scales[row], scale_below = scales[row + 8];
  if (of.is_gated) {
#pragma unroll
    for (int i = 0; i < TILE / 4; i += 4) {
      const int element = tile * (TILE / 2) + i * 2 + within;
      const float *gates = sums + i, *ups = gates + TILE / 4;
      of.put_gated(row, element, gates, ups, scale);
      of.put_gated(row + 8, element, gates + 2, ups + 2, scale_below);
    }
    return;
  }
  const float of_unit = 1 / unit;
  float squares = 0, below = 0;
#pragma unroll
  for (int i = 0; i < TILE / 2; i += 4) {
    const int element = tile * TILE + i * 2 + within;
    const Two bias = of.of(of.bias, element), norm = of.of(of.norm, element);
    squares += of.put(row, element, sums + i, scale, bias, of.added(row, element), norm, of_unit);
    below += of.put(row + 8, element, sums + i + 2, scale_below, bias, of.added(row + 8, element), norm, of_unit);
  }
  if (of.norm) put_squares<4>(of, tile, row, squares, below, unit);
}

// ---- sums of several blocks ----

// Of a tile's pairs of rows each block of a cluster makes y of some, of which the others send their sums: 512 bytes a
// pair, in units of 16 bytes that a thread has of 8 columns, so placed that neither those who write nor those who read
// them meet at a bank.
constexpr int PAIR_BYTES = SHARED_TILE * 2 * sizeof(float);
__device__ inline int unit(int pair, int eighth, int within) { return (eighth + pair) % 8 * 4 + within; }

template <int GROUPS>
struct Shared {
  static constexpr int PAIRS = GROUPS * GROUP_ROWS / 2, WARPS = GROUPS * GROUP_THREADS / 32;
  // Pairs that a warp has at once.
  static constexpr int AT_ONCE = 2, MOST_BLOCKS = 8;

  const Cluster cluster;
  const int begin, pairs, warp, lane, element;
  // What others send, and what this block has itself.
  char *inbox, *outbox;
  // What elements take from elsewhere.
  Two bias, norm, added[AT_ONCE][2];

  __device__ Shared(const Cluster& cluster, int tile, char* inbox, char* outbox)
      : cluster(cluster),
        begin(cluster.begin(PAIRS)),
        pairs(cluster.end(PAIRS) - begin),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        element(tile * SHARED_TILE + lane * 2),
        inbox(inbox),
        outbox(outbox) {}

  __device__ int bytes() const { return (cluster.size - 1) * pairs * PAIR_BYTES; }

  // Asks for what the first pairs take from elsewhere.
  __device__ void ask(const Product& of) {
    bias = of.of(of.bias, element), norm = of.of(of.norm, element);
    ask_for_added(of, warp);
  }
  __device__ void ask_for_added(const Product& of, int first) {
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const int row = row_of(begin + first + i * WARPS);
      added[i][0] = of.added(row, element), added[i][1] = of.added(row + 8, element);
    }
  }

  __device__ void send(const float (&sums)[SHARED_TILE / 2], const Arrivals& arrivals) const {
    const int pair = own_pair();
#pragma unroll
    for (int i = 0; i < 8; i++)
      ((Pack<float>*)outbox)[pair * 32 + unit(pair, i, lane % 4)] = {sums[i * 4], sums[i * 4 + 1], sums[i * 4 + 2],
                                                                     sums[i * 4 + 3]};
    show_copies();
    __syncthreads();
    if (threadIdx.x >= cluster.size || threadIdx.x == cluster.rank) return;
    const Cluster to(cluster.size, threadIdx.x);
    const int first = to.begin(PAIRS), bytes = (to.end(PAIRS) - first) * PAIR_BYTES;
    const int slot = cluster.rank - (cluster.rank > to.rank);  // there is none for the block's own
    arrivals.send((u32)__cvta_generic_to_shared(inbox) + slot * bytes,
                  (u32)__cvta_generic_to_shared(outbox) + first * PAIR_BYTES, bytes, to.rank);
  }

  // A pair's four sums of the thread, over the blocks in their order.
  __device__ Pack<float> sum(int pair) const {
    const int at = pair * PAIR_BYTES + unit(begin + pair, lane / 4, lane % 4) * 16;
    Pack<float> part[MOST_BLOCKS], sum = {};
#pragma unroll
    for (u32 i = 0; i < MOST_BLOCKS; i++) {
      const int slot = i - (i > cluster.rank);
      const char* from = i == cluster.rank ? outbox + begin * PAIR_BYTES : inbox + slot * pairs * PAIR_BYTES;
      if (i < cluster.size) part[i] = *(const Pack<float>*)(from + at);
    }
#pragma unroll
    for (u32 i = 0; i < MOST_BLOCKS; i++)
      if (i < cluster.size)
        for (int j = 0; j < 4; j++) sum.lane[j] += part[i].lane[j];
    return sum;
  }

  // Makes y of the block's pairs of rows, one a warp.
  __device__ void put(const Product& of, int tile, const float* scales, float unit) {
    const float of_unit = 1 / unit;
#pragma unroll 1
    for (int first = warp; first < pairs; first += WARPS * AT_ONCE) {
      if (first > warp) ask_for_added(of, first);
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int pair = first + i * WARPS, row = row_of(begin + pair);
        if (pair >= pairs) break;
        const Pack<float> sums = sum(pair);
        const float squares = of.put(row, element, sums.lane, scales[row], bias, added[i][0], norm, of_unit);
        const float below =
            of.put(row + 8, element, sums.lane + 2, scales[row + 8], bias, added[i][1], norm, of_unit);
        if (of.norm) put_squares<32>(of, tile, row, squares, below, unit);
      }
    }
  }
};

// ---- the product ----

// A cluster multiplies `GROUPS` times 64 rows with `TILE` rows of weights, each of its blocks a part of k, in `STAGES`
// that are copied while others are multiplied; the sums of its blocks are joined in their order. The rows of x are the first
// ones, or those that `chosen` says.
template <int GROUPS, int TILE, int STAGES>
__device__ inline void multiply_tile(const Product& of, const Cluster& cluster, int tile, const int* chosen = nullptr) {
  constexpr int ROWS = GROUPS * GROUP_ROWS, STAGE_BYTES = (ROWS + TILE) * ROW_BYTES;
  // Rows that the threads of a block copy at once, 16 bytes each.
  constexpr int AT_ONCE = GROUPS * GROUP_THREADS / 8;
  extern __shared__ __align__(1024) char stages[];
  __shared__ float scales[ROWS];
  __shared__ Arrivals arrivals;
  const u32 base = (u32)__cvta_generic_to_shared(stages);
  const int chunks = of.k / CHUNK;
  const int begin = cluster.begin(chunks), count = cluster.end(chunks) - begin;
  const bool is_shared = TILE == SHARED_TILE && cluster.size > 1;
  Shared<GROUPS> shared(cluster, tile, stages + STAGES * STAGE_BYTES, stages);
  if (is_shared) {
    if (threadIdx.x == 0) arrivals.expect(shared.bytes());
    Cluster::arrive();
  }

  const int pack = threadIdx.x % 8, first = threadIdx.x / 8;
  const u32 swizzled = first * ROW_BYTES + ((pack ^ first % 8) << 4);
  const i64 column = (i64)begin * CHUNK + pack * 8;
  const Narrow *weights[(TILE + AT_ONCE - 1) / AT_ONCE], *x[ROWS / AT_ONCE];
#pragma unroll
  for (int i = 0; i * AT_ONCE < TILE; i++)
    weights[i] = of.w + of.weight_row<TILE>(tile, first + i * AT_ONCE) * of.k + column;
#pragma unroll
  for (int i = 0; i * AT_ONCE < ROWS; i++) {
    const int row = first + i * AT_ONCE, there = row < of.rows ? row : 0;
    x[i] = of.x + (i64)(chosen ? chosen[there] : there) * of.k + column;
  }
  const auto stage = [&](int c) { return base + c % STAGES * STAGE_BYTES; };
  const auto copy_weights = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i * AT_ONCE < TILE; i++)
      if (TILE % AT_ONCE == 0 || first + i * AT_ONCE < TILE)
        copy(stage(c) + (ROWS + i * AT_ONCE) * ROW_BYTES + swizzled, weights[i] + c * CHUNK);
  };
  const auto copy_x = [&](int c) {
    if (c >= count) return;
#pragma unroll
    for (int i = 0; i * AT_ONCE < ROWS; i++)
      copy(stage(c) + i * AT_ONCE * ROW_BYTES + swizzled, x[i] + c * CHUNK, first + i * AT_ONCE < of.rows ? 16 : 0);
  };

#pragma unroll
  for (int c = 0; c < STAGES - 1; c++) copy_weights(c);
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
  for (int c = 0; c < count; c++) {
    await_copies<STAGES - 2>();
    // Copies are seen by the matrix units, which are done with the stage that is copied to next.
    show_copies();
    await_products<0>();
    __syncthreads();
    begin_products();
#pragma unroll
    for (int part = 0; part < ROW_BYTES; part += 32)
      multiply_all<TILE>(sums, matrix(stage(c) + group_rows + part), stage(c) + ROWS * ROW_BYTES + part);
    end_products();
    copy_weights(c + STAGES - 1), copy_x(c + STAGES - 1), end_copies();
  }
  const float scale = of.before.of_tiles ? of.before.scale(squares, half_row, half, of.k) : 1;
  if (half == 0) scales[half_row] = scale;
  await_products<0>(sums);
  await_copies<0>();
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
  put_own<TILE>(of, tile, sums, scales, unit, own_pair());
}

// ---- entries ----

#define PRODUCT(NAME, GROUPS, TILE, STAGES)                                                       \
  extern "C" __global__ void __launch_bounds__(GROUPS * GROUP_THREADS) NAMED(NAME)(Product of) {  \
    const Cluster cluster;                                                                        \
    multiply_tile<GROUPS, TILE, STAGES>(of, cluster, blockIdx.x / cluster.size);                  \
  }
