// One slot per rank: all placements have the same rank loads in another order, so that only the linear costs differ. What
// is left is the assignment problem, solved exactly by shortest augmenting paths (Jonker and Volgenant 1987).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "placement/bound.hpp"

namespace gimbal::placement {

class Assignment {
 public:
  explicit Assignment(const BoundLayer& y)
      : y_(y), n_(y.experts), of_rank_(size(n_) + 1), of_expert_(size(n_) + 1), taken_by_(size(n_) + 1, kNone) {}

  // Least sum of the linear costs over all placements, a hair below it for the rounding of the sums.
  double least() {
    for (int r = 0; r < n_; ++r) augment(r);
    double total = 0.0, scale = 0.0;
    for (int r = 0; r < n_; ++r) {  // whatever the experts' prices are, the cheapest of each rank bounds its cost
      double low = kHuge;
      for (int e = 0; e < n_; ++e) low = std::min(low, y_.at(r, e) - of_expert_[size(e)]);
      total += low + of_expert_[size(r)];  // as many experts as ranks
      scale += std::abs(low) + std::abs(of_expert_[size(r)]);
    }
    return total - 1e-13 * scale;
  }

 private:
  static constexpr int kNone = -1;
  static constexpr double kHuge = 1e300;
  static std::size_t size(int n) { return static_cast<std::size_t>(n); }

  // Gives rank r an expert: along the path of least reduced cost that ends at a free one. Column n_ stands for r itself.
  void augment(int r) {
    std::vector<double> distance(size(n_), kHuge);
    std::vector<int> before(size(n_), n_);
    std::vector<char> done(size(n_) + 1, 0);
    taken_by_[size(n_)] = r;
    int here = n_;
    while (taken_by_[size(here)] != kNone) {
      done[size(here)] = 1;
      const int rank = taken_by_[size(here)];
      int next = kNone;
      for (int e = 0; e < n_; ++e) {
        if (done[size(e)]) continue;
        const double reduced = y_.at(rank, e) - of_rank_[size(rank)] - of_expert_[size(e)];
        if (reduced < distance[size(e)]) {
          distance[size(e)] = reduced;
          before[size(e)] = here;
        }
        if (next == kNone || distance[size(e)] < distance[size(next)]) next = e;
      }
      const double step = distance[size(next)];
      for (int e = 0; e <= n_; ++e) {
        if (done[size(e)]) {
          of_rank_[size(taken_by_[size(e)])] += step;
          of_expert_[size(e)] -= step;
        } else if (e < n_) {
          distance[size(e)] -= step;
        }
      }
      here = next;
    }
    while (here != n_) {
      taken_by_[size(here)] = taken_by_[size(before[size(here)])];
      here = before[size(here)];
    }
  }

  const BoundLayer& y_;
  int n_;
  std::vector<double> of_rank_, of_expert_;  // dual prices
  std::vector<int> taken_by_;                // [experts] rank
};

}  // namespace gimbal::placement
