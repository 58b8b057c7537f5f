// Attention on the CPU: over packed sequences forward and backward, and of one token over a cache. What
// kernels.cpp says of kernels holds here.
//
// Scores of a few queries over all keys are held at once, so softmax needs no running maximum; keys are
// transposed first, so that a vector holds several keys and no lanes are summed.
//
// All forward kernels add in one order: over a head's elements from the first on, and over keys in vectors that
// begin at multiples of LANES. What a query comes to has the same bits whichever of them runs it, and beside
// whatever: keys that it does not see weigh nothing.
#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "shim.h"
#include "vectors.h"

namespace {

// Query rows that one pass over the keys serves.
constexpr int64_t QUERIES = 8;

// to[d][t] = row(t)[d] for t from `begin`, a multiple of LANES; rows of `padded`, with zeros behind t up to a
// whole vector. In tiles of 4 by 4, in registers.
template <typename Row>
INLINE void transpose_rows(const Row& row, int64_t begin, int64_t rows, int64_t dim, int64_t padded, float* to) {
  for (int64_t t = begin; t < round_up(rows); t += 4) {
    const float* from[4] = {};
    for (int64_t r = 0; r < 4 && t + r < rows; ++r) from[r] = row(t + r);
    int64_t d = 0;
    for (; d + 4 <= dim; d += 4) {
      Quad in[4] = {};
      for (int64_t r = 0; r < 4 && t + r < rows; ++r) in[r] = *(const UnalignedQuad*)(from[r] + d);
      const Quad a = {in[0][0], in[1][0], in[0][1], in[1][1]}, b = {in[2][0], in[3][0], in[2][1], in[3][1]};
      const Quad e = {in[0][2], in[1][2], in[0][3], in[1][3]}, f = {in[2][2], in[3][2], in[2][3], in[3][3]};
      *(UnalignedQuad*)(to + d * padded + t) = Quad{a[0], a[1], b[0], b[1]};
      *(UnalignedQuad*)(to + (d + 1) * padded + t) = Quad{a[2], a[3], b[2], b[3]};
      *(UnalignedQuad*)(to + (d + 2) * padded + t) = Quad{e[0], e[1], f[0], f[1]};
      *(UnalignedQuad*)(to + (d + 3) * padded + t) = Quad{e[2], e[3], f[2], f[3]};
    }
    for (; d < dim; ++d)
      for (int64_t r = 0; r < 4; ++r)
        to[d * padded + t + r] = t + r < rows ? from[r][d] : 0.0f;
  }
}
INLINE void transpose(const float* from, int64_t stride, int64_t rows, int64_t dim, int64_t padded,
                      float* to) {
  transpose_rows([=](int64_t t) { return from + t * stride; }, 0, rows, dim, padded, to);
}

// to[t][d] = from[t][d]; d is padded with zeros to `padded`.
INLINE void copy_rows(const float* from, int64_t stride, int64_t rows, int64_t dim, int64_t padded,
                      float* to) {
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < dim; i += LANES) store(to + t * padded + i, load(from + t * stride + i, dim - i));
}

// The reverse: to[t][d] = from[t][d] without the padding.
INLINE void store_rows(const float* from, int64_t padded, int64_t rows, int64_t dim, float* to,
                       int64_t stride) {
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t i = 0; i < dim; i += LANES) store(to + t * stride + i, load(from + t * padded + i), dim - i);
}

// What a query sees of the keys: those from `from` up to `to`, in vectors from `begin` up to `end`.
struct Seen {
  int64_t from, to, begin, end;
  Seen(int64_t from, int64_t to) : from(from), to(to), begin(from / LANES * LANES), end(round_up(to)) {}
  // The lanes of the vector at `t` that it sees.
  IntVec lanes(int64_t t) const { return first_lanes(to - t) & ~first_lanes(from - t); }
};

// out[r][t] = sum over d of rows[r][d] * transposed[d][t], for the t of the vectors that are seen.
template <int64_t ROWS = QUERIES>
INLINE void times_transposed(const float* rows, int64_t row_stride, const float* transposed, int64_t dim,
                             int64_t padded, const Seen& seen, float* out) {
  for (int64_t t = seen.begin; t < seen.end; t += LANES) {
    Vec sums[ROWS] = {};
    for (int64_t d = 0; d < dim; ++d) {
      const Vec column = load(transposed + d * padded + t);
      for (int64_t r = 0; r < ROWS; ++r) sums[r] += rows[r * row_stride + d] * column;
    }
    for (int64_t r = 0; r < ROWS; ++r) store(out + r * padded + t, sums[r]);
  }
}

// out[r][d] = sum over the t that are seen of weights[r][t] * rows[t][d].
INLINE void weighted_sums(const float* weights, int64_t weight_stride, const float* rows, const Seen& seen,
                          int64_t dim_padded, float* out) {
  for (int64_t i = 0; i < dim_padded; i += LANES) {
    Vec sums[QUERIES] = {};
    for (int64_t t = seen.begin; t < seen.to; ++t) {
      const Vec row = load(rows + t * dim_padded + i);
      for (int64_t r = 0; r < QUERIES; ++r) sums[r] += weights[r * weight_stride + t] * row;
    }
    for (int64_t r = 0; r < QUERIES; ++r) store(out + r * dim_padded + i, sums[r]);
  }
}

// sums[t][d] += sum over r of weights[r][t] * rows[r][d], for the t that are seen.
INLINE void add_outer(const float* weights, int64_t weight_stride, const float* rows, const Seen& seen,
                      int64_t dim_padded, float* sums) {
  for (int64_t i = 0; i < dim_padded; i += LANES) {
    Vec row[QUERIES];
    for (int64_t r = 0; r < QUERIES; ++r) row[r] = load(rows + r * dim_padded + i);
    for (int64_t t = seen.begin; t < seen.to; ++t) {
      Vec sum = load(sums + t * dim_padded + i);
      for (int64_t r = 0; r < QUERIES; ++r) sum += weights[r * weight_stride + t] * row[r];
      store(sums + t * dim_padded + i, sum);
    }
  }
}

// The queries and keys of one sequence, by their first rows: the last keys are the queries' own.
struct Sequence {
  int64_t first_query, queries, first_key, keys;
};

// What all kernels of attention over packed sequences know of a call. A query sees `window` keys, its own included.
struct Attention {
  Heads q, k, v;
  const int64_t *query_offsets, *key_offsets;
  int64_t heads, kv_heads, dim, max_len, window;
  float scale;
  int64_t group() const { return heads / kv_heads; }
  int64_t len_padded() const { return round_up(max_len); }
  int64_t dim_padded() const { return round_up(dim); }
  Sequence sequence(int64_t number) const {
    const int64_t first_query = query_offsets[number], first_key = key_offsets[number];
    return {first_query, query_offsets[number + 1] - first_query, first_key, key_offsets[number + 1] - first_key};
  }
  // Of `rows` queries from number `query` on.
  Seen seen(const Sequence& of, int64_t query, int64_t rows) const {
    const int64_t own = of.keys - of.queries + query;
    return Seen(std::max<int64_t>(0, own + 1 - window), own + rows);
  }
};

// Turns the scores of one query over the keys that `row` sees into e^(scale * score - max), 0 elsewhere in the
// vectors of `all`. Returns the sum, and the max through `max`.
INLINE float softmax_row(float* scores, float scale, const Seen& row, const Seen& all, float* max) {
  Vec maxima = Vec{} - INFINITE;
  for (int64_t t = all.begin; t < all.end; t += LANES) {
    const Vec score = select(row.lanes(t), Vec(load(scores + t) * scale), Vec(Vec{} - INFINITE));
    store(scores + t, score);
    maxima = larger(maxima, score);
  }
  *max = max_lanes(maxima);
  Vec sums = {};
  for (int64_t t = all.begin; t < all.end; t += LANES) {
    const Vec mass = exp(load(scores + t) - *max);
    store(scores + t, mass);
    sums += mass;
  }
  return sum_lanes(sums);
}

// Where one task keeps what it works on.
struct ForwardScratch {
  float* keys;            // [dim, padded]
  float* values;          // [padded, dim_padded]
  float* scores;          // [QUERIES, padded]
  float *queries, *sums;  // [QUERIES, dim_padded]

  static int64_t size(const Attention& a) {
    return a.len_padded() * (a.dim + a.dim_padded() + QUERIES) + 2 * QUERIES * a.dim_padded();
  }
  ForwardScratch(const Attention& a, float* memory)
      : keys(memory),
        values(keys + a.dim * a.len_padded()),
        scores(values + a.len_padded() * a.dim_padded()),
        queries(scores + QUERIES * a.len_padded()),
        sums(queries + QUERIES * a.dim_padded()) {}
};

// `rows` queries of one head from number `query` of a sequence.
INLINE void queries_forward(const Attention& a, const ForwardScratch& s, const Sequence& of, int64_t query,
                            int64_t rows, int64_t head, float* out, float* lse) {
  const int64_t padded = a.len_padded(), dim_padded = a.dim_padded(), row = of.first_query + query;
  const Seen seen = a.seen(of, query, rows);
  copy_rows(a.q.data + row * a.q.stride + head * a.dim, a.q.stride, rows, a.dim, dim_padded, s.queries);
  times_transposed(s.queries, dim_padded, s.keys, a.dim, padded, seen, s.scores);
  float inverse[QUERIES];
  for (int64_t r = 0; r < rows; ++r) {
    float max;
    const float sum = softmax_row(s.scores + r * padded, a.scale, a.seen(of, query + r, 1), seen, &max);
    lse[(row + r) * a.heads + head] = max + std::log(sum);
    inverse[r] = 1.0f / sum;
  }
  weighted_sums(s.scores, padded, s.values, seen, dim_padded, s.sums);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < a.dim; i += LANES)
      store(out + ((row + r) * a.heads + head) * a.dim + i, load(s.sums + r * dim_padded + i) * inverse[r],
            a.dim - i);
}

// Tasks are (sequence, key head).
FOR_EACH_ISA void attention_range(const Attention& a, float* out, float* lse, float* memory, int64_t begin,
                                  int64_t end) {
  const ForwardScratch s(a, memory);
  for (int64_t task = begin; task < end; ++task) {
    const Sequence of = a.sequence(task / a.kv_heads);
    const int64_t kv_head = task % a.kv_heads, column = kv_head * a.dim;
    transpose(a.k.data + of.first_key * a.k.stride + column, a.k.stride, of.keys, a.dim, a.len_padded(), s.keys);
    copy_rows(a.v.data + of.first_key * a.v.stride + column, a.v.stride, of.keys, a.dim, a.dim_padded(), s.values);
    for (int64_t head = kv_head * a.group(); head < (kv_head + 1) * a.group(); ++head)
      for (int64_t query = 0; query < of.queries; query += QUERIES)
        queries_forward(a, s, of, query, std::min(QUERIES, of.queries - query), head, out, lse);
  }
}

// What attention's backward reads and writes beside the inputs.
struct AttentionGrads {
  const float *dout, *out, *lse;
  Heads dq, dk, dv;
};

// In place: scores to probabilities, and the probabilities' gradients to the scores' gradients.
INLINE void scores_backward(float* scores, float* grads, float scale, float lse, float delta, const Seen& row,
                            const Seen& all) {
  for (int64_t t = all.begin; t < all.end; t += LANES) {
    const Vec prob = select(row.lanes(t), exp(load(scores + t) * scale - lse), Vec{});
    store(scores + t, prob);
    store(grads + t, prob * (load(grads + t) - delta) * scale);
  }
}

// Where one task keeps what it works on.
struct BackwardScratch {
  float *keys_transposed, *values_transposed;  // [dim, padded]
  float *keys, *dkeys, *dvalues;               // [padded, dim_padded]
  float *scores, *dscores;                     // [QUERIES, padded]
  float *queries, *douts, *sums;               // [QUERIES, dim_padded]

  static int64_t size(const Attention& a) {
    return a.len_padded() * (2 * a.dim + 3 * a.dim_padded() + 2 * QUERIES) + 3 * QUERIES * a.dim_padded();
  }
  BackwardScratch(const Attention& a, float* memory) {
    auto take = [&](int64_t count) {
      float* taken = memory;
      memory += count;
      return taken;
    };
    const int64_t padded = a.len_padded(), dim_padded = a.dim_padded();
    for (float** to : {&keys_transposed, &values_transposed}) *to = take(a.dim * padded);
    for (float** to : {&keys, &dkeys, &dvalues}) *to = take(padded * dim_padded);
    for (float** to : {&scores, &dscores}) *to = take(QUERIES * padded);
    for (float** to : {&queries, &douts, &sums}) *to = take(QUERIES * dim_padded);
  }
};

// `rows` queries of one head from number `query` of a sequence: writes their gradients and adds to those of the keys and
// values.
INLINE void queries_backward(const Attention& a, const AttentionGrads& g, const BackwardScratch& s,
                             const Sequence& of, int64_t query, int64_t rows, int64_t head) {
  const int64_t padded = a.len_padded(), dim_padded = a.dim_padded(), out_stride = a.heads * a.dim;
  const int64_t row = of.first_query + query, at = row * out_stride + head * a.dim;
  const Seen seen = a.seen(of, query, rows);
  copy_rows(a.q.data + row * a.q.stride + head * a.dim, a.q.stride, rows, a.dim, dim_padded, s.queries);
  copy_rows(g.dout + at, out_stride, rows, a.dim, dim_padded, s.douts);
  times_transposed(s.queries, dim_padded, s.keys_transposed, a.dim, padded, seen, s.scores);
  times_transposed(s.douts, dim_padded, s.values_transposed, a.dim, padded, seen, s.dscores);
  for (int64_t r = 0; r < rows; ++r) {
    Vec dots = {};
    for (int64_t i = 0; i < a.dim; i += LANES)
      dots += load(s.douts + r * dim_padded + i) * load(g.out + at + r * out_stride + i, a.dim - i);
    scores_backward(s.scores + r * padded, s.dscores + r * padded, a.scale, g.lse[(row + r) * a.heads + head],
                    sum_lanes(dots), a.seen(of, query + r, 1), seen);
  }
  for (int64_t r = rows; r < QUERIES; ++r) {  // rows past the end add nothing to keys and values
    std::fill(s.scores + r * padded + seen.begin, s.scores + r * padded + seen.end, 0.0f);
    std::fill(s.dscores + r * padded + seen.begin, s.dscores + r * padded + seen.end, 0.0f);
  }
  weighted_sums(s.dscores, padded, s.keys, seen, dim_padded, s.sums);
  store_rows(s.sums, dim_padded, rows, a.dim, g.dq.data + row * g.dq.stride + head * a.dim, g.dq.stride);
  add_outer(s.dscores, padded, s.queries, seen, dim_padded, s.dkeys);
  add_outer(s.scores, padded, s.douts, seen, dim_padded, s.dvalues);
}

FOR_EACH_ISA void attention_backward_range(const Attention& a, const AttentionGrads& g, float* memory,
                                           int64_t begin, int64_t end) {
  const BackwardScratch s(a, memory);
  const int64_t padded = a.len_padded(), dim_padded = a.dim_padded();
  for (int64_t task = begin; task < end; ++task) {
    const Sequence of = a.sequence(task / a.kv_heads);
    const int64_t kv_head = task % a.kv_heads, column = kv_head * a.dim, first = of.first_key;
    const float* k = a.k.data + first * a.k.stride + column;
    transpose(k, a.k.stride, of.keys, a.dim, padded, s.keys_transposed);
    transpose(a.v.data + first * a.v.stride + column, a.v.stride, of.keys, a.dim, padded, s.values_transposed);
    copy_rows(k, a.k.stride, of.keys, a.dim, dim_padded, s.keys);
    std::fill(s.dkeys, s.dkeys + of.keys * dim_padded, 0.0f);
    std::fill(s.dvalues, s.dvalues + of.keys * dim_padded, 0.0f);
    for (int64_t head = kv_head * a.group(); head < (kv_head + 1) * a.group(); ++head)
      for (int64_t query = 0; query < of.queries; query += QUERIES)
        queries_backward(a, g, s, of, query, std::min(QUERIES, of.queries - query), head);
    store_rows(s.dkeys, dim_padded, of.keys, a.dim, g.dk.data + first * g.dk.stride + column, g.dk.stride);
    store_rows(s.dvalues, dim_padded, of.keys, a.dim, g.dv.data + first * g.dv.stride + column, g.dv.stride);
  }
}

// One new token of each sequence against its blocks of the cache [blocks, block_tokens, kv_heads, dim]; tasks are
// (row, key head). Row `b` reads the blocks tables[b, 0 .. table_len], and of its tokens the last `window`.
struct Decode {
  Heads q;
  const float *keys, *values;
  const int64_t *tables, *lengths;
  int64_t table_len, block_tokens, heads, kv_heads, dim, window;
  float scale;

  int64_t len_padded() const { return round_up(table_len * block_tokens); }
  // The cached row of token `t` of a sequence.
  const float* at(const float* cache, const int64_t* table, int64_t t, int64_t column) const {
    return cache + (table[t / block_tokens] * block_tokens + t % block_tokens) * kv_heads * dim + column;
  }
};

// `keys` has room for [dim, padded], `scores` for [padded].
FOR_EACH_ISA void decode_attention_range(const Decode& d, float* out, float* keys, float* scores, int64_t begin,
                                         int64_t end) {
  const int64_t padded = d.len_padded(), group = d.heads / d.kv_heads;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / d.kv_heads, kv_head = task % d.kv_heads, column = kv_head * d.dim;
    const int64_t len = d.lengths[row], *table = d.tables + row * d.table_len;
    const Seen seen(std::max<int64_t>(0, len - d.window), len);
    const auto row_of = [&](int64_t t) { return d.at(d.keys, table, t, column); };
    transpose_rows(row_of, seen.begin, len, d.dim, padded, keys);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      const float* query = d.q.data + row * d.q.stride + head * d.dim;
      times_transposed<1>(query, d.dim, keys, d.dim, padded, seen, scores);
      float max;
      const float inverse = 1.0f / softmax_row(scores, d.scale, seen, seen, &max);
      for (int64_t i = 0; i < d.dim; i += LANES) {
        Vec sums = {};
        for (int64_t t = seen.from; t < len; ++t)
          sums += scores[t] * load(d.at(d.values, table, t, column) + i, d.dim - i);
        store(out + (row * d.heads + head) * d.dim + i, sums * inverse, d.dim - i);
      }
    }
  }
}

}  // namespace

extern "C" {

int anyroll_attention(Heads q, Heads k, Heads v, const int64_t* query_offsets, const int64_t* key_offsets,
                      float scale, int64_t window, float* out, float* lse, int64_t sequences, int64_t max_len,
                      int64_t heads, int64_t kv_heads, int64_t dim) {
  return guarded(-1, [&] {
    const Attention a{q, k, v, query_offsets, key_offsets, heads, kv_heads, dim, max_len, window, scale};
    at::parallel_for(0, sequences * kv_heads, grain(max_len * dim), [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(ForwardScratch::size(a));
      attention_range(a, out, lse, scratch.data(), begin, end);
    });
    return 0;
  });
}

int anyroll_attention_backward(Heads q, Heads k, Heads v, const float* dout, const float* out,
                               const float* lse, Heads dq, Heads dk, Heads dv, const int64_t* query_offsets,
                               const int64_t* key_offsets, float scale, int64_t window, int64_t sequences,
                               int64_t max_len, int64_t heads, int64_t kv_heads, int64_t dim) {
  return guarded(-1, [&] {
    const Attention a{q, k, v, query_offsets, key_offsets, heads, kv_heads, dim, max_len, window, scale};
    const AttentionGrads g{dout, out, lse, dq, dk, dv};
    at::parallel_for(0, sequences * kv_heads, grain(max_len * dim), [&](int64_t begin, int64_t end) {
      std::vector<float> scratch(BackwardScratch::size(a));
      attention_backward_range(a, g, scratch.data(), begin, end);
    });
    return 0;
  });
}

int anyroll_decode_attention(Heads q, const float* keys, const float* values, const int64_t* tables,
                             const int64_t* lengths, float scale, int64_t window, float* out, int64_t rows,
                             int64_t table_len, int64_t block_tokens, int64_t heads, int64_t kv_heads,
                             int64_t dim) {
  return guarded(-1, [&] {
    const Decode d{q,            keys,  values,   tables, lengths, table_len,
                   block_tokens, heads, kv_heads, dim,    window,  scale};
    at::parallel_for(0, rows * kv_heads, grain(16 * dim), [&](int64_t begin, int64_t end) {
      std::vector<float> scratch((dim + 1) * d.len_padded());
      decode_attention_range(d, out, scratch.data(), scratch.data() + dim * d.len_padded(), begin, end);
    });
    return 0;
  });
}
}
