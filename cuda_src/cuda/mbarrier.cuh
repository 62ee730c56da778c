// Barriers in shared memory that count bytes as they arrive (mbarrier), from compute capability 9.0. Older devices have
// none, and a launcher never starts on them what uses one.
#pragma once
#include <cstdint>

#include "async.cuh"

namespace aot {
inline namespace AOT_ISA {

#if __CUDA_ARCH__ >= 900
// The address in block `rank` of the cluster that corresponds to this block's `address`.
__device__ inline uint32_t address_in_block(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}

__device__ inline void mbarrier_init(uint64_t *barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// Makes initialized barriers visible to the cluster and to TMA.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// Arrives, and adds to the bytes that the phase waits for.
__device__ inline void mbarrier_expect(uint64_t *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ inline void mbarrier_arrive(uint64_t *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits for the end of the phase of this parity.
__device__ inline void mbarrier_wait(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;\n}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Waits where other blocks of the cluster wrote the data.
__device__ inline void mbarrier_wait_cluster(uint64_t *barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "again:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n@!p bra again;\n}" ::"r"(
          shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Writes `value` to block `rank`'s copy of *slot; that block's copy of *barrier counts the bytes.
template <typename V>
__device__ inline void store_async(const V *slot, const V &value, const uint64_t *barrier, int rank) {
  static_assert(sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16, "the instruction's sizes");
  const uint32_t *word = reinterpret_cast<const uint32_t *>(&value);
  uint32_t to = address_in_block(shared_address(slot), rank), there = address_in_block(shared_address(barrier), rank);
  if constexpr (sizeof(V) == 4)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(to), "r"(there),
                 "r"(word[0])
                 : "memory");
  else if constexpr (sizeof(V) == 8)
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%2, %3}, [%1];" ::"r"(to),
                 "r"(there), "r"(word[0]), "r"(word[1])
                 : "memory");
  else
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(to),
                 "r"(there), "r"(word[0]), "r"(word[1]), "r"(word[2]), "r"(word[3])
                 : "memory");
}
#else
__device__ inline void mbarrier_init(uint64_t *, int) {}
__device__ inline void mbarrier_init_fence() {}
__device__ inline void mbarrier_expect(uint64_t *, int) {}
__device__ inline void mbarrier_wait_cluster(uint64_t *, uint32_t) {}
template <typename V>
__device__ inline void store_async(const V *, const V &, const uint64_t *, int) {}
#endif

}  // namespace AOT_ISA
}  // namespace aot
