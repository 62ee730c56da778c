// The parts of tensors.h that a call needs only when it is refused or writes to memory that the caller allocated.
#include "tensors.h"

using namespace aot;

Status Arguments::check_overlap(const CallSlot *slots, int n_slots) const {
  uint64_t inputs = 0;
  for (int i = 0; i < n_slots && !slots[i].is_output; ++i) inputs |= uint64_t{1} << i;
  const int n_in = __builtin_popcountll(given & inputs);
  for (int i = n_in; i < n; ++i)
    for (int j = 0; j < i; ++j) {
      const char *a = static_cast<char *>(params[i]), *b = static_cast<char *>(params[j]);
      const bool disjoint = a + bytes(i) <= b || b + bytes(j) <= a;
      if (!disjoint && !(j < n_in && a == b && bytes(i) == bytes(j)))
        return fail(kInvalidArgument, "%s: %s shares memory with %s", slots[0].op.c_str(), slot_name(slots, i),
                    slot_name(slots, j));
    }
  return kOk;
}

Status Arguments::refuse(const CallSlot &slot, const char *why) {
  return fail(kInvalidArgument, "%s: %s %s", slot.op.c_str(), slot.name.c_str(), why);
}

Status Arguments::wrong_device(const CallSlot &slot, const CallSlot &first, bool is_cpu, int id) const {
  char found[24] = "cpu", expected[24] = "cpu";
  if (!is_cpu) std::snprintf(found, sizeof found, "cuda:%d", id);
  if (device == kCuda) std::snprintf(expected, sizeof expected, "cuda:%d", device_id);
  return fail(kInvalidArgument, "%s: %s is on %s, expected %s, the device of %s", slot.op.c_str(), slot.name.c_str(),
              found, expected, first.name.c_str());
}

int64_t Arguments::bytes(int i) const {
  int64_t elements = 1;
  for (int k = 0; k < ndims[i]; ++k) elements *= shapes[i][k];
  return elements * element_bytes(dtypes[i]);
}

// The slot's name of the i-th tensor given.
const char *Arguments::slot_name(const CallSlot *slots, int i) const {
  int slot = 0;
  for (;; ++slot)
    if (given >> slot & 1 && i-- == 0) return slots[slot].name.c_str();
}
