// Sums and joins of what the ranks of a host have in each other's reach, without a call of a communication library.
//
// Each rank has written its part to memory that all of them read. Block b of a kernel tells block b of the others, and
// waits for them: the work before a rank's kernel has then ended. The memory has two halves, used in turn. So a rank
// writes a half again only after the kernel between, in which all others had ended the kernel that read it.

#define MOST_RANKS 8

// The parts of all ranks, and the turns that the blocks of all ranks have told each of them.
struct Ranks {
  u64 parts[MOST_RANKS], turns[MOST_RANKS];
  int rank, count;
  // After this time the others are given up.
  u64 limit_ns;
};

__device__ inline u64 now_ns() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// `taken` has the turns that each block of this rank has taken. `failed` ends all waits.
__device__ inline void meet(const Ranks& ranks, u32* taken, int* failed) {
  const u32 turn = taken[blockIdx.x] + 1;
  if (threadIdx.x < ranks.count) {
    u32* theirs = (u32*)ranks.turns[threadIdx.x] + blockIdx.x * MOST_RANKS + ranks.rank;
    const u32* ours = (const u32*)ranks.turns[ranks.rank] + blockIdx.x * MOST_RANKS + threadIdx.x;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(theirs), "r"(turn) : "memory");
    const u64 begun = now_ns();
    for (;;) {
      u32 told;
      asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(told) : "l"(ours) : "memory");
      if ((int)(told - turn) >= 0 || *(volatile int*)failed) break;
      if (now_ns() - begun > ranks.limit_ns) *(volatile int*)failed = 1;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) taken[blockIdx.x] = turn;
}

template <typename T>
__device__ inline void sum_one(const T* of_ranks, int count, T& out, int is_added) {
  float sum = widen(of_ranks[0]);
#pragma unroll
  for (int rank = 1; rank < MOST_RANKS; rank++) {
    if (rank < count) sum += widen(of_ranks[rank]);
  }
  T rounded;
  narrow(sum, rounded);
  if (is_added) narrow(widen(out) + widen(rounded), rounded);
  out = rounded;
}

// The sum of all parts, in fp32 and in rank order, rounded once. `out` becomes it, or it is added to `out`.
template <typename T>
__device__ inline void sum_parts(const Ranks& ranks, T* out, u32 n, int is_added) {
  using P = Pack<T>;
  u32 done = 0;
  if (aligned(out) && aligned((void*)ranks.parts[0])) {
    const u32 packs = n / P::LANES;
    for (u32 i = thread_index(); i < packs; i += thread_count()) {
      P of_ranks[MOST_RANKS];
#pragma unroll
      for (int rank = 0; rank < MOST_RANKS; rank++) {
        if (rank < ranks.count) of_ranks[rank] = ((const P*)ranks.parts[rank])[i];
      }
      P total = is_added ? ((const P*)out)[i] : P{};
      for (int k = 0; k < P::LANES; k++) {
        T lanes[MOST_RANKS];
#pragma unroll
        for (int rank = 0; rank < MOST_RANKS; rank++) lanes[rank] = of_ranks[rank].lane[k];
        sum_one(lanes, ranks.count, total.lane[k], is_added);
      }
      ((P*)out)[i] = total;
    }
    done = packs * P::LANES;
  }
  for (u32 i = done + thread_index(); i < n; i += thread_count()) {
    T lanes[MOST_RANKS];
    for (int rank = 0; rank < ranks.count; rank++) lanes[rank] = ((const T*)ranks.parts[rank])[i];
    sum_one(lanes, ranks.count, out[i], is_added);
  }
}

// Rows of `all` columns from parts of `width` columns, of which each rank's first `count` are its own.
template <typename P>
__device__ inline void join_packs(const Ranks& ranks, P* out, u32 rows, u32 width, u32 count, u32 all) {
  for (u32 i = thread_index(); i < rows * all; i += thread_count()) {
    const u32 row = i / all, column = i % all, rank = column / count;
    out[i] = ((const P*)ranks.parts[rank])[row * width + column - rank * count];
  }
}

template <typename T>
__device__ inline void join_parts(const Ranks& ranks, T* out, u32 rows, u32 width, u32 count, u32 all) {
  using P = Pack<T>;
  const u32 lanes = P::LANES;
  if (width % lanes == 0 && count % lanes == 0 && all % lanes == 0 && aligned(out) && aligned((void*)ranks.parts[0])) {
    join_packs(ranks, (P*)out, rows, width / lanes, count / lanes, all / lanes);
  } else {
    join_packs(ranks, out, rows, width, count, all);
  }
}

// ---- entries ----

// Of one type, which whoever compiles this names behind it.
#define KERNELS(T, suffix)                                                                                             \
  extern "C" __global__ void __launch_bounds__(512)                                                                    \
      sum_of_host_##suffix(Ranks ranks, u32* taken, int* failed, T* out, u32 n, int is_added) {                        \
    meet(ranks, taken, failed);                                                                                        \
    sum_parts(ranks, out, n, is_added);                                                                                \
  }                                                                                                                    \
  extern "C" __global__ void __launch_bounds__(512) join_of_host_##suffix(Ranks ranks, u32* taken, int* failed,        \
                                                                          T* out, u32 rows, u32 width, u32 count,      \
                                                                          u32 all) {                                   \
    meet(ranks, taken, failed);                                                                                        \
    join_parts(ranks, out, rows, width, count, all);                                                                   \
  }
