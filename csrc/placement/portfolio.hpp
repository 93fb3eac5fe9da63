// Method "portfolio" on the host: the solver of search.cuh, descent.cuh and prices.cuh on one thread per layer.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "placement/descent.cuh"
#include "placement/prepare.hpp"
#include "placement/prices.cuh"

// Lanes become vector instructions of what the processor has; the results are the same bytes.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(GIMBAL_SIMT)
#define GIMBAL_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4"), flatten))
#else
#define GIMBAL_CLONES
#endif

namespace gimbal::placement {

typedef int HostLanes __attribute__((vector_size(16)));
typedef unsigned UnsignedHostLanes __attribute__((vector_size(16)));

template <>
struct UnsignedOf<HostLanes> {
  using type = UnsignedHostLanes;
};

using Clock = std::chrono::steady_clock;

// The Block of one host thread.
struct Serial {
  static constexpr int kLanes = 4;
  using Ints = HostLanes;
  Clock::time_point deadline = Clock::time_point::max();

  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  u64 min64(u64 key) const { return key; }
  void add(int* target, int value) const { *target += value; }
  bool expired() const { return deadline != Clock::time_point::max() && Clock::now() >= deadline; }

  int argmin(const int* matrix, int rows, int columns) const {
    int lowest = kNever, row = 0;
    for (int i = 0; i < rows; ++i) {
      int here = kNever;
      const int* values = matrix + i * columns;
      for (int j = 0; j < columns; ++j) here = values[j] < here ? values[j] : here;
      if (here < lowest) {
        lowest = here;
        row = i;
      }
    }
    const int* values = matrix + row * columns;
    int column = 0;
    while (column + 1 < columns && values[column] != lowest) ++column;
    return row * columns + column;
  }
};

struct Effort {
  int kicks, seeds;
  int most_moves;              // -1: any number
  Clock::time_point deadline;  // kicks end there
};

// Memory for one search after another, aligned for vectors.
class Arena {
 public:
  char* reserve(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<char*>(::operator new(bytes, std::align_val_t{64})));
      size_ = bytes;
    }
    return memory_.get();
  }

 private:
  struct Free {
    void operator()(char* memory) const { ::operator delete(memory, std::align_val_t{64}); }
  };
  std::unique_ptr<char, Free> memory_;
  std::size_t size_ = 0;
};

constexpr int kMostStarts = 3;

// From here to the end of solve_view: nothing that allocates or throws, the arrays come from the caller.
struct Job {
  const View* view;
  char *price_memory, *search_memory;
  float* work;
  int *starts, *found;  // [kMostStarts, experts], [2, experts]
  Effort effort;
};

// The ranks where the search starts: prices rounded by rank and by class, and the current ones on few ranks.
inline int make_starts(Serial& block, const Job& job) {
  const View& y = *job.view;
  Prices<Serial> prices{block, y};
  prices.carve(job.price_memory);
  prices.s.work = job.work;
  prices.ascend();
  prices.round_by_rank(job.starts);
  int count = 1;
  if (y.classes < y.ranks) prices.round_by_class(job.starts + count++ * y.experts);
  if (y.home[0] >= 0 && y.ranks <= 8) {
    for (int e = 0; e < y.experts; ++e) job.starts[count * y.experts + e] = y.home[e];
    ++count;
  }
  return count;
}

// Best placement found, in found[0]: ranks of the experts.
template <class S>
inline void search_from_starts(S& search, const Job& job) {
  const View& y = *job.view;
  const int count = make_starts(search.b, job);
  int *best = job.found, *here = job.found + y.experts;
  const auto row = sizeof(int) * static_cast<std::size_t>(y.experts);
  long long lowest = 0;
  for (int start = 0; start < count; ++start) {  // ties: the first start
    settle(search, job.starts + start * y.experts);
    const long long value = objective(search);
    if (start > 0 && value >= lowest) continue;
    lowest = value;
    leave(search, best);
  }
  if (job.effort.kicks > 0) {
    std::memcpy(job.starts, best, row);
    for (int seed = 1; seed <= job.effort.seeds; ++seed) {  // ties: the first seed
      resume(search, job.starts);
      kick(search, job.effort.kicks, seed);
      const long long value = objective(search);
      if (value >= lowest) continue;
      lowest = value;
      leave(search, best);
    }
  }
  if (y.home[0] < 0) return;
  resume(search, y.home);  // no better than what is there: stay
  if (objective(search) <= lowest) std::memcpy(best, y.home, row);
  if (job.effort.most_moves < 0) return;
  int moves = 0;
  for (int e = 0; e < y.experts; ++e) moves += best[e] != y.home[e];
  if (moves <= job.effort.most_moves) return;
  descend(search, job.effort.most_moves);
  leave(search, here);
  std::memcpy(best, here, row);
}

template <bool kAcrossRanks, int kWindows>
inline void solve_as(const Job& job) {
  Serial block{job.effort.deadline};
  Search<Serial, kAcrossRanks, kWindows> search{block, *job.view};
  search.carve(job.search_memory);
  search_from_starts(search, job);
}

GIMBAL_CLONES inline void solve_across_one(const Job& job) { solve_as<true, 1>(job); }
GIMBAL_CLONES inline void solve_across_any(const Job& job) { solve_as<true, 0>(job); }
GIMBAL_CLONES inline void solve_within_one(const Job& job) { solve_as<false, 1>(job); }
GIMBAL_CLONES inline void solve_within_any(const Job& job) { solve_as<false, 0>(job); }

// Lanes over ranks fill vectors when there are many ranks, lanes over slots when there are few.
inline bool lanes_across(const Shape& shape) { return shape.ranks >= 16 || shape.ranks > shape.slots_per_rank; }

// The solver of one thread; its memory is used again from layer to layer.
class Portfolio {
 public:
  // Ranks of the experts, or null where the layer has no traffic and stays.
  const int* solve(const Layer& layer, const Windows& windows, const Weights& weights, const Effort& effort) {
    const Shape& shape = layer.shape;
    const bool across = lanes_across(shape);
    const int padded = across ? round_up(static_cast<int>(shape.ranks), Serial::kLanes) : 0;
    if (!prepared_.build(layer, windows, weights, padded)) return nullptr;
    const View& y = prepared_.view();
    Serial block;
    Search<Serial, true, 0> wide{block, y};
    Search<Serial, false, 0> narrow{block, y};
    Prices<Serial> prices{block, y};
    work_.resize(shape.ranks * static_cast<std::size_t>(y.stride));
    starts_.resize(kMostStarts * shape.experts);
    found_.resize(2 * shape.experts);
    const Job job{&y,
                  prices_.reserve(prices.carve(nullptr)),
                  search_.reserve(across ? wide.carve(nullptr) : narrow.carve(nullptr)),
                  work_.data(),
                  starts_.data(),
                  found_.data(),
                  effort};
    if (across)
      y.windows == 1 ? solve_across_one(job) : solve_across_any(job);
    else
      y.windows == 1 ? solve_within_one(job) : solve_within_any(job);
    return found_.data();
  }

 private:
  Prepared prepared_;
  Arena prices_, search_;
  std::vector<float> work_;
  std::vector<int> starts_, found_;
};

}  // namespace gimbal::placement
