// Experts copied between GPUs that map each other's memory, with flags that say when they may and when they have.
//
// Grid: rows * parts blocks of kThreads threads; block b works on row b / parts and owns every parts-th stretch of each of
// its pieces. A row is one expert of one layer: pieces of memory, a flag to wait for, a flag to raise. Used twice:
//   push    waits until the receiver has copied out what lay in the staging row, writes there, raises the row's flag;
//   commit  waits for the row's flag, copies from staging to the slot; the last row raises "consumed".
// Flags are words that only grow. They are raised with release and read with acquire at system scope, so whoever sees
// a value sees all that was written before, on another GPU too. A block waits in one thread; the barrier after it keeps
// the others from reading early, the barrier before raising keeps the flag behind all threads' writes.
// 16-byte accesses where both addresses allow them, single bytes elsewhere (scales of a few bytes per expert).
#pragma once

namespace gimbal::migration {

using Int64 = long long;
using Word = unsigned long long;

constexpr unsigned kThreads = 256;

#if defined(GIMBAL_SIMT)
__device__ inline Word load_flag(const Word* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
__device__ inline void raise_flag(Word* flag, Word value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
__device__ inline unsigned arrive(unsigned* counter) { return __atomic_fetch_add(counter, 1u, __ATOMIC_ACQ_REL); }
__device__ inline void pause() { simt::spin(); }
#else
__device__ inline Word load_flag(const Word* flag) {
  Word value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}
__device__ inline void raise_flag(Word* flag, Word value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ inline unsigned arrive(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
__device__ inline void pause() { __nanosleep(100); }
#endif

struct Piece {
  const unsigned char* source;
  unsigned char* destination;
  Int64 bytes;
};

struct Row {
  Int64 first_piece, pieces;
  const Word* wait_for;  // until it is at least wait_value; null: at once
  Word wait_value;
  unsigned* arrived;  // counts blocks; the one that makes it `expected` raises the flag and clears it
  Int64 expected;
  Word* raise;  // null: nothing to raise
  Word raise_value;
};

struct Transfer {
  const Piece* pieces;
  const Row* rows;
  Int64 parts;
};

__device__ inline void copy_part(const Piece& piece, Int64 part, Int64 parts) {
  const Int64 first = part * kThreads + threadIdx.x, step = parts * kThreads;
  const Word both = reinterpret_cast<Word>(piece.source) | reinterpret_cast<Word>(piece.destination);
  const Int64 vectors = both % 16 == 0 ? piece.bytes / 16 : 0;
  const uint4* from = reinterpret_cast<const uint4*>(piece.source);
  uint4* to = reinterpret_cast<uint4*>(piece.destination);
  for (Int64 i = first; i < vectors; i += step) to[i] = from[i];
  for (Int64 i = vectors * 16 + first; i < piece.bytes; i += step) piece.destination[i] = piece.source[i];
}

__device__ inline void transfer(const Transfer& a) {
  const unsigned parts = static_cast<unsigned>(a.parts);  // a 64-bit division would be a call, with a stack
  const unsigned part = blockIdx.x % parts;
  const Row row = a.rows[blockIdx.x / parts];
  if (threadIdx.x == 0 && row.wait_for != nullptr) {
    while (load_flag(row.wait_for) < row.wait_value) pause();
  }
  __syncthreads();  // after the flag was seen
  for (Int64 i = 0; i < row.pieces; ++i) copy_part(a.pieces[row.first_piece + i], part, parts);
  __syncthreads();  // before the flag is raised
  if (threadIdx.x == 0 && arrive(row.arrived) + 1 == row.expected) {
    *row.arrived = 0;
    if (row.raise != nullptr) raise_flag(row.raise, row.raise_value);
  }
}

}  // namespace gimbal::migration

extern "C" __global__ void __launch_bounds__(gimbal::migration::kThreads)
    gimbal_transfer(const gimbal::migration::Transfer arguments) {
  gimbal::migration::transfer(arguments);
}
