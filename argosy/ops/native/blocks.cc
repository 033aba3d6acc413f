// Products of float32 data with weights of few bits (`codes.h`). No float32 copy of the weight is made: codes become floats in registers,
// or, for more rows than a tile has, a part of a panel in a buffer of the first-level cache.
//
// scale * number and scale * zero are exact in float32 for every type of GGUF, and no type has both a zero and a minimum. So w is
// rounded once and has the bits of the float32 weight, and the sums have the order of `argosy_product`: the results are the same, bit
// for bit, for finite scales.

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "codes.h"
#include "parallel.h"
#include "tiles.h"

namespace ffi = xla::ffi;

namespace {

// Of the summed axis at a time in the buffer: 32 KB with the widest vectors.
constexpr int64_t PART = 256;
// The most rows that are multiplied from registers. Each further number of rows is a function more to compile for each format.
constexpr int FEW = ROWS < 8 ? ROWS : 8;

// Calls row(i, left, right) with COLUMNS floats of rows k, k + 1 ... of a panel, from column c on, for whole groups while there is
// room for `most` rows. `k` begins a group. Returns the number of rows.
template <int BITS, typename Number, typename Row>
inline int64_t each(const Blocks& w, int64_t K, int64_t k, int64_t most, int64_t c, const Row& row) {
  using Code = Group<BITS>;
  constexpr int64_t DEPTH = Code::DEPTH;
  const Number number(w.levels);
  const int64_t groups = (w.block + DEPTH - 1) / DEPTH;
  int64_t done = 0, at = k % w.block;
  for (int64_t b = k / w.block; k + done < K; b++, at = 0) {
    const int64_t place = b * PANEL + c;
    const Floats scale[2] = {load(w.scale + place), load(w.scale + place + LANES)};
    Floats minimum[2] = {scale[0] * all(w.zero), scale[1] * all(w.zero)};
    if (w.minimum)
      for (int i = 0; i < 2; i++) minimum[i] += load(w.minimum + place + i * LANES);
    for (; at < w.block; at += DEPTH) {
      const int64_t rows = std::min(DEPTH, w.block - at);
      if (done + rows > most) return done;
      const uint8_t* group = w.codes + (b * groups + at / DEPTH) * Code::BYTES;
      __builtin_prefetch(group + SOON);
      if (Code::BYTES > 64) __builtin_prefetch(group + SOON + 64);
      auto one = [&](int64_t j) {
        Floats found[2];
        for (int i = 0; i < 2; i++) {
          const Words codes = Code::four(group, c + i * LANES, int(j / 4));
          found[i] = scale[i] * number(codes >> (8 * (j % 4)) & 255u) - minimum[i];
        }
        row(done + j, found[0], found[1]);
      };
      if (rows == DEPTH) {
#pragma GCC unroll 8
        for (int64_t j = 0; j < DEPTH; j++) one(j);
      } else {
        for (int64_t j = 0; j < rows; j++) one(j);
      }
      done += rows;
    }
  }
  return done;
}

// y[M, :columns] = x[M, K] times columns c ... of a panel of K rows.
template <int M, int BITS, typename Number>
void few_rows(const float* x, const Blocks& w, int64_t K, int64_t c, float* y, int64_t N, int64_t columns) {
  Floats sums[M][2] = {};
  each<BITS, Number>(w, K, 0, K, c, [&](int64_t k, Floats left, Floats right) {
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
      const Floats a = all(x[m * K + k]);
      sums[m][0] += a * left;
      sums[m][1] += a * right;
    }
  });
  for (int m = 0; m < M; m++) store_columns(y + m * N, sums[m][0], sums[m][1], columns);
}

using FewRows = void (*)(const float*, const Blocks&, int64_t, int64_t, float*, int64_t, int64_t);

template <int BITS, typename Number, int... M>
FewRows few_rows_of(int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr FewRows all[] = {few_rows<M + 1, BITS, Number>...};
  return all[rows - 1];
}

// x [rows, K] times a weight of N columns, or of N of each expert, of which `panel` gives each panel: y [rows, N].
template <int BITS, typename Number, typename Panel>
ffi::Error product(ffi::ThreadPool& pool, const float* from, const std::vector<Share>& shares, int64_t K, const Panel& panel, float* to,
                   int64_t N) {
  const int64_t count = (N + PANEL - 1) / PANEL, some = count / (4 * pool.num_threads());
  const bool alone = shares.size() > 1 || shares.empty() || shares[0].rows <= ROWS;
  const int64_t together = alone ? 1 : std::max<int64_t>(1, std::min<int64_t>(8, some)), tasks = (count + together - 1) / together;
  parallel(pool, tasks * shares.size(), [&](int64_t task) {
    alignas(64) float part[PART * COLUMNS];
    const Share& share = shares[task / tasks];
    const float* x = from + share.start * K;
    float* y = to + share.start * N;
    const int64_t M = share.rows, first = task % tasks * together;
    for (int64_t p = first; p < std::min(first + together, count); p++) {
      const Blocks w = panel(share.panel + p);
      for (int64_t c = 0; c < PANEL; c += COLUMNS) {
        const int64_t n = p * PANEL + c, columns = std::min<int64_t>(COLUMNS, N - n);
        if (columns <= 0) continue;
        if (M <= FEW) {
          few_rows_of<BITS, Number>(M, std::make_integer_sequence<int, FEW>{})(x, w, K, c, y + n, N, columns);
          continue;
        }
        for (int64_t k = 0, deep; k < K; k += deep) {
          deep = each<BITS, Number>(w, K, k, PART, c, [&](int64_t i, Floats left, Floats right) {
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

// codes [panels, groups, bytes]; scale [panels, blocks, PANEL]; minimum as scale, or nothing; levels: 16 numbers, or nothing.
// numbers: what codes stand for: 0 whole numbers, 1 levels, 2 e4m3, 3 e5m2. sizes: the rows of each expert, or nothing.
ffi::Error blocks_product_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::U8> codes, ffi::Buffer<ffi::F32> scale,
                             ffi::Buffer<ffi::F32> minimum, ffi::Buffer<ffi::F32> levels, ffi::Buffer<ffi::S32> sizes,
                             ffi::ResultBuffer<ffi::F32> y, int64_t bits, int64_t zero, int64_t numbers) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  if (!panels_fit(codes, scale, minimum, K, N, bits, sizes.element_count()) || (numbers == 1 && levels.element_count() != 16))
    return ffi::Error::InvalidArgument("the shapes of codes and scales do not fit the product");
  const auto panel = panels_of(codes, scale, minimum, levels.typed_data(), K, zero);
  const float* from = x.typed_data();
  float* to = y->typed_data();
  const std::vector<Share> shares = shares_of(sizes, M, N);
  clear_rest(shares, M, N, to);
  switch (bits << 4 | numbers) {
    case 8 << 4:
      return product<8, Whole>(pool, from, shares, K, panel, to, N);
    case 4 << 4:
      return product<4, Whole>(pool, from, shares, K, panel, to, N);
    case 2 << 4:
      return product<2, Whole>(pool, from, shares, K, panel, to, N);
    case 4 << 4 | 1:
      return product<4, Levels>(pool, from, shares, K, panel, to, N);
    case 8 << 4 | 2:
      return product<8, E4M3>(pool, from, shares, K, panel, to, N);
    case 8 << 4 | 3:
      return product<8, E5M2>(pool, from, shares, K, panel, to, N);
    default:
      return ffi::Error::InvalidArgument("there are no such codes");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_blocks_product, blocks_product_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("zero")
                                  .Attr<int64_t>("numbers"));
