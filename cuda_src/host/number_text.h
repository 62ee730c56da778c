// Numbers as text that extra.h reads.
#pragma once
#include <locale.h>

#include <cstdio>
#include <string>

namespace aot {

// Every digit of a double, in the C locale.
inline std::string number_text(double number) {
  static const locale_t c = newlocale(LC_ALL_MASK, "C", locale_t{});
  char text[32];
  const locale_t before = uselocale(c);
  std::snprintf(text, sizeof text, "%.17g", number + 0.0);  // 0.0 for -0.0
  uselocale(before);
  return text;
}

}  // namespace aot
