#include "core/amounts.h"

#include <fmt/format.h>

namespace fathom {

std::string Grouped(int64_t value) {
  const std::string digits = std::to_string(value);
  const size_t first = digits[0] == '-' ? 1 : 0;
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > first && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string Gib(int64_t bytes) {
  return fmt::format("{:.3f}", static_cast<double>(bytes) / (int64_t{1} << 30));
}

std::string Amount(int64_t bytes) {
  const int64_t size = bytes < 0 ? -bytes : bytes;
  const auto in = [&](int shift, const char* unit) {
    return fmt::format("{:.3f} {}", static_cast<double>(bytes) / (int64_t{1} << shift), unit);
  };
  if (size >= int64_t{1} << 30) return in(30, "GiB");
  if (size >= int64_t{1} << 20) return in(20, "MiB");
  if (size >= int64_t{1} << 10) return in(10, "KiB");
  return fmt::format("{} B", bytes);
}

std::string BytesAndAmount(int64_t bytes) {
  if (bytes > -1024 && bytes < 1024) return fmt::format("{} B", bytes);
  return fmt::format("{} B ({})", Grouped(bytes), Amount(bytes));
}

}  // namespace fathom
