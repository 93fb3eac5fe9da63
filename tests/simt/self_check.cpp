// Small kernels that are right or wrong in a known way; the argument chooses one. Exit code 1: a wrong result.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "simt.hpp"

namespace {

// Shared memory is reversed through the block: out[i] = input of the opposite thread.
__global__ void reverse(const int* in, int* out, bool with_barrier) {
  GIMBAL_SHARED(int, held);
  held[threadIdx.x] = in[threadIdx.x];
  if (with_barrier) __syncthreads();
  out[threadIdx.x] = held[blockDim.x - 1 - threadIdx.x];
}

__global__ void sum(int* total, bool atomic) {
  const unsigned lanes = __ballot_sync(0xffffffffu, threadIdx.x % 3 == 0);
  if ((threadIdx.x & 31u) != 0) return;
  if (atomic) {
    atomicAdd(total, __popc(lanes));
  } else {
    simt::maybe_yield();
    *total += __popc(lanes);
  }
}

__global__ void diverge() {
  if (threadIdx.x < 7) __syncthreads();
  __ballot_sync(0xffffffffu, true);
}

__global__ void past_the_end(int* out) {
  GIMBAL_SHARED(int, held);
  held[threadIdx.x + 1] = 1;
  __syncthreads();
  out[threadIdx.x] = held[threadIdx.x];
}

bool reversed(bool with_barrier, unsigned seed) {
  std::vector<int> in(96), out(96);
  for (int i = 0; i < 96; ++i) in[i] = 1000 + i;
  const int* from = in.data();
  int* to = out.data();
  simt::launch(1, 96, 96 * sizeof(int), seed, 1, [=] { reverse(from, to, with_barrier); });
  for (int i = 0; i < 96; ++i) {
    if (out[i] != in[95 - i]) return false;
  }
  return true;
}

bool summed(bool atomic, unsigned seed) {
  int total = 0;
  int* p = &total;
  simt::launch(8, 64, 0, seed, 2, [=] { sum(p, atomic); });
  return total == 8 * 22;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  bool right = true;
  for (unsigned seed = 0; seed < 8; ++seed) {
    if (what == "barrier") right = right && reversed(true, seed);
    if (what == "no-barrier") right = right && reversed(false, seed);
    if (what == "atomic") right = right && summed(true, seed);
    if (what == "no-atomic") right = right && summed(false, seed);
    if (what == "deadlock") simt::launch(1, 32, 0, seed, 1, [] { diverge(); });
    int out[32];
    int* p = out;
    if (what == "past-the-end") simt::launch(1, 32, 32 * sizeof(int), seed, 1, [=] { past_the_end(p); });
  }
  return right ? 0 : 1;
}
