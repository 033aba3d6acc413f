// Products with packed weights, and paged attention, for CPUs. XLA calls them through its foreign function interface.
//
// Both are loops around the tile of `tiles.h`: a row's result is the same, bit for bit, whatever other rows are computed beside it.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "parallel.h"
#include "tiles.h"

namespace ffi = xla::ffi;

namespace {

// Tokens of the cache at a time, and query rows at a time, in attention.
constexpr int64_t TOKENS = 64, QUERIES = 96;
// The log-sum-exp of a query that sees no token; `UNSEEN` in ops/attention.py.
constexpr float UNSEEN = -1e30f;

// Asks for n numbers, which are wanted soon: what lies in pages is too scattered for the processor to guess.
template <typename T>
inline void fetch(const T* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / sizeof(T)) __builtin_prefetch(p + i, 0, 2);
}

// ---------------------------------------------------------------- products

// x [M, K] times a weight of N columns in panels [ceil(N / PANEL), K, PANEL]: y [M, N].
template <typename W>
ffi::Error product(ffi::ThreadPool& pool, const float* x, int64_t M, int64_t K, const W* panels, float* y, int64_t N) {
  // With several tiles a thread takes neighboring panels, because it asks for the next one while it computes this.
  const int64_t count = (N + PANEL - 1) / PANEL, share = count / (4 * pool.num_threads());
  const int64_t together = M <= ROWS ? 1 : std::max<int64_t>(1, std::min<int64_t>(8, share));
  parallel(pool, (count + together - 1) / together, [=](int64_t task) {
    for (int64_t panel = task * together; panel < std::min((task + 1) * together, count); panel++) {
      const W* w = panels + panel * K * PANEL;
      for (int64_t k = 0; k < K; k += DEPTH) {
        const int64_t deep = std::min(DEPTH, K - k);
        for (int64_t c = 0; c < PANEL; c += COLUMNS) {
          const int64_t n = panel * PANEL + c;
          if (n < N)
            tiles(x + k, K, M, w + k * PANEL + c, PANEL, deep, y + n, N, std::min<int64_t>(COLUMNS, N - n), k > 0,
                  w + (k + deep) * PANEL + c);
        }
      }
    }
  });
  return ffi::Error::Success();
}

ffi::Error product_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::AnyBuffer panels, ffi::ResultBuffer<ffi::F32> y) {
  const auto shape = panels.dimensions();
  const int64_t M = x.dimensions()[0], K = x.dimensions()[1], N = y->dimensions()[1];
  if (shape.size() != 3 || shape[1] != K || shape[2] != PANEL || shape[0] != (N + PANEL - 1) / PANEL)
    return ffi::Error::InvalidArgument("the shape of the panels does not fit the product");
  const void* w = panels.untyped_data();
  switch (panels.element_type()) {
    case ffi::F32:
      return product(pool, x.typed_data(), M, K, static_cast<const float*>(w), y->typed_data(), N);
    case ffi::BF16:
      return product(pool, x.typed_data(), M, K, static_cast<const uint16_t*>(w), y->typed_data(), N);
    default:
      return ffi::Error::InvalidArgument("panels are float32 or bfloat16");
  }
}

// ---------------------------------------------------------------- attention

// e^x for x <= 0, to 2 units in the last place; zero below -87. Cephes' polynomial on [-ln 2 / 2, ln 2 / 2].
inline Floats exponential(Floats x) {
  const Ints low = x < all(-87.0f);
  x = (Floats)(((Ints)x & ~low) | ((Ints)all(-87.0f) & low));
  const Floats shifter = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats n = (x * all(1.44269504088896341f) + shifter) - shifter;
  const Floats r = (x - n * all(0.693359375f)) + n * all(2.12194440e-4f);
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) p = p * r + all(c);
  p = p * r * r + r + all(1.0f);
  const Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
  return (Floats)((Ints)(p * (Floats)power) & ~low);
}

struct Attention {
  int64_t B, T, N, H, K, U, pages, page, width, window;
  float scale, cap;
  const float *q, *sinks;
  const int32_t *table, *lengths, *at;
  float *y, *lse;
};

// The first n numbers, and zeros.
template <typename T>
inline Floats load(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T some[LANES] = {};
  std::memcpy(some, p, n * sizeof(T));
  return load(some);
}

// Of two vectors the elements whose numbers have no bit D, or (`high`) those that have it, so that the D-th step of a transposition
// is done for two rows D apart.
template <int D, bool high, int... I>
inline Floats half(Floats a, Floats b, std::integer_sequence<int, I...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, (high ? (I & D ? LANES + I : I + D) : (I & D ? LANES + I - D : I))...);
#else
  return __builtin_shuffle(a, b, Ints{(high ? (I & D ? LANES + I : I + D) : (I & D ? LANES + I - D : I))...});
#endif
}

template <int D = 1>
inline void transpose(Floats* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
  for (int i = 0; i < LANES; i++) {
    if (i & D) continue;
    const Floats low = half<D, false>(rows[i], rows[i + D], lanes), high = half<D, true>(rows[i], rows[i + D], lanes);
    rows[i] = low, rows[i + D] = high;
  }
  if constexpr (2 * D < LANES) transpose<2 * D>(rows);
}

// One query's softmax over `tokens` new scores, in place: exponentials with respect to the greatest score so far. What was summed
// before is to be multiplied by the factor that is returned.
inline float softmax(float* scores, int64_t tokens, int64_t low, int64_t high, const float* mine, float cap, float* most,
                     float* total) {
  const float unseen = -std::numeric_limits<float>::infinity();
  Ints at;
  for (int i = 0; i < LANES; i++) at[i] = i;
  Floats top = all(unseen);
  for (int64_t s = 0; s < tokens; s += LANES) {
    Floats score = load(scores + s);
    if (cap > 0) {
      const Floats twice = score * all(2 / cap), e = exponential(pick(twice > Floats{}, -twice, twice));
      const Floats size = all(cap) * (all(1.0f) - e) / (all(1.0f) + e);
      score = pick(twice > Floats{}, size, -size);
    }
    const Ints place = at + int32_t(s), seen = (place >= int32_t(low)) & (place < int32_t(high)) & (load(mine + s) > Floats{});
    score = pick(seen, score, all(unseen));
    top = pick(score > top, score, top);
    store(scores + s, score);
  }
  float greatest = *most;
  for (int i = 0; i < LANES; i++) greatest = std::max(greatest, top[i]);
  if (greatest == unseen) {
    std::memset(scores, 0, tokens * sizeof(float));
    return 1.0f;
  }
  Floats sum = {};
  for (int64_t s = 0; s < tokens; s += LANES) {
    const Floats p = exponential(load(scores + s) - all(greatest));
    store(scores + s, p);
    sum += p;
  }
  const float factor = *most == unseen ? 0.0f : std::exp(*most - greatest);
  float added = 0;
  for (int i = 0; i < LANES; i++) added += sum[i];
  *total = *total * factor + added;
  *most = greatest;
  return factor;
}

// Memory of a thread for one task.
struct Scratch {
  std::vector<float> q, keys, values, scores, sums, most, total;
  void fit(const Attention& a, int64_t rows, int64_t wide) {
    q.resize(rows * a.H);
    keys.resize(a.H * TOKENS);
    values.resize(TOKENS * wide);
    scores.resize(rows * TOKENS);
    sums.assign(rows * wide, 0.0f);
    most.assign(rows, -std::numeric_limits<float>::infinity());
    total.assign(rows, 0.0f);
  }
};

// Queries first ... last - 1 of row b under the query heads of key head k, over TOKENS cached tokens at a time (FlashAttention,
// arXiv:2205.14135).
template <typename C>
void attend(const Attention& a, const C* keys, const C* values, int64_t b, int64_t k, int64_t first, int64_t last) {
  static thread_local Scratch own;
  const int64_t G = a.N / a.K, rows = (last - first) * G, wide = (a.U + COLUMNS - 1) / COLUMNS * COLUMNS;
  own.fit(a, rows, wide);
  int64_t newest = -1, oldest = a.window ? std::numeric_limits<int64_t>::max() : 0;
  for (int64_t t = first, r = 0; t < last; t++) {
    const int64_t at = a.at[b * a.T + t];
    newest = std::max(newest, at);
    if (a.window) oldest = std::min(oldest, at - a.window + 1);
    for (int64_t g = 0; g < G; g++, r++) {
      const float* from = a.q + ((b * a.T + t) * a.N + k * G + g) * a.H;
      for (int64_t h = 0; h < a.H; h++) own.q[r * a.H + h] = from[h] * a.scale;
      if (a.sinks) own.most[r] = a.sinks[k * G + g], own.total[r] = 1.0f;
    }
  }
  const int64_t end = std::min({int64_t(a.lengths[b]), newest + 1, a.width * a.page});
  // The rows of TOKENS tokens in the pools, -1 for tokens without a page. What lies there is asked for at once.
  int64_t places[2][TOKENS], *place = places[0], *later = places[1];
  auto locate = [&](int64_t start, int64_t* place) {
    for (int64_t s = 0; s < TOKENS; s++) {
      const int64_t number = start + s < end ? a.table[b * a.width + (start + s) / a.page] : -1;
      place[s] = number >= 0 && number < a.pages ? (number * a.page + (start + s) % a.page) * a.K + k : -1;
      if (place[s] >= 0) fetch(keys + place[s] * a.H, a.H), fetch(values + place[s] * a.U, a.U);
    }
  };
  const int64_t from = std::max<int64_t>(oldest, 0) / TOKENS * TOKENS;
  locate(from, later);
  for (int64_t start = from; start < end; start += TOKENS) {
    // Keys as [H, tokens], values as [tokens, U]. Only the row's own tokens are read: others may be anything, NaN too.
    const int64_t tokens = std::min(TOKENS, end - start);
    std::swap(place, later);
    float mine[TOKENS];
    for (int64_t s = 0; s < TOKENS; s++) mine[s] = place[s] >= 0;
    for (int64_t s = 0; s < tokens; s += LANES)
      for (int64_t h = 0; h < a.H; h += LANES) {
        Floats block[LANES];
        for (int i = 0; i < LANES; i++)
          block[i] = place[s + i] < 0 ? Floats{} : load(keys + place[s + i] * a.H + h, a.H - h);
        transpose(block);
        for (int i = 0; i < std::min<int64_t>(LANES, a.H - h); i++) store(own.keys.data() + (h + i) * TOKENS + s, block[i]);
      }
    if (start + TOKENS < end) locate(start + TOKENS, later);
    for (int64_t s = 0; s < tokens; s++)
      for (int64_t u = 0; u < wide; u += LANES)
        store(own.values.data() + s * wide + u,
              place[s] < 0 || u >= a.U ? Floats{} : load(values + place[s] * a.U + u, a.U - u));
    for (int64_t c = 0; c < tokens; c += COLUMNS)
      tiles(own.q.data(), a.H, rows, own.keys.data() + c, TOKENS, a.H, own.scores.data() + c, TOKENS, COLUMNS, false);
    for (int64_t r = 0; r < rows; r++) {
      const int64_t at = a.at[b * a.T + first + r / G];
      const int64_t low = a.window ? at - a.window + 1 - start : 0, high = std::min(at + 1 - start, tokens);
      const float factor = softmax(own.scores.data() + r * TOKENS, (tokens + LANES - 1) / LANES * LANES,
                                   std::clamp<int64_t>(low, 0, TOKENS), std::clamp<int64_t>(high, 0, TOKENS), mine, a.cap,
                                   &own.most[r], &own.total[r]);
      if (factor != 1.0f)
        for (int64_t u = 0; u < wide; u++) own.sums[r * wide + u] *= factor;
    }
    for (int64_t u = 0; u < wide; u += COLUMNS)
      tiles(own.scores.data(), TOKENS, rows, own.values.data() + u, wide, tokens, own.sums.data() + u, wide, COLUMNS, true);
  }
  for (int64_t r = 0; r < rows; r++) {
    const int64_t q = (b * a.T + first + r / G) * a.N + k * G + r % G;
    const bool saw = own.total[r] > 0;
    for (int64_t u = 0; u < a.U; u++) a.y[q * a.U + u] = saw ? own.sums[r * wide + u] / own.total[r] : 0.0f;
    a.lse[q] = saw ? own.most[r] + std::log(own.total[r]) : UNSEEN;
  }
}

template <typename C>
ffi::Error attention(ffi::ThreadPool& pool, const Attention& a, const C* keys, const C* values) {
  const int64_t each = std::max<int64_t>(1, QUERIES * a.K / a.N), parts = (a.T + each - 1) / each;
  // The heads of a token lie side by side, so one thread takes all of them, if that leaves enough work for each.
  const int64_t heads = a.B * parts >= 4 * pool.num_threads() ? a.K : 1, groups = a.K / heads;
  parallel(pool, a.B * groups * parts, [&](int64_t i) {
    const int64_t part = i % parts, g = i / parts % groups, b = i / parts / groups;
    for (int64_t k = g * heads; k < (g + 1) * heads; k++)
      attend(a, keys, values, b, k, part * each, std::min(a.T, (part + 1) * each));
  });
  return ffi::Error::Success();
}

// q [B, T, N, H], keys [pages, page, K, H], values [pages, page, K, U], table [B, P], lengths [B], at [B, T], sinks [N] or [0]:
// y [B, T, N, U] and log-sum-exp [B, T, N].
ffi::Error attention_of(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer keys, ffi::AnyBuffer values,
                        ffi::Buffer<ffi::S32> table, ffi::Buffer<ffi::S32> lengths, ffi::Buffer<ffi::S32> at,
                        ffi::Buffer<ffi::F32> sinks, ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::F32> lse, float scale,
                        float cap, int64_t window) {
  const auto Q = q.dimensions(), P = keys.dimensions();
  Attention a;
  a.B = Q[0], a.T = Q[1], a.N = Q[2], a.H = Q[3];
  a.pages = P[0], a.page = P[1], a.K = P[2], a.U = values.dimensions()[3], a.width = table.dimensions()[1];
  a.window = window, a.scale = scale, a.cap = cap;
  a.q = q.typed_data(), a.sinks = sinks.element_count() ? sinks.typed_data() : nullptr;
  a.table = table.typed_data(), a.lengths = lengths.typed_data(), a.at = at.typed_data();
  a.y = y->typed_data(), a.lse = lse->typed_data();
  if (keys.element_type() != values.element_type() || a.N % a.K)
    return ffi::Error::InvalidArgument("keys and values of different types, or heads that do not divide");
  const void *ks = keys.untyped_data(), *vs = values.untyped_data();
  switch (keys.element_type()) {
    case ffi::F32:
      return attention(pool, a, static_cast<const float*>(ks), static_cast<const float*>(vs));
    case ffi::BF16:
      return attention(pool, a, static_cast<const uint16_t*>(ks), static_cast<const uint16_t*>(vs));
    default:
      return ffi::Error::InvalidArgument("keys and values are float32 or bfloat16");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_product, product_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(argosy_paged_attention, attention_of,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<float>("cap")
                                  .Attr<int64_t>("window"));
