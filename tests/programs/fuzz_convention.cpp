// Calls the CPU entries of a library through the C convention alone, at random: fuzz_convention LIBRARY CALLS SEED.
//
// A valid call has shapes that fit, and must return 0, write every byte of its outputs and none beside them. A hostile
// call has one thing wrong, and must return a status with a text that begins with the operator's name, and write
// nothing. Inference is asked of both, and of shapes that no tensor has. The first fault ends the run with exit 1.
#include <dlfcn.h>

#include <algorithm>
#include <cinttypes>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using Shape = std::vector<int64_t>;

// ------------------------------------------------------------------------------------------------------------- chance

uint64_t state;

uint64_t bits() {  // splitmix64
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return z ^ z >> 31;
}
int64_t between(int64_t first, int64_t last) { return first + static_cast<int64_t>(bits() % (last - first + 1)); }
bool flip() { return bits() & 1; }
bool seldom(int n) { return bits() % n == 0; }
template <class T>
const T &any(const std::vector<T> &of) {
  return of[bits() % of.size()];
}

// Mostly small, and seldom so large that several threads have something to do.
Shape small_shape(int most = 4) {
  Shape shape(between(0, most));
  const bool large = seldom(400);
  for (int64_t &dim : shape) dim = large && shape.size() < 3 ? between(100, 300) : between(0, 5);
  return shape;
}

Shape operator+(Shape a, const Shape &b) { return a.insert(a.end(), b.begin(), b.end()), a; }

// ---------------------------------------------------------------------------------------------------------- operators

struct Op {
  std::string name, inputs, outputs;  // slots in order, each with the mark that aot.h gives it and a space
};

// The operators that problem_of has shapes for; their backwards are found by name. tests/programs/hostile_calls.py
// calls all that the library has.
constexpr const char *kFamilies =
    "add gelu swiglu softmax layer_norm rms_norm add_layer_norm add_rms_norm batch_norm batch_norm_relu cross_entropy "
    "cross_entropy_lse linear linear_cross_entropy linear_cross_entropy_lse lltm matmul conv2d rope qkv_rope attention "
    "qkv_attention paged_attention ";

std::vector<Op> ops;

struct Problem {
  std::string attrs;
  std::map<std::string, Shape> shapes;                                                        // by input
  std::vector<std::string> wide = {"stats", "rstd", "gates", "dlse"}, integers = {"target"};  // not of the common dtype
  std::vector<std::string> always, never;  // optional slots that are given, or are not
  int64_t classes = 0, ignored = -100;
};

std::string text(const Shape &shape) {
  std::string s;
  for (int64_t dim : shape) s += (s.empty() ? "" : ",") + std::to_string(dim);
  return s;
}

Problem norm_problem(bool eps) {
  Problem p;
  Shape rows = small_shape(3), axes = small_shape(2);
  if (axes.empty()) axes = {between(0, 40)};
  const Shape x = rows + axes;
  for (const char *slot : {"x", "residual", "h", "dy", "dh"}) p.shapes[slot] = x;
  const bool affine = flip();  // such that bias depends on weight
  const size_t lines = affine ? between(0, rows.size()) : 0;
  p.shapes["weight"] = p.shapes["bias"] = Shape(rows.end() - lines, rows.end()) + axes;
  if (affine) p.always = {"weight"};
  if (affine && flip()) p.wide.insert(p.wide.end(), {"weight", "bias"});
  if (flip()) p.wide.insert(p.wide.end(), {"residual", "h", "dh"});
  p.shapes["stats"] = rows + Shape{2}, p.shapes["rstd"] = rows + Shape{1};
  p.attrs = "normalized_shape=" + text(axes);
  if (eps) p.attrs += "\neps=" + any<std::string>({"1e-05", "0.1", "0.0", "nan", "inf", "-inf", "5e-324"});
  if (affine) p.attrs += "\nweight_offset=" + any<std::string>({"0.0", "1.0", "nan"});
  return p;
}

Problem cross_entropy_problem() {
  Problem p;
  const Shape rows = flip() ? Shape{seldom(100) ? between(1000, 9000) : between(0, 9)} : Shape{};
  const std::string reduction = any<std::string>({"none", "mean", "sum"});
  p.classes = between(1, 40), p.ignored = flip() ? -100 : between(0, p.classes - 1);
  p.shapes["x"] = rows + Shape{p.classes};
  p.shapes["slope"] = rows + Shape{reduction == "none" ? 0 : p.classes};
  p.shapes["target"] = rows, p.shapes["dy"] = reduction == "none" ? rows : Shape{};
  p.shapes["weight"] = {p.classes}, p.shapes["dlse"] = rows;
  p.attrs = "reduction=" + reduction + "\nlabel_smoothing=" + any<std::string>({"0.0", "0.1", "1.0"}) +
            "\nignore_index=" + std::to_string(p.ignored) + "\nz_loss=" + any<std::string>({"0.0", "0.1"}) +
            "\nsoftcap=" + any<std::string>({"0.0", "2.0"});
  return p;
}

Problem linear_problem() {
  Problem p;
  const int64_t in = between(0, 40), out = between(0, 40);
  const Shape rows = small_shape(3);
  const std::string activation = any<std::string>({"", "relu", "gelu", "gelu_tanh", "silu"});
  p.shapes = {{"x", rows + Shape{in}}, {"weight", {out, in}}, {"bias", {out}}, {"dy", rows + Shape{out}}};
  p.shapes["pre_activation"] = rows + Shape{activation.empty() ? 0 : out};
  p.attrs = std::string("allow_tf32=") + (flip() ? "1" : "0");
  if (!activation.empty()) p.attrs += "\nactivation=" + activation;
  return p;
}

Problem lltm_problem() {
  Problem p;
  const int64_t state = between(0, 20), features = between(0, 20);
  const Shape rows = small_shape(2), h = rows + Shape{state};
  for (const char *slot : {"old_h", "old_cell", "dnew_h", "dnew_cell"}) p.shapes[slot] = h;
  for (const char *slot : {"dnew_h", "dnew_cell"})
    if (seldom(5)) p.shapes[slot] = {};
  p.shapes["input"] = rows + Shape{features}, p.shapes["weights"] = {3 * state, state + features};
  p.shapes["bias"] = flip() ? Shape{1, 3 * state} : Shape{3 * state}, p.shapes["gates"] = rows + Shape{3 * state};
  return p;
}

Problem matmul_problem() {
  Problem p;
  const int64_t m = between(0, 40), k = between(0, 40), n = between(0, 40);
  const bool ta = flip(), tb = flip();
  Shape batch = small_shape(2), few(batch.begin() + between(0, static_cast<int64_t>(batch.size())), batch.end());
  for (int64_t &dim : batch) dim = dim > 5 ? 5 : dim;
  for (int64_t &dim : few) dim = dim > 5 ? 5 : dim;
  for (int64_t &dim : few)
    if (flip()) dim = 1;
  const bool first = flip();
  p.shapes["a"] = (first ? batch : few) + (ta ? Shape{k, m} : Shape{m, k});
  p.shapes["b"] = (first ? few : batch) + (tb ? Shape{n, k} : Shape{k, n});
  p.shapes["dy"] = batch + Shape{m, n};
  p.attrs = "transpose_a=" + std::to_string(ta) + "\ntranspose_b=" + std::to_string(tb);
  return p;
}

Problem conv2d_problem() {
  Problem p;
  const bool nhwc = flip();
  const int64_t groups = between(1, 3), inner = between(0, 9), outputs = groups * between(0, 9);
  int64_t stride[2], dilation[2], kernel[2], out[2], padding[2], image[2];
  for (int i = 0; i < 2; ++i) {
    stride[i] = between(1, 3), dilation[i] = between(1, 3), kernel[i] = between(1, 3), out[i] = between(1, 6);
    const int64_t span = (out[i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1;
    padding[i] = between(0, span / 2), image[i] = span - 2 * padding[i];
  }
  auto placed = [&](int64_t channels, const int64_t *size) {
    return nhwc ? Shape{size[0], size[1], channels} : Shape{channels, size[0], size[1]};
  };
  Shape batch = small_shape(2);
  for (int64_t &dim : batch) dim = dim > 5 ? 5 : dim;
  p.shapes["x"] = batch + placed(groups * inner, image), p.shapes["weight"] = Shape{outputs} + placed(inner, kernel);
  p.shapes["dy"] = batch + placed(outputs, out), p.shapes["bias"] = {outputs};
  p.attrs = std::string("layout=") + (nhwc ? "NHWC" : "NCHW") + "\ngroups=" + std::to_string(groups) +
            "\nstride=" + text({stride[0], stride[1]}) + "\npadding=" + text({padding[0], padding[1]}) +
            "\ndilation=" + text({dilation[0], dilation[1]});
  return p;
}

// activated: of batch_norm, which may have an activation.
Problem batch_norm_problem(bool activated) {
  Problem p;
  const Shape rows = small_shape(2), channels = {between(0, 9)}, inner = small_shape(2), x = rows + channels + inner;
  for (const char *slot : {"x", "y", "dy", "residual"}) p.shapes[slot] = x;
  for (const char *slot : {"weight", "bias", "mean", "var", "dmean", "dvar"}) p.shapes[slot] = channels;
  p.wide.insert(p.wide.end(), {"mean", "var", "dmean", "dvar"});
  if (flip()) p.always = {"weight"}, p.wide.insert(p.wide.end(), {"weight", "bias"});  // bias depends on weight
  p.attrs = "axis=" + std::to_string(static_cast<int64_t>(rows.size()) - (flip() ? 0 : static_cast<int64_t>(x.size())));
  if (activated && flip()) p.attrs += "\nactivation=" + any<std::string>({"relu", "silu", "hardswish"});
  return p;
}

// packed: of qkv_rope, else of rope.
Problem rope_problem(bool packed) {
  Problem p;
  const bool heads_first = flip(), interleaved = flip();
  const int64_t seq = between(0, 9), kv_heads = between(1, 3), heads = kv_heads * between(1, 2), half = between(0, 9);
  const Shape rows = small_shape(2);
  auto placed = [&](int64_t n) { return rows + (heads_first ? Shape{n, seq, 2 * half} : Shape{seq, n, 2 * half}); };
  for (const char *slot : {"x", "dy", "dq"}) p.shapes[slot] = placed(heads);
  for (const char *slot : {"dk", "dv"}) p.shapes[slot] = placed(kv_heads);
  p.shapes["qkv"] = rows + Shape{seq, (heads + 2 * kv_heads) * 2 * half};
  p.classes = seq + between(1, 3), p.ignored = between(0, p.classes - 1);
  p.shapes["cos"] = p.shapes["sin"] = {p.classes, interleaved || flip() ? half : 2 * half};
  p.shapes["positions"] = {seq}, p.integers = {"positions"};
  p.always = {"x", "qkv", "cos", "sin"};  // dcos needs x
  if (flip()) p.wide.insert(p.wide.end(), {"cos", "sin"});
  p.attrs = std::string("layout=") + (heads_first ? "BHSD" : "BSHD") + "\ninterleaved=" + (interleaved ? "1" : "0");
  if (packed)
    p.attrs += "\nheads=" + std::to_string(heads) + "\nkv_heads=" + std::to_string(kv_heads) +
               "\ngrouped=" + (flip() ? "1" : "0");
  return p;
}

Problem attention_problem(bool packed) {
  Problem p;
  const bool heads_first = !packed && flip();
  const int64_t of_q = between(0, 9), of_k = packed ? of_q : between(0, 9), shared = between(1, 3),
                kv_heads = between(1, 3);
  const int64_t heads = kv_heads * shared, dim = between(1, 20), batch = between(0, 3);
  auto placed = [&](int64_t seq, int64_t n) {
    return heads_first ? Shape{batch, n, seq, dim} : Shape{batch, seq, n, dim};
  };
  for (const char *slot : {"q", "y", "dy"}) p.shapes[slot] = placed(of_q, heads);
  for (const char *slot : {"k", "v"}) p.shapes[slot] = placed(of_k, kv_heads);
  p.shapes["lse"] = {batch, heads, of_q}, p.wide.push_back("lse");
  p.always = {"lse"};
  p.never = {"lengths", "mask", "bias", "sinks", "cu_seqlens", "cu_seqlens_k", "seed", "dbias", "dsinks"};
  p.attrs = std::string("causal=") + (flip() ? "1" : "0") + "\nsoftcap=" + any<std::string>({"0.0", "2.0"});
  if (!packed) return p.attrs += std::string("\nlayout=") + (heads_first ? "BHSD" : "BSHD"), p;
  p.shapes["qkv"] = {batch, of_q, (heads + 2 * kv_heads) * dim};
  p.shapes["y"] = p.shapes["dy"] = {batch, of_q, heads * dim};
  p.attrs += "\nheads=" + std::to_string(heads) + "\nkv_heads=" + std::to_string(kv_heads);
  return p;
}

Problem paged_attention_problem() {
  Problem p;
  const int64_t batch = between(0, 3), keys = between(0, 20), kv_heads = between(1, 3), dim = between(1, 20);
  p.shapes["q"] = {batch, between(1, 4), kv_heads * between(1, 3), dim};
  p.shapes["k_cache"] = p.shapes["v_cache"] = {batch, keys, kv_heads, dim};
  p.shapes["lengths"] = {batch}, p.integers = {"lengths"};
  p.classes = keys + 1, p.ignored = between(0, keys);
  p.never = {"block_table"};
  p.attrs = "window=" + std::to_string(between(0, 9)) + "\nsoftcap=" + any<std::string>({"0.0", "2.0"});
  return p;
}

Problem linear_cross_entropy_problem() {
  Problem p = cross_entropy_problem();
  const int64_t in = between(0, 20);
  const Shape rows = p.shapes["target"];
  p.shapes["x"] = rows + Shape{in}, p.shapes["weight"] = {p.classes, in};
  p.shapes["bias"] = p.shapes["class_weight"] = {p.classes};
  p.attrs += std::string("\nallow_tf32=") + (flip() ? "1" : "0");
  return p;
}

Problem elementwise_problem(const std::string &family) {
  Problem p;
  const Shape shape = small_shape();
  for (const char *slot : {"a", "b", "x", "y", "dy", "gate", "up"}) p.shapes[slot] = shape;
  const int64_t ndim = shape.empty() ? 1 : static_cast<int64_t>(shape.size());
  if (family == "add") p.always = {"b"};
  if (family == "gelu") p.attrs = std::string("approximate=") + (flip() ? "tanh" : "none");
  if (family == "softmax") p.attrs = "dim=" + std::to_string(between(-ndim, ndim - 1));
  return p;
}

Problem problem_of(const Op &op) {
  const std::string family = op.name.substr(0, op.name.find("_backward"));
  if (family.find("batch_norm") == 0) return batch_norm_problem(family.find("relu") == std::string::npos);
  if (family.find("norm") != std::string::npos) return norm_problem(flip());
  if (family == "cross_entropy" || family == "cross_entropy_lse") return cross_entropy_problem();
  if (family == "rope" || family == "qkv_rope") return rope_problem(family == "qkv_rope");
  if (family == "attention" || family == "qkv_attention") return attention_problem(family == "qkv_attention");
  if (family == "paged_attention") return paged_attention_problem();
  if (family.find("linear_cross_entropy") == 0) {
    Problem p = linear_cross_entropy_problem();
    if (family != op.name) p.never = {"x_slope", "weight_slope", "bias_slope"};  // each serves one gradient
    return p;
  }
  if (family == "linear") return linear_problem();
  if (family == "lltm") return lltm_problem();
  if (family == "matmul") return matmul_problem();
  if (family == "conv2d") return conv2d_problem();
  return elementwise_problem(family);
}

// ----------------------------------------------------------------------------------------------------------- a library

using Entry = int(int, void **, int *, int64_t **, const char **, void *, void *);
using Init = int(int *, int64_t **, const char **, void *);

void *library;

template <class F>
F *symbol(const std::string &name) {
  void *found = dlsym(library, name.c_str());
  if (!found) std::fprintf(stderr, "the library has no %s\n", name.c_str()), std::exit(1);
  return reinterpret_cast<F *>(found);
}

// Adds to ops what the library says of an entry's slots.
void read_op(const std::string &name) {
  const std::string said = symbol<const char *()>("aot_" + name + "_cpuSignature")();
  const size_t first = said.find(';'), second = said.find(';', first + 1);
  ops.push_back({name, said.substr(0, first), said.substr(first + 1, second - first - 1)});
}

void read_ops() {
  const std::string names = kFamilies;
  for (size_t at = 0, end; (end = names.find(' ', at)) != std::string::npos; at = end + 1) {
    const std::string name = names.substr(at, end - at), backward = name + "_backward";
    read_op(name);
    if (dlsym(library, ("aot_" + backward + "_cpu").c_str())) read_op(backward);
  }
}

struct Extra {
  void *pointer;
  explicit Extra(const std::string &attrs) : pointer(symbol<void *(const char *)>("aot_extra_new")(attrs.c_str())) {}
  ~Extra() { symbol<void(void *)>("aot_extra_delete")(pointer); }
  Extra(const Extra &) = delete;
  Extra &operator=(const Extra &) = delete;
};

const std::map<std::string, int> kTypes = {{"int32", 34},   {"int64", 35},   {"float16", 42},
                                           {"float32", 43}, {"float64", 44}, {"bfloat16", 45}};

int64_t itemsize(const std::string &dtype) {
  return dtype == "float64" || dtype == "int64" ? 8 : dtype == "float32" || dtype == "int32" ? 4 : 2;
}

int64_t count(const Shape &shape) {
  int64_t n = 1;
  for (int64_t dim : shape) n *= dim;
  return n;
}

// The companions give a vector of one output's, where the operator has one slot, else of all those that are present.
std::vector<Shape> infer_shapes(const std::string &entry, bool many, int *ndims, int64_t **shapes, void *extra) {
  if (many) return symbol<std::vector<Shape>(int *, int64_t **, void *)>(entry + "InferShape")(ndims, shapes, extra);
  return {symbol<Shape(int *, int64_t **, void *)>(entry + "InferShape")(ndims, shapes, extra)};
}
std::vector<int> infer_types(const std::string &entry, bool many, const std::vector<int> &types, void *extra) {
  if (many) return symbol<std::vector<int>(std::vector<int>, void *)>(entry + "InferType")(types, extra);
  return {symbol<int(std::vector<int>, void *)>(entry + "InferType")(types, extra)};
}

// -------------------------------------------------------------------------------------------------------------- memory

// So many bytes, and none beside them: under ASan the heap's own guards see to that, else a fence on either side.
class Memory {
 public:
  explicit Memory(int64_t bytes) : bytes_(bytes), all_(new unsigned char[bytes + 2 * kFence]) {
    std::memset(all_.get(), kMark, kFence), std::memset(data() + bytes, kMark, kFence), fill();
  }
  unsigned char *data() const { return all_.get() + kFence; }
  void fill() { std::memset(data(), kUnwritten, bytes_); }
  bool fenced() const { return all(all_.get(), kFence, kMark) && all(data() + bytes_, kFence, kMark); }
  bool untouched() const { return all(data(), bytes_, kUnwritten); }
  // Bytes that are all ones make a NaN that no kernel writes.
  bool written(int64_t itemsize) const {
    for (int64_t i = 0; i < bytes_; i += itemsize)
      if (all(data() + i, itemsize, kUnwritten)) return false;
    return true;
  }

 private:
#ifdef __SANITIZE_ADDRESS__
  static constexpr int kFence = 0;
#else
  static constexpr int kFence = 64;
#endif
  static constexpr unsigned char kMark = 0xa7, kUnwritten = 0xff;
  static bool all(const unsigned char *p, int64_t n, unsigned char value) {
    for (int64_t i = 0; i < n; ++i)
      if (p[i] != value) return false;
    return true;
  }
  int64_t bytes_;
  std::unique_ptr<unsigned char[]> all_;
};

// Numbers from -4 to 4, and seldom one that is not finite.
void fill_floats(const std::string &dtype, int64_t n, unsigned char *data) {
  for (int64_t i = 0; i < n; ++i) {
    const float number = seldom(500) ? __builtin_inff() : seldom(500) ? __builtin_nanf("") : between(-64, 64) / 16.f;
    uint32_t word;
    std::memcpy(&word, &number, 4);
    if (dtype == "float64") {
      const double wide = number;
      std::memcpy(data + i * 8, &wide, 8);
    } else if (dtype == "float32") {
      std::memcpy(data + i * 4, &word, 4);
    } else if (dtype == "bfloat16") {
      const uint16_t high = word >> 16;
      std::memcpy(data + i * 2, &high, 2);
    } else {  // float16: 1 to 2, or infinite
      const uint16_t half = seldom(500) ? 0x7c00 : 0x3c00 | (bits() & 0x83ff);
      std::memcpy(data + i * 2, &half, 2);
    }
  }
}

void fill_integers(const std::string &dtype, int64_t n, const Problem &p, unsigned char *data) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t wide = seldom(4) ? p.ignored : between(0, p.classes - 1);
    const int32_t narrow = static_cast<int32_t>(wide);
    if (dtype == "int64") std::memcpy(data + i * 8, &wide, 8);
    else std::memcpy(data + i * 4, &narrow, 4);
  }
}

// ------------------------------------------------------------------------------------------------------------- a call

struct Slot {
  std::string name;
  bool optional, workspace;
};

std::vector<Slot> slots(const std::string &text) {
  std::vector<Slot> found;
  for (size_t at = 0; at < text.size();) {
    const size_t end = text.find(' ', at) == std::string::npos ? text.size() : text.find(' ', at);
    const char mark = text[end - 1];
    found.push_back({text.substr(at, end - at - 1), mark == '?', mark == '*'});
    at = end + 1;
  }
  return found;
}

struct Given {
  Slot slot;
  bool output;
  Shape shape;
  std::string dtype;
  std::unique_ptr<Memory> memory;
};

struct Call {
  const Op &op;
  std::string entry, attrs;
  bool many;
  std::vector<Given> given;
  // the arrays of the convention, with room for a tensor too many
  std::vector<void *> params;
  std::vector<int> ndims;
  std::vector<int64_t *> shapes;
  std::vector<const char *> dtypes;
  int nparam = 0;

  explicit Call(const Op &op) : op(op), entry("aot_" + op.name + "_cpu"), many(slots(op.outputs).size() > 1) {
    const Problem p = problem_of(op);
    const std::string dtype = any<std::string>({"float16", "bfloat16", "float32", "float64"});
    const int64_t inputs = take_inputs(p, dtype), outputs = choose_outputs(p);
    attrs = p.attrs + "\ninputs=" + std::to_string(inputs) + "\noutputs=" + std::to_string(outputs);
    arrays();
    infer(dtype);
    arrays();
  }

  int run(void *extra) {
    return symbol<Entry>(entry)(nparam, params.data(), ndims.data(), shapes.data(), dtypes.data(), nullptr, extra);
  }
  int init(void *extra) const { return symbol<Init>(entry + "Init")(nullptr, nullptr, nullptr, extra); }

  // The operator has one, and attributes end with the bits of the outputs.
  std::string attrs_without_workspace() const {
    const size_t bits_at = attrs.rfind('=') + 1, last = slots(op.outputs).size() - 1;
    return attrs.substr(0, bits_at) + std::to_string(std::stoll(attrs.substr(bits_at)) & ~(int64_t{1} << last));
  }

  std::string described() const {
    std::string s = op.name + " {" + attrs + "}";
    for (char &c : s) c = c == '\n' ? ' ' : c;
    for (const Given &g : given) s += " " + g.slot.name + " " + g.dtype + "(" + text(g.shape) + ")";
    return s;
  }

 private:
  static bool has(const std::vector<std::string> &names, const std::string &name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  int64_t take_inputs(const Problem &p, const std::string &dtype) {
    int64_t mask = 0, i = 0;
    for (const Slot &slot : slots(op.inputs)) {
      const int64_t bit = int64_t{1} << i++;
      if (has(p.never, slot.name) || (slot.optional && !has(p.always, slot.name) && flip())) continue;
      mask |= bit;
      Given g{slot, false, p.shapes.at(slot.name), dtype, nullptr};
      if (has(p.wide, slot.name)) g.dtype = dtype == "float64" ? dtype : "float32";
      const bool integer = has(p.integers, slot.name);
      if (integer) g.dtype = flip() ? "int32" : "int64";
      const int64_t n = count(g.shape);
      g.memory = std::make_unique<Memory>(n * itemsize(g.dtype));
      integer ? fill_integers(g.dtype, n, p, g.memory->data()) : fill_floats(g.dtype, n, g.memory->data());
      given.push_back(std::move(g));
    }
    return mask;
  }
  int64_t choose_outputs(const Problem &p) {
    int64_t mask = 0, i = 0;
    for (const Slot &slot : slots(op.outputs)) {
      const int64_t bit = int64_t{1} << i++;
      if (has(p.never, slot.name) || (slot.optional && flip())) continue;
      mask |= bit, given.push_back({slot, true, {}, "", nullptr});
    }
    return mask;
  }
  // The entry must take outputs as the companions infer them.
  void infer(const std::string &dtype) {
    const Extra extra(attrs);
    std::vector<int> types;
    for (const Given &g : given)
      if (!g.output) types.push_back(kTypes.at(g.dtype));
    const auto found = infer_shapes(entry, many, ndims.data(), shapes.data(), extra.pointer);
    const auto ids = infer_types(entry, many, types, extra.pointer);
    size_t at = 0;
    for (Given &g : given) {
      if (!g.output) continue;
      g.dtype = dtype;
      for (const auto &[name, id] : kTypes)
        if (id == ids.at(at)) g.dtype = name;
      g.shape = found.at(at++);
      for (int64_t dim : g.shape)
        if (dim < 0)
          std::printf("FAULT: %s: %s is not inferred\n", described().c_str(), g.slot.name.c_str()), std::exit(1);
      if (g.slot.workspace && flip()) g.shape = g.shape + Shape{2};
      g.memory = std::make_unique<Memory>(count(g.shape) * itemsize(g.dtype));
    }
  }
  void arrays() {
    params.clear(), ndims.clear(), shapes.clear(), dtypes.clear();
    for (Given &g : given) {
      params.push_back(g.memory ? g.memory->data() : nullptr), ndims.push_back(static_cast<int>(g.shape.size()));
      shapes.push_back(g.shape.data()), dtypes.push_back(g.dtype.c_str());
    }
    nparam = static_cast<int>(given.size());
    params.push_back(params[0]), ndims.push_back(ndims[0]), shapes.push_back(shapes[0]), dtypes.push_back(dtypes[0]);
  }
};

[[noreturn]] void fault(const Call &call, const std::string &what) {
  std::printf("FAULT: %s: %s\n", call.described().c_str(), what.c_str());
  std::exit(1);
}

std::string last_error() { return symbol<const char *()>("aot_last_error")(); }

void check_fences(const Call &call) {
  for (const Given &g : call.given)
    if (!g.memory->fenced()) fault(call, "bytes beside " + g.slot.name + " were written");
}

void valid_call() {
  Call call(any(ops));
  const Extra extra(call.attrs);
  if (!seldom(8) && call.init(extra.pointer)) fault(call, "Init: " + last_error());
  if (call.run(extra.pointer)) fault(call, last_error());
  check_fences(call);
  for (const Given &g : call.given)
    if (g.output && !g.slot.workspace && !g.memory->written(itemsize(g.dtype)))
      fault(call, g.slot.name + " was not wholly written");
}

// ------------------------------------------------------------------------------------------------------ hostile calls

const std::vector<int64_t> kLarge = {int64_t{1} << 31, int64_t{1} << 40, int64_t{1} << 49, int64_t{1} << 62, INT64_MAX};
const std::vector<int64_t> kNegative = {-1, -2, -100, -(int64_t{1} << 40), INT64_MIN};

enum Outcome { kRefused, kEither, kNothingDone };

// Makes one thing wrong. Of what may be right after all, as a workspace that is too large, the outcome is kEither.
Outcome spoil(Call &call, void **extra, std::vector<std::unique_ptr<Extra>> &kept) {
  const size_t i = bits() % call.given.size();
  Given &g = call.given[i];
  const bool may_be_absent = g.slot.optional || g.slot.workspace;
  switch (between(0, 13)) {
    case 0:
    case 1:
      if (g.shape.empty()) return kNothingDone;
      g.shape[bits() % g.shape.size()] = any(kNegative);
      return kRefused;
    case 2:
    case 3:
      if (g.shape.empty()) return kNothingDone;
      // nothing else tells how many classes there are: as many as a tensor may have would be a valid call
      if ((call.op.name == "cross_entropy" || call.op.name == "cross_entropy_lse") && g.slot.name == "x")
        return g.shape.back() = INT64_MAX, kRefused;
      if (call.op.name.find("linear_cross_entropy") == 0 && g.slot.name == "weight")
        return g.shape.front() = INT64_MAX, kRefused;
      g.shape[bits() % g.shape.size()] = any(kLarge);
      if (flip() && g.shape.size() > 1)
        for (int64_t &dim : g.shape) dim = any(kLarge);
      return g.slot.workspace ? kEither : kRefused;
    case 4:
      call.ndims[i] = any<int>({-1, -2, -1000, INT_MIN, 33, 1000, INT_MAX});
      return kRefused;
    case 5:
      call.nparam = any<int>({-1, 0, INT_MIN, call.nparam + 1, INT_MAX});
      return call.nparam == 0 && call.given.empty() ? kEither : kRefused;
    case 6:
      --call.nparam;
      if (!call.given.back().slot.workspace || flip()) return kRefused;
      call.attrs = call.attrs_without_workspace();
      kept.push_back(std::make_unique<Extra>(call.attrs)), *extra = kept.back()->pointer;
      return kEither;
    case 7:
      if (g.shape.empty()) return kNothingDone;
      call.shapes[i] = nullptr;
      return kRefused;
    case 8:
      call.dtypes[i] = any<const char *>({nullptr, "", "float128", "float3", "float32x", "complex64", "int8", "bool"});
      return kRefused;
    case 9:
      if (!count(g.shape)) return kNothingDone;
      call.params[i] = nullptr;
      return kRefused;
    case 10: {  // the data of another operator's Init
      const Call other(any(ops));
      if (other.op.name == call.op.name) return kNothingDone;
      kept.push_back(std::make_unique<Extra>(other.attrs));
      if (other.init(kept.back()->pointer)) return kNothingDone;
      *extra = kept.back()->pointer;
      return kRefused;
    }
    case 11:  // a dtype that is known, but not this one
      call.dtypes[i] = g.dtype == "int32" || g.dtype == "int64" ? "float32" : "int64";
      return kRefused;
    case 12:
      if (g.shape.empty() || (!g.output && count(g.shape))) return kNothingDone;  // an input of more is no smaller
      if (!g.output || may_be_absent) return kNothingDone;
      ++g.shape[bits() % g.shape.size()];
      return kRefused;
    default:  // attributes of which one is not what the operator takes
      const size_t at = call.attrs.find('=', call.attrs.find("inputs=") ? 0 : std::string::npos);
      if (at == std::string::npos || at > call.attrs.find("inputs=")) return kNothingDone;
      const size_t end = call.attrs.find('\n', at);
      call.attrs.replace(at + 1, end - at - 1,
                         any<std::string>({"", "x", "7,7,7", "18446744073709551616", "-9223372036854775809", "9e999",
                                           "0x10", " 1", "1 ", "nan,", "none\t", std::string(100, 'a'), "2,,2"}));
      kept.push_back(std::make_unique<Extra>(call.attrs));
      *extra = kept.back()->pointer;
      return kRefused;
  }
}

bool hostile_call() {
  Call call(any(ops));
  const std::string before = call.attrs;
  std::vector<std::unique_ptr<Extra>> kept;
  kept.push_back(std::make_unique<Extra>(call.attrs));
  void *extra = kept[0]->pointer;
  const bool bound = flip();
  if (bound && call.init(extra)) fault(call, "Init: " + last_error());
  const Outcome outcome = spoil(call, &extra, kept);
  if (outcome == kNothingDone) return false;
  if (call.attrs != before && bound) call.init(extra);  // which refuses them, and so does the call
  const int status = call.run(extra);
  const std::string said = last_error();
  if (outcome == kRefused && !status) fault(call, "was taken");
  if (status && said.compare(0, call.op.name.size(), call.op.name))
    fault(call, "does not say whose error it is: " + said);
  for (const Given &g : call.given)
    if (status && g.output && !g.memory->untouched()) fault(call, g.slot.name + " was written by a call that failed");
  return true;
}

// The arrays themselves are null: of a call, and of an Init.
bool null_call() {
  Call call(any(ops));
  const Extra extra(call.attrs);
  if (flip() && call.init(extra.pointer)) fault(call, "Init: " + last_error());
  if (call.init(nullptr) == 0) fault(call, "Init took no extra");
  const int missing = static_cast<int>(between(0, 3));
  const int status = symbol<Entry>(call.entry)(
      call.nparam, missing == 0 ? nullptr : call.params.data(), missing == 1 ? nullptr : call.ndims.data(),
      missing == 2 ? nullptr : call.shapes.data(), missing == 3 ? nullptr : call.dtypes.data(), nullptr, extra.pointer);
  if (!status) fault(call, "was taken without one of its arrays");
  call.run(nullptr);  // no attributes: right for some
  check_fences(call);
  return true;
}

// For shapes that no tensor has, and unknown types, inference returns a status and throws nothing.
bool hostile_inference() {
  Call call(any(ops));
  std::vector<std::vector<int64_t>> rows;
  for (size_t i = 0; i < call.given.size(); ++i) {
    rows.emplace_back(between(0, 40));
    for (int64_t &dim : rows.back()) dim = seldom(4) ? any(kLarge) : seldom(4) ? any(kNegative) : between(-2, 9);
    if (flip()) continue;
    call.shapes[i] = rows.back().data();
    call.ndims[i] = seldom(4) ? any<int>({-1, INT_MIN, 33, INT_MAX}) : static_cast<int>(rows.back().size());
  }
  std::vector<int> types;
  for (int64_t i = between(0, 9); i > 0; --i) types.push_back(static_cast<int>(between(30, 50)));
  if (seldom(4)) call.attrs = any<std::string>({"", "inputs=0", "outputs=0", "inputs=1\noutputs=1", "stride=-1,-1"});
  // what is present is told by the attributes: no more is read than there is
  const Extra extra(call.attrs);
  if (call.attrs.find("inputs=") != std::string::npos)
    infer_shapes(call.entry, call.many, call.ndims.data(), call.shapes.data(), extra.pointer);
  infer_types(call.entry, call.many, types, extra.pointer);
  return true;
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: %s LIBRARY CALLS SEED\n", argv[0]), 2;
  library = dlopen(argv[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 2;
  read_ops();
  const int64_t calls = std::atoll(argv[2]);
  state = std::strtoull(argv[3], nullptr, 10);
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  int64_t valid = 0, hostile = 0, inferred = 0;
  while (valid + hostile + inferred < calls) {
    const int64_t which = between(0, 9);
    if (which < 5) valid_call(), ++valid;
    else if (which < 8) hostile += hostile_call();
    else if (which < 9) hostile += null_call();
    else inferred += hostile_inference();
  }
  std::printf("%" PRId64 " calls of %zu entries: %" PRId64 " valid, %" PRId64 " hostile, %" PRId64
              " of inference with hostile shapes; no fault\n",
              calls, ops.size(), valid, hostile, inferred);
}
