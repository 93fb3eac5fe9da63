// The copy kernel as one translation unit, for the prebuilt fatbin and for NVRTC.
#include "migration/transfer.cuh"
