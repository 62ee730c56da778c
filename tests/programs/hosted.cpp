// Functions of MindSpore's AOT convention, as its tutorials write them: they know nothing of aotops. test_hosting.py
// compiles them, with either ABI of std::string, and hosts them.
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

// MindSpore's custom_aot_extra.h, which authors copy.
class AotKernelData {
 public:
  AotKernelData() = default;
  virtual ~AotKernelData() = default;
};

class AotExtra {
 public:
  AotExtra() = default;
  virtual ~AotExtra() = default;
  virtual bool HasAttr(std::string name) = 0;

  template <typename T>
  inline T Attr(std::string name) const;

  void SetWorkSpace(const std::vector<size_t> &workspace) { workspace_ = workspace; }
  const std::vector<size_t> &WorkSpace() const { return workspace_; }
  void SetKernelData(AotKernelData *data) { data_ = data; }
  AotKernelData *KernelData() const { return data_; }

 private:
  std::vector<size_t> workspace_;
  AotKernelData *data_ = nullptr;

  virtual bool GetAttrBool(std::string name) = 0;
  virtual int64_t GetAttrInt(std::string name) = 0;
  virtual float GetAttrFloat(std::string name) = 0;
  virtual std::string GetAttrStr(std::string name) = 0;
  virtual std::vector<int64_t> GetAttrIntVec(std::string name) = 0;
  virtual std::vector<float> GetAttrFloatVec(std::string name) = 0;
  virtual std::vector<std::vector<int64_t>> GetAttrInt2DVec(std::string name) = 0;
  virtual std::vector<std::vector<float>> GetAttrFloat2DVec(std::string name) = 0;
};
#define ATTR(T, Get)                                \
  template <>                                       \
  inline T AotExtra::Attr(std::string name) const { \
    return const_cast<AotExtra *>(this)->Get(name); \
  }
ATTR(bool, GetAttrBool)
ATTR(int64_t, GetAttrInt)
ATTR(float, GetAttrFloat)
ATTR(std::string, GetAttrStr)
ATTR(std::vector<int64_t>, GetAttrIntVec)
ATTR(std::vector<float>, GetAttrFloatVec)
ATTR(std::vector<std::vector<int64_t>>, GetAttrInt2DVec)
ATTR(std::vector<std::vector<float>>, GetAttrFloat2DVec)

enum TypeId : int {};
static const TypeId kInt64 = static_cast<TypeId>(35);

#define PARAMETERS \
  int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream, void *extra

static int64_t size_of(int ndim, const int64_t *shape) {
  int64_t n = 1;
  for (int i = 0; i < ndim; ++i) n *= shape[i];
  return n;
}

// 1: another number of tensors; 2: another dtype.
static int check(int nparam, int expected, const char **dtypes) {
  if (nparam != expected) return 1;
  for (int i = 0; i < nparam; ++i)
    if (std::strcmp(dtypes[i], "float32")) return 2;
  return 0;
}

// ------------------------------------------------------------------------------------------------------------ bare

extern "C" int CustomAdd(PARAMETERS) {
  if (int wrong = check(nparam, 3, dtypes)) return wrong;
  if (stream) return 3;
  const float *x = static_cast<float *>(params[0]), *y = static_cast<float *>(params[1]);
  float *z = static_cast<float *>(params[2]);
  const int64_t n = size_of(ndims[2], shapes[2]);
  for (int64_t i = 0; i < n; ++i) z[i] = x[i] + y[i];
  return 0;
}

extern "C" int CustomMul(PARAMETERS) {
  if (int wrong = check(nparam, 3, dtypes)) return wrong;
  const float *x = static_cast<float *>(params[0]), *y = static_cast<float *>(params[1]);
  float *z = static_cast<float *>(params[2]);
  const int64_t n = size_of(ndims[2], shapes[2]);
  for (int64_t i = 0; i < n; ++i) z[i] = x[i] * y[i];
  return 0;
}

// Transposes a matrix: the shape of the result is another one.
extern "C" int Transpose(PARAMETERS) {
  if (int wrong = check(nparam, 2, dtypes)) return wrong;
  const float *x = static_cast<float *>(params[0]);
  float *y = static_cast<float *>(params[1]);
  const int64_t rows = shapes[0][0], columns = shapes[0][1];
  if (shapes[1][0] != columns || shapes[1][1] != rows) return 4;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) y[j * rows + i] = x[i * columns + j];
  return 0;
}

// Bytes of any dtype, whose name it writes to the second output: its length, then its characters.
extern "C" int Copy(PARAMETERS) {
  if (nparam != 3) return 1;
  const std::string name = dtypes[0];
  const size_t digits = name.find_first_of("0123456789");
  const int64_t item = name == "bool" ? 1 : std::stoi(name.substr(digits)) / 8;
  std::memcpy(params[1], params[0], item * size_of(ndims[0], shapes[0]));
  auto *said = static_cast<int64_t *>(params[2]);
  for (int64_t i = 0; i < shapes[2][0]; ++i) said[i] = i < static_cast<int64_t>(name.size()) ? name[i] : 0;
  return 0;
}

// Python's numbers: y = x * factor + offset, or x where `flag` is false. They are tensors without axes, and shapes.
extern "C" int Numbers(PARAMETERS) {
  if (nparam != 5) return 1;
  const char *expected[] = {"float32", "float32", "int64", "bool", "float32"};
  for (int i = 0; i < 5; ++i)
    if (std::strcmp(dtypes[i], expected[i])) return 2;
  for (int i = 1; i < 4; ++i)
    if (ndims[i] || shapes[i]) return 3;
  const float *x = static_cast<float *>(params[0]), factor = *static_cast<float *>(params[1]);
  const int64_t offset = *static_cast<int64_t *>(params[2]);
  float *y = static_cast<float *>(params[4]);
  for (int64_t i = 0; i < size_of(ndims[0], shapes[0]); ++i)
    y[i] = *static_cast<bool *>(params[3]) ? x[i] * factor + offset : x[i];
  return 0;
}

// ------------------------------------------------------------------------------------------------------ attributes

// y = x * the sum of all that the attributes say.
static float sum_of_attributes(const AotExtra &extra) {
  float sum = extra.Attr<bool>("flag") + extra.Attr<int64_t>("count") + extra.Attr<float>("scale");
  sum += extra.Attr<std::string>("a_name_of_more_than_fifteen_characters").size();
  for (int64_t v : extra.Attr<std::vector<int64_t>>("axes")) sum += v;
  for (float v : extra.Attr<std::vector<float>>("weights")) sum += v;
  for (const auto &row : extra.Attr<std::vector<std::vector<int64_t>>>("pairs"))
    for (size_t i = 0; i < row.size(); ++i) sum += row[i] * (i + 1);
  const auto table = extra.Attr<std::vector<std::vector<float>>>("table");
  for (size_t i = 0; i < table.size(); ++i)
    for (float v : table[i]) sum += v * (i + 1);
  return sum;
}

extern "C" int Attributes(PARAMETERS) {
  if (int wrong = check(nparam, 2, dtypes)) return wrong;
  const float sum = sum_of_attributes(*static_cast<AotExtra *>(extra));
  for (int64_t i = 0; i < size_of(ndims[0], shapes[0]); ++i)
    static_cast<float *>(params[1])[i] = static_cast<float *>(params[0])[i] * sum;
  return 0;
}

extern "C" int Asks(PARAMETERS) { return static_cast<int>(static_cast<AotExtra *>(extra)->Attr<float>("nowhere")); }

extern "C" int Mistakes(PARAMETERS) { return static_cast<int>(static_cast<AotExtra *>(extra)->Attr<float>("count")); }

// ------------------------------------------------------------------- Init, kernel data, workspaces, InferShape,
// InferType

static int64_t inits, alive;
extern "C" int64_t Inits() { return inits; }
extern "C" int64_t Alive() { return alive; }

struct PowerData : AotKernelData {
  int64_t exponent, elements;
  PowerData() { ++alive; }
  ~PowerData() override { --alive; }
};

// y = x ** exponent. The first workspace holds y so far, the second, of another size, the elements' exponents.
extern "C" int PowerInit(int *ndims, int64_t **shapes, const char **dtypes, AotExtra *extra) {
  ++inits;
  if (std::strcmp(dtypes[0], "float32") || std::strcmp(dtypes[1], "float32")) return 2;
  auto *data = new PowerData;
  extra->SetKernelData(data);
  data->exponent = extra->Attr<int64_t>("exponent"), data->elements = size_of(ndims[0], shapes[0]);
  const size_t n = data->elements;
  extra->SetWorkSpace({n * sizeof(float), n + 1});
  return 0;
}

extern "C" int Power(PARAMETERS) {
  if (nparam != 4) return 1;
  const auto *data = static_cast<PowerData *>(static_cast<AotExtra *>(extra)->KernelData());
  const float *x = static_cast<float *>(params[0]);
  float *y = static_cast<float *>(params[1]), *so_far = static_cast<float *>(params[2]);
  char *done = static_cast<char *>(params[3]);
  const int64_t n = size_of(ndims[0], shapes[0]);
  if (n != data->elements) return 5;
  if (reinterpret_cast<uintptr_t>(done) % 16) return 6;
  for (int64_t i = 0; i < n; ++i) so_far[i] = 1, done[i] = 0;
  done[n] = 42;
  for (int64_t k = 0; k < data->exponent; ++k)
    for (int64_t i = 0; i < n; ++i) so_far[i] *= x[i], ++done[i];
  for (int64_t i = 0; i < n; ++i) {
    if (done[i] != data->exponent) return 7;
    y[i] = so_far[i];
  }
  return done[n] == 42 ? 0 : 8;
}

extern "C" std::vector<int64_t> PowerInferShape(int *ndims, int64_t **shapes, AotExtra *) {
  return {shapes[0], shapes[0] + ndims[0]};
}
extern "C" TypeId PowerInferType(std::vector<TypeId> types, AotExtra *) { return types[0]; }

// dx = dy * exponent * x ** (exponent - 1)
extern "C" int PowerGrad(PARAMETERS) {
  if (int wrong = check(nparam, 3, dtypes)) return wrong;
  const float *dy = static_cast<float *>(params[0]), *x = static_cast<float *>(params[1]);
  const int64_t exponent = static_cast<AotExtra *>(extra)->Attr<int64_t>("exponent");
  for (int64_t i = 0; i < size_of(ndims[0], shapes[0]); ++i) {
    float power = static_cast<float>(exponent);
    for (int64_t k = 1; k < exponent; ++k) power *= x[i];
    static_cast<float *>(params[2])[i] = dy[i] * power;
  }
  return 0;
}

// The largest element of each row, and its place.
extern "C" int Largest(PARAMETERS) {
  if (nparam != 3 || std::strcmp(dtypes[1], "float32") || std::strcmp(dtypes[2], "int64")) return 1;
  const int64_t columns = shapes[0][ndims[0] - 1], rows = size_of(ndims[0] - 1, shapes[0]);
  for (int64_t r = 0; r < rows; ++r) {
    const float *x = static_cast<float *>(params[0]) + r * columns;
    int64_t best = 0;
    for (int64_t i = 1; i < columns; ++i)
      if (x[i] > x[best]) best = i;
    static_cast<float *>(params[1])[r] = x[best], static_cast<int64_t *>(params[2])[r] = best;
  }
  return 0;
}

extern "C" std::vector<std::vector<int64_t>> LargestInferShape(int *ndims, int64_t **shapes, AotExtra *) {
  std::vector<int64_t> rows(shapes[0], shapes[0] + ndims[0]);
  if (rows != std::vector<int64_t>{-2}) rows.pop_back();
  return {rows, rows};
}
extern "C" std::vector<TypeId> LargestInferType(std::vector<TypeId> types, AotExtra *) { return {types[0], kInt64}; }

// ---------------------------------------------------------------------------------------------- writes to its inputs

// total += x
extern "C" int Accumulate(PARAMETERS) {
  if (nparam < 2 || std::strcmp(dtypes[0], "float32")) return 1;
  for (int64_t i = 0; i < size_of(ndims[0], shapes[0]); ++i)
    static_cast<float *>(params[0])[i] += static_cast<float *>(params[1])[i];
  return 0;
}

// As above, with total's new sum as an output.
extern "C" int AccumulateSum(PARAMETERS) {
  if (int wrong = check(nparam, 3, dtypes)) return wrong;
  float *total = static_cast<float *>(params[0]), sum = 0;
  for (int64_t i = 0; i < size_of(ndims[0], shapes[0]); ++i) sum += total[i] += static_cast<float *>(params[1])[i];
  *static_cast<float *>(params[2]) = sum;
  return 0;
}

// ------------------------------------------------------------------------------------------------------------ failures

extern "C" int Fails(PARAMETERS) { return -7; }
extern "C" int Throws(PARAMETERS) { throw std::runtime_error("the weather is bad"); }
extern "C" int ThrowsNumber(PARAMETERS) { throw 3; }
extern "C" int BadInit(PARAMETERS) { return 0; }
extern "C" int BadInitInit(int *, int64_t **, const char **, AotExtra *) { return 9; }
// Writes over all that it is given, after what its name says.
static int overwrite(int status, int n, void **params, int *ndims, int64_t **shapes, const char **dtypes) {
  for (int i = 0; i < n; ++i) {
    for (int k = 0; k < ndims[i]; ++k) shapes[i][k] = -7;
    ndims[i] = 99, shapes[i] = nullptr, dtypes[i] = "nothing";
    if (params) params[i] = nullptr;
  }
  return status;
}
extern "C" int Overwrites(PARAMETERS) {
  if (int wrong = check(nparam, 2, dtypes)) return wrong;
  std::memcpy(params[1], params[0], size_of(ndims[0], shapes[0]) * sizeof(float));
  return overwrite(0, nparam, params, ndims, shapes, dtypes);
}
extern "C" int OverwritesInit(int *ndims, int64_t **shapes, const char **dtypes, AotExtra *) {
  return overwrite(0, 2, nullptr, ndims, shapes, dtypes);
}
extern "C" int OverwritesBare(PARAMETERS) { return Overwrites(nparam, params, ndims, shapes, dtypes, stream, extra); }
extern "C" std::vector<int64_t> OverwritesInferShape(int *ndims, int64_t **shapes, AotExtra *) {
  std::vector<int64_t> shape(shapes[0], shapes[0] + ndims[0]);
  if (ndims[0] != 1 || shapes[0][0] != -2) {
    for (int k = 0; k < ndims[0]; ++k) shapes[0][k] = -7;
    ndims[0] = 99, shapes[0] = nullptr;
  }
  return shape;
}
extern "C" TypeId OverwritesInferType(std::vector<TypeId> types, AotExtra *) { return types[0]; }

extern "C" int Unknown(PARAMETERS) { return 0; }
extern "C" std::vector<int64_t> UnknownInferShape(int *, int64_t **, AotExtra *) { return {3, -1}; }
extern "C" TypeId UnknownInferType(std::vector<TypeId> types, AotExtra *) { return types[0]; }

extern "C" int BadShape(PARAMETERS) { return 0; }
extern "C" std::vector<int64_t> BadShapeInferShape(int *, int64_t **, AotExtra *) {
  throw std::length_error("no shape");
}
extern "C" TypeId BadShapeInferType(std::vector<TypeId>, AotExtra *) { return static_cast<TypeId>(99); }
