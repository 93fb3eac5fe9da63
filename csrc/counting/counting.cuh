// Maps logical expert ids to physical slots and counts the picks, in one launch (SPEC section 2).
//
// Grid: blocks of kThreads threads, at most one per multiprocessor. Block b owns the b-th stretch of the flattened
// [rows, top_k] picks, and no counter. Each thread takes kPicks neighbouring picks at a time, by 16-byte loads and
// stores where ids and out are contiguous and aligned. Shared memory holds a histogram over a window of sources
// (those from the block's first row on) and one over slots; it is added to the global counters once, by one atomic per
// non-zero bin. Lanes of a warp that picked the same slot for the same source add up first: one atomic for all of them.
// Picks that a window does not cover (sources far apart, or more experts than shared memory holds) take one global
// atomic per group of equal lanes.
#pragma once

#include "counting/call.cuh"
#include "counting/choice.cuh"

#if defined(__CUDACC__)
#define GIMBAL_SHARED(type, name) extern __shared__ type name[]
#endif

namespace gimbal::counting {

using UInt64 = unsigned long long;

constexpr unsigned kThreads = 256;
constexpr unsigned kPicks = 4;
constexpr unsigned kTile = kThreads * kPicks;
constexpr unsigned kAllLanes = 0xffffffffu;

// `thresholds` are read by the weighted kernels only, `source_of_row` by the per-row ones only.
struct Arguments {
  Call call;
  Int64 window;           // sources that the shared histogram covers
  Int64 shared_slots;     // slots that it covers: all, or 0
  Int64 tiles_per_block;  // a block owns this many tiles of kTile picks
  Int64 vectorised;       // ids and out are contiguous and aligned to 16 bytes
};

__device__ inline bool wide(const Call& a, TypeBit bit) { return (a.types >> bit & 1) != 0; }

__device__ inline Int64 read_integer(const void* address, bool is_wide, Int64 at) {
  return is_wide ? static_cast<const Int64*>(address)[at] : static_cast<const int*>(address)[at];
}

__device__ inline bool is_enabled(const Call& a) {
  if (a.enabled == nullptr) return true;
  switch (a.enabled_bytes) {
    case 1: return *static_cast<const signed char*>(a.enabled) != 0;
    case 2: return *static_cast<const short*>(a.enabled) != 0;
    default: return read_integer(a.enabled, a.enabled_bytes == 8, 0) != 0;
  }
}

__device__ inline Int64 rows_to_count(const Call& a) {
  if (!is_enabled(a)) return 0;
  if (a.num_tokens == nullptr) return a.counted_rows;
  const Int64 tokens = read_integer(a.num_tokens, wide(a, kNumTokens), 0);
  return tokens < a.counted_rows ? tokens : a.counted_rows;
}

__device__ inline void add_global(void* counters, bool is_wide, Int64 at, unsigned picks) {
  if (is_wide) {
    atomicAdd(static_cast<UInt64*>(counters) + at, static_cast<UInt64>(picks));
  } else {
    atomicAdd(static_cast<unsigned*>(counters) + at, picks);
  }
}

// kPicks ids from flat index `first` on; those at or past `total` read as -1.
template <typename Id>
__device__ inline void load_ids(const Arguments& arguments, unsigned first, unsigned total, Int64* ids) {
  const Call& a = arguments.call;
  const Id* from = static_cast<const Id*>(a.ids);
  if (arguments.vectorised && first + kPicks <= total) {
    if constexpr (sizeof(Id) == 4) {
      const int4 four = *reinterpret_cast<const int4*>(from + first);
      ids[0] = four.x, ids[1] = four.y, ids[2] = four.z, ids[3] = four.w;
    } else {
      const longlong2 low = *reinterpret_cast<const longlong2*>(from + first);
      const longlong2 high = *reinterpret_cast<const longlong2*>(from + first + 2);
      ids[0] = low.x, ids[1] = low.y, ids[2] = high.x, ids[3] = high.y;
    }
    return;
  }
  const unsigned top_k = static_cast<unsigned>(a.top_k);
  for (unsigned i = 0; i < kPicks; ++i) {
    const unsigned pick = first + i;
    ids[i] = -1;
    if (pick < total) ids[i] = from[(pick / top_k) * a.ids_row_stride + (pick % top_k) * a.ids_column_stride];
  }
}

template <typename Id>
__device__ inline void store_slots(const Arguments& arguments, unsigned first, unsigned total, const int* slots) {
  const Call& a = arguments.call;
  Id* to = static_cast<Id*>(a.out);
  if (arguments.vectorised && first + kPicks <= total) {
    if constexpr (sizeof(Id) == 4) {
      *reinterpret_cast<int4*>(to + first) = int4{slots[0], slots[1], slots[2], slots[3]};
    } else {
      *reinterpret_cast<longlong2*>(to + first) = longlong2{slots[0], slots[1]};
      *reinterpret_cast<longlong2*>(to + first + 2) = longlong2{slots[2], slots[3]};
    }
    return;
  }
  const unsigned top_k = static_cast<unsigned>(a.top_k);
  for (unsigned i = 0; i < kPicks; ++i) {
    const unsigned pick = first + i;
    if (pick < total) to[(pick / top_k) * a.out_row_stride + (pick % top_k) * a.out_column_stride] = slots[i];
  }
}

template <bool kWeighted>
__device__ inline int slot_of(const Call& a, unsigned row, unsigned source, unsigned expert) {
  const Int64 cell = static_cast<Int64>(source) * a.experts + expert;
  const unsigned choices = static_cast<unsigned>(a.nearest[cell]);
  const unsigned turn = turn_of_row(row);
  unsigned index = 0;
  if (choices > 1) {
    index = kWeighted ? weighted_choice(turn, source, expert, choices, a.thresholds + cell * a.width)
                      : even_choice(turn, source, expert, choices);
  }
  return a.replicas[cell * a.width + index];
}

// Shared memory: picks by [window, experts], then by [shared_slots].
struct Histogram {
  unsigned* bins;
  unsigned first_source, window, experts, slots;

  __device__ unsigned size() const { return window * experts + slots; }

  __device__ void clear() const {
    for (unsigned i = threadIdx.x; i < size(); i += kThreads) bins[i] = 0;
  }

  __device__ void add(const Call& a, unsigned source, unsigned expert, int slot, unsigned picks) const {
    if (source - first_source < window) {
      atomicAdd(&bins[(source - first_source) * experts + expert], picks);
    } else {
      add_global(a.counts, wide(a, kCounts), static_cast<Int64>(source) * experts + expert, picks);
    }
    if (a.load == nullptr) return;
    if (slots != 0) {
      atomicAdd(&bins[window * experts + static_cast<unsigned>(slot)], picks);
    } else {
      add_global(a.load, wide(a, kLoad), slot, picks);
    }
  }

  __device__ void flush(const Call& a) const {
    const Int64 first_cell = static_cast<Int64>(first_source) * experts;
    for (unsigned i = threadIdx.x; i < size(); i += kThreads) {
      if (bins[i] == 0) continue;
      if (i < window * experts) {
        add_global(a.counts, wide(a, kCounts), first_cell + i, bins[i]);
      } else {
        add_global(a.load, wide(a, kLoad), i - window * experts, bins[i]);
      }
    }
  }
};

// The sources that a block's shared histogram covers begin at its first row's, as far as there are any.
template <bool kPerRow>
__device__ inline unsigned first_source_of(const Arguments& arguments, unsigned first_pick) {
  const Call& a = arguments.call;
  if constexpr (!kPerRow) return static_cast<unsigned>(a.source);
  const Int64 row = first_pick / static_cast<unsigned>(a.top_k);
  const Int64 source = row < a.rows ? read_integer(a.source_of_row, wide(a, kSources), row * a.source_stride) : 0;
  const Int64 last = a.sources - arguments.window;
  return static_cast<unsigned>(source < 0 ? 0 : (source > last ? last : source));
}

template <bool kPerRow>
__device__ inline Int64 source_of(const Call& a, unsigned row) {
  if constexpr (!kPerRow) return a.source;
  return read_integer(a.source_of_row, wide(a, kSources), row * a.source_stride);
}

// One pick per lane. Called by all lanes of a warp; `counted` says whether this lane's pick counts.
__device__ inline void count_pick(const Call& a, const Histogram& histogram, bool counted, unsigned source,
                                  unsigned expert, int slot) {
  const unsigned lanes = __ballot_sync(kAllLanes, counted);
  if (!counted) return;
  // A slot has one expert, so equal slots of one source are equal in everything.
  const UInt64 key = static_cast<UInt64>(source) << 32 | static_cast<unsigned>(slot);
  const unsigned equal = __match_any_sync(lanes, key);
  if (__ffs(equal) - 1 == static_cast<int>(threadIdx.x & 31u)) {
    histogram.add(a, source, expert, slot, static_cast<unsigned>(__popc(equal)));
  }
}

template <typename Id, bool kPerRow, bool kWeighted>
__device__ inline void map_and_count(const Arguments& arguments) {
  GIMBAL_SHARED(unsigned, bins);
  const Call& a = arguments.call;
  const unsigned top_k = static_cast<unsigned>(a.top_k), total = static_cast<unsigned>(a.rows) * top_k;
  const unsigned tiles = static_cast<unsigned>(arguments.tiles_per_block), first_tile = blockIdx.x * tiles;
  const Histogram histogram{bins, first_source_of<kPerRow>(arguments, first_tile * kTile),
                            static_cast<unsigned>(arguments.window), static_cast<unsigned>(a.experts),
                            static_cast<unsigned>(arguments.shared_slots)};
  const Int64 counted_rows = rows_to_count(a);
  histogram.clear();
  __syncthreads();
  for (unsigned tile = first_tile; tile < first_tile + tiles; ++tile) {  // as often for every thread of the block
    const unsigned first = tile * kTile + threadIdx.x * kPicks;
    Int64 ids[kPicks];
    int slots[kPicks];
    load_ids<Id>(arguments, first, total, ids);
    unsigned row = first / top_k, column = first % top_k;
    for (unsigned i = 0; i < kPicks; ++i) {
      const bool inside = first + i < total && static_cast<UInt64>(ids[i]) < static_cast<UInt64>(a.experts);
      const Int64 source = inside ? source_of<kPerRow>(a, row) : 0;
      const bool valid = inside && static_cast<UInt64>(source) < static_cast<UInt64>(a.sources);
      const unsigned s = static_cast<unsigned>(source), e = static_cast<unsigned>(ids[i]);
      slots[i] = valid ? slot_of<kWeighted>(a, row, s, e) : -1;
      count_pick(a, histogram, valid && row < counted_rows, s, e, slots[i]);
      if (++column == top_k) ++row, column = 0;
    }
    store_slots<Id>(arguments, first, total, slots);
  }
  __syncthreads();
  histogram.flush(a);
}

}  // namespace gimbal::counting

// One kernel per type of the ids, sources and shares; every other difference is a uniform branch.
#define GIMBAL_COUNTING_KERNEL(name, Id, per_row, weighted)                                            \
  extern "C" __global__ void __launch_bounds__(256) name(const gimbal::counting::Arguments arguments) { \
    gimbal::counting::map_and_count<Id, per_row, weighted>(arguments);                                  \
  }

GIMBAL_COUNTING_KERNEL(gimbal_count_i32, int, false, false)
GIMBAL_COUNTING_KERNEL(gimbal_count_i64, long long, false, false)
GIMBAL_COUNTING_KERNEL(gimbal_count_i32_weighted, int, false, true)
GIMBAL_COUNTING_KERNEL(gimbal_count_i64_weighted, long long, false, true)
GIMBAL_COUNTING_KERNEL(gimbal_count_i32_per_row, int, true, false)
GIMBAL_COUNTING_KERNEL(gimbal_count_i64_per_row, long long, true, false)
GIMBAL_COUNTING_KERNEL(gimbal_count_i32_per_row_weighted, int, true, true)
GIMBAL_COUNTING_KERNEL(gimbal_count_i64_per_row_weighted, long long, true, true)
