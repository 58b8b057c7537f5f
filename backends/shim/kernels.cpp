// CPU kernels of `ops`: fp32 in, fp32 out, threads from libtorch's own pool.
//
// The arguments were checked in Rust: shapes fit, indices are in range. A kernel has two functions: `..._range`
// does the work for a range of rows and is compiled for several instruction sets; the C function below it
// spreads ranges over threads. Each row is computed by one thread in one order, and sums over rows run in
// chunks of a fixed number of rows, so that no result depends on the number of threads.
#include <ATen/Parallel.h>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>
#include "shim.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define FOR_EACH_ISA __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#endif
#else
#define FOR_EACH_ISA
#endif
#define INLINE static inline __attribute__((always_inline))

// A [rows, heads, dim] view: a row is dense, rows lie `stride` floats apart.
struct Heads {
  float* data;
  int64_t stride;
};

namespace {

// ---------------------------------------------------------------------------------------------- vectors

constexpr int64_t LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef float UnalignedVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef float Half __attribute__((vector_size(32)));
typedef float UnalignedHalf __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t IntHalf __attribute__((vector_size(32)));
typedef float Quad __attribute__((vector_size(16)));
typedef int32_t IntQuad __attribute__((vector_size(16)));
typedef float UnalignedQuad __attribute__((vector_size(16), aligned(4), may_alias));

constexpr float INFINITE = std::numeric_limits<float>::infinity();
// Work below this many floats is not worth waking a thread.
constexpr int64_t GRAIN_FLOATS = 1 << 15;
// Rows that one partial sum covers.
constexpr int64_t CHUNK_ROWS = 256;

INLINE int64_t round_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }
INLINE int64_t chunks_of(int64_t rows) { return (rows + CHUNK_ROWS - 1) / CHUNK_ROWS; }
INLINE int64_t grain(int64_t floats_a_row) { return std::max<int64_t>(1, GRAIN_FLOATS / std::max<int64_t>(1, floats_a_row)); }

INLINE Vec load(const float* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
INLINE void store(float* to, Vec value) { *reinterpret_cast<UnalignedVec*>(to) = value; }

// The first `count` lanes of a vector, the others 0; and the reverse. `count` may be more than a vector's.
INLINE Vec load(const float* from, int64_t count) {
  if (count >= LANES) return load(from);
  Vec value = {};
  for (int64_t lane = 0; lane < count; ++lane) value[lane] = from[lane];
  return value;
}
INLINE void store(float* to, Vec value, int64_t count) {
  if (count >= LANES) return store(to, value);
  for (int64_t lane = 0; lane < count; ++lane) to[lane] = value[lane];
}

// Selection works on masks of all ones and all zeros, made without comparing vectors: GCC takes a comparison of
// generic vectors apart into lanes when the instruction set comes from an attribute.
template <typename Floats, typename Ints>
INLINE Floats select(const Ints& mask, const Floats& chosen, const Floats& otherwise) {
  return (Floats)(((Ints)chosen & mask) | ((Ints)otherwise & ~mask));
}
// The lanes where a < b: the sign of the difference.
template <typename Ints = IntVec, typename Floats>
INLINE Ints less(const Floats& a, const Floats& b) {
  return (Ints)(a - b) >> 31;
}
template <typename Ints = IntVec, typename Floats>
INLINE Floats larger(const Floats& a, const Floats& b) {
  return select(less<Ints>(a, b), b, a);
}
// The first `count` lanes.
INLINE IntVec first_lanes(int64_t count) {
  static const int32_t ones_then_zeros[2 * LANES] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  IntVec mask;
  std::memcpy(&mask, ones_then_zeros + LANES - std::max<int64_t>(0, std::min(count, LANES)), sizeof mask);
  return mask;
}

// The two halves of a vector, for sums and maxima over its lanes.
template <typename Small, typename Large>
INLINE void halves(const Large& value, Small* low, Small* high) {
  std::memcpy(low, &value, sizeof *low);
  std::memcpy(high, reinterpret_cast<const char*>(&value) + sizeof *low, sizeof *high);
}
INLINE float sum_lanes(const Vec& value) {
  Half a, b;
  halves(value, &a, &b);
  Quad c, d;
  halves(Half(a + b), &c, &d);
  const Quad sum = c + d;
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}
INLINE float max_lanes(const Vec& value) {
  Half a, b;
  halves(value, &a, &b);
  Quad c, d;
  halves(larger<IntHalf>(a, b), &c, &d);
  const Quad max = larger<IntQuad>(c, d);
  return std::max(std::max(max[0], max[2]), std::max(max[1], max[3]));
}

// e^x to about 2 units in the last place (Cephes' polynomial on [-ln 2 / 2, ln 2 / 2]); 0 below -87.3.
INLINE Vec exp(const Vec& x) {
  const Vec zero = {};
  const Vec upper = zero + 88.3f, lower = zero - 87.3f;
  const IntVec vanishes = less(x, lower);
  const Vec clamped = select(less(upper, x), upper, select(vanishes, lower, x));
  // Adding 1.5 * 2^23 rounds to an integer, which then lies in the low bits.
  const Vec shifted = clamped * 1.44269504088896341f + 12582912.0f;
  const Vec n = shifted - 12582912.0f;
  const Vec r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = zero + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const IntVec exponent = ((IntVec)shifted - 0x4b400000 + 127) << 23;
  return select(vanishes, zero, Vec(p * (Vec)exponent));
}

// ------------------------------------------------------------------------------------------ norm, sums

FOR_EACH_ISA void rms_norm_range(Heads x, const float* residual, const float* weight, float eps, float* y, float* rstd,
                                 int64_t begin, int64_t end, int64_t heads, int64_t dim) {
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      float* xr = x.data + row * x.stride + head * dim;
      const int64_t flat = row * heads + head;
      Vec squares = {};
      for (int64_t i = 0; i < dim; i += LANES) {
        Vec value = load(xr + i, dim - i);
        if (residual) {
          value += load(residual + flat * dim + i, dim - i);
          store(xr + i, value, dim - i);
        }
        squares += value * value;
      }
      const float scale = 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(dim) + eps);
      rstd[flat] = scale;
      for (int64_t i = 0; i < dim; i += LANES)
        store(y + flat * dim + i, load(xr + i, dim - i) * scale * load(weight + i, dim - i), dim - i);
    }
  }
}

// One chunk of rows; its part of the weight's gradient goes to `dweight`.
FOR_EACH_ISA void rms_norm_backward_range(Heads dy, Heads x, const float* rstd, const float* weight, Heads dx,
                                          float* dweight, int64_t begin, int64_t end, int64_t heads, int64_t dim) {
  std::fill(dweight, dweight + dim, 0.0f);
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      float* dyr = dy.data + row * dy.stride + head * dim;
      float* dxr = dx.data + row * dx.stride + head * dim;
      const float* xr = x.data + row * x.stride + head * dim;
      const float scale = rstd[row * heads + head];
      Vec dots = {};
      for (int64_t i = 0; i < dim; i += LANES)
        dots += load(dyr + i, dim - i) * load(weight + i, dim - i) * load(xr + i, dim - i);
      const float mean = sum_lanes(dots) * scale / static_cast<float>(dim);
      for (int64_t i = 0; i < dim; i += LANES) {
        const Vec grad = load(dyr + i, dim - i), w = load(weight + i, dim - i);
        const Vec normed = load(xr + i, dim - i) * scale;
        store(dweight + i, load(dweight + i, dim - i) + grad * normed, dim - i);
        store(dxr + i, load(dxr + i, dim - i) + (grad * w - normed * mean) * scale, dim - i);
        store(dyr + i, normed * w, dim - i);
      }
    }
  }
}

FOR_EACH_ISA void sum_rows_range(const float* x, float* out, int64_t begin, int64_t end, int64_t columns) {
  std::fill(out, out + columns, 0.0f);
  for (int64_t row = begin; row < end; ++row)
    for (int64_t i = 0; i < columns; i += LANES)
      store(out + i, load(out + i, columns - i) + load(x + row * columns + i, columns - i), columns - i);
}

// Adds the partial sums of all chunks, in their order.
void join_chunks(const std::vector<float>& parts, int64_t chunks, int64_t columns, float* out, bool add) {
  if (!add) std::fill(out, out + columns, 0.0f);
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    for (int64_t i = 0; i < columns; ++i) out[i] += parts[chunk * columns + i];
}

// ------------------------------------------------------------------------------------- rotation, SwiGLU

FOR_EACH_ISA void rope_range(Heads x, const int64_t* positions, const float* table, float sign, int64_t begin,
                             int64_t end, int64_t heads, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float* cosines = table + positions[row] * dim;
    const float* sines = cosines + half;
    for (int64_t head = 0; head < heads; ++head) {
      float* first = x.data + row * x.stride + head * dim;
      float* second = first + half;
      int64_t i = 0;
      for (; i + 8 <= half; i += 8) {
        const Half a = *(UnalignedHalf*)(first + i), b = *(UnalignedHalf*)(second + i);
        const Half cosine = *(UnalignedHalf*)(cosines + i), sine = *(UnalignedHalf*)(sines + i) * sign;
        *(UnalignedHalf*)(first + i) = a * cosine - b * sine;
        *(UnalignedHalf*)(second + i) = b * cosine + a * sine;
      }
      for (; i < half; ++i) {
        const float a = first[i], b = second[i], sine = sign * sines[i];
        first[i] = a * cosines[i] - b * sine;
        second[i] = b * cosines[i] + a * sine;
      }
    }
  }
}

FOR_EACH_ISA void swiglu_range(const float* gate_up, float* y, int64_t begin, int64_t end, int64_t size) {
  for (int64_t row = begin; row < end; ++row) {
    const float *gates = gate_up + row * 2 * size, *ups = gates + size;
    for (int64_t i = 0; i < size; i += LANES) {
      const Vec gate = load(gates + i, size - i), up = load(ups + i, size - i);
      store(y + row * size + i, gate * up / (1.0f + exp(-gate)), size - i);
    }
  }
}

FOR_EACH_ISA void swiglu_backward_range(float* gate_up, float* dy, int64_t begin, int64_t end, int64_t size) {
  for (int64_t row = begin; row < end; ++row) {
    float *gates = gate_up + row * 2 * size, *ups = gates + size, *grads = dy + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      const Vec gate = load(gates + i, size - i), up = load(ups + i, size - i), grad = load(grads + i, size - i);
      const Vec sigmoid = 1.0f / (1.0f + exp(-gate)), silu = gate * sigmoid;
      store(gates + i, grad * up * (sigmoid + silu * (1.0f - sigmoid)), size - i);
      store(ups + i, grad * silu, size - i);
      store(grads + i, silu * up, size - i);
    }
  }
}

// -------------------------------------------------------------------------------- embedding, log-probs

FOR_EACH_ISA void embedding_backward_range(const float* dy, const int64_t* tokens, float* dweight, bool add,
                                           int64_t begin, int64_t end, int64_t rows, int64_t vocab, int64_t columns) {
  if (!add)
    for (int64_t token = 0; token < vocab; ++token)
      std::fill(dweight + token * columns + begin, dweight + token * columns + end, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    float* to = dweight + tokens[row] * columns;
    for (int64_t i = begin; i < end; i += LANES)
      store(to + i, load(to + i, end - i) + load(dy + row * columns + i, end - i), end - i);
  }
}

FOR_EACH_ISA void logprobs_range(const float* logits, const int64_t* targets, float inverse_temperature, float* logprobs,
                                 float* entropy, float* lse, int64_t begin, int64_t end, int64_t vocab) {
  for (int64_t row = begin; row < end; ++row) {
    const float* z = logits + row * vocab;
    Vec maxima = Vec{} - INFINITE;
    for (int64_t i = 0; i < vocab; i += LANES)
      maxima = larger(maxima, select(first_lanes(vocab - i), load(z + i, vocab - i), Vec(Vec{} - INFINITE)));
    const float max = max_lanes(maxima) * inverse_temperature;
    Vec sums = {}, moments = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
      const Vec shifted = load(z + i, vocab - i) * inverse_temperature - max;
      const Vec mass = select(first_lanes(vocab - i), exp(shifted), Vec{});
      sums += mass;
      moments += mass * shifted;
    }
    const float sum = sum_lanes(sums), log_sum = std::log(sum);
    logprobs[row] = z[targets[row]] * inverse_temperature - max - log_sum;
    entropy[row] = log_sum - sum_lanes(moments) / sum;
    lse[row] = max + log_sum;
  }
}

FOR_EACH_ISA void logprobs_backward_range(float* logits, const int64_t* targets, float inverse_temperature,
                                          const float* lse, const float* entropy, const float* dlogprobs,
                                          const float* dentropy, int64_t begin, int64_t end, int64_t vocab) {
  for (int64_t row = begin; row < end; ++row) {
    float* z = logits + row * vocab;
    const float grad = dlogprobs[row] * inverse_temperature;
    const float entropy_grad = dentropy ? dentropy[row] * inverse_temperature : 0.0f;
    const float offset = entropy_grad * entropy[row] + grad;
    for (int64_t i = 0; i < vocab; i += LANES) {
      const Vec log_p = load(z + i, vocab - i) * inverse_temperature - lse[row];
      store(z + i, -exp(log_p) * (entropy_grad * log_p + offset), vocab - i);
    }
    z[targets[row]] += grad;
  }
}

// -------------------------------------------------------------------------------------------- attention

// Query rows that one pass over the keys serves.
constexpr int64_t QUERIES = 4;

// to[d][t] = from[t][d]; rows of `padded`, with zeros behind t up to a whole vector. In tiles of 4 by 4, in
// registers.
INLINE void transpose(const float* from, int64_t stride, int64_t rows, int64_t dim, int64_t padded, float* to) {
  for (int64_t t = 0; t < round_up(rows); t += 4) {
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      Quad in[4] = {};
      for (int64_t r = 0; r < 4 && t + r < rows; ++r) in[r] = *(const UnalignedQuad*)(from + (t + r) * stride + d);
      const Quad a = {in[0][0], in[1][0], in[0][1], in[1][1]}, b = {in[2][0], in[3][0], in[2][1], in[3][1]};
      const Quad e = {in[0][2], in[1][2], in[0][3], in[1][3]}, f = {in[2][2], in[3][2], in[2][3], in[3][3]};
      *(UnalignedQuad*)(to + d * padded + t) = Quad{a[0], a[1], b[0], b[1]};
      *(UnalignedQuad*)(to + (d + 1) * padded + t) = Quad{a[2], a[3], b[2], b[3]};
      *(UnalignedQuad*)(to + (d + 2) * padded + t) = Quad{e[0], e[1], f[0], f[1]};
      *(UnalignedQuad*)(to + (d + 3) * padded + t) = Quad{e[2], e[3], f[2], f[3]};
    }
    for (; d < dim; ++d)
      for (int64_t r = 0; r < 4; ++r) to[d * padded + t + r] = t + r < rows ? from[(t + r) * stride + d] : 0.0f;
  }
}

// to[t][d] = from[t][d]; d is padded with zeros to `padded`.
INLINE void copy_rows(const float* from, int64_t stride, int64_t rows, int64_t dim, int64_t padded, float* to) {
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < dim; i += LANES) store(to + t * padded + i, load(from + t * stride + i, dim - i));
}

// out[r][t] = sum over d of rows[r][d] * transposed[d][t], for the first `columns` t (a multiple of LANES).
INLINE void times_transposed(const float* rows, int64_t row_stride, const float* transposed, int64_t dim,
                             int64_t padded, int64_t columns, float* out) {
  for (int64_t t = 0; t < columns; t += LANES) {
    Vec sums[QUERIES] = {};
    for (int64_t d = 0; d < dim; ++d) {
      const Vec column = load(transposed + d * padded + t);
      for (int64_t r = 0; r < QUERIES; ++r) sums[r] += rows[r * row_stride + d] * column;
    }
    for (int64_t r = 0; r < QUERIES; ++r) store(out + r * padded + t, sums[r]);
  }
}

// out[r][d] = sum over t < count of weights[r][t] * rows[t][d].
INLINE void weighted_sums(const float* weights, int64_t weight_stride, const float* rows, int64_t count,
                          int64_t dim_padded, float* out) {
  for (int64_t i = 0; i < dim_padded; i += LANES) {
    Vec sums[QUERIES] = {};
    for (int64_t t = 0; t < count; ++t) {
      const Vec row = load(rows + t * dim_padded + i);
      for (int64_t r = 0; r < QUERIES; ++r) sums[r] += weights[r * weight_stride + t] * row;
    }
    for (int64_t r = 0; r < QUERIES; ++r) store(out + r * dim_padded + i, sums[r]);
  }
}

// sums[t][d] += sum over r of weights[r][t] * rows[r][d], for t < count.
INLINE void add_outer(const float* weights, int64_t weight_stride, const float* rows, int64_t count,
                      int64_t dim_padded, float* sums) {
  for (int64_t i = 0; i < dim_padded; i += LANES) {
    Vec row[QUERIES];
    for (int64_t r = 0; r < QUERIES; ++r) row[r] = load(rows + r * dim_padded + i);
    for (int64_t t = 0; t < count; ++t) {
      Vec sum = load(sums + t * dim_padded + i);
      for (int64_t r = 0; r < QUERIES; ++r) sum += weights[r * weight_stride + t] * row[r];
      store(sums + t * dim_padded + i, sum);
    }
  }
}

// What all kernels of attention know of a call.
struct Attention {
  Heads q, k, v;
  const int64_t* offsets;
  int64_t heads, kv_heads, dim, max_len;
  float scale;
  int64_t group() const { return heads / kv_heads; }
  int64_t len_padded() const { return round_up(max_len); }
  int64_t dim_padded() const { return round_up(dim); }
};

// Turns the scores of one query over its first `keys` keys into e^(scale * score - max), 0 beyond them up to
// `columns`. Returns the sum, and the max through `max`.
INLINE float softmax_row(float* scores, float scale, int64_t keys, int64_t columns, float* max) {
  Vec maxima = Vec{} - INFINITE;
  for (int64_t t = 0; t < columns; t += LANES) {
    const Vec score = select(first_lanes(keys - t), Vec(load(scores + t) * scale), Vec(Vec{} - INFINITE));
    store(scores + t, score);
    maxima = larger(maxima, score);
  }
  *max = max_lanes(maxima);
  Vec sums = {};
  for (int64_t t = 0; t < columns; t += LANES) {
    const Vec mass = exp(load(scores + t) - *max);
    store(scores + t, mass);
    sums += mass;
  }
  return sum_lanes(sums);
}

// Tasks are (sequence, key head). Scores of a few queries over all keys are held at once, so softmax needs no
// running maximum; keys are transposed first, so that a vector holds 16 keys and no lanes are summed.
FOR_EACH_ISA void attention_range(const Attention& a, float* out, float* lse, float* scratch, int64_t begin,
                                  int64_t end) {
  const int64_t padded = a.len_padded(), dim_padded = a.dim_padded();
  float* keys = scratch;                               // [dim, padded]
  float* values = keys + a.dim * padded;               // [padded, dim_padded]
  float* scores = values + padded * dim_padded;        // [QUERIES, padded]
  float* queries = scores + QUERIES * padded;          // [QUERIES, dim_padded]
  float* sums = queries + QUERIES * dim_padded;        // [QUERIES, dim_padded]
  for (int64_t task = begin; task < end; ++task) {
    const int64_t first = a.offsets[task / a.kv_heads], len = a.offsets[task / a.kv_heads + 1] - first;
    const int64_t kv_head = task % a.kv_heads;
    transpose(a.k.data + first * a.k.stride + kv_head * a.dim, a.k.stride, len, a.dim, padded, keys);
    copy_rows(a.v.data + first * a.v.stride + kv_head * a.dim, a.v.stride, len, a.dim, dim_padded, values);
    for (int64_t head = kv_head * a.group(); head < (kv_head + 1) * a.group(); ++head) {
      for (int64_t query = 0; query < len; query += QUERIES) {
        const int64_t rows = std::min(QUERIES, len - query), seen = query + rows, columns = round_up(seen);
        copy_rows(a.q.data + (first + query) * a.q.stride + head * a.dim, a.q.stride, rows, a.dim, dim_padded, queries);
        times_transposed(queries, dim_padded, keys, a.dim, padded, columns, scores);
        float inverse[QUERIES];
        for (int64_t r = 0; r < rows; ++r) {
          float max;
          const float sum = softmax_row(scores + r * padded, a.scale, query + r + 1, columns, &max);
          lse[(first + query + r) * a.heads + head] = max + std::log(sum);
          inverse[r] = 1.0f / sum;
        }
        weighted_sums(scores, padded, values, seen, dim_padded, sums);
        for (int64_t r = 0; r < rows; ++r) {
          float* to = out + ((first + query + r) * a.heads + head) * a.dim;
          for (int64_t i = 0; i < a.dim; i += LANES)
            store(to + i, load(sums + r * dim_padded + i) * inverse[r], a.dim - i);
        }
      }
    }
  }
}

int64_t attention_scratch(const Attention& a) {
  return a.len_padded() * (a.dim + a.dim_padded() + QUERIES) + 2 * QUERIES * a.dim_padded();
}

// What attention's backward reads and writes beside the inputs.
struct AttentionGrads {
  const float *dout, *out, *lse;
  Heads dq, dk, dv;
};

// In place: scores to probabilities, and the probabilities' gradients to the scores' gradients.
INLINE void scores_backward(float* scores, float* grads, float scale, float lse, float delta, int64_t keys,
                            int64_t columns) {
  for (int64_t t = 0; t < columns; t += LANES) {
    const Vec prob = select(first_lanes(keys - t), exp(load(scores + t) * scale - lse), Vec{});
    store(scores + t, prob);
    store(grads + t, prob * (load(grads + t) - delta) * scale);
  }
}

FOR_EACH_ISA void attention_backward_range(const Attention& a, const AttentionGrads& g, float* scratch, int64_t begin,
                                           int64_t end) {
  const int64_t padded = a.len_padded(), dim_padded = a.dim_padded();
  float* keys_transposed = scratch;                           // [dim, padded]
  float* values_transposed = keys_transposed + a.dim * padded;  // [dim, padded]
  float* keys = values_transposed + a.dim * padded;           // [padded, dim_padded]
  float* dkeys = keys + padded * dim_padded;                  // [padded, dim_padded]
  float* dvalues = dkeys + padded * dim_padded;               // [padded, dim_padded]
  float* scores = dvalues + padded * dim_padded;              // [QUERIES, padded]
  float* dscores = scores + QUERIES * padded;                 // [QUERIES, padded]
  float* queries = dscores + QUERIES * padded;                // [QUERIES, dim_padded]
  float* douts = queries + QUERIES * dim_padded;              // [QUERIES, dim_padded]
  float* sums = douts + QUERIES * dim_padded;                 // [QUERIES, dim_padded]
  const int64_t out_stride = a.heads * a.dim;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t first = a.offsets[task / a.kv_heads], len = a.offsets[task / a.kv_heads + 1] - first;
    const int64_t kv_head = task % a.kv_heads;
    const float* k = a.k.data + first * a.k.stride + kv_head * a.dim;
    transpose(k, a.k.stride, len, a.dim, padded, keys_transposed);
    transpose(a.v.data + first * a.v.stride + kv_head * a.dim, a.v.stride, len, a.dim, padded, values_transposed);
    copy_rows(k, a.k.stride, len, a.dim, dim_padded, keys);
    std::fill(dkeys, dkeys + len * dim_padded, 0.0f);
    std::fill(dvalues, dvalues + len * dim_padded, 0.0f);
    for (int64_t head = kv_head * a.group(); head < (kv_head + 1) * a.group(); ++head) {
      for (int64_t query = 0; query < len; query += QUERIES) {
        const int64_t rows = std::min(QUERIES, len - query), seen = query + rows, columns = round_up(seen);
        const int64_t row = first + query, at = row * out_stride + head * a.dim;
        copy_rows(a.q.data + row * a.q.stride + head * a.dim, a.q.stride, rows, a.dim, dim_padded, queries);
        copy_rows(g.dout + at, out_stride, rows, a.dim, dim_padded, douts);
        times_transposed(queries, dim_padded, keys_transposed, a.dim, padded, columns, scores);
        times_transposed(douts, dim_padded, values_transposed, a.dim, padded, columns, dscores);
        for (int64_t r = 0; r < rows; ++r) {
          Vec dots = {};
          for (int64_t i = 0; i < a.dim; i += LANES)
            dots += load(douts + r * dim_padded + i) * load(g.out + at + r * out_stride + i, a.dim - i);
          const float lse = g.lse[(row + r) * a.heads + head];
          scores_backward(scores + r * padded, dscores + r * padded, a.scale, lse, sum_lanes(dots), query + r + 1, columns);
        }
        for (int64_t r = rows; r < QUERIES; ++r) {  // rows past the end add nothing to keys and values
          std::fill(scores + r * padded, scores + r * padded + columns, 0.0f);
          std::fill(dscores + r * padded, dscores + r * padded + columns, 0.0f);
        }
        weighted_sums(dscores, padded, keys, seen, dim_padded, sums);
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t i = 0; i < a.dim; i += LANES)
            store(g.dq.data + (row + r) * g.dq.stride + head * a.dim + i, load(sums + r * dim_padded + i), a.dim - i);
        add_outer(dscores, padded, queries, seen, dim_padded, dkeys);
        add_outer(scores, padded, douts, seen, dim_padded, dvalues);
      }
    }
    for (int64_t t = 0; t < len; ++t) {
      for (int64_t i = 0; i < a.dim; i += LANES) {
        store(g.dk.data + (first + t) * g.dk.stride + kv_head * a.dim + i, load(dkeys + t * dim_padded + i), a.dim - i);
        store(g.dv.data + (first + t) * g.dv.stride + kv_head * a.dim + i, load(dvalues + t * dim_padded + i), a.dim - i);
      }
    }
  }
}

int64_t attention_backward_scratch(const Attention& a) {
  return a.len_padded() * (2 * a.dim + 3 * a.dim_padded() + 2 * QUERIES) + 3 * QUERIES * a.dim_padded();
}

// One new token of each sequence against its cache [slots, cache_len, kv_heads, dim]; tasks are (row, head).
struct Decode {
  Heads q;
  const float *keys, *values;
  const int64_t *slots, *lengths;
  int64_t cache_len, heads, kv_heads, dim;
  float scale;
};

FOR_EACH_ISA void decode_attention_range(const Decode& d, float* out, float* scores, int64_t begin, int64_t end) {
  const int64_t stride = d.kv_heads * d.dim;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / d.heads, head = task % d.heads, len = d.lengths[row], columns = round_up(len);
    const int64_t start = d.slots[row] * d.cache_len * stride + head / (d.heads / d.kv_heads) * d.dim;
    const float* query = d.q.data + row * d.q.stride + head * d.dim;
    for (int64_t t = 0; t < len; ++t) {
      Vec dots = {};
      for (int64_t i = 0; i < d.dim; i += LANES)
        dots += load(query + i, d.dim - i) * load(d.keys + start + t * stride + i, d.dim - i);
      scores[t] = sum_lanes(dots);
    }
    std::fill(scores + len, scores + columns, 0.0f);
    float max;
    const float inverse = 1.0f / softmax_row(scores, d.scale, len, columns, &max);
    for (int64_t i = 0; i < d.dim; i += LANES) {
      Vec sums = {};
      for (int64_t t = 0; t < len; ++t) sums += scores[t] * load(d.values + start + t * stride + i, d.dim - i);
      store(out + task * d.dim + i, sums * inverse, d.dim - i);
    }
  }
}

}  // namespace

// ------------------------------------------------------------------------------------------------ C ABI
// Each returns 0, or -1 with the reason in anyroll_last_error (memory, or what a thread threw).

extern "C" {

int anyroll_rms_norm(Heads x, const float* residual, const float* weight, float eps, float* y, float* rstd, int64_t rows,
                     int64_t heads, int64_t dim) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(heads * dim), [&](int64_t begin, int64_t end) {
      rms_norm_range(x, residual, weight, eps, y, rstd, begin, end, heads, dim);
    });
    return 0;
  });
}

int anyroll_rms_norm_backward(Heads dy, Heads x, const float* rstd, const float* weight, Heads dx, float* dweight,
                              bool add, int64_t rows, int64_t heads, int64_t dim) {
  return guarded(-1, [&] {
    const int64_t chunks = chunks_of(rows);
    std::vector<float> parts(chunks * dim);
    at::parallel_for(0, chunks, grain(CHUNK_ROWS * heads * dim), [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk)
        rms_norm_backward_range(dy, x, rstd, weight, dx, parts.data() + chunk * dim, chunk * CHUNK_ROWS,
                                std::min(rows, (chunk + 1) * CHUNK_ROWS), heads, dim);
    });
    join_chunks(parts, chunks, dim, dweight, add);
    return 0;
  });
}

int anyroll_sum_rows(const float* x, float* out, bool add, int64_t rows, int64_t columns) {
  return guarded(-1, [&] {
    const int64_t chunks = chunks_of(rows);
    std::vector<float> parts(chunks * columns);
    at::parallel_for(0, chunks, grain(CHUNK_ROWS * columns), [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk)
        sum_rows_range(x, parts.data() + chunk * columns, chunk * CHUNK_ROWS, std::min(rows, (chunk + 1) * CHUNK_ROWS),
                       columns);
    });
    join_chunks(parts, chunks, columns, out, add);
    return 0;
  });
}

int anyroll_rope(Heads x, const int64_t* positions, const float* table, float sign, int64_t rows, int64_t heads,
                 int64_t dim) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(heads * dim), [&](int64_t begin, int64_t end) {
      rope_range(x, positions, table, sign, begin, end, heads, dim);
    });
    return 0;
  });
}

int anyroll_swiglu(const float* gate_up, float* y, int64_t rows, int64_t size) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(3 * size),
                     [&](int64_t begin, int64_t end) { swiglu_range(gate_up, y, begin, end, size); });
    return 0;
  });
}

int anyroll_swiglu_backward(float* gate_up, float* dy, int64_t rows, int64_t size) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(3 * size),
                     [&](int64_t begin, int64_t end) { swiglu_backward_range(gate_up, dy, begin, end, size); });
    return 0;
  });
}

int anyroll_embedding_backward(const float* dy, const int64_t* tokens, float* dweight, bool add, int64_t rows,
                               int64_t vocab, int64_t columns) {
  return guarded(-1, [&] {
    const int64_t blocks = round_up(columns) / LANES;  // each thread owns some columns of every row
    at::parallel_for(0, blocks, grain((rows + vocab) * LANES), [&](int64_t begin, int64_t end) {
      embedding_backward_range(dy, tokens, dweight, add, begin * LANES, std::min(columns, end * LANES), rows, vocab,
                               columns);
    });
    return 0;
  });
}

int anyroll_logprobs(const float* logits, const int64_t* targets, float inverse_temperature, float* logprobs,
                     float* entropy, float* lse, int64_t rows, int64_t vocab) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(vocab), [&](int64_t begin, int64_t end) {
      logprobs_range(logits, targets, inverse_temperature, logprobs, entropy, lse, begin, end, vocab);
    });
    return 0;
  });
}

int anyroll_logprobs_backward(float* logits, const int64_t* targets, float inverse_temperature, const float* lse,
                              const float* entropy, const float* dlogprobs, const float* dentropy, int64_t rows,
                              int64_t vocab) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(vocab), [&](int64_t begin, int64_t end) {
      logprobs_backward_range(logits, targets, inverse_temperature, lse, entropy, dlogprobs, dentropy, begin, end,
                              vocab);
    });
    return 0;
  });
}

int anyroll_attention(Heads q, Heads k, Heads v, const int64_t* offsets, float scale, float* out, float* lse,
                      int64_t sequences, int64_t max_len, int64_t heads, int64_t kv_heads, int64_t dim) {
  return guarded(-1, [&] {
    const Attention a{q, k, v, offsets, heads, kv_heads, dim, max_len, scale};
    at::parallel_for(0, sequences * kv_heads, grain(max_len * dim), [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(attention_scratch(a));
      attention_range(a, out, lse, scratch.data(), begin, end);
    });
    return 0;
  });
}

int anyroll_attention_backward(Heads q, Heads k, Heads v, const float* dout, const float* out, const float* lse,
                               Heads dq, Heads dk, Heads dv, const int64_t* offsets, float scale, int64_t sequences,
                               int64_t max_len, int64_t heads, int64_t kv_heads, int64_t dim) {
  return guarded(-1, [&] {
    const Attention a{q, k, v, offsets, heads, kv_heads, dim, max_len, scale};
    const AttentionGrads g{dout, out, lse, dq, dk, dv};
    at::parallel_for(0, sequences * kv_heads, grain(max_len * dim), [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(attention_backward_scratch(a));
      attention_backward_range(a, g, scratch.data(), begin, end);
    });
    return 0;
  });
}

int anyroll_decode_attention(Heads q, const float* keys, const float* values, const int64_t* slots,
                             const int64_t* lengths, float scale, float* out, int64_t rows, int64_t cache_len,
                             int64_t heads, int64_t kv_heads, int64_t dim) {
  return guarded(-1, [&] {
    const Decode d{q, keys, values, slots, lengths, cache_len, heads, kv_heads, dim, scale};
    at::parallel_for(0, rows * heads, grain(16 * dim), [&](int64_t begin, int64_t end) {
      std::vector<float> scores(round_up(cache_len));
      decode_attention_range(d, out, scores.data(), begin, end);
    });
    return 0;
  });
}
}
