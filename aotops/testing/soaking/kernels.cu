// The kernels between which the soak runs a call on a GPU, and the few functions of the runtime that it needs. cuda.py
// compiles this file and calls it through ctypes. Every function returns a cudaError_t.
//
// The order of a repeat on a stream:
//
//   write_late   allows its dependents to start at once, waits a while, and only then writes the call's inputs, and
//                poison over its outputs and workspace
//   the call     any number of kernels
//   follow       is launched to start before the call's last kernel ends. It waits for that kernel, as a dependent
//                must, compares inputs and outputs with what a call in quiet left, and poisons everything
//
// So a kernel of the call that touches memory before the kernels before it have ended reads poison, or its results are
// poisoned. If the call ends before all of its kernels or write_late have ended, follow finds wrong bytes, or
// write_late of the next repeat finds bytes that were written after follow.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace {

constexpr int kSlots = 32, kThreads = 256, kLoadThreads = 1024;
// Few enough that a kernel which starts too early finds room beside them.
constexpr int64_t kWriters = 48, kFollowers = 128;

// Memory of whole pieces of 16 bytes.
struct Slot {
  uint4 *at;
  const uint4 *before, *after;  // null: poison is written; nothing is compared
  int64_t pieces;
};

// A piece that was wrong.
struct Wrong {
  uint4 found, expected;
  int64_t piece;
  unsigned long long repeat;
};

struct Plan {
  Slot slots[kSlots];
  int64_t n;
  unsigned long long *found;  // of each slot the pieces that were wrong, and those written too late; then the repeats
  Wrong *first;               // of each slot: that of the thread which was the first to find one
};

__device__ uint4 poison() { return make_uint4(~0u, ~0u, ~0u, ~0u); }

__device__ bool differ(uint4 a, uint4 b) { return a.x != b.x || a.y != b.y || a.z != b.z || a.w != b.w; }

__device__ void launch_next() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ void spin(int64_t cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {
  }
}

__device__ int64_t first() { return int64_t{blockIdx.x} * blockDim.x + threadIdx.x; }
__device__ int64_t step() { return int64_t{gridDim.x} * blockDim.x; }

__global__ void __launch_bounds__(kThreads) write_late(Plan plan, int64_t cycles, bool poisoned) {
  launch_next();
  for (int s = 0; poisoned && s < plan.n; ++s) {
    const Slot &slot = plan.slots[s];
    unsigned long long late = 0;
    for (int64_t i = first(); i < slot.pieces; i += step()) late += differ(__ldcg(slot.at + i), poison());
    if (late) atomicAdd(plan.found + 2 * s + 1, late);
  }
  spin(cycles * (1 + blockIdx.x % 4) / 4);  // the blocks do not write at one time
  for (int s = 0; s < plan.n; ++s) {
    const Slot &slot = plan.slots[s];
    for (int64_t i = first(); i < slot.pieces; i += step()) slot.at[i] = slot.before ? slot.before[i] : poison();
  }
}

__global__ void __launch_bounds__(kThreads) follow(Plan plan) {
  wait_for_kernel_before();
  for (int s = 0; s < plan.n; ++s) {
    const Slot &slot = plan.slots[s];
    unsigned long long wrong = 0;
    Wrong one;
    for (int64_t i = first(); i < slot.pieces; i += step()) {
      const uint4 v = __ldcg(slot.at + i);
      if (slot.after && differ(v, slot.after[i]) && ++wrong == 1)
        one = {v, slot.after[i], i, *static_cast<volatile unsigned long long *>(plan.found + 2 * kSlots)};
      slot.at[i] = poison();
    }
    if (wrong && atomicAdd(plan.found + 2 * s, wrong) == 0) plan.first[s] = one;
  }
  if (first() == 0) atomicAdd(plan.found + 2 * kSlots, 1ull);
}

// Work beside the calls: it takes multiprocessors, cache and memory bandwidth from them.
__global__ void __launch_bounds__(kLoadThreads) load_device(uint4 *memory, int64_t pieces, int64_t cycles) {
  const long long start = clock64();
  for (int64_t i = first(); clock64() - start < cycles; i += step()) {
    uint4 v = __ldcg(memory + i % pieces);
    ++v.x;
    __stcg(memory + i % pieces, v);
  }
}

unsigned blocks(const Plan &plan, int64_t most) {
  int64_t pieces = 1;
  for (int64_t s = 0; s < plan.n; ++s) pieces = std::max(pieces, plan.slots[s].pieces);
  return static_cast<unsigned>(std::min(most, (pieces + kThreads - 1) / kThreads));
}

cudaStream_t as_stream(void *stream) { return static_cast<cudaStream_t>(stream); }

// early: it may start before the kernel before it has ended.
template <typename... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), unsigned blocks, int threads, bool early, void *stream,
                   Parameters... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks), config.blockDim = dim3(threads), config.stream = as_stream(stream);
  config.attrs = &attribute, config.numAttrs = early ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace

extern "C" {

const char *soak_error(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }

int soak_device(int device, char *name, int size) {
  cudaDeviceProp properties;
  if (cudaError_t error = cudaSetDevice(device)) return error;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, device)) return error;
  for (int i = 0; i < size; ++i) name[i] = i + 1 < size ? properties.name[std::min(i, 255)] : '\0';
  return cudaSuccess;
}

int soak_new_memory(int64_t bytes, void **memory) { return cudaMalloc(memory, bytes); }
int soak_free_memory(void *memory) { return cudaFree(memory); }
int soak_new_stream(void **stream) {
  return cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t *>(stream), cudaStreamNonBlocking);
}
int soak_free_stream(void *stream) { return cudaStreamDestroy(as_stream(stream)); }

// Pageable memory of the host: these return when the copy has ended.
int soak_copy(void *to, const void *from, int64_t bytes, void *stream) {
  if (cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, as_stream(stream))) return error;
  return cudaStreamSynchronize(as_stream(stream));
}
int soak_set(void *to, int value, int64_t bytes, void *stream) {
  return cudaMemsetAsync(to, value, bytes, as_stream(stream));
}
int soak_synchronize(void *stream) { return cudaStreamSynchronize(as_stream(stream)); }

int soak_before(const void *plan_, int64_t cycles, int poisoned, void *stream) {
  const auto &plan = *static_cast<const Plan *>(plan_);
  return launch(write_late, blocks(plan, kWriters), kThreads, false, stream, plan, cycles, poisoned != 0);
}

int soak_after(const void *plan_, int early, void *stream) {
  const auto &plan = *static_cast<const Plan *>(plan_);
  return launch(follow, blocks(plan, kFollowers), kThreads, early != 0, stream, plan);
}

int soak_load(void *memory, int64_t bytes, int n_blocks, int64_t cycles, void *stream) {
  return launch(load_device, n_blocks, kLoadThreads, false, stream, static_cast<uint4 *>(memory), bytes / 16, cycles);
}

// The work that a stream is given between these two is recorded, to be replayed as a CUDA graph.
int soak_record(void *stream) { return cudaStreamBeginCapture(as_stream(stream), cudaStreamCaptureModeRelaxed); }

// *graph: null if the recording has failed.
int soak_recorded(void *stream, void **graph) {
  cudaGraph_t recorded = nullptr;
  cudaGraphExec_t made = nullptr;
  cudaError_t error = cudaStreamEndCapture(as_stream(stream), &recorded);
  if (!error) error = cudaGraphInstantiate(&made, recorded, 0);
  if (recorded) cudaGraphDestroy(recorded);
  if (error) cudaGetLastError();  // which would be that of the next launch
  *graph = made;
  return error;
}

int soak_replay(void *graph, void *stream) {
  return cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), as_stream(stream));
}
int soak_free_graph(void *graph) { return cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)); }

}  // extern "C"
