// The part of a CUDA runtime whose answers matter to torch: it reports devices that do not exist, so that fake CUDA
// tensors take the paths of real ones. There is no device memory, and so no real CUDA tensor; host memory is real.
// It counts how often the host would wait for the device. All other functions are generated (stub_cuda.py).
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define VERSION 13020

static _Thread_local int current_device;
static atomic_uintptr_t last_handle = 4096;
static atomic_ulong waits;

static int device_count(void) {
  const char *text = getenv("STUB_CUDA_DEVICES");
  return text ? atoi(text) : 8;
}

static void *new_handle(void) { return (void *)atomic_fetch_add(&last_handle, 64); }

// ---------------------------------------------------------------------------------------------------- what is counted

unsigned long stub_cuda_waits(void) { return atomic_load(&waits); }

static cudaError_t wait_for_device(void) {
  atomic_fetch_add(&waits, 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize(void) { return wait_for_device(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return wait_for_device(); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) { return wait_for_device(); }

// ------------------------------------------------------------------------------------------------------------ devices

cudaError_t cudaGetDeviceCount(int *count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

// An H100 SXM as its deviceQuery reports it.
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA H100 80GB HBM3");
  const char *memory = getenv("STUB_CUDA_MEMORY");
  found->totalGlobalMem = memory ? strtoull(memory, NULL, 10) : 85520809984UL;
  found->major = 9;
  found->multiProcessorCount = 132;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->regsPerMultiprocessor = 65536;
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = 232448;
  found->sharedMemPerMultiprocessor = 233472;
  found->l2CacheSize = 52428800;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  switch (attribute) {
  case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
  case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
  case cudaDevAttrMultiProcessorCount: *value = 132; break;
  default: *value = 1;
  }
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  strncpy(text, "0000:1b:00.0", length);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
  *function = driver ? dlsym(driver, name) : NULL;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// -------------------------------------------------------------------------------------------------- streams and events

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority) {
  *stream = new_handle();
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags) {
  *event = new_handle();
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end) {
  *milliseconds = 1;
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- memory

cudaError_t cudaMalloc(void **pointer, size_t size) {
  *pointer = NULL;
  return cudaErrorMemoryAllocation;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = 85520809984UL;
  *free_bytes = 84000000000UL;
  return cudaSuccess;
}

// Page-locked memory by its address, for who asks whether a pointer is page-locked.
static struct block {
  struct block *next;
  char *start;
  size_t size;
} *blocks;
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int flags) {
  struct block *made = malloc(sizeof *made);
  if (!made || !(*pointer = malloc(size ? size : 1))) return cudaErrorMemoryAllocation;
  pthread_mutex_lock(&guard);
  *made = (struct block){blocks, *pointer, size};
  blocks = made;
  pthread_mutex_unlock(&guard);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned int flags) {
  struct block *made = malloc(sizeof *made);
  if (!made) return cudaErrorMemoryAllocation;
  pthread_mutex_lock(&guard);
  *made = (struct block){blocks, pointer, size};
  blocks = made;
  pthread_mutex_unlock(&guard);
  return cudaSuccess;
}
static void forget(void *pointer) {
  pthread_mutex_lock(&guard);
  for (struct block **at = &blocks; *at; at = &(*at)->next)
    if ((*at)->start == pointer) {
      struct block *gone = *at;
      *at = gone->next;
      free(gone);
      break;
    }
  pthread_mutex_unlock(&guard);
}
cudaError_t cudaHostUnregister(void *pointer) {
  forget(pointer);
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
cudaError_t cudaFreeHost(void *pointer) {
  forget(pointer);
  free(pointer);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  memset(found, 0, sizeof *found);
  found->type = cudaMemoryTypeUnregistered;
  pthread_mutex_lock(&guard);
  for (struct block *each = blocks; each; each = each->next)
    if ((const char *)pointer >= each->start && (const char *)pointer < each->start + each->size)
      found->type = cudaMemoryTypeHost;
  pthread_mutex_unlock(&guard);
  return cudaSuccess;
}

// ------------------------------------------------------------------------------------------------------------- errors

const char *cudaGetErrorName(cudaError_t error) { return "cudaErrorOfStub"; }
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "the CUDA stub has no device memory: only fake tensors may be on cuda"
                                            : "the CUDA stub refuses this call";
}
