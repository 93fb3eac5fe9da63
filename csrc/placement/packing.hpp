// Method "eplb": balance only. Spare slots go to copies of the fullest experts, then the copies are packed evenly.
#pragma once

#include <vector>

#include "placement/layer.hpp"
#include "placement/scored.hpp"

namespace gimbal::placement {

// Each spare slot goes to the expert whose copies are the fullest, which makes the fullest copy as light as it
// can be. Never more copies than ranks. Ties: fewer copies, then the lowest id. [experts]
inline std::vector<std::size_t> count_copies(const Shape& shape, const std::vector<double>& load) {
  std::vector<std::size_t> copies(shape.experts, 1);
  std::vector<double> per_copy = load;
  for (std::size_t spare = shape.slots() - shape.experts; spare > 0; --spare) {
    std::size_t fullest = shape.experts;
    for (std::size_t e = 0; e < shape.experts; ++e) {
      if (copies[e] == shape.ranks) continue;
      if (fullest == shape.experts || per_copy[e] > per_copy[fullest] ||
          (per_copy[e] == per_copy[fullest] && copies[e] < copies[fullest]))
        fullest = e;
    }
    ++copies[fullest];
    per_copy[fullest] = load[fullest] / static_cast<double>(copies[fullest]);
  }
  return copies;
}

// Heaviest copy first, equal ones in ascending id, each to the lightest rank that has a free slot and no copy of the
// expert; ties: fewer filled slots, then the lowest rank. Until the last expert with several copies is placed, only
// the least filled of those ranks are considered: up to rounding no restriction, since such copies are at least half
// as heavy as the fullest one, and it leaves some rank without the expert a free slot for each of its copies.
inline RankSets pack_evenly(const Shape& shape, const std::vector<double>& load) {
  const std::vector<std::size_t> copies = count_copies(shape, load);
  std::vector<double> weight(shape.experts), rank_load(shape.ranks, 0.0);
  for (std::size_t e = 0; e < shape.experts; ++e) weight[e] = load[e] / static_cast<double>(copies[e]);
  const std::vector<std::size_t> order = descending(weight);
  std::size_t in_rows = shape.experts;  // experts of `order` that are placed row by row
  while (in_rows > 0 && copies[order[in_rows - 1]] == 1) --in_rows;

  RankSets held(shape);
  for (std::size_t nth = 0; nth < shape.experts; ++nth) {
    const std::size_t e = order[nth];
    const auto before = [&](std::size_t a, std::size_t b) {
      if (nth < in_rows && held.filled(a) != held.filled(b)) return held.filled(a) < held.filled(b);
      if (rank_load[a] != rank_load[b]) return rank_load[a] < rank_load[b];
      return held.filled(a) < held.filled(b);
    };
    for (std::size_t copy = 0; copy < copies[e]; ++copy) {
      std::size_t best = shape.ranks;
      for (std::size_t r = 0; r < shape.ranks; ++r) {
        if (held.filled(r) == shape.slots_per_rank || held.has(r, e)) continue;
        if (best == shape.ranks || before(r, best)) best = r;
      }
      held.add(best, e);
      rank_load[best] += weight[e];
    }
  }
  return held;
}

}  // namespace gimbal::placement
