// Counting for tensors in host memory (SPEC section 2), called from gimbal_kernels/counting/host.py, which validates.

#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <thread>
#include <type_traits>
#include <vector>

#include "counting/call.cuh"
#include "counting/choice.cuh"

namespace {

using namespace gimbal::counting;

bool wide(const Call& call, TypeBit bit) { return (call.types >> bit & 1) != 0; }

std::int64_t counted_rows(const Call& call) {
  static const char zeros[8] = {};
  if (call.enabled != nullptr && std::memcmp(call.enabled, zeros, static_cast<std::size_t>(call.enabled_bytes)) == 0) {
    return 0;
  }
  std::int64_t limit = call.counted_rows;
  if (call.num_tokens != nullptr) {
    const std::int64_t tokens = wide(call, kNumTokens) ? *static_cast<const std::int64_t*>(call.num_tokens)
                                                       : *static_cast<const std::int32_t*>(call.num_tokens);
    limit = tokens < limit ? tokens : limit;
  }
  return limit;
}

// Wraps at the end of the counter's range, as torch's in-place addition does.
template <typename T, typename Picks>
void add_to_counter(T& counter, Picks picks) {
  using U = std::make_unsigned_t<T>;
  counter = static_cast<T>(static_cast<U>(counter) + static_cast<U>(picks));
}

// The tables of one source.
struct SourceTables {
  const std::int32_t* replicas;
  const std::int32_t* nearest;
  const std::int32_t* thresholds;
  std::int64_t width;
  unsigned source;

  SourceTables(const Call& call, std::int64_t s)
      : replicas(call.replicas + s * call.experts * call.width),
        nearest(call.nearest + s * call.experts),
        thresholds(call.thresholds == nullptr ? nullptr : call.thresholds + s * call.experts * call.width),
        width(call.width),
        source(static_cast<unsigned>(s)) {}

  std::int32_t slot(std::int64_t expert, unsigned turn) const {
    const auto choices = static_cast<unsigned>(nearest[expert]);
    const std::int32_t* copies = replicas + expert * width;
    if (choices == 1) return copies[0];  // most experts
    const auto e = static_cast<unsigned>(expert);
    if (thresholds == nullptr) return copies[even_choice(turn, source, e, choices)];
    return copies[weighted_choice(turn, source, e, choices, thresholds + expert * width)];
  }
};

std::int64_t source_of(const Call& call, std::int64_t row) {
  if (call.source_of_row == nullptr) return call.source;
  const std::int64_t at = row * call.source_stride;
  return wide(call, kSources) ? static_cast<const std::int64_t*>(call.source_of_row)[at]
                              : static_cast<const std::int32_t*>(call.source_of_row)[at];
}

// Where the picks of a range of rows go. One of three: nowhere, straight to the counters, or to a histogram.
struct NoPicks {
  void add(std::int64_t, std::int64_t, std::int32_t) {}
};

template <typename Count, typename Load>
struct Counters {
  Count* counts;  // [experts], of one source
  Load* load;     // [slots], or null

  void add(std::int64_t, std::int64_t expert, std::int32_t slot) {
    add_to_counter(counts[expert], 1);
    if (load != nullptr) add_to_counter(load[slot], 1);
  }
};

// Picks by slot, which tell the picks by expert too: one increment per pick instead of two. Neighbouring picks go
// to different copies of the histogram: incrementing one counter twice in a row would wait for the first store.
struct SlotHistogram {
  static constexpr std::int64_t kMaxSlots = 1024, kCopies = 4;
  std::uint32_t bins[kCopies][kMaxSlots];

  explicit SlotHistogram(std::int64_t slots) {
    for (auto& copy : bins) std::memset(copy, 0, static_cast<std::size_t>(slots) * sizeof(copy[0]));
  }

  void add(std::int64_t k, std::int64_t, std::int32_t slot) { ++bins[k & (kCopies - 1)][slot]; }

  template <typename Count, typename Load>
  void add_to(const Counters<Count, Load>& counters, const SourceTables& tables, std::int64_t experts) const {
    for (std::int64_t expert = 0; expert < experts; ++expert) {
      for (std::int32_t i = 0; i < tables.nearest[expert]; ++i) {
        const std::int32_t slot = tables.replicas[expert * tables.width + i];
        std::uint32_t picks = 0;
        for (const auto& copy : bins) picks += copy[slot];
        add_to_counter(counters.counts[expert], picks);
        if (counters.load != nullptr) add_to_counter(counters.load[slot], picks);
      }
    }
  }
};

// Rows [begin, end), all of one source.
template <bool kDense, typename Id, typename Picks>
void map_range(const Call& call, const SourceTables& tables, std::int64_t begin, std::int64_t end, Picks& picks) {
  const std::int64_t top_k = call.top_k, ids_step = call.ids_column_stride, out_step = call.out_column_stride;
  const auto experts = static_cast<std::uint64_t>(call.experts);
  const SourceTables held = tables;  // a copy whose address is not taken stays in registers
  for (std::int64_t row = begin; row < end; ++row) {
    const Id* ids = static_cast<const Id*>(call.ids) + row * call.ids_row_stride;
    Id* out = static_cast<Id*>(call.out) + row * call.out_row_stride;
    const unsigned turn = turn_of_row(static_cast<unsigned>(row));
#pragma GCC unroll 4
    for (std::int64_t k = 0; k < top_k; ++k) {
      const std::int64_t expert = ids[kDense ? k : k * ids_step];
      Id& place = out[kDense ? k : k * out_step];
      if (static_cast<std::uint64_t>(expert) >= experts) {
        place = -1;
        continue;
      }
      const std::int32_t slot = held.slot(expert, turn);
      place = slot;
      picks.add(k, expert, slot);
    }
  }
}

// Rows [begin, end), all of one source, all counted.
template <bool kDense, typename Id, typename Count, typename Load>
void count_range(const Call& call, const SourceTables& tables, std::int64_t begin, std::int64_t end,
                 Counters<Count, Load> counters) {
  const std::int64_t picks = (end - begin) * call.top_k;
  if (call.slots <= SlotHistogram::kMaxSlots && picks > 8 * call.slots && picks <= 0xffffffff) {
    SlotHistogram histogram(call.slots);
    map_range<kDense, Id>(call, tables, begin, end, histogram);
    histogram.add_to(counters, tables, call.experts);
  } else {
    map_range<kDense, Id>(call, tables, begin, end, counters);
  }
}

template <typename Id>
void fill_rows(const Call& call, std::int64_t begin, std::int64_t end) {
  for (std::int64_t row = begin; row < end; ++row) {
    Id* out = static_cast<Id*>(call.out) + row * call.out_row_stride;
    for (std::int64_t k = 0; k < call.top_k; ++k) out[k * call.out_column_stride] = -1;
  }
}

// Rows [begin, end): maps all, counts those before `counted`. counts: [sources, experts]; load may be null.
template <bool kDense, typename Id, typename Count, typename Load>
void map_rows(const Call& call, std::int64_t begin, std::int64_t end, std::int64_t counted, Count* counts,
              Load* load) {
  NoPicks nowhere;
  for (std::int64_t next; begin < end; begin = next) {
    const std::int64_t source = source_of(call, begin);
    next = call.source_of_row == nullptr ? end : begin + 1;
    while (next < end && source_of(call, next) == source) ++next;
    if (static_cast<std::uint64_t>(source) >= static_cast<std::uint64_t>(call.sources)) {
      fill_rows<Id>(call, begin, next);
      continue;
    }
    const SourceTables tables(call, source);
    const std::int64_t middle = counted < begin ? begin : (counted < next ? counted : next);
    count_range<kDense, Id>(call, tables, begin, middle, Counters<Count, Load>{counts + source * call.experts, load});
    map_range<kDense, Id>(call, tables, middle, next, nowhere);
  }
}

template <typename Id, typename Count, typename Load>
void map_rows(const Call& call, std::int64_t begin, std::int64_t end, std::int64_t counted, Count* counts,
              Load* load) {
  if (call.ids_column_stride == 1 && call.out_column_stride == 1) {
    map_rows<true, Id>(call, begin, end, counted, counts, load);
  } else {
    map_rows<false, Id>(call, begin, end, counted, counts, load);
  }
}

template <typename T>
void add_all(T* target, const std::int64_t* picks, std::int64_t size) {
  for (std::int64_t i = 0; i < size; ++i) add_to_counter(target[i], picks[i]);
}

// Every thread but the first counts into arrays of its own; they are added up at the end, so the result is exact.
template <typename Id, typename Count, typename Load>
void map_on_threads(const Call& call, std::int64_t counted, std::int64_t threads) {
  const std::int64_t cells = call.sources * call.experts, slots = call.load == nullptr ? 0 : call.slots;
  auto* counts = static_cast<Count*>(call.counts);
  auto* load = static_cast<Load*>(call.load);
  std::vector<std::int64_t> picks(static_cast<std::size_t>((threads - 1) * (cells + slots)));
  const auto part = [&](std::int64_t t) { return call.rows * t / threads; };
  std::vector<std::thread> helpers;
  std::int64_t started = 1;
  try {
    helpers.reserve(static_cast<std::size_t>(threads));
    for (; started < threads; ++started) {
      std::int64_t* own = picks.data() + (started - 1) * (cells + slots);
      std::int64_t* own_load = slots == 0 ? nullptr : own + cells;
      helpers.emplace_back([&call, counted, own, own_load, begin = part(started), end = part(started + 1)] {
        map_rows<Id>(call, begin, end, counted, own, own_load);
      });
    }
  } catch (const std::exception&) {
    // No more threads or memory to be had: this one does the rest.
  }
  map_rows<Id>(call, 0, part(1), counted, counts, load);
  if (started < threads) map_rows<Id>(call, part(started), call.rows, counted, counts, load);
  for (std::thread& helper : helpers) helper.join();
  for (std::int64_t t = 1; t < started; ++t) {
    const std::int64_t* own = picks.data() + (t - 1) * (cells + slots);
    add_all(counts, own, cells);
    if (slots != 0) add_all(load, own + cells, slots);
  }
}

// Below this many picks per thread, starting threads and adding up their counters costs more than it saves.
constexpr std::int64_t kPicksPerThread = 131'072;

std::int64_t thread_count(const Call& call) {
  const std::int64_t useful = call.rows * call.top_k / (kPicksPerThread + call.sources * call.experts);
  if (useful < 2) return 1;
  const std::int64_t cores = std::thread::hardware_concurrency();
  const std::int64_t limit = cores < 8 ? cores : 8;
  return useful < limit ? useful : (limit > 1 ? limit : 1);
}

template <typename Id, typename Count, typename Load>
void run(const Call& call, std::int64_t threads) {
  const std::int64_t counted = counted_rows(call);
  if (threads > 1) {
    try {
      return map_on_threads<Id, Count, Load>(call, counted, threads);
    } catch (const std::bad_alloc&) {
      // Thrown before any row was touched: no memory for the threads' counters, so one thread does it all.
    }
  }
  map_rows<Id>(call, 0, call.rows, counted, static_cast<Count*>(call.counts), static_cast<Load*>(call.load));
}

template <typename Id, typename Count>
void run_with_load(const Call& call, std::int64_t threads) {
  wide(call, kLoad) ? run<Id, Count, std::int64_t>(call, threads) : run<Id, Count, std::int32_t>(call, threads);
}

template <typename Id>
void run_with_counts(const Call& call, std::int64_t threads) {
  wide(call, kCounts) ? run_with_load<Id, std::int64_t>(call, threads)
                      : run_with_load<Id, std::int32_t>(call, threads);
}

}  // namespace

// Bumped whenever an argument or a word of Call changes its place or meaning.
extern "C" std::int32_t gimbal_counting_abi() { return 2; }

// words: a Call. threads: 0 chooses by size.
extern "C" void gimbal_counting_map(const void* words, std::int64_t threads) {
  Call call;
  std::memcpy(&call, words, sizeof(Call));
  if (threads == 0) threads = thread_count(call);
  wide(call, kIds) ? run_with_counts<std::int64_t>(call, threads) : run_with_counts<std::int32_t>(call, threads);
}
