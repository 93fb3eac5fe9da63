// The copies of all experts of one layer, the loads that they make, and what another set of copies would change.
//
// With d the changes of the rank loads that a new set of copies makes and L the loads, both in the units in which J
// grows by the squares of (L - mean), the half of an expert is
//   half = change of its cost + sum_row d (2 (L - mean) + d),
// and two experts that change together change J by the sum of their halves and 2 sum_row d_e d_f. All of it is modulo
// 2^32: only sums that fit are compared.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "placement/replica_layer.hpp"

namespace gimbal::placement {

using u32 = std::uint32_t;

class ReplicaState {
 public:
  explicit ReplicaState(const ReplicaLayer& layer) : y_(layer) {
    const std::size_t experts = size(y_.experts), rows = size(y_.rows);
    where_.resize(experts * size(y_.ranks));
    count_.resize(experts);
    cost_.resize(experts);
    load_.resize(experts * rows);
    excess_.resize(rows);
    set_.resize(size(y_.ranks) + 1);
    set_load_.resize((size(y_.ranks) + 1) * size(y_.windows));
  }

  // Takes slots [slots], -1 where one is free. Of two copies of an expert on one rank the lower slot is kept.
  void load(const int* slots) {
    slot_.assign(slots, slots + y_.slots());
    std::fill(count_.begin(), count_.end(), 0);
    std::fill(load_.begin(), load_.end(), 0u);
    for (int k = 0; k < y_.windows; ++k)
      for (int r = 0; r < y_.ranks; ++r)
        excess_[size(k * y_.ranks + r)] = 2u * static_cast<u32>(-y_.mean(k));
    for (int p = 0; p < y_.slots(); ++p) {
      int& e = slot_[size(p)];
      if (e < 0) continue;
      const int r = p / y_.size;
      int* where = ranks_of(e);
      const int n = count_[size(e)];
      if (n > 0 && where[n - 1] == r) {
        e = -1;
      } else {
        where[n] = r;
        ++count_[size(e)];
      }
    }
    added_ = 0;
    for (int e = 0; e < y_.experts; ++e) {
      u32* load = set_load_.data();
      cost_[size(e)] = y_.copy_set(e, ranks_of(e), count_[size(e)], load);
      put(e, load);
      for (int i = 0; i < count_[size(e)]; ++i) added_ += !y_.was_on(e, ranks_of(e)[i]);
    }
  }

  const std::vector<int>& slots() const { return slot_; }
  int new_copies() const { return added_; }

  // The objective in units, up to a constant that all placements of the layer share.
  std::int64_t objective() const {
    std::int64_t total = 0;
    for (const u32 cost : cost_) total += static_cast<std::int32_t>(cost);
    for (const u32 twice : excess_) {
      const std::int64_t over = static_cast<std::int32_t>(twice) / 2;
      total += over * over;
    }
    return total;
  }

 protected:
  // A change of one load.
  struct Row {
    int row;
    u32 d;
  };

  static std::size_t size(int n) { return static_cast<std::size_t>(n); }
  int* ranks_of(int e) { return where_.data() + size(e) * size(y_.ranks); }
  const int* ranks_of(int e) const { return where_.data() + size(e) * size(y_.ranks); }
  u32* loads_of(int e) { return load_.data() + size(e) * size(y_.rows); }
  bool has(int e, int r) const {
    for (int i = 0; i < count_[size(e)]; ++i)
      if (ranks_of(e)[i] == r) return true;
    return false;
  }

  // set_: the ranks of e without `drop` (-1: with all) and with `take` (-1: none), ascending. Returns how many.
  int changed_set(int e, int drop, int take) {
    int n = 0;
    for (int i = 0; i < count_[size(e)]; ++i) {
      const int r = ranks_of(e)[i];
      if (take >= 0 && take < r && (n == 0 || set_[size(n - 1)] < take)) set_[size(n++)] = take;
      if (r != drop) set_[size(n++)] = r;
    }
    if (take >= 0 && (n == 0 || set_[size(n - 1)] < take)) set_[size(n++)] = take;
    return n;
  }

  // Adds the loads of e's copies to the ranks. load: [windows][copies]
  void put(int e, const u32* load) {
    const int n = count_[size(e)];
    for (int k = 0; k < y_.windows; ++k)
      for (int i = 0; i < n; ++i) {
        const int row = k * y_.ranks + ranks_of(e)[i];
        loads_of(e)[row] = load[k * n + i];
        excess_[size(row)] += 2u * load[k * n + i];
      }
  }

  void set_copies(int e, int drop, int take) {
    if (drop >= 0) added_ -= !y_.was_on(e, drop);
    if (take >= 0) added_ += !y_.was_on(e, take);
    const int n = changed_set(e, drop, take);
    for (int k = 0; k < y_.windows; ++k)
      for (int i = 0; i < count_[size(e)]; ++i) {
        const int row = k * y_.ranks + ranks_of(e)[i];
        excess_[size(row)] -= 2u * loads_of(e)[row];
        loads_of(e)[row] = 0;
      }
    std::memcpy(ranks_of(e), set_.data(), size(n) * sizeof(int));
    count_[size(e)] = n;
    cost_[size(e)] = y_.copy_set(e, ranks_of(e), n, set_load_.data());
    put(e, set_load_.data());
  }

  // The half of a changed copy set; its rows with a change that is not 0 are left in rows_.
  std::int32_t half_of(int e, int drop, int take) {
    const int n = changed_set(e, drop, take);
    const u32 cost = y_.copy_set(e, set_.data(), n, set_load_.data());
    u32 half = cost - cost_[size(e)];
    rows_.clear();
    const u32* old = loads_of(e);
    const auto meet = [&](int row, u32 load) {
      const u32 d = load - old[row];
      if (d == 0) return;
      half += d * (excess_[size(row)] + d);
      rows_.push_back({row, d});
    };
    for (int k = 0; k < y_.windows; ++k) {
      if (drop >= 0) meet(k * y_.ranks + drop, 0);
      for (int i = 0; i < n; ++i) meet(k * y_.ranks + set_[size(i)], set_load_[size(k * n + i)]);
    }
    return static_cast<std::int32_t>(half);
  }

  const ReplicaLayer& y_;
  std::vector<int> slot_, where_, count_;  // [slots], [experts, ranks] ascending, [experts]
  std::vector<u32> cost_, load_, excess_;  // [experts], [experts, rows], [rows] 2 (L - mean)
  std::vector<Row> rows_;                  // of the last half
  int added_ = 0;                          // copies that are new

 private:
  std::vector<int> set_;  // the ranks of a changed set, and the loads there
  std::vector<u32> set_load_;
};

}  // namespace gimbal::placement
