// The kernels of method "portfolio" under random schedules against the solver on one host thread, bit for bit.
//
//   simt_portfolio SCHEDULES      per kernel, shape and block size; exits 1 when any result differs

#include "simt.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "placement/kernels.cuh"
#include "placement/portfolio.hpp"
#define GIMBAL_ISA baseline
#define GIMBAL_LANES 4
#include "placement/solver.hpp"

using namespace gimbal::placement;
using baseline::Serial;

namespace {

constexpr int kLayers = 2, kKicks = 4, kSeeds = 2, kWorkers = 1;

struct Case {
  int experts, ranks, sources, windows;
};

// Random traffic of one layer, and what the solver makes of it.
struct Input {
  std::vector<double> traffic, distance, weights;
  std::vector<std::vector<double>> loads;
  std::vector<std::int32_t> current;
  Prepared prepared;

  Input(const Case& c, unsigned seed) {
    std::mt19937 random(seed);
    std::lognormal_distribution<double> popularity(5.0, 1.0);
    const auto size = [](int n) { return static_cast<std::size_t>(n); };
    for (int i = 0; i < c.sources * c.experts; ++i) traffic.push_back(std::floor(popularity(random)));
    for (int i = 0; i < c.sources * c.ranks; ++i)
      distance.push_back(i % c.ranks / (c.ranks / c.sources) == i / c.ranks ? 0.0 : 1.0);
    for (int e = 0; e < c.experts; ++e) current.push_back(e);
    std::shuffle(current.begin(), current.end(), random);
    for (int k = 0; k < c.windows; ++k) {
      loads.emplace_back(size(c.experts), 0.0);
      for (int i = 0; i < c.sources * c.experts; ++i)
        loads.back()[size(i % c.experts)] += k == 0 ? traffic[size(i)] : std::floor(popularity(random));
      weights.push_back(std::pow(0.8, k));
    }
    std::vector<const double*> rows;
    for (const auto& row : loads) rows.push_back(row.data());
    const Layer layer{{size(c.sources), size(c.experts), size(c.ranks), size(c.experts / c.ranks)}, traffic.data(),
                      distance.data(), current.data()};
    prepared.build(layer, {rows.size(), rows.data(), weights.data()}, {1.0, 4.0, 0.02}, 0);
  }
};

struct Results {
  std::vector<int> starts, settled, kicked;
  std::vector<long long> settled_value, kicked_value;

  explicit Results(int experts)
      : starts(static_cast<std::size_t>(kLayers * kGpuStarts * experts), -1),
        settled(starts.size(), -1),
        kicked(static_cast<std::size_t>(kLayers * kSeeds * experts), -1),
        settled_value(kLayers * kGpuStarts, -1),
        kicked_value(kLayers * kSeeds, -1) {}
};

Results on_host(const std::vector<View>& views) {
  const int experts = views[0].experts;
  Results out(experts);
  Arena memory;
  std::vector<float> work(static_cast<std::size_t>(views[0].ranks * views[0].stride));
  Serial block;
  for (int layer = 0; layer < kLayers; ++layer) {
    const View& y = views[static_cast<std::size_t>(layer)];
    int* starts = out.starts.data() + layer * kGpuStarts * experts;
    Prices<Serial> prices{block, y};
    prices.carve(memory.reserve(prices.carve(nullptr)));
    prices.s.work = work.data();
    prices.ascend();
    prices.round_by_rank(starts);
    prices.round_by_class(starts + experts);
    for (int e = 0; e < experts; ++e) starts[2 * experts + e] = y.home[e];
    Search<Serial, false, 0> search{block, y};
    search.carve(memory.reserve(search.carve(nullptr)));
    for (int i = 0; i < kGpuStarts; ++i) {
      settle(search, starts + i * experts);
      leave(search, out.settled.data() + (layer * kGpuStarts + i) * experts);
      out.settled_value[static_cast<std::size_t>(layer * kGpuStarts + i)] = objective(search);
    }
    for (int i = 0; i < kSeeds; ++i) {
      resume(search, out.settled.data() + layer * kGpuStarts * experts);
      kick(search, kKicks, i + 1);
      leave(search, out.kicked.data() + (layer * kSeeds + i) * experts);
      out.kicked_value[static_cast<std::size_t>(layer * kSeeds + i)] = objective(search);
    }
  }
  return out;
}

// Launches that differ from the host; `launches` counts them all.
int compare(const Case& c, int schedules, int& launches) {
  std::vector<Input> inputs;
  for (unsigned layer = 0; layer < kLayers; ++layer) inputs.emplace_back(c, 100 * layer + 7);
  std::vector<View> views;
  for (const Input& input : inputs) views.push_back(input.prepared.view());
  const Results host = on_host(views);
  const std::size_t shared = shared_bytes(views[0]);
  const int kinds[kGpuStarts] = {0, 1, 2};
  std::vector<int> from;
  for (int layer = 0; layer < kLayers; ++layer)
    for (int e = 0; e < c.experts; ++e)
      from.push_back(host.settled[static_cast<std::size_t>(layer * kGpuStarts * c.experts + e)]);
  int different = 0;
  for (const unsigned threads : {32u, 64u, 96u})
    for (int schedule = 0; schedule < schedules; ++schedule) {
      const unsigned seed = 31 * static_cast<unsigned>(schedule) + threads;
      Results gpu(c.experts);
      std::vector<float> work(static_cast<std::size_t>(kLayers * c.ranks * views[0].stride));
      simt::launch(kLayers, threads, shared, seed, kWorkers, [&] { gimbal_portfolio_starts(views.data(), work.data(), gpu.starts.data()); });
      simt::launch(kLayers * kGpuStarts, threads, shared, seed, kWorkers, [&] {
        gimbal_portfolio_settle(views.data(), host.starts.data(), kinds, kGpuStarts, gpu.settled.data(),
                         gpu.settled_value.data());
      });
      simt::launch(kLayers * kSeeds, threads, shared, seed, kWorkers, [&] {
        gimbal_portfolio_kick(views.data(), from.data(), kKicks, kSeeds, gpu.kicked.data(), gpu.kicked_value.data());
      });
      launches += 3;
      different += gpu.starts != host.starts;
      different += gpu.settled != host.settled || gpu.settled_value != host.settled_value;
      different += gpu.kicked != host.kicked || gpu.kicked_value != host.kicked_value;
    }
  return different;
}

// Keys of min64 called again and again without anything in between, as its description allows.
u64 key_of(unsigned thread, unsigned call) { return (thread * 7919u + call * 104729u) % 10007u; }

int wrong_minima(int schedules) {
  constexpr unsigned kThreads = 96, kCalls = 6;
  int wrong = 0;
  for (int schedule = 0; schedule < schedules; ++schedule) {
    std::vector<u64> found(kThreads * kCalls, 0);
    simt::launch(1, kThreads, kKeyBytes, 13 + static_cast<unsigned>(schedule), kWorkers, [&] {
      GIMBAL_SHARED(char, memory);
      const CudaBlock block{reinterpret_cast<u64*>(memory)};
      const unsigned thread = static_cast<unsigned>(block.rank());
      for (unsigned call = 0; call < kCalls; ++call)
        found[call * kThreads + thread] = block.min64(key_of(thread, call));
    });
    for (unsigned call = 0; call < kCalls; ++call) {
      u64 low = kNoKey;
      for (unsigned thread = 0; thread < kThreads; ++thread) low = std::min(low, key_of(thread, call));
      for (unsigned thread = 0; thread < kThreads; ++thread) wrong += found[call * kThreads + thread] != low;
    }
  }
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  const int schedules = count > 1 ? std::atoi(arguments[1]) : 1;
  int launches = 0, different = 0;
  for (const Case& c : {Case{16, 4, 2, 1}, Case{12, 6, 3, 2}, Case{20, 4, 4, 1}, Case{8, 8, 2, 3}})
    different += compare(c, schedules, launches);
  View wide{};  // 256 experts on 64 ranks, each source near eight of them
  wide.experts = wide.stride = 256;
  wide.ranks = 64;
  wide.size = 4;
  wide.classes = 8;
  wide.windows = 1;
  std::printf("launches %d, different %d, shared bytes %zu\n", launches, different, shared_bytes(wide));
  const int wrong = wrong_minima(schedules);
  if (wrong != 0) std::fprintf(stderr, "min64: %d wrong\n", wrong);
  return different != 0 || wrong != 0;
}
