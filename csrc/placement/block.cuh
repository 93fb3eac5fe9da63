// Who executes the solver: one CUDA block, or one host thread. The solver is written once against this interface.
//
//   rank(), size()    this thread among those of the block
//   sync()            barrier; what was written before it is seen after it
//   min64(key)        lowest key of all threads, the same for each of them; may be called again at once
//   argmin(m, n, d)   index of the lowest value of the symmetric matrix m [n, >= n], rows of d; ties: the lowest index
//   copy(to, from, n) n ints, by all threads; no barrier
//   add(p, v)         *p += v, from any number of threads
//   expired()         true once the time allowed is used up (host only)
//   kLanes, Ints, Floats  neighbouring elements that a thread takes at once and the types that hold them: one on a GPU, a
//                     vector on the host
//
// Results must not depend on size(), on kLanes or on the order in which threads run: integers everywhere, or floats
// whose every operation is rounded on its own (no fused multiply-add) and whose sums are integers.
#pragma once

#if defined(__CUDACC_RTC__)  // NVRTC has no standard headers and knows memcpy by that name only
namespace std {
using size_t = ::size_t;
}
#define GIMBAL_MEMCPY memcpy
#else
#include <cstddef>
#include <cstdint>
#define GIMBAL_MEMCPY __builtin_memcpy
#endif

// GIMBAL_HD: small functions that every solver shares. Always inlined: the host has a solver per instruction set, and a
// copy that one of them compiled must never serve another. GIMBAL_BODY: what depends on the Block and so is each one's own.
#if defined(__CUDACC__)
#define GIMBAL_HD __host__ __device__ __forceinline__
#define GIMBAL_BODY __host__ __device__ __forceinline__
#else
#define GIMBAL_HD inline __attribute__((always_inline))
#define GIMBAL_BODY inline
#endif

#if defined(__GNUC__) && !defined(__CUDACC__)
#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are only passed to functions that are inlined
#endif

namespace gimbal::placement {

using u64 = unsigned long long;

constexpr u64 kNoKey = ~0ull;

// Signed values in ascending order as unsigned keys.
GIMBAL_HD u64 ordered(int value) { return static_cast<unsigned>(value) ^ 0x80000000u; }
GIMBAL_HD int value_of(u64 high) { return static_cast<int>(static_cast<unsigned>(high) ^ 0x80000000u); }

// What cannot be written in the same way for one number and for a vector; specialised where vectors are defined.
template <class V>
struct LanesOf {
  using Unsigned = unsigned;
  static GIMBAL_HD int to_ints(float value) { return static_cast<int>(value); }  // toward zero
  static GIMBAL_HD float to_floats(int value) { return static_cast<float>(value); }
#if defined(__CUDA_ARCH__)
  static GIMBAL_HD int bits(float value) { return __float_as_int(value); }
  static GIMBAL_HD float of_bits(int bits) { return __int_as_float(bits); }
#else
  static GIMBAL_HD int bits(float value) {
    int bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
  }
  static GIMBAL_HD float of_bits(int bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
  }
#endif
  static GIMBAL_HD int ascending() { return 0; }  // 0, 1, 2 ...
  static GIMBAL_HD int sum(int value) { return value; }
  static GIMBAL_HD bool any(int mask) { return mask != 0; }
};

// Products and differences modulo 2^32: intermediate values may wrap, sums of them that fit come out exact.
template <class V>
GIMBAL_HD V wrap_mul(V a, V b) {
  using U = typename LanesOf<V>::Unsigned;
  return (V)((U)a * (U)b);
}
template <class V>
GIMBAL_HD V wrap_add(V a, V b) {
  using U = typename LanesOf<V>::Unsigned;
  return (V)((U)a + (U)b);
}
template <class V>
GIMBAL_HD V wrap_sub(V a, V b) {
  using U = typename LanesOf<V>::Unsigned;
  return (V)((U)a - (U)b);
}

// Lanes from and to memory, the same value in all, and the smaller of two.
template <class V, class T>
GIMBAL_HD V load_lanes(const T* from) {
  V lanes;
  GIMBAL_MEMCPY(&lanes, from, sizeof(V));
  return lanes;
}
template <class V, class T>
GIMBAL_HD void store_lanes(T* to, V lanes) {
  GIMBAL_MEMCPY(to, &lanes, sizeof(V));
}
template <class V, class T>
GIMBAL_HD V all_lanes(T value) {
  return V{} + value;
}
template <class V>
GIMBAL_HD V min_lanes(V a, V b) {
  return a < b ? a : b;
}

// -1 in lanes where a comparison holds: what vector comparisons give by themselves.
GIMBAL_HD int mask_lanes(bool holds) { return holds ? -1 : 0; }
template <class V>
GIMBAL_HD V mask_lanes(V mask) {
  return mask;
}

#if defined(__CUDACC__) || defined(GIMBAL_SIMT)
// part: shared memory for one key per warp. Blocks are whole warps.
struct CudaBlock {
  static constexpr int kLanes = 1;
  using Ints = int;
  using Floats = float;
  u64* part;

  __device__ int rank() const { return static_cast<int>(static_cast<unsigned>(threadIdx.x)); }
  __device__ int size() const { return static_cast<int>(static_cast<unsigned>(blockDim.x)); }
  __device__ void sync() const { __syncthreads(); }
  __device__ void add(int* target, int value) const { atomicAdd(target, value); }
  __device__ bool expired() const { return false; }

  __device__ void copy(int* to, const int* from, int count) const {
    for (int i = rank(); i < count; i += size()) to[i] = from[i];
  }

  __device__ u64 min64(u64 key) const {
    for (int offset = 16; offset > 0; offset /= 2) {
      const u64 other = __shfl_sync(0xffffffffu, key, (rank() & 31) ^ offset);
      key = other < key ? other : key;
    }
    if ((rank() & 31) == 0) part[rank() / 32] = key;
    __syncthreads();
    for (int warp = 0; warp < size() / 32; ++warp) key = part[warp] < key ? part[warp] : key;
    __syncthreads();  // the next call, which need not have a barrier before it, overwrites `part`
    return key;
  }

  __device__ int argmin(const int* matrix, int rows, int columns) const {
    u64 key = kNoKey;
    for (int i = rank(); i < rows * columns; i += size()) {
      const u64 here = ordered(matrix[i]) << 32 | static_cast<unsigned>(i);
      key = here < key ? here : key;
    }
    return static_cast<int>(min64(key) & 0xffffffffu);
  }
};
#endif

}  // namespace gimbal::placement
