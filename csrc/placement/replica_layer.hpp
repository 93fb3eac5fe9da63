// One layer with spare slots, in the integers that its search works in (SPEC section 4).
//
// Specified by gimbal_kernels/placement/replicas.py: float64 in a written order without fused multiply-add up to the
// rounding of one copy set's cost and loads; integers modulo 2^32 from there on, whose sums do not depend on order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "placement/layer.hpp"
#include "placement/prepare.hpp"

namespace gimbal::placement {

// Weight of balance in each stage, in units of beta: a geometric series from 0.2 to 1.
constexpr int kReplicaStages = 3;
constexpr double kReplicaStageWeight[kReplicaStages] = {0.2, 0.4472135954999579, 1.0};

// What the objective needs to know about the copies of one expert: which ranks hold them decides the cost of its picks
// and the loads that it puts on these ranks, in every window.
class ReplicaLayer {
 public:
  int experts = 0, sources = 0, ranks = 0, size = 0, windows = 0;
  int rows = 0;       // windows * ranks: one load per window and rank
  int move_cost = 0;  // of a copy on a rank that has none now

  int slots() const { return ranks * size; }
  bool was_on(int e, int r) const { return was_on_[at(e, r)] != 0; }
  // Load of a rank when all are equal, in units of window k.
  int mean(int k) const { return mean_units_[static_cast<std::size_t>(k)]; }
  double total_load(int e) const { return loads_[0][e]; }

  // False when the layer has no traffic in this window: there is nothing to optimise.
  bool build(const Layer& layer, const Windows& given, const Weights& weights, double drift) {
    experts = static_cast<int>(layer.shape.experts);
    sources = static_cast<int>(layer.shape.sources);
    ranks = static_cast<int>(layer.shape.ranks);
    size = static_cast<int>(layer.shape.slots_per_rank);
    distance_ = layer.distance;
    if (!keep_windows(given)) return false;
    transpose(layer);
    order_ranks(layer);
    remember(layer);
    scale(weights, drift);
    return true;
  }

  // Sets the weight of balance to `stage` times beta.
  void weigh(double stage) {
    const std::size_t n = static_cast<std::size_t>(experts), kept = loads_.size();
    unit_load_.assign(kept * n, 0.0);
    mean_units_.clear();
    for (std::size_t k = 0; k < kept; ++k) {
      const double each = std::sqrt(beta_ * stage * weight_[k] * units_ / static_cast<double>(ranks)) / mean_[k];
      for (std::size_t e = 0; e < n; ++e) unit_load_[k * n + e] = k == 0 ? each : each * loads_[k][e];
      mean_units_.push_back(static_cast<int>(std::lrint(mean_[k] * each)));
    }
  }

  // Cost of expert e with its copies on `where` [count], ascending; load: [windows][count] units, written. Picks of an
  // earlier window go where those of this one go; without any in this one, evenly to all copies.
  std::uint32_t copy_set(int e, const int* where, int count, std::uint32_t* load) const {
    double* picks = picks_;
    const double now = loads_[0][e];
    double remote = 0.0, squares = 0.0;
    int moves = 0;
    serve(e, where, count, picks, remote);
    for (int i = 0; i < count; ++i) {
      squares += picks[i] * picks[i];
      moves += !was_on(e, where[i]);
    }
    for (int k = 0; k < windows; ++k) {
      const double unit = unit_load_[static_cast<std::size_t>(k * experts + e)];
      for (int i = 0; i < count; ++i) {
        const double part = k == 0 ? picks[i] : now > 0.0 ? picks[i] / now : 1.0 / static_cast<double>(count);
        load[k * count + i] = static_cast<std::uint32_t>(static_cast<int>(std::lrint(part * unit)));
      }
    }
    const int cost = static_cast<int>(std::lrint(unit_remote_ * remote + unit_square_ * squares));
    return static_cast<std::uint32_t>(cost + (has_current_ ? moves * move_cost : 0));
  }

 private:
  std::size_t at(int e, int r) const { return static_cast<std::size_t>(e * ranks + r); }

  // Picks that each of the copies serves, nearest first and evenly among equals; remote: sum of picks * distance.
  void serve(int e, const int* where, int count, double* picks, double& remote) const {
    if (count == 1) {
      picks[0] = loads_[0][e];
      remote = remote_[at(e, where[0])];
      return;
    }
    for (int i = 0; i < count; ++i) picks[i] = 0.0;
    const double* traffic = by_expert_.data() + static_cast<std::size_t>(e) * static_cast<std::size_t>(sources);
    for (int s = 0; s < sources; ++s) {
      if (traffic[s] == 0.0) continue;
      const int* order = order_.data() + s * ranks;
      int nearest = order[where[0]], serving = 1, first = where[0];
      for (int i = 1; i < count; ++i) {
        const int here = order[where[i]];
        if (here == nearest) ++serving;
        if (here >= nearest) continue;
        nearest = here;
        serving = 1;
        first = where[i];
      }
      remote += traffic[s] * distance_[s * ranks + first];
      const double part = traffic[s] / static_cast<double>(serving);
      for (int i = 0; i < count; ++i)
        if (order[where[i]] == nearest) picks[i] += part;
    }
  }

  // This window, and earlier ones that saw picks.
  bool keep_windows(const Windows& given) {
    loads_.clear();
    mean_.clear();
    weight_.clear();
    double sum = 0.0;
    for (std::size_t k = 0; k < given.count; ++k) {
      double total = 0.0;
      for (int e = 0; e < experts; ++e) total += given.loads[k][e];
      if (total < 0x1p-64) {
        if (k == 0) return false;
        continue;
      }
      if (k == 0) total_ = total;
      loads_.push_back(given.loads[k]);
      mean_.push_back(total / static_cast<double>(ranks));
      weight_.push_back(given.weights[k]);
      sum += given.weights[k];
    }
    for (double& weight : weight_) weight /= sum;
    windows = static_cast<int>(loads_.size());
    rows = windows * ranks;
    return true;
  }

  void transpose(const Layer& layer) {
    const std::size_t n = static_cast<std::size_t>(experts), many = static_cast<std::size_t>(sources);
    by_expert_.resize(n * many);
    remote_.assign(n * static_cast<std::size_t>(ranks), 0.0);
    for (int s = 0; s < sources; ++s)
      for (int e = 0; e < experts; ++e) {
        const double picks = layer.traffic[s * experts + e];
        by_expert_[static_cast<std::size_t>(e) * many + static_cast<std::size_t>(s)] = picks;
        if (picks == 0.0) continue;
        for (int r = 0; r < ranks; ++r) remote_[at(e, r)] += picks * distance_[s * ranks + r];
      }
    picks_memory_.resize(static_cast<std::size_t>(ranks));
    picks_ = picks_memory_.data();
  }

  // order_[s][r]: how many different distances from source s are below that of rank r.
  void order_ranks(const Layer& layer) {
    order_.resize(static_cast<std::size_t>(sources * ranks));
    std::vector<double> sorted;
    for (int s = 0; s < sources; ++s) {
      const double* row = layer.distance + s * ranks;
      sorted.assign(row, row + ranks);
      std::sort(sorted.begin(), sorted.end());
      sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
      for (int r = 0; r < ranks; ++r)
        order_[static_cast<std::size_t>(s * ranks + r)] =
            static_cast<int>(std::lower_bound(sorted.begin(), sorted.end(), row[r]) - sorted.begin());
    }
  }

  void remember(const Layer& layer) {
    has_current_ = layer.current != nullptr;
    was_on_.assign(static_cast<std::size_t>(experts * ranks), 0);
    if (has_current_)
      for (int p = 0; p < slots(); ++p) was_on_[at(layer.current[p], p / size)] = 1;
  }

  // units_: the largest power of two up to 2^28 for which no move changes the objective by kMostUnits. A move changes
  // the copies of two experts: two costs, and in each window loads that at most move from the fullest rank possible.
  void scale(const Weights& weights, double drift) {
    beta_ = weights.beta;
    const double count = static_cast<double>(ranks), mean = mean_[0];
    const double square = weights.beta * (drift * drift) / (count * (mean * mean));
    double dearest = 0.0, heaviest_now = 0.0;
    for (const double remote : remote_) dearest = std::max(dearest, remote);
    for (int e = 0; e < experts; ++e) heaviest_now = std::max(heaviest_now, loads_[0][e]);
    const double move = has_current_ ? weights.gamma / static_cast<double>(experts) : 0.0;
    double top = 2.0 * (weights.alpha / total_ * dearest + square * (heaviest_now * heaviest_now) + move);
    for (std::size_t k = 0; k < loads_.size(); ++k) {
      std::vector<double> sorted(loads_[k], loads_[k] + experts);
      std::sort(sorted.begin(), sorted.end(), [](double a, double b) { return a > b; });
      double full = 0.0;
      for (int i = 0; i < size; ++i) full += sorted[static_cast<std::size_t>(i)] / mean_[k];
      const double heaviest = sorted[0] / mean_[k];
      top += weights.beta * weight_[k] / count * heaviest * (4.0 * full + 8.0 * heaviest);
    }
    int exponent = 28;
    while (exponent > -1000 && std::ldexp(top, exponent) >= kMostUnits) --exponent;
    units_ = std::ldexp(1.0, exponent);
    unit_remote_ = units_ * (weights.alpha / total_);
    unit_square_ = units_ * square;
    move_cost = static_cast<int>(std::lrint(units_ * move));
  }

  const double* distance_ = nullptr;
  bool has_current_ = false;
  double total_ = 0.0, beta_ = 0.0, units_ = 1.0, unit_remote_ = 0.0, unit_square_ = 0.0;
  std::vector<const double*> loads_;
  std::vector<double> mean_, weight_;       // [windows]
  std::vector<double> unit_load_;           // [windows, experts], of this window per pick, of earlier ones of all picks
  std::vector<double> by_expert_, remote_;         // [experts, sources], [experts, ranks]
  std::vector<int> order_, mean_units_;
  std::vector<std::uint8_t> was_on_;  // [experts, ranks]
  std::vector<double> picks_memory_;
  double* picks_ = nullptr;
};

}  // namespace gimbal::placement
