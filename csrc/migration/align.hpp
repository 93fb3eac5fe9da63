// What a layer has to fetch: slots that keep their expert, new copies, duplicates inside a rank.
// The same rules and order as `align` in gimbal_kernels/migration/reference.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gimbal::migration {

struct Shape {
  std::size_t layers, slots, ranks;
  std::size_t size() const { return slots / ranks; }
};

struct Need {
  std::int32_t layer, expert, slot;
};

struct LocalCopy {
  std::int32_t layer, expert, source, destination;
};

struct Alignment {
  std::vector<Need> needs;
  std::vector<LocalCopy> copies;
};

// One rank of one layer. old, wanted, target: the rank's `size` slots; `first`: number of its first slot. The work
// space is three vectors that the caller keeps, so that nothing is allocated per rank.
class RankAligner {
 public:
  void align(const std::int32_t* old, const std::int32_t* wanted, std::int32_t* target, std::size_t size,
             std::int32_t layer, std::int32_t first, Alignment& out) {
    wanted_.assign(wanted, wanted + size);
    std::sort(wanted_.begin(), wanted_.end());
    home_.clear();
    free_.clear();
    taken_.assign(size, 0);
    for (std::size_t i = 0; i < size; ++i) {
      target[i] = old[i];
      if (!take(old[i])) {
        free_.push_back(static_cast<std::int32_t>(i));
      } else if (home_of(old[i]) < 0) {
        home_.emplace_back(old[i], first + static_cast<std::int32_t>(i));
      }
    }
    std::size_t next = 0;
    for (std::size_t i = 0; i < size; ++i) {
      if (taken_[i]) continue;
      const std::int32_t expert = wanted_[i], slot = first + free_[next];
      target[free_[next++]] = expert;
      const std::int32_t home = home_of(expert);
      if (home >= 0) {
        out.copies.push_back({layer, expert, home, slot});
      } else {
        home_.emplace_back(expert, slot);
        out.needs.push_back({layer, expert, slot});
      }
    }
  }

 private:
  // Marks one wanted copy of the expert as served; false when none is left.
  bool take(std::int32_t expert) {
    auto at = static_cast<std::size_t>(std::lower_bound(wanted_.begin(), wanted_.end(), expert) - wanted_.begin());
    while (at < wanted_.size() && wanted_[at] == expert && taken_[at]) ++at;
    if (at == wanted_.size() || wanted_[at] != expert) return false;
    taken_[at] = 1;
    return true;
  }

  std::int32_t home_of(std::int32_t expert) const {
    for (const auto& [known, slot] : home_) {
      if (known == expert) return slot;
    }
    return -1;
  }

  std::vector<std::int32_t> wanted_, free_;
  std::vector<char> taken_;
  std::vector<std::pair<std::int32_t, std::int32_t>> home_;
};

}  // namespace gimbal::migration
