// The counting kernels as one translation unit, for the prebuilt fatbin and for NVRTC.
#include "counting/counting.cuh"
