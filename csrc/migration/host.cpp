// C interface of migration, called from gimbal_kernels/migration, which validates.

#include <cstdint>
#include <exception>
#include <vector>

#include "migration/align.hpp"
#include "migration/colouring.hpp"
#include "migration/flags.hpp"
#include "migration/sources.hpp"

namespace {

using namespace gimbal::migration;

void plan(const Shape& shape, const std::int32_t* old, const std::int32_t* wanted, const std::int32_t* node_of_rank,
          std::int32_t* target, std::int32_t* transfers, std::int32_t* copies, std::int64_t* counts) {
  Alignment aligned;
  RankAligner aligner;
  const std::size_t size = shape.size();
  for (std::size_t at = 0; at < shape.layers * shape.slots; at += size) {
    aligner.align(old + at, wanted + at, target + at, size, static_cast<std::int32_t>(at / shape.slots),
                  static_cast<std::int32_t>(at % shape.slots), aligned);
  }
  SourceChoice choice(shape, old, node_of_rank);
  const std::vector<std::int32_t> senders = choice.choose(aligned.needs);
  for (std::size_t i = 0; i < senders.size(); ++i) {
    const Need& need = aligned.needs[i];
    const std::int32_t row[6] = {need.layer,
                                 need.expert,
                                 senders[i],
                                 choice.source_slot(need, senders[i]),
                                 static_cast<std::int32_t>(need.slot / size),
                                 need.slot};
    for (int k = 0; k < 6; ++k) *transfers++ = row[k];
  }
  for (const LocalCopy& copy : aligned.copies) {
    for (const std::int32_t value : {copy.layer, copy.expert, copy.source, copy.destination}) *copies++ = value;
  }
  counts[0] = static_cast<std::int64_t>(aligned.needs.size());
  counts[1] = static_cast<std::int64_t>(aligned.copies.size());
}

}  // namespace

// Bumped whenever the signature or the meaning of an argument changes.
extern "C" std::int32_t gimbal_migration_abi() { return 1; }

// shape: layers, slots, ranks. old, wanted, target: [layers, slots]. node_of_rank: [ranks]. transfers: room for
// [layers * slots, 6]; copies: for [layers * slots, 4]; counts: how many of each. Returns 0, or 1 when memory ran out.
extern "C" std::int32_t gimbal_migration_plan(const std::int64_t* shape, const std::int32_t* old,
                                              const std::int32_t* wanted, const std::int32_t* node_of_rank,
                                              std::int32_t* target, std::int32_t* transfers, std::int32_t* copies,
                                              std::int64_t* counts) {
  try {
    plan({static_cast<std::size_t>(shape[0]), static_cast<std::size_t>(shape[1]), static_cast<std::size_t>(shape[2])},
         old, wanted, node_of_rank, target, transfers, copies, counts);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}

// sources, destinations: ranks, [count]. colours: [count], written. Returns the number of rounds, or -1 when memory
// ran out.
extern "C" std::int64_t gimbal_migration_colour(std::int64_t ranks, std::int64_t count, const std::int32_t* sources,
                                                const std::int32_t* destinations, std::int32_t* colours) {
  try {
    Colouring colouring(static_cast<std::size_t>(ranks), static_cast<std::size_t>(count), sources, destinations);
    colouring.run(colours);
    return static_cast<std::int64_t>(colouring.rounds());
  } catch (const std::exception&) {
    return -1;
  }
}

extern "C" void gimbal_migration_copy(const Piece* pieces, std::int64_t count) { copy_pieces(pieces, count); }

extern "C" std::uint64_t gimbal_migration_load(const std::uint64_t* flag) { return load_acquire(flag); }

extern "C" void gimbal_migration_store(std::uint64_t* flag, std::uint64_t value) { store_release(flag, value); }

extern "C" std::uint64_t gimbal_migration_swap(std::uint64_t* flag, std::uint64_t expected, std::uint64_t wanted) {
  return swap_if(flag, expected, wanted);
}
