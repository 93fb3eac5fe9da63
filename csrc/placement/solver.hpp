// Method "portfolio" on one host thread: the solver of search.cuh, descent.cuh and prices.cuh for the instruction set that
// GIMBAL_ISA names (serial.hpp). Every instruction set finds the same bytes.
#pragma once

#include "placement/descent.cuh"
#include "placement/prices.cuh"
#include "placement/serial.hpp"

namespace gimbal::placement {
namespace GIMBAL_ISA {

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

inline void copy_ranks(int* to, const int* from, int experts) {
  for (int e = 0; e < experts; ++e) to[e] = from[e];
}

// Best of the starts and of the kicks from it, in `best`; returns its objective.
template <class S>
inline long long search_from_starts(S& search, const Job& job, int* best) {
  const View& y = *job.view;
  const int count = make_starts(search.b, job);
  long long lowest = 0;
  for (int start = 0; start < count; ++start) {  // ties: the first start
    settle(search, job.starts + start * y.experts);
    const long long value = objective(search);
    if (start > 0 && value >= lowest) continue;
    lowest = value;
    leave(search, best);
  }
  if (job.effort.kicks == 0) return lowest;
  copy_ranks(job.starts, best, y.experts);
  for (int seed = 1; seed <= job.effort.seeds; ++seed) {  // ties: the first seed
    resume(search, job.starts);
    kick(search, job.effort.kicks, seed);
    const long long value = objective(search);
    if (value >= lowest) continue;
    lowest = value;
    leave(search, best);
  }
  return lowest;
}

template <bool kAcrossRanks, int kWindows>
inline void solve_as(const Job& job) {
  const View& y = *job.view;
  Serial block{&job.effort};
  Search<Serial, kAcrossRanks, kWindows> search{block, y};
  search.carve(job.search_memory);
  int *best = job.found, *here = job.found + y.experts;
  const long long lowest = search_from_starts(search, job, best);
  if (y.home[0] < 0) return;
  resume(search, y.home);  // no better than what is there: stay
  if (objective(search) <= lowest) copy_ranks(best, y.home, y.experts);
  if (job.effort.most_moves < 0) return;
  int moves = 0;
  for (int e = 0; e < y.experts; ++e) moves += best[e] != y.home[e];
  if (moves <= job.effort.most_moves) return;
  descend(search, job.effort.most_moves);
  leave(search, here);
  copy_ranks(best, here, y.experts);
}

inline void solve(const Job& job) {
  const bool one = job.view->windows == 1;
  if (job.across)
    one ? solve_as<true, 1>(job) : solve_as<true, 0>(job);
  else
    one ? solve_as<false, 1>(job) : solve_as<false, 0>(job);
}

inline std::size_t price_bytes(const View& y) {
  Serial block;
  return Prices<Serial>{block, y}.carve(nullptr);
}

inline std::size_t search_bytes(const View& y, bool across) {
  Serial block;
  return across ? Search<Serial, true, 0>{block, y}.carve(nullptr) : Search<Serial, false, 0>{block, y}.carve(nullptr);
}

inline const Solver& solver() {
  static constexpr Solver kSolver{GIMBAL_LANES, price_bytes, search_bytes, solve};
  return kSolver;
}

}  // namespace GIMBAL_ISA
}  // namespace gimbal::placement
