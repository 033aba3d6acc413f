// The tile that products and attention are loops around: a few rows times a few vectors of columns, whose sums stay in registers while
// the summed axis is walked once. Each element is one chain of multiply-adds in the order of that axis, so a row's result is the same,
// bit for bit, whatever other rows are computed beside it, and whatever the number of threads.

#ifndef ARGOSY_TILES_H
#define ARGOSY_TILES_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

namespace {

// Floats in a vector, and rows in a tile: a tile of two vectors keeps 2 * ROWS sums in registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6;
#else
constexpr int LANES = 4, ROWS = 6;
#endif
constexpr int COLUMNS = 2 * LANES;
// Columns of a panel of a packed weight; `PANEL` in products.py.
constexpr int64_t PANEL = 32;
// Of the summed axis at a time, so that this part of a panel stays in the second-level cache for all rows.
constexpr int64_t DEPTH = 2048;
// Rows of a panel between the one that is multiplied and the one that is asked for: 8 KB of float32.
constexpr int64_t AHEAD = 64;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

template <typename T>
struct Lanes;
template <>
struct Lanes<uint16_t> {
  typedef uint16_t type __attribute__((vector_size(2 * LANES)));
};

inline Floats all(float a) { return a - Floats{}; }

inline Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// bfloat16 is the upper half of a float32.
inline Floats load(const uint16_t* p) {
  Lanes<uint16_t>::type half;
  std::memcpy(&half, p, sizeof half);
  return (Floats)(__builtin_convertvector(half, Ints) << 16);
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

// The first `columns` of COLUMNS numbers.
inline void store_columns(float* p, Floats left, Floats right, int64_t columns) {
  float edge[COLUMNS], *to = columns < COLUMNS ? edge : p;
  store(to, left);
  store(to + LANES, right);
  if (columns < COLUMNS) std::memcpy(p, edge, columns * sizeof(float));
}

inline Floats pick(Ints where, Floats a, Floats b) { return (Floats)(((Ints)a & where) | ((Ints)b & ~where)); }

// What is asked for while a tile is computed: `step` bytes for each row of `w`, from `from` on. Nothing if there are no bytes.
struct Later {
  const char* from = nullptr;
  int64_t step = 0;
};

// y[M, :columns] = x[M, K] @ w[K, :COLUMNS], or added to it. `w` may be read beyond `columns`, up to COLUMNS.
template <int M, typename W>
void tile(const float* x, int64_t x_row, const W* w, int64_t w_row, int64_t K, float* y, int64_t y_row, int64_t columns,
          bool add, Later later) {
  Floats sums[M][2];
  float edge[COLUMNS];
  for (int m = 0; m < M; m++) {
    const float* from = y + m * y_row;
    if (!add) {
      sums[m][0] = sums[m][1] = Floats{};
      continue;
    }
    if (columns < COLUMNS) {
      std::memset(edge, 0, sizeof edge);
      std::memcpy(edge, from, columns * sizeof(float));
      from = edge;
    }
    sums[m][0] = load(from);
    sums[m][1] = load(from + LANES);
  }
  for (int64_t k = 0; k < K; k++) {
    const Floats left = load(w + k * w_row), right = load(w + k * w_row + LANES);
    __builtin_prefetch(later.from + k * later.step);
    if (later.step > 64) __builtin_prefetch(later.from + k * later.step + 64);
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const Floats a = all(x[m * x_row + k]);
      sums[m][0] += a * left;
      sums[m][1] += a * right;
    }
  }
  for (int m = 0; m < M; m++) store_columns(y + m * y_row, sums[m][0], sums[m][1], columns);
}

template <typename W>
using Tile = void (*)(const float*, int64_t, const W*, int64_t, int64_t, float*, int64_t, int64_t, bool, Later);

template <typename W, int... M>
Tile<W> tile_of(int rows, std::integer_sequence<int, M...>) {
  static constexpr Tile<W> tiles[] = {tile<M + 1, W>...};
  return tiles[rows - 1];
}

// As `tile`, for any number of rows, split evenly into tiles. One tile asks for rows of `w` AHEAD; several ask for `next`, which has the
// size of this `w` and is wanted after it, and each for its share.
template <typename W>
void tiles(const float* x, int64_t x_row, int64_t M, const W* w, int64_t w_row, int64_t K, float* y, int64_t y_row,
           int64_t columns, bool add, const W* next = nullptr) {
  const int64_t count = (M + ROWS - 1) / ROWS, bytes = w_row * sizeof(W);
  for (int64_t i = 0, m = 0; i < count; i++) {
    const int rows = int((M - m) / (count - i));
    const auto one = tile_of<W>(rows, std::make_integer_sequence<int, ROWS>{});
    const Later later = count == 1 ? Later{reinterpret_cast<const char*>(w + AHEAD * w_row), bytes}
                        : next     ? Later{reinterpret_cast<const char*>(next) + i * K * bytes / count, bytes / count}
                                   : Later{};
    one(x + m * x_row, x_row, w, w_row, K, y + m * y_row, y_row, columns, add, later);
    m += rows;
  }
}

}  // namespace

#endif
