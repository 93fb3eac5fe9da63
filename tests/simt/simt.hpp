// CUDA C++ on the host: every CUDA thread of a block is a fiber, scheduled at random from a seed.
//
// Include this before a .cuh file and compile it with any C++17 compiler; link simt_runtime.cpp, which must be compiled
// without sanitizers. A barrier releases a block only when all its threads have reached it, a warp operation
// completes only when all lanes of its mask have reached the same one; anything else ends the process with a
// line that begins with "SIMT:". Shared memory starts out filled with 0xCD and ends at its last byte exactly, so
// that AddressSanitizer sees an access past it. ThreadSanitizer sees two threads of a block as unordered unless a barrier
// or a warp operation lies between them, and two blocks as unordered always.
//
// Not modelled: memory scopes (atomics are relaxed and act on all of memory), asynchronous copies, clusters.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define GIMBAL_SIMT 1

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) longlong2 { long long x, y; };

namespace simt {

// Which number of the running thread: threadIdx.x, blockIdx.x, blockDim.x, gridDim.x.
enum class Index { kThread, kBlock, kBlockSize, kGridSize };

void run(unsigned blocks, unsigned threads, std::size_t shared_bytes, std::uint64_t seed, int workers,
         void (*kernel)(void*), void* arguments);
unsigned index(Index which);
void* dynamic_shared_memory();
void barrier();
// Another thread may run here.
void maybe_yield();
// Another thread will run here, and other workers get the processor: for loops that wait for another block.
void spin();
// Waits until all lanes of `mask` are at the operation `name`; `value` is what this lane brings along.
void meet_lanes(const char* name, unsigned mask, std::uint64_t value);
// What a lane of the mask brought to the last operation that this thread took part in.
std::uint64_t lane_value(int lane);
[[noreturn]] void fail(const char* message, unsigned mask);

// Runs `kernel()` once for every thread of every block: `launch(blocks, threads, bytes, seed, workers, [=] { f(x); })`.
// The blocks come in shuffled order, on `workers` host threads at a time.
template <typename Kernel>
void launch(unsigned blocks, unsigned threads, std::size_t shared_bytes, std::uint64_t seed, int workers,
            Kernel kernel) {
  run(blocks, threads, shared_bytes, seed, workers, [](void* body) { (*static_cast<Kernel*>(body))(); }, &kernel);
}

template <Index which>
struct Coordinate {
  operator unsigned() const { return index(which); }
};
template <Index which>
struct Coordinates {
  Coordinate<which> x;
};

template <typename T>
std::uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8, "a lane exchanges at most 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(std::uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename Test>
unsigned lanes_where(unsigned mask, Test test) {
  unsigned lanes = 0;
  for (int lane = 0; lane < 32; ++lane) {
    if ((mask >> lane & 1u) && test(lane_value(lane))) lanes |= 1u << lane;
  }
  return lanes;
}

inline unsigned ballot(const char* name, unsigned mask, bool predicate) {
  meet_lanes(name, mask, predicate);
  return lanes_where(mask, [](std::uint64_t value) { return value != 0; });
}

template <typename T>
unsigned match_any(const char* name, unsigned mask, T value) {
  const std::uint64_t own = to_bits(value);
  meet_lanes(name, mask, own);
  return lanes_where(mask, [own](std::uint64_t other) { return other == own; });
}

template <typename T>
T shuffle(const char* name, unsigned mask, T value, int source) {
  meet_lanes(name, mask, to_bits(value));
  if (!(mask >> (source & 31) & 1u)) fail("a shuffle reads a lane that is not in its mask", mask);
  return from_bits<T>(lane_value(source & 31));
}

}  // namespace simt

static const simt::Coordinates<simt::Index::kThread> threadIdx;
static const simt::Coordinates<simt::Index::kBlock> blockIdx;
static const simt::Coordinates<simt::Index::kBlockSize> blockDim;
static const simt::Coordinates<simt::Index::kGridSize> gridDim;

#define SIMT_TEXT_(line) #line
#define SIMT_TEXT(line) SIMT_TEXT_(line)
#define SIMT_HERE(operation) operation " at line " SIMT_TEXT(__LINE__)
#define GIMBAL_SHARED(type, name) type* name = static_cast<type*>(simt::dynamic_shared_memory())

#define __syncthreads() simt::barrier()
#define __syncwarp(...) simt::meet_lanes(SIMT_HERE("__syncwarp"), simt_mask_or_all(__VA_ARGS__), 0)
#define __ballot_sync(mask, predicate) simt::ballot(SIMT_HERE("__ballot_sync"), mask, predicate)
#define __any_sync(mask, predicate) (simt::ballot(SIMT_HERE("__any_sync"), mask, predicate) != 0)
#define __all_sync(mask, predicate) (simt::ballot(SIMT_HERE("__all_sync"), mask, predicate) == (mask))
#define __match_any_sync(mask, value) simt::match_any(SIMT_HERE("__match_any_sync"), mask, value)
#define __shfl_sync(mask, value, source) simt::shuffle(SIMT_HERE("__shfl_sync"), mask, value, source)
#define __shfl_xor_sync(mask, value, lanes) \
  simt::shuffle(SIMT_HERE("__shfl_xor_sync"), mask, value, static_cast<int>((threadIdx.x & 31u) ^ (lanes)))

constexpr unsigned simt_mask_or_all(unsigned mask = 0xffffffffu) { return mask; }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __ffs(unsigned value) { return __builtin_ffs(static_cast<int>(value)); }
inline int __clz(unsigned value) { return value == 0 ? 32 : __builtin_clz(value); }
template <typename T>
T __ldg(const T* address) { return *address; }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <typename T>
T atomicAdd(T* address, T value) {
  simt::maybe_yield();
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}

template <typename T>
T atomicMin(T* address, T value) {
  simt::maybe_yield();
  T seen = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (value < seen && !__atomic_compare_exchange_n(address, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return seen;
}
