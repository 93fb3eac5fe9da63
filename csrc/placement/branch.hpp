// Best-first branching on the lower bound: experts that the prices leave undecided are pinned to a rank, or on more than
// eight ranks to a class of equally distant ones (SPEC section 3.4). The lowest bound of the open nodes is a bound on the
// layer whenever the search stops.
#pragma once

#include <memory>
#include <queue>

#include "placement/lift.hpp"

namespace gimbal::placement {

constexpr int kRootSteps = 400;
constexpr int kNodeSteps = 60;

class Branching {
 public:
  // upper: the cost of a placement that exists; lift: whether nodes are lifted.
  Branching(const BoundLayer& y, bool lift, double upper) : y_(y), lift_(lift), upper_(upper) {}

  // A lower bound after opening up to `nodes` nodes below the root; 0: the root alone.
  double run(int nodes) {
    add(Ban{}, nullptr);
    double bound = open_.top()->bound;
    while (nodes > 0 && !open_.empty()) {
      const std::shared_ptr<Node> node = open_.top();
      bound = node->bound;
      if (node->expert < 0 || bound >= upper_) break;
      open_.pop();
      for (const int group : groups(*node)) {
        Ban ban = pinned(*node, group);
        if (y_.ranks <= 8 && !fill_up(ban)) continue;  // no placement is like that
        add(std::move(ban), node.get());
        --nodes;
      }
      if (!open_.empty()) bound = open_.top()->bound;
    }
    return std::min(bound, upper_);
  }

 private:
  struct Node {
    double bound;
    Ban ban;
    DualPrices prices;
    int expert;  // to branch on, -1: none is left
  };
  struct Worse {
    bool operator()(const std::shared_ptr<Node>& a, const std::shared_ptr<Node>& b) const { return a->bound > b->bound; }
  };

  // Ranks of one group are not told apart.
  int group_of(int r) const { return y_.ranks <= 8 ? r : y_.rank_class[static_cast<std::size_t>(r)]; }

  std::vector<int> groups(const Node& node) const {
    std::vector<int> found;
    for (int r = 0; r < y_.ranks; ++r)
      if (!banned(node.ban, y_, r, node.expert)) found.push_back(group_of(r));
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

  Ban pinned(const Node& node, int group) const {
    Ban ban = node.ban.empty() ? Ban(y_.cost.size(), 0) : node.ban;
    for (int r = 0; r < y_.ranks; ++r)
      if (group_of(r) != group) ban[static_cast<std::size_t>(r * y_.experts + node.expert)] = 1;
    return ban;
  }

  // The only rank left to an expert, or -1.
  int only_rank(const Ban& ban, int e) const {
    int found = -1;
    for (int r = 0; r < y_.ranks; ++r) {
      if (banned(ban, y_, r, e)) continue;
      if (found >= 0) return -1;
      found = r;
    }
    return found;
  }

  // Closes ranks that are full of pinned experts to all others; false when some rank or expert cannot be served.
  bool fill_up(Ban& ban) const {
    for (bool changed = true; changed;) {
      changed = false;
      std::vector<int> pinned(static_cast<std::size_t>(y_.ranks), 0), only(static_cast<std::size_t>(y_.experts));
      for (int e = 0; e < y_.experts; ++e) {
        only[static_cast<std::size_t>(e)] = only_rank(ban, e);
        if (only[static_cast<std::size_t>(e)] >= 0) ++pinned[static_cast<std::size_t>(only[static_cast<std::size_t>(e)])];
      }
      for (int r = 0; r < y_.ranks; ++r) {
        if (pinned[static_cast<std::size_t>(r)] > y_.size) return false;
        if (pinned[static_cast<std::size_t>(r)] < y_.size) continue;
        for (int e = 0; e < y_.experts; ++e) {
          if (only[static_cast<std::size_t>(e)] == r || banned(ban, y_, r, e)) continue;
          ban[static_cast<std::size_t>(r * y_.experts + e)] = 1;
          changed = true;
        }
      }
    }
    for (int e = 0; e < y_.experts; ++e) {
      int open = 0;
      for (int r = 0; r < y_.ranks; ++r) open += !banned(ban, y_, r, e);
      if (open == 0) return false;
    }
    return true;
  }

  // Cost when every expert has one rank left, a hair below for rounding; negative when some have more.
  double settled_cost(const Ban& ban) const {
    std::vector<double> rank_load(static_cast<std::size_t>(y_.ranks), 0.0);
    double cost = 0.0;
    for (int e = 0; e < y_.experts; ++e) {
      const int r = ban.empty() ? -1 : only_rank(ban, e);
      if (r < 0) return -1.0;
      cost += y_.at(r, e);
      rank_load[static_cast<std::size_t>(r)] += y_.load[static_cast<std::size_t>(e)];
    }
    for (const double load : rank_load) cost += y_.b * (load - 1.0) * (load - 1.0);
    return cost * (1.0 - 1e-12);
  }

  void add(Ban ban, const Node* parent) {
    auto node = std::make_shared<Node>();
    node->ban = std::move(ban);
    const int steps = parent == nullptr ? kRootSteps : kNodeSteps;
    node->prices = ascent_.run(y_, node->ban, steps, parent == nullptr ? nullptr : &parent->prices);
    node->bound = dual_value(y_, node->prices, node->ban, lowest_);
    if (lift_) node->bound += best_lift(y_, node->prices, node->ban, lowest_);
    if (parent != nullptr) node->bound = std::max({node->bound, parent->bound, settled_cost(node->ban)});
    node->expert = undecided(*node);
    open_.push(std::move(node));
  }

  // The expert whose load is largest against the difference between its two cheapest groups.
  int undecided(const Node& node) const {
    int chosen = -1;
    double most = -1.0;
    for (int e = 0; e < y_.experts; ++e) {
      double first = 1e300, second = 1e300;
      int cheapest = -1;
      for (int r = 0; r < y_.ranks; ++r) {
        if (banned(node.ban, y_, r, e)) continue;
        const std::size_t i = static_cast<std::size_t>(r);
        const double here =
            y_.at(r, e) + node.prices.price[i] * y_.load[static_cast<std::size_t>(e)] + node.prices.offset[i];
        if (here < first) {
          if (group_of(r) != cheapest) second = first;
          first = here;
          cheapest = group_of(r);
        } else if (here < second && group_of(r) != cheapest) {
          second = here;
        }
      }
      if (second > 1e299) continue;  // one group is left
      const double score = y_.load[static_cast<std::size_t>(e)] / (second - first + 2e-4 * y_.unit);
      if (score > most) {
        most = score;
        chosen = e;
      }
    }
    return chosen;
  }

  const BoundLayer& y_;
  bool lift_;
  double upper_;
  Ascent ascent_;
  std::vector<double> lowest_;
  std::priority_queue<std::shared_ptr<Node>, std::vector<std::shared_ptr<Node>>, Worse> open_;
};

}  // namespace gimbal::placement
