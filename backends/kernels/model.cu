// Kernels that a decoder needs, behind `elements.cuh`, `block.cuh` and `rows.cuh`; `ops` has their meaning and
// `ops::composite` the same formulas in library calls. Sums run in fp32, in an order that depends on sizes alone, and
// nothing is added atomically.

// A [rows, heads, dim] view: a head is dense, rows lie `stride` elements apart.
template <typename T>
struct Heads {
  T* data;
  i64 stride;

  // The head at a place among so many a row.
  __device__ T* at(const Place& head, u64 dim) const { return data + (i64)head.row * stride + head.rest * dim; }
  // Whether heads of a multiple of a pack begin where a pack may.
  __device__ bool is_aligned() const { return aligned(data) && stride % Pack<T>::LANES == 0; }
};

// Ends the kernel, and with it the context: libtorch does the same with an index that is out of range.
__device__ inline void refuse() {
#ifdef __HIP_DEVICE_COMPILE__
  __builtin_trap();
#else
  __trap();
#endif
}

// ---- norms ----

// y, which may be x itself, and unless it is null `rstd` [rows, heads].
template <typename T>
__device__ inline void rms_norm(Heads<T> x, const T* residual, const T* weight, float eps, Heads<T> y, float* rstd,
                                u64 rows, u64 heads, u64 dim) {
  constexpr int LANES = Pack<T>::LANES;
  for (u64 index = blockIdx.x; index < rows * heads; index += gridDim.x) {
    const Place place(index, heads);
    T *x_row = x.at(place, dim), *y_row = y.at(place, dim);
    float squares = 0;
    for (u64 i = threadIdx.x * LANES; i < dim; i += blockDim.x * LANES) {
      Pack<T> pack = read(x_row, i, dim);
      if (residual) {
        const Pack<T> other = read(residual + index * dim, i, dim);
        for (int k = 0; k < LANES; k++) narrow(widen(pack.lane[k]) + widen(other.lane[k]), pack.lane[k]);
        write(x_row, i, dim, pack);
      }
      for (int k = 0; k < LANES; k++) squares += widen(pack.lane[k]) * widen(pack.lane[k]);
    }
    const float scale = 1 / sqrtf(over_block<add>(squares) / dim + eps);
    if (rstd && threadIdx.x == 0) rstd[index] = scale;
    for (u64 i = threadIdx.x * LANES; i < dim; i += blockDim.x * LANES) {
      Pack<T> pack = read(x_row, i, dim);
      const Pack<T> w = read(weight, i, dim);
      for (int k = 0; k < LANES; k++) narrow(widen(pack.lane[k]) * scale * widen(w.lane[k]), pack.lane[k]);
      write(y_row, i, dim, pack);
    }
  }
}

// The same for heads of up to 32 packs, one a thread, with as many heads side by side in a block as there is room for.
template <typename T>
__device__ inline void rms_norm_narrow(Heads<const T> x, const T* weight, float eps, Heads<T> y, float* rstd,
                                       u64 rows, u64 heads, u64 dim, Sharers sharers) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 i = sharers.lane * LANES, all = rows * heads;
  const Pack<T> w = read(weight, i, dim);
  for (u64 base = blockIdx.x * (u64)sharers.groups; base < all; base += gridDim.x * (u64)sharers.groups) {
    const u64 index = base + sharers.group, size = index < all ? dim : 0;
    const Place place(index, heads);
    Pack<T> pack = read(x.at(place, dim), i, size);
    float squares = 0;
    for (int k = 0; k < LANES; k++) squares += widen(pack.lane[k]) * widen(pack.lane[k]);
    const float scale = 1 / sqrtf(sharers.sum(squares) / dim + eps);
    if (rstd && sharers.lane == 0 && size > 0) rstd[index] = scale;
    for (int k = 0; k < LANES; k++) narrow(widen(pack.lane[k]) * scale * widen(w.lane[k]), pack.lane[k]);
    write(y.at(place, dim), i, size, pack);
  }
}

// Each block takes `chunk` heads, each thread a pack of those of its group, and leaves its part of the weight's gradient in
// a row of `partial`.
template <typename T>
__device__ inline void rms_norm_backward(Heads<T> dy, Heads<const T> x, const float* rstd, const T* weight, Heads<T> dx,
                                         float* partial, u64 rows, u64 heads, u64 dim, u64 chunk, Sharers sharers) {
  constexpr int LANES = Pack<T>::LANES, MOST = 256;  // threads where there are groups
  __shared__ float of_groups[MOST * LANES];
  const int i = sharers.lane * LANES, left = (int)dim - i, count = left < LANES ? left : LANES;
  const bool is_whole = count == LANES && dim % LANES == 0 && dy.is_aligned() && x.is_aligned() && dx.is_aligned();
  const auto take = [&](const T* from) { return is_whole ? *(const Pack<T>*)from : read(from, 0, count); };
  const auto put = [&](T* to, const Pack<T>& pack) {
    if (is_whole) {
      *(Pack<T>*)to = pack;
    } else {
      write(to, 0, count, pack);
    }
  };
  const Pack<T> w = read(weight, i, dim);
  float sums[LANES] = {};
  const u64 begin = blockIdx.x * chunk, end = begin + chunk < rows * heads ? begin + chunk : rows * heads;
  for (u64 base = begin; base < end; base += sharers.groups) {
    const u64 index = base + sharers.group;
    const bool is_there = count > 0 && index < end;
    const Place head(index, heads);
    T *dy_row = dy.at(head, dim) + i, *dx_row = dx.at(head, dim) + i;
    Pack<T> y = {}, below = {}, of_x = {};
    float scale = 0, dot = 0;
    const auto normed = [&](int k) { return widen(of_x.lane[k]) * scale; };
    const auto scaled = [&](int k) { return widen(y.lane[k]) * widen(w.lane[k]); };
    if (is_there) {
      y = take(dy_row), of_x = take(x.at(head, dim) + i), below = take(dx_row), scale = rstd[index];
      for (int k = 0; k < LANES; k++) {
        sums[k] += widen(y.lane[k]) * normed(k);
        dot += scaled(k) * normed(k);
      }
    }
    const float mean = sharers.sum(dot) / dim;
    if (!is_there) continue;
    for (int k = 0; k < LANES; k++) {
      narrow(widen(below.lane[k]) + (scaled(k) - normed(k) * mean) * scale, below.lane[k]);
      narrow(normed(k) * widen(w.lane[k]), y.lane[k]);
    }
    put(dx_row, below), put(dy_row, y);
  }
  if (sharers.groups > 1) {
    for (int k = 0; k < LANES; k++) of_groups[threadIdx.x * LANES + k] = sums[k];
    __syncthreads();
    if (sharers.group > 0) return;
    for (int group = 1; group < sharers.groups; group++)
      for (int k = 0; k < LANES; k++) sums[k] += of_groups[(group * sharers.count + sharers.lane) * LANES + k];
  }
  for (int k = 0; k < count; k++) partial[blockIdx.x * dim + i + k] = sums[k];
}

// ---- sums over rows ----

// partial[c] = the sum of `chunk` rows; the blocks of a chunk follow one another, each with a pack a thread.
template <typename T>
__device__ inline void sum_rows(const T* x, float* partial, u64 rows, u64 columns, u64 chunk) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 blocks = (packs_of<T>(columns) + blockDim.x - 1) / blockDim.x;
  const Place block(blockIdx.x, blocks);
  const u64 part = block.row, i = (block.rest * blockDim.x + threadIdx.x) * LANES;
  if (i >= columns) return;
  const u64 begin = part * chunk, end = begin + chunk < rows ? begin + chunk : rows;
  float sums[LANES] = {};
#pragma unroll 4
  for (u64 row = begin; row < end; row++) {
    const Pack<T> pack = read(x + row * columns, i, columns);
    for (int k = 0; k < LANES; k++) sums[k] += widen(pack.lane[k]);
  }
  for (int k = 0; k < LANES && i + k < columns; k++) partial[part * columns + i + k] = sums[k];
}

// ---- elementwise ----

// Of each head the first `turned` elements.
template <typename T>
__device__ inline void rope(Heads<T> x, const i64* positions, const float* table, float sign, u64 rows, u64 heads,
                            u64 dim, u64 table_rows, u64 turned) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 half = turned / 2, packs = packs_of<T>(half);
  for (u64 index = thread_index(); index < rows * heads * packs; index += thread_count()) {
    const Place pack(index, packs), head(pack.row, heads);
    const u64 i = pack.rest * LANES, position = positions[head.row];
    if (position >= table_rows) refuse();
    const float* angles = table + position * turned;
    T* row = x.data + (i64)head.row * x.stride + head.rest * dim;
    Pack<T> first = read(row, i, half), second = read(row + half, i, half);
    for (int k = 0; k < LANES && i + k < half; k++) {
      const float cos = angles[i + k], sin = sign * angles[half + i + k];
      const float a = widen(first.lane[k]), b = widen(second.lane[k]);
      narrow(a * cos - b * sin, first.lane[k]);
      narrow(b * cos + a * sin, second.lane[k]);
    }
    write(row, i, half, first);
    write(row + half, i, half, second);
  }
}

// What a gate becomes, g sigmoid(z): z, its derivative by g, and the product with what is gated.
struct Silu {
  __device__ static float inner(float g) { return g; }
  __device__ static float slope(float) { return 1; }
  __device__ static float times(float g, float u) { return gated(g, u); }
};

// z is twice that of the approximation of the normal distribution by tanh.
struct Gelu {
  __device__ static float inner(float g) { return 1.5957691216057308f * (g + 0.044715f * g * g * g); }
  __device__ static float slope(float g) { return 1.5957691216057308f * (1 + 0.134145f * g * g); }
  __device__ static float times(float g, float u) { return g * sigmoid(inner(g)) * u; }
};

template <typename Gate, typename T>
__device__ inline void glu(const T* gate_up, T* y, u64 rows, u64 size) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 packs = packs_of<T>(size);
  for (u64 index = thread_index(); index < rows * packs; index += thread_count()) {
    const Place pack(index, packs);
    const u64 row = pack.row, i = pack.rest * LANES;
    Pack<T> gate = read(gate_up + 2 * row * size, i, size);
    const Pack<T> up = read(gate_up + (2 * row + 1) * size, i, size);
    for (int k = 0; k < LANES; k++) narrow(Gate::times(widen(gate.lane[k]), widen(up.lane[k])), gate.lane[k]);
    write(y + row * size, i, size, gate);
  }
}

template <typename Gate, typename T>
__device__ inline void glu_backward(T* gate_up, T* dy, u64 rows, u64 size) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 packs = packs_of<T>(size);
  for (u64 index = thread_index(); index < rows * packs; index += thread_count()) {
    const Place pack(index, packs);
    const u64 row = pack.row, i = pack.rest * LANES;
    T *gate_row = gate_up + 2 * row * size, *up_row = gate_row + size, *dy_row = dy + row * size;
    Pack<T> gate = read(gate_row, i, size), up = read(up_row, i, size), gradient = read(dy_row, i, size);
    for (int k = 0; k < LANES; k++) {
      const float g = widen(gate.lane[k]), u = widen(up.lane[k]), d = widen(gradient.lane[k]);
      const float s = sigmoid(Gate::inner(g)), activated = g * s;
      narrow(d * u * s * (1 + g * (1 - s) * Gate::slope(g)), gate.lane[k]);
      narrow(d * activated, up.lane[k]);
      narrow(activated * u, gradient.lane[k]);
    }
    write(gate_row, i, size, gate);
    write(up_row, i, size, up);
    write(dy_row, i, size, gradient);
  }
}

// ---- products by rows ----

// Rows and columns of y that a block makes, and how much of k it has in shared memory.
constexpr int LINEAR_TILE = 64, LINEAR_DEPTH = 16;

// y [rows, n] = x [rows, k] w [n, k]^T + bias, which may be missing. A thread makes 4 x 4 values, each one term after
// the other, so that a row has the same bits whatever the others hold and however many they are.
template <typename T>
__device__ inline void linear_by_rows(const T* x, const T* w, const T* bias, T* y, u64 rows, u64 n, u64 k) {
  constexpr int EACH = 4;
  __shared__ float of_x[LINEAR_DEPTH][LINEAR_TILE + EACH], of_w[LINEAR_DEPTH][LINEAR_TILE + EACH];
  const Place tile(blockIdx.x, (n + LINEAR_TILE - 1) / LINEAR_TILE);
  const u64 first_row = tile.row * LINEAR_TILE, first_column = tile.rest * LINEAR_TILE;
  // What a thread copies, and the corner of what it makes.
  const int line = threadIdx.x / EACH, begin = threadIdx.x % EACH * EACH;
  const int row = threadIdx.x / (LINEAR_TILE / EACH) * EACH, column = threadIdx.x % (LINEAR_TILE / EACH) * EACH;
  float sums[EACH][EACH] = {};
  for (u64 base = 0; base < k; base += LINEAR_DEPTH) {
    for (int i = begin; i < begin + EACH; i++) {
      const bool is_inside = base + i < k;
      const u64 x_row = first_row + line, w_row = first_column + line;
      of_x[i][line] = is_inside && x_row < rows ? widen(x[x_row * k + base + i]) : 0;
      of_w[i][line] = is_inside && w_row < n ? widen(w[w_row * k + base + i]) : 0;
    }
    __syncthreads();
    for (int i = 0; i < LINEAR_DEPTH; i++)
      for (int a = 0; a < EACH; a++)
        for (int b = 0; b < EACH; b++) sums[a][b] = fmaf(of_x[i][row + a], of_w[i][column + b], sums[a][b]);
    __syncthreads();
  }
  for (int a = 0; a < EACH && first_row + row + a < rows; a++)
    for (int b = 0; b < EACH && first_column + column + b < n; b++) {
      const u64 at = first_column + column + b;
      narrow(bias ? sums[a][b] + widen(bias[at]) : sums[a][b], y[(first_row + row + a) * n + at]);
    }
}

// ---- dropout ----

// A bijection that leaves no bit where it was.
__device__ inline u32 mix(u32 x) {
  x = (x >> 16 ^ x) * 0x45d9f3b;
  x = (x >> 16 ^ x) * 0x45d9f3b;
  return x >> 16 ^ x;
}

template <typename T>
__device__ inline void dropout(const T* x, const i64* keys, u32 salt, u32 threshold, float scale, T* y, u64 rows,
                               u64 columns) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 packs = packs_of<T>(columns);
  for (u64 index = thread_index(); index < rows * packs; index += thread_count()) {
    const Place place(index, packs);
    const u64 row = place.row, i = place.rest * LANES;
    const u32 of_row = mix((u32)keys[row] ^ salt);
    Pack<T> pack = read(x + row * columns, i, columns);
    for (int k = 0; k < LANES; k++) {
      const bool is_dropped = mix(of_row ^ mix((u32)(i + k))) < threshold;
      narrow(is_dropped ? 0.0f : widen(pack.lane[k]) * scale, pack.lane[k]);
    }
    write(y + row * columns, i, columns, pack);
  }
}

// ---- log-probabilities ----

// A softmax so far: the largest value, the sum of exp(z - max), and that of exp(z - max) (z - max).
struct Softmax {
  float max, sum, moment;

  __device__ void rebase(float to) {
    if (sum > 0) {
      const float factor = __expf(max - to);
      moment = factor * (moment + sum * (max - to));
      sum *= factor;
    }
    max = to;
  }
};

// One block a row.
template <typename T>
__device__ inline void logprobs(const T* logits, const i64* targets, float inverse_temperature, float* logprobs,
                                float* entropy, float* lse, u64 vocab) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 row = blockIdx.x;
  const T* z = logits + row * vocab;
  Softmax of_thread = {-__int_as_float(0x7f800000), 0, 0};
  for (u64 i = threadIdx.x * LANES; i < vocab; i += blockDim.x * LANES) {
    const Pack<T> pack = read(z, i, vocab);
    const int count = vocab - i < LANES ? vocab - i : LANES;
    float values[LANES], max = of_thread.max;
    for (int k = 0; k < LANES; k++) {
      values[k] = widen(pack.lane[k]) * inverse_temperature;
      if (k < count) max = larger(max, values[k]);
    }
    if (max > of_thread.max) of_thread.rebase(max);
    for (int k = 0; k < LANES; k++) {
      if (k >= count) break;
      const float term = __expf(values[k] - max);
      of_thread.sum += term;
      of_thread.moment += term * (values[k] - max);
    }
  }
  const float max = over_block<larger>(of_thread.max);
  of_thread.rebase(max);
  const float sum = over_block<add>(of_thread.sum), moment = over_block<add>(of_thread.moment);
  if (threadIdx.x > 0) return;
  const u64 target = targets[row];
  if (target >= vocab) refuse();
  const float log_sum = logf(sum);
  logprobs[row] = widen(z[target]) * inverse_temperature - max - log_sum;
  entropy[row] = log_sum - moment / sum;
  lse[row] = max + log_sum;
}

// One block a row.
template <typename T>
__device__ inline void logprobs_backward(T* logits, const i64* targets, float inverse_temperature, const float* lse,
                                         const float* entropy, const float* dlogprobs, const float* dentropy,
                                         u64 vocab) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 row = blockIdx.x, target = targets[row];
  if (target >= vocab) refuse();
  T* z = logits + row * vocab;
  const float gradient = dlogprobs[row] * inverse_temperature;
  const float of_entropy = dentropy ? dentropy[row] * inverse_temperature : 0;
  const float offset = of_entropy * entropy[row] + gradient, log_sum = lse[row];
  for (u64 i = threadIdx.x * LANES; i < vocab; i += blockDim.x * LANES) {
    Pack<T> pack = read(z, i, vocab);
    for (int k = 0; k < LANES; k++) {
      const float log_p = widen(pack.lane[k]) * inverse_temperature - log_sum;
      const float slope = -__expf(log_p) * (of_entropy * log_p + offset);
      narrow(i + k == target ? slope + gradient : slope, pack.lane[k]);
    }
    write(z, i, vocab, pack);
  }
}

// ---- embedding ----

// `tokens` is sorted, and row `order[p]` of `dy` is that of token `tokens[p]`: equal tokens are in the order of their
// rows. The blocks of a place follow one another, each with a pack a thread; the first place of a token sums its run.
template <typename T>
__device__ inline void embedding_backward(const T* dy, const i64* tokens, const i64* order, T* dweight, int is_added,
                                          u64 rows, u64 vocab, u64 columns) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 blocks = (packs_of<T>(columns) + blockDim.x - 1) / blockDim.x;
  const Place block(blockIdx.x, blocks);
  const u64 first = block.row, i = (block.rest * blockDim.x + threadIdx.x) * LANES;
  const u64 token = tokens[first];
  if (token >= vocab) refuse();
  if (i >= columns || (first > 0 && tokens[first - 1] == tokens[first])) return;
  float sums[LANES] = {};
  for (u64 place = first; place < rows && tokens[place] == tokens[first]; place++) {
    const Pack<T> pack = read(dy + order[place] * columns, i, columns);
    for (int k = 0; k < LANES; k++) sums[k] += widen(pack.lane[k]);
  }
  Pack<T> pack = read(dweight + token * columns, i, columns);
  for (int k = 0; k < LANES; k++) narrow(is_added ? widen(pack.lane[k]) + sums[k] : sums[k], pack.lane[k]);
  write(dweight + token * columns, i, columns, pack);
}

// ---- rows ----

// Row `index[r]` of x to row r of y, which is dense. The blocks of a row follow one another, each with a pack a thread.
template <typename T>
__device__ inline void take_rows(Heads<const T> x, const i64* index, T* y, u64 columns) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 blocks = (packs_of<T>(columns) + blockDim.x - 1) / blockDim.x;
  const Place block(blockIdx.x, blocks);
  const u64 i = (block.rest * blockDim.x + threadIdx.x) * LANES;
  if (i >= columns) return;
  write(y + block.row * columns, i, columns, read(x.data + index[block.row] * x.stride, i, columns));
}

// ---- entry points ----

#define FOR_TYPE(T, SUFFIX)                                                                                            \
  extern "C" __global__ void __launch_bounds__(1024)                                                                   \
      rms_norm_##SUFFIX(Heads<T> x, const T* residual, const T* weight, float eps, Heads<T> y, float* rstd, u64 rows,  \
                        u64 heads, u64 dim) {                                                                          \
    take_turn();                                                                                                       \
    rms_norm(x, residual, weight, eps, y, rstd, rows, heads, dim);                                                     \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      rms_norm_narrow_##SUFFIX(Heads<const T> x, const T* weight, float eps, Heads<T> y, float* rstd, u64 rows,        \
                               u64 heads, u64 dim, int shift) {                                                        \
    take_turn();                                                                                                       \
    rms_norm_narrow(x, weight, eps, y, rstd, rows, heads, dim, Sharers(shift));                                        \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024)                                                                   \
      rms_norm_backward_##SUFFIX(Heads<T> dy, Heads<const T> x, const float* rstd, const T* weight, Heads<T> dx,       \
                                 float* partial, u64 rows, u64 heads, u64 dim, u64 chunk, int shift) {                 \
    rms_norm_backward(dy, x, rstd, weight, dx, partial, rows, heads, dim, chunk, Sharers(shift));                      \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      sum_rows_##SUFFIX(const T* x, float* partial, u64 rows, u64 columns, u64 chunk) {                                \
    sum_rows(x, partial, rows, columns, chunk);                                                                        \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024)                                                                   \
      join_parts_##SUFFIX(const float* partial, u64 parts, u64 columns, T* out, int is_added) {                        \
    join_parts(partial, parts, columns, blockIdx.x * (u64)32, out, is_added);                                          \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      rope_##SUFFIX(Heads<T> x, const i64* positions, const float* table, float sign, u64 rows, u64 heads, u64 dim,    \
                    u64 table_rows, u64 turned) {                                                                      \
    rope(x, positions, table, sign, rows, heads, dim, table_rows, turned);                                             \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      swiglu_##SUFFIX(const T* gate_up, T* y, u64 rows, u64 size) {                                                    \
    take_turn();                                                                                                       \
    glu<Silu>(gate_up, y, rows, size);                                                                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      swiglu_backward_##SUFFIX(T* gate_up, T* dy, u64 rows, u64 size) {                                                \
    glu_backward<Silu>(gate_up, dy, rows, size);                                                                       \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      geglu_##SUFFIX(const T* gate_up, T* y, u64 rows, u64 size) {                                                     \
    take_turn();                                                                                                       \
    glu<Gelu>(gate_up, y, rows, size);                                                                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      geglu_backward_##SUFFIX(T* gate_up, T* dy, u64 rows, u64 size) {                                                 \
    glu_backward<Gelu>(gate_up, dy, rows, size);                                                                       \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      linear_by_rows_##SUFFIX(const T* x, const T* w, const T* bias, T* y, u64 rows, u64 n, u64 k) {                   \
    take_turn();                                                                                                       \
    linear_by_rows(x, w, bias, y, rows, n, k);                                                                         \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      dropout_##SUFFIX(const T* x, const i64* keys, u32 salt, u32 threshold, float scale, T* y, u64 rows,              \
                       u64 columns) {                                                                                  \
    dropout(x, keys, salt, threshold, scale, y, rows, columns);                                                        \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024)                                                                   \
      logprobs_##SUFFIX(const T* logits, const i64* targets, float inverse_temperature, float* logprobs_of,            \
                        float* entropy, float* lse, u64 vocab) {                                                       \
    logprobs(logits, targets, inverse_temperature, logprobs_of, entropy, lse, vocab);                                  \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024)                                                                   \
      logprobs_backward_##SUFFIX(T* logits, const i64* targets, float inverse_temperature, const float* lse,           \
                                 const float* entropy, const float* dlogprobs, const float* dentropy, u64 vocab) {     \
    logprobs_backward(logits, targets, inverse_temperature, lse, entropy, dlogprobs, dentropy, vocab);                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      embedding_backward_##SUFFIX(const T* dy, const i64* tokens, const i64* order, T* dweight, int is_added,          \
                                  u64 rows, u64 vocab, u64 columns) {                                                  \
    embedding_backward(dy, tokens, order, dweight, is_added, rows, vocab, columns);                                    \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      take_rows_##SUFFIX(Heads<const T> x, const i64* index, T* y, u64 columns) {                                      \
    take_rows(x, index, y, columns);                                                                                   \
  }

FOR_TYPE(float, f32)
FOR_TYPE(Bf16, bf16)
FOR_TYPE(F16, f16)
