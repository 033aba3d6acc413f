// Weights of few bits as they lie in memory, and what their codes stand for.
//
//     w = scale * number(code) - minimum        a scale, and perhaps a minimum, for each block along the summed axis
//
// Columns are in panels of PANEL. Along the summed axis, four codes of a column lie in four neighboring bytes, which is what products
// of eight bits take at once; a block begins a new group of DEPTH codes. Two or four codes share a byte where they have four or two bits.
// A file's own order (`ops.native.codes`) is laid out so when a weight is packed.

#ifndef ARGOSY_CODES_H
#define ARGOSY_CODES_H

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "tiles.h"
#include "xla/ffi/api/ffi.h"

namespace {

typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

// Bytes of codes between the group that is multiplied and the one that is asked for.
constexpr int64_t SOON = 2048;

// The columns of a panel whose codes begin in bytes of their own, the codes of a column in a group, and the bytes of a group.
template <int BITS>
struct Group {
  static constexpr int64_t WIDTH = BITS == 8 ? PANEL : PANEL / 2, DEPTH = BITS == 2 ? 8 : 4, BYTES = 4 * WIDTH;

  // Four codes of each of LANES columns from c on, one in each byte: the first four or (`later`) the last four of a group.
  static Words four(const uint8_t* group, int64_t c, int later) {
    Words codes;
    std::memcpy(&codes, group + 4 * (c % WIDTH), sizeof codes);
    if constexpr (BITS == 8) return codes;
    return codes >> (BITS * (c / WIDTH + 2 * later)) & (((1u << BITS) - 1) * 0x01010101u);
  }
};

// Whole numbers from 0 on. What is subtracted from them is part of the minimum.
struct Whole {
  explicit Whole(const float*) {}
  Floats operator()(Words code) const { return __builtin_convertvector((Ints)code, Floats); }
};

// One of 16 numbers.
struct Levels {
  static constexpr int PARTS = 16 / LANES;
  Floats level[PARTS];
  explicit Levels(const float* levels) {
    for (int i = 0; i < PARTS; i++) level[i] = load(levels + i * LANES);
  }
  Floats operator()(Words code) const {
#if defined(__clang__)
    Floats out;
    for (int i = 0; i < LANES; i++) out[i] = level[code[i] / LANES][code[i] % LANES];
    return out;
#else
    Floats out = __builtin_shuffle(level[0], (Ints)code);
    for (int i = 1; i < PARTS; i++) out = pick((Ints)code >= i * LANES, __builtin_shuffle(level[i], (Ints)code), out);
    return out;
#endif
  }
};

// Floats of eight bits: a sign, an exponent and MANTISSA bits. Magnitudes from SPECIAL on are infinite or NaN.
template <int MANTISSA, int BIAS, int SPECIAL>
struct Minifloats {
  explicit Minifloats(const float*) {}
  Floats operator()(Words code) const {
    const Ints size = (Ints)(code & 127u);
    const Ints normal = (size << (23 - MANTISSA)) + ((127 - BIAS) << 23);
    const Floats small = __builtin_convertvector(size, Floats) * all(1.0f / (1 << (BIAS + MANTISSA - 1)));
    const Floats finite = pick(size < (1 << MANTISSA), small, (Floats)normal);
    return (Floats)((Ints)finite | ((size >= SPECIAL) & 0x7f800000) | (Ints)((code & 128u) << 24));
  }
};
using E4M3 = Minifloats<3, 7, 127>;
using E5M2 = Minifloats<2, 15, 124>;

// A panel of a weight. `minimum` may be null.
struct Blocks {
  const uint8_t* codes;
  const float *scale, *minimum, *levels;
  // Codes of a column in a block.
  int64_t block;
  // What is subtracted from codes.
  float zero;
};

// Rows of data and the first of the panels that they are multiplied with.
struct Share {
  int64_t start, rows, panel;
};

// All of M rows with one weight, or, with `sizes`, those of each expert that has rows: rows lie by expert, and so do panels.
inline std::vector<Share> shares_of(const xla::ffi::Buffer<xla::ffi::S32>& sizes, int64_t M, int64_t N) {
  const int64_t experts = sizes.element_count(), panels = (N + PANEL - 1) / PANEL;
  if (!experts) return {{0, M, 0}};
  std::vector<Share> shares;
  for (int64_t e = 0, start = 0; e < experts && start < M; e++) {
    const int64_t rows = std::min<int64_t>(std::max(sizes.typed_data()[e], 0), M - start);
    if (rows) shares.push_back({start, rows, e * panels});
    start += rows;
  }
  return shares;
}

// Rows that no expert has become zeros.
inline void clear_rest(const std::vector<Share>& shares, int64_t M, int64_t N, float* y) {
  const int64_t done = shares.empty() ? 0 : shares.back().start + shares.back().rows;
  std::memset(y + done * N, 0, (M - done) * N * sizeof(float));
}

// codes [panels, groups, bytes]; scale [panels, blocks, PANEL]; minimum as scale, or nothing. Experts have panels one after another.
inline bool panels_fit(const xla::ffi::Buffer<xla::ffi::U8>& codes, const xla::ffi::Buffer<xla::ffi::F32>& scale,
                       const xla::ffi::Buffer<xla::ffi::F32>& minimum, int64_t K, int64_t N, int64_t bits, int64_t experts) {
  const auto shape = codes.dimensions(), scales = scale.dimensions();
  const int64_t panels = (N + PANEL - 1) / PANEL * std::max<int64_t>(experts, 1), depth = bits == 2 ? 8 : 4;
  if ((bits != 8 && bits != 4 && bits != 2) || shape.size() != 3 || scales.size() != 3 || scales[1] < 1 || K % scales[1]) return false;
  const int64_t groups = (K / scales[1] + depth - 1) / depth * scales[1];
  return shape[0] == panels && shape[1] == groups && shape[2] == PANEL * depth * bits / 8 && scales[0] == panels &&
         scales[2] == PANEL && (!minimum.element_count() || minimum.element_count() == scale.element_count());
}

// The panels by number.
inline auto panels_of(const xla::ffi::Buffer<xla::ffi::U8>& codes, const xla::ffi::Buffer<xla::ffi::F32>& scale,
                      const xla::ffi::Buffer<xla::ffi::F32>& minimum, const float* levels, int64_t K, int64_t zero) {
  const uint8_t* from = codes.typed_data();
  const float *s = scale.typed_data(), *m = minimum.element_count() ? minimum.typed_data() : nullptr;
  const int64_t bytes = codes.dimensions()[1] * codes.dimensions()[2], blocks = scale.dimensions()[1];
  return [=](int64_t p) {
    const int64_t at = p * blocks * PANEL;
    return Blocks{from + p * bytes, s + at, m ? m + at : nullptr, levels, K / blocks, float(zero)};
  };
}

}  // namespace

#endif
