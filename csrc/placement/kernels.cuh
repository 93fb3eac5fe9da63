// Kernels of method "portfolio": the solver of search.cuh, descent.cuh and prices.cuh on CUDA blocks (SPEC section 3.3).
//
//   gimbal_portfolio_starts   one block per layer: prices, both roundings, the current ranks
//   gimbal_portfolio_settle   one block per (layer, start): descent through the stages
//   gimbal_portfolio_kick     one block per (layer, seed): kicks from the best start
//
// Everything a block writes is in its shared memory, but for `work` (gimbal_portfolio_starts) and its results. Same bytes as the
// host for every block size. Blocks are whole warps, at most 512 threads. Shared memory starts with 64 keys of min64.
#pragma once

#if defined(__CUDACC__) && !defined(GIMBAL_SHARED)
#define GIMBAL_SHARED(type, name) extern __shared__ __align__(64) type name[]
#endif

#include "placement/block.cuh"
#include "placement/descent.cuh"
#include "placement/prices.cuh"

namespace gimbal::placement {

constexpr int kMostThreads = 512;
constexpr std::size_t kKeyBytes = 512;  // one key per warp and the alignment of what follows
constexpr int kGpuStarts = 3;           // by rank, by class, current

#if !defined(__CUDACC_RTC__)  // which takes no functions of the host
// Bytes of shared memory that the kernels need for a layer of this shape.
inline std::size_t shared_bytes(const View& y) {
  CudaBlock block{nullptr};
  Search<CudaBlock, false, 0> search{block, y};
  Prices<CudaBlock> prices{block, y};
  const std::size_t a = search.carve(nullptr), b = prices.carve(nullptr);
  return kKeyBytes + (a > b ? a : b);
}
#endif

}  // namespace gimbal::placement

// views: [layers]. work: [layers, ranks, stride] floats. starts: [layers, 3, experts] ranks of experts, written.
extern "C" __global__ void __launch_bounds__(gimbal::placement::kMostThreads, 1)
    gimbal_portfolio_starts(const gimbal::placement::View* views, float* work, int* starts) {
  using namespace gimbal::placement;
  GIMBAL_SHARED(char, memory);
  const int layer = static_cast<int>(static_cast<unsigned>(blockIdx.x));
  const View y = views[layer];
  CudaBlock block{reinterpret_cast<u64*>(memory)};
  Prices<CudaBlock> prices{block, y};
  prices.carve(memory + kKeyBytes);
  prices.s.work = work + static_cast<std::size_t>(layer) * y.ranks * y.stride;
  int* out = starts + static_cast<std::size_t>(layer) * kGpuStarts * y.experts;
  prices.ascend();
  prices.round_by_rank(out);
  prices.round_by_class(out + y.experts);
  for (int e = block.rank(); e < y.experts; e += block.size()) out[2 * y.experts + e] = y.home[e];
}

// kinds: [count] starts to take; found: [layers, count, experts] ranks, value: [layers, count] objectives, both written.
extern "C" __global__ void __launch_bounds__(gimbal::placement::kMostThreads, 1)
    gimbal_portfolio_settle(const gimbal::placement::View* views, const int* starts, const int* kinds, int count, int* found,
                     long long* value) {
  using namespace gimbal::placement;
  GIMBAL_SHARED(char, memory);
  const int block_index = static_cast<int>(static_cast<unsigned>(blockIdx.x)), layer = block_index / count;
  const View y = views[layer];
  CudaBlock block{reinterpret_cast<u64*>(memory)};
  Search<CudaBlock, false, 0> search{block, y};
  search.carve(memory + kKeyBytes);
  settle(search, starts + (static_cast<std::size_t>(layer) * kGpuStarts + kinds[block_index % count]) * y.experts);
  leave(search, found + static_cast<std::size_t>(block_index) * y.experts);
  const long long total = objective(search);
  if (block.rank() == 0) value[block_index] = total;
}

// from: [layers, experts] ranks to start at; found: [layers, seeds, experts], value: [layers, seeds], both written.
extern "C" __global__ void __launch_bounds__(gimbal::placement::kMostThreads, 1)
    gimbal_portfolio_kick(const gimbal::placement::View* views, const int* from, int kicks, int seeds, int* found,
                   long long* value) {
  using namespace gimbal::placement;
  GIMBAL_SHARED(char, memory);
  const int block_index = static_cast<int>(static_cast<unsigned>(blockIdx.x)), layer = block_index / seeds;
  const View y = views[layer];
  CudaBlock block{reinterpret_cast<u64*>(memory)};
  Search<CudaBlock, false, 0> search{block, y};
  search.carve(memory + kKeyBytes);
  resume(search, from + static_cast<std::size_t>(layer) * y.experts);
  kick(search, kicks, block_index % seeds + 1);
  leave(search, found + static_cast<std::size_t>(block_index) * y.experts);
  const long long total = objective(search);
  if (block.rank() == 0) value[block_index] = total;
}
