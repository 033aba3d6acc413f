// Work for the threads of XLA's pool.

#ifndef ARGOSY_PARALLEL_H
#define ARGOSY_PARALLEL_H

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

// Runs work(0) ... work(count - 1) on the caller and on threads of the pool that are free, and returns when all are done.
template <typename Work>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, const Work& work) {
  struct State {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto state = std::make_shared<State>();
  // A thread that comes too late finds no number left, and does not touch `work`.
  auto loop = [state, count, &work] {
    for (int64_t i; (i = state->next.fetch_add(1)) < count;) {
      work(i);
      state->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min<int64_t>(pool.num_threads(), count); i++) {
    auto other = loop;
    pool.Schedule(std::move(other));
  }
  loop();
  for (int spins = 0; state->done.load(std::memory_order_acquire) < count; spins++)
    if (spins > 4096) std::this_thread::yield();
}

#endif
