// Kernels that a strategy needs, behind `elements.cuh`.

// ---- reduction in rank order ----

// The numbers of `ReduceOp`, in its order.
enum { SUM, AVG, MIN, MAX };

// NaN wins in MIN and MAX, as it does in a sum.
__device__ inline float combine(float a, float b, int op) {
  if (op == MIN) return a != a || a < b ? a : b;
  if (op == MAX) return a != a || a > b ? a : b;
  return a + b;
}
// Sums of integers wrap.
template <typename T>
__device__ inline T combine(T a, T b, int op) {
  if (op == MIN) return a < b ? a : b;
  if (op == MAX) return a > b ? a : b;
  return (T)((u64)a + (u64)b);
}

// out[i] = in[0 * n + i] op in[1 * n + i] op ..., from left to right; floats in fp32, rounded once.
template <typename T>
__device__ inline void reduce_in_rank_order(T* out, const T* in, u64 n, int world_size, int op) {
  using Wide = decltype(widen(T()));
  constexpr int LANES = Pack<T>::LANES;
  if (n % LANES == 0 && aligned(out) && aligned(in)) {
    const u64 packs = n / LANES;
    for (u64 i = thread_index(); i < packs; i += thread_count()) {
      Wide sum[LANES];
      Pack<T> pack = ((const Pack<T>*)in)[i];
      for (int k = 0; k < LANES; k++) sum[k] = widen(pack.lane[k]);
      for (int rank = 1; rank < world_size; rank++) {
        pack = ((const Pack<T>*)in)[rank * packs + i];
        for (int k = 0; k < LANES; k++) sum[k] = combine(sum[k], widen(pack.lane[k]), op);
      }
      for (int k = 0; k < LANES; k++) narrow((Wide)(op == AVG ? sum[k] / world_size : sum[k]), pack.lane[k]);
      ((Pack<T>*)out)[i] = pack;
    }
    return;
  }
  for (u64 i = thread_index(); i < n; i += thread_count()) {
    Wide sum = widen(in[i]);
    for (int rank = 1; rank < world_size; rank++) sum = combine(sum, widen(in[rank * n + i]), op);
    narrow((Wide)(op == AVG ? sum / world_size : sum), out[i]);
  }
}

extern "C" __global__ void __launch_bounds__(256)
    reduce_f32(float* out, const float* in, u64 n, int world_size, int op) {
  reduce_in_rank_order(out, in, n, world_size, op);
}
extern "C" __global__ void __launch_bounds__(256)
    reduce_bf16(Bf16* out, const Bf16* in, u64 n, int world_size, int op) {
  reduce_in_rank_order(out, in, n, world_size, op);
}
extern "C" __global__ void __launch_bounds__(256)
    reduce_f16(F16* out, const F16* in, u64 n, int world_size, int op) {
  reduce_in_rank_order(out, in, n, world_size, op);
}
extern "C" __global__ void __launch_bounds__(256)
    reduce_i32(int* out, const int* in, u64 n, int world_size, int op) {
  reduce_in_rank_order(out, in, n, world_size, op);
}
extern "C" __global__ void __launch_bounds__(256)
    reduce_i64(i64* out, const i64* in, u64 n, int world_size, int op) {
  reduce_in_rank_order(out, in, n, world_size, op);
}
extern "C" __global__ void __launch_bounds__(256)
    reduce_u8(unsigned char* out, const unsigned char* in, u64 n, int world_size, int op) {
  reduce_in_rank_order(out, in, n, world_size, op);
}

// The sum over ranks of in[r * n + i], from left to right in fp32, written to out[i] or added to it.
template <typename T>
__device__ inline void sum_ranks(float* out, const T* in, u64 n, int world_size, int is_added) {
  constexpr int LANES = Pack<T>::LANES, QUADS = LANES / 4;
  u64 done = 0;
  if (n % LANES == 0 && aligned(out) && aligned(in)) {
    const u64 packs = n / LANES;
    for (u64 i = thread_index(); i < packs; i += thread_count()) {
      float sum[LANES];
      Pack<T> pack = ((const Pack<T>*)in)[i];
      for (int k = 0; k < LANES; k++) sum[k] = widen(pack.lane[k]);
      for (int rank = 1; rank < world_size; rank++) {
        pack = ((const Pack<T>*)in)[rank * packs + i];
        for (int k = 0; k < LANES; k++) sum[k] += widen(pack.lane[k]);
      }
      for (int quad = 0; quad < QUADS; quad++) {
        Pack<float>* to = (Pack<float>*)out + i * QUADS + quad;
        Pack<float> total = {};
        if (is_added) total = *to;
        for (int k = 0; k < 4; k++) total.lane[k] = is_added ? total.lane[k] + sum[quad * 4 + k] : sum[quad * 4 + k];
        *to = total;
      }
    }
    done = n;
  }
  for (u64 i = done + thread_index(); i < n; i += thread_count()) {
    float sum = widen(in[i]);
    for (int rank = 1; rank < world_size; rank++) sum += widen(in[rank * n + i]);
    out[i] = is_added ? out[i] + sum : sum;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    sum_ranks_f32(float* out, const float* in, u64 n, int world_size, int is_added) {
  sum_ranks(out, in, n, world_size, is_added);
}
extern "C" __global__ void __launch_bounds__(256)
    sum_ranks_bf16(float* out, const Bf16* in, u64 n, int world_size, int is_added) {
  sum_ranks(out, in, n, world_size, is_added);
}
extern "C" __global__ void __launch_bounds__(256)
    sum_ranks_f16(float* out, const F16* in, u64 n, int world_size, int is_added) {
  sum_ranks(out, in, n, world_size, is_added);
}

// ---- AdamW ----

struct AdamW {
  float learning_rate, beta1, beta2, eps, keep;
};

__device__ inline void adamw_one(float& w, float& m, float& v, float gradient, const AdamW& h, float bias1,
                                 float bias2_root) {
  m = h.beta1 * m + (1 - h.beta1) * gradient;
  v = h.beta2 * v + (1 - h.beta2) * gradient * gradient;
  w = h.keep * w - h.learning_rate / bias1 * m / (sqrtf(v) / bias2_root + h.eps);
}

// One element a thread where they are not aligned, and else four, which is the fastest (docs/results/hardware.md). The
// gradient is multiplied by factors[0]; where that is not finite nothing is written. The other two correct the
// moments' bias.
template <typename G>
__device__ inline void adamw_all(float* w, float* m, float* v, const G* gradient, const float* factors, u64 n,
                                 const AdamW& h) {
  using States = Pack<float>;
  using Gradients = Pack<G, States::LANES>;
  const float s = factors[0], bias1 = factors[1], bias2_root = factors[2];
  if ((__float_as_uint(s) & 0x7f800000) == 0x7f800000) return;
  u64 done = 0;
  if (aligned(w) && aligned(m) && aligned(v) && aligned<Gradients>(gradient)) {
    const u64 packs = n / States::LANES;
    for (u64 i = thread_index(); i < packs; i += thread_count()) {
      States pw = ((States*)w)[i], pm = ((States*)m)[i], pv = ((States*)v)[i];
      const Gradients pg = ((const Gradients*)gradient)[i];
      for (int k = 0; k < States::LANES; k++)
        adamw_one(pw.lane[k], pm.lane[k], pv.lane[k], widen(pg.lane[k]) * s, h, bias1, bias2_root);
      ((States*)w)[i] = pw;
      ((States*)m)[i] = pm;
      ((States*)v)[i] = pv;
    }
    done = packs * States::LANES;
  }
  for (u64 i = done + thread_index(); i < n; i += thread_count())
    adamw_one(w[i], m[i], v[i], widen(gradient[i]) * s, h, bias1, bias2_root);
}

extern "C" __global__ void __launch_bounds__(256)
    adamw_f32(float* w, float* m, float* v, const float* gradient, const float* factors, u64 n, AdamW h) {
  adamw_all(w, m, v, gradient, factors, n, h);
}
extern "C" __global__ void __launch_bounds__(256)
    adamw_bf16(float* w, float* m, float* v, const Bf16* gradient, const float* factors, u64 n, AdamW h) {
  adamw_all(w, m, v, gradient, factors, n, h);
}
extern "C" __global__ void __launch_bounds__(256)
    adamw_f16(float* w, float* m, float* v, const F16* gradient, const float* factors, u64 n, AdamW h) {
  adamw_all(w, m, v, gradient, factors, n, h);
}

// ---- AdamW with moments in 8 bits ----

constexpr int MOMENT_BLOCK = 256;  // elements that share a scale, each with a thread of its own
constexpr int MAP_VALUES = 256;

// The moments: codes, and a scale of each block.
struct EightBits {
  unsigned char* codes;
  float* scales;
};

// The number of bounds below x, of which the last is infinite.
__device__ inline int code_of(float x, const float* bounds) {
  int code = 0;
  for (int step = MAP_VALUES / 2; step > 0; step /= 2)
    if (bounds[code + step - 1] < x) code += step;
  return code;
}

__device__ inline void round_moment(float x, float scale, const float* bounds, EightBits to, u64 i, bool is_first) {
  to.codes[i] = code_of(x / (scale == 0 ? 1 : scale), bounds);
  if (is_first) to.scales[i / MOMENT_BLOCK] = scale;
}

// A block of threads takes a block of elements at a time. `maps` has values and bounds of the first moment's map, then
// of the second's; `runs` has the ends of runs of equal weight decay, and then for each whether it decays.
extern "C" __global__ void __launch_bounds__(MOMENT_BLOCK)
    adamw_eight_bits(float* w, unsigned char* m_codes, unsigned char* v_codes, float* m_scales, float* v_scales,
                     const float* gradient, const float* factors, const float* maps, const i64* runs, int run_count,
                     u64 n, AdamW h) {
  __shared__ float tables[4][MAP_VALUES];
  __shared__ float low[MOMENT_BLOCK], high[MOMENT_BLOCK], high_v[MOMENT_BLOCK];
  const int t = threadIdx.x;
  const float s = factors[0], bias1 = factors[1], bias2_root = factors[2];
  if ((__float_as_uint(s) & 0x7f800000) == 0x7f800000) return;
  for (int table = 0; table < 4; table++) tables[table][t] = maps[table * MAP_VALUES + t];
  const EightBits of_m = {m_codes, m_scales}, of_v = {v_codes, v_scales};
  for (u64 begin = blockIdx.x * (u64)MOMENT_BLOCK; begin < n; begin += gridDim.x * (u64)MOMENT_BLOCK) {
    const u64 i = begin + t;
    __syncthreads();  // tables are there, and nobody reads the block before
    float m = 0, v = 0;
    if (i < n) {
      m = tables[0][m_codes[i]] * m_scales[begin / MOMENT_BLOCK];
      v = tables[2][v_codes[i]] * v_scales[begin / MOMENT_BLOCK];
      int run = 0;
      while (run + 1 < run_count && (i64)i >= runs[run]) run++;
      AdamW of_run = h;
      if (!runs[run_count + run]) of_run.keep = 1;
      adamw_one(w[i], m, v, gradient[i] * s, of_run, bias1, bias2_root);
    }
    low[t] = m, high[t] = m, high_v[t] = v;
    for (int half = MOMENT_BLOCK / 2; half > 0; half /= 2) {
      __syncthreads();
      if (t < half) {
        low[t] = fminf(low[t], low[t + half]);
        high[t] = fmaxf(high[t], high[t + half]);
        high_v[t] = fmaxf(high_v[t], high_v[t + half]);
      }
    }
    __syncthreads();
    if (i < n) {
      round_moment(m, high[0] >= -low[0] ? high[0] : low[0], tables[1], of_m, i, t == 0);
      round_moment(v, high_v[0], tables[3], of_v, i, t == 0);
    }
  }
}

// ---- sum of squares ----

constexpr int TREE_THREADS = 256;
constexpr u64 CHUNK = 16384;  // elements of one block; `kernels/strategy.rs` counts with it

// The sum over the block's threads, as a tree. Thread 0 has the result.
__device__ inline double block_sum(double sum) {
  __shared__ double sums[TREE_THREADS];
  sums[threadIdx.x] = sum;
  for (int half = TREE_THREADS / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  return sums[0];
}

// partial[b] = the sum of the squares of chunk b, in fp64. Which thread adds what depends on n alone, whatever the
// alignment and however many blocks run at once.
extern "C" __global__ void __launch_bounds__(TREE_THREADS) sum_squares(const float* x, u64 n, double* partial) {
  const u64 begin = blockIdx.x * CHUNK, end = begin + CHUNK < n ? begin + CHUNK : n;
  const bool wide = aligned(x);
  double sum = 0;
  for (u64 i = begin + threadIdx.x * 4; i < end; i += TREE_THREADS * 4) {
    if (wide && i + 4 <= end) {
      const Pack<float> pack = *(const Pack<float>*)(x + i);
      for (int k = 0; k < 4; k++) sum += (double)pack.lane[k] * pack.lane[k];
    } else {
      for (u64 k = i; k < i + 4 && k < end; k++) sum += (double)x[k] * x[k];
    }
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// *total = the sum of all partial sums; one block.
extern "C" __global__ void __launch_bounds__(TREE_THREADS)
    sum_partial(const double* partial, u64 count, double* total) {
  double sum = 0;
  for (u64 i = threadIdx.x; i < count; i += TREE_THREADS) sum += partial[i];
  sum = block_sum(sum);
  if (threadIdx.x == 0) *total = sum;
}
