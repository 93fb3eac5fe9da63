// Methods "paper" and "greedy": hottest expert first, each to the rank of lowest score that has a free slot.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "placement/layer.hpp"

namespace gimbal::placement {

// What one unit of each term adds to a score: a pick times distance, a pick squared, leaving the current rank.
struct ScoreFactors {
  double remote, square, move;
};

// The paper's heuristic: traffic in units of the mean expert load.
inline ScoreFactors paper_factors(const Shape& shape, double total, const Weights& weights) {
  const double mean_expert = total / static_cast<double>(shape.experts);
  return {weights.alpha / mean_expert, weights.beta / (mean_expert * mean_expert), weights.gamma};
}

// The marginals of the cost that `evaluate` reports.
inline ScoreFactors greedy_factors(const Shape& shape, double total, const Weights& weights) {
  const double ranks = static_cast<double>(shape.ranks);
  const double mean_rank = total / ranks;
  return {weights.alpha / total, weights.beta / (ranks * (mean_rank * mean_rank)),
          weights.gamma / static_cast<double>(shape.experts)};
}

// Indices by descending value; equal values in ascending index.
inline std::vector<std::size_t> descending(const std::vector<double>& value) {
  std::vector<std::size_t> order(value.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return value[a] > value[b]; });
  return order;
}

// Rank of each expert in the current placement; `ranks` where there is none. One copy per expert. [experts]
inline std::vector<std::size_t> home_ranks(const Layer& layer) {
  std::vector<std::size_t> home(layer.shape.experts, layer.shape.ranks);
  if (layer.current != nullptr)
    for (std::size_t p = 0; p < layer.shape.slots(); ++p)
      home[static_cast<std::size_t>(layer.current[p])] = p / layer.shape.slots_per_rank;
  return home;
}

// Sum over sources of picks * distance for every rank the expert might go to. remote: [ranks]
inline void remote_picks(const Layer& layer, std::size_t expert, std::vector<double>& remote) {
  const std::size_t ranks = layer.shape.ranks;
  std::fill(remote.begin(), remote.end(), 0.0);
  for (std::size_t s = 0; s < layer.shape.sources; ++s) {
    const double picks = layer.traffic[s * layer.shape.experts + expert];
    const double* distance = layer.distance + s * ranks;
    for (std::size_t r = 0; r < ranks; ++r) remote[r] += picks * distance[r];
  }
}

// Equal scores: the rank that needs no migration, then the one with fewer filled slots, then the lowest one.
inline RankSets place_by_score(const Layer& layer, const std::vector<double>& load, double total,
                               const ScoreFactors& factors) {
  const Shape& shape = layer.shape;
  const double mean_rank = total / static_cast<double>(shape.ranks);
  const std::vector<std::size_t> home = home_ranks(layer);
  std::vector<double> rank_load(shape.ranks, 0.0), remote(shape.ranks), score(shape.ranks);
  RankSets held(shape);
  for (const std::size_t e : descending(load)) {
    remote_picks(layer, e, remote);
    for (std::size_t r = 0; r < shape.ranks; ++r) {
      const double after = rank_load[r] + load[e] - mean_rank;
      const double before = rank_load[r] - mean_rank;
      score[r] = factors.remote * remote[r] + factors.square * (after * after - before * before);
    }
    std::size_t best = 0;
    double best_score = std::numeric_limits<double>::infinity();  // no score is: the first free rank wins
    bool best_moves = true;
    for (std::size_t r = 0; r < shape.ranks; ++r) {
      if (held.filled(r) == shape.slots_per_rank) continue;
      const bool moves = home[e] != shape.ranks && home[e] != r;
      const double here = score[r] + (moves ? factors.move : 0.0);
      const bool wins_tie = moves != best_moves ? best_moves : held.filled(r) < held.filled(best);
      if (here < best_score || (here == best_score && wins_tie)) {
        best = r;
        best_score = here;
        best_moves = moves;
      }
    }
    held.add(best, e);
    rank_load[best] += load[e];
  }
  return held;
}

}  // namespace gimbal::placement
