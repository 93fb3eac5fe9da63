// The Block of one host thread. GIMBAL_ISA, the namespace of an instruction set, and GIMBAL_LANES, the neighbouring ints in
// its vectors, are defined by the file that includes this.
#pragma once

#include "placement/job.hpp"

namespace gimbal::placement {
namespace GIMBAL_ISA {

typedef int HostInts __attribute__((vector_size(4 * GIMBAL_LANES)));
typedef unsigned HostUnsigned __attribute__((vector_size(4 * GIMBAL_LANES)));
typedef signed char HostBytes __attribute__((vector_size(GIMBAL_LANES)));
typedef float HostFloats __attribute__((vector_size(4 * GIMBAL_LANES)));

}  // namespace GIMBAL_ISA

template <>
struct LanesOf<GIMBAL_ISA::HostInts> {
  using Unsigned = GIMBAL_ISA::HostUnsigned;
  static GIMBAL_HD GIMBAL_ISA::HostFloats to_floats(GIMBAL_ISA::HostInts values) {
    return __builtin_convertvector(values, GIMBAL_ISA::HostFloats);
  }
  static GIMBAL_HD GIMBAL_ISA::HostFloats of_bits(GIMBAL_ISA::HostInts bits) { return (GIMBAL_ISA::HostFloats)bits; }
  static GIMBAL_HD GIMBAL_ISA::HostInts ascending() {
    GIMBAL_ISA::HostInts lanes;
    for (int l = 0; l < GIMBAL_LANES; ++l) lanes[l] = l;
    return lanes;
  }
  static GIMBAL_HD int sum(GIMBAL_ISA::HostInts values) {
    int sum = 0;
    for (int l = 0; l < GIMBAL_LANES; ++l) sum += values[l];
    return sum;
  }
  static GIMBAL_HD int lowest(GIMBAL_ISA::HostInts values) {
    const GIMBAL_ISA::HostInts lane = ascending();
#pragma GCC unroll 4
    for (int half = GIMBAL_LANES / 2; half > 0; half /= 2)
      values = min_lanes(__builtin_shuffle(values, lane ^ half), values);
    return values[0];
  }
  // mask: lanes of 0 or -1
  static GIMBAL_HD bool any(GIMBAL_ISA::HostInts mask) {
    const auto narrow = __builtin_convertvector(mask, GIMBAL_ISA::HostBytes);
    std::uint32_t words[GIMBAL_LANES / 4], bits = 0;
    __builtin_memcpy(words, &narrow, sizeof words);
    for (const std::uint32_t word : words) bits |= word;
    return bits != 0;
  }
};

template <>
struct LanesOf<GIMBAL_ISA::HostFloats> {
  static GIMBAL_HD GIMBAL_ISA::HostInts to_ints(GIMBAL_ISA::HostFloats values) {
    return __builtin_convertvector(values, GIMBAL_ISA::HostInts);
  }
  static GIMBAL_HD GIMBAL_ISA::HostInts bits(GIMBAL_ISA::HostFloats values) { return (GIMBAL_ISA::HostInts)values; }
};

namespace GIMBAL_ISA {

struct Serial {
  static constexpr int kLanes = GIMBAL_LANES;
  using Ints = HostInts;
  using Floats = HostFloats;
  const Effort* effort = nullptr;  // null: no limit of time

  int rank() const { return 0; }
  int size() const { return 1; }
  void sync() const {}
  u64 min64(u64 key) const { return key; }
  void add(int* target, int value) const { *target += value; }
  bool expired() const { return effort != nullptr && effort->passed != nullptr && effort->passed(effort->deadline); }

  void copy(int* to, const int* from, int count) const {
    __builtin_memcpy(to, from, sizeof(int) * static_cast<std::size_t>(count));
  }

  int argmin(const int* matrix, int rows, int columns) const {
    const int count = rows * columns;
    int lowest = kNever, i = 0;
    if (columns % kLanes == 0) {
      const Ints wanted = all_lanes<Ints>(lowest = lowest_of_tiles(matrix, rows, columns));
      while (!LanesOf<Ints>::any(mask_lanes(load_lanes<Ints>(matrix + i) == wanted))) i += kLanes;
    } else {
      for (int j = 0; j < count; ++j) lowest = matrix[j] < lowest ? matrix[j] : lowest;
    }
    while (matrix[i] != lowest) ++i;
    return i;
  }

 private:
  // What is left of the diagonal is there a second time. Two minima at a time hide the latency.
  static int lowest_of_tiles(const int* matrix, int rows, int columns) {
    Ints even = all_lanes<Ints>(kNever), odd = even;
    for (int row = 0; row < rows; ++row) {
      const int* values = matrix + row * columns;
      int x = row / kLanes * kLanes;
      for (; x + kLanes < columns; x += 2 * kLanes) {
        even = min_lanes(load_lanes<Ints>(values + x), even);
        odd = min_lanes(load_lanes<Ints>(values + x + kLanes), odd);
      }
      if (x < columns) even = min_lanes(load_lanes<Ints>(values + x), even);
    }
    return LanesOf<Ints>::lowest(min_lanes(even, odd));
  }
};

}  // namespace GIMBAL_ISA

}  // namespace gimbal::placement
