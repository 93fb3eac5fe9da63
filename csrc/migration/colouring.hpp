// Rounds of transfers: edge colouring of a bipartite multigraph with as many colours as the largest degree (König).
// The same rules and order as `colour` in gimbal_kernels/migration/reference.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gimbal::migration {

class Colouring {
 public:
  Colouring(std::size_t ranks, std::size_t count, const std::int32_t* sources, const std::int32_t* destinations)
      : count_(count), source_(sources), destination_(destinations) {
    std::vector<std::size_t> out(ranks), in(ranks);
    for (std::size_t i = 0; i < count; ++i) rounds_ = std::max({rounds_, ++out[source_[i]], ++in[destination_[i]]});
    words_ = (rounds_ + 63) / 64;
    for (Side* side : {&send_, &receive_}) {
      side->edge.assign(ranks * rounds_, -1);
      side->free.assign(ranks * words_, 0);
      for (std::size_t rank = 0; rank < ranks; ++rank) {
        for (std::size_t c = 0; c < rounds_; ++c) side->free[rank * words_ + c / 64] |= std::uint64_t{1} << (c % 64);
      }
    }
  }

  std::size_t rounds() const { return rounds_; }

  void run(std::int32_t* colours) {
    colour_ = colours;
    for (std::size_t i = 0; i < count_; ++i) {
      const std::uint64_t* out = &send_.free[source_[i] * words_];
      const std::uint64_t* in = &receive_.free[destination_[i] * words_];
      std::size_t chosen = lowest([&](std::size_t w) { return out[w] & in[w]; });
      if (chosen == rounds_) {
        chosen = lowest([&](std::size_t w) { return out[w]; });
        swap_path(destination_[i], chosen, lowest([&](std::size_t w) { return in[w]; }));
      }
      paint(static_cast<std::int32_t>(i), chosen);
    }
  }

 private:
  struct Side {
    std::vector<std::int32_t> edge;   // [ranks, rounds]: the transfer of a rank with a colour, or -1
    std::vector<std::uint64_t> free;  // [ranks, words]: its free colours as bits
  };

  template <typename Word>
  std::size_t lowest(Word word) const {
    for (std::size_t w = 0; w < words_; ++w) {
      if (const std::uint64_t bits = word(w)) return w * 64 + static_cast<std::size_t>(__builtin_ctzll(bits));
    }
    return rounds_;
  }

  void set(Side& side, std::int32_t rank, std::size_t colour, std::int32_t edge) {
    side.edge[rank * rounds_ + colour] = edge;
    side.free[rank * words_ + colour / 64] ^= std::uint64_t{1} << (colour % 64);
  }

  void paint(std::int32_t i, std::size_t colour) {
    colour_[i] = static_cast<std::int32_t>(colour);
    set(send_, source_[i], colour, i);
    set(receive_, destination_[i], colour, i);
  }

  // Swaps two colours along the path that starts with `first` at a receiver. All edges are taken off before any is
  // put back: in between, a rank would have two edges of one colour.
  void swap_path(std::int32_t receiver, std::size_t first, std::size_t second) {
    path_.clear();
    std::int32_t at = receiver;
    std::size_t colour = first;
    bool receiving = true;
    for (;;) {
      const std::int32_t edge = (receiving ? receive_ : send_).edge[at * rounds_ + colour];
      if (edge < 0) break;
      colour = first + second - colour;
      path_.emplace_back(edge, colour);
      at = receiving ? source_[edge] : destination_[edge];
      receiving = !receiving;
    }
    for (const auto& [edge, painted] : path_) {
      set(send_, source_[edge], first + second - painted, -1);
      set(receive_, destination_[edge], first + second - painted, -1);
    }
    for (const auto& [edge, painted] : path_) paint(edge, painted);
  }

  std::size_t count_, rounds_ = 0, words_ = 0;
  const std::int32_t *source_, *destination_;
  std::int32_t* colour_ = nullptr;
  Side send_, receive_;
  std::vector<std::pair<std::int32_t, std::size_t>> path_;
};

}  // namespace gimbal::migration
