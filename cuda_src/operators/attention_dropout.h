// Which probabilities of attention are kept under dropout. It depends on the seed and on the place of a probability
// alone: the same on every device and in each kernel, whatever its tiles are.
//
// Philox4x32-10 with the seed's two numbers as its key and (key / 8, query, head, 0) as its counter gives four words of
// 32 bits, which are eight numbers, the lower half of a word first. Number key % 8 is that of a key, which is dropped
// if it is below dropout 2^16. Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#define AOT_BOTH_SIDES __host__ __device__
#else
#define AOT_BOTH_SIDES
#endif

namespace aot {
inline namespace AOT_ISA {

// A counter, from which words become in rounds.
struct Philox {
  static constexpr int kRounds = 10;
  static constexpr uint32_t kLowStep = 0x9E3779B9, kHighStep = 0xBB67AE85;  // of the key, from a round to the next
  uint32_t a, b, c, d;

  AOT_BOTH_SIDES void round(uint32_t low, uint32_t high) {
    const uint64_t left = uint64_t{a} * 0xD2511F53u, right = uint64_t{c} * 0xCD9E8D57u;
    a = static_cast<uint32_t>(right >> 32) ^ b ^ low, b = static_cast<uint32_t>(right);
    c = static_cast<uint32_t>(left >> 32) ^ d ^ high, d = static_cast<uint32_t>(left);
  }
};

// The keys that are kept of the queries of a head.
struct KeptKeys {
  uint32_t low, high, head, least;  // the seed; the number of the head; numbers from `least` on are kept

  // The numbers of keys 8 eight to 8 eight + 7.
  AOT_BOTH_SIDES Philox numbers(uint32_t query, uint32_t eight) const {
    Philox x = {eight, query, head, 0};
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
    for (uint32_t i = 0; i < Philox::kRounds; ++i) x.round(low + i * Philox::kLowStep, high + i * Philox::kHighStep);
    return x;
  }
  // Bit j: whether key 8 eight + j is kept.
  AOT_BOTH_SIDES uint32_t operator()(uint32_t query, uint32_t eight) const {
    const Philox x = numbers(query, eight);
    return both(x.a) | both(x.b) << 2 | both(x.c) << 4 | both(x.d) << 6;
  }

 private:
  AOT_BOTH_SIDES uint32_t both(uint32_t word) const { return ((word & 0xffff) >= least) | (word >> 16 >= least) << 1; }
};

// The dropout of a call. seed: two numbers, of which the lower 32 bits count; null without dropout.
struct AttentionDropout {
  const void *seed;
  bool wide;  // int64
  uint32_t least;
  double times;  // what is kept is multiplied by it

  explicit AOT_BOTH_SIDES operator bool() const { return seed; }
  // head: example * heads + head.
  AOT_BOTH_SIDES KeptKeys of(int64_t head) const { return {word(0), word(1), static_cast<uint32_t>(head), least}; }

 private:
  AOT_BOTH_SIDES uint32_t word(int i) const {
    return wide ? static_cast<uint32_t>(static_cast<const int64_t *>(seed)[i]) : static_cast<const uint32_t *>(seed)[i];
  }
};

}  // namespace AOT_ISA
}  // namespace aot
