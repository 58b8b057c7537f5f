// A step of decoding through a mixture of experts, behind `rows.cuh` and `product.cu`: for compute capability 9.0a alone, in
// 16 bits. `ops::Choice` and `ops::Dispatch` have its meaning. Rows of tokens that go to the same expert lie side by side, so
// that a block reads an expert's weights once for all of them.

constexpr int MOST_EXPERTS = 1024;

// ---- choices ----

// The experts `chosen` [rows, per_token] of a row's logits [rows, experts], by the largest probabilities and among equals from
// the first on, and what they count. A row is a block, an expert a thread.
__device__ inline void choose(const Narrow* logits, int experts, int per_token, int is_normalized, int* chosen,
                              float* weights) {
  __shared__ float probs[MOST_EXPERTS];
  const i64 row = blockIdx.x;
  const int own = threadIdx.x;
  const float logit = own < experts ? widen(logits[row * experts + own]) : -INFINITE;
  const float power = __expf(logit - over_block<larger>(logit));
  const float prob = power / over_block<add>(power);
  probs[own] = prob;
  __syncthreads();
  int in_front = 0;
  for (int other = 0; other < experts; other++)
    in_front += probs[other] > prob || (probs[other] == prob && other < own);
  const bool is_chosen = own < experts && in_front < per_token;
  const float all = is_normalized ? over_block<add>(is_chosen ? prob : 0) : 1;
  if (!is_chosen) return;
  chosen[row * per_token + in_front] = own;
  weights[row * per_token + in_front] = prob / all;
}

// ---- order ----

// Calls `see(i)` for each i below `count`, from the first on, where `chosen` has the thread's own number.
template <typename See>
__device__ inline void over_own(const int* chosen, int count, See see) {
  constexpr int RUN = 1024;
  __shared__ int run[RUN];
  for (int first = 0; first < count; first += RUN) {
    const int here = min(count - first, RUN);
    __syncthreads();
    for (int i = threadIdx.x; i < here; i += blockDim.x) run[i] = chosen[first + i];
    __syncthreads();
    for (int i = 0; i < here; i++)
      if (run[i] == threadIdx.x) see(first + i);
  }
}

// Sorts choices by their experts, and those of an expert by their tokens: where each expert's rows end, the token of each
// row, and the row of each choice. One block, an expert a thread.
__device__ inline void sort(const int* chosen, int count, int per_token, int experts, int* ends, int* tokens, int* places) {
  __shared__ int counts[MOST_EXPERTS];
  const int own = threadIdx.x;
  int rows = 0;
  over_own(chosen, count, [&](int) { rows++; });
  counts[own] = rows;
  __syncthreads();
  int row = 0;
  for (int other = 0; other < own; other++) row += counts[other];
  if (own < experts) ends[own] = row + rows;
  over_own(chosen, count, [&](int choice) {
    tokens[row] = choice / per_token;
    places[choice] = row++;
  });
}

// ---- products ----

// Where each expert's rows end, and the row of x that each of them is; null where they lie as they are multiplied. Of the experts
// `own` from `first` on are here.
struct Experts {
  const int *ends, *tokens;
  int first, own;
};

// Some rows of weights of one expert, with all rows that are the expert's. Of a product `w` has the matrices of all experts that
// are here, one below the other.
template <int TILE, int STAGES>
__device__ inline void multiply_expert(Product of, const Experts& experts) {
  const int width = of.is_gated ? TILE / 2 : TILE, tiles = (of.n + width - 1) / width;
  const int place = blockIdx.x / tiles, tile = blockIdx.x % tiles, expert = experts.first + place;
  of.w += (i64)place * (of.is_gated ? 2 : 1) * of.n * of.k;
  take_turn();
  const int end = experts.ends[expert];
  for (int first = expert ? experts.ends[expert - 1] : 0; first < end; first += GROUP_ROWS) {
    Product part = of;
    part.rows = min(end - first, GROUP_ROWS);
    part.y += (i64)first * of.n;
    if (!experts.tokens) part.x += (i64)first * of.k;
    __syncthreads();  // the rows in front are multiplied
    multiply_tile<1, TILE, STAGES>(part, Cluster(1, 0), tile, experts.tokens ? experts.tokens + first : nullptr);
  }
}

// ---- sums ----

// y [rows, columns] plus what a row's experts made of it, each by what it counts; rounded once. A row is a block. The `own` experts
// from `first` on are here, and made rows up to their ends.
__device__ inline void add_up(Narrow* y, const Narrow* made, const int* places, const float* weights, int per_token,
                              int columns, const int* ends, int first, int own) {
  constexpr int LANES = Pack<Narrow>::LANES;
  const i64 row = blockIdx.x;
  const int begin = first ? ends[first - 1] : 0, end = ends[first + own - 1];
  for (int i = threadIdx.x * LANES; i < columns; i += blockDim.x * LANES) {
    Pack<Narrow> pack = read(y + row * columns, i, columns);
    float sums[LANES];
    for (int k = 0; k < LANES; k++) sums[k] = widen(pack.lane[k]);
    for (i64 choice = row * per_token; choice < (row + 1) * per_token; choice++) {
      if (places[choice] < begin || places[choice] >= end) continue;
      const Pack<Narrow> of_expert = read(made + (i64)places[choice] * columns, i, columns);
      for (int k = 0; k < LANES; k++) sums[k] += widen(of_expert.lane[k]) * weights[choice];
    }
    for (int k = 0; k < LANES; k++) narrow(sums[k], pack.lane[k]);
    write(y + row * columns, i, columns, pack);
  }
}

// ---- entries ----

extern "C" __global__ void __launch_bounds__(MOST_EXPERTS)
    NAMED(choose_experts)(const Narrow* logits, int experts, int per_token, int is_normalized, int* chosen,
                          float* weights) {
  take_turn();
  choose(logits, experts, per_token, is_normalized, chosen, weights);
}
extern "C" __global__ void __launch_bounds__(MOST_EXPERTS)
    NAMED(sort_choices)(const int* chosen, int count, int per_token, int experts, int* ends, int* tokens,
                        int* places) {
  take_turn();
  sort(chosen, count, per_token, experts, ends, tokens, places);
}
extern "C" __global__ void __launch_bounds__(GROUP_THREADS)
    NAMED(multiply_experts)(Product of, Experts experts) {
  multiply_expert<96, 3>(of, experts);
}
extern "C" __global__ void __launch_bounds__(256)
    NAMED(add_experts)(Narrow* y, const Narrow* made, const int* places, const float* weights, int per_token,
                       int columns, const int* ends, int first, int own) {
  take_turn();
  add_up(y, made, places, weights, per_token, columns, ends, first, own);
}
