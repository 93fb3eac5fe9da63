// Method "portfolio" with spare slots: its starts and its choice; C interface of it and of the shares. Part of
// host.cpp.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "placement/parallel.hpp"
#include "placement/replica_search.hpp"
#include "placement/scored.hpp"
#include "placement/slots.hpp"
#include "placement/water_fill.hpp"

namespace gimbal::placement {

// One copy per expert, heaviest first, each to the lightest rank that has fewer than ceil(E/R); ties: fewer copies,
// then the lowest rank. The other slots stay free. [slots]
inline std::vector<int> single_copies(const ReplicaLayer& y) {
  std::vector<double> load(static_cast<std::size_t>(y.experts)), rank_load(static_cast<std::size_t>(y.ranks), 0.0);
  for (int e = 0; e < y.experts; ++e) load[static_cast<std::size_t>(e)] = y.total_load(e);
  std::vector<int> slots(static_cast<std::size_t>(y.slots()), -1), filled(rank_load.size(), 0);
  const int most = (y.experts + y.ranks - 1) / y.ranks;
  for (const std::size_t e : descending(load)) {
    std::size_t best = rank_load.size();
    for (std::size_t r = 0; r < rank_load.size(); ++r) {
      if (filled[r] == most) continue;
      const bool first = best == rank_load.size();
      if (first || rank_load[r] < rank_load[best] || (rank_load[r] == rank_load[best] && filled[r] < filled[best]))
        best = r;
    }
    slots[best * static_cast<std::size_t>(y.size) + static_cast<std::size_t>(filled[best]++)] = static_cast<int>(e);
    rank_load[best] += load[e];
  }
  return slots;
}

// All stages from one start: the balance weighs more in each, and the last one counts. `first`: the stage to begin
// with.
inline void search_replicas(ReplicaLayer& y, ReplicaSearch& search, std::vector<int> start, int first) {
  for (int stage = first; stage < kReplicaStages; ++stage) {
    y.weigh(kReplicaStageWeight[stage]);
    search.load(start.data());
    search.fill(-1);
    search.descend();
    start = search.slots();
  }
}

struct ReplicaEffort {
  int kicks, most_moves;  // most_moves -1: any number
  bool timed;
  std::chrono::steady_clock::time_point deadline;  // kicks end there

  bool expired() const { return timed && std::chrono::steady_clock::now() >= deadline; }
};

// Slots of the best placement found, then kicked: from the current slots; from `start`, at the last stage; and from
// single copies where there is neither or kicks follow. Ties: the first. The current placement when nothing is better
// and it has no expert twice on a rank. [slots], -1 where a cap left a slot free
inline std::vector<int> best_replicas(ReplicaLayer& y, const std::int32_t* current, const std::int32_t* start,
                                      const ReplicaEffort& effort) {
  ReplicaSearch search(y);
  std::vector<int> best, held;
  std::int64_t lowest = 0;
  const auto consider = [&](const std::vector<int>& from, int stage) {
    search_replicas(y, search, from, stage);
    if (!best.empty() && search.objective() >= lowest) return;
    best = search.slots();
    lowest = search.objective();
  };
  if (current != nullptr) held.assign(current, current + y.slots());
  if (current != nullptr) consider(held, 0);
  if (start != nullptr) consider(std::vector<int>(start, start + y.slots()), kReplicaStages - 1);
  if (best.empty() || effort.kicks > 0) consider(single_copies(y), 0);
  search.load(best.data());
  search.kick(effort.kicks, 1, [&] { return effort.expired(); });
  best = search.slots();
  lowest = search.objective();
  if (current == nullptr) return best;
  const int moves = search.new_copies();
  search.load(held.data());
  if (search.slots() == held && search.objective() <= lowest) return held;
  if (effort.most_moves < 0 || moves <= effort.most_moves) return best;
  search.fill(effort.most_moves);
  search.descend_within(effort.most_moves);
  return search.slots();
}

// Slot map of the copies found: what stays on its rank keeps its slot (of two copies there the one in the lower slot);
// others take the slots of experts that left, then those of second copies, ascending id into ascending slot. A second
// copy stays where nothing came for its slot.
inline void write_slots(const Layer& layer, const std::vector<int>& found, std::int32_t* slots) {
  const std::size_t size = layer.shape.slots_per_rank;
  std::vector<int> come, free;
  for (std::size_t r = 0; r < layer.shape.ranks; ++r) {
    come.assign(found.begin() + static_cast<std::ptrdiff_t>(r * size),
                found.begin() + static_cast<std::ptrdiff_t>((r + 1) * size));
    come.erase(std::remove(come.begin(), come.end(), -1), come.end());
    std::sort(come.begin(), come.end());
    const std::vector<int> held = come;
    free.clear();
    std::vector<int> second;
    for (std::size_t p = r * size; p < (r + 1) * size; ++p) {
      const int e = layer.current == nullptr ? -1 : layer.current[p];
      slots[p] = e;
      const auto waiting = std::find(come.begin(), come.end(), e);
      if (waiting != come.end())
        come.erase(waiting);
      else if (std::find(held.begin(), held.end(), e) != held.end())
        second.push_back(static_cast<int>(p));
      else
        free.push_back(static_cast<int>(p));
    }
    free.insert(free.end(), second.begin(), second.end());
    for (std::size_t i = 0; i < come.size(); ++i) slots[free[i]] = come[i];
  }
}

inline void place_replicas_layer(const Layer& layer, const Windows& windows, const Weights& weights, double drift,
                                 const std::int32_t* start, const ReplicaEffort& effort, std::int32_t* slots) {
  ReplicaLayer y;
  if (!y.build(layer, windows, weights, drift)) return keep_or_identity(layer, slots);
  write_slots(layer, best_replicas(y, layer.current, start, effort), slots);
}

// Arrays over all layers, as Python hands them over. shape: layers, sources, experts, ranks, slots per rank, windows.
struct ReplicaBatch {
  const std::int64_t* shape;
  const double *traffic, *distance, *loads, *window_weights;  // loads: [windows, layers, experts]
  const std::int32_t* current;                                // [layers, slots] or null

  std::size_t size(int i) const { return static_cast<std::size_t>(shape[i]); }
  Layer layer(std::size_t l) const {
    const Shape one{size(1), size(2), size(3), size(4)};
    const std::int32_t* held = current == nullptr ? nullptr : current + l * one.slots();
    return {one, traffic + l * one.sources * one.experts, distance, held};
  }
  // Calls body(layer number, layer, windows) for each layer. Returns 0, or 1 when memory ran out.
  template <typename Body>
  std::int32_t for_each(std::int32_t threads, const Body& body) const {
    const auto one = [&](std::size_t l) {
      std::vector<const double*> of_layer(size(5));
      for (std::size_t k = 0; k < size(5); ++k) of_layer[k] = loads + (k * size(0) + l) * size(2);
      body(l, layer(l), Windows{size(5), of_layer.data(), window_weights});
    };
    const std::size_t wanted = threads > 0 ? static_cast<std::size_t>(threads)
                                           : std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, 8);
    return for_each_layer(size(0), wanted, one) ? 0 : 1;
  }
};

}  // namespace gimbal::placement

// Bumped whenever the signature or the meaning of an argument changes.
extern "C" std::int32_t gimbal_replicas_abi() { return 2; }

// shape: those of ReplicaBatch, then kicks and most moves (-1: any number). weights: alpha, beta, gamma. drift:
// relative change of an expert's load. start: [layers, slots] where the search begins too, or null. seconds: time after
// which no kick starts, counted from the call, or negative. slots: [layers, slots], written. threads: 0 is one per
// core. Returns 0, or 1 when memory ran out.
extern "C" std::int32_t gimbal_replicas_place(const std::int64_t* shape, const double* traffic, const double* distance,
                                              const double* window_loads, const double* window_weights,
                                              const std::int32_t* current, const double* weights, double drift,
                                              const std::int32_t* start, double seconds, std::int32_t threads,
                                              std::int32_t* slots) {
  using namespace gimbal::placement;
  const ReplicaBatch batch{shape, traffic, distance, window_loads, window_weights, current};
  ReplicaEffort effort{static_cast<int>(shape[6]), static_cast<int>(shape[7]), seconds >= 0.0 && seconds < 1e9, {}};
  using Clock = std::chrono::steady_clock;
  if (effort.timed)
    effort.deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  return batch.for_each(threads, [&](std::size_t l, const Layer& layer, const Windows& windows) {
    const std::size_t first = l * layer.shape.slots();
    place_replicas_layer(layer, windows, {weights[0], weights[1], weights[2]}, drift,
                         start == nullptr ? nullptr : start + first, effort, slots + first);
  });
}

// shape: those of ReplicaBatch, then the most rounds. slots: [layers, slots]. still: part of all picks; a round that
// moves less is the last. shares: [layers, sources, slots], written. The rest as in gimbal_replicas_place.
extern "C" std::int32_t gimbal_water_fill(const std::int64_t* shape, const double* traffic, const double* distance,
                                          const double* window_loads, const double* window_weights,
                                          const std::int32_t* slots, const double* weights, double drift, double still,
                                          std::int32_t threads, double* shares) {
  using namespace gimbal::placement;
  const ReplicaBatch batch{shape, traffic, distance, window_loads, window_weights, slots};
  return batch.for_each(threads, [&](std::size_t l, const Layer& layer, const Windows& windows) {
    WaterFill fill;
    if (fill.build(layer, layer.current, windows, {weights[0], weights[1], weights[2]}, drift))
      fill.run(static_cast<int>(shape[6]), still);
    fill.write(shares + l * layer.shape.sources * layer.shape.slots());
  });
}
