// The device code of this folder; compile with -fmad=false, prices must round as on the host.
#include "placement/kernels.cuh"
