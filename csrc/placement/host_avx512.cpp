// The solver of method "portfolio" for processors with AVX-512.

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")  // for all that follows
#define GIMBAL_ISA avx512
#define GIMBAL_LANES 16
#include "placement/solver.hpp"

namespace gimbal::placement {

const Solver& avx512_solver() { return avx512::solver(); }

}  // namespace gimbal::placement
#endif
