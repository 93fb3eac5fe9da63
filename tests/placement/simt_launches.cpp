// Runs one launch of the portfolio kernels as the product made it, on the host.
//
// Usage: program FILE SEED. FILE: 64-bit numbers (kernel, blocks, threads, shared bytes, arguments, regions), the arguments, and
// each region of device memory: its address, its bytes, its content. Addresses are translated; one outside all regions
// ends the program. Every region but the first, which holds the views, is written back to the start of FILE.

#include "simt.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "placement/kernels.cuh"

namespace {

using namespace gimbal::placement;

struct Region {
  u64 address, bytes;
  std::unique_ptr<char[]> memory;  // of its own, so that AddressSanitizer sees an access past it
};

std::vector<Region> regions;

u64 number(std::FILE* file) {
  u64 value = 0;
  if (std::fread(&value, 8, 1, file) != 1) std::exit(2);
  return value;
}

template <typename T>
T* at(u64 address) {
  for (const Region& region : regions)
    if (address >= region.address && address < region.address + region.bytes)
      return reinterpret_cast<T*>(region.memory.get() + (address - region.address));
  std::fprintf(stderr, "no memory at %llx\n", address);
  std::exit(3);
}

template <typename T>
void move(T*& pointer) {
  pointer = at<T>(reinterpret_cast<u64>(pointer));
}

// The views with pointers of this process; the largest shared memory that one of them needs.
std::size_t translate(View* views, std::size_t count) {
  std::size_t most = 0;
  for (View* y = views; y != views + count; ++y) {
    move(y->rank_class);
    move(y->comm);
    move(y->home);
    move(y->load);
    move(y->share);
    move(y->cooling);
    if (y->cost_rows != nullptr) std::exit(3);
    most = std::max(most, shared_bytes(*y));
  }
  return most;
}

}  // namespace

int main(int count, char** arguments) {
  std::FILE* file = count == 3 ? std::fopen(arguments[1], "rb+") : nullptr;
  if (file == nullptr) return 2;
  u64 head[6];
  for (u64& value : head) value = number(file);
  std::vector<u64> a;
  for (u64 i = 0; i < head[4]; ++i) a.push_back(number(file));
  for (u64 i = 0; i < head[5]; ++i) {
    Region region{number(file), number(file), nullptr};
    region.memory.reset(new char[region.bytes]);
    if (std::fread(region.memory.get(), 1, region.bytes, file) != region.bytes) return 2;
    regions.push_back(std::move(region));
  }
  View* const views = at<View>(a[0]);
  if (reinterpret_cast<char*>(views) != regions[0].memory.get() || regions[0].bytes % sizeof(View) != 0) return 3;
  const std::size_t needed = translate(views, regions[0].bytes / sizeof(View));
  if (needed != head[3]) {
    std::fprintf(stderr, "shared memory: %llu bytes, needed %zu\n", head[3], needed);
    return 4;
  }
  const int number_of_kernel = static_cast<int>(head[0]), third = static_cast<int>(a[2]), fourth = static_cast<int>(a[3]);
  simt::launch(static_cast<unsigned>(head[1]), static_cast<unsigned>(head[2]), needed,
               static_cast<std::uint64_t>(std::atoll(arguments[2])), 1, [&] {
                 if (number_of_kernel == 0) gimbal_portfolio_starts(views, at<float>(a[1]), at<int>(a[2]));
                 if (number_of_kernel == 1)
                   gimbal_portfolio_settle(views, at<int>(a[1]), at<int>(a[2]), fourth, at<int>(a[4]), at<long long>(a[5]));
                 if (number_of_kernel == 2)
                   gimbal_portfolio_kick(views, at<int>(a[1]), third, fourth, at<int>(a[4]), at<long long>(a[5]));
               });
  std::rewind(file);
  for (std::size_t i = 1; i < regions.size(); ++i) std::fwrite(regions[i].memory.get(), 1, regions[i].bytes, file);
  return std::fclose(file);
}
