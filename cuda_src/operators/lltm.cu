#include "lltm.h"

#include <initializer_list>

#include "cuda/math.cuh"
#include "cuda/sum_slices.cuh"
#include "gemm/gemm.h"
#include "gemm/mma.cuh"
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

// Few rows: a warp computes two rows of one column of the state, each with kSumLanes lanes. A thread issues kSumBatch
// loads of each operand before it uses the first, so that many are in flight.
constexpr int kSumLanes = 16, kSumBlock = 256, kSumRows = kSumBlock / kSumLanes, kSumBatch = 4;

template <typename T, int kSize>
__global__ void __launch_bounds__(kSumBlock) lltm_lanes_kernel(Operands<T> x, CellForward<T> cell) {
  using A = Accumulate<T>;
  const int lane = threadIdx.x % kSumLanes;
  const int64_t row = int64_t{blockIdx.y} * kSumRows + threadIdx.x / kSumLanes, j = blockIdx.x;
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

// Many rows: a tile has the same columns of all three gates, so that one thread has the three sums of a cell.

// The operands of a tile's product: old_h and its weights in part 0, input and its weights in part 1.
template <typename T, class Shape>
struct GateOperands {
  Operands<T> x;
  int64_t row0, j0;

  __device__ explicit GateOperands(const Operands<T> &x)
      : x(x), row0(int64_t{blockIdx.y} * Shape::kM), j0(int64_t{blockIdx.x} * Shape::kPartN) {
    static_assert(Shape::kGroupsN == 3, "one for each gate");
  }
  template <class Left, class Right>
  __device__ void operator()(int part, Left &left, Right &right) const {
    const T *rows = part ? x.input : x.old_h, *columns = x.weights + (part ? x.state : 0);
    const int64_t width = part ? x.features : x.state;
    left.begin(width, Shape::kDepth, [&](int at, int k) { return rows + min(row0 + at, x.rows - 1) * width + k; });
    right.begin(width, Shape::kDepth, [&](int at, int k) {
      return columns + (at / Shape::kPartN * x.state + min(j0 + at % Shape::kPartN, x.state - 1)) * x.width() + k;
    });
  }
  __device__ int64_t steps_h() const { return ceil_div(x.state, Shape::kDepth); }
  __device__ int64_t steps_input() const { return ceil_div(x.features, Shape::kDepth); }
};

template <typename T, class Shape, int kSize>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    lltm_tile_kernel(Operands<T> x, CellForward<T> cell) {
  using A = Accumulate<T>;
  using Left = TileLoader<T, Shape, Shape::kM, true, kSize>;
  using Right = TileLoader<T, Shape, Shape::kN, true, kSize>;
  __shared__ TileStages<Shape, A> memory;
  TileSums<Shape, A> sum = {};
  GateOperands<T, Shape> operands(x);
  simt_mainloop<Left, Right>(memory, sum, operands.steps_h(), operands.steps_input(), operands);

  constexpr int kCount = kSize == 1 ? 1 : 4;
  const int64_t column = operands.j0 + first_column<Shape>();
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i) {
    int64_t row = operands.row0 + first_row<Shape>() + i / 4 * Shape::kPartM + i % 4;
#pragma unroll
    for (int l = 0; l < 4; l += kCount) {
      A of_gates[3][kCount];
#pragma unroll
      for (int n = 0; n < 3 * kCount; ++n)
        of_gates[n / kCount][n % kCount] = sum.value[i][n / kCount * 4 + l + n % kCount];
      if (row < x.rows && column + l < x.state)
        cell.template write<kCount>(row, column + l, of_gates, cell.template read<kCount>(row, column + l));
    }
  }
}

// The same for 16 bits on the tensor cores.
extern __shared__ __align__(128) unsigned char mma_memory[];

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) lltm_mma_kernel(Operands<T> x, CellForward<T> cell) {
  using Left = MmaLoader<T, Shape, Shape::kM, true>;
  using Right = MmaLoader<T, Shape, Shape::kN, true>;
  MmaSums<Shape> sum = {};
  GateOperands<T, Shape> operands(x);
  mma_mainloop<Left, Right>(reinterpret_cast<T *>(mma_memory), sum, operands.steps_h(), operands.steps_input(),
                            operands);
  constexpr int kInGate = Shape::kColumns / 3;
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < kInGate; ++j) {
        int64_t row = operands.row0 + Shape::row(i, half), column = operands.j0 + Shape::column(j);
        float of_gates[3][2];
#pragma unroll
        for (int n = 0; n < 6; ++n) of_gates[n / 2][n % 2] = sum.value[i][n / 2 * kInGate + j][half * 2 + n % 2];
        if (row < x.rows && column < x.state)
          cell.template write<2>(row, column, of_gates, cell.template read<2>(row, column));
      }
}

// The cell, from sums that cuBLASLt has written in the place of the gates.
template <typename T, int kCount>
__global__ void __launch_bounds__(256) lltm_cell_kernel(CellForward<T> cell, int64_t packets) {
  using A = Accumulate<T>;
  const int64_t packet = int64_t{blockIdx.x} * 256 + threadIdx.x, at = packet * kCount;
  if (packet >= packets) return;
  const int64_t row = at / cell.state, j = at % cell.state;
  A sum[3][kCount];
#pragma unroll
  for (int g = 0; g < 3; ++g) {
    auto part = load_packet<kCount>(cell.gates + (row * 3 + g) * cell.state + j);
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
constexpr int kCellWarps = 8;

template <typename T, int kCount>
__global__ void __launch_bounds__(kCellWarps * 32)
    lltm_cell_backward_kernel(CellBackward<T> cell, T *dpre, Accumulate<T> *sums, int64_t rows) {
  using A = Accumulate<T>;
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

// Many rows: one launch for the tiles of four products, in the order of TileCounts: the columns of dweights for old_h,
// those for input, dold_h and dinput.
struct TileCounts {
  int64_t weights_h, weights_x, old_h, input;  // 0 if not wanted

  __host__ __device__ int64_t weights() const { return weights_h + weights_x; }
  __host__ __device__ int64_t inputs() const { return old_h + input; }
};

// The product and the tile of this block.
template <typename T, class Shape>
struct ProductTile {
  Operands<T> x;
  const T *dpre;
  int64_t all, width, offset, m0, n0;
  bool of_weights, of_input;

  __device__ ProductTile(const Operands<T> &x, const T *dpre, const TileCounts &tiles) : x(x), dpre(dpre) {
    int64_t tile = blockIdx.x;
    of_weights = tile < tiles.weights();
    if (!of_weights) tile -= tiles.weights();
    of_input = tile >= (of_weights ? tiles.weights_h : tiles.old_h);
    if (of_input) tile -= of_weights ? tiles.weights_h : tiles.old_h;
    all = 3 * x.state, width = of_input ? x.features : x.state, offset = of_input ? x.state : 0;
    const int64_t columns = ceil_div(width, Shape::kN);
    m0 = tile / columns * Shape::kM, n0 = tile % columns * Shape::kN;
  }
  __device__ int64_t steps() const { return ceil_div(of_weights ? x.rows : all, Shape::kDepth); }
  // dweights if the left operand is contiguous along its rows; dold_h or dinput if along the summed axis. A packet past
  // the end of a row is replaced by the row's last one; its results are not stored.
  template <int kSize, class Left, class Right>
  __device__ void begin(Left &left, Right &right) const {
    if constexpr (!Left::kKMajor) {
      const T *rows = of_input ? x.input : x.old_h;
      left.begin(x.rows, Shape::kDepth * all,
                 [&](int at, int row) { return dpre + row * all + min(m0 + at, all - kSize); });
      right.begin(x.rows, Shape::kDepth * width,
                  [&](int at, int row) { return rows + row * width + min(n0 + at, width - kSize); });
    } else {
      const T *columns = x.weights + offset;
      left.begin(all, Shape::kDepth, [&](int at, int n) { return dpre + min(m0 + at, x.rows - 1) * all + n; });
      right.begin(all, Shape::kDepth * x.width(),
                  [&](int at, int n) { return columns + n * x.width() + min(n0 + at, width - kSize); });
    }
  }
  template <int n>
  __device__ void store(const Gradients<T> &gradients, int row, int column, const Accumulate<T> *sum) const {
    T *out = of_weights ? gradients.dweights : of_input ? gradients.dinput : gradients.dold_h;
    const int64_t m = m0 + row, k = n0 + column;
    if (!out || m >= (of_weights ? all : x.rows) || k >= width) return;
    Packet<T, n> packet;
#pragma unroll
    for (int l = 0; l < n; ++l) packet.value[l] = narrow<T>(sum[l]);
    store_packet(out + (of_weights ? m * x.width() + offset : m * width) + k, packet);
  }
};

template <typename T, class Shape, int kSize>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    lltm_products_kernel(Operands<T> x, const T *dpre, Gradients<T> gradients, TileCounts tiles) {
  using A = Accumulate<T>;
  __shared__ TileStages<Shape, A> memory;
  TileSums<Shape, A> sum = {};
  const ProductTile<T, Shape> tile(x, dpre, tiles);
  auto begin = [&](int, auto &left, auto &right) { tile.template begin<kSize>(left, right); };
  using Right = TileLoader<T, Shape, Shape::kN, false, kSize>;
  if (tile.of_weights)
    simt_mainloop<TileLoader<T, Shape, Shape::kM, false, kSize>, Right>(memory, sum, tile.steps(), 0, begin);
  else simt_mainloop<TileLoader<T, Shape, Shape::kM, true, kSize>, Right>(memory, sum, tile.steps(), 0, begin);
  constexpr int kCount = kSize == 1 ? 1 : 4;
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int j = 0; j < Shape::kColumns; j += kCount)
      tile.template store<kCount>(gradients, first_row<Shape>() + i / 4 * Shape::kPartM + i % 4,
                                  first_column<Shape>() + j / 4 * Shape::kPartN + j % 4, &sum.value[i][j]);
}

template <typename T, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks)
    lltm_products_mma_kernel(Operands<T> x, const T *dpre, Gradients<T> gradients, TileCounts tiles) {
  T *memory = reinterpret_cast<T *>(mma_memory);
  MmaSums<Shape> sum = {};
  const ProductTile<T, Shape> tile(x, dpre, tiles);
  auto begin = [&](int, auto &left, auto &right) { tile.template begin<8>(left, right); };
  using Right = MmaLoader<T, Shape, Shape::kN, false>;
  if (tile.of_weights) mma_mainloop<MmaLoader<T, Shape, Shape::kM, false>, Right>(memory, sum, tile.steps(), 0, begin);
  else mma_mainloop<MmaLoader<T, Shape, Shape::kM, true>, Right>(memory, sum, tile.steps(), 0, begin);
#pragma unroll
  for (int i = 0; i < Shape::kRows; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < Shape::kColumns; ++j)
        tile.template store<2>(gradients, Shape::row(i, half), Shape::column(j), &sum.value[i][j][half * 2]);
}

// -------------------------------------------------------------------------------------------------------- launchers

// Tile shapes for sums in A: for many rows, and for fewer, where enough blocks matter more than large tiles.
template <typename A, int kSize>
struct TileShapes {
  using Gates = SimtTile<128, 96, 16, 2, 3, 2, 16>;
  using FewGates = SimtTile<64, 96, 16, 1, 3, 2, 8>;
  using Products = SimtTile<128, 128, 16, 2, 2, 2, 16>;
  using FewProducts = SimtTile<64, 64, 16, 1, 1, 2, 8>;
};
// For float64, for 16 bits without tensor cores, and for accesses that cannot be vectorized.
struct PlainTileShapes {
  using FewGates = SimtTile<64, 96, 8, 1, 3, 1, 8>;
  using Gates = FewGates;
  using FewProducts = SimtTile<64, 64, 8, 1, 1, 1, 8>;
};
template <int kSize>
struct TileShapes<double, kSize> : PlainTileShapes {};
template <>
struct TileShapes<float, 8> : PlainTileShapes {};
template <>
struct TileShapes<float, 1> : PlainTileShapes {};

using MmaGates = MmaTile<128, 192, 3, 4, 2, 4, 1>;
using MmaProducts = MmaTile<128, 128, 1, 2, 2, 3, 2>;

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

template <class Shape, typename T>
Status launch_gates_kernel(const char *op, void (*kernel)(Operands<T>, CellForward<T>), int shared,
                           const Operands<T> &x, const CellForward<T> &cell, cudaStream_t stream) {
  dim3 grid(ceil_div(x.state, Shape::kPartN), ceil_div(x.rows, Shape::kM));
  if (grid.y > 65535) return fail(kInvalidArgument, "%s: more than 65535 tiles of rows", op);
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid, Shape::kThreads, shared, stream>>>(x, cell);
  return check_launch(op);
}

template <typename T, class Shape, int kSize>
Status launch_gate_tiles(const char *op, const Operands<T> &x, const CellForward<T> &cell, cudaStream_t stream) {
  return launch_gates_kernel<Shape>(op, lltm_tile_kernel<T, Shape, kSize>, 0, x, cell, stream);
}

// Whether the device has tensor cores for bfloat16 too, and `shared` bytes of shared memory.
Status on_tensor_cores(const char *op, int shared, bool *result) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return *result = device.major >= 8 && device.shared_memory >= shared, kOk;
}

// Whether there are enough tiles for one wave of blocks.
template <class Shape>
Status fill_device(const char *op, int64_t tiles, bool *result) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return *result = tiles >= device.multiprocessors * Shape::kBlocks, kOk;
}

// c (m, n) = a (m, k) b (k, n), or c += a b.
struct LargeProduct {
  int64_t m, n, k;
  Operand a, b, c;
  bool accumulate = false;
};

// Computes the products with cuBLASLt, except those whose c is null. *done is false if cuBLASLt is absent or refuses.
Status multiply_large(const char *op, DType dtype, DType c_dtype, std::initializer_list<LargeProduct> products,
                      void *workspace, int64_t bytes, cudaStream_t stream, bool *done) {
  *done = false;
  for (const LargeProduct &p : products) {
    if (!p.c.data || !p.m || !p.n) continue;
    GemmParams gemm = {dtype, c_dtype, p.m, p.n, p.k, p.a, p.b, p.c};
    gemm.accumulate = p.accumulate, gemm.workspace = workspace, gemm.workspace_bytes = bytes;
    AOT_TRY(gemm_cublaslt(op, gemm, stream, done));
    if (!*done) return kOk;
  }
  return kOk;
}

template <typename T>
Operand matrix(const T *data, int64_t stride, bool transposed = false) {
  return {const_cast<T *>(data), stride, transposed};
}

// The gates of many rows: cuBLASLt writes their sums, and lltm_cell_kernel replaces them by the gates.
template <typename T>
Status large_gates(const char *op, const Operands<T> &x, const CellForward<T> &cell, cudaStream_t stream, bool *done) {
  const int64_t all = 3 * x.state, packets = x.rows * x.state / 4;
  if (!cell.gates || !Lltm::large(x.rows * all, x.width())) return kOk;
  const Operand gates = {cell.gates, all};
  AOT_TRY(multiply_large(op, x.dtype, accumulate_dtype(x.dtype),
                         {{x.rows, all, x.state, matrix(x.old_h, x.state), matrix(x.weights, x.width(), true), gates},
                          {x.rows, all, x.features, matrix(x.input, x.features),
                           matrix(x.weights + x.state, x.width(), true), gates, true}},
                         nullptr, 0, stream, done));
  if (!*done) return kOk;
  lltm_cell_kernel<T, 4><<<grid_size(ceil_div(packets, 256)), 256, 0, stream>>>(cell, packets);
  return check_launch(op);
}

// Computes the gates' sums, and calls `cell` with them.
template <typename T, int kSize>
Status launch_gates(const char *op, const Operands<T> &x, const CellForward<T> &cell, cudaStream_t stream) {
  using Shapes = TileShapes<Accumulate<T>, kSize>;
  if (x.rows * x.state == 0) return kOk;
  if (x.rows <= kSumRows || x.rows * x.state <= 49152) {
    dim3 grid(grid_size(x.state), ceil_div(x.rows, kSumRows));
    lltm_lanes_kernel<T, kSize><<<grid, kSumBlock, 0, stream>>>(x, cell);
    return check_launch(op);
  }
  if constexpr (kSize > 1) {
    bool done = false;
    AOT_TRY(large_gates<T>(op, x, cell, stream, &done));
    if (done) return kOk;
  }
  if constexpr (sizeof(T) == 2 && kSize > 1) {
    bool mma;
    AOT_TRY(on_tensor_cores(op, MmaGates::kShared, &mma));
    if (mma) return launch_gates_kernel<MmaGates>(op, lltm_mma_kernel<T, MmaGates>, MmaGates::kShared, x, cell, stream);
  }
  using Large = typename Shapes::Gates;
  bool many;
  AOT_TRY(fill_device<Large>(op, ceil_div(x.rows, Large::kM) * ceil_div(x.state, Large::kPartN), &many));
  if (many) return launch_gate_tiles<T, Large, kSize>(op, x, cell, stream);
  return launch_gate_tiles<T, typename Shapes::FewGates, kSize>(op, x, cell, stream);
}

template <class Shape, typename T>
TileCounts count_tiles(const Operands<T> &x, const Gradients<T> &gradients) {
  auto tiles = [](bool wanted, int64_t m, int64_t n) {
    return wanted ? ceil_div(m, Shape::kM) * ceil_div(n, Shape::kN) : 0;
  };
  return {tiles(gradients.dweights, 3 * x.state, x.state), tiles(gradients.dweights, 3 * x.state, x.features),
          tiles(gradients.dold_h, x.rows, x.state), tiles(gradients.dinput, x.rows, x.features)};
}

template <class Shape, typename T>
Status launch_products_kernel(const char *op, void (*kernel)(Operands<T>, const T *, Gradients<T>, TileCounts),
                              int shared, const Operands<T> &x, const T *dpre, const Gradients<T> &gradients,
                              cudaStream_t stream) {
  const TileCounts tiles = count_tiles<Shape>(x, gradients);
  if (tiles.weights() + tiles.inputs() == 0) return kOk;
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid_size(tiles.weights() + tiles.inputs()), Shape::kThreads, shared, stream>>>(x, dpre, gradients, tiles);
  return check_launch(op);
}

template <typename T, class Shape, int kSize>
Status launch_product_tiles(const char *op, const Operands<T> &x, const T *dpre, const Gradients<T> &gradients,
                            cudaStream_t stream) {
  return launch_products_kernel<Shape>(op, lltm_products_kernel<T, Shape, kSize>, 0, x, dpre, gradients, stream);
}

// dweights, dold_h and dinput of many rows. `scratch` is cuBLASLt's.
template <typename T, int kSize>
Status launch_products(const char *op, const Operands<T> &x, T *dpre, const Gradients<T> &gradients, void *scratch,
                       int64_t bytes, cudaStream_t stream) {
  using Shapes = TileShapes<Accumulate<T>, kSize>;
  // One launch for all products has a single tail. With few tiles cuBLASLt is faster, because of its split-K.
  if constexpr (std::is_same_v<T, float> && kSize > 1) {
    using Large = typename Shapes::Products;
    const TileCounts tiles = count_tiles<Large>(x, gradients);
    bool weights = true, inputs = true;
    if (tiles.weights()) AOT_TRY(fill_device<Large>(op, tiles.weights(), &weights));
    if (tiles.inputs()) AOT_TRY(fill_device<Large>(op, tiles.inputs(), &inputs));
    if (weights && inputs) return launch_product_tiles<T, Large, kSize>(op, x, dpre, gradients, stream);
  }
  const int64_t all = 3 * x.state;
  bool done = false;
  if (bytes)
    AOT_TRY(multiply_large(
        op, x.dtype, x.dtype,
        {{all, x.state, x.rows, matrix(dpre, all, true), matrix(x.old_h, x.state), {gradients.dweights, x.width()}},
         {all,
          x.features,
          x.rows,
          matrix(dpre, all, true),
          matrix(x.input, x.features),
          {gradients.dweights ? gradients.dweights + x.state : nullptr, x.width()}},
         {x.rows, x.state, all, matrix(dpre, all), matrix(x.weights, x.width()), {gradients.dold_h, x.state}},
         {x.rows,
          x.features,
          all,
          matrix(dpre, all),
          matrix(x.weights + x.state, x.width()),
          {gradients.dinput, x.features}}},
        scratch, bytes, stream, &done));
  if (done) return kOk;
  if constexpr (sizeof(T) == 2 && kSize > 1) {
    bool mma;
    AOT_TRY(on_tensor_cores(op, MmaProducts::kShared, &mma));
    if (mma)
      return launch_products_kernel<MmaProducts>(op, lltm_products_mma_kernel<T, MmaProducts>, MmaProducts::kShared, x,
                                                 dpre, gradients, stream);
  }
  return launch_product_tiles<T, typename Shapes::FewProducts, kSize>(op, x, dpre, gradients, stream);
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
  auto *stream = static_cast<cudaStream_t>(stream_);
  return dispatch(in[op.kInput].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> x = operands<T>(in[op.kInput], in[op.kWeights], in[op.kOldH]);
    const Tensor &gates = out[op.kGates] || out[op.kWork].size() == 0 ? out[op.kGates] : out[op.kWork];
    CellForward<T> cell = {in[op.kBias].as<const T>(), in[op.kOldCell].as<const T>(), out[op.kNewH].as<T>(),
                           out[op.kNewCell].as<T>(),   gates.as<Accumulate<T>>(),     x.state};
    if (vectorizable(x, cell.bias, cell.old_cell, cell.new_h, cell.new_cell, cell.gates))
      return launch_gates<T, kVectorSize<T>>(op.name, x, cell, stream);
    return launch_gates<T, 1>(op.name, x, cell, stream);
  });
}

// `place` is the layout of `scratch`. `have_gates`: cell.gates is an input, and need not be recomputed.
template <typename T, int kSize>
Status lltm_backward(const LltmBackward &op, const Operands<T> &x, const T *bias, const CellBackward<T> &cell,
                     const LltmBackward::Scratch &place, Accumulate<T> *scratch, const Gradients<T> &gradients,
                     bool have_gates, cudaStream_t stream) {
  constexpr int kCount = kSize == 1 ? 1 : 4;
  const int64_t all = 3 * x.state;
  T *dpre = reinterpret_cast<T *>(scratch);
  const bool few = x.rows * x.width() <= 36864, weights = gradients.dweights || gradients.dbias;
  if (!have_gates)
    AOT_TRY((launch_gates<T, kSize>(op.name, x, {bias, cell.old_cell, nullptr, nullptr, scratch + place.gates, x.state},
                                    stream)));
  if (few && x.width() <= 256)
    return launch_few(op.name, x, ComputedGradients<T>{cell}, gradients, weights || cell.dold_cell, stream);
  if (x.rows > 0 && x.state > 0) {
    const dim3 grid(grid_size(ceil_div(x.state, 32 * kCount)), op.parts(x.rows));
    lltm_cell_backward_kernel<T, kCount><<<grid, kCellWarps * 32, 0, stream>>>(
        cell, dpre, gradients.dbias && !few ? scratch + place.sums : nullptr, x.rows);
    AOT_TRY(check_launch(op.name));
  }
  if (few) return launch_few(op.name, x, LoadedGradients<T>{dpre, all}, gradients, weights, stream);
  if (gradients.dbias)
    AOT_TRY(sum_slices<double>(op.name, scratch + place.sums, op.parts(x.rows), gradients.dbias, all, stream));
  return launch_products<T, kSize>(op.name, x, dpre, gradients, scratch + place.library,
                                   (place.end - place.library) * sizeof(*scratch), stream);
}

Status lltm_backward_cuda(const LltmBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  const Tensor &input = in[op.kInput], &old_h = in[op.kOldH], &gates = in[op.kGates], &work = out[op.kWork];
  if (!work) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(input.dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const Operands<T> x = operands<T>(input, in[op.kWeights], old_h);
    const LltmBackward::Scratch place = op.scratch(input, old_h, bool(gates));
    A *scratch = work.as<A>();
    const T *bias = in[op.kBias].as<const T>();
    auto output_gradient = [&](const Tensor &d) { return OutputGradient<T>{d.as<const T>(), d.ndim == 0}; };
    const CellBackward<T> cell = {gates ? gates.as<const A>() : scratch + place.gates,
                                  in[op.kOldCell].as<const T>(),
                                  output_gradient(in[op.kDnewH]),
                                  output_gradient(in[op.kDnewCell]),
                                  out[op.kDoldCell].as<T>(),
                                  x.state};
    const Gradients<T> gradients = {out[op.kDinput].as<T>(), out[op.kDweights].as<T>(), out[op.kDbias].as<T>(),
                                    out[op.kDoldH].as<T>()};
    auto run = [&](auto size) {
      return lltm_backward<T, size()>(op, x, bias, cell, place, scratch, gradients, bool(gates),
                                      static_cast<cudaStream_t>(stream));
    };
    if (vectorizable(x, bias, cell.old_cell, cell.gates, cell.dnew_h.scalar ? nullptr : cell.dnew_h.data,
                     cell.dnew_cell.scalar ? nullptr : cell.dnew_cell.data, cell.dold_cell, scratch, gradients.dinput,
                     gradients.dweights, gradients.dold_h))
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
