// attention of few queries and keys, on ordinary cores: a warp for each row, whose lanes have a key each in the
// softmax. In the other kernels' tiles nearly all rows and columns would be empty.
#pragma once
#include "attention.cuh"
#include "cuda/launch.cuh"
#include "cuda/packet.cuh"
#include "cuda/reduce.cuh"

namespace aot {
inline namespace AOT_ISA {

// kFewKeys, kFewRows: the most keys, and rows of queries that share one of keys, with which these kernels are faster,
// causal or not. At 16 keys their backward took 113 us on an H200 where the tiles' took 96.
// kFewSize: neighbouring elements of a row that a lane has in its products.
constexpr int kFewKeys = 8, kFewRows = 32, kFewDim = 128, kFewSize = 4, kFewBlock = 128, kFewWarps = kFewBlock / 32,
              kFewBatch = 4;

// Whether these kernels take a call whose tensors are aligned.
template <typename T>
bool few_takes(const AttentionInputs<T> &x) {
  const AttentionSizes &z = x.z;
  if (sizeof(T) > 4 || !x.plain() || x.extra.dropout || z.softcap != 0 || !z.keys || z.keys > kFewKeys) return false;
  const bool dims = z.dim % kFewSize == 0 && z.v_dim % kFewSize == 0 && std::max(z.dim, z.v_dim) <= kFewDim;
  return dims && z.kv_heads && z.queries * z.group() <= kFewRows && z.rows() <= 1 << 30;
}

// The number of a warp, of which the compiler knows that its lanes have the same.
__device__ inline int few_warp() { return __shfl_sync(~0u, warp_index(), 0); }

// This lane's part of a row; zeros behind its end, or without `present`.
template <typename T>
struct FewPart {
  float value[kFewSize] = {};

  __device__ FewPart(const T *row, int64_t dim, bool present = true) {
    const int column = lane_index() * kFewSize;
    const auto packet = load_packet<kFewSize>(row + column, present && column < dim);
#pragma unroll
    for (int i = 0; i < kFewSize; ++i) value[i] = widen(packet.value[i]);
  }
  __device__ FewPart() {}

  __device__ void add(float weight, const FewPart &x) {
#pragma unroll
    for (int i = 0; i < kFewSize; ++i) value[i] += weight * x.value[i];
  }
  __device__ void store(T *row, int64_t dim, float times) const {
    Packet<T, kFewSize> packet;
#pragma unroll
    for (int i = 0; i < kFewSize; ++i) packet.value[i] = narrow<T>(value[i] * times);
    if (lane_index() * kFewSize < dim) store_packet(row + lane_index() * kFewSize, packet);
  }
};

// A tensor of a call, null if absent: row i of head h of example b is at at(b, h, i). Its steps are computed once, on
// the host: they are most of what a kernel for so few numbers would do.
template <typename T>
struct FewTensor {
  T *data;
  int64_t example, head, row, dim;

  FewTensor(T *data_, const AttentionSizes &z, int64_t heads, int64_t seq, int64_t dim_)
      : data(data_), example(seq * heads * dim_), dim(dim_) {
    head = z.heads_first ? seq * dim : dim, row = z.heads_first ? dim : heads * dim;
  }
  __device__ T *at(unsigned b, unsigned h, unsigned i) const { return data + b * example + h * head + i * row; }
};

template <typename T>
struct FewCall {
  AttentionInputs<T> x;
  FewTensor<const T> q, k, v, dy;
  FewTensor<T> y, dq, dk, dv;

  FewCall(const AttentionInputs<T> &x_, T *y_, T *dq_, T *dk_, T *dv_)
      : x(x_),
        q(x.q, x.z, x.z.row_heads, x.z.queries, x.z.dim),
        k(x.k, x.z, x.z.kv_row_heads, x.z.keys, x.z.dim),
        v(x.v, x.z, x.z.kv_row_heads, x.z.keys, x.z.v_dim),
        dy(x.dy, x.z, x.z.heads, x.z.queries, x.z.v_dim),
        y(y_, x.z, x.z.heads, x.z.queries, x.z.v_dim),
        dq(dq_, x.z, x.z.row_heads, x.z.queries, x.z.dim),
        dk(dk_, x.z, x.z.kv_row_heads, x.z.keys, x.z.dim),
        dv(dv_, x.z, x.z.kv_row_heads, x.z.keys, x.z.v_dim) {}
};

// The keys [begin, end) that a query sees, and what is computed of them. All lanes call all of its functions.
template <typename T>
struct FewQuery {
  int begin, end;
  float scale;

  __device__ FewQuery(const AttentionSizes &z, unsigned query, int64_t length) : scale(static_cast<float>(z.scale)) {
    const Range seen = z.seen_by(query, query + 1, length);
    begin = static_cast<int>(min(seen.begin, int64_t{kFewKeys})), end = static_cast<int>(max(seen.end, int64_t{0}));
  }

  // f(key, its part) for each key that this query sees, of a head of rows; kFewBatch loads are in flight.
  template <class F>
  __device__ void each(const T *rows, const FewTensor<const T> &of, F f) const {
    const T *row = rows + begin * of.row;
#pragma unroll 1
    for (int key = begin; key < end; key += kFewBatch) {
      FewPart<T> parts[kFewBatch];
#pragma unroll
      for (int i = 0; i < kFewBatch; ++i, row += of.row) parts[i] = FewPart<T>(row, of.dim, key + i < end);
#pragma unroll
      for (int i = 0; i < kFewBatch; ++i) f(key + i, parts[i]);
    }
  }
  // The product of this row's part and that of its row, for key lane_index().
  __device__ float products(const FewPart<T> &part, const T *rows, const FewTensor<const T> &of) const {
    float mine = 0;
    each(rows, of, [&](int key, const FewPart<T> &row) {
      float sum = 0;
#pragma unroll
      for (int i = 0; i < kFewSize; ++i) sum += part.value[i] * row.value[i];
      sum = sum_lanes<32>(sum);
      if (lane_index() == key) mine = sum;
    });
    return mine;
  }
  // The sum of the keys' rows times their lanes' weights.
  __device__ FewPart<T> sum(float weight, const T *rows, const FewTensor<const T> &of) const {
    FewPart<T> sum;
    each(rows, of, [&](int key, const FewPart<T> &row) { sum.add(__shfl_sync(~0u, weight, key), row); });
    return sum;
  }
  // The probability of key lane_index(), of its product; *lse: of the row.
  __device__ float probability(float product, float *lse) const {
    const bool sees = lane_index() >= begin && lane_index() < end;
    const float score = product * scale;
    float most = sees ? score : -__int_as_float(0x7f800000);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float theirs = __shfl_xor_sync(~0u, most, offset);
      most = theirs > most || theirs != theirs ? theirs : most;
    }
    const float e = sees ? exponential<T>(score - most) : 0, total = sum_lanes<32>(e);
    *lse = most + logf(total);
    return sees ? e / total : 0;
  }
};

// A warp for each row of y, and of lse; either may be null.
template <typename T>
__global__ void __launch_bounds__(kFewBlock) attention_few_kernel(FewCall<T> c, float *lse) {
  const AttentionSizes &z = c.x.z;
  const unsigned row = blockIdx.x * kFewWarps + few_warp(), queries = static_cast<unsigned>(z.queries),
                 heads = static_cast<unsigned>(z.heads), group = heads / static_cast<unsigned>(z.kv_heads);
  if (row >= z.rows()) return;
  const unsigned query = row % queries, h = row / queries % heads, b = row / queries / heads;
  const auto length = c.x.length(b);
  const FewQuery<T> of(z, query, length.value);
  float its_lse;
  const FewPart<T> q(c.q.at(b, h, query), z.dim);
  const float p = of.probability(of.products(q, c.k.at(b, h / group, 0), c.k), &its_lse);
  if (lse && lane_index() == 0) lse[row] = its_lse;
  if (c.y.data) of.sum(p, c.v.at(b, h / group, 0), c.v).store(c.y.at(b, h, query), z.v_dim, length.times);
}

// A block for each head of keys. Its warps take the rows of the queries that share it, and then dk and dv of each key,
// whose terms are added in the order of these rows. p and delta are computed again: y and lse would be two more reads.
template <typename T>
__global__ void __launch_bounds__(kFewBlock) attention_few_backward_kernel(FewCall<T> c) {
  __shared__ float weights[2][kFewRows][kFewKeys];  // ds and p
  const AttentionSizes &z = c.x.z;
  const unsigned queries = static_cast<unsigned>(z.queries), kv_heads = static_cast<unsigned>(z.kv_heads),
                 group = static_cast<unsigned>(z.heads) / kv_heads;
  const unsigned kv = blockIdx.x % kv_heads, b = blockIdx.x / kv_heads, rows = queries * group;
  const auto length = c.x.length(b);
  const T *const k = c.k.at(b, kv, 0), *const v = c.v.at(b, kv, 0);
  for (unsigned row = few_warp(); row < rows; row += kFewWarps) {
    const unsigned query = row % queries, h = kv * group + row / queries;
    const FewQuery<T> of(z, query, length.value);
    const FewPart<T> q(c.q.at(b, h, query), z.dim), dy(c.dy.at(b, h, query), z.v_dim);
    const float product = of.products(q, k, c.k), dp = of.products(dy, v, c.v);
    float lse;
    const float p = of.probability(product, &lse), delta = sum_lanes<32>(p * dp);
    const float ds = p == 0 ? 0 : p * (dp - delta) * of.scale;
    if (lane_index() < kFewKeys) weights[0][row][lane_index()] = ds, weights[1][row][lane_index()] = p;
    if (c.dq.data) of.sum(ds, k, c.k).store(c.dq.at(b, h, query), z.dim, length.times);
  }
  __syncthreads();
  for (unsigned item = few_warp(); item < 2 * z.keys; item += kFewWarps) {
    const unsigned key = item / 2, of_v = item % 2;
    const FewTensor<T> &to = of_v ? c.dv : c.dk;
    const FewTensor<const T> &from = of_v ? c.dy : c.q;
    if (!to.data) continue;
    FewPart<T> sum;
    const T *head = from.at(b, kv * group, 0), *at = head;
    unsigned query = 0;
#pragma unroll 1
    for (unsigned row = 0; row < rows; row += kFewBatch) {
      FewPart<T> parts[kFewBatch];
#pragma unroll
      for (int i = 0; i < kFewBatch; ++i) {
        parts[i] = FewPart<T>(at, from.dim, row + i < rows);
        at += from.row;
        if (++query == queries) query = 0, at = head += from.head;
      }
#pragma unroll
      for (int i = 0; i < kFewBatch; ++i) {
        const float weight = row + i < rows ? weights[of_v][row + i][key] : 0;
        if (weight != 0) sum.add(weight, parts[i]);  // what is not seen may be infinite
      }
    }
    sum.store(to.at(b, kv, key), to.dim, length.times);
  }
}

template <typename T>
Status run_few(const char *op, const AttentionInputs<T> &x, T *y, float *lse, void *stream) {
  const auto blocks = static_cast<unsigned>(ceil_div(x.z.rows(), kFewWarps));
  if (!blocks) return kOk;
  const FewCall<T> call(x, y, nullptr, nullptr, nullptr);
  return launch_kernel(op, attention_few_kernel<T>, {blocks, kFewBlock}, stream, call, lse);
}

template <typename T>
Status run_few_backward(const char *op, const AttentionInputs<T> &x, T *dq, T *dk, T *dv, void *stream) {
  const auto blocks = static_cast<unsigned>(x.z.batch * x.z.kv_heads);
  if (!blocks) return kOk;
  const FewCall<T> call(x, nullptr, dq, dk, dv);
  return launch_kernel(op, attention_few_backward_kernel<T>, {blocks, kFewBlock}, stream, call);
}

}  // namespace AOT_ISA
}  // namespace aot
