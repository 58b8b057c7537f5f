// Values in 4 bits back to wide ones, behind `elements.cuh`: `ops::from_four_bits` has the format.

// The levels of NF4, in ascending order: `ops::four_bits` has their source.
__constant__ float LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f,
    0.7229568362236023f, 1.0f};

// Words of a block of 64 values: eight of codes, and the largest value.
#define CODES 8
#define WORDS (CODES + 1)

// Each thread widens the eight codes of a word, the upper half of each byte first.
template <typename T>
__device__ inline void widen_codes(T* out, const u32* packed, u64 blocks) {
  __shared__ float levels[16];
  if (threadIdx.x < 16) levels[threadIdx.x] = LEVELS[threadIdx.x];
  __syncthreads();
  for (u64 i = thread_index(); i < blocks * CODES; i += thread_count()) {
    const u32* block = packed + i / CODES * WORDS;
    const u32 codes = block[i % CODES];
    const float largest = __uint_as_float(block[CODES]);
    Pack<T, 8> values;
    for (int k = 0; k < 8; k++) narrow(levels[codes >> (k ^ 1) * 4 & 15] * largest, values.lane[k]);
    ((Pack<T, 8>*)out)[i] = values;
  }
}

#define KERNEL(T, name)                                                                                   \
  extern "C" __global__ void __launch_bounds__(256) from_four_bits_##name(T* out, const u32* in, u64 n) { \
    widen_codes(out, in, n);                                                                              \
  }
KERNEL(float, f32)
KERNEL(Bf16, bf16)
KERNEL(F16, f16)
