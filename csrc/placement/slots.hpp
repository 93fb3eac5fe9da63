// From the experts of each rank to the expert of each slot.
#pragma once

#include <cstdint>

#include "placement/layer.hpp"

namespace gimbal::placement {

// An expert that stays on its rank keeps its slot (of two copies there the one in the lower slot stays); the others
// fill the freed slots, ascending id into ascending slot. `held` is used up. slots: [slots]
inline void slots_in_ranks(const Layer& layer, RankSets held, std::int32_t* slots) {
  const Shape& shape = layer.shape;
  for (std::size_t r = 0; r < shape.ranks; ++r) {
    const std::size_t first = r * shape.slots_per_rank, last = first + shape.slots_per_rank;
    for (std::size_t p = first; p < last; ++p) {
      const bool stays = layer.current != nullptr && held.has(r, static_cast<std::size_t>(layer.current[p]));
      slots[p] = stays ? layer.current[p] : -1;
      if (stays) held.remove(r, static_cast<std::size_t>(layer.current[p]));
    }
    std::size_t expert = 0;
    for (std::size_t p = first; p < last; ++p) {
      if (slots[p] >= 0) continue;
      while (!held.has(r, expert)) ++expert;
      slots[p] = static_cast<std::int32_t>(expert++);
    }
  }
}

// Slot p holds expert p mod E: the placement when there is neither traffic nor a current one.
inline void keep_or_identity(const Layer& layer, std::int32_t* slots) {
  for (std::size_t p = 0; p < layer.shape.slots(); ++p)
    slots[p] = layer.current != nullptr ? layer.current[p] : static_cast<std::int32_t>(p % layer.shape.experts);
}

}  // namespace gimbal::placement
