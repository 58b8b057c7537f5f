// Choosing a token from each row of logits, behind `elements.cuh` and `block.cuh`: by the random numbers and the rules of
// the host. Sums run in fp32, in an order that does not depend on other rows.

constexpr int SAMPLE_THREADS = 1024;
// The elements that 32 threads read at once are a stripe; `kernels/sample.rs` refuses a vocabulary of more.
constexpr int MAX_STRIPES = 2048;
template <typename T>
constexpr int STRIPE = 32 * Pack<T>::LANES;
template <typename T>
__device__ inline int stripes_of(int size) {
  return (size + STRIPE<T> - 1) / STRIPE<T>;
}

// Compiled once and called, where it is a pass over all logits anyway: in place of all calls it takes the compiler 8
// seconds, and so 3.
#define APART __attribute__((noinline))

// How a row is sampled. A negative inverse temperature takes the likeliest token; its log-prob is then at the absolute.
// A penalty of 1 is none.
struct Choice {
  float inverse_temperature, top_p, min_p, top_k, penalty;

  __device__ bool is_greedy() const { return inverse_temperature < 0; }
  __device__ bool penalizes() const { return penalty != 1; }
  __device__ bool filters() const { return !is_greedy() && (top_k > 0 || top_p < 1 || min_p > 0); }
};

// An order of floats as one of integers, where values differ by STEP or more.
template <u32 STEP>
__device__ inline u32 order_of(float x) {
  const u32 bits = __float_as_uint(x), order = bits & 0x80000000 ? ~bits : bits | 0x80000000;
  return order & (0 - STEP);
}

// From one value of a type to the next in that order, at least: bits below it are 0 once a value is widened.
template <typename T>
constexpr u32 STEP_OF = 1;
template <>
constexpr u32 STEP_OF<Bf16> = 1 << 16;
template <>
constexpr u32 STEP_OF<F16> = 1 << 13;

// The bit of a token in the words of those that a row has.
__device__ inline u32 bit_of(int token) { return 1u << token % 32; }

// Logits of a row, those of tokens that it has already with a penalty where PENALIZES; what is past its end is minus
// infinity, which has no mass.
template <typename T, bool PENALIZES>
struct Logits {
  static constexpr int LANES = Pack<T>::LANES;
  // From one value to the next; a penalized one is divided and may have any bits.
  static constexpr u32 STEP = PENALIZES ? 1 : STEP_OF<T>;
  const T* row;
  int size;
  const u32* seen;
  float penalty;

  // `i` is a multiple of LANES, so that the bits of all lie in one word, or past the end.
  __device__ void read(int i, float (&to)[LANES]) const {
    if (i + LANES <= size && aligned(row + i)) {
      const Pack<T> pack = *(const Pack<T>*)(row + i);
      for (int k = 0; k < LANES; k++) to[k] = widen(pack.lane[k]);
    } else {
      for (int k = 0; k < LANES; k++) to[k] = i + k < size ? widen(row[i + k]) : -INFINITE;
    }
    if (!PENALIZES || i >= size) return;
    const u32 bits = seen[i / 32];
    for (int k = 0; k < LANES; k++) to[k] = bits & bit_of(i + k) ? penalized(to[k]) : to[k];
  }
  __device__ float at(int i) const {
    const float x = widen(row[i]);
    return PENALIZES && seen[i / 32] & bit_of(i) ? penalized(x) : x;
  }
  __device__ float penalized(float x) const { return x > 0 ? x / penalty : x * penalty; }
};

// The first of what the threads of a block have found, of which one that has found nothing has INFINITE; 0 where none has,
// as among logits that are no numbers. Every vocabulary that is allowed is below 2^24.
__device__ inline int first_of(float found) {
  const float first = -over_block<larger>(-found);
  return first < INFINITE ? (int)first : 0;
}

// The largest logit of a row, and of the tokens that have it the first.
struct Likeliest {
  float logit;
  int token;
};
template <typename T, bool PENALIZES>
__device__ APART Likeliest likeliest_of(const Logits<T, PENALIZES>& logits) {
  constexpr int LANES = Pack<T>::LANES;
  float x[LANES], largest = -INFINITE, first = INFINITE;
#pragma unroll 4
  for (int i = threadIdx.x * LANES; i < logits.size; i += SAMPLE_THREADS * LANES) {
    logits.read(i, x);
    for (int k = 0; k < LANES; k++)
      if (x[k] > largest) largest = x[k], first = i + k;
  }
  const float of_thread = largest;
  largest = over_block<larger>(largest);
  return {largest, first_of(of_thread == largest ? first : INFINITE)};
}

// ---- stripes ----

// Of a stripe the largest logit, and the mass of all relative to it.
struct Stripe {
  float largest, mass;
};
// Stripes that 32 threads read at once, and the threads of a block.
constexpr int STRIPES_AT_ONCE = 4, STRIPE_THREADS = 256;

// Measures the stripes of all rows: all that it takes to choose where nothing is filtered and nothing penalized.
template <typename T>
__device__ inline void measure_stripes(const T* all_logits, int vocab, const Choice* choices, Stripe* of_rows) {
  constexpr int LANES = Pack<T>::LANES, GROUPS = STRIPE_THREADS / 32;
  const int stripes = stripes_of<T>(vocab), blocks = (stripes + GROUPS * STRIPES_AT_ONCE - 1) / (GROUPS * STRIPES_AT_ONCE);
  const i64 row = blockIdx.x / blocks;
  const int first = blockIdx.x % blocks * GROUPS * STRIPES_AT_ONCE + threadIdx.x / 32, lane = threadIdx.x % 32;
  const Choice choice = choices[row];
  if (choice.penalizes() || choice.filters()) return;  // nobody asks for them
  const Logits<T, false> logits = {all_logits + row * vocab, vocab};
  const float inverse_temperature = fabsf(choice.inverse_temperature);
  float x[STRIPES_AT_ONCE][LANES];
#pragma unroll
  for (int s = 0; s < STRIPES_AT_ONCE; s++) logits.read((first + s * GROUPS) * STRIPE<T> + lane * LANES, x[s]);
#pragma unroll
  for (int s = 0; s < STRIPES_AT_ONCE; s++) {
    float largest = x[s][0], mass = 0;
    for (int k = 1; k < LANES; k++) largest = larger(largest, x[s][k]);
    largest = over_neighbours<larger>(largest, 32);
    const float at_least = largest > -INFINITE ? largest : 0;  // nothing has mass then
    for (int k = 0; k < LANES; k++) mass += __expf((x[s][k] - at_least) * inverse_temperature);
    mass = over_neighbours<add>(mass, 32);
    const int stripe = first + s * GROUPS;
    if (lane == 0 && stripe < stripes) of_rows[row * stripes + stripe] = {largest, mass};
  }
}

// ---- choosing ----

// Which tokens may be chosen: those above a threshold, and of those that equal it the first so many.
struct Allowed {
  u32 threshold;
  int ties;
};

// Of each stripe, and of 32 together, and at last of the tokens of one and of 32 together, the mass above the threshold and
// how many tokens equal it; and where the stripe begins that has the token.
struct Stripes {
  float above[MAX_STRIPES], group_above[MAX_STRIPES / 32];
  int equal[MAX_STRIPES], group_equal[MAX_STRIPES / 32];
  int begin;
};

// The part of `count` parts at which the cumulated mass passes `rest`, which becomes what is left of it there; the last
// that has any mass if rounding leaves too much. `ties` becomes what is left of them, each of mass `of_tie`.
__device__ inline int pick(int count, double& rest, int& ties, float of_tie, const float* above, const int* equal) {
  int last = 0, ties_at_last = ties;
  for (int i = 0; i < count; i++) {
    const int kept = equal[i] < ties ? equal[i] : ties;
    const double mass = (double)above[i] + of_tie * (float)kept;
    if (!(mass > 0)) continue;  // or it is no number
    last = i, ties_at_last = ties;
    if (rest < mass) return i;
    rest -= mass, ties -= kept;
  }
  rest = INFINITE, ties = ties_at_last;
  return last;
}

template <typename T, bool PENALIZES>
struct Sampler {
  static constexpr int LANES = Pack<T>::LANES;
  static constexpr u32 STEP = Logits<T, PENALIZES>::STEP;
  Logits<T, PENALIZES> logits;
  float inverse_temperature, largest;

  __device__ float mass(float x) const { return __expf((x - largest) * inverse_temperature); }

  // The sum over tokens from a threshold on of their masses, or of ones.
  __device__ APART float measure(u32 threshold, bool is_count) const {
    float sum = 0, x[LANES];
#pragma unroll 4
    for (int i = threadIdx.x * LANES; i < logits.size; i += SAMPLE_THREADS * LANES) {
      logits.read(i, x);
      for (int k = 0; k < LANES; k++)
        if (i + k < logits.size && order_of<STEP>(x[k]) >= threshold) sum += is_count ? 1 : mass(x[k]);
    }
    return over_block<add>(sum);
  }

  // The largest threshold from which on tokens measure as much as is wanted, bit by bit.
  __device__ u32 threshold_of(float wanted, bool is_count) const {
    u32 threshold = 0;
    for (u32 bit = 1u << 31; bit >= STEP; bit /= 2)
      if (measure(threshold | bit, is_count) >= wanted) threshold |= bit;
    return threshold;
  }

  __device__ float mass_at(u32 threshold) const {
    const u32 bits = threshold & 0x80000000 ? threshold & 0x7fffffff : ~threshold;
    return mass(__uint_as_float(bits & (0 - STEP)));
  }

  // top-k, then top-p of what is left, then min-p.
  __device__ Allowed allowed(const Choice& choice, float total) const {
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
      const u32 least = order_of<STEP>(largest + logf(choice.min_p) / inverse_temperature);
      if (least > allowed.threshold) allowed = {least - 1, 0};
    }
    return allowed;
  }

  // Measures the stripes of what is allowed.
  __device__ void measure(Allowed allowed, Stripes& of) const {
    float x[LANES];
    clear(of);
#pragma unroll 2
    for (int base = 0; base < logits.size; base += SAMPLE_THREADS * LANES) {
      const int i = base + threadIdx.x * LANES;
      float above = 0, ties = 0;
      logits.read(i < logits.size ? i : logits.size, x);
      for (int k = 0; k < LANES; k++) {
        const u32 order = order_of<STEP>(x[k]);
        if (order > allowed.threshold) above += mass(x[k]);
        if (order == allowed.threshold) ties += 1;
      }
      above = over_neighbours<add>(above, 32), ties = over_neighbours<add>(ties, 32);
      if (threadIdx.x % 32 == 0 && i < logits.size) of.above[i / STRIPE<T>] = above, of.equal[i / STRIPE<T>] = (int)ties;
    }
    __syncthreads();
  }
  // The same where all is, of what was measured already.
  __device__ void take(const Stripe* measured, Stripes& of) const {
    clear(of);
    for (int i = threadIdx.x; i < stripes_of<T>(logits.size); i += SAMPLE_THREADS)
      of.above[i] = measured[i].mass * mass(measured[i].largest);
    __syncthreads();
  }
  __device__ void clear(Stripes& of) const {
    for (int i = threadIdx.x; i < stripes_of<T>(logits.size) / 32 * 32 + 32; i += SAMPLE_THREADS)
      if (i < MAX_STRIPES) of.above[i] = 0, of.equal[i] = 0;
    __syncthreads();
  }

  // The token at which the cumulated mass of those that are allowed passes `uniform` times the whole. Thread 0 gets both.
  __device__ int invert(Allowed allowed, double uniform, Stripes& of, float& whole) const {
    const int groups = (stripes_of<T>(logits.size) + 31) / 32;
    for (int g = threadIdx.x; g < groups; g += SAMPLE_THREADS) {
      float above = 0;
      int ties = 0;
      for (int s = 0; s < 32; s++) above += of.above[g * 32 + s], ties += of.equal[g * 32 + s];
      of.group_above[g] = above, of.group_equal[g] = ties;
    }
    __syncthreads();
    const float of_tie = allowed.ties > 0 ? mass_at(allowed.threshold) : 0;
    double rest = 0;
    int ties = allowed.ties;
    if (threadIdx.x == 0) {
      double sum = 0;
      for (int g = 0; g < groups; g++) {
        const int kept = of.group_equal[g] < ties ? of.group_equal[g] : ties;
        sum += (double)of.group_above[g] + of_tie * (float)kept, ties -= kept;
      }
      whole = (float)sum;
      rest = uniform * sum;
      ties = allowed.ties;
      const int g = pick(groups, rest, ties, of_tie, of.group_above, of.group_equal);
      of.begin = STRIPE<T> * (g * 32 + pick(32, rest, ties, of_tie, of.above + g * 32, of.equal + g * 32));
    }
    __syncthreads();
    const int begin = of.begin, left = logits.size - begin, count = left < STRIPE<T> ? left : STRIPE<T>, i = threadIdx.x;
    float above = 0, equal = 0;
    if (i < count) {
      const float logit = logits.at(begin + i);
      const u32 order = order_of<STEP>(logit);
      above = order > allowed.threshold ? mass(logit) : 0, equal = order == allowed.threshold;
      of.above[i] = above, of.equal[i] = (int)equal;
    }
    above = over_neighbours<add>(above, 32), equal = over_neighbours<add>(equal, 32);
    if (i % 32 == 0 && i < STRIPE<T>) of.group_above[i / 32] = above, of.group_equal[i / 32] = (int)equal;
    __syncthreads();
    if (i > 0) return 0;
    const int of_group = 32 * pick(STRIPE<T> / 32, rest, ties, of_tie, of.group_above, of.group_equal);
    const int in_group = count - of_group < 32 ? count - of_group : 32;
    return begin + of_group + pick(in_group, rest, ties, of_tie, of.above + of_group, of.equal + of_group);
  }
};

// Thread 0 gets the token and, where something is filtered, the mass of all in `total`; `largest` becomes the largest logit.
template <typename T, bool PENALIZES>
__device__ inline int choose(const Logits<T, PENALIZES>& logits, const Choice& choice, double uniform, Stripes& stripes,
                             float& largest, float& total) {
  const Likeliest likeliest = likeliest_of(logits);
  largest = likeliest.logit;
  const Sampler<T, PENALIZES> sampler = {logits, fabsf(choice.inverse_temperature), largest};
  if (choice.is_greedy()) return likeliest.token;
  Allowed allowed = {0, 0};
  if (choice.filters()) {
    total = sampler.measure(0, false);
    allowed = sampler.allowed(choice, total);
  }
  sampler.measure(allowed, stripes);
  float of_allowed;
  return sampler.invert(allowed, uniform, stripes, of_allowed);
}

// The same of a row whose stripes were measured, where nothing is filtered and nothing penalized.
template <typename T>
__device__ inline int choose_measured(const Logits<T, false>& logits, const Choice& choice, double uniform,
                                      const Stripe* measured, Stripes& stripes, float& largest, float& total) {
  const int count = stripes_of<T>(logits.size);
  float of_thread = -INFINITE, mass = 0, first = INFINITE;
  for (int i = threadIdx.x; i < count; i += SAMPLE_THREADS) of_thread = larger(of_thread, measured[i].largest);
  largest = over_block<larger>(of_thread);
  const Sampler<T, false> sampler = {logits, fabsf(choice.inverse_temperature), largest};
  if (!choice.is_greedy()) {
    sampler.take(measured, stripes);
    return sampler.invert({0, 0}, uniform, stripes, total);
  }
  for (int i = threadIdx.x; i < count; i += SAMPLE_THREADS) {
    mass += measured[i].mass * sampler.mass(measured[i].largest);
    if (measured[i].largest == largest && first == INFINITE) first = i;
  }
  total = over_block<add>(mass);
  const int i = STRIPE<T> * first_of(first) + threadIdx.x;
  const bool is_largest = threadIdx.x < STRIPE<T> && i < logits.size && logits.at(i) == largest;
  return first_of(is_largest ? i : INFINITE);
}

// One row a block. `tokens` and `positions` are what the next step reads, and so is `seen`, bits of the tokens that a row
// with a penalty has; `chosen` and `logprobs` are what the host reads.
template <typename T>
__device__ inline void sample(const T* all_logits, int vocab, const Choice* choices, const Stripe* measured,
                              const double* uniforms, u32* seen, i64* tokens, i64* positions, i64* chosen,
                              float* logprobs) {
  __shared__ Stripes stripes;
  const i64 row = blockIdx.x;
  const Choice choice = choices[row];
  u32* words = seen + row * ((vocab + 31) / 32);
  const Logits<T, false> logits = {all_logits + row * vocab, vocab};
  int token;
  float largest, total = 0;
  if (choice.penalizes()) {
    const Logits<T, true> penalized = {logits.row, vocab, words, choice.penalty};
    token = choose(penalized, choice, uniforms[row], stripes, largest, total);
    largest = likeliest_of(logits).logit;  // log-probs are without the penalty
  } else if (choice.filters()) {
    token = choose(logits, choice, uniforms[row], stripes, largest, total);
  } else {
    measured += row * stripes_of<T>(vocab);
    token = choose_measured(logits, choice, uniforms[row], measured, stripes, largest, total);
  }
  const Sampler<T, false> sampler = {logits, fabsf(choice.inverse_temperature), largest};
  if (choice.penalizes()) total = sampler.measure(0, false);
  if (threadIdx.x == 0) {
    chosen[row] = tokens[row] = token;
    logprobs[row] = (widen(logits.row[token]) - largest) * sampler.inverse_temperature - logf(total);
    positions[row] += 1;
    if (choice.penalizes()) words[token / 32] |= bit_of(token);
  }
}

// ---- entries ----

// Of one type, which whoever compiles this names behind it.
#define KERNELS(T, suffix)                                                                                             \
  extern "C" __global__ void __launch_bounds__(STRIPE_THREADS)                                                         \
      measure_stripes_##suffix(const T* logits, int vocab, const Choice* choices, Stripe* measured) {                  \
    take_turn();                                                                                                       \
    measure_stripes(logits, vocab, choices, measured);                                                                 \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS)                                                         \
      sample_##suffix(const T* logits, int vocab, const Choice* choices, const Stripe* measured,                       \
                      const double* uniforms, u32* seen, i64* tokens, i64* positions, i64* chosen, float* logprobs) {  \
    take_turn();                                                                                                       \
    sample(logits, vocab, choices, measured, uniforms, seen, tokens, positions, chosen, logprobs);                     \
  }
