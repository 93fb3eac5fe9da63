// Runs the CUDA counting kernels on the host: calls from one file, results to another (simt_lane.py writes and reads).
//
// A call: 64-bit words [kernel, blocks, shared bytes, seed, workers], the words of Arguments with pointers left 0, the
// sizes in bytes of the ten arrays (-1: absent), then their contents. A result: the contents of out, counts and load afterwards.
// Every array lies in an allocation of exactly its size, so that AddressSanitizer sees an access past either end.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "simt.hpp"

#include "counting/counting.cuh"

namespace {

using gimbal::counting::Arguments;

constexpr int kArrays = 10, kOut = 1, kCounts = 5, kLoad = 6;
using Kernel = void (*)(const Arguments);
const Kernel kKernels[] = {gimbal_count_i32,
                           gimbal_count_i64,
                           gimbal_count_i32_weighted,
                           gimbal_count_i64_weighted,
                           gimbal_count_i32_per_row,
                           gimbal_count_i64_per_row,
                           gimbal_count_i32_per_row_weighted,
                           gimbal_count_i64_per_row_weighted};

struct Header {
  long long kernel, blocks, shared_bytes, seed, workers;
};

void read(std::FILE* file, void* to, std::size_t bytes) {
  if (bytes != 0 && std::fread(to, 1, bytes, file) != bytes) {
    std::fprintf(stderr, "the file of calls is cut short\n");
    std::exit(2);
  }
}

void run_call(const Header& header, std::FILE* calls, std::FILE* results) {
  Arguments arguments;
  long long sizes[kArrays];
  void* arrays[kArrays];
  read(calls, &arguments, sizeof(arguments));
  read(calls, sizes, sizeof(sizes));
  for (int i = 0; i < kArrays; ++i) {
    arrays[i] = sizes[i] < 0 ? nullptr : std::malloc(static_cast<std::size_t>(sizes[i]));
    if (sizes[i] > 0) read(calls, arrays[i], static_cast<std::size_t>(sizes[i]));
  }
  std::memcpy(&arguments, arrays, sizeof(arrays));
  if (arguments.call.out == nullptr) arguments.call.out = arrays[0];  // in place
  const Kernel kernel = kKernels[header.kernel];
  simt::launch(static_cast<unsigned>(header.blocks), gimbal::counting::kThreads,
               static_cast<std::size_t>(header.shared_bytes), static_cast<std::uint64_t>(header.seed),
               static_cast<int>(header.workers), [=] { kernel(arguments); });
  for (const int i : {sizes[kOut] < 0 ? 0 : kOut, kCounts, kLoad}) {
    if (sizes[i] > 0) std::fwrite(arrays[i], 1, static_cast<std::size_t>(sizes[i]), results);
  }
  for (void* array : arrays) std::free(array);
}

}  // namespace

int main(int count, char** names) {
  if (count != 3) return 2;
  std::FILE* calls = std::fopen(names[1], "rb");
  std::FILE* results = std::fopen(names[2], "wb");
  if (calls == nullptr || results == nullptr) return 2;
  Header header;
  while (std::fread(&header, sizeof(header), 1, calls) == 1) run_call(header, calls, results);
  std::fclose(results);
  std::fclose(calls);
  return 0;
}
