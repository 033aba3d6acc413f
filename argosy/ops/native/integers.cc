// Products of data that is rounded to whole numbers of at most eight bits with weights of whole numbers of 8, 4 or 2 (`codes.h`):
//
//     q = round(x / x_scale)        x_scale = the largest magnitude of a block / half of the range, as `adapt.formats` rounds
//     y[m, n] = sum over blocks of  x_scale[m] * (scale[n] * sum(q * (code - zero)) - minimum[n] * sum(q))
//
// The inner sums are of whole numbers, and exact: AVX512-VNNI and AVX-VNNI multiply four pairs and add them at once, AVX2 takes four
// instructions, and other processors a loop. All give the same integers, and a block's float32 arithmetic is one multiplication and one
// multiply-add, so the results are equal bit for bit where the processor has those.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "codes.h"
#include "parallel.h"
#include "tiles.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace {

typedef int8_t SmallInts __attribute__((vector_size(LANES)));

// Rows of a tile, each with two vectors of whole numbers and two of floats.
constexpr int TILE = LANES == 16 ? 6 : 3;

// sums + codes * x, four codes from 0 on and four numbers of x in the bytes of each lane.
inline Ints dot(Ints sums, Words codes, int32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  // Pairs of 16 bits: those of eight would saturate.
  const __m256i all = _mm256_set1_epi32(x), low = _mm256_set1_epi32(0x00ff00ff), w = (__m256i)codes;
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8), odd = _mm256_srai_epi16(all, 8);
  const __m256i first = _mm256_madd_epi16(_mm256_and_si256(w, low), even);
  const __m256i second = _mm256_madd_epi16(_mm256_and_si256(_mm256_srli_epi16(w, 8), low), odd);
  return sums + (Ints)first + (Ints)second;
#else
  for (int j = 0; j < 4; j++) sums += (Ints)(codes >> (8 * j) & 255u) * int32_t(int8_t(uint32_t(x) >> (8 * j)));
  return sums;
#endif
}

// Rounded data, each row in groups as the weight's codes are.
struct Data {
  const int8_t* codes;
  // Scales [M, scales], and the sums of each block of the weight [M, blocks].
  const float* scale;
  const int32_t* sums;
  // Bytes of a row, scales of a row, and blocks that share one.
  int64_t row, scales, shared;
};

inline Floats magnitude(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }

// The largest magnitude of n numbers; NaN if one is not finite.
inline float largest(const float* x, int64_t n) {
  Floats most = {};
  Ints finite = Ints{} - 1;
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    const Floats size = magnitude(load(x + i));
    finite &= size <= all(FLT_MAX);
    most = pick(size > most, size, most);
  }
  float top = 0;
  bool good = true;
  for (int j = 0; j < LANES; j++) top = std::max(top, most[j]), good &= finite[j] != 0;
  for (; i < n; i++) top = std::max(top, std::fabs(x[i])), good &= std::isfinite(x[i]);
  return good ? top : std::numeric_limits<float>::quiet_NaN();
}

// Rounds n numbers to nearest, ties to even, within the range of `half`. Returns their sum.
inline int32_t rounded(const float* x, int64_t n, float scale, int half, int8_t* codes) {
  const float shifter = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats low = all(float(-half)), high = all(float(half - 1));
  Ints sums = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
    Floats q = load(x + i) / all(scale);
    q = pick(q > high, high, pick(q < low, low, q));
    const Ints whole = __builtin_convertvector((q + all(shifter)) - all(shifter), Ints);
    sums += whole;
    const auto bytes = __builtin_convertvector(whole, SmallInts);
    std::memcpy(codes + i, &bytes, sizeof bytes);
  }
  int32_t sum = 0;
  for (int j = 0; j < LANES; j++) sum += sums[j];
  for (; i < n; i++) sum += codes[i] = int8_t(std::nearbyint(std::clamp(x[i] / scale, float(-half), float(half - 1))));
  return sum;
}

// y[M, :columns] = x[M] times columns c ... of a panel.
template <int M, int BITS>
void integer_tile(const Data& x, const Blocks& w, int64_t blocks, int64_t c, float* y, int64_t N, int64_t columns) {
  using Code = Group<BITS>;
  constexpr int64_t DEPTH = Code::DEPTH;
  const int64_t groups = (w.block + DEPTH - 1) / DEPTH;
  const int32_t zero = int32_t(w.zero);
  Floats out[M][2] = {};
  for (int64_t b = 0; b < blocks; b++) {
    Ints sums[M][2];
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = Ints{} - zero * x.sums[m * blocks + b];
    const uint8_t* group = w.codes + b * groups * Code::BYTES;
    const int8_t* from = x.codes + b * groups * DEPTH;
    for (int64_t g = 0; g < groups; g++, group += Code::BYTES, from += DEPTH) {
      __builtin_prefetch(group + SOON);
      if (Code::BYTES > 64) __builtin_prefetch(group + SOON + 64);
#pragma GCC unroll 2
      for (int later = 0; later < DEPTH / 4; later++) {
        const Words left = Code::four(group, c, later), right = Code::four(group, c + LANES, later);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
          int32_t four;
          std::memcpy(&four, from + m * x.row + 4 * later, 4);
          sums[m][0] = dot(sums[m][0], left, four);
          sums[m][1] = dot(sums[m][1], right, four);
        }
      }
    }
    const int64_t place = b * PANEL + c;
    for (int i = 0; i < 2; i++) {
      const Floats scale = load(w.scale + place + i * LANES);
      for (int m = 0; m < M; m++) {
        const Floats own = all(x.scale[m * x.scales + b / x.shared]);
        out[m][i] += own * scale * __builtin_convertvector(sums[m][i], Floats);
        if (w.minimum) out[m][i] -= own * load(w.minimum + place + i * LANES) * all(float(x.sums[m * blocks + b]));
      }
    }
  }
  for (int m = 0; m < M; m++) store_columns(y + m * N, out[m][0], out[m][1], columns);
}

using IntegerTile = void (*)(const Data&, const Blocks&, int64_t, int64_t, float*, int64_t, int64_t);

template <int BITS, int... M>
IntegerTile integer_tile_of(int64_t rows, std::integer_sequence<int, M...>) {
  static constexpr IntegerTile tiles[] = {integer_tile<M + 1, BITS>...};
  return tiles[rows - 1];
}

// x [M, K], with `scales` scales a row, or the one that is `given`; `half` of the range of its whole numbers.
template <int BITS, typename Panel>
ffi::Error product(ffi::ThreadPool& pool, const float* x, const std::vector<Share>& shares, int64_t K, int64_t scales,
                   const float* given, int half, const Panel& panel, float* to, int64_t N) {
  if (shares.empty()) return ffi::Error::Success();
  const int64_t M = shares.back().start + shares.back().rows;
  const int64_t block = panel(0).block, blocks = K / block, shared = blocks / scales, depth = Group<BITS>::DEPTH;
  // Blocks that are no whole number of groups end in zeros.
  const int64_t wide = (block + depth - 1) / depth * depth, row = blocks * wide;
  std::vector<int8_t> codes(M * row);
  std::vector<float> own(M * scales);
  std::vector<int32_t> sums(M * blocks);
  // XLA compiles the division of `adapt.formats` as this product. The largest magnitude is a tie between two whole numbers if it is
  // negative, and XLA may round it either way.
  const float steps = 1 / (half - 0.5f);
  const auto round = [&](int64_t m) {
    for (int64_t s = 0; s < scales; s++) {
      const float* from = x + m * K + s * shared * block;
      const float most = largest(from, shared * block), scale = most == most && given ? *given : most * steps;
      const bool used = scale >= FLT_MIN;
      own[m * scales + s] = used ? scale : most == most ? 1.0f : most;
      if (used)
        for (int64_t b = s * shared; b < (s + 1) * shared; b++, from += block)
          sums[m * blocks + b] = rounded(from, block, scale, half, codes.data() + m * row + b * wide);
    }
  };
  if (M > TILE)
    parallel(pool, M, round);
  else
    for (int64_t m = 0; m < M; m++) round(m);
  const int64_t count = (N + PANEL - 1) / PANEL;
  parallel(pool, count * shares.size(), [&](int64_t task) {
    const Share& share = shares[task / count];
    const int64_t p = task % count, last = share.start + share.rows, tiles = (share.rows + TILE - 1) / TILE;
    const Blocks w = panel(share.panel + p);
    for (int64_t c = 0; c < PANEL; c += COLUMNS) {
      const int64_t n = p * PANEL + c, columns = std::min<int64_t>(COLUMNS, N - n);
      if (columns <= 0) continue;
      for (int64_t i = 0, m = share.start; i < tiles; i++) {
        const int64_t rows = (last - m) / (tiles - i);
        const Data some = {codes.data() + m * row, own.data() + m * scales, sums.data() + m * blocks, row, scales, shared};
        integer_tile_of<BITS>(rows, std::make_integer_sequence<int, TILE>{})(some, w, blocks, c, to + m * N + n, N, columns);
        m += rows;
      }
    }
  });
  return ffi::Error::Success();
}

// x [M, K]; given: a scale of x, or nothing; the weight and `sizes` as in `blocks.cc`. scales: of a row of x. x_bits: of its whole
// numbers.
ffi::Error integer_product_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> given, ffi::Buffer<ffi::U8> codes,
                              ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> minimum, ffi::Buffer<ffi::S32> sizes,
                              ffi::ResultBuffer<ffi::F32> y, int64_t bits, int64_t zero, int64_t scales, int64_t x_bits) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  if (!panels_fit(codes, scale, minimum, K, N, bits, sizes.element_count()) || scales < 1 || scale.dimensions()[1] % scales ||
      x_bits < 2 || x_bits > 8)
    return ffi::Error::InvalidArgument("the shapes of codes and scales do not fit the product");
  const auto panel = panels_of(codes, scale, minimum, nullptr, K, zero);
  const float *from = x.typed_data(), *own = given.element_count() ? given.typed_data() : nullptr;
  const int half = 1 << (x_bits - 1);
  float* to = y->typed_data();
  const std::vector<Share> shares = shares_of(sizes, M, N);
  clear_rest(shares, M, N, to);
  switch (bits) {
    case 8:
      return product<8>(pool, from, shares, K, scales, own, half, panel, to, N);
    case 4:
      return product<4>(pool, from, shares, K, scales, own, half, panel, to, N);
    default:
      return product<2>(pool, from, shares, K, scales, own, half, panel, to, N);
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_integer_product, integer_product_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("zero")
                                  .Attr<int64_t>("scales")
                                  .Attr<int64_t>("x_bits"));
