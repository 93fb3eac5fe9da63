// Shares of the picks of every (source, expert) over the copies of the expert (SPEC section 4).
//
// Specified by gimbal_kernels/placement/water_fill.py, which has the derivation: the same float64 operations in the
// same order, no fused multiply-add.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "placement/layer.hpp"
#include "placement/prepare.hpp"

namespace gimbal::placement {

// One layer. Loads are kept per window; what a source sends to a copy is a part of all picks of the expert, which every
// window scales by its own number of picks.
class WaterFill {
 public:
  // False when the layer has no traffic in this window. `slots`: [slots], every expert at least once.
  bool build(const Layer& layer, const std::int32_t* slots, const Windows& windows, const Weights& weights,
             double drift) {
    layer_ = layer;
    find_copies(slots);
    const bool some = weigh(windows, weights, drift);
    start_nearest();
    return some;
  }

  // Rounds over all blocks, up to `rounds`; ends after one that moves less than `still` of all picks.
  void run(int rounds, double still) {
    for (int round = 0; round < rounds; ++round) {
      double moved = 0.0;
      for (std::size_t e = 0; e < layer_.shape.experts; ++e) moved += fill_expert(e);
      if (moved <= still * total_) return;
    }
  }

  // shares: [sources, slots], evenly among slots of one rank
  void write(double* shares) const {
    for (std::size_t s = 0; s < layer_.shape.sources; ++s)
      for (std::size_t e = 0; e < layer_.shape.experts; ++e)
        for (std::size_t i = first_[e]; i < first_[e + 1]; ++i)
          for (const std::size_t p : copy_[i].slots) {
            const double all = share_[s * copy_.size() + i];
            shares[s * layer_.shape.slots() + p] = all / static_cast<double>(copy_[i].slots.size());
          }
  }

 private:
  struct Copy {
    std::size_t rank;
    std::vector<std::size_t> slots;
  };

  // The copies of each expert by ascending rank: copy_[first_[e]] to copy_[first_[e + 1]].
  void find_copies(const std::int32_t* slots) {
    const Shape& shape = layer_.shape;
    std::vector<std::vector<std::size_t>> of(shape.experts);
    for (std::size_t p = 0; p < shape.slots(); ++p) of[static_cast<std::size_t>(slots[p])].push_back(p);
    copy_.clear();
    first_.assign(1, 0);
    for (const std::vector<std::size_t>& held : of) {
      for (const std::size_t p : held) {
        const std::size_t rank = p / shape.slots_per_rank;
        if (copy_.size() == first_.back() || copy_.back().rank != rank) copy_.push_back({rank, {}});
        copy_.back().slots.push_back(p);
      }
      first_.push_back(copy_.size());
    }
  }

  bool weigh(const Windows& windows, const Weights& weights, double drift) {
    const Shape& shape = layer_.shape;
    const double ranks = static_cast<double>(shape.ranks);
    loads_.clear();
    curve_.clear();
    std::vector<double> weight;
    double sum = 0.0;
    total_ = 0.0;
    for (std::size_t k = 0; k < windows.count; ++k) {
      double picks = 0.0;
      for (std::size_t e = 0; e < shape.experts; ++e) picks += windows.loads[k][e];
      if (picks < 0x1p-64) {
        if (k == 0) return false;
        continue;
      }
      if (k == 0) total_ = picks;
      const double mean = picks / ranks;
      loads_.push_back(windows.loads[k]);
      curve_.push_back(weights.beta / (ranks * (mean * mean)));
      weight.push_back(windows.weights[k]);
      sum += windows.weights[k];
    }
    per_pick_ = weights.alpha / total_;
    square_ = curve_[0] * (drift * drift);
    for (std::size_t k = 0; k < weight.size(); ++k) curve_[k] *= weight[k] / sum;
    return true;
  }

  // Even shares among the nearest slots, and the loads that they make. An expert without picks in this window has its
  // earlier ones on all its slots evenly.
  void start_nearest() {
    const Shape& shape = layer_.shape;
    share_.assign(shape.sources * copy_.size(), 0.0);
    part_.assign(copy_.size(), 0.0);
    rank_load_.assign(loads_.size() * shape.ranks, 0.0);
    for (std::size_t e = 0; e < shape.experts; ++e) {
      if (!loads_.empty() && loads_[0][e] <= 0.0) spread_evenly(e);
      for (std::size_t s = 0; s < shape.sources; ++s) {
        const double* distance = layer_.distance + s * shape.ranks;
        double nearest = distance[copy_[first_[e]].rank];
        for (std::size_t i = first_[e]; i < first_[e + 1]; ++i) nearest = std::min(nearest, distance[copy_[i].rank]);
        double serving = 0.0;
        for (std::size_t i = first_[e]; i < first_[e + 1]; ++i)
          if (distance[copy_[i].rank] == nearest) serving += static_cast<double>(copy_[i].slots.size());
        for (std::size_t i = first_[e]; i < first_[e + 1]; ++i) {
          if (distance[copy_[i].rank] != nearest) continue;
          double& share = share_[s * copy_.size() + i];
          share = static_cast<double>(copy_[i].slots.size()) / serving;
          shift(e, i, amount(s, e) * share);
        }
      }
    }
  }

  void spread_evenly(std::size_t e) {
    double all = 0.0;
    for (std::size_t i = first_[e]; i < first_[e + 1]; ++i) all += static_cast<double>(copy_[i].slots.size());
    for (std::size_t i = first_[e]; i < first_[e + 1]; ++i)
      shift(e, i, static_cast<double>(copy_[i].slots.size()) / all);
  }

  // The part of an expert's picks that come from one source.
  double amount(std::size_t s, std::size_t e) const {
    const double picks = layer_.traffic[s * layer_.shape.experts + e];
    return picks > 0.0 && !loads_.empty() ? picks / loads_[0][e] : 0.0;
  }

  // Sends `part` more of e's picks to copy i.
  void shift(std::size_t e, std::size_t i, double part) {
    part_[i] += part;
    for (std::size_t k = 0; k < loads_.size(); ++k)
      rank_load_[k * layer_.shape.ranks + copy_[i].rank] += loads_[k][e] * part;
  }

  // One block per source; returns the picks that changed their copy.
  double fill_expert(std::size_t e) {
    const double picks = loads_[0][e];
    if (first_[e + 1] - first_[e] < 2 || picks <= 0.0) return 0.0;
    double curvature = square_ * (picks * picks);
    for (std::size_t k = 0; k < loads_.size(); ++k) curvature += curve_[k] * (loads_[k][e] * loads_[k][e]);
    if (curvature <= 0.0) return 0.0;
    double moved = 0.0;
    for (std::size_t s = 0; s < layer_.shape.sources; ++s)
      if (amount(s, e) > 0.0) moved += fill_block(s, e, 2.0 * curvature);
    return moved * picks;
  }

  double fill_block(std::size_t s, std::size_t e, double curvature) {
    const std::size_t begin = first_[e], count = first_[e + 1] - begin;
    const double picks = loads_[0][e], send = amount(s, e);
    double* share = share_.data() + s * copy_.size() + begin;
    slope_.resize(count);
    order_.resize(count);
    for (std::size_t i = 0; i < count; ++i) {
      const Copy& copy = copy_[begin + i];
      const double now = send * share[i];
      double slope = per_pick_ * picks * layer_.distance[s * layer_.shape.ranks + copy.rank];
      for (std::size_t k = 0; k < loads_.size(); ++k) {
        const double others = rank_load_[k * layer_.shape.ranks + copy.rank] - loads_[k][e] * now;
        slope += 2.0 * curve_[k] * loads_[k][e] * others;
      }
      slope_[i] = slope + 2.0 * square_ * (picks * picks) * (part_[begin + i] - now);
      order_[i] = i;
    }
    std::stable_sort(order_.begin(), order_.end(), [&](std::size_t a, std::size_t b) { return slope_[a] < slope_[b]; });
    double sum = 0.0, level = 0.0;
    std::size_t open = 0;
    do {
      sum += slope_[order_[open++]];
      level = (sum + curvature * send) / static_cast<double>(open);
    } while (open < count && level > slope_[order_[open]]);
    return pour(s, e, share, open, level);
  }

  // The cheapest `open` copies take what lifts their slopes to `level`.
  double pour(std::size_t s, std::size_t e, double* share, std::size_t open, double level) {
    const std::size_t begin = first_[e], count = first_[e + 1] - begin;
    const double send = amount(s, e);
    double all = 0.0, moved = 0.0;
    poured_.assign(count, 0.0);
    for (std::size_t n = 0; n < open; ++n) {
      const double depth = std::max(0.0, level - slope_[order_[n]]);
      poured_[order_[n]] = depth;
      all += depth;
    }
    if (all <= 0.0) return 0.0;
    for (std::size_t i = 0; i < count; ++i) {
      const double next = poured_[i] / all, part = send * next - send * share[i];
      share[i] = next;
      shift(e, begin + i, part);
      moved += std::abs(part);
    }
    return moved;
  }

  Layer layer_{};
  double total_ = 0.0, per_pick_ = 0.0, square_ = 0.0;
  std::vector<const double*> loads_;  // [windows] -> [experts]
  std::vector<double> curve_;         // [windows] cost of a squared pick
  std::vector<Copy> copy_;
  std::vector<std::size_t> first_;
  std::vector<double> share_;      // [sources, copies]
  std::vector<double> part_;       // [copies] of the expert's picks
  std::vector<double> rank_load_;  // [windows, ranks]
  std::vector<double> slope_, poured_;
  std::vector<std::size_t> order_;
};

}  // namespace gimbal::placement
