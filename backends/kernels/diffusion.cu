// Kernels that transformers of images need, behind `elements.cuh`, `block.cuh` and `rows.cuh`; `ops::modulation` and
// `ops::joint` have their meaning. Sums run in fp32, in an order that depends on sizes and on alignment alone, and nothing is
// added atomically.

// [images, tokens, channels]: the tokens of an image are dense rows, images lie `stride` elements apart. With a single token
// it is what the tokens of an image have in common.
template <typename T>
struct Images {
  T* data;
  i64 stride;

  __device__ T* row(u64 image, u64 token, u64 channels) const { return data + (i64)image * stride + token * channels; }
  // Whether rows of a multiple of a pack begin where a pack may.
  __device__ bool is_aligned() const { return aligned(data) && stride % Pack<T>::LANES == 0; }
};

// Rows of `size` whose packs the sharers of a row have in registers, `EACH` a thread, one every so many. Where rows begin
// and end with packs, as `WHOLE` ones all do, they are read and written as such.
template <typename T, int EACH, bool WHOLE = false>
struct OwnPacks {
  static constexpr int LANES = Pack<T>::LANES;
  int size, lane, count;
  bool is_whole;

  __device__ OwnPacks(int size, const Sharers& sharers, bool are_aligned)
      : size(size), lane(sharers.lane), count(sharers.count), is_whole(WHOLE || (are_aligned && size % LANES == 0)) {}
  __device__ int at(int e) const { return (lane + e * count) * LANES; }
  __device__ bool has(int e, int k) const { return at(e) + (WHOLE ? 0 : k) < size; }
  __device__ Pack<T> take(const T* row, int e) const {
    if (!is_whole) return read(row, at(e), size);
    return at(e) < size ? *(const Pack<T>*)(row + at(e)) : Pack<T>{};
  }
  __device__ void put(T* row, int e, const Pack<T>& pack) const {
    if (!is_whole) {
      write(row, at(e), size, pack);
    } else if (at(e) < size) {
      *(Pack<T>*)(row + at(e)) = pack;
    }
  }
};

// The image, and the tokens of it, that a block has: `chunk` of them, one block after another.
struct Chunk {
  u64 image, part, begin, end;

  __device__ Chunk(u64 block, u64 tokens, u64 chunk) {
    const u64 parts = (tokens + chunk - 1) / chunk;
    const Place place(block, parts);
    image = place.row, part = place.rest;
    begin = part * chunk, end = begin + chunk < tokens ? begin + chunk : tokens;
  }
};

// ---- norms that are modulated ----

// y = (x - mean) / sqrt(variance + eps) (1 + scale) + shift; `stats` gets the mean and the inverse deviation of each row.
template <int EACH, bool WHOLE, typename T>
__device__ inline void modulated_norm(Images<const T> x, Images<const T> shift, Images<const T> scale, float eps, T* y,
                                      float* stats, u64 images, u64 tokens, u64 channels, Sharers sharers) {
  const OwnPacks<T, EACH, WHOLE> own(channels, sharers, x.is_aligned() && shift.is_aligned() && scale.is_aligned());
  for (u64 base = blockIdx.x * (u64)sharers.groups; base < images * tokens; base += gridDim.x * (u64)sharers.groups) {
    const u64 found = base + sharers.group, index = found < images * tokens ? found : images * tokens - 1;
    const Place place(index, tokens);
    const T* from = x.row(place.row, place.rest, channels);
    Pack<T> packs[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) packs[e] = own.take(from, e);
    float sum = 0, squares = 0;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      for (int k = 0; k < own.LANES; k++) sum += widen(packs[e].lane[k]);
    }
    const float mean = sharers.sum(sum) / channels;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      for (int k = 0; k < own.LANES; k++) {
        const float apart = own.has(e, k) ? widen(packs[e].lane[k]) - mean : 0;
        squares += apart * apart;
      }
    }
    const float inverse = 1 / sqrtf(sharers.sum(squares) / channels + eps);
    if (found != index) continue;
    if (sharers.lane == 0) stats[2 * index] = mean, stats[2 * index + 1] = inverse;
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      const Pack<T> a = own.take(scale.row(place.row, 0, 0), e), b = own.take(shift.row(place.row, 0, 0), e);
      for (int k = 0; k < own.LANES; k++) {
        const float normed = (widen(packs[e].lane[k]) - mean) * inverse;
        narrow(normed * (1 + widen(a.lane[k])) + widen(b.lane[k]), packs[e].lane[k]);
      }
      own.put(y + index * channels, e, packs[e]);
    }
  }
}

// dx, to which `below` is added, unless its data is null. A block leaves its part of the gradients of shift and scale in two
// rows of `partial`.
template <int EACH, typename T>
__device__ inline void modulated_norm_backward(Images<const T> dy, Images<const T> x, Images<const T> below,
                                               const float* stats, Images<const T> scale, T* dx, float* partial,
                                               u64 tokens, u64 channels, u64 chunk, Sharers sharers) {
  const Chunk of(blockIdx.x, tokens, chunk);
  const OwnPacks<T, EACH> own(channels, sharers,
                              dy.is_aligned() && x.is_aligned() && below.is_aligned() && scale.is_aligned());
  Pack<T> a[EACH];
  for (int e = 0; e < EACH; e++) a[e] = own.take(scale.row(of.image, 0, 0), e);
  float of_shift[EACH][own.LANES] = {}, of_scale[EACH][own.LANES] = {};
  for (u64 token = of.begin; token < of.end; token++) {
    const u64 index = of.image * tokens + token;
    const float mean = stats[2 * index], inverse = stats[2 * index + 1];
    Pack<T> of_x[EACH], of_y[EACH], sum[EACH] = {};
    for (int e = 0; e < EACH; e++) {
      of_x[e] = own.take(x.row(of.image, token, channels), e), of_y[e] = own.take(dy.row(of.image, token, channels), e);
      if (below.data) sum[e] = own.take(below.row(of.image, token, channels), e);
    }
    const auto normed = [&](int e, int k) { return (widen(of_x[e].lane[k]) - mean) * inverse; };
    const auto scaled = [&](int e, int k) { return widen(of_y[e].lane[k]) * (1 + widen(a[e].lane[k])); };
    float total = 0, dot = 0;
    for (int e = 0; e < EACH; e++) {
      for (int k = 0; k < own.LANES; k++) {
        const float d = widen(of_y[e].lane[k]);
        of_shift[e][k] += d, of_scale[e][k] += d * normed(e, k);
        total += scaled(e, k), dot += scaled(e, k) * normed(e, k);
      }
    }
    total = sharers.sum(total) / channels, dot = sharers.sum(dot) / channels;
    for (int e = 0; e < EACH; e++) {
      for (int k = 0; k < own.LANES; k++) {
        narrow(widen(sum[e].lane[k]) + (scaled(e, k) - total - normed(e, k) * dot) * inverse, sum[e].lane[k]);
      }
      own.put(dx + index * channels, e, sum[e]);
    }
  }
  float* sums = partial + blockIdx.x * 2 * channels;
  for (int e = 0; e < EACH; e++) {
    for (int k = 0; k < own.LANES && own.has(e, k); k++) {
      sums[own.at(e) + k] = of_shift[e][k], sums[channels + own.at(e) + k] = of_scale[e][k];
    }
  }
}

// ---- gates ----

// out = x + y gate. A block has a row at a time.
template <int EACH, typename T>
__device__ inline void gated_add(Images<const T> x, const T* y, Images<const T> gate, Images<T> out, u64 images,
                                 u64 tokens, u64 channels, Sharers sharers) {
  const OwnPacks<T, EACH> own(channels, sharers,
                              x.is_aligned() && aligned(y) && gate.is_aligned() && out.is_aligned());
  for (u64 index = blockIdx.x; index < images * tokens; index += gridDim.x) {
    const Place token(index, tokens);
    const T *x_row = x.row(token.row, token.rest, channels), *y_row = y + index * channels;
    Pack<T> sums[EACH], added[EACH], gates[EACH];
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      sums[e] = own.take(x_row, e), added[e] = own.take(y_row, e), gates[e] = own.take(gate.row(token.row, 0, 0), e);
    }
#pragma unroll
    for (int e = 0; e < EACH; e++) {
      for (int k = 0; k < own.LANES; k++) {
        narrow(widen(sums[e].lane[k]) + widen(added[e].lane[k]) * widen(gates[e].lane[k]), sums[e].lane[k]);
      }
      own.put(out.row(token.row, token.rest, channels), e, sums[e]);
    }
  }
}

// dy = dout gate. A block leaves its part of the gate's gradient in a row of `partial`.
template <int EACH, typename T>
__device__ inline void gated_add_backward(Images<const T> dout, const T* y, Images<const T> gate, T* dy, float* partial,
                                          u64 tokens, u64 channels, u64 chunk, Sharers sharers) {
  const Chunk of(blockIdx.x, tokens, chunk);
  const OwnPacks<T, EACH> own(channels, sharers, dout.is_aligned() && aligned(y) && gate.is_aligned());
  for (int e = 0; e < EACH; e++) {
    const Pack<T> g = own.take(gate.row(of.image, 0, 0), e);
    float sums[own.LANES] = {};
#pragma unroll 4
    for (u64 token = of.begin; token < of.end; token++) {
      const u64 row = (of.image * tokens + token) * channels;
      Pack<T> d = own.take(dout.row(of.image, token, channels), e);
      const Pack<T> of_y = own.take(y + row, e);
      for (int k = 0; k < own.LANES; k++) {
        sums[k] += widen(d.lane[k]) * widen(of_y.lane[k]);
        narrow(widen(d.lane[k]) * widen(g.lane[k]), d.lane[k]);
      }
      own.put(dy + row, e, d);
    }
    for (int k = 0; k < own.LANES && own.has(e, k); k++) partial[blockIdx.x * channels + own.at(e) + k] = sums[k];
  }
}

// Of each image the sums over `parts` rows of `partial`.
template <typename T>
__device__ inline void join_images(const float* partial, u64 parts, u64 columns, T* out) {
  const Place block(blockIdx.x, (columns + 31) / 32);
  join_parts(partial + block.row * parts * columns, parts, columns, block.rest * 32, out + block.row * columns, 0);
}

// ---- heads ----

// Heads of the tokens of images, [images, tokens, heads, dim], of which only the last dimension is dense.
template <typename T>
struct Spread {
  T* data;
  i64 image, token, head;  // elements from one to the next

  __device__ T* at(u64 of_image, u64 of_token, u64 of_head) const {
    return data + (i64)of_image * image + (i64)of_token * token + (i64)of_head * head;
  }
};

// Queries, keys and values.
template <typename T>
struct Three {
  Spread<T> of[3];
};
// The weights of the norms of queries and keys; null where they are not normed.
template <typename T>
struct Norms {
  const T* of[2];
};

// 1 / the root of the mean square of a head, of which each sharer has a pack.
template <typename T>
__device__ inline float inverse_root(const Pack<T>& pack, float eps, u64 dim, Sharers sharers) {
  float squares = 0;
  for (int k = 0; k < Pack<T>::LANES; k++) squares += widen(pack.lane[k]) * widen(pack.lane[k]);
  return 1 / sqrtf(sharers.sum(squares) / dim + eps);
}

// The heads of one kind of tokens, dense [images, tokens, 3, heads, dim], to where those of all kinds are. A thread has a
// pack of a query, of its key and of its value.
template <typename T>
__device__ inline void split_heads(const T* qkv, Norms<T> norms, float eps, Three<T> to, u64 images, u64 tokens, u64 heads,
                                   u64 dim, Sharers sharers) {
  constexpr int LANES = Pack<T>::LANES;
  const u64 i = sharers.lane * LANES, all = images * tokens * heads;
  Pack<T> weights[2] = {};
#pragma unroll
  for (int which = 0; which < 2; which++) {
    if (norms.of[which]) weights[which] = read(norms.of[which], i, dim);
  }
  for (u64 base = blockIdx.x * (u64)sharers.groups; base < all; base += gridDim.x * (u64)sharers.groups) {
    const u64 index = base + sharers.group, size = index < all ? dim : 0;
    const Place head(index, heads), token(head.row, tokens);
    const T* from = qkv + (head.row * 3 * heads + head.rest) * dim;
    Pack<T> packs[3];
#pragma unroll
    for (int which = 0; which < 3; which++) packs[which] = read(from + which * heads * dim, i, size);
#pragma unroll
    for (int which = 0; which < 2; which++) {
      if (!norms.of[which]) continue;
      const float inverse = inverse_root(packs[which], eps, dim, sharers);
      for (int k = 0; k < LANES; k++) {
        narrow(widen(packs[which].lane[k]) * inverse * widen(weights[which].lane[k]), packs[which].lane[k]);
      }
    }
#pragma unroll
    for (int which = 0; which < 3; which++) {
      write(to.of[which].at(token.row, token.rest, head.rest), i, size, packs[which]);
    }
  }
}

// A block has `chunk` heads, and leaves its part of the gradients of the weights in two rows of `partial`, unless that is null.
template <typename T>
__device__ inline void split_heads_backward(Three<const T> from, const T* qkv, Norms<T> norms, float eps, T* dqkv,
                                            float* partial, u64 images, u64 tokens, u64 heads, u64 dim, u64 chunk,
                                            Sharers sharers) {
  constexpr int LANES = Pack<T>::LANES, MOST = 256;  // threads of a block
  __shared__ float of_groups[2][MOST * LANES];
  const u64 i = sharers.lane * LANES, all = images * tokens * heads;
  const u64 begin = blockIdx.x * chunk, end = begin + chunk < all ? begin + chunk : all;
  Pack<T> weights[2] = {};
#pragma unroll
  for (int which = 0; which < 2; which++) {
    if (norms.of[which]) weights[which] = read(norms.of[which], i, dim);
  }
  float sums[2][LANES] = {};
  for (u64 base = begin; base < end; base += sharers.groups) {
    const u64 index = base + sharers.group, size = index < end ? dim : 0;
    const Place head(index, heads), token(head.row, tokens);
    const u64 at = (head.row * 3 * heads + head.rest) * dim;
    Pack<T> grads[3], values[2];
#pragma unroll
    for (int which = 0; which < 3; which++) {
      grads[which] = read(from.of[which].at(token.row, token.rest, head.rest), i, size);
    }
#pragma unroll
    for (int which = 0; which < 2; which++) values[which] = read(qkv + at + which * heads * dim, i, size);
#pragma unroll
    for (int which = 0; which < 2; which++) {
      if (!norms.of[which]) continue;
      const Pack<T>&x = values[which], &w = weights[which];
      Pack<T>& d = grads[which];
      const float inverse = inverse_root(x, eps, dim, sharers);
      float dot = 0;
      for (int k = 0; k < LANES; k++) {
        const float product = widen(d.lane[k]) * widen(x.lane[k]) * inverse;
        sums[which][k] += product, dot += product * widen(w.lane[k]);
      }
      dot = sharers.sum(dot) / dim;
      for (int k = 0; k < LANES; k++) {
        narrow((widen(d.lane[k]) * widen(w.lane[k]) - widen(x.lane[k]) * inverse * dot) * inverse, d.lane[k]);
      }
    }
#pragma unroll
    for (int which = 0; which < 3; which++) write(dqkv + at + which * heads * dim, i, size, grads[which]);
  }
  if (!partial) return;
#pragma unroll
  for (int which = 0; which < 2; which++) {
    for (int k = 0; k < LANES; k++) of_groups[which][threadIdx.x * LANES + k] = sums[which][k];
  }
  __syncthreads();
  if (sharers.group > 0) return;
#pragma unroll
  for (int which = 0; which < 2; which++) {
    for (int k = 0; k < LANES && i + k < dim; k++) {
      float sum = sums[which][k];
      for (int group = 1; group < sharers.groups; group++)
        sum += of_groups[which][(group * sharers.count + sharers.lane) * LANES + k];
      partial[(blockIdx.x * 2 + which) * dim + i + k] = sum;
    }
  }
}

// ---- entry points ----

// Rows are narrow where 32 threads have them, with so many packs each and nothing but packs, and wide where a block has one.
constexpr int EACH_NARROW = 8, EACH_WIDE = 2;

#define FOR_TYPE(T, SUFFIX)                                                                                            \
  extern "C" __global__ void __launch_bounds__(512)                                                                    \
      modulated_norm_##SUFFIX(Images<const T> x, Images<const T> shift, Images<const T> scale, float eps, T* y,        \
                              float* stats, u64 images, u64 tokens, u64 channels, int sharers) {                       \
    modulated_norm<EACH_WIDE, false>(x, shift, scale, eps, y, stats, images, tokens, channels, Sharers(sharers));      \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256, 2)                                                                 \
      modulated_norm_narrow_##SUFFIX(Images<const T> x, Images<const T> shift, Images<const T> scale, float eps, T* y, \
                                     float* stats, u64 images, u64 tokens, u64 channels, int sharers) {                \
    modulated_norm<EACH_NARROW, true>(x, shift, scale, eps, y, stats, images, tokens, channels, Sharers(sharers));     \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(512)                                                                    \
      modulated_norm_backward_##SUFFIX(Images<const T> dy, Images<const T> x, Images<const T> below,                   \
                                       const float* stats, Images<const T> scale, T* dx, float* partial, u64 tokens,   \
                                       u64 channels, u64 chunk, int sharers) {                                         \
    modulated_norm_backward<EACH_WIDE>(dy, x, below, stats, scale, dx, partial, tokens, channels, chunk,               \
                                       Sharers(sharers));                                                              \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(512)                                                                    \
      gated_add_##SUFFIX(Images<const T> x, const T* y, Images<const T> gate, Images<T> out, u64 images, u64 tokens,   \
                         u64 channels, int sharers) {                                                                  \
    gated_add<EACH_WIDE>(x, y, gate, out, images, tokens, channels, Sharers(sharers));                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(512)                                                                    \
      gated_add_backward_##SUFFIX(Images<const T> dout, const T* y, Images<const T> gate, T* dy, float* partial,       \
                                  u64 tokens, u64 channels, u64 chunk, int sharers) {                                  \
    gated_add_backward<EACH_WIDE>(dout, y, gate, dy, partial, tokens, channels, chunk, Sharers(sharers));              \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(1024)                                                                   \
      join_images_##SUFFIX(const float* partial, u64 parts, u64 columns, T* out) {                                     \
    join_images(partial, parts, columns, out);                                                                         \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      split_heads_##SUFFIX(const T* qkv, Norms<T> norms, float eps, Three<T> to, u64 images, u64 tokens, u64 heads,    \
                           u64 dim, int sharers) {                                                                     \
    split_heads(qkv, norms, eps, to, images, tokens, heads, dim, Sharers(sharers));                                    \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(256)                                                                    \
      split_heads_backward_##SUFFIX(Three<const T> from, const T* qkv, Norms<T> norms, float eps, T* dqkv,             \
                                    float* partial, u64 images, u64 tokens, u64 heads, u64 dim, u64 chunk,             \
                                    int sharers) {                                                                     \
    split_heads_backward(from, qkv, norms, eps, dqkv, partial, images, tokens, heads, dim, chunk, Sharers(sharers));   \
  }

FOR_TYPE(float, f32)
FOR_TYPE(Bf16, bf16)
FOR_TYPE(F16, f16)
