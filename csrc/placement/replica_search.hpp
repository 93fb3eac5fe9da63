// Search over the copies of the experts of one layer (SPEC section 4): fill free slots, swap two copies, turn a copy of
// one expert into a copy of another.
//
// Specified by gimbal_kernels/placement/replica_search.py. For a rank `a`, the halves of everything that could come to
// `a` are made once, a lane for each. A copy on `a` then meets all lanes at the price of the few rows in which it
// changes a load itself.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

#include "placement/replica_state.hpp"

namespace gimbal::placement {

// No move costs as much as this, and adding any half to it does not wrap.
constexpr u32 kNoMove = 1u << 30;

// Loops over lanes, as vectors of what the processor has.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define GIMBAL_LANE_LOOP __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define GIMBAL_LANE_LOOP
#endif

// t[i] += factor * row[i]
GIMBAL_LANE_LOOP inline void add_scaled(u32* t, const u32* row, u32 factor, int count) {
  for (int i = 0; i < count; ++i) t[i] += factor * row[i];
}

GIMBAL_LANE_LOOP inline std::int32_t lowest_of(const u32* t, int count) {
  std::int32_t low = INT32_MAX;
  for (int i = 0; i < count; ++i) {
    const std::int32_t here = static_cast<std::int32_t>(t[i]);
    low = here < low ? here : low;
  }
  return low;
}

// The generator behind the kicks; below(n) is uniform in [0, n), from the upper 28 bits.
struct ReplicaLcg {
  explicit ReplicaLcg(u32 seed) : state(seed * 2654435761u + 12345u) {}
  int below(int n) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((static_cast<std::uint64_t>(state >> 4) * static_cast<std::uint64_t>(n)) >> 28);
  }
  u32 state;
};

class ReplicaSearch : public ReplicaState {
 public:
  explicit ReplicaSearch(const ReplicaLayer& layer) : ReplicaState(layer), lanes_(layer.slots() + layer.experts) {
    change_.resize(size(y_.rows) * size(lanes_));
    half_.resize(size(lanes_));
    new_copies_.resize(size(lanes_));
    lane_rows_.resize(size(lanes_));
    look_.resize(size(y_.ranks));
    sum_.resize(size(std::max(y_.size, y_.experts)));
  }

  // Gives every free slot the copy that changes the objective by least. A copy's change is computed again only when it
  // is the lowest known; ties: lowest expert, then rank. `most`: copies that may be new, or -1.
  void fill(int most) {
    std::vector<std::vector<int>> room(size(y_.ranks));
    for (int p = y_.slots() - 1; p >= 0; --p)
      if (slot_[size(p)] < 0) room[size(p / y_.size)].push_back(p);
    std::priority_queue<Candidate> waiting;
    for (int e = 0; e < y_.experts; ++e)
      for (int r = 0; r < y_.ranks; ++r)
        if (!room[size(r)].empty() && !has(e, r)) waiting.push({half_of(e, -1, r), e, r});
    while (!waiting.empty()) {
      Candidate next = waiting.top();
      waiting.pop();
      std::vector<int>& free = room[size(next.rank)];
      if (free.empty() || has(next.expert, next.rank)) continue;
      const bool added = !y_.was_on(next.expert, next.rank);
      if (most >= 0 && added && added_ >= most) continue;
      next.change = half_of(next.expert, -1, next.rank);
      if (!waiting.empty() && next < waiting.top()) {
        waiting.push(next);
        continue;
      }
      slot_[size(free.back())] = next.expert;
      free.pop_back();
      set_copies(next.expert, -1, next.rank);
    }
  }

  // Rank after rank, slot after slot, each slot's best move at once, until no rank is left to look at: all at first,
  // then those whose loads a move has changed. Ties: a swap before a copy, then the lowest rank and slot to swap with,
  // the lowest expert to copy.
  void descend() {
    std::fill(look_.begin(), look_.end(), 1);
    descend_nearby();
  }

  // Leaves local optima: 2 to 4 forced moves, a descent nearby; what does not improve the objective is undone. Ends
  // early when `expired` says so.
  template <typename Expired>
  void kick(int count, u32 seed, const Expired& expired) {
    ReplicaLcg random{seed};
    std::vector<int> best = slot_;
    std::int64_t lowest = objective();
    for (int n = 0; n < count && !expired(); ++n) {
      std::fill(look_.begin(), look_.end(), 0);
      const int moves = 2 + random.below(3);
      for (int i = 0; i < moves; ++i) {
        const int slot = random.below(y_.slots());
        force(slot, random.below(y_.ranks));
      }
      descend_nearby();
      const std::int64_t value = objective();
      if (value < lowest) {
        lowest = value;
        best = slot_;
      } else {
        load(best.data());
      }
    }
  }

  // The best move of all slots, again and again, as long as at most `most` copies are new. Ties: the lowest slot first.
  void descend_within(int most) {
    for (;;) {
      Move best{0, -1, -1};
      int at = -1;
      for (int a = 0; a < y_.ranks; ++a) {
        prepare(a);
        for (int p = a * y_.size; p < (a + 1) * y_.size; ++p) {
          const Move move = best_move(p, most);
          if (move.lane < 0 || move.change >= best.change) continue;
          best = move;
          at = p;
        }
      }
      if (at < 0) return;
      apply(at, best);
    }
  }

 private:
  struct Candidate {
    std::int32_t change;
    int expert, rank;
    // std::priority_queue has the largest on top.
    bool operator<(const Candidate& o) const {
      return change != o.change ? change > o.change : expert != o.expert ? expert > o.expert : rank > o.rank;
    }
  };
  // lane: the slot to swap with, or slots() + the expert to copy. to: the rank that the leaving copy goes to, or -1.
  struct Move {
    std::int32_t change;
    int lane, to;
  };

  // Makes the half in which `f` comes to rank a, leaving rank `from` (-1: a further copy). lane: where it is kept.
  void make_half(int lane, int f, int from, int a) {
    for (const int row : lane_rows_[size(lane)]) change_[size(row) * size(lanes_) + size(lane)] = 0;
    lane_rows_[size(lane)].clear();
    half_[size(lane)] = kNoMove;
    new_copies_[size(lane)] = 2;
    if (f < 0 || has(f, a)) return;
    half_[size(lane)] = static_cast<u32>(half_of(f, from, a));
    new_copies_[size(lane)] = !y_.was_on(f, a) - (from >= 0 && !y_.was_on(f, from));
    for (const Row& row : rows_) {
      change_[size(row.row) * size(lanes_) + size(lane)] = row.d;
      lane_rows_[size(lane)].push_back(row.row);
    }
  }

  void make_lane(int lane, int a) {
    const int total = y_.slots();
    if (lane >= total) return make_half(lane, lane - total, -1, a);
    const int from = lane / y_.size;
    make_half(lane, from == a ? -1 : slot_[size(lane)], from, a);
  }

  // All halves of what could come to rank a.
  void prepare(int a) {
    for (int lane = 0; lane < lanes_; ++lane) make_lane(lane, a);
  }

  // The halves after a move: new for the two experts, the others as the loads have changed.
  void refresh(int a) {
    for (const Row& row : moved_)
      add_scaled(half_.data(), change_.data() + size(row.row) * size(lanes_), row.d, lanes_);
    const int total = y_.slots();
    for (const int e : {moved_experts_[0], moved_experts_[1]}) {
      for (int p = 0; p < total; ++p)
        if (slot_[size(p)] == e) make_lane(p, a);
      make_lane(total + e, a);
    }
  }

  // As descend, from the ranks that are marked.
  void descend_nearby() {
    while (std::find(look_.begin(), look_.end(), 1) != look_.end())
      for (int a = 0; a < y_.ranks; ++a) {
        if (!look_[size(a)]) continue;
        look_[size(a)] = 0;
        prepare(a);
        for (int p = a * y_.size; p < (a + 1) * y_.size; ++p) {
          const Move move = best_move(p, -1);
          if (move.lane < 0) continue;
          apply(p, move);
          refresh(a);
        }
      }
  }

  // The best move of the copy in slot p to rank x, or where it is on x already into a copy of another expert, even if
  // it raises the objective.
  void force(int p, int x) {
    const int e = slot_[size(p)], a = p / y_.size, total = y_.slots();
    if (e < 0) return;
    const bool swaps = !has(e, x);
    if (!swaps && count_[size(e)] < 2) return;
    prepare(a);
    Move best{static_cast<std::int32_t>(kNoMove / 2), -1, -1};
    const u32 half = static_cast<u32>(half_of(e, a, swaps ? x : -1));
    if (swaps)
      meet_lanes(x * y_.size, y_.size, half, x, 2, best);
    else
      meet_lanes(total, y_.experts, half, -1, 2, best);
    if (best.lane >= 0) apply(p, best);
  }

  // The best move of the copy in slot p against the prepared halves, lane -1 if none improves. `most` as in fill.
  Move best_move(int p, int most) {
    Move best{0, -1, -1};
    const int e = slot_[size(p)], a = p / y_.size, total = y_.slots();
    if (e < 0) return best;
    for (int x = 0; x < y_.ranks; ++x) {
      if (has(e, x)) continue;
      const u32 half = static_cast<u32>(half_of(e, a, x));
      const int slack = most < 0 ? 2 : most - added_ - !y_.was_on(e, x) + !y_.was_on(e, a);
      meet_lanes(x * y_.size, y_.size, half, x, slack, best);
    }
    if (count_[size(e)] > 1) {
      const u32 half = static_cast<u32>(half_of(e, a, -1));
      meet_lanes(total, y_.experts, half, -1, most < 0 ? 2 : most - added_ + !y_.was_on(e, a), best);
    }
    return best;
  }

  // The lowest sum of `half` and that of a lane; slack: new copies that the lane may bring.
  void meet_lanes(int first, int count, u32 half, int to, int slack, Move& best) {
    u32* sum = sum_.data();
    for (int i = 0; i < count; ++i) sum[i] = half_[size(first + i)] + half;
    for (const Row& row : rows_)
      add_scaled(sum, change_.data() + size(row.row) * size(lanes_) + first, 2u * row.d, count);
    if (slack < 2)
      for (int i = 0; i < count; ++i) sum[i] = new_copies_[size(first + i)] > slack ? kNoMove : sum[i];
    const std::int32_t low = lowest_of(sum, count);
    if (low >= best.change) return;
    int lane = 0;
    while (static_cast<std::int32_t>(sum[lane]) != low) ++lane;
    best = {low, first + lane, to};
  }

  // Moves the copy in slot p; leaves the changes of 2 (L - mean) in moved_.
  void apply(int p, const Move& move) {
    const int e = slot_[size(p)], a = p / y_.size, total = y_.slots();
    const std::vector<u32> before = excess_;
    const int f = move.lane < total ? slot_[size(move.lane)] : move.lane - total;
    if (move.lane < total) slot_[size(move.lane)] = e;
    slot_[size(p)] = f;
    set_copies(e, a, move.to);
    set_copies(f, move.to, a);
    moved_.clear();
    for (int row = 0; row < y_.rows; ++row)
      if (excess_[size(row)] != before[size(row)]) {
        moved_.push_back({row, excess_[size(row)] - before[size(row)]});
        look_[size(row % y_.ranks)] = 1;
      }
    moved_experts_[0] = e;
    moved_experts_[1] = f;
  }

  // What could come to the prepared rank: a lane per slot (its copy, swapped) and per expert (a further copy).
  int lanes_;
  std::vector<u32> change_, half_;           // [rows, lanes], [lanes]
  std::vector<std::vector<int>> lane_rows_;  // [lanes] rows of change_ that are not 0
  std::vector<int> new_copies_;              // [lanes]
  std::vector<Row> moved_;                   // changes of excess_ by the last move
  int moved_experts_[2] = {-1, -1};
  std::vector<u32> sum_;
  std::vector<char> look_;  // [ranks] worth another look
};

}  // namespace gimbal::placement
