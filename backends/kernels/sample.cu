// Choosing a token from each row of logits, behind `elements.cuh` and `block.cuh`: by the random numbers and the rules of
// the host. Sums run in fp32, in an order that does not depend on other rows.

constexpr int SAMPLE_THREADS = 1024;
// The elements that 32 threads read at once are a stripe; `sample_kernels` refuses a vocabulary of more.
constexpr int MAX_STRIPES = 2048;

// How a row is sampled. A negative inverse temperature takes the likeliest token; its log-prob is then at the absolute.
struct Choice {
  float inverse_temperature, top_p, min_p, top_k;
};

// An order of floats as one of integers. Of a 16-bit float only the upper half counts.
template <typename T>
__device__ inline u32 order_of(float x) {
  const u32 bits = __float_as_uint(x), order = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return sizeof(T) == 2 ? order & 0xffff0000 : order;
}

// Logits of a row; what is past its end is minus infinity, which has no mass.
template <typename T>
struct Logits {
  static constexpr int LANES = Pack<T>::LANES;
  const T* row;
  int size;

  __device__ void read(int i, float (&to)[LANES]) const {
    if (i + LANES <= size && aligned(row + i)) {
      const Pack<T> pack = *(const Pack<T>*)(row + i);
      for (int k = 0; k < LANES; k++) to[k] = widen(pack.lane[k]);
      return;
    }
    for (int k = 0; k < LANES; k++) to[k] = i + k < size ? widen(row[i + k]) : -INFINITE;
  }
};

// Which tokens may be chosen: those above a threshold, and of those that equal it the first so many.
struct Allowed {
  u32 threshold;
  int ties;
};

template <typename T>
struct Sampler {
  static constexpr int LANES = Pack<T>::LANES;
  Logits<T> logits;
  float inverse_temperature, largest;

  __device__ float mass(float x) const { return __expf((x - largest) * inverse_temperature); }

  // The sum over tokens from a threshold on of their masses, or of ones.
  __device__ float measure(u32 threshold, bool is_count) const {
    float sum = 0, x[LANES];
#pragma unroll 4
    for (int i = threadIdx.x * LANES; i < logits.size; i += SAMPLE_THREADS * LANES) {
      logits.read(i, x);
      for (int k = 0; k < LANES; k++)
        if (i + k < logits.size && order_of<T>(x[k]) >= threshold) sum += is_count ? 1 : mass(x[k]);
    }
    return over_block<add>(sum);
  }

  // The largest threshold from which on tokens measure as much as is wanted, bit by bit.
  __device__ u32 threshold_of(float wanted, bool is_count) const {
    constexpr int LAST_BIT = sizeof(T) == 2 ? 16 : 0;
    u32 threshold = 0;
    for (int bit = 31; bit >= LAST_BIT; bit--)
      if (measure(threshold | 1u << bit, is_count) >= wanted) threshold |= 1u << bit;
    return threshold;
  }

  __device__ float mass_at(u32 threshold) const {
    const u32 bits = threshold & 0x80000000 ? threshold & 0x7fffffff : ~threshold;
    return mass(__uint_as_float(sizeof(T) == 2 ? bits & 0xffff0000 : bits));
  }

  // top-k, then top-p of what is left, then min-p.
  __device__ Allowed allowed(const Choice& choice, float total) const {
    constexpr u32 STEP = sizeof(T) == 2 ? 0x10000 : 1;  // from one value to the next
    Allowed allowed = {0, 0};
    if (choice.top_k > 0 && choice.top_k < logits.size) {
      const u32 threshold = threshold_of(choice.top_k, true);
      const float above = measure(threshold + STEP, true);
      allowed = {threshold, (int)(choice.top_k - above)};
      total = measure(threshold + STEP, false) + allowed.ties * mass_at(threshold);
    }
    if (choice.top_p < 1) {
      const float wanted = choice.top_p * total;
      const u32 threshold = threshold_of(wanted, false);
      const float missing = wanted - measure(threshold + STEP, false);
      int ties = (int)ceilf(missing / mass_at(threshold));
      if (ties < 1) ties = 1;
      if (threshold > allowed.threshold || ties < allowed.ties) allowed = {threshold, ties};
    }
    if (choice.min_p > 0) {
      const u32 least = order_of<T>(largest + logf(choice.min_p) / inverse_temperature);
      if (least > allowed.threshold) allowed = {least - 1, 0};
    }
    return allowed;
  }
};

// The part of `count` parts at which the cumulated mass passes `rest`, which becomes what is left of it there; the last
// that has any mass if rounding leaves too much. `ties` becomes what is left of them, each of mass `of_tie`.
template <typename Parts>
__device__ inline int pick(int count, double& rest, int& ties, float of_tie, Parts parts) {
  int last = 0, ties_at_last = ties;
  for (int i = 0; i < count; i++) {
    float above;
    int equal;
    parts(i, above, equal);
    const int kept = equal < ties ? equal : ties;
    const double mass = above + (double)of_tie * kept;
    if (mass <= 0) continue;
    last = i, ties_at_last = ties;
    if (rest < mass) return i;
    rest -= mass, ties -= kept;
  }
  rest = INFINITE, ties = ties_at_last;
  return last;
}

// One row a block. `tokens` and `positions` are what the next step reads; `chosen` and `logprobs` what the host does.
template <typename T>
__device__ inline void sample(const T* all_logits, int vocab, const Choice* choices, const double* uniforms,
                              i64* tokens, i64* positions, i64* chosen, float* logprobs) {
  constexpr int LANES = Pack<T>::LANES, STRIPE = 32 * LANES;
  __shared__ float above[MAX_STRIPES];
  __shared__ int equal[MAX_STRIPES];
  __shared__ float group_above[MAX_STRIPES / 32];
  __shared__ int group_equal[MAX_STRIPES / 32];
  __shared__ int begin, token;
  __shared__ float total;
  const i64 row = blockIdx.x;
  const Choice choice = choices[row];
  const Logits<T> logits = {all_logits + row * vocab, vocab};
  float x[LANES], largest = -INFINITE, first = INFINITE;
#pragma unroll 4
  for (int i = threadIdx.x * LANES; i < vocab; i += SAMPLE_THREADS * LANES) {
    logits.read(i, x);
    for (int k = 0; k < LANES; k++)
      if (x[k] > largest) largest = x[k], first = i + k;
  }
  const float of_thread = largest;
  largest = over_block<larger>(largest);
  // Of equals the first; every vocabulary that is allowed is below 2^24.
  first = -over_block<larger>(of_thread == largest ? -first : -INFINITE);
  const Sampler<T> sampler = {logits, fabsf(choice.inverse_temperature), largest};
  const bool is_greedy = choice.inverse_temperature < 0;
  const bool is_free = !is_greedy && choice.top_k <= 0 && choice.top_p >= 1 && choice.min_p <= 0;
  Allowed allowed = {0, 0};
  if (!is_free) {
    const float of_all = sampler.measure(0, false);
    if (threadIdx.x == 0) total = of_all;
    if (!is_greedy) allowed = sampler.allowed(choice, of_all);
  }

  if (is_greedy) {
    if (threadIdx.x == 0) token = (int)first;
  } else {
    const int stripes = (vocab + STRIPE - 1) / STRIPE;
    for (int i = threadIdx.x; i < stripes / 32 * 32 + 32; i += SAMPLE_THREADS)
      if (i < MAX_STRIPES) above[i] = 0, equal[i] = 0;
    __syncthreads();
#pragma unroll 2
    for (int base = 0; base < vocab; base += SAMPLE_THREADS * LANES) {
      const int i = base + threadIdx.x * LANES;
      float mass = 0, ties = 0;
      logits.read(i < vocab ? i : vocab, x);
      for (int k = 0; k < LANES; k++) {
        const u32 order = order_of<T>(x[k]);
        if (order > allowed.threshold) mass += sampler.mass(x[k]);
        if (order == allowed.threshold) ties += 1;
      }
      for (int mask = 16; mask > 0; mask /= 2) mass += exchange(mass, mask), ties += exchange(ties, mask);
      if (threadIdx.x % 32 == 0 && i < vocab) above[i / STRIPE] = mass, equal[i / STRIPE] = (int)ties;
    }
    __syncthreads();
    const int groups = (stripes + 31) / 32;
    for (int g = threadIdx.x; g < groups; g += SAMPLE_THREADS) {
      float mass = 0;
      int ties = 0;
      for (int s = 0; s < 32; s++) mass += above[g * 32 + s], ties += equal[g * 32 + s];
      group_above[g] = mass, group_equal[g] = ties;
    }
    __syncthreads();
    const float of_tie = allowed.ties > 0 ? sampler.mass_at(allowed.threshold) : 0;
    double rest = 0;
    int ties = allowed.ties;
    if (threadIdx.x == 0) {
      double whole = 0;
      for (int g = 0; g < groups; g++) {
        const int kept = group_equal[g] < ties ? group_equal[g] : ties;
        whole += group_above[g] + (double)of_tie * kept, ties -= kept;
      }
      if (is_free) total = (float)whole;
      rest = uniforms[row] * whole;
      ties = allowed.ties;
      const int g = pick(groups, rest, ties, of_tie, [&](int i, float& mass, int& count) {
        mass = group_above[i], count = group_equal[i];
      });
      begin = STRIPE * (g * 32 + pick(32, rest, ties, of_tie, [&](int i, float& mass, int& count) {
        mass = above[g * 32 + i], count = equal[g * 32 + i];
      }));
    }
    __syncthreads();
    const int count = vocab - begin < STRIPE ? vocab - begin : STRIPE;
    for (int i = threadIdx.x; i < count; i += SAMPLE_THREADS) {
      const float logit = widen(logits.row[begin + i]);
      const u32 order = order_of<T>(logit);
      above[i] = order > allowed.threshold ? sampler.mass(logit) : 0, equal[i] = order == allowed.threshold;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      token = begin + pick(count, rest, ties, of_tie, [&](int i, float& mass, int& is_tie) {
        mass = above[i], is_tie = equal[i];
      });
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    const float logit = widen(logits.row[token]);
    chosen[row] = tokens[row] = token;
    logprobs[row] = (logit - largest) * sampler.inverse_temperature - logf(total);
    positions[row] += 1;
  }
}

// ---- entries ----

#define KERNELS(T, suffix)                                                                                             \
  extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)                                                         \
      sample_##suffix(const T* logits, int vocab, const Choice* choices, const double* uniforms, i64* tokens,          \
                      i64* positions, i64* chosen, float* logprobs) {                                                  \
    take_turn();                                                                                                       \
    sample(logits, vocab, choices, uniforms, tokens, positions, chosen, logprobs);                                     \
  }
KERNELS(float, f32)
KERNELS(Bf16, bf16)
