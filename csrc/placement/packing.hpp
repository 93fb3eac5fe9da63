// Method "eplb": balance only. Spare slots go to copies of the fullest experts, then the copies are packed evenly.
#pragma once

#include <algorithm>
#include <limits>
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

class Packing {
 public:
  Packing(const Shape& shape, const std::vector<double>& load)
      : shape_(shape), copies_(count_copies(shape, load)), weight_(load), rank_load_(shape.ranks, 0.0), held_(shape) {
    for (std::size_t e = 0; e < shape.experts; ++e) weight_[e] = load[e] / static_cast<double>(copies_[e]);
  }

  // Heaviest copy first, equal ones in ascending id, each to the lightest rank that can take it.
  RankSets run() {
    for (const std::size_t e : descending(weight_)) {
      for (std::size_t copy = 0; copy < copies_[e]; ++copy) {
        std::size_t rank = lightest_free(e, /*without_expert=*/true);
        if (rank == shape_.ranks) rank = make_room(e, lightest_free(e, /*without_expert=*/false));
        held_.add(rank, e);
        rank_load_[rank] += weight_[e];
      }
    }
    return held_;
  }

 private:
  // Lightest rank with a free slot; ties: fewer filled slots, then the lowest rank. `ranks` if there is none.
  std::size_t lightest_free(std::size_t expert, bool without_expert) const {
    std::size_t best = shape_.ranks;
    for (std::size_t r = 0; r < shape_.ranks; ++r) {
      if (held_.filled(r) == shape_.slots_per_rank || (without_expert && held_.has(r, expert))) continue;
      if (best == shape_.ranks || rank_load_[r] < rank_load_[best] ||
          (rank_load_[r] == rank_load_[best] && held_.filled(r) < held_.filled(best)))
        best = r;
    }
    return best;
  }

  // Every rank with a free slot has the expert: moves another one from a full rank without it to rank `free`, and
  // returns that full rank. There always is one to move, because the full rank holds more experts than `free`.
  // Of all moves the one after which the heavier of the two ranks is lightest; ties: lowest rank, lowest id.
  std::size_t make_room(std::size_t expert, std::size_t free) {
    std::size_t from = shape_.ranks, moved = shape_.experts;
    double best = std::numeric_limits<double>::infinity();
    for (std::size_t r = 0; r < shape_.ranks; ++r) {
      if (held_.has(r, expert)) continue;
      for (std::size_t other = 0; other < shape_.experts; ++other) {
        if (!held_.has(r, other) || held_.has(free, other)) continue;
        const double there = rank_load_[free] + weight_[other];
        const double here = rank_load_[r] - weight_[other] + weight_[expert];
        if (std::max(there, here) < best) {
          best = std::max(there, here);
          from = r;
          moved = other;
        }
      }
    }
    held_.remove(from, moved);
    held_.add(free, moved);
    rank_load_[free] += weight_[moved];
    rank_load_[from] -= weight_[moved];
    return from;
  }

  const Shape shape_;
  const std::vector<std::size_t> copies_;  // [experts]
  std::vector<double> weight_;             // [experts] picks of one copy
  std::vector<double> rank_load_;          // [ranks]
  RankSets held_;
};

}  // namespace gimbal::placement
