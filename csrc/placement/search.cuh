// Local search over swaps of two experts between ranks, P = E (SPEC section 3.3), in exact integers.
//
// Loads w are scaled so that half the sum of squared rank loads is the imbalance term, costs c hold the rest. A swap of
// expert e on rank a with f on rank x changes the objective by
//
//   X_e + Y_f - 2 w_e w_f,   X_e = c_ex - c_ea + w_e (w_e - g),   Y_f = c_fa - c_fx + w_f (w_f + g),   g = L_a - L_x
//
// summed over windows where w and L occur. Intermediate products wrap modulo 2^32; the sum fits, see prepare.hpp, and so
// does X_e - 2 w_e w_f, which is why the minimum over e may be taken before Y_f is added.
#pragma once

#include "placement/block.cuh"

namespace gimbal::placement {

constexpr int kMaxWindows = 8;
constexpr int kStages = 4;
constexpr int kPriceSteps = 80;
// Above every change of the objective and below what wraps.
constexpr int kNever = 1 << 30;

GIMBAL_HD int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// One layer, read-only. Arrays over experts have rows of `stride` elements, padded with zeros.
struct View {
  int experts, ranks, size, classes, windows, stride;  // size: slots per rank; classes: of ranks equally far from all
  int move_cost;                                       // added for every expert that is not on its current rank
  const int* rank_class;                               // [ranks]
  const int* comm;                                     // [classes, stride] remote picks
  const int* home;                                     // [stride] current rank, -1 without one
  const int* load;                                     // [kStages, windows, stride], the last stage is the objective
  const int* cost_rows;                                // [stride, padded ranks] comm and move cost; host only, or null
  const float* share;                                  // [stride] load over mean rank load, mean over the windows
  const float* cooling;                                // [kPriceSteps] temperatures
  float unit, curvature, share_step, count_step, price_limit;
};

GIMBAL_HD int cost_on(const View& y, int e, int rank) {
  const bool moves = (y.home[e] >= 0) & (y.home[e] != rank);
  return y.comm[y.rank_class[rank] * y.stride + e] + (moves ? y.move_cost : 0);
}

// Shared memory of one search, or a buffer of the host's. A cell is a slot: its expert and what goes with it.
struct Scratch {
  int *expert, *saved;       // [cells]
  int *home, *own;           // [cells] current rank and cost here of the expert in the cell
  int* cost;                 // [classes, cells] its remote picks on a rank of each class
  int* load;                 // [windows, cells]
  int* lowest;               // [cells]
  int* table;                // [size x ranks] X_e of the rank that is scanned
  int* twice;                // [windows, size] its loads, doubled
  int *rank_load, *saved_load;  // [windows, ranks]
  int *best, *kept;          // [ranks, ranks] lowest change of a swap between two ranks, symmetric
  int* dirty;                // [ranks] whether the best swaps of a rank are out of date
  int* chosen;               // [experts] rank of each expert
};

template <class T>
GIMBAL_HD T* take(char*& next, std::size_t count) {
  T* const here = reinterpret_cast<T*>(next);
  next += (count * sizeof(T) + 63) / 64 * 64;
  return here;
}

// The solver of one layer. kAcrossRanks: lanes run over ranks (cells [size, ranks]) instead of over the slots of one rank
// (cells [ranks, size]). kWindows: number of windows, 0 when it is only known at run time.
template <class Block, bool kAcrossRanks, int kWindows>
struct Search {
  static constexpr int kLanes = Block::kLanes;
  static constexpr bool kAcross = kAcrossRanks;
  using Ints = typename Block::Ints;

  Block& b;
  const View& y;
  Scratch s{};

  GIMBAL_HD int windows() const { return kWindows > 0 ? kWindows : y.windows; }
  GIMBAL_HD int ranks() const { return kAcrossRanks ? round_up(y.ranks, kLanes) : y.ranks; }  // padded
  GIMBAL_HD int size() const { return kAcrossRanks ? y.size : round_up(y.size, kLanes); }     // padded
  GIMBAL_HD int cells() const { return ranks() * size(); }
  GIMBAL_HD int cell(int rank, int slot) const { return kAcrossRanks ? slot * ranks() + rank : rank * size() + slot; }
  GIMBAL_HD int rank_of(int cell) const { return kAcrossRanks ? cell % ranks() : cell / size(); }

  // Lays the arrays out in memory from `base` (64-byte aligned); returns the bytes taken. With null: measures only.
  GIMBAL_BODY std::size_t carve(char* base) {
    char* next = base;
    const int n = cells(), r = ranks(), w = windows();
    s.best = take<int>(next, y.ranks * r);
    s.kept = take<int>(next, y.ranks * r);
    s.expert = take<int>(next, n);
    s.saved = take<int>(next, n);
    s.home = take<int>(next, n);
    s.own = take<int>(next, n);
    s.cost = take<int>(next, y.classes * n);
    s.load = take<int>(next, w * n);
    s.lowest = take<int>(next, n);
    s.table = take<int>(next, n);
    s.twice = take<int>(next, w * size());
    s.rank_load = take<int>(next, w * r);
    s.saved_load = take<int>(next, w * r);
    s.dirty = take<int>(next, r);
    s.chosen = s.saved;  // read once, before anything is saved
    return static_cast<std::size_t>(next - base);
  }

  GIMBAL_BODY void fill_cell(int q, int e, int rank) {
    s.expert[q] = e;
    s.home[q] = y.home[e];
    s.own[q] = cost_on(y, e, rank);
    for (int k = 0; k < y.classes; ++k) s.cost[k * cells() + q] = y.comm[k * y.stride + e];
  }

  GIMBAL_BODY void fill_loads(int q, int stage) {
    for (int k = 0; k < windows(); ++k)
      s.load[k * cells() + q] = y.load[(stage * y.windows + k) * y.stride + s.expert[q]];
  }

  // Experts to the slots of their ranks, in ascending id. Reads `chosen`.
  GIMBAL_BODY void enter() {
    for (int q = b.rank(); q < cells(); q += b.size()) {  // padding is computed with, never looked at
      s.expert[q] = 0;
      s.home[q] = s.own[q] = s.lowest[q] = 0;
      for (int k = 0; k < y.classes; ++k) s.cost[k * cells() + q] = 0;
      for (int k = 0; k < windows(); ++k) s.load[k * cells() + q] = 0;
    }
    for (int i = b.rank(); i < windows() * ranks(); i += b.size()) s.rank_load[i] = 0;
    for (int i = b.rank(); i < y.ranks * ranks(); i += b.size()) s.best[i] = kNever;
    b.sync();
    for (int e = b.rank(); e < y.experts; e += b.size()) {
      const int rank = s.chosen[e];
      int slot = 0;
      for (int f = 0; f < e; ++f) slot += s.chosen[f] == rank;
      fill_cell(cell(rank, slot), e, rank);
    }
    b.sync();
  }

  // Loads of a stage; all pairs of ranks are to be scanned.
  GIMBAL_BODY void reweigh(int stage) {
    for (int i = b.rank(); i < y.experts; i += b.size()) fill_loads(cell(i / y.size, i % y.size), stage);
    b.sync();
    for (int i = b.rank(); i < windows() * y.ranks; i += b.size()) {
      const int k = i / y.ranks, rank = i % y.ranks;
      int sum = 0;
      for (int slot = 0; slot < y.size; ++slot) sum += s.load[k * cells() + cell(rank, slot)];
      s.rank_load[k * ranks() + rank] = sum;
    }
    for (int r = b.rank(); r < y.ranks; r += b.size()) s.dirty[r] = 1;
    b.sync();
  }

  // Change of the objective when the experts in cell p of rank a and cell q of rank x swap.
  GIMBAL_BODY int change(int p, int q, int a, int x) const {
    const int n = cells();
    int sum = s.cost[y.rank_class[x] * n + p] + (s.home[p] >= 0 && s.home[p] != x ? y.move_cost : 0) - s.own[p];
    sum += s.cost[y.rank_class[a] * n + q] + (s.home[q] >= 0 && s.home[q] != a ? y.move_cost : 0) - s.own[q];
    for (int k = 0; k < windows(); ++k) {
      const int d = wrap_sub(s.load[k * n + p], s.load[k * n + q]);
      const int g = wrap_sub(s.rank_load[k * ranks() + a], s.rank_load[k * ranks() + x]);
      sum = wrap_add(sum, wrap_mul(d, wrap_sub(d, g)));
    }
    return sum;
  }

  GIMBAL_BODY void swap(int p, int q, int a, int x) {
    if (b.rank() == 0) {
      const int n = cells();
      for (int k = 0; k < windows(); ++k) {
        const int d = s.load[k * n + p] - s.load[k * n + q];
        s.load[k * n + p] -= d;
        s.load[k * n + q] += d;
        s.rank_load[k * ranks() + a] -= d;
        s.rank_load[k * ranks() + x] += d;
      }
      const int e = s.expert[p], f = s.expert[q];
      fill_cell(p, f, a);
      fill_cell(q, e, x);
      s.dirty[a] = s.dirty[x] = 1;
    }
    b.sync();
  }

  // ---- best[a][x] and best[x][a] for one rank a against all others

  // Whether a scan of a leaves x out: itself, and what an earlier scan of the same round has been through.
  GIMBAL_HD bool left_out(int a, int x) const { return x == a || (x < a && s.dirty[x] != 0); }

  GIMBAL_BODY void scan(int a) {
    double_loads(a);
    if constexpr (kAcrossRanks) {
      table_across(a);
      b.sync();
      lowest_across(a);
    } else {
      scan_slots(a, 0, y.ranks);
      const int wide = size(), ranks_ = y.ranks, size_ = y.size;
      for (int x = b.rank(); x < ranks_; x += b.size()) {
        if (left_out(a, x)) continue;
        int low = kNever;
        const int* row = s.lowest + x * wide;
        for (int slot = 0; slot < size_; ++slot) low = row[slot] < low ? row[slot] : low;
        s.best[a * ranks_ + x] = s.best[x * ranks_ + a] = low;
      }
    }
    b.sync();
  }

  GIMBAL_BODY void double_loads(int a) {
    const int wide = size(), count = windows() * wide;
    for (int i = b.rank(); i < count; i += b.size()) s.twice[i] = 2 * s.load[i / wide * cells() + cell(a, i % wide)];
  }

  // lowest[f]: lowest change of a swap of f with an expert of rank a, for all f of the ranks from `first` to before `last`.
  GIMBAL_BODY void scan_slots(int a, int first, int last) {
    table_within(a, first, last);
    b.sync();
    lowest_within(a, first, last);
    b.sync();
  }

  // X_e with lanes over ranks: table [size, ranks].
  GIMBAL_BODY void table_across(int a) {
    const int wide = ranks(), size_ = y.size;
    for (int slot = 0; slot < size_; ++slot) {
      const int p = cell(a, slot), own = s.own[p];
      const int* row = y.cost_rows + static_cast<std::size_t>(s.expert[p]) * wide;
      int* out = s.table + slot * wide;
      for (int x0 = b.rank() * kLanes; x0 < wide; x0 += b.size() * kLanes) {
        Ints here = load_lanes<Ints>(row + x0) - own;
        for (int k = 0; k < windows(); ++k) {
          const int w = s.load[k * cells() + p], gap = wrap_sub(w, s.rank_load[k * wide + a]);
          const Ints other = load_lanes<Ints>(s.rank_load + k * wide + x0);
          here = wrap_add(here, wrap_mul(all_lanes<Ints>(w), wrap_add(all_lanes<Ints>(gap), other)));
        }
        store_lanes(out + x0, here);
      }
    }
  }

  // X_e with lanes over the slots of rank a: table [ranks, size].
  GIMBAL_BODY void table_within(int a, int first, int last) {
    const int tiles = size() / kLanes;
    for (int t = first * tiles + b.rank(); t < last * tiles; t += b.size()) {
      const int x = t / tiles, p = cell(a, t % tiles * kLanes);
      if (left_out(a, x)) continue;
      Ints here = cost_to(x, p);
      for (int k = 0; k < windows(); ++k) {
        const int g = wrap_sub(s.rank_load[k * ranks() + a], s.rank_load[k * ranks() + x]);
        const Ints w = load_lanes<Ints>(s.load + k * cells() + p);
        here = wrap_add(here, wrap_mul(w, wrap_sub(w, all_lanes<Ints>(g))));
      }
      store_lanes(s.table + t * kLanes, here);
    }
  }

  // Cost on `rank` of the experts in the cells from q, minus their cost where they are.
  GIMBAL_BODY Ints cost_to(int rank, int q) const {
    const Ints home = load_lanes<Ints>(s.home + q);
    const Ints moves = mask_lanes(home != rank) & mask_lanes(home >= 0) & y.move_cost;
    return load_lanes<Ints>(s.cost + y.rank_class[rank] * cells() + q) - load_lanes<Ints>(s.own + q) + moves;
  }

  // Y_f of the experts in the cells from q for a swap with rank a; x0: rank of the first of them.
  GIMBAL_BODY Ints partner(int a, int x0, int q) const {
    Ints sum = cost_to(a, q);
    for (int k = 0; k < windows(); ++k) {
      const int* load = s.rank_load + k * ranks();
      Ints g;
      if constexpr (kAcrossRanks)
        g = wrap_sub(all_lanes<Ints>(load[a]), load_lanes<Ints>(load + x0));
      else
        g = all_lanes<Ints>(wrap_sub(load[a], load[x0]));
      const Ints w = load_lanes<Ints>(s.load + k * cells() + q);
      sum = wrap_add(sum, wrap_mul(w, wrap_add(w, g)));
    }
    return sum;
  }

  // X_e - 2 w_e w_f of expert i of rank a with those in the cells from q.
  GIMBAL_BODY Ints without_partner(int i, int x0, int q) const {
    const int* term = s.table + (kAcrossRanks ? i * ranks() + x0 : x0 * size() + i);
    Ints here;
    if constexpr (kAcrossRanks)
      here = load_lanes<Ints>(term);
    else
      here = all_lanes<Ints>(*term);
    for (int k = 0; k < windows(); ++k) {
      const Ints twice = all_lanes<Ints>(s.twice[k * size() + i]);
      here = wrap_sub(here, wrap_mul(twice, load_lanes<Ints>(s.load + k * cells() + q)));
    }
    return here;
  }

  // low[n]: lowest X_e + Y_f - 2 w_e w_f over the experts e of rank a, for f in the cells from q + n * step.
  template <int kTiles>
  GIMBAL_BODY void lowest_swaps(int a, int x0, int q, int step, Ints* low) const {
    const int size_ = y.size;
    for (int n = 0; n < kTiles; ++n) low[n] = all_lanes<Ints>(kNever);
    for (int i = 0; i < size_; ++i)
      for (int n = 0; n < kTiles; ++n) low[n] = min_lanes(without_partner(i, x0, q + n * step), low[n]);
    for (int n = 0; n < kTiles; ++n) low[n] = wrap_add(low[n], partner(a, x0, q + n * step));
  }

  GIMBAL_BODY void lowest_across(int a) {
    const int wide = ranks(), ranks_ = y.ranks, size_ = y.size;
    for (int x0 = b.rank() * kLanes; x0 < wide; x0 += b.size() * kLanes) {
      Ints low = all_lanes<Ints>(kNever), two[2];
      int slot = 0;
      for (; slot + 1 < size_; slot += 2) {
        lowest_swaps<2>(a, x0, slot * wide + x0, wide, two);
        low = min_lanes(min_lanes(two[0], two[1]), low);
      }
      if (slot < size_) {
        lowest_swaps<1>(a, x0, slot * wide + x0, wide, two);
        low = min_lanes(two[0], low);
      }
      int* const row = s.best + a * wide;
      store_lanes(row + x0, low);
      for (int x = x0; x < x0 + kLanes; ++x) {
        if (x == a || x >= ranks_) row[x] = kNever;
        if (x < ranks_) s.best[x * wide + a] = row[x];
      }
    }
  }

  GIMBAL_BODY void lowest_within(int a, int first, int last) {
    constexpr int kTiles = kLanes > 1 ? 2 : 1;  // at a time
    const int tiles = size() / kLanes, step = tiles % kTiles == 0 ? kTiles : 1;
    for (int t = first * tiles + b.rank() * step; t < last * tiles; t += b.size() * step) {
      if (left_out(a, t / tiles)) continue;
      Ints low[kTiles];
      if (step == kTiles)
        lowest_swaps<kTiles>(a, t / tiles, t * kLanes, kLanes, low);
      else
        lowest_swaps<1>(a, t / tiles, t * kLanes, kLanes, low);
      for (int n = 0; n < step; ++n) store_lanes(s.lowest + (t + n) * kLanes, low[n]);
    }
  }
};

}  // namespace gimbal::placement
