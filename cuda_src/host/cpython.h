// CPython without Python.h: the functions used here, facts about the interpreter, owned references and capsules.
//
// The functions are weak symbols, so that the library works with every version of CPython and loads without one.
#pragma once
#include <algorithm>
#include <string>
#include <utility>

#include "aot.h"

extern "C" const char *aot_last_error();

#define WEAK extern "C" __attribute__((weak))
WEAK void PyErr_SetString(void *exception, const char *text);
WEAK void *PyErr_Occurred();
WEAK void PyErr_Clear();
WEAK void PyErr_Fetch(void **type, void **value, void **traceback);
WEAK void PyErr_Restore(void *type, void *value, void *traceback);
WEAK void *PyEval_SaveThread();
WEAK void PyEval_RestoreThread(void *state);
WEAK void Py_IncRef(void *object);
WEAK void Py_DecRef(void *object);
WEAK void *PyObject_VectorcallDict(void *callable, void *const *args, size_t n, void *keywords);
WEAK void *PyObject_VectorcallMethod(void *name, void *const *args, size_t n, void *names);
WEAK int PyObject_IsTrue(void *object);
WEAK void *PyObject_GetAttr(void *object, void *name);
WEAK void *PyObject_GenericGetDict(void *object, void *unused);
WEAK int PyObject_SetAttr(void *object, void *name, void *value);
WEAK void *PyUnicode_InternFromString(const char *text);
WEAK void *PyTuple_New(intptr_t n);
WEAK intptr_t PyTuple_Size(void *tuple);
WEAK void *PyTuple_GetItem(void *tuple, intptr_t i);
WEAK int PyTuple_SetItem(void *tuple, intptr_t i, void *value);
WEAK void *PyBool_FromLong(long value);
WEAK void *PyBytes_FromStringAndSize(const char *bytes, intptr_t n);
WEAK void *PyDict_New();
WEAK intptr_t PyDict_Size(void *dict);
WEAK void PyDict_Clear(void *dict);
WEAK void *PyDict_GetItemWithError(void *dict, void *key);
WEAK int PyDict_SetItem(void *dict, void *key, void *value);
WEAK int PyDict_DelItem(void *dict, void *key);
WEAK int PyDict_Next(void *dict, intptr_t *position, void **key, void **value);
WEAK void *PyCapsule_GetContext(void *capsule);
WEAK void *PyLong_AsVoidPtr(void *object);
WEAK long PyLong_AsLong(void *object);
WEAK void *PyLong_FromLongLong(long long value);
WEAK double PyFloat_AsDouble(void *object);

namespace aot {

// Facts about the interpreter. call.py fills this struct once.
struct Interpreter {
  void *none;
  void *errors[kOutOfMemory + 1];  // exception classes by Status; [0] is not used
  void *int_type, *float_type, *bool_type, *str_type, *tuple_type;
  int64_t type_offset;  // of PyObject.ob_type
  int64_t head_size;    // sizeof(PyObject)
};
inline Interpreter python;

// An owned reference, or null.
class Ref {
 public:
  Ref(void *object = nullptr) : object_(object) {}
  Ref(Ref &&other) noexcept : object_(other.release()) {}
  ~Ref() {
    if (object_) Py_DecRef(object_);
  }
  Ref &operator=(Ref &&other) noexcept { return std::swap(object_, other.object_), *this; }
  operator void *() const { return object_; }
  void *release() { return std::exchange(object_, nullptr); }

 private:
  void *object_;
};

// PyCapsule.pointer: the C side of one of our builtins. Unlike PyCapsule_GetPointer it does not check the name.
template <typename T>
T *capsule_pointer(void *capsule) {
  return *reinterpret_cast<T **>(static_cast<char *>(capsule) + python.head_size);
}

inline void *type_of(void *object) {
  return *reinterpret_cast<void **>(static_cast<char *>(object) + python.type_offset);
}

inline const char *type_name(void *object) {
  char *type = static_cast<char *>(type_of(object));
  return *reinterpret_cast<const char **>(type + python.head_size + sizeof(intptr_t));  // after PyVarObject.ob_size
}

// Takes the reference. 1 or 0; -1: Python's error is set.
inline int is_true(Ref object) { return object ? PyObject_IsTrue(object) : -1; }

// Whether Python's error was set by `finish`, not by Python code that a builtin called.
inline thread_local bool error_is_ours = false;

// The result of a builtin: None, or null with the exception of `status` and the text of aot_last_error() set.
inline void *finish(int status) {
  if (!status) return Py_IncRef(python.none), python.none;
  error_is_ours = !PyErr_Occurred();
  if (error_is_ours)
    PyErr_SetString(python.errors[status < 0 || status > kOutOfMemory ? kConventionMisused : status], aot_last_error());
  return nullptr;
}

// Describes a struct that a Python file mirrors, for its check: the line `sizeof(Name) 8`, and one for the place of
// each member, `Name.member 0`. The compiler refuses a list that lacks a member.
#define AOT_DESCRIBE(Struct, ...)                                      \
  [] {                                                                 \
    static const Struct made = {};                                     \
    const auto &[__VA_ARGS__] = made;                                  \
    return ::aot::described(#Struct, #__VA_ARGS__, made, __VA_ARGS__); \
  }()

template <class Struct, class... Member>
std::string described(const char *name, const std::string &names, const Struct &made, const Member &...members) {
  const void *const places[] = {&members...};
  std::string text = "\nsizeof(" + std::string(name) + ") " + std::to_string(sizeof made);
  size_t at = 0;
  for (const void *place : places) {
    const size_t end = std::min(names.find(',', at), names.size());
    const auto offset = static_cast<const char *>(place) - reinterpret_cast<const char *>(&made);
    text += "\n" + std::string(name) + "." + names.substr(at, end - at) + " " + std::to_string(offset);
    at = names.find_first_not_of(", ", end);
  }
  return text;
}

}  // namespace aot
