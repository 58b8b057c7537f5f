// Attention of a decoding step for any device, behind `decode.cuh`.

// Tokens that a thread has in flight; they lie in one block of the cache.
constexpr int IN_FLIGHT = 4;
// Elements of a head that a thread holds.
constexpr int ELEMENTS = 8;

template <typename T>
__device__ inline void load_elements(const T* from, float (&to)[ELEMENTS]) {
  constexpr int LANES = Pack<T>::LANES;
  for (int part = 0; part < ELEMENTS / LANES; part++) {
    const Pack<T> pack = ((const Pack<T>*)from)[part];
    for (int k = 0; k < LANES; k++) to[part * LANES + k] = widen(pack.lane[k]);
  }
}

// DIM / 8 threads share a token, so that a block goes through `SUBS` runs of tokens side by side, each with a softmax of
// its own; they are joined at the end, in order.
template <int DIM, int HEADS, typename T>
__device__ inline void attend(Queries<T> queries, const Rotation<T>& rotation, T* keys, T* values, Tables tables,
                              const i64* positions, float scale, int window, Attended<T> attended, int kv_heads) {
  constexpr int THREADS = ATTENTION_THREADS<DIM>, SHARERS = DIM / ELEMENTS, SUBS = THREADS / SHARERS;
  __shared__ float of_max[SUBS][HEADS], of_sum[SUBS][HEADS], of_values[SUBS][DIM];
  __shared__ Own<DIM, HEADS, T> own;
  const int heads = attended.heads;
  const Part<HEADS> part(positions, window, attended.rows, heads, kv_heads);
  take_turn();
  if (part.is_empty()) return;
  const int row = part.row, count = part.count, seen = part.seen, end = part.end;
  const int lane = threadIdx.x % SHARERS, sub = threadIdx.x / SHARERS;
  const i64 stride = (i64)kv_heads * DIM, column = part.kv_head * DIM + lane * ELEMENTS;
  const i64 position = positions[row], last = tables.place(row, position) * stride + part.kv_head * DIM;
  take_own(own, part, queries, rotation, position, keys + last, values + last, heads, kv_heads);

  float query[HEADS][ELEMENTS], sums[HEADS][ELEMENTS] = {}, max[HEADS], sum[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    max[h] = -INFINITE, sum[h] = 0;
    load_elements(own.queries[h < count ? h : 0] + lane * ELEMENTS, query[h]);
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
        dot = over_neighbours<add>(dot, SHARERS);
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
      attended.put_values(place, DIM, i, Pack<float, 1>{joined}, whole);
    }
    if (threadIdx.x == 0) attended.put_softmax(place, largest, whole);
    __syncthreads();
  }
}

// ---- entries ----

#define ATTENTION(T, suffix, DIM, HEADS)                                                                               \
  extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS<DIM>) attend_##DIM##_##HEADS##_##suffix(              \
      Queries<T> queries, Rotation<T> rotation, T* keys, T* values, Tables tables, const i64* positions, float scale,  \
      int window, Attended<T> attended, int kv_heads) {                                                                \
    attend<DIM, HEADS>(queries, rotation, keys, values, tables, positions, scale, window, attended, kv_heads);         \
  }
// Of one type, which whoever compiles this names behind it: compiling both takes twice as long.
#define KERNELS(T, suffix)                                                                                             \
  ATTENTION(T, suffix, 16, 4)                                                                                          \
  ATTENTION(T, suffix, 32, 4)                                                                                          \
  ATTENTION(T, suffix, 64, 4)                                                                                          \
  ATTENTION(T, suffix, 64, 8)                                                                                          \
  ATTENTION(T, suffix, 128, 4)                                                                                         \
  ATTENTION(T, suffix, 128, 8)                                                                                         \
  TURN_ROWS(T, turn_rows_16_##suffix, 16)                                                                              \
  TURN_ROWS(T, turn_rows_32_##suffix, 32)                                                                              \
  TURN_ROWS(T, turn_rows_64_##suffix, 64)                                                                              \
  TURN_ROWS(T, turn_rows_128_##suffix, 128)                                                                            \
  JOIN(T, join_splits_##suffix)
