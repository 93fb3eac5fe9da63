// Steepest descent over swaps, and kicks out of its local optimum (SPEC section 3.3).
#pragma once

#include "placement/search.cuh"

namespace gimbal::placement {

// Linear congruential generator; one number serves every thread of a block.
struct Lcg {
  unsigned state;

  // Uniform in [0, n), from the upper 28 bits.
  GIMBAL_HD int below(int n) {
    state = state * 1664525u + 1013904223u;
    return static_cast<int>((static_cast<u64>(state >> 4) * static_cast<unsigned>(n)) >> 28);
  }
};

GIMBAL_HD Lcg seeded(int seed) { return Lcg{static_cast<unsigned>(seed) * 2654435761u + 12345u}; }

// First pair of slots (i, j) of ranks a < x, i before j, whose swap changes the objective by `value`: i * size + j.
template <class S>
GIMBAL_BODY int locate(S& search, int a, int x, int value) {
  const auto& [b, y, s] = search;
  const int size = y.size;
  u64 key = kNoKey;
  if constexpr (S::kAcross) {  // few slots, and one thread
    for (int i = 0; i < size && key == kNoKey; ++i)
      for (int j = 0; j < size && key == kNoKey; ++j)
        if (search.change(search.cell(a, i), search.cell(x, j), a, x) == value) key = static_cast<u64>(i * size + j);
  } else {
    search.double_loads(a);
    search.scan_slots(a, x, x + 1);
    for (int j = b.rank(); j < size; j += b.size()) {
      const int q = search.cell(x, j);
      if (s.lowest[q] != value) continue;
      int i = 0;
      while (search.change(search.cell(a, i), q, a, x) != value) ++i;
      const u64 here = static_cast<u64>(i * size + j);
      key = here < key ? here : key;
    }
  }
  return static_cast<int>(b.min64(key));
}

// Scans what is out of date and applies the best swap, until none improves. Ties: lowest rank a, then x, then slot i,
// then j. Returns the change of the objective. `limit`: experts that may be away from their current rank; the descent ends before a swap exceeds it.
template <class S>
GIMBAL_BODY long long descend(S& search, int limit = 1 << 30) {
  const int wide = search.ranks(), size = search.y.size;
  int away = 0;
  long long total = 0;
  for (;;) {
    for (int r = 0; r < search.y.ranks; ++r) {
      if (search.s.dirty[r] == 0) continue;
      search.scan(r);  // ends with a barrier
    }
    for (int r = search.b.rank(); r < search.y.ranks; r += search.b.size())
      if (search.s.dirty[r] != 0) search.s.dirty[r] = 0;  // others may still be reading those that are 0
    const int best = search.b.argmin(search.s.best, search.y.ranks, wide);
    const int a = best / wide, x = best % wide, value = search.s.best[best];
    if (value >= 0) return total;
    const int pair = locate(search, a, x, value);
    const int p = search.cell(a, pair / size), q = search.cell(x, pair % size);
    if (limit < search.y.experts) {
      const int before = (search.s.home[p] != a) + (search.s.home[q] != x);
      const int after = (search.s.home[p] != x) + (search.s.home[q] != a);
      if (away + after - before > limit) return total;
      away += after - before;
    }
    search.b.sync();
    search.swap(p, q, a, x);
    total += value;
  }
}

// Forced swap of the expert in cell p of rank a with its best partner on rank x; ties: the lowest slot.
template <class S>
GIMBAL_BODY int force(S& search, int p, int a, int x) {
  u64 key = kNoKey;
  for (int j = search.b.rank(); j < search.y.size; j += search.b.size()) {
    const u64 here = ordered(search.change(p, search.cell(x, j), a, x)) << 32 | static_cast<unsigned>(j);
    key = here < key ? here : key;
  }
  key = search.b.min64(key);
  search.swap(p, search.cell(x, static_cast<int>(key & 0xffffffffu)), a, x);
  return value_of(key >> 32);
}

// What a failed kick goes back to. Reads and writes cells, loads of ranks and the best swaps.
template <class S>
GIMBAL_BODY void keep(S& search) {
  auto& [b, y, s] = search;
  b.copy(s.saved, s.expert, search.cells());
  b.copy(s.saved_load, s.rank_load, search.windows() * search.ranks());
  b.copy(s.kept, s.best, y.ranks * search.ranks());
  b.sync();
}

template <class S>
GIMBAL_BODY void undo(S& search) {
  using Ints = typename S::Ints;
  auto& [b, y, s] = search;
  const int cells = search.cells();
  for (int q0 = b.rank() * S::kLanes; q0 < cells; q0 += b.size() * S::kLanes) {
    const auto changed = load_lanes<Ints>(s.expert + q0) != load_lanes<Ints>(s.saved + q0);
    if (!LanesOf<Ints>::any(mask_lanes(changed))) continue;
    for (int q = q0; q < q0 + S::kLanes; ++q) {
      if (s.expert[q] == s.saved[q]) continue;
      search.fill_cell(q, s.saved[q], search.rank_of(q));
      search.fill_loads(q, kStages - 1);
    }
  }
  b.copy(s.rank_load, s.saved_load, search.windows() * search.ranks());
  b.copy(s.best, s.kept, y.ranks * search.ranks());
  b.sync();
}

// Chains of 3 to 5 forced swaps, each followed by a descent; what does not improve is undone.
template <class S>
GIMBAL_BODY void kick(S& search, int kicks, int seed) {
  auto& [b, y, s] = search;
  if (y.ranks < 2) return;
  Lcg random = seeded(seed);
  for (int kick = -1; kick < kicks && !b.expired(); ++kick) {  // the first time round there is no kick
    long long total = 0;
    const int length = kick < 0 ? 0 : 3 + random.below(3);
    int a = kick < 0 ? 0 : random.below(y.ranks);
    for (int step = 0; step < length; ++step) {
      const int p = search.cell(a, random.below(y.size));
      int x = random.below(y.ranks - 1);
      x += x >= a;
      total += force(search, p, a, x);
      a = x;
    }
    total += descend(search);
    if (total < 0 || kick < 0)
      keep(search);
    else
      undo(search);
  }
}

// Twice the objective up to a constant of the layer: 2 c + sum of squared rank loads. Computed by every thread.
template <class S>
GIMBAL_BODY long long objective(const S& search) {
  const auto& [b, y, s] = search;
  long long total = 0;
  for (int i = 0; i < y.experts; ++i) total += 2ll * s.own[search.cell(i / y.size, i % y.size)];
  for (int k = 0; k < search.windows(); ++k)
    for (int r = 0; r < y.ranks; ++r) {
      const long long load = s.rank_load[k * search.ranks() + r];
      total += load * load;
    }
  return total;
}

// From the ranks in `start` [experts] through the stages of growing weight of balance to a local optimum.
template <class S>
GIMBAL_BODY void settle(S& search, const int* start) {
  auto& [b, y, s] = search;
  for (int e = b.rank(); e < y.experts; e += b.size()) s.chosen[e] = start[e];
  b.sync();
  search.enter();
  for (int stage = 0; stage < kStages; ++stage) {
    search.reweigh(stage);
    descend(search);
  }
}

// Back to a placement that `settle` found: the last stage only, without a descent.
template <class S>
GIMBAL_BODY void resume(S& search, const int* ranks_of_experts) {
  auto& [b, y, s] = search;
  for (int e = b.rank(); e < y.experts; e += b.size()) s.chosen[e] = ranks_of_experts[e];
  b.sync();
  search.enter();
  search.reweigh(kStages - 1);
}

template <class S>
GIMBAL_BODY void leave(const S& search, int* ranks_of_experts) {
  const auto& [b, y, s] = search;
  for (int i = b.rank(); i < y.experts; i += b.size())
    ranks_of_experts[s.expert[search.cell(i / y.size, i % y.size)]] = i / y.size;
  b.sync();
}

}  // namespace gimbal::placement
