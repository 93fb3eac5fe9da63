// The lift of the lower bound where a few experts are heavier than half a rank (SPEC section 3.4).
//
// The dual lets a rank hold a fraction of a heavy expert. A rank that really holds one costs more: on rank r, with heavy
// members H and any slope n >= price_r (dn = n - price_r), at least
//
//   sum over H of (z_er + dn w_e) + the C - |H| lowest (z_fr + dn w_f) over light f - dn - (n^2 - price_r^2) / 4b
//
// above the dual's value, z the priced cost minus the lowest one. With |H| = 1, minimised over ranks, that is the lift
// of e. Lifts add up if for every rank and every |H| >= 2 some slope makes the above cover the lifts of any such H.
#pragma once

#include "placement/bound.hpp"

namespace gimbal::placement {

class Lift {
 public:
  Lift(const BoundLayer& y, const DualPrices& p, const Ban& ban, const std::vector<double>& lowest)
      : y_(y), p_(p), order_(static_cast<std::size_t>(y.experts)) {
    for (int e = 0; e < y.experts; ++e) order_[static_cast<std::size_t>(e)] = e;
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return load(a) > load(b); });
    excess_.resize(y.cost.size());
    for (int r = 0; r < y.ranks; ++r)
      for (int e = 0; e < y.experts; ++e) {
        const double priced = y.at(r, e) + price(r) * load(e) + p.offset[static_cast<std::size_t>(r)];
        const double above = std::max(0.0, priced - lowest[static_cast<std::size_t>(e)]);
        excess_[index(r, e)] = banned(ban, y, r, e) ? 1e9 : above;
      }
  }

  // The sum of the lifts of the `heavy` heaviest experts that may be added.
  double of(int heavy) {
    heavy_ = std::min(heavy, y_.experts);
    most_ = std::min(y_.size, heavy_);
    choose_slopes();
    tabulate();
    for (int r = 0; r < y_.ranks; ++r)
      while (total() > 0.0 && !covers(r)) drop_weakest();
    return total();
  }

 private:
  std::size_t index(int r, int e) const { return static_cast<std::size_t>(r * y_.experts + e); }
  double load(int e) const { return y_.load[static_cast<std::size_t>(e)]; }
  double price(int r) const { return p_.price[static_cast<std::size_t>(r)]; }
  int heavy_expert(int h) const { return order_[static_cast<std::size_t>(h)]; }
  double above(int r, int e, double dn) const { return excess_[index(r, e)] + dn * load(e); }

  double total() const {
    double sum = 0.0;
    for (const double lift : lifts_) sum += lift;
    return sum;
  }

  void drop_weakest() {
    double* weakest = nullptr;
    for (double& lift : lifts_)
      if (lift > 0.0 && (weakest == nullptr || lift < *weakest)) weakest = &lift;
    *weakest = 0.0;
  }

  // Slopes to try, as steps above the price: what a rank with so much more than the mean load would pay.
  void choose_slopes() {
    std::vector<double> over{0, .02, .05, .1, .15, .2, .3, .4, .6, .8, 1.2, 2, 4};
    for (int h = 0; h < heavy_ && h < 6; ++h)
      if (load(heavy_expert(h)) > 1.05)
        for (const double x : {-.05, .0, .05, .1}) over.push_back(load(heavy_expert(h)) - 1 + x);
    slopes_.clear();
    for (const double x : over) slopes_.push_back(2 * y_.b * x);
  }

  const double* light(int r, std::size_t u) const {
    return light_.data() + (static_cast<std::size_t>(r) * slopes_.size() + u) * static_cast<std::size_t>(y_.size + 1);
  }

  // What a slope costs on a rank, apart from its members.
  double constant(int r, std::size_t u) const {
    const double n = price(r) + slopes_[u];
    return -slopes_[u] - (n * n - price(r) * price(r)) / (4 * y_.b);
  }

  // light_[r][u][m]: the m lowest light members together. lifts_: as if each heavy expert were alone.
  void tabulate() {
    const std::size_t row = static_cast<std::size_t>(y_.size + 1);
    light_.assign(static_cast<std::size_t>(y_.ranks) * slopes_.size() * row, 0.0);
    lifts_.assign(static_cast<std::size_t>(heavy_), 1e300);
    std::vector<double> values;
    for (int r = 0; r < y_.ranks; ++r) {
      std::vector<double> best(lifts_.size(), 0.0);
      for (std::size_t u = 0; u < slopes_.size(); ++u) {
        values.clear();
        for (int i = heavy_; i < y_.experts; ++i) values.push_back(above(r, heavy_expert(i), slopes_[u]));
        const int known = std::min<int>(y_.size, static_cast<int>(values.size()));
        std::partial_sort(values.begin(), values.begin() + known, values.end());
        double* sums = light_.data() + (static_cast<std::size_t>(r) * slopes_.size() + u) * row;
        for (int i = 0; i < y_.size; ++i) sums[i + 1] = sums[i] + (i < known ? values[static_cast<std::size_t>(i)] : 0);
        for (int h = 0; h < heavy_; ++h) {
          const double here = above(r, heavy_expert(h), slopes_[u]) + constant(r, u) + sums[y_.size - 1];
          best[static_cast<std::size_t>(h)] = std::max(best[static_cast<std::size_t>(h)], here);
        }
      }
      for (std::size_t h = 0; h < lifts_.size(); ++h) lifts_[h] = std::min(lifts_[h], best[h]);
    }
  }

  // Whether on rank r any two or more heavy experts together cost at least their lifts.
  bool covers(int r) const {
    std::vector<char> covered(static_cast<std::size_t>(most_ + 1), 0);
    std::vector<double> left(static_cast<std::size_t>(heavy_));
    for (std::size_t u = 0; u < slopes_.size(); ++u) {
      for (int h = 0; h < heavy_; ++h)
        left[static_cast<std::size_t>(h)] =
            above(r, heavy_expert(h), slopes_[u]) - lifts_[static_cast<std::size_t>(h)];
      std::partial_sort(left.begin(), left.begin() + most_, left.end());
      double sum = constant(r, u);
      for (int k = 1; k <= most_; ++k) {
        sum += left[static_cast<std::size_t>(k - 1)];
        if (sum + light(r, u)[y_.size - k] >= 0.0) covered[static_cast<std::size_t>(k)] = 1;
      }
    }
    for (int k = 2; k <= most_; ++k)
      if (covered[static_cast<std::size_t>(k)] == 0) return false;
    return true;
  }

  const BoundLayer& y_;
  const DualPrices& p_;
  std::vector<int> order_;  // experts, heaviest first
  std::vector<double> excess_, slopes_, light_, lifts_;
  int heavy_ = 0, most_ = 0;
};

// The best of the lifts of 1, 2, 4 ... 32 heavy experts; 0 where balance costs nothing.
inline double best_lift(const BoundLayer& y, const DualPrices& p, const Ban& ban, const std::vector<double>& lowest) {
  if (y.b <= 0.0) return 0.0;
  Lift lift(y, p, ban, lowest);
  double best = 0.0;
  for (int heavy = 1; heavy <= 32 && heavy <= y.experts; heavy *= 2) best = std::max(best, lift.of(heavy));
  return best;
}

}  // namespace gimbal::placement
