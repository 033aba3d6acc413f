// Products of data in int8 with weights of whole numbers of 8, 4 or 2 bits (`codes.h`):
//
//     y[m, n] = sum over blocks of  x_scale[m] * (scale[n] * sum(x * (code - zero)) - minimum[n] * sum(x))
//
// The inner sums are of whole numbers, and exact: AVX512-VNNI and AVX-VNNI multiply four pairs and add them at once, AVX2 takes four
// instructions, and other processors a loop. All give the same integers, and a block's float32 arithmetic is one multiplication and one
// multiply-add, so the results are equal bit for bit where the processor has those.

#include <algorithm>
#include <cstdint>
#include <cstring>
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

// Data in int8, each row in groups as the weight's codes are.
struct Data {
  const int8_t* codes;
  // Scales [M, scales], and the sums of each block of the weight [M, blocks].
  const float* scale;
  const int32_t* sums;
  // Bytes of a row, scales of a row, and blocks that share one.
  int64_t row, scales, shared;
};

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

template <int BITS, typename Panel>
ffi::Error product(ffi::ThreadPool& pool, const int8_t* x, const float* x_scale, int64_t M, int64_t K, int64_t scales,
                   const Panel& panel, float* y, int64_t N) {
  const int64_t block = panel(0).block, blocks = K / block, depth = Group<BITS>::DEPTH;
  const int64_t wide = (block + depth - 1) / depth * depth, row = blocks * wide;
  std::vector<int32_t> sums(M * blocks);
  for (int64_t i = 0; i < M * blocks; i++)
    for (int64_t k = 0; k < block; k++) sums[i] += x[i * block + k];
  // Blocks that are no whole number of groups end in zeros.
  std::vector<int8_t> padded(wide == block ? 0 : M * row);
  if (wide != block)
    for (int64_t i = 0; i < M * blocks; i++) std::memcpy(padded.data() + i * wide, x + i * block, block);
  const Data data = {wide == block ? x : padded.data(), x_scale, sums.data(), row, scales, blocks / scales};
  const int64_t count = (N + PANEL - 1) / PANEL, tiles = (M + TILE - 1) / TILE;
  parallel(pool, count, [&](int64_t p) {
    const Blocks w = panel(p);
    for (int64_t c = 0; c < PANEL; c += COLUMNS) {
      const int64_t n = p * PANEL + c, columns = std::min<int64_t>(COLUMNS, N - n);
      if (columns <= 0) continue;
      for (int64_t i = 0, m = 0; i < tiles; i++) {
        const int64_t rows = (M - m) / (tiles - i);
        const Data some = {data.codes + m * row, data.scale + m * scales, data.sums + m * blocks, row, scales, data.shared};
        integer_tile_of<BITS>(rows, std::make_integer_sequence<int, TILE>{})(some, w, blocks, c, y + m * N + n, N, columns);
        m += rows;
      }
    }
  });
  return ffi::Error::Success();
}

// x [M, K] and x_scale [M, scales], of whole blocks of the weight; the weight as in `blocks.cc`.
ffi::Error integer_product_of(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> x, ffi::Buffer<ffi::F32> x_scale, ffi::Buffer<ffi::U8> codes,
                              ffi::Buffer<ffi::F32> scale, ffi::Buffer<ffi::F32> minimum, ffi::ResultBuffer<ffi::F32> y, int64_t bits,
                              int64_t zero) {
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  const auto scales = x_scale.dimensions();
  if (!panels_fit(codes, scale, minimum, K, N, bits) || scales.size() != 2 || scales[0] != M || scales[1] < 1 ||
      scale.dimensions()[1] % scales[1])
    return ffi::Error::InvalidArgument("the shapes of codes and scales do not fit the product");
  const auto panel = panels_of(codes, scale, minimum, nullptr, K, zero);
  const int8_t* from = x.typed_data();
  const float* own = x_scale.typed_data();
  float* to = y->typed_data();
  switch (bits) {
    case 8:
      return product<8>(pool, from, own, M, K, scales[1], panel, to, N);
    case 4:
      return product<4>(pool, from, own, M, K, scales[1], panel, to, N);
    default:
      return product<2>(pool, from, own, M, K, scales[1], panel, to, N);
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_integer_product, integer_product_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("zero"));
