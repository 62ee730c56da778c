// paged_attention's chunks of keys in 16 bits on tensor cores, by mma.sync, from compute capability 8.0 on.
//
// The rows of a head of k, its queries by the heads that share it, are packed as rows of a product. Up to 16 of them,
// each warp of a block goes through keys of its own, which pass through stages that no other warp reads: no barrier is
// in the loop. More rows are spread over the warps, which then read one another's keys. Memory is to be busy all the
// time: at 4.8 TB/s an H200 brings 21 bytes in a cycle to a multiprocessor, so that 96 KiB in flight are those of
// 4,500 cycles, and the products of 8 KiB take a warp about 700 if it need not wait for its own instructions. More than
// 16 rows are bound by that: each of four warps multiplies all keys of a block, so that a multiprocessor takes in 24
// KiB in the time of one warp's products, which do wait, and 64 rows take twice the time of 16.
#pragma once
#include "attention_mma.cuh"
#include "paged_attention.cuh"

namespace aot {
inline namespace AOT_ISA {

// kDim: head_dim, padded with zeros. kKeys: the keys of a warp's part of a stage. kShared: whether warps read one
// another's keys, and have rows of their own.
template <int kDim_, int kWarps_, int kKeys_, bool kShared_>
struct PagedShape {
  static constexpr int kDim = kDim_, kWarps = kWarps_, kKeys = kKeys_, kStages = 2, kThreads = 32 * kWarps;
  static constexpr bool kShared = kShared_;
  static constexpr int kRows = kShared ? 16 * kWarps : 16, kStep = kWarps * kKeys;  // of a block; keys of a stage
  static constexpr int kTile = kKeys * kDim * 2, kPart = 2 * kTile;                 // bytes: k's or v's, and both
  static constexpr int kBytes = kStages * kWarps * kPart;
  static_assert(kShared || kWarps * 16 * (kDim + 2) * 4 <= kBytes, "the results of warps take the place of stages");
};

// Copies of a chunk's keys and values. A copy's addresses are a product and two constants: a warp has no other copies
// under way while it finds them.
template <typename T, class Shape>
class PagedKeys : public PagedLookUp<T, Shape::kKeys, Shape::kStep> {
 public:
  static constexpr int kPieces = Shape::kDim / 8, kAtOnce = 32 / kPieces;  // pieces of 16 bytes of a row; rows

  __device__ PagedKeys(const PagedInputs<T> &x, const PagedTile &tile, KeyRange seen)
      : PagedLookUp<T, Shape::kKeys, Shape::kStep>(x, tile, seen),
        k_(reinterpret_cast<const char *>(x.k + tile.h * x.z.dim + piece() * 8)),
        v_(reinterpret_cast<const char *>(x.v + tile.h * x.z.v_dim + piece() * 8)),
        k_stride_(static_cast<uint32_t>(x.z.kv_heads * x.z.dim * sizeof(T))),
        v_stride_(static_cast<uint32_t>(x.z.kv_heads * x.z.v_dim * sizeof(T))),
        to_(piece_address<Shape::kDim>(0, lane_index() / kPieces, piece())),
        of_k_(piece() * 8 < x.z.dim),
        of_v_(piece() * 8 < x.z.v_dim) {}

  // Starts to copy this warp's part of the next step.
  __device__ void fetch(uint32_t part) {
    static_assert(Shape::kDim % 64 == 0, "piece_address mixes with the lowest bits of a row");
    const int row = this->next();
#pragma unroll
    for (int i = 0; i < Shape::kKeys; i += kAtOnce) {
      const int from = __shfl_sync(~0u, row, i + lane_index() / kPieces);
      const uint32_t to = ((part + to_) ^ i % 8 * 16) + i * Shape::kDim * 2, present = from < 0 ? 0 : from;
      copy_async(to, k_ + uint64_t{present} * k_stride_, from >= 0 && of_k_);
      copy_async(to + Shape::kTile, v_ + uint64_t{present} * v_stride_, from >= 0 && of_v_);
    }
  }

 private:
  static __device__ int piece() { return lane_index() % kPieces; }

  const char *k_, *v_;            // this lane's piece of the head's first row
  uint32_t k_stride_, v_stride_;  // bytes
  uint32_t to_;                   // of the first row that this lane copies, from a part's begin
  bool of_k_, of_v_;
};

// Rows of q as the left factor of products, from global memory.
template <int kDim, typename T>
__device__ inline void load_rows(uint32_t (&q)[kDim / 16][4], const PagedInputs<T> &x, const PagedTile &tile,
                                 int64_t row) {
  const PagedSizes &z = x.z;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t r = row + 8 * half + lane_index() / 4;
    const bool present = r < z.rows();
    const T *const at = x.q + (present ? z.row_of(tile.b, tile.h, r) * z.dim : 0) + lane_index() % 4 * 2;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
      for (int high = 0; high < 2; ++high)
        q[k][2 * high + half] =
            present && 16 * k + 8 * high < z.dim ? *reinterpret_cast<const uint32_t *>(at + 16 * k + 8 * high) : 0;
  }
}

// 16 rows of a warp: what it has summed of the keys so far.
template <typename T, class Shape>
class PagedRows {
 public:
  static constexpr int kDim = Shape::kDim, kKeys = Shape::kKeys;
  MmaSums<1, kDim> sums = {};
  float most[2] = {-kInfinity, -kInfinity}, total[2] = {};  // in units of log(2); of this lane's keys

  __device__ PagedRows(const PagedInputs<T> &x, const PagedTile &tile, KeyRange chunk, int64_t length, int64_t row)
      : scale_(static_cast<float>(x.z.scale * kLog2E)),
        cap_(static_cast<float>(x.z.softcap * kLog2E)),
        inner_(x.z.softcap == 0 ? 0.0f : static_cast<float>(x.z.scale / x.z.softcap)) {
    const PagedSizes &z = x.z;
    load_rows<kDim>(q_, x, tile, row);
    const auto bounded = [=](int64_t key) {
      return static_cast<int>(key < chunk.begin ? chunk.begin : key < chunk.end ? key : chunk.end);
    };
    whole_ = {bounded(z.seen(z.queries - 1, length).begin), bounded(z.seen(0, length).end)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t r = row + 8 * half + lane_index() / 4;
      const KeyRange seen = z.seen(r < z.rows() ? r / z.group() : 0, length);
      seen_[half] = {bounded(seen.begin), bounded(seen.end)};
    }
  }

  // Adds kKeys keys from `key` on.
  __device__ void add(uint32_t part, int key) {
    MmaSums<1, kKeys> s = {};
    multiply(s, part);
    const bool whole = key >= whole_.x && key + kKeys <= whole_.y;
    // One condition serves all scores.
    const auto each = [&](auto f) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) f(s[0][n][e], e / 2, key + 8 * n + lane_index() % 4 * 2 + e % 2);
    };
    if (inner_ == 0) each([&](float &score, int, int) { score *= scale_; });
    else each([&](float &score, int, int) { score = cap_ * MmaScores::tangent(score * inner_); });
    if (!whole)
      each([&](float &score, int half, int at) {
        if (at < seen_[half].x || at >= seen_[half].y) score = -kInfinity;
      });
    bool grown = false;
    float shrink[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float block = -kInfinity;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) block = fmaxf(block, fmaxf(s[0][n][2 * half], s[0][n][2 * half + 1]));
      block = fmaxf(block, __shfl_xor_sync(~0u, block, 1));
      block = fmaxf(block, __shfl_xor_sync(~0u, block, 2));
      const float before = most[half], now = fmaxf(before, block), base = now == -kInfinity ? 0 : now;
      most[half] = now, shrink[half] = fast_exp2(before - base), grown |= now > before;
      float sum = 0;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) sum += s[0][n][2 * half + e] = fast_exp2(s[0][n][2 * half + e] - base);
      total[half] = total[half] * shrink[half] + sum;
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[0][n][e] *= shrink[e / 2];
    }
    MmaFactor<1, kKeys> p;
    round_weights<1, kKeys>(p, s, T());
    multiply_weights<kDim, 1, kKeys>(sums, p, part + Shape::kTile, T());
  }

 private:
  __device__ void multiply(MmaSums<1, kKeys> &s, uint32_t part) const {
    const int lane = lane_index(), eighth = lane % 8, low = lane / 8 % 2, high = lane / 16;
    const LaneRows<kDim> of_keys(part, 8 * high + eighth, low);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k)
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t right[4];
        load_matrices(right, of_keys(k) + n * 16 * kDim * 2);
        multiply_add(s[0][2 * n], q_[k], right[0], right[1], T());
        multiply_add(s[0][2 * n + 1], q_[k], right[2], right[3], T());
      }
  }

  float scale_, cap_, inner_;
  int2 whole_, seen_[2];
  uint32_t q_[kDim / 16][4];
};

// Two elements of a row's sum, or of y.
template <typename T>
__device__ inline void store_pair(const PagedInputs<T> &x, int64_t at, float2 sum, float total) {
  if (!x.y) *reinterpret_cast<float2 *>(x.sums + at) = sum;
  else if (total == 0) *reinterpret_cast<uint32_t *>(x.y + at) = 0;
  else *reinterpret_cast<uint32_t *>(x.y + at) = narrow_word(sum.x / total, sum.y / total, T());
}

// The results of warps that had keys of their own, in their order.
template <typename T, class Shape>
__device__ inline void store_of_warps(const PagedInputs<T> &x, const PagedTile &tile, PagedRows<T, Shape> &rows,
                                      float *shared) {
  constexpr int kDim = Shape::kDim, kWarps = Shape::kWarps;
  const PagedSizes &z = x.z;
  float (*const mosts)[16] = reinterpret_cast<float (*)[16]>(shared), (*const totals)[16] = mosts + kWarps;
  float *const sums = shared + 2 * kWarps * 16;
  const int quarter = lane_index() % 4, eighth = lane_index() / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = eighth + 8 * half;
    if (quarter == 0) mosts[warp_index()][r] = rows.most[half], totals[warp_index()][r] = rows.total[half];
    float *const to = sums + (warp_index() * 16 + r) * kDim + quarter * 2;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n)
      *reinterpret_cast<float2 *>(to + 8 * n) = {rows.sums[0][n][2 * half], rows.sums[0][n][2 * half + 1]};
  }
  __syncthreads();
  const int count = z.rows() < 16 ? static_cast<int>(z.rows()) : 16;
  for (int r = warp_index(); r < count; r += kWarps) {
    float most = -kInfinity, times[kWarps], total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, mosts[w][r]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      times[w] = mosts[w][r] == -kInfinity && totals[w][r] == 0 ? 0 : fast_exp2(mosts[w][r] - most);
      total += totals[w][r] * times[w];
    }
    const int64_t at = tile.c * z.all_rows() + z.row_of(tile.b, tile.h, r);
    if (lane_index() == 0 && !x.y) x.most[at] = most * static_cast<float>(1 / kLog2E), x.total[at] = total;
#pragma unroll
    for (int i = 0; i < kDim; i += 64) {
      const int column = i + 2 * lane_index();
      float2 sum = {};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const float2 theirs = *reinterpret_cast<const float2 *>(sums + (w * 16 + r) * kDim + column);
        sum.x += theirs.x * times[w], sum.y += theirs.y * times[w];
      }
      if (column < z.v_dim) store_pair(x, at * z.v_dim + column, sum, total);
    }
  }
}

// The results of a warp's own rows, from `row` on.
template <typename T, class Shape>
__device__ inline void store_of_rows(const PagedInputs<T> &x, const PagedTile &tile, const PagedRows<T, Shape> &rows,
                                     int64_t row) {
  const PagedSizes &z = x.z;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t r = row + lane_index() / 4 + 8 * half;
    if (r >= z.rows()) continue;
    const int64_t at = tile.c * z.all_rows() + z.row_of(tile.b, tile.h, r);
    if (lane_index() % 4 == 0 && !x.y)
      x.most[at] = rows.most[half] * static_cast<float>(1 / kLog2E), x.total[at] = rows.total[half];
    const int64_t to = at * z.v_dim + lane_index() % 4 * 2;
#pragma unroll
    for (int n = 0; n < Shape::kDim / 8; ++n)
      if (8 * n < z.v_dim)
        store_pair(x, to + 8 * n, {rows.sums[0][n][2 * half], rows.sums[0][n][2 * half + 1]}, rows.total[half]);
  }
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, kPagedResident) paged_attention_mma_kernel(PagedInputs<T> x) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  constexpr int kStages = Shape::kStages, kWarps = Shape::kWarps;
  extern __shared__ __align__(1024) uint4 paged_shared[];
  launch_next();
  const PagedSizes &z = x.z;
  const PagedTile tile(z, Shape::kRows);
  const int64_t length = x.length(tile.b);
  const KeyRange seen = z.seen_of_chunk(tile.c, length);
  if (length < 0 || seen.begin >= seen.end) {
    if (x.y) store_nothing(x, tile, Shape::kRows, length >= 0);
    return;
  }
  const int first = static_cast<int>(seen.begin) / Shape::kKeys * Shape::kKeys;
  const int steps = (static_cast<int>(seen.end) - first - 1) / Shape::kStep + 1;
  const uint32_t stages = shared_address(paged_shared);
  const auto part = [=](int step, int warp) { return stages + (step % kStages * kWarps + warp) * Shape::kPart; };

  PagedKeys<T, Shape> keys(x, tile, seen);
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) {
    if (step < steps) keys.fetch(part(step, warp_index()));
    commit_copies();
  }
  const int64_t row = tile.row + (Shape::kShared ? 16 * warp_index() : 0);
  PagedRows<T, Shape> rows(x, tile, seen, length, row);
  const bool busy = row < z.rows();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    // A stage of a warp's own is free as soon as the warp has read it, and is filled while it waits for the next one.
    if (Shape::kShared || !x.ahead) wait_copies<kStages - 2>();
    if constexpr (Shape::kShared) __syncthreads();
    else __syncwarp();
    if (step + kStages - 1 < steps) keys.fetch(part(step + kStages - 1, warp_index()));
    commit_copies();
    if constexpr (!Shape::kShared) wait_copies<kStages - 1>(), __syncwarp();
    const int key = first + step * Shape::kStep;
    if constexpr (Shape::kShared) {
#pragma unroll 1
      for (int warp = 0; warp < kWarps && busy; ++warp) rows.add(part(step, warp), key + warp * Shape::kKeys);
    } else {
      rows.add(part(step, warp_index()), key + warp_index() * Shape::kKeys);
    }
  }
  const bool missed = Shape::kShared ? __syncthreads_or(keys.missed()) : keys.missed();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.total[half] = sum_lanes<4>(rows.total[half]);
    if (missed) rows.total[half] = not_a_number<float>();
  }
  if constexpr (Shape::kShared) {
    store_of_rows(x, tile, rows, row);
  } else {
    wait_copies<0>();
    __syncthreads();
    store_of_warps(x, tile, rows, reinterpret_cast<float *>(paged_shared));
  }
#endif
}

// ------------------------------------------------------------------------------------------------------- launchers

// Whether the kernel takes a call whose tensors are aligned.
inline bool paged_mma_takes(const PagedSizes &z) { return paged_indices_fit(z) && z.has_pieces(); }

// f(PagedShape) for the head_dim that q, k and v are padded to.
template <class F>
Status dispatch_paged(const PagedSizes &z, F f) {
  const int64_t dim = std::max(z.dim, z.v_dim);
  const auto of = [&](auto alone, auto shared) { return z.has_few_rows() ? f(alone) : f(shared); };
  return dim <= 64    ? of(PagedShape<64, 4, 32, false>(), PagedShape<64, 4, 32, true>())
         : dim <= 128 ? of(PagedShape<128, 4, 16, false>(), PagedShape<128, 4, 16, true>())
                      : of(PagedShape<256, 2, 16, false>(), PagedShape<256, 2, 16, true>());
}

}  // namespace AOT_ISA
}  // namespace aot
