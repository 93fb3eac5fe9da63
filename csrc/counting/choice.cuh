// Which copy of an expert serves a pick: the formulas of gimbal_kernels/counting/reference.py, for host and device.
#pragma once

#ifndef GIMBAL_HD
#if defined(__CUDACC__)
#define GIMBAL_HD __host__ __device__ __forceinline__
#else
#define GIMBAL_HD inline
#endif
#endif

namespace gimbal::counting {

constexpr unsigned kRowStep = 2654435769u;
constexpr unsigned kCarry3Step = 2542331567u;
constexpr unsigned kCarry5Step = 3337167497u;

// A point of the unit circle in units of 2^-32; products and sums wrap.
GIMBAL_HD unsigned turn_of_row(unsigned row) {
  return row * kRowStep + (row >> 3) * kCarry3Step + (row >> 5) * kCarry5Step;
}

// turn · choices / 2^32, in units of 2^-16 of a copy; below choices · 2^16.
GIMBAL_HD unsigned scaled(unsigned turn, unsigned choices) {
  return static_cast<unsigned>((static_cast<unsigned long long>(turn) * choices) >> 16);
}

// Index in [0, choices) when every copy takes the same share. choices >= 1.
GIMBAL_HD unsigned even_choice(unsigned turn, unsigned source, unsigned expert, unsigned choices) {
  return ((scaled(turn, choices) >> 16) + source + expert) % choices;
}

// Index in [0, choices) when copy j takes the part of the circle from threshold j - 1 to threshold j, in units of
// 2^-16 of a copy. thresholds: [choices], ascending; the last is choices · 2^16 and is not read.
GIMBAL_HD unsigned weighted_choice(unsigned turn, unsigned source, unsigned expert, unsigned choices,
                                   const int* thresholds) {
  const unsigned circle = choices << 16;
  unsigned at = scaled(turn, choices) + ((source + expert) % choices << 16);
  if (at >= circle) at -= circle;
  unsigned index = 0;
  while (index + 1 < choices && at >= static_cast<unsigned>(thresholds[index])) ++index;
  return index;
}

}  // namespace gimbal::counting
