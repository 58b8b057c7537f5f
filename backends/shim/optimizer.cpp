// CPU kernels of `ops::optimizer`: flat fp32 buffers, threads from libtorch's own pool.
#include <ATen/Parallel.h>

#include <cmath>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define ANYROLL_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define ANYROLL_CLONES
#endif

// Elements that one thread takes at a time. Results do not depend on it for AdamW, which is elementwise; the sum
// of squares is defined by it.
static constexpr int64_t CHUNK = 4096;

ANYROLL_CLONES static void adamw_chunk(float* w, float* m, float* v, const float* g, int64_t n, float scale, float lr,
                                       float beta1, float beta2, float eps, float keep, float bias1,
                                       float bias2_root) {
  for (int64_t i = 0; i < n; i++) {
    float gradient = g[i] * scale;
    m[i] = beta1 * m[i] + (1 - beta1) * gradient;
    v[i] = beta2 * v[i] + (1 - beta2) * gradient * gradient;
    w[i] = keep * w[i] - lr / bias1 * m[i] / (std::sqrt(v[i]) / bias2_root + eps);
  }
}

// In fp64, over eight lanes, so that the order is fixed and still vectorises.
ANYROLL_CLONES static double squares_chunk(const float* x, int64_t n) {
  double lanes[8] = {};
  int64_t whole = n / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8)
    for (int lane = 0; lane < 8; lane++) lanes[lane] += static_cast<double>(x[i + lane]) * x[i + lane];
  for (int64_t i = whole; i < n; i++) lanes[i - whole] += static_cast<double>(x[i]) * x[i];
  double sum = 0;
  for (double lane : lanes) sum += lane;
  return sum;
}

extern "C" {
void anyroll_adamw(float* w, float* m, float* v, const float* g, const float* factors, int64_t n, float lr,
                   float beta1, float beta2, float eps, float weight_decay) {
  float scale = factors[0], bias1 = factors[1], bias2_root = factors[2];
  if (!std::isfinite(scale)) return;
  at::parallel_for(0, n, 8 * CHUNK, [&](int64_t begin, int64_t end) {
    adamw_chunk(w + begin, m + begin, v + begin, g + begin, end - begin, scale, lr, beta1, beta2, eps,
                1 - lr * weight_decay, bias1, bias2_root);
  });
}

void anyroll_sum_of_squares(const float* x, int64_t n, double* sum) {
  int64_t chunks = (n + CHUNK - 1) / CHUNK;
  std::vector<double> partial(chunks);
  at::parallel_for(0, chunks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) partial[c] = squares_chunk(x + c * CHUNK, std::min(CHUNK, n - c * CHUNK));
  });
  *sum = 0;
  for (double part : partial) *sum += part;
}
}
