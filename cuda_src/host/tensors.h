// Reads the tensors of a call: NumPy arrays, and tensors of a framework that has a DLPack exchange table.
//
// All arguments of a call live on the C stack: argument arrays that calls share would be a data race between threads.
#pragma once
#include <algorithm>
#include <cstdio>

#include "bound_entry.h"
#include "cpython.h"
#include "dlpack.h"
#include "entry_arguments.h"

namespace aot {

constexpr int kMaxSlots = 63;  // a set of them is 64 bits, of which a shift by their number is defined

// DLPack 1.3, DLPackExchangeAPI; https://github.com/dmlc/dlpack
struct DLExchange {
  uint32_t major, minor;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*read)(void *object, DLTensor *out);  // -1: Python's error is set
  int (*current_stream)(int device_type, int32_t device_id, void **stream);
};

// The framework whose tensors are read through DLPack; its set-up fills this struct.
struct DLPack {
  const DLExchange *exchange;
  void *types[2];                  // exactly these: a subclass may mean anything
  bool (*is_plain)(void *tensor);  // whether the memory of a tensor of these types is what the tensor means
};
inline DLPack dlpack;

// PyArrayObject after its head. Its layout is public.
struct NumpyArray {
  char *data;
  int ndim;
  int64_t *shape, *strides;
  void *base, *dtype;
  int flags;
};

// NumPy's types. call.py fills this struct. Dtypes are compared by identity: a byte-swapped or otherwise special dtype
// is another object.
struct Numpy {
  void *type;
  int n;
  void *dtypes[32];
  const char *names[32];
};
inline Numpy numpy;

inline bool is_dlpack(void *object) {
  const void *type = type_of(object);
  return type == dlpack.types[0] || type == dlpack.types[1];
}

// One slot of an operator.
struct CallSlot {
  std::string op, name;  // for error texts
  int optional_bit;      // its bit among the optional slots; -1: required
  bool is_output;
  bool accepts_scalar;  // where all elements are one number in memory, the entry accepts it as a tensor without axes
};

constexpr int kMostMoved = 8;  // slots whose second axis is read as their last

// Describes the tensor with its second axis as its last, in arrays of the caller's. False: it has none, or no strides.
inline bool move_channels(DLTensor *t, int64_t *shape, int64_t *strides) {
  if (t->ndim < 3 || t->ndim > kMaxNdim || !t->strides) return false;
  for (int k = 0; k < t->ndim; ++k) {
    const int from = k == 0 ? 0 : k + 1 < t->ndim ? k + 1 : 1;
    shape[k] = t->shape[from], strides[k] = t->strides[from];
  }
  t->shape = shape, t->strides = strides;
  return true;
}

// The arguments of an entry, as read from Python objects. The errors of its functions are those of aot::fail; where one
// of Python's is set already, the status is kConventionMisused.
struct Arguments : EntryArguments<kMaxSlots> {
  uint64_t channels_last = 0;  // bit i: slot i, of a DLPack tensor, is read with its second axis as its last
  uint64_t given = 0;          // bit i: slot i
  int64_t elements = 0;        // of all tensors
  int64_t first_elements = 0;  // of the first
  Device device = kCpu;
  int device_id = 0;
  void *stream = nullptr;

  // The slots from `first` to before `last`; None is an absent one.
  Status read(const CallSlot *slots, void *const *objects, int first, int last) {
    for (int i = first; i < last; ++i) {
      if (objects[i] == python.none) {
        if (slots[i].optional_bit < 0)
          return fail(kUnsupportedDtype, "%s: %s is None, expected a tensor", slots[i].op.c_str(),
                      slots[i].name.c_str());
        continue;
      }
      AOT_TRY(read(slots[i], slots[0], objects[i], channels_last >> i & 1));
      given |= uint64_t{1} << i;
      ++n;
    }
    return kOk;
  }

  // Passes `memory` as a tensor of the shape and dtype of `prototype`, a DLPack tensor; false where it is too small.
  bool use(char *memory, int64_t bytes, int slot, void *prototype) {
    DLTensor t;
    if (dlpack.exchange->read(prototype, &t)) return PyErr_Clear(), false;
    for (int k = 0; k < t.ndim; ++k) bytes /= std::max<int64_t>(t.shape[k], 1);
    if (bytes < t.bits / 8) return false;
    push(memory, t.ndim, t.shape, dlpack_dtype(t));
    given |= uint64_t{1} << slot;
    return true;
  }

  // A call on fewer elements is over before another thread could use the interpreter's lock.
  bool worth_releasing() const { return device == kCuda || elements > 16384; }

  // An output may be an input, element for element. Nothing else may share an output's memory.
  Status check_overlap(const CallSlot *slots, int n_slots) const;

 private:
  Status read(const CallSlot &slot, const CallSlot &first, void *object, bool moves) {
    if (is_dlpack(object)) return read_dlpack(slot, first, object, moves);
    if (type_of(object) == numpy.type) return read_numpy(slot, first, object);
    return fail(kUnsupportedDtype, "%s: %s is a %s, expected a tensor", slot.op.c_str(), slot.name.c_str(),
                type_name(object));
  }

  Status read_dlpack(const CallSlot &slot, const CallSlot &first, void *object, bool moves) {
    DLTensor t;
    if (!dlpack.is_plain(object)) return refuse(slot, "is not a plain tensor");
    if (dlpack.exchange->read(object, &t)) return kConventionMisused;
    if (t.ndim > kMaxNdim)
      return fail(kInvalidArgument, "%s: %s has %d dimensions, expected at most %d", slot.op.c_str(), slot.name.c_str(),
                  t.ndim, kMaxNdim);
    int64_t strides[kMaxNdim];
    if (moves && (n_moved_ == kMostMoved || !move_channels(&t, moved_[n_moved_++], strides)))
      return refuse(slot, "is not contiguous");
    set(static_cast<char *>(t.data) + t.byte_offset, t.ndim, t.shape, dlpack_dtype(t));
    const Layout layout(t);
    count(layout.size);
    const bool scalar = layout.as_scalar(slot.accepts_scalar);
    if (scalar) ndims[n] = 0, shapes[n] = nullptr;
    if (!layout.contiguous && !scalar) return refuse(slot, "is not contiguous");
    if (!t.data && layout.size) return refuse(slot, "has no memory: its storage was freed");
    return check_device(slot, first, t.device_type, t.device_id);
  }

  Status read_numpy(const CallSlot &slot, const CallSlot &first, void *object) {
    auto *a = reinterpret_cast<NumpyArray *>(static_cast<char *>(object) + python.head_size);
    int64_t size = 1;
    for (int k = 0; k < a->ndim; ++k) size *= a->shape[k];
    count(size);
    set(a->data, a->ndim, a->shape, kUnnamedDtype);
    for (int i = 0; i < numpy.n; ++i)
      if (a->dtype == numpy.dtypes[i]) {
        dtypes[n] = numpy.names[i];
        break;
      }
    constexpr int kCContiguous = 1, kAligned = 0x100, kWriteable = 0x400;
    if (!(a->flags & kCContiguous) || !(a->flags & kAligned)) return refuse(slot, "is not contiguous");
    if (slot.is_output && !(a->flags & kWriteable)) return refuse(slot, "is read-only, expected an array to write to");
    return check_device(slot, first, kDLCpu, 0);
  }

  void count(int64_t size) {
    if (n == 0) first_elements = size;
    elements += size;
  }

  // The first tensor chooses the device and the stream; the others must be on that device.
  Status check_device(const CallSlot &slot, const CallSlot &first, int type, int id) {
    const bool is_cpu = type == kDLCpu || type == kDLCudaHost;
    if (!is_cpu && type != kDLCuda)
      return fail(kNotImplemented, "%s: %s is on a device of DLPack's type %d, expected cpu or cuda", slot.op.c_str(),
                  slot.name.c_str(), type);
    if (n == 0) {
      device = is_cpu ? kCpu : kCuda, device_id = is_cpu ? 0 : id;
      if (!is_cpu && dlpack.exchange->current_stream(type, id, &stream)) return kConventionMisused;
      return kOk;
    }
    if ((device == kCpu) == is_cpu && (is_cpu || id == device_id)) return kOk;
    return wrong_device(slot, first, is_cpu, id);
  }

  static Status refuse(const CallSlot &slot, const char *why);
  Status wrong_device(const CallSlot &slot, const CallSlot &first, bool is_cpu, int id) const;
  int64_t bytes(int i) const;
  const char *slot_name(const CallSlot *slots, int i) const;

  int64_t moved_[kMostMoved][kMaxNdim];  // the shapes of slots of channels_last
  int n_moved_ = 0;
};

}  // namespace aot
