// From picks, distances and weights to the integers that the portfolio works in (SPEC section 3.3).
//
// Specified by gimbal_kernels/placement/portfolio.py: float64, sums in ascending order, no fused multiply-add.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "placement/bound.hpp"
#include "placement/layer.hpp"
#include "placement/search.cuh"

namespace gimbal::placement {

// Weight of balance in each stage, in units of beta: a geometric series from 0.2 to 1.
constexpr double kStageWeight[kStages] = {0.2, 0.34199518933533946, 0.5848035476425731, 1.0};
// Temperature of the prices from step to step: 1e-3^(1/80).
constexpr double kCooling = 0.9172759353897796;
// Every change of the objective stays below this many units, and 2^31 is where 32 bits end.
constexpr double kMostUnits = 536866816.0;  // 2^29 - 2^12

struct Windows {
  std::size_t count;            // this window and those before it
  const double* const* loads;   // [count] -> [experts] picks of each expert in this layer
  const double* weights;        // [count]
};

// A layer in integers; `view` points into the vectors.
class Prepared {
 public:
  // False when the layer has no traffic in this window: there is nothing to optimise.
  bool build(const Layer& layer, const Windows& windows, const Weights& weights, int padded_ranks) {
    if (!sum_loads(layer.shape, windows)) return false;
    find_classes(layer);
    sum_comm(layer, weights.alpha);
    scale(layer.shape, weights);
    round_costs(layer, weights, padded_ranks);
    round_loads(layer.shape, weights.beta);
    cool(layer.shape, weights.beta);
    return true;
  }

  const View& view() const { return view_; }

  // The same layer in float64, for the lower bound. With several windows the loads are their weighted mean: a square of
  // a mean is at most the mean of the squares, so a bound for it is one for the layer.
  BoundLayer for_bound(const Shape& shape, const Weights& weights, bool placed) const {
    BoundLayer out{view_.experts, view_.ranks, view_.size, weights.beta / static_cast<double>(shape.ranks), 0.0, {}, {},
                   rank_class_};
    for (int r = 0; r < view_.ranks; ++r)
      for (int e = 0; e < view_.experts; ++e) {
        const bool moves = placed && home_[static_cast<std::size_t>(e)] != r;
        const std::size_t k = static_cast<std::size_t>(rank_class_[static_cast<std::size_t>(r)]);
        const double move = moves ? weights.gamma / static_cast<double>(shape.experts) : 0.0;
        out.cost.push_back(comm_[k * shape.experts + static_cast<std::size_t>(e)] + move);
        out.unit = std::max(out.unit, out.cost.back());
      }
    for (std::size_t e = 0; e < shape.experts; ++e) {
      double load = 0.0;
      for (std::size_t k = 0; k < loads_.size(); ++k) load += weight_[k] * (loads_[k][e] / mean_[k]);
      out.load.push_back(load);
    }
    if (out.unit <= 0.0) out.unit = out.b > 0.0 ? out.b : 1.0;
    return out;
  }

  // The imbalance term of every placement when each rank has one slot; b: beta/R.
  double imbalance_of_single_slots(double b) const {
    double total = 0.0;
    for (std::size_t k = 0; k < loads_.size(); ++k)
      for (int e = 0; e < view_.experts; ++e) {
        const double over = loads_[k][e] / mean_[k] - 1.0;
        total += b * weight_[k] * (over * over);
      }
    return total * (1.0 - 1e-13);
  }

  // Integer units of the search per unit of J.
  double units() const { return units_; }

 private:
  bool sum_loads(const Shape& shape, const Windows& windows) {
    view_ = View{};
    view_.experts = static_cast<int>(shape.experts);
    view_.ranks = static_cast<int>(shape.ranks);
    view_.size = static_cast<int>(shape.slots_per_rank);
    view_.stride = round_up(view_.experts, 16);
    loads_.clear();
    mean_.clear();
    weight_.clear();
    double sum = 0.0;
    for (std::size_t k = 0; k < windows.count; ++k) {
      double total = 0.0;
      for (std::size_t e = 0; e < shape.experts; ++e) total += windows.loads[k][e];
      if (total < 0x1p-64) {
        if (k == 0) return false;
        continue;
      }
      if (k == 0) total_ = total;
      loads_.push_back(windows.loads[k]);
      mean_.push_back(total / static_cast<double>(shape.ranks));
      weight_.push_back(windows.weights[k]);
      sum += windows.weights[k];
    }
    for (double& weight : weight_) weight /= sum;
    view_.windows = static_cast<int>(loads_.size());
    return true;
  }

  // Ranks with the same distance to every source, in the order in which they first occur.
  void find_classes(const Layer& layer) {
    const Shape& shape = layer.shape;
    std::vector<std::size_t>& first = first_of_class_;
    first.clear();
    rank_class_.assign(shape.ranks, 0);
    for (std::size_t r = 0; r < shape.ranks; ++r) {
      std::size_t k = 0;
      for (; k < first.size(); ++k) {
        bool same = true;
        for (std::size_t s = 0; s < shape.sources && same; ++s)
          same = layer.distance[s * shape.ranks + r] == layer.distance[s * shape.ranks + first[k]];
        if (same) break;
      }
      if (k == first.size()) first.push_back(r);
      rank_class_[r] = static_cast<int>(k);
    }
    view_.classes = static_cast<int>(first.size());
  }

  // comm_[k][e] = alpha/T * sum over sources of distance * picks
  void sum_comm(const Layer& layer, double alpha) {
    const Shape& shape = layer.shape;
    comm_.assign(first_of_class_.size() * shape.experts, 0.0);
    for (std::size_t k = 0; k < first_of_class_.size(); ++k)
      for (std::size_t s = 0; s < shape.sources; ++s) {
        const double each = layer.distance[s * shape.ranks + first_of_class_[k]] * (alpha / total_);
        if (each == 0.0) continue;
        const double* picks = layer.traffic + s * shape.experts;
        double* out = comm_.data() + k * shape.experts;
        for (std::size_t e = 0; e < shape.experts; ++e) out[e] += each * picks[e];
      }
  }

  // units_: the largest power of two up to 2^28 for which no swap changes the objective by kMostUnits. A swap changes
  // two costs, and in each window at most (heaviest expert) * (heaviest expert + `size` heaviest) * 2 beta/(R mu^2).
  void scale(const Shape& shape, const Weights& weights) {
    double dearest = 0.0;
    for (const double cost : comm_) dearest = std::max(dearest, cost);
    double top = 2.0 * (dearest + weights.gamma / static_cast<double>(shape.experts));
    for (std::size_t k = 0; k < loads_.size(); ++k) {
      std::vector<double> sorted(loads_[k], loads_[k] + shape.experts);
      std::sort(sorted.begin(), sorted.end(), [](double a, double b) { return a > b; });
      double full = 0.0;
      for (std::size_t i = 0; i < shape.slots_per_rank; ++i) full += sorted[i] / mean_[k];
      const double heaviest = sorted[0] / mean_[k];
      top += 2.0 * (weights.beta * weight_[k]) / static_cast<double>(shape.ranks) * heaviest * (heaviest + full);
    }
    int exponent = 28;
    while (exponent > -1000 && std::ldexp(top, exponent) >= kMostUnits) --exponent;
    units_ = std::ldexp(1.0, exponent);
  }

  void round_costs(const Layer& layer, const Weights& weights, int padded_ranks) {
    const std::size_t experts = layer.shape.experts, stride = static_cast<std::size_t>(view_.stride);
    const std::size_t classes = first_of_class_.size();
    const bool placed = layer.current != nullptr;
    view_.move_cost = placed ? to_int(units_ * weights.gamma / static_cast<double>(experts)) : 0;
    comm_units_.assign(classes * stride, 0);
    for (std::size_t k = 0; k < classes; ++k)
      for (std::size_t e = 0; e < experts; ++e)
        comm_units_[k * stride + e] = to_int(comm_[k * experts + e] * units_);
    home_.assign(stride, -1);
    if (placed)
      for (std::size_t p = 0; p < layer.shape.slots(); ++p)
        home_[static_cast<std::size_t>(layer.current[p])] = static_cast<int>(p / layer.shape.slots_per_rank);
    view_.rank_class = rank_class_.data();
    view_.comm = comm_units_.data();
    view_.home = home_.data();
    if (padded_ranks == 0) return;
    const std::size_t wide = static_cast<std::size_t>(padded_ranks);
    cost_rows_.assign(stride * wide, 0);
    for (int e = 0; e < view_.experts; ++e)
      for (int r = 0; r < view_.ranks; ++r)
        cost_rows_[static_cast<std::size_t>(e) * wide + static_cast<std::size_t>(r)] = cost_on(view_, e, r);
    view_.cost_rows = cost_rows_.data();
  }

  void round_loads(const Shape& shape, double beta) {
    const std::size_t stride = static_cast<std::size_t>(view_.stride), windows = loads_.size();
    load_units_.assign(kStages * windows * stride, 0);
    for (std::size_t stage = 0; stage < kStages; ++stage)
      for (std::size_t k = 0; k < windows; ++k) {
        const double balance = beta * kStageWeight[stage] * weight_[k];
        const double each = std::sqrt(2.0 * balance * units_ / static_cast<double>(shape.ranks)) / mean_[k];
        int* out = load_units_.data() + (stage * windows + k) * stride;
        for (std::size_t e = 0; e < shape.experts; ++e) out[e] = to_int(loads_[k][e] * each);
      }
    view_.load = load_units_.data();
  }

  // What the prices need: costs in units of 2^-28 of the largest, so that float32 holds them whatever the weights are.
  void cool(const Shape& shape, double beta) {
    const double ranks = static_cast<double>(shape.ranks), experts = static_cast<double>(shape.experts);
    share_.assign(static_cast<std::size_t>(view_.stride), 0.0f);
    for (std::size_t e = 0; e < shape.experts; ++e) {
      double share = 0.0;
      for (std::size_t k = 0; k < loads_.size(); ++k) share += weight_[k] * (loads_[k][e] / mean_[k]);
      share_[e] = static_cast<float>(share);
    }
    long long range = 0;
    for (int e = 0; e < view_.experts; ++e) {
      int low = kNever, high = 0;
      for (int r = 0; r < view_.ranks; ++r) {
        low = std::min(low, cost_on(view_, e, r));
        high = std::max(high, cost_on(view_, e, r));
      }
      range += high - low;
    }
    double temperature = static_cast<double>(range) * 0x1p-28 / experts + 1e-9;
    cooling_.resize(kPriceSteps);
    for (float& step : cooling_) {
      step = static_cast<float>(temperature);
      temperature *= kCooling;
    }
    const double curvature = std::min(1e30, ranks / (2.0 * (beta * units_ * 0x1p-28)));  // 1e30 when beta is 0
    view_.share = share_.data();
    view_.cooling = cooling_.data();
    view_.unit = 0x1p-28f;
    view_.curvature = static_cast<float>(curvature);
    view_.price_limit = static_cast<float>(ranks / curvature);
    view_.share_step = static_cast<float>(experts / ranks);
    view_.count_step = static_cast<float>(experts / ranks / static_cast<double>(shape.slots_per_rank));
  }

  static int to_int(double value) { return static_cast<int>(std::lrint(value)); }

  View view_{};
  double total_ = 0.0, units_ = 1.0;
  std::vector<const double*> loads_;
  std::vector<double> mean_, weight_, comm_;
  std::vector<std::size_t> first_of_class_;
  std::vector<int> rank_class_, comm_units_, home_, cost_rows_, load_units_;
  std::vector<float> share_, cooling_;
};

}  // namespace gimbal::placement
