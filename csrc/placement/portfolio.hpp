// Method "portfolio" on the host: one thread per layer, with the widest vectors that the processor has.
#pragma once

#include <memory>
#include <new>
#include <vector>

#include "placement/job.hpp"
#include "placement/prepare.hpp"

namespace gimbal::placement {

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

// The solver for an instruction set, or null where the processor or the build has none.
inline const Solver* solver_for(InstructionSet wanted) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
  static const bool avx2 = __builtin_cpu_supports("avx2");
  static const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx512 && (wanted == kBest || wanted == kAvx512)) return &avx512_solver();
  if (avx2 && (wanted == kBest || wanted == kAvx2)) return &avx2_solver();
#endif
  return wanted == kBest || wanted == kBaseline ? &baseline_solver() : nullptr;
}

// Lanes over ranks fill vectors when there are many ranks, lanes over slots when there are few.
inline bool lanes_across(const Shape& shape) { return shape.ranks >= 16 || shape.ranks > shape.slots_per_rank; }

// The solver of one thread; its memory is used again from layer to layer.
class Portfolio {
 public:
  // Ranks of the experts, or null where the layer has no traffic and stays.
  const int* solve(const Solver& solver, const Layer& layer, const Windows& windows, const Weights& weights,
                   const Effort& effort) {
    const Shape& shape = layer.shape;
    const bool across = lanes_across(shape);
    const int padded = across ? round_up(static_cast<int>(shape.ranks), solver.lanes) : 0;
    if (!prepared_.build(layer, windows, weights, padded)) return nullptr;
    const View& y = prepared_.view();
    work_.resize(shape.ranks * static_cast<std::size_t>(y.stride));
    starts_.resize(kMostStarts * shape.experts);
    found_.resize(2 * shape.experts);
    solver.solve({&y, across, prices_.reserve(solver.price_bytes(y)), search_.reserve(solver.search_bytes(y, across)),
                  work_.data(), starts_.data(), found_.data(), effort});
    return found_.data();
  }

 private:
  Prepared prepared_;
  Arena prices_, search_;
  std::vector<float> work_;
  std::vector<int> starts_, found_;
};

}  // namespace gimbal::placement
