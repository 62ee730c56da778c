#include "lltm.h"

#include "cuda/math.cuh"
#include "cuda/mma.cuh"
#include "cuda/tile.cuh"

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

// What becomes of the three sums of n neighbouring columns of the state. `read` fetches beforehand what it takes.

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
    store_packet(new_cell + row * state + j, cell);
    store_packet(new_h + row * state + j, h);
    if (!gates) return;
    for (int g = 0; g < 3; ++g) store_packet(gates + (row * 3 + g) * state + j, gate[g]);
  }
};

template <typename T>
struct CellBackward {
  using A = Accumulate<T>;
  const T *bias, *old_cell, *dnew_h, *dnew_cell;
  T *dold_cell, *dpre;
  int64_t state;

  template <int n>
  struct Read {
    Packet<T, n> bias[3], old_cell, dnew_h, dnew_cell;
  };
  template <int n>
  __device__ Read<n> read(int64_t row, int64_t j) const {
    Read<n> r;
    for (int g = 0; g < 3; ++g) r.bias[g] = load_packet<n>(bias + g * state + j);
    r.old_cell = load_packet<n>(old_cell + row * state + j);
    r.dnew_h = load_packet<n>(dnew_h + row * state + j);
    r.dnew_cell = load_packet<n>(dnew_cell + row * state + j);
    return r;
  }
  template <int n>
  __device__ void write(int64_t row, int64_t j, const A (&sum)[3][n], const Read<n> &r) const {
    Gates<A> g[n];
#pragma unroll
    for (int l = 0; l < n; ++l)
      g[l] = activate(sum[0][l] + widen(r.bias[0].value[l]), sum[1][l] + widen(r.bias[1].value[l]),
                      sum[2][l] + widen(r.bias[2].value[l]));
    write(row, j, g, r);
  }
  template <int n>
  __device__ void write(int64_t row, int64_t j, const Gates<A> (&gate)[n], const Read<n> &r) const {
    Packet<T, n> cell, d[3];
#pragma unroll
    for (int l = 0; l < n; ++l) {
      GateGradients<A> g =
          lltm_gradient(gate[l], widen(r.old_cell.value[l]), widen(r.dnew_h.value[l]), widen(r.dnew_cell.value[l]));
      d[0].value[l] = narrow<T>(g.i), d[1].value[l] = narrow<T>(g.o), d[2].value[l] = narrow<T>(g.c);
      cell.value[l] = narrow<T>(g.cell);
    }
    for (int g = 0; g < 3; ++g) store_packet(dpre + (row * 3 + g) * state + j, d[g]);
    if (dold_cell) store_packet(dold_cell + row * state + j, cell);
  }
};

// ------------------------------------------------------------------------------------------------------------ gates

template <typename T>
struct Operands {
  const T *input, *old_h, *weights;
  int64_t rows, features, state;

  __host__ __device__ int64_t width() const { return state + features; }
  // [old_h, input]
  __device__ const T *at(int64_t row, int64_t k) const {
    return k < state ? old_h + row * state + k : input + row * features + k - state;
  }
};

// Few rows: a warp has two of them and one column of the state, and its lanes share the sums. What a block asks of
// memory, it asks at once.
constexpr int kSumLanes = 16, kSumBlock = 256, kSumRows = kSumBlock / kSumLanes, kSumBatch = 4;

template <typename T, int kSize, class Cell>
__global__ void __launch_bounds__(kSumBlock) lltm_lanes_kernel(Operands<T> x, Cell cell) {
  using A = Accumulate<T>;
  const int lane = threadIdx.x % kSumLanes;
  const int64_t row = int64_t{blockIdx.y} * kSumRows + threadIdx.x / kSumLanes, j = blockIdx.x;
  const bool present = row < x.rows;
  typename Cell::template Read<1> read;
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

template <typename T, class Shape, int kSize, class Cell>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) lltm_tile_kernel(Operands<T> x, Cell cell) {
  using A = Accumulate<T>;
  using Left = Carrier<T, Shape, Shape::kM, true, kSize>;
  using Right = Carrier<T, Shape, Shape::kN, true, kSize>;
  __shared__ TileMemory<Shape, A> memory;
  TileSums<Shape, A> sum = {};
  GateOperands<T, Shape> operands(x);
  multiply<Left, Right>(memory, sum, operands.steps_h(), operands.steps_input(), operands, [](const A *) {});

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

template <typename T, class Shape, class Cell>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlocks) lltm_mma_kernel(Operands<T> x, Cell cell) {
  using Left = MmaOperand<T, Shape, Shape::kM, true>;
  using Right = MmaOperand<T, Shape, Shape::kN, true>;
  MmaSums<Shape> sum = {};
  GateOperands<T, Shape> operands(x);
  multiply_mma<Left, Right>(reinterpret_cast<T *>(mma_memory), sum, operands.steps_h(), operands.steps_input(),
                            operands, [](const T *) {});
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

// dpre where the forward has left the gates.
template <typename T, int kCount>
__global__ void __launch_bounds__(256)
    lltm_gates_backward_kernel(CellBackward<T> cell, const Accumulate<T> *gates, int64_t packets) {
  using A = Accumulate<T>;
  int64_t packet = int64_t{blockIdx.x} * 256 + threadIdx.x, at = packet * kCount;
  if (packet >= packets) return;
  int64_t row = at / cell.state, j = at % cell.state;
  auto read = cell.template read<kCount>(row, j);
  Packet<A, kCount> g[3];
  for (int i = 0; i < 3; ++i) g[i] = load_packet<kCount>(gates + (row * 3 + i) * cell.state + j);
  Gates<A> gate[kCount];
#pragma unroll
  for (int l = 0; l < kCount; ++l) gate[l] = {g[0].value[l], g[1].value[l], g[2].value[l]};
  cell.write(row, j, gate, read);
}

// --------------------------------------------------------------------------------------------------------- products

// The gradients that are products with dpre; null where nobody wants them.
template <typename T>
struct Gradients {
  T *dinput, *dweights, *dbias, *dold_h;
};

// Few rows. Four results of a column are a warp's; a lane has a column. dweights and dbias sum over the rows, which are
// few; dold_h and dinput over the gates, which the warps of a block share.
constexpr int kFewBlock = 256, kFewWarps = kFewBlock / 32, kFewRows = 4, kFewBatch = 8;

// sum[i] += left[i * left_row + t * left_term] * *right(t), over every step-th t, unless there is nothing to the right.
template <typename T, typename A, class Right>
__device__ inline void multiply_few(A (&sum)[kFewRows], A (&total)[kFewRows], const T *left, int64_t left_row,
                                    int64_t left_term, int rows, int64_t first, int64_t terms, int64_t step,
                                    bool present, Right right) {
  for (; first < terms; first += step * kFewBatch) {
    T a[kFewBatch][kFewRows], b[kFewBatch];  // as they are: all loads are on their way before one is used
#pragma unroll
    for (int t = 0; t < kFewBatch; ++t) {
      int64_t term = first + t * step;
      bool inside = term < terms;
      b[t] = inside && present ? *right(term) : T(0.0f);
#pragma unroll
      for (int i = 0; i < kFewRows; ++i) a[t][i] = inside && i < rows ? left[i * left_row + term * left_term] : T(0.0f);
    }
#pragma unroll
    for (int t = 0; t < kFewBatch; ++t)
#pragma unroll
      for (int i = 0; i < kFewRows; ++i) {
        A x = widen(a[t][i]);
        sum[i] += x * widen(b[t]), total[i] += x;
      }
  }
}

template <typename T>
__global__ void __launch_bounds__(kFewBlock)
    lltm_products_few_kernel(Operands<T> x, const T *dpre, Gradients<T> gradients, int64_t weight_blocks) {
  using A = Accumulate<T>;
  const int warp = warp_index(), lane = lane_index();
  const int64_t columns = ceil_div(x.width(), 32), all = 3 * x.state;
  A sum[kFewRows] = {}, total[kFewRows] = {};
  if (blockIdx.x < weight_blocks) {
    const int64_t k = blockIdx.x % columns * 32 + lane, n = (blockIdx.x / columns * kFewWarps + warp) * kFewRows;
    if (n >= all) return;
    const int rows = static_cast<int>(min(int64_t{kFewRows}, all - n));
    const bool inside = k < x.width();
    multiply_few(sum, total, dpre + n, 1, all, rows, 0, x.rows, 1, inside, [&](int64_t row) { return x.at(row, k); });
    for (int i = 0; i < rows; ++i) {
      if (gradients.dweights && inside) gradients.dweights[(n + i) * x.width() + k] = narrow<T>(sum[i]);
      if (gradients.dbias && k == 0) gradients.dbias[n + i] = narrow<T>(total[i]);
    }
    return;
  }
  const int64_t block = blockIdx.x - weight_blocks, k = block % columns * 32 + lane, row = block / columns * kFewRows;
  const int rows = static_cast<int>(min(int64_t{kFewRows}, x.rows - row));
  const bool inside = k < x.width();
  multiply_few(sum, total, dpre + row * all, all, 1, rows, warp, all, kFewWarps, inside,
               [&](int64_t n) { return x.weights + n * x.width() + k; });
  __shared__ A of_warps[kFewWarps][kFewRows][32];
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
    of_weights = tile < tiles.weights_h + tiles.weights_x;
    if (!of_weights) tile -= tiles.weights_h + tiles.weights_x;
    of_input = tile >= (of_weights ? tiles.weights_h : tiles.old_h);
    if (of_input) tile -= of_weights ? tiles.weights_h : tiles.old_h;
    all = 3 * x.state, width = of_input ? x.features : x.state, offset = of_input ? x.state : 0;
    const int64_t columns = ceil_div(width, Shape::kN);
    m0 = tile / columns * Shape::kM, n0 = tile % columns * Shape::kN;
  }
  __device__ int64_t steps() const { return ceil_div(of_weights ? x.rows : all, Shape::kDepth); }
  // The tiles at the left edge of dweights have dbias too.
  __device__ bool has_bias() const { return of_weights && offset + n0 == 0; }

  // dweights where the left operand lies along its rows, dold_h or dinput where it lies along the summed axis. A packet
  // beyond the last is the last.
  template <int kSize, class Left, class Right>
  __device__ void begin(Left &left, Right &right) const {
    if constexpr (!Left::kDeep) {
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
  __shared__ TileMemory<Shape, A> memory;
  TileSums<Shape, A> sum = {};
  const ProductTile<T, Shape> tile(x, dpre, tiles);
  auto begin = [&](int, auto &left, auto &right) { tile.template begin<kSize>(left, right); };
  using Right = Carrier<T, Shape, Shape::kN, false, kSize>;
  if (tile.of_weights) {
    const int64_t n = tile.m0 + threadIdx.x;
    const bool with_bias = gradients.dbias && tile.has_bias() && threadIdx.x < Shape::kM && n < tile.all;
    A bias = 0;
    multiply<Carrier<T, Shape, Shape::kM, false, kSize>, Right>(memory, sum, tile.steps(), 0, begin,
                                                                [&](const A *step) {
                                                                  if (with_bias)
                                                                    for (int k = 0; k < Shape::kDepth; ++k)
                                                                      bias += step[k * Shape::kStrideM + threadIdx.x];
                                                                });
    if (with_bias) gradients.dbias[n] = narrow<T>(bias);
  } else {
    multiply<Carrier<T, Shape, Shape::kM, true, kSize>, Right>(memory, sum, tile.steps(), 0, begin, [](const A *) {});
  }
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
  using Right = MmaOperand<T, Shape, Shape::kN, false>;
  if (tile.of_weights) {
    const int64_t n = tile.m0 + threadIdx.x;
    const bool with_bias = gradients.dbias && tile.has_bias() && threadIdx.x < Shape::kM && n < tile.all;
    float bias = 0;
    using Left = MmaOperand<T, Shape, Shape::kM, false>;
    multiply_mma<Left, Right>(memory, sum, tile.steps(), 0, begin, [&](const T *step) {
      if (with_bias)
        for (int k = 0; k < Shape::kDepth; ++k)
          bias += widen(step[packet_offset<Left::kPackets>(k, threadIdx.x / 8) / sizeof(T) + threadIdx.x % 8]);
    });
    if (with_bias) gradients.dbias[n] = narrow<T>(bias);
  } else {
    multiply_mma<MmaOperand<T, Shape, Shape::kM, true>, Right>(memory, sum, tile.steps(), 0, begin, [](const T *) {});
  }
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
  using Gates = Tile<128, 192, 16, 2, 3, 1, 8>;
  using FewGates = Tile<64, 96, 16, 1, 3, 2, 8>;
  using Products = Tile<128, 128, 16, 2, 2, 2, 2>;
  using FewProducts = Tile<64, 64, 16, 1, 1, 2, 8>;
};
// Doubles; 16 bits where there are no tensor cores for them; what can only be read element by element.
struct PlainTileShapes {
  using FewGates = Tile<64, 96, 8, 1, 3, 1, 8>;
  using Gates = FewGates;
  using FewProducts = Tile<64, 64, 8, 1, 1, 1, 8>;
  using Products = FewProducts;
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
  return {input.as<const T>(),    old_h.as<const T>(),     weights.as<const T>(),
          LltmAttrs::rows(old_h), LltmAttrs::width(input), LltmAttrs::width(old_h)};
}

// Whether all can be read and written sixteen bytes at a time.
template <typename T, typename... Pointers>
bool in_packets(const Operands<T> &x, const Pointers *...pointers) {
  constexpr int kWhole = kVectorSize<T> < 4 ? 4 : kVectorSize<T>;
  return x.state % kWhole == 0 && x.features % kWhole == 0 && aligned(x.input, x.old_h, x.weights, pointers...);
}

template <class Shape>
int64_t gate_tiles(int64_t rows, int64_t state) {
  return ceil_div(rows, Shape::kM) * ceil_div(state, Shape::kPartN);
}

template <class Shape, typename T, class Cell>
Status launch_tiles(const char *op, void (*kernel)(Operands<T>, Cell), int shared, const Operands<T> &x,
                    const Cell &cell, void *stream) {
  dim3 grid(ceil_div(x.state, Shape::kPartN), ceil_div(x.rows, Shape::kM));
  if (grid.y > 65535) return fail(kInvalidArgument, "%s: more than 65535 tiles of rows", op);
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid, Shape::kThreads, shared, static_cast<cudaStream_t>(stream)>>>(x, cell);
  return check_launch(op);
}

template <typename T, class Shape, int kSize, class Cell>
Status launch_tiles(const char *op, const Operands<T> &x, const Cell &cell, void *stream) {
  return launch_tiles<Shape>(op, lltm_tile_kernel<T, Shape, kSize, Cell>, 0, x, cell, stream);
}

// Whether there are tensor cores that take it, and `shared` bytes for their operands.
inline Status on_tensor_cores(const char *op, int shared, bool *result) {
  DeviceLimits device;
  AOT_TRY(device_limits(op, &device));
  return *result = device.major >= 8 && device.shared_memory >= shared, kOk;
}

// The gates, and what `cell` makes of them.
template <typename T, int kSize, class Cell>
Status launch_gates(const char *op, const Operands<T> &x, const Cell &cell, void *stream) {
  using Shapes = TileShapes<Accumulate<T>, kSize>;
  if (x.rows * x.state == 0) return kOk;
  if (x.rows <= kSumRows || x.rows * x.state <= 49152) {
    dim3 grid(grid_size(x.state), ceil_div(x.rows, kSumRows));
    lltm_lanes_kernel<T, kSize><<<grid, kSumBlock, 0, static_cast<cudaStream_t>(stream)>>>(x, cell);
    return check_launch(op);
  }
  if constexpr (sizeof(T) == 2 && kSize > 1) {
    bool mma;
    AOT_TRY(on_tensor_cores(op, MmaGates::kShared, &mma));
    if (mma) return launch_tiles<MmaGates>(op, lltm_mma_kernel<T, MmaGates, Cell>, MmaGates::kShared, x, cell, stream);
  }
  if (gate_tiles<typename Shapes::Gates>(x.rows, x.state) >= 96)
    return launch_tiles<T, typename Shapes::Gates, kSize>(op, x, cell, stream);
  return launch_tiles<T, typename Shapes::FewGates, kSize>(op, x, cell, stream);
}

template <class Shape, typename T>
Status launch_products(const char *op, void (*kernel)(Operands<T>, const T *, Gradients<T>, TileCounts), int shared,
                       const Operands<T> &x, const T *dpre, const Gradients<T> &gradients, void *stream) {
  auto tiles = [](int64_t m, int64_t n) { return ceil_div(m, Shape::kM) * ceil_div(n, Shape::kN); };
  const bool weights = gradients.dweights;
  TileCounts counts = {weights           ? tiles(3 * x.state, x.state)
                       : gradients.dbias ? tiles(3 * x.state, 1)
                                         : 0,
                       weights ? tiles(3 * x.state, x.features) : 0, gradients.dold_h ? tiles(x.rows, x.state) : 0,
                       gradients.dinput ? tiles(x.rows, x.features) : 0};
  int64_t blocks = counts.weights_h + counts.weights_x + counts.old_h + counts.input;
  if (blocks == 0) return kOk;
  AOT_TRY(allow(op, kernel, 1, shared));
  kernel<<<grid_size(blocks), Shape::kThreads, shared, static_cast<cudaStream_t>(stream)>>>(x, dpre, gradients, counts);
  return check_launch(op);
}

template <typename T, class Shape, int kSize>
Status launch_products(const char *op, const Operands<T> &x, const T *dpre, const Gradients<T> &gradients,
                       void *stream) {
  return launch_products<Shape>(op, lltm_products_kernel<T, Shape, kSize>, 0, x, dpre, gradients, stream);
}

template <typename T, int kSize>
Status launch_products(const char *op, const Operands<T> &x, const T *dpre, const Gradients<T> &gradients,
                       void *stream) {
  using Shapes = TileShapes<Accumulate<T>, kSize>;
  const int64_t columns = ceil_div(x.width(), 32);
  if (x.rows * x.width() <= 36864) {
    bool weights = gradients.dweights || gradients.dbias, inputs = gradients.dold_h || gradients.dinput;
    int64_t weight_blocks = weights ? columns * ceil_div(3 * x.state, kFewRows * kFewWarps) : 0;
    int64_t blocks = weight_blocks + (inputs ? columns * ceil_div(x.rows, kFewRows) : 0);
    if (blocks == 0) return kOk;
    lltm_products_few_kernel<<<grid_size(blocks), kFewBlock, 0, static_cast<cudaStream_t>(stream)>>>(x, dpre, gradients,
                                                                                                     weight_blocks);
    return check_launch(op);
  }
  if constexpr (sizeof(T) == 2 && kSize > 1) {
    bool mma;
    AOT_TRY(on_tensor_cores(op, MmaProducts::kShared, &mma));
    if (mma)
      return launch_products<MmaProducts>(op, lltm_products_mma_kernel<T, MmaProducts>, MmaProducts::kShared, x, dpre,
                                          gradients, stream);
  }
  const int64_t across = ceil_div(x.width(), 128), of_weights = ceil_div(3 * x.state, 128) * across;
  if (of_weights >= 96 && of_weights + ceil_div(x.rows, 128) * across >= 264)
    return launch_products<T, typename Shapes::Products, kSize>(op, x, dpre, gradients, stream);
  return launch_products<T, typename Shapes::FewProducts, kSize>(op, x, dpre, gradients, stream);
}

Status lltm_cuda(const Lltm &op, const Tensor *in, const Tensor *out, void *stream) {
  return dispatch(in[0].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Operands<T> x = operands<T>(in[0], in[1], in[3]);
    CellForward<T> cell = {in[2].as<const T>(), in[4].as<const T>(), out[0].as<T>(),
                           out[1].as<T>(),      out[2].as<A>(),      x.state};
    if (in_packets(x, cell.bias, cell.old_cell, cell.new_h, cell.new_cell, cell.gates))
      return launch_gates<T, kVectorSize<T>>(op.name, x, cell, stream);
    return launch_gates<T, 1>(op.name, x, cell, stream);
  });
}

template <typename T, int kSize>
Status lltm_backward(const LltmBackward &op, const Operands<T> &x, const CellBackward<T> &cell,
                     const Accumulate<T> *gates, const Gradients<T> &gradients, void *stream) {
  constexpr int kCount = kSize == 1 ? 1 : 4;
  if (gates) {
    int64_t packets = x.rows * x.state / kCount;
    if (packets) {
      lltm_gates_backward_kernel<T, kCount>
          <<<grid_size(ceil_div(packets, 256)), 256, 0, static_cast<cudaStream_t>(stream)>>>(cell, gates, packets);
      AOT_TRY(check_launch(op.name));
    }
  } else {
    AOT_TRY((launch_gates<T, kSize>(op.name, x, cell, stream)));
  }
  return launch_products<T, kSize>(op.name, x, cell.dpre, gradients, stream);
}

Status lltm_backward_cuda(const LltmBackward &op, const Tensor *in, const Tensor *out, void *stream) {
  if (!out[5]) return fail(kConventionMisused, "%s: workspace is missing", op.name);
  return dispatch(in[2].dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    using A = Accumulate<T>;
    Operands<T> x = operands<T>(in[2], in[3], in[5]);
    CellBackward<T> cell = {in[4].as<const T>(),
                            in[6].as<const T>(),
                            in[0].as<const T>(),
                            in[1].as<const T>(),
                            out[4].as<T>(),
                            out[5].as<T>(),
                            x.state};
    Gradients<T> gradients = {out[0].as<T>(), out[1].as<T>(), out[2].as<T>(), out[3].as<T>()};
    const A *gates = in[7].as<const A>();
    if (in_packets(x, cell.bias, cell.old_cell, cell.dnew_h, cell.dnew_cell, cell.dold_cell, cell.dpre, gates,
                   gradients.dinput, gradients.dweights, gradients.dold_h))
      return lltm_backward<T, kVectorSize<T>>(op, x, cell, gates, gradients, stream);
    return lltm_backward<T, 1>(op, x, cell, gates, gradients, stream);
  });
}

}  // namespace AOT_ISA
}  // namespace aot

// --------------------------------------------------------------------------------------------------------- entries

using namespace aot;

AOT_ENTRY(Lltm, aot_lltm_cuda, lltm_cuda)
AOT_ENTRY(LltmBackward, aot_lltm_backward_cuda, lltm_backward_cuda)
