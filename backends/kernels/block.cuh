// Sums over the threads of a block, behind `elements.cuh`.

__device__ inline float add(float a, float b) { return a + b; }
__device__ inline float larger(float a, float b) { return a > b ? a : b; }

// The value of the thread whose number differs in the bits of `mask`, below 32.
__device__ inline float exchange(float x, int mask) {
#ifdef __HIP_DEVICE_COMPILE__
  return __shfl_xor(x, mask, 32);
#else
  return __shfl_xor_sync(0xffffffff, x, mask, 32);
#endif
}

// Joins one value of each of `count` neighbouring threads, a power of two up to 32, as a tree. All threads of a block
// call.
template <float (*join)(float, float)>
__device__ inline float over_neighbours(float x, int count) {
  for (int mask = count / 2; mask > 0; mask /= 2) x = join(x, exchange(x, mask));
  return x;
}

// Joins one value of each of the block's threads, of which there are 32, 64, ... or 1024, as a tree. All threads call
// and get the result.
template <float (*join)(float, float)>
__device__ inline float over_block(float x) {
  __shared__ float of_group[32];
  x = over_neighbours<join>(x, 32);
  const int groups = blockDim.x / 32;
  if (groups == 1) return x;
  __syncthreads();  // the call before this one may still be reading
  if (threadIdx.x % 32 == 0) of_group[threadIdx.x / 32] = x;
  __syncthreads();
  x = of_group[threadIdx.x % groups];
  for (int mask = groups / 2; mask > 0; mask /= 2) x = join(x, exchange(x, mask));
  return x;
}
