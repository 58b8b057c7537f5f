// Backward of causal attention over packed sequences, bf16 with sums in fp32, behind `elements.cuh` and
// `warpgroup.cuh`: for compute capability 9.0a alone. Every sum is made by one block in one order, so that results
// repeat to the bit: gradients of keys and values by blocks that go through the queries, those of queries by blocks
// that go through the keys. Scores are made twice for that, which costs less than to order sums among blocks (the way
// of FlashAttention-2; Dao, 2023).

// Two groups of four warps multiply, with 64 rows of the block's own each, while a third copies.
constexpr int GROUP = 128, MULTIPLIERS = 2, THREADS = GROUP * (MULTIPLIERS + 1);
constexpr int ROWS = 64, TILE = ROWS * MULTIPLIERS;
constexpr float LOG2_E = 1.4426950408889634f;

// A tensor [N, heads, D] whose rows lie `stride` elements apart.
struct Heads {
  Bf16* data;
  i64 stride;

  __device__ Bf16* at(i64 row, int head, int dim) const { return data + row * stride + head * dim; }
};

// What the kernels take.
struct Backward {
  Heads q, k, v, out, dout, dq, dk, dv;
  const float* lse;  // of query n and head h at n lse_row + h lse_head
  i64 lse_row, lse_head;
  float* stats;        // [2, H, N]: log-sum-exps for powers of two, and sums of `out * dout`
  const int* offsets;  // [sequences + 1]
  i64 tokens;
  int sequences, heads, kv_heads, window;
  float scale;
};

extern __shared__ __align__(1024) char shared[];

__device__ inline u32 shared_at(int offset) { return (u32)__cvta_generic_to_shared(shared) + offset; }

// ---- stages ----

// Shared memory that the copying group fills while the others read what it filled before, with two barriers a stage: it
// is full when every thread has copied its part, and empty when every warp has read it.
template <int STAGES>
struct Ring {
  static constexpr int BYTES = STAGES * 16;
  u32 full, empty;
  int stage = 0, parity = 0;

  __device__ Ring(u32 at) : full(at), empty(at + STAGES * 8) {}

  // By all threads of a block.
  __device__ void open() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) init(full + i * 8, GROUP), init(empty + i * 8, GROUP / 32 * MULTIPLIERS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
  __device__ void await_empty() const { await(empty + stage * 8, parity ^ 1); }
  __device__ void await_full() const { await(full + stage * 8, parity); }
  // The copies since the last call are the stage's.
  __device__ void fill() {
    end_copies();
    await_copies<0>();
    show_copies();
    arrive(full + stage * 8);
    next();
  }
  __device__ void leave() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + stage * 8);
    next();
  }

 private:
  __device__ void next() {
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
  __device__ static void init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
  }
  __device__ static void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
  }
  __device__ static void await(u32 barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
  }
};

// ---- tiles ----

// `COUNT` rows of D elements in shared memory: for each 64 columns `COUNT` rows, swizzled.
template <int COUNT, int D>
struct Tile {
  static constexpr int WIDTH = D, COLUMNS_BYTES = COUNT * ROW_BYTES, BYTES = COUNT * D * 2;

  // By the threads of a group: the rows from `first` on, zeros from `end` on.
  __device__ static void copy_in(u32 to, const Bf16* from, i64 stride, int first, int end) {
    constexpr int UNITS = D / 8, AT_ONCE = GROUP / UNITS;
    const int thread = threadIdx.x % GROUP, unit = thread % UNITS, row = thread / UNITS;
    static_assert(AT_ONCE % 8 == 0, "a thread's rows are swizzled alike");
    const Bf16* source = from + (first + row) * stride + unit * 8;
    const u32 at = to + unit / 8 * COLUMNS_BYTES + row * ROW_BYTES + ((unit % 8 ^ row % 8) << 4);
#pragma unroll
    for (int i = 0; i < COUNT / AT_ONCE; i++) {
      const bool is_there = first + row + i * AT_ONCE < end;
      copy(at + i * AT_ONCE * ROW_BYTES, is_there ? source : from, is_there ? 16 : 0);
      source += AT_ONCE * stride;
    }
  }
  // 16 columns from `16 k` on, of the rows from `row` on: what is multiplied along its rows.
  __device__ static u64 columns(u32 tile, int row, int k) {
    return matrix(tile + k / 4 * COLUMNS_BYTES + row * ROW_BYTES + k % 4 * 32);
  }
  // 16 rows from `16 k` on, with all their columns: what is multiplied along its columns.
  __device__ static u64 rows(u32 tile, int k) { return matrix(tile + k * 16 * ROW_BYTES, COLUMNS_BYTES); }
};

// c = a b^T, of the 64 rows of a tile from `row` on and all of another one.
template <class A, class B, int N>
__device__ inline void multiply_tiles(float (&c)[N], u32 a, int row, u32 b) {
#pragma unroll
  for (int k = 0; k < A::WIDTH / 16; k++) multiply<2 * N>(c, A::columns(a, row, k), B::columns(b, 0, k), k > 0);
  end_products();
}
// c += a b, of an operand in registers and a tile.
template <class B, int N, int M>
__device__ inline void add_products(float (&c)[N], const u32 (&a)[M], u32 b) {
#pragma unroll
  for (int k = 0; k < M / 4; k++) multiply_rows<2 * N>(c, a + 4 * k, B::rows(b, k));
  end_products();
}

// ---- sums in registers ----

// A thread's rows of 64 are this one and the one 8 below, its columns of each 8 this one and the next (`multiply`).
__device__ inline int own_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
__device__ inline int own_column() { return threadIdx.x % 4 * 2; }
// Behind these, those of sum `i`.
__device__ constexpr int row_of(int i) { return i / 2 % 2 * 8; }
__device__ constexpr int column_of(int i) { return i / 4 * 8 + i % 2; }

__device__ inline u32 narrow_pair(float low, float high) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}
template <int N>
__device__ inline void to_operand(const float (&c)[N], u32 (&a)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) a[i] = narrow_pair(c[2 * i], c[2 * i + 1]);
}
__device__ inline float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- work ----

// Which queries and keys of a sequence see each other.
struct Sight {
  int window, len;

  __device__ bool sees(int query, int key) const { return key <= query && query - key < window && query < len; }
  // Whether all do, of so many from two on.
  __device__ bool all(int query, int queries, int key, int keys) const {
    return key + keys - 1 <= query && query + queries - 1 - key < window && query + queries <= len;
  }
};

// What a block works on: one head of `heads`, and part `part` of a sequence, which begins at row `begin`.
struct Work {
  int begin, len, head, part;

  __device__ Work(const Backward& of, int heads) {
    const int each = of.sequences * heads, rest = blockIdx.x % each;
    part = blockIdx.x / each;
    head = rest % heads;
    begin = of.offsets[rest / heads];
    len = of.offsets[rest / heads + 1] - begin;
  }
  // A group's rows from `row` on of the sequence.
  template <int N>
  __device__ void store(const float (&c)[N], Heads to, int row, float scale) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int own = row + own_row() + half * 8;
      if (own >= len) continue;
      Bf16* at = to.at((i64)begin + own, head, 2 * N) + own_column();
#pragma unroll
      for (int i = half * 2; i < N; i += 4) *(u32*)(at + column_of(i)) = narrow_pair(c[i] * scale, c[i + 1] * scale);
    }
  }
};

// Divides a block into those who copy and those who multiply. Its registers are dealt out anew, 40 and 232 a thread of
// the 168 for each that it has: one that asks for more waits for ever.
template <class Task>
__device__ inline void run(const Backward& of) {
  Task task(of);
  if (!task.exists()) return;
  task.ring.open();
  const int group = threadIdx.x / GROUP;
  if (group == MULTIPLIERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    task.copy_all();
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    task.multiply_all(group * ROWS);
  }
}

// ---- gradients of keys and values ----

// A block has a tile of keys and goes through the queries that see them, of all the heads that read them. The first
// blocks have the most to do.
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
  const int first_key, heads;  // those that read a key head
  int blocks;                  // of queries
  Ring<STAGES> ring;

  __device__ KeyGradients(const Backward& of)
      : of(of),
        work(of, of.kv_heads),
        first_key(work.part * TILE),
        heads(of.heads / of.kv_heads),
        ring(shared_at(BARRIERS_AT)) {
    const i64 seen = (i64)first_key + TILE - 1 + of.window;  // behind the last query that sees a key
    blocks = ((seen < work.len ? (int)seen : work.len) - first_key + ROWS - 1) / ROWS;
  }
  __device__ bool exists() const { return first_key < work.len; }
  __device__ u32 stage() const { return shared_at(STAGES_AT) + ring.stage * STAGE_BYTES; }

  __device__ void copy_all() {
    // They come with the first stage.
    Keys::copy_in(shared_at(0), of.k.at(work.begin, work.head, D), of.k.stride, first_key, work.len);
    Keys::copy_in(shared_at(VALUES_AT), of.v.at(work.begin, work.head, D), of.v.stride, first_key, work.len);
    const int thread = threadIdx.x % GROUP;
    for (int g = 0; g < heads; g++) {
      const int head = work.head * heads + g;
      const Bf16 *q = of.q.at(work.begin, head, D), *dout = of.dout.at(work.begin, head, D);
      const float* stats = of.stats + (thread / ROWS * of.heads + head) * of.tokens + work.begin;
      for (int b = 0; b < blocks; b++) {
        const int query = first_key + b * ROWS, own = query + thread % ROWS;
        const float stat = stats[own < work.len ? own : 0];
        ring.await_empty();
        Queries::copy_in(stage(), q, of.q.stride, query, work.len);
        Queries::copy_in(stage() + DOUT_AT, dout, of.dout.stride, query, work.len);
        ((float*)(shared + STATS_AT))[ring.stage * 2 * ROWS + thread] = stat;
        ring.fill();
      }
    }
  }

  __device__ void multiply_all(int row) {
    const int key = first_key + row;
    float dk[D / 2] = {}, dv[D / 2] = {};
    for (int g = 0; g < heads; g++) {
      for (int b = 0; b < blocks; b++) {
        const int query = first_key + b * ROWS;
        ring.await_full();
        if (query + ROWS > key) multiply_block(row, query, dk, dv);
        ring.leave();
      }
    }
    work.store(dk, of.dk, key, of.scale);
    work.store(dv, of.dv, key, 1);
  }

  // With p transposed: dv += p dout, and dk += p (dp - delta) q.
  __device__ void multiply_block(int row, int query, float (&dk)[D / 2], float (&dv)[D / 2]) {
    const u32 q = stage(), dout = q + DOUT_AT;
    const float* stats = (const float*)(shared + STATS_AT) + ring.stage * 2 * ROWS + own_column();
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

// A block has a tile of queries and goes through the keys that they see; the last queries, which see the most, come
// first.
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
  const int first_query;
  int first_key, blocks;  // of keys
  Ring<STAGES> ring;

  __device__ QueryGradients(const Backward& of)
      : of(of),
        work(of, of.heads),
        first_query(((work.len + TILE - 1) / TILE - 1 - work.part) * TILE),
        ring(shared_at(BARRIERS_AT)) {
    const int end = first_query + TILE < work.len ? first_query + TILE : work.len;
    const int seen = first_query - of.window + 1;
    first_key = seen > 0 ? seen / KEYS * KEYS : 0;
    blocks = (end - first_key + KEYS - 1) / KEYS;
  }
  __device__ bool exists() const { return first_query >= 0; }
  __device__ u32 stage() const { return shared_at(STAGES_AT) + ring.stage * STAGE_BYTES; }

  __device__ void copy_all() {
    // They come with the first stage.
    Queries::copy_in(shared_at(0), of.q.at(work.begin, work.head, D), of.q.stride, first_query, work.len);
    Queries::copy_in(shared_at(DOUT_AT), of.dout.at(work.begin, work.head, D), of.dout.stride, first_query, work.len);
    const int kv_head = work.head / (of.heads / of.kv_heads);
    const Bf16 *k = of.k.at(work.begin, kv_head, D), *v = of.v.at(work.begin, kv_head, D);
    for (int b = 0; b < blocks; b++) {
      const int key = first_key + b * KEYS;
      ring.await_empty();
      Keys::copy_in(stage(), k, of.k.stride, key, work.len);
      Keys::copy_in(stage() + VALUES_AT, v, of.v.stride, key, work.len);
      ring.fill();
    }
  }

  __device__ void multiply_all(int row) {
    const int query = first_query + row;
    float lse[2], delta[2], dq[D / 2] = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int own = query + own_row() + half * 8;
      const float* stats = of.stats + work.head * of.tokens + work.begin + (own < work.len ? own : 0);
      lse[half] = stats[0], delta[half] = stats[of.heads * of.tokens];
    }
    for (int b = 0; b < blocks; b++) {
      const int key = first_key + b * KEYS;
      ring.await_full();
      if (key < query + ROWS) multiply_block(row, key, lse, delta, dq);
      ring.leave();
    }
    work.store(dq, of.dq, query, of.scale);
  }

  // dq += p (dp - delta) k.
  __device__ void multiply_block(int row, int key, const float (&lse)[2], const float (&delta)[2],
                                 float (&dq)[D / 2]) {
    const u32 k = stage(), v = k + VALUES_AT;
    const int query = first_query + row;
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
  const i64 own = thread_index() / EACH, last = of.tokens * of.heads - 1, i = own < last ? own : last;
  const i64 query = i / of.heads, head = i % of.heads;
  const int lane = threadIdx.x % EACH;
  const auto pack = [&](Heads from) { return *(const Pack<Bf16>*)(from.at(query, head, D) + lane * 8); };
  const auto out = pack(of.out), dout = pack(of.dout);
  float sum = 0;
  for (int j = 0; j < 8; j++) sum += widen(out.lane[j]) * widen(dout.lane[j]);
  for (int mask = EACH / 2; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffff, sum, mask);
  if (lane > 0 || own > last) return;
  float* stats = of.stats + head * of.tokens + query;
  stats[0] = of.lse[query * of.lse_row + head * of.lse_head] * LOG2_E;
  stats[of.heads * of.tokens] = sum;
}

// ---- entries ----

// What `attention_kernels.rs` asks for.
static_assert(KeyGradients<64>::BYTES == 83504 && KeyGradients<128>::BYTES == 165424, "keys_bytes");
static_assert(QueryGradients<64>::BYTES == 98336 && QueryGradients<128>::BYTES == 196640, "queries_bytes");

// The bounds are what makes ptxas heed the registers that `run` deals out.
#define BACKWARD(D)                                                                              \
  extern "C" __global__ void attention_stats_##D(Backward of) { make_stats<D>(of); }             \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_keys_##D(Backward of) {     \
    run<KeyGradients<D>>(of);                                                                    \
  }                                                                                              \
  extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_queries_##D(Backward of) {  \
    run<QueryGradients<D>>(of);                                                                  \
  }
BACKWARD(64)
BACKWARD(128)
