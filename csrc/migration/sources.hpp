// The sender of every new copy: on the destination's node where possible, largest outgoing load minimal.
// The same rules and order as `choose_sources` in gimbal_kernels/migration/reference.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "migration/align.hpp"

namespace gimbal::migration {

class SourceChoice {
 public:
  SourceChoice(const Shape& shape, const std::int32_t* old, const std::int32_t* node_of_rank)
      : shape_(shape), old_(old), node_(node_of_rank), load_(shape.ranks), movable_(shape.ranks * shape.ranks) {}

  // Sender of each need; `source_slot(need, sender)` then finds the slot.
  std::vector<std::int32_t> choose(const std::vector<Need>& needs) {
    find_candidates(needs);
    chosen_.assign(needs.size(), 0);
    std::vector<std::size_t> order(needs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return count(a) < count(b); });
    for (const std::size_t i : order) {
      std::int32_t best = candidates_[begin_[i]];
      for (std::size_t k = begin_[i]; k < begin_[i + 1]; ++k) {
        if (load_[candidates_[k]] < load_[best]) best = candidates_[k];
      }
      chosen_[i] = best;
      ++load_[best];
      note(i, +1);
      if (count(i) > 1) flexible_.push_back(i);
    }
    std::sort(flexible_.begin(), flexible_.end());
    while (shift_one()) {
    }
    return chosen_;
  }

  std::int32_t source_slot(const Need& need, std::int32_t sender) const {
    const std::int32_t* first = old_ + need.layer * shape_.slots + sender * shape_.size();
    const std::int32_t* at = std::find(first, first + shape_.size(), need.expert);
    return static_cast<std::int32_t>(sender * shape_.size() + (at - first));
  }

 private:
  std::size_t count(std::size_t i) const { return begin_[i + 1] - begin_[i]; }

  // Holders of each expert by one sort per layer: (expert, rank) pairs, ascending, distinct.
  void find_candidates(const std::vector<Need>& needs) {
    std::vector<std::pair<std::int32_t, std::int32_t>> holders;
    std::int32_t prepared = -1;
    begin_.assign(1, 0);
    for (const Need& need : needs) {
      if (need.layer != prepared) {
        prepared = need.layer;
        holders.clear();
        for (std::size_t p = 0; p < shape_.slots; ++p) {
          holders.emplace_back(old_[prepared * shape_.slots + p], static_cast<std::int32_t>(p / shape_.size()));
        }
        std::sort(holders.begin(), holders.end());
        holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
      }
      const std::int32_t node = node_[need.slot / shape_.size()];
      const auto first = std::lower_bound(holders.begin(), holders.end(), std::pair{need.expert, std::int32_t{-1}});
      for (const bool near : {true, false}) {
        for (auto at = first; at != holders.end() && at->first == need.expert; ++at) {
          if (!near || node_[at->second] == node) candidates_.push_back(at->second);
        }
        if (candidates_.size() > begin_.back()) break;
      }
      begin_.push_back(candidates_.size());
    }
  }

  // movable_[a][b]: how many of a's transfers b could send instead.
  void note(std::size_t i, std::int32_t by) {
    for (std::size_t k = begin_[i]; k < begin_[i + 1]; ++k) {
      if (candidates_[k] != chosen_[i]) movable_[chosen_[i] * shape_.ranks + candidates_[k]] += by;
    }
  }

  bool shift_one() {
    const std::size_t ranks = shape_.ranks;
    const auto start = static_cast<std::size_t>(std::max_element(load_.begin(), load_.end()) - load_.begin());
    before_.assign(ranks, -1);
    before_[start] = static_cast<std::int32_t>(start);
    queue_.assign(1, start);
    for (std::size_t head = 0; head < queue_.size(); ++head) {
      const std::size_t here = queue_[head];
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        if (before_[rank] >= 0 || movable_[here * ranks + rank] == 0) continue;
        before_[rank] = static_cast<std::int32_t>(here);
        if (load_[rank] <= load_[start] - 2) {
          apply(start, rank);
          return true;
        }
        queue_.push_back(rank);
      }
    }
    return false;
  }

  void apply(std::size_t start, std::size_t end) {
    --load_[start];
    ++load_[end];
    steps_.clear();  // picked before anything moves: the search looked at this state
    for (std::size_t rank = end; rank != start; rank = static_cast<std::size_t>(before_[rank])) {
      steps_.emplace_back(first_movable(before_[rank], static_cast<std::int32_t>(rank)), rank);
    }
    for (const auto& [i, rank] : steps_) {
      note(i, -1);
      chosen_[i] = static_cast<std::int32_t>(rank);
      note(i, +1);
    }
  }

  std::size_t first_movable(std::int32_t from, std::int32_t to) const {
    for (const std::size_t i : flexible_) {
      if (chosen_[i] != from) continue;
      const auto last = candidates_.begin() + static_cast<std::ptrdiff_t>(begin_[i + 1]);
      if (std::find(candidates_.begin() + static_cast<std::ptrdiff_t>(begin_[i]), last, to) != last) return i;
    }
    return 0;  // not reached: movable_ counted one
  }

  Shape shape_;
  const std::int32_t *old_, *node_;
  std::vector<std::int32_t> load_, movable_, chosen_, candidates_, before_;
  std::vector<std::size_t> begin_, flexible_, queue_;
  std::vector<std::pair<std::size_t, std::size_t>> steps_;
};

}  // namespace gimbal::migration
