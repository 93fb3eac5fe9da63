// Flags and copies between processes that share memory: the host's twin of transfer.cuh.
#pragma once

#include <cstdint>
#include <cstring>

namespace gimbal::migration {

// One piece of memory to move. Addresses are plain integers, so that Python fills a table of them.
struct Piece {
  std::uint64_t source, destination, bytes;
};

inline void copy_pieces(const Piece* pieces, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<void*>(pieces[i].destination), reinterpret_cast<const void*>(pieces[i].source),
                pieces[i].bytes);
  }
}

// Whoever loads a value sees everything that was written before it was stored.
inline std::uint64_t load_acquire(const std::uint64_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }

inline void store_release(std::uint64_t* flag, std::uint64_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }

// Stores `wanted` where `expected` stands; returns what stood there, so a caller with another answer lost the race.
inline std::uint64_t swap_if(std::uint64_t* flag, std::uint64_t expected, std::uint64_t wanted) {
  __atomic_compare_exchange_n(flag, &expected, wanted, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  return expected;
}

}  // namespace gimbal::migration
