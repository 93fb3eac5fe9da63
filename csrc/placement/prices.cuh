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
GIMBAL_HD float exp2_rounded(float x) {
  const int whole = static_cast<int>(x + 128.0f) - 128;  // floor: truncation of a positive number
  const float t = x - static_cast<float>(whole);
  float p = t * 0.00133336f + 0.00961813f;
  p = p * t + 0.05550411f;
  p = p * t + 0.24022651f;
  p = p * t + 0.69314718f;
  p = p * t + 1.0f;
  const int shift = whole * 8388608;  // into the exponent of a number in [1, 2)
#if defined(__CUDA_ARCH__)
  return __int_as_float(__float_as_int(p) + shift);
#else
  int bits;
  __builtin_memcpy(&bits, &p, 4);
  bits += shift;
  __builtin_memcpy(&p, &bits, 4);
  return p;
#endif
}

// Bits of a float in ascending order.
GIMBAL_HD unsigned ordered_bits(float x) {
  unsigned bits;
#if defined(__CUDA_ARCH__)
  bits = __float_as_uint(x);
#else
  __builtin_memcpy(&bits, &x, 4);
#endif
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

  Block& b;
  const View& y;
  PriceScratch s{};

  // As Search::carve; `work` is not part of it.
  GIMBAL_HD std::size_t carve(char* base) {
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

  // work[r][e] = cost + offset + price * share for the experts e0 + l
  GIMBAL_HD void priced(float* out, int r, int e0) const {
    const int* comm = y.comm + y.rank_class[r] * y.stride + e0;
    const int *home = y.home + e0, move = y.move_cost;
    const float *share = y.share + e0, price = s.price[r], offset = s.offset[r];
    for (int l = 0; l < kLanes; ++l) {
      const int cost = comm[l] + ((home[l] != r) & (home[l] >= 0) ? move : 0);
      const float base = static_cast<float>(cost) * y.unit + offset;
      out[l] = base + price * share[l];
    }
  }

  GIMBAL_HD void ascend() {
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
    for (int t = b.rank(); t < y.stride / kLanes; t += b.size())
      for (int r = 0; r < y.ranks; ++r) priced(s.work + r * y.stride + t * kLanes, r, t * kLanes);
    b.sync();
  }

  // work[r][e] becomes exp((lowest - priced) / temperature), scale[e] what makes it a share.
  GIMBAL_HD void soft_choice(float inverse) {
    for (int t = b.rank(); t < y.stride / kLanes; t += b.size()) {
      const int e0 = t * kLanes;
      float lowest[kLanes], sum[kLanes], here[kLanes];
      for (int l = 0; l < kLanes; ++l) lowest[l] = 1e30f;
      for (int r = 0; r < y.ranks; ++r) {
        float* out = s.work + r * y.stride + e0;
        priced(here, r, e0);
        for (int l = 0; l < kLanes; ++l) {
          out[l] = here[l];
          lowest[l] = here[l] < lowest[l] ? here[l] : lowest[l];
        }
      }
      for (int l = 0; l < kLanes; ++l) sum[l] = 0.0f;
      for (int r = 0; r < y.ranks; ++r) {
        float* out = s.work + r * y.stride + e0;
        for (int l = 0; l < kLanes; ++l) {
          float x = (lowest[l] - out[l]) * inverse;
          x = x > -100.0f ? x : -100.0f;
          here[l] = exp2_rounded(x);
        }
        for (int l = 0; l < kLanes; ++l) {
          out[l] = here[l];
          sum[l] = sum[l] + here[l];
        }
      }
      for (int l = 0; l < kLanes; ++l) s.scale[e0 + l] = kShareUnits / sum[l];
    }
  }

  // Load and number of experts that choose each rank, in units of 2^-20; every thread takes a part of one rank's experts.
  GIMBAL_HD void sum_choices() {
    const int parts = b.size() > y.ranks ? b.size() / y.ranks : 1;
    for (int t = b.rank(); t < y.ranks * parts; t += b.size()) {
      const int r = t % y.ranks;
      const float* row = s.work + r * y.stride;
      int load = 0, count = 0;
      for (int e = t / y.ranks; e < y.experts; e += parts) {
        const float share = row[e] * s.scale[e];
        load += static_cast<int>(share * y.share[e]);
        count += static_cast<int>(share);
      }
      b.add(s.load_sum + r, load);
      b.add(s.count_sum + r, count);
    }
  }

  // One step of rank r along the running mean of its gradient.
  GIMBAL_HD void update(int r, float temperature) {
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

  // order[] = experts by descending value; ties: lowest id
  template <class Value>
  GIMBAL_HD void sort_descending(const Value* value) {
    for (int e = b.rank(); e < y.experts; e += b.size()) {
      int before = 0;
      for (int f = 0; f < y.experts; ++f) before += (value[f] > value[e]) | ((value[f] == value[e]) & (f < e));
      s.order[before] = e;
    }
    b.sync();
  }

  // Experts by descending regret (second lowest priced cost minus lowest), each to its cheapest rank with a free slot.
  // Ties: lowest expert, lowest rank. ranks_of: [experts]
  GIMBAL_HD void round_by_rank(int* ranks_of) {
    for (int e = b.rank(); e < y.experts; e += b.size()) {
      float first = 1e30f, second = 1e30f;
      for (int r = 0; r < y.ranks; ++r) insert(s.work[r * y.stride + e], first, second);
      s.lowest[e] = second - first;
    }
    for (int r = b.rank(); r < y.ranks; r += b.size()) s.count_sum[r] = 0;
    b.sync();
    sort_descending(s.lowest);
    for (int n = 0; n < y.experts; ++n) {
      const int e = s.order[n];
      u64 key = kNoKey;
      for (int r = b.rank(); r < y.ranks; r += b.size()) {
        const u64 here = static_cast<u64>(ordered_bits(s.work[r * y.stride + e])) << 32 | static_cast<unsigned>(r);
        if (s.count_sum[r] < y.size && here < key) key = here;
      }
      put(e, static_cast<int>(b.min64(key) & 0xffffffffu), ranks_of);
    }
  }

  GIMBAL_HD static void insert(float value, float& first, float& second) {
    second = value < first ? first : value < second ? value : second;
    first = value < first ? value : first;
  }

  GIMBAL_HD void put(int e, int rank, int* ranks_of) {
    if (b.rank() == 0) {
      ranks_of[e] = rank;
      s.count_sum[rank] += 1;
    }
    b.sync();
  }

  // Experts by descending regret to classes of equally distant ranks, by the lowest priced cost in a class with room; then
  // inside the classes, heaviest expert first, to the rank where it adds least to the objective of the second stage.
  // Ties: lowest expert, class, rank. ranks_of: [experts]
  GIMBAL_HD void round_by_class(int* ranks_of) {
    for (int e = b.rank(); e < y.experts; e += b.size()) {
      float first = 1e30f, second = 1e30f;
      for (int k = 0; k < y.classes; ++k) insert(class_cost(k, e), first, second);
      s.lowest[e] = y.classes > 1 ? second - first : 0.0f;
    }
    for (int k = b.rank(); k < y.classes; k += b.size()) {  // experts in a class, then its capacity
      s.count_sum[k] = 0;
      s.load_sum[k] = 0;
      for (int r = 0; r < y.ranks; ++r) s.load_sum[k] += y.rank_class[r] == k ? y.size : 0;
    }
    b.sync();
    sort_descending(s.lowest);
    for (int n = 0; n < y.experts; ++n) {
      const int e = s.order[n];
      u64 key = kNoKey;
      for (int k = b.rank(); k < y.classes; k += b.size()) {
        const u64 here = static_cast<u64>(ordered_bits(class_cost(k, e))) << 32 | static_cast<unsigned>(k);
        if (s.count_sum[k] < s.load_sum[k] && here < key) key = here;
      }
      put(e, static_cast<int>(b.min64(key) & 0xffffffffu), s.group);
    }
    fill_classes(ranks_of);
  }

  // Lowest priced cost of an expert in a class.
  GIMBAL_HD float class_cost(int k, int e) const {
    float low = 1e30f;
    for (int r = 0; r < y.ranks; ++r) {
      const float here = s.work[r * y.stride + e];
      low = y.rank_class[r] == k && here < low ? here : low;
    }
    return low;
  }

  GIMBAL_HD void fill_classes(int* ranks_of) {
    const int* load = y.load + y.windows * y.stride;  // second stage, newest window
    long long total = 0;
    for (int e = 0; e < y.experts; ++e) total += load[e];
    const long long mean = total / y.ranks;
    for (int r = b.rank(); r < y.ranks; r += b.size()) {
      s.count_sum[r] = 0;
      s.rank_load[r] = 0;
    }
    b.sync();
    sort_descending(load);
    for (int n = 0; n < y.experts; ++n) {
      const int e = s.order[n];
      u64 key = kNoKey;
      for (int r = b.rank(); r < y.ranks; r += b.size()) {
        if (s.count_sum[r] == y.size || y.rank_class[r] != s.group[e]) continue;
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
