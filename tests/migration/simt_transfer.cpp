// Two ranks that push experts into each other's staging and commit them, on the host, under random schedules.
//
// Per wave each rank launches the kernel twice, as a server would on two streams: a push into the peer's staging and a
// commit from its own, both at once. Two staging buffers alternate; pieces have sizes and addresses of all alignments. Prints
// how many bytes are wrong; every array lies in an allocation of exactly its size.

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "simt.hpp"

#include "migration/transfer.cuh"

namespace {

using namespace gimbal::migration;

constexpr int kRows = 2, kWaves = 4, kParts = 2, kGenerations = 2;
constexpr Int64 kSizes[] = {2560, 40, 200 + 3};  // several rounds of 16 bytes, few bytes, not a multiple of 16
constexpr int kPieces = 3;
constexpr Int64 kRowBytes = 2560 + 48 + 208;

unsigned char content(int rank, int wave, int row, Int64 at) {
  return static_cast<unsigned char>(rank * 101 + wave * 31 + row * 7 + at * 13 + at / 251);
}

struct Rank {
  std::vector<std::vector<unsigned char>> weights, slots;  // [wave * rows][bytes], what goes out and what came in
  std::vector<unsigned char> staging = std::vector<unsigned char>(kGenerations * kRows * kRowBytes, 0xEE);
  std::vector<Word> flags = std::vector<Word>(kGenerations * kRows, 0);
  Word consumed = 0;
};

Int64 offset(int piece) {
  Int64 at = 0;
  for (int i = 0; i < piece; ++i) at += (kSizes[i] + 15) / 16 * 16;
  return at;
}

Int64 size_of_row() {
  Int64 sum = 0;
  for (const Int64 size : kSizes) sum += size;
  return sum;
}

// Pieces and rows of one launch; `tight` is the expert's memory, one piece right after the other.
struct Launch {
  std::vector<Piece> pieces;
  std::vector<Row> rows;
  std::vector<unsigned> arrived = std::vector<unsigned>(kRows, 0);

  void add(unsigned char* tight, unsigned char* staged, bool push, Row row) {
    row.first_piece = static_cast<Int64>(pieces.size());
    row.pieces = kPieces;
    for (int i = 0; i < kPieces; ++i) {
      unsigned char* out = staged + offset(i);
      pieces.push_back(push ? Piece{tight, out, kSizes[i]} : Piece{out, tight, kSizes[i]});
      tight += kSizes[i];
    }
    rows.push_back(row);
  }

  void run(std::uint64_t seed) {
    const Transfer arguments{pieces.data(), rows.data(), kParts};
    simt::launch(kRows * kParts, kThreads, 0, seed, kRows * kParts, [=] { gimbal_transfer(arguments); });
  }
};

void push(Rank& own, Rank& peer, int wave, std::uint64_t seed) {
  Launch launch;
  const int generation = wave % kGenerations;
  for (int row = 0; row < kRows; ++row) {
    const int at = generation * kRows + row;
    const Word needed = wave >= kGenerations ? static_cast<Word>(wave - kGenerations + 1) : 0;
    launch.add(own.weights[wave * kRows + row].data(), peer.staging.data() + at * kRowBytes, true,
               {0, 0, &peer.consumed, needed, &launch.arrived[row], kParts, &peer.flags[at],
                static_cast<Word>(wave + 1)});
  }
  launch.run(seed);
}

void commit(Rank& own, int wave, std::uint64_t seed) {
  Launch launch;
  const int generation = wave % kGenerations;
  for (int row = 0; row < kRows; ++row) {
    const int at = generation * kRows + row;
    launch.add(own.slots[wave * kRows + row].data(), own.staging.data() + at * kRowBytes, false,
               {0, 0, &own.flags[at], static_cast<Word>(wave + 1), &launch.arrived[0], kRows * kParts, &own.consumed,
                static_cast<Word>(wave + 1)});
  }
  launch.run(seed);
}

long long exchange(std::uint64_t seed) {
  Rank ranks[2];
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < kWaves * kRows; ++i) {
      std::vector<unsigned char> expert(static_cast<std::size_t>(size_of_row()));
      for (std::size_t at = 0; at < expert.size(); ++at) {
        expert[at] = content(r, i / kRows, i % kRows, static_cast<Int64>(at));
      }
      ranks[r].slots.emplace_back(expert.size(), 0x77);
      ranks[r].weights.push_back(std::move(expert));
    }
  }
  std::vector<std::thread> streams;
  for (int r = 0; r < 2; ++r) {
    streams.emplace_back([&, r] {
      for (int wave = 0; wave < kWaves; ++wave) push(ranks[r], ranks[1 - r], wave, seed * 100 + wave * 4 + r);
    });
    streams.emplace_back([&, r] {
      // Half of the seeds: pushes run as far ahead as they can before anything is consumed.
      if (seed % 2 == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
      for (int wave = 0; wave < kWaves; ++wave) commit(ranks[r], wave, seed * 100 + wave * 4 + r + 2);
    });
  }
  for (std::thread& stream : streams) stream.join();
  long long wrong = 0;
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < kWaves * kRows; ++i) {
      for (std::size_t at = 0; at < ranks[r].slots[i].size(); ++at) {
        wrong += ranks[r].slots[i][at] != ranks[1 - r].weights[i][at];
      }
    }
  }
  return wrong;
}

}  // namespace

int main(int count, char** arguments) {
  const int seeds = count > 1 ? std::atoi(arguments[1]) : 1;
  long long wrong = 0;
  for (int seed = 1; seed <= seeds; ++seed) wrong += exchange(static_cast<std::uint64_t>(seed));
  std::printf("%lld bytes wrong\n", wrong);
  return wrong == 0 ? 0 : 1;
}
