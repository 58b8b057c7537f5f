// CPU kernels of `ops`: fp32 in, fp32 out, threads from libtorch's own pool. Attention is in attention.cpp.
//
// The arguments were checked in Rust: shapes fit, indices are in range. A kernel has two functions:
// `..._range` does the work for a range of rows and is compiled for several instruction sets; the C function
// below it spreads ranges over threads. Each row is computed by one thread in one order, and sums over rows
// run in chunks of a fixed number of rows, so that no result depends on the number of threads.
#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#include "shim.h"
#include "vectors.h"

namespace {

// ------------------------------------------------------------------------------------------ norm, sums

FOR_EACH_ISA void rms_norm_range(Heads x, const float* residual, const float* weight, float eps, float* y,
                                 float* rstd, int64_t begin, int64_t end, int64_t heads, int64_t dim) {
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
                                          float* dweight, int64_t begin, int64_t end, int64_t heads,
                                          int64_t dim) {
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
                             int64_t end, int64_t heads, int64_t dim, int64_t turned) {
  const int64_t half = turned / 2;
  for (int64_t row = begin; row < end; ++row) {
    const float* cosines = table + positions[row] * turned;
    const float* sines = cosines + half;
    for (int64_t head = 0; head < heads; ++head) {
      float* first = x.data + row * x.stride + head * dim;
      float* second = first + half;
      int64_t i = 0;
      for (; i + LANES <= half; i += LANES) {
        const Vec a = load(first + i), b = load(second + i);
        const Vec cosine = load(cosines + i), sine = load(sines + i) * sign;
        store(first + i, a * cosine - b * sine);
        store(second + i, b * cosine + a * sine);
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
      const Vec gate = load(gates + i, size - i), up = load(ups + i, size - i),
                grad = load(grads + i, size - i);
      const Vec sigmoid = 1.0f / (1.0f + exp(-gate)), silu = gate * sigmoid;
      store(gates + i, grad * up * (sigmoid + silu * (1.0f - sigmoid)), size - i);
      store(ups + i, grad * silu, size - i);
      store(grads + i, silu * up, size - i);
    }
  }
}

// The inner function z of gelu(g) = g sigmoid(z): twice that of the approximation by tanh.
constexpr float GELU_INNER = 1.5957691216057308f, GELU_CUBE = 0.044715f;

FOR_EACH_ISA void geglu_range(const float* gate_up, float* y, int64_t begin, int64_t end, int64_t size) {
  for (int64_t row = begin; row < end; ++row) {
    const float *gates = gate_up + row * 2 * size, *ups = gates + size;
    for (int64_t i = 0; i < size; i += LANES) {
      const Vec gate = load(gates + i, size - i), up = load(ups + i, size - i);
      const Vec inner = GELU_INNER * (gate + GELU_CUBE * gate * gate * gate);
      store(y + row * size + i, gate * up / (1.0f + exp(-inner)), size - i);
    }
  }
}

FOR_EACH_ISA void geglu_backward_range(float* gate_up, float* dy, int64_t begin, int64_t end, int64_t size) {
  for (int64_t row = begin; row < end; ++row) {
    float *gates = gate_up + row * 2 * size, *ups = gates + size, *grads = dy + row * size;
    for (int64_t i = 0; i < size; i += LANES) {
      const Vec gate = load(gates + i, size - i), up = load(ups + i, size - i),
                grad = load(grads + i, size - i);
      const Vec inner = GELU_INNER * (gate + GELU_CUBE * gate * gate * gate),
                slope = GELU_INNER * (1.0f + 3.0f * GELU_CUBE * gate * gate);
      const Vec sigmoid = 1.0f / (1.0f + exp(-inner)), gelu = gate * sigmoid;
      store(gates + i, grad * up * (sigmoid + gelu * (1.0f - sigmoid) * slope), size - i);
      store(ups + i, grad * gelu, size - i);
      store(grads + i, gelu * up, size - i);
    }
  }
}

// --------------------------------------------------------------------------------------------- dropout

// A bijection that leaves no bit where it was.
INLINE uint32_t mix(uint32_t x) {
  x = (x >> 16 ^ x) * 0x45d9f3b;
  x = (x >> 16 ^ x) * 0x45d9f3b;
  return x >> 16 ^ x;
}

FOR_EACH_ISA void dropout_range(const float* x, const int64_t* keys, uint32_t salt, uint32_t threshold, float scale,
                                float* y, int64_t begin, int64_t end, int64_t columns) {
  for (int64_t row = begin; row < end; ++row) {
    const uint32_t of_row = mix(static_cast<uint32_t>(keys[row]) ^ salt);
    const float* from = x + row * columns;
    float* to = y + row * columns;
    for (int64_t i = 0; i < columns; ++i)
      to[i] = mix(of_row ^ mix(static_cast<uint32_t>(i))) < threshold ? 0.0f : from[i] * scale;
  }
}

// -------------------------------------------------------------------------------- embedding, log-probs

FOR_EACH_ISA void embedding_backward_range(const float* dy, const int64_t* tokens, float* dweight, bool add,
                                           int64_t begin, int64_t end, int64_t rows, int64_t vocab,
                                           int64_t columns) {
  if (!add)
    for (int64_t token = 0; token < vocab; ++token)
      std::fill(dweight + token * columns + begin, dweight + token * columns + end, 0.0f);
  for (int64_t row = 0; row < rows; ++row) {
    float* to = dweight + tokens[row] * columns;
    for (int64_t i = begin; i < end; i += LANES)
      store(to + i, load(to + i, end - i) + load(dy + row * columns + i, end - i), end - i);
  }
}

FOR_EACH_ISA void logprobs_range(const float* logits, const int64_t* targets, float inverse_temperature,
                                 float* logprobs, float* entropy, float* lse, int64_t begin, int64_t end,
                                 int64_t vocab) {
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

}  // namespace

// ------------------------------------------------------------------------------------------------ C ABI
// Each returns 0, or -1 with the reason in anyroll_last_error (memory, or what a thread threw).

extern "C" {

int anyroll_rms_norm(Heads x, const float* residual, const float* weight, float eps, float* y, float* rstd,
                     int64_t rows, int64_t heads, int64_t dim) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(heads * dim), [&](int64_t begin, int64_t end) {
      rms_norm_range(x, residual, weight, eps, y, rstd, begin, end, heads, dim);
    });
    return 0;
  });
}

int anyroll_rms_norm_backward(Heads dy, Heads x, const float* rstd, const float* weight, Heads dx,
                              float* dweight, bool add, int64_t rows, int64_t heads, int64_t dim) {
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
        sum_rows_range(x, parts.data() + chunk * columns, chunk * CHUNK_ROWS,
                       std::min(rows, (chunk + 1) * CHUNK_ROWS), columns);
    });
    join_chunks(parts, chunks, columns, out, add);
    return 0;
  });
}

int anyroll_rope(Heads x, const int64_t* positions, const float* table, float sign, int64_t rows,
                 int64_t heads, int64_t dim, int64_t turned) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(heads * turned), [&](int64_t begin, int64_t end) {
      rope_range(x, positions, table, sign, begin, end, heads, dim, turned);
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
    at::parallel_for(0, rows, grain(3 * size), [&](int64_t begin, int64_t end) {
      swiglu_backward_range(gate_up, dy, begin, end, size);
    });
    return 0;
  });
}

int anyroll_geglu(const float* gate_up, float* y, int64_t rows, int64_t size) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(3 * size),
                     [&](int64_t begin, int64_t end) { geglu_range(gate_up, y, begin, end, size); });
    return 0;
  });
}

int anyroll_geglu_backward(float* gate_up, float* dy, int64_t rows, int64_t size) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(3 * size), [&](int64_t begin, int64_t end) {
      geglu_backward_range(gate_up, dy, begin, end, size);
    });
    return 0;
  });
}

int anyroll_dropout(const float* x, const int64_t* keys, uint32_t salt, uint32_t threshold, float scale, float* y,
                    int64_t rows, int64_t columns) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(4 * columns), [&](int64_t begin, int64_t end) {
      dropout_range(x, keys, salt, threshold, scale, y, begin, end, columns);
    });
    return 0;
  });
}

int anyroll_embedding_backward(const float* dy, const int64_t* tokens, float* dweight, bool add, int64_t rows,
                               int64_t vocab, int64_t columns) {
  return guarded(-1, [&] {
    const int64_t blocks = round_up(columns) / LANES;  // each thread owns some columns of every row
    at::parallel_for(0, blocks, grain((rows + vocab) * LANES), [&](int64_t begin, int64_t end) {
      embedding_backward_range(dy, tokens, dweight, add, begin * LANES, std::min(columns, end * LANES), rows,
                               vocab, columns);
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

int anyroll_logprobs_backward(float* logits, const int64_t* targets, float inverse_temperature,
                              const float* lse, const float* entropy, const float* dlogprobs,
                              const float* dentropy, int64_t rows, int64_t vocab) {
  return guarded(-1, [&] {
    at::parallel_for(0, rows, grain(vocab), [&](int64_t begin, int64_t end) {
      logprobs_backward_range(logits, targets, inverse_temperature, lse, entropy, dlogprobs, dentropy, begin,
                              end, vocab);
    });
    return 0;
  });
}
}
