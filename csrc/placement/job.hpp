// One layer to be solved on the host, and who solves it: the same solver is compiled once per instruction set.
//
// Only plain data and pointers cross between the instruction sets: an inline function of the standard library that was
// compiled for one of them must not end up serving another.
#pragma once

#include "placement/search.cuh"

namespace gimbal::placement {

constexpr int kMostStarts = 3;

struct Effort {
  int kicks, seeds;
  int most_moves;           // -1: any number
  long long deadline;       // kicks end once it has passed
  bool (*passed)(long long deadline);  // null: there is none
};

// All memory is the caller's: nothing in a solver allocates or throws.
struct Job {
  const View* view;
  bool across;  // lanes run over ranks
  char *price_memory, *search_memory;
  float* work;
  int *starts, *found;  // [kMostStarts, experts], [2, experts]
  Effort effort;
};

// The solver for one instruction set.
struct Solver {
  int lanes;
  std::size_t (*price_bytes)(const View&);
  std::size_t (*search_bytes)(const View&, bool across);
  void (*solve)(const Job&);  // leaves the best placement found in found[0]: ranks of the experts
};

enum InstructionSet : int { kBest = 0, kBaseline = 1, kAvx2 = 2, kAvx512 = 3 };

const Solver& baseline_solver();  // host.cpp
const Solver& avx2_solver();      // host_avx2.cpp, x86-64 and GCC only
const Solver& avx512_solver();    // host_avx512.cpp, likewise

}  // namespace gimbal::placement
