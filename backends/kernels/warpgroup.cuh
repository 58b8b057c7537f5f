// Instructions of four warps that multiply together, and of what feeds them, behind `elements.cuh`: for compute
// capability 9.0a alone, whose matrix units read shared memory.

// Two values in 16 bits each, the first one in the lower half.
__device__ inline u32 narrow_pair(float low, float high) {
  u32 bits;
  asm("cvt.rn." NARROW "x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
}

// ---- copies into shared memory ----

// 16 bytes, of which those past the first so many are zeros. (With a hint for the cache, ptxas of CUDA 13.0 makes
// instructions of it that are none.)
__device__ inline void copy(u32 to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// What the thread's copies brought is seen by the matrix units.
__device__ inline void show_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- products ----

// Bytes of a row in shared memory, as wide as its swizzle.
constexpr int ROW_BYTES = 128;

// Where 64 or more rows of swizzled bytes lie, whose first 32 bytes are multiplied; or 16 rows that are multiplied
// along their columns, of which the next 64 lie so many bytes further on.
__device__ inline u64 matrix(u32 at, u32 next_columns = 16) {
  return (u64)(at >> 4 & 0x3fff) | (u64)(next_columns >> 4) << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ inline void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Operands of the instructions below: sums, and the names of their registers.
#define SUM(i) "+f"(c[i])
#define SUMS_4(i) SUM(i), SUM(i + 1), SUM(i + 2), SUM(i + 3)
#define SUMS_8(i) SUMS_4(i), SUMS_4(i + 4)
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_64                                                                                                   \
  NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
           "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Behind these the sums are what products made of them.
template <int PENDING, int COUNT>
__device__ inline void await_products(float (&c)[COUNT]) {
  await_products<PENDING>();
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : SUM(i)::"memory");
}

#define MULTIPLY(N, NAMES, A, B, KEEPS)                                       \
  "{\n.reg .pred keeps;\nsetp.ne.b32 keeps, " KEEPS ", 0;\n"                  \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NARROW "." NARROW " {" NAMES "}, " A \
  ", " B ", keeps, 1, 1, 0, 0;\n}"
// c = a b^T, or c + a b^T where it `keeps` what there is, for 64 x 16 and `N` x 16 values, by four warps: a thread has
// row lane / 4 of its warp's 16, columns 2 (lane % 4) and the next, then the same 8 rows below, and so on for each 8
// columns.
template <int N>
__device__ inline void multiply(float* c, u64 a, u64 b, bool keeps = true) {
  static_assert(N == 16 || N == 32 || N == 64 || N == 128, "what there is");
  if constexpr (N == 16) {
    asm volatile(MULTIPLY(16, NAMES_8, "%8", "%9", "%10") : SUMS_8(0) : "l"(a), "l"(b), "r"((int)keeps));
  } else if constexpr (N == 32) {
    asm volatile(MULTIPLY(32, NAMES_16, "%16", "%17", "%18") : SUMS_16(0) : "l"(a), "l"(b), "r"((int)keeps));
  } else if constexpr (N == 64) {
    asm volatile(MULTIPLY(64, NAMES_32, "%32", "%33", "%34") : SUMS_32(0) : "l"(a), "l"(b), "r"((int)keeps));
  } else {
    asm volatile(MULTIPLY(128, NAMES_64, "%64", "%65", "%66")
                 : SUMS_32(0), SUMS_32(32)
                 : "l"(a), "l"(b), "r"((int)keeps));
  }
}

#define MULTIPLY_ROWS(N, NAMES, A, B) \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NARROW "." NARROW " {" NAMES "}, {" A "}, " B ", 1, 1, 1, 1;"
// c += a b for 64 x 16 and 16 x `N` values: a thread's of a, two to a register, are those that it would have of sums.
template <int N>
__device__ inline void multiply_rows(float* c, const u32* a, u64 b) {
  static_assert(N == 64 || N == 128, "what there is");
  if constexpr (N == 64) {
    asm volatile(MULTIPLY_ROWS(64, NAMES_32, "%32, %33, %34, %35", "%36")
                 : SUMS_32(0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile(MULTIPLY_ROWS(128, NAMES_64, "%64, %65, %66, %67", "%68")
                 : SUMS_32(0), SUMS_32(32)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
}
