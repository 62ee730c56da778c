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

// While an object lives, the calling thread's tile registers are configured for products; then they are as before,
// since another library may have configured them.
class TileRegisters {
 public:
  static constexpr int kSide = 32;   // rows and columns of a block of sums
  static constexpr int kPairs = 16;  // pairs of terms of a step

  TileRegisters() {
    asm volatile("sttilecfg %0" : "=m"(before_));
    const Configuration mine = all_rows();
    asm volatile("ldtilecfg %0" ::"m"(mine));
  }
  ~TileRegisters() {
    if (before_.palette) asm volatile("ldtilecfg %0" ::"m"(before_));
    else asm volatile("tilerelease");
  }
  TileRegisters(const TileRegisters &) = delete;

  // sums[i * ld + j] of kSide x kSide = the sum over `steps` * kPairs pairs p of terms of a(i, p) * b(p, j), where a's
  // rows are `a_bytes` apart, and b's kSide pairs.
  void multiply(const void *a, int64_t a_bytes, const float *b, int64_t steps, float *sums, int64_t ld) const {
    const char *upper = static_cast<const char *>(a), *lower = upper + kSide / 2 * a_bytes;
    const char *left = reinterpret_cast<const char *>(b), *right = left + 64;
    const int64_t b_bytes = kSide * sizeof(float), ld_bytes = ld * sizeof(float);
    asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::: "memory");
    for (int64_t i = 0; i < steps; ++i, upper += 64, lower += 64, left += kPairs * b_bytes, right += kPairs * b_bytes)
      asm volatile(
          "tileloadd (%2,%5,1), %%tmm6\n\t"
          "tileloadd (%0,%4,1), %%tmm4\n\t"
          "tileloadd (%3,%5,1), %%tmm7\n\t"
          "tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\t"
          "tileloadd (%1,%4,1), %%tmm5\n\t"
          "tdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
          "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\t"
          "tdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::"r"(upper),
          "r"(lower), "r"(left), "r"(right), "r"(a_bytes), "r"(b_bytes)
          : "memory");
    float *const below = sums + kSide / 2 * ld;
    asm volatile(
        "tilestored %%tmm0, (%0,%4,1)\n\t"
        "tilestored %%tmm1, (%1,%4,1)\n\t"
        "tilestored %%tmm2, (%2,%4,1)\n\t"
        "tilestored %%tmm3, (%3,%4,1)" ::"r"(sums),
        "r"(sums + kSide / 2), "r"(below), "r"(below + kSide / 2), "r"(ld_bytes)
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
  struct alignas(64) Configuration {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };

  static Configuration all_rows() {
    Configuration c{};
    c.palette = 1;
    for (int i = 0; i < 8; ++i) c.row_bytes[i] = 64, c.rows[i] = 16;
    return c;
  }

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
    TileRegisters().multiply(a, sizeof a[0], reinterpret_cast<const float *>(b), 1, sums[0], kSide);
    for (int i = 0; i < kSide; ++i)
      for (int j = 0; j < kSide; ++j) {
        int sum = 0;
        for (int p = 0; p < 2 * kPairs; ++p) sum += of(i, p) * of(p, 2 * j + 1);
        if (sums[i][j] != sum) return false;
      }
    return true;
  }

  Configuration before_;
};

}  // namespace AOT_ISA
}  // namespace aot
#endif
