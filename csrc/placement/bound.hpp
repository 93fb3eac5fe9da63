// Lower bound on the cost of one layer, one copy per expert (SPEC section 3.4): Lagrangian dual at any prices.
//
//   sum_e min_r (c_er + price_r w_e + offset_r) - C sum_r offset_r - sum_r (price_r + price_r^2 / 4b)
//
// with c the linear cost, w loads in units of the mean rank load and b = beta/R. Float32 finds the prices, the value at
// them is summed in float64, so it is a bound whatever the prices are.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "placement/prices.cuh"

namespace gimbal::placement {

// Cost of a rank that a branch forbids; beyond any real one after division by `unit`.
constexpr double kForbidden = 1e6;

struct BoundLayer {
  int experts, ranks, size;
  double b;                     // beta/R
  double unit;                  // largest cost; what the ascent divides by
  std::vector<double> cost;     // [ranks, experts]
  std::vector<double> load;     // [experts]
  std::vector<int> rank_class;  // [ranks]

  double at(int r, int e) const { return cost[static_cast<std::size_t>(r * experts + e)]; }
};

struct DualPrices {
  std::vector<double> price, offset;  // [ranks]
};

// Which ranks an expert may not use; empty: none is forbidden. [ranks, experts]
using Ban = std::vector<std::uint8_t>;

inline bool banned(const Ban& ban, const BoundLayer& y, int r, int e) {
  return !ban.empty() && ban[static_cast<std::size_t>(r * y.experts + e)] != 0;
}

// Softmin dual ascent with momentum, in float32 and units of `unit`.
class Ascent {
 public:
  // `start` null: from prices of 0 and a temperature of the mean spread of the costs; else from there, 20 times cooler.
  DualPrices run(const BoundLayer& y, const Ban& ban, int steps, const DualPrices* start) {
    const int n = y.experts, stride = round_up(n, 16);
    cost_.assign(static_cast<std::size_t>(y.ranks * stride), 0.0f);
    work_.resize(cost_.size());
    load_.assign(static_cast<std::size_t>(stride), 0.0f);
    lowest_.resize(load_.size());
    sum_.resize(load_.size());
    double spread = 0.0;
    for (int e = 0; e < n; ++e) {
      load_[static_cast<std::size_t>(e)] = static_cast<float>(y.load[static_cast<std::size_t>(e)]);
      double low = kForbidden, high = 0.0;
      for (int r = 0; r < y.ranks; ++r) {
        const double here = banned(ban, y, r, e) ? kForbidden : y.at(r, e) / y.unit;
        cost_[static_cast<std::size_t>(r * stride + e)] = static_cast<float>(here);
        low = std::min(low, here);
        if (here < kForbidden) high = std::max(high, here);
      }
      spread += std::max(0.0, high - low);
    }
    const std::size_t ranks = static_cast<std::size_t>(y.ranks);
    DualPrices p = start != nullptr ? *start : DualPrices{std::vector<double>(ranks), std::vector<double>(ranks)};
    for (double& x : p.price) x /= y.unit;
    for (double& x : p.offset) x /= y.unit;
    climb(y, p, stride, steps, (spread / n + 1e-9) * (start != nullptr ? 0.05 : 1.0));
    for (double& x : p.price) x *= y.unit;
    for (double& x : p.offset) x *= y.unit;
    return p;
  }

 private:
  void climb(const BoundLayer& y, DualPrices& p, int stride, int steps, double temperature) {
    const double curvature = y.b > 0.0 ? y.unit / (2.0 * y.b) : 0.0;
    const double limit = y.b > 0.0 ? y.ranks / curvature : 0.0;
    const double per_rank = static_cast<double>(y.experts) / y.ranks;
    const double cooling = std::pow(1e-3, 1.0 / steps);
    std::vector<double> price_mean(p.price.size()), offset_mean(p.price.size());
    for (int step = 0; step < steps; ++step, temperature *= cooling) {
      choose(y, p, stride, static_cast<float>(1.4426950408889634 / temperature));
      for (int r = 0; r < y.ranks; ++r) {
        const float* row = work_.data() + r * stride;
        double load = 0.0, count = 0.0;
        for (int e = 0; e < y.experts; ++e) {
          const double share = row[e] * sum_[static_cast<std::size_t>(e)];
          count += share;
          load += share * load_[static_cast<std::size_t>(e)];
        }
        const std::size_t i = static_cast<std::size_t>(r);
        const double over = (load - 1.0 - p.price[i] * curvature) * (per_rank / y.size);
        price_mean[i] = 0.9 * price_mean[i] + 0.1 * over;
        offset_mean[i] = 0.9 * offset_mean[i] + 0.1 * (count - y.size) / y.size;
        p.price[i] = std::clamp(p.price[i] + 2.1 * temperature * per_rank * price_mean[i], -limit, limit);
        p.offset[i] += 2.1 * temperature * offset_mean[i];
      }
    }
  }

  // work_: exp of how much dearer each rank is than the cheapest; sum_: one over its sum over the ranks.
  void choose(const BoundLayer& y, const DualPrices& p, int stride, float inverse) {
    std::fill(lowest_.begin(), lowest_.end(), 1e30f);
    std::fill(sum_.begin(), sum_.end(), 0.0f);
    const float* load = load_.data();
    float *lowest = lowest_.data(), *sum = sum_.data();
    for (int r = 0; r < y.ranks; ++r) {
      const float price = static_cast<float>(p.price[static_cast<std::size_t>(r)]);
      const float offset = static_cast<float>(p.offset[static_cast<std::size_t>(r)]);
      const float* cost = cost_.data() + r * stride;
      float* work = work_.data() + r * stride;
      for (int e = 0; e < stride; ++e) {
        work[e] = cost[e] + offset + price * load[e];
        lowest[e] = work[e] < lowest[e] ? work[e] : lowest[e];
      }
    }
    for (int r = 0; r < y.ranks; ++r) {
      float* work = work_.data() + r * stride;
      for (int e = 0; e < stride; ++e) {
        float x = (lowest[e] - work[e]) * inverse;
        x = x > -100.0f ? x : -100.0f;
        work[e] = exp2_rounded(x);
        sum[e] += work[e];
      }
    }
    for (int e = 0; e < stride; ++e) sum[e] = 1.0f / sum[e];
  }

  std::vector<float> cost_, work_, load_, lowest_, sum_;
};

// The bound at given prices, a hair below it for the rounding of the sums; lowest: priced cost of each expert, written.
inline double dual_value(const BoundLayer& y, const DualPrices& p, const Ban& ban, std::vector<double>& lowest) {
  lowest.assign(static_cast<std::size_t>(y.experts), 1e300);
  double total = 0.0, size = 0.0;
  for (int r = 0; r < y.ranks; ++r) {
    const std::size_t i = static_cast<std::size_t>(r);
    for (int e = 0; e < y.experts; ++e) {
      if (banned(ban, y, r, e)) continue;
      double& low = lowest[static_cast<std::size_t>(e)];
      low = std::min(low, y.at(r, e) + p.price[i] * y.load[static_cast<std::size_t>(e)] + p.offset[i]);
    }
    const double curve = y.b > 0.0 ? p.price[i] * p.price[i] / (4.0 * y.b) : 0.0;
    total -= y.size * p.offset[i] + p.price[i] + curve;
    size += y.size * std::abs(p.offset[i]) + std::abs(p.price[i]) + curve;
  }
  for (const double low : lowest) {
    total += low;
    size += std::abs(low);
  }
  return total - 1e-13 * size;
}

}  // namespace gimbal::placement
