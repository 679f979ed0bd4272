// The part of a CUDA driver that torch asks: one context, which is active. The rest is generated (stub_cuda.py).
#include <cuda.h>
#include <stdlib.h>

CUresult cuInit(unsigned int flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13020;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int *count) {
  const char *text = getenv("STUB_CUDA_DEVICES");
  *count = text ? atoi(text) : 8;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice *device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  *context = (CUcontext)(size_t)16;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "the CUDA stub refuses this call";
  return CUDA_SUCCESS;
}
