// Kernels of a decoding step, behind `elements.cuh`: one token of each sequence, over a cache in blocks. They take all
// that changes from one step to the next from the device's memory, so that a recorded step can be run again. Sums run in
// fp32, in an order that depends on a sequence's length alone and not on what shares its batch.

// Where a sequence's tokens lie: block `tables[row, t / block_tokens]`, a power of two of tokens a block.
struct Tables {
  const int* entries;
  int table_len, block_shift, blocks;

  // The place of token `t` of a row; past the row's table, or in a block that is none, it is in block 0, which is
  // nobody's.
  __device__ i64 place(i64 row, i64 t) const {
    const i64 entry = t >> block_shift;
    const u32 block = entry < table_len ? entries[row * table_len + entry] : 0;
    return ((i64)(block < (u32)blocks ? block : 0) << block_shift) + (t & ((1 << block_shift) - 1));
  }
};

// ---- rotation, and into the cache ----

// The widest head; `decode_kernels` has no wider one.
constexpr int MAX_DIM = 128;

// One head of a row a block. Queries and keys are normed where there are weights for it, and rotated; queries stay where
// they are, keys and values go to the cache.
template <typename T>
__device__ inline void rope_into_cache(T* qkv, const T* q_norm, const T* k_norm, float eps, const i64* positions,
                                       const float* table, i64 table_rows, T* keys, T* values, Tables tables,
                                       int heads, int kv_heads, int dim) {
  constexpr int LANES = Pack<T>::LANES;
  const int all = heads + 2 * kv_heads, half = dim / 2, i = threadIdx.x;
  const i64 row = blockIdx.x / all;
  const int head = blockIdx.x % all;
  const bool is_pair = i < half, is_query = head < heads, is_value = head >= heads + kv_heads;
  __shared__ float squares[MAX_DIM];
  T* x = qkv + (row * all + head) * dim;
  const i64 position = positions[row] < table_rows ? positions[row] : table_rows - 1;
  const int pair = is_pair ? i : 0;
  const float cos = table[position * dim + pair], sin = table[position * dim + half + pair];
  take_turn();  // positions are of the step before
  T first = x[0], second = x[0];
  if (is_pair) first = x[i], second = x[half + i];
  if (!is_value) {
    if (const T* norm = is_query ? q_norm : k_norm) {
      const float a = widen(first), b = widen(second);
      if (is_pair) squares[i] = a * a, squares[half + i] = b * b;
      __syncthreads();
      // In the order of `rms_norm` in `model.cu`, a pack a thread, so that training's norms have the same bits.
      float sum = 0;
      if (i < dim / LANES)
        for (int k = 0; k < LANES; k++) sum += squares[i * LANES + k];
      const float scale = 1 / sqrtf(over_block<add>(sum) / dim + eps);
      if (is_pair) narrow(a * scale * widen(norm[i]), first), narrow(b * scale * widen(norm[half + i]), second);
    }
    if (is_pair) {
      const float a = widen(first), b = widen(second);
      narrow(a * cos - b * sin, first);
      narrow(b * cos + a * sin, second);
    }
  }
  if (!is_pair) return;
  if (!is_query) {
    const int kv_head = (head - heads) % kv_heads;
    x = (is_value ? values : keys) + (tables.place(row, positions[row]) * kv_heads + kv_head) * dim;
  }
  x[i] = first, x[half + i] = second;
}

// ---- attention over the cache ----

// Tokens that one block goes through: how a sequence is split depends on its length alone.
constexpr int SPLIT_TOKENS = 512;
// Parts begin at multiples of it, and it divides the tokens of a block of the cache.
constexpr int RUN_TOKENS = 16;
// Threads of a block. A narrow head's token has few, so that many of them would have few tokens each to join.
template <int DIM>
constexpr int ATTENTION_THREADS = DIM < 64 ? 128 : 256;
// Tokens that a thread has in flight; they lie in one block of the cache.
constexpr int IN_FLIGHT = 4;
// Elements of a head that a thread holds.
constexpr int ELEMENTS = 8;

// The queries of a row are dense, rows lie `stride` elements apart.
template <typename T>
struct Queries {
  const T* data;
  i64 stride;

  __device__ const T* at(i64 row, i64 element) const { return data + row * stride + element; }
};

template <typename T>
__device__ inline void load_elements(const T* from, float (&to)[ELEMENTS]) {
  constexpr int LANES = Pack<T>::LANES;
  for (int part = 0; part < ELEMENTS / LANES; part++) {
    const Pack<T> pack = ((const Pack<T>*)from)[part];
    for (int k = 0; k < LANES; k++) to[part * LANES + k] = widen(pack.lane[k]);
  }
}

// The first of `length` tokens that a sequence's last one sees.
__device__ inline int first_seen(int length, int window) { return length > window ? length - window : 0; }

// What a block is for: up to HEADS query heads of one key head, over one split of one row, of whose tokens the last
// `window` count.
template <int HEADS>
struct Part {
  // The first of `count` heads, and the tokens from `begin` on, of which those before `seen` are not seen.
  int row, kv_head, head, count, split, seen, begin, end;

  __device__ Part(const i64* positions, int window, int rows, int heads, int kv_heads) {
    const int group = heads / kv_heads, tiles = (group + HEADS - 1) / HEADS;
    row = blockIdx.x % rows, kv_head = blockIdx.x / rows % kv_heads;
    const int tile = blockIdx.x / rows / kv_heads % tiles;
    split = blockIdx.x / rows / kv_heads / tiles;
    head = kv_head * group + tile * HEADS;
    count = group - tile * HEADS < HEADS ? group - tile * HEADS : HEADS;
    const int length = (int)positions[row] + 1, first_token = split * SPLIT_TOKENS;
    seen = first_seen(length, window);
    begin = first_token < seen ? seen / RUN_TOKENS * RUN_TOKENS : first_token;
    end = length < first_token + SPLIT_TOKENS ? length : first_token + SPLIT_TOKENS;
  }

  __device__ bool is_empty() const { return begin >= end; }
};

// Where attention goes: to `out` [rows, heads, dim] if there is one split, else in parts that `join_splits` joins.
// `partial` [splits, rows, heads, dim] gets the weighted sums of values, `softmax` [splits, rows, heads, 2] the largest
// score and the sum of weights. `lse` [rows, heads] gets log(sum(exp(score))), if it is wanted.
template <typename T>
struct Attended {
  float *partial, *softmax, *lse;
  T* out;
  int splits, rows, heads;

  __device__ i64 place(int split, int row, int head) const { return ((i64)split * rows + row) * heads + head; }
  __device__ void put_value(i64 place, int dim, int i, float value, float whole) const {
    if (splits == 1) {
      narrow(value / whole, out[place * dim + i]);
    } else {
      partial[place * dim + i] = value;
    }
  }
  __device__ void put_softmax(i64 place, float largest, float whole) const {
    if (splits > 1) {
      softmax[place * 2] = largest, softmax[place * 2 + 1] = whole;
    } else if (lse) {
      lse[place] = largest + logf(whole);
    }
  }
};

// DIM / 8 threads share a token, so that a block goes through `SUBS` runs of tokens side by side, each with a softmax of
// its own; they are joined at the end, in order.
template <int DIM, int HEADS, typename T>
__device__ inline void attend(Queries<T> queries, const T* keys, const T* values, Tables tables, const i64* positions,
                              float scale, int window, Attended<T> attended, int kv_heads) {
  constexpr int THREADS = ATTENTION_THREADS<DIM>, SHARERS = DIM / ELEMENTS, SUBS = THREADS / SHARERS;
  __shared__ float of_max[SUBS][HEADS], of_sum[SUBS][HEADS], of_values[SUBS][DIM];
  const int heads = attended.heads;
  const Part<HEADS> part(positions, window, attended.rows, heads, kv_heads);
  take_turn();
  if (part.is_empty()) return;
  const int row = part.row, count = part.count, seen = part.seen, end = part.end;
  const int lane = threadIdx.x % SHARERS, sub = threadIdx.x / SHARERS;
  const i64 stride = (i64)kv_heads * DIM, column = part.kv_head * DIM + lane * ELEMENTS;

  float query[HEADS][ELEMENTS], sums[HEADS][ELEMENTS] = {}, max[HEADS], sum[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    max[h] = -INFINITE, sum[h] = 0;
    const int of = part.head + (h < count ? h : 0);
    load_elements(queries.at(row, of * DIM + lane * ELEMENTS), query[h]);
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++) query[h][k] *= scale;
  }

  // All threads go around equally often, since they exchange values.
  for (int base = part.begin; base < end; base += SUBS * IN_FLIGHT) {
    const int first = base + sub * IN_FLIGHT;
    const i64 place = tables.place(row, first < end ? first : part.begin);
    float key[IN_FLIGHT][ELEMENTS] = {}, value[IN_FLIGHT][ELEMENTS] = {};
#pragma unroll
    for (int u = 0; u < IN_FLIGHT; u++) {
      if (first + u >= end) continue;
      load_elements(keys + (place + u) * stride + column, key[u]);
      load_elements(values + (place + u) * stride + column, value[u]);
    }
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      if (h >= count) continue;
      float score[IN_FLIGHT], largest = max[h];
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; u++) {
        float dot = 0;
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) dot = fmaf(query[h][k], key[u][k], dot);
#pragma unroll
        for (int mask = SHARERS / 2; mask > 0; mask /= 2) dot += exchange(dot, mask);
        score[u] = first + u < end && first + u >= seen ? dot : -INFINITE;
        largest = larger(largest, score[u]);
      }
      const float origin = largest == -INFINITE ? 0 : largest, kept = __expf(max[h] - origin);
      max[h] = largest;
      sum[h] *= kept;
#pragma unroll
      for (int k = 0; k < ELEMENTS; k++) sums[h][k] *= kept;
#pragma unroll
      for (int u = 0; u < IN_FLIGHT; u++) {
        const float weight = __expf(score[u] - origin);
        sum[h] += weight;
#pragma unroll
        for (int k = 0; k < ELEMENTS; k++) sums[h][k] = fmaf(weight, value[u][k], sums[h][k]);
      }
    }
  }

#pragma unroll
  for (int h = 0; h < HEADS; h++)
    if (lane == 0) of_max[sub][h] = max[h], of_sum[sub][h] = sum[h];
  __syncthreads();
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (h >= count) continue;
    float largest = of_max[0][h], whole = 0;
    for (int s = 1; s < SUBS; s++) largest = larger(largest, of_max[s][h]);
    for (int s = 0; s < SUBS; s++) whole += of_sum[s][h] * __expf(of_max[s][h] - largest);
    const float kept = __expf(max[h] - largest);
#pragma unroll
    for (int k = 0; k < ELEMENTS; k++) of_values[sub][lane * ELEMENTS + k] = sums[h][k] * kept;
    __syncthreads();
    const i64 place = attended.place(part.split, row, part.head + h);
    for (int i = threadIdx.x; i < DIM; i += THREADS) {
      float joined = 0;
      for (int s = 0; s < SUBS; s++) joined += of_values[s][i];
      attended.put_value(place, DIM, i, joined, whole);
    }
    if (threadIdx.x == 0) attended.put_softmax(place, largest, whole);
    __syncthreads();
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
#define HAS_MATRIX_UNITS 1

// c += a b for 16 x 16 and 16 x 8 bf16 values: thread `lane` has rows lane / 4 and 8 below it of a and c, columns
// 2 (lane % 4) and the next (and 8 behind them in a), and of b column lane / 4 and the rows that are a's columns.
__device__ inline void multiply(float (&c)[4], u32 a, u32 a_below, u32 a_behind, u32 a_last, u32 b, u32 b_behind) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a), "r"(a_below), "r"(a_behind), "r"(a_last), "r"(b), "r"(b_behind));
}

// The transpose of 8 x 8 values of 16 bits, of which a thread has row lane / 4, columns 2 (lane % 4) and the next.
__device__ inline u32 transposed(float first, float second) {
  Bf16 low, high;
  narrow(first, low), narrow(second, high);
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(low.bits | (u32)high.bits << 16));
  return out;
}

struct alignas(16) Words {
  u32 word[4];
};

// The same as `attend` on matrix units, in bf16. A warp takes 16 tokens at a time, which lie in one block of the cache,
// and multiplies from the cache's side, keys by queries and values, transposed, by weights: the 8 columns are the query
// heads, at most, of a key head. The order of a product's terms is free, so that each thread reads 16 bytes in a row: of
// keys, the elements 8 (lane % 4) and on of each 32 for tokens lane / 4 and 8 on; of values, 8 (lane / 4) and on of each
// 64 for the tokens whose weights it has. The next keys are on their way while values are summed.
template <int DIM, int HEADS>
__device__ inline void attend_matrix(Queries<Bf16> queries, const Bf16* keys, const Bf16* values, Tables tables,
                                     const i64* positions, float scale, int window, Attended<Bf16> attended,
                                     int kv_heads) {
  constexpr int THREADS = ATTENTION_THREADS<DIM>, WARPS = THREADS / 32, COLUMNS = 8;
  __shared__ float of_max[WARPS][COLUMNS], of_sum[WARPS][COLUMNS], of_all[COLUMNS], of_values[WARPS][COLUMNS][DIM];
  const int heads = attended.heads;
  const Part<HEADS> part(positions, window, attended.rows, heads, kv_heads);
  if (part.is_empty()) return take_turn();
  const int row = part.row, count = part.count, seen = part.seen, begin = part.begin, end = part.end;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, over = lane / 4, within = lane % 4;
  const i64 stride = (i64)kv_heads * DIM;
  const Bf16 *of_keys = keys + part.kv_head * DIM + within * 8, *of_head = values + part.kv_head * DIM + over * 8;

  Words query[DIM / 32] = {}, key[2][DIM / 32];
  const auto read_keys = [&](i64 place) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < DIM / 32; i++)
        key[half][i] = *(const Words*)(of_keys + (place + half * 8 + over) * stride + i * 32);
  };
  // Of heads 2 `within` and the next, whose columns this thread has.
  float sums[DIM / 16][4] = {}, max[2] = {-INFINITE, -INFINITE}, sum[2] = {};
  int run = begin + warp * RUN_TOKENS;
  i64 place = tables.place(row, run < end ? run : begin);
  // In a step of decoding all tokens but the last one are of steps before, so that their keys need not wait for this one's.
  // Elsewhere the kernel is not started early.
  const bool is_old = run + RUN_TOKENS <= positions[row];
  if (!is_old) take_turn();
  read_keys(place);
  if (is_old) take_turn();
  if (over < count) {
    const Bf16* from = queries.at(row, (part.head + over) * DIM + within * 8);
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) query[i] = *(const Words*)(from + i * 32);
  }
  while (run < end) {
    Words value[4][DIM / 64] = {};
#pragma unroll
    for (int t = 0; t < 4; t++) {
      const int token = t / 2 * 8 + within * 2 + t % 2;
      if (run + token >= end) continue;  // what was never written may be NaN
#pragma unroll
      for (int i = 0; i < DIM / 64; i++)
        value[t][i] = *(const Words*)(of_head + (place + token) * stride + i * 64);
    }
    const int next = run + WARPS * RUN_TOKENS;
    if (next < end) place = tables.place(row, next);
    float score[4] = {};
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
      const u32 *q = query[i].word, *k = key[0][i].word, *below = key[1][i].word;
      multiply(score, k[0], below[0], k[1], below[1], q[0], q[1]);
      multiply(score, k[2], below[2], k[3], below[3], q[2], q[3]);
    }
    if (next < end) read_keys(place);
    float kept[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int token = run + half * 8 + over;
        const bool is_seen = token < end && token >= seen;
        score[half * 2 + h] = is_seen ? score[half * 2 + h] * scale : -INFINITE;
      }
      float largest = larger(max[h], larger(score[h], score[2 + h]));
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) largest = larger(largest, exchange(largest, mask));
      // A run has a token that is seen, so `largest` is finite.
      kept[h] = __expf(max[h] - largest);
      max[h] = largest;
      score[h] = __expf(score[h] - largest), score[2 + h] = __expf(score[2 + h] - largest);
      sum[h] = sum[h] * kept[h] + score[h] + score[2 + h];
    }
    const u32 weight = transposed(score[0], score[1]), weight_behind = transposed(score[2], score[3]);
#pragma unroll
    for (int pair = 0; pair < DIM / 16; pair++) {
      const int i = pair / 4, word = pair % 4;
      const u32 first = value[0][i].word[word], second = value[1][i].word[word];
      const u32 third = value[2][i].word[word], fourth = value[3][i].word[word];
#pragma unroll
      for (int k = 0; k < 4; k++) sums[pair][k] *= kept[k % 2];
      // Two elements of a head, as rows `over` and 8 below.
      multiply(sums[pair], __byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632),
               __byte_perm(third, fourth, 0x5410), __byte_perm(third, fourth, 0x7632), weight, weight_behind);
    }
    run = next;
  }

#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sum[h] += exchange(sum[h], mask);
    if (over == 0) of_max[warp][within * 2 + h] = max[h], of_sum[warp][within * 2 + h] = sum[h];
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int column = within * 2 + h;
    float largest = of_max[0][column];
    for (int w = 1; w < WARPS; w++) largest = larger(largest, of_max[w][column]);
    const float kept = __expf(max[h] - largest);
#pragma unroll
    for (int pair = 0; pair < DIM / 16; pair++)
#pragma unroll
      for (int k = 0; k < 2; k++)
        of_values[warp][column][pair / 4 * 64 + over * 8 + pair % 4 * 2 + k] = sums[pair][k * 2 + h] * kept;
  }
  if (threadIdx.x < count) {
    float most = of_max[0][threadIdx.x], whole = 0;
    for (int w = 1; w < WARPS; w++) most = larger(most, of_max[w][threadIdx.x]);
    for (int w = 0; w < WARPS; w++) whole += of_sum[w][threadIdx.x] * __expf(of_max[w][threadIdx.x] - most);
    of_all[threadIdx.x] = whole;
    attended.put_softmax(attended.place(part.split, row, part.head + threadIdx.x), most, whole);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * DIM; i += THREADS) {
    const int h = i / DIM;
    float joined = 0;
    for (int w = 0; w < WARPS; w++) joined += of_values[w][h][i % DIM];
    attended.put_value(attended.place(part.split, row, part.head + h), DIM, i % DIM, joined, of_all[h]);
  }
}
#endif

// Joins the splits of one head of a row a block, one element a thread: `out` [rows, heads, dim].
template <typename T>
__device__ inline void join_splits(const Attended<T>& of, const i64* positions, int window, int dim) {
  const float *partial = of.partial, *softmax = of.softmax;
  const int heads = of.heads;
  const i64 head = blockIdx.x, all = (i64)of.rows * heads, last = positions[head / heads] / SPLIT_TOKENS;
  const int first = first_seen((int)positions[head / heads] + 1, window) / SPLIT_TOKENS;
  const int splits = last < of.splits ? (int)last + 1 : of.splits;
  float largest = -INFINITE, whole = 0, joined = 0;
  for (int s = first; s < splits; s++) largest = larger(largest, softmax[(s * all + head) * 2]);
  for (int s = first; s < splits; s++) {
    const i64 at = s * all + head;
    const float kept = __expf(softmax[at * 2] - largest);
    whole += softmax[at * 2 + 1] * kept;
    joined = fmaf(partial[at * dim + threadIdx.x], kept, joined);
  }
  narrow(joined / whole, of.out[head * dim + threadIdx.x]);
  if (of.lse && threadIdx.x == 0) of.lse[head] = largest + logf(whole);
}

// ---- entries ----

#define KERNELS(T, suffix)                                                                                             \
  extern "C" __global__ void rope_into_cache_##suffix(                                                                 \
      T* qkv, const T* q_norm, const T* k_norm, float eps, const i64* positions, const float* table, i64 table_rows,   \
      T* keys, T* values, Tables tables, int heads, int kv_heads, int dim) {                                           \
    rope_into_cache(qkv, q_norm, k_norm, eps, positions, table, table_rows, keys, values, tables, heads, kv_heads,     \
                    dim);                                                                                              \
  }                                                                                                                    \
  extern "C" __global__ void join_splits_##suffix(Attended<T> of, const i64* positions, int window, int dim) {         \
    take_turn();                                                                                                       \
    join_splits(of, positions, window, dim);                                                                           \
  }
KERNELS(float, f32)
KERNELS(Bf16, bf16)

// With at least BLOCKS blocks on a multiprocessor.
#define ATTENTION(T, suffix, DIM, HEADS, attend, BLOCKS)                                                               \
  extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS<DIM>, BLOCKS) attend_##suffix##_##DIM##_##HEADS(      \
      Queries<T> queries, const T* keys, const T* values, Tables tables, const i64* positions, float scale,            \
      int window, Attended<T> attended, int kv_heads) {                                                                \
    attend<DIM, HEADS>(queries, keys, values, tables, positions, scale, window, attended, kv_heads);                   \
  }
ATTENTION(float, f32, 16, 4, attend, 1)
ATTENTION(float, f32, 32, 4, attend, 1)
ATTENTION(float, f32, 64, 4, attend, 1)
ATTENTION(float, f32, 64, 8, attend, 1)
ATTENTION(float, f32, 128, 4, attend, 1)
ATTENTION(float, f32, 128, 8, attend, 1)
// Too narrow for matrix units.
ATTENTION(Bf16, bf16, 16, 4, attend, 1)
ATTENTION(Bf16, bf16, 32, 4, attend, 1)
#ifdef HAS_MATRIX_UNITS
ATTENTION(Bf16, bf16, 64, 4, attend_matrix, 2)
ATTENTION(Bf16, bf16, 64, 8, attend_matrix, 2)
ATTENTION(Bf16, bf16, 128, 4, attend_matrix, 2)
ATTENTION(Bf16, bf16, 128, 8, attend_matrix, 2)
#else
ATTENTION(Bf16, bf16, 64, 4, attend, 1)
ATTENTION(Bf16, bf16, 64, 8, attend, 1)
ATTENTION(Bf16, bf16, 128, 4, attend, 1)
ATTENTION(Bf16, bf16, 128, 8, attend, 1)
#endif
