// The solver of method "portfolio" for processors with AVX2.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2")  // for all that follows
#define GIMBAL_ISA avx2
#define GIMBAL_LANES 8
#include "placement/solver.hpp"

namespace gimbal::placement {

const Solver& avx2_solver() { return avx2::solver(); }

}  // namespace gimbal::placement
#endif
