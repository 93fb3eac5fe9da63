// Runs the copy kernel on the host by a table of descriptors that the product made.
//
// Usage: program FILE SEED. FILE: five 64-bit numbers (rows, parts, bytes of the table, where the pieces begin in it, bytes
// of memory), the table, the memory. Addresses in the table are offsets into the memory, which is written back
// to the start of FILE.

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "simt.hpp"

#include "migration/transfer.cuh"

namespace {

using namespace gimbal::migration;

template <typename T>
T* move_by(T* offset, unsigned char* base) {
  return reinterpret_cast<T*>(base + reinterpret_cast<std::uintptr_t>(offset));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  std::FILE* file = std::fopen(arguments[1], "rb+");
  std::uint64_t head[5];
  if (file == nullptr || std::fread(head, 8, 5, file) != 5) return 2;
  const std::uint64_t count_of_rows = head[0], table_bytes = head[2], split = head[3], memory_bytes = head[4];
  std::vector<uint4> table((table_bytes + 15) / 16), storage(memory_bytes / 16);
  unsigned char* memory = reinterpret_cast<unsigned char*>(storage.data());
  if (std::fread(table.data(), 1, table_bytes, file) != table_bytes) return 2;
  if (std::fread(memory, 1, memory_bytes, file) != memory_bytes) return 2;
  Row* rows = reinterpret_cast<Row*>(table.data());
  Piece* pieces = reinterpret_cast<Piece*>(reinterpret_cast<unsigned char*>(table.data()) + split);
  for (std::uint64_t i = 0; i < count_of_rows; ++i) {
    rows[i].arrived = move_by(rows[i].arrived, memory);
    for (Int64 k = rows[i].first_piece; k < rows[i].first_piece + rows[i].pieces; ++k) {
      pieces[k].source = move_by(pieces[k].source, memory);
      pieces[k].destination = move_by(pieces[k].destination, memory);
    }
  }
  const Transfer arguments_of_kernel{pieces, rows, static_cast<Int64>(head[1])};
  const auto seed = static_cast<std::uint64_t>(std::atoll(arguments[2]));
  const auto blocks = static_cast<unsigned>(count_of_rows * head[1]);
  simt::launch(blocks, kThreads, 0, seed, 2, [=] { gimbal_transfer(arguments_of_kernel); });
  std::rewind(file);
  std::fwrite(memory, 1, memory_bytes, file);
  return std::fclose(file);
}
