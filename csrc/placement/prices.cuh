// Starting placements from dual prices (SPEC section 3.3): softmin dual ascent in float32, then two roundings.
//
// A rank asks `offset` for a slot and `price` per unit of load. Floats choose where the search starts and never what a
// placement costs; still they are the same bits everywhere: each operation is rounded on its own, sums are of integers.
#pragma once

#include "placement/search.cuh"

namespace gimbal::placement {

constexpr float kShareUnits = 1048576.0f;  // shares of an expert are summed in units of 2^-20
constexpr int kRankBits = 12;              // ranks in the keys of `round_by_class`

// 2^x to about 1e-4 for -100 <= x <= 0: what counts is that it is the same everywhere, the prices adapt.
template <class Floats>
GIMBAL_HD Floats exp2_rounded(Floats x) {
  auto whole = LanesOf<Floats>::to_ints(x + 128.0f) - 128;  // floor: truncation of a positive number
  using Ints = decltype(whole);
  const Floats t = x - LanesOf<Ints>::to_floats(whole);
  Floats p = t * 0.00133336f + 0.00961813f;
  p = p * t + 0.05550411f;
  p = p * t + 0.24022651f;
  p = p * t + 0.69314718f;
  p = p * t + 1.0f;
  return LanesOf<Ints>::of_bits(LanesOf<Floats>::bits(p) + whole * 8388608);  // into the exponent of a number in [1, 2)
}

// Bits of a float in ascending order.
GIMBAL_HD unsigned ordered_bits(float x) {
  const unsigned bits = static_cast<unsigned>(LanesOf<float>::bits(x));
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct PriceScratch {
  float *price, *offset, *price_mean, *offset_mean;  // [ranks], the means are those of the ascent direction
  float *lowest, *scale;                             // [stride]
  int *load_sum, *count_sum;                         // [ranks]
  int *order, *group;                                // [experts]
  long long* rank_load;                              // [ranks]
  float* work;                                       // [ranks, stride] priced costs, global memory on a GPU
};

template <class Block>
struct Prices {
  static constexpr int kLanes = Block::kLanes;
  using Ints = typename Block::Ints;
  using Floats = typename Block::Floats;

  Block& b;
  const View& y;
  PriceScratch s{};

  // As Search::carve; `work` is not part of it.
  GIMBAL_BODY std::size_t carve(char* base) {
    char* next = base;
    s.rank_load = take<long long>(next, y.ranks);
    s.price = take<float>(next, y.ranks);
    s.offset = take<float>(next, y.ranks);
    s.price_mean = take<float>(next, y.ranks);
    s.offset_mean = take<float>(next, y.ranks);
    s.lowest = take<float>(next, y.stride);
    s.scale = take<float>(next, y.stride);
    s.load_sum = take<int>(next, y.ranks);
    s.count_sum = take<int>(next, y.ranks);
    s.order = take<int>(next, y.experts);
    s.group = take<int>(next, y.experts);
    return static_cast<std::size_t>(next - base);
  }

  // Costs with prices of the experts from e0, one rank after another.
  struct Tile {
    const int *comm, *rank_class;
    const float *price, *offset;
    int stride;
    float unit;
    Ints home, moves;
    Floats share;

    GIMBAL_HD Tile(const View& y, const PriceScratch& s, int e0)
        : comm(y.comm + e0), rank_class(y.rank_class), price(s.price), offset(s.offset), stride(y.stride), unit(y.unit) {
      home = load_lanes<Ints>(y.home + e0);
      moves = mask_lanes(home >= 0) & y.move_cost;
      share = load_lanes<Floats>(y.share + e0);
    }
    GIMBAL_HD Floats on(int r) const {
      const Ints cost = load_lanes<Ints>(comm + rank_class[r] * stride) + (mask_lanes(home != r) & moves);
      return (LanesOf<Ints>::to_floats(cost) * unit + offset[r]) + share * price[r];
    }
  };

  GIMBAL_BODY void ascend() {
    for (int r = b.rank(); r < y.ranks; r += b.size())
      s.price[r] = s.offset[r] = s.price_mean[r] = s.offset_mean[r] = 0.0f;
    b.sync();
    for (int step = 0; step < kPriceSteps; ++step) {
      soft_choice(1.4426950408889634f / y.cooling[step]);  // log2(e), for powers of 2 instead of e
      for (int r = b.rank(); r < y.ranks; r += b.size()) s.load_sum[r] = s.count_sum[r] = 0;
      b.sync();
      sum_choices();
      b.sync();
      for (int r = b.rank(); r < y.ranks; r += b.size()) update(r, y.cooling[step]);
      b.sync();
    }
    const int ranks = y.ranks, stride = y.stride;
    for (int e0 = b.rank() * kLanes; e0 < stride; e0 += b.size() * kLanes) {
      const Tile tile(y, s, e0);
      for (int r = 0; r < ranks; ++r) store_lanes(s.work + r * stride + e0, tile.on(r));
    }
    b.sync();
  }

  // work[r][e] becomes exp((lowest - priced) / temperature), scale[e] what makes it a share; 0 in the padding.
  GIMBAL_BODY void soft_choice(float inverse) {
    const int ranks = y.ranks, stride = y.stride, experts = y.experts;
    const Floats least = all_lanes<Floats>(-100.0f);
    for (int e0 = b.rank() * kLanes; e0 < stride; e0 += b.size() * kLanes) {
      const Tile tile(y, s, e0);
      float* const column = s.work + e0;
      Floats lowest = all_lanes<Floats>(1e30f), sum = all_lanes<Floats>(0.0f);
      for (int r = 0; r < ranks; ++r) {
        const Floats here = tile.on(r);
        store_lanes(column + r * stride, here);
        lowest = min_lanes(here, lowest);
      }
      for (int r = 0; r < ranks; ++r) {
        const Floats x = (lowest - load_lanes<Floats>(column + r * stride)) * inverse;
        const Floats here = exp2_rounded<Floats>(x > least ? x : least);
        store_lanes(column + r * stride, here);
        sum = sum + here;
      }
      store_lanes(s.scale + e0, kShareUnits / sum);
      for (int e = experts > e0 ? experts : e0; e < e0 + kLanes; ++e) s.scale[e] = 0.0f;
    }
  }

  // Load and number of experts that choose each rank, in units of 2^-20; every thread takes a part of one rank's experts.
  GIMBAL_BODY void sum_choices() {
    const int ranks = y.ranks, experts = y.experts, parts = b.size() > ranks ? b.size() / ranks : 1;
    for (int t = b.rank(); t < ranks * parts; t += b.size()) {
      const int r = t % ranks;
      const float* row = s.work + r * y.stride;
      Ints load = all_lanes<Ints>(0), count = all_lanes<Ints>(0);
      for (int e0 = t / ranks * kLanes; e0 < experts; e0 += parts * kLanes) {
        const Floats share = load_lanes<Floats>(row + e0) * load_lanes<Floats>(s.scale + e0);
        load += LanesOf<Floats>::to_ints(share * load_lanes<Floats>(y.share + e0));
        count += LanesOf<Floats>::to_ints(share);
      }
      b.add(s.load_sum + r, LanesOf<Ints>::sum(load));
      b.add(s.count_sum + r, LanesOf<Ints>::sum(count));
    }
  }

  // One step of rank r along the running mean of its gradient.
  GIMBAL_BODY void update(int r, float temperature) {
    const float load = static_cast<float>(s.load_sum[r]) * (1.0f / kShareUnits);
    const float over = (load - 1.0f) - s.price[r] * y.curvature;
    s.price_mean[r] = 0.9f * s.price_mean[r] + 0.1f * (over * y.count_step);
    const float count = static_cast<float>(s.count_sum[r]) * (1.0f / kShareUnits);
    const float full = (count - static_cast<float>(y.size)) / static_cast<float>(y.size);
    s.offset_mean[r] = 0.9f * s.offset_mean[r] + 0.1f * full;
    const float step = temperature * 2.1f;
    const float price = s.price[r] + (step * y.share_step) * s.price_mean[r];
    // Beyond the limit no price is optimal; without it a tiny beta lets the ascent overflow.
    s.price[r] = price > y.price_limit ? y.price_limit : price < -y.price_limit ? -y.price_limit : price;
    s.offset[r] = s.offset[r] + step * s.offset_mean[r];
  }

  // order[] = experts by descending value; ties: lowest id. value: [stride], the padding below or equal to all others.
  template <class Values, class Value>
  GIMBAL_BODY void sort_descending(const Value* value) {
    const int experts = y.experts;
    for (int e = b.rank(); e < experts; e += b.size()) {
      const Values here = all_lanes<Values>(value[e]);
      Ints before = all_lanes<Ints>(0);  // counted downwards
      for (int f = 0; f < experts; f += kLanes) {
        const Values other = load_lanes<Values>(value + f);
        const Ints earlier = mask_lanes(LanesOf<Ints>::ascending() < e - f);
        before += mask_lanes(other > here) | (mask_lanes(other == here) & earlier);
      }
      s.order[-LanesOf<Ints>::sum(before)] = e;
    }
    b.sync();
  }

  // order[] = experts by descending regret, the second lowest of `rows` rows of `work` minus the lowest.
  GIMBAL_BODY void sort_by_regret(int rows) {
    const int stride = y.stride, experts = y.experts;
    for (int e0 = b.rank() * kLanes; e0 < stride; e0 += b.size() * kLanes) {
      Floats first = all_lanes<Floats>(1e30f), second = first;
      for (int r = 0; r < rows; ++r) {
        const Floats here = load_lanes<Floats>(s.work + r * stride + e0);
        second = min_lanes(here > first ? here : first, second);
        first = min_lanes(here, first);
      }
      store_lanes(s.lowest + e0, rows > 1 ? second - first : all_lanes<Floats>(0.0f));
      for (int e = experts > e0 ? experts : e0; e < e0 + kLanes; ++e) s.lowest[e] = -1.0f;
    }
    b.sync();
    sort_descending<Floats>(s.lowest);
  }

  GIMBAL_BODY void empty(int* counts, int count) {
    for (int i = b.rank(); i < count; i += b.size()) counts[i] = 0;
    b.sync();
  }

  GIMBAL_BODY void put(int e, int rank, int* ranks_of) {
    if (b.rank() == 0) {
      ranks_of[e] = rank;
      s.count_sum[rank] += 1;
    }
    b.sync();
  }

  // Experts by descending regret, each to the row of `work` that is cheapest for it among those with room.
  // Ties: lowest expert, lowest row. room: [rows] experts; chosen: [experts]
  template <class Room>
  GIMBAL_BODY void fill_by_regret(int rows, const Room& room, int* chosen) {
    sort_by_regret(rows);
    empty(s.count_sum, rows);
    const int experts = y.experts, stride = y.stride;
    for (int n = 0; n < experts; ++n) {
      const int e = s.order[n];
      u64 key = kNoKey;
      for (int r = b.rank(); r < rows; r += b.size()) {
        const u64 here = static_cast<u64>(ordered_bits(s.work[r * stride + e])) << 32 | static_cast<unsigned>(r);
        if (s.count_sum[r] < room(r) && here < key) key = here;
      }
      put(e, static_cast<int>(b.min64(key) & 0xffffffffu), chosen);
    }
  }

  // By descending regret, each expert to its cheapest rank with a free slot. ranks_of: [experts]
  GIMBAL_BODY void round_by_rank(int* ranks_of) {
    const int size = y.size;
    fill_by_regret(y.ranks, [size](int) { return size; }, ranks_of);
  }

  // Experts by descending regret to classes of equally distant ranks, by the lowest priced cost in a class with room; then
  // inside the classes, heaviest expert first, to the rank where it adds least to the objective of the second stage.
  // Ties: lowest expert, class, rank. Overwrites `work`. ranks_of: [experts]
  GIMBAL_BODY void round_by_class(int* ranks_of) {
    const int ranks = y.ranks, stride = y.stride;
    for (int e0 = b.rank() * kLanes; e0 < stride; e0 += b.size() * kLanes)
      for (int k = 0; k < y.classes; ++k) {  // rank k is of class k or of one before it: row k is not needed any more
        Floats low = all_lanes<Floats>(1e30f);
        for (int r = k; r < ranks; ++r)
          if (y.rank_class[r] == k) low = min_lanes(load_lanes<Floats>(s.work + r * stride + e0), low);
        store_lanes(s.work + k * stride + e0, low);
      }
    for (int k = b.rank(); k < y.classes; k += b.size()) {
      int room = 0;
      for (int r = 0; r < ranks; ++r) room += y.rank_class[r] == k ? y.size : 0;
      s.load_sum[k] = room;
    }
    b.sync();
    const int* room = s.load_sum;
    fill_by_regret(y.classes, [room](int k) { return room[k]; }, s.group);
    fill_classes(ranks_of);
  }

  GIMBAL_BODY void fill_classes(int* ranks_of) {
    const int ranks = y.ranks, experts = y.experts, size = y.size;
    const int* load = y.load + y.windows * y.stride;  // second stage, newest window
    long long total = 0;
    for (int e = 0; e < experts; ++e) total += load[e];
    const long long mean = total / ranks;
    for (int r = b.rank(); r < ranks; r += b.size()) s.rank_load[r] = 0;
    empty(s.count_sum, ranks);
    sort_descending<Ints>(load);
    for (int n = 0; n < experts; ++n) {
      const int e = s.order[n], group = s.group[e];
      u64 key = kNoKey;
      for (int r = b.rank(); r < ranks; r += b.size()) {
        if (y.rank_class[r] != group || s.count_sum[r] == size) continue;
        const long long rise = 2ll * cost_on(y, e, r) + load[e] * (2 * (s.rank_load[r] - mean) + load[e]);
        const u64 here = static_cast<u64>(rise + (1ll << 50)) << kRankBits | static_cast<unsigned>(r);
        key = here < key ? here : key;
      }
      const int rank = static_cast<int>(b.min64(key) & ((1u << kRankBits) - 1));
      if (b.rank() == 0) s.rank_load[rank] += load[e];
      put(e, rank, ranks_of);
    }
  }
};

}  // namespace gimbal::placement
