// paged_attention's chunks of keys in float32 on ordinary cores, for head_dims of up to 128 that are multiples of 4.
//
// A warp has keys of its own, kKeys at a time, which it copies ahead to shared memory and waits for alone. Four lanes
// have a key's score with each of kRows rows, and then a lane has four columns of all rows' sums.
#pragma once
#include "cuda/packet.cuh"
#include "paged_attention.cuh"

namespace aot {
inline namespace AOT_ISA {

// Where a block has what, for sizes of a call. Lines of keys are an odd number of pieces of 16 bytes, so that pieces of
// eight keys are in different banks.
template <int kRows_>
struct PagedFloatShape {
  static constexpr int kRows = kRows_, kWarps = 4, kThreads = 32 * kWarps, kKeys = 8, kStages = 2;
  static constexpr int kStep = kWarps * kKeys;                             // keys of a stage
  static constexpr int kQuarters = 32 / kKeys, kMine = kRows / kQuarters;  // rows whose weights a lane computes
  int dim, v_dim, k_line, part;                                            // elements; part: of a warp in a stage

  __host__ __device__ explicit PagedFloatShape(const PagedSizes &z)
      : dim(static_cast<int>(z.dim)),
        v_dim(static_cast<int>(z.v_dim)),
        k_line(dim % 8 ? dim : dim + 4),
        part(kKeys * (k_line + v_dim)) {}

  // Elements: of q and of weights, ahead of the stages; and of the results of warps, which take the place of these.
  __host__ __device__ int ahead() const { return kRows * dim + kWarps * kKeys * kRows; }
  int results() const { return kWarps * kRows * (v_dim + 2); }
  int bytes() const { return 4 * std::max(ahead() + kStages * kWarps * part, results()); }
};

__device__ inline float4 load_four(const float *p) { return *reinterpret_cast<const float4 *>(p); }

// The sums of four lanes' scores, of which each of the lanes keeps a quarter of the rows.
template <int kMine>
__device__ inline void scatter_scores(float (&mine)[kMine], float (&score)[4 * kMine], int quarter) {
  float half[2 * kMine];
  const bool high = quarter & 2, odd = quarter & 1;
#pragma unroll
  for (int i = 0; i < 2 * kMine; ++i) {
    const float other = __shfl_xor_sync(~0u, high ? score[i] : score[2 * kMine + i], 16);
    half[i] = (high ? score[2 * kMine + i] : score[i]) + other;
  }
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const float other = __shfl_xor_sync(~0u, odd ? half[i] : half[kMine + i], 8);
    mine[i] = (odd ? half[kMine + i] : half[i]) + other;
  }
}

template <int kRows>
__global__ void __launch_bounds__(128, kPagedResident) paged_attention_float_kernel(PagedInputs<float> x) {
  using Shape = PagedFloatShape<kRows>;
  constexpr int kKeys = Shape::kKeys, kWarps = Shape::kWarps, kMine = Shape::kMine, kStages = Shape::kStages;
  extern __shared__ __align__(16) float paged_floats[];
  launch_next();
  const PagedSizes &z = x.z;
  const Shape shape(z);
  const PagedTile tile(z, kRows);
  const int64_t length = x.length(tile.b);
  const KeyRange seen = z.seen_of_chunk(tile.c, length);
  if (length < 0 || seen.begin >= seen.end) {
    if (x.y) store_nothing(x, tile, kRows, length >= 0);
    return;
  }
  const int begin = static_cast<int>(seen.begin), end = static_cast<int>(seen.end), first = begin / kKeys * kKeys;
  const int steps = (end - first - 1) / Shape::kStep + 1;
  const int lane = lane_index(), warp = warp_index(), dim = shape.dim, v_dim = shape.v_dim;
  float *const q = paged_floats;
  auto *const weights = reinterpret_cast<Packet<float, kRows> *>(q + kRows * dim) + warp * kKeys;
  const auto stage_of = [=](int step) {
    return paged_floats + shape.ahead() + (step % kStages * kWarps + warp) * shape.part;
  };

  PagedLookUp<float, kKeys, Shape::kStep> rows(x, tile, seen);
  const auto copy = [&](float *to, int line, const float *from, int width, int row) {
    const int along = width <= 64 ? 16 : 32, piece = lane % along * 4, at_once = 32 / along;
    const int64_t stride = z.kv_heads * width;
    from += tile.h * width;
#pragma unroll 2
    for (int j = lane / along; j < kKeys; j += at_once) {
      const int of = __shfl_sync(~0u, row, j);
      if (piece < width)
        copy_async(shared_address(to + j * line + piece), of < 0 ? from : from + of * stride + piece, of >= 0);
    }
  };
  const auto fetch = [&](int step) {
    const int row = rows.next();
    copy(stage_of(step), shape.k_line, x.k, dim, row);
    copy(stage_of(step) + kKeys * shape.k_line, v_dim, x.v, v_dim, row);
  };
  fetch(0);
  commit_copies();
  for (int r = warp; r < kRows; r += kWarps) {
    const int64_t row = tile.row + r;
    const float *const from = x.q + (row < z.rows() ? z.row_of(tile.b, tile.h, row) * dim : 0);
    for (int d = lane; d < dim; d += 32) q[r * dim + d] = row < z.rows() ? from[d] : 0.0f;
  }
  __syncthreads();

  const auto bounded = [&](int64_t key) {
    return static_cast<int>(key < seen.begin ? seen.begin : key < seen.end ? key : seen.end);
  };
  const int whole_begin = bounded(z.seen(z.queries - 1, length).begin), whole_end = bounded(z.seen(0, length).end);
  const int key_of_lane = lane % kKeys, quarter = lane / kKeys, column = 4 * lane;
  int2 own[kMine];
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const KeyRange of = z.seen((tile.row + quarter * kMine + i) / z.group(), length);
    own[i] = {bounded(of.begin), bounded(of.end)};
  }
  const float scale = static_cast<float>(z.scale), cap = static_cast<float>(z.softcap);
  float sums[kRows][4] = {}, most[kMine], total[kMine] = {};
#pragma unroll
  for (float &m : most) m = minus_infinity<float>();
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    __syncwarp();  // the warp has read the stage that is filled while it waits for the next one
    if (step + kStages - 1 < steps) fetch(step + kStages - 1);
    commit_copies();
    wait_copies<kStages - 1>();
    __syncwarp();

    const float *const stage = stage_of(step);
    float scores[kRows] = {}, score[kMine];
    const float *const key_line = stage + key_of_lane * shape.k_line;
#pragma unroll 4
    for (int d = 4 * quarter; d < dim; d += 16) {
      const float4 right = load_four(key_line + d);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float4 left = load_four(q + r * dim + d);
        scores[r] += left.x * right.x, scores[r] += left.y * right.y;
        scores[r] += left.z * right.z, scores[r] += left.w * right.w;
      }
    }
    scatter_scores<kMine>(score, scores, quarter);
    const int from = first + step * Shape::kStep + warp * kKeys, key = from + key_of_lane;
    const bool whole = from >= whole_begin && from + kKeys <= whole_end;
    bool grown = false;
    float shrink[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      score[i] *= scale;
      if (cap != 0) score[i] = cap * tanhf(score[i] / cap);
      if (!whole && (key < own[i].x || key >= own[i].y)) score[i] = minus_infinity<float>();
      float top = score[i];
#pragma unroll
      for (int offset = 1; offset < kKeys; offset *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, offset));
      const float before = most[i], now = fmaxf(before, top), base = now == minus_infinity<float>() ? 0.0f : now;
      most[i] = now, shrink[i] = expf(before - base), grown |= now > before;
      score[i] = expf(score[i] - base), total[i] = total[i] * shrink[i] + score[i];
      weights[key_of_lane].value[quarter * kMine + i] = score[i];
    }
    if (__any_sync(~0u, grown)) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float times = __shfl_sync(~0u, shrink[r % kMine], r / kMine * kKeys);
#pragma unroll
        for (float &sum : sums[r]) sum *= times;
      }
    }
    __syncwarp();
    if (column < v_dim) {
      const float *const values = stage + kKeys * shape.k_line + column;
#pragma unroll 4
      for (int j = 0; j < kKeys; ++j) {
        const float4 right = load_four(values + j * v_dim);
        const Packet<float, kRows> left = weights[j];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          sums[r][0] += left.value[r] * right.x, sums[r][1] += left.value[r] * right.y;
          sums[r][2] += left.value[r] * right.z, sums[r][3] += left.value[r] * right.w;
        }
      }
    }
  }
  const bool missed = rows.missed();
  wait_copies<0>();
  __syncthreads();
  float *const mosts = paged_floats, *const totals = mosts + kWarps * kRows, *const results = totals + kWarps * kRows;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const float all = missed ? not_a_number<float>() : sum_lanes<kKeys>(total[i]);
    const int at = warp * kRows + quarter * kMine + i;
    if (key_of_lane == 0) mosts[at] = most[i], totals[at] = all;
  }
  if (column < v_dim)
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      *reinterpret_cast<float4 *>(results + (warp * kRows + r) * v_dim + column) = {sums[r][0], sums[r][1], sums[r][2],
                                                                                    sums[r][3]};
  __syncthreads();
#pragma unroll 1
  for (int r = warp; r < kRows && tile.row + r < z.rows(); r += kWarps) {
    float top = minus_infinity<float>(), all = 0;
    for (int w = 0; w < kWarps; ++w) top = fmaxf(top, mosts[w * kRows + r]);
    float4 sum = {};
#pragma unroll 1
    for (int w = 0; w < kWarps; ++w) {
      const float theirs = mosts[w * kRows + r], part = totals[w * kRows + r];
      const float times = theirs == minus_infinity<float>() && part == 0 ? 0.0f : expf(theirs - top);
      all += part * times;
      if (column >= v_dim) continue;
      const float4 of = load_four(results + (w * kRows + r) * v_dim + column);
      sum.x += of.x * times, sum.y += of.y * times, sum.z += of.z * times, sum.w += of.w * times;
    }
    const int64_t at = tile.c * z.all_rows() + z.row_of(tile.b, tile.h, tile.row + r);
    if (lane == 0 && !x.y) x.most[at] = top, x.total[at] = all;
    if (x.y) sum = all == 0 ? float4{} : float4{sum.x / all, sum.y / all, sum.z / all, sum.w / all};
    if (column < v_dim) *reinterpret_cast<float4 *>((x.y ? x.y : x.sums) + at * v_dim + column) = sum;
  }
}

// Whether the kernel takes a call whose tensors are aligned.
inline bool paged_float_takes(const PagedSizes &z) {
  return paged_indices_fit(z) && z.dim <= 128 && z.v_dim <= 128 && z.dim % 4 == 0 && z.v_dim % 4 == 0;
}

}  // namespace AOT_ISA
}  // namespace aot
