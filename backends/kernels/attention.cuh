// Causal attention and its backward, a tile at a time, behind `elements.cuh`, `block.cuh` and `warpgroup.cuh`: what their
// kernels have in common. 16-bit values with sums in fp32, for compute capability 9.0a alone.

// Two groups of four warps multiply, with 64 rows of the block's own each, while a third copies.
constexpr int GROUP = 128, MULTIPLIERS = 2, THREADS = GROUP * (MULTIPLIERS + 1);
constexpr int ROWS = 64, TILE = ROWS * MULTIPLIERS;
constexpr float LOG2_E = 1.4426950408889634f;

// A tensor [N, heads, D] whose rows lie `stride` elements apart.
struct Heads {
  Narrow* data;
  i64 stride;

  __device__ Narrow* at(i64 row, int head, int dim) const { return data + row * stride + head * dim; }
};

// A tile: the tokens of a sequence from `first` on.
struct Place {
  int sequence, first;
};

// What the kernels take. Sequences are tokens back to back; those that one begins with may be keys and values there, and no
// queries: what they see is another sequence's, or another device's.
struct Forward {
  Heads q, k, v, out;
  float* lse;  // of row n and head h at n lse_row + h lse_head
  i64 lse_row, lse_head;
  const int* offsets;  // where the tokens of each sequence begin, and the last one's end
  const int* queries;  // the same of its queries, which are its last tokens; null where all are
  const int* rows;     // the row of each token's key and value; null where token n has row n
  const Place* tiles;  // the longest work first
  int heads, kv_heads, window;
  float scale;
};

extern __shared__ __align__(1024) char shared[];

__device__ inline u32 shared_at(int offset) { return (u32)__cvta_generic_to_shared(shared) + offset; }

// ---- stages ----

// Shared memory that the copying group fills while the others read what it filled before, with two barriers a stage: it
// is full when every thread has copied its part, and empty when every warp has read it. Stages are taken in turn, and
// given away in the same order, though later ones may be taken before: by those who copy up to `AHEAD`.
template <int STAGES, int AHEAD = 0>
struct Ring {
  static constexpr int BYTES = STAGES * 16;
  u32 full, empty;
  int stage = 0, parity = 0;     // the next to be taken
  int oldest = 0, underway = 0;  // the first that was not given away; how many are copied to

  __device__ Ring(u32 at) : full(at), empty(at + STAGES * 8) {}

  // By all threads of a block.
  __device__ void open() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; i++) init(full + i * 8, GROUP), init(empty + i * 8, GROUP / 32 * MULTIPLIERS);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }

  // By those who copy: a stage to copy to.
  __device__ int take_empty() {
    await(empty + stage * 8, parity ^ 1);
    return take();
  }
  // The copies since the last call are the stage's.
  __device__ void fill() {
    end_copies();
    if (underway++ == AHEAD) give_full<AHEAD>();
  }
  __device__ void fill_rest() {
    while (underway > 0) give_full<0>();
  }

  // By those who multiply: a stage to read.
  __device__ int take_full() {
    await(full + stage * 8, parity);
    return take();
  }
  __device__ void leave() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(empty + oldest * 8);
    next(oldest);
  }

 private:
  template <int PENDING>
  __device__ void give_full() {
    await_copies<PENDING>();
    show_copies();
    arrive(full + oldest * 8);
    next(oldest), underway--;
  }
  __device__ int take() {
    const int taken = stage;
    if (next(stage)) parity ^= 1;
    return taken;
  }
  // Whether it is the first again.
  __device__ static bool next(int& stage) {
    if (++stage == STAGES) stage = 0;
    return stage == 0;
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
  static constexpr int HEIGHT = COUNT, WIDTH = D, COLUMNS_BYTES = COUNT * ROW_BYTES, BYTES = COUNT * D * 2;

  // By the threads of a group: the rows of a tensor from `from` on, of which there are so many, and zeros for the others.
  __device__ static void copy_in(u32 to, const Narrow* from, i64 stride, int count) {
    const Narrow* source = from + thread_row() * stride + unit() * 8;
#pragma unroll
    for (int i = 0; i < COUNT / AT_ONCE; i++) {
      const bool is_there = thread_row() + i * AT_ONCE < count;
      copy(place(to, i), is_there ? source : from, is_there ? 16 : 0);
      source += AT_ONCE * stride;
    }
  }
  // The same for rows that `rows` names. A thread asks for one of its warp's.
  __device__ static void gather_in(u32 to, const Narrow* from, i64 stride, const int* rows, int count) {
    constexpr int OF_WARP = 32 / UNITS;
    const int lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
    const int asked = warp * OF_WARP + lane % OF_WARP + lane / OF_WARP * AT_ONCE;
    const int found = asked < COUNT && asked < count ? rows[asked] : -1;
    from += unit() * 8;
#pragma unroll
    for (int i = 0; i < COUNT / AT_ONCE; i++) {
      const int row = __shfl_sync(0xffffffff, found, i * OF_WARP + lane / UNITS);
      copy(place(to, i), row < 0 ? from : from + row * stride, row < 0 ? 0 : 16);
    }
  }
  // 16 columns from `16 k` on, of the rows from `row` on: what is multiplied along its rows.
  __device__ static u64 columns(u32 tile, int row, int k) {
    return matrix(tile + k / 4 * COLUMNS_BYTES + row * ROW_BYTES + k % 4 * 32);
  }
  // 16 rows from `16 k` on, with all their columns: what is multiplied along its columns.
  __device__ static u64 rows(u32 tile, int k) { return matrix(tile + k * 16 * ROW_BYTES, COLUMNS_BYTES); }

 private:
  // A thread copies 16 bytes of every so manieth row.
  static constexpr int UNITS = D / 8, AT_ONCE = GROUP / UNITS;
  static_assert(AT_ONCE % 8 == 0, "a thread's rows are swizzled alike");
  __device__ static int unit() { return threadIdx.x % UNITS; }
  __device__ static int thread_row() { return threadIdx.x % GROUP / UNITS; }
  __device__ static u32 place(u32 tile, int i) {
    const int row = thread_row();
    return tile + unit() / 8 * COLUMNS_BYTES + (row + i * AT_ONCE) * ROW_BYTES + ((unit() % 8 ^ row % 8) << 4);
  }
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

template <int N>
__device__ inline void to_operand(const float (&c)[N], u32 (&a)[N / 2]) {
#pragma unroll
  for (int i = 0; i < N / 2; i++) a[i] = narrow_pair(c[2 * i], c[2 * i + 1]);
}
// Over the threads that have a row.
template <float (*join)(float, float)>
__device__ inline float over_quad(float x) {
  for (int mask = 1; mask <= 2; mask *= 2) x = join(x, exchange(x, mask));
  return x;
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

// What a block works on: a tile of a sequence, and one head of `heads`. Tokens are numbered from the sequence's first.
struct Work {
  int begin, len, common, head, first;
  const int* rows;
  int own;  // what makes a row of a query

  __device__ Work(const Forward& of, int heads) {
    const Place tile = of.tiles[blockIdx.x / heads];
    head = blockIdx.x % heads;
    first = tile.first;
    begin = of.offsets[tile.sequence];
    len = of.offsets[tile.sequence + 1] - begin;
    const int* queries = of.queries ? of.queries + tile.sequence : of.offsets + tile.sequence;
    common = len - (queries[1] - queries[0]);
    rows = of.rows ? of.rows + begin : nullptr;
    own = queries[0] - common;
  }
  __device__ int row(int token) const { return rows ? rows[token] : begin + token; }
  // The row of a query, or -1 behind the last.
  __device__ int query_row(int token) const { return token < len ? own + token : -1; }
  // Copies a tile of queries of a head, from `token` on, and one of keys or values.
  template <class Tile>
  __device__ void copy_queries(u32 to, Heads from, int head, int token) const {
    Tile::copy_in(to, from.at(own + token, head, Tile::WIDTH), from.stride, len - token);
  }
  template <class Tile>
  __device__ void copy_keys(u32 to, Heads from, int head, int token) const {
    const int left = len - token, count = left < Tile::HEIGHT ? left : Tile::HEIGHT;
    // Rows rise, and mostly one by one.
    const int first = row(token), last = row(token + count - 1);
    if (last - first == count - 1) {
      Tile::copy_in(to, from.at(first, head, Tile::WIDTH), from.stride, count);
    } else {
      Tile::gather_in(to, from.at(0, head, Tile::WIDTH), from.stride, rows + token, count);
    }
  }
  // A group's sums for the tokens from `token` on, to their rows behind `row`.
  template <int N>
  __device__ void store(const float (&c)[N], Heads to, int row, int token, const float (&scale)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int mine = token + own_row() + half * 8;
      if (mine >= len) continue;
      Narrow* at = to.at((i64)row + mine, head, 2 * N) + own_column();
#pragma unroll
      for (int i = half * 2; i < N; i += 4) {
        *(u32*)(at + column_of(i)) = narrow_pair(c[i] * scale[half], c[i + 1] * scale[half]);
      }
    }
  }
};

// The blocks of `KEYS` keys that a tile of queries sees.
template <int KEYS>
struct SeenKeys {
  int first, blocks;

  __device__ SeenKeys(const Work& work, int window) {
    const int end = work.first + TILE < work.len ? work.first + TILE : work.len, seen = work.first - window + 1;
    first = seen > 0 ? seen / KEYS * KEYS : 0;
    blocks = (end - first + KEYS - 1) / KEYS;
  }
};

// Divides a block into those who copy and those who multiply. Its registers are dealt out anew, 40 and 232 a thread of
// the 168 for each that it has: one that asks for more waits for ever.
template <class Task, class Of>
__device__ inline void run(const Of& of) {
  Task task(of);
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

