// The operators of LibTorch's dispatcher, registered through its stable C ABI, which is found in the loaded library: a
// C++ program needs no Python for them, and this file no header of torch.
//
// One generic kernel serves every operator, on the CPU and on CUDA, of this library and of others. The frontend tells
// of an operator when it registers it (torch_operator.h says what). A C++ program has the rows of this library in
// build/torch_table.inc, which packaging/torch_table.py makes of the definitions, and reads those of another library in
// the text that `aotops schemas` prints: frontends/torch_schema.py makes both.
#include <link.h>

#include <algorithm>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

#include "libraries.h"
#include "torch_invocation.h"

// The base class of exceptions that torch's bindings turn into the Python exception that they set. It is declared here
// because a boxed kernel has no other way to say which one. Where it is not known, it is a runtime_error.
namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

WEAK void *PyImport_ImportModule(const char *name);

namespace {

using namespace aot;

// ------------------------------------------------------------------------------------------------------------- errors

// The exception that Python is to raise.
class PythonError final : public pybind11::builtin_exception {
 public:
  PythonError(Status status, bool out_of_memory, const char *text)
      : builtin_exception(text), status_(status), out_of_memory_(out_of_memory) {}
  void set_error() const override {
    const Ref exception = out_of_memory_ ? torchs_out_of_memory() : Ref();
    PyErr_SetString(exception ? static_cast<void *>(exception) : python.errors[status_], what());
  }

 private:
  static Ref torchs_out_of_memory() {
    const Ref module = PyImport_ImportModule("torch");
    Ref found = module ? PyObject_GetAttr(module, PyUnicode_InternFromString("OutOfMemoryError")) : nullptr;
    if (!found) PyErr_Clear();
    return found;
  }
  Status status_;
  bool out_of_memory_;
};

// ----------------------------------------------------------------------------------------------------------- kernels

// As torch's own stable kernels do, a kernel throws, and the dispatcher's caller catches.
void run(const DispatchedOperator &op, Value *stack) {
  Status status;
  bool out_of_memory;
  {
    Invocation invocation(op);
    status = invocation.run(stack), out_of_memory = invocation.out_of_memory();
  }
  if (!status) return;
  const std::string text = aot_last_error();
  if (python.none) throw PythonError(status, out_of_memory, text.c_str());
  throw std::runtime_error(text);
}

// A kernel of torch's is a plain function, to which nothing is bound: there is one for each operator that may come.
constexpr size_t kMostOperators = 512;
std::mutex registering;
std::deque<DispatchedOperator> operators;  // kept for good. Only who registers one looks at it
const DispatchedOperator *served[kMostOperators];
std::atomic<bool> registered{false};  // one of this library's operators is

template <size_t i>
void kernel(Value *stack, uint64_t, uint64_t) {
  run(*served[i], stack);
}

template <size_t... i>
Kernel *kernel_of(size_t wanted, std::index_sequence<i...>) {
  static constexpr Kernel *kernels[] = {kernel<i>...};
  return kernels[wanted];
}

// ------------------------------------------------------------------------------------------------------- registration

constexpr char kOwnName[] = "aotops";

Status open_torch() {
  static const Status found = find_torch();
  if (!found) return kOk;
  return find_torch();  // for the message, or because torch is loaded now
}

Status torch_refused(const char *what) { return fail(kConventionMisused, "torch: %s: %s", what, torch_error()); }

bool is_implemented(std::string_view library, std::string_view schema) {
  return std::any_of(operators.begin(), operators.end(),
                     [&](const DispatchedOperator &op) { return op.library == library && op.schema == schema; });
}

Status read_operator(const char *library, const char *schema, const char *written, bool elementwise,
                     DispatchedOperator *op) {
  const SharedLibrary *owner = find_library(std::strcmp(library, kOwnName) ? library : "");
  if (!owner) return fail(kInvalidArgument, "torch: the library %s is not registered", library);
  op->library = library, op->elementwise = elementwise;
  AOT_TRY(op->read(schema, written));
  int entries = 0, inferring = 0;
  for (Device d : {kCpu, kCuda}) {
    EntryFunctions &f = op->functions[d];
    if (f.read(owner->handle, symbol_of("aot_" + op->name, d))) ++entries, inferring += f.infer != nullptr;
  }
  if (entries && inferring == entries) return kOk;
  return fail(kNotImplemented, "torch: the library %s has no complete entry of %s: rebuild it", library, schema);
}

// torch's objects for registrations are kept for good: to delete one is to unregister what it registered.
Status implement(const char *library, const char *schema, const char *written, bool elementwise) {
  const size_t i = operators.size();
  if (i == kMostOperators)
    return fail(kNotImplemented, "torch: there are kernels of %zu operators already, for more there is no place", i);
  DispatchedOperator &op = operators.emplace_back();
  const Status status = read_operator(library, schema, written, elementwise, &op);
  if (status) return operators.pop_back(), status;
  served[i] = &op;
  for (const char *key : {"CPU", "CUDA"}) {
    void *registration;
    if (stable.aoti_torch_library_init_impl(library, key, __FILE__, __LINE__, &registration))
      return torch_refused(library);
    Kernel *const made = kernel_of(i, std::make_index_sequence<kMostOperators>());
    if (stable.torch_library_impl(registration, op.name.c_str(), made, kAbiVersion))
      return torch_refused(op.name.c_str());
  }
  if (op.library == kOwnName) registered = true;
  return kOk;
}

Status define(const std::string &name, const char *schema) {
  static std::map<std::string, void *> fragments;
  void *&library = fragments[name];
  if (!library && stable.aoti_torch_library_init_fragment(name.c_str(), __FILE__, __LINE__, &library))
    return torch_refused(name.c_str());
  const bool has_tags = stable.torch_library_def_with_tags && stable.torch_tag_needs_exact_strides;
  const int32_t tag = has_tags ? stable.torch_tag_needs_exact_strides() : 0;
  const bool failed = has_tags ? stable.torch_library_def_with_tags(library, schema, &tag, 1)
                               : stable.aoti_torch_library_def(library, schema);
  return failed ? torch_refused(schema) : kOk;
}

Status provide(const char *library, const char *schema, const char *written, bool elementwise) {
  if (is_implemented(library, schema)) return kOk;
  AOT_TRY(define(library, schema));
  return implement(library, schema, written, elementwise);
}

// The text up to a separator, which is taken off `rest` with it.
std::string take(std::string_view *rest, char separator) {
  const size_t end = std::min(rest->find(separator), rest->size());
  std::string taken(rest->substr(0, end));
  return rest->remove_prefix(std::min(end + 1, rest->size())), taken;
}

// `rows`: the text of `aotops schemas`, whose first line is the version of aotops that printed it.
Status provide_rows(const char *library, std::string_view rows) {
  const std::string expected = "aotops " AOT_VERSION, made_by = take(&rows, '\n');
  if (made_by != expected)
    return fail(kInvalidArgument, "torch: the schemas of %s begin with '%.80s', expected '%s': print them again",
                library, made_by.c_str(), expected.c_str());
  while (!rows.empty()) {
    const std::string row = take(&rows, '\n');
    std::string_view rest = row;
    const std::string schema = take(&rest, '\t'), written = take(&rest, '\t'), elementwise = take(&rest, '\t');
    if (elementwise != "0" && elementwise != "1")
      return fail(kInvalidArgument, "torch: the schemas of %s have a row '%.80s', expected three columns", library,
                  row.c_str());
    AOT_TRY(provide(library, schema.c_str(), written.c_str(), elementwise == "1"));
  }
  return kOk;
}

// Whether another copy of this library in the process has registered its operators; false, and an error, if it has
// another version.
Status find_other_copy(bool *found) {
  std::vector<std::string> paths;
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *paths) {
        if (*info->dlpi_name) static_cast<std::vector<std::string> *>(paths)->push_back(info->dlpi_name);
        return 0;
      },
      &paths);
  for (const std::string &path : paths) {
    void *handle = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
    if (!handle) continue;
    int (*theirs)(), (*ours)();
    const char *(*version)();
    find(handle, "aot_torch_registered", &theirs), find(handle, "aot_version", &version);
    find(find_library("")->handle, "aot_torch_registered", &ours);
    dlclose(handle);
    if (!theirs || theirs == ours || !theirs()) continue;
    if (!version || std::strcmp(version(), AOT_VERSION))
      return fail(kInvalidArgument, "torch: %s has registered the operators of its version %s, expected %s",
                  path.c_str(), version ? version() : "", AOT_VERSION);
    return *found = true, kOk;
  }
  return kOk;
}

// The operators of this library.
constexpr struct {
  const char *schema, *written;
  bool elementwise;
} kOwn[] = {
#include "torch_table.inc"
};

}  // namespace

// 1: operators of torch's dispatcher are this library's.
AOT_API int aot_torch_registered() { return registered; }

AOT_API int aot_torch_register() {
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  bool elsewhere = false;
  AOT_TRY(find_other_copy(&elsewhere));
  if (elsewhere) return kOk;
  for (const auto &own : kOwn) AOT_TRY(provide(kOwnName, own.schema, own.written, own.elementwise));
  return kOk;
}

AOT_API int aot_torch_register_library(const char *name, const char *path, const char *schemas) {
  if (!std::strcmp(name, kOwnName))
    return fail(kInvalidArgument, "torch: %s is the name of the built-in operators", name);
  void *handle = dlopen(path, RTLD_NOW);
  if (!handle) return fail(kInvalidArgument, "torch: %s", dlerror());
  AOT_TRY(add_library(name, handle, false));
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  return provide_rows(name, schemas);
}

// Registers the kernels of an operator that Python has defined with this schema. `library`: its namespace, and the name
// by which libraries.h knows the library of its entries. torch_operator.h says what `written` is.
AOT_API int aot_torch_implement(const char *library, const char *schema, const char *written, int elementwise) {
  std::lock_guard<std::mutex> hold(registering);
  AOT_TRY(open_torch());
  return implement(library, schema, written, elementwise);
}
