/* A GPU without numbers: a stand-in for the CUDA runtime and driver, cuBLAS, cuSOLVER and NCCL, for a machine that has no GPU.
 *
 * Preloaded under an unchanged CUDA build of PyTorch. Memory is address space that nobody touches (so 139 GiB fit anywhere), a kernel launch is
 * counted by the kernel's name and does nothing, small copies are made (so that what the host sent comes back), large ones are not.
 * What is real: the dispatcher, which device a tensor is on, which kernels a GPU has for a dtype, refusals of deterministic mode, autograd, streams and events
 * as PyTorch orders them, the caching allocator with its peaks, the host's time before the driver, the compiler (Triton, ptxas).
 * What is not: any number that a kernel would have computed, any time of the device.
 *
 * Build: see build.sh. Read from Python: counters.py.
 */
#define _GNU_SOURCE
#define CUDAAPI
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <stdint.h>
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#include <sys/mman.h>
#include <execinfo.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cublas_api.h>
#include <cublasLt.h>
#include <cusolverDn.h>
#include <nccl.h>

#define EXPORT __attribute__((visibility("default")))
#define TOTAL ((size_t)141 << 30)
static const size_t SMALL = (size_t)1 << 20;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- counters ---- */
enum { LAUNCH, GEMM, TRITON, MEMCPY_HD_PINNED, MEMCPY_HD_PAGEABLE, MEMCPY_DH_PINNED, MEMCPY_DH_PAGEABLE, MEMCPY_DD, MEMSET, STREAM_SYNC, DEVICE_SYNC,
  EVENT_SYNC, EVENT_RECORD, STREAM_WAIT, EVENT_QUERY, MALLOC, FREE, HOST_ALLOC, NCCL_CALL, NCCL_GROUP, STREAM_QUERY, EVENT_CREATE, HOST_REGISTER, NCOUNTERS };
static const char *counter_names[NCOUNTERS] = {"launch","gemm","triton","h2d_pinned","h2d_pageable","d2h_pinned","d2h_pageable","d2d","memset","stream_sync","device_sync",
  "event_sync","event_record","stream_wait","event_query","malloc","free","host_alloc","nccl","nccl_group","stream_query","event_create","host_register"};
static int64_t counters[NCOUNTERS];
static int64_t copied[4];
static double gemm_flops;
#define COUNT(c) __atomic_fetch_add(&counters[c], 1, __ATOMIC_RELAXED)

EXPORT int64_t nullgpu_count(int which) { return counters[which]; }
EXPORT const char *nullgpu_name(int which) { return which < NCOUNTERS ? counter_names[which] : 0; }
EXPORT int64_t nullgpu_copied(int kind) { return copied[kind]; }
EXPORT double nullgpu_gemm_flops(void) { return gemm_flops; }

/* ---- kernels by name ---- */
typedef struct { const void *key; const char *name; int64_t count; } entry;
static entry *table; static size_t slots_, used_;
static entry *find(const void *key, int make) {
  if (!table) { slots_ = 1 << 18; table = calloc(slots_, sizeof(entry)); }
  size_t at = ((uintptr_t)key * 0x9E3779B97F4A7C15ull) >> 46;
  for (;; at = (at + 1) & (slots_ - 1)) {
    if (table[at].key == key) return &table[at];
    if (!table[at].key) { if (!make) return 0; if (++used_ > slots_ / 2) abort(); table[at].key = key; return &table[at]; }
  }
}
static void hit(const void *key) { pthread_mutex_lock(&lock); entry *e = find(key, 1); e->count++; pthread_mutex_unlock(&lock); }

typedef struct { char what[120]; int64_t count; } shape;
static shape shapes[4096]; static int nshapes;
static void note(const char *what) {
  pthread_mutex_lock(&lock);
  int i = 0; for (; i < nshapes; i++) if (!strcmp(shapes[i].what, what)) break;
  if (i == nshapes && nshapes < 4096) { strncpy(shapes[i].what, what, 119); shapes[i].count = 0; nshapes++; }
  if (i < 4096) shapes[i].count++;
  pthread_mutex_unlock(&lock);
}
EXPORT void nullgpu_reset(void) {
  pthread_mutex_lock(&lock);
  memset(counters, 0, sizeof counters); memset(copied, 0, sizeof copied); gemm_flops = 0;
  for (size_t i = 0; i < slots_; i++) table[i].count = 0;
  nshapes = 0;
  pthread_mutex_unlock(&lock);
}
EXPORT void nullgpu_dump(const char *path) {
  FILE *f = fopen(path, "w"); if (!f) return;
  for (size_t i = 0; i < slots_; i++) if (table && table[i].count) fprintf(f, "K\t%ld\t%s\n", table[i].count, table[i].name ? table[i].name : "?");
  for (int i = 0; i < nshapes; i++) fprintf(f, "S\t%ld\t%s\n", shapes[i].count, shapes[i].what);
  fclose(f);
}

/* ---- a collective that hangs, until its communicator is aborted ---- */
static volatile int hanging;
static int64_t comms_made, comms_aborted;
EXPORT void nullgpu_hang(int on) { hanging = on; }
EXPORT int nullgpu_hangs(void) { return hanging; }
EXPORT int64_t nullgpu_comms(int aborted) { return aborted ? comms_aborted : comms_made; }
static void wait_while_hanging(void) { struct timespec t = {0, 1000000}; while (hanging) nanosleep(&t, 0); }

/* ---- memory ---- */
typedef struct range { char *start; size_t size; int kind; struct range *next; } range; /* kind: 1 host, 2 device */
static range *ranges; static size_t in_use;
static void add_range(void *p, size_t size, int kind) {
  range *r = malloc(sizeof *r); r->start = p; r->size = size; r->kind = kind;
  pthread_mutex_lock(&lock); r->next = ranges; ranges = r; if (kind == 2) in_use += size; pthread_mutex_unlock(&lock);
}
static int kind_of(const void *p) {
  int kind = 0; pthread_mutex_lock(&lock);
  for (range *r = ranges; r; r = r->next) if ((char *)p >= r->start && (char *)p < r->start + r->size) { kind = r->kind; break; }
  pthread_mutex_unlock(&lock); return kind;
}
static size_t drop_range(void *p) {
  size_t size = 0; pthread_mutex_lock(&lock);
  for (range **at = &ranges; *at; at = &(*at)->next) if ((*at)->start == p) { range *r = *at; *at = r->next; size = r->size; if (r->kind == 2) in_use -= size; free(r); break; }
  pthread_mutex_unlock(&lock); return size;
}
static void *map(size_t size) {
  void *p = mmap(0, size + (2 << 20), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return 0;
  return (void *)(((uintptr_t)p + (2 << 20) - 1) & ~(uintptr_t)((2 << 20) - 1)); /* the slack is never given back */
}
EXPORT size_t nullgpu_in_use(void) { return in_use; }

static __thread int last_error;
static cudaError_t fail(cudaError_t e) { last_error = e; return e; }

EXPORT cudaError_t cudaMalloc(void **p, size_t size) {
  COUNT(MALLOC); if (in_use + size > TOTAL - ((size_t)2 << 30)) return fail(cudaErrorMemoryAllocation);
  if (!size) { *p = 0; return 0; }
  if (!(*p = map(size))) return fail(cudaErrorMemoryAllocation);
  add_range(*p, size, 2); return 0; }
EXPORT cudaError_t cudaFree(void *p) { COUNT(FREE); size_t s = p ? drop_range(p) : 0; if (s) munmap(p, s); return 0; }
EXPORT cudaError_t cudaMallocAsync(void **p, size_t s, cudaStream_t st) { return cudaMalloc(p, s); }
EXPORT cudaError_t cudaFreeAsync(void *p, cudaStream_t st) { return cudaFree(p); }
EXPORT cudaError_t cudaHostAlloc(void **p, size_t size, unsigned flags) { COUNT(HOST_ALLOC); *p = map(size ? size : 1); add_range(*p, size ? size : 1, 1); return 0; }
EXPORT cudaError_t cudaFreeHost(void *p) { size_t s = p ? drop_range(p) : 0; if (s) munmap(p, s); return 0; }
EXPORT cudaError_t cudaHostRegister(void *p, size_t size, unsigned flags) { COUNT(HOST_REGISTER); add_range(p, size, 1); return 0; }
EXPORT cudaError_t cudaHostUnregister(void *p) { drop_range(p); return 0; }
EXPORT cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *t = TOTAL; *f = TOTAL - ((size_t)1 << 30) - in_use; return 0; }
EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
  memset(a, 0, sizeof *a); int k = kind_of(p); a->type = k == 2 ? cudaMemoryTypeDevice : k == 1 ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  a->device = k ? 0 : -1; a->devicePointer = k ? (void *)p : 0; a->hostPointer = k == 1 ? (void *)p : 0; return 0; }
static void copy(void *d, const void *s, size_t n) {
  int to = kind_of(d), from = kind_of(s);
  if (to == 2 && from == 2) { COUNT(MEMCPY_DD); copied[2] += n; }
  else if (to == 2) { COUNT(from == 1 ? MEMCPY_HD_PINNED : MEMCPY_HD_PAGEABLE); copied[0] += n; }
  else if (from == 2) { COUNT(to == 1 ? MEMCPY_DH_PINNED : MEMCPY_DH_PAGEABLE); copied[1] += n; }
  if (n == 1 && from == 2 && to == 1) *(char *)d = 0; /* item() of a truth value that no kernel has computed */
  else if (n <= SMALL) memmove(d, s, n); }
EXPORT cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { copy(d, s, n); COUNT(STREAM_SYNC); return 0; }
EXPORT cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { copy(d, s, n); return 0; }
EXPORT cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int sd, size_t n, cudaStream_t st) { copy(d, s, n); return 0; }
EXPORT cudaError_t cudaMemcpyToSymbol(const void *sym, const void *s, size_t n, size_t o, enum cudaMemcpyKind k) { return 0; }
EXPORT cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t st) {
  int to = kind_of(d), from = kind_of(s);
  if (to == 2 && from == 2) { COUNT(MEMCPY_DD); copied[2] += w * h; } else if (to == 2) { COUNT(from == 1 ? MEMCPY_HD_PINNED : MEMCPY_HD_PAGEABLE); copied[0] += w * h; }
  else if (from == 2) { COUNT(to == 1 ? MEMCPY_DH_PINNED : MEMCPY_DH_PAGEABLE); copied[1] += w * h; }
  if (w * h <= SMALL) for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (const char *)s + i * sp, w);
  return 0; }
EXPORT cudaError_t cudaMemset(void *p, int v, size_t n) { COUNT(MEMSET); if (n <= SMALL) memset(p, v, n); return 0; }
EXPORT cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t st) { return cudaMemset(p, v, n); }

/* ---- device ---- */
static int attribute(int a) {
  switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024; case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024; case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647; case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152; case cudaDevAttrTotalConstantMemory: return 65536; case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536; case cudaDevAttrClockRate: return 1980000; case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMemoryClockRate: return 3201000; case cudaDevAttrGlobalMemoryBusWidth: return 6144; case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048; case cudaDevAttrComputeCapabilityMajor: return 9; case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrStreamPrioritiesSupported: case cudaDevAttrGlobalL1CacheSupported: case cudaDevAttrLocalL1CacheSupported: return 1;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472; case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448; case cudaDevAttrMaxBlocksPerMultiprocessor: return 32; case cudaDevAttrReservedSharedMemoryPerBlock: return 1024;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrManagedMemory: case cudaDevAttrConcurrentManagedAccess: return 1;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return 1; case CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH: return 1;
    case cudaDevAttrMemoryPoolsSupported: return 1; case cudaDevAttrAsyncEngineCount: return 3; case cudaDevAttrCooperativeLaunch: return 1;
    default: return 0; } }
EXPORT cudaError_t cudaGetDeviceCount(int *n) { *n = 1; return 0; }
EXPORT cudaError_t cudaGetDevice(int *d) { *d = 0; return 0; }
EXPORT cudaError_t cudaSetDevice(int d) { return d ? fail(cudaErrorInvalidDevice) : 0; }
EXPORT cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) { *v = attribute(a); return 0; }
EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  memset(p, 0, sizeof *p); strcpy(p->name, "NVIDIA H200"); p->totalGlobalMem = TOTAL; p->major = 9; p->multiProcessorCount = 132; p->warpSize = 32;
  p->sharedMemPerBlock = 49152; p->sharedMemPerBlockOptin = 232448; p->sharedMemPerMultiprocessor = 233472; p->regsPerBlock = 65536; p->regsPerMultiprocessor = 65536;
  p->maxThreadsPerBlock = 1024; p->maxThreadsPerMultiProcessor = 2048; p->maxBlocksPerMultiProcessor = 32;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64; p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->l2CacheSize = 60 << 20; p->memoryBusWidth = 6144; p->totalConstMem = 65536; p->textureAlignment = 512; p->concurrentKernels = 1; p->unifiedAddressing = 1;
  p->managedMemory = p->concurrentManagedAccess = 1; p->asyncEngineCount = 3; p->cooperativeLaunch = 1; p->pciBusID = 1; p->ECCEnabled = 1; return 0; }
EXPORT cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:01:00.0"); return 0; }
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *c, int a, int b) { *c = 0; return 0; }
EXPORT cudaError_t cudaDeviceEnablePeerAccess(int a, unsigned f) { return 0; }
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *l, int *g) { *l = 0; *g = -5; return 0; }
EXPORT cudaError_t cudaDeviceSynchronize(void) { COUNT(DEVICE_SYNC); wait_while_hanging(); return 0; }
EXPORT cudaError_t cudaDriverGetVersion(int *v) { *v = 13000; return 0; }
EXPORT cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) { *p = (cudaMemPool_t)8; return 0; }
EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { *(uint64_t *)v = 0; return 0; }
EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { return 0; }
EXPORT cudaError_t cudaMemPoolSetAccess(cudaMemPool_t p, const struct cudaMemAccessDesc *d, size_t n) { return 0; }
EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t p, size_t n) { return 0; }
EXPORT const char *cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorOfNullGpu" : "cudaSuccess"; }
EXPORT const char *cudaGetErrorString(cudaError_t e) { return e == cudaErrorMemoryAllocation ? "out of memory" : e ? "error of the null GPU" : "no error"; }
EXPORT cudaError_t cudaGetLastError(void) { int e = last_error; last_error = 0; return e; }
EXPORT cudaError_t cudaPeekAtLastError(void) { return last_error; }
EXPORT cudaError_t cudaProfilerStart(void) { return 0; }
EXPORT cudaError_t cudaProfilerStop(void) { return 0; }

/* ---- streams and events ---- */
static int64_t now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1000000000ll + t.tv_nsec; }
static uintptr_t handles = 0x1000;
static void *handle(void) { return (void *)__atomic_add_fetch(&handles, 16, __ATOMIC_RELAXED); }
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *s) { *s = handle(); return 0; }
EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { *s = handle(); return 0; }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t s) { return 0; }
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
EXPORT cudaError_t cudaStreamQuery(cudaStream_t s) { COUNT(STREAM_QUERY); if (hanging) return cudaErrorNotReady; return 0; }
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t s) { COUNT(STREAM_SYNC); wait_while_hanging(); return 0; }
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) { COUNT(STREAM_WAIT); return 0; }
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = cudaStreamCaptureStatusNone; return 0; }
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g, const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
  *c = cudaStreamCaptureStatusNone; if (id) *id = 0; if (g) *g = 0; if (n) *n = 0; return 0; }
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) { return 0; }
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *d, unsigned fl) { f(s, 0, d); return 0; }
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *d) { f(d); return 0; }
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *e) { COUNT(EVENT_CREATE); *e = calloc(1, 8); return 0; }
EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return cudaEventCreate(e); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t e) { free(e); return 0; }
EXPORT cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) { COUNT(EVENT_RECORD); *(int64_t *)e = now(); return 0; }
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
EXPORT cudaError_t cudaEventQuery(cudaEvent_t e) { COUNT(EVENT_QUERY); if (hanging) return cudaErrorNotReady; return 0; }
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t e) { COUNT(EVENT_SYNC); wait_while_hanging(); return 0; }
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = (*(int64_t *)b - *(int64_t *)a) / 1e6f + 1e-3f; return 0; }
EXPORT cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaIpcCloseMemHandle(void *p) { return 0; }
EXPORT cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) { return fail(cudaErrorNotSupported); }

/* ---- launches ---- */
static __thread struct { dim3 g, b; size_t s; void *st; } pushed;
EXPORT void **__cudaRegisterFatBinary(void *f) { void **h = calloc(1, 8); return h; }
EXPORT void __cudaRegisterFatBinaryEnd(void **h) {}
EXPORT void __cudaUnregisterFatBinary(void **h) {}
EXPORT char __cudaInitModule(void **h) { return 1; }
EXPORT void __cudaRegisterVar(void **h, char *v, char *a, const char *n, int e, size_t s, int c, int g) {}
EXPORT void __cudaRegisterFunction(void **h, const char *host, char *fun, const char *name, int l, void *t, void *b, dim3 *bd, dim3 *gd, int *w) {
  pthread_mutex_lock(&lock); entry *e = find(host, 1); e->name = name; pthread_mutex_unlock(&lock); }
EXPORT unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t s, struct CUstream_st *st) { pushed.g = g; pushed.b = b; pushed.s = s; pushed.st = st; return 0; }
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *s, void *st) { *g = pushed.g; *b = pushed.b; *s = pushed.s; *(void **)st = pushed.st; return 0; }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return 0; }
static int too_large(dim3 g, dim3 b) { return !g.x || !g.y || !g.z || !b.x || !b.y || !b.z || g.y > 65535 || g.z > 65535 || b.x * b.y * b.z > 1024; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void **args, size_t s, cudaStream_t st) {
  if (too_large(g, b)) return fail(cudaErrorInvalidConfiguration);
  COUNT(LAUNCH); hit(k); return 0; }
EXPORT cudaError_t cudaLaunchKernel(const void *k, dim3 g, dim3 b, void **args, size_t s, cudaStream_t st) { return __cudaLaunchKernel((cudaKernel_t)k, g, b, args, s, st); }
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *c, const void *f, void **args) { return __cudaLaunchKernel((cudaKernel_t)f, c->gridDim, c->blockDim, args, c->dynamicSmemBytes, c->stream); }
EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
  memset(a, 0, sizeof *a); a->ptxVersion = a->binaryVersion = 90; a->maxThreadsPerBlock = 1024; a->numRegs = 64; a->maxDynamicSharedSizeBytes = 49152; return 0; }
EXPORT cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute a, int v) { return 0; }
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t s, unsigned fl) { *n = 2; return 0; }
static char symbol_space[65536];
EXPORT cudaError_t cudaGetSymbolAddress(void **p, const void *s) { *p = symbol_space; return 0; }
EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t g, const char *p, unsigned f) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t g) { return 0; }
EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t g) { return 0; }
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *n, size_t *c) { *c = 0; return 0; }
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *e, cudaGraph_t g, unsigned long long f) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t e, cudaStream_t s) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { return fail(cudaErrorNotSupported); }
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { return fail(cudaErrorNotSupported); }

/* ---- driver ---- */
typedef struct { char name[256]; } function;
EXPORT CUresult cuInit(unsigned f) { return 0; }
EXPORT CUresult cuDriverGetVersion(int *v) { *v = 13000; return 0; }
EXPORT CUresult cuDeviceGet(CUdevice *d, int n) { *d = n; return 0; }
EXPORT CUresult cuDeviceGetCount(int *n) { *n = 1; return 0; }
EXPORT CUresult cuDeviceGetName(char *s, int n, CUdevice d) { snprintf(s, n, "NVIDIA H200"); return 0; }
EXPORT CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = attribute(a); return 0; }
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)16; return 0; }
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned *f, int *a) { *f = 0; *a = 1; return 0; }
EXPORT CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)16; return 0; }
EXPORT CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
EXPORT CUresult cuCtxPushCurrent_v2(CUcontext c) { return 0; }
EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *c) { return 0; }
EXPORT CUresult cuCtxGetLimit(size_t *v, CUlimit l) { *v = 1 << 20; return 0; }
EXPORT CUresult cuCtxSetLimit(CUlimit l, size_t v) { return 0; }
EXPORT CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return 0; }
EXPORT CUresult cuGetErrorString(CUresult r, const char **s) { *s = r ? "error of the null GPU" : "no error"; return 0; }
EXPORT CUresult cuGetErrorName(CUresult r, const char **s) { *s = r ? "CUDA_ERROR_OF_NULL_GPU" : "CUDA_SUCCESS"; return 0; }
EXPORT CUresult cuModuleLoadData(CUmodule *m, const void *i) { *m = handle(); return 0; }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *m, const void *i, unsigned n, CUjit_option *o, void **v) { *m = handle(); return 0; }
EXPORT CUresult cuModuleLoad(CUmodule *m, const char *p) { *m = handle(); return 0; }
EXPORT CUresult cuModuleUnload(CUmodule m) { return 0; }
EXPORT CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
  function *made = calloc(1, sizeof *made); snprintf(made->name, 255, "triton:%s", n); *f = (CUfunction)made;
  pthread_mutex_lock(&lock); entry *e = find(made, 1); e->name = made->name; pthread_mutex_unlock(&lock); return 0; }
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *p, size_t *s, CUmodule m, const char *n) { *p = (CUdeviceptr)symbol_space; *s = 64; return 0; }
EXPORT CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return 0; }
EXPORT CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return 0; }
EXPORT CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
static CUresult launch(CUfunction f, unsigned x, unsigned y, unsigned z) { if (!x || !y || !z) return CUDA_ERROR_INVALID_VALUE; COUNT(TRITON); hit(f); return 0; }
EXPORT CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned s, CUstream st, void **p, void **e) { return launch(f, gx, gy, gz); }
EXPORT CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned s, CUstream st, void **p) { return launch(f, gx, gy, gz); }
EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) { return launch(f, c->gridDimX, c->gridDimY, c->gridDimZ); }
EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, CUfunction f, int b, size_t s) { *n = 2; return 0; }
EXPORT CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 66; return 0; }
EXPORT CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t r, void *p, const cuuint64_t *d, const cuuint64_t *st, const cuuint32_t *b, const cuuint32_t *e, CUtensorMapInterleave i, CUtensorMapSwizzle s, CUtensorMapL2promotion l, CUtensorMapFloatOOBfill o) { return 0; }
EXPORT CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p) {
  int k = kind_of((void *)p); if (!k) return CUDA_ERROR_INVALID_VALUE;
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER || a == CU_POINTER_ATTRIBUTE_HOST_POINTER) *(CUdeviceptr *)v = p; else *(int *)v = a == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? k : 0; return 0; }
EXPORT CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute *a, void **v, CUdeviceptr p) { return CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuStreamSynchronize(CUstream s) { COUNT(STREAM_SYNC); return 0; }
EXPORT CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned f) { return 0; }
EXPORT CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f) { *g = 2 << 20; return 0; }
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *p, size_t s, size_t a, CUdeviceptr h, unsigned long long f) {
  void *m = map(s); if (!m) return CUDA_ERROR_OUT_OF_MEMORY; *p = (CUdeviceptr)m;
  range *r = malloc(sizeof *r); r->start = m; r->size = s; r->kind = 2; pthread_mutex_lock(&lock); r->next = ranges; ranges = r; pthread_mutex_unlock(&lock); return 0; }
EXPORT CUresult cuMemAddressFree(CUdeviceptr p, size_t s) { size_t had = drop_range((void *)p); pthread_mutex_lock(&lock); in_use += had; pthread_mutex_unlock(&lock); if (had) munmap((void *)p, had); return 0; }
EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t s, const CUmemAllocationProp *p, unsigned long long f) {
  COUNT(MALLOC); pthread_mutex_lock(&lock); int full = in_use + s > TOTAL - ((size_t)2 << 30); if (!full) in_use += s; pthread_mutex_unlock(&lock);
  if (full) return CUDA_ERROR_OUT_OF_MEMORY; size_t *box = malloc(8); *box = s; *h = (CUmemGenericAllocationHandle)box; return 0; }
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle h) { COUNT(FREE); pthread_mutex_lock(&lock); in_use -= *(size_t *)h; pthread_mutex_unlock(&lock); free((void *)h); return 0; }
EXPORT CUresult cuMemMap(CUdeviceptr p, size_t s, size_t o, CUmemGenericAllocationHandle h, unsigned long long f) { return 0; }
EXPORT CUresult cuMemUnmap(CUdeviceptr p, size_t s) { madvise((void *)p, s, MADV_DONTNEED); return 0; }
EXPORT CUresult cuMemSetAccess(CUdeviceptr p, size_t s, const CUmemAccessDesc *d, size_t n) { return 0; }
EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *b, size_t *s, CUdeviceptr p) { *b = p; *s = 1; return 0; }
static CUresult unknown(void) { return CUDA_ERROR_NOT_SUPPORTED; }
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *n, void **f, unsigned v, unsigned long long fl, enum cudaDriverEntryPointQueryResult *r) {
  char with[256]; void *found = dlsym(RTLD_DEFAULT, n); if (!found) { snprintf(with, 255, "%s_v2", n); found = dlsym(RTLD_DEFAULT, with); }
  if (!found && getenv("NULLGPU_VERBOSE")) fprintf(stderr, "nullgpu: no driver function %s\n", n);
  *f = found ? found : (void *)unknown; if (r) *r = cudaDriverEntryPointSuccess; return 0; }
EXPORT CUresult cuGetProcAddress_v2(const char *n, void **f, int v, cuuint64_t fl, CUdriverProcAddressQueryResult *r) { enum cudaDriverEntryPointQueryResult q; cudaGetDriverEntryPointByVersion(n, f, v, fl, &q); if (r) *r = 0; return 0; }

/* ---- cuBLAS ---- */
static void gemm(const char *how, int64_t m, int64_t n, int64_t k, int64_t batch, int type) {
  char what[120]; COUNT(GEMM); gemm_flops += 2.0 * m * n * k * batch; snprintf(what, 119, "%s %ldx%ldx%ld b%ld t%d", how, m, n, k, batch, type); note(what); }
EXPORT cublasStatus_t cublasCreate_v2(cublasHandle_t *h) { *h = handle(); return 0; }
EXPORT cublasStatus_t cublasDestroy_v2(cublasHandle_t h) { return 0; }
EXPORT cublasStatus_t cublasSetStream_v2(cublasHandle_t h, cudaStream_t s) { return 0; }
EXPORT cublasStatus_t cublasSetWorkspace_v2(cublasHandle_t h, void *w, size_t s) { return 0; }
static int math_mode;
EXPORT cublasStatus_t cublasSetMathMode(cublasHandle_t h, cublasMath_t m) { math_mode = m; return 0; }
EXPORT cublasStatus_t cublasGetMathMode(cublasHandle_t h, cublasMath_t *m) { *m = math_mode; return 0; }
EXPORT cublasStatus_t cublasSetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t m) { return 0; }
EXPORT cublasStatus_t cublasGetPointerMode_v2(cublasHandle_t h, cublasPointerMode_t *m) { *m = 0; return 0; }
EXPORT cublasStatus_t cublasGemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *al, const void *A, cudaDataType At, int lda, const void *B, cudaDataType Bt, int ldb, const void *be, void *C, cudaDataType Ct, int ldc, cublasComputeType_t ct, cublasGemmAlgo_t a) { gemm("gemm", m, n, k, 1, At); return 0; }
EXPORT cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void *al, const void *A, cudaDataType At, int lda, long long sa, const void *B, cudaDataType Bt, int ldb, long long sb, const void *be, void *C, cudaDataType Ct, int ldc, long long sc, int batch, cublasComputeType_t ct, cublasGemmAlgo_t a) { gemm("bgemm", m, n, k, batch, At); return 0; }
EXPORT cublasStatus_t cublasSgemmEx(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *al, const void *A, cudaDataType At, int lda, const void *B, cudaDataType Bt, int ldb, const float *be, void *C, cudaDataType Ct, int ldc) { gemm("gemm", m, n, k, 1, At); return 0; }
EXPORT cublasStatus_t cublasSgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *al, const float *A, int lda, const float *B, int ldb, const float *be, float *C, int ldc) { gemm("gemm", m, n, k, 1, CUDA_R_32F); return 0; }
EXPORT cublasStatus_t cublasDgemm_v2(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double *al, const double *A, int lda, const double *B, int ldb, const double *be, double *C, int ldc) { gemm("gemm", m, n, k, 1, CUDA_R_64F); return 0; }
EXPORT cublasStatus_t cublasSgemmStridedBatched(cublasHandle_t h, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float *al, const float *A, int lda, long long sa, const float *B, int ldb, long long sb, const float *be, float *C, int ldc, long long sc, int batch) { gemm("bgemm", m, n, k, batch, CUDA_R_32F); return 0; }
EXPORT cublasStatus_t cublasSgemv_v2(cublasHandle_t h, cublasOperation_t t, int m, int n, const float *al, const float *A, int lda, const float *x, int ix, const float *be, float *y, int iy) { gemm("gemv", m, 1, n, 1, CUDA_R_32F); return 0; }
EXPORT cublasStatus_t cublasDgemv_v2(cublasHandle_t h, cublasOperation_t t, int m, int n, const double *al, const double *A, int lda, const double *x, int ix, const double *be, double *y, int iy) { gemm("gemv", m, 1, n, 1, CUDA_R_64F); return 0; }
EXPORT cublasStatus_t cublasDotEx(cublasHandle_t h, int n, const void *x, cudaDataType xt, int ix, const void *y, cudaDataType yt, int iy, void *r, cudaDataType rt, cudaDataType et) { gemm("dot", 1, 1, n, 1, xt); return 0; }
EXPORT cublasStatus_t cublasSdot_v2(cublasHandle_t h, int n, const float *x, int ix, const float *y, int iy, float *r) { gemm("dot", 1, 1, n, 1, CUDA_R_32F); return 0; }
typedef struct { int type; uint64_t rows, cols; int batch; } layout;
typedef struct { int compute, scale, ta, tb, epilogue; } desc;
EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *l, cudaDataType t, uint64_t r, uint64_t c, int64_t ld) { layout *m = calloc(1, sizeof *m); m->type = t; m->rows = r; m->cols = c; m->batch = 1; *l = (cublasLtMatrixLayout_t)m; return 0; }
EXPORT cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t l) { free(l); return 0; }
EXPORT cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t l, cublasLtMatrixLayoutAttribute_t a, const void *b, size_t s) { if (a == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) ((layout *)l)->batch = *(int *)b; return 0; }
EXPORT cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *d, cublasComputeType_t c, cudaDataType_t s) { desc *m = calloc(1, sizeof *m); m->compute = c; *d = (cublasLtMatmulDesc_t)m; return 0; }
EXPORT cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t d) { free(d); return 0; }
EXPORT cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a, const void *b, size_t s) { desc *m = (desc *)d; if (a == CUBLASLT_MATMUL_DESC_TRANSA) m->ta = *(int *)b; if (a == CUBLASLT_MATMUL_DESC_TRANSB) m->tb = *(int *)b; return 0; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *p) { *p = calloc(1, 8); return 0; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t p) { free(p); return 0; }
EXPORT cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a, const void *b, size_t s) { return 0; }
EXPORT cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t h, cublasLtMatmulDesc_t d, cublasLtMatrixLayout_t A, cublasLtMatrixLayout_t B, cublasLtMatrixLayout_t C, cublasLtMatrixLayout_t D, cublasLtMatmulPreference_t p, int n, cublasLtMatmulHeuristicResult_t *r, int *got) { memset(r, 0, sizeof *r); *got = 1; return 0; }
EXPORT cublasStatus_t cublasLtMatmul(cublasLtHandle_t h, cublasLtMatmulDesc_t d, const void *al, const void *A, cublasLtMatrixLayout_t Al, const void *B, cublasLtMatrixLayout_t Bl, const void *be, const void *C, cublasLtMatrixLayout_t Cl, void *D, cublasLtMatrixLayout_t Dl, const cublasLtMatmulAlgo_t *algo, void *w, size_t ws, cudaStream_t s) {
  layout *a = (layout *)Al, *c = (layout *)Dl; desc *m = (desc *)d; gemm("lt", c->rows, c->cols, m->ta ? a->rows : a->cols, c->batch, a->type); return 0; }

/* ---- cuSOLVER: what eigenvectors and a QR decomposition need ---- */
EXPORT cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t *h) { *h = handle(); return 0; }
EXPORT cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t h) { return 0; }
EXPORT cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t h, cudaStream_t s) { return 0; }
EXPORT cusolverStatus_t cusolverDnCreateParams(cusolverDnParams_t *p) { *p = handle(); return 0; }
EXPORT cusolverStatus_t cusolverDnDestroyParams(cusolverDnParams_t p) { return 0; }
EXPORT cusolverStatus_t cusolverDnXsyevd_bufferSize(cusolverDnHandle_t h, cusolverDnParams_t p, cusolverEigMode_t j, cublasFillMode_t u, int64_t n, cudaDataType a, const void *A, int64_t lda, cudaDataType w, const void *W, cudaDataType c, size_t *device, size_t *host) { *device = 8 * n * n; *host = 8 * n; return 0; }
EXPORT cusolverStatus_t cusolverDnXsyevd(cusolverDnHandle_t h, cusolverDnParams_t p, cusolverEigMode_t j, cublasFillMode_t u, int64_t n, cudaDataType a, void *A, int64_t lda, cudaDataType w, void *W, cudaDataType c, void *device, size_t ds, void *host, size_t hs, int *info) { *info = 0; gemm("syevd", n, n, n, 1, a); return 0; }
EXPORT cusolverStatus_t cusolverDnXsyevBatched_bufferSize(cusolverDnHandle_t h, cusolverDnParams_t p, cusolverEigMode_t j, cublasFillMode_t u, int64_t n, cudaDataType a, const void *A, int64_t lda, cudaDataType w, const void *W, cudaDataType c, size_t *device, size_t *host, int64_t batch) { *device = 8 * n * n * batch; *host = 8 * n; return 0; }
EXPORT cusolverStatus_t cusolverDnXsyevBatched(cusolverDnHandle_t h, cusolverDnParams_t p, cusolverEigMode_t j, cublasFillMode_t u, int64_t n, cudaDataType a, void *A, int64_t lda, cudaDataType w, void *W, cudaDataType c, void *device, size_t ds, void *host, size_t hs, int *info, int64_t batch) { memset(info, 0, batch * sizeof *info); gemm("syevd", n, n, n, batch, a); return 0; }
EXPORT cusolverStatus_t cusolverDnXgeqrf_bufferSize(cusolverDnHandle_t h, cusolverDnParams_t p, int64_t m, int64_t n, cudaDataType a, const void *A, int64_t lda, cudaDataType t, const void *T, cudaDataType c, size_t *device, size_t *host) { *device = 8 * n * n; *host = 8 * n; return 0; }
EXPORT cusolverStatus_t cusolverDnXgeqrf(cusolverDnHandle_t h, cusolverDnParams_t p, int64_t m, int64_t n, cudaDataType a, void *A, int64_t lda, cudaDataType t, void *T, cudaDataType c, void *device, size_t ds, void *host, size_t hs, int *info) { *info = 0; gemm("geqrf", m, n, n, 1, a); return 0; }
EXPORT cusolverStatus_t cusolverDnSorgqr_bufferSize(cusolverDnHandle_t h, int m, int n, int k, const float *A, int lda, const float *t, int *size) { *size = 64 * n; return 0; }
EXPORT cusolverStatus_t cusolverDnSorgqr(cusolverDnHandle_t h, int m, int n, int k, float *A, int lda, const float *t, float *w, int size, int *info) { *info = 0; gemm("orgqr", m, n, k, 1, CUDA_R_32F); return 0; }

/* ---- NCCL: every rank but this one is imagined ---- */
typedef struct { int ranks, rank; } comm;
static int64_t nccl_bytes;
static const int width[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
#define MOVE(n, t) (nccl_bytes += (int64_t)(n) * width[t], COUNT(NCCL_CALL))
/* The other ranks say what this one says. */
static void same(const void *s, void *r, size_t n, int ranks) { if (n * ranks <= SMALL) for (int i = 0; i < ranks; i++) if ((char *)r + i * n != s) memmove((char *)r + i * n, s, n); }
EXPORT int64_t nullgpu_nccl_bytes(void) { return nccl_bytes; }
EXPORT ncclResult_t ncclGetVersion(int *v) { *v = 22809; return 0; }
EXPORT ncclResult_t ncclGetUniqueId(ncclUniqueId *i) { memset(i, 7, sizeof *i); return 0; }
static ncclComm_t new_comm(int n, int r) { __atomic_fetch_add(&comms_made, 1, __ATOMIC_RELAXED); comm *c = malloc(sizeof *c); c->ranks = n; c->rank = r; return (ncclComm_t)c; }
EXPORT ncclResult_t ncclCommInitRank(ncclComm_t *c, int n, ncclUniqueId i, int r) { *c = new_comm(n, r); return 0; }
EXPORT ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int n, ncclUniqueId i, int r, ncclConfig_t *f) { *c = new_comm(n, r); return 0; }
EXPORT ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int n, int r, int k, ncclUniqueId *i, ncclConfig_t *f) { *c = new_comm(n, r); return 0; }
EXPORT ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *n, ncclConfig_t *f) { *n = new_comm(1, 0); return 0; }
EXPORT ncclResult_t ncclCommAbort(ncclComm_t c) { __atomic_fetch_add(&comms_aborted, 1, __ATOMIC_RELAXED); hanging = 0; return 0; }
EXPORT ncclResult_t ncclCommDestroy(ncclComm_t c) { return 0; }
EXPORT ncclResult_t ncclCommFinalize(ncclComm_t c) { return 0; }
EXPORT ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = ((comm *)c)->ranks; return 0; }
EXPORT ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) { *n = ((comm *)c)->rank; return 0; }
EXPORT ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) { *e = 0; return 0; }
EXPORT ncclResult_t ncclCommRegister(const ncclComm_t c, void *b, size_t s, void **h) { *h = 0; return 0; }
EXPORT ncclResult_t ncclCommDeregister(const ncclComm_t c, void *h) { return 0; }
EXPORT const char *ncclGetErrorString(ncclResult_t r) { return "of the null GPU"; }
EXPORT const char *ncclGetLastError(ncclComm_t c) { return ""; }
EXPORT ncclResult_t ncclGroupStart(void) { return 0; }
EXPORT ncclResult_t ncclGroupEnd(void) { COUNT(NCCL_GROUP); return 0; }
EXPORT ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c, cudaStream_t st) { MOVE(n, t); same(s, r, n * width[t], 1); return 0; }
EXPORT ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) { MOVE(n * ((comm *)c)->ranks, t); same(s, r, n * width[t], ((comm *)c)->ranks); return 0; }
EXPORT ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, ncclComm_t c, cudaStream_t st) { MOVE(n * ((comm *)c)->ranks, t); return 0; }
EXPORT ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { MOVE(n, t); same(s, r, n * width[t], 1); return 0; }
EXPORT ncclResult_t ncclBcast(void *b, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { MOVE(n, t); return 0; }
EXPORT ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t o, int root, ncclComm_t c, cudaStream_t st) { MOVE(n, t); return 0; }
EXPORT ncclResult_t ncclAlltoAll(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) { MOVE(n * ((comm *)c)->ranks, t); same(s, r, n * width[t] * ((comm *)c)->ranks, 1); return 0; }
EXPORT ncclResult_t ncclSend(const void *s, size_t n, ncclDataType_t t, int p, ncclComm_t c, cudaStream_t st) { MOVE(n, t); return 0; }
EXPORT ncclResult_t ncclRecv(void *r, size_t n, ncclDataType_t t, int p, ncclComm_t c, cudaStream_t st) { COUNT(NCCL_CALL); return 0; }
