#include "lltm.h"

#include "cuda/math.cuh"
#include "cuda/overlap.cuh"
#include "cuda/sum_slices.cuh"
#include "gemm/gemm.h"
#include "gemm/tile.cuh"

namespace aot {
inline namespace AOT_ISA {
namespace {

// ---------------------------------------------------------------------------------------------------------- formula

template <typename A>
struct Gates {
  A i, o, c;
};

template <typename A>
__device__ inline Gates<A> activate(A i, A o, A c) {
  return {sigmoid<A>(i), sigmoid<A>(o), c > 0 ? c : expm1(c)};
}

template <typename A>
struct GateGradients {
  A i, o, c, cell;
};

template <typename A>
__device__ inline GateGradients<A> lltm_gradient(Gates<A> g, A old_cell, A dnew_h, A dnew_cell) {
  A h = tanh(old_cell + g.c * g.i), cell = dnew_cell + dnew_h * g.o * (1 - h * h);
  return {cell * g.c * g.i * (1 - g.i), dnew_h * h * g.o * (1 - g.o), cell * g.i * (g.c > 0 ? 1 : g.c + 1), cell};
}

// Computes a row's new_h, new_cell and gates in n neighbouring columns of the state from the three sums of each:
// write(). read() loads the operands, and may precede the sums. new_h and new_cell may be null, and so may gates.
template <typename T>
struct CellForward {
  using A = Accumulate<T>;
  const T *bias, *old_cell;
  T *new_h, *new_cell;
  A *gates;
  int64_t state;

  template <int n>
  struct Read {
    Packet<T, n> bias[3], old_cell;
  };
  template <int n>
  __device__ Read<n> read(int64_t row, int64_t j) const {
    Read<n> r;
    for (int g = 0; g < 3; ++g) r.bias[g] = load_packet<n>(bias + g * state + j);
    r.old_cell = load_packet<n>(old_cell + row * state + j);
    return r;
  }
  template <int n>
  __device__ void write(int64_t row, int64_t j, const A (&sum)[3][n], const Read<n> &r) const {
    Packet<T, n> h, cell;
    Packet<A, n> gate[3];
#pragma unroll
    for (int l = 0; l < n; ++l) {
      Gates<A> g = activate(sum[0][l] + widen(r.bias[0].value[l]), sum[1][l] + widen(r.bias[1].value[l]),
                            sum[2][l] + widen(r.bias[2].value[l]));
      A c = widen(r.old_cell.value[l]) + g.c * g.i;
      cell.value[l] = narrow<T>(c), h.value[l] = narrow<T>(tanh(c) * g.o);
      gate[0].value[l] = g.i, gate[1].value[l] = g.o, gate[2].value[l] = g.c;
    }
    if (new_h) store_packet(new_h + row * state + j, h), store_packet(new_cell + row * state + j, cell);
    if (!gates) return;
    for (int g = 0; g < 3; ++g) store_packet(gates + (row * 3 + g) * state + j, gate[g]);
  }
};

// The gradient of an output: shaped like the state, or a scalar to be broadcast.
template <typename T>
struct OutputGradient {
  const T *data;
  bool scalar;

  template <int n>
  __device__ Packet<T, n> read(int64_t at) const {
    if (!scalar) return load_packet<n>(data + at);
    Packet<T, n> packet;
#pragma unroll
    for (int l = 0; l < n; ++l) packet.value[l] = *data;
    return packet;
  }
};

template <typename T>
struct CellBackward {
  using A = Accumulate<T>;
  const A *gates;
  const T *old_cell;
  OutputGradient<T> dnew_h, dnew_cell;
  T *dold_cell;
  int64_t state;

  // The gradients of a row's gates in n neighbouring columns. Writes dold_cell, if that is not null.
  template <int n>
  __device__ void gradients(int64_t row, int64_t j, GateGradients<A> (&d)[n]) const {
    const int64_t at = row * state + j;
    Packet<A, n> g[3];
    for (int i = 0; i < 3; ++i) g[i] = load_packet<n>(gates + (row * 3 + i) * state + j);
    Packet<T, n> cell = load_packet<n>(old_cell + at), dh = dnew_h.template read<n>(at),
                 dcell = dnew_cell.template read<n>(at), dold;
#pragma unroll
    for (int l = 0; l < n; ++l) {
      d[l] = lltm_gradient<A>({g[0].value[l], g[1].value[l], g[2].value[l]}, widen(cell.value[l]), widen(dh.value[l]),
                              widen(dcell.value[l]));
      dold.value[l] = narrow<T>(d[l].cell);
    }
    if (dold_cell) store_packet(dold_cell + at, dold);
  }
};

// ------------------------------------------------------------------------------------------------------------ gates

template <typename T>
struct Operands {
  const T *input, *old_h, *weights;
  int64_t rows, features, state;
  DType dtype;

  __host__ __device__ int64_t width() const { return state + features; }
  // Element (row, k) of [old_h, input].
  __device__ const T *at(int64_t row, int64_t k) const {
    return k < state ? old_h + row * state + k : input + row * features + k - state;
  }
};

// Few gates: a warp computes two rows of one column of the state, each with kSumLanes lanes. A thread issues kSumBatch
// loads of each operand before it uses the first, so that many are in flight.
constexpr int kSumLanes = 16, kSumBlock = 256, kSumRows = kSumBlock / kSumLanes, kSumBatch = 4;

template <typename T, int kSize>
__global__ void __launch_bounds__(kSumBlock) lltm_lanes_kernel(Operands<T> x, CellForward<T> cell) {
  using A = Accumulate<T>;
  const int lane = threadIdx.x % kSumLanes;
  const int64_t row = int64_t{blockIdx.x} * kSumRows + threadIdx.x / kSumLanes, j = blockIdx.y;
  const bool present = row < x.rows;
  typename CellForward<T>::template Read<1> read;
  if (present && lane == 0) read = cell.template read<1>(row, j);
  A sum[3][1] = {};
  for (int64_t first = lane * kSize; first < x.width(); first += kSumLanes * kSize * kSumBatch) {
    Packet<T, kSize> a[kSumBatch], w[kSumBatch][3];
#pragma unroll
    for (int b = 0; b < kSumBatch; ++b) {
      int64_t k = first + b * kSumLanes * kSize;
      bool inside = k < x.width();
      a[b] = load_packet<kSize>(x.at(row, k), inside && present);
      for (int g = 0; g < 3; ++g) w[b][g] = load_packet<kSize>(x.weights + (g * x.state + j) * x.width() + k, inside);
    }
#pragma unroll
    for (int b = 0; b < kSumBatch; ++b)
#pragma unroll
      for (int l = 0; l < kSize; ++l)
        for (int g = 0; g < 3; ++g) sum[g][0] += widen(a[b].value[l]) * widen(w[b][g].value[l]);
  }
  for (int g = 0; g < 3; ++g) sum[g][0] = sum_lanes<kSumLanes>(sum[g][0]);
  if (present && lane == 0) cell.template write<1>(row, j, sum, read);
}

// Few rows in float32, for compute capability 9.0, where it was measured: one kernel computes the sums and the cell. A
// cluster has a tile of kRows rows and kColumns columns of the state, which are three columns of sums each; its blocks
// share the terms. These come in chunks of kDepth through kStages stages of shared memory, half of each for one group
// of four warps and half for the other. A thread has 8 rows by 6 columns of sums.
struct RowTile {
  static constexpr int kRows = 64, kColumns = 32, kSums = 3 * kColumns, kDepth = 32, kStages = 4, kThreads = 256;
  static constexpr int kStride = kDepth + 4, kLine = kSums + 4;  // in shared memory, padded against bank conflicts
  static constexpr int kStage = (kRows + kSums) * kStride;
  // Eight rows of sums, which blocks send each other. A block gets kOctets at most: two of each of seven blocks.
  static constexpr int kOctet = 8 * kLine, kOctets = 14;
  static constexpr int kShared = (kStages * kStage + kOctets * kOctet) * int{sizeof(float)};
  // On an H200 it was faster than the product and its kernels with 16 to 128 rows and up to 12 chunks for each block,
  // and slower with most of more.
  static constexpr int kLeastRows = 16, kMostRows = 2 * kRows, kMostChunks = 12;
  static_assert(kRows * kLine <= kStages * kStage, "the sums take the place of the stages");
};

__global__ void __launch_bounds__(RowTile::kThreads, 1) lltm_rows_kernel(Operands<float> x, CellForward<float> cell) {
#if __CUDA_ARCH__ == 900
  using Tile = RowTile;
  extern __shared__ float4 memory[];
  __shared__ uint64_t arrived;
  float *const stages = reinterpret_cast<float *>(memory), *const octets = stages + Tile::kStages * Tile::kStage;
  const int blocks = static_cast<int>(gridDim.x), rank = static_cast<int>(blockIdx.x);  // of the cluster
  const int width = static_cast<int>(x.width()), chunks = (width + Tile::kDepth - 1) / Tile::kDepth;
  const int first = chunks * rank / blocks, last = chunks * (rank + 1) / blocks;
  const int first_row = static_cast<int>(blockIdx.z) * Tile::kRows;
  const int64_t first_column = int64_t{blockIdx.y} * Tile::kColumns;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 1), mbarrier_init_fence();
    mbarrier_expect(&arrived, (7 - rank + blocks) / blocks * blocks * Tile::kOctet * int{sizeof(float)});
  }
  __syncwarp();
  if (blocks > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  const int line = static_cast<int>(threadIdx.x) / 8, piece = static_cast<int>(threadIdx.x) % 8 * 4;
  const float *const weights = x.weights + (first_column + line) * width;
  const bool has_column = first_column + line < x.state;
  auto copy = [&](int chunk) {
    const int k = chunk * Tile::kDepth + piece;
    uint32_t to =
        shared_address(stages + (chunk - first) % Tile::kStages * Tile::kStage + line * Tile::kStride + piece);
    constexpr int kNext = 32 * Tile::kStride * int{sizeof(float)};
#pragma unroll
    for (int i = 0; i < Tile::kRows; i += 32, to += kNext) {
      const int row = first_row + line + i;
      copy_async(to, x.at(row, k), k < width && row < x.rows);
    }
#pragma unroll
    for (int g = 0; g < 3; ++g, to += kNext) copy_async(to, weights + g * x.state * width + k, k < width && has_column);
  };

  wait_for_kernel_before();
#pragma unroll 1
  for (int i = 0; i < Tile::kStages; ++i) {
    if (first + i < last) copy(first + i);
    commit_copies();
  }
  const int lane = lane_index(), warp = warp_index() % 4, group = warp_index() / 4;
  // Rows m + 8 i, sums n + j. Pairs of lanes share what they load, which halves its time.
  const int m = lane / 2 % 8, n = 24 * warp + 6 * (lane / 16 * 2 + lane % 2);
  float sum[8][6] = {};
#pragma unroll 1
  for (int i = first; i < last; ++i) {
    if (i == first) wait_copies<Tile::kStages - 1>();
    else wait_copies<Tile::kStages - 2>();
    __syncthreads();
    if (i > first) {
      if (i - 1 + Tile::kStages < last) copy(i - 1 + Tile::kStages);
      commit_copies();
    }
    const float *stage = stages + (i - first) % Tile::kStages * Tile::kStage + group * (Tile::kDepth / 2);
    const float *a = stage + m * Tile::kStride, *b = stage + (Tile::kRows + n) * Tile::kStride;
    Packet<float, 4> av[2][8], bv[2][6];  // the next four terms are read while four are multiplied
    auto read = [&](int k) {
      const int to = k / 4 % 2;
#pragma unroll
      for (int j = 0; j < 6; ++j) bv[to][j] = *reinterpret_cast<const Packet<float, 4> *>(b + j * Tile::kStride + k);
#pragma unroll
      for (int r = 0; r < 8; ++r)
        av[to][r] = *reinterpret_cast<const Packet<float, 4> *>(a + 8 * r * Tile::kStride + k);
    };
    read(0);
#pragma unroll
    for (int k = 0; k < Tile::kDepth / 2; k += 4) {
      if (k + 4 < Tile::kDepth / 2) read(k + 4);
      const int from = k / 4 % 2;
#pragma unroll
      for (int l = 0; l < 4; ++l)
#pragma unroll
        for (int r = 0; r < 8; ++r)
#pragma unroll
          for (int j = 0; j < 6; ++j) sum[r][j] += av[from][r].value[l] * bv[from][j].value[l];
    }
  }

  // Each group adds up half of the rows. Then the blocks do, eight rows in turn.
  const int64_t column = first_column + lane;
  const bool has_sums = column < x.state;
  int row = 8 * rank + warp_index();
  CellForward<float>::Read<1> read = {};
  if (has_sums && first_row + row < x.rows) read = cell.read<1>(first_row + row, column);
  using Pair = Packet<float, 2>;
  float *const mine = stages + m * Tile::kLine + n;
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 8; ++r)
    if (r / 4 != group)
#pragma unroll
      for (int j = 0; j < 6; j += 2) store_packet(mine + r * Tile::kOctet + j, Pair{sum[r][j], sum[r][j + 1]});
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 8; ++r)
    if (r / 4 == group)
#pragma unroll
      for (int j = 0; j < 6; j += 2) {
        float *const at = mine + r * Tile::kOctet + j;
        const Pair other = *reinterpret_cast<const Pair *>(at);
        store_packet(at, Pair{sum[r][j] + other.value[0], sum[r][j + 1] + other.value[1]});
      }
  __syncthreads();
  const float *part = (blocks > 1 ? octets : stages) + warp_index() * Tile::kLine + lane;
  if (blocks > 1) {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all blocks have barriers
#pragma unroll
    for (int octet = 0; octet < 8; ++octet)
      if (threadIdx.x < Tile::kOctet / 4) {
        const Packet<float, 4> *from = reinterpret_cast<const Packet<float, 4> *>(stages + octet * Tile::kOctet);
        float *to = octets + (octet / blocks * blocks + rank) * Tile::kOctet;
        store_async(reinterpret_cast<Packet<float, 4> *>(to) + threadIdx.x, from[threadIdx.x], &arrived,
                    octet % blocks);
      }
    mbarrier_wait_cluster(&arrived, 0);
  }
#pragma unroll 1
  for (; row < Tile::kRows && first_row + row < x.rows; row += 8 * blocks) {
    float total[3][1] = {};
#pragma unroll
    for (int r = 0; r < kMaxCluster; ++r)
      if (r < blocks)
#pragma unroll
        for (int g = 0; g < 3; ++g) total[g][0] += part[r * Tile::kOctet + g * Tile::kColumns];
    part += blocks * Tile::kOctet;
    if (!has_sums) continue;
    cell.write<1>(first_row + row, column, total, read);
    const int next = row + 8 * blocks;
    if (next < Tile::kRows && first_row + next < x.rows) read = cell.read<1>(first_row + next, column);
  }
#else
  __trap();
#endif
}

// Many gates: they are a product of joined = [old_h, input].
template <typename T>
struct Joined {
  Operands<T> x;
  T *data;

  template <int kSize>
  __device__ void write(int64_t packet) const {
    const int64_t at = packet * kSize;
    if (at < x.rows * x.width()) store_packet(data + at, load_packet<kSize>(x.at(at / x.width(), at % x.width())));
  }
};

template <typename T, int kSize>
__global__ void __launch_bounds__(256) lltm_join_kernel(Joined<T> joined) {
  wait_for_kernel_before();
  joined.template write<kSize>(int64_t{blockIdx.x} * 256 + threadIdx.x);
}

// The cell, from the sums of that product, which may lie where the gates are to be.
template <typename T, int kCount>
__global__ void __launch_bounds__(256)
    lltm_cell_kernel(const Accumulate<T> *sums, CellForward<T> cell, int64_t packets) {
  wait_for_kernel_before();
  const int64_t packet = int64_t{blockIdx.x} * 256 + threadIdx.x, at = packet * kCount;
  if (packet >= packets) return;
  const int64_t row = at / cell.state, j = at % cell.state;
  Accumulate<T> sum[3][kCount];
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    auto part = load_packet<kCount>(sums + (row * 3 + g) * cell.state + j);
#pragma unroll
    for (int l = 0; l < kCount; ++l) sum[g][l] = part.value[l];
  }
  cell.template write<kCount>(row, j, sum, cell.template read<kCount>(row, j));
}

// --------------------------------------------------------------------------------------------------------- gradients

// The gradients that are sums over dpre, or products with it; null if not wanted.
template <typename T>
struct Gradients {
  T *dinput, *dweights, *dbias, *dold_h;
};

// dpre and dold_cell. `sums`, unless null, receives the partial sums of dbias over each block's rows, (gridDim.y, 3S).
// Blocks behind the first cell_blocks of each gridDim.x write joined.
constexpr int kCellWarps = 8;

template <typename T, int kCount>
__global__ void __launch_bounds__(kCellWarps * 32)
    lltm_cell_backward_kernel(CellBackward<T> cell, T *dpre, Accumulate<T> *sums, int64_t rows, unsigned cell_blocks,
                              Joined<T> joined) {
  using A = Accumulate<T>;
  if (blockIdx.x >= cell_blocks) {
    const int64_t block = int64_t{blockIdx.x - cell_blocks} * gridDim.y + blockIdx.y;
    return joined.template write<kCount>(block * kCellWarps * 32 + threadIdx.x);
  }
  const int64_t j = (int64_t{blockIdx.x} * 32 + lane_index()) * kCount, all = 3 * cell.state;
  const int64_t piece = ceil_div(rows, gridDim.y), first = blockIdx.y * piece, last = min(first + piece, rows);
  A total[3 * kCount];
  LongSums<A, 3 * kCount> totals(total);
  totals.each(first + warp_index(), j < cell.state ? last : 0, kCellWarps, [&](int64_t row) {
    GateGradients<A> d[kCount];
    cell.template gradients<kCount>(row, j, d);
    Packet<T, kCount> packet[3];
#pragma unroll
    for (int l = 0; l < kCount; ++l) {
      A gate[] = {d[l].i, d[l].o, d[l].c};
#pragma unroll
      for (int g = 0; g < 3; ++g) totals.run[g * kCount + l] += gate[g], packet[g].value[l] = narrow<T>(gate[g]);
    }
#pragma unroll
    for (int g = 0; g < 3; ++g) store_packet(dpre + row * all + g * cell.state + j, packet[g]);
  });
  if (!sums) return;
  __shared__ A of_warps[kCellWarps][3 * kCount][32];
#pragma unroll
  for (int n = 0; n < 3 * kCount; ++n) of_warps[warp_index()][n][lane_index()] = total[n];
  __syncthreads();
  for (int n = warp_index(); n < 3 * kCount && j < cell.state; n += kCellWarps) {
    A sum = 0;
#pragma unroll
    for (int w = 0; w < kCellWarps; ++w) sum += of_warps[w][n][lane_index()];
    sums[blockIdx.y * all + n / kCount * cell.state + j + n % kCount] = sum;
  }
}

// What is left of one product: dold_h and dinput of joined = [dold_h, dinput], and dbias, the sums of partial sums.
template <typename T, int kCount>
__global__ void __launch_bounds__(256) lltm_part_kernel(const T *joined, Operands<T> x, Gradients<T> d,
                                                        const Accumulate<T> *sums, int parts, unsigned sum_blocks) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x, all = 3 * x.state;
  if (blockIdx.x < sum_blocks) {
    if (i >= all) return;
    double total = 0;
#pragma unroll 8
    for (int part = 0; part < parts; ++part) total += sums[part * all + i];
    d.dbias[i] = narrow<T>(static_cast<Accumulate<T>>(total));
    return;
  }
  const int64_t at = (i - int64_t{sum_blocks} * 256) * kCount, row = at / x.width(), k = at % x.width();
  if (row >= x.rows) return;
  T *const to = k < x.state ? d.dold_h + row * x.state + k : d.dinput + row * x.features + k - x.state;
  store_packet(to, load_packet<kCount>(joined + at));
}

// Few rows: all gradients in one kernel. A lane has a column, and a warp kFewRows results of each. dweights and dbias
// are sums over the few rows. dold_h and dinput are sums over the gates, which the warps of a block share. A block
// computes the elements of dpre that it needs, or loads them if too many blocks would compute the same ones.
constexpr int kFewBlock = 256, kFewWarps = kFewBlock / 32, kFewRows = 4, kFewBatch = 16, kFewPart = 2048;

// Element (row, n) of dpre, loaded.
template <typename T>
struct LoadedGradients {
  const T *dpre;
  int64_t all;
  __device__ Accumulate<T> operator()(int64_t row, int64_t n, bool) const { return widen(dpre[row * all + n]); }
};
// The cell, computed from the gates.
template <typename T>
struct ComputedGradients {
  CellBackward<T> cell;
  // `writes`: this block writes dold_cell
  __device__ Accumulate<T> operator()(int64_t row, int64_t n, bool writes) const {
    const int gate = (n >= cell.state) + (n >= 2 * cell.state);
    CellBackward<T> of_element = cell;
    if (gate || !writes) of_element.dold_cell = nullptr;
    GateGradients<Accumulate<T>> d[1];
    of_element.template gradients<1>(row, n - gate * cell.state, d);
    return gate == 0 ? d->i : gate == 1 ? d->o : d->c;
  }
};

// sum[i] += left(from + i, t) * *right(t) and total[i] += left(from + i, t) for t < terms, which kWarps warps share.
// `part`, in shared memory, holds left(i, t) for i < kAcross, which all warps of the block use.
template <int kAcross, int kWarps, typename T, typename A, class Left, class Right>
__device__ inline void multiply_few(A *part, A (&sum)[kFewRows], A (&total)[kFewRows], int from, int64_t terms,
                                    bool present, Left left, Right right) {
  constexpr int kTerms = kFewPart / kAcross;
  for (int64_t first = 0; first < terms; first += kTerms) {
    const int count = static_cast<int>(min(int64_t{kTerms}, terms - first)), begin = kWarps > 1 ? warp_index() : 0;
    T b[kFewBatch];
    auto load = [&](int t) {  // all are in flight before one is used
#pragma unroll
      for (int l = 0; l < kFewBatch; ++l)
        b[l] = present && t + l * kWarps < count ? *right(first + t + l * kWarps) : T(0.0f);
    };
    load(begin);
    for (int e = threadIdx.x; e < count * kAcross; e += kFewBlock) part[e] = left(e % kAcross, first + e / kAcross);
    __syncthreads();
    for (int t = begin; t < count; t += kFewBatch * kWarps) {
      T now[kFewBatch];
#pragma unroll
      for (int l = 0; l < kFewBatch; ++l) now[l] = b[l];
      load(t + kFewBatch * kWarps);
#pragma unroll
      for (int l = 0; l < kFewBatch; ++l) {
        if (t + l * kWarps >= count) continue;
        auto a = *reinterpret_cast<const Packet<A, kFewRows> *>(part + (t + l * kWarps) * kAcross + from);
#pragma unroll
        for (int i = 0; i < kFewRows; ++i) sum[i] += a.value[i] * widen(now[l]), total[i] += a.value[i];
      }
    }
    __syncthreads();
  }
}

template <typename T, class Source>
__global__ void __launch_bounds__(kFewBlock)
    lltm_few_kernel(Operands<T> x, Source dpre, Gradients<T> gradients, int64_t weight_blocks) {
  using A = Accumulate<T>;
  __shared__ __align__(16) A part[kFewPart];
  const int warp = warp_index(), lane = lane_index();
  const int64_t columns = ceil_div(x.width(), 32), all = 3 * x.state;
  A sum[kFewRows] = {}, total[kFewRows] = {};
  if (blockIdx.x < weight_blocks) {
    constexpr int kAcross = kFewRows * kFewWarps;
    const int64_t k = blockIdx.x % columns * 32 + lane, n0 = blockIdx.x / columns * kAcross, n = n0 + warp * kFewRows;
    const bool inside = k < x.width(), writes_dold_cell = blockIdx.x % columns == 0;
    multiply_few<kAcross, 1, T>(
        part, sum, total, warp * kFewRows, x.rows, inside,
        [&](int i, int64_t row) { return n0 + i < all ? dpre(row, n0 + i, writes_dold_cell) : A(0); },
        [&](int64_t row) { return x.at(row, k); });
    for (int i = 0; i < kFewRows && n + i < all; ++i) {
      if (gradients.dweights && inside) gradients.dweights[(n + i) * x.width() + k] = narrow<T>(sum[i]);
      if (gradients.dbias && k == 0) gradients.dbias[n + i] = narrow<T>(total[i]);
    }
    return;
  }
  const int64_t block = blockIdx.x - weight_blocks, k = block % columns * 32 + lane, row = block / columns * kFewRows;
  const int rows = static_cast<int>(min(int64_t{kFewRows}, x.rows - row));
  const bool inside = k < x.width();
  multiply_few<kFewRows, kFewWarps, T>(
      part, sum, total, 0, all, inside, [&](int i, int64_t n) { return i < rows ? dpre(row + i, n, false) : A(0); },
      [&](int64_t n) { return x.weights + n * x.width() + k; });
  A(&of_warps)[kFewWarps][kFewRows][32] = reinterpret_cast<A(&)[kFewWarps][kFewRows][32]>(part);
  for (int i = 0; i < kFewRows; ++i) of_warps[warp][i][lane] = sum[i];
  __syncthreads();
  if (warp >= rows || !inside) return;
  A result = 0;
  for (int w = 0; w < kFewWarps; ++w) result += of_warps[w][warp][lane];
  T *out = k < x.state ? gradients.dold_h : gradients.dinput;
  if (out) out[k < x.state ? (row + warp) * x.state + k : (row + warp) * x.features + k - x.state] = narrow<T>(result);
}

// -------------------------------------------------------------------------------------------------------- launchers

template <typename T>
Operands<T> operands(const Tensor &input, const Tensor &weights, const Tensor &old_h) {
  return {input.as<const T>(),
          old_h.as<const T>(),
          weights.as<const T>(),
          LltmAttrs::rows(old_h),
          LltmAttrs::width(input),
          LltmAttrs::width(old_h),
          old_h.dtype};
}

// Whether accesses of 16 bytes are possible throughout.
template <typename T, typename... Pointers>
bool vectorizable(const Operands<T> &x, const Pointers *...pointers) {
  constexpr int kWhole = kVectorSize<T> < 4 ? 4 : kVectorSize<T>;
  return x.state % kWhole == 0 && x.features % kWhole == 0 && aligned(x.input, x.old_h, x.weights, pointers...);
}

// A workspace, as Lltm and LltmBackward lay it out.
template <typename T>
struct Memory {
  T *joined;
  Accumulate<T> *gates, *sums, *library;
  int64_t library_bytes;

  Memory(Accumulate<T> *data, const LltmAttrs::Scratch &place)
      : joined(reinterpret_cast<T *>(data + place.joined)),
        gates(data + place.gates),
        sums(data + place.sums),
        library(data + place.library),
        library_bytes((place.end - place.library) * sizeof(*data)) {}
};

template <typename T>
Operand matrix(const T *data, int64_t stride, bool transposed = false) {
  return {const_cast<T *>(data), stride, transposed};
}

// c (m, n) = a (m, k) b (k, n), if c is wanted.
template <typename T>
Status multiply(const char *op, DType dtype, DType c_dtype, int64_t m, int64_t n, int64_t k, Operand a, Operand b,
                Operand c, const Memory<T> &memory, cudaStream_t stream) {
  GemmParams g = {dtype, c_dtype, m, n, k, a, b, c};
  g.workspace = memory.library_bytes ? memory.library : nullptr, g.workspace_bytes = memory.library_bytes;
  return c.data ? gemm(op, g, stream) : kOk;
}

template <typename T, int kSize>
Status join(const char *op, const Operands<T> &x, T *joined, cudaStream_t stream) {
  const int64_t packets = x.rows * x.width() / kSize;
  if (packets == 0) return kOk;
  const unsigned blocks = grid_size(ceil_div(packets, 256));
  return launch_kernel(op, lltm_join_kernel<T, kSize>, {blocks, 256, 0, 1, overlaps(blocks)}, stream,
                       Joined<T>{x, joined});
}

// Blocks of a cluster for so many tiles: as many as let all clusters run at once. Unused without code for 9.0.
[[maybe_unused]] inline Status row_blocks(const char *op, int64_t tiles, unsigned *blocks) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices][kMaxCluster + 1];  // clusters at once of a size, and 1
  int device = 0;
  AOT_TRY(check_cuda(op, cudaGetDevice(&device)));
  for (*blocks = kMaxCluster; *blocks > 1; --*blocks) {
    int64_t at_once = device < kDevices ? known[device][*blocks].load(std::memory_order_relaxed) - 1 : -1;
    if (at_once < 0) {
      AOT_TRY(clusters_at_once<lltm_rows_kernel>(op, RowTile::kThreads, *blocks, RowTile::kShared, &at_once));
      if (device < kDevices) known[device][*blocks].store(static_cast<int>(at_once) + 1, std::memory_order_relaxed);
    }
    if (tiles <= at_once) break;
  }
  return kOk;
}

// The kernel of few rows, if it takes such a call.
template <typename T, int kSize>
Status launch_rows(const char *op, const Operands<T> &x, const CellForward<T> &cell, cudaStream_t stream, bool *done) {
#ifdef AOT_HAVE_SM90
  if constexpr (std::is_same_v<T, float> && kSize > 1) {
    DeviceLimits limits;
    AOT_TRY(device_limits(op, &limits));
    if (limits.major != 9 || x.rows < RowTile::kLeastRows || x.rows > RowTile::kMostRows) return kOk;
    const int64_t columns = ceil_div(x.state, RowTile::kColumns), tiles = ceil_div(x.rows, RowTile::kRows);
    unsigned blocks = 1;
    AOT_TRY(row_blocks(op, columns * tiles, &blocks));
    *done = ceil_div(x.width(), RowTile::kDepth * blocks) <= RowTile::kMostChunks;
    if (!*done) return kOk;
    const dim3 grid(blocks, static_cast<unsigned>(columns), static_cast<unsigned>(tiles));
    return launch_kernel(op, lltm_rows_kernel, {grid, RowTile::kThreads, RowTile::kShared, blocks, true}, stream, x,
                         cell);
  }
#endif
  return kOk;
}

// Computes the gates' sums, and calls `cell` with them. *joined: whether it leaves [old_h, input] in memory.joined.
template <typename T, int kSize>
Status launch_gates(const char *op, const Operands<T> &x, const CellForward<T> &cell, bool few, const Memory<T> &memory,
                    cudaStream_t stream, bool *joined) {
  constexpr int kCount = kSize == 1 ? 1 : 4;
  const int64_t all = 3 * x.state, packets = x.rows * x.state / kCount;
  *joined = false;
  if (packets == 0) return kOk;
  if (few) {
    const dim3 grid(grid_size(ceil_div(x.rows, kSumRows)), static_cast<unsigned>(x.state));
    lltm_lanes_kernel<T, kSize><<<grid, kSumBlock, 0, stream>>>(x, cell);
    return check_launch(op);
  }
  bool done = false;
  AOT_TRY((launch_rows<T, kSize>(op, x, cell, stream, &done)));
  if (done) return kOk;
  *joined = true;
  Accumulate<T> *sums = cell.gates ? cell.gates : memory.gates;
  AOT_TRY((join<T, kSize>(op, x, memory.joined, stream)));
  AOT_TRY(multiply(op, x.dtype, accumulate_dtype(x.dtype), x.rows, all, x.width(), matrix(memory.joined, x.width()),
                   matrix(x.weights, x.width(), true), {sums, all}, memory, stream));
  const unsigned blocks = grid_size(ceil_div(packets, 256));
  return launch_kernel(op, lltm_cell_kernel<T, kCount>, {blocks, 256, 0, 1, overlaps(blocks)}, stream, sums, cell,
                       packets);
}

template <typename T, class Source>
Status launch_few(const char *op, const Operands<T> &x, const Source &dpre, const Gradients<T> &gradients, bool weights,
                  cudaStream_t stream) {
  const int64_t columns = ceil_div(x.width(), 32);
  const int64_t weight_blocks = weights ? columns * ceil_div(3 * x.state, kFewRows * kFewWarps) : 0;
  const bool inputs = gradients.dold_h || gradients.dinput;
  const int64_t blocks = weight_blocks + (inputs ? columns * ceil_div(x.rows, kFewRows) : 0);
  if (blocks == 0) return kOk;
  lltm_few_kernel<T, Source><<<grid_size(blocks), kFewBlock, 0, stream>>>(x, dpre, gradients, weight_blocks);
  return check_launch(op);
}

Status lltm_cuda(const Lltm &op, const Tensor *in, const Tensor *out, void *stream_) {
  const Tensor &input = in[op.kInput], &old_h = in[op.kOldH], &work = out[op.kWork];
  const Lltm::Scratch place = op.scratch(input, old_h);
  if (place.end && !work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    auto *stream = static_cast<cudaStream_t>(stream_);
    const Operands<T> x = operands<T>(input, in[op.kWeights], old_h);
    const CellForward<T> cell = {in[op.kBias].as<const T>(), in[op.kOldCell].as<const T>(),      out[op.kNewH].as<T>(),
                                 out[op.kNewCell].as<T>(),   out[op.kGates].as<Accumulate<T>>(), x.state};
    const Memory<T> memory(work.as<Accumulate<T>>(), place);
    const bool few = op.few_gates(input, old_h);
    bool joined = false;
    if (vectorizable(x, cell.bias, cell.old_cell, cell.new_h, cell.new_cell, cell.gates, work.as<T>()))
      return launch_gates<T, kVectorSize<T>>(op.name, x, cell, few, memory, stream, &joined);
    return launch_gates<T, 1>(op.name, x, cell, few, memory, stream, &joined);
  });
}

// The most elements of [dold_h, dinput] that are one product, and then copied.
constexpr int64_t kOneProduct = 1 << 20;

// recompute: the gates, which then are memory.gates.
template <typename T, int kSize>
Status lltm_backward(const LltmBackward &op, const Operands<T> &x, const T *bias, const CellBackward<T> &cell, T *dpre,
                     const Memory<T> &memory, const Gradients<T> &d, bool recompute, bool few_gates,
                     cudaStream_t stream) {
  constexpr int kCount = kSize == 1 ? 1 : 4;
  const int64_t all = 3 * x.state, width = x.width();
  const bool few = x.rows * width <= 36864, weights = d.dweights || d.dbias;
  bool joined = false;
  if (recompute)
    AOT_TRY((launch_gates<T, kSize>(op.name, x, {bias, cell.old_cell, nullptr, nullptr, memory.gates, x.state},
                                    few_gates, memory, stream, &joined)));
  if (few && width <= 256)
    return launch_few(op.name, x, ComputedGradients<T>{cell}, d, weights || cell.dold_cell, stream);
  // Where a launch takes longer than a copy of few elements, [dold_h, dinput] is one product, and joined and dbias have
  // no kernels of their own.
  const bool packets = kCount == 1 || aligned(d.dold_h, d.dinput);
  const bool one_product = !few && d.dold_h && d.dinput && packets && x.rows * width <= kOneProduct;
  const bool joins = !few && d.dweights && !joined, joins_here = joins && one_product;
  const int parts = op.parts(x.rows);
  Accumulate<T> *const sums = d.dbias && !few ? memory.sums : nullptr;
  if (x.rows > 0 && x.state > 0) {
    const unsigned cell_blocks = grid_size(ceil_div(x.state, 32 * kCount));
    const int64_t joining = joins_here ? ceil_div(x.rows * width, int64_t{kCellWarps} * 32 * kCount * parts) : 0;
    const dim3 grid(cell_blocks + static_cast<unsigned>(joining), parts);
    lltm_cell_backward_kernel<T, kCount>
        <<<grid, kCellWarps * 32, 0, stream>>>(cell, dpre, sums, x.rows, cell_blocks, {x, memory.joined});
    AOT_TRY(check_launch(op.name));
  }
  if (few) return launch_few(op.name, x, LoadedGradients<T>{dpre, all}, d, weights, stream);
  if (d.dbias && !one_product) AOT_TRY(sum_slices<double>(op.name, memory.sums, parts, d.dbias, all, stream));
  if (joins && !joins_here) AOT_TRY((join<T, kSize>(op.name, x, memory.joined, stream)));
  auto product = [&](int64_t m, int64_t n, int64_t k, Operand a, Operand b, T *c) {
    return multiply(op.name, x.dtype, x.dtype, m, n, k, a, b, {c, n}, memory, stream);
  };
  AOT_TRY(product(all, width, x.rows, matrix(dpre, all, true), matrix(memory.joined, width), d.dweights));
  if (one_product) {
    AOT_TRY(product(x.rows, width, all, matrix(dpre, all), matrix(x.weights, width), memory.joined));
    const unsigned sum_blocks = d.dbias ? grid_size(ceil_div(all, 256)) : 0;
    const unsigned blocks = grid_size(ceil_div(x.rows * width, 256 * kCount));
    lltm_part_kernel<T, kCount>
        <<<sum_blocks + blocks, 256, 0, stream>>>(memory.joined, x, d, memory.sums, parts, sum_blocks);
    return check_launch(op.name);
  }
  AOT_TRY(product(x.rows, x.state, all, matrix(dpre, all), matrix(x.weights, width), d.dold_h));
  return product(x.rows, x.features, all, matrix(dpre, all), matrix(x.weights + x.state, width), d.dinput);
}

Status lltm_backward_cuda(const LltmBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &input = in[op.kInput], &old_h = in[op.kOldH], &gates = in[op.kGates], &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const Operands<T> x = operands<T>(input, in[op.kWeights], old_h);
    const Memory<T> memory(work.as<A>(), op.scratch(input, old_h, bool(gates)));
    const T *bias = in[op.kBias].as<const T>();
    auto output_gradient = [&](const Tensor &d) { return OutputGradient<T>{d.as<const T>(), d.ndim == 0}; };
    const CellBackward<T> cell = {
        gates ? gates.as<const A>() : memory.gates, in[op.kOldCell].as<const T>(), output_gradient(in[op.kDnewH]),
        output_gradient(in[op.kDnewCell]),          out[op.kDoldCell].as<T>(),     x.state};
    const Gradients<T> gradients = {out[op.kDinput].as<T>(), out[op.kDweights].as<T>(), out[op.kDbias].as<T>(),
                                    out[op.kDoldH].as<T>()};
    auto run = [&](auto size) {
      return lltm_backward<T, size()>(op, x, bias, cell, work.as<T>(), memory, gradients, !gates,
                                      op.few_gates(input, old_h), static_cast<cudaStream_t>(stream));
    };
    if (vectorizable(x, bias, cell.old_cell, cell.gates, cell.dnew_h.scalar ? nullptr : cell.dnew_h.data,
                     cell.dnew_cell.scalar ? nullptr : cell.dnew_cell.data, cell.dold_cell, work.as<T>()))
      return run(std::integral_constant<int, kVectorSize<T>>());
    return run(std::integral_constant<int, 1>());
  });
}

}  // namespace
}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Lltm, aot_lltm_cuda, lltm_cuda)
AOT_ENTRY(LltmBackward, aot_lltm_backward_cuda, lltm_backward_cuda)
