// Compiled with -D_GLIBCXX_USE_CXX11_ABI=0: the strings in AotExtra's interface have the old ABI, as in MindSpore's
// build.
#include "custom_aot_extra.h"

#include <locale.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#if defined(_GLIBCXX_USE_CXX11_ABI) && _GLIBCXX_USE_CXX11_ABI
#error "compile this file with -D_GLIBCXX_USE_CXX11_ABI=0"
#endif

namespace {

// Whether the whole text is a number in the format of Python's repr(float): digits, or inf or nan with an optional
// sign; in the C locale, whatever the process's. Spaces and hexadecimal digits, which strtod accepts, are refused, and
// so are numbers beyond the largest double, which it reads as infinity.
bool parse(const std::string &text, double *value) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", locale_t{});
  const size_t sign = text[0] == '-';
  const bool word = !text.compare(sign, std::string::npos, "inf") || !text.compare(sign, std::string::npos, "nan");
  if (!c || text.empty() || (!word && text.find_first_not_of("0123456789+-.eE") != std::string::npos)) return false;
  char *end;
  const double number = strtod_l(text.c_str(), &end, c);
  if (end != text.c_str() + text.size() || (std::isinf(number) && !word)) return false;
  return *value = number, true;
}

// Calls `read` if the attribute is given. Catches the host's exceptions, such as for a missing attribute or another
// type.
template <class Read>
int get(void *extra, const char *name, Read read) noexcept {
  try {
    auto *e = static_cast<AotExtra *>(extra);
    if (!e || !e->HasAttr(name)) return 0;
    return read(*e) ? 1 : -1;
  } catch (...) {
    return -1;
  }
}

}  // namespace

namespace aot {

int extra_get_bool(void *extra, const char *name, bool *value) noexcept {
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrBool(name), true; });
}

int extra_get_int(void *extra, const char *name, int64_t *value) noexcept {
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrInt(name), true; });
}

int extra_get_float(void *extra, const char *name, double *value) noexcept {
  const int found = get(extra, name, [&](AotExtra &e) { return parse(e.GetAttrStr(name), value); });
  if (found >= 0) return found;
  return get(extra, name, [&](AotExtra &e) { return *value = e.GetAttrFloat(name), true; });
}

int extra_get_string(void *extra, const char *name, char *value, size_t capacity) noexcept {
  return get(extra, name, [&](AotExtra &e) {
    std::string text = e.GetAttrStr(name);
    if (text.size() >= capacity || text.find('\0') != std::string::npos) return false;
    std::memcpy(value, text.c_str(), text.size() + 1);
    return true;
  });
}

int extra_take_string(void *extra, const char *name, void (*take)(void *context, const char *text),
                      void *context) noexcept {
  return get(extra, name, [&](AotExtra &e) { return take(context, e.GetAttrStr(name).c_str()), true; });
}

double decimal(const char *text) noexcept {
  double value;
  return parse(std::string(text), &value) ? value : std::nan("");
}

int extra_get_ints(void *extra, const char *name, int64_t *value, int capacity, int *n) noexcept {
  return get(extra, name, [&](AotExtra &e) {
    std::vector<int64_t> list = e.GetAttrIntVec(name);
    if (list.size() > static_cast<size_t>(capacity)) return false;
    std::copy(list.begin(), list.end(), value);
    *n = static_cast<int>(list.size());
    return true;
  });
}

}  // namespace aot
