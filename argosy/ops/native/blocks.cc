// Products with weights of few bits, as they lie in a file: blocks of whole numbers along the summed axis, each with a scale and
// perhaps a minimum, w = scale * (code - zero) - minimum. No float32 copy is made: a row of codes becomes floats in registers, or, for more rows
// than a tile has, a part of a panel in a buffer of the first-level cache.
//
// scale * (code - zero) is exact in float32 for every type of GGUF, and no type has both a zero and a minimum. So w is rounded once
// and has the bits of the float32 weight, and the sums have the order of `argosy_product`: the results are the same, bit for bit, for
// finite scales.

#include <algorithm>
#include <cstdint>
#include <utility>

#include "parallel.h"
#include "tiles.h"

namespace ffi = xla::ffi;

namespace {

// Of the summed axis at a time in the buffer: 32 KB with the widest vectors. A multiple of every block's length.
constexpr int64_t PART = 256;
// Bytes of codes between the row that is multiplied and the one that is asked for.
constexpr int64_t SOON = 2048;

struct Pair {
  Floats left, right;
};

inline Bytes some(const uint8_t* from) {
  Bytes codes;
  std::memcpy(&codes, from, sizeof codes);
  return codes;
}

// A code of eight bits for each column, stored with its highest bit flipped: see `widened`.
struct Eight {
  static constexpr int64_t ROW = PANEL;
  static Pair load(const uint8_t* row, int64_t c) { return {widened(some(row + c) ^ 128), widened(some(row + c + LANES) ^ 128)}; }
};

// Four bits for each: columns c and c + 16 share a byte, c in its low half.
struct Four {
  static constexpr int64_t HALF = PANEL / 2, ROW = HALF;
  static Floats one(const uint8_t* row, int64_t c) {
    const Bytes both = some(row + c % HALF);
    return widened(c < HALF ? both & 15 : both >> 4);
  }
  static Pair load(const uint8_t* row, int64_t c) {
    if constexpr (LANES == HALF) return {one(row, 0), one(row, HALF)};
    return {one(row, c), one(row, c + LANES)};
  }
};

// A panel of a weight: w = scale * (code - zero) - minimum. `minimum` may be null.
struct Blocks {
  const uint8_t* codes;
  const float *scale, *minimum;
  int64_t block;
  float zero;
};

// Calls row(k, left, right) with COLUMNS floats of each of `deep` rows of a panel from row `start` and column `c` on. `start` and `deep`
// are multiples of a block.
template <typename Code, typename Row>
inline void each(const Blocks& w, int64_t start, int64_t deep, int64_t c, const Row& row) {
  for (int64_t at = 0; at < deep; at += w.block) {
    const int64_t place = (start + at) / w.block * PANEL + c;
    const Pair scale = {load(w.scale + place), load(w.scale + place + LANES)};
    // Of whole numbers, so exact: what is subtracted for codes that have a zero.
    Pair minimum = {scale.left * all(w.zero), scale.right * all(w.zero)};
    if (w.minimum) minimum = {minimum.left + load(w.minimum + place), minimum.right + load(w.minimum + place + LANES)};
    const uint8_t* codes = w.codes + (start + at) * Code::ROW;
    for (int64_t k = 0; k < w.block; k++) {
      const Pair code = Code::load(codes + k * Code::ROW, c);
      __builtin_prefetch(codes + k * Code::ROW + SOON);
      row(at + k, scale.left * code.left - minimum.left, scale.right * code.right - minimum.right);
    }
  }
}

// y[M, :columns] = x[M, K] times columns c ... of a panel of K rows.
template <int M, typename Code>
void narrow_tile(const float* x, const Blocks& w, int64_t K, int64_t c, float* y, int64_t y_row, int64_t columns) {
  Floats sums[M][2] = {};
  each<Code>(w, 0, K, c, [&](int64_t k, Floats left, Floats right) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const Floats a = all(x[m * K + k]);
      sums[m][0] += a * left;
      sums[m][1] += a * right;
    }
  });
  float edge[COLUMNS];
  for (int m = 0; m < M; m++) {
    float* to = columns < COLUMNS ? edge : y + m * y_row;
    store(to, sums[m][0]);
    store(to + LANES, sums[m][1]);
    if (columns < COLUMNS) std::memcpy(y + m * y_row, edge, columns * sizeof(float));
  }
}

using NarrowTile = void (*)(const float*, const Blocks&, int64_t, int64_t, float*, int64_t, int64_t);

template <typename Code, int... M>
NarrowTile narrow_tile_of(int rows, std::integer_sequence<int, M...>) {
  static constexpr NarrowTile tiles[] = {narrow_tile<M + 1, Code>...};
  return tiles[rows - 1];
}

// x [M, K] times a weight of N columns, of which `panel` gives each panel: y [M, N].
template <typename Code, typename Panel>
ffi::Error product(ffi::ThreadPool& pool, const float* x, int64_t M, int64_t K, const Panel& panel, float* y, int64_t N) {
  const int64_t count = (N + PANEL - 1) / PANEL, share = count / (4 * pool.num_threads());
  const int64_t together = M <= ROWS ? 1 : std::max<int64_t>(1, std::min<int64_t>(8, share));
  parallel(pool, (count + together - 1) / together, [=](int64_t task) {
    alignas(64) float part[PART * COLUMNS];
    for (int64_t p = task * together; p < std::min((task + 1) * together, count); p++) {
      const Blocks w = panel(p);
      for (int64_t c = 0; c < PANEL; c += COLUMNS) {
        const int64_t n = p * PANEL + c, columns = std::min<int64_t>(COLUMNS, N - n);
        if (columns <= 0) continue;
        if (M <= ROWS) {
          narrow_tile_of<Code>(int(M), std::make_integer_sequence<int, ROWS>{})(x, w, K, c, y + n, N, columns);
          continue;
        }
        for (int64_t k = 0; k < K; k += PART) {
          const int64_t deep = std::min(PART, K - k);
          each<Code>(w, k, deep, c, [&](int64_t i, Floats left, Floats right) {
            store(part + i * COLUMNS, left);
            store(part + i * COLUMNS + LANES, right);
          });
          tiles<float>(x + k, K, M, part, COLUMNS, deep, y + n, N, columns, k > 0);
        }
      }
    }
  });
  return ffi::Error::Success();
}

// codes [panels, K, PANEL] of eight bits or [panels, K, PANEL / 2] of twice four; scale [panels, blocks, PANEL]; minimum as scale, or
// nothing.
ffi::Error blocks_product_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::F32> scale,
                             ffi::Buffer<ffi::F32> minimum, ffi::ResultBuffer<ffi::F32> y, int64_t zero) {
  const auto shape = codes.dimensions(), scales = scale.dimensions();
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1], panels = (N + PANEL - 1) / PANEL;
  if (shape.size() != 3 || scales.size() != 3 || shape[0] != panels || scales[0] != panels || shape[1] != K || scales[2] != PANEL ||
      (shape[2] != PANEL && shape[2] != PANEL / 2) ||
      scales[1] < 1 || K % scales[1] || PART % (K / scales[1]))
    return ffi::Error::InvalidArgument("the shapes of codes and scales do not fit the product");
  if (minimum.element_count() && minimum.element_count() != scale.element_count())
    return ffi::Error::InvalidArgument("there are as many minima as scales, or none");
  const uint8_t* from = codes.typed_data();
  const float *s = scale.typed_data(), *m = minimum.element_count() ? minimum.typed_data() : nullptr;
  const int64_t width = shape[2], groups = scales[1];
  const auto panel = [=](int64_t p) {
    const int64_t at = p * groups * PANEL;
    return Blocks{from + p * K * width, s + at, m ? m + at : nullptr, K / groups, float(zero)};
  };
  return width == PANEL ? product<Eight>(pool, x.typed_data(), M, K, panel, y->typed_data(), N)
                        : product<Four>(pool, x.typed_data(), M, K, panel, y->typed_data(), N);
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_blocks_product, blocks_product_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("zero"));
