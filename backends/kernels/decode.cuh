// Attention of a decoding step, behind `elements.cuh` and `block.cuh`: one token of each sequence, over a cache in blocks.
// Kernels take all that changes from one step to the next from the device's memory, so that a recorded step can be run
// again. Sums run in fp32, in an order that depends on a sequence's length alone and not on what shares its batch.

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

// ---- parts ----

// Tokens that one block goes through: how a sequence is split depends on its length alone.
constexpr int SPLIT_TOKENS = 512;
// Parts begin at multiples of it, and it divides the tokens of a block of the cache.
constexpr int RUN_TOKENS = 16;
// Threads of a block. A narrow head's token has few, so that many of them would have few tokens each to join.
template <int DIM>
constexpr int ATTENTION_THREADS = DIM < 64 ? 128 : 256;

// The queries of a row are dense, rows lie `stride` elements apart.
template <typename T>
struct Queries {
  const T* data;
  i64 stride;

  __device__ const T* at(i64 row, i64 element) const { return data + row * stride + element; }
};

// What is done with a step's own rows, which have keys and values behind their queries: queries and keys are normed where
// there are weights for it, and rotated; keys and values go to the cache. Without a `table` queries are as attention takes
// them, and the cache has all keys.
template <typename T>
struct Rotation {
  const T *q_norm, *k_norm;
  const float* table;  // [table_rows, turned]: cosines and sines
  i64 table_rows;
  float eps;
  int turned;  // elements of a head, the first ones, most often all

  __device__ const float* at(i64 position) const {
    return table + (position < table_rows ? position : table_rows - 1) * turned;
  }
};

// The first of `length` tokens that a sequence's last one sees.
__device__ inline int first_seen(int length, int window) { return length > window ? length - window : 0; }

// What a block is for: up to HEADS query heads of one key head, over one split of one row, of whose tokens the last
// `window` count.
template <int HEADS>
struct Part {
  // The first of `count` heads, and the tokens from `begin` on, of which those before `seen` are not seen, the row's last
  // one among them or not.
  int row, kv_head, head, count, split, seen, begin, end;
  bool has_last;

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
    has_last = end == length;
  }

  __device__ bool is_empty() const { return begin >= end; }
};

// What a block has of its row in shared memory: the queries of its heads, and the row's own key and value.
template <int DIM, int HEADS, typename T>
struct alignas(16) Own {
  T queries[HEADS][DIM], key[DIM], value[DIM];
};

// The inverse norm of a head by 32 threads, all of which take part; 1 without norms.
template <int DIM, typename T>
__device__ inline float norm_scale(const T* x, const Rotation<T>& how, int lane) {
  if (!how.q_norm) return 1;
  constexpr int LANES = Pack<T>::LANES;
  // In the order of `rms_norm` in `model.cu`, a pack a thread, so that training's norms have the same bits.
  float sum = 0;
  if (lane < DIM / LANES) {
    const Pack<T> pack = ((const Pack<T>*)x)[lane];
    for (int k = 0; k < LANES; k++) sum += widen(pack.lane[k]) * widen(pack.lane[k]);
  }
  return 1 / sqrtf(over_neighbours<add>(sum, 32) / DIM + how.eps);
}

// Norms a head with `scale` and the weights `norm`, if there are any, and rotates it, unless it is a value, by 32 threads: to
// `to`, which may be the head itself, and to `cached`, if that is somewhere.
template <int DIM, typename T>
__device__ inline void turn_head(const T* x, const T* norm, float scale, const Rotation<T>& how, i64 position,
                                 bool is_value, int lane, T* to, T* cached) {
  constexpr int HALF = DIM / 2;
  const float* table = how.at(position);
  const int turned = how.table ? how.turned / 2 : HALF;
  for (int at = lane; at < HALF; at += 32) {
    // Pairs that are turned lie in front of the others.
    const bool is_turned = at < turned;
    const int left = is_turned ? at : turned + at, right = is_turned ? turned + at : HALF + at;
    T first = x[left], second = x[right];
    if (norm) {
      narrow(widen(first) * scale * widen(norm[left]), first);
      narrow(widen(second) * scale * widen(norm[right]), second);
    }
    if (how.table && is_turned && !is_value) {
      const float a = widen(first), b = widen(second), cos = table[left], sin = table[right];
      narrow(a * cos - b * sin, first);
      narrow(b * cos + a * sin, second);
    }
    to[left] = first, to[right] = second;
    if (cached) cached[left] = first, cached[right] = second;
  }
}

// Takes them, 32 threads a head; in a part with the last token its key and value go to the cache as well, where blocks with
// other heads of the same key head write the same. All threads go around equally often, since they exchange values.
template <int DIM, int HEADS, typename T>
__device__ inline void take_own(Own<DIM, HEADS, T>& own, const Part<HEADS>& part, Queries<T> rows,
                                const Rotation<T>& how, i64 position, T* key, T* value, int heads, int kv_heads) {
  const int lane = threadIdx.x % 32, all = part.count + (how.table && part.has_last ? 2 : 0);
  for (int base = 0; base < all; base += blockDim.x / 32) {
    const int i = base + threadIdx.x / 32;
    const bool is_there = i < all, is_query = i < part.count, is_value = i > part.count;
    const int head = is_query ? part.head + i : heads + (is_value ? kv_heads : 0) + part.kv_head;
    const T* x = rows.at(part.row, is_there ? head * DIM : 0);
    const T* norm = is_query ? how.q_norm : is_value ? nullptr : how.k_norm;
    const float scale = norm_scale<DIM>(x, how, lane);
    if (!is_there) continue;
    T* const to = is_query ? own.queries[i] : is_value ? own.value : own.key;
    T* const cached = is_query ? nullptr : is_value ? value : key;
    turn_head<DIM>(x, norm, scale, how, position, is_value, lane, to, cached);
  }
  __syncthreads();
}

// Norms and rotates the queries and keys of a step's rows where they lie, 32 threads a head, and puts keys and values into
// the cache: in front of attention without a table, where rows of one sequence see each other's keys.
template <int DIM, typename T>
__device__ inline void turn_rows(Queries<T> queries, const Rotation<T>& how, T* keys, T* values, Tables tables,
                                 const i64* positions, int rows, int heads, int kv_heads) {
  const int lane = threadIdx.x % 32, all = heads + 2 * kv_heads;
  const i64 i = blockIdx.x * (i64)(blockDim.x / 32) + threadIdx.x / 32, row = i / all;
  if (row >= rows) return;
  const int head = i % all, kv_head = (head - heads) % kv_heads;
  const bool is_query = head < heads, is_value = head >= heads + kv_heads;
  T* const x = (T*)queries.at(row, head * DIM);
  const T* norm = is_query ? how.q_norm : is_value ? nullptr : how.k_norm;
  const i64 position = positions[row], place = (tables.place(row, position) * kv_heads + kv_head) * DIM;
  T* const cached = is_query ? nullptr : (is_value ? values : keys) + place;
  turn_head<DIM>(x, norm, norm_scale<DIM>(x, how, lane), how, position, is_value, lane, x, cached);
}

#define TURN_ROWS(T, name, DIM)                                                                                        \
  extern "C" __global__ void name(Queries<T> queries, Rotation<T> how, T* keys, T* values, Tables tables,              \
                                  const i64* positions, int rows, int heads, int kv_heads) {                           \
    take_turn();                                                                                                       \
    turn_rows<DIM>(queries, how, keys, values, tables, positions, rows, heads, kv_heads);                              \
  }

// Where attention goes: to `out` [rows, heads, dim] if there is one split, else in parts that `join_splits` joins.
// `partial` [splits, rows, heads, dim] gets the weighted sums of values, `softmax` [splits, rows, heads, 2] the largest
// score and the sum of weights. `lse` [rows, heads] gets log(sum(exp(score))), if it is wanted.
template <typename T>
struct Attended {
  float *partial, *softmax, *lse;
  T* out;
  int splits, rows, heads;

  __device__ i64 place(int split, int row, int head) const { return ((i64)split * rows + row) * heads + head; }
  // Neighbouring values from `i` on.
  template <int N>
  __device__ void put_values(i64 place, int dim, int i, const Pack<float, N>& values, float whole) const {
    if (splits > 1) {
      *(Pack<float, N>*)(partial + place * dim + i) = values;
      return;
    }
    Pack<T, N> narrowed;
    for (int k = 0; k < N; k++) narrow(values.lane[k] / whole, narrowed.lane[k]);
    *(Pack<T, N>*)(out + place * dim + i) = narrowed;
  }
  __device__ void put_softmax(i64 place, float largest, float whole) const {
    if (splits > 1) {
      softmax[place * 2] = largest, softmax[place * 2 + 1] = whole;
    } else if (lse) {
      lse[place] = largest + logf(whole);
    }
  }
};

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

#define JOIN(T, name)                                                                                                  \
  extern "C" __global__ void name(Attended<T> of, const i64* positions, int window, int dim) {                         \
    take_turn();                                                                                                       \
    join_splits(of, positions, window, dim);                                                                           \
  }
