// paged_attention of at most 8 rows of a head of k, in 16 bits, by TMA and mma.sync: compute capability 9.0.
//
// Keys are the rows of products, and the rows of a head of k their 8 columns: a tile of keys takes half of the
// products, exponentials and registers that it takes as columns of 16 rows. Each warp of a block loads tiles of its
// own, by two instructions each, into stages that no other warp reads, and goes on with the next example's while it
// combines the results of one. With three stages keys in blocks of 16 are slower.
#pragma once
#include "attention_mma.cuh"
#include "cuda/mma.cuh"
#include "cuda/tma.cuh"
#include "paged_attention.cuh"

namespace aot {
inline namespace AOT_ISA {

// A tile has kKeys keys and values of a head, each in parts of 64 elements, kHalf bytes, swizzled by TMA.
template <int kDim_>
struct PagedTmaShape {
  static constexpr int kDim = kDim_, kWarps = 4, kKeys = 2048 / kDim, kStages = 2;
  static constexpr int kResident = kDim == 64 ? 3 : 2;  // blocks on a multiprocessor
  static constexpr int kThreads = 32 * kWarps, kRows = 8, kStep = kWarps * kKeys;
  static constexpr int kHalf = kKeys * 128, kTile = kDim / 64 * kHalf, kPart = 2 * kTile;
  static constexpr int kRing = kWarps * kStages * kPart, kPitch = kDim + 4;  // kPitch: other banks for each row
  static constexpr int kResults = kWarps * kRows * (kPitch + 2) * 4;
  static constexpr int kBytes = kRing + kResults + kWarps * kStages * 8;
};

// --------------------------------------------------------------------------------------------------- lists of keys

// The keys of an example that its queries see, and the steps that a block takes them in, at multiples of a step.
struct PagedSteps {
  int begin = 0, end = 0, first = 0, count = 0;

  __device__ PagedSteps() {}
  __device__ PagedSteps(KeyRange seen, int step)
      : begin(static_cast<int>(seen.begin)),
        end(static_cast<int>(seen.end)),
        first(begin / step * step),
        count(end > begin ? (end - first - 1) / step + 1 : 0) {}
};

template <int kStep>
__device__ inline PagedSteps paged_steps(const Integers &lengths, const PagedSizes &z, int b) {
  const int64_t length = length_of(lengths, z, b);
  if (length <= 0) return {};
  return {{z.seen(0, length).begin, length}, kStep};
}

// The steps of all examples as one list, of which each of `pieces` blocks of a head has an equal part. A warp's lanes
// count.
template <int kStep>
class PagedList {
 public:
  int total, pieces;

  __device__ PagedList(const Integers &lengths, const PagedSizes &z)
      : lengths_(lengths), z_(z), own_(count(lane_index())) {
    int sum = own_, most = own_;
    for (int b = lane_index() + 32; b < z.batch; b += 32) {
      const int n = count(b);
      sum += n, most = max(most, n);
    }
    total = sum_lanes<32>(sum);
    constexpr int kFewest = static_cast<int>(PagedSizes::kFewestKeys) / kStep;
    pieces = static_cast<int>(z.chunks);
    if (total < pieces * kFewest) pieces = total < kFewest ? 1 : total / kFewest;
    // Examples of one length are pieces themselves, of which none is combined.
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(~0u, most, offset));
    if (z.batch > pieces && z.batch <= kPagedWaves * z.chunks && total == z.batch * most)
      pieces = static_cast<int>(z.batch);
    each_ = total / pieces, more_ = total % pieces;
  }

  // The first step of a piece. The first `more_` pieces have a step more than the others.
  __device__ int begin(int piece) const { return piece * each_ + min(piece, more_); }
  // The piece of a step.
  __device__ int piece(int step) const {
    const int i = step / (each_ + 1);
    return i < more_ ? i : (step - more_) / each_;
  }
  // The example of a step, and that example's first.
  __device__ void find(int step, int *b, int *first) const {
    int before = 0;
    for (int base = 0;; base += 32) {
      const int own = base == 0 ? own_ : count(base + lane_index());
      int sum = own;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const int theirs = __shfl_up_sync(~0u, sum, offset);
        if (lane_index() >= offset) sum += theirs;
      }
      const unsigned past = __ballot_sync(~0u, before + sum > step);
      if (past || base + 32 >= z_.batch) {
        const int lane = past ? __ffs(past) - 1 : 31;
        *b = base + lane, *first = before + __shfl_sync(~0u, sum - own, lane);
        return;
      }
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  // The first step of an example.
  __device__ int first_of(int example) const {
    int sum = lane_index() < example ? own_ : 0;
    for (int b = lane_index() + 32; b < example; b += 32) sum += count(b);
    return sum_lanes<32>(sum);
  }

 private:
  __device__ int count(int b) const { return b < z_.batch ? paged_steps<kStep>(lengths_, z_, b).count : 0; }

  const Integers &lengths_;
  const PagedSizes &z_;
  int own_;  // steps of the lane's of the first 32 examples
  int each_, more_;
};

// ----------------------------------------------------------------------------------------------------------- tiles

// What is read once gives way to everything else in L2.
__device__ inline uint64_t evict_first() {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
  return policy;
}

// k and v as (blocks, kv_heads * dim / 64, block_size, 64).
struct PagedMaps {
  CUtensorMap k, v;
};

// The tiles of a warp, which are loaded some ahead of what it multiplies.
template <typename T, class Shape>
class PagedTiles {
 public:
  int loaded = 0;

  __device__ PagedTiles(const PagedInputs<T> &x, const PagedMaps &maps, int head, uint32_t stages, uint64_t *full)
      : x_(x), maps_(maps), policy_(evict_first()), line_(head * (Shape::kDim / 64)), stages_(stages), full_(full) {}

  // Begins with step `first` of an example, of `left` steps of it and of those after it.
  __device__ void begin(int b, const PagedSteps &e, int first, int left) {
    b_ = b, left_ = left;
    enter(e, first);
    advance();
  }
  // Loads no key from `end` on.
  __device__ void limit(int end) {
    end_ = min(end_, end);
    if (key_ >= end_) present_ = false, steps_ = 0;
    else steps_ = min(steps_, (end_ - key_ - 1) / Shape::kStep);
  }
  // Loads the next tile, if there is one.
  __device__ void load(int stage) {
    if (!present_) return;
    const bool missing = block_ < 0 || block_ >= x_.z.blocks;
    missed_ = (missed_ & ~(1u << stage)) | (missing ? 1u << stage : 0);
    if (lane_index() == 0) {
#if __CUDA_ARCH__ >= 900
      const int block = missing ? -1 : static_cast<int>(block_);  // TMA writes zeros for -1
      const uint32_t to = stages_ + stage * Shape::kPart;
      mbarrier_expect(full_ + stage, Shape::kPart);
      copy(maps_.k, to, full_ + stage, block);
      copy(maps_.v, to + Shape::kTile, full_ + stage, block);
#endif
    }
    ++loaded;
    advance();
  }
  // Whether the block of a stage's keys is none of the cache.
  __device__ bool missed(int stage) const { return missed_ >> stage & 1; }

 private:
  __device__ void copy(const CUtensorMap &map, uint32_t to, uint64_t *full, int block) const {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
        "l"(&map), "r"(shared_address(full)), "r"(0), "r"(at_), "r"(line_), "r"(block), "l"(policy_)
        : "memory");
#endif
  }
  // Goes to before a step of an example.
  __device__ void enter(const PagedSteps &e, int step) {
    steps_ = min(e.count - step, left_), left_ -= steps_;
    key_ = e.first + (step - 1) * Shape::kStep + warp_index() * Shape::kKeys;
    begin_ = e.begin, end_ = e.end;
  }
  // Finds the next tile that has keys, and starts to read which block it is in.
  __device__ void advance() {
    present_ = false;
    do {
      while (steps_ == 0) {
        if (left_ == 0 || ++b_ >= x_.z.batch) return;
        enter(paged_steps<Shape::kStep>(x_.lengths, x_.z, b_), 0);
      }
      --steps_, key_ += Shape::kStep;
    } while (key_ >= end_ || key_ + Shape::kKeys <= begin_);
    present_ = true, block_ = b_, at_ = key_;
    if (!x_.z.table) return;
    const int size = static_cast<int>(x_.z.block_size), of = key_ / size;
    block_ = x_.table[b_ * x_.z.max_blocks + of], at_ -= of * size;
  }

  const PagedInputs<T> &x_;
  const PagedMaps &maps_;
  uint64_t policy_;
  int line_;
  uint32_t stages_;
  uint64_t *full_;
  int b_ = 0, left_ = 0;                           // left_: steps of later examples
  int steps_ = 0, key_ = 0, begin_ = 0, end_ = 0;  // of the example
  int at_ = 0;                                     // the tile's first key in its block
  int64_t block_ = 0;                              // as it was read: a comparison would wait for it
  unsigned missed_ = 0;
  bool present_ = false;
};

// -------------------------------------------------------------------------------------------------------- products

// The 8 rows of a head of k: what a warp has summed of the keys so far. A lane has rows 2 (lane % 4) and the next.
template <typename T, class Shape>
class PagedColumns {
 public:
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys, kTiles = kKeys / 16;
  static constexpr float kLeast = -__builtin_huge_valf();
  float sums[kDim / 16][4] = {};                    // (16, 8) each: elements of v, rows
  float most[2] = {kLeast, kLeast}, total[2] = {};  // in units of log(2); total: of this lane's keys

  __device__ PagedColumns(const PagedInputs<T> &x, int b, int head, const PagedSteps &e, int64_t length)
      : scale_(static_cast<float>(x.z.scale * kLog2E)),
        cap_(static_cast<float>(x.z.softcap * kLog2E)),
        inner_(x.z.softcap == 0 ? 0.0f : static_cast<float>(x.z.scale / x.z.softcap)),
        seen_{e.begin, e.end} {
    const PagedSizes &z = x.z;
    const int lane = lane_index(), rows = static_cast<int>(z.rows()), group = static_cast<int>(z.group());
    const bool present = lane / 4 < rows;
    const T *const at = x.q + (present ? z.row_of(b, head, lane / 4) * kDim : 0) + lane % 4 * 2;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
      for (int high = 0; high < 2; ++high)
        q_[k][high] = present ? *reinterpret_cast<const uint32_t *>(at + 16 * k + 8 * high) : 0;
    const auto bounded = [&](int64_t key) {
      return static_cast<int>(key < e.begin ? e.begin : key < e.end ? key : e.end);
    };
    whole_ = {bounded(z.seen(z.queries - 1, length).begin), bounded(z.seen(0, length).end)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane % 4 * 2 + i;
      const KeyRange seen = z.seen(r < rows ? r / group : 0, length);
      own_[i] = {bounded(seen.begin), bounded(seen.end)};
    }
    const int eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
    of_k_ = (8 * low + eighth) * 128 + (high ^ eighth) * 16;
    of_v_ = (8 * high + eighth) * 128 + (low ^ eighth) * 16;
  }

  // Adds the tile of keys from `key` on.
  __device__ void add(uint32_t tile, int key) {
    float s[kTiles][4];
    multiply_keys(s, tile);
    // One condition serves all scores.
    const auto each = [&](auto f) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(s[m][e], e % 2, key + 16 * m + e / 2 * 8 + lane_index() / 4);
    };
    if (inner_ == 0) each([&](float &score, int, int) { score *= scale_; });
    else each([&](float &score, int, int) { score = cap_ * MmaScores::tangent(score * inner_); });
    if (key < whole_.x || key + kKeys > whole_.y) {
      each([&](float &score, int i, int at) {
        if (at < own_[i].x || at >= own_[i].y) score = kLeast;
      });
      clear_unseen(tile + Shape::kTile, key);
    }
    float top[2] = {kLeast, kLeast};
    each([&](float &score, int i, int) { top[i] = fmaxf(top[i], score); });
    if (__any_sync(~0u, top[0] > most[0] || top[1] > most[1])) raise(top);
    const float base[2] = {most[0] == kLeast ? 0 : most[0], most[1] == kLeast ? 0 : most[1]};
    each([&](float &score, int i, int) { total[i] += score = fast_exp2(score - base[i]); });
#pragma unroll
    for (int m = 0; m < kTiles; ++m) {
      const uint32_t low = transposed(narrow_word(s[m][0], s[m][1], T())),
                     high = transposed(narrow_word(s[m][2], s[m][3], T()));
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t v[4];
        load_transposed_matrices(v, ((tile + Shape::kTile + of_v_) ^ d % 4 * 32) + d / 4 * Shape::kHalf + m * 2048);
        multiply_add(sums[d], v, low, high, T());
      }
    }
  }

 private:
  // Two sums of every second product each: one waits for another half as often.
  __device__ void multiply_keys(float (&s)[kTiles][4], uint32_t tile) const {
    float odd[kTiles][4] = {};
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (float &e : s[m]) e = 0;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        uint32_t keys[4];
        load_matrices(keys, ((tile + of_k_) ^ k % 4 * 32) + k / 4 * Shape::kHalf + m * 2048);
        multiply_add(k % 2 ? odd[m] : s[m], keys, q_[k][0], q_[k][1], T());
      }
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][e] += odd[m][e];
  }

  // Makes `most` the largest of all lanes' scores so far.
  __device__ void raise(float (&top)[2]) {
    float shrink[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], offset));
      const float now = fmaxf(most[i], top[i]);
      shrink[i] = fast_exp2(most[i] - (now == kLeast ? 0 : now));
      most[i] = now, total[i] *= shrink[i];
    }
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[d][e] *= shrink[e % 2];
  }

  // A lane's pair of 16 bits of (8, 8), as that of its transpose.
  __device__ static uint32_t transposed(uint32_t pair) {
    uint32_t result = 0;
#if __CUDA_ARCH__ >= 750
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
#endif
    return result;
  }
  // Writes zeros to values that no query sees: they may be NaN, and 0 NaN would be one.
  __device__ void clear_unseen(uint32_t values, int key) const {
#if __CUDA_ARCH__ >= 900
    const uint32_t to = values + lane_index() / 8 * Shape::kHalf + lane_index() % 8 * 16;
#pragma unroll 1
    for (int i = 0; i < kKeys; ++i)
      if ((key + i < seen_.x || key + i >= seen_.y) && lane_index() < kDim / 8)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to + i * 128), "r"(0) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // TMA writes there next
    __syncwarp();
#endif
  }

  float scale_, cap_, inner_;
  int2 seen_, whole_, own_[2];  // keys: that any query sees, that all do, that this lane's rows do
  uint32_t q_[kDim / 16][2], of_k_, of_v_;
};

// --------------------------------------------------------------------------------------------------------- results

// Combines the warps' results of a head's rows: y of the example, or, without y, partial results from row `at` on.
template <typename T, class Shape>
__device__ inline void store_columns(const PagedInputs<T> &x, const PagedColumns<T, Shape> &own, bool missed,
                                     float *shared, int b, int head, T *y, int64_t at) {
  constexpr int kDim = Shape::kDim, kPitch = Shape::kPitch, kRows = Shape::kRows, kWarps = Shape::kWarps;
  constexpr float kLeast = PagedColumns<T, Shape>::kLeast;
  float (*const mosts)[kRows] = reinterpret_cast<float (*)[kRows]>(shared), (*const totals)[kRows] = mosts + kWarps;
  float *const sums = shared + 2 * kWarps * kRows;
  const int warp = warp_index(), lane = lane_index();
  __syncthreads();  // all have read the results of the head before
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float total = own.total[i];
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) total += __shfl_xor_sync(~0u, total, offset);
    const int r = lane % 4 * 2 + i;
    if (lane < 4) mosts[warp][r] = own.most[i], totals[warp][r] = missed ? not_a_number<float>() : total;
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        sums[(warp * kRows + r) * kPitch + 16 * d + 8 * half + lane / 4] = own.sums[d][2 * half + i];
  }
  __syncthreads();
  const int rows = static_cast<int>(x.z.rows());
  for (int r = warp; r < rows; r += kWarps) {
    float most = kLeast, times[kWarps], total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, mosts[w][r]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      times[w] = mosts[w][r] == kLeast && totals[w][r] == 0 ? 0 : fast_exp2(mosts[w][r] - most);
      total += totals[w][r] * times[w];
    }
    const int64_t row = y ? x.z.row_of(b, head, r) : at + r;
    if (!y && lane == 0) x.most[row] = most, x.total[row] = total;
#pragma unroll
    for (int i = 2 * lane; i < kDim; i += 64) {
      float2 sum = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 theirs = *reinterpret_cast<const float2 *>(sums + (w * kRows + r) * kPitch + i);
        sum.x += theirs.x * times[w], sum.y += theirs.y * times[w];
      }
      if (!y) *reinterpret_cast<float2 *>(x.sums + row * kDim + i) = sum;
      else
        *reinterpret_cast<uint32_t *>(y + row * kDim + i) =
            total == 0 ? 0 : narrow_word(sum.x / total, sum.y / total, T());
    }
  }
}

// y of an example without keys.
template <typename T, class Shape>
__device__ inline void store_empty(const PagedInputs<T> &x, int b, int head) {
  const T value = narrow<T>(x.length(b) >= 0 ? 0 : not_a_number<float>());
  for (int r = warp_index(); r < x.z.rows(); r += Shape::kWarps)
    for (int i = lane_index(); i < Shape::kDim; i += 32) x.y[x.z.row_of(b, head, r) * Shape::kDim + i] = value;
}

// kWhole: a block has all keys of an example's head, and writes y. Without a window it loads tiles before it knows the
// length. Else a block has a piece of a head's list: it writes y of the examples that it has whole, and partial results
// of at most two others.
template <typename T, class Shape, bool kWhole>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kResident)
    paged_attention_tma_kernel(const __grid_constant__ PagedInputs<T> x, const __grid_constant__ PagedMaps maps) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
  constexpr int kStages = Shape::kStages, kStep = Shape::kStep;
  extern __shared__ __align__(1024) uint4 paged_tma_shared[];
  const PagedSizes &z = x.z;
  char *const shared = reinterpret_cast<char *>(paged_tma_shared);
  float *const results = reinterpret_cast<float *>(shared + Shape::kRing);
  uint64_t *const full = reinterpret_cast<uint64_t *>(shared + Shape::kRing + Shape::kResults) + warp_index() * kStages;
  if (lane_index() == 0) {
    for (int i = 0; i < kStages; ++i) mbarrier_init(full + i, 1);
    mbarrier_init_fence();
  }
  __syncwarp();
  wait_for_kernel_before();
  launch_next();  // and not before: the next kernel reads the lengths at once, which the one before may write
  const unsigned heads = static_cast<unsigned>(z.kv_heads);
  const int head = static_cast<int>(blockIdx.x % heads), piece = static_cast<int>(blockIdx.x / heads);
  const uint32_t stages = shared_address(shared) + warp_index() * kStages * Shape::kPart;
  PagedTiles<T, Shape> tiles(x, maps, head, stages, full);
  const auto load_first = [&](int b, const PagedSteps &e, int first, int left) {
    tiles.begin(b, e, first, left);
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) tiles.load(i);
  };
  int b = piece, first = 0, left;  // first: a step of example b
  if constexpr (kWhole) {
    const bool early = z.window >= z.max_keys();
    const PagedSteps all({0, z.max_keys()}, kStep);
    if (early) load_first(b, all, 0, all.count);
    const PagedSteps e = paged_steps<kStep>(x.lengths, z, b);
    left = e.count;
    if (early) tiles.limit(e.end);
    else load_first(b, e, 0, left);
    if (left == 0) store_empty<T, Shape>(x, b, head);
  } else {
    const PagedList<kStep> list(x.lengths, z);
    if (piece >= list.pieces) return;
    const int begin = list.begin(piece);
    left = list.begin(piece + 1) - begin;
    if (left == 0) return;
    list.find(begin, &b, &first);
    first = begin - first;
    load_first(b, paged_steps<kStep>(x.lengths, z, b), first, left);
  }

  int stage = 0, used = 0, result = 2 * piece;
  uint32_t phase = 0;
  const auto next = [&] {
    ++used;
    if (++stage == kStages) stage = 0, phase ^= 1;
  };
#pragma unroll 1
  for (; left > 0; ++b, first = 0) {
    const PagedSteps e = paged_steps<kStep>(x.lengths, z, b);
    const int count = min(e.count - first, left);
    if (count == 0) continue;
    left -= count;
    PagedColumns<T, Shape> rows(x, b, head, e, e.end);
    bool missed = false;
    const int end = min(e.end, e.first + (first + count) * kStep);
#pragma unroll 1
    for (int key = e.first + first * kStep + warp_index() * Shape::kKeys; key < end; key += kStep) {
      if (key + Shape::kKeys <= e.begin) continue;
      mbarrier_wait(full + stage, phase);
      missed |= tiles.missed(stage);
      rows.add(stages + stage * Shape::kPart, key);
      __syncwarp();
      tiles.load(stage);
      next();
    }
    const int64_t at = (int64_t{result} * z.kv_heads + head) * z.rows();
    store_columns<T, Shape>(x, rows, missed, results, b, head, count == e.count ? x.y : nullptr, at);
    result = 2 * piece + 1;
  }
  if constexpr (kWhole) {
    for (; used < tiles.loaded; next()) mbarrier_wait(full + stage, phase);  // what was loaded beyond the length
  }
#endif
}

constexpr int kPartsWarps = 8;

// A row of y from its pieces' partial results: of a warp, or of all warps of a block, `warps`, of which each has every
// so many parts. What one piece has whole is in y, and what no query sees is written here.
template <typename T, class Shape>
__global__ void __launch_bounds__(32 * kPartsWarps) paged_attention_parts_kernel(PagedInputs<T> x, int warps) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
  constexpr int kDim = Shape::kDim, kAtOnce = 8, kPairs = kDim / 64;
  constexpr float kLeast = -__builtin_huge_valf();
  __shared__ float mosts[kPartsWarps], totals[kPartsWarps];
  __shared__ float2 sums[kPartsWarps][kDim / 2];
  launch_next();
  const PagedSizes &z = x.z;
  const int warp = warp_index() % warps, lane = lane_index();
  const int64_t row = int64_t{blockIdx.x} * (kPartsWarps / warps) + warp_index() / warps;
  const int group = static_cast<int>(z.group()), of = static_cast<int>(row % (z.queries * z.heads));
  const int query = of / static_cast<int>(z.heads), head = of % static_cast<int>(z.heads);
  const int b = static_cast<int>(row / (z.queries * z.heads));
  int begin = 0, parts = 0, second = 0;  // second: whether the first part is the second result of its piece
  int64_t length = 0;
  if (row < z.all_rows()) {
    const PagedList<Shape::kStep> list(x.lengths, z);
    const int count = paged_steps<Shape::kStep>(x.lengths, z, b).count, at = list.first_of(b);
    if (count) begin = list.piece(at), parts = list.piece(at + count - 1) - begin + 1, second = list.begin(begin) != at;
    length = x.length(b);
  }
  wait_for_kernel_before();
  if (parts == 1 || row >= z.all_rows()) return;
  float most = kLeast, total = 0;
  float2 sum[kPairs] = {};
  for (int i = warp; i < parts; i += warps * kAtOnce) {
    float m[kAtOnce], t[kAtOnce];
    float2 s[kAtOnce][kPairs];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int part = i + j * warps;
      const bool present = part < parts;
      const int64_t result = present ? 2 * (begin + part) + (part == 0 ? second : 0) : 0;
      const int64_t at = (result * z.kv_heads + head / group) * z.rows() + query * group + head % group;
      m[j] = present ? x.most[at] : kLeast, t[j] = present ? x.total[at] : 0;
#pragma unroll
      for (int k = 0; k < kPairs; ++k)
        s[j][k] = present ? reinterpret_cast<const float2 *>(x.sums + at * kDim)[32 * k + lane] : float2{};
    }
    float now = most;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) now = fmaxf(now, m[j]);
    const float shrink = most == now ? 1 : fast_exp2(most - now);
    total *= shrink;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) sum[k].x *= shrink, sum[k].y *= shrink;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const float times = t[j] == 0 ? 0 : fast_exp2(m[j] - now);
      total += t[j] * times;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) sum[k].x += s[j][k].x * times, sum[k].y += s[j][k].y * times;
    }
    most = now;
  }
  if (warps > 1) {
    if (lane == 0) mosts[warp] = most, totals[warp] = total;
#pragma unroll
    for (int k = 0; k < kPairs; ++k) sums[warp][32 * k + lane] = sum[k], sum[k] = {};
    __syncthreads();
    if (warp) return;
    for (int w = 0; w < warps; ++w) most = fmaxf(most, mosts[w]);
    total = 0;
    for (int w = 0; w < warps; ++w) {
      const float times = totals[w] == 0 ? 0 : fast_exp2(mosts[w] - most);
      total += totals[w] * times;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const float2 theirs = sums[w][32 * k + lane];
        sum[k].x += theirs.x * times, sum[k].y += theirs.y * times;
      }
    }
  }
  if (length < 0) total = not_a_number<float>();
#pragma unroll
  for (int k = 0; k < kPairs; ++k)
    reinterpret_cast<uint32_t *>(x.y + row * kDim)[32 * k + lane] =
        total == 0 ? 0 : narrow_word(sum[k].x / total, sum[k].y / total, T());
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Whether the kernels take a call whose tensors are aligned. A tile has keys of one block. Of ragged examples with a
// table, which a block each has whole, 16 of up to 1024 keys in blocks of 64 and 12 heads of 64 take 13.9 us, and 13.4
// by mma.sync: tables are read tile by tile.
inline bool paged_tma_takes(const PagedSizes &z) {
  constexpr int64_t kMostExamples = 4096;  // a block counts their keys
  const int64_t steps = bounded_product(z.batch, z.max_keys() / 64 + 1);
  return paged_indices_fit(z) && z.has_columns() && z.max_keys() > 0 && z.blocks > 0 && z.batch > 0 &&
         z.batch <= kMostExamples && bounded_product(z.batch, z.kv_heads) <= INT32_MAX && steps <= INT32_MAX &&
         (!z.table || z.block_size % (2048 / z.dim) == 0) && !(z.table && z.dim == 64 && whole_pays(z)) &&
         TensorMaps::get().tiled;
}

template <typename T, class Shape>
Status run_paged_tma_of(const char *op, PagedInputs<T> x, T *y, bool *served, void *stream) {
  const PagedSizes &z = x.z;
  const DType dtype = std::is_same_v<T, __half> ? DType::float16 : DType::bfloat16;
  const int64_t row = z.kv_heads * z.dim;
  const auto map = [&](CUtensorMap *to, const T *from) {
    return map_tiled<4>(to, dtype, from, {64, uint64_t(z.block_size), uint64_t(row / 64), uint64_t(z.blocks)},
                        {row, 64, z.block_size * row}, {64, Shape::kKeys, Shape::kDim / 64, 1});
  };
  PagedMaps maps;
  AOT_TRY(bind_device(op));  // for the driver, which encodes tensor maps
  *served = map(&maps.k, x.k) && map(&maps.v, x.v);
  if (!*served) return kOk;
  x.y = y;
  if (whole_pays(z)) {
    const unsigned blocks = static_cast<unsigned>(z.batch * z.kv_heads);
    return launch_kernel(op, paged_attention_tma_kernel<T, Shape, true>, {blocks, Shape::kThreads, Shape::kBytes},
                         stream, x, maps);
  }
  x.z.chunks = pieces_of_heads(z);
  const int64_t results = piece_results(z);
  x.most = x.sums + results * z.dim, x.total = x.most + results;
  const int64_t groups = z.batch <= kPagedWaves * x.z.chunks ? std::max(z.batch, x.z.chunks) : x.z.chunks;
  const unsigned blocks = static_cast<unsigned>(groups * z.kv_heads);
  AOT_TRY(launch_kernel(op, paged_attention_tma_kernel<T, Shape, false>,
                        {blocks, Shape::kThreads, Shape::kBytes, 1, true}, stream, x, maps));
  // A row has about as many parts as there are pieces of an example.
  const int warps = x.z.chunks > 4 * z.batch ? kPartsWarps : 1;
  const unsigned rows = static_cast<unsigned>(ceil_div(z.all_rows(), kPartsWarps / warps));
  return launch_kernel(op, paged_attention_parts_kernel<T, Shape>, {rows, 32 * kPartsWarps, 0, 1, true}, stream, x,
                       warps);
}

// *served: whether y is written. It is not if the driver refuses a tensor map.
template <typename T>
Status run_paged_tma(const char *op, const PagedInputs<T> &x, T *y, bool *served, void *stream) {
  if (x.z.dim == 64) return run_paged_tma_of<T, PagedTmaShape<64> >(op, x, y, served, stream);
  return run_paged_tma_of<T, PagedTmaShape<128> >(op, x, y, served, stream);
}

}  // namespace AOT_ISA
}  // namespace aot
