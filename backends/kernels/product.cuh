// What a product with a matrix of weights is, and what becomes of it, behind `warpgroup.cuh`: 16-bit values with sums in
// fp32.

// Elements of k in a stage: a row of shared memory.
constexpr int CHUNK = 64;
// Rows that a product with a norm, or with gates, has at most.
constexpr int MOST_ROWS = 128;

using Two = Pack<Narrow, 2>;

__device__ inline Two narrowed(float first, float second) {
  union {
    u32 word;
    Two two;
  } out = {narrow_pair(first, second)};
  return out.two;
}

// The norm of a vector is made in two parts: the product that makes the vector multiplies it by the norm's weights and
// leaves sums of squares, a tile each [tiles, MOST_ROWS], and the product that takes it multiplies what it makes by the
// reciprocal root of their mean. In fp16 the vector times the weights may be too large before that, though its norm is
// not. So there it is multiplied by the weights in units of a power of two above them all, which lies behind the sums
// [MOST_ROWS] and comes back with the root.
struct Squares {
  float* of_tiles;  // null where there is no norm
  int tiles;
  float eps;

  // Every second tile of a row, asked for before the products and added up behind them.
  static constexpr int EARLY = 28;
  struct Half {
    float of_tile[EARLY];
    float unit;
  };
  __device__ Half half(int row, int first) const {
    Half half;
#pragma unroll
    for (int i = 0; i < EARLY; i++) {
      const int tile = first + i * 2;
      half.of_tile[i] = tile < tiles ? of_tiles[tile * MOST_ROWS + row] : 0;
    }
    half.unit = HAS_RANGE_OF_FP32 || !of_tiles ? 1 : of_tiles[tiles * MOST_ROWS + row];
    return half;
  }
  // Of the halves that two neighbouring threads have.
  __device__ float scale(const Half& half, int row, int first, int dim) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < EARLY; i++) sum += half.of_tile[i];
#pragma unroll 1
    for (int tile = first + EARLY * 2; tile < tiles; tile += 2) sum += of_tiles[tile * MOST_ROWS + row];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    const float scale = rsqrtf(__fdividef(sum, dim) + eps);
    return HAS_RANGE_OF_FP32 ? scale : scale * half.unit;
  }
  // The sum of a tile, and with the first one the unit.
  __device__ void put(int tile, int row, float sum, float unit) const {
    of_tiles[tile * MOST_ROWS + row] = sum;
    if (!HAS_RANGE_OF_FP32 && tile == 0) of_tiles[tiles * MOST_ROWS + row] = unit;
  }
};

// What is multiplied, and what becomes of it: y [rows, n] = s (x w^T) + bias + y, where s is the scale of x's norm, or,
// gated, of two halves of w [2 n, k], silu(s x w_0^T) s x w_1^T, each rounded as it would be by itself. `bias` [n] may be
// missing. With `norm` [n], `normed` becomes y times it, in the norm's unit.
struct Product {
  const Narrow *x, *w, *bias;
  Narrow* y;
  const Narrow* norm;
  Narrow* normed;
  Squares before, after;
  int rows, n, k, is_gated, is_added;

  // The row of weights that is row `r` of tile `tile`, or another one where there is none.
  template <int TILE>
  __device__ i64 weight_row(int tile, int r) const {
    const int half = is_gated ? TILE / 2 : TILE, row = tile * half + r % half;
    return (row < n ? row : n - 1) + (r < half ? 0 : n);
  }

  __device__ bool has(int row, int element) const { return row < rows && element < n; }
  __device__ i64 place(int row, int element) const { return (i64)row * n + element; }
  // What two neighbouring elements of y take from vectors, and from y as it was.
  __device__ Two of(const Narrow* vector, int element) const {
    return vector && element < n ? *(const Two*)(vector + element) : Two{};
  }
  __device__ Two added(int row, int element) const {
    return is_added && has(row, element) ? *(const Two*)(y + place(row, element)) : Two{};
  }

  // Makes two elements of y of their sums; of their squares the sum, if a norm follows, of whose unit 1 is `of_unit`.
  __device__ float put(int row, int element, const float* sum, float scale, Two bias, Two added, Two norm,
                       float of_unit) const {
    if (!has(row, element)) return 0;
    const Two out = narrowed(sum[0] * scale + widen(bias.lane[0]) + widen(added.lane[0]),
                             sum[1] * scale + widen(bias.lane[1]) + widen(added.lane[1]));
    *(Two*)(y + place(row, element)) = out;
    if (!this->norm) return 0;
    const float first = widen(out.lane[0]), second = widen(out.lane[1]);
    *(Two*)(normed + place(row, element)) =
        narrowed(first * (widen(norm.lane[0]) * of_unit), second * (widen(norm.lane[1]) * of_unit));
    return first * first + second * second;
  }
  __device__ void put_gated(int row, int element, const float* gate, const float* up, float scale) const {
    if (!has(row, element)) return;
    const Two gates = narrowed(gate[0] * scale, gate[1] * scale), ups = narrowed(up[0] * scale, up[1] * scale);
    *(Two*)(y + place(row, element)) = narrowed(gated(widen(gates.lane[0]), widen(ups.lane[0])),
                                                gated(widen(gates.lane[1]), widen(ups.lane[1])));
  }
};
