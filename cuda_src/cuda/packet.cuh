// A few contiguous elements that a thread loads and stores at once.
#pragma once
#include "cuda/vector.cuh"

namespace aot {
inline namespace AOT_ISA {

// n elements, aligned as far as one load takes.
template <typename T, int n>
struct alignas(sizeof(T) * n < 16 ? sizeof(T) * n : 16) Packet {
  T value[n];
};

template <int n, typename T>
__device__ inline Packet<T, n> load_packet(const T *p) {
  Packet<T, n> packet;
  if constexpr (sizeof packet == 16) reinterpret_cast<Vector<T> &>(packet) = load_once(p);
  else packet = *reinterpret_cast<const Packet<T, n> *>(p);
  return packet;
}
// Zeros if not present.
template <int n, typename T>
__device__ inline Packet<T, n> load_packet(const T *p, bool present) {
  Packet<T, n> packet = {};
  if constexpr (sizeof packet == 16) reinterpret_cast<Vector<T> &>(packet) = load_present(p, present);
  else if (present) packet = *reinterpret_cast<const Packet<T, n> *>(p);
  return packet;
}

template <typename T, int n>
__device__ inline void store_packet(T *p, const Packet<T, n> &packet) {
  *reinterpret_cast<Packet<T, n> *>(p) = packet;
}

}  // namespace AOT_ISA
}  // namespace aot
