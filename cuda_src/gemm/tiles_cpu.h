// The tile registers (AMX) of Intel's processors: products of bfloat16 matrices, summed in float.
//
// A register has 16 rows of 64 bytes. tdpbf16ps adds to a block of 16 x 16 sums the product of 16 rows of 32 terms with
// 16 columns of 32 terms, whose pairs of terms are adjacent. It takes subnormal factors for zeros and flushes subnormal
// sums, as vdpbf16ps does, and its rate is 16 times that of float's multiply-add.
#pragma once
#if defined(__AVX512F__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace aot {
inline namespace AOT_ISA {

// Packed pairs: each row's begin row_bytes after those of the one before it.
struct TileOperand {
  const void *data;
  int64_t row_bytes;
};

// ldtilecfg loads it.
struct alignas(64) TileConfiguration {
  uint8_t palette = 0, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  // All eight registers, whole.
  static constexpr TileConfiguration whole() {
    TileConfiguration c;
    c.palette = 1;
    for (int i = 0; i < 8; ++i) c.row_bytes[i] = 64, c.rows[i] = 16;
    return c;
  }
};

// While an object lives, the calling thread's tile registers are configured for products; then they are as before,
// since another library may have configured them.
class TileRegisters {
 public:
  static constexpr int kSide = 32;   // rows and columns of a block of sums
  static constexpr int kPairs = 16;  // pairs of terms of a step

  TileRegisters() {
    static constexpr TileConfiguration kMine = TileConfiguration::whole();
    asm volatile("sttilecfg %0" : "=m"(before_));
    same_ = !std::memcmp(&before_, &kMine, sizeof kMine);
    if (!same_) asm volatile("ldtilecfg %0" ::"m"(kMine));
  }
  ~TileRegisters() {
    if (same_) return;
    if (before_.palette) asm volatile("ldtilecfg %0" ::"m"(before_));
    else asm volatile("tilerelease");
  }
  TileRegisters(const TileRegisters &) = delete;

  // sums[i * ld + j] of kSide x kSide = the sum over `steps` * kPairs pairs p of terms of a(i, p) * b(p, j).
  void multiply(TileOperand a, TileOperand b, int64_t steps, float *sums, int64_t ld) const {
    zero();
    const char *left = static_cast<const char *>(a.data), *right = static_cast<const char *>(b.data);
    for (int64_t i = 0; i < steps; ++i, left += kPairs * 4, right += kPairs * b.row_bytes)
      add({left, a.row_bytes}, {right, b.row_bytes});
    store(sums, ld);
  }

  // multiply in parts: the sums become zero or are loaded, steps are added, and the sums are stored.
  void zero() const {
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::: "memory");
  }
  void load(const float *sums, int64_t ld = kSide) const {
    const float *const below = sums + kSide / 2 * ld;
    asm volatile(
        "tileloadd (%0,%4,1), %%tmm0\n\t"
        "tileloadd (%1,%4,1), %%tmm1\n\t"
        "tileloadd (%2,%4,1), %%tmm2\n\t"
        "tileloadd (%3,%4,1), %%tmm3" ::"r"(sums),
        "r"(sums + kSide / 2), "r"(below), "r"(below + kSide / 2), "r"(ld * int64_t{sizeof(float)})
        : "memory");
  }
  // kSide rows of kPairs pairs, and kPairs rows of kSide pairs.
  void add(TileOperand a, TileOperand b) const {
    const char *const upper = static_cast<const char *>(a.data), *const left = static_cast<const char *>(b.data);
    asm volatile(
        "tileloadd (%0,%4,1), %%tmm4\n\t"
        "tileloadd (%2,%5,1), %%tmm6\n\t"
        "tileloadd (%3,%5,1), %%tmm7\n\t"
        "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
        "tileloadd (%1,%4,1), %%tmm5\n\t"
        "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
        "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
        "tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(upper),
        "r"(upper + kSide / 2 * a.row_bytes), "r"(left), "r"(left + 64), "r"(a.row_bytes), "r"(b.row_bytes)
        : "memory");
  }
  void store(float *sums, int64_t ld = kSide) const {
    float *const below = sums + kSide / 2 * ld;
    asm volatile(
        "tilestored %%tmm0, (%0,%4,1)\n\t"
        "tilestored %%tmm1, (%1,%4,1)\n\t"
        "tilestored %%tmm2, (%2,%4,1)\n\t"
        "tilestored %%tmm3, (%3,%4,1)" ::"r"(sums),
        "r"(sums + kSide / 2), "r"(below), "r"(below + kSide / 2), "r"(ld * int64_t{sizeof(float)})
        : "memory");
  }

  // Whether the processor has them, the kernel lets this process use them, and a product is right.
  // AOTOPS_CPU_ISA=avx512 turns them off.
  static bool available() {
    static const bool are = [] {
      const char *asked = std::getenv("AOTOPS_CPU_ISA");
      return !(asked && !std::strcmp(asked, "avx512")) && present() && permitted() && right();
    }();
    return are;
  }

 private:
  static bool present() {
    unsigned a, b, c, d;
    constexpr unsigned kBFloat16 = 1u << 22, kTiles = 1u << 24, kBoth = kBFloat16 | kTiles;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBoth) == kBoth;
  }
  // Linux saves the registers only of processes that asked for them: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
  static bool permitted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

  // A product of small integers, which is exact.
  static bool right() {
    alignas(64) uint16_t a[kSide][2 * kPairs], b[kPairs][kSide][2];
    alignas(64) float sums[kSide][kSide];
    const auto of = [](int64_t i, int64_t p) { return static_cast<int>((5 * i + 3 * p + i * p) % 15) - 7; };
    const auto bfloat16_of = [](float x) {
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof x);
      return static_cast<uint16_t>(bits >> 16);
    };
    for (int i = 0; i < kSide; ++i)
      for (int p = 0; p < 2 * kPairs; ++p)
        a[i][p] = bfloat16_of(of(i, p)), b[p / 2][i][p % 2] = bfloat16_of(of(p, 2 * i + 1));
    TileRegisters().multiply({a, sizeof a[0]}, {b, sizeof b[0]}, 1, sums[0], kSide);
    for (int i = 0; i < kSide; ++i)
      for (int j = 0; j < kSide; ++j) {
        int sum = 0;
        for (int p = 0; p < 2 * kPairs; ++p) sum += of(i, p) * of(p, 2 * j + 1);
        if (sums[i][j] != sum) return false;
      }
    return true;
  }

  TileConfiguration before_;
  bool same_;
};

}  // namespace AOT_ISA
}  // namespace aot
#endif
