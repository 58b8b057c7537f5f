// Products of matrices on the CPU whose result for a row depends on that row alone. What kernels.cpp says of kernels
// holds here.
//
// A library chooses its way, and with it the order of its sums, by the number of rows. Here every element is a sum over
// vectors of LANES values from the first on, whose lanes are joined at the end, whichever tile it lies in.
#include <ATen/Parallel.h>

#include "shim.h"
#include "vectors.h"

namespace {

// Rows and columns of a tile: as many sums as registers hold.
constexpr int64_t TILE_ROWS = 4, TILE_COLUMNS = 3;
// Of a task: its rows stay in the cache while its columns of weights come by.
constexpr int64_t TASK_ROWS = 64, TASK_COLUMNS = 96;

// x [rows, inner], w [columns, inner], out [rows, columns].
struct Linear {
  const float *x, *w;
  float* out;
  int64_t rows, inner, columns;
};

template <int64_t ROWS, int64_t COLUMNS>
INLINE void tile(const Linear& l, int64_t row, int64_t column) {
  const float *x = l.x + row * l.inner, *w = l.w + column * l.inner;
  Vec sums[ROWS][COLUMNS] = {};
  for (int64_t k = 0; k < l.inner; k += LANES) {
    Vec values[ROWS];
    for (int64_t r = 0; r < ROWS; ++r) values[r] = load(x + r * l.inner + k, l.inner - k);
    for (int64_t c = 0; c < COLUMNS; ++c) {
      const Vec weights = load(w + c * l.inner + k, l.inner - k);
      for (int64_t r = 0; r < ROWS; ++r) sums[r][c] += values[r] * weights;
    }
  }
  for (int64_t r = 0; r < ROWS; ++r)
    for (int64_t c = 0; c < COLUMNS; ++c) l.out[(row + r) * l.columns + column + c] = sum_lanes(sums[r][c]);
}

// `ROWS` rows of columns `begin` up to `end`.
template <int64_t ROWS>
INLINE void tiles(const Linear& l, int64_t row, int64_t begin, int64_t end) {
  int64_t column = begin;
  for (; column + TILE_COLUMNS <= end; column += TILE_COLUMNS) tile<ROWS, TILE_COLUMNS>(l, row, column);
  for (; column < end; ++column) tile<ROWS, 1>(l, row, column);
}

FOR_EACH_ISA void linear_range(const Linear& l, int64_t begin, int64_t end) {
  const int64_t across = (l.columns + TASK_COLUMNS - 1) / TASK_COLUMNS;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t first_row = task / across * TASK_ROWS, last_row = std::min(l.rows, first_row + TASK_ROWS);
    const int64_t first = task % across * TASK_COLUMNS, last = std::min(l.columns, first + TASK_COLUMNS);
    int64_t row = first_row;
    for (; row + TILE_ROWS <= last_row; row += TILE_ROWS) tiles<TILE_ROWS>(l, row, first, last);
    for (; row < last_row; ++row) tiles<1>(l, row, first, last);
  }
}

}  // namespace

extern "C" int anyroll_linear(const float* x, const float* w, float* out, int64_t rows, int64_t inner,
                              int64_t columns) {
  return guarded(-1, [&] {
    const Linear l{x, w, out, rows, inner, columns};
    const int64_t down = (rows + TASK_ROWS - 1) / TASK_ROWS;
    const int64_t across = (columns + TASK_COLUMNS - 1) / TASK_COLUMNS;
    const int64_t grained = grain(std::min(rows, TASK_ROWS) * inner);
    at::parallel_for(0, down * across, grained, [&](int64_t begin, int64_t end) { linear_range(l, begin, end); });
    return 0;
  });
}
