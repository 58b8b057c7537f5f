// Rows of elements, a pack a thread, and sums over them and over their columns, behind `elements.cuh` and `block.cuh`.

// Where `index` lies among rows of `size`. In 32 bits, where they hold it, a division is several times as fast, and what
// is left of some kernels is not much more than that.
struct Place {
  u64 row, rest;

  __device__ Place(u64 index, u64 size) {
    if ((index | size) >> 32) {
      row = index / size;
    } else {
      row = (u32)index / (u32)size;
    }
    rest = index - row * size;
  }
};

// The elements of a row of `size` from `i` on, as many as a pack has. What is past the row reads as 0 and is not
// written.
template <typename T>
__device__ inline Pack<T> read(const T* row, u64 i, u64 size) {
  constexpr int LANES = Pack<T>::LANES;
  if (aligned(row + i) && i + LANES <= size) return *(const Pack<T>*)(row + i);
  Pack<T> pack;
  for (int k = 0; k < LANES; k++) {
    if (i + k < size) {
      pack.lane[k] = row[i + k];
    } else {
      narrow(0.0f, pack.lane[k]);
    }
  }
  return pack;
}

template <typename T>
__device__ inline void write(T* row, u64 i, u64 size, const Pack<T>& pack) {
  constexpr int LANES = Pack<T>::LANES;
  if (aligned(row + i) && i + LANES <= size) {
    *(Pack<T>*)(row + i) = pack;
    return;
  }
  for (int k = 0; k < LANES && i + k < size; k++) row[i + k] = pack.lane[k];
}

template <typename T>
__device__ inline u64 packs_of(u64 size) {
  return (size + Pack<T>::LANES - 1) / Pack<T>::LANES;
}

// The threads that share a row, a power of two: up to 32 side by side in a block, or all of a block.
struct Sharers {
  int count, lane, group, groups;

  __device__ Sharers(int shift)
      : count(1 << shift), lane(threadIdx.x & (count - 1)), group(threadIdx.x >> shift), groups(blockDim.x >> shift) {}
  // As a tree; all threads of the block call.
  __device__ float sum(float x) const {
    return groups == 1 ? over_block<add>(x) : over_neighbours<add>(x, count);
  }
};

// out[c] = the sum of column c of `partial`, or added to. A block has 32 groups of 32 threads, a column each, from `first`
// on.
template <typename T>
__device__ inline void join_parts(const float* partial, u64 parts, u64 columns, u64 first, T* out, int is_added) {
  __shared__ float sums[32][32];
  const u64 column = first + threadIdx.x % 32;
  const int group = threadIdx.x / 32;
  float sum = 0;
  if (column < columns) {
#pragma unroll 8
    for (u64 part = group; part < parts; part += 32) sum += partial[part * columns + column];
  }
  sums[group][threadIdx.x % 32] = sum;
  __syncthreads();
  if (group > 0 || column >= columns) return;
  for (int other = 1; other < 32; other++) sum += sums[other][threadIdx.x];
  narrow(is_added ? widen(out[column]) + sum : sum, out[column]);
}
