// FATHOM_HOST_DEVICE: a function for the CPU and, in CUDA sources, for the device.
#pragma once

#ifdef __CUDACC__
#define FATHOM_HOST_DEVICE __host__ __device__
#else
#define FATHOM_HOST_DEVICE
#endif
