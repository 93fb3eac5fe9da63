// One layer of a placement problem, and the experts that its ranks are given.
//
// Every method here is specified by gimbal_kernels/placement/reference.py and must give its bytes: float64, sums
// in ascending order, no fused multiply-add (the library is compiled with -ffp-contract=off).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gimbal::placement {

struct Shape {
  std::size_t sources, experts, ranks, slots_per_rank;

  std::size_t slots() const { return ranks * slots_per_rank; }
};

struct Weights {
  double alpha, beta, gamma;
};

struct Layer {
  Shape shape;
  const double* traffic;        // [sources, experts] picks
  const double* distance;       // [sources, ranks]
  const std::int32_t* current;  // [slots], or null when nothing is loaded yet
};

// The experts of every rank: a set per rank, and how many it holds.
class RankSets {
 public:
  explicit RankSets(const Shape& shape)
      : experts_(shape.experts), held_(shape.ranks * shape.experts), filled_(shape.ranks) {}

  bool has(std::size_t rank, std::size_t expert) const { return held_[rank * experts_ + expert] != 0; }
  std::size_t filled(std::size_t rank) const { return filled_[rank]; }

  void add(std::size_t rank, std::size_t expert) {
    held_[rank * experts_ + expert] = 1;
    ++filled_[rank];
  }
  void remove(std::size_t rank, std::size_t expert) {
    held_[rank * experts_ + expert] = 0;
    --filled_[rank];
  }

 private:
  std::size_t experts_;
  std::vector<unsigned char> held_;  // [ranks, experts]
  std::vector<std::size_t> filled_;  // [ranks]
};

// Picks of each expert over all sources, first source first. [experts]
inline std::vector<double> expert_loads(const Layer& layer) {
  std::vector<double> load(layer.shape.experts, 0.0);
  for (std::size_t s = 0; s < layer.shape.sources; ++s)
    for (std::size_t e = 0; e < layer.shape.experts; ++e) load[e] += layer.traffic[s * layer.shape.experts + e];
  return load;
}

}  // namespace gimbal::placement
