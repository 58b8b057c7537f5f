// The same as `decode.cu` on matrix units, in 16 bits, behind `decode.cuh`: for NVIDIA's compute capability 8.0 and later.

// c += a b for 16 x 16 and 16 x 8 values: thread `lane` has rows lane / 4 and 8 below it of a and c, columns
// 2 (lane % 4) and the next (and 8 behind them in a), and of b column lane / 4 and the rows that are a's columns.
__device__ inline void multiply(float (&c)[4], u32 a, u32 a_below, u32 a_behind, u32 a_last, u32 b, u32 b_behind) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." NARROW "." NARROW
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a), "r"(a_below), "r"(a_behind), "r"(a_last), "r"(b), "r"(b_behind));
}

// The transpose of 8 x 8 values of 16 bits, of which a thread has row lane / 4, columns 2 (lane % 4) and the next.
__device__ inline u32 transposed(float first, float second) {
  Narrow low, high;
  narrow(first, low), narrow(second, high);
  u32 out;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(low.bits | (u32)high.bits << 16));
  return out;
}

struct alignas(16) Words {
  u32 word[4];
};

// 16 bytes into shared memory, of which those past the first so many are zeros.
__device__ inline void copy(void* to, const void* from, int bytes) {
  const u32 at = (u32)__cvta_generic_to_shared(to);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}

// Query heads of a block, at most.
constexpr int COLUMNS = 8;
// Runs of keys and of values that a warp has in shared memory, as many as leave room for a second block.
template <int DIM>
constexpr int SLOTS = DIM < 128 ? 6 : 3;

// A run's keys, or its values, in units of 16 bytes, placed so that those that are read together have banks of their own.
template <int DIM>
struct Run {
  Words unit[RUN_TOKENS][DIM / 8];

  __device__ Words& of_keys(int token, int i) { return unit[token][i ^ token % 2 * 4]; }
  __device__ Words& of_values(int token, int i) { return unit[token][i ^ token / 2 % 4 * 2]; }
};

// The same as `attend` on matrix units, in 16 bits. A warp takes 16 tokens at a time, which lie in one block of the cache,
// and multiplies from the cache's side, keys by queries and values, transposed, by weights: the 8 columns are the query
// heads, at most, of a key head. The order of a product's terms is free, so that each thread reads 16 bytes in a row: of
// keys, the elements 8 (lane % 4) and on of each 32 for tokens lane / 4 and 8 on; of values, 8 (lane / 4) and on of each
// 64 for the tokens whose weights it has.
//
// All tokens but a step's own were written by steps before, so that the first runs are on their way before the kernel's
// turn; its own comes from its rows.
template <int DIM>
__device__ inline void attend_matrix(Queries<Narrow> queries, const Rotation<Narrow>& rotation, Narrow* keys,
                                     Narrow* values, Tables tables, const i64* positions, float scale, int window,
                                     Attended<Narrow> attended, int kv_heads) {
  constexpr int THREADS = ATTENTION_THREADS<DIM>, WARPS = THREADS / 32;
  constexpr int RUNS = SPLIT_TOKENS / RUN_TOKENS / WARPS, UNITS = DIM / 8, AT_ONCE = 32 / UNITS;
  static_assert(WARPS * SLOTS<DIM> * sizeof(Run<DIM>) == 98304, "what the launch gives");
  extern __shared__ __align__(16) char shared[];
  __shared__ float of_max[WARPS][COLUMNS], of_sum[WARPS][COLUMNS];
  __shared__ Own<DIM, COLUMNS, Narrow> own;
  const int heads = attended.heads;
  const Part<COLUMNS> part(positions, window, attended.rows, heads, kv_heads);
  if (part.is_empty()) return;
  const int row = part.row, count = part.count, seen = part.seen, begin = part.begin, end = part.end;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, over = lane / 4, within = lane % 4;
  const i64 stride = (i64)kv_heads * DIM, column = part.kv_head * DIM, position = positions[row];
  Run<DIM>* const slots = (Run<DIM>*)shared + warp * SLOTS<DIM>;

  i64 places[RUNS];
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int run = begin + (r * WARPS + warp) * RUN_TOKENS;
    places[r] = tables.place(row, run < end ? run : begin) * stride + column;
  }
  // The token that is not in the cache yet, if this part has it.
  const int own_token = rotation.table && part.has_last ? end - 1 : -1;
  // Keys and values of the warp's runs in turn, each a group of copies, of which SLOTS are on their way.
  const auto copy_run = [&](int i) {
    const int r = i / 2, run = begin + (r * WARPS + warp) * RUN_TOKENS;
    if (r < RUNS && run < end) {
      const Narrow* from = (i % 2 ? values : keys) + places[r];
      Run<DIM>& slot = slots[i % SLOTS<DIM>];
#pragma unroll
      for (int j = 0; j < RUN_TOKENS; j += AT_ONCE) {
        const int token = j + lane / UNITS, unit = lane % UNITS;
        // What was never written may be NaN.
        if (run + token != own_token)
          copy(i % 2 ? &slot.of_values(token, unit) : &slot.of_keys(token, unit), from + token * stride + unit * 8,
               run + token < end ? 16 : 0);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  const auto await_run = [&](int r, const Narrow* from, bool of_values, Run<DIM>& slot) {
    asm volatile("cp.async.wait_group %0;" ::"n"(SLOTS<DIM> - 1) : "memory");
    const int token = own_token - (begin + (r * WARPS + warp) * RUN_TOKENS);
    if (token >= 0 && token < RUN_TOKENS && lane < UNITS)
      (of_values ? slot.of_values(token, lane) : slot.of_keys(token, lane)) = ((const Words*)from)[lane];
    __syncwarp();
  };
#pragma unroll
  for (int i = 0; i < SLOTS<DIM>; i++) copy_run(i);
  const i64 last = tables.place(row, position) * stride + column;
  // Wanted soon, and not in the cache: weights have gone through it since the layer before.
  if (rotation.table && threadIdx.x * 32 < rotation.turned)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(rotation.at(position) + threadIdx.x * 32));
  take_turn();
  take_own(own, part, queries, rotation, position, keys + last, values + last, heads, kv_heads);

  Words query[DIM / 32] = {};
  if (over < count)
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) query[i] = ((const Words*)own.queries[over])[within + i * 4];
  // Of heads 2 `within` and the next, whose columns this thread has.
  float sums[DIM / 16][4] = {}, max[2] = {-INFINITE, -INFINITE}, sum[2] = {};
#pragma unroll
  for (int r = 0; r < RUNS; r++) {
    const int run = begin + (r * WARPS + warp) * RUN_TOKENS;
    if (run >= end) break;
    Run<DIM>& of_keys = slots[r * 2 % SLOTS<DIM>];
    Run<DIM>& of_values = slots[(r * 2 + 1) % SLOTS<DIM>];
    await_run(r, own.key, false, of_keys);
    float score[4] = {};
#pragma unroll
    for (int i = 0; i < DIM / 32; i++) {
      const Words key = of_keys.of_keys(over, within + i * 4), key_below = of_keys.of_keys(over + 8, within + i * 4);
      const u32 *q = query[i].word, *k = key.word, *below = key_below.word;
      multiply(score, k[0], below[0], k[1], below[1], q[0], q[1]);
      multiply(score, k[2], below[2], k[3], below[3], q[2], q[3]);
    }
    __syncwarp();
    copy_run(r * 2 + SLOTS<DIM>);
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
    await_run(r, own.value, true, of_values);
    Words value[4][DIM / 64];
#pragma unroll
    for (int t = 0; t < 4; t++)
#pragma unroll
      for (int i = 0; i < DIM / 64; i++)
        value[t][i] = of_values.of_values(t / 2 * 8 + within * 2 + t % 2, over + i * 8);
    __syncwarp();
    copy_run(r * 2 + 1 + SLOTS<DIM>);
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
  }

#pragma unroll
  for (int h = 0; h < 2; h++) {
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) sum[h] += exchange(sum[h], mask);
    if (over == 0) of_max[warp][within * 2 + h] = max[h], of_sum[warp][within * 2 + h] = sum[h];
  }
  __syncthreads();  // the slots' memory is free
  // A row's length, and which half of 8 elements comes first, keep what 8 threads write at once in banks of its own.
  constexpr int PITCH = DIM + 4;
  const auto of_values = (float(*)[COLUMNS][PITCH])shared;
#pragma unroll
  for (int h = 0; h < 2; h++) {
    const int column = within * 2 + h;
    float largest = of_max[0][column];
#pragma unroll
    for (int w = 1; w < WARPS; w++) largest = larger(largest, of_max[w][column]);
    const float kept = __expf(max[h] - largest);
#pragma unroll
    for (int pair = 0; pair < DIM / 16; pair += 4)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        Pack<float> four;
        const bool is_high = half != over % 2;
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const float low = sums[pair + k / 2][k % 2 * 2 + h], high = sums[pair + 2 + k / 2][k % 2 * 2 + h];
          four.lane[k] = (is_high ? high : low) * kept;
        }
        *(Pack<float>*)&of_values[warp][column][pair * 16 + over * 8 + is_high * 4] = four;
      }
  }
  if (threadIdx.x < count) {
    float most = of_max[0][threadIdx.x], whole = 0;
    for (int w = 1; w < WARPS; w++) most = larger(most, of_max[w][threadIdx.x]);
    for (int w = 0; w < WARPS; w++) whole += of_sum[w][threadIdx.x] * __expf(of_max[w][threadIdx.x] - most);
    of_sum[0][threadIdx.x] = whole;  // which no other thread reads before
    attended.put_softmax(attended.place(part.split, row, part.head + threadIdx.x), most, whole);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count * DIM / 4; i += THREADS) {
    const int h = i / (DIM / 4), element = i % (DIM / 4) * 4;
    Pack<float> joined = {};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const Pack<float> part = *(const Pack<float>*)&of_values[w][h][element];
#pragma unroll
      for (int k = 0; k < 4; k++) joined.lane[k] += part.lane[k];
    }
    attended.put_values(attended.place(part.split, row, part.head + h), DIM, element, joined, of_sum[0][h]);
  }
}

// ---- entries ----

JOIN(Narrow, NAMED(join_matrix))
TURN_ROWS(Narrow, NAMED(turn_matrix_64), 64)
TURN_ROWS(Narrow, NAMED(turn_matrix_128), 128)

// Two of its blocks share a multiprocessor.
#define ATTENTION(DIM)                                                                                              \
  extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS<DIM>, 2) NAMED(attend_matrix_##DIM)(               \
      Queries<Narrow> queries, Rotation<Narrow> rotation, Narrow* keys, Narrow* values, Tables tables,              \
      const i64* positions, float scale, int window, Attended<Narrow> attended, int kv_heads) {                     \
    attend_matrix<DIM>(queries, rotation, keys, values, tables, positions, scale, window, attended, kv_heads);      \
  }
ATTENTION(64)
ATTENTION(128)
