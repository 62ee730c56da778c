// An operator as the kernel of LibTorch's dispatcher knows it: its schema, which has the names and types of its
// arguments, and the names of what its entry writes.
#pragma once
#include <string_view>

#include "calls.h"

namespace aot {

enum class Kind { integer, number, boolean, text, integers };

struct Attribute {
  std::string name;
  Kind kind;
  bool optional;
};

// An operator bound to its attributes.
struct BoundAttributes {
  std::string key;
  size_t hash;
  Call call;
  BoundAttributes *next;
};

struct DispatchedOperator {
  std::string library, name, schema;
  EntryFunctions functions[2];  // by Device
  int n_inputs = 0, n_results = 0, n_workspaces = 0;
  std::string inputs[kMaxSlots], written[kMaxSlots];  // results, then workspaces
  uint64_t optional = 0;                              // bit i: input i may be absent
  uint64_t maskable = 0;                              // bit i: the argument `wanted` has a value for result i
  bool may_want_none = false;                         // `wanted` may be None, for none of them
  bool elementwise = false;
  std::vector<Attribute> attributes;
  // The entries that it was bound to, which are kept for good; n_bound counts them.
  mutable GrowingList<BoundAttributes> bound;
  mutable std::atomic<int> n_bound{0};

  // `written`: the names of results and workspaces, separated by spaces, a workspace's followed by "*", and that of a
  // result which `wanted` is about by "?".
  Status read(const char *schema, const char *written) {
    this->schema = schema;
    const std::string_view text = schema, arguments = text.substr(text.find('(') + 1);
    name = text.substr(0, text.find('('));
    AOT_TRY(read_arguments(arguments.substr(0, arguments.find(") -> "))));
    AOT_TRY(read_written(written));
    Call call;
    if (!add_slots(&call))
      return fail(kNotImplemented, "torch: %s has more than %d tensors, or more than %d that may be absent", schema,
                  kMaxSlots, kMaxOptional);
    return kOk;
  }

  // False: there are more than a call has places for.
  bool add_slots(Call *call) const {
    call->op = name, call->n_in = n_inputs;
    for (int i = 0; i < n_inputs; ++i)
      if (!call->add_slot(inputs[i].c_str(), optional >> i & 1, false)) return false;
    for (int i = 0; i < n_results + n_workspaces; ++i)
      if (!call->add_slot(written[i].c_str(), maskable >> i & 1, false)) return false;
    return true;
  }

 private:
  Status read_arguments(std::string_view rest) {
    while (!rest.empty()) {
      const std::string_view one = rest.substr(0, rest.find(", "));
      std::string_view type = one.substr(0, one.find(' '));
      if (type.substr(0, 5) == "bool[") {  // `wanted`, the last one
        may_want_none = type.back() == '?';
        break;
      }
      AOT_TRY(read_argument(type, std::string(one.substr(type.size() + 1))));
      rest.remove_prefix(std::min(one.size() + 2, rest.size()));
    }
    return kOk;
  }

  Status read_argument(std::string_view type, std::string argument) {
    constexpr struct {
      std::string_view type;
      Kind kind;
    } kKinds[] = {{"int", Kind::integer},
                  {"float", Kind::number},
                  {"bool", Kind::boolean},
                  {"str", Kind::text},
                  {"SymInt[]", Kind::integers}};
    const bool may_be_absent = type.back() == '?';
    if (may_be_absent) type.remove_suffix(1);
    for (const auto &known : kKinds)
      if (known.type == type) return attributes.push_back({std::move(argument), known.kind, may_be_absent}), kOk;
    if (type != "Tensor" || n_inputs == kMaxSlots)
      return fail(kNotImplemented, "torch: %s: %s is a %s, which kernels in C do not take", schema.c_str(),
                  argument.c_str(), std::string(type).c_str());
    optional |= static_cast<uint64_t>(may_be_absent) << n_inputs;
    inputs[n_inputs++] = std::move(argument);
    return kOk;
  }

  Status read_written(std::string_view rest) {
    while (!rest.empty()) {
      std::string_view one = rest.substr(0, rest.find(' '));
      rest.remove_prefix(std::min(one.size() + 1, rest.size()));
      const int i = n_results + n_workspaces;
      if (i == kMaxSlots) return fail(kNotImplemented, "torch: %s has too many results", schema.c_str());
      const char mark = one.back();
      if (mark == '?' || mark == '*') one.remove_suffix(1);
      maskable |= static_cast<uint64_t>(mark == '?') << i;
      ++(mark == '*' ? n_workspaces : n_results);
      written[i] = one;
    }
    return kOk;
  }
};

}  // namespace aot
