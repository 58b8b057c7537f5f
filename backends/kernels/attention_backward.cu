// Backward of causal attention over packed sequences, behind `attention.cuh`. Every sum is made by one block in one order,
// so that results repeat to the bit: gradients of keys and values by blocks that go through the queries, those of queries by
// blocks that go through the keys. Scores are made twice for that, which costs less than to order sums among blocks (the way
// of FlashAttention-2; Dao, 2023).

// What the kernels take. Gradients of keys and values have a row for each token.
struct Backward : Forward {
  Heads dout, dq, dk, dv;
  float* stats;  // [2, H, all_rows]: log-sum-exps for powers of two, and sums of `out * dout`
  i64 all_rows;  // of queries
};

// ---- gradients of keys and values ----

// A block has a tile of keys and goes through the queries that see them, of all the heads that read them.
template <int D>
struct KeyGradients {
  static constexpr int STAGES = 3;
  using Keys = Tile<TILE, D>;
  using Queries = Tile<ROWS, D>;
  // Keys and values, queries and their outputs' gradients, stats of these.
  static constexpr int VALUES_AT = Keys::BYTES, STAGES_AT = 2 * Keys::BYTES;
  static constexpr int DOUT_AT = Queries::BYTES, STAGE_BYTES = 2 * Queries::BYTES;
  static constexpr int STATS_AT = STAGES_AT + STAGES * STAGE_BYTES, STATS_BYTES = 2 * ROWS * sizeof(float);
  static constexpr int BARRIERS_AT = STATS_AT + STAGES * STATS_BYTES, BYTES = BARRIERS_AT + Ring<STAGES>::BYTES;

  const Backward& of;
  const Work work;
  const int first_key, first_query, heads;  // those that read a key head
  int blocks;                               // of queries
  Ring<STAGES> ring;

  __device__ KeyGradients(const Backward& of)
      : of(of),
        work(of, of.kv_heads),
        first_key(work.first),
        first_query(first_key > work.common ? first_key : work.common),
        heads(of.heads / of.kv_heads),
        ring(shared_at(BARRIERS_AT)) {
    const i64 seen = (i64)first_key + TILE - 1 + of.window;  // behind the last query that sees a key
    const int queries = (seen < work.len ? (int)seen : work.len) - first_query;
    blocks = queries > 0 ? (queries + ROWS - 1) / ROWS : 0;
  }
  __device__ u32 stage(int index) const { return shared_at(STAGES_AT) + index * STAGE_BYTES; }

  __device__ void copy_all() {
    if (blocks == 0) return;
    // They come with the first stage.
    work.copy_keys<Keys>(shared_at(0), of.k, work.head, first_key);
    work.copy_keys<Keys>(shared_at(VALUES_AT), of.v, work.head, first_key);
    const int thread = threadIdx.x % GROUP;
    for (int g = 0; g < heads; g++) {
      const int head = work.head * heads + g;
      const float* stats = of.stats + (thread / ROWS * of.heads + head) * of.all_rows;
      for (int b = 0; b < blocks; b++) {
        const int query = first_query + b * ROWS, row = work.query_row(query + thread % ROWS);
        const float stat = stats[row < 0 ? 0 : row];
        const int index = ring.take_empty();
        work.copy_queries<Queries>(stage(index), of.q, head, query);
        work.copy_queries<Queries>(stage(index) + DOUT_AT, of.dout, head, query);
        ((float*)(shared + STATS_AT))[index * 2 * ROWS + thread] = stat;
        ring.fill();
      }
    }
  }

  __device__ void multiply_all(int row) {
    const int key = first_key + row;
    float dk[D / 2] = {}, dv[D / 2] = {};
    for (int g = 0; g < heads; g++) {
      for (int b = 0; b < blocks; b++) {
        const int query = first_query + b * ROWS, index = ring.take_full();
        if (query + ROWS > key) multiply_block(index, row, query, dk, dv);
        ring.leave();
      }
    }
    work.store(dk, of.dk, work.begin, key, {of.scale, of.scale});
    work.store(dv, of.dv, work.begin, key, {1, 1});
  }

  // With p transposed: dv += p dout, and dk += p (dp - delta) q.
  __device__ void multiply_block(int index, int row, int query, float (&dk)[D / 2], float (&dv)[D / 2]) const {
    const u32 q = stage(index), dout = q + DOUT_AT;
    const float* stats = (const float*)(shared + STATS_AT) + index * 2 * ROWS + own_column();
    const int key = first_key + row;
    const Sight sight = {of.window, work.len};
    const bool sees_all = sight.all(query, ROWS, key, ROWS);
    const float scale = of.scale * LOG2_E;
    float p[ROWS / 2], dp[ROWS / 2];
    u32 probabilities[ROWS / 4], dscores[ROWS / 4];
    begin_products();
    multiply_tiles<Keys, Queries>(p, shared_at(0), row, q);
    multiply_tiles<Keys, Queries>(dp, shared_at(VALUES_AT), row, dout);
    await_products<1>(p);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
      p[i] = power_of_two(__fmaf_rn(p[i], scale, -stats[column_of(i)]));
      if (!sees_all && !sight.sees(query + own_column() + column_of(i), key + own_row() + row_of(i))) p[i] = 0;
    }
    to_operand(p, probabilities);
    begin_products();
    add_products<Queries>(dv, probabilities, dout);
    await_products<1>(dp);
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) p[i] *= dp[i] - stats[ROWS + column_of(i)];
    to_operand(p, dscores);
    begin_products();
    add_products<Queries>(dk, dscores, q);
    await_products<0>(dk);
    await_products<0>(dv);
  }
};

// ---- gradients of queries ----

// A block has a tile of queries and goes through the keys that they see.
template <int D>
struct QueryGradients {
  static constexpr int STAGES = 2, KEYS = 128;
  using Queries = Tile<TILE, D>;
  using Keys = Tile<KEYS, D>;
  // Queries and their outputs' gradients, keys and values.
  static constexpr int DOUT_AT = Queries::BYTES, STAGES_AT = 2 * Queries::BYTES;
  static constexpr int VALUES_AT = Keys::BYTES, STAGE_BYTES = 2 * Keys::BYTES;
  static constexpr int BARRIERS_AT = STAGES_AT + STAGES * STAGE_BYTES, BYTES = BARRIERS_AT + Ring<STAGES>::BYTES;

  const Backward& of;
  const Work work;
  const SeenKeys<KEYS> seen;
  Ring<STAGES> ring;

  __device__ QueryGradients(const Backward& of)
      : of(of), work(of, of.heads), seen(work, of.window), ring(shared_at(BARRIERS_AT)) {}
  __device__ u32 stage(int index) const { return shared_at(STAGES_AT) + index * STAGE_BYTES; }

  __device__ void copy_all() {
    // They come with the first stage.
    work.copy_queries<Queries>(shared_at(0), of.q, work.head, work.first);
    work.copy_queries<Queries>(shared_at(DOUT_AT), of.dout, work.head, work.first);
    const int kv_head = work.head / (of.heads / of.kv_heads);
    for (int b = 0; b < seen.blocks; b++) {
      const int key = seen.first + b * KEYS;
      const u32 to = stage(ring.take_empty());
      work.copy_keys<Keys>(to, of.k, kv_head, key);
      work.copy_keys<Keys>(to + VALUES_AT, of.v, kv_head, key);
      ring.fill();
    }
  }

  __device__ void multiply_all(int row) {
    const int query = work.first + row;
    float lse[2], delta[2], dq[D / 2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int mine = work.query_row(query + own_row() + half * 8);
      const float* stats = of.stats + work.head * of.all_rows + (mine < 0 ? 0 : mine);
      lse[half] = stats[0], delta[half] = stats[of.heads * of.all_rows];
    }
    for (int b = 0; b < seen.blocks; b++) {
      const int key = seen.first + b * KEYS, index = ring.take_full();
      if (key < query + ROWS) multiply_block(index, row, key, lse, delta, dq);
      ring.leave();
    }
    work.store(dq, of.dq, work.own, query, {of.scale, of.scale});
  }

  // dq += p (dp - delta) k.
  __device__ void multiply_block(int index, int row, int key, const float (&lse)[2], const float (&delta)[2],
                                 float (&dq)[D / 2]) const {
    const u32 k = stage(index), v = k + VALUES_AT;
    const int query = work.first + row;
    const Sight sight = {of.window, work.len};
    const bool sees_all = sight.all(query, ROWS, key, KEYS);
    const float scale = of.scale * LOG2_E;
    float p[KEYS / 2], dp[KEYS / 2];
    u32 dscores[KEYS / 4];
    begin_products();
    multiply_tiles<Queries, Keys>(p, shared_at(0), row, k);
    multiply_tiles<Queries, Keys>(dp, shared_at(DOUT_AT), row, v);
    await_products<1>(p);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) {
      p[i] = power_of_two(__fmaf_rn(p[i], scale, -lse[i / 2 % 2]));
      if (!sees_all && !sight.sees(query + own_row() + row_of(i), key + own_column() + column_of(i))) p[i] = 0;
    }
    await_products<0>(dp);
#pragma unroll
    for (int i = 0; i < KEYS / 2; i++) p[i] *= dp[i] - delta[i / 2 % 2];
    to_operand(p, dscores);
    begin_products();
    add_products<Keys>(dq, dscores, k);
    await_products<0>(dq);
  }
};

// ---- what both read ----

// D / 8 threads for each query of a head; those that have none do the last one's again, since threads add up in step.
template <int D>
__device__ inline void make_stats(const Backward& of) {
  constexpr int EACH = D / 8;
  const i64 own = thread_index() / EACH, last = of.all_rows * of.heads - 1, i = own < last ? own : last;
  const i64 query = i / of.heads, head = i % of.heads;
  const int lane = threadIdx.x % EACH;
  const auto pack = [&](Heads from) { return *(const Pack<Narrow>*)(from.at(query, head, D) + lane * 8); };
  const auto out = pack(of.out), dout = pack(of.dout);
  float sum = 0;
  for (int j = 0; j < 8; j++) sum += widen(out.lane[j]) * widen(dout.lane[j]);
  for (int mask = EACH / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  if (lane > 0 || own > last) return;
  float* stats = of.stats + head * of.all_rows + query;
  stats[0] = of.lse[query * of.lse_row + head * of.lse_head] * LOG2_E;
  stats[of.heads * of.all_rows] = sum;
}

// ---- entries ----

// What `kernels/attention.rs` asks for.
static_assert(KeyGradients<64>::BYTES == 83504 && KeyGradients<128>::BYTES == 165424, "keys_bytes");
static_assert(QueryGradients<64>::BYTES == 98336 && QueryGradients<128>::BYTES == 196640, "queries_bytes");

// The bounds are what makes ptxas heed the registers that `run` deals out.
#define BACKWARD(D)                                                                                     \
  extern "C" __global__ void NAMED(attention_stats_##D)(Backward of) { make_stats<D>(of); }             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAMED(attention_keys_##D)(Backward of) {     \
    run<KeyGradients<D>>(of);                                                                           \
  }                                                                                                     \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) NAMED(attention_queries_##D)(Backward of) {  \
    run<QueryGradients<D>>(of);                                                                         \
  }
BACKWARD(64)
BACKWARD(128)
