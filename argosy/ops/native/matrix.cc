// Products of two float32 matrices on the matrix units of Intel's processors (AMX), which multiply bfloat16 alone.
//
// A float32 is the exact sum of three bfloat16: the number rounded, the rest rounded, and what is left. Of the nine products of the
// parts of two numbers the three smallest are below the last bit of a float32 and are left out; the other six are summed in float32
// (Henry, Tang, Heinecke 2019, arXiv:1904.06376). With two parts a number, three products are summed, for a relative error of 2^-17.
//
// Both matrices are split and laid out in tiles first, so that the units read memory in order. Each element is summed in an order
// that its own row, its own column and the summed axis decide, so it is the same, bit for bit, with any number of threads.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <vector>

#include "parallel.h"

#if defined(__linux__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__AVX512BW__) && \
    defined(__AVX512DQ__)
#define ARGOSY_AMX 1
#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ffi = xla::ffi;

#if ARGOSY_AMX

namespace {

// A tile has 16 rows of 64 bytes. A block is 32 rows or 32 columns of the summed axis' 32: two tiles for each part.
constexpr int64_t SIDE = 32, TILE = 512, BLOCK = 2 * TILE;
// Of the summed axis, and of rows, at a time: together they fit into half of a second-level cache of 2 MB.
constexpr int64_t DEPTH = 768, ROWS = 256;
// Columns of a task, and rows or columns that are laid out at a time.
constexpr int64_t COLUMNS = 128, MOST = 4096;

struct alignas(64) Config {
  uint8_t palette = 1, start = 0, unused[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// The thread's tiles are ours while this lives; XLA's own kernels use them too.
class Tiles {
 public:
  Tiles() {
    Config own;
    for (int i = 0; i < 8; i++) own.bytes[i] = 64, own.rows[i] = 16;
    _tile_storeconfig(&before_);
    _tile_loadconfig(&own);
  }
  ~Tiles() {
    if (before_.palette)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }

 private:
  Config before_;
};

// Memory for tiles, kept from call to call.
class Scratch {
 public:
  explicit Scratch(int64_t count) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      auto& free = kept();
      const auto found = std::find_if(free.begin(), free.end(), [=](const Held& one) { return one.count >= count; });
      if (found != free.end()) {
        held_ = *found;
        free.erase(found);
        return;
      }
    }
    const size_t huge = 1 << 21, bytes = (count * sizeof(uint16_t) + huge - 1) / huge * huge;
    held_ = {static_cast<uint16_t*>(std::aligned_alloc(huge, bytes)), static_cast<int64_t>(bytes / sizeof(uint16_t))};
    if (held_.data) madvise(held_.data, bytes, MADV_HUGEPAGE);
  }
  ~Scratch() {
    if (!held_.data) return;
    std::lock_guard<std::mutex> lock(mutex());
    auto& free = kept();
    free.reserve(8);
    free.push_back(held_);
    if (free.size() > 4) {  // the smallest goes
      const auto least = std::min_element(free.begin(), free.end(), [](const Held& a, const Held& b) { return a.count < b.count; });
      std::free(least->data);
      free.erase(least);
    }
  }
  uint16_t* data() const { return held_.data; }

 private:
  struct Held {
    uint16_t* data;
    int64_t count;
  };
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::vector<Held>& kept() {
    static std::vector<Held> all;
    return all;
  }
  Held held_;
};

// A matrix of which one axis is summed: element (i, k) lies at i * own + k * summed, and one of the two steps is 1.
struct Side {
  const float* at;
  int64_t own, summed;
};

inline __m512 first_floats(const float* p, int64_t n) {
  return n >= 16 ? _mm512_loadu_ps(p) : n <= 0 ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}

// The nearest bfloat16, as a float: its lower half is zero. What is left without it is exact, and of an infinity NaN. NaN stays NaN:
// adding to its bits might carry over into the sign.
inline __m512 rounded(__m512 x) {
  const __m512i bits = _mm512_castps_si512(x), quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i more = _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
  const __m512i found = _mm512_mask_mov_epi32(more, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
  return _mm512_castsi512_ps(_mm512_and_si512(found, _mm512_set1_epi32(0xffff0000)));
}

// The parts of two vectors of numbers: each pair has one of the first, and one of the second.
template <int P>
inline void split(__m512 first, __m512 second, __m512i* pairs) {
  for (int p = 0; p < P; p++) {
    const bool last = p == 2;  // what is left after two parts is a bfloat16
    const __m512 a = last ? first : rounded(first), b = last ? second : rounded(second);
    pairs[p] = _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(a), 16), _mm512_castps_si512(b));
    first = _mm512_sub_ps(first, a), second = _mm512_sub_ps(second, b);
  }
}

// Of two rows of a matrix of pairs, D apart, the D-th step of its transposition.
template <int D>
inline void exchange(__m512i& a, __m512i& b) {
  alignas(64) static const auto order = [] {
    struct Orders {
      int32_t low[16], high[16];
    } o;
    for (int i = 0; i < 16; i++) o.low[i] = i & D ? 16 + i - D : i, o.high[i] = i & D ? 16 + i : i + D;
    return o;
  }();
  const __m512i low = _mm512_permutex2var_epi32(a, _mm512_load_si512(order.low), b);
  b = _mm512_permutex2var_epi32(a, _mm512_load_si512(order.high), b);
  a = low;
}

template <int D = 1>
inline void transpose(__m512i (&rows)[16]) {
  for (int i = 0; i < 16; i++)
    if (!(i & D)) exchange<D>(rows[i], rows[i + D]);
  if constexpr (D < 8) transpose<2 * D>(rows);
}

// One block of a side in tiles, [parts][2][16][16 pairs]: with a row for each i (`by_row`, the left side), or for each pair (the right
// side). A pair is k and k + 16 of the summed axis. Beyond n of i, and beyond k of the summed axis, there are zeros.
template <int P, bool by_row>
void lay_out(const Side& side, int64_t n, int64_t k, uint16_t* out) {
  for (int half = 0; half < 2; half++) {
    __m512i rows[P][16];
    const float* from = side.at + half * 16 * side.own;
    const int64_t here = n - 16 * half;
    for (int r = 0; r < 16; r++) {
      __m512i pairs[P];
      if (side.summed == 1) {  // 32 numbers along the summed axis
        const float* row = from + r * side.own;
        const int64_t some = r < here ? k : 0;
        split<P>(first_floats(row, some), first_floats(row + 16, some - 16), pairs);
      } else {  // two of the summed axis, for 16 i each
        const float* row = from + r * side.summed;
        split<P>(first_floats(row, r < k ? here : 0), first_floats(row + 16 * side.summed, r + 16 < k ? here : 0), pairs);
      }
      for (int p = 0; p < P; p++) rows[p][r] = pairs[p];
    }
    for (int p = 0; p < P; p++) {
      if ((side.summed == 1) != by_row) transpose(rows[p]);
      for (int r = 0; r < 16; r++) _mm512_store_si512(out + p * BLOCK + half * TILE + r * 32, rows[p][r]);
    }
  }
}

// y [32, 32] = the blocks of a strip of rows times those of a strip of columns.
template <int P>
void tile(const uint16_t* a, const uint16_t* b, int64_t blocks, float* y, int64_t y_row) {
  const int64_t bytes = y_row * sizeof(float);
  _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
  for (int64_t i = 0; i < blocks; i++, a += P * BLOCK, b += P * BLOCK)
    for (int q = P - 1; q >= 0; q--) {
      _tile_loadd(6, b + q * BLOCK, 64); _tile_loadd(7, b + q * BLOCK + TILE, 64);
      for (int p = P - 1 - q; p >= 0; p--) {  // the smallest first
        _tile_loadd(4, a + p * BLOCK, 64); _tile_loadd(5, a + p * BLOCK + TILE, 64);
        _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
      }
    }
  _tile_stored(0, y, bytes); _tile_stored(1, y + 16, bytes);
  _tile_stored(2, y + 16 * y_row, bytes); _tile_stored(3, y + 16 * y_row + 16, bytes);
}

// As `tile`, for a part of y that is smaller, or added to it. Each part of the summed axis has a sum of its own: in one chain of all
// additions, errors would grow with the root of the summed axis.
template <int P>
void edge(const uint16_t* a, const uint16_t* b, int64_t blocks, float* y, int64_t y_row, int64_t m, int64_t n, bool add) {
  alignas(64) float whole[SIDE * SIDE];
  tile<P>(a, b, blocks, whole, SIDE);
  for (int64_t i = 0; i < m; i++)
    for (int64_t j = 0; j < n; j += 16) {
      const __mmask16 there = n - j < 16 ? __mmask16((1u << (n - j)) - 1) : __mmask16(-1);
      float* to = y + i * y_row + j;
      __m512 sum = _mm512_load_ps(whole + i * SIDE + j);
      if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(there, to));
      _mm512_mask_storeu_ps(to, there, sum);
    }
}

inline int64_t strips(int64_t n) { return (n + SIDE - 1) / SIDE; }

// Strips of a side that one task lays out.
constexpr int64_t TOGETHER = 2;

// Strips of a side from `first` on, [strips][blocks][parts][2][16][32].
template <int P, bool by_row>
void lay_out_some(const Side& side, int64_t first, int64_t n, int64_t k, uint16_t* out) {
  const int64_t blocks = strips(k);
  for (int64_t s = first; s < std::min(first + TOGETHER, strips(n)); s++)
    for (int64_t b = 0; b < blocks; b++) {
      const Side from = {side.at + s * SIDE * side.own + b * SIDE * side.summed, side.own, side.summed};
      lay_out<P, by_row>(from, n - s * SIDE, k - b * SIDE, out + (s * blocks + b) * P * BLOCK);
    }
}

template <int P>
ffi::Error product(ffi::ThreadPool& pool, Side a, Side b, float* y, int64_t M, int64_t N, int64_t K) {
  // Parts of about the same size, whole blocks each.
  const int64_t parts = (K + DEPTH - 1) / DEPTH, depth = strips((K + parts - 1) / parts) * SIDE;
  const Scratch left(strips(std::min(M, MOST)) * strips(depth) * P * BLOCK), right(strips(std::min(N, MOST)) * strips(depth) * P * BLOCK);
  const uint16_t *as = left.data(), *bs = right.data();
  if (!as || !bs) return ffi::Error(ffi::ErrorCode::kResourceExhausted, "no memory for the tiles of a product");
  for (int64_t k = 0; k < K; k += depth)
    for (int64_t m0 = 0; m0 < M; m0 += MOST)
      for (int64_t n0 = 0; n0 < N; n0 += MOST) {
        const int64_t deep = std::min(depth, K - k), blocks = strips(deep), rows = std::min(MOST, M - m0), columns = std::min(MOST, N - n0);
        const int64_t lefts = n0 == 0 ? (strips(rows) + TOGETHER - 1) / TOGETHER : 0;
        const int64_t before = lefts + (strips(columns) + TOGETHER - 1) / TOGETHER;
        const int64_t across = (columns + COLUMNS - 1) / COLUMNS, down = (rows + ROWS - 1) / ROWS;
        const Side over = {a.at + m0 * a.own + k * a.summed, a.own, a.summed}, under = {b.at + n0 * b.own + k * b.summed, b.own, b.summed};
        std::atomic<int64_t> ready{0};
        parallel(pool, before + down * across, [&](int64_t task) {
          if (task < before) {
            if (task < lefts)
              lay_out_some<P, true>(over, task * TOGETHER, rows, deep, left.data());
            else
              lay_out_some<P, false>(under, (task - lefts) * TOGETHER, columns, deep, right.data());
            ready.fetch_add(1, std::memory_order_release);
            return;
          }
          // Tasks are begun in their order, so the others that lay out are being done.
          for (int spins = 0; ready.load(std::memory_order_acquire) < before; spins++)
            spins > 4096 ? std::this_thread::yield() : _mm_pause();
          const Tiles tiles;
          const int64_t top = (task - before) / across * ROWS, first = (task - before) % across * COLUMNS;
          for (int64_t n = first; n < std::min(first + COLUMNS, columns); n += SIDE)
            for (int64_t m = top; m < std::min(top + ROWS, rows); m += SIDE) {
              const uint16_t *ours = as + m / SIDE * blocks * P * BLOCK, *theirs = bs + n / SIDE * blocks * P * BLOCK;
              float* to = y + (m0 + m) * N + n0 + n;
              if (k == 0 && m + SIDE <= rows && n + SIDE <= columns)
                tile<P>(ours, theirs, blocks, to, N);
              else
                edge<P>(ours, theirs, blocks, to, N, std::min(SIDE, rows - m), std::min(SIDE, columns - n), k > 0);
            }
        });
      }
  return ffi::Error::Success();
}

}  // namespace

// Linux lends the registers of the tiles to processes that ask.
extern "C" int argosy_has_amx() {
  constexpr long ask = 0x1023, tiles = 18;
  static const bool given = syscall(SYS_arch_prctl, ask, tiles) == 0;
  return given;
}

#else

extern "C" int argosy_has_amx() { return 0; }

#endif

namespace {

// a [M, K] or, if its axis 0 is summed, [K, M]; b [K, N] or [N, K]: y [M, N]. parts: bfloat16 parts of a number.
ffi::Error matrix_product_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> a, ffi::Buffer<ffi::F32> b, ffi::ResultBuffer<ffi::F32> y,
                             int64_t a_summed, int64_t b_summed, int64_t parts) {
#if ARGOSY_AMX
  if (!argosy_has_amx()) return ffi::Error(ffi::ErrorCode::kUnimplemented, "Linux does not lend the matrix units");
  const auto A = a.dimensions(), B = b.dimensions();
  const int64_t K = A[a_summed], M = A[1 - a_summed], N = B[1 - b_summed];
  if (B[b_summed] != K || y->dimensions()[0] != M || y->dimensions()[1] != N)
    return ffi::Error::InvalidArgument("the shapes of a product do not fit");
  const Side left = {a.typed_data(), a_summed ? K : 1, a_summed ? 1 : M}, right = {b.typed_data(), b_summed ? K : 1, b_summed ? 1 : N};
  if (parts == 3) return product<3>(pool, left, right, y->typed_data(), M, N, K);
  if (parts == 2) return product<2>(pool, left, right, y->typed_data(), M, N, K);
  return ffi::Error::InvalidArgument("numbers have two or three parts");
#else
  return ffi::Error(ffi::ErrorCode::kUnimplemented, "this processor has no matrix units");
#endif
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_matrix_product, matrix_product_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("a_summed")
                                  .Attr<int64_t>("b_summed")
                                  .Attr<int64_t>("parts"));
