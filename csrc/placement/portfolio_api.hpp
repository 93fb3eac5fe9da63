// C interface of method "portfolio", part of host.cpp.
#pragma once

#include <cstdint>

#include "placement/assignment.hpp"
#include "placement/branch.hpp"
#include "placement/parallel.hpp"
#include "placement/portfolio.hpp"
#include "placement/slots.hpp"

namespace gimbal::placement {

// Arrays over all layers, as Python hands them over.
struct Batch {
  Shape shape;
  std::size_t layers, windows;
  const double *traffic, *distance, *loads;  // [layers, sources, experts], [sources, ranks], [windows, layers, experts]
  const double* window_weights;              // [windows]
  const std::int32_t* current;               // [layers, slots] or null

  Layer layer(std::size_t l) const {
    const std::size_t cells = shape.sources * shape.experts;
    return {shape, traffic + l * cells, distance, current == nullptr ? nullptr : current + l * shape.slots()};
  }
};

inline void place_portfolio_layer(const Solver& solver, const Batch& batch, std::size_t l, const Weights& weights,
                                  const Effort& effort, std::int32_t* slots) {
  thread_local Portfolio portfolio;
  const Layer layer = batch.layer(l);
  const double* loads[kMaxWindows];
  for (std::size_t k = 0; k < batch.windows; ++k)
    loads[k] = batch.loads + (k * batch.layers + l) * batch.shape.experts;
  const int* ranks = portfolio.solve(solver, layer, {batch.windows, loads, batch.window_weights}, weights, effort);
  if (ranks == nullptr) return keep_or_identity(layer, slots);
  RankSets held(layer.shape);
  for (std::size_t e = 0; e < layer.shape.experts; ++e) held.add(static_cast<std::size_t>(ranks[e]), e);
  slots_in_ranks(layer, held, slots);
}

// A lower bound on the cost of a layer; `upper`: the cost of a placement that exists.
inline double bound_layer(const Batch& batch, std::size_t l, const Weights& weights, bool lift, int nodes, double upper) {
  const Layer layer = batch.layer(l);
  const double* loads[kMaxWindows];
  for (std::size_t k = 0; k < batch.windows; ++k)
    loads[k] = batch.loads + (k * batch.layers + l) * batch.shape.experts;
  Prepared prepared;
  if (!prepared.build(layer, {batch.windows, loads, batch.window_weights}, weights, 0)) return 0.0;
  const BoundLayer exact = prepared.for_bound(layer.shape, weights, layer.current != nullptr);
  if (layer.shape.slots_per_rank == 1)
    return std::min(upper, Assignment(exact).least() + prepared.imbalance_of_single_slots(exact.b));
  return Branching(exact, lift, upper).run(nodes);
}

}  // namespace gimbal::placement
