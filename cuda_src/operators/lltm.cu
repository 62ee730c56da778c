#include "lltm.h"

#include <initializer_list>

#include "cuda/math.cuh"
#include "gemm/gemm.h"
#include "gemm/mma.cuh"
#include "gemm/tile.cuh"

namespace aot {
inline namespace AOT_ISA {

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

// What becomes of the three sums of n neighbouring columns of the state. `read` fetches beforehand what it takes. new_h
// and new_cell, or the gates, may be absent.
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

// A gradient that comes in: like the state, or one number for all of it.
template <typename T>
struct Incoming {
  const T *data;
  bool one;

  template <int n>
  __device__ Packet<T, n> read(int64_t at) const {
    if (!one) return load_packet<n>(data + at);
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
  Incoming<T> dnew_h, dnew_cell;
  T *dold_cell;
  int64_t state;

  // Of n neighbouring columns; writes dold_cell.
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
  // [old_h, input]
  __device__ const T *at(int64_t row, int64_t k) const {
    return k < state ? old_h + row * state + k : input + row * features + k - state;
  }
};

// Few rows: a warp has two of them and one column of the state, and its lanes share the sums. What a block asks of
// memory, it asks at once.
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

// Many rows: a tile has the same columns of the three gates, which meet in one thread.

// Lets a tile's operands begin with old_h, and then with input.
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

// The same of 16 bits on the tensor cores.
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

// The cell of sums that are in the place of the gates.
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

// The gradients that are products with dpre; null where nobody wants them.
template <typename T>
struct Gradients {
  T *dinput, *dweights, *dbias, *dold_h;
};

// dpre and dold_cell; `sums`, where it is wanted, gets those of each block's rows, (gridDim.y, 3S).
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

template <typename T>
__global__ void __launch_bounds__(256) lltm_dbias_kernel(const Accumulate<T> *sums, int parts, T *dbias, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= n) return;
  double sum = 0;  // of so few it costs nothing
#pragma unroll 16
  for (int part = 0; part < parts; ++part) sum += sums[part * n + i];
  dbias[i] = narrow<T>(static_cast<Accumulate<T>>(sum));
}

// Few rows: all gradients in one kernel. Four results of a column are a warp's; a lane has a column. dweights and dbias
// sum over the rows, which are few; dold_h and dinput over the gates, which the warps of a block share. A block
// computes the dpre that it multiplies itself, or reads it where too many blocks would compute the same.
constexpr int kFewBlock = 256, kFewWarps = kFewBlock / 32, kFewRows = 4, kFewBatch = 16, kFewPart = 2048;

// Element (row, n) of dpre.
template <typename T>
struct KeptGradients {
  const T *dpre;
  int64_t all;
  __device__ Accumulate<T> operator()(int64_t row, int64_t n, bool) const { return widen(dpre[row * all + n]); }
};
template <typename T>
struct OwnGradients {
  CellBackward<T> cell;
  // `first`: the only block to have it that writes dold_cell
  __device__ Accumulate<T> operator()(int64_t row, int64_t n, bool first) const {
    const int gate = (n >= cell.state) + (n >= 2 * cell.state);
    CellBackward<T> of = cell;
    if (gate || !first) of.dold_cell = nullptr;
    GateGradients<Accumulate<T>> d[1];
    of.template gradients<1>(row, n - gate * cell.state, d);
    return gate == 0 ? d->i : gate == 1 ? d->o : d->c;
  }
};

// sum[i] += left(from + i, t) * *right(t) and total[i] += left(from + i, t), over `terms` of t, which kWarps warps
// share. `part` gets what the block's warps need of the left: left(i, t) for i < kAcross.
template <int kAcross, int kWarps, typename T, typename A, class Left, class Right>
__device__ inline void multiply_few(A *part, A (&sum)[kFewRows], A (&total)[kFewRows], int from, int64_t terms,
                                    bool present, Left left, Right right) {
  constexpr int kTerms = kFewPart / kAcross;
  for (int64_t first = 0; first < terms; first += kTerms) {
    const int count = static_cast<int>(min(int64_t{kTerms}, terms - first)), begin = kWarps > 1 ? warp_index() : 0;
    T b[kFewBatch];
    auto load = [&](int t) {  // all are on their way before one is used
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
    const bool inside = k < x.width(), first = blockIdx.x % columns == 0;
    multiply_few<kAcross, 1, T>(
        part, sum, total, warp * kFewRows, x.rows, inside,
        [&](int i, int64_t row) { return n0 + i < all ? dpre(row, n0 + i, first) : A(0); },
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

// Many rows: tiles of dweights by old_h, dweights by input, dold_h and dinput, one after the other.
struct TileCounts {
  int64_t weights_h, weights_x, old_h, input;  // of each; 0 where nobody wants it

  __host__ __device__ int64_t weights() const { return weights_h + weights_x; }
  __host__ __device__ int64_t inputs() const { return old_h + input; }
};

// Which tile of which product a block has.
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
  // dweights where the left operand lies along its rows, dold_h or dinput where it lies along the summed axis. A packet
  // beyond the last is the last.
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

// Shapes of tiles for sums of A: of many rows, and of fewer, where more blocks matter more.
template <typename A, int kSize>
struct TileShapes {
  using Gates = SimtTile<128, 96, 16, 2, 3, 2, 16>;
  using FewGates = SimtTile<64, 96, 16, 1, 3, 2, 8>;
  using Products = SimtTile<128, 128, 16, 2, 2, 2, 16>;
  using FewProducts = SimtTile<64, 64, 16, 1, 1, 2, 8>;
};
// Doubles; 16 bits where there are no tensor cores for them; what can only be read element by element.
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

// Whether all can be read and written sixteen bytes at a time.
template <typename T, typename... Pointers>
bool in_packets(const Operands<T> &x, const Pointers *...pointers) {
  constexpr int kWhole = kVectorSize<T> < 4 ? 4 : kVectorSize<T>;
  return x.state % kWhole == 0 && x.features % kWhole == 0 && aligned(x.input, x.old_h, x.weights, pointers...);
}

template <class Shape, typename T>
Status launch_tiles(const char *op, void (*kernel)(Operands<T>, CellForward<T>), int shared, const Operands<T> &x,
                    const CellForward<T> &cell, cudaStream_t stream) {
  dim3 grid(ceil_div(x.state, Shape::kPartN), ceil_div(x.rows, Shape::kM));
  if (grid.y > 65535) return fail(kInvalidArgument, "%s: more than 65535 tiles of rows", op);
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid, Shape::kThreads, shared, stream>>>(x, cell);
  return check_launch(op);
}

template <typename T, class Shape, int kSize>
Status launch_tiles(const char *op, const Operands<T> &x, const CellForward<T> &cell, cudaStream_t stream) {
  return launch_tiles<Shape>(op, lltm_tile_kernel<T, Shape, kSize>, 0, x, cell, stream);
}

// Whether there are tensor cores that take it, and `shared` bytes for their operands.
inline Status on_tensor_cores(const char *op, int shared, bool *result) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return *result = device.major >= 8 && device.shared_memory >= shared, kOk;
}

// Whether there is a tile for each of the device's places.
template <class Shape>
Status fill_device(const char *op, int64_t tiles, bool *result) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return *result = tiles >= device.multiprocessors * Shape::kBlocks, kOk;
}

// c = a b of so many rows, columns and terms, or c += a b.
struct LargeProduct {
  int64_t m, n, k;
  Operand a, b, c;
  bool accumulate = false;
};

// All of them by cuBLASLt, those without c left out; *done tells whether it is there and takes them.
inline Status multiply_large(const char *op, DType dtype, DType c_dtype, std::initializer_list<LargeProduct> products,
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

// The gates of many rows by cuBLASLt, which leaves their sums in their place.
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

// The gates, and what `cell` makes of them.
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
    if (mma) return launch_tiles<MmaGates>(op, lltm_mma_kernel<T, MmaGates>, MmaGates::kShared, x, cell, stream);
  }
  using Large = typename Shapes::Gates;
  bool many;
  AOT_TRY(fill_device<Large>(op, ceil_div(x.rows, Large::kM) * ceil_div(x.state, Large::kPartN), &many));
  if (many) return launch_tiles<T, Large, kSize>(op, x, cell, stream);
  return launch_tiles<T, typename Shapes::FewGates, kSize>(op, x, cell, stream);
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
Status launch_products(const char *op, void (*kernel)(Operands<T>, const T *, Gradients<T>, TileCounts), int shared,
                       const Operands<T> &x, const T *dpre, const Gradients<T> &gradients, cudaStream_t stream) {
  const TileCounts tiles = count_tiles<Shape>(x, gradients);
  if (tiles.weights() + tiles.inputs() == 0) return kOk;
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid_size(tiles.weights() + tiles.inputs()), Shape::kThreads, shared, stream>>>(x, dpre, gradients, tiles);
  return check_launch(op);
}

template <typename T, class Shape, int kSize>
Status launch_products(const char *op, const Operands<T> &x, const T *dpre, const Gradients<T> &gradients,
                       cudaStream_t stream) {
  return launch_products<Shape>(op, lltm_products_kernel<T, Shape, kSize>, 0, x, dpre, gradients, stream);
}

// dweights, dold_h and dinput of many rows. `scratch`: cuBLASLt's.
template <typename T, int kSize>
Status launch_products(const char *op, const Operands<T> &x, T *dpre, const Gradients<T> &gradients, void *scratch,
                       int64_t bytes, cudaStream_t stream) {
  using Shapes = TileShapes<Accumulate<T>, kSize>;
  // In one launch nothing waits for the last tiles of a product; where there are few tiles, cuBLASLt cuts their sums.
  if constexpr (std::is_same_v<T, float> && kSize > 1) {
    using Large = typename Shapes::Products;
    const TileCounts tiles = count_tiles<Large>(x, gradients);
    bool weights = true, inputs = true;
    if (tiles.weights()) AOT_TRY(fill_device<Large>(op, tiles.weights(), &weights));
    if (tiles.inputs()) AOT_TRY(fill_device<Large>(op, tiles.inputs(), &inputs));
    if (weights && inputs) return launch_products<T, Large, kSize>(op, x, dpre, gradients, stream);
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
      return launch_products<MmaProducts>(op, lltm_products_mma_kernel<T, MmaProducts>, MmaProducts::kShared, x, dpre,
                                          gradients, stream);
  }
  return launch_products<T, typename Shapes::FewProducts, kSize>(op, x, dpre, gradients, stream);
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
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    Operands<T> x = operands<T>(in[0], in[1], in[3]);
    const Tensor &gates = out[2] || out[3].size() == 0 ? out[2] : out[3];
    CellForward<T> cell = {in[2].as<const T>(), in[4].as<const T>(),       out[0].as<T>(),
                           out[1].as<T>(),      gates.as<Accumulate<T>>(), x.state};
    if (in_packets(x, cell.bias, cell.old_cell, cell.new_h, cell.new_cell, cell.gates))
      return launch_gates<T, kVectorSize<T>>(op.name, x, cell, stream);
    return launch_gates<T, 1>(op.name, x, cell, stream);
  });
}

// `scratch`: its places, of the accumulate type.
template <typename T, int kSize>
Status lltm_backward(const LltmBackward &op, const Operands<T> &x, const T *bias, const CellBackward<T> &cell,
                     const LltmBackward::Scratch &place, Accumulate<T> *scratch, const Gradients<T> &gradients,
                     bool kept, cudaStream_t stream) {
  constexpr int kCount = kSize == 1 ? 1 : 4;
  const int64_t all = 3 * x.state;
  T *dpre = reinterpret_cast<T *>(scratch);
  const bool few = x.rows * x.width() <= 36864, weights = gradients.dweights || gradients.dbias;
  if (!kept)
    AOT_TRY((launch_gates<T, kSize>(op.name, x, {bias, cell.old_cell, nullptr, nullptr, scratch + place.gates, x.state},
                                    stream)));
  if (few && x.width() <= 256)
    return launch_few(op.name, x, OwnGradients<T>{cell}, gradients, weights || cell.dold_cell, stream);
  if (x.rows > 0 && x.state > 0) {
    const dim3 grid(grid_size(ceil_div(x.state, 32 * kCount)), op.parts(x.rows));
    lltm_cell_backward_kernel<T, kCount><<<grid, kCellWarps * 32, 0, stream>>>(
        cell, dpre, gradients.dbias && !few ? scratch + place.sums : nullptr, x.rows);
    AOT_TRY(check_launch(op.name));
  }
  if (few) return launch_few(op.name, x, KeptGradients<T>{dpre, all}, gradients, weights, stream);
  if (gradients.dbias) {
    lltm_dbias_kernel<<<grid_size(ceil_div(all, 256)), 256, 0, stream>>>(scratch + place.sums, op.parts(x.rows),
                                                                         gradients.dbias, all);
    AOT_TRY(check_launch(op.name));
  }
  return launch_products<T, kSize>(op.name, x, dpre, gradients, scratch + place.library,
                                   (place.end - place.library) * sizeof(*scratch), stream);
}

Status lltm_backward_cuda(const LltmBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  if (!out[5]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(in[2].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    const Operands<T> x = operands<T>(in[2], in[3], in[5]);
    const LltmBackward::Scratch place = op.scratch(in[2], in[5], bool(in[7]));
    A *scratch = out[5].as<A>();
    const T *bias = in[4].as<const T>();
    auto incoming = [&](const Tensor &d) { return Incoming<T>{d.as<const T>(), d.ndim == 0}; };
    const CellBackward<T> cell = {in[7] ? in[7].as<const A>() : scratch + place.gates,
                                  in[6].as<const T>(),
                                  incoming(in[0]),
                                  incoming(in[1]),
                                  out[4].as<T>(),
                                  x.state};
    const Gradients<T> gradients = {out[0].as<T>(), out[1].as<T>(), out[2].as<T>(), out[3].as<T>()};
    auto run = [&](auto size) {
      return lltm_backward<T, size()>(op, x, bias, cell, place, scratch, gradients, bool(in[7]),
                                      static_cast<cudaStream_t>(stream));
    };
    const bool packets = in_packets(x, bias, cell.old_cell, cell.gates, cell.dnew_h.one ? nullptr : cell.dnew_h.data,
                                    cell.dnew_cell.one ? nullptr : cell.dnew_cell.data, cell.dold_cell, scratch,
                                    gradients.dinput, gradients.dweights, gradients.dold_h);
    if (packets) return run(std::integral_constant<int, kVectorSize<T>>());
    return run(std::integral_constant<int, 1>());
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Lltm, aot_lltm_cuda, lltm_cuda)
AOT_ENTRY(LltmBackward, aot_lltm_backward_cuda, lltm_backward_cuda)
