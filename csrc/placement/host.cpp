// C interface of the placement methods, called from gimbal_kernels/placement/host.py, which validates.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "placement/layer.hpp"
#include "placement/packing.hpp"
#include "placement/parallel.hpp"
#include "placement/portfolio_api.hpp"
#include "placement/replica_api.hpp"
#include "placement/scored.hpp"
#include "placement/slots.hpp"
#define GIMBAL_ISA baseline
#define GIMBAL_LANES 4
#include "placement/solver.hpp"

const gimbal::placement::Solver& gimbal::placement::baseline_solver() { return baseline::solver(); }

namespace {

using namespace gimbal::placement;

enum Method : std::int32_t { kPaper = 0, kGreedy = 1, kBalanced = 2 };

// Below this many multiply-adds (about a millisecond on one core) starting threads costs more than they save.
constexpr std::size_t kThreadedWork = 1'000'000;
// A layer with less than 2^-64 picks in all counts as empty, as in gimbal_kernels/placement/checks.py.
constexpr double kEmptyBelow = 0x1p-64;

void place_layer(const Layer& layer, Method method, const Weights& weights, std::int32_t* slots) {
  const std::vector<double> load = expert_loads(layer);
  double total = 0.0;
  for (const double picks : load) total += picks;
  if (total < kEmptyBelow) {
    keep_or_identity(layer, slots);
  } else if (method == kBalanced) {
    slots_in_ranks(layer, pack_evenly(layer.shape, load), slots);
  } else {
    const ScoreFactors factors = method == kPaper ? paper_factors(layer.shape, total, weights)
                                                  : greedy_factors(layer.shape, total, weights);
    slots_in_ranks(layer, place_by_score(layer, load, total, factors), slots);
  }
}

long long steady_now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

bool passed(long long deadline) { return steady_now() >= deadline; }

// Limits as Python hands them over; without a time budget (seconds < 0) no clock is read.
Effort effort_of(const std::int64_t* limits, double seconds) {
  const bool timed = seconds >= 0.0 && seconds < 1e9;
  return {static_cast<int>(limits[0]), static_cast<int>(limits[1]), static_cast<int>(limits[2]),
          timed ? steady_now() + static_cast<long long>(seconds * 1e9) : 0, timed ? passed : nullptr};
}

std::size_t thread_count(std::size_t layers, const Shape& shape, std::int32_t requested) {
  if (requested > 0) return static_cast<std::size_t>(requested);
  const std::size_t work = layers * shape.experts * shape.ranks * (shape.sources + 4);
  if (work < kThreadedWork) return 1;
  return std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
}

}  // namespace

// Bumped whenever the signature or the meaning of an argument changes.
extern "C" std::int32_t gimbal_placement_abi() { return 4; }

// shape: layers, sources, experts, ranks, slots per rank. traffic: [layers, sources, experts]. distance: [sources,
// ranks]. current: [layers, slots] or null. weights: alpha, beta, gamma. slots: [layers, slots], written.
// threads: 0 chooses by size. Returns 0, or 1 when memory ran out.
extern "C" std::int32_t gimbal_placement_solve(std::int32_t method, const std::int64_t* shape, const double* traffic,
                                               const double* distance, const std::int32_t* current,
                                               const double* weights, std::int32_t threads, std::int32_t* slots) {
  const std::size_t layers = static_cast<std::size_t>(shape[0]);
  const Shape layer_shape{static_cast<std::size_t>(shape[1]), static_cast<std::size_t>(shape[2]),
                          static_cast<std::size_t>(shape[3]), static_cast<std::size_t>(shape[4])};
  const std::size_t cells = layer_shape.sources * layer_shape.experts, total = layer_shape.slots();
  const auto body = [&](std::size_t l) {
    const Layer layer{layer_shape, traffic + l * cells, distance, current == nullptr ? nullptr : current + l * total};
    place_layer(layer, static_cast<Method>(method), {weights[0], weights[1], weights[2]}, slots + l * total);
  };
  return for_each_layer(layers, thread_count(layers, layer_shape, threads), body) ? 0 : 1;
}

// The instruction sets (enum InstructionSet) that gimbal_placement_portfolio can be told to use, as bits.
extern "C" std::int32_t gimbal_placement_instruction_sets() {
  std::int32_t found = 0;
  for (const InstructionSet each : {kBaseline, kAvx2, kAvx512})
    if (solver_for(each) != nullptr) found |= 1 << each;
  return found;
}

// shape: layers, sources, experts, ranks, slots per rank, windows, kicks, seeds, most moves (-1: any number), instruction
// set (0: the best). window_loads: [windows, layers, experts], this window first; window_weights: [windows]. seconds: time
// after which no kick starts, counted from the call, or negative. The rest as in gimbal_placement_solve. Returns 2 when
// the processor lacks the instruction set.
extern "C" std::int32_t gimbal_placement_portfolio(const std::int64_t* shape, const double* traffic,
                                                   const double* distance, const double* window_loads,
                                                   const double* window_weights, const std::int32_t* current,
                                                   const double* weights, double seconds, std::int32_t threads,
                                                   std::int32_t* slots) {
  const auto size = [&](int i) { return static_cast<std::size_t>(shape[i]); };
  const Batch batch{{size(1), size(2), size(3), size(4)}, size(0), size(5), traffic, distance, window_loads,
                    window_weights, current};
  const Effort effort = effort_of(shape + 6, seconds);
  const Solver* solver = solver_for(static_cast<InstructionSet>(shape[9]));
  if (solver == nullptr) return 2;
  const auto body = [&](std::size_t l) {
    place_portfolio_layer(*solver, batch, l, {weights[0], weights[1], weights[2]}, effort,
                          slots + l * batch.shape.slots());
  };
  const std::size_t wanted = threads > 0 ? static_cast<std::size_t>(threads)
                                         : std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
  return for_each_layer(batch.layers, wanted, body) ? 0 : 1;
}

// Lower bounds on the cost of each layer, one copy per expert. shape: the first six of gimbal_placement_portfolio, then
// nodes and whether to lift. upper: [layers] costs of placements that exist, or infinity. bound: [layers], written.
extern "C" std::int32_t gimbal_placement_bound(const std::int64_t* shape, const double* traffic, const double* distance,
                                               const double* window_loads, const double* window_weights,
                                               const std::int32_t* current, const double* weights, const double* upper,
                                               double* bound) {
  const auto size = [&](int i) { return static_cast<std::size_t>(shape[i]); };
  const Batch batch{{size(1), size(2), size(3), size(4)}, size(0), size(5), traffic, distance, window_loads,
                    window_weights, current};
  const auto body = [&](std::size_t l) {
    bound[l] = bound_layer(batch, l, {weights[0], weights[1], weights[2]}, shape[7] != 0, static_cast<int>(shape[6]),
                           upper[l]);
  };
  const std::size_t threads = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
  return for_each_layer(batch.layers, threads, body) ? 0 : 1;
}
